//! What a run says: kept within its caps, stored while it runs, and neither lost nor reordered by a store that fails.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use warp_domain::JobId;
use warp_domain::ending::State;
use warp_pipeline::{Handler, Level};
use warp_store::{Store, StoreErrorKind};
use warp_worker::{HostConfig, RunCaps};

use crate::world::{Fault, Gate, World, code, config, done, offer, plain, retry, retryable};

async fn lines(world: &World, id: JobId) -> Vec<(u32, &'static str, String)> {
    let logs = world.store.job_logs(id, None).await.expect("read logs");
    logs.into_iter().map(|(run, line)| (run, line.stream, line.text)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_of_every_kind_are_kept_whatever_the_run_came_to() {
    let world = World::new();
    let body = code(|attempt, calls, _| async move {
        let levels = [Level::Stdout, Level::Stderr, Level::Trace, Level::Debug, Level::Info, Level::Warn, Level::Error];
        for level in levels {
            calls.line(level, format!("{level:?}"));
        }
        if attempt.run == 1 { retryable("no") } else { panic!("no") }
    });
    let _host = world.host(config(1), vec![offer("a", retry(1, Duration::ZERO), body)]);
    let id = world.add("a").await;
    world.one(id, State::Failed).await;
    let streams = ["stdout", "stderr", "trace", "debug", "info", "warn", "error"];
    let said = ["Stdout", "Stderr", "Trace", "Debug", "Info", "Warn", "Error"];
    let expected: Vec<_> =
        (1..=2).flat_map(|run| streams.iter().zip(said).map(move |(stream, text)| (run, *stream, text.to_owned()))).collect();
    assert_eq!(lines(&world, id).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_exceeds_a_cap_is_counted() {
    let world = World::new();
    let body = code(|_, calls, _| async move {
        for number in 0..5 {
            calls.line(Level::Info, number.to_string());
        }
        calls.dropped(10, 100);
        for name in ["one", "two", "three", "one"] {
            calls.progress(name.to_owned(), 10.0);
        }
        done()
    });
    let bytes = code(|_, calls, _| async move {
        calls.line(Level::Info, "12345".to_owned());
        calls.line(Level::Info, "123456".to_owned());
        calls.line(Level::Info, "12345".to_owned());
        done()
    });
    let caps = RunCaps { lines: 3, bytes: 10, progress_names: 2, ..RunCaps::default() };
    let _host = world.host(HostConfig { caps, ..config(1) }, vec![offer("lines", plain(), body), offer("bytes", plain(), bytes)]);
    let (a, b) = (world.add("lines").await, world.add("bytes").await);
    world.all(&[a, b], State::Completed).await;
    let details = world.details(a).await;
    assert_eq!((lines(&world, a).await.len(), details.dropped), (3, (13, 102)), "two lines, a third name, and what the guest lost");
    assert_eq!(details.progress, [("one".to_owned(), 10.0), ("two".to_owned(), 10.0)]);
    assert_eq!((lines(&world, b).await.len(), world.details(b).await.dropped), (2, (1, 6)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_is_a_number_from_0_to_100_whatever_was_said() {
    let world = World::new();
    let said = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5, 100.5, 42.0, 3e38];
    let body = code(move |_, calls, _| async move {
        for (number, percent) in said.into_iter().enumerate() {
            calls.progress(number.to_string(), 77.0);
            calls.progress(number.to_string(), percent);
        }
        done()
    });
    let _host = world.host(config(1), vec![offer("a", plain(), body)]);
    let id = world.add("a").await;
    world.one(id, State::Completed).await;
    let kept: Vec<_> = world.details(id).await.progress.into_iter().map(|(_, percent)| percent).collect();
    assert_eq!(kept, [0.0, 100.0, 0.0, 0.0, 100.0, 42.0, 100.0]);
}

/// Says "1" and "2" at once, then one more number for each time the gate opens, up to "4".
fn talking(gate: &Gate) -> Arc<dyn Handler> {
    let gate = gate.clone();
    code(move |_, calls, _| {
        let gate = gate.clone();
        async move {
            calls.line(Level::Info, "1".to_owned());
            calls.line(Level::Info, "2".to_owned());
            calls.progress("rows".to_owned(), 10.0);
            for number in 3..=4 {
                gate.pass().await;
                calls.line(Level::Info, number.to_string());
                calls.progress("rows".to_owned(), number as f32 * 10.0);
            }
            gate.pass().await;
            done()
        }
    })
}

async fn numbers(world: &World, id: JobId) -> String {
    lines(world, id).await.into_iter().map(|(_, _, text)| text).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_run_can_be_read_while_it_goes_on() {
    let world = World::new();
    let gate = Gate::new();
    let _host = world.host(config(1), vec![offer("a", plain(), talking(&gate))]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    world.jump(Duration::from_millis(1100));
    world.until("its first lines", || world.look(|model| model.rows.values().all(|row| row.logs.len() == 2))).await;
    assert_eq!(world.state(id).await, State::Processing);
    assert_eq!(world.details(id).await.progress, [("rows".to_owned(), 10.0)]);
    gate.open(3);
    world.one(id, State::Completed).await;
    assert_eq!(numbers(&world, id).await, "1234");
    assert_eq!(world.details(id).await.progress, [("rows".to_owned(), 40.0)]);
}

/// What the store did not take goes out with the next, in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_store_did_not_take_is_sent_again_in_order() {
    let world = World::new();
    let gate = Gate::new();
    world.fault("append_output", Fault::Refused(StoreErrorKind::Unavailable), 1);
    let _host = world.host(config(1), vec![offer("a", plain(), talking(&gate))]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    world.jump(Duration::from_millis(1100));
    world.until("a failure", || world.count("append_output") == 1).await;
    gate.open(1);
    world.until("the third line", || gate.came() == 2).await;
    world.jump(Duration::from_millis(1100));
    world.until("all lines so far", || world.look(|model| model.rows.values().all(|row| row.logs.len() == 3))).await;
    gate.open(2);
    world.one(id, State::Completed).await;
    assert_eq!(numbers(&world, id).await, "1234");
}

/// The run ends while its output is on the way: the settle waits for it, whether it arrives or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_does_not_overtake_its_own_output() {
    for refusal in [None, Some(StoreErrorKind::Unavailable)] {
        let world = World::new();
        let gate = Gate::new();
        let answer = Arc::new(Semaphore::new(0));
        world.fault("append_output", Fault::Held(answer.clone(), refusal), 1);
        let _host = world.host(config(1), vec![offer("a", plain(), talking(&gate))]);
        let id = world.add("a").await;
        world.until("the run", || gate.came() == 1).await;
        world.jump(Duration::from_millis(1100));
        world.until("output on the way", || world.count("append_output") == 1).await;
        gate.open(3);
        world.until("the end", || gate.came() == 3).await;
        world.rounds().await;
        assert_eq!(world.state(id).await, State::Processing, "its first lines are not stored yet");
        answer.add_permits(1);
        world.one(id, State::Completed).await;
        assert_eq!(numbers(&world, id).await, "1234");
        assert_eq!(world.count("append_output"), 1);
    }
}
