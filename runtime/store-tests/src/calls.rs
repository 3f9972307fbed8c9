//! How calls behave: dropped ones, many at once, and who is woken.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use warp_domain::ending::State;
use warp_store::{ClaimParams, CommandVerdict, ExchangeParams, HandOff};

use crate::world::{World, done, gated, mutex, plain, retry_at, settle};

/// Polls a future so many times and drops it, as a caller does that is cancelled.
async fn poll_and_drop(future: impl Future, times: usize) {
    let mut future = pin!(future);
    for _ in 0..times {
        if std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await.is_ready() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// C2: whoever drops a call leaves it done or not begun. Nothing is half written, no slot leaks, nothing hangs.
pub async fn a_dropped_call_is_done_or_not_begun(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    let mut ids = Vec::new();
    for round in 0..60 {
        let jobs: Vec<_> = (0..3).map(|n| world.job("c", &format!("{{\"n\": {n}}}"))).collect();
        ids.extend(jobs.iter().map(|job| job.id));
        poll_and_drop(world.store.enqueue(jobs, world.now()), round % 12).await;
        let claim = Some(ClaimParams { lanes: host.lanes.clone(), max: 2 });
        let params = ExchangeParams { host: host.id, now: world.now(), settles: Vec::new().into(), claim, hand_off: HandOff::default() };
        poll_and_drop(world.store.exchange(params), (round * 7) % 12).await;
    }
    // Whatever the dropped exchanges claimed belongs to this host, which knows none of it.
    world.renew(host.id, Vec::new()).await;
    let mut stored = Vec::new();
    for (at, id) in ids.iter().enumerate() {
        if world.store.job(*id, world.now()).await.expect("read").is_some() {
            stored.push(*id);
            assert!(world.events(*id).await.contains(&"Created".to_owned()));
        } else {
            assert!(!stored.contains(&ids[at / 3 * 3]), "a call is written as a whole");
        }
    }
    assert!(!stored.is_empty(), "some calls were polled long enough");
    let mut ran = world.finish(&host, &stored).await;
    ran.sort_unstable();
    assert_eq!(ran, stored, "each stored job runs to its end, once");
    for n in 0..3 {
        if let Some(key) = world.store.key(&format!("k:{n}")).await.expect("key") {
            assert_eq!((key.holders.len(), key.waiting), (0, 0), "{}", key.key);
        }
    }
}

/// Many callers at once: everything is taken, every job runs once.
pub async fn many_callers_at_once(world: World) {
    let world = std::sync::Arc::new(world);
    let hosts = [world.host(&[plain("c")]).await, world.host(&[plain("c")]).await];
    let enqueuers: Vec<_> = (0..8)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move {
                let mut ids = Vec::new();
                for _ in 0..20 {
                    ids.extend(world.enqueue_many("c", 5).await);
                }
                ids
            })
        })
        .collect();
    let runners: Vec<_> = hosts
        .into_iter()
        .map(|host| {
            let world = world.clone();
            tokio::spawn(async move {
                let (mut ran, mut settles) = (Vec::new(), Vec::new());
                loop {
                    let exchanged = world.exchange(&host, std::mem::take(&mut settles), 32).await;
                    ran.extend(exchanged.claimed.iter().map(|claimed| claimed.id));
                    settles = exchanged.claimed.iter().map(|claimed| settle(claimed, done())).collect();
                    let overview = world.store.overview().await.expect("overview");
                    if settles.is_empty() && overview.states.get(&State::Completed) == Some(&800) {
                        return ran;
                    }
                }
            })
        })
        .collect();
    let (mut ids, mut ran) = (Vec::new(), Vec::new());
    for task in enqueuers {
        ids.extend(task.await.expect("an enqueuer"));
    }
    for task in runners {
        ran.extend(task.await.expect("a runner"));
    }
    ids.sort_unstable();
    ran.sort_unstable();
    assert_eq!(ran, ids);
}

/// Everything that makes a job runnable, or wants one cancelled, wakes whoever waits. Nothing here polls: a missing
/// announcement ends in the patience of the test.
pub async fn whatever_makes_a_job_runnable_wakes(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"])), plain("free")]).await;
    let ids = world.enqueue_many("c", 3).await;
    let first = world.claim_one(&host).await;
    world.claim(&host, 5).await;
    wakes(&world, "an enqueue", world.enqueue_one("free")).await;
    let free = world.claim_one(&host).await;
    wakes(&world, "a hand-on", world.complete(&host, &first)).await;
    wakes(&world, "a raised limit", world.limit("k", 2)).await;
    wakes(&world, "a retry at once", world.end(&host, &free, retry_at(world.now()))).await;
    let second = world.claim_one(&host).await;
    assert_eq!(second.id, ids[1]);
    wakes(&world, "a cancellation", world.cancel(second.id, CommandVerdict::Requested)).await;
    world.complete(&host, &second).await;
    wakes(&world, "a requeue", world.requeue(second.id, CommandVerdict::Done)).await;
    let other = world.host(&[plain("free")]).await;
    world.claim(&other, 5).await;
    wakes(&world, "a rescue", world.rescue(&other)).await;
    wakes(&world, "a pause", world.store.pause_queue("night", "ada", world.now())).await;
    wakes(&world, "its end", world.store.resume_queue("night", world.now())).await;
    wakes(&world, "a host's pause", world.store.pause_host(host.id, "ada", world.now())).await;
    wakes(&world, "its end", world.store.resume_host(host.id, world.now())).await;
}

/// Waits for the announcement of what `act` does; what was announced before is over.
async fn wakes<T>(world: &World, what: &str, act: impl Future<Output = T>) {
    const PATIENCE: Duration = Duration::from_secs(30);
    while tokio::time::timeout(Duration::ZERO, world.store.changed()).await.is_ok() {}
    let (_, woken) = tokio::join!(act, tokio::time::timeout(PATIENCE, world.store.changed()));
    assert!(woken.is_ok(), "{what} wakes nobody");
}
