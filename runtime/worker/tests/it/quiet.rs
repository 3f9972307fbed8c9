//! Nothing to do costs next to nothing: calls of the store are counted, and so is every look at the clock, which the
//! loop has in each of its rounds. The spans are real, the bounds generous: a loop that spins makes thousands.

use std::sync::atomic::Ordering;
use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::policy::TimeoutMode;
use warp_store::StoreErrorKind;
use warp_worker::{HostConfig, StopLevel};

use crate::stopping::take_for_dead;
use crate::world::{Fault, Gate, World, config, no_op, offer, plain, timeout};

const SPAN: Duration = Duration::from_secs(2);

/// Calls of the store and looks at the clock within the span.
async fn measured(world: &World) -> (usize, u64) {
    let (calls, asked) = (world.calls(), world.clock.asked.load(Ordering::Relaxed));
    tokio::time::sleep(SPAN).await;
    (world.calls() - calls, world.clock.asked.load(Ordering::Relaxed) - asked)
}

fn assert_quiet((calls, asked): (usize, u64), most_calls: usize) {
    assert!(calls <= most_calls, "{calls} calls of the store in {SPAN:?}");
    assert!(asked <= 200, "{asked} looks at the clock in {SPAN:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_host_is_quiet() {
    let world = World::new();
    let _host = world.host(HostConfig::new("host", 4), vec![offer("a", plain(), no_op())]);
    let ids = world.add_many("a", 50).await;
    world.all(&ids, State::Completed).await;
    assert_quiet(measured(&world).await, 4);
}

/// The tick: what is due at regular times is one call, and a look for work every so often is another. A host that
/// renews every five seconds and polls every twenty stays far below a statement in two seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_host_renews_and_polls_and_nothing_else() {
    let world = World::new();
    let (renew_every, poll_every) = (Duration::from_millis(100), Some(Duration::from_millis(400)));
    let config = HostConfig { renew_every, poll_every, exchanges: Some(3), ..HostConfig::new("host", 4) };
    let _host = world.host(config, vec![offer("a", plain(), no_op())]);
    let ids = world.add_many("a", 50).await;
    world.all(&ids, State::Completed).await;
    world.rounds().await;
    let (before, calls) = (world.history().len(), world.calls());
    tokio::time::sleep(SPAN).await;
    let made: Vec<_> = world.history()[before..].iter().map(|(call, _)| *call).collect();
    let count = |which: &str| made.iter().filter(|call| **call == which).count();
    assert_eq!(count("renew") + count("exchange"), made.len(), "{made:?}");
    assert!((10..=21).contains(&count("renew")) && (2..=7).contains(&count("exchange")), "{made:?}");
    assert!(world.calls() - calls <= made.len() + 1, "calls that failed");
}

/// Two hosts, and jobs that neither runs, are due later, or wait for a key: nobody wakes the other for nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_with_nothing_that_they_can_run_are_quiet() {
    let world = World::new();
    let _one = world.host(HostConfig::new("one", 4), vec![offer("a", plain(), no_op())]);
    let _two = world.host(HostConfig::new("two", 4), vec![offer("b", plain(), no_op())]);
    world.add_many("nobody's", 10).await;
    let mut later = world.job("a", "{}");
    later.due = Some(world.now().after(Duration::from_secs(3600)));
    world.enqueue(later).await;
    world.until("both", || world.look(|model| model.is_served("a") && model.is_served("b"))).await;
    assert_quiet(measured(&world).await, 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_whose_runs_wait_is_quiet() {
    let world = World::new();
    let gate = Gate::new();
    let limit = Duration::from_secs(3600);
    let _host = world.host(HostConfig::new("host", 2), vec![offer("a", timeout(limit, TimeoutMode::Fail), gate.handler())]);
    world.add_many("a", 6).await;
    world.until("two runs", || gate.came() == 2).await;
    assert_quiet(measured(&world).await, 12);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_without_its_store_is_quiet() {
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::OutcomeUnknown] {
        let world = World::new();
        let gate = Gate::new();
        let host = world.host(HostConfig::new("host", 2), vec![offer("a", plain(), gate.handler())]);
        world.add_many("a", 2).await;
        world.until("two runs", || gate.came() == 2).await;
        for call in ["exchange", "renew", "serve", "hosts", "expire_reservations", "prune", "signals", "register", "deregister"] {
            world.fault(call, Fault::Refused(kind), usize::MAX);
        }
        // One run has ended and cannot be settled, one goes on, and the offers have changed.
        gate.open(1);
        host.offer(vec![offer("b", plain(), no_op())]);
        assert_quiet(measured(&world).await, 40);
        // And while it stops.
        host.stop.send(StopLevel::Graceful).expect("it lives");
        assert_quiet(measured(&world).await, 40);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_can_neither_claim_nor_register_is_quiet() {
    let world = World::new();
    for call in ["exchange", "serve"] {
        world.fault(call, Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    }
    let _host = world.host(HostConfig { renew_every: Duration::from_millis(500), ..config(1) }, vec![offer("a", plain(), no_op())]);
    assert_quiet(measured(&world).await, 40);
    world.heal();
    for call in ["register", "hosts"] {
        world.fault(call, Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    }
    take_for_dead(&world).await;
    world.until("an attempt", || world.count("register") >= 2).await;
    assert_quiet(measured(&world).await, 30);
    world.heal();
    let id = world.add("a").await;
    world.one(id, State::Completed).await;
}
