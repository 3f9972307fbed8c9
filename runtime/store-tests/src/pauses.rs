//! Queues and hosts that an operator pauses: nothing new starts, what runs goes on, and nobody waits behind them.

use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::policy::Concurrency;
use warp_domain::resolve::Declarations;
use warp_domain::{HostId, JobId};
use warp_store::{Lane, NewJob, Pause, StoreErrorKind, Waiting};

use crate::world::{Host, PATIENCE, QUEUE, World, done, gated, mutex, plain, semaphore, settle};

/// The second queue of these cases.
const NIGHT: &str = "night";

/// A host that serves these contracts from both queues.
async fn host_of_both(world: &World, served: &[Declarations]) -> Host {
    let Host { id, lanes } = world.host(served).await;
    let night = lanes.iter().map(|lane| Lane { queue: NIGHT.to_owned(), declarations: Arc::clone(&lane.declarations) });
    Host { id, lanes: lanes.iter().cloned().chain(night).collect() }
}

async fn enqueue_in(world: &World, queue: &str, contract: &str) -> JobId {
    world.enqueue(vec![NewJob { queue: queue.to_owned(), ..world.job(contract, "{}") }]).await[0]
}

async fn pause(world: &World, queue: &str) -> bool {
    world.store.pause_queue(queue, "ada", world.now()).await.expect("pause a queue")
}

async fn resume(world: &World, queue: &str) -> bool {
    world.store.resume_queue(queue, world.now()).await.expect("resume a queue")
}

/// No claim takes a job of a paused queue, whether it is ready or falls due; other queues and what runs go on.
pub async fn a_paused_queue_starts_nothing_new(world: World) {
    let host = host_of_both(&world, &[plain("c")]).await;
    let running = enqueue_in(&world, NIGHT, "c").await;
    let claimed = world.claim_one(&host).await;
    let waiting = enqueue_in(&world, NIGHT, "c").await;
    let day = enqueue_in(&world, QUEUE, "c").await;
    let due = NewJob { queue: NIGHT.to_owned(), due: Some(world.in_seconds(5)), ..world.job("c", "{}") };
    let due = world.enqueue(vec![due]).await[0];
    let word = Pause { by: "ada".to_owned(), at: world.now() };
    assert!(pause(&world, NIGHT).await);
    world.pass(Duration::from_secs(10));
    assert!(!world.store.pause_queue(NIGHT, "bob", world.now()).await.expect("pause again"), "it is paused already");
    let exchanged = world.exchange(&host, Vec::new(), 5).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [day]);
    assert_eq!((exchanged.more, exchanged.next_due), (false, None), "nobody is told to ask again at once");
    for id in [waiting, due] {
        let details = world.details(id).await;
        assert_eq!((details.summary.state, details.waiting), (State::Enqueued, Some(Waiting::Paused(word.clone()))));
    }
    world.complete(&host, &claimed).await;
    assert_eq!(world.state(running).await, State::Completed);
    let told = [(NIGHT.to_owned(), word)];
    assert!(world.store.paused_queues().await.expect("paused queues").into_iter().eq(told.clone()));
    assert!(world.store.overview().await.expect("overview").paused_queues.into_iter().eq(told));
    assert_eq!(world.store.pause_queue("", "ada", world.now()).await.expect_err("no name").kind(), StoreErrorKind::Invalid);
    assert!(resume(&world, NIGHT).await);
    assert!(!resume(&world, NIGHT).await, "it is not paused any more");
    assert_eq!(world.claim_ids(&host, 5).await, [waiting, due]);
    assert!(world.store.paused_queues().await.expect("paused queues").is_empty());
}

/// A paused host claims nothing, settles what it runs, and is seen; others take over. A new registration is not paused.
pub async fn a_paused_host_starts_nothing_new(world: World) {
    let (host, other) = (world.host(&[plain("c"), plain("own")]).await, world.host(&[plain("c")]).await);
    let ids = world.enqueue_many("c", 2).await;
    let claimed = world.claim_one(&host).await;
    let own = world.enqueue_one("own").await;
    let later = world.enqueue(vec![NewJob { due: Some(world.in_seconds(5)), ..world.job("c", "{}") }]).await[0];
    let word = Pause { by: "ada".to_owned(), at: world.now() };
    let pause = async |id: HostId| world.store.pause_host(id, "ada", world.now()).await;
    assert!(pause(host.id).await.expect("pause"));
    assert!(!pause(host.id).await.expect("pause again"));
    world.pass(Duration::from_secs(10));
    let exchanged = world.exchange(&host, vec![settle(&claimed, done())], 5).await;
    assert_eq!((exchanged.claimed.len(), exchanged.more, exchanged.next_due), (0, false, None), "what is due waits for others");
    assert_eq!(world.state(ids[0]).await, State::Completed, "what runs goes on");
    let paused = async |id: HostId| {
        let hosts = world.store.hosts().await.expect("hosts");
        hosts.into_iter().find(|seen| seen.host == id).expect("registered").paused
    };
    assert_eq!((paused(host.id).await, paused(other.id).await), (Some(word.clone()), None));
    assert!(world.renew(other.id, Vec::new()).await.hosts.iter().any(|seen| seen.paused.as_ref() == Some(&word)));
    assert_eq!(world.details(own).await.waiting, Some(Waiting::ForHost), "the only host that runs it is paused");
    assert_eq!(world.claim_ids(&other, 5).await, [ids[1], later]);
    world.renew(host.id, Vec::new()).await;
    assert_eq!(paused(host.id).await, Some(word), "a renewal does not end it");
    assert!(world.store.resume_host(host.id, world.now()).await.expect("resume"));
    assert!(!world.store.resume_host(host.id, world.now()).await.expect("resume again"));
    assert_eq!(world.claim_ids(&host, 5).await, [own]);
    assert!(pause(host.id).await.expect("pause"));
    world.store.deregister(host.id, world.now()).await.expect("deregister");
    let resumed = world.store.resume_host(host.id, world.now()).await;
    for refused in [pause(host.id).await, pause(HostId(4711)).await, resumed] {
        assert_eq!(refused.expect_err("not registered").kind(), StoreErrorKind::NotFound);
    }
    assert_eq!(paused(world.host(&[plain("own")]).await.id).await, None);
}

fn heavy(name: &str) -> Declarations {
    gated(name, 1, Concurrency { weight: 2, ..semaphore("k", 2) })
}

/// C5, B7: the waiters of a paused queue hold nobody up, from the pause itself on; and count again when it is resumed.
pub async fn waiters_of_a_paused_queue_are_passed_over(world: World) {
    let host = host_of_both(&world, &[gated("light", 1, semaphore("k", 2)), heavy("heavy")]).await;
    enqueue_in(&world, QUEUE, "light").await;
    let first = world.claim_one(&host).await;
    let heavy = enqueue_in(&world, NIGHT, "heavy").await;
    let light = enqueue_in(&world, QUEUE, "light").await;
    assert_eq!(world.claim_ids(&host, 5).await, [], "the head waits for both slots, and the other behind it");
    assert_eq!(world.waiters("k").await, [heavy, light]);
    assert!(pause(&world, NIGHT).await);
    assert_eq!(world.holders("k").await, [first.id, light], "the pause hands on");
    assert!(!world.key("k").await.waiters[0].claimable);
    let second = world.claim_one(&host).await;
    let third = enqueue_in(&world, QUEUE, "light").await;
    assert_eq!(world.claim_ids(&host, 5).await, []);
    world.complete(&host, &first).await;
    assert_eq!(world.holders("k").await, [third, second.id], "a freed slot passes them by");
    let third = world.claim_one(&host).await;
    for claimed in [&second, &third] {
        world.complete(&host, claimed).await;
    }
    assert_eq!(world.holders("k").await, [], "nobody else is there");
    assert!(resume(&world, NIGHT).await);
    assert_eq!(world.holders("k").await, [heavy, heavy], "the resumption hands on");
    assert_eq!(world.claim_ids(&host, 5).await, [heavy]);
}

/// The same for a host: what only a paused host runs holds nobody up.
pub async fn waiters_for_a_paused_host_are_passed_over(world: World) {
    let (host, other) = (world.host(&[gated("own", 1, mutex(&["k"]))]).await, world.host(&[gated("c", 1, mutex(&["k"]))]).await);
    world.enqueue_one("c").await;
    let first = world.claim_one(&other).await;
    let own = world.enqueue_one("own").await;
    let next = world.enqueue_one("c").await;
    world.claim(&host, 5).await;
    world.claim(&other, 5).await;
    assert_eq!(world.waiters("k").await, [own, next]);
    assert!(world.store.pause_host(host.id, "ada", world.now()).await.expect("pause"));
    world.complete(&other, &first).await;
    assert_eq!(world.holders("k").await, [next]);
    let next = world.claim_one(&other).await;
    world.complete(&other, &next).await;
    assert_eq!(world.holders("k").await, []);
    assert!(world.store.resume_host(host.id, world.now()).await.expect("resume"));
    assert_eq!(world.holders("k").await, [own]);
}

/// B7: what was reserved for a job of a queue that is paused now goes on to the next after the patience, in the
/// renewal of any host.
pub async fn a_reservation_in_a_paused_queue_goes_on(world: World) {
    let host = host_of_both(&world, &[gated("c", 1, mutex(&["k"]))]).await;
    enqueue_in(&world, QUEUE, "c").await;
    let first = world.claim_one(&host).await;
    let night = enqueue_in(&world, NIGHT, "c").await;
    let day = enqueue_in(&world, QUEUE, "c").await;
    assert_eq!(world.claim_ids(&host, 5).await, []);
    let exchanged = world.exchange(&host, vec![settle(&first, done())], 0).await;
    assert_eq!((exchanged.reserved, world.holders("k").await), (1, vec![night]), "reserved, and not claimed with it");
    assert!(pause(&world, NIGHT).await);
    assert_eq!(world.claim_ids(&host, 5).await, []);
    let early = world.renew(host.id, Vec::new()).await;
    assert_eq!((early.expired, early.reserved), (0, true));
    world.pass(PATIENCE);
    let renewed = world.renew(host.id, Vec::new()).await;
    assert_eq!((renewed.expired, renewed.reserved, world.holders("k").await), (1, true, vec![day]));
    let last = world.claim_one(&host).await;
    assert_eq!(last.id, day);
    world.pass(PATIENCE);
    let renewed = world.renew(host.id, Vec::new()).await;
    assert_eq!((renewed.expired, renewed.reserved), (0, false));
    assert!(resume(&world, NIGHT).await);
    let exchanged = world.exchange(&host, vec![settle(&last, done())], 5).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [night]);
    assert_eq!(exchanged.reserved, 0, "claimed with the hand-on");
}

/// Hosts hear of pauses together with cancellations, so that they can hand back what has not begun.
pub async fn hosts_hear_of_pauses(world: World) {
    let (host, other) = (world.host(&[plain("c")]).await, world.host(&[plain("c")]).await);
    let heard = async |id: HostId| {
        let signals = world.store.signals(id).await.expect("signals");
        (signals.host_paused, signals.paused_queues)
    };
    assert_eq!(heard(host.id).await, (false, vec![]));
    pause(&world, NIGHT).await;
    world.store.pause_host(host.id, "ada", world.now()).await.expect("pause");
    assert_eq!(heard(host.id).await, (true, vec![NIGHT.to_owned()]));
    assert_eq!(heard(other.id).await, (false, vec![NIGHT.to_owned()]));
    resume(&world, NIGHT).await;
    world.store.resume_host(host.id, world.now()).await.expect("resume");
    assert_eq!(heard(host.id).await, (false, vec![]));
}
