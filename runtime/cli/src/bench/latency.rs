//! One job at a time, on hosts that have nothing else to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_domain::policy::{ConcurrencyKind, Declared};
use warp_store::Store;

use super::Bench;
use super::ground::Running;
use super::report::{Row, percentile};
use super::subject::{CONTRACT, Fixed, Recorder, job, limited, offer};
use crate::failure::{Failure, Outcome};

/// The host has registered, published its contracts and found nothing.
const SETTLED_IN: Duration = Duration::from_millis(300);
/// Jobs before those that count: connections, plans and caches are not new then.
const WARM_UP: u64 = 100;
/// Between two jobs.
const PAUSE: Duration = Duration::from_millis(5);
/// How long one job may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

impl Bench<'_> {
    /// From the answer to the enqueue to the start, and from its call. `other` enqueues over connections that are not
    /// the host's.
    pub(super) fn latency(&self, name: &str, other: bool) -> Outcome<Row> {
        let ground = self.ground()?;
        let samples = self.args.jobs.unwrap_or(1_000);
        let recorder = Recorder::new(None, Duration::ZERO, true);
        let offers = Fixed(vec![offer(Arc::<Recorder>::clone(&recorder), CONTRACT, Declared::default())]);
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let hosts = self.start(&ground, &offers)?;
            let publisher: Arc<dyn Store> = match hosts.first() {
                Some(host) if !other => Arc::clone(&host.store),
                _ => ground.publisher().await?,
            };
            tokio::time::sleep(SETTLED_IN).await;
            let (mut from_answer, mut from_call) = (Vec::new(), Vec::new());
            let mut first = None;
            for number in 0..WARM_UP + samples {
                if number == WARM_UP {
                    first = gauge.mark().await?;
                }
                let new = job(&ground.surroundings, CONTRACT, number, 1);
                let id = new.id;
                let called = Instant::now();
                ground.enqueue_batch(&*publisher, vec![new]).await?;
                let answered = Instant::now();
                let started = loop {
                    if let Some(started) = recorder.started(id) {
                        break started;
                    }
                    if called.elapsed() > PATIENCE {
                        return Err(Failure::usage(format!("job {number} has not started within {PATIENCE:?}")));
                    }
                    tokio::time::sleep(Duration::from_micros(200)).await;
                };
                if number >= WARM_UP {
                    // A start may even precede the answer to the enqueue.
                    from_answer.push(started.saturating_duration_since(answered).as_secs_f64() * 1e3);
                    from_call.push(started.saturating_duration_since(called).as_secs_f64() * 1e3);
                }
                tokio::time::sleep(PAUSE).await;
            }
            let last = gauge.mark().await?;
            drop(publisher);
            hosts.into_iter().for_each(Running::stop);
            let cost = gauge.cost(&first, &last).await?;
            let mut row = self.row(name, samples, "answer to the enqueue to start of the handler", gauge.settings().await?);
            row.statements_per_job = cost.as_ref().map(|cost| cost.statements as f64 / samples.max(1) as f64);
            row.beside.statements_from = cost.map(|cost| cost.statements_from);
            gauge.close().await;
            let [p50, p95, p99] = [0.50, 0.95, 0.99].map(|part| percentile(&from_call, part));
            Ok(row.timed(from_answer).figure("from_call_p50_ms", p50).figure("from_call_p95_ms", p95).figure("from_call_p99_ms", p99))
        })
    }

    /// How long after the end of a run on one host the job that waits for its key starts on the other.
    pub(super) fn handover(&self) -> Outcome<Row> {
        let ground = self.ground()?;
        let rounds = self.args.jobs.unwrap_or(400) / 2;
        // Long enough that the other host has parked its job before the first one ends.
        let recorder = Recorder::new(None, Duration::from_millis(20), true);
        let declared = limited(ConcurrencyKind::Mutex, "the-key", 1)?;
        let offers = |contract: &str| Fixed(vec![offer(Arc::<Recorder>::clone(&recorder), contract, declared.clone())]);
        ground.runtime.block_on(async {
            let mut gauge = ground.meter().await?;
            let one = ground.start("warp-bench-1", offers("here"), self.host_config())?;
            let other = ground.start("warp-bench-2", offers("there"), self.host_config())?;
            tokio::time::sleep(SETTLED_IN).await;
            let mut gaps = Vec::new();
            for number in 0..rounds {
                let pair = ["here", "there"].map(|contract| job(&ground.surroundings, contract, number, 1)).to_vec();
                ground.enqueue_batch(&*one.store, pair).await?;
                let begin = Instant::now();
                let ended = usize::try_from(2 * (number + 1)).unwrap_or(usize::MAX);
                while recorder.spans().len() < ended {
                    if begin.elapsed() > PATIENCE {
                        return Err(Failure::usage(format!("pair {number} has not ended within {PATIENCE:?}")));
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                if let [.., (_, first_ended), (second_began, _)] = recorder.spans()[..] {
                    gaps.push(second_began.saturating_duration_since(first_ended).as_secs_f64() * 1e3);
                }
            }
            [one, other].into_iter().for_each(Running::stop);
            let note = format!("end of a run to start of the waiter on the other host; at most {} at once", recorder.most());
            let mut row = self.row("handover", 2 * rounds, note, gauge.settings().await?);
            row.beside.hosts = 2;
            gauge.close().await;
            Ok(row.timed(gaps))
        })
    }
}
