//! `/metrics`: what is counted, in the text format of Prometheus and OpenMetrics.
//!
//! What must stay true: a database that does not answer takes away its own figures and nothing else; the names are an
//! interface, added to and never renamed.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::Mutex;
use tokio::time;
use warp_store::{HolderSeen, KeySeen, Overview, QueueSeen, StoreError};
use warp_worker::HostReport;

use crate::{PoolState, Sources};

/// What the answer says it is.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// For so long the figures of the database are given again without asking it.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(5);
/// How long the database is waited for.
const DATABASE_WITHIN: Duration = Duration::from_secs(3);
/// How many keys are looked at: the busiest.
const KEYS: u32 = 10;
/// How many queues are told of: the deepest. Anybody who enqueues names queues, so their number is bounded here.
const QUEUES: u32 = 100;

/// Reads everything, the database not more often than it should.
pub(crate) struct Metrics {
    sources: Sources,
    /// When it was read, on the boot-time clock. The lock is held while the database is asked, so that all who come
    /// meanwhile get the one answer.
    database: Mutex<Option<(Duration, Arc<DatabaseSeen>)>>,
}

impl Metrics {
    pub(crate) fn new(sources: Sources) -> Self {
        Metrics { sources, database: Mutex::new(None) }
    }

    /// The exposition. Dropped at an await, the question to the database is dropped with it, which the store allows.
    pub(crate) async fn text(&self) -> String {
        let database = self.database().await;
        let Sources { numbers, catalog, pool, workers, version, database: kind, locks, .. } = &self.sources;
        render(Seen {
            host: numbers.report(),
            lease_age: numbers.lease_age(),
            contracts: catalog.offers().len(),
            workers: *workers,
            pool: pool.as_ref().map(|ask| ask()),
            info: [("version", *version), ("database", *kind), ("locks", *locks)],
            database,
        })
    }

    async fn database(&self) -> Arc<DatabaseSeen> {
        let mut known = self.database.lock().await;
        if let Some((at, seen)) = &*known
            && self.sources.surroundings.boot().saturating_sub(*at) < FRESH_FOR
        {
            return Arc::clone(seen);
        }
        let seen = Arc::new(match time::timeout(DATABASE_WITHIN, self.ask()).await {
            Ok(Ok((overview, queues, keys))) => DatabaseSeen::Answered { overview, queues, keys },
            Ok(Err(error)) => DatabaseSeen::Silent(error.to_string()),
            Err(_) => DatabaseSeen::Silent("no answer in time".to_owned()),
        });
        if let DatabaseSeen::Silent(why) = &*seen {
            tracing::debug!(why, "the database gives no figures for metrics");
        }
        *known = Some((self.sources.surroundings.boot(), Arc::clone(&seen)));
        seen
    }

    async fn ask(&self) -> Result<(Overview, Vec<QueueDepth>, Vec<KeyWait>), StoreError> {
        let store = &self.sources.store;
        let overview = store.overview().await?;
        let now = self.sources.surroundings.now();
        let queues = store.queues(QUEUES).await?.into_iter().map(|seen| QueueDepth::of(seen, now)).collect();
        let mut keys = Vec::new();
        for key in store.keys(KEYS).await? {
            // A list does not say since when its waiters wait.
            let seen = if key.waiting == 0 { Some(key) } else { store.key(&key.key).await? };
            keys.extend(seen.map(|seen| KeyWait::of(&seen, self.sources.surroundings.now())));
        }
        keys.sort_by(|a, b| b.oldest.cmp(&a.oldest).then(b.waiting.cmp(&a.waiting)));
        Ok((overview, queues, keys))
    }
}

/// A queue, and for how long its first ready job could have run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct QueueDepth {
    queue: String,
    depths: [(&'static str, u64); 4],
    oldest: Duration,
}

impl QueueDepth {
    fn of(seen: QueueSeen, now: warp_domain::UnixMillis) -> Self {
        let QueueSeen { queue, ready, running, scheduled, parked, oldest_ready } = seen;
        QueueDepth {
            queue,
            depths: [("ready", ready), ("running", running), ("scheduled", scheduled), ("parked", parked)],
            oldest: oldest_ready.map_or(Duration::ZERO, |since| now.since(since)),
        }
    }
}

/// A key without its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KeyWait {
    waiting: u32,
    held: u32,
    oldest: Duration,
}

impl KeyWait {
    fn of(key: &KeySeen, now: warp_domain::UnixMillis) -> Self {
        let running = |holder: &&HolderSeen| holder.host.is_some();
        KeyWait {
            waiting: key.waiting,
            held: u32::try_from(key.holders.iter().filter(running).count()).unwrap_or(u32::MAX),
            oldest: key.waiters.iter().map(|waiter| now.since(waiter.since)).max().unwrap_or_default(),
        }
    }
}

#[derive(Debug, PartialEq)]
enum DatabaseSeen {
    Answered { overview: Overview, queues: Vec<QueueDepth>, keys: Vec<KeyWait> },
    Silent(String),
}

/// Everything that one answer says.
#[derive(Debug)]
struct Seen {
    host: HostReport,
    lease_age: Option<Duration>,
    contracts: usize,
    workers: u32,
    pool: Option<PoolState>,
    info: [(&'static str, &'static str); 3],
    database: Arc<DatabaseSeen>,
}

fn render(seen: Seen) -> String {
    let mut registry = Registry::with_prefix("warp");
    registry.register_collector(Box::new(seen));
    let mut text = String::new();
    // Writing into a text cannot fail unless a collector breaks the encoder's rules, which the test would show.
    if let Err(error) = text::encode(&mut text, &registry) {
        tracing::error!(%error, "failed to write the metrics");
    }
    text
}

impl Collector for Seen {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Seen { host, lease_age, contracts, workers, pool, info, database } = self;
        let mut out = Out(encoder);
        out.gauges("host", "What this host is, always 1", [(*info, 1.0)])?;
        out.host(host)?;
        out.gauge("workers", "How many jobs run at once at most", f64::from(*workers))?;
        out.gauge("contracts_served", "Contracts that this host can run now", *contracts as f64)?;
        if let Some(age) = lease_age {
            out.gauge("lease_age_seconds", "Since the last good renewal of the lease was sent; absent without one", age.as_secs_f64())?;
        }
        if let Some(PoolState { busy, idle, most }) = pool {
            let states = [([("state", "busy")], f64::from(*busy)), ([("state", "idle")], f64::from(*idle))];
            out.gauges("pool_connections", "Connections of the pool", states)?;
            out.gauge("pool_connections_most", "How many there may be", f64::from(*most))?;
        }
        match &**database {
            DatabaseSeen::Answered { overview, queues, keys } => {
                out.gauge("database_up", "Whether the database answered", 1.0)?;
                out.overview(overview)?;
                out.queues(queues)?;
                out.keys(keys)
            }
            DatabaseSeen::Silent(_) => out.gauge("database_up", "Whether the database answered", 0.0),
        }
    }
}

/// Writes metrics.
struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn host(&mut self, report: &HostReport) -> fmt::Result {
        // Without `..`, so that a new number cannot be forgotten here.
        let HostReport { exchanges, claimed, settled, late, parked, parked_again, skipped, unknown_rows, rescued, running } = *report;
        self.gauge("running", "Jobs that this host has claimed and not settled", running as f64)?;
        self.counter("exchanges", "Round trips of this host that settled or claimed", exchanges)?;
        self.counter("claimed", "Jobs that this host claimed", claimed)?;
        self.counter("settled", "Runs that this host settled", settled)?;
        self.counter("settled_late", "Settles of this host that came too late and changed nothing", late)?;
        self.counter("parked", "Jobs that a claim of this host parked", parked)?;
        self.counter("parked_again", "Of those, how many had been parked before", parked_again)?;
        self.counter("skipped", "Jobs that a claim of this host skipped", skipped)?;
        self.counter("rows_unknown", "Rows under this host's name that it did not know", unknown_rows)?;
        self.counter("rows_rescued", "Rows that this host gave back from dead hosts", rescued)
    }

    fn overview(&mut self, overview: &Overview) -> fmt::Result {
        let Overview { states, parked, counters, paused_queues } = overview;
        let rows = states.iter().map(|(state, jobs)| ([("state", state.name())], *jobs as f64));
        self.gauges("jobs", "Jobs in the database", rows)?;
        self.gauge("jobs_parked", "Enqueued jobs that wait for a key", *parked as f64)?;
        self.gauge("queues_paused", "Queues that an operator has paused", paused_queues.len() as f64)?;
        let counted = counters.iter().map(|(name, value)| {
            let name = name.strip_prefix("stats:").unwrap_or(name);
            let (what, reason) = name.split_once(':').unwrap_or((name, ""));
            ([("what", what), ("reason", reason)], u64::try_from(*value).unwrap_or(0))
        });
        self.counters("ends", "What has happened to jobs, all hosts together", counted)
    }

    fn queues(&mut self, queues: &[QueueDepth]) -> fmt::Result {
        let depths = queues.iter().flat_map(|QueueDepth { queue, depths, .. }| {
            depths.iter().map(move |(state, jobs)| ([("queue", queue.as_str()), ("state", *state)], *jobs as f64))
        });
        self.gauges("queue_jobs", "Jobs in the deepest queues, counted up to some ten thousand", depths)?;
        let oldest = queues.iter().map(|QueueDepth { queue, oldest, .. }| ([("queue", queue.as_str())], oldest.as_secs_f64()));
        self.gauges("queue_oldest_ready_seconds", "For how long the first ready job of the same queues could have run", oldest)
    }

    /// By rank, not by name: a key is made of payloads.
    fn keys(&mut self, keys: &[KeyWait]) -> fmt::Result {
        let ranks: Vec<String> = (1..=keys.len()).map(|rank| rank.to_string()).collect();
        let rows = |figure: fn(&KeyWait) -> f64| ranks.iter().zip(keys).map(move |(rank, key)| ([("rank", rank.as_str())], figure(key)));
        self.gauges(
            "key_wait_seconds",
            "For how long the first in line has waited, of the busiest keys",
            rows(|key| key.oldest.as_secs_f64()),
        )?;
        self.gauges("key_waiting", "How many wait, of the same keys", rows(|key| f64::from(key.waiting)))?;
        self.gauges("key_slots_held", "Slots that are taken, of the same keys", rows(|key| f64::from(key.held)))
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?)
    }

    fn gauges<'s, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'s str, &'s str); N], f64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in rows {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_descriptor(name, help, None, MetricType::Counter)?)
    }

    fn counters<'s, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'s str, &'s str); N], u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in rows {
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use warp_domain::ending::State;

    use super::*;

    fn seen(database: DatabaseSeen) -> Seen {
        Seen {
            host: HostReport { exchanges: 1, claimed: 2, settled: 3, running: 4, ..HostReport::default() },
            lease_age: Some(Duration::from_millis(1500)),
            contracts: 2,
            workers: 8,
            pool: Some(PoolState { busy: 1, idle: 2, most: 4 }),
            info: [("version", "1.2.3"), ("database", "postgres"), ("locks", "ledger")],
            database: Arc::new(database),
        }
    }

    #[test]
    fn everything() {
        let overview = Overview {
            states: BTreeMap::from([(State::Enqueued, 7), (State::Failed, 1)]),
            parked: 3,
            counters: BTreeMap::from([("stats:succeeded".to_owned(), 5), ("stats:requeued:concurrency".to_owned(), 6)]),
            paused_queues: BTreeMap::new(),
        };
        let keys = vec![KeyWait { waiting: 3, held: 1, oldest: Duration::from_secs(90) }];
        let deep = QueueSeen {
            queue: "night \"shift\"".to_owned(),
            ready: 5,
            running: 1,
            scheduled: 2,
            parked: 3,
            oldest_ready: Some(warp_domain::UnixMillis(1_000)),
        };
        let idle = QueueSeen { queue: "default".to_owned(), ready: 0, running: 1, scheduled: 0, parked: 0, oldest_ready: None };
        let queues = [deep, idle].map(|seen| QueueDepth::of(seen, warp_domain::UnixMillis(13_500))).to_vec();
        insta::assert_snapshot!(render(seen(DatabaseSeen::Answered { overview, queues, keys })));
    }

    #[test]
    fn a_silent_database_takes_its_own_figures_away_and_nothing_else() {
        let text = render(Seen { lease_age: None, pool: None, ..seen(DatabaseSeen::Silent("gone".to_owned())) });
        assert!(text.contains("warp_database_up 0.0\n") && text.contains("warp_claimed_total 2\n"), "{text}");
        assert!(!text.contains("warp_jobs") && !text.contains("warp_key") && !text.contains("warp_lease"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
