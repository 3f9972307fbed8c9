//! What the product promises, kept by real processes: hosts that are the shipped program, a handler that keeps a
//! ledger outside of them, and a test that compares the ledger with what the database says.
//!
//! What must stay true: whether two attempts overlapped is read from the ledger alone, never from the host's own
//! account. Figures are printed, not asserted, except where the promise itself is a time.
//!
//! `WARP_SOAK=1` runs the same tests at the sizes of a long night (`cargo xtask soak`).

/// Makes two tests of each function, on a file and on a server. The function is given the scene.
macro_rules! on_each_scene {
    ($($test:ident)*) => {
        mod sqlite {
            $(#[test] fn $test() { super::$test(&crate::acceptance::Scene::new()) })*
        }
        mod postgres {
            $(#[test] fn $test() { super::$test(&crate::acceptance::Scene::on(crate::Ground::on_empty_server())) })*
        }
    };
}

/// Makes a test of each function, on a server whose slots are session locks.
macro_rules! on_session_locks {
    ($($test:ident)*) => {
        mod session_locks {
            $(#[test] fn $test() { super::$test(&crate::acceptance::Scene::on(crate::Ground::on_session_locks())) })*
        }
    };
}

mod crowd;
mod killed;
mod replaced;
mod shipped;
mod stopped;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use warp_domain::{Digest, JobId};
use warp_store::{JobDetails, Overview, Store};

use crate::Ground;
use crate::stage::now;

/// No wait of these tests is longer: what has not happened by then on a busy machine does not happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// How soon the database is looked at again where nothing announces a change.
const AGAIN: Duration = Duration::from_millis(20);

/// The larger number where somebody asked for a long run.
pub(crate) fn size(usual: usize, soak: usize) -> usize {
    if std::env::var_os("WARP_SOAK").is_some() { soak } else { usual }
}

/// The workspace's target directory: guests and compiled code are kept there between runs.
pub(crate) fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

fn build(manifest: &str, package: &str) {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--release", "--target", "wasm32-wasip2", "--package", package, "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest))
        .arg("--target-dir")
        .arg(target().join("test-guests"))
        .status()
        .expect("cargo starts");
    assert!(status.success(), "{package} does not build");
}

fn built(name: &str) -> PathBuf {
    target().join("test-guests/wasm32-wasip2/release").join(name)
}

/// The guest that keeps the ledger, built on first use.
pub(crate) fn ledger_guest() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| build("tests/guests/Cargo.toml", "ledger"));
    built("ledger.wasm")
}

/// The guest whose start code never ends, which is the plugin host's.
fn spinning_start_guest() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| build("../plugin-host/tests/guests/Cargo.toml", "spinning-start"));
    built("spinning_start.wasm")
}

/// Nanoseconds of the wall clock, as the guest writes them.
pub(crate) fn wall() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_nanos()).expect("before the year 2554")
}

/// Directory, database and plugins of one test, and the eyes of the test on all three.
struct Scene {
    ground: Ground,
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn Store>,
}

impl Scene {
    /// On a SQLite file.
    fn new() -> Self {
        Scene::on(Ground::new())
    }

    /// An empty database, an empty plugins directory, and the folder of the ledger granted to the plugin `ledger`.
    fn on(ground: Ground) -> Self {
        ground.run(&["migrate"]).good();
        for folder in ["plugins", "out"] {
            std::fs::create_dir(ground.path(folder)).expect("a directory");
        }
        ground.write("warp.toml", format!("cache = {:?}\n[grant.ledger]\nfiles = {{ out = \"out\" }}\n", target().join("test-cache")));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let store = runtime.block_on(ground.store());
        Scene { ground, runtime, store }
    }

    /// How many processes share the database: two where they share a file, three on a server.
    fn hosts(&self) -> usize {
        if self.ground.on_server() { 3 } else { 2 }
    }

    /// Starts so many, each with these arguments, and waits until each has loaded the ledger.
    #[track_caller]
    fn start_hosts(&self, args: &[&str]) -> Vec<Host> {
        (0..self.hosts()).map(|_| Host::start(self, args, "ledger.wasm")).collect()
    }

    /// Puts the ledger guest with these handlers into the plugins directory, in place of what was there. Returns
    /// its digest as the program prints it.
    fn publish(&self, handlers: &str) -> String {
        let manifest = format!(
            "format = 1\n[plugin]\nname = \"ledger\"\nversion = \"1.0.0\"\n{handlers}\n[capabilities]\nfiles = [{{ path = \"out\", mode = \"write\" }}]\n"
        );
        self.ground.write("ledger.toml", manifest);
        let guest = ledger_guest();
        let guest = guest.to_str().expect("a path in UTF-8");
        self.ground.run(&["pack", guest, "ledger.toml", "-o", "plugins/ledger.wasm", "--force"]).good();
        digest_of(&self.ground.path("plugins/ledger.wasm")).to_string()
    }

    /// Enqueues one job for each payload. Returns their ids in that order.
    fn enqueue(&self, contract: &str, payloads: impl IntoIterator<Item = String>) -> Vec<String> {
        let batch: String = payloads.into_iter().map(|payload| payload + "\n").collect();
        self.ground.write("batch.jsonl", batch);
        let ended = self.ground.run(&["enqueue", contract, "--batch", "batch.jsonl", "--json"]);
        let mut verdicts: Vec<(u64, String)> = ended
            .good()
            .lines()
            .map(|line| {
                let verdict: serde_json::Value = serde_json::from_str(line).expect("JSON");
                assert_eq!(verdict["verdict"], "enqueued", "{verdict}");
                (verdict["line"].as_u64().expect("a line"), verdict["id"].as_str().expect("an id").to_owned())
            })
            .collect();
        verdicts.sort_unstable();
        verdicts.into_iter().map(|(_, id)| id).collect()
    }

    /// Waits until the database as a whole looks like this.
    #[track_caller]
    fn until(&self, what: &str, mut holds: impl FnMut(&Overview) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let overview = self.runtime.block_on(self.store.overview()).expect("the store answers");
            if holds(&overview) {
                return;
            }
            assert!(Instant::now() < deadline, "{what} has not come about: {overview:?}");
            // What makes a job runnable ends the wait at once; an end that hands nothing on is seen by looking again.
            let _ = self.runtime.block_on(async { tokio::time::timeout(AGAIN, self.store.changed()).await });
        }
    }

    /// Waits until a job looks like this.
    #[track_caller]
    fn until_job(&self, id: &str, what: &str, mut holds: impl FnMut(&JobDetails) -> bool) -> JobDetails {
        let mut found = None;
        self.until(what, |_| {
            let details = self.job(id);
            holds(&details).then(|| found = Some(details)).is_some()
        });
        found.expect("what was waited for")
    }

    fn job(&self, id: &str) -> JobDetails {
        let id: JobId = id.parse().expect("an id");
        self.runtime.block_on(self.store.job(id, now())).expect("the store answers").expect("the job is there")
    }

    fn ledger(&self) -> Ledger {
        Ledger::read(&self.ground.path("out"))
    }
}

fn digest_of(file: &Path) -> Digest {
    use sha2::Digest as _;
    Digest(sha2::Sha256::digest(std::fs::read(file).expect("a file")).into())
}

/// How many jobs have ended, whichever way.
pub(crate) fn ended(overview: &Overview) -> u64 {
    use warp_domain::ending::State::{Completed, Deleted, Failed};
    [Completed, Deleted, Failed].iter().filter_map(|state| overview.states.get(state)).sum()
}

// ------------------------------------------------------------------------------------------------- hosts

/// A running `warp-host run`, killed when the test lets go of it.
pub(crate) struct Host {
    child: Child,
    lines: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Host {
    /// Starts a host and waits until it has loaded the plugin in `file`.
    #[track_caller]
    fn start(scene: &Scene, args: &[&str], file: &str) -> Self {
        Host::spawn(scene.ground.command(), args, file)
    }

    /// The same for a program that is ready to be given arguments.
    #[track_caller]
    pub(crate) fn spawn(mut command: Command, args: &[&str], file: &str) -> Self {
        command.args(["run", "--log-format", "json", "--log-level", "info,warp_host=debug"]).args(args);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let stderr = child.stderr.take().expect("a pipe");
        let lines = Arc::<(Mutex<Vec<String>>, Condvar)>::default();
        let heard = Arc::clone(&lines);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                heard.0.lock().expect("no panic").push(line);
                heard.1.notify_all();
            }
        });
        let host = Host { child, lines };
        host.wait_for("the plugin to load", |line| line.contains("\"plugin loaded\"") && line.contains(&format!("\"{file}\"")));
        host
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of its log, printed before or from now on.
    #[track_caller]
    pub(crate) fn wait_for(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let (lines, news) = &*self.lines;
        let lines = lines.lock().expect("no panic");
        let waiting = |lines: &mut Vec<String>| !lines.iter().any(|line| wanted(line));
        let (lines, _) = news.wait_timeout_while(lines, PATIENCE, waiting).expect("no panic");
        let found = lines.iter().find(|line| wanted(line)).cloned();
        found.unwrap_or_else(|| panic!("still waiting for {what}; the host's log:\n{}", lines.join("\n")))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Stops it gracefully and returns its numbers.
    #[track_caller]
    pub(crate) fn stop(mut self) -> serde_json::Value {
        self.signal(Signal::TERM);
        let line = self.wait_for("its numbers", |line| line.contains("\"numbers of this host\""));
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
        serde_json::from_str::<serde_json::Value>(&line).expect("JSON")["fields"].take()
    }

    /// `kill -9`. Returns the instant before, on the ledger's clock.
    pub(crate) fn kill(&mut self) -> u64 {
        let at = wall();
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
        at
    }
}

impl Host {
    /// Whether the process is still the one that was started.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// The lines of its log that are like this.
    pub(crate) fn lines(&self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        self.lines.0.lock().expect("no panic").iter().filter(|line| wanted(line)).cloned().collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let lines = self.lines.0.lock().map(|lines| lines.join("\n")).unwrap_or_default();
            eprintln!("---- the log of host {}\n{lines}", self.child.id());
        }
    }
}

// ------------------------------------------------------------------------------------------------- the ledger

/// One attempt as its guest wrote it down. Instants are nanoseconds of the wall clock.
#[derive(Debug, Clone)]
struct Entry {
    job: String,
    run: u32,
    token: u64,
    key: String,
    start: u64,
    /// Absent if the attempt was stopped or its host killed.
    end: Option<u64>,
}

/// Every attempt that has started.
struct Ledger {
    entries: Vec<Entry>,
}

impl Ledger {
    fn read(folder: &Path) -> Self {
        let mut entries = Vec::new();
        for file in std::fs::read_dir(folder).expect("a folder") {
            let path = file.expect("an entry").path();
            if path.extension().is_none_or(|suffix| suffix != "start") {
                continue;
            }
            let stem = path.file_stem().expect("a name").to_str().expect("UTF-8");
            let mut parts = stem.rsplitn(3, '-');
            let (token, run, job) = (parts.next(), parts.next(), parts.next().expect("three parts"));
            let (start, key) = Self::line(&path).unwrap_or_else(|| {
                // The host was killed between creating the file and writing it: the attempt had begun by then.
                let made = path.metadata().and_then(|about| about.modified()).expect("a time");
                let since = made.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
                (u64::try_from(since.as_nanos()).expect("before the year 2554"), "none".to_owned())
            });
            entries.push(Entry {
                job: job.to_owned(),
                run: run.expect("three parts").parse().expect("a number"),
                token: token.expect("three parts").parse().unwrap_or(0),
                key,
                start,
                end: Self::line(&path.with_extension("end")).map(|(end, _)| end),
            });
        }
        entries.sort_by_key(|entry| entry.start);
        Ledger { entries }
    }

    fn line(path: &Path) -> Option<(u64, String)> {
        let text = std::fs::read_to_string(path).ok()?;
        let (at, key) = text.split_once(' ')?;
        Some((at.parse().expect("a number"), key.to_owned()))
    }

    /// The most attempts of each key that ran at one moment. Every attempt must have an end.
    fn most_at_once(&self) -> BTreeMap<String, usize> {
        let mut moments: BTreeMap<&str, Vec<(u64, i32)>> = BTreeMap::new();
        for Entry { key, start, end, job, run, .. } in &self.entries {
            let end = end.unwrap_or_else(|| panic!("run {run} of {job} has no end"));
            moments.entry(key).or_default().extend([(*start, 1), (end, -1)]);
        }
        let most = |mut of: Vec<(u64, i32)>| {
            // An end before a start of the same instant: they touch, and do not overlap.
            of.sort_unstable();
            of.iter()
                .scan(0i32, |now, (_, change)| {
                    *now += change;
                    Some(*now)
                })
                .max()
                .unwrap_or(0)
        };
        moments.into_iter().map(|(key, of)| (key.to_owned(), usize::try_from(most(of)).unwrap_or(0))).collect()
    }

    /// Of two holders of a key the later has the larger token.
    #[track_caller]
    fn assert_tokens_grow(&self) {
        let mut last: BTreeMap<&str, &Entry> = BTreeMap::new();
        for entry in &self.entries {
            if let Some(before) = last.insert(&entry.key, entry) {
                assert!(before.token < entry.token, "{entry:?} came after {before:?}");
            }
        }
    }
}
