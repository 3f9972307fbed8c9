//! Jobs that a run enqueues: what they inherit, when they exist, and which are refused.

use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::policy::{Declared, Timeout, TimeoutMode};
use warp_pipeline::{Child, ChildRefused};
use warp_store::{JobFilter, Store};
use warp_worker::{HostConfig, RunCaps, WorkerGroup};

use crate::world::{World, code, config, done, no_op, offer, plain, retry, retryable};

/// One that nothing is said about.
pub fn child(contract: &str) -> Child {
    Child {
        contract: contract.to_owned(),
        payload: "{}".to_owned(),
        queue: None,
        delay: Duration::ZERO,
        unique_key: None,
        metadata: Vec::new(),
    }
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_inherit_queue_metadata_and_trace_but_no_policy() {
    let world = World::new();
    let parent = code(|_, calls, _| async move {
        calls.enqueue(Child { metadata: vec![pair("tenant", "own"), pair("new", "1")], ..child("kept") }).expect("acceptable");
        calls.enqueue(Child { queue: Some("other".into()), delay: Duration::from_secs(60), ..child("moved") }).expect("acceptable");
        done()
    });
    let host_config =
        HostConfig { groups: vec![WorkerGroup { queues: vec!["default".into(), "special".into()], workers: 1 }], ..config(1) };
    let _host = world.host(host_config, vec![offer("parent", retry(2, Duration::ZERO), parent)]);
    let mut job = world.job("parent", "{}");
    job.queue = "special".into();
    job.metadata = vec![pair("tenant", "theirs"), pair("source", "shop")];
    job.trace_parent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into());
    let trace = job.trace_parent.clone();
    job.explicit = Declared { timeout: Some(Timeout { per_attempt: Duration::from_secs(9), mode: TimeoutMode::Delete }), ..plain() };
    let enqueued = world.now();
    let parent = world.enqueue(job).await;
    world.one(parent, State::Completed).await;
    let list = |contract: &str| JobFilter { contract: Some(contract.into()), limit: 9, ..JobFilter::default() };
    let of = async |contract: &str| world.details(world.store.jobs(list(contract)).await.expect("list")[0].id).await;
    let kept = of("kept").await;
    assert_eq!((kept.summary.queue.as_str(), kept.summary.state), ("special", State::Enqueued));
    assert_eq!(kept.metadata, [pair("source", "shop"), pair("tenant", "own"), pair("new", "1")]);
    assert_eq!((kept.trace_parent, kept.explicit.is_empty(), kept.stamp), (trace.clone(), true, None));
    let moved = of("moved").await;
    assert_eq!((moved.summary.queue.as_str(), moved.summary.state, moved.trace_parent), ("other", State::Scheduled, trace));
    assert_eq!(moved.metadata, [pair("tenant", "theirs"), pair("source", "shop")]);
    assert!(moved.summary.due.expect("it is scheduled") >= enqueued.after(Duration::from_secs(60)));
}

/// The first attempt fails, the second completes: of the first none exists.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_of_a_failed_attempt_never_exist() {
    let world = World::new();
    let parent = code(|attempt, calls, _| async move {
        for _ in 0..attempt.run {
            calls.enqueue(child("child")).expect("acceptable");
        }
        match attempt.run {
            1 => retryable("no"),
            2 => panic!("no"),
            _ => done(),
        }
    });
    let _host = world.host(config(1), vec![offer("parent", retry(2, Duration::ZERO), parent), offer("child", plain(), no_op())]);
    let id = world.add("parent").await;
    world.one(id, State::Completed).await;
    world.until("the children", || world.look(|model| model.rows.values().all(|row| row.place.state() == State::Completed))).await;
    assert_eq!(world.look(|model| model.rows.len()), 4);
}

/// What could never be stored is refused when it is asked for, and spoils neither the run nor the other children.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_stored_is_refused_at_the_call() {
    let world = World::new();
    let parent = code(|_, calls, _| async move {
        let bad = [
            child(""),
            child("a\0b"),
            child(&"x".repeat(10_000)),
            Child { payload: "not json".into(), ..child("child") },
            Child { payload: "[".repeat(10_000), ..child("child") },
            Child { queue: Some(String::new()), ..child("child") },
            Child { unique_key: Some("a\0".into()), ..child("child") },
            Child { metadata: vec![pair("a", "\0")], ..child("child") },
            Child { metadata: vec![pair("", "a")], ..child("child") },
        ];
        for one in bad {
            let refused = calls.enqueue(one.clone());
            assert!(matches!(&refused, Err(ChildRefused::Invalid(why)) if !why.is_empty()), "{one:?}: {refused:?}");
        }
        let once = Child { unique_key: Some("once".into()), ..child("child") };
        let first = calls.enqueue(once.clone()).expect("acceptable");
        assert_eq!(calls.enqueue(once).expect("no error"), first, "a second is the first one");
        calls.enqueue(child("child")).expect("acceptable");
        calls.enqueue(child("child")).expect("acceptable");
        assert!(matches!(calls.enqueue(child("child")), Err(ChildRefused::TooMany(_))));
        done()
    });
    let caps = RunCaps { children: 3, ..RunCaps::default() };
    let _host = world.host(HostConfig { caps, ..config(1) }, vec![offer("parent", plain(), parent)]);
    let id = world.add("parent").await;
    world.until("the end", || world.look(|model| model.rows.values().any(|row| row.place.state().is_final()))).await;
    let details = world.details(id).await;
    assert_eq!(details.summary.state, State::Completed, "{:?}", details.error);
    assert_eq!(world.look(|model| model.rows.len()), 4);
}

/// A result that no store can hold fails its own job; its neighbours in the batch are settled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_end_fails_its_own_job_only() {
    let world = World::new();
    let gate = crate::world::Gate::new();
    let body = {
        let gate = gate.clone();
        code(move |attempt, _, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                crate::world::result(if attempt.payload.contains("bad") { "a\0b" } else { "fine" })
            }
        })
    };
    let _host = world.host(config(5), vec![offer("a", plain(), body)]);
    let mut ids = Vec::new();
    for number in 0..5 {
        ids.push(world.enqueue(world.job("a", if number == 2 { "\"bad\"" } else { "\"good\"" })).await);
    }
    world.until("every run", || gate.came() == 5).await;
    gate.open(5);
    let bad = ids.remove(2);
    world.all(&ids, State::Completed).await;
    world.one(bad, State::Failed).await;
    assert!(world.details(bad).await.error.unwrap_or_default().contains("NUL"));
}
