//! A guest that does not end by itself ends when it is told to, whatever it is doing, and hurts nobody beside it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use warp_domain::ending::{Observed, Outcome, Said};
use warp_pipeline::{StopReason, StopSignal};
use warp_plugin_host::{Caps, EngineConfig, Permissions, Runnable};

use crate::guests::{Recorder, attempt, engine, hostile, new_engine, run, run_with, runnable_on};

/// Not a measurement: the promise is 50 ms, and a test that waits longer than this would hang for ever.
const HANGS: Duration = Duration::from_secs(20);

fn start(runnable: &Arc<Runnable>, payload: &str) -> (Arc<StopSignal>, Arc<Recorder>, tokio::task::JoinHandle<Outcome>) {
    let (stop, recorder) = (Arc::<StopSignal>::default(), Arc::<Recorder>::default());
    let task = tokio::spawn({
        let (runnable, stop, recorder, payload) = (Arc::clone(runnable), Arc::clone(&stop), Arc::clone(&recorder), payload.to_owned());
        async move { run_with(&runnable, &payload, &recorder, &stop).await.0 }
    });
    (stop, recorder, task)
}

async fn ends(task: tokio::task::JoinHandle<Outcome>) -> Outcome {
    tokio::time::timeout(HANGS, task).await.expect("the guest goes on after its stop").expect("no panic")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spinning_guest_and_one_in_a_host_call_end_with_the_reason_of_the_stop() {
    let hostile = hostile().await;
    for payload in ["print-then-spin ready", "busy-calls"] {
        let (stop, recorder, task) = start(&hostile, payload);
        recorder.heard.notified().await;
        stop.stop(StopReason::TimedOut);
        assert_eq!(ends(task).await, Outcome::Observed(Observed::TimedOut(Duration::from_millis(1234))), "{payload}");
    }
    let (stop, _, task) = start(&hostile, "sleep 4000000");
    stop.stop(StopReason::Cancelled);
    assert_eq!(ends(task).await, Outcome::Observed(Observed::Cancelled));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_component_that_spins_in_its_start_code_ends_too() {
    let never = runnable_on(&engine(), "spinning_start", Permissions::default(), Caps::default()).await;
    let (stop, _, task) = start(&never, "ok");
    // Nothing can be heard from start code, so the ticks that it has seen are its only sign of life.
    tokio::time::timeout(Duration::from_millis(100), std::future::pending::<()>()).await.expect_err("pending");
    assert!(!task.is_finished());
    stop.stop(StopReason::HandBack);
    assert!(matches!(ends(task).await, Outcome::Observed(Observed::HandedBack(_))));
}

/// With one thread, the guest holds what everybody else needs, and gives it back only at its ticks. It was checked
/// by hand that this passes with either layer alone: the guest that yields, and the guest that asks and traps.
#[tokio::test(flavor = "current_thread")]
async fn a_spinning_guest_is_stopped_from_another_thread_while_it_holds_the_only_one() {
    let hostile = hostile().await;
    let (stop, recorder) = (Arc::<StopSignal>::default(), Arc::<Recorder>::default());
    let stopper = {
        let (stop, recorder) = (Arc::clone(&stop), Arc::clone(&recorder));
        std::thread::spawn(move || {
            while recorder.lines.lock().expect("no panic").is_empty() {
                std::thread::yield_now();
            }
            stop.stop(StopReason::TimedOut);
        })
    };
    let outcome = run_with(&hostile, "print-then-spin ready", &recorder, &stop).await.0;
    stopper.join().expect("no panic");
    assert_eq!(outcome, Outcome::Observed(Observed::TimedOut(Duration::from_millis(1234))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_timeout_of_one_guest_leaves_its_neighbours_alone() {
    let hostile = hostile().await;
    let spinners: Vec<_> = (0..4).map(|_| start(&hostile, "print-then-spin ready")).collect();
    for (_, recorder, _) in &spinners {
        recorder.heard.notified().await;
    }
    let (neighbour_stop, neighbour, waiting) = start(&hostile, "until-cancelled");
    for (stop, _, _) in &spinners {
        let (outcome, ..) = run(&hostile, "echo beside them").await;
        assert_eq!(outcome, Outcome::Said(Said::Completed(Some("beside them".to_owned()))));
        stop.stop(StopReason::TimedOut);
    }
    for (_, _, task) in spinners {
        assert!(matches!(ends(task).await, Outcome::Observed(Observed::TimedOut(_))));
    }
    assert!(!waiting.is_finished());
    neighbour.cancelled.store(true, Ordering::Release);
    assert_eq!(ends(waiting).await, Outcome::Said(Said::Completed(Some("stopped on request".to_owned()))));
    assert_eq!(neighbour_stop.reason(), None);
}

/// After any number of guests that were stopped by force, every place is free and a new guest runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_engine_hands_back_and_a_stopped_guest_frees_its_place() {
    for pooling in [true, false] {
        let engine = new_engine(&EngineConfig { slots: 2, pooling, ..EngineConfig::default() });
        assert_eq!(engine.info().pooling, pooling);
        let caps = Caps { admission: Duration::from_millis(5), ..Caps::default() };
        let hostile = runnable_on(&engine, "hostile", Permissions::default(), caps).await;
        let held: Vec<_> = (0..2).map(|_| start(&hostile, "print-then-spin ready")).collect();
        for (_, recorder, _) in &held {
            recorder.heard.notified().await;
        }
        let Outcome::Observed(Observed::HandedBack(why)) = run(&hostile, "ok").await.0 else { panic!("there is no place") };
        assert!(why.contains("all 2 are taken"), "{why}");
        for (stop, _, task) in held {
            stop.stop(StopReason::TimedOut);
            ends(task).await;
        }
        assert_eq!(engine.free_slots(), 2);
        assert_eq!(run(&hostile, "ok").await.0, Outcome::Said(Said::Completed(None)));
    }
}

#[tokio::test]
async fn a_stop_before_the_start_charges_nothing_but_a_cancel_is_a_cancel() {
    let hostile = hostile().await;
    for (reason, expected) in [
        (StopReason::TimedOut, Observed::HandedBack("its time ran out while it waited for a place in the engine".to_owned())),
        (StopReason::Cancelled, Observed::Cancelled),
        (StopReason::HandBack, Observed::HandedBack("the host stopped the run before it started".to_owned())),
    ] {
        let stop = Arc::<StopSignal>::default();
        stop.stop(reason);
        assert_eq!(run_with(&hostile, "spin", &Arc::default(), &stop).await.0, Outcome::Observed(expected));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_run_frees_its_place() {
    let engine = new_engine(&EngineConfig { slots: 1, pooling: true, ..EngineConfig::default() });
    let hostile = runnable_on(&engine, "hostile", Permissions::default(), Caps::default()).await;
    let recorder = Arc::<Recorder>::default();
    let running = hostile.run(attempt("print-then-spin ready"), recorder.clone(), Arc::default());
    tokio::select! {
        _ = running => panic!("it spins for ever"),
        () = recorder.heard.notified() => {}
    }
    assert_eq!(run(&hostile, "ok").await.0, Outcome::Said(Said::Completed(None)));
}
