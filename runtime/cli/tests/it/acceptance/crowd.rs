//! A thousand jobs on eight keys, two processes on one file or three on one server: who ran beside whom.

use std::collections::HashMap;
use std::time::Instant;

use warp_domain::ending::State;

use super::{Entry, Host, Scene, ended, size};

on_each_scene! {
    a_mutex_holds_across_processes_and_nobody_is_refused_again_and_again
    a_mutex_holds_where_no_process_can_hold_every_key
    a_semaphore_of_three_is_filled_and_never_exceeded
    skip_deletes_the_surplus_and_names_who_was_in_the_way
}

on_session_locks! {
    a_mutex_holds_across_processes_and_nobody_is_refused_again_and_again
    a_mutex_holds_where_no_process_can_hold_every_key
    a_semaphore_of_three_is_filled_and_never_exceeded
    skip_deletes_the_surplus_and_names_who_was_in_the_way
}

const KEYS: usize = 8;

fn jobs() -> usize {
    size(1000, 5000)
}

/// What the hosts say about a crowd that they ran.
struct Ran {
    ids: Vec<String>,
    /// Runs that each host settled.
    settled: Vec<i64>,
    /// How often a job was refused again after its first parking.
    again: i64,
}

/// Runs the crowd under one policy, with so many workers in each of the processes.
fn crowd(scene: &Scene, policy: &str, workers: &str, ms: u32) -> Ran {
    scene.publish(&format!("[contract.work]\n[handler.work]\n{policy}"));
    let hosts = scene.start_hosts(&["--workers", workers]);
    let begun = Instant::now();
    let ids = scene.enqueue("work", (0..jobs()).map(|job| format!(r#"{{"key":"k{}","ms":"{ms}","job":"{job}"}}"#, job % KEYS)));
    scene.until("the end of every job", |overview| ended(overview) == jobs() as u64);
    eprintln!("{} jobs of {ms} ms on {KEYS} keys under `{policy}`, {} × {workers} workers: {:.1?}", jobs(), hosts.len(), begun.elapsed());
    let numbers: Vec<_> = hosts.into_iter().map(Host::stop).collect();
    let of = |name: &str| numbers.iter().map(|of| of[name].as_i64().expect("a number")).collect::<Vec<_>>();
    let none = vec![0; numbers.len()];
    assert_eq!((of("late"), of("rescued"), of("unknown_rows")), (none.clone(), none.clone(), none));
    eprintln!("settled {:?}, parked {:?}, of those again {:?}", of("settled"), of("parked"), of("parked_again"));
    Ran { ids, settled: of("settled"), again: of("parked_again").iter().sum() }
}

/// The promise of a waiting crowd, whatever its limit.
fn waited(scene: &Scene, ran: &Ran, limit: usize) {
    for id in &ran.ids {
        let job = scene.job(id);
        assert_eq!((job.summary.state, job.summary.runs, job.summary.attempts), (State::Completed, 1, 1), "{job:?}");
        let parkings = job.audit.iter().filter(|row| row.event == "Requeued").count();
        assert!(parkings <= 1, "the history hears of a wait once: {:?}", job.audit);
    }
    let ledger = scene.ledger();
    let most = ledger.most_at_once();
    assert_eq!((ledger.entries.len(), most.len()), (jobs(), KEYS));
    assert_eq!(most.values().max(), Some(&limit), "so many at once: {most:?}");
    assert!(ran.again <= jobs() as i64 / 20, "{} refusals after the first parking are more than 0.05 per job", ran.again);
}

fn a_mutex_holds_across_processes_and_nobody_is_refused_again_and_again(scene: &Scene) {
    let ran = crowd(scene, r#"mutex = { key = "work:{key}", mode = "wait" }"#, "16", 2);
    waited(scene, &ran, 1);
    scene.ledger().assert_tokens_grow();
}

/// With fewer workers than keys in each process none can hold them all, so keys go back and forth.
fn a_mutex_holds_where_no_process_can_hold_every_key(scene: &Scene) {
    let ran = crowd(scene, r#"mutex = { key = "work:{key}", mode = "wait" }"#, &KEYS.div_ceil(scene.hosts()).to_string(), 10);
    waited(scene, &ran, 1);
    scene.ledger().assert_tokens_grow();
    assert!(ran.settled.iter().all(|settled| *settled > 0), "one of them did everything: {:?}", ran.settled);
}

fn a_semaphore_of_three_is_filled_and_never_exceeded(scene: &Scene) {
    let ran = crowd(scene, r#"semaphore = { key = "work:{key}", limit = 3 }"#, "16", 5);
    waited(scene, &ran, 3);
}

fn skip_deletes_the_surplus_and_names_who_was_in_the_way(scene: &Scene) {
    let ids = crowd(scene, r#"mutex = { key = "work:{key}" }"#, "16", 2).ids;
    let ledger = scene.ledger();
    let most = ledger.most_at_once();
    assert!(most.values().all(|most| *most == 1), "two at once: {most:?}");
    let ran: HashMap<&str, &Entry> = ledger.entries.iter().map(|entry| (entry.job.as_str(), entry)).collect();
    let (mut completed, mut deleted) = (0, 0);
    for (at, id) in ids.iter().enumerate() {
        let job = scene.job(id);
        if job.summary.state == State::Completed {
            completed += 1;
            assert!(ran.contains_key(id.as_str()), "{job:?}");
            continue;
        }
        deleted += 1;
        assert_eq!((job.summary.state, job.summary.runs), (State::Deleted, 0), "{job:?}");
        assert!(!ran.contains_key(id.as_str()), "it was skipped and ran: {job:?}");
        let key = format!("k{}", at % KEYS);
        let last = job.audit.last().expect("a history");
        let holder = last.message.strip_prefix(&format!("Cancelled — 'work:{key}' full (1 slots), held by "));
        let holder = holder.and_then(|holder| ran.get(holder)).unwrap_or_else(|| panic!("who is in the way? {:?}", job.audit));
        assert_eq!(holder.key, key);
    }
    eprintln!("{completed} ran, {deleted} were skipped");
    assert!(completed >= KEYS && deleted > 0, "{completed} ran, {deleted} were skipped");
    assert_eq!((completed + deleted, ledger.entries.len()), (jobs(), completed));
}
