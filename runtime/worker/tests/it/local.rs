//! Local waiters (slots.md B8): a slot of a short job passes on inside its host.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::State;
use warp_pipeline::{Handler, StateOp, StateReply};
use warp_store::StoreErrorKind;
use warp_testkit::model::Place;

use crate::world::{Fault, Gate, World, code, config_of, done, limited, mutex, offer};

/// A mutex's handler that counts who is inside, keeps the fences in the order of the starts, and lets others in if it can.
#[derive(Clone, Default)]
struct Inside {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    fences: Arc<Mutex<Vec<u64>>>,
}

impl Inside {
    fn handler(&self) -> Arc<dyn Handler> {
        let inside = self.clone();
        code(move |attempt, _, _| {
            let inside = inside.clone();
            async move {
                let fence = attempt.fencing_token.and_then(|fence| fence.parse().ok());
                inside.fences.lock().unwrap().push(fence.expect("a keyed run has one"));
                inside.most.fetch_max(inside.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.now.fetch_sub(1, Ordering::SeqCst);
                done()
            }
        })
    }

    /// Nobody was beside another, and every start had a larger fence than the one before.
    fn assert_alone(&self, starts: usize) {
        assert_eq!(self.most.load(Ordering::SeqCst), 1, "two inside at once");
        let fences = self.fences.lock().unwrap();
        assert_eq!(fences.len(), starts);
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    }
}

/// How many ends each exchange brought that brought any.
fn batches(world: &World) -> Vec<usize> {
    let ends = world.history().into_iter().filter(|(call, ends)| *call == "exchange" && !ends.is_empty());
    ends.map(|(_, ends)| ends.len()).collect()
}

/// So many jobs of one key, enqueued before anybody looks.
async fn many(world: &World, count: usize) -> Vec<JobId> {
    world.add_many("a", count).await
}

/// Without local waiters every end goes alone: the slot is free only with the answer.
#[tokio::test]
async fn a_slot_passes_through_several_runs_before_anything_is_written() {
    let world = World::new();
    let inside = Inside::default();
    let ids = many(&world, 200).await;
    // A commit takes longer than a run.
    world.fault("exchange", Fault::Slow(Duration::from_millis(2)), usize::MAX);
    let _host = world.host(config_of(4, 2), vec![offer("a", mutex("k"), inside.handler())]);
    world.all(&ids, State::Completed).await;
    inside.assert_alone(200);
    let batches = batches(&world);
    assert!(batches.len() < 150 && batches.iter().any(|ends| *ends > 1), "one end each: {batches:?}");
    assert_eq!(world.look(|model| model.slots.len()), 0);
}

/// An answer is lost after the commit again and again; the batch goes again with what had passed in it.
#[tokio::test]
async fn lost_answers_neither_free_a_slot_twice_nor_keep_it() {
    let world = World::new();
    let inside = Inside::default();
    let _host = world.host(config_of(4, 3), vec![offer("a", mutex("k"), inside.handler())]);
    for kind in [StoreErrorKind::OutcomeUnknown, StoreErrorKind::Busy] {
        let fault = if kind == StoreErrorKind::Busy { Fault::Refused(kind) } else { Fault::ReplyLost(kind) };
        world.fault("ends", fault, 5);
        let ids = many(&world, 60).await;
        world.all(&ids, State::Completed).await;
        world.heal();
    }
    inside.assert_alone(120);
    assert_eq!(world.look(|model| model.slots.len()), 0);
}

/// Each run adds one to what it reads and writes that with its settle: the next must see it.
#[tokio::test]
async fn the_next_holder_sees_what_settles_with_the_one_before() {
    let world = World::new();
    let handler = code(|_, calls, _| async move {
        let read = calls.state("b", "n", StateOp::Get, false).await;
        let before = match read {
            Ok(StateReply::Value(value)) => value.and_then(|value| value.parse().ok()).unwrap_or(0u32),
            other => panic!("{other:?}"),
        };
        calls.state("b", "n", StateOp::Put(Some((before + 1).to_string())), false).await.expect("kept for the settle");
        done()
    });
    let ids = many(&world, 100).await;
    let _host = world.host(config_of(4, 2), vec![offer("a", mutex("k"), handler)]);
    world.all(&ids, State::Completed).await;
    let sum = world.look(|model| model.state.get(&("b".to_owned(), "n".to_owned())).cloned());
    assert_eq!(sum.as_deref(), Some("100"));
}

/// Short runs have brought waiters, then a long one comes: they wait for a moment and stand in line again, uncharged.
#[tokio::test]
async fn whoever_waits_for_too_long_goes_back() {
    let world = World::new();
    let gate = Gate::new();
    let at_gate = gate.clone();
    let handler = code(move |attempt, _, _| {
        let gate = at_gate.clone();
        async move {
            if attempt.payload.contains("long") {
                gate.pass().await;
            }
            done()
        }
    });
    let mut ids = many(&world, 40).await;
    ids.push(world.enqueue(world.job("a", r#"{"long":1}"#)).await);
    let last = many(&world, 40).await;
    let host = world.host(config_of(4, 2), vec![offer("a", mutex("k"), handler)]);
    limited("the long one", async {
        while gate.came() == 0 {
            world.rounds().await;
        }
    })
    .await;
    let running = || world.look(|model| model.rows.values().filter(|row| row.place == Place::Running).count());
    world.jump(Duration::from_millis(30));
    world.until("only the long one is left running", || running() == 1).await;
    gate.open(1);
    world.all(&ids, State::Completed).await;
    world.all(&last, State::Completed).await;
    let attempts = world.look(|model| model.rows.values().map(|row| row.attempts).max());
    assert_eq!(attempts, Some(1), "waiting is not charged");
    drop(host);
}

/// What waits goes back at once, and nothing that has a slot keeps it.
#[tokio::test]
async fn a_host_that_stops_gives_its_waiters_back() {
    let world = World::new();
    let inside = Inside::default();
    let ids = many(&world, 300).await;
    let host = world.host(config_of(4, 2), vec![offer("a", mutex("k"), inside.handler())]);
    world.until("some are done", || world.look(|model| model.rows.values().filter(|row| row.place == Place::Completed).count()) > 50).await;
    let stopped = limited("the stop", host.end(warp_worker::StopLevel::Graceful)).await;
    assert_eq!((stopped.abandoned, stopped.deregistered), (0, true));
    let held = world.look(|model| model.slots.values().filter(|slot| slot.token.is_some()).count());
    let running = world.look(|model| model.rows.values().filter(|row| row.place == Place::Running).count());
    assert_eq!((held, running), (0, 0));
    let _host = world.host(config_of(4, 2), vec![offer("a", mutex("k"), inside.handler())]);
    world.all(&ids, State::Completed).await;
    inside.assert_alone(300);
}
