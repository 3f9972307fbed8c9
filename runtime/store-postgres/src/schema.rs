//! The schema: installing it, bringing it up to date, and refusing what this build cannot work with.
//!
//! What must stay true:
//! - a migration is one message and so one transaction, recorded in it, under a lock that ends with it; it needs no
//!   session, no superuser and no extension, and a dropped future leaves nothing held;
//! - nothing is migrated unless somebody asks for it;
//! - a schema that a newer build has migrated, or that has been changed by hand, is refused and never guessed at.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgConnection;
use warp_domain::UnixMillis;
use warp_store::{Result, StoreErrorKind};

use crate::call::{Db, Sql, Texts, get, place, simple};
use crate::connect::{self, Connector};
use crate::error::{Fault, Phase, own};
use crate::settings::{ConnectSettings, check_schema_name};

/// Every migration in order; the schema's version is how many have been applied. Texts are static SQL, see [`place`].
pub const MIGRATIONS: [(&str, &str); 2] = [
    ("0001_jobs", include_str!("../../../migrations/postgres/0001_jobs.sql")),
    (
        "0002_pause",
        concat!(
            include_str!("../../../migrations/postgres/0002_pause.sql"),
            include_str!("../../../migrations/postgres/functions/ledger.sql"),
            include_str!("../../../migrations/postgres/functions/exchange.sql"),
            include_str!("../../../migrations/postgres/functions/claim.sql"),
            include_str!("../../../migrations/postgres/functions/enqueue.sql"),
            include_str!("../../../migrations/postgres/functions/hosts.sql"),
            include_str!("../../../migrations/postgres/functions/operators.sql"),
            include_str!("../../../migrations/postgres/functions/session.sql"),
        ),
    ),
];

/// The schema version that this build reads and writes.
pub const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// The oldest server that the statements are written for.
const OLDEST_SERVER: i32 = 150_000;
/// How often a migration is begun anew because another process was faster.
const MOST_ROUNDS: usize = 2 * MIGRATIONS.len() + 4;

/// What a slot is made of. A property of the database: two kinds on one key would exclude nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LockKind {
    /// Rows. Works through every pooler.
    Ledger,
    /// Advisory locks of one session per host.
    Session,
}

impl LockKind {
    /// As it is written everywhere.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LockKind::Ledger => "ledger",
            LockKind::Session => "session",
        }
    }
}

impl fmt::Display for LockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LockKind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "ledger" => Ok(LockKind::Ledger),
            "session" => Ok(LockKind::Session),
            other => Err(format!("{other:?} is no kind of locks; write `ledger` or `session`")),
        }
    }
}

/// The version that the database's schema is at; 0 when there is none.
///
/// # Errors
/// When the database cannot be reached or read.
pub async fn schema_version(settings: &ConnectSettings) -> Result<u32> {
    const OP: &str = "read the schema version";
    let asked = async {
        let (connector, mut conn) = connected(settings).await?;
        let seen = Seen::read(&mut Asker::Plain { conn: &mut conn, connector: &connector, schema: &settings.schema }).await;
        connect::close(conn).await;
        seen.map(|seen| seen.version())
    };
    asked.await.map_err(|fault: Fault| fault.into_error(OP))
}

/// Brings the schema up to date and returns the names of the migrations that were applied, or, with `dry_run`, that
/// would be. `locks` is the kind of slots that a new database gets; the ledger if nothing is said. Dropped, a migration
/// either happens as a whole or not at all.
///
/// # Errors
/// [`StoreErrorKind::Schema`] when the schema is newer than this build or was changed by hand;
/// [`StoreErrorKind::Invalid`] when the database exists with another kind of locks.
pub async fn migrate(settings: &ConnectSettings, locks: Option<LockKind>, dry_run: bool) -> Result<Vec<&'static str>> {
    const OP: &str = "migrate the database";
    let migrated = async {
        let (connector, mut conn) = connected(settings).await?;
        let done = apply(&connector, &mut conn, &settings.schema, locks, dry_run).await;
        connect::close(conn).await;
        done
    };
    migrated.await.map_err(|fault: Fault| fault.into_error(OP))
}

/// What [`migrate`] sends to a database that has been brought to `version`, from 0 for an empty one, as a script for
/// `psql --single-transaction`.
///
/// # Errors
/// When the name cannot be a schema's.
pub fn migration_sql(schema: &str, locks: LockKind, version: u32) -> Result<String> {
    check_schema_name(schema).map_err(|fault| fault.into_error("write the migrations"))?;
    let mut script = String::new();
    for (at, (name, _)) in MIGRATIONS.iter().enumerate().skip(version as usize) {
        let _ = writeln!(script, "-- {name}\n{}", step(at, schema, locks));
    }
    Ok(script)
}

/// What a database says about its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocksSeen {
    /// What they are made of.
    pub kind: LockKind,
    /// Who said so; `migrate` when the schema was made with it.
    pub set_by: String,
    /// When it was changed, if it ever was.
    pub set_at: Option<UnixMillis>,
}

/// Why the kind of slots cannot be changed now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocksInUse {
    /// Registered hosts, by name, and for how long each has been silent by the server's clock. One that was killed is among
    /// them until somebody has rescued it.
    pub hosts: Vec<(String, Duration)>,
    /// Slots that are taken or reserved.
    pub slots: u64,
}

/// What the database's slots are made of, and who said so. Reads the one row of `setting`.
///
/// # Errors
/// When the database cannot be reached, or has not the schema that this build knows.
pub async fn locks(settings: &ConnectSettings) -> Result<LocksSeen> {
    const OP: &str = "read what slots are made of";
    let sql = Sql::new("SELECT locks, locks_set_by, locks_set_at FROM warp.setting");
    let row = one_row(settings, sql, OP).await?;
    let seen = || {
        let kind: String = get(&row, 0)?;
        let kind = kind.parse().map_err(|why| Fault::said(StoreErrorKind::Schema, why))?;
        Ok(LocksSeen { kind, set_by: get(&row, 1)?, set_at: get::<Option<i64>>(&row, 2)?.map(UnixMillis) })
    };
    seen().map_err(|fault: Fault| fault.into_error(OP))
}

/// Changes what slots are made of, or says what is in the way: hosts, which would go on with the other kind, and slots
/// that are taken. One call of a function; a dropped future leaves it done or not done.
///
/// # Errors
/// When the database cannot be reached, or has not the schema that this build knows.
pub async fn set_locks(
    settings: &ConnectSettings,
    kind: LockKind,
    by: &str,
    now: UnixMillis,
) -> Result<std::result::Result<(), LocksInUse>> {
    const OP: &str = "change what slots are made of";
    let sql = Sql::new("SELECT hosts, silent, slots FROM warp.set_locks($1, $2, $3)").arg(kind.name()).arg(by).arg(now.0);
    let row = one_row(settings, sql, OP).await?;
    let answer = || {
        let (Texts(hosts), silent, slots) = (get(&row, 0)?, get::<Vec<i64>>(&row, 1)?, get::<i64>(&row, 2)?);
        let silent = silent.into_iter().map(|millis| Duration::from_millis(millis.unsigned_abs()));
        let in_use = LocksInUse { hosts: hosts.into_iter().flatten().zip(silent).collect(), slots: u64::try_from(slots).unwrap_or(0) };
        Ok(if in_use.hosts.is_empty() && in_use.slots == 0 { Ok(()) } else { Err(in_use) })
    };
    answer().map_err(|fault: Fault| fault.into_error(OP))
}

/// The answer of a database that this build can work with.
async fn one_row(settings: &ConnectSettings, sql: Sql, op: &'static str) -> Result<sqlx::postgres::PgRow> {
    let asked = async {
        let (connector, mut conn) = connected(settings).await?;
        let mut asker = Asker::Plain { conn: &mut conn, connector: &connector, schema: &settings.schema };
        Seen::read(&mut asker).await?.check_ready(connector.name())?;
        let rows = asker.rows(sql).await?;
        connect::close(conn).await;
        rows.into_iter().next().ok_or_else(|| Fault::said(StoreErrorKind::Internal, "the database gives no answer"))
    };
    asked.await.map_err(|fault: Fault| fault.into_error(op))
}

async fn connected(settings: &ConnectSettings) -> std::result::Result<(Connector, PgConnection), Fault> {
    let connector = Connector::new(settings)?;
    let conn = connector.connect("").await?;
    Ok((connector, conn))
}

async fn apply(
    connector: &Connector,
    conn: &mut PgConnection,
    schema: &str,
    locks: Option<LockKind>,
    dry_run: bool,
) -> std::result::Result<Vec<&'static str>, Fault> {
    let mut names = Vec::new();
    for _ in 0..MOST_ROUNDS {
        let seen = Seen::read(&mut Asker::Plain { conn: &mut *conn, connector, schema }).await?;
        seen.check_server(connector.name())?;
        seen.check_known(connector.name())?;
        let version = seen.version() as usize;
        if let (Some(wanted), Some(found)) = (locks, seen.locks)
            && wanted != found
        {
            return Err(other_locks(connector.name(), wanted, &seen));
        }
        if dry_run {
            return Ok(MIGRATIONS.iter().skip(version).map(|(name, _)| *name).collect());
        }
        let Some((name, _)) = MIGRATIONS.get(version) else { return Ok(names) };
        // No time limit: a migration of a large table takes what it takes. Whoever gives up drops the future.
        let sent = sqlx::raw_sql(AssertSqlSafe(step(version, schema, locks.unwrap_or(LockKind::Ledger)))).execute(&mut *conn).await;
        match sent.map_err(|error| Fault::from_driver(&error, Phase::Sent, connector.name())) {
            Ok(_) => names.push(*name),
            // Two processes began on one database: whoever came second looks again.
            Err(fault) if fault.code() == Some(own::SCHEMA) || fault.may_pass_again() => {}
            Err(fault) if fault.code() == Some("42501") => {
                return Err(Fault::said(
                    StoreErrorKind::Unavailable,
                    format!(
                        "{}. The role that migrates must own the schema: `CREATE SCHEMA {schema} AUTHORIZATION <role>` by the database's owner is enough, or GRANT CREATE ON DATABASE",
                        fault.text()
                    ),
                ));
            }
            Err(fault) => return Err(fault),
        }
    }
    Err(Fault::said(StoreErrorKind::Busy, format!("{}: other processes kept migrating; try again", connector.name())))
}

/// One migration as one message. Its lock is an advisory lock of this transaction, so that two processes do not try at
/// once to create what only one can; the table of migrations is read after it was got.
fn step(at: usize, schema: &str, locks: LockKind) -> String {
    let (name, text) = MIGRATIONS[at];
    let number = at + 1;
    let mut message = format!("SELECT pg_advisory_xact_lock(hashtextextended('warp-host:migrate:{schema}', 0));\n");
    // Neither a role's limit for statements nor a long queue behind somebody's open transaction.
    message.push_str("SET LOCAL statement_timeout = 0;\nSET LOCAL lock_timeout = '15s';\n");
    if at == 0 {
        // Asked first, because IF NOT EXISTS demands the right to create even where the schema exists.
        message.push_str(&place(
            "DO $$ BEGIN IF to_regnamespace('warp') IS NULL THEN CREATE SCHEMA warp; END IF; END $$;
CREATE TABLE IF NOT EXISTS warp.migration (
    number int PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);\n",
            schema,
        ));
    }
    let _ = writeln!(
        message,
        "DO $$ BEGIN IF (SELECT coalesce(max(number), 0) FROM {schema}.migration) <> {at} THEN
    RAISE EXCEPTION 'migration {name} does not follow what this database has' USING ERRCODE = '{code}';
END IF; END $$;",
        code = own::SCHEMA
    );
    message.push_str(&place(text, schema));
    let _ = writeln!(
        message,
        "\nINSERT INTO {schema}.migration (number, name, checksum) VALUES ({number}, '{name}', '{checksum}');",
        checksum = checksum(text)
    );
    if at == 0 && locks != LockKind::Ledger {
        let _ = writeln!(message, "UPDATE {schema}.setting SET locks = '{locks}';");
    }
    message
}

/// Of the text as it stands in the source, so that it does not depend on the name of the schema.
fn checksum(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Who asks: one connection before anything is known, or the open database.
pub(crate) enum Asker<'a> {
    Plain { conn: &'a mut PgConnection, connector: &'a Connector, schema: &'a str },
    Db(&'a Db),
}

impl Asker<'_> {
    pub(crate) async fn rows(&mut self, sql: Sql) -> std::result::Result<Vec<sqlx::postgres::PgRow>, Fault> {
        match self {
            Asker::Plain { conn, connector, schema } => simple(conn, &sql, schema, connector.name()).await,
            Asker::Db(db) => db.rows(sql.repeatable()).await,
        }
    }

    fn schema(&self) -> &str {
        match self {
            Asker::Plain { schema, .. } => schema,
            Asker::Db(db) => db.schema(),
        }
    }
}

/// What a database says about itself before it is used.
pub(crate) struct Seen {
    pub(crate) server_version: i32,
    pub(crate) version_text: String,
    pub(crate) in_recovery: bool,
    pub(crate) read_only: bool,
    pub(crate) isolation: String,
    schema: String,
    schema_exists: bool,
    may_use: bool,
    /// The migrations that were applied: number, name, checksum. `None` without the table.
    applied: Option<Vec<(i32, String, String)>>,
    pub(crate) locks: Option<LockKind>,
    locks_set_by: String,
}

impl Seen {
    /// Reads it. Locks nothing; the catalogue by name and two tiny tables.
    pub(crate) async fn read(asker: &mut Asker<'_>) -> std::result::Result<Self, Fault> {
        let schema = asker.schema().to_owned();
        let sql = Sql::new(
            "SELECT current_setting('server_version_num')::int4, current_setting('server_version'), pg_is_in_recovery(),
                    current_setting('transaction_read_only') = 'on', current_setting('default_transaction_isolation'),
                    n.oid IS NOT NULL, coalesce(has_schema_privilege(n.oid, 'USAGE'), false), m.oid IS NOT NULL, s.oid IS NOT NULL
             FROM (VALUES (1)) one
             LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = $1
             LEFT JOIN pg_catalog.pg_class m ON m.relnamespace = n.oid AND m.relname = 'migration'
             LEFT JOIN pg_catalog.pg_class s ON s.relnamespace = n.oid AND s.relname = 'setting'",
        );
        let rows = asker.rows(sql.arg(schema.as_str())).await?;
        let row = rows.first().ok_or_else(|| Fault::said(StoreErrorKind::Internal, "the database says nothing about itself"))?;
        let mut seen = Seen {
            server_version: get(row, 0)?,
            version_text: get(row, 1)?,
            in_recovery: get(row, 2)?,
            read_only: get(row, 3)?,
            isolation: get(row, 4)?,
            schema,
            schema_exists: get(row, 5)?,
            may_use: get(row, 6)?,
            applied: None,
            locks: None,
            locks_set_by: String::new(),
        };
        if !seen.may_use {
            return Ok(seen);
        }
        if get(row, 7)? {
            let rows = asker.rows(Sql::new("SELECT number, name, checksum FROM warp.migration ORDER BY number")).await?;
            seen.applied =
                Some(rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?, get(row, 2)?))).collect::<std::result::Result<_, Fault>>()?);
        }
        if get(row, 8)? {
            for row in asker.rows(Sql::new("SELECT locks, locks_set_by FROM warp.setting")).await? {
                seen.locks = get::<String>(&row, 0)?.parse().ok();
                seen.locks_set_by = get(&row, 1)?;
            }
        }
        Ok(seen)
    }

    pub(crate) fn version(&self) -> u32 {
        let newest = self.applied.iter().flatten().map(|(number, _, _)| *number).max().unwrap_or(0);
        u32::try_from(newest).unwrap_or(0)
    }

    /// What no migration could mend.
    pub(crate) fn check_server(&self, target: &str) -> std::result::Result<(), Fault> {
        let refuse = |kind, why: String| Err(Fault::said(kind, format!("{target} {why}")));
        if self.server_version < OLDEST_SERVER {
            return refuse(StoreErrorKind::Schema, format!("is PostgreSQL {}; 15 or newer is needed", self.version_text));
        }
        if self.in_recovery {
            return refuse(
                StoreErrorKind::Unavailable,
                "is a read-only standby; name the primary, or the address that follows it".to_owned(),
            );
        }
        if self.read_only {
            return refuse(
                StoreErrorKind::Unavailable,
                "makes every transaction read-only (default_transaction_read_only); change that for this role or database".to_owned(),
            );
        }
        if self.isolation != "read committed" {
            return refuse(
                StoreErrorKind::Invalid,
                format!(
                    "begins transactions as {:?}, and the statements are written for read committed; run `ALTER ROLE <role> SET default_transaction_isolation = 'read committed'` (and look at the address's `options`)",
                    self.isolation
                ),
            );
        }
        Ok(())
    }

    /// A schema that this build knows, or an older one.
    pub(crate) fn check_known(&self, target: &str) -> std::result::Result<(), Fault> {
        let schema = &self.schema;
        if self.schema_exists && !self.may_use {
            let why = format!(
                "{target}: this role may not use the schema {schema}; GRANT USAGE ON SCHEMA {schema}, or use the role that migrated it"
            );
            return Err(Fault::said(StoreErrorKind::Unavailable, why));
        }
        let version = self.version();
        if version > SCHEMA_VERSION {
            let why = format!(
                "{target}: the schema {schema} has version {version} and this build knows {SCHEMA_VERSION}; run the newer warp-host that migrated it, or restore a backup from before"
            );
            return Err(Fault::said(StoreErrorKind::Schema, why));
        }
        for (number, name, found) in self.applied.iter().flatten() {
            let known = usize::try_from(number - 1).ok().and_then(|at| MIGRATIONS.get(at));
            if known.is_none_or(|(known, text)| known != name || checksum(text) != *found) {
                let why = format!(
                    "{target}: migration {number} of the schema {schema} ({name}) is not the one that this build knows; it was made by a build of another branch, or its record was changed"
                );
                return Err(Fault::said(StoreErrorKind::Schema, why));
            }
        }
        Ok(())
    }

    /// A schema that this build can work with as it is.
    pub(crate) fn check_ready(&self, target: &str) -> std::result::Result<LockKind, Fault> {
        self.check_server(target)?;
        self.check_known(target)?;
        let (schema, version) = (&self.schema, self.version());
        let why = match (version, self.locks) {
            (SCHEMA_VERSION, Some(locks)) => return Ok(locks),
            (SCHEMA_VERSION, None) => {
                format!("{target}: the schema {schema} does not say what its slots are made of; restore the row of {schema}.setting")
            }
            (0, _) => format!("{target} has no schema {schema} yet; run `warp-host migrate`"),
            _ => format!(
                "{target}: the schema {schema} has version {version} and this build needs {SCHEMA_VERSION}; run `warp-host migrate`"
            ),
        };
        Err(Fault::said(StoreErrorKind::Schema, why))
    }
}

/// Looks at an open database: refuses what this build cannot work with, and a kind of locks that differs from what the
/// host was told. Returns the kind.
pub(crate) async fn check(db: &Db, wanted: Option<LockKind>) -> std::result::Result<LockKind, Fault> {
    let seen = Seen::read(&mut Asker::Db(db)).await?;
    let found = seen.check_ready(db.name())?;
    match wanted {
        Some(wanted) if wanted != found => Err(other_locks(db.name(), wanted, &seen)),
        _ => Ok(found),
    }
}

fn other_locks(target: &str, wanted: LockKind, seen: &Seen) -> Fault {
    let found = seen.locks.unwrap_or(LockKind::Ledger);
    Fault::said(
        StoreErrorKind::Invalid,
        format!(
            "{target}: slots are made of {found} locks (set by {}), not of {wanted} locks; change the settings, or the database with `warp-host locks set {wanted}` while nothing holds a slot",
            seen.locks_set_by
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_schema_is_part_of_a_migration() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migrations/postgres");
        let mut files = 0;
        for directory in [root.clone(), root.join("functions")] {
            for entry in std::fs::read_dir(directory).expect("the directory of migrations") {
                let path = entry.expect("an entry").path();
                if path.extension().is_some_and(|extension| extension == "sql") {
                    let text = std::fs::read_to_string(&path).expect("a file");
                    assert!(MIGRATIONS.iter().any(|(_, sql)| sql.contains(&text)), "{} is in no migration", path.display());
                    files += 1;
                }
            }
        }
        assert!(files > 0, "there are files");
    }

    #[test]
    fn a_migration_cannot_end_its_own_transaction() {
        for (name, text) in MIGRATIONS {
            for word in ["BEGIN;", "COMMIT;", "ROLLBACK;"] {
                assert!(!text.to_uppercase().lines().any(|line| line.trim() == word), "{name} has {word}");
            }
        }
    }

    #[test]
    fn a_script_for_another_schema_names_no_other() {
        let script = migration_sql("jobs", LockKind::Session, 0).expect("a name");
        assert!(script.contains("CREATE TABLE jobs.job"));
        assert!(!script.contains("warp.job"), "the placeholder is left");
        assert!(script.contains("SET locks = 'session'"));
        assert!(migration_sql("Jobs; DROP", LockKind::Ledger, 0).is_err());
    }
}
