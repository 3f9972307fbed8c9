//! Every entry path gets the same treatment: resolved, stamped, gated.

use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::Ending;
use warp_domain::policy::{Declared, Source};
use warp_store::{CommandVerdict, NewJob};

use crate::world::{Host, World, done, gated, hand_back, mutex, retry_at, settle};

/// Holds the key with another job, lets `enter` bring a job in, and checks that it is stamped and waits, then that
/// it runs when the key is free.
async fn check(world: &World, path: &str, enter: impl AsyncFnOnce(&World, &Host) -> JobId) {
    let key = "account:{n}";
    let host = world.host(&[gated("job", 1, mutex(&[key])), gated("holder", 1, mutex(&["account:7"]))]).await;
    let id = enter(world, &host).await;
    let details = world.details(id).await;
    assert!(details.summary.parked, "{path}: it must wait for the key: {details:#?}");
    assert_eq!(details.keys, ["account:7"], "{path}");
    let stamp = details.stamp.unwrap_or_else(|| panic!("{path}: it must be stamped"));
    let source = stamp.concurrency.unwrap_or_else(|| panic!("{path}: with its concurrency")).source;
    assert!(matches!(source, Source::Handler { name, .. } if name == "job-handler"), "{path}");
    // Whoever holds is completed; then it runs, once, and ends.
    for holder in world.key("account:7").await.holders {
        world.cancel(holder.job, CommandVerdict::Requested).await;
    }
    world.rescue(&host).await;
    let host = world.host(&[gated("job", 1, mutex(&[key])), gated("holder", 1, mutex(&["account:7"]))]).await;
    let claimed = world.claim(&host, 5).await;
    assert_eq!(claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [id], "{path}");
    assert_eq!(world.holders("account:7").await, [id], "{path}");
    world.complete(&host, &claimed[0]).await;
    assert_eq!(world.holders("account:7").await, [], "{path}");
    world.store.deregister(host.id, world.now()).await.expect("deregister");
}

const PAYLOAD: &str = r#"{"n": 7}"#;

async fn hold(world: &World, host: &Host) {
    world.enqueue_one("holder").await;
    let claimed = world.claim(host, 5).await;
    assert!(claimed.iter().any(|claimed| claimed.lane.declarations.contract == "holder"), "the key is taken: {claimed:?}");
}

/// Takes the key between the end of a run and the job's return.
async fn hold_while_it_is_away(world: &World, host: &Host) {
    let only_holder =
        Host { id: host.id, lanes: host.lanes.iter().filter(|lane| lane.declarations.contract == "holder").cloned().collect() };
    hold(world, &only_holder).await;
    world.claim(host, 5).await;
}

/// Enqueued by a caller.
pub async fn an_enqueued_job(world: World) {
    check(&world, "enqueue", async |world, host| {
        hold(world, host).await;
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        world.claim(host, 5).await;
        id
    })
    .await;
}

/// Scheduled for later.
pub async fn a_scheduled_job(world: World) {
    check(&world, "schedule", async |world, host| {
        hold(world, host).await;
        let id = world.enqueue(vec![NewJob { due: Some(world.in_seconds(5)), ..world.job("job", PAYLOAD) }]).await[0];
        world.pass(Duration::from_secs(5));
        world.claim(host, 5).await;
        id
    })
    .await;
}

/// Enqueued by a handler; it inherits no policy.
pub async fn a_child_of_a_handler(world: World) {
    check(&world, "child", async |world, host| {
        hold(world, host).await;
        let parent = NewJob { explicit: Declared::default(), ..world.job("job", r#"{"n": 1}"#) };
        world.enqueue(vec![parent]).await;
        let claimed = world.claim_one(host).await;
        let child = world.job("job", PAYLOAD);
        let mut end = settle(&claimed, done());
        end.children = vec![child.clone()];
        world.exchange(host, vec![end], 5).await;
        child.id
    })
    .await;
}

/// Requeued by an operator.
pub async fn an_operators_requeue(world: World) {
    check(&world, "requeue", async |world, host| {
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        let claimed = world.claim_one(host).await;
        world.complete(host, &claimed).await;
        hold(world, host).await;
        world.requeue(id, CommandVerdict::Done).await;
        world.claim(host, 5).await;
        id
    })
    .await;
}

/// Back from a host that died.
pub async fn a_rescued_job(world: World) {
    check(&world, "rescue", async |world, host| {
        let doomed = world.host(&[gated("job", 1, mutex(&["account:{n}"]))]).await;
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        world.claim_one(&doomed).await;
        world.rescue(&doomed).await;
        hold_while_it_is_away(world, host).await;
        id
    })
    .await;
}

/// Back from a retry delay.
pub async fn a_retried_job(world: World) {
    check(&world, "retry", async |world, host| {
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        let claimed = world.claim_one(host).await;
        world.end(host, &claimed, retry_at(world.in_seconds(3))).await;
        hold(world, host).await;
        world.pass(Duration::from_secs(3));
        world.claim(host, 5).await;
        id
    })
    .await;
}

/// Back from a snooze.
pub async fn a_snoozed_job(world: World) {
    check(&world, "snooze", async |world, host| {
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        let claimed = world.claim_one(host).await;
        world.end(host, &claimed, Ending::Snooze { at: world.in_seconds(3) }).await;
        hold(world, host).await;
        world.pass(Duration::from_secs(3));
        world.claim(host, 5).await;
        id
    })
    .await;
}

/// Given back by a host that stops.
pub async fn a_job_handed_back(world: World) {
    check(&world, "hand-back", async |world, host| {
        let id = world.enqueue(vec![world.job("job", PAYLOAD)]).await[0];
        let claimed = world.claim_one(host).await;
        world.end(host, &claimed, hand_back()).await;
        hold_while_it_is_away(world, host).await;
        id
    })
    .await;
}

/// What the caller declares outranks handler and contract, on every key.
pub async fn an_explicit_policy_outranks(world: World) {
    let host = world.host(&[gated("job", 1, mutex(&["account:{n}"]))]).await;
    let explicit = Declared { concurrency: Some(mutex(&["mine:{n}"])), ..Declared::default() };
    let own = NewJob { explicit, ..world.job("job", PAYLOAD) };
    let ids = world.enqueue(vec![world.job("job", PAYLOAD), own]).await;
    assert_eq!(world.claim_ids(&host, 5).await, ids, "they have different keys");
    let details = world.details(ids[1]).await;
    assert_eq!(details.keys, ["mine:7"]);
    assert_eq!(details.stamp.expect("stamped").concurrency.expect("declared").source, Source::Enqueue);
}
