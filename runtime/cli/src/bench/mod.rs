//! `bench`: what this machine does.
//!
//! Each workload runs on a new database with durable commits, hosts in this process and the same driver, worker and
//! engine as `run`. Nothing is asserted and nothing is tuned for it; the settings in force are part of each row, so that
//! figures of different days can be laid side by side.
//!
//! - `burn`: everything is enqueued, then worked off; or enqueued all the while
//! - `latency`: one job at a time, on idle hosts
//! - `standing`: what costs without work to do: nothing at all, waiters, history
//! - `attempts`: a plugin without a database
//!
//! What it deliberately does not do: compare with other queues. `cargo xtask bench-peers` does, and calls this.

mod attempts;
mod burn;
mod ground;
mod html;
mod latency;
mod meter;
mod report;
mod standing;
mod subject;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use warp_pipeline::Handler;
use warp_worker::HostConfig;

use self::ground::Ground;
use self::meter::{Backends, Cost};
use self::report::{Beside, Row};
use crate::args::BenchArgs;
use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::{hosting, text};

/// Every workload in the order in which they run.
const WORKLOADS: &[(&str, &str)] = &[
    ("native-noop", "a function that does nothing; the database alone"),
    ("noop", "a component that does nothing"),
    ("mutex", "the same over mutex keys in Wait mode, --groups of them"),
    ("semaphore", "the same over one key whose limit is the number of workers"),
    ("one-key", "one mutex key, 5 ms of work each"),
    ("eight-keys", "eight mutex keys, 5 ms of work each"),
    ("no-key", "no key, 5 ms of work each"),
    ("limit-equals-workers", "a limit that never refuses anybody, beside the same jobs without it"),
    ("bulk-enqueue", "nothing but enqueueing, --per-call jobs at a time"),
    ("waiters", "jobs without a key beside --waiters jobs that wait for one, and without them"),
    ("latency", "one job at a time on an idle host, enqueued in its process"),
    ("latency-other", "the same, enqueued over another connection as another process does"),
    ("handover", "a slot that is freed on one host and waited for on another, on connections of their own"),
    ("attempt", "one attempt of each plugin in the directory, without a database"),
    ("idle", "nothing to do: statements, memory and processor time"),
    ("history", "claims beside --finished, --scheduled and --parked jobs, before and after ANALYZE"),
];

/// What takes long to set up runs only when it is named.
const ONLY_WHEN_NAMED: &[&str] = &["history"];

/// Measures.
pub fn bench(args: BenchArgs, config: Config) -> Outcome {
    for name in &args.workload {
        if WORKLOADS.iter().all(|(known, _)| known != name) {
            let known: Vec<_> = WORKLOADS.iter().map(|(name, what)| format!("\n  {name:<20} {what}")).collect();
            return Err(Failure::usage(format!("there is no workload {name:?}; the workloads are{}", known.concat())));
        }
        if args.continuous && burn::shape(name, 1, 1).is_none() {
            return Err(Failure::usage(format!(
                "the workload {name} is not one of jobs that are worked off, so it cannot be --continuous"
            )));
        }
    }
    let chosen = WORKLOADS.iter().map(|(name, _)| *name).filter(|name| match args.workload.is_empty() {
        true => !ONLY_WHEN_NAMED.contains(name) && (!args.continuous || burn::shape(name, 1, 1).is_some()),
        false => args.workload.iter().any(|asked| asked == name),
    });
    let bench = Bench { args: &args, config: &config };
    let mut rows = Vec::new();
    for name in chosen {
        let progress = Progress::spinner(format!("{name} …"));
        let repeats = (0..args.repeat.max(1)).map(|_| bench.measure(name)).collect::<Outcome<Vec<_>>>();
        progress.finish();
        let found = report::median_rows(repeats.map_err(|failure| failure.context(format!("failed to measure {name}")))?);
        if config.json {
            found.iter().try_for_each(text::print_json)?;
        }
        rows.extend(found);
        // Written again after each workload: what was measured is not lost if a later one fails.
        write_page(args.html.as_deref(), &rows)?;
    }
    if !config.json {
        text::print(report::table(&rows))?;
    }
    Ok(())
}

fn write_page(file: Option<&Path>, rows: &[Row]) -> Outcome {
    let Some(file) = file else { return Ok(()) };
    std::fs::write(file, html::page(rows)).map_err(|error| Failure::from(error).context(format!("failed to write {}", file.display())))
}

/// What all workloads share.
struct Bench<'a> {
    args: &'a BenchArgs,
    config: &'a Config,
}

impl Bench<'_> {
    fn measure(&self, name: &str) -> Outcome<Vec<Row>> {
        if let Some(shape) = burn::shape(name, self.workers(), self.args.groups) {
            return Ok(vec![if self.args.continuous { self.flow(&shape)? } else { self.burn(&shape)? }]);
        }
        Ok(match name {
            "limit-equals-workers" => vec![self.limit_equals_workers()?],
            "bulk-enqueue" => vec![self.bulk_enqueue()?],
            "waiters" => vec![self.waiters()?],
            "latency" => vec![self.latency("latency", false)?],
            "latency-other" => vec![self.latency("latency-other", true)?],
            "handover" => vec![self.handover()?],
            "attempt" => self.attempts()?,
            "history" => self.history()?,
            _ => vec![self.idle()?],
        })
    }

    fn workers(&self) -> u32 {
        self.args.workers.unwrap_or(16)
    }

    fn host_config(&self) -> HostConfig {
        HostConfig { prefetch_limit: self.config.prefetch.value, ..HostConfig::new("bench", self.workers()) }
    }

    fn ground(&self) -> Outcome<Ground> {
        Ground::new(self.config, self.args.dir.as_deref())
    }

    /// The component that does nothing.
    fn component(&self, ground: &Ground) -> Outcome<Arc<dyn Handler>> {
        let file = self.config.plugins.value.join("noop.wasm");
        if !file.exists() {
            return Err(Failure::usage(format!(
                "this workload runs {}, which is not there; `cargo xtask plugins noop` builds it, --plugins names another directory",
                file.display()
            )));
        }
        let loader = hosting::loader(self.workers().saturating_mul(self.args.hosts), &self.config.cache.value)?;
        hosting::load_one(&ground.runtime, &loader, &file, &hosting::grants(self.config))
    }

    /// A row that says where it was measured, and nothing else yet.
    fn row(&self, workload: &str, jobs: u64, note: impl Into<String>, server: serde_json::Map<String, serde_json::Value>) -> Row {
        let on_a_server = !server.is_empty();
        let mut settings = server;
        let mut add = |name: &str, value: serde_json::Value| settings.insert(name.to_owned(), value);
        if on_a_server {
            add("pool", self.config.database.pool.value.into());
        } else {
            add("synchronous", "FULL".into());
            add("journal", "WAL".into());
        }
        add("history", true.into());
        add("prefetch_limit", self.config.prefetch.value.into());
        add("cores", std::thread::available_parallelism().map_or(1, std::num::NonZero::get).into());
        add("build", if cfg!(debug_assertions) { "debug" } else { "release" }.into());
        add("hosts", format!("{}, threads of one process", self.args.hosts).into());
        Row {
            store: if on_a_server { "postgres" } else { "sqlite" },
            locks: self.config.database.locks.value.map_or("ledger", crate::args::Locks::name),
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
            settings: settings.into(),
            beside: Beside { note: note.into(), hosts: self.args.hosts, ..Beside::default() },
        }
    }
}

/// Puts what the server counted into a row. `running` is the time in which jobs ran, `whole` also that of the enqueue.
fn charged(mut row: Row, jobs: u64, running: &Option<Cost>, whole: &Option<Cost>, backends: Backends) -> Row {
    let jobs = jobs.max(1) as f64;
    if let Some(cost) = running {
        row.statements_per_job = Some(cost.statements as f64 / jobs);
        row.beside.statements_from = Some(cost.statements_from);
        row = row.figure("statements_per_s", per_second(cost.statements, cost.span));
        if cost.nested > 0 {
            row = row.figure("nested_statements_per_job", cost.nested as f64 / jobs);
        }
    }
    if let Some(cost) = whole {
        row.wal_bytes_per_job = cost.wal_page_image_bytes.map(|images| cost.wal_bytes.saturating_sub(images) as f64 / jobs);
        row = row.figure("wal_bytes_per_job_with_page_images", cost.wal_bytes as f64 / jobs);
        row.settings["page_images_from"] = cost.page_images_from.into();
    }
    if !backends.by_name.is_empty() {
        row.peak_backends = Some(backends.peak);
        row.beside.backends = backends.by_name;
    }
    row
}

fn per_second(count: u64, span: Duration) -> f64 {
    count as f64 / span.as_secs_f64().max(1e-9)
}
