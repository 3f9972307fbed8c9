//! What an operator asks before trusting a database: one look at everything that has hurt somebody.
//!
//! What must stay true: a finding that is not `ok` says what to do; whatever fails is a finding and never ends the
//! rest; nothing is changed and no lock is left, except where the usual pooler test, which is shown for comparison, has
//! stranded one of its own on somebody's backend; then the report says so.
//!
//! What it deliberately does not do: judge by names of hosts and ports.

use std::time::Duration;

use serde::Serialize;
use sqlx::postgres::{PgConnection, PgListener, PgPoolOptions, PgRow};
use warp_domain::UnixMillis;

use crate::call::{Sql, get, simple};
use crate::connect::{self, Connector};
use crate::error::Fault;
use crate::pooler::{self, Pooling};
use crate::schema::{Asker, LockKind, SCHEMA_VERSION, Seen};
use crate::settings::ConnectSettings;

/// What a host needs beside its pool: the lock connection, the one that listens, and one for what is urgent.
pub const BESIDE_POOL: u32 = 3;
/// A difference of clocks that people should know of. Nothing is decided by comparing clocks; times are shown.
const CLOCKS_DIFFER: Duration = Duration::from_secs(2);
/// Dead rows that are more than this, and more than live ones, are a sign.
const MANY_DEAD_ROWS: i64 = 50_000;
/// A transaction that has been open for so long keeps every dead row since.
const OLD_TRANSACTION: Duration = Duration::from_secs(10 * 60);
/// A host that vanishes keeps its sessions for as long as the server waits for it.
const LONG_KEEPALIVE: Duration = Duration::from_secs(5 * 60);

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, and will hurt some day.
    Warn,
    /// A host would refuse to start, or would not keep its promises.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What: `server`, `schema`, `pooling` …
    pub what: &'static str,
    /// How grave it is.
    pub level: Level,
    /// What was seen.
    pub text: String,
    /// What to do about it; nothing when it is as it should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// What was found, in the order in which it was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The address, without a password.
    pub database: String,
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The gravest level.
    #[must_use]
    pub fn worst(&self) -> Level {
        self.findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
    }

    /// The finding about something, if it was looked at.
    #[must_use]
    pub fn finding(&self, what: &str) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.what == what)
    }

    fn add(&mut self, what: &'static str, level: Level, text: impl Into<String>, remedy: impl Into<String>) {
        let remedy = Some(remedy.into()).filter(|_| level != Level::Ok);
        self.findings.push(Finding { what, level, text: text.into(), remedy });
    }

    fn ok(&mut self, what: &'static str, text: impl Into<String>) {
        self.add(what, Level::Ok, text, "");
    }

    fn failed(&mut self, what: &'static str, fault: &Fault) {
        self.add(what, Level::Fail, fault.text(), "see the text; the rest was looked at nevertheless");
    }
}

/// Looks at the database that the settings name. `wanted` is the kind of locks that the hosts are configured for, if
/// they are; `clock` is this host's clock. Takes a few seconds at most where the pooler makes it wait.
///
/// # Errors
/// Never: an address that cannot be read or reached is a finding.
pub async fn doctor(settings: &ConnectSettings, wanted: Option<LockKind>, clock: impl Fn() -> UnixMillis) -> Report {
    let mut report = Report { database: String::new(), findings: Vec::new() };
    let connector = match Connector::new(settings) {
        Ok(connector) => connector,
        Err(fault) => {
            "(not readable)".clone_into(&mut report.database);
            report.failed("connection", &fault);
            return report;
        }
    };
    connector.name().clone_into(&mut report.database);
    let mut conn = match connector.connect("").await {
        Ok(conn) => conn,
        Err(fault) => {
            report.failed("connection", &fault);
            return report;
        }
    };
    report.ok("connection", "connected and logged in");
    let mut patient = Patient { conn: &mut conn, connector: &connector, settings };
    let locks = database(&mut report, &mut patient, wanted).await;
    let pooling = pooling(&mut report, &connector, locks, settings.pool).await;
    naive(&mut report, &mut patient).await;
    listen(&mut report, settings, pooling).await;
    budget(&mut report, &mut patient).await;
    terminate(&mut report, &mut patient, locks).await;
    durability(&mut report, &mut patient).await;
    tls(&mut report, &mut patient, pooling).await;
    clocks(&mut report, &mut patient, clock).await;
    keepalives(&mut report, &mut patient, pooling).await;
    cleaning(&mut report, &mut patient).await;
    connect::close(conn).await;
    report
}

/// The connection that is asked.
struct Patient<'a> {
    conn: &'a mut PgConnection,
    connector: &'a Connector,
    settings: &'a ConnectSettings,
}

impl Patient<'_> {
    async fn rows(&mut self, sql: Sql) -> Result<Vec<PgRow>, Fault> {
        let asked = simple(self.conn, &sql, &self.settings.schema, self.connector.name());
        match tokio::time::timeout(self.settings.statement_timeout, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(Fault::said(warp_store::StoreErrorKind::Unavailable, "no answer in time")),
        }
    }

    async fn row(&mut self, sql: Sql) -> Result<PgRow, Fault> {
        let missing = || Fault::said(warp_store::StoreErrorKind::Internal, "the server gave no row");
        self.rows(sql).await?.into_iter().next().ok_or_else(missing)
    }
}

/// Server, isolation, schema, kind of locks.
async fn database(report: &mut Report, patient: &mut Patient<'_>, wanted: Option<LockKind>) -> Option<LockKind> {
    let name = patient.connector.name();
    let mut asker = Asker::Plain { conn: &mut *patient.conn, connector: patient.connector, schema: &patient.settings.schema };
    let seen = match Seen::read(&mut asker).await {
        Ok(seen) => seen,
        Err(fault) => {
            report.failed("server", &fault);
            return None;
        }
    };
    match seen.check_server(name) {
        Ok(()) => report.ok("server", format!("PostgreSQL {}, a primary, transactions begin as {}", seen.version_text, seen.isolation)),
        Err(fault) => report.failed("server", &fault),
    }
    match seen.check_known(name) {
        Err(fault) => report.failed("schema", &fault),
        Ok(()) if seen.version() == SCHEMA_VERSION => {
            report.ok("schema", format!("{} at version {SCHEMA_VERSION}", patient.settings.schema))
        }
        Ok(()) => {
            let text = format!("{} at version {}, this build needs {SCHEMA_VERSION}", patient.settings.schema, seen.version());
            report.add("schema", Level::Fail, text, "run `warp-host migrate`");
        }
    }
    match (seen.locks, wanted) {
        (None, _) => {}
        (Some(found), Some(wanted)) if found != wanted => report.add(
            "locks",
            Level::Fail,
            format!("slots are made of {found} locks and the settings want {wanted} locks"),
            format!("change the settings, or run `warp-host locks set {wanted}` while nothing holds a slot"),
        ),
        (Some(found), _) => report.ok("locks", format!("slots are made of {found} locks")),
    }
    seen.locks
}

/// The two-client test, and whether the kind of locks can live with what it finds.
async fn pooling(report: &mut Report, connector: &Connector, locks: Option<LockKind>, pool: u32) -> Option<Pooling> {
    let probed = match pooler::probe(connector, "").await {
        Ok(probed) => probed,
        Err(fault) => {
            report.failed("pooling", &fault);
            return None;
        }
    };
    let text = format!("two-client test: {} ({})", probed.pooling, probed.evidence);
    match (probed.pooling, locks) {
        (Pooling::Session, _) if probed.starved => {
            let remedy = format!(
                "raise the pooler's default_pool_size to what all hosts need together ({} each), or connect directly",
                pool + BESIDE_POOL
            );
            report.add("pooling", Level::Fail, text, remedy);
        }
        (Pooling::Session, _) => report.ok("pooling", format!("{text}; prepared statements are used")),
        (pooled, Some(LockKind::Session)) => report.add("pooling", Level::Fail, text, pooler::remedies(pooled)),
        (_, _) => {
            report.ok("pooling", format!("{text}; works with ledger locks: simple statements are used, and new work is found by polling"))
        }
    }
    for conn in probed.connections {
        connect::close(conn).await;
    }
    Some(probed.pooling)
}

/// The usual test, for comparison: it passes on an idle pooler.
async fn naive(report: &mut Report, patient: &mut Patient<'_>) {
    let result = pooler::naive(patient.conn, patient.connector.name()).await;
    match result {
        Ok(seen) if seen.stranded => report.add(
            "naive-test",
            Level::Warn,
            format!("{} and its lock stays on a backend of the pooler", seen.text),
            "nothing waits for that lock (its number is random); it ends with the backend",
        ),
        Ok(seen) => report.ok("naive-test", format!("{}; it says little, the two-client test decides", seen.text)),
        Err(fault) => report.failed("naive-test", &fault),
    }
}

async fn listen(report: &mut Report, settings: &ConnectSettings, pooling: Option<Pooling>) {
    let tested = async {
        let connector = Connector::for_listen(settings)?;
        let pooling = match (pooling, &settings.listen_url) {
            (Some(known), None) => known,
            _ => pooler::probe(&connector, "").await?.pooling,
        };
        if pooling != Pooling::Session {
            return Ok(false);
        }
        let options = connector.options("").await?;
        let fault = |error| Fault::from_driver(&error, crate::error::Phase::Connecting, connector.name());
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(connector.patience()).connect_lazy_with(options);
        let mut listener = PgListener::connect_with(&pool).await.map_err(fault)?;
        listener.listen(&settings.schema).await.map_err(fault)?;
        Ok::<bool, Fault>(true)
    };
    match tested.await {
        Ok(true) => report.ok("listen", "LISTEN works: hosts are told of new work at once"),
        Ok(false) => report.add(
            "listen",
            Level::Warn,
            "LISTEN does not work through a pooler that hands out a backend for each transaction or statement: new work is found by polling",
            "set listen_url to a direct address or to a pooler in session mode, if a start must not wait for the next poll",
        ),
        Err(fault) => report.failed("listen", &fault),
    }
}

/// Whether there is room for this host. Reads the server's table of backends and two rows of the catalogue.
async fn budget(report: &mut Report, patient: &mut Patient<'_>) {
    let need = i64::from(patient.settings.pool) + i64::from(BESIDE_POOL);
    let seen = async {
        let row = patient
            .row(Sql::new(
                "SELECT current_setting('max_connections')::int8 - current_setting('superuser_reserved_connections')::int8
                          - coalesce(current_setting('reserved_connections', true), '0')::int8,
                        (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = 'client backend'),
                        (SELECT rolconnlimit::int8 FROM pg_catalog.pg_roles WHERE rolname = current_user),
                        (SELECT datconnlimit::int8 FROM pg_catalog.pg_database WHERE datname = current_database()),
                        (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE usename = current_user AND datname = current_database())",
            ))
            .await?;
        Ok::<(i64, i64, i64, i64, i64), Fault>((get(&row, 0)?, get(&row, 1)?, get(&row, 2)?, get(&row, 3)?, get(&row, 4)?))
    };
    let (most, used, role_most, database_most, own) = match seen.await {
        Ok(seen) => seen,
        Err(fault) => return report.failed("budget", &fault),
    };
    let limit = [role_most, database_most].into_iter().filter(|limit| *limit >= 0).min();
    let free = limit.map_or(i64::MAX, |limit| limit - own).min(most - used);
    let mut text = format!(
        "a host takes at most {need} connections (pool {} + {BESIDE_POOL}); the server has {most} for everybody, {used} in use",
        patient.settings.pool
    );
    if let Some(limit) = limit {
        text.push_str(&format!(", and this role or database may have {limit}"));
    }
    if free < need {
        report.add("budget", Level::Warn, text, "raise max_connections (or the role's limit), lower the pool, or put a pooler in front");
    } else {
        report.ok("budget", text);
    }
}

/// slots.md A12: whoever rescues a host under session locks ends its lock session.
async fn terminate(report: &mut Report, patient: &mut Patient<'_>, locks: Option<LockKind>) {
    if locks != Some(LockKind::Session) {
        return;
    }
    let seen = async {
        let row = patient
            .row(Sql::new(
                "SELECT has_function_privilege('pg_catalog.pg_terminate_backend(int4, int8)', 'EXECUTE'),
                        (SELECT count(*) FROM pg_catalog.pg_stat_activity
                         WHERE application_name LIKE '%:warp-locks' AND datname = current_database()
                           AND NOT pg_has_role(usesysid, 'MEMBER'))",
            ))
            .await?;
        Ok::<(bool, i64), Fault>((get(&row, 0)?, get(&row, 1)?))
    };
    match seen.await {
        Ok((true, 0)) => report.ok("terminate", "this role may end the lock sessions of other hosts"),
        Ok((false, _)) => report.add(
            "terminate",
            Level::Fail,
            "this role may not call pg_terminate_backend, so a frozen host would keep its slots",
            "GRANT EXECUTE ON FUNCTION pg_terminate_backend(int, bigint) to this role, or use ledger locks",
        ),
        Ok((true, strangers)) => report.add(
            "terminate",
            Level::Fail,
            format!("{strangers} lock sessions belong to roles that this role may not end, so a frozen host would keep its slots"),
            "run all hosts with one role, or make this role a member of the others",
        ),
        Err(fault) => report.failed("terminate", &fault),
    }
}

async fn durability(report: &mut Report, patient: &mut Patient<'_>) {
    let seen = async {
        let row = patient
            .row(Sql::new("SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')"))
            .await?;
        Ok::<(String, String, String), Fault>((get(&row, 0)?, get(&row, 1)?, get(&row, 2)?))
    };
    match seen.await {
        Ok((_, fsync, pages)) if fsync == "off" || pages == "off" => report.add(
            "durability",
            Level::Warn,
            format!("fsync is {fsync} and full_page_writes {pages}: a crash of the machine can destroy the database"),
            "turn both on, unless this database may be lost",
        ),
        Ok((commit, _, _)) if commit == "off" => report.add(
            "durability",
            Level::Warn,
            "synchronous_commit is off: the last jobs that were acknowledged can be lost in a crash, and runs repeated",
            "ALTER ROLE … SET synchronous_commit = on",
        ),
        Ok((commit, _, _)) => report.ok("durability", format!("synchronous_commit is {commit}")),
        Err(fault) => report.failed("durability", &fault),
    }
}

async fn tls(report: &mut Report, patient: &mut Patient<'_>, pooling: Option<Pooling>) {
    let seen = async {
        let row = patient
            .rows(Sql::new(
                "SELECT ssl, coalesce(version, ''), coalesce(cipher, '') FROM pg_catalog.pg_stat_ssl WHERE pid = pg_backend_pid()",
            ))
            .await?;
        row.first().map(|row| Ok::<(bool, String, String), Fault>((get(row, 0)?, get(row, 1)?, get(row, 2)?))).transpose()
    };
    // What the server sees is its own neighbour.
    let between =
        if pooling == Some(Pooling::Session) { "to the server, or from the pooler to it" } else { "from the pooler to the server" };
    match seen.await {
        Ok(Some((true, version, cipher))) => report.ok("tls", format!("{version} with {cipher} {between}")),
        Ok(_) if patient.connector.is_local() => report.ok("tls", format!("no TLS {between}, on this machine")),
        Ok(_) => report.add(
            "tls",
            Level::Warn,
            format!("no TLS {between}"),
            "set sslmode=verify-full and sslrootcert, unless the network is trusted; behind a pooler also between it and the server",
        ),
        Err(fault) => report.failed("tls", &fault),
    }
}

async fn clocks(report: &mut Report, patient: &mut Patient<'_>, clock: impl Fn() -> UnixMillis) {
    let before = clock();
    let seen = async {
        let row = patient.row(Sql::new("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8")).await?;
        get::<i64>(&row, 0)
    };
    match seen.await {
        Ok(server) => {
            let after = clock();
            let middle = before.0 + after.0.saturating_sub(before.0) / 2;
            let offset = server.saturating_sub(middle);
            let text = format!("the server's clock is {} ms {} this host's", offset.abs(), if offset < 0 { "behind" } else { "ahead of" });
            if offset.unsigned_abs() > CLOCKS_DIFFER.as_millis() as u64 {
                report.add(
                    "clock",
                    Level::Warn,
                    text,
                    "synchronise both (NTP): what is due the server decides, and times in logs are this host's",
                );
            } else {
                report.ok("clock", text);
            }
        }
        Err(fault) => report.failed("clock", &fault),
    }
}

async fn keepalives(report: &mut Report, patient: &mut Patient<'_>, pooling: Option<Pooling>) {
    let seen = async {
        let row = patient
            .row(Sql::new(
                "SELECT current_setting('tcp_keepalives_idle')::int8, current_setting('tcp_keepalives_interval')::int8,
                        current_setting('tcp_keepalives_count')::int8",
            ))
            .await?;
        Ok::<(i64, i64, i64), Fault>((get(&row, 0)?, get(&row, 1)?, get(&row, 2)?))
    };
    match seen.await {
        Ok((0, _, _)) => report.ok("keepalive", "a socket of this machine, which needs none"),
        Ok((idle, interval, count)) => {
            let noticed = idle.saturating_add(interval.saturating_mul(count));
            let text = format!("by itself the server notices a host that has vanished after {noticed} s");
            if pooling == Some(Pooling::Session) {
                report.ok("keepalive", format!("{text}; sessions of hosts ask for half a minute"));
            } else if u64::try_from(noticed).unwrap_or(0) > LONG_KEEPALIVE.as_secs() {
                report.add(
                    "keepalive",
                    Level::Warn,
                    text,
                    "set tcp_keepalives_idle = 10, _interval = 5, _count = 4 on the server, and tcp_keepalive on the pooler",
                );
            } else {
                report.ok("keepalive", text);
            }
        }
        Err(fault) => report.failed("keepalive", &fault),
    }
}

/// Whether dead rows are cleaned away: the hot tables are read by every claim.
async fn cleaning(report: &mut Report, patient: &mut Patient<'_>) {
    let seen = async {
        let settings = patient.row(Sql::new("SELECT current_setting('autovacuum'), current_setting('track_counts')")).await?;
        let dead = patient
            .rows(
                Sql::new(
                    "SELECT relname::text, n_dead_tup, n_live_tup FROM pg_catalog.pg_stat_user_tables
                     WHERE schemaname = $1 AND n_dead_tup > greatest($2, n_live_tup) ORDER BY n_dead_tup DESC LIMIT 5",
                )
                .arg(patient.settings.schema.as_str())
                .arg(MANY_DEAD_ROWS),
            )
            .await?;
        let old = patient
            .row(Sql::new(
                "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::int8
                 FROM pg_catalog.pg_stat_activity WHERE backend_xmin IS NOT NULL AND backend_type = 'client backend'",
            ))
            .await?;
        let tables =
            dead.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?, get(row, 2)?))).collect::<Result<Vec<(String, i64, i64)>, Fault>>()?;
        Ok::<_, Fault>((get::<String>(&settings, 0)?, get::<String>(&settings, 1)?, tables, get::<i64>(&old, 0)?))
    };
    let (autovacuum, counts, tables, oldest) = match seen.await {
        Ok(seen) => seen,
        Err(fault) => return report.failed("autovacuum", &fault),
    };
    if autovacuum == "on" && counts == "on" {
        report.ok("autovacuum", "on");
    } else {
        let text = format!("autovacuum is {autovacuum}, track_counts {counts}: dead rows stay and every claim gets slower");
        report.add("autovacuum", Level::Fail, text, "turn both on");
    }
    if tables.is_empty() {
        report.ok("dead-rows", "few dead rows");
    } else {
        let tables: Vec<String> = tables.iter().map(|(table, dead, live)| format!("{table}: {dead} dead, {live} live")).collect();
        report.add(
            "dead-rows",
            Level::Warn,
            tables.join("; "),
            "look for old transactions and replication slots, then VACUUM these tables",
        );
    }
    if u64::try_from(oldest).unwrap_or(0) >= OLD_TRANSACTION.as_secs() {
        let text = format!("a transaction has been open for {oldest} s and keeps every dead row since");
        report.add("old-transaction", Level::Warn, text, "find it in pg_stat_activity (backend_xmin, xact_start) and end it");
    }
}
