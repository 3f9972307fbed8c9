//! `bench`: what this machine does.
//!
//! Each workload runs on a new database with durable commits, a host in this process and the same driver, worker
//! and engine as `run`. Nothing is asserted and nothing is tuned for it; the settings in force are part of each
//! row, so that figures of different days can be laid side by side.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::Serialize;
use tokio::sync::watch;
use warp_domain::ending::{Outcome as RunOutcome, Said};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, JobId};
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopSignal};
use warp_store::{EnqueueVerdict, NewJob, Store};
use warp_store_sqlite::{OpenOptions, SqliteStore};
use warp_worker::{Catalog, Host, HostConfig, HostReport, Offer, StopLevel, Surroundings};

use crate::args::BenchArgs;
use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::system::System;
use crate::{hosting, text};

/// One row of the report. The names are fixed: figures of different days are compared by them.
#[derive(Debug, Clone, Serialize)]
struct Row {
    store: &'static str,
    locks: &'static str,
    workload: String,
    jobs: u64,
    workers: u32,
    jobs_per_s: Option<f64>,
    /// From the commit of the enqueue to the handler's first instruction; for `attempt-…` the attempt itself.
    p50_ms: Option<f64>,
    p95_ms: Option<f64>,
    p99_ms: Option<f64>,
    /// Transactions, which is what SQLite has instead of round trips.
    statements_per_job: Option<f64>,
    wal_bytes_per_job: Option<f64>,
    /// Refusals after a job's first parking.
    refused_per_job: Option<f64>,
    peak_backends: Option<u32>,
    settings: serde_json::Value,
}

/// Every workload in the order in which they run.
const WORKLOADS: &[(&str, &str)] = &[
    ("native-noop", "a function that does nothing; the database alone"),
    ("noop", "a component that does nothing"),
    ("mutex", "the same over 100 mutex keys in Wait mode"),
    ("semaphore", "the same over one key whose limit is the number of workers"),
    ("one-key", "one mutex key, 5 ms of work each"),
    ("eight-keys", "eight mutex keys, 5 ms of work each"),
    ("no-key", "no key, 5 ms of work each"),
    ("waiters", "jobs without a key beside ten thousand that wait for one"),
    ("latency", "one job at a time on an idle host, enqueued in its process"),
    ("latency-other", "the same, enqueued over another connection as another process does"),
    ("handover", "a slot that is freed on one host and waited for on another, on connections of their own"),
    ("attempt", "one attempt of each plugin in the directory, without a database"),
    ("idle", "nothing to do for twenty seconds: memory and processor time"),
];

/// Measures.
pub fn bench(args: BenchArgs, config: Config) -> Outcome {
    for name in &args.workload {
        if WORKLOADS.iter().all(|(known, _)| known != name) {
            let known: Vec<_> = WORKLOADS.iter().map(|(name, what)| format!("\n  {name:<14} {what}")).collect();
            return Err(Failure::usage(format!("there is no workload {name:?}; the workloads are{}", known.concat())));
        }
    }
    let chosen = WORKLOADS.iter().filter(|(name, _)| args.workload.is_empty() || args.workload.iter().any(|asked| asked == name));
    let bench = Bench { args: &args, config: &config };
    let mut rows = Vec::new();
    for (name, _) in chosen {
        let progress = Progress::spinner(format!("{name} …"));
        let repeats = (0..args.repeat.max(1)).map(|_| bench.measure(name)).collect::<Outcome<Vec<_>>>()?;
        progress.finish();
        let found = median_rows(repeats);
        if config.json {
            found.iter().try_for_each(text::print_json)?;
        }
        rows.extend(found);
    }
    if !config.json {
        text::print(table(&rows))?;
    }
    Ok(())
}

fn table(rows: &[Row]) -> String {
    let number = |value: Option<f64>, digits: usize| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"));
    let lines = rows.iter().map(|row| {
        [
            row.workload.clone(),
            row.jobs.to_string(),
            row.workers.to_string(),
            number(row.jobs_per_s, 0),
            number(row.p50_ms, 3),
            number(row.p95_ms, 3),
            number(row.p99_ms, 3),
            number(row.statements_per_job, 3),
            number(row.refused_per_job, 3),
            row.settings["note"].as_str().unwrap_or_default().to_owned(),
        ]
    });
    text::table(["WORKLOAD", "JOBS", "WORKERS", "JOBS/S", "P50 MS", "P95 MS", "P99 MS", "TX/JOB", "REFUSED/JOB", "NOTE"], lines).to_string()
}

/// Of several runs of one workload, the one whose rate (else whose median) is in the middle, with the spread.
fn median_rows(mut repeats: Vec<Vec<Row>>) -> Vec<Row> {
    let figure = |rows: &Vec<Row>| rows.first().and_then(|row| row.jobs_per_s.or(row.p50_ms)).unwrap_or(0.0);
    repeats.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
    let spread = (repeats.first().map(&figure), repeats.last().map(&figure));
    let count = repeats.len();
    let mut rows = repeats.swap_remove(count / 2);
    for row in &mut rows {
        row.settings["repeats"] = count.into();
        if count > 1 {
            row.settings["lowest"] = spread.0.into();
            row.settings["highest"] = spread.1.into();
        }
    }
    rows
}

struct Bench<'a> {
    args: &'a BenchArgs,
    config: &'a Config,
}

/// A database of its own and the runtimes of a host.
struct Ground {
    dir: tempfile::TempDir,
    control: tokio::runtime::Runtime,
    guests: tokio::runtime::Runtime,
    surroundings: Arc<System>,
}

impl Ground {
    fn new(parent: Option<&Path>) -> Outcome<Self> {
        let dir = match parent {
            Some(parent) => tempfile::TempDir::with_prefix_in("warp-bench-", parent)?,
            None => tempfile::TempDir::with_prefix("warp-bench-")?,
        };
        Ok(Ground { dir, control: hosting::control_runtime()?, guests: hosting::guest_runtime()?, surroundings: Arc::new(System::new()) })
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("bench.db")
    }

    async fn store(&self) -> Outcome<Arc<SqliteStore>> {
        let options = OpenOptions { create: true, migrate: true, ..OpenOptions::new(self.path()) };
        Ok(Arc::new(SqliteStore::open(options).await?))
    }
}

/// What is offered, unchanging.
struct Fixed(Vec<Offer>);

#[async_trait]
impl Catalog for Fixed {
    fn offers(&self) -> Vec<Offer> {
        self.0.clone()
    }

    async fn changed(&self) {
        std::future::pending().await
    }
}

/// A native handler, or a component, with a record of when each job started and how many ran at once.
struct Recorder {
    inner: Option<Arc<dyn Handler>>,
    work: Duration,
    started: Mutex<HashMap<JobId, Instant>>,
    spans: Mutex<Vec<(Instant, Instant)>>,
    record: bool,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Recorder {
    fn new(inner: Option<Arc<dyn Handler>>, work: Duration, record: bool) -> Arc<Self> {
        Arc::new(Recorder {
            inner,
            work,
            started: Mutex::default(),
            spans: Mutex::default(),
            record,
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        })
    }

    fn started(&self, id: JobId) -> Option<Instant> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied()
    }
}

#[async_trait]
impl Handler for Recorder {
    async fn run(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> RunOutcome {
        let begin = Instant::now();
        if self.record {
            self.started.lock().unwrap_or_else(PoisonError::into_inner).insert(attempt.job_id, begin);
        }
        let now = self.now.fetch_add(1, Ordering::AcqRel) + 1;
        self.most.fetch_max(now, Ordering::AcqRel);
        if !self.work.is_zero() {
            tokio::time::sleep(self.work).await;
        }
        let outcome = match &self.inner {
            Some(inner) => inner.run(attempt, calls, stop).await,
            None => RunOutcome::Said(Said::Completed(None)),
        };
        self.now.fetch_sub(1, Ordering::AcqRel);
        if self.record {
            self.spans.lock().unwrap_or_else(PoisonError::into_inner).push((begin, Instant::now()));
        }
        outcome
    }
}

const CONTRACT: &str = "noop";

fn offer(handler: Arc<dyn Handler>, contract: &str, on_handler: Declared) -> Offer {
    let declarations = Declarations {
        contract: contract.to_owned(),
        handler: contract.to_owned(),
        digest: Digest([0; 32]),
        on_contract: Declared::default(),
        on_handler,
    };
    Offer { declarations: Arc::new(declarations), handler }
}

/// A job whose payload carries its number.
fn job(surroundings: &System, contract: &str, number: u64) -> NewJob {
    NewJob {
        id: surroundings.new_id(),
        contract: contract.to_owned(),
        queue: "default".to_owned(),
        payload: format!("{{\"n\":{number},\"k\":{}}}", number % 100),
        metadata: Vec::new(),
        trace_parent: None,
        due: None,
        explicit: Declared::default(),
        unique_key: None,
    }
}

fn limited(kind: ConcurrencyKind, key: &str, limit: u32) -> Outcome<Declared> {
    let key = key.parse().map_err(|error| Failure::usage(format!("{error}")))?;
    let concurrency =
        Concurrency { kind, keys: vec![key], limit, weight: 1, mode: Mode::Wait, order: Order::Any, on_retry: OnRetry::Block };
    Ok(Declared { concurrency: Some(concurrency), ..Declared::default() })
}

/// One burn-down: everything is enqueued first, then a host works it off.
struct Burn {
    name: &'static str,
    jobs: u64,
    component: bool,
    work: Duration,
    declared: Declared,
    /// Jobs of a second contract that wait for one key beside it.
    waiters: u64,
}

impl Bench<'_> {
    fn measure(&self, name: &str) -> Outcome<Vec<Row>> {
        let burn = |name: &'static str, jobs: u64, component: bool, work_ms: u64, declared: Declared| {
            let jobs = self.args.jobs.unwrap_or(jobs);
            self.burn(&Burn { name, jobs, component, work: Duration::from_millis(work_ms), declared, waiters: 0 })
        };
        let workers = self.workers();
        let mutex = |key: &str| limited(ConcurrencyKind::Mutex, key, 1);
        let row = match name {
            "native-noop" => burn("native-noop", 100_000, false, 0, Declared::default())?,
            "noop" => burn("noop", 100_000, true, 0, Declared::default())?,
            "mutex" => burn("mutex", 100_000, true, 0, mutex("k:{k}")?)?,
            "semaphore" => burn("semaphore", 100_000, true, 0, limited(ConcurrencyKind::Semaphore, "all", workers)?)?,
            "one-key" => burn("one-key", 1_000, false, 5, mutex("one")?)?,
            "eight-keys" => burn("eight-keys", 4_000, false, 5, mutex("k:{k}")?)?,
            "no-key" => burn("no-key", 10_000, false, 5, Declared::default())?,
            "waiters" => {
                let jobs = self.args.jobs.unwrap_or(50_000);
                let work = Duration::ZERO;
                self.burn(&Burn { name: "waiters", jobs, component: false, work, declared: Declared::default(), waiters: 10_000 })?
            }
            "latency" => self.latency("latency", false)?,
            "latency-other" => self.latency("latency-other", true)?,
            "handover" => self.handover()?,
            "attempt" => return self.attempts(),
            _ => self.idle()?,
        };
        Ok(vec![row])
    }

    fn workers(&self) -> u32 {
        self.args.workers.unwrap_or(16)
    }

    fn host_config(&self) -> HostConfig {
        HostConfig { prefetch_limit: self.config.prefetch.value, ..HostConfig::new("bench", self.workers()) }
    }

    fn settings(&self, note: &str) -> serde_json::Value {
        serde_json::json!({
            "synchronous": "FULL",
            "journal": "WAL",
            "history": true,
            "prefetch_limit": self.config.prefetch.value,
            "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            "build": if cfg!(debug_assertions) { "debug" } else { "release" },
            "note": note,
        })
    }

    fn row(&self, workload: &str, jobs: u64, note: &str) -> Row {
        Row {
            store: "sqlite",
            locks: "ledger",
            workload: workload.to_owned(),
            jobs,
            workers: self.workers(),
            jobs_per_s: None,
            p50_ms: None,
            p95_ms: None,
            p99_ms: None,
            statements_per_job: None,
            wal_bytes_per_job: None,
            refused_per_job: None,
            peak_backends: None,
            settings: self.settings(note),
        }
    }

    fn component(&self, ground: &Ground) -> Outcome<Arc<dyn Handler>> {
        let file = self.config.plugins.value.join("noop.wasm");
        if !file.exists() {
            return Err(Failure::usage(format!(
                "this workload runs {}, which is not there; `cargo xtask plugins noop` builds it, --plugins names another directory",
                file.display()
            )));
        }
        let loader = hosting::loader(self.workers(), &self.config.cache.value)?;
        hosting::load_one(&ground.control, &loader, &file, &hosting::grants(self.config))
    }

    fn burn(&self, burn: &Burn) -> Outcome<Row> {
        let ground = Ground::new(self.args.dir.as_deref())?;
        let inner = if burn.component { Some(self.component(&ground)?) } else { None };
        let recorder = Recorder::new(inner, burn.work, false);
        let mut offers = vec![offer(Arc::<Recorder>::clone(&recorder), CONTRACT, burn.declared.clone())];
        if burn.waiters > 0 {
            let slow = Recorder::new(None, Duration::from_secs(1), false);
            offers.push(offer(slow, "waiter", limited(ConcurrencyKind::Mutex, "the-key", 1)?));
        }
        let (report, took, done) = ground.control.block_on(async {
            let store = ground.store().await?;
            enqueue_all(&*store, &ground.surroundings, "waiter", burn.waiters).await?;
            enqueue_all(&*store, &ground.surroundings, CONTRACT, burn.jobs).await?;
            // Of the waiters one at a time runs and the others are parked; they are there to be in the way.
            Ok::<_, Failure>(work_off(&ground, store, Fixed(offers), self.host_config(), burn.jobs).await)
        })?;
        let per_job = |count: u64| Some(count as f64 / burn.jobs.max(1) as f64);
        let most = recorder.most.load(Ordering::Acquire);
        let note = match burn.waiters {
            0 => format!("at most {most} at once"),
            waiters => format!("beside {waiters} jobs that wait for one key"),
        };
        Ok(Row {
            jobs_per_s: Some(done as f64 / took.as_secs_f64().max(1e-9)),
            statements_per_job: per_job(report.exchanges),
            refused_per_job: per_job(report.parked_again),
            ..self.row(burn.name, burn.jobs, &note)
        })
    }

    fn latency(&self, name: &str, other: bool) -> Outcome<Row> {
        let ground = Ground::new(self.args.dir.as_deref())?;
        let samples = self.args.jobs.unwrap_or(1_000);
        let recorder = Recorder::new(None, Duration::ZERO, true);
        let offers = Fixed(vec![offer(Arc::<Recorder>::clone(&recorder), CONTRACT, Declared::default())]);
        let waits = ground.control.block_on(async {
            let store = ground.store().await?;
            let publisher: Arc<SqliteStore> = if other { ground.store().await? } else { Arc::clone(&store) };
            let (host, stop) = start(&ground, store, offers, self.host_config());
            // The host has registered, published its contracts and found nothing.
            tokio::time::sleep(Duration::from_millis(300)).await;
            let mut waits = Vec::new();
            for number in 0..samples {
                let new = job(&ground.surroundings, CONTRACT, number);
                let id = new.id;
                let begin = Instant::now();
                publisher.enqueue(vec![new], ground.surroundings.now()).await?;
                let committed = Instant::now();
                let started = loop {
                    if let Some(started) = recorder.started(id) {
                        break started;
                    }
                    if begin.elapsed() > Duration::from_secs(30) {
                        return Err(Failure::usage(format!("job {number} has not started within 30 s")));
                    }
                    tokio::time::sleep(Duration::from_micros(200)).await;
                };
                // A start may even precede the answer to the enqueue.
                waits.push(started.saturating_duration_since(committed).as_secs_f64() * 1e3);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            finish(host, stop).await;
            Ok(waits)
        })?;
        let [p50, p95, p99] = percentiles(waits);
        Ok(Row { p50_ms: p50, p95_ms: p95, p99_ms: p99, ..self.row(name, samples, "commit of the enqueue to start of the handler") })
    }

    /// How long after the end of a run on one host the job that waits for its key starts on the other.
    fn handover(&self) -> Outcome<Row> {
        let ground = Ground::new(self.args.dir.as_deref())?;
        let rounds = self.args.jobs.unwrap_or(400) / 2;
        // Long enough that the other host has parked its job before the first one ends.
        let recorder = Recorder::new(None, Duration::from_millis(20), true);
        let declared = limited(ConcurrencyKind::Mutex, "the-key", 1)?;
        let offers = |contract: &str| Fixed(vec![offer(Arc::<Recorder>::clone(&recorder), contract, declared.clone())]);
        let spans = || recorder.spans.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let gaps = ground.control.block_on(async {
            let (here, there) = (ground.store().await?, ground.store().await?);
            let one = start(&ground, Arc::clone(&here), offers("here"), self.host_config());
            let other = start(&ground, there, offers("there"), self.host_config());
            tokio::time::sleep(Duration::from_millis(300)).await;
            let mut gaps = Vec::new();
            for number in 0..rounds {
                let pair = vec![job(&ground.surroundings, "here", number), job(&ground.surroundings, "there", number)];
                here.enqueue(pair, ground.surroundings.now()).await?;
                let begin = Instant::now();
                let ended = usize::try_from(2 * (number + 1)).unwrap_or(usize::MAX);
                while spans().len() < ended {
                    if begin.elapsed() > Duration::from_secs(30) {
                        return Err(Failure::usage(format!("pair {number} has not ended within 30 s")));
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                if let [.., (_, first_ended), (second_began, _)] = spans()[..] {
                    gaps.push(second_began.saturating_duration_since(first_ended).as_secs_f64() * 1e3);
                }
            }
            finish(one.0, one.1).await;
            finish(other.0, other.1).await;
            Ok(gaps)
        })?;
        let [p50, p95, p99] = percentiles(gaps);
        let most = recorder.most.load(Ordering::Acquire);
        let note = format!("end of a run to start of the waiter on the other host; at most {most} at once");
        Ok(Row { p50_ms: p50, p95_ms: p95, p99_ms: p99, ..self.row("handover", 2 * rounds, &note) })
    }

    /// What an attempt costs, plugin by plugin, beside the native function in the same loop.
    fn attempts(&self) -> Outcome<Vec<Row>> {
        let ground = Ground::new(self.args.dir.as_deref())?;
        let native: Arc<dyn Handler> = Recorder::new(None, Duration::ZERO, false);
        let mut subjects = vec![("native".to_owned(), native)];
        let loader = hosting::loader(self.workers(), &self.config.cache.value)?;
        let folder = &self.config.plugins.value;
        let entries = std::fs::read_dir(folder).map_err(|error| Failure::usage(format!("failed to read {}: {error}", folder.display())))?;
        let mut files: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
        files.retain(|file| file.extension().is_some_and(|ending| ending == "wasm"));
        files.sort();
        for file in files {
            let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            subjects.push((name, hosting::load_one(&ground.control, &loader, &file, &hosting::grants(self.config))?));
        }
        let mut rows = Vec::new();
        for (name, handler) in subjects {
            let runs = self.args.jobs.unwrap_or(if name == "csv-report" { 2_000 } else { 10_000 });
            let times = ground.guests.block_on(ground.guests.spawn(async move {
                let mut times = Vec::new();
                for number in 0..runs + 100 {
                    let (info, calls, stop) = (attempt(number), Arc::new(Deaf), Arc::new(StopSignal::default()));
                    let begin = Instant::now();
                    handler.run(info, calls, stop).await;
                    // The first ones pay for pages that the operating system has not mapped yet.
                    if number >= 100 {
                        times.push(begin.elapsed().as_secs_f64() * 1e3);
                    }
                }
                times
            }));
            let [p50, p95, p99] = percentiles(times.map_err(|error| Failure::from(anyhow::Error::from(error)))?);
            let note = "one attempt that ends at once: store, instance, call, drop";
            rows.push(Row { p50_ms: p50, p95_ms: p95, p99_ms: p99, workers: 1, ..self.row(&format!("attempt-{name}"), runs, note) });
        }
        Ok(rows)
    }

    fn idle(&self) -> Outcome<Row> {
        let ground = Ground::new(self.args.dir.as_deref())?;
        let span = Duration::from_secs(20);
        let offers = Fixed(vec![offer(Recorder::new(None, Duration::ZERO, false), CONTRACT, Declared::default())]);
        let cpu = ground.control.block_on(async {
            let store = ground.store().await?;
            let (host, stop) = start(&ground, store, offers, self.host_config());
            tokio::time::sleep(Duration::from_secs(2)).await;
            let before = processor_time();
            tokio::time::sleep(span).await;
            let used = processor_time().saturating_sub(before);
            finish(host, stop).await;
            Ok::<_, Failure>(used)
        })?;
        let percent = cpu.as_secs_f64() / span.as_secs_f64() * 100.0;
        let note = format!("{percent:.2} % of a core, {} MiB resident", resident_mebibytes());
        let mut row = self.row("idle", 0, &note);
        row.settings["cpu_percent"] = percent.into();
        row.settings["resident_mib"] = resident_mebibytes().into();
        Ok(row)
    }
}

fn attempt(number: u64) -> AttemptInfo {
    AttemptInfo {
        job_id: JobId(u128::from(number)),
        contract: CONTRACT.to_owned(),
        handler: CONTRACT.to_owned(),
        payload: "{}".into(),
        run: 1,
        attempt: 1,
        queue: "default".to_owned(),
        metadata: Vec::new(),
        trace_parent: None,
        time_left: None,
        fencing_token: None,
    }
}

async fn enqueue_all(store: &dyn Store, surroundings: &System, contract: &str, jobs: u64) -> Outcome {
    let mut number = 0;
    while number < jobs {
        let batch: Vec<_> = (number..jobs.min(number + 1_000)).map(|number| job(surroundings, contract, number)).collect();
        number += batch.len() as u64;
        let verdicts = store.enqueue(batch, surroundings.now()).await?;
        if let Some(refused) = verdicts.iter().find(|verdict| !matches!(verdict, EnqueueVerdict::Enqueued(_))) {
            return Err(Failure::usage(format!("a job of the workload was not accepted: {refused:?}")));
        }
    }
    Ok(())
}

type Running = (tokio::task::JoinHandle<Result<warp_worker::Stopped, warp_store::StoreError>>, warp_worker::Numbers);

fn start(ground: &Ground, store: Arc<SqliteStore>, offers: Fixed, config: HostConfig) -> (Running, watch::Sender<StopLevel>) {
    let (stop, stopped) = watch::channel(StopLevel::Run);
    let surroundings: Arc<dyn Surroundings> = Arc::<System>::clone(&ground.surroundings);
    let host = Host::new(config, store, Arc::new(offers), surroundings, ground.guests.handle().clone(), stopped);
    let numbers = host.numbers();
    ((tokio::spawn(host.run()), numbers), stop)
}

async fn finish((host, _): Running, stop: watch::Sender<StopLevel>) {
    // A receiver that is gone means that the host has ended by itself.
    let _ = stop.send(StopLevel::Now);
    let _ = host.await;
}

/// Works until `jobs` are settled; the report, the time from start to the last settle, and how many were settled.
async fn work_off(ground: &Ground, store: Arc<SqliteStore>, offers: Fixed, config: HostConfig, jobs: u64) -> (HostReport, Duration, u64) {
    let begin = Instant::now();
    let (running, stop) = start(ground, store, offers, config);
    let (mut last, mut changed) = (0, Instant::now());
    loop {
        let report = running.1.report();
        if report.settled != last {
            (last, changed) = (report.settled, Instant::now());
        }
        if report.settled >= jobs || changed.elapsed() > Duration::from_secs(60) {
            finish(running, stop).await;
            return (report, changed.duration_since(begin), report.settled);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn percentiles(mut samples: Vec<f64>) -> [Option<f64>; 3] {
    samples.sort_by(f64::total_cmp);
    [0.50, 0.95, 0.99].map(|part| samples.get(((samples.len() as f64 * part) as usize).min(samples.len().saturating_sub(1))).copied())
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// From /proc, so 0 where there is none.
fn resident_mebibytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Answers nothing, for attempts without a store.
struct Deaf;

static CHILDREN: AtomicU64 = AtomicU64::new(0);

#[async_trait]
impl HostCalls for Deaf {
    fn line(&self, _: warp_pipeline::Level, _: String) {}
    fn dropped(&self, _: u64, _: u64) {}
    fn progress(&self, _: String, _: f32) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn enqueue(&self, _: warp_pipeline::Child) -> Result<JobId, warp_pipeline::ChildRefused> {
        Ok(JobId(u128::from(CHILDREN.fetch_add(1, Ordering::Relaxed))))
    }
    fn holds_slot(&self) -> bool {
        false
    }
    async fn state(
        &self,
        _: &str,
        _: &str,
        _: warp_pipeline::StateOp,
        _: bool,
    ) -> Result<warp_pipeline::StateReply, warp_pipeline::StateFault> {
        Err(warp_pipeline::StateFault::Unavailable("there is no database".to_owned()))
    }
}
