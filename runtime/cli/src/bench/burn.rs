//! Jobs that are worked off: all enqueued before the hosts start, or enqueued while they run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_domain::JobId;
use warp_domain::policy::{ConcurrencyKind, Declared};

use super::ground::{self, Ground, Progressed, Running, backends, sum, work_off};
use super::report::{Row, rates};
use super::subject::{CONTRACT, Fixed, Recorder, job, limited, offer};
use super::{Bench, charged, per_second};
use crate::failure::Outcome;

/// The longest span between two calls that enqueue at a fixed rate.
const TICK: Duration = Duration::from_millis(5);
/// How long `--continuous` lasts where nobody says.
const CONTINUOUS: Duration = Duration::from_secs(60);
/// How long the last jobs of `--continuous` may take to end.
const DRAIN: Duration = Duration::from_secs(30);
/// The most jobs that one call enqueues while hosts run.
const MOST_AT_ONCE: u64 = 1_000;

/// What one workload's jobs are.
pub struct Shape {
    name: &'static str,
    jobs: u64,
    component: bool,
    work: Duration,
    key: Option<(ConcurrencyKind, &'static str, u32)>,
    /// How many keys a template renders to.
    groups: u64,
}

/// The workload of this name, if it is one of jobs that are worked off.
pub fn shape(name: &str, workers: u32, groups: u64) -> Option<Shape> {
    use ConcurrencyKind::{Mutex, Semaphore};
    let shape =
        |name, jobs, component, work_ms, key, groups| Shape { name, jobs, component, work: Duration::from_millis(work_ms), key, groups };
    Some(match name {
        "native-noop" => shape("native-noop", 100_000, false, 0, None, 1),
        "noop" => shape("noop", 100_000, true, 0, None, 1),
        "mutex" => shape("mutex", 100_000, true, 0, Some((Mutex, "k:{k}", 1)), groups),
        "semaphore" => shape("semaphore", 100_000, true, 0, Some((Semaphore, "all", workers)), 1),
        "one-key" => shape("one-key", 1_000, false, 5, Some((Mutex, "one", 1)), 1),
        "eight-keys" => shape("eight-keys", 4_000, false, 5, Some((Mutex, "k:{k}", 1)), 8),
        "no-key" => shape("no-key", 10_000, false, 5, None, 1),
        _ => return None,
    })
}

impl Bench<'_> {
    /// Everything is enqueued first, then the hosts work it off. The clock starts before they open the database.
    pub(super) fn burn(&self, shape: &Shape) -> Outcome<Row> {
        let ground = self.ground()?;
        let jobs = self.args.jobs.unwrap_or(shape.jobs);
        let (recorder, offers) = self.offers(&ground, shape, false)?;
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let empty = gauge.mark().await?;
            let publisher = ground.publisher().await?;
            ground.enqueue(&*publisher, CONTRACT, jobs, shape.groups).await?;
            drop(publisher);
            let enqueued = gauge.mark().await?;
            let watch = gauge.watch().await?;
            let begin = Instant::now();
            let hosts = self.start(&ground, &offers)?;
            let Progressed { report, took, counts } = work_off(&hosts, begin, jobs).await;
            let ended = gauge.mark().await?;
            let backends = backends(watch).await?;
            hosts.into_iter().for_each(Running::stop);
            let running = gauge.cost(&enqueued, &ended).await?;
            let whole = gauge.cost(&empty, &ended).await?;
            let per_job = |count: u64| count as f64 / jobs.max(1) as f64;
            let mut row = self.row(shape.name, jobs, format!("at most {} at once", recorder.most()), gauge.settings().await?);
            row.jobs_per_s = Some(per_second(report.settled, took));
            row.refused_per_job = Some(per_job(report.parked_again));
            // What the server counts takes its place where there is one.
            row.statements_per_job = Some(per_job(report.exchanges));
            row.beside.throughput = rates(&counts);
            let row = charged(row, jobs, &running, &whole, backends)
                .figure("exchanges_per_job", per_job(report.exchanges))
                .figure("parked_per_job", per_job(report.parked))
                .figure("not_settled", Some(jobs.saturating_sub(report.settled) as f64).filter(|missing| *missing > 0.0))
                .figure("dead_rows", ground.dead_rows().await?.map(|rows| rows as f64));
            gauge.close().await;
            Ok(row)
        })
    }

    /// Jobs are enqueued while the hosts run: at a fixed rate, or so that a fixed number is always under way.
    pub(super) fn flow(&self, shape: &Shape) -> Outcome<Row> {
        let ground = self.ground()?;
        let span = self.args.span.unwrap_or(CONTINUOUS);
        let outstanding = self.args.outstanding.unwrap_or(4 * u64::from(self.workers()) * u64::from(self.args.hosts));
        let (recorder, offers) = self.offers(&ground, shape, true)?;
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let publisher = ground.publisher().await?;
            let hosts = self.start(&ground, &offers)?;
            let watch = gauge.watch().await?;
            let first = gauge.mark().await?;
            let begin = Instant::now();
            let mut sent: HashMap<JobId, Instant> = HashMap::new();
            let mut counts = vec![(0.0, 0)];
            while begin.elapsed() < span {
                let enqueued = sent.len() as u64;
                let settled = sum(&hosts).settled;
                counts.push((begin.elapsed().as_secs_f64(), settled));
                let wanted = match self.args.rate {
                    Some(rate) => ((begin.elapsed().as_secs_f64() * rate) as u64).saturating_sub(enqueued),
                    None => (settled + outstanding).saturating_sub(enqueued),
                };
                let batch: Vec<_> =
                    (0..wanted.min(MOST_AT_ONCE)).map(|more| job(&ground.surroundings, CONTRACT, enqueued + more, shape.groups)).collect();
                if batch.is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                }
                let called = Instant::now();
                sent.extend(batch.iter().map(|job| (job.id, called)));
                ground.enqueue_batch(&*publisher, batch).await?;
                if self.args.rate.is_some() {
                    tokio::time::sleep(TICK.saturating_sub(called.elapsed())).await;
                }
            }
            let (took, report) = (begin.elapsed(), sum(&hosts));
            let last = gauge.mark().await?;
            let backends = backends(watch).await?;
            let jobs = sent.len() as u64;
            while sum(&hosts).settled < jobs && begin.elapsed() < took + DRAIN {
                tokio::time::sleep(TICK).await;
            }
            let left = jobs.saturating_sub(sum(&hosts).settled);
            drop(publisher);
            hosts.into_iter().for_each(Running::stop);
            let cost = gauge.cost(&first, &last).await?;
            let starts = recorder.starts();
            let waits = sent.iter().filter_map(|(id, called)| Some(starts.get(id)?.saturating_duration_since(*called).as_secs_f64() * 1e3));
            let how = match self.args.rate {
                Some(rate) => format!("{rate} jobs a second were asked for"),
                None => format!("{outstanding} jobs under way at any time"),
            };
            let note = format!("{how} for {:.0} s; waits from the call that enqueues to the start", took.as_secs_f64());
            let mut row = self.row(&format!("{}-continuous", shape.name), jobs, note, gauge.settings().await?);
            row.jobs_per_s = Some(per_second(report.settled, took));
            row.refused_per_job = Some(report.parked_again as f64 / jobs.max(1) as f64);
            row.statements_per_job = Some(report.exchanges as f64 / jobs.max(1) as f64);
            row.beside.throughput = rates(&counts);
            let row = charged(row.timed(waits.collect()), jobs, &cost, &cost, backends)
                .figure("enqueued_per_s", per_second(jobs, took))
                .figure("not_settled", Some(left as f64).filter(|left| *left > 0.0))
                .figure("dead_rows", ground.dead_rows().await?.map(|rows| rows as f64));
            gauge.close().await;
            Ok(row)
        })
    }

    /// What a limit costs that never refuses anybody.
    pub(super) fn limit_equals_workers(&self) -> Outcome<Row> {
        let workers = self.workers().saturating_mul(self.args.hosts);
        let key = Some((ConcurrencyKind::Semaphore, "all", workers));
        let plain = Shape { name: "limit-equals-workers", jobs: 100_000, component: false, work: Duration::ZERO, key: None, groups: 1 };
        let without = self.burn(&plain)?.jobs_per_s.unwrap_or(0.0);
        let row = self.burn(&Shape { key, ..plain })?;
        let cost = row.jobs_per_s.filter(|_| without > 0.0).map(|rate| (1.0 - rate / without) * 100.0);
        Ok(row.figure("without_limit_jobs_per_s", without).figure("cost_percent", cost))
    }

    /// Nothing but enqueueing. Jobs are made before the clock starts.
    pub(super) fn bulk_enqueue(&self) -> Outcome<Row> {
        let ground = self.ground()?;
        let jobs = self.args.jobs.unwrap_or(100_000);
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let publisher = ground.publisher().await?;
            let mut batches = Vec::new();
            let mut number = 0;
            while number < jobs {
                let upto = jobs.min(number + self.args.per_call);
                batches.push((number..upto).map(|number| job(&ground.surroundings, CONTRACT, number, 100)).collect::<Vec<_>>());
                number = upto;
            }
            let first = gauge.mark().await?;
            let begin = Instant::now();
            let (mut done, mut counts) = (0, vec![(0.0, 0)]);
            for batch in batches {
                done += batch.len() as u64;
                ground.enqueue_batch(&*publisher, batch).await?;
                counts.push((begin.elapsed().as_secs_f64(), done));
            }
            let took = begin.elapsed();
            let last = gauge.mark().await?;
            drop(publisher);
            let cost = gauge.cost(&first, &last).await?;
            let note = format!("{} jobs with each call", self.args.per_call);
            let mut row = self.row("bulk-enqueue", jobs, note, gauge.settings().await?);
            row.jobs_per_s = Some(per_second(jobs, took));
            row.beside.throughput = rates(&counts);
            let row = charged(row, jobs, &cost, &cost, ground::backends(None).await?);
            gauge.close().await;
            Ok(row)
        })
    }

    fn offers(&self, ground: &Ground, shape: &Shape, record: bool) -> Outcome<(Arc<Recorder>, Fixed)> {
        let inner = if shape.component { Some(self.component(ground)?) } else { None };
        let recorder = Recorder::new(inner, shape.work, record);
        let declared = match shape.key {
            Some((kind, key, limit)) => limited(kind, key, limit)?,
            None => Declared::default(),
        };
        let offers = Fixed(vec![offer(Arc::<Recorder>::clone(&recorder), CONTRACT, declared)]);
        Ok((recorder, offers))
    }

    /// As many hosts as were asked for.
    pub(super) fn start(&self, ground: &Ground, offers: &Fixed) -> Outcome<Vec<Running>> {
        (1..=self.args.hosts).map(|number| ground.start(&format!("warp-bench-{number}"), offers.clone(), self.host_config())).collect()
    }
}
