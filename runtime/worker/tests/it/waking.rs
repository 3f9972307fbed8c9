//! Whatever makes a job runnable wakes the host. Polling is an hour away in every case here, so a missed announcement
//! shows as a case that does not end.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use warp_domain::ending::{Outcome, Said, State};
use warp_domain::policy::Declared;
use warp_pipeline::Child;
use warp_store::{CommandVerdict, Store};
use warp_worker::HostConfig;

use crate::world::{self, Fault, Gate, World, code, done, mutex, no_op, offer, plain, retry, retryable};

const SOON: Duration = Duration::from_millis(40);
/// Much longer than anything takes, much shorter than what else could wake the loop.
const LATE: Duration = Duration::from_secs(5);

/// Nothing of the loop's own falls due for an hour.
fn config(workers: u32) -> HostConfig {
    let hour = Duration::from_secs(3600);
    HostConfig { renew_every: hour, lease: 3 * hour, reservation_patience: hour, ..world::config(workers) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_wakes() {
    let world = World::new();
    let _host = world.host(config(1), vec![offer("a", plain(), no_op())]);
    for _ in 0..20 {
        let id = world.add("a").await;
        world.one(id, State::Completed).await;
    }
}

/// The claim has been made and its answer is on the way when the job arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_during_an_exchange_is_not_missed() {
    let world = World::new();
    let answer = Arc::new(Semaphore::new(0));
    world.fault("exchange", Fault::AnswerHeld(answer.clone()), 1);
    let _host = world.host(config(1), vec![offer("a", plain(), no_op())]);
    world.until("the claim", || world.history().iter().any(|(call, _)| *call == "exchange")).await;
    let id = world.add("a").await;
    // The announcement is heard before the answer. It is the only one: another would make up for a lost one.
    tokio::task::yield_now().await;
    answer.add_permits(1);
    world.one(id, State::Completed).await;
}

/// All workers are busy when it arrives, and the settle that frees one is what asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_while_all_workers_are_busy_is_not_missed() {
    let world = World::new();
    let gate = Gate::new();
    let _host = world.host(config(1), vec![offer("a", plain(), gate.handler())]);
    let first = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    let second = world.add("a").await;
    gate.open(2);
    world.all(&[first, second], State::Completed).await;
}

/// The ends of an outage are settled by an exchange that claims nothing; what became runnable meanwhile is asked for
/// after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_during_an_outage_is_not_missed() {
    let world = World::new();
    let gate = Gate::new();
    let _host = world.host(config(1), vec![offer("a", plain(), gate.handler())]);
    let first = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    world.fault("exchange", Fault::Refused(warp_store::StoreErrorKind::Unavailable), 3);
    gate.open(2);
    world.until("a failure", || world.count("exchange") >= 3).await;
    let second = world.add("a").await;
    world.all(&[first, second], State::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_job_runs_when_it_is_due_and_not_before() {
    let world = World::new();
    let _host = world.host(config(1), vec![offer("a", plain(), no_op())]);
    for _ in 0..3 {
        let mut job = world.job("a", "{}");
        let due = world.now().after(SOON);
        job.due = Some(due);
        let id = world.enqueue(job).await;
        world.one(id, State::Completed).await;
        let audit = world.details(id).await.audit;
        let began = audit.iter().find(|row| row.event == "Processing").expect("it ran").at;
        assert!(began >= due && began < due.after(LATE), "{began:?} for {due:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_and_a_snooze_run_when_they_are_due() {
    let world = World::new();
    let failing = code(|attempt, _, _| async move { if attempt.run == 1 { retryable("again") } else { done() } });
    let snoozing = code(|attempt, _, _| async move { if attempt.run == 1 { Outcome::Said(Said::Snooze(SOON)) } else { done() } });
    let _host = world.host(config(1), vec![offer("retry", retry(1, SOON), failing), offer("snooze", plain(), snoozing)]);
    let (a, b) = (world.add("retry").await, world.add("snooze").await);
    world.all(&[a, b], State::Completed).await;
    assert_eq!(world.details(a).await.summary.attempts, 2);
    assert_eq!(world.details(b).await.summary.attempts, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requeue_wakes() {
    let world = World::new();
    let body = code(|attempt, _, _| async move { if attempt.run == 1 { retryable("broken") } else { done() } });
    let _host = world.host(config(1), vec![offer("a", plain(), body)]);
    let id = world.add("a").await;
    world.one(id, State::Failed).await;
    assert_eq!(world.store.requeue(id, "ada", world.now()).await.expect("requeue"), CommandVerdict::Done);
    world.one(id, State::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raised_limit_wakes() {
    let world = World::new();
    world.store.set_limit("k", 0, "ada", world.now()).await.expect("a limit");
    let _host = world.host(config(2), vec![offer("a", mutex("k"), no_op())]);
    let ids = world.add_many("a", 3).await;
    let parked = || world.look(|model| model.rows.values().filter(|row| row.parked_on.is_some()).count() == 3);
    world.until("all three parked", parked).await;
    world.store.set_limit("k", 1, "ada", world.now()).await.expect("a limit");
    world.all(&ids, State::Completed).await;
}

/// The settle of one host reserves the slot for a job of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_handed_on_wakes_the_other_host() {
    let world = World::new();
    let gate = Gate::new();
    let _one = world.host(config(1), vec![offer("a", mutex("k"), gate.handler())]);
    let _two = world.host(config(1), vec![offer("b", mutex("k"), no_op())]);
    let holder = world.add("a").await;
    world.until("the holder", || gate.came() == 1).await;
    let waiter = world.add("b").await;
    world.until("the waiter", || world.look(|model| model.rows.values().any(|row| row.parked_on.is_some()))).await;
    gate.open(1);
    world.all(&[holder, waiter], State::Completed).await;
}

/// The reserved job's contract finds nobody any more, so its turn goes to another host's job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_that_expires_wakes_the_next() {
    let world = World::new();
    let gate = Gate::new();
    let patience = Duration::from_millis(20);
    let busy = Gate::new();
    let _one = world.host(HostConfig { reservation_patience: patience, ..config(1) }, vec![offer("a", mutex("k"), gate.handler())]);
    let _two = world.host(
        HostConfig { reservation_patience: patience, ..config(1) },
        vec![offer("b", mutex("k"), no_op()), offer("busy", plain(), busy.handler())],
    );
    let _three = world.host(HostConfig { reservation_patience: patience, ..config(1) }, vec![offer("c", mutex("k"), no_op())]);
    let holder = world.add("a").await;
    world.until("the holder", || gate.came() == 1).await;
    let parked =
        |count| move |model: &warp_testkit::model::Model| model.rows.values().filter(|row| row.parked_on.is_some()).count() == count;
    let first = world.add("b").await;
    world.until("the first waiter", || world.look(parked(1))).await;
    let second = world.add("c").await;
    world.until("the second waiter", || world.look(parked(2))).await;
    let blocking = world.add("busy").await;
    world.until("no worker for the first", || busy.came() == 1).await;
    gate.open(1);
    world.all(&[holder, second], State::Completed).await;
    assert_ne!(world.state(first).await, State::Completed);
    busy.open(1);
    world.all(&[first, blocking], State::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_wakes_also_another_host() {
    let world = World::new();
    let parent = code(|_, calls, _| async move {
        let child = Child {
            contract: "child".into(),
            payload: "{}".into(),
            queue: None,
            delay: Duration::ZERO,
            unique_key: None,
            metadata: Vec::new(),
        };
        calls.enqueue(child).expect("it is acceptable");
        done()
    });
    let _one = world.host(config(1), vec![offer("parent", plain(), parent)]);
    let _two = world.host(config(1), vec![offer("child", Declared::default(), no_op())]);
    world.until("both", || world.look(|model| model.is_served("child") && model.is_served("parent"))).await;
    world.add("parent").await;
    let completed = || world.look(|model| model.rows.values().filter(|row| row.place.state() == State::Completed).count() == 2);
    world.until("parent and child", completed).await;
}
