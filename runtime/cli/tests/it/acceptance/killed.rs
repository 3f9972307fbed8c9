//! `kill -9` of one of two processes, or of three on a server, again and again: nothing is lost, nothing runs twice at a time, and whoever
//! was interrupted runs again soon and pays nothing.
//!
//! On SQLite a dead process is known by its lock and not waited for. One that is only frozen keeps its lock, so the
//! lease decides, as it does for every host of a server; what a frozen one does after waking is refused.

use std::collections::HashMap;
use std::time::Duration;

use rustix::process::Signal;
use warp_domain::ending::State;

use super::{Host, Scene, ended, size, wall};

on_each_scene! {
    killed_processes_lose_nothing_and_let_nothing_overlap
    a_frozen_process_loses_its_jobs_after_the_lease_and_cannot_end_them_when_it_wakes
}

on_session_locks! {
    killed_processes_lose_nothing_and_let_nothing_overlap
    a_frozen_process_loses_its_jobs_after_the_lease_and_cannot_end_them_when_it_wakes
}

const KEYS: usize = 8;
const LEASE: Duration = Duration::from_secs(6);
/// The other hosts are looked at three times per lease.
const SWEEP: Duration = Duration::from_secs(2);
/// What a busy machine may add.
const SLACK: Duration = Duration::from_secs(5);
/// Enough for the kills to fall among running, waiting and settling jobs alike.
const JOBS_BETWEEN: usize = 120;

/// Numbers that nobody can foresee, and that a printed seed repeats.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        // Knuth's multiplier; the upper half is the random one.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A host that was killed.
struct Death {
    /// Its place, which the next host takes.
    place: usize,
    pid: u32,
    at: u64,
}

/// From when on a host watched this death that has lived on until the rescue. On a server only such a one knows how long the
/// dead host has been silent; on a file the system tells whoever asks.
fn watched_since(scene: &Scene, deaths: &[Death], death: &Death, rescue: u64) -> u64 {
    if !scene.ground.on_server() {
        return death.at;
    }
    let last = |place: usize| {
        let of = deaths.iter().filter(|other| other.place == place && other.at <= rescue).map(|other| other.at);
        of.max().unwrap_or(0).max(death.at)
    };
    (0..scene.hosts()).map(last).min().unwrap_or(death.at)
}

fn start(scene: &Scene) -> Host {
    Host::start(scene, &["--workers", "5", "--lease", "6s"], "ledger.wasm")
}

fn killed_processes_lose_nothing_and_let_nothing_overlap(scene: &Scene) {
    // On a server each death is waited for, until the lease is over.
    let kills = if scene.ground.on_server() { size(6, 50) } else { size(50, 300) };
    scene.publish("[contract.work]\n[handler.work]\nmutex = { key = \"work:{key}\", mode = \"wait\" }");
    let seed = wall();
    let mut draw = Draw(seed);
    eprintln!("{kills} kills, seed {seed}");
    let mut hosts: Vec<_> = (0..scene.hosts()).map(|_| start(scene)).collect();
    let (mut ids, mut deaths) = (Vec::new(), Vec::new());
    for _ in 0..kills {
        let more: Vec<_> = (0..JOBS_BETWEEN).map(|job| format!(r#"{{"key":"k{}","ms":"{}"}}"#, job % KEYS, 1 + draw.below(40))).collect();
        ids.extend(scene.enqueue("work", more));
        // Some of what is there has ended, and the rest has not.
        let enough = (ids.len() - JOBS_BETWEEN) as u64 + draw.below(JOBS_BETWEEN as u64 * 2 / 3);
        scene.until("some of the jobs to end", |overview| ended(overview) >= enough);
        std::thread::sleep(Duration::from_micros(draw.below(20_000)));
        let victim = draw.below(hosts.len() as u64) as usize;
        let pid = hosts[victim].pid();
        deaths.push(Death { place: victim, pid, at: hosts[victim].kill() });
        hosts[victim] = start(scene);
    }
    scene.until("the end of every job", |overview| ended(overview) == ids.len() as u64);
    for host in hosts {
        host.stop();
    }
    let slowest = judge(scene, &ids, &deaths);
    assert!(slowest <= LEASE + SWEEP + SLACK, "a job waited {slowest:?} for its rescue");
}

fn a_frozen_process_loses_its_jobs_after_the_lease_and_cannot_end_them_when_it_wakes(scene: &Scene) {
    scene.publish("[contract.hold]\n[handler.hold]\nmutex = { key = \"work:{key}\", mode = \"wait\" }");
    let hold = |key: &str| scene.enqueue("hold", [format!(r#"{{"does":"hold","key":"{key}","gate":"gate"}}"#)]).remove(0);
    let frozen = start(scene);
    let id = hold("k");
    scene.until("the job to start", |_| scene.ledger().entries.len() == 1);
    let others: Vec<_> = (1..scene.hosts()).map(|_| start(scene)).collect();
    frozen.signal(Signal::STOP);
    let at = wall();
    scene.until("its second start", |_| scene.ledger().entries.len() == 2);
    let [first, second] = scene.ledger().entries.try_into().expect("two starts");
    let after = Duration::from_nanos(second.start - at);
    eprintln!("the job of a frozen process ran again after {after:.1?}");
    // The last renewal may have been a sweep ago.
    assert!(after >= LEASE - SWEEP, "its lease had not run out");
    assert!(after <= LEASE + SWEEP + SLACK, "the lease has long run out");
    assert!(first.token < second.token, "an outside system could not tell the late writer");

    frozen.signal(Signal::CONT);
    frozen.wait_for("it to notice", |line| line.contains("this host was taken for dead"));
    frozen.wait_for("it to go on", |line| line.contains("\"registered anew\""));
    scene.ground.write("out/gate", "");
    let job = scene.until_job(&id, "its end", |job| job.summary.state.is_final());
    assert_eq!((job.summary.state, job.summary.runs, job.summary.attempts), (State::Completed, 2, 1), "{job:?}");
    let ends = job.audit.iter().filter(|row| row.event == "Completed").map(|row| row.run).collect::<Vec<_>>();
    assert_eq!(ends, [2], "{job:?}");
    assert!(scene.ledger().entries[0].end.is_none(), "the attempt that was given back went on to its end");
    for other in others {
        other.stop();
    }
    // The one that was frozen is a host like any other again.
    let id = hold("later");
    scene.until_job(&id, "another job", |job| job.summary.state == State::Completed);
    frozen.stop();
}

/// Compares the ledger with the database. Returns how long it took at most to rescue the jobs of a killed host, from when
/// on somebody who lived watched.
fn judge(scene: &Scene, ids: &[String], deaths: &[Death]) -> Duration {
    let (mut slowest, mut longest) = (Duration::ZERO, Duration::ZERO);
    let mut rescues = 0;
    let mut killed_runs = HashMap::new();
    let mut keys = HashMap::new();
    for id in ids {
        let job = scene.job(id);
        // One charged attempt, however often its host died.
        assert_eq!((job.summary.state, job.summary.attempts), (State::Completed, 1), "{job:?}");
        let given_back = |message: &str| job.audit.iter().filter(|row| row.message == message && row.run > 0).count();
        let died = given_back("its host died");
        let waits = job.audit.iter().filter(|row| row.message.starts_with("Requeued — ")).count();
        let requeues = job.audit.iter().filter(|row| row.event == "Requeued").count();
        assert_eq!(job.summary.runs as usize, 1 + requeues - waits, "a run is missing in the history: {job:?}");
        rescues += died;
        for row in job.audit.iter().filter(|row| row.event == "Processing") {
            let host = row.host.as_deref().expect("a run has a host");
            let pid: u32 = host.rsplit(':').next().and_then(|pid| pid.parse().ok()).expect("a host is called MACHINE:PID");
            // In a long run numbers of processes come back, so the first death after the start is the one.
            let began = u64::try_from(row.at.0).expect("after 1970") * 1_000_000;
            let Some(death) = deaths.iter().find(|death| death.pid == pid && death.at >= began) else { continue };
            killed_runs.insert((id.clone(), row.run), death.at);
            if let Some(rescue) = job.audit.iter().find(|of| of.run == row.run && of.message == "its host died") {
                let rescued = u64::try_from(rescue.at.0).expect("after 1970");
                let after = |since: u64| Duration::from_millis(rescued.saturating_sub(since / 1_000_000));
                slowest = slowest.max(after(watched_since(scene, deaths, death, rescued * 1_000_000)));
                longest = longest.max(after(death.at));
            }
        }
        keys.insert(id.clone(), job.keys);
    }
    let mut ledger = scene.ledger();
    let mut interrupted = 0;
    for entry in &mut ledger.entries {
        // What was torn off while it was written down has no key in the ledger.
        entry.key = keys[&entry.job].concat();
        if entry.end.is_none() {
            let killed = killed_runs.get(&(entry.job.clone(), entry.run));
            entry.end = Some(*killed.unwrap_or_else(|| panic!("it has no end, and its host was not killed: {entry:?}")));
            interrupted += 1;
        }
    }
    let most = ledger.most_at_once();
    assert_eq!(most.len(), KEYS);
    assert!(most.values().all(|most| *most == 1), "two at once: {most:?}");
    ledger.assert_tokens_grow();
    eprintln!(
        "{} jobs, {} starts, {rescues} rescued, {interrupted} of them in the middle of their work; rescued within {longest:.1?} of the kill, \
         and {slowest:.1?} of the last one that took a watcher",
        ids.len(),
        ledger.entries.len(),
    );
    assert!(interrupted > 0, "no kill met a running job");
    slowest
}
