//! Several exchanges at once: as many as may be, no more jobs in memory than one alone would bring, and no statement
//! more than it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use warp_domain::ending::State;

use crate::world::{Fault, Gate, World, code, config_of, done, mutex, no_op, offer, plain};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_many_as_may_be_are_under_way() {
    for exchanges in 1..=3 {
        let world = World::new();
        world.fault("exchange", Fault::Slow(Duration::from_millis(12)), usize::MAX);
        let host = world.host(config_of(16, exchanges), vec![offer("a", plain(), no_op())]);
        let ids = world.add_many("a", 2_000).await;
        world.all(&ids, State::Completed).await;
        assert_eq!(world.most_at_once(), exchanges as usize);
        let report = host.numbers.report();
        assert_eq!((report.late, report.unknown_rows), (0, 0));
    }
}

/// Answers that come together must not look like a rush, nor may three claims bring three times as much.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_jobs_are_not_hoarded() {
    let world = World::new();
    let gate = Gate::new();
    world.fault("exchange", Fault::Slow(Duration::from_millis(4)), usize::MAX);
    let _host = world.host(config_of(6, 3), vec![offer("slow", plain(), gate.handler())]);
    let ids = world.add_many("slow", 36).await;
    for round in 1..=6 {
        world.until("six runs", || gate.came() == round * 6).await;
        // This is what a slow job is; nothing waits for it.
        tokio::time::sleep(Duration::from_millis(40)).await;
        gate.open(6);
    }
    world.all(&ids, State::Completed).await;
    // Six, and what ends within two exchanges: hardly more than one.
    assert!(world.most_outstanding() <= 8, "{} claimed at once", world.most_outstanding());
}

/// The end of a run that holds a key goes at once, although the exchange before it does not come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keyed_end_does_not_wait_for_the_batch_before_it() {
    let world = World::new();
    let (gate, keyed) = (Gate::new(), Gate::new());
    let _host = world.host(config_of(8, 2), vec![offer("a", plain(), gate.handler()), offer("k", mutex("k"), keyed.handler())]);
    let plain_ones = world.add_many("a", 6).await;
    let keyed_ones = world.add_many("k", 3).await;
    world.until("seven runs", || gate.came() == 6 && keyed.came() == 1).await;
    let answer = Arc::new(Semaphore::new(0));
    world.fault("ends", Fault::Held(answer.clone(), None), 1);
    gate.open(6);
    world.until("the batch", || world.count("ends") > 0).await;
    keyed.open(3);
    world.all(&keyed_ones, State::Completed).await;
    assert!(plain_ones.len() > world.look(|model| model.counters.get("stats:succeeded").copied().unwrap_or(0)) as usize - 3);
    answer.add_permits(1);
    world.all(&plain_ones, State::Completed).await;
}

/// A job that arrives while an exchange is on its way, and finds an idle worker, is claimed beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_worker_does_not_wait_for_somebody_elses_end() {
    let world = World::new();
    let gate = Gate::new();
    let _host = world.host(config_of(2, 2), vec![offer("a", plain(), gate.handler()), offer("b", plain(), no_op())]);
    let first = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    // Its end goes out and hangs.
    let answer = Arc::new(Semaphore::new(0));
    world.fault("ends", Fault::Held(answer.clone(), None), 1);
    gate.open(1);
    world.until("the end on its way", || world.count("ends") > 0).await;
    let second = world.add("b").await;
    tokio::time::timeout(Duration::from_secs(2), world.one(second, State::Completed)).await.expect("claimed beside it");
    answer.add_permits(1);
    world.one(first, State::Completed).await;
}

/// Sixteen workers with jobs of some milliseconds: ends go together, a few statements for every ten jobs at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_full_swing_ends_go_together() {
    let world = World::new();
    let ran = Arc::new(AtomicU32::new(0));
    let body = {
        let ran = ran.clone();
        code(move |_, _, _| {
            ran.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                done()
            }
        })
    };
    let host = world.host(config_of(16, 3), vec![offer("a", plain(), body)]);
    let ids = world.add_many("a", 1_500).await;
    world.all(&ids, State::Completed).await;
    let exchanges = host.numbers.report().exchanges;
    assert!(exchanges * 10 <= 1_500 * 3, "{exchanges} exchanges for 1,500 jobs");
}
