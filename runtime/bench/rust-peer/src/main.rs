//! graphile_worker, a queue written in Rust on PostgreSQL, under the workloads of `cargo xtask bench-peers`.
//!
//! `rust-peer WORKLOAD '{"url": …, "jobs": …}'` prints one JSON object on its last line, as the peers for Node do.
//! It is set for throughput as its own benchmark sets it: a local queue, ends written in batches. It deletes a job that
//! has succeeded, so it keeps no history.
//!
//! A measuring program: whatever fails ends it with the error.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler, WorkerContext, WorkerOptions, WorkerUtils,
};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::sync::oneshot;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Nobody else's: it is dropped before each workload.
const SCHEMA: &str = "warp_bench_graphile_rs";

/// What the command line may set; the rest is as its benchmark has it.
#[derive(Clone, Serialize, Deserialize)]
struct Settings {
    #[serde(skip_serializing)]
    url: String,
    #[serde(default = "defaults::jobs")]
    jobs: usize,
    #[serde(default = "defaults::samples")]
    samples: usize,
    #[serde(default = "defaults::concurrency")]
    concurrency: usize,
    #[serde(default = "defaults::size")]
    size: usize,
    #[serde(default = "defaults::batch_ms")]
    batch_ms: u64,
    #[serde(default = "defaults::queues")]
    queues: usize,
    #[serde(default)]
    per_call: Option<usize>,
}

mod defaults {
    pub fn jobs() -> usize {
        100_000
    }
    pub fn samples() -> usize {
        300
    }
    pub fn concurrency() -> usize {
        500
    }
    pub fn size() -> usize {
        5000
    }
    pub fn batch_ms() -> u64 {
        5
    }
    pub fn queues() -> usize {
        1
    }
}

/// What a handler tells the measuring side.
#[derive(Clone, Debug, Default)]
struct Seen {
    done: Arc<AtomicU64>,
    waiting: Arc<Mutex<HashMap<usize, oneshot::Sender<Instant>>>>,
}

#[derive(Serialize, Deserialize)]
struct Noop {
    n: usize,
}

impl TaskHandler for Noop {
    const IDENTIFIER: &'static str = "noop";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        if let Some(seen) = ctx.get_ext::<Seen>() {
            seen.done.fetch_add(1, Ordering::Relaxed);
            let waiting = seen.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.n);
            if let Some(waiting) = waiting {
                // Nobody listens any more when the measurement is over.
                let _ = waiting.send(Instant::now());
            }
        }
        Ok::<(), String>(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let workload = args.next().unwrap_or_default();
    let settings: Settings = serde_json::from_str(&args.next().unwrap_or_default())?;
    let pool = fresh(&settings).await?;
    let mut found = match workload.as_str() {
        "burn" => burn(&settings, &pool).await?,
        "bulk" => bulk(&settings, &pool).await?,
        "latency" => latency(&settings, &pool).await?,
        other => return Err(format!("there is no workload {other:?}; there are burn, bulk and latency").into()),
    };
    found["version"] = "0.14.1".into();
    found["settings"] = serde_json::to_value(&settings)?;
    println!("{found}");
    // The worker has nothing to tidy up that a dropped schema does not.
    std::process::exit(0);
}

async fn fresh(settings: &Settings) -> Result<PgPool, Failure> {
    let pool = PgPoolOptions::new().max_connections(8).connect(&settings.url).await?;
    sqlx::query("drop schema if exists warp_bench_graphile_rs cascade").execute(&pool).await?;
    WorkerUtils::new(pool.clone(), SCHEMA).migrate().await?;
    Ok(pool)
}

/// Values are made before the clock starts; turning them into text is part of the call, as in ours.
async fn add_jobs(pool: &PgPool, jobs: usize, per_call: usize) -> Result<Duration, Failure> {
    let utils = WorkerUtils::new(pool.clone(), SCHEMA);
    let spec = |n: usize| RawJobSpec {
        identifier: Noop::IDENTIFIER.to_owned(),
        payload: serde_json::json!({ "n": n, "k": n % 100 }),
        spec: JobSpec::default(),
    };
    let specs: Vec<_> = (0..jobs).map(spec).collect();
    let begin = Instant::now();
    for batch in specs.chunks(per_call.max(1)) {
        utils.add_raw_jobs(batch).await?;
    }
    Ok(begin.elapsed())
}

fn options(settings: &Settings, pool: &PgPool, seen: &Seen) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(pool.clone())
        .schema(SCHEMA)
        .concurrency(settings.concurrency)
        .complete_job_batch_delay(Duration::from_millis(settings.batch_ms))
        .fail_job_batch_delay(Duration::from_millis(settings.batch_ms))
        .local_queue(LocalQueueConfig::default().with_size(settings.size).with_queue_count(settings.queues))
        .add_extension(seen.clone())
        .define_job::<Noop>()
}

async fn burn(settings: &Settings, pool: &PgPool) -> Result<serde_json::Value, Failure> {
    add_jobs(pool, settings.jobs, 10_000).await?;
    sqlx::query("vacuum analyze").execute(pool).await?;
    let seen = Seen::default();
    let begin = Instant::now();
    let worker = Arc::new(options(settings, pool, &seen).init().await?);
    let running = Arc::clone(&worker);
    tokio::spawn(async move { running.run().await });
    while seen.done.load(Ordering::Relaxed) < settings.jobs as u64 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // Done is when the ends are written.
    while sqlx::query_scalar::<_, bool>("select exists (select from warp_bench_graphile_rs._private_jobs)").fetch_one(pool).await? {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let rate = settings.jobs as f64 / begin.elapsed().as_secs_f64();
    Ok(serde_json::json!({ "jobs": settings.jobs, "jobs_per_s": rate }))
}

async fn bulk(settings: &Settings, pool: &PgPool) -> Result<serde_json::Value, Failure> {
    let took = add_jobs(pool, settings.jobs, settings.per_call.unwrap_or(settings.jobs)).await?;
    Ok(serde_json::json!({ "jobs": settings.jobs, "jobs_per_s": settings.jobs as f64 / took.as_secs_f64() }))
}

/// From the call that enqueues and from its answer to the handler's start, one job at a time on an idle worker.
async fn latency(settings: &Settings, pool: &PgPool) -> Result<serde_json::Value, Failure> {
    let seen = Seen::default();
    let worker = Arc::new(options(settings, pool, &seen).init().await?);
    let running = Arc::clone(&worker);
    tokio::spawn(async move { running.run().await });
    let utils = worker.create_utils();
    let warm_up = 100;
    let (mut from_call, mut from_answer) = (Vec::new(), Vec::new());
    for n in 0..warm_up + settings.samples {
        let (started, start) = oneshot::channel();
        seen.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(n, started);
        let called = Instant::now();
        utils.add_job(Noop { n }, JobSpec::default()).await?;
        let answered = Instant::now();
        let start = tokio::time::timeout(Duration::from_secs(30), start).await??;
        if n >= warm_up {
            from_call.push(start.saturating_duration_since(called).as_secs_f64() * 1e3);
            from_answer.push(start.saturating_duration_since(answered).as_secs_f64() * 1e3);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let [p50, p95, p99] = percentiles(from_call);
    let [answer_p50, _, answer_p99] = percentiles(from_answer);
    Ok(serde_json::json!({
        "samples": settings.samples, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99,
        "from_answer_p50_ms": answer_p50, "from_answer_p99_ms": answer_p99,
    }))
}

fn percentiles(mut samples: Vec<f64>) -> [Option<f64>; 3] {
    samples.sort_by(f64::total_cmp);
    [0.50, 0.95, 0.99].map(|part| samples.get((samples.len() as f64 * part) as usize).copied())
}
