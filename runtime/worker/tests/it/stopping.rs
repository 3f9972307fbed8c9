//! Ending a host: gracefully, at once, without a store, without a registration, and by dropping it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use warp_domain::JobId;
use warp_domain::ending::{Ending, Observed, Outcome, State};
use warp_pipeline::{Handler, StopReason};
use warp_store::StoreErrorKind;
use warp_worker::{Condition, HostConfig, StopLevel, Stopped};

use crate::world::{Fault, Gate, World, code, config, done, no_op, offer, plain};

/// Waits at the gate; given back if it is stopped before.
fn patient(gate: &Gate) -> Arc<dyn Handler> {
    let gate = gate.clone();
    code(move |_, _, stop| {
        let gate = gate.clone();
        async move {
            tokio::select! {
                () = gate.pass() => done(),
                reason = stop.stopped() => {
                    assert_eq!(reason, StopReason::HandBack);
                    Outcome::Observed(Observed::HandedBack("stopped".into()))
                }
            }
        }
    })
}

/// Never ends, whatever it is told.
fn deaf(gate: &Gate) -> Arc<dyn Handler> {
    let gate = gate.clone();
    code(move |_, _, _| {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            std::future::pending().await
        }
    })
}

fn uncharged(world: &World, id: JobId) -> bool {
    world.look(|model| {
        let row = &model.rows[&model.handle(id).expect("it is there")];
        row.place.state() == State::Enqueued && row.attempts == 0 && row.runs == 1
    })
}

/// The settles of this job that were taken, in order.
fn endings(world: &World, id: JobId) -> Vec<Ending> {
    let handle = world.look(|model| model.handle(id)).expect("it is there");
    let settles = world.history().into_iter().flat_map(|(_, settles)| settles);
    settles.filter(|settle| settle.handle == handle).map(|settle| settle.ending).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_gives_back_what_has_not_begun_and_waits_for_what_has() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(config(2), vec![offer("fast", plain(), no_op()), offer("slow", plain(), patient(&gate))]);
    world.fault("exchange", Fault::Slow(Duration::from_millis(2)), usize::MAX);
    let fast = world.add_many("fast", 300).await;
    world.all(&fast, State::Completed).await;
    let slow = world.add_many("slow", 20).await;
    world.until("prefetched jobs", || host.numbers.report().running > 2 && gate.came() == 2).await;
    let claimed: Vec<_> = world.look(|model| {
        let running = |id: &&JobId| model.rows[&model.handle(**id).expect("it is there")].place.state() == State::Processing;
        slow.iter().filter(running).copied().collect()
    });
    let task = tokio::spawn(host.end(StopLevel::Graceful));
    // The first two run; whatever was claimed beyond them goes back now, although nobody has ended.
    world.until("the queued ones back", || claimed[2..].iter().all(|id| uncharged(&world, *id))).await;
    assert!(!task.is_finished());
    assert_eq!(gate.came(), 2);
    gate.open(2);
    assert_eq!(task.await.expect("no panic"), Stopped { abandoned: 0, deregistered: true });
    world.all(&claimed[..2], State::Completed).await;
    assert_eq!(world.look(|model| model.hosts.len()), 0);
    assert!(matches!(endings(&world, claimed[2])[..], [Ending::HandBack { .. }]), "given back by itself, not by the farewell");
}

/// The claim was sent before the stop and is answered after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_late_answer_brings_is_not_begun_any_more() {
    let world = World::new();
    let gate = Gate::new();
    let answer = Arc::new(Semaphore::new(0));
    let id = world.add("a").await;
    world.fault("exchange", Fault::AnswerHeld(answer.clone()), 1);
    let host = world.host(config(2), vec![offer("a", plain(), patient(&gate))]);
    world.one(id, State::Processing).await;
    host.stop.send(StopLevel::Graceful).expect("it lives");
    world.rounds().await;
    answer.add_permits(1);
    assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    assert_eq!(gate.came(), 0, "it was begun");
    assert!(uncharged(&world, id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_outlasts_the_grace_is_stopped_and_given_back() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(HostConfig { stop_grace: Duration::from_millis(30), ..config(2) }, vec![offer("a", plain(), patient(&gate))]);
    let ids = world.add_many("a", 2).await;
    world.until("both", || gate.came() == 2).await;
    assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    for id in ids {
        assert!(uncharged(&world, id));
        assert!(matches!(endings(&world, id)[..], [Ending::HandBack { .. }]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ignores_its_stop_does_not_hold_up_the_end() {
    let world = World::new();
    let gate = Gate::new();
    gate.open(1);
    let long = HostConfig { stop_grace: Duration::from_secs(1), lease: Duration::from_secs(600), ..config(1) };
    let host = world.host(long, vec![offer("a", plain(), deaf(&gate))]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    host.stop.send(StopLevel::Graceful).expect("it lives");
    let task = tokio::spawn(host.end(StopLevel::Graceful));
    // Until it has noticed the stop, the jump is no part of the grace.
    while !task.is_finished() {
        world.jump(Duration::from_secs(7));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(task.await.expect("no panic"), Stopped { abandoned: 1, deregistered: true });
    assert!(uncharged(&world, id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_at_once_is_one_statement() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(config(2), vec![offer("a", plain(), patient(&gate))]);
    let ids = world.add_many("a", 2).await;
    world.until("both", || gate.came() == 2).await;
    let before = world.history().len();
    assert_eq!(host.end(StopLevel::Now).await, Stopped { abandoned: 2, deregistered: true });
    // A claim or a tick may have been under way; ends would be further statements.
    let counts = |(call, ends): &&(&str, Vec<_>)| !matches!(*call, "signals" | "renew") && !(*call == "exchange" && ends.is_empty());
    let after: Vec<_> = world.history()[before..].iter().filter(counts).map(|(call, _)| *call).collect();
    assert_eq!(after, ["deregister"]);
    assert!(ids.iter().all(|id| uncharged(&world, *id)));
}

/// Whoever held the other end is gone: so is the host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_nobody_can_stop_ends() {
    let world = World::new();
    let host = world.host(config(1), vec![offer("a", plain(), no_op())]);
    let id = world.add("a").await;
    world.one(id, State::Completed).await;
    drop(host.stop);
    let stopped = crate::world::limited("the end", host.task).await.expect("no panic").expect("registered");
    assert!(stopped.deregistered);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_does_not_hold_up_the_end_for_ever() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(HostConfig { stop_grace: Duration::from_millis(20), ..config(1) }, vec![offer("a", plain(), patient(&gate))]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    for call in ["exchange", "renew", "deregister"] {
        world.fault(call, Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    }
    let task = tokio::spawn(host.end(StopLevel::Graceful));
    while !task.is_finished() {
        world.jump(Duration::from_secs(2));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(task.await.expect("no panic"), Stopped { abandoned: 0, deregistered: false });
    // Somebody else takes over.
    world.heal();
    let _other = world.host(config(1), vec![offer("a", plain(), no_op())]);
    rescued(&world, &[id]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_was_taken_for_dead_can_still_be_stopped() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(HostConfig { renew_every: Duration::from_millis(20), ..config(1) }, vec![offer("a", plain(), patient(&gate))]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    // From here on it cannot get a registration back.
    world.fault("register", Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    take_for_dead(&world).await;
    world.until("an attempt to register", || world.count("register") >= 2).await;
    assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    assert!(uncharged(&world, id));
}

/// Whoever routes work to it must know, from the moment on that it is told to stop or cannot claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_says_whether_it_can_claim() {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(HostConfig { renew_every: Duration::from_millis(20), ..config(1) }, vec![offer("a", plain(), patient(&gate))]);
    let is = |condition| host.numbers.condition() == condition;
    world.until("the registration", || is(Condition::Good)).await;
    world.fault("renew", Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    world.jump(Duration::from_secs(60));
    assert_eq!(host.numbers.condition(), Condition::Lapsed, "before it has noticed itself");
    world.heal_only("renew");
    world.until("a renewal", || is(Condition::Good)).await;
    world.fault("register", Fault::Refused(StoreErrorKind::Unavailable), usize::MAX);
    take_for_dead(&world).await;
    world.until("an attempt to register anew", || world.count("register") >= 2).await;
    assert_eq!(host.numbers.condition(), Condition::Unregistered);
    world.heal_only("register");
    world.until("a new registration", || is(Condition::Good)).await;
    world.add("a").await;
    world.until("a run", || gate.came() == 1).await;
    host.stop.send(StopLevel::Graceful).expect("it lives");
    assert_eq!(host.numbers.condition(), Condition::Stopping);
    gate.open(1);
    let numbers = host.numbers.clone();
    host.end(StopLevel::Graceful).await;
    assert_eq!(numbers.condition(), Condition::Stopping);
}

/// It hears of it in the middle of its grace: there is nothing left to write and nobody to take leave of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_taken_for_dead_while_it_stops_ends_at_once() {
    let world = World::new();
    let gate = Gate::new();
    let hour = Duration::from_secs(3600);
    let host = world.host(
        HostConfig { renew_every: Duration::from_millis(20), stop_grace: hour, ..config(1) },
        vec![offer("a", plain(), patient(&gate))],
    );
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    host.stop.send(StopLevel::Graceful).expect("it lives");
    world.rounds().await;
    take_for_dead(&world).await;
    assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    assert!(uncharged(&world, id));
    assert_eq!(world.count("register"), 1);
}

/// Rescues every host as if it had been seen standing still for a lease.
pub async fn take_for_dead(world: &World) {
    let hosts = world.look(|model| model.hosts.iter().map(|(host, row)| (*host, row.renewals)).collect::<Vec<_>>());
    for (host, renewals) in hosts {
        let mut renewals = renewals;
        while world.look(|model| model.hosts.contains_key(&host)) {
            // It may have renewed in between.
            warp_store::Store::rescue(&*world.store, host, renewals, 5, world.now()).await.expect("rescue");
            renewals = world.look(|model| model.hosts.get(&host).map_or(0, |row| row.renewals));
        }
    }
}

/// Lets time pass until the host that is left has rescued and completed these.
pub async fn rescued(world: &World, ids: &[JobId]) {
    let open =
        || world.look(|model| ids.iter().any(|id| model.rows[&model.handle(*id).expect("it is there")].place.state() != State::Completed));
    crate::world::limited("the rescue", async {
        while open() {
            world.jump(Duration::from_secs(2));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Wherever the loop is dropped, nothing of it begins afterwards, and a rescue finds every job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_loop_leaves_everything_to_a_rescue() {
    for calls in 1..25 {
        let world = World::new();
        let begun = Arc::new(AtomicU32::new(0));
        let body = {
            let begun = begun.clone();
            code(move |_, _, _| {
                begun.fetch_add(1, Ordering::SeqCst);
                async {
                    tokio::task::yield_now().await;
                    done()
                }
            })
        };
        let ids = world.add_many("a", 60).await;
        let host = world.host(config(3), vec![offer("a", plain(), body)]);
        world.until("so many calls", || world.calls() > calls).await;
        host.task.abort();
        let _ = host.task.await;
        // Workers, listeners and runs all share the clock, and whoever reads the age of the lease.
        drop(host.numbers);
        world.until("the end of all that belonged to it", || Arc::strong_count(&world.clock) == 1).await;
        let after = begun.load(Ordering::SeqCst);
        let _other = world.host(config(3), vec![offer("a", plain(), no_op())]);
        rescued(&world, &ids).await;
        assert_eq!(begun.load(Ordering::SeqCst), after, "workers went on after the loop was dropped");
        assert_eq!(world.look(|model| model.rows.values().filter(|row| row.attempts != 1).count()), 0, "a rescue charges nothing");
    }
}
