//! Cancelling: the run is told, has its grace, and is stopped; what was finished counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use warp_domain::ending::{Observed, Outcome, Said, State};
use warp_pipeline::{Handler, StopReason};
use warp_store::{CommandVerdict, Store};
use warp_worker::HostConfig;

use crate::world::{Fault, Gate, World, code, config, done, no_op, offer, plain, retry, retryable};

/// Ends like this as soon as it hears that it is cancelled.
fn ends(outcome: Outcome, seen: Gate) -> Arc<dyn Handler> {
    code(move |_, calls, stop| {
        let (outcome, seen) = (outcome.clone(), seen.clone());
        async move {
            assert!(!calls.cancelled());
            seen.open(1);
            seen.pass().await;
            while !calls.cancelled() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(stop.reason(), None, "the grace has only begun");
            outcome
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_hears_of_it_ends_as_it_likes() {
    let cases = [
        (done(), State::Completed),
        (retryable("stopped halfway"), State::Deleted),
        (Outcome::Said(Said::Snooze(Duration::ZERO)), State::Deleted),
        (Outcome::Observed(Observed::Trapped("boom".into())), State::Deleted),
        (Outcome::Observed(Observed::HandedBack("no room".into())), State::Deleted),
        (Outcome::Said(Said::Permanent("no such file".into())), State::Failed),
    ];
    for declared in [plain(), retry(3, Duration::ZERO)] {
        for (outcome, expected) in cases.clone() {
            let world = World::new();
            let seen = Gate::new();
            let _host = world.host(config(1), vec![offer("a", declared.clone(), ends(outcome.clone(), seen.clone()))]);
            let id = world.add("a").await;
            world.until("the run", || seen.came() == 1).await;
            assert_eq!(world.store.cancel(id, "ada", world.now()).await.expect("cancel"), CommandVerdict::Requested);
            world.until("the end", || world.look(|model| model.rows.values().all(|row| row.place.state().is_final()))).await;
            assert_eq!(world.state(id).await, expected, "{outcome:?}");
            assert_eq!(world.details(id).await.summary.runs, 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_ignores_it_is_stopped_after_the_grace() {
    let world = World::new();
    let gate = Gate::new();
    let deaf = {
        let gate = gate.clone();
        code(move |_, calls, stop| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                while !calls.cancelled() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                gate.pass().await;
                assert_eq!(stop.stopped().await, StopReason::Cancelled);
                Outcome::Observed(Observed::Cancelled)
            }
        })
    };
    gate.open(2);
    let host = world.host(
        HostConfig { cancel_grace: Duration::from_secs(600), lease: Duration::from_secs(6000), ..config(1) },
        vec![offer("a", plain(), deaf)],
    );
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    world.store.cancel(id, "ada", world.now()).await.expect("cancel");
    world.until("the signal", || gate.came() == 2).await;
    assert_eq!(world.state(id).await, State::Processing, "the grace is not over");
    world.jump(Duration::from_secs(601));
    world.one(id, State::Deleted).await;
    assert_eq!(world.details(id).await.audit.last().map(|row| row.message.clone()).as_deref(), Some("cancelled"));
    assert_eq!(host.numbers.report().late, 0);
}

/// A job that waits in the host's memory behind a busy worker is not begun any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_has_not_begun_never_begins() {
    let world = World::new();
    let (gate, begun) = (Gate::new(), Arc::new(AtomicU32::new(0)));
    let slow = {
        let (gate, begun) = (gate.clone(), begun.clone());
        code(move |_, _, _| {
            let (gate, begun) = (gate.clone(), begun.clone());
            async move {
                begun.fetch_add(1, Ordering::SeqCst);
                gate.pass().await;
                done()
            }
        })
    };
    let host = world.host(config(1), vec![offer("fast", plain(), no_op()), offer("slow", plain(), slow)]);
    world.fault("exchange", Fault::Slow(Duration::from_millis(2)), usize::MAX);
    let fast = world.add_many("fast", 300).await;
    world.all(&fast, State::Completed).await;
    let slow = world.add_many("slow", 20).await;
    world.until("a prefetched job", || host.numbers.report().running > 1 && gate.came() == 1).await;
    let queued = world.look(|model| {
        let waiting = slow.iter().skip(1).copied();
        let running = |id: &warp_domain::JobId| model.handle(*id).is_some_and(|job| model.rows[&job].place.state() == State::Processing);
        waiting.filter(running).collect::<Vec<_>>()
    });
    assert!(!queued.is_empty());
    for id in &queued {
        assert_eq!(world.store.cancel(*id, "ada", world.now()).await.expect("cancel"), CommandVerdict::Requested);
    }
    let asked = world.count("signals");
    world.until("the signal", || world.count("signals") >= asked + 2).await;
    gate.open(20);
    world.all(&queued, State::Deleted).await;
    world.until("the others", || world.look(|model| model.rows.values().all(|row| row.place.state().is_final()))).await;
    assert_eq!(begun.load(Ordering::SeqCst) as usize, 20 - queued.len());
}
