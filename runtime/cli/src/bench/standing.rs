//! What costs without being worked off: idle hosts, jobs that wait for a key, jobs that lie there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_domain::ending::Ending;
use warp_domain::policy::{ConcurrencyKind, Declared};
use warp_domain::{HostId, JobId};
use warp_store::{ClaimParams, Claimed, ExchangeParams, Exchanged, HandOff, HostInfo, Lane, NewJob, Served, Settle, Store};
use warp_worker::Surroundings;

use super::ground::{Ground, Progressed, Running, backends, work_off};
use super::report::{Row, rates};
use super::subject::{CONTRACT, Fixed, Recorder, job, limited, offer};
use super::{Bench, charged, per_second};
use crate::failure::{Failure, Outcome};

/// The contract of jobs that wait for the key.
const WAITER: &str = "waiter";
/// Hosts have registered and found nothing.
const SETTLED_IN: Duration = Duration::from_secs(2);
/// How long statements are counted while waiters wait and nothing else happens, where nobody says.
const STILL: Duration = Duration::from_secs(10);
/// So long nothing may move while jobs are parked.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than any measurement.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);
/// How many rows of history one statement copies.
const COPIES: u64 = 500_000;
/// How many jobs `history` claims with each timed call, and how many calls it times.
const CLAIM: u32 = 16;
const CLAIMS: u64 = 1_000;
/// How many a call takes while history is made through the store.
const MAKE: u32 = 1_000;

impl Bench<'_> {
    /// Hosts with nothing to do.
    pub(super) fn idle(&self) -> Outcome<Row> {
        let ground = self.ground()?;
        let span = self.args.span.unwrap_or(Duration::from_secs(if ground.is_on_a_server() { 120 } else { 20 }));
        let offers = Fixed(vec![offer(Recorder::new(None, Duration::ZERO, false), CONTRACT, Declared::default())]);
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let hosts = self.start(&ground, &offers)?;
            let watch = gauge.watch().await?;
            tokio::time::sleep(SETTLED_IN).await;
            let (first, cpu) = (gauge.mark().await?, processor_time());
            tokio::time::sleep(span).await;
            let cpu = processor_time().saturating_sub(cpu);
            let last = gauge.mark().await?;
            let backends = backends(watch).await?;
            let resident = resident_mebibytes();
            hosts.into_iter().for_each(Running::stop);
            let cost = gauge.cost(&first, &last).await?;
            let per_host = cost.as_ref().map(|cost| per_second(cost.statements, cost.span) / f64::from(self.args.hosts));
            let row = self.row("idle", 0, format!("{:.0} s", span.as_secs_f64()), gauge.settings().await?);
            let mut row = charged(row, 1, &cost, &None, backends)
                .figure("cpu_percent", cpu.as_secs_f64() / span.as_secs_f64() * 100.0)
                .figure("resident_mib", resident as f64)
                .figure("statements_per_s_and_host", per_host);
            // There is no job to divide by.
            row.statements_per_job = None;
            gauge.close().await;
            Ok(row)
        })
    }

    /// Jobs without a key beside many that wait for one, and beside one that holds it and nobody who waits.
    pub(super) fn waiters(&self) -> Outcome<Row> {
        let jobs = self.args.jobs.unwrap_or(50_000);
        let alone = self.beside_waiters(1, jobs)?;
        let row = self.beside_waiters(self.args.waiters, jobs)?;
        let share = row.jobs_per_s.zip(alone.jobs_per_s).map(|(with, without)| with / without.max(1e-9) * 100.0);
        let still = |row: &Row| row.beside.figures.get("statements_per_s_while_still").copied();
        let cost = still(&row).zip(still(&alone)).map(|(with, without)| with - without);
        let without = alone.jobs_per_s;
        Ok(row.figure("without_waiters_jobs_per_s", without).figure("share_percent", share).figure("statements_per_s_for_waiters", cost))
    }

    fn beside_waiters(&self, waiters: u64, jobs: u64) -> Outcome<Row> {
        let ground = self.ground()?;
        let holder = Recorder::new(None, FOR_EVER, false);
        let waiting = offer(holder, WAITER, limited(ConcurrencyKind::Mutex, "the-key", 1)?);
        let others = offer(Recorder::new(None, Duration::ZERO, false), CONTRACT, Declared::default());
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let publisher = ground.publisher().await?;
            ground.enqueue(&*publisher, WAITER, waiters, 1).await?;
            // These hosts park them and then stand still.
            let parking = Instant::now();
            let hosts = self.start(&ground, &Fixed(vec![waiting.clone()]))?;
            wait_until_parked(&*publisher, waiters - 1).await?;
            let parked_per_s = per_second(waiters - 1, parking.elapsed());
            let still = match ground.is_on_a_server() {
                true => {
                    tokio::time::sleep(SETTLED_IN).await;
                    let from = gauge.mark().await?;
                    tokio::time::sleep(self.args.span.unwrap_or(STILL)).await;
                    Some((from, gauge.mark().await?))
                }
                false => None,
            };
            hosts.into_iter().for_each(Running::stop);
            ground.enqueue(&*publisher, CONTRACT, jobs, 1).await?;
            drop(publisher);
            let first = gauge.mark().await?;
            let watch = gauge.watch().await?;
            let begin = Instant::now();
            let hosts = self.start(&ground, &Fixed(vec![waiting, others]))?;
            let Progressed { report, took, counts } = work_off(&hosts, begin, jobs).await;
            let last = gauge.mark().await?;
            let backends = backends(watch).await?;
            hosts.into_iter().for_each(Running::stop);
            let cost = gauge.cost(&first, &last).await?;
            let quiet = match &still {
                Some((from, to)) => gauge.cost(from, to).await?,
                None => None,
            };
            let note = format!("beside {} jobs that wait for one key", waiters - 1);
            let mut row = self.row("waiters", jobs, note, gauge.settings().await?);
            row.jobs_per_s = Some(per_second(report.settled, took));
            row.statements_per_job = Some(report.exchanges as f64 / jobs.max(1) as f64);
            row.refused_per_job = Some(report.parked_again as f64 / jobs.max(1) as f64);
            row.beside.throughput = rates(&counts);
            let row = charged(row, jobs, &cost, &None, backends)
                .figure("parked_per_s", Some(parked_per_s).filter(|_| waiters > 1))
                .figure("statements_per_s_while_still", quiet.map(|cost| per_second(cost.statements, cost.span)))
                .figure("not_settled", Some(jobs.saturating_sub(report.settled) as f64).filter(|missing| *missing > 0.0));
            gauge.close().await;
            Ok(row)
        })
    }

    /// How long a claim takes beside many jobs that it must not look at.
    pub(super) fn history(&self) -> Outcome<Vec<Row>> {
        let ground = self.ground()?;
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let store = ground.claimer().await?;
            let claimer = Claimer::register(&ground, Arc::clone(&store)).await?;
            let filling = Instant::now();
            claimer.fill(self.args.finished, self.args.scheduled, self.args.parked).await?;
            let filled = filling.elapsed();
            let mut rows = Vec::new();
            for (name, analyze) in [("history", false), ("history-analyzed", true)] {
                if analyze {
                    if !ground.is_on_a_server() {
                        break;
                    }
                    ground.ask("ANALYZE").await?;
                }
                ground.enqueue(&*store, CONTRACT, CLAIMS * u64::from(CLAIM), 1).await?;
                let waits = claimer.time_claims().await?;
                let note = format!("a claim of {CLAIM} jobs, {} ANALYZE", if analyze { "after" } else { "before" });
                let row = self.row(name, CLAIMS * u64::from(CLAIM), note, gauge.settings().await?);
                rows.push(
                    Row { workers: CLAIM, ..row.timed(waits) }
                        .figure("finished", self.args.finished as f64)
                        .figure("scheduled", self.args.scheduled as f64)
                        .figure("parked", self.args.parked as f64)
                        .figure("seconds_to_fill", filled.as_secs_f64()),
                );
            }
            drop(claimer);
            drop(store);
            gauge.close().await;
            Ok(rows)
        })
    }
}

async fn wait_until_parked(store: &dyn Store, expected: u64) -> Outcome {
    let (mut last, mut changed) = (0, Instant::now());
    loop {
        let parked = store.overview().await?.parked;
        if parked >= expected {
            return Ok(());
        }
        if parked != last {
            (last, changed) = (parked, Instant::now());
        }
        if changed.elapsed() > PATIENCE {
            return Err(Failure::usage(format!("only {parked} of {expected} jobs have been parked, and nothing moves")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A registration that claims by hand, so that one claim can be timed.
struct Claimer<'a> {
    ground: &'a Ground,
    store: Arc<dyn Store>,
    host: HostId,
    lanes: Arc<[Lane]>,
}

impl<'a> Claimer<'a> {
    async fn register(ground: &'a Ground, store: Arc<dyn Store>) -> Outcome<Self> {
        let idle = || Recorder::new(None, Duration::ZERO, false);
        let offers = [offer(idle(), CONTRACT, Declared::default()), offer(idle(), WAITER, limited(ConcurrencyKind::Mutex, "the-key", 1)?)];
        let info = HostInfo { name: "bench".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned(), now: ground.surroundings.now() };
        let host = store.register(info).await?;
        let served = offers.iter().map(|offer| Served { declarations: Arc::clone(&offer.declarations) }).collect();
        store.serve(host, served).await?;
        let lane = |offer: &warp_worker::Offer| Lane { queue: "default".to_owned(), declarations: Arc::clone(&offer.declarations) };
        Ok(Claimer { ground, store, host, lanes: offers.iter().map(lane).collect() })
    }

    async fn exchange(&self, settles: Vec<Settle>, max: u32) -> Outcome<Exchanged> {
        let claim = (max > 0).then(|| ClaimParams { lanes: Arc::clone(&self.lanes), max });
        let params = ExchangeParams {
            host: self.host,
            now: self.ground.surroundings.now(),
            settles: settles.into(),
            claim,
            hand_off: HandOff::default(),
        };
        Ok(self.store.exchange(params).await?)
    }

    /// Claims and settles until nothing is left; what each claim took in milliseconds.
    async fn time_claims(&self) -> Outcome<Vec<f64>> {
        let mut waits = Vec::new();
        loop {
            let begin = Instant::now();
            let found = self.exchange(Vec::new(), CLAIM).await?;
            let took = begin.elapsed();
            if found.claimed.is_empty() {
                return Ok(waits);
            }
            waits.push(took.as_secs_f64() * 1e3);
            self.exchange(found.claimed.iter().map(completed).collect(), 0).await?;
        }
    }

    /// Makes history: by copying one job of each kind in the database where it can be asked to, else job by job.
    async fn fill(&self, finished: u64, scheduled: u64, parked: u64) -> Outcome {
        let copying = self.ground.is_on_a_server();
        let count = |wanted: u64| if copying { wanted.min(1) } else { wanted };
        let made = self.make(CONTRACT, count(finished), false).await?;
        let later = self.make(CONTRACT, count(scheduled), true).await?;
        self.settle_all().await?;
        // The first of them holds the key from now on.
        let waiting = self.make(WAITER, count(parked) + 1, false).await?;
        loop {
            let found = self.exchange(Vec::new(), MAKE).await?;
            if found.claimed.is_empty() && found.parked == 0 {
                break;
            }
        }
        if !copying {
            return Ok(());
        }
        let kinds = [(made.last(), finished), (later.last(), scheduled), (waiting.last().filter(|_| parked > 0), parked)];
        for (template, wanted) in kinds {
            if let Some(template) = template {
                copy_job(self.ground, *template, wanted.saturating_sub(1)).await?;
            }
        }
        Ok(())
    }

    async fn make(&self, contract: &str, jobs: u64, later: bool) -> Outcome<Vec<JobId>> {
        let mut ids = Vec::new();
        let due = later.then(|| self.ground.surroundings.now().after(FOR_EVER));
        let mut number = 0;
        while number < jobs {
            let upto = jobs.min(number + u64::from(MAKE));
            let one = |number| NewJob { due, ..job(&self.ground.surroundings, contract, number, 1) };
            let batch: Vec<_> = (number..upto).map(one).collect();
            ids.extend(batch.iter().map(|job| job.id));
            self.ground.enqueue_batch(&*self.store, batch).await?;
            number = upto;
        }
        Ok(ids)
    }

    async fn settle_all(&self) -> Outcome {
        let mut ended = Vec::new();
        loop {
            let found = self.exchange(ended, MAKE).await?;
            if found.claimed.is_empty() {
                return Ok(());
            }
            ended = found.claimed.iter().map(completed).collect();
        }
    }
}

fn completed(claimed: &Claimed) -> Settle {
    let ending = Ending::Completed { result: None };
    Settle {
        handle: claimed.handle,
        token: claimed.token,
        ending: ending.clone(),
        on_conflict: ending,
        output: warp_store::RunOutput::default(),
        children: Vec::new(),
        state: Vec::new(),
        took: Duration::from_millis(1),
    }
}

/// Copies everything that one job has in any table, so many times, under handles and ids of their own. Which tables and
/// columns there are, the database says. The tables' statistics stay as they are until somebody asks for them.
async fn copy_job(ground: &Ground, template: JobId, copies: u64) -> Outcome {
    let id = uuid::Uuid::from_u128(template.0);
    let handle = single(ground.ask(&format!("SELECT handle FROM warp.job WHERE id = '{id}'")).await?)?;
    // `handle` names the job in its own rows, `job` in rows about it.
    let tables = ground
        .ask(
            "SELECT c.table_name, (array_agg(c.column_name ORDER BY c.column_name) FILTER (WHERE c.column_name IN ('handle', 'job')))[1], \
                    string_agg(quote_ident(c.column_name), ',' ORDER BY c.ordinal_position) \
             FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name) \
             WHERE c.table_schema = rtrim('warp.', '.') AND t.table_type = 'BASE TABLE' AND c.is_generated = 'NEVER' \
             GROUP BY c.table_name HAVING bool_or(c.column_name IN ('handle', 'job'))",
        )
        .await?;
    let first: u64 = single(ground.ask("SELECT nextval('warp.handle')").await?)?.parse().map_err(anyhow::Error::from)?;
    ground.ask(&format!("SELECT setval('warp.handle', {})", first + copies + 1)).await?;
    for row in tables {
        let [Some(table), Some(key), Some(columns)] = &row[..] else { continue };
        if ground.ask(&format!("SELECT FROM warp.{table} WHERE {key} = {handle} LIMIT 1")).await?.is_empty() {
            continue;
        }
        ground.ask(&format!("ALTER TABLE warp.{table} SET (autovacuum_enabled = off)")).await?;
        let values: Vec<_> = columns
            .split(',')
            .map(|column| match column {
                column if column == key => format!("{first} + g"),
                // Ascending, as ids of version 7 are.
                "id" => {
                    format!("(lpad(to_hex({first} + g), 12, '0') || '7' || left(md5(g::text), 3) || '8' || right(md5(g::text), 15))::uuid")
                }
                "entry" => "nextval('warp.entry')".to_owned(),
                "ticket" => "CASE WHEN t.ticket IS NOT NULL THEN nextval('warp.ticket') END".to_owned(),
                column => format!("t.{column}"),
            })
            .collect();
        let mut from = 1;
        while from <= copies {
            let upto = copies.min(from + COPIES - 1);
            let sql = format!(
                "INSERT INTO warp.{table} ({columns}) SELECT {} FROM generate_series({from}::bigint, {upto}) g, \
                 (SELECT * FROM warp.{table} WHERE {key} = {handle}) t",
                values.join(", ")
            );
            ground.ask(&sql).await?;
            from = upto + 1;
        }
    }
    Ok(())
}

fn single(rows: Vec<Vec<Option<String>>>) -> Outcome<String> {
    let value = rows.into_iter().next().and_then(|row| row.into_iter().next().flatten());
    value.ok_or_else(|| Failure::from(anyhow::anyhow!("failed to fill the database: the job to copy is not there")))
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
