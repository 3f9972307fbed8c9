//! Shared state as a run sees it, and what its settle writes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use warp_domain::ending::State;
use warp_pipeline::{Handler, HostCalls, StateFault, StateOp, StateReply};
use warp_store::{StateChange, Store};
use warp_worker::{HostConfig, RunCaps};

use crate::world::{Fault, Gate, World, code, config, done, offer, plain, retry, retryable};

type Answer = Result<StateReply, StateFault>;

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

fn value(value: &str) -> Answer {
    Ok(StateReply::Value(text(value)))
}

const NOTHING: Answer = Ok(StateReply::Value(None));
const DIFFERS: Answer = Ok(StateReply::Differs);

fn put(value: &str) -> StateOp {
    StateOp::Put(text(value))
}

fn cas(expected: Option<&str>, value: Option<&str>) -> StateOp {
    StateOp::CompareAndSet { expected: expected.map(str::to_owned), value: value.map(str::to_owned) }
}

/// A handler that does these one by one and keeps the answers.
fn doing(ops: Vec<StateOp>, at_once: bool) -> (Arc<dyn Handler>, Arc<Mutex<Vec<Answer>>>) {
    let answers: Arc<Mutex<Vec<Answer>>> = Arc::default();
    let kept = answers.clone();
    let handler = code(move |_, calls, _| {
        let (ops, answers) = (ops.clone(), kept.clone());
        async move {
            for op in ops {
                let answer = calls.state("bucket", "key", op, at_once).await;
                answers.lock().unwrap().push(answer);
            }
            done()
        }
    });
    (handler, answers)
}

fn stored(world: &World) -> Option<String> {
    world.look(|model| model.state.get(&("bucket".to_owned(), "key".to_owned())).cloned())
}

/// What a run saw, what its settle was asked to do, and what is there afterwards.
async fn run(before: Option<&str>, ops: Vec<StateOp>, at_once: bool) -> (Vec<Answer>, Vec<StateChange>, Option<String>) {
    let world = World::new();
    let (prepare, _) = doing(vec![StateOp::Put(before.map(str::to_owned))], true);
    let (handler, answers) = doing(ops, at_once);
    let _host = world.host(config(1), vec![offer("prepare", plain(), prepare), offer("a", plain(), handler)]);
    let first = world.add("prepare").await;
    world.one(first, State::Completed).await;
    let id = world.add("a").await;
    world.one(id, State::Completed).await;
    let settle = world.history().into_iter().flat_map(|(_, settles)| settles).last().expect("it was settled");
    let changes = settle.state.into_iter().map(|write| write.change).collect();
    let answers = answers.lock().unwrap().clone();
    (answers, changes, stored(&world))
}

/// Every pair of operations on one value, and the texts that a number may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buffered_operations_read_their_own_writes_and_settle_as_one() {
    use StateChange::{Add, CompareAndSet, Put};
    let compare = |expected: Option<&str>, value: Option<&str>| CompareAndSet {
        expected: expected.map(str::to_owned),
        value: value.map(str::to_owned),
    };
    let not_a_number = || Err(StateFault::NotANumber("\"abc\" is not a decimal integer".to_owned()));
    let get = || StateOp::Get;
    let add = StateOp::Add;
    type Case<'a> = (Option<&'a str>, Vec<StateOp>, Vec<Answer>, Vec<StateChange>, Option<&'a str>);
    let cases: Vec<Case<'_>> = vec![
        (Some("1"), vec![get()], vec![value("1")], vec![], Some("1")),
        (None, vec![get(), put("x"), get()], vec![NOTHING, value("x"), value("x")], vec![Put(text("x"))], Some("x")),
        (Some("1"), vec![StateOp::Put(None), get()], vec![NOTHING, NOTHING], vec![Put(None)], None),
        (Some("1"), vec![put("2"), put("3")], vec![value("2"), value("3")], vec![Put(text("3"))], Some("3")),
        (Some("1"), vec![put("2"), add(5), get()], vec![value("2"), value("7"), value("7")], vec![Put(text("7"))], Some("7")),
        (Some("1"), vec![put("2"), cas(Some("2"), Some("9"))], vec![value("2"), value("9")], vec![Put(text("9"))], Some("9")),
        (Some("1"), vec![put("2"), cas(Some("1"), Some("9"))], vec![value("2"), DIFFERS], vec![Put(text("2"))], Some("2")),
        (Some("1"), vec![StateOp::Put(None), add(4)], vec![NOTHING, value("4")], vec![Put(text("4"))], Some("4")),
        (Some("1"), vec![cas(Some("1"), Some("2"))], vec![value("2")], vec![compare(Some("1"), Some("2"))], Some("2")),
        (Some("1"), vec![cas(Some("7"), Some("2"))], vec![DIFFERS], vec![], Some("1")),
        (None, vec![cas(None, Some("2"))], vec![value("2")], vec![compare(None, Some("2"))], Some("2")),
        (Some("1"), vec![cas(Some("1"), None), get()], vec![NOTHING, NOTHING], vec![compare(Some("1"), None)], None),
        (
            Some("1"),
            vec![cas(Some("1"), Some("2")), cas(Some("2"), Some("3"))],
            vec![value("2"), value("3")],
            vec![compare(Some("1"), Some("3"))],
            Some("3"),
        ),
        (Some("1"), vec![cas(Some("1"), Some("2")), add(5)], vec![value("2"), value("7")], vec![compare(Some("1"), Some("7"))], Some("7")),
        (
            Some("1"),
            vec![cas(Some("1"), Some("2")), put("9")],
            vec![value("2"), value("9")],
            vec![compare(Some("1"), Some("9"))],
            Some("9"),
        ),
        (Some("1"), vec![add(5), add(-2), get()], vec![value("6"), value("4"), value("4")], vec![Add(3)], Some("4")),
        (None, vec![add(5)], vec![value("5")], vec![Add(5)], Some("5")),
        (Some("1"), vec![add(5), put("9")], vec![value("6"), value("9")], vec![Put(text("9"))], Some("9")),
        (Some("1"), vec![add(5), cas(Some("6"), Some("9"))], vec![value("6"), value("9")], vec![compare(Some("1"), Some("9"))], Some("9")),
        (None, vec![add(5), cas(Some("5"), Some("9"))], vec![value("5"), value("9")], vec![compare(None, Some("9"))], Some("9")),
        (
            Some("007"),
            vec![add(1), cas(Some("8"), Some("9"))],
            vec![value("8"), value("9")],
            vec![compare(Some("007"), Some("9"))],
            Some("9"),
        ),
        (Some("abc"), vec![add(1), get()], vec![not_a_number(), value("abc")], vec![], Some("abc")),
        (Some("1"), vec![put("abc"), add(1), get()], vec![value("abc"), not_a_number(), value("abc")], vec![Put(text("abc"))], Some("abc")),
        (Some("1"), vec![add(i128::MAX)], vec![Err(StateFault::NotANumber("the sum exceeds 128 bits".to_owned()))], vec![], Some("1")),
    ];
    for (before, ops, answers, changes, after) in cases {
        let got = run(before, ops.clone(), false).await;
        assert_eq!(got, (answers, changes, after.map(str::to_owned)), "{before:?} {ops:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_at_once_are_there_at_once() {
    let ops = vec![put("1"), StateOp::Add(2), cas(Some("3"), Some("x")), cas(Some("3"), None), StateOp::Get, StateOp::Add(1)];
    let (answers, changes, after) = run(None, ops, true).await;
    let not_a_number = Err(StateFault::NotANumber("\"x\" is not a decimal integer".to_owned()));
    assert_eq!(answers, [value("1"), value("3"), value("x"), DIFFERS, value("x"), not_a_number]);
    assert_eq!((changes, after), (vec![], text("x")));
}

/// Buffered writes of an attempt that fails were never there; those at once stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_failed_attempt_buffered_is_gone() {
    let world = World::new();
    let failing = code(|_, calls, _| async move {
        calls.state("bucket", "key", put("buffered"), false).await.expect("granted");
        calls.state("bucket", "other", put("at once"), true).await.expect("granted");
        retryable("no")
    });
    let _host = world.host(config(1), vec![offer("a", plain(), failing)]);
    let id = world.add("a").await;
    world.one(id, State::Failed).await;
    assert_eq!(world.look(|model| model.state.values().cloned().collect::<Vec<_>>()), ["at once"]);
}

/// Somebody else writes between an attempt's comparison and its settle: it is charged, tried again, and nothing of
/// it is written; with no budget left it fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_comparison_that_no_longer_holds_at_the_settle_writes_nothing() {
    for (budget, expected) in [(1, State::Completed), (0, State::Failed)] {
        let world = World::new();
        let gate = Gate::new();
        let body = {
            let gate = gate.clone();
            code(move |attempt, calls, _| {
                let gate = gate.clone();
                async move {
                    let StateReply::Value(seen) = calls.state("bucket", "key", StateOp::Get, false).await.expect("granted") else {
                        unreachable!("a read")
                    };
                    let next = format!("{}+{}", seen.clone().unwrap_or_default(), attempt.run);
                    calls.state("bucket", "key", cas(seen.as_deref(), Some(&next)), false).await.expect("granted");
                    calls.state("bucket", "beside", put("written"), false).await.expect("granted");
                    calls.enqueue(crate::children::child("nobody's")).expect("acceptable");
                    gate.pass().await;
                    done()
                }
            })
        };
        let (between, _) = doing(vec![put("theirs")], true);
        let _host = world.host(config(2), vec![offer("a", retry(budget, Duration::ZERO), body), offer("between", plain(), between)]);
        let id = world.add("a").await;
        world.until("the run", || gate.came() == 1).await;
        let other = world.add("between").await;
        world.one(other, State::Completed).await;
        gate.open(2);
        world.one(id, expected).await;
        let details = world.details(id).await;
        let rows = world.look(|model| model.rows.len());
        if budget == 1 {
            assert_eq!((details.summary.attempts, stored(&world)), (2, text("theirs+2")));
            assert_eq!(rows, 3, "one child, of the attempt that completed");
        } else {
            assert_eq!((stored(&world), rows), (text("theirs"), 2));
            assert_eq!(world.look(|model| model.state.len()), 1);
            assert!(details.error.unwrap_or_default().contains("shared state changed"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_are_bounded_by_what_is_kept_not_by_how_often_it_was_written() {
    let world = World::new();
    let caps = RunCaps { state_bytes: 100, ..RunCaps::default() };
    let full = Err(StateFault::TooLarge("the attempt's buffered state writes exceed 100B".to_owned()));
    let large = Err(StateFault::TooLarge("the state write exceeds 100B".to_owned()));
    let body = code(move |_, calls, _| {
        let (full, large) = (full.clone(), large.clone());
        async move {
            // 6 + 3 + 50 bytes each.
            let fifty = "x".repeat(50);
            for _ in 0..10 {
                assert_eq!(calls.state("bucket", "one", put(&fifty), false).await, value(&fifty));
            }
            assert_eq!(calls.state("bucket", "two", put(&fifty), false).await, full);
            assert_eq!(calls.state("bucket", "two", put("y"), false).await, value("y"));
            assert_eq!(calls.state("bucket", "one", put(&"x".repeat(100)), false).await, full);
            assert_eq!(calls.state("bucket", "one", StateOp::Get, false).await, value(&fifty));
            assert_eq!(calls.state("bucket", "three", put(&"x".repeat(100)), true).await, large);
            done()
        }
    });
    let _host = world.host(HostConfig { caps, ..config(1) }, vec![offer("a", plain(), body)]);
    let id = world.add("a").await;
    world.until("the end", || world.look(|model| model.rows.values().all(|row| row.place.state().is_final()))).await;
    let details = world.details(id).await;
    assert_eq!(details.summary.state, State::Completed, "{:?}", details.error);
}

/// The lease has lapsed on the boot-time clock, and nobody has noticed yet but the call itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_once_the_lease_has_lapsed_or_the_run_is_over() {
    let world = World::new();
    let gate = Gate::new();
    let escaped: Arc<Mutex<Option<Arc<dyn HostCalls>>>> = Arc::default();
    let refusals: Arc<Mutex<Vec<String>>> = Arc::default();
    let body = {
        let (gate, escaped, refusals) = (gate.clone(), escaped.clone(), refusals.clone());
        code(move |attempt, calls, _| {
            let (gate, escaped, refusals) = (gate.clone(), escaped.clone(), refusals.clone());
            async move {
                *escaped.lock().unwrap() = Some(calls.clone());
                if attempt.run > 1 {
                    return done();
                }
                gate.pass().await;
                for at_once in [true, false] {
                    let refused = calls.state("bucket", "key", put("late"), at_once).await.expect_err("the lease has lapsed");
                    refusals.lock().unwrap().push(format!("{refused:?}"));
                }
                let refused = calls.enqueue(crate::children::child("a")).expect_err("the lease has lapsed");
                refusals.lock().unwrap().push(format!("{refused:?}"));
                retryable("lapsed")
            }
        })
    };
    let _host = world.host(config(1), vec![offer("a", retry(1, Duration::ZERO), body)]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    world.fault("renew", Fault::Refused(warp_store::StoreErrorKind::Unavailable), 1);
    world.jump(Duration::from_secs(13));
    gate.open(1);
    world.one(id, State::Completed).await;
    let refusals = refusals.lock().unwrap().clone();
    assert_eq!(refusals.len(), 3);
    assert!(refusals[..2].iter().all(|text| text.contains("lease has lapsed")), "{refusals:?}");
    assert_eq!(world.look(|model| (model.state.len(), model.rows.len())), (0, 1));
    // The second run has ended; its calls have outlived it.
    let calls = escaped.lock().unwrap().take().expect("it ran");
    let over = calls.state("bucket", "key", put("later"), true).await;
    assert_eq!(over, Err(StateFault::Unavailable("the run has ended".to_owned())));
    assert!(calls.enqueue(crate::children::child("a")).is_err());
    assert_eq!(world.store.state_get("bucket", "key").await.expect("read"), None);
}

/// The store says no: the handler hears it and may go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_is_an_answer() {
    let world = World::new();
    for call in ["state_get", "state_apply"] {
        world.fault(call, Fault::Refused(warp_store::StoreErrorKind::Unavailable), 1);
    }
    let (handler, answers) = doing(vec![StateOp::Get, StateOp::Get], false);
    let (at_once, answers_at_once) = doing(vec![put("1"), put("2")], true);
    let _host = world.host(config(1), vec![offer("a", plain(), handler), offer("b", plain(), at_once)]);
    let ids = [world.add("a").await, world.add("b").await];
    world.all(&ids, State::Completed).await;
    assert!(matches!(answers.lock().unwrap()[..], [Err(StateFault::Unavailable(_)), Ok(_)]));
    assert!(matches!(answers_at_once.lock().unwrap()[..], [Err(StateFault::Unavailable(_)), Ok(_)]));
}
