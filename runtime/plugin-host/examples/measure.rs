//! What an attempt costs, and how fast a guest stops. Prints a table; asserts nothing.
//!
//! ```text
//! cargo test -p warp-plugin-host --test it stopping      # builds the guests
//! cargo run --release -p warp-plugin-host --example measure -- plugins/noop.wasm target/test-guests/wasm32-wasip2/release/hostile.wasm
//! ```
//!
//! The first component is called with an empty payload, over and over; the native row is the same call of a
//! handler that does nothing, so that the difference is what WebAssembly costs. The second is the tests' guest, which
//! is told to spin or to sleep and then stopped.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use warp_domain::ending::{Outcome, Said};
use warp_domain::{Digest, JobId};
use warp_pipeline::{AttemptInfo, Child, ChildRefused, Handler, HostCalls, Level, StateFault, StateOp, StateReply, StopReason, StopSignal};
use warp_plugin_host::{Caps, CodeLoader, Directory, Engine, EngineConfig, Permissions, Runnable};

const ATTEMPTS: usize = 20_000;
const STOPS: usize = 100;

/// A host that takes everything and keeps nothing.
#[derive(Default)]
struct Deaf(Notify);

#[async_trait]
impl HostCalls for Deaf {
    fn line(&self, _: Level, _: String) {
        self.0.notify_one();
    }
    fn dropped(&self, _: u64, _: u64) {}
    fn progress(&self, _: String, _: f32) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn enqueue(&self, _: Child) -> Result<JobId, ChildRefused> {
        Ok(JobId(0))
    }
    fn holds_slot(&self) -> bool {
        false
    }
    async fn state(&self, _: &str, _: &str, _: StateOp, _: bool) -> Result<StateReply, StateFault> {
        Ok(StateReply::Value(None))
    }
}

struct Native;

#[async_trait]
impl Handler for Native {
    async fn run(&self, _: AttemptInfo, _: Arc<dyn HostCalls>, _: Arc<StopSignal>) -> Outcome {
        Outcome::Said(Said::Completed(None))
    }
}

struct Wasm(Arc<Runnable>);

#[async_trait]
impl Handler for Wasm {
    async fn run(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> Outcome {
        self.0.run(attempt, calls, stop).await.0
    }
}

fn attempt(payload: &str) -> AttemptInfo {
    AttemptInfo {
        job_id: JobId(1),
        contract: "noop".to_owned(),
        handler: "noop".to_owned(),
        payload: payload.into(),
        run: 1,
        attempt: 1,
        queue: "default".to_owned(),
        metadata: Vec::new(),
        trace_parent: None,
        time_left: Some(Duration::from_secs(60)),
        fencing_token: None,
    }
}

/// Median and 99th percentile in microseconds.
fn quantiles(mut spans: Vec<Duration>) -> (f64, f64) {
    spans.sort();
    let at = |q: f64| spans[((spans.len() - 1) as f64 * q) as usize].as_secs_f64() * 1e6;
    (at(0.5), at(0.99))
}

async fn attempts(handler: Arc<dyn Handler>, at_once: usize) -> (f64, f64, f64) {
    let began = Instant::now();
    let tasks: Vec<_> = (0..at_once)
        .map(|_| {
            let handler = Arc::clone(&handler);
            tokio::spawn(async move {
                let mut spans = Vec::with_capacity(ATTEMPTS / at_once);
                for _ in 0..ATTEMPTS / at_once {
                    let began = Instant::now();
                    handler.run(attempt("{}"), Arc::<Deaf>::default(), Arc::default()).await;
                    spans.push(began.elapsed());
                }
                spans
            })
        })
        .collect();
    let mut spans = Vec::new();
    for task in tasks {
        spans.extend(task.await.unwrap_or_default());
    }
    let per_second = spans.len() as f64 / began.elapsed().as_secs_f64();
    let (median, p99) = quantiles(spans);
    (median, p99, per_second)
}

/// From the stop to the answer.
async fn stops(runnable: &Arc<Runnable>, payload: &str) -> (f64, f64) {
    let mut spans = Vec::new();
    for _ in 0..STOPS {
        let (calls, stop) = (Arc::<Deaf>::default(), Arc::<StopSignal>::default());
        let (runnable, heard, signal) = (Arc::clone(runnable), Arc::clone(&calls), Arc::clone(&stop));
        let payload = payload.to_owned();
        let task = tokio::spawn(async move { runnable.run(attempt(&payload), calls, signal).await });
        // A guest that only sleeps says nothing and is given a moment.
        tokio::time::timeout(Duration::from_millis(20), heard.0.notified()).await.ok();
        let began = Instant::now();
        stop.stop(StopReason::TimedOut);
        if task.await.is_ok() {
            spans.push(began.elapsed());
        }
    }
    quantiles(spans)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(noop), Some(hostile)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: measure <component that does nothing> <the tests' hostile guest>");
        return ExitCode::FAILURE;
    };
    match measure(&noop, &hostile).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("failed to measure: {e}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(noop: &str, hostile: &str) -> Result<(), Box<dyn std::error::Error>> {
    for pooling in [true, false] {
        let engine = Engine::new(&EngineConfig { pooling, ..EngineConfig::default() })?;
        let code = CodeLoader::new(Arc::clone(&engine), None, Duration::from_secs(300))?;
        let with_files = Directory { host: std::env::temp_dir(), guest: "/in".to_owned(), writable: false };
        let with_files = Permissions { files: vec![with_files], ..Permissions::default() };
        let own_thread = load(&engine, &code, noop, with_files).await?;
        let noop = load(&engine, &code, noop, Permissions::default()).await?;
        println!("\nguest memory {}", if pooling { "pooled" } else { "on demand" });
        for at_once in [1, 2] {
            let wasm = |runnable: &Arc<Runnable>| Arc::new(Wasm(Arc::clone(runnable))) as Arc<dyn Handler>;
            for (name, handler) in [("native", Arc::new(Native) as _), ("component", wasm(&noop)), ("with files", wasm(&own_thread))] {
                let (median, p99, per_second) = attempts(handler, at_once).await;
                println!("  {name:<10} {at_once} at once: median {median:>8.1} µs, p99 {p99:>8.1} µs, {per_second:>9.0} a second");
            }
        }
        let hostile = load(&engine, &code, hostile, Permissions::default()).await?;
        for payload in ["print-then-spin ready", "sleep 1000000"] {
            let (median, p99) = stops(&hostile, payload).await;
            println!("  stop of `{payload}`: median {:>6.2} ms, p99 {:>6.2} ms", median / 1e3, p99 / 1e3);
        }
    }
    Ok(())
}

async fn load(
    engine: &Arc<Engine>,
    code: &CodeLoader,
    path: &str,
    permissions: Permissions,
) -> Result<Arc<Runnable>, Box<dyn std::error::Error>> {
    let bytes = std::fs::read(path)?;
    let digest = Digest(Sha256::digest(&bytes).into());
    let component = code.component(bytes.into(), digest).await?;
    Ok(Arc::new(Runnable::new(Arc::clone(engine), &component, digest, permissions, Caps::default())?))
}
