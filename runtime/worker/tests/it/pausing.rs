//! A paused queue or host: nothing new begins, what runs goes on, and what was claimed and not begun goes back by itself.

use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::State;
use warp_store::{NewJob, Store as _};
use warp_worker::HostConfig;

use crate::world::{Fault, Gate, TestHost, World, config, config_of, no_op, offer, plain};

/// A host that has claimed more slow jobs than it has workers, because fast ones came before them.
async fn with_prefetched(world: &World, gate: &Gate) -> (TestHost, Vec<JobId>) {
    let host = world.host(config_of(2, 3), vec![offer("fast", plain(), no_op()), offer("slow", plain(), gate.handler())]);
    world.fault("exchange", Fault::Slow(Duration::from_millis(2)), usize::MAX);
    let fast = world.add_many("fast", 600).await;
    world.all(&fast, State::Completed).await;
    let slow = world.add_many("slow", 20).await;
    world.until("prefetched jobs", || host.numbers.report().running > 2 && gate.came() == 2).await;
    (host, slow)
}

fn in_state(world: &World, ids: &[JobId], state: State) -> usize {
    world.look(|model| ids.iter().filter(|id| model.rows[&model.handle(**id).expect("there")].place.state() == state).count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_queue_gives_back_what_has_not_begun() {
    let world = World::new();
    let gate = Gate::new();
    let (host, slow) = with_prefetched(&world, &gate).await;
    assert!(world.store.pause_queue("default", "ada", world.now()).await.expect("pause"));
    world.until("the rest back", || in_state(&world, &slow, State::Processing) == 2).await;
    gate.open(2);
    world.until("the two that ran", || in_state(&world, &slow, State::Completed) == 2).await;
    world.rounds().await;
    assert_eq!((gate.came(), in_state(&world, &slow, State::Enqueued)), (2, 18), "nothing began in their place");
    // Other queues go on.
    let other = world.host(
        HostConfig { groups: vec![warp_worker::WorkerGroup { queues: vec!["night".into()], workers: 1 }], ..config(1) },
        vec![offer("fast", plain(), no_op())],
    );
    let night = world.enqueue(NewJob { queue: "night".into(), ..world.job("fast", "{}") }).await;
    world.one(night, State::Completed).await;
    assert!(world.store.resume_queue("default", world.now()).await.expect("resume"));
    gate.open(100);
    world.all(&slow, State::Completed).await;
    for id in slow {
        assert_eq!(world.details(id).await.summary.attempts, 1, "handing back charges nothing");
    }
    assert!(!host.task.is_finished() && !other.task.is_finished());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_host_leaves_its_work_to_others() {
    let world = World::new();
    let gate = Gate::new();
    let (_host, slow) = with_prefetched(&world, &gate).await;
    let id = world.look(|model| *model.hosts.keys().next().expect("registered"));
    assert!(world.store.pause_host(id, "ada", world.now()).await.expect("pause"));
    world.until("the rest back", || in_state(&world, &slow, State::Processing) == 2).await;
    let _other = world.host(config(1), vec![offer("slow", plain(), no_op())]);
    world.until("the other to run them", || in_state(&world, &slow, State::Completed) == 18).await;
    assert_eq!(gate.came(), 2);
    gate.open(2);
    world.all(&slow, State::Completed).await;
    let fast = world.add("fast").await;
    world.rounds().await;
    assert_eq!(world.state(fast).await, State::Enqueued, "only the paused host runs it");
    assert!(world.store.resume_host(id, world.now()).await.expect("resume"));
    world.one(fast, State::Completed).await;
}
