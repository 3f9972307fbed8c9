//! What people ask and command.

use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason, State};
use warp_domain::{JobId, UnixMillis};
use warp_store::{CommandVerdict, JobFilter, NewJob, QueueSeen, Retention, SettleVerdict, Waiting};

use crate::world::{World, done, gated, hand_back, mutex, plain, retry_at, settle};

/// Cancelling ends at once what waits, asks for the end of what runs, and refuses what has ended.
pub async fn cancelling_depends_on_the_state(world: World) {
    let host = world.host(&[plain("c")]).await;
    let running = world.enqueue_one("c").await;
    let claimed = world.claim_one(&host).await;
    let waiting = world.enqueue_one("c").await;
    let scheduled = world.enqueue(vec![NewJob { due: Some(world.in_seconds(9)), ..world.job("c", "{}") }]).await[0];
    for id in [waiting, scheduled] {
        world.cancel(id, CommandVerdict::Done).await;
        let details = world.details(id).await;
        assert_eq!(details.summary.state, State::Deleted);
        assert!(details.audit.last().expect("history").message.contains("ada"), "who did it is told");
    }
    world.cancel(waiting, CommandVerdict::NotNow(State::Deleted)).await;
    world.cancel(JobId(4711), CommandVerdict::Unknown).await;
    assert_eq!(world.store.signals(host.id).await.expect("signals").cancelled, []);
    world.cancel(running, CommandVerdict::Requested).await;
    let signals = world.store.signals(host.id).await.expect("signals").cancelled;
    assert_eq!(signals.iter().map(|signal| (signal.handle, signal.token)).collect::<Vec<_>>(), [(claimed.handle, claimed.token)]);
    assert_eq!(world.state(running).await, State::Processing, "its host ends it");
    assert!(world.events(running).await.contains(&"CancellationRequested".to_owned()));
    world.end(&host, &claimed, Ending::Deleted { message: "cancelled".into() }).await;
    assert_eq!(world.state(running).await, State::Deleted);
    assert_eq!(world.store.signals(host.id).await.expect("signals").cancelled, []);
}

/// A cancelled run that fails, snoozes or is given back does not run again; one that finishes has finished.
pub async fn a_cancelled_run_does_not_come_back(world: World) {
    let host = world.host(&[plain("c")]).await;
    let cases = [
        (retry_at(world.now()), State::Deleted),
        (Ending::Snooze { at: world.now() }, State::Deleted),
        (hand_back(), State::Deleted),
        (done(), State::Completed),
        (Ending::Failed { message: "no".into(), reason: FailedReason::Permanent }, State::Failed),
    ];
    for (ending, state) in cases {
        let id = world.enqueue_one("c").await;
        let claimed = world.claim_one(&host).await;
        world.cancel(id, CommandVerdict::Requested).await;
        world.end(&host, &claimed, ending.clone()).await;
        assert_eq!(world.state(id).await, state, "{ending:?}");
    }
    let id = world.enqueue_one("c").await;
    world.claim_one(&host).await;
    world.cancel(id, CommandVerdict::Requested).await;
    world.rescue(&host).await;
    assert_eq!(world.state(id).await, State::Deleted, "its host died");
    // A later run is not the one that was cancelled.
    let host = world.host(&[plain("c")]).await;
    world.requeue(id, CommandVerdict::Done).await;
    let again = world.claim_one(&host).await;
    assert_eq!(world.store.signals(host.id).await.expect("signals").cancelled, []);
    world.end(&host, &again, retry_at(world.now())).await;
    assert_eq!(world.state(id).await, State::Enqueued);
}

/// Requeueing starts a job afresh from any end, and a Scheduled one at once; it is refused for what is on its way.
pub async fn requeueing_starts_afresh(world: World) {
    let host = world.host(&[plain("c")]).await;
    let endings =
        [done(), Ending::Deleted { message: "no use".into() }, Ending::Failed { message: "no".into(), reason: FailedReason::Permanent }];
    for ending in endings {
        let id = world.enqueue_one("c").await;
        world.requeue(id, CommandVerdict::NotNow(State::Enqueued)).await;
        let claimed = world.claim_one(&host).await;
        world.requeue(id, CommandVerdict::NotNow(State::Processing)).await;
        world.end(&host, &claimed, ending).await;
        world.requeue(id, CommandVerdict::Done).await;
        let details = world.details(id).await;
        assert_eq!((details.summary.state, details.summary.attempts, details.result), (State::Enqueued, 0, None));
        let again = world.claim_one(&host).await;
        assert_eq!((again.id, again.run, again.attempt), (id, 2, 1));
        world.complete(&host, &again).await;
    }
    let scheduled = world.enqueue(vec![NewJob { due: Some(world.in_seconds(99)), ..world.job("c", "{}") }]).await[0];
    world.requeue(scheduled, CommandVerdict::Done).await;
    assert_eq!(world.claim_ids(&host, 5).await, [scheduled]);
    world.requeue(JobId(4711), CommandVerdict::Unknown).await;
    assert_eq!(world.counter("stats:requeued:manual").await, 4);
}

/// Deleting removes everything, except what runs; the id may then be used again.
pub async fn deleting_removes_everything(world: World) {
    let host = world.host(&[plain("c")]).await;
    let delete = async |id: JobId| world.store.delete(id, world.now()).await.expect("delete");
    let job = NewJob { unique_key: Some("u".into()), ..world.job("c", "{}") };
    world.enqueue(vec![job.clone()]).await;
    let claimed = world.claim_one(&host).await;
    assert_eq!(delete(job.id).await, CommandVerdict::NotNow(State::Processing));
    let mut end = settle(&claimed, done());
    end.output.lines = vec![warp_store::LogLine { at: world.now(), stream: "stdout", text: "x".into() }];
    world.exchange(&host, vec![end.clone()], 0).await;
    assert_eq!(delete(job.id).await, CommandVerdict::Done);
    assert_eq!(delete(job.id).await, CommandVerdict::Unknown);
    assert_eq!(world.store.job(job.id, world.now()).await.expect("read"), None);
    assert!(world.store.job_logs(job.id, None).await.expect("read the log").is_empty());
    assert_eq!(world.exchange(&host, vec![end], 0).await.settled, [SettleVerdict::Late]);
    // A waiting one takes its unique key along.
    world.enqueue(vec![job.clone()]).await;
    assert_eq!(delete(job.id).await, CommandVerdict::Done);
    world.enqueue(vec![job.clone()]).await;
    assert!(world.events(job.id).await.iter().eq(["Created"]), "nothing of the old one is left");
    assert_eq!(world.store.overview().await.expect("overview").states.get(&State::Completed), None);
}

/// Lists: newest first, by every filter and page by page.
pub async fn lists_filter_and_page(world: World) {
    let host = world.host(&[gated("a", 1, mutex(&["k:{n}"]))]).await;
    let a: Vec<_> = world.enqueue((0..6).map(|n| world.job("a", &format!("{{\"n\": {}}}", n % 3))).collect()).await;
    let b = world.enqueue(vec![NewJob { queue: "night".into(), ..world.job("b", "{}") }]).await[0];
    let claimed = world.claim(&host, 10).await;
    assert_eq!(claimed.len(), 3);
    world.complete(&host, &claimed[0]).await;
    let list = async |filter: JobFilter| {
        let jobs = world.store.jobs(JobFilter { limit: if filter.limit == 0 { 100 } else { filter.limit }, ..filter }).await.expect("list");
        jobs.into_iter().map(|job| job.id).collect::<Vec<_>>()
    };
    let newest_first = |ids: &[JobId]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.reverse();
        ids
    };
    let all = newest_first(&[a.clone(), vec![b]].concat());
    assert_eq!(list(JobFilter::default()).await, all);
    assert_eq!(list(JobFilter { limit: 2, ..JobFilter::default() }).await, all[..2]);
    assert_eq!(list(JobFilter { before: Some(all[1]), limit: 3, ..JobFilter::default() }).await, all[2..5]);
    assert_eq!(list(JobFilter { contract: Some("b".into()), ..JobFilter::default() }).await, [b]);
    assert_eq!(list(JobFilter { queue: Some("night".into()), ..JobFilter::default() }).await, [b]);
    assert_eq!(list(JobFilter { key: Some("k:1".into()), ..JobFilter::default() }).await, [a[4], a[1]]);
    assert_eq!(list(JobFilter { key: Some("k:9".into()), ..JobFilter::default() }).await, []);
    assert_eq!(list(JobFilter { states: vec![State::Completed], ..JobFilter::default() }).await, [a[0]]);
    assert_eq!(list(JobFilter { states: vec![State::Processing, State::Completed], ..JobFilter::default() }).await, [a[2], a[1], a[0]]);
    let parked: Vec<_> = world.store.jobs(JobFilter { limit: 100, ..JobFilter::default() }).await.expect("list");
    let parked: Vec<_> = parked.into_iter().filter(|job| job.parked).map(|job| job.id).collect();
    assert_eq!(parked, [a[5], a[4]]);
    let reserved = world.details(a[3]).await;
    assert_eq!((reserved.summary.parked, reserved.waiting), (false, Some(Waiting::Reserved)));
}

/// Keys: the busiest first, with holders and counts.
pub async fn keys_are_listed_busiest_first(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    let jobs = [0, 0, 0, 1, 1, 2].map(|n| world.job("c", &format!("{{\"n\": {n}}}")));
    let ids = world.enqueue(jobs.to_vec()).await;
    world.claim(&host, 10).await;
    let keys = world.store.keys(2).await.expect("keys");
    let seen: Vec<_> = keys.iter().map(|key| (key.key.as_str(), key.waiting, key.holders[0].job, key.waiters.len())).collect();
    assert_eq!(seen, [("k:0", 2, ids[0], 0), ("k:1", 1, ids[3], 0)]);
    assert_eq!(world.store.keys(10).await.expect("keys").len(), 3);
    assert_eq!(world.store.key("never heard of").await.expect("key"), None);
}

/// The overview counts every state, ended ones without scanning them, and stays right through pruning.
pub async fn the_overview_adds_up(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"])), plain("free")]).await;
    world.enqueue_many("c", 3).await;
    world.enqueue_many("free", 4).await;
    world.enqueue(vec![NewJob { due: Some(world.in_seconds(99)), ..world.job("c", "{}") }]).await;
    let claimed = world.claim(&host, 4).await;
    world.complete(&host, &claimed[1]).await;
    world.end(&host, &claimed[2], Ending::Failed { message: "no".into(), reason: FailedReason::Permanent }).await;
    let overview = world.store.overview().await.expect("overview");
    let count = |state: State| overview.states.get(&state).copied().unwrap_or(0);
    let counts = State::ALL.map(count);
    assert_eq!(counts, [1, 3, 0, 2, 1, 1, 0]);
    assert_eq!(overview.parked, 2);
    world.pass(Duration::from_secs(10));
    let keep_nothing = Retention { completed: Some(Duration::ZERO), deleted: Some(Duration::ZERO), failed: Some(Duration::ZERO) };
    assert_eq!(world.store.prune(keep_nothing, 100, world.now()).await.expect("prune"), 2);
    let overview = world.store.overview().await.expect("overview");
    assert_eq!((overview.states.get(&State::Completed), overview.states.get(&State::Failed)), (None, None));
    assert_eq!((overview.counters["stats:succeeded"], overview.counters["stats:failed"]), (1, 1), "what happened has happened");
}

/// What lies in each queue, deepest first; queues in which nothing lies are not told of.
pub async fn queues_are_told_by_their_depth(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"])), plain("free")]).await;
    let in_queue = |queue: &str, contract: &str| NewJob { queue: queue.to_owned(), ..world.job(contract, "{}") };
    assert_eq!(world.store.queues(9).await.expect("queues"), []);
    world.enqueue_many("c", 3).await;
    world.claim(&host, 3).await;
    let since = world.now();
    world.enqueue(vec![in_queue("night", "free")]).await;
    world.pass(Duration::from_secs(7));
    world.enqueue(vec![in_queue("night", "other"), NewJob { due: Some(world.in_seconds(99)), ..in_queue("night", "free") }]).await;
    world.enqueue(vec![NewJob { due: Some(world.in_seconds(99)), ..world.job("c", "{}") }]).await;
    let ended = world.enqueue(vec![in_queue("over", "free")]).await;
    world.cancel(ended[0], CommandVerdict::Done).await;
    let first = QueueSeen { queue: "default".to_owned(), ready: 0, running: 1, scheduled: 1, parked: 2, oldest_ready: None };
    let second = QueueSeen { queue: "night".to_owned(), ready: 2, running: 0, scheduled: 1, parked: 0, oldest_ready: Some(since) };
    assert_eq!(world.store.queues(9).await.expect("queues"), [first.clone(), second]);
    assert_eq!(world.store.queues(1).await.expect("queues"), [first]);
}

/// Retention: each ended state by its own age, at most so many at a time, and nothing that lives.
pub async fn retention_removes_what_is_old_enough(world: World) {
    let host = world.host(&[plain("c")]).await;
    let old = world.enqueue_many("c", 5).await;
    let claimed = world.claim(&host, 5).await;
    world.exchange(&host, claimed[..4].iter().map(|claimed| settle(claimed, done())).collect(), 0).await;
    world.end(&host, &claimed[4], Ending::Failed { message: "no".into(), reason: FailedReason::Permanent }).await;
    let alive = world.enqueue_one("c").await;
    world.pass(Duration::from_secs(3_600));
    let young = world.enqueue_one("free").await;
    world.cancel(young, CommandVerdict::Done).await;
    let hour = Retention { completed: Some(Duration::from_secs(3_600)), deleted: Some(Duration::from_secs(3_600)), failed: None };
    let prune = async |now: UnixMillis| world.store.prune(hour, 3, now).await.expect("prune");
    assert_eq!(prune(UnixMillis(world.now().0 - 1)).await, 0, "not a millisecond early");
    assert_eq!((prune(world.now()).await, prune(world.now()).await, prune(world.now()).await), (3, 1, 0));
    for id in &old[..4] {
        assert_eq!(world.store.job(*id, world.now()).await.expect("read"), None);
    }
    for id in [old[4], alive, young] {
        assert!(world.store.job(id, world.now()).await.expect("read").is_some(), "{id} is kept");
    }
}

/// A key that no ended or living job and no operator needs any more may be forgotten, one that is needed may not.
pub async fn retention_keeps_the_keys_of_the_living(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    world.limit("k:0", 1).await;
    let jobs = [0, 1, 1, 2].map(|n| world.job("c", &format!("{{\"n\": {n}}}")));
    let ids = world.enqueue(jobs.to_vec()).await;
    let claimed = world.claim(&host, 10).await;
    for claimed in &claimed {
        world.complete(&host, claimed).await;
    }
    let keep_nothing = Retention { completed: Some(Duration::ZERO), deleted: None, failed: None };
    world.store.prune(keep_nothing, 100, world.now()).await.expect("prune");
    assert_eq!(world.key("k:0").await.admin_limit, Some(1));
    assert_eq!(world.holders("k:1").await, [ids[2]]);
    let last = world.claim(&host, 10).await;
    assert_eq!(last.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [ids[2]]);
    assert_eq!(world.details(ids[2]).await.keys, ["k:1"]);
}
