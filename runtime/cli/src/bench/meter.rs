//! What the server counts while a workload runs: statements, WAL, connections, dead rows, its settings.
//!
//! What must stay true: the meter asks from a database of its own, and the counters that it reads are those of the
//! workload's database, so nothing that it asks is counted. Only WAL is a number of the whole server; whoever measures
//! it lets nothing else run there.
//!
//! SQLite has no server that counts: there the hosts' own numbers stand for statements, and the rest is left out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use warp_store_postgres::{ConnectSettings, Observer};

use crate::failure::{Failure, Outcome};

/// How often connections are counted.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// A backend publishes its statistics at the latest when it ends; so long the meter waits for that.
const BACKENDS_END: Duration = Duration::from_secs(10);
/// Settings without which figures cannot be compared.
const SETTINGS: &[&str] = &[
    "server_version",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
    "wal_level",
    "wal_compression",
    "shared_buffers",
    "max_wal_size",
    "max_connections",
    "autovacuum",
    "pg_stat_statements.track",
];
/// The bytes of a page: an image of one takes no more.
const PAGE_BYTES: u64 = 8192;

/// Asks the server about one of its databases.
pub struct Meter {
    own: Observer,
    own_settings: ConnectSettings,
    /// The database that is measured.
    database: String,
    has_statements: bool,
    has_wal_inspection: bool,
}

/// The counters at one moment.
#[derive(Debug, Clone)]
pub struct Mark {
    at: Instant,
    statements: Option<Statements>,
    transactions: u64,
    wal: String,
    page_images: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Statements {
    top_level: u64,
    nested: u64,
}

/// What lies between two marks.
#[derive(Debug, Clone)]
pub struct Cost {
    pub span: Duration,
    pub statements: u64,
    /// Those that functions of the schema ran, where the server tracks them.
    pub nested: u64,
    pub statements_from: &'static str,
    pub wal_bytes: u64,
    /// What images of pages take of it, if that can be told.
    pub wal_page_image_bytes: Option<u64>,
    /// From where that is known, or why it is not.
    pub page_images_from: &'static str,
}

impl Meter {
    /// From a database of its own, about another one on the same server.
    pub async fn connect(own: &ConnectSettings, database: &str) -> Outcome<Self> {
        let own_settings = ConnectSettings { application_name: "warp-bench-meter".to_owned(), ..own.clone() };
        let mut own = Observer::connect(&own_settings).await?;
        // Both need rights or a library that a server may not have; without them the figures say how else they were found.
        let has_statements =
            own.ask("CREATE EXTENSION IF NOT EXISTS pg_stat_statements; SELECT count(*) FROM pg_stat_statements(false)").await.is_ok();
        let has_wal_inspection = own.ask("CREATE EXTENSION IF NOT EXISTS pg_walinspect").await.is_ok();
        Ok(Meter { own, own_settings, database: database.to_owned(), has_statements, has_wal_inspection })
    }

    /// What the server says about itself.
    pub async fn settings(&mut self) -> Outcome<serde_json::Map<String, serde_json::Value>> {
        let wanted: Vec<_> = SETTINGS.iter().map(|name| format!("current_setting('{name}', true)")).collect();
        let row = one(self.own.ask(&format!("SELECT {}", wanted.join(", "))).await?)?;
        let named = SETTINGS.iter().zip(row);
        Ok(named.filter_map(|(name, value)| value.map(|value| ((*name).to_owned(), value.into()))).collect())
    }

    /// Reads the counters.
    pub async fn mark(&mut self) -> Outcome<Mark> {
        let statements = match self.has_statements {
            true => {
                let sql = format!(
                    "SELECT coalesce(sum(s.calls) FILTER (WHERE s.toplevel), 0), coalesce(sum(s.calls) FILTER (WHERE NOT s.toplevel), 0) \
                     FROM pg_stat_statements(false) s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = '{}'",
                    self.database
                );
                let row = one(self.own.ask(&sql).await?)?;
                Some(Statements { top_level: number(&row, 0)?, nested: number(&row, 1)? })
            }
            false => None,
        };
        let sql = format!(
            "SELECT pg_current_wal_insert_lsn(), (SELECT wal_fpi FROM pg_stat_wal), \
             (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = '{}')",
            self.database
        );
        let row = one(self.own.ask(&sql).await?)?;
        Ok(Mark { at: Instant::now(), statements, wal: text(&row, 0)?, page_images: number(&row, 1)?, transactions: number(&row, 2)? })
    }

    /// Waits until every client of the measured database has gone, so that its statistics are complete.
    pub async fn quiet(&mut self) -> Outcome {
        let begin = Instant::now();
        let sql = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND backend_type = 'client backend'", self.database);
        while begin.elapsed() < BACKENDS_END {
            if number(&one(self.own.ask(&sql).await?)?, 0)? == 0 {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// What lies between two marks, read after the clients have gone: only then the server has counted everything.
    pub async fn cost(&mut self, from: &Mark, to: &Mark) -> Outcome<Cost> {
        self.quiet().await?;
        let last = self.mark().await?;
        let (statements, nested, statements_from) = match (from.statements, to.statements) {
            (Some(from), Some(to)) => {
                (to.top_level.saturating_sub(from.top_level), to.nested.saturating_sub(from.nested), "pg_stat_statements")
            }
            _ => (last.transactions.saturating_sub(from.transactions), 0, "transactions of pg_stat_database"),
        };
        let sql = format!("SELECT pg_wal_lsn_diff('{}', '{}')::bigint", to.wal, from.wal);
        let wal_bytes = number(&one(self.own.ask(&sql).await?)?, 0)?;
        let (wal_page_image_bytes, page_images_from) = match self.inspect_wal(from, to).await {
            Some(bytes) => (Some(bytes), "pg_walinspect"),
            None => page_images(last.page_images.saturating_sub(from.page_images), wal_bytes),
        };
        Ok(Cost {
            span: to.at.saturating_duration_since(from.at),
            statements,
            nested,
            statements_from,
            wal_bytes,
            wal_page_image_bytes,
            page_images_from,
        })
    }

    /// The bytes of page images in a stretch of the log, if it is still there and may be read.
    async fn inspect_wal(&mut self, from: &Mark, to: &Mark) -> Option<u64> {
        if !self.has_wal_inspection {
            return None;
        }
        let sql = format!("SELECT coalesce(sum(fpi_size), 0)::bigint FROM pg_get_wal_stats('{}', '{}')", from.wal, to.wal);
        let rows = self.own.ask(&sql).await.ok()?;
        rows.first()?.first()?.as_ref()?.parse().ok()
    }

    /// Begins to count connections.
    pub async fn watch(&self) -> Outcome<Watch> {
        let observer = Observer::connect(&self.own_settings).await?;
        let over = Arc::new(AtomicBool::new(false));
        let counting = tokio::spawn(count_backends(observer, self.database.clone(), Arc::clone(&over)));
        Ok(Watch { over, counting })
    }

    /// Ends the meter's connection.
    pub async fn close(self) {
        self.own.close().await;
    }
}

/// Dead rows of every table of a database, read in that database itself.
pub async fn dead_rows(measured: &ConnectSettings) -> Outcome<u64> {
    let settings = ConnectSettings { application_name: "warp-bench-meter".to_owned(), ..measured.clone() };
    let mut observer = Observer::connect(&settings).await?;
    let row = one(observer.ask("SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables").await?)?;
    observer.close().await;
    number(&row, 0)
}

/// What is known about images of pages where the log itself may not be read. Of their number there is only a counter of the
/// whole server, and of their size a bound: an image leaves out the hole in its page, and compression is possible. With as
/// many as would fill the log, the bound says nothing.
fn page_images(count: u64, wal_bytes: u64) -> (Option<u64>, &'static str) {
    match count.saturating_mul(PAGE_BYTES) {
        bytes if bytes < wal_bytes || bytes == 0 => (Some(bytes), "pg_stat_wal.wal_fpi, 8 KiB each at most"),
        _ => (None, "unknown: pg_walinspect is not there, and pg_stat_wal.wal_fpi counts images for more than all of the log"),
    }
}

/// Connections, being counted.
pub struct Watch {
    over: Arc<AtomicBool>,
    counting: JoinHandle<Outcome<Backends>>,
}

/// The most connections at once: of all hosts together, and by name of the application.
#[derive(Debug, Clone, Default)]
pub struct Backends {
    pub peak: u32,
    pub by_name: BTreeMap<String, u32>,
}

impl Watch {
    /// What was counted.
    pub async fn finish(self) -> Outcome<Backends> {
        self.over.store(true, Ordering::Release);
        self.counting.await.map_err(|error| Failure::from(anyhow::Error::from(error)))?
    }
}

async fn count_backends(mut observer: Observer, database: String, over: Arc<AtomicBool>) -> Outcome<Backends> {
    let sql = format!(
        "SELECT application_name, count(*) FROM pg_stat_activity \
         WHERE datname = '{database}' AND backend_type = 'client backend' GROUP BY application_name"
    );
    let mut found = Backends::default();
    while !over.load(Ordering::Acquire) {
        let mut sum = 0;
        for row in observer.ask(&sql).await? {
            let (name, count) = (text(&row, 0)?, u32::try_from(number(&row, 1)?).unwrap_or(u32::MAX));
            // The publisher is no host.
            if !name.starts_with(super::ground::PUBLISHER) {
                sum += count;
            }
            let most = found.by_name.entry(name).or_default();
            *most = count.max(*most);
        }
        found.peak = found.peak.max(sum);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    observer.close().await;
    Ok(found)
}

type Texts = Vec<Option<String>>;

fn one(rows: Vec<Texts>) -> Outcome<Texts> {
    rows.into_iter().next().ok_or_else(|| unreadable("no row"))
}

fn text(row: &Texts, at: usize) -> Outcome<String> {
    row.get(at).cloned().flatten().ok_or_else(|| unreadable("nothing where a value belongs"))
}

fn number(row: &Texts, at: usize) -> Outcome<u64> {
    let text = text(row, at)?;
    text.parse().map_err(|_| unreadable(&text))
}

fn unreadable(what: &str) -> Failure {
    Failure::from(anyhow::anyhow!("failed to read the server's statistics: it answered {what:?}"))
}

#[cfg(test)]
mod tests {
    use super::page_images;

    #[test]
    fn images_that_would_fill_the_log_are_not_told() {
        for (count, wal_bytes, told) in
            [(0, 0, Some(0)), (0, 100, Some(0)), (1, 8_193, Some(8_192)), (1, 8_192, None), (3, 20_000, None), (u64::MAX, 20_000, None)]
        {
            assert_eq!(page_images(count, wal_bytes).0, told, "{count} images in {wal_bytes} bytes");
        }
    }
}
