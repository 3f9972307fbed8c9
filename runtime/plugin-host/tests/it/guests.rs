//! Builds the guests once, compiles them once, and plays the host around one attempt.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use warp_domain::ending::Outcome;
use warp_domain::{Digest, JobId};
use warp_pipeline::{AttemptInfo, Child, ChildRefused, HostCalls, Level, StateFault, StateOp, StateReply, StopSignal};
use warp_plugin_host::{Cache, Caps, CodeLoader, Engine, EngineConfig, Loader, Permissions, RunStats, Runnable};

/// The workspace's target directory, where everything built by tests is kept between runs.
pub fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

/// The bytes of a guest of `tests/guests`, built on first use.
pub fn guest(name: &str) -> &'static [u8] {
    static BUILT: OnceLock<()> = OnceLock::new();
    static HOSTILE: OnceLock<Vec<u8>> = OnceLock::new();
    static SMALL: OnceLock<Vec<u8>> = OnceLock::new();
    static SPINNING_START: OnceLock<Vec<u8>> = OnceLock::new();
    let out = target().join("test-guests");
    BUILT.get_or_init(|| {
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--release", "--target", "wasm32-wasip2", "--manifest-path"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests/Cargo.toml"))
            .arg("--target-dir")
            .arg(&out)
            .status()
            .expect("cargo starts");
        assert!(status.success(), "the guests do not build");
    });
    let read = || std::fs::read(out.join(format!("wasm32-wasip2/release/{name}.wasm"))).expect("cargo said that it built it");
    match name {
        "hostile" => HOSTILE.get_or_init(read),
        "small" => SMALL.get_or_init(read),
        "spinning_start" => SPINNING_START.get_or_init(read),
        other => panic!("no guest is called {other}"),
    }
}

pub fn digest(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// One engine for all tests that do not need one of their own, as in a host.
pub fn engine() -> Arc<Engine> {
    static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();
    Arc::clone(ENGINE.get_or_init(|| new_engine(&EngineConfig { slots: 64, ..EngineConfig::default() })))
}

pub fn new_engine(config: &EngineConfig) -> Arc<Engine> {
    Engine::new(config).expect("this machine runs WebAssembly")
}

/// Compiled code is kept between test runs.
pub fn code(engine: &Arc<Engine>) -> CodeLoader {
    let cache = Cache::open(&target().join("test-cache"), engine).expect("the cache opens");
    CodeLoader::new(Arc::clone(engine), Some(cache), Duration::from_secs(300)).expect("a compile thread")
}

pub async fn runnable_on(engine: &Arc<Engine>, name: &str, permissions: Permissions, caps: Caps) -> Arc<Runnable> {
    let bytes = guest(name);
    let component = code(engine).component(bytes.into(), digest(bytes)).await.expect("it compiles");
    Arc::new(Runnable::new(Arc::clone(engine), &component, digest(bytes), permissions, caps).expect("it links"))
}

pub async fn hostile() -> Arc<Runnable> {
    runnable_on(&engine(), "hostile", Permissions::default(), Caps::default()).await
}

pub fn attempt(payload: &str) -> AttemptInfo {
    AttemptInfo {
        job_id: JobId(7),
        contract: "contract".to_owned(),
        handler: "handler".to_owned(),
        payload: payload.into(),
        run: 3,
        attempt: 2,
        queue: "default".to_owned(),
        metadata: vec![("tenant".to_owned(), "ä".to_owned())],
        trace_parent: None,
        time_left: Some(Duration::from_millis(1234)),
        fencing_token: Some("99".to_owned()),
    }
}

/// A host that keeps what it is told.
#[derive(Default)]
pub struct Recorder {
    pub lines: Mutex<Vec<(Level, String)>>,
    pub dropped: Mutex<(u64, u64)>,
    pub progress: Mutex<Vec<(String, f32)>>,
    pub children: Mutex<Vec<Child>>,
    pub state: Mutex<std::collections::BTreeMap<(String, String), String>>,
    pub state_ops: Mutex<Vec<(String, bool)>>,
    pub cancelled: std::sync::atomic::AtomicBool,
    pub holds_slot: std::sync::atomic::AtomicBool,
    pub panic_on_child: std::sync::atomic::AtomicBool,
    /// Notified on every line and every progress report.
    pub heard: Notify,
}

impl Recorder {
    pub fn lines_of(&self, level: Level) -> Vec<String> {
        self.lines.lock().expect("no panic").iter().filter(|(of, _)| *of == level).map(|(_, text)| text.clone()).collect()
    }
}

#[async_trait::async_trait]
impl HostCalls for Recorder {
    fn line(&self, level: Level, text: String) {
        self.lines.lock().expect("no panic").push((level, text));
        self.heard.notify_one();
    }

    fn dropped(&self, lines: u64, bytes: u64) {
        *self.dropped.lock().expect("no panic") = (lines, bytes);
    }

    fn progress(&self, name: String, percent: f32) {
        let mut progress = self.progress.lock().expect("no panic");
        progress.retain(|(of, _)| *of != name);
        progress.push((name, percent));
        self.heard.notify_one();
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(std::sync::atomic::Ordering::Acquire)
    }

    fn enqueue(&self, child: Child) -> Result<JobId, ChildRefused> {
        assert!(!self.panic_on_child.load(std::sync::atomic::Ordering::Acquire), "a defect of the host");
        let mut children = self.children.lock().expect("no panic");
        children.push(child);
        Ok(JobId(children.len() as u128))
    }

    fn holds_slot(&self) -> bool {
        self.holds_slot.load(std::sync::atomic::Ordering::Acquire)
    }

    async fn state(&self, bucket: &str, key: &str, op: StateOp, at_once: bool) -> Result<StateReply, StateFault> {
        // Another thread answers in a real host.
        tokio::task::yield_now().await;
        self.state_ops.lock().expect("no panic").push((format!("{op:?}"), at_once));
        let mut state = self.state.lock().expect("no panic");
        let place = (bucket.to_owned(), key.to_owned());
        let now = state.get(&place).cloned();
        let next = match op {
            StateOp::Get => return Ok(StateReply::Value(now)),
            StateOp::Put(value) => value,
            StateOp::CompareAndSet { expected, value } if expected == now => value,
            StateOp::CompareAndSet { .. } => return Ok(StateReply::Differs),
            StateOp::Add(amount) => {
                let number = now.as_deref().unwrap_or("0").parse::<i128>().map_err(|e| StateFault::NotANumber(e.to_string()))?;
                Some((number + amount).to_string())
            }
        };
        match &next {
            Some(value) => state.insert(place, value.clone()),
            None => state.remove(&place),
        };
        Ok(StateReply::Value(next))
    }
}

/// Runs one attempt that nobody stops.
pub async fn run(runnable: &Arc<Runnable>, payload: &str) -> (Outcome, RunStats, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let (outcome, stats) = run_with(runnable, payload, &recorder, &Arc::default()).await;
    (outcome, stats, recorder)
}

pub async fn run_with(runnable: &Arc<Runnable>, payload: &str, recorder: &Arc<Recorder>, stop: &Arc<StopSignal>) -> (Outcome, RunStats) {
    runnable.run(attempt(payload), Arc::clone(recorder) as Arc<dyn HostCalls>, Arc::clone(stop)).await
}

/// A loader with the shared cache of compiled code.
pub fn plugin_loader() -> Arc<Loader> {
    let engine = engine();
    Arc::new(Loader::new(Arc::clone(&engine), code(&engine), Caps::default(), 64 << 20))
}
