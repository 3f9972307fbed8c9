//! Everything bad that can be put before a host, through the shipped program: each piece of it has the exact text
//! that a person reads, and behind each the same host completes a good job.
//!
//! What must stay true: a host is started once for a table and outlives all of it, and the job that proves so comes
//! after the bad thing was noticed, never beside it.
//!
//! What is not here: what the library tests show already for one layer alone (`warp-manifest`: the manifest and its
//! section; `warp-plugin-host`: caps and reload with every detail).

mod database;
mod full_disk;
mod guests;
mod payloads;
mod plugins;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use warp_domain::JobId;
use warp_domain::ending::State;
use warp_store::{JobDetails, Store};
use warp_store_sqlite::{OpenOptions, SqliteStore};

use crate::Ground;
use crate::stage::now;

/// A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// The manifest of the plugin that is never at fault.
const GOOD: &str = "format = 1\n[plugin]\nname = \"good\"\nversion = \"1.0.0\"\n[handler.echo]\n";

/// The workspace's target directory: guests and compiled code are kept there between runs.
fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

/// A guest of the plugin host's tests, built on first use.
fn guest(name: &str) -> Vec<u8> {
    static BUILT: OnceLock<()> = OnceLock::new();
    let out = target().join("test-guests");
    BUILT.get_or_init(|| {
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--release", "--target", "wasm32-wasip2", "--manifest-path"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin-host/tests/guests/Cargo.toml"))
            .arg("--target-dir")
            .arg(&out)
            .status()
            .expect("cargo starts");
        assert!(status.success(), "the guests do not build");
    });
    std::fs::read(out.join(format!("wasm32-wasip2/release/{name}.wasm"))).expect("cargo said that it built it")
}

fn packed(guest: &[u8], manifest: &str) -> Vec<u8> {
    warp_manifest::pack(guest, manifest).expect("packable")
}

/// A directory of plugins, one of them good, and a database.
struct Site {
    ground: Ground,
    runtime: tokio::runtime::Runtime,
    store: SqliteStore,
}

impl Site {
    fn new() -> Self {
        Site::on(Ground::new(), "warp.db", "")
    }

    /// With the database at this place, and more settings.
    fn on(ground: Ground, database: &str, settings: &str) -> Self {
        let cache = target().join("test-cache");
        ground.write("warp.toml", format!("cache = {cache:?}\ndatabase.url = \"sqlite:{database}\"\n{settings}"));
        ground.run(&["migrate"]).good();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let store = runtime.block_on(SqliteStore::open(OpenOptions::new(ground.path(database)))).expect("opens");
        let site = Site { ground, runtime, store };
        site.put("good.wasm", packed(&guest("small"), GOOD));
        site
    }

    fn plugin(&self, name: &str) -> PathBuf {
        self.ground.path("plugins").join(name)
    }

    /// As every publisher should do it.
    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let aside = format!(".{name}.part");
        self.ground.write(&format!("plugins/{aside}"), bytes);
        std::fs::rename(self.plugin(&aside), self.plugin(name)).expect("renamable");
    }

    fn enqueue(&self, contract: &str, payload: &str) -> String {
        self.ground.run(&["enqueue", contract, "--payload", payload]).good().trim().to_owned()
    }

    fn job(&self, id: &str) -> JobDetails {
        let id: JobId = id.parse().expect("an id");
        self.runtime.block_on(self.store.job(id, now())).expect("the store answers").expect("what was acknowledged is there")
    }

    /// Waits until a job is as wanted.
    #[track_caller]
    fn until(&self, id: &str, what: &str, holds: impl Fn(&JobDetails) -> bool) -> JobDetails {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let job = self.job(id);
            if holds(&job) {
                return job;
            }
            assert!(Instant::now() < deadline, "{id} is not {what}: {job:?}");
            // New work of any process ends the wait; a claim tells nobody, so it is looked for.
            let _ = self.runtime.block_on(async { tokio::time::timeout(Duration::from_millis(100), self.store.changed()).await });
        }
    }

    #[track_caller]
    fn ended(&self, id: &str) -> JobDetails {
        self.until(id, "at its end", |job| matches!(job.summary.state, State::Completed | State::Failed | State::Deleted))
    }

    /// What everybody must be able to do after everything.
    #[track_caller]
    fn works(&self, host: &Host) {
        let job = self.ended(&self.enqueue("echo", "{\"n\": 1}"));
        assert_eq!((job.summary.state, job.result.as_deref()), (State::Completed, Some("{\"n\": 1}")), "{job:?}");
        assert_eq!(job.summary.runs, 1);
        host.assert_alive();
    }
}

/// A running `warp-host run`, killed when the test lets go of it.
struct Host {
    child: Mutex<Child>,
    log: Arc<(Mutex<Vec<Value>>, Condvar)>,
}

impl Host {
    /// Starts one and waits until the good plugin serves.
    #[track_caller]
    fn start(site: &Site) -> Self {
        let mut command = site.ground.command();
        command.args(["run", "--workers", "4", "--log-format", "json"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let stderr = child.stderr.take().expect("a pipe");
        let log = Arc::<(Mutex<Vec<Value>>, Condvar)>::default();
        let heard = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // What is said to people stands between the lines of the log.
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                heard.0.lock().expect("no panic").push(line);
                heard.1.notify_all();
            }
        });
        let host = Host { child: Mutex::new(child), log };
        host.wait_for(0, "the good plugin", |line| says(line, "plugin loaded", "good.wasm").then_some(()));
        host
    }

    /// How much it has said so far.
    fn said(&self) -> usize {
        self.log.0.lock().expect("no panic").len()
    }

    /// Waits for a line of its log, from the one with this number on.
    #[track_caller]
    fn wait_for<T>(&self, from: usize, what: &str, mut wanted: impl FnMut(&Value) -> Option<T>) -> T {
        let (log, news) = &*self.log;
        let log = log.lock().expect("no panic");
        let mut found = None;
        let mut next = from;
        let searching = |log: &mut Vec<Value>| {
            found = log.get(next..).unwrap_or_default().iter().find_map(&mut wanted);
            next = log.len().max(from);
            found.is_none()
        };
        let (log, _) = news.wait_timeout_while(log, PATIENCE, searching).expect("no panic");
        let heard = || log.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
        found.unwrap_or_else(|| panic!("still waiting for {what}; the host's log:\n{}", heard()))
    }

    /// The next refusal of a file, as it is logged.
    #[track_caller]
    fn refusal(&self, from: usize, file: &str) -> String {
        self.wait_for(from, &format!("a refusal of {file}"), |line| refusal_in(line, file))
    }

    #[track_caller]
    fn assert_alive(&self) {
        let ended = self.child.lock().expect("no panic").try_wait().expect("it is ours");
        assert!(ended.is_none(), "the host ended: {ended:?}");
    }

    /// Stops it gracefully.
    #[track_caller]
    fn stop(self) {
        let mut child = self.child.lock().expect("no panic");
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM).expect("it runs");
        let status = child.wait().expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // It may have ended already.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn says(line: &Value, message: &str, file: &str) -> bool {
    let fields = &line["fields"];
    fields["message"].as_str().is_some_and(|text| text.starts_with(message)) && fields["file"] == file
}

fn refusal_in(line: &Value, file: &str) -> Option<String> {
    says(line, "plugin refused", file).then(|| line["fields"]["reason"].as_str().expect("a reason").to_owned())
}

/// Compares with an expected text in which `…` stands for what differs from build to build.
#[track_caller]
fn assert_reads(what: &str, text: &str, expected: &str) {
    let good = match expected.split_once('…') {
        None => text == expected,
        Some((before, after)) => text.len() >= before.len() + after.len() && text.starts_with(before) && text.ends_with(after),
    };
    assert!(good, "{what}\nexpected {expected}\n     got {text}");
}
