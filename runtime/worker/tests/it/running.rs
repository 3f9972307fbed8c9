//! Jobs run to their end, each under its own policy, and no run disturbs another.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use warp_domain::ending::{Observed, Outcome, State};
use warp_domain::policy::TimeoutMode;
use warp_pipeline::StopReason;
use warp_worker::{HostConfig, StopLevel, Stopped};

use crate::world::{Fault, Gate, World, code, config, done, mutex, no_op, offer, offer_of, plain, result, retry, timeout};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_run_to_their_end_with_their_results() {
    let world = World::new();
    let echo = code(|attempt, _, _| async move { result(format!("{} {} {}", attempt.payload, attempt.run, attempt.attempt)) });
    let host = world.host(config(3), vec![offer("echo", plain(), echo)]);
    let mut ids = Vec::new();
    for number in 0..20 {
        ids.push(world.enqueue(world.job("echo", &number.to_string())).await);
    }
    world.all(&ids, State::Completed).await;
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(world.details(*id).await.result, Some(format!("{number} 1 1")));
        assert_eq!(world.events(*id).await, ["Created", "Processing", "Completed"]);
    }
    let numbers = host.numbers.clone();
    assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    let report = numbers.report();
    assert_eq!((report.claimed, report.settled, report.running, report.late, report.unknown_rows), (20, 20, 0, 0, 0));
    assert_eq!(world.look(|model| model.hosts.len()), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_workers_count_as_one() {
    let world = World::new();
    let _host = world.host(config(0), vec![offer("a", plain(), no_op())]);
    let ids = world.add_many("a", 3).await;
    world.all(&ids, State::Completed).await;
    assert_eq!(world.most_outstanding(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_at_a_time_for_each_key_and_several_keys_at_once() {
    let world = World::new();
    let running: Arc<[AtomicI32; 4]> = Arc::default();
    let (most_of_a_key, all, most) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicI32::new(0)), Arc::new(AtomicI32::new(0)));
    let tokens: Arc<Mutex<Vec<Vec<i64>>>> = Arc::new(Mutex::new(vec![Vec::new(); 4]));
    let body = {
        let (most_of_a_key, most, tokens) = (most_of_a_key.clone(), most.clone(), tokens.clone());
        code(move |attempt, calls, _| {
            let (running, most_of_a_key, all, most, tokens) =
                (running.clone(), most_of_a_key.clone(), all.clone(), most.clone(), tokens.clone());
            async move {
                assert!(calls.holds_slot());
                let digits: String = attempt.payload.chars().filter(char::is_ascii_digit).collect();
                let key: usize = digits.parse().expect("one digit");
                most_of_a_key.fetch_max(running[key].fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                most.fetch_max(all.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let token = attempt.fencing_token.expect("a keyed job has one").parse().expect("decimal text");
                tokens.lock().unwrap()[key].push(token);
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                all.fetch_sub(1, Ordering::SeqCst);
                running[key].fetch_sub(1, Ordering::SeqCst);
                done()
            }
        })
    };
    let jobs: Vec<_> = (0..100).map(|number| world.job("a", &format!("{{\"key\":{}}}", number % 4))).collect();
    let ids: Vec<_> = jobs.iter().map(|job| job.id).collect();
    warp_store::Store::enqueue(&*world.store, jobs, world.now()).await.expect("enqueue");
    let _host = world.host(config(16), vec![offer("a", mutex("k:{key}"), body)]);
    world.all(&ids, State::Completed).await;
    assert_eq!(most_of_a_key.load(Ordering::SeqCst), 1);
    assert!(most.load(Ordering::SeqCst) > 1, "the keys did not run beside each other");
    for tokens in &*tokens.lock().unwrap() {
        assert!(tokens.len() == 25 && tokens.is_sorted(), "fencing tokens grow: {tokens:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_ends_its_own_attempt_only() {
    let world = World::new();
    let later = code(|_, _, _| async {
        tokio::task::yield_now().await;
        panic!("boom after a wait")
    });
    let at_once = code(|_, _, _| -> std::future::Ready<Outcome> { panic!("boom before a future") });
    let host =
        world.host(config(1), vec![offer("later", plain(), later), offer("at-once", plain(), at_once), offer("fine", plain(), no_op())]);
    let (a, b) = (world.add("later").await, world.add("at-once").await);
    let fine = world.add_many("fine", 5).await;
    world.all(&[a, b], State::Failed).await;
    world.all(&fine, State::Completed).await;
    for (id, text) in [(a, "boom after a wait"), (b, "boom before a future")] {
        let error = world.details(id).await.error.unwrap_or_default();
        assert!(error.contains("panicked") && error.contains(text), "{error}");
    }
    assert!(!host.task.is_finished());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_stops_the_run_and_the_stamp_decides_what_follows() {
    let world = World::new();
    let limit = Duration::from_millis(40);
    let slow_once = || {
        code(move |attempt, _, stop| async move {
            assert_eq!(attempt.time_left, Some(limit));
            if attempt.attempt > 1 {
                return done();
            }
            assert_eq!(stop.stopped().await, StopReason::TimedOut);
            Outcome::Observed(Observed::TimedOut(limit))
        })
    };
    let retried = warp_domain::policy::Declared { retry: retry(1, Duration::ZERO).retry, ..timeout(limit, TimeoutMode::Fail) };
    let _host = world.host(
        config(2),
        vec![
            offer("retried", retried, slow_once()),
            offer("failed", timeout(limit, TimeoutMode::Fail), slow_once()),
            offer("deleted", timeout(limit, TimeoutMode::Delete), slow_once()),
        ],
    );
    let (a, b, c) = (world.add("retried").await, world.add("failed").await, world.add("deleted").await);
    world.one(a, State::Completed).await;
    world.one(b, State::Failed).await;
    world.one(c, State::Deleted).await;
    let details = world.details(a).await;
    assert_eq!((details.summary.runs, details.summary.attempts), (2, 2));
    assert_eq!(world.details(b).await.error.as_deref(), Some("timed out after 40ms"));
}

/// A run that begins while nobody looks at it is stopped when its own time is over, not a second later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_without_end_and_one_beside_it() {
    let world = World::new();
    let gate = Gate::new();
    let stopped = code(|_, _, stop| async move {
        stop.stopped().await;
        Outcome::Observed(Observed::TimedOut(Duration::from_millis(30)))
    });
    let declared = timeout(Duration::MAX, TimeoutMode::Fail);
    let _host = world.host(
        config(2),
        vec![offer("endless", declared, gate.handler()), offer("short", timeout(Duration::from_millis(30), TimeoutMode::Fail), stopped)],
    );
    let endless = world.add("endless").await;
    world.until("a run", || gate.came() == 1).await;
    let short = world.add("short").await;
    world.one(short, State::Failed).await;
    gate.open(1);
    world.one(endless, State::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_serves_new_jobs_and_lets_runs_end_on_their_version() {
    let world = World::new();
    let gate = Gate::new();
    let old = {
        let gate = gate.clone();
        code(move |_, _, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                result("old")
            }
        })
    };
    let host = world.host(config(2), vec![offer_of("a", 1, plain(), old), offer("gone", plain(), no_op())]);
    let first = world.add("a").await;
    world.until("a run", || gate.came() == 1).await;
    host.offer(vec![offer_of("a", 2, plain(), code(|_, _, _| async { result("new") })), offer("b", plain(), no_op())]);
    let served = || world.look(|model| model.is_served("b") && !model.is_served("gone"));
    world.until("the new offers", served).await;
    // A claim that was under way may still bring the old version; the one after it does not.
    let before = host.numbers.report().exchanges;
    let asked_anew = || {
        world.nudge();
        host.numbers.report().exchanges >= before + 2
    };
    world.until("claims for the new offers", asked_anew).await;
    let (second, other, gone) = (world.add("a").await, world.add("b").await, world.add("gone").await);
    world.all(&[second, other], State::Completed).await;
    gate.open(1);
    world.one(first, State::Completed).await;
    assert_eq!(world.details(first).await.result.as_deref(), Some("old"));
    assert_eq!(world.details(second).await.result.as_deref(), Some("new"));
    assert_eq!(world.events(gone).await, ["Created"], "nobody offers it any more");
    host.offer(vec![offer("gone", plain(), no_op())]);
    world.one(gone, State::Completed).await;
}

/// Many runs that end together must not look like fast ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_jobs_are_never_prefetched_and_fast_ones_are() {
    let world = World::new();
    let gate = Gate::new();
    let _host = world.host(config(4), vec![offer("slow", plain(), gate.handler()), offer("fast", plain(), no_op())]);
    let ids = world.add_many("slow", 24).await;
    for round in 1..=6 {
        world.until("four runs", || gate.came() == round * 4).await;
        // This is what a slow job is; nothing waits for it.
        tokio::time::sleep(Duration::from_millis(30)).await;
        gate.open(4);
    }
    world.all(&ids, State::Completed).await;
    assert_eq!(world.most_outstanding(), 4);
    world.fault("exchange", Fault::Slow(Duration::from_millis(2)), usize::MAX);
    let ids = world.add_many("fast", 600).await;
    world.all(&ids, State::Completed).await;
    assert!(world.most_outstanding() > 8, "{} claimed at once", world.most_outstanding());
}

/// More ends than one transaction should have: the rest goes with the next, and nobody is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_ends_is_settled_in_bounded_batches_in_order() {
    let world = World::new();
    let (gate, order) = (Gate::new(), Arc::new(AtomicU32::new(0)));
    let body = {
        let (gate, order) = (gate.clone(), order.clone());
        code(move |_, _, _| {
            let (gate, order) = (gate.clone(), order.clone());
            async move {
                gate.pass().await;
                result(order.fetch_add(1, Ordering::SeqCst).to_string())
            }
        })
    };
    let _host = world.host(HostConfig { prefetch_limit: 0, ..config(1500) }, vec![offer("a", plain(), body)]);
    let ids = world.add_many("a", 1500).await;
    world.until("every run", || gate.came() == 1500).await;
    let gate_of_answers = Arc::new(tokio::sync::Semaphore::new(0));
    world.fault("exchange", Fault::AnswerHeld(gate_of_answers.clone()), 1);
    gate.open(1500);
    world.until("every end", || order.load(Ordering::SeqCst) == 1500).await;
    gate_of_answers.add_permits(1);
    world.all(&ids, State::Completed).await;
    let sizes: Vec<_> = world.history().into_iter().filter(|(call, _)| *call == "exchange").map(|(_, settles)| settles.len()).collect();
    assert!(sizes.iter().all(|size| *size <= 1024), "{sizes:?}");
    assert_eq!(sizes.iter().sum::<usize>(), 1500);
}
