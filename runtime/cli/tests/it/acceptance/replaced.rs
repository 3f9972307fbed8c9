//! A plugin is replaced again and again under load, its key, limit and mode changing each time: whoever has
//! started keeps the rules that were written on the job, whoever is new takes the new ones.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use warp_domain::ending::State;
use warp_domain::policy::{ConcurrencyKind, Mode, Stamp};
use warp_store::{JobDetails, JobFilter, Waiting};

use super::{Host, Scene, ended, size};

on_each_scene! {
    replacements_under_load_change_nothing_for_whoever_has_started
    five_that_wait_while_the_limit_is_raised_stay_at_the_old_one_until_an_operator_sets_it
}

on_session_locks! {
    replacements_under_load_change_nothing_for_whoever_has_started
    five_that_wait_while_the_limit_is_raised_stay_at_the_old_one_until_an_operator_sets_it
}

const KEYS: usize = 4;

/// What one version declares.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    kind: ConcurrencyKind,
    key: &'static str,
    limit: u32,
    mode: Mode,
}

impl Rule {
    /// Of the nth version: key, limit and mode differ from those of the one before.
    fn of(version: usize) -> Self {
        let key = ["a:{key}", "b:{key}", "c:{key}:{tenant}"][version % 3];
        let mode = if version % 2 == 1 { Mode::Skip } else { Mode::Wait };
        match version % 4 {
            0 => Rule { kind: ConcurrencyKind::Mutex, key, limit: 1, mode },
            more => Rule { kind: ConcurrencyKind::Semaphore, key, limit: 1 + more as u32, mode },
        }
    }

    fn declaration(&self) -> String {
        let Rule { kind, key, limit, mode } = self;
        let mode = if *mode == Mode::Skip { "skip" } else { "wait" };
        match kind {
            ConcurrencyKind::Mutex => format!("mutex = {{ key = \"{key}\", mode = \"{mode}\" }}"),
            ConcurrencyKind::Semaphore => format!("semaphore = {{ key = \"{key}\", limit = {limit}, mode = \"{mode}\" }}"),
        }
    }
}

/// The rules on a job and the version that they came from.
fn stamped(stamp: &Stamp) -> (Rule, String) {
    let stamped = stamp.concurrency.as_ref().expect("every version has a rule");
    let key = ["a:{key}", "b:{key}", "c:{key}:{tenant}"].into_iter().find(|key| *key == stamped.value.keys[0].to_string());
    let (kind, limit, mode) = (stamped.value.kind, stamped.value.limit, stamped.value.mode);
    let source = stamped.source.to_string();
    let digest = source.strip_prefix("handler work@").unwrap_or_else(|| panic!("{source}"));
    (Rule { kind, key: key.expect("a key that was declared"), limit, mode }, digest.to_owned())
}

/// What the test saw of jobs while they ran or waited.
#[derive(Default)]
struct Seen {
    stamps: HashMap<String, Stamp>,
    running: usize,
    parked: usize,
}

impl Seen {
    /// Takes note of everybody who has started or is parked now.
    fn look(&mut self, scene: &Scene) {
        let filter = JobFilter { states: vec![State::Enqueued, State::Processing], limit: 10_000, ..JobFilter::default() };
        let jobs = scene.runtime.block_on(scene.store.jobs(filter)).expect("the store answers");
        for summary in jobs.iter().filter(|job| job.parked || job.state == State::Processing) {
            *(if summary.parked { &mut self.parked } else { &mut self.running }) += 1;
            let id = summary.id.to_string();
            if let Entry::Vacant(place) = self.stamps.entry(id) {
                let stamp = scene.job(place.key()).stamp;
                place.insert(stamp.unwrap_or_else(|| panic!("it has started and has no stamp: {summary:?}")));
            }
        }
    }
}

/// Waits until every host serves this version.
#[track_caller]
fn until_replaced(hosts: &[Host], digest: &str) {
    for host in hosts {
        host.wait_for("the replacement", |line| line.contains("\"plugin replaced") && line.contains(&format!("\"digest\":\"{digest}\"")));
    }
}

fn resident(host: &Host) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn replacements_under_load_change_nothing_for_whoever_has_started(scene: &Scene) {
    // Several hosts compile each version on the same cores, so a server gets all hundred in the long run only.
    let replacements = if scene.ground.on_server() { size(20, 100) } else { 100 };
    let (backlog, more) = (size(200, 2000), size(8, 40));
    // A comment makes the file of each version another one, though the rules come back every dozen.
    let handler = |version: usize| format!("# {version}\n[contract.work]\n[handler.work]\n{}", Rule::of(version).declaration());
    // Digest to version, in the order of publishing.
    let mut published = HashMap::from([(scene.publish(&handler(0)), 0)]);
    let hosts = scene.start_hosts(&["--workers", "16"]);
    let at_start: Vec<u64> = hosts.iter().map(resident).collect();
    let begun = std::time::Instant::now();

    let payload = |job: usize| format!(r#"{{"key":"k{}","tenant":"t{}","ms":"250","job":"{job}"}}"#, job % KEYS, job % 3);
    // The oldest version that may be written on a job.
    let mut ids: Vec<(String, usize)> = scene.enqueue("work", (0..backlog).map(payload)).into_iter().map(|id| (id, 0)).collect();
    let mut seen = Seen::default();
    for version in 1..=replacements {
        seen.look(scene);
        let digest = scene.publish(&handler(version));
        until_replaced(&hosts, &digest);
        published.insert(digest, version);
        // Enqueued after it serves, so the rules are the new ones: no other version comes before it is claimed
        // or seen as parked.
        let new = scene.enqueue("work", (0..more).map(|job| payload(version * more + job)));
        ids.extend(new.into_iter().map(|id| (id, version)));
    }
    assert_eq!(published.len(), 1 + replacements, "two versions are the same");
    scene.until("the end of every job", |overview| ended(overview) == ids.len() as u64);
    eprintln!("{replacements} replacements under {} jobs in {} hosts: {:.1?}", ids.len(), hosts.len(), begun.elapsed());
    eprintln!("at the replacements {} ran and {} were parked, {} jobs in all", seen.running, seen.parked, seen.stamps.len());
    let at_end: Vec<u64> = hosts.iter().map(resident).collect();
    eprintln!("resident: {at_start:?} KiB at the start, {at_end:?} KiB at the end");
    // A version that were kept would keep a compiled component and its place in the pool.
    let grown = at_start.iter().zip(&at_end).any(|(start, end)| *end >= start + (64 << 10));
    assert!(!grown, "the memory of old versions does not come back: {at_start:?} KiB, then {at_end:?} KiB");
    assert!(seen.running > 0 && seen.parked > 0, "nothing ran or waited when the plugin was replaced");

    let (mut overtaken, mut new_rules) = (0, 0);
    for (id, oldest) in &ids {
        let job = scene.job(id);
        let stamp = job.stamp.as_ref().unwrap_or_else(|| panic!("no stamp: {job:?}"));
        if let Some(before) = seen.stamps.get(id) {
            assert_eq!(before, stamp, "the rules of {id} have changed");
        }
        let (rule, digest) = stamped(stamp);
        let version = *published.get(&digest).unwrap_or_else(|| panic!("nobody published {digest}: {job:?}"));
        assert_eq!(rule, Rule::of(version), "{job:?}");
        assert!(version >= *oldest, "enqueued when version {oldest} served, it follows version {version}: {job:?}");
        new_rules += usize::from(version == *oldest && version > 0);
        let ran = digests(&job);
        assert!(ran.iter().all(|digest| published.contains_key(digest)), "{job:?}");
        match job.summary.state {
            State::Completed => {
                assert_eq!((ran.len(), job.summary.attempts), (1, 1), "{job:?}");
                let on = published[&ran[0]];
                assert!(on >= version, "it ran on version {on} with the rules of version {version}: {job:?}");
                overtaken += usize::from(on > version);
            }
            State::Deleted => {
                assert_eq!((ran.len(), rule.mode), (0, Mode::Skip), "{job:?}");
            }
            other => panic!("{other:?}: {job:?}"),
        }
    }
    eprintln!("{overtaken} jobs ran on a newer version under the rules of an older one, {new_rules} took the version of their day");
    assert!(overtaken > 0, "nobody waited across a replacement");
    assert!(new_rules > replacements, "new jobs do not take the new rules");
    for host in hosts {
        host.stop();
    }
}

/// The plugin version of each start.
fn digests(job: &JobDetails) -> Vec<String> {
    let starts = job.audit.iter().filter(|row| row.event == "Processing");
    starts.map(|row| row.digest.expect("a start names its version").to_string()).collect()
}

fn five_that_wait_while_the_limit_is_raised_stay_at_the_old_one_until_an_operator_sets_it(scene: &Scene) {
    let handlers = |limit: u32| {
        format!("[contract.hold]\n[handler.hold]\nsemaphore = {{ key = \"bank\", limit = {limit} }}\n[contract.work]\n[handler.work]")
    };
    let old = scene.publish(&handlers(1));
    let hosts = scene.start_hosts(&["--workers", "16"]);
    let hold = |count: usize| scene.enqueue("hold", (0..count).map(|_| r#"{"does":"hold","key":"bank","gate":"gate"}"#.to_owned()));
    let started = || scene.ledger().entries.iter().filter(|entry| entry.key == "bank").count();
    let holder = hold(1).remove(0);
    scene.until("the first to start", |_| started() == 1);
    let five = hold(5);
    scene.until("the others to wait", |overview| overview.parked == 5);

    let new = scene.publish(&handlers(10));
    until_replaced(&hosts, &new);
    // A job of the new version that has run to its end proves that new jobs are claimed under it, beside those who wait.
    let probe = scene.enqueue("work", [r#"{"ms":"0","key":"probe"}"#.to_owned()]).remove(0);
    let probed = scene.until_job(&probe, "a job on the new version", |job| job.summary.state == State::Completed);
    assert_eq!(digests(&probed), std::slice::from_ref(&new));
    assert_eq!(started(), 1, "somebody started beside a holder at limit 1");
    for (at, id) in five.iter().enumerate() {
        let shown = scene.ground.run(&["jobs", "show", id, "--json"]).json();
        assert_eq!(shown["stamp"]["concurrency"]["limit"], 1, "{shown}");
        assert_eq!(shown["stamp"]["concurrency"]["source"], format!("handler hold@{old}"), "{shown}");
        let waiting = &shown["waiting"];
        assert_eq!((&waiting["for"], &waiting["place"]), (&"key".into(), &(at + 1).into()), "{shown}");
        assert_eq!((&waiting["limit"], &waiting["limit_from"]), (&1.into(), &"stamp".into()), "{shown}");
    }
    // One of the new version is at ten, and yet nobody starts beside a holder at one.
    let sixth = hold(1).remove(0);
    let waits = scene.until_job(&sixth, "the new one to wait", |job| job.summary.parked);
    assert_eq!(waits.stamp.and_then(|stamp| stamp.concurrency).map(|stamped| stamped.value.limit), Some(10));
    assert!(matches!(waits.waiting, Some(Waiting::ForKey { limit: 10, limit_is_admin: false, .. })), "{:?}", waits.waiting);

    scene.ground.run(&["limits", "set", "bank", "10"]).good();
    scene.until("all to run at once", |_| started() == 7);
    scene.ground.write("out/gate", "");
    for id in five.iter().chain([&holder, &sixth]) {
        let job = scene.until_job(id, "its end", |job| job.summary.state.is_final());
        assert_eq!(job.summary.state, State::Completed, "{job:?}");
        let limit = job.stamp.and_then(|stamp| stamp.concurrency).map(|stamped| stamped.value.limit);
        assert_eq!(limit, Some(if *id == sixth { 10 } else { 1 }), "an admin limit changes no stamp");
    }
    assert_eq!(scene.ledger().most_at_once()["bank"], 7);
    for host in hosts {
        host.stop();
    }
}
