//! Worker groups: queues and workers of their own, one lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use warp_domain::JobId;
use warp_domain::ending::State;
use warp_store::{NewJob, Store as _};
use warp_worker::{HostConfig, StopLevel, Stopped, WorkerGroup};

use crate::world::{Gate, World, code, config_of, done, mutex, no_op, offer, plain};

fn group(queues: &[&str], workers: u32) -> WorkerGroup {
    WorkerGroup { queues: queues.iter().map(|queue| (*queue).to_owned()).collect(), workers }
}

fn config(groups: Vec<WorkerGroup>, exchanges: u32) -> HostConfig {
    HostConfig { groups, ..config_of(1, exchanges) }
}

async fn add_to(world: &World, queue: &str, contract: &str, count: usize) -> Vec<JobId> {
    let jobs: Vec<_> = (0..count).map(|_| NewJob { queue: queue.to_owned(), ..world.job(contract, "{}") }).collect();
    let ids = jobs.iter().map(|job| job.id).collect();
    world.store.enqueue(jobs, world.now()).await.expect("enqueue");
    ids
}

/// The slow jobs fill their own workers and wait; the fast ones of the same contract's other queue never do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_jobs_of_one_group_take_no_worker_of_another() {
    for exchanges in [1, 3] {
        let world = World::new();
        let gate = Gate::new();
        let groups = vec![group(&["slow"], 2), group(&["fast", "faster"], 3)];
        let host = world.host(config(groups, exchanges), vec![offer("slow", plain(), gate.handler()), offer("fast", plain(), no_op())]);
        let slow = add_to(&world, "slow", "slow", 20).await;
        world.until("two slow runs", || gate.came() == 2).await;
        for queue in ["fast", "faster"] {
            let fast = add_to(&world, queue, "fast", 200).await;
            world.all(&fast, State::Completed).await;
        }
        let claimed = |ids: &[JobId]| {
            world.look(|model| ids.iter().filter(|id| model.rows[&model.handle(**id).expect("there")].host.is_some()).count())
        };
        assert_eq!((gate.came(), claimed(&slow)), (2, 2), "and none is hoarded");
        // The slow contract in the other group's queue is that group's affair.
        let there = add_to(&world, "fast", "slow", 3).await;
        world.until("three more", || gate.came() == 5).await;
        assert_eq!(claimed(&there), 3);
        gate.open(100);
        world.all(&slow, State::Completed).await;
        world.all(&there, State::Completed).await;
        assert_eq!(world.look(|model| model.hosts.len()), 1, "one registration for all groups");
        assert_eq!(host.end(StopLevel::Graceful).await, Stopped { abandoned: 0, deregistered: true });
    }
}

/// Never more at once than a group has workers, and a queue that several groups serve uses the workers of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_two_groups_serve_uses_the_workers_of_both() {
    let world = World::new();
    let gate = Gate::new();
    let groups = vec![group(&["default"], 1), group(&["default", "other"], 2)];
    let _host = world.host(config(groups, 2), vec![offer("a", plain(), gate.handler())]);
    let ids = add_to(&world, "default", "a", 9).await;
    world.until("three runs", || gate.came() == 3).await;
    world.rounds().await;
    assert_eq!(gate.came(), 3);
    gate.open(100);
    world.all(&ids, State::Completed).await;
}

/// A key is handed on from a job of one group to one of the other, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_goes_from_group_to_group() {
    for exchanges in [1, 3] {
        let world = World::new();
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let body = {
            let (running, most) = (running.clone(), most.clone());
            code(move |_, _, _| {
                let (running, most) = (running.clone(), most.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    running.fetch_sub(1, Ordering::SeqCst);
                    done()
                }
            })
        };
        let groups = vec![group(&["one"], 2), group(&["two"], 2)];
        let _host = world.host(config(groups, exchanges), vec![offer("a", mutex("k"), body)]);
        let mut ids = Vec::new();
        for _ in 0..30 {
            for queue in ["one", "two"] {
                ids.extend(add_to(&world, queue, "a", 1).await);
            }
        }
        world.all(&ids, State::Completed).await;
        assert_eq!(most.load(Ordering::SeqCst), 1);
    }
}
