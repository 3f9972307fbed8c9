//! What comes out: which rows, in which order, under which policy.

use std::collections::BTreeSet;
use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::policy::{Declared, Source, Timeout, TimeoutMode};
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, HostId};
use warp_store::{ClaimParams, CommandVerdict, ExchangeParams, HandOff, NewJob, StoreErrorKind, Waiting};

use crate::world::{World, done, gated, hand_back, mutex, plain, retries, retry_at, settle};

/// Oldest due first, over all lanes; never more than asked for; `more` says that another claim would find some.
pub async fn the_oldest_due_comes_first_over_all_lanes(world: World) {
    let host = world.host(&[plain("a"), plain("b")]).await;
    let mut ids = Vec::new();
    for contract in ["a", "b", "b", "a", "a", "b"] {
        ids.push(world.enqueue_one(contract).await);
        world.pass(Duration::from_millis(1));
    }
    let first = world.exchange(&host, Vec::new(), 4).await;
    assert_eq!(first.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), ids[..4]);
    assert!(first.more);
    assert_eq!(world.claim_ids(&host, 4).await, ids[4..]);
    assert_eq!(world.claim_ids(&host, 4).await, []);
}

/// A host gets what it serves and nothing else, whichever queue it stands in.
pub async fn a_claim_keeps_to_its_lanes(world: World) {
    let host = world.host(&[plain("a")]).await;
    world.enqueue_one("b").await;
    world.enqueue(vec![NewJob { queue: "night".into(), ..world.job("a", "{}") }]).await;
    let mine = world.enqueue_one("a").await;
    assert_eq!(world.claim_ids(&host, 10).await, [mine]);
}

/// Two hosts never run one job, and each run has its own, growing token.
pub async fn no_job_goes_to_two_hosts(world: World) {
    let (one, two) = (world.host(&[plain("c")]).await, world.host(&[plain("c")]).await);
    assert_ne!(one.id, two.id);
    world.enqueue_many("c", 40).await;
    let mut tokens = Vec::new();
    let mut seen = BTreeSet::new();
    for round in 0..20 {
        for claimed in world.claim(if round % 2 == 0 { &one } else { &two }, 3).await {
            assert!(seen.insert(claimed.id), "{} was claimed twice", claimed.id);
            tokens.push(claimed.token);
        }
    }
    assert_eq!(seen.len(), 40);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// A34 of a kind: ten thousand jobs that only another host can run delay nobody.
pub async fn ten_thousand_jobs_of_another_host_hide_nothing(world: World) {
    for _ in 0..10 {
        world.enqueue_many("foreign", 1_000).await;
    }
    world.pass(Duration::from_millis(1));
    let mine = world.enqueue_one("mine").await;
    let host = world.host(&[plain("mine")]).await;
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [mine]);
    // The same with both lanes on one host: the younger lane is neither lost nor first.
    let next = world.enqueue_one("mine").await;
    let both = world.host(&[plain("mine"), plain("foreign")]).await;
    let claimed = world.claim_ids(&both, 5).await;
    assert_eq!(claimed.len(), 5);
    assert!(!claimed.contains(&next));
}

/// C1: a host that is not registered gets nothing and can end nothing.
pub async fn a_host_without_registration_is_told_so(world: World) {
    let host = world.host(&[plain("c")]).await;
    world.enqueue_one("c").await;
    let claimed = world.claim_one(&host).await;
    world.rescue(&host).await;
    for id in [host.id, HostId(4711)] {
        let params = |settles: Vec<_>| ExchangeParams {
            host: id,
            now: world.now(),
            settles: settles.into(),
            claim: Some(ClaimParams { lanes: host.lanes.clone(), max: 1 }),
            hand_off: HandOff::default(),
        };
        let error = world.store.exchange(params(vec![settle(&claimed, done())])).await.expect_err("not registered");
        assert_eq!(error.kind(), StoreErrorKind::HostLost);
        assert_eq!(world.try_renew(id, Vec::new()).await.expect_err("not registered").kind(), StoreErrorKind::HostLost);
        assert_eq!(world.store.serve(id, Vec::new()).await.expect_err("not registered").kind(), StoreErrorKind::HostLost);
        assert_eq!(world.store.deregister(id, world.now()).await.expect_err("not registered").kind(), StoreErrorKind::HostLost);
    }
    assert_eq!(world.state(claimed.id).await, State::Enqueued);
}

/// Runs count every start, attempts only what is charged.
pub async fn runs_and_attempts_are_counted_apart(world: World) {
    let host = world.host(&[plain("c")]).await;
    let id = world.enqueue_one("c").await;
    let mut seen = Vec::new();
    for ending in [retry_at(world.now()), hand_back(), warp_domain::ending::Ending::Snooze { at: world.now() }, retry_at(world.now())] {
        let claimed = world.claim_one(&host).await;
        seen.push((claimed.run, claimed.attempt));
        world.end(&host, &claimed, ending).await;
    }
    let last = world.claim_one(&host).await;
    seen.push((last.run, last.attempt));
    assert_eq!(seen, [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)]);
    world.complete(&host, &last).await;
    let summary = world.details(id).await.summary;
    assert_eq!((summary.runs, summary.attempts), (5, 3));
}

/// The claim resolves whole families, writes the winner with its source, and shows it on the row.
pub async fn the_claim_stamps_what_won_and_where_it_came_from(world: World) {
    let timeout = Timeout { per_attempt: Duration::from_secs(9), mode: TimeoutMode::Delete };
    let declarations =
        Declarations { on_contract: Declared { timeout: Some(timeout.clone()), ..retries(3) }, on_handler: retries(2), ..plain("c") };
    let host = world.host(&[declarations]).await;
    let explicit = NewJob { explicit: retries(1), ..world.job("c", "{}") };
    let ids = world.enqueue(vec![world.job("c", "{}"), explicit]).await;
    let claimed = world.claim(&host, 2).await;
    let digest = Digest([1; 32]);
    let handler = Source::Handler { name: "c-handler".into(), digest };
    let contract = Source::Contract { name: "c".into(), digest };
    for (at, (max, source)) in [(2, handler), (1, Source::Enqueue)].into_iter().enumerate() {
        let details = world.details(ids[at]).await;
        assert_eq!(details.stamp.as_ref(), Some(&*claimed[at].stamp), "what runs is what the row says");
        assert_eq!(details.running, Some(("machine-1".into(), digest)));
        let stamp = details.stamp.expect("stamped");
        let retry = stamp.retry.expect("declared");
        assert_eq!((retry.value.max, retry.source), (max, source));
        let timed = stamp.timeout.expect("declared on the contract");
        assert_eq!((timed.value, timed.source), (timeout.clone(), contract.clone()));
        assert_eq!(stamp.concurrency, None);
    }
}

/// A new version changes nothing for what has started: not by retry, snooze, hand-back, requeue or rescue.
pub async fn a_stamp_outlives_everything(world: World) {
    let version = |n: u8| Declarations { digest: Digest([n; 32]), on_handler: retries(u32::from(n)), ..plain("c") };
    let mut host = world.host(&[version(1)]).await;
    let id = world.enqueue_one("c").await;
    let first = world.claim_one(&host).await;
    world.end(&host, &first, retry_at(world.now())).await;
    host = world.serve(host.id, &[version(2)]).await;
    let expect_first = |stamp: &warp_domain::policy::Stamp, when: &str| {
        assert_eq!(stamp, &*first.stamp, "{when}");
    };
    let endings = [("retry", hand_back()), ("hand-back", warp_domain::ending::Ending::Snooze { at: world.now() }), ("snooze", done())];
    for (when, ending) in endings {
        let claimed = world.claim_one(&host).await;
        expect_first(&claimed.stamp, when);
        assert_eq!(claimed.lane.declarations.digest, Digest([2; 32]), "the code is the new one");
        world.end(&host, &claimed, ending).await;
    }
    world.requeue(id, CommandVerdict::Done).await;
    expect_first(&world.claim_one(&host).await.stamp, "operator requeue");
    world.rescue(&host).await;
    let host = world.host(&[version(3)]).await;
    expect_first(&world.claim_one(&host).await.stamp, "rescue");
    let fresh = world.enqueue_one("c").await;
    assert_eq!(world.claim_ids(&host, 1).await, [fresh]);
    assert_eq!(world.details(fresh).await.stamp.expect("stamped").retry.expect("declared").value.max, 3);
}

/// A key that cannot be rendered fails that job, permanently and with the field's name, and nobody else.
pub async fn a_key_without_its_field_fails_that_job_alone(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["pay:{customer.id}"]))]).await;
    let jobs = [r#"{"customer": {"id": 1}}"#, r#"{"customer": {"name": "x"}, "n": 1}"#, r#"{"customer": {"id": 2}}"#];
    let ids = world.enqueue(jobs.iter().map(|payload| world.job("c", payload)).collect()).await;
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [ids[0], ids[2]]);
    assert_eq!(exchanged.unacceptable, 1);
    let failed = world.details(ids[1]).await;
    assert_eq!(failed.summary.state, State::Failed);
    let error = failed.error.expect("the reason is kept");
    assert!(error.contains("`customer.id`") && error.contains("`n`"), "{error}");
    assert_eq!(world.counter("stats:failed:unacceptable").await, 1);
    assert_eq!((failed.summary.runs, failed.audit.last().map(|row| row.event.clone())), (0, Some("Failed".into())));
}

/// A job says why it is not running when no key is the reason.
pub async fn a_waiting_job_says_why(world: World) {
    let ids = world.enqueue_many("c", 3).await;
    assert_eq!(world.details(ids[0]).await.waiting, Some(Waiting::ForHost));
    let host = world.host(&[plain("c")]).await;
    assert_eq!(world.details(ids[2]).await.waiting, Some(Waiting::ForWorker { ahead: 2 }));
    let claimed = world.claim_one(&host).await;
    assert_eq!(world.details(ids[0]).await.waiting, None, "it runs");
    assert_eq!(world.details(ids[2]).await.waiting, Some(Waiting::ForWorker { ahead: 1 }));
    world.complete(&host, &claimed).await;
    assert_eq!(world.details(ids[0]).await.waiting, None, "it has ended");
}
