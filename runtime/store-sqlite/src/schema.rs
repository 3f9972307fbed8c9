//! The file and its schema: opening, migrating, backing up.
//!
//! What must stay true: a migration is one transaction and is recorded in it; a file that a newer build has
//! migrated is refused, never guessed at.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteSynchronous};
use sqlx::{Connection as _, Row as _, SqliteConnection};
use warp_store::{Result, StoreError, StoreErrorKind};

use crate::error::{Fault, check_room_to_open};

/// Every migration in order; the schema's version is how many have been applied.
pub const MIGRATIONS: [(&str, &str); 2] = [
    ("0001_jobs", include_str!("../../../migrations/sqlite/0001_jobs.sql")),
    ("0002_pause", include_str!("../../../migrations/sqlite/0002_pause.sql")),
];

/// The schema version that this build reads and writes.
pub const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// How to open a database.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The file.
    pub path: PathBuf,
    /// Whether a missing file is made.
    pub create: bool,
    /// Whether an older (or empty) schema is brought up to date. Without it such a file is refused.
    pub migrate: bool,
}

impl OpenOptions {
    /// A file that is created and migrated as needed.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        OpenOptions { path: path.into(), create: true, migrate: true }
    }
}

/// Connection settings that every connection shares.
pub(crate) fn connect_options(path: &Path, create: bool) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(create)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(false)
        .busy_timeout(Duration::from_secs(5))
        // The writer's scripts are one statement each for every mixture of shapes; a large one takes half a megabyte.
        .statement_cache_capacity(128)
        .row_buffer_size(1024)
        .pragma("temp_store", "memory")
        .pragma("cache_size", "-16384")
        // A checkpoint syncs the file itself; a longer log means fewer of them.
        .pragma("wal_autocheckpoint", "4000")
        .pragma("journal_size_limit", "67108864")
}

/// For connections that only ask.
pub(crate) fn reader_options(path: &Path) -> SqliteConnectOptions {
    connect_options(path, false).pragma("query_only", "on").pragma("cache_size", "-4096")
}

/// The version a file is at; 0 is an empty file.
pub async fn schema_version(path: &Path) -> Result<u32> {
    const OP: &str = "read the schema version";
    let mut conn = connect(path, false, OP).await?;
    let version = read_version(&mut conn).await.map_err(|fault| fault.into_error(OP, path))?;
    let _ = conn.close().await;
    Ok(version)
}

/// Brings a file up to date and returns the names of the migrations that were applied, or, with `dry_run`, that
/// would be. Fails with [`StoreErrorKind::Schema`] when the file is newer than this build.
pub async fn migrate(path: &Path, dry_run: bool) -> Result<Vec<&'static str>> {
    const OP: &str = "migrate the database";
    let mut conn = connect(path, !dry_run, OP).await?;
    let done = apply(&mut conn, dry_run).await.map_err(|fault| fault.into_error(OP, path));
    let _ = conn.close().await;
    done
}

async fn connect(path: &Path, create: bool, op: &'static str) -> Result<SqliteConnection> {
    check_room_to_open(path).map_err(|fault| fault.into_error(op, path))?;
    SqliteConnection::connect_with(&connect_options(path, create)).await.map_err(|error| Fault::Sql(error).into_error(op, path))
}

async fn read_version(conn: &mut SqliteConnection) -> std::result::Result<u32, Fault> {
    let has_table =
        sqlx::query("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'migration'").fetch_optional(&mut *conn).await?;
    if has_table.is_none() {
        return match sqlx::query("SELECT name FROM sqlite_schema LIMIT 1").fetch_optional(&mut *conn).await? {
            None => Ok(0),
            Some(row) => Err(Fault::Said(
                StoreErrorKind::Schema,
                format!("the file holds a database of another program (it has `{}`); name another file", row.try_get::<String, _>(0)?),
            )),
        };
    }
    let version: i64 = sqlx::query("SELECT coalesce(max(number), 0) FROM migration").fetch_one(&mut *conn).await?.try_get(0)?;
    Ok(u32::try_from(version).unwrap_or(u32::MAX))
}

fn refuse_newer(version: u32) -> std::result::Result<(), Fault> {
    if version <= SCHEMA_VERSION {
        return Ok(());
    }
    Err(Fault::Said(
        StoreErrorKind::Schema,
        format!(
            "the database has schema version {version} and this build knows {SCHEMA_VERSION}; run the newer warp-host that migrated it, or restore a backup from before"
        ),
    ))
}

async fn apply(conn: &mut SqliteConnection, dry_run: bool) -> std::result::Result<Vec<&'static str>, Fault> {
    let version = read_version(conn).await?;
    refuse_newer(version)?;
    if !dry_run {
        use_log(conn).await?;
    }
    let mut names = Vec::new();
    for (at, (name, text)) in MIGRATIONS.iter().enumerate().skip(version as usize) {
        names.push(*name);
        if dry_run {
            continue;
        }
        let number = i64::try_from(at + 1).unwrap_or(i64::MAX);
        let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
        // Two processes may start on one empty file: whoever comes second finds the work done.
        if u64::from(read_version(&mut transaction).await?) > at as u64 {
            transaction.rollback().await?;
            continue;
        }
        sqlx::raw_sql("CREATE TABLE IF NOT EXISTS migration (number INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT")
            .execute(&mut *transaction)
            .await?;
        sqlx::raw_sql(*text).execute(&mut *transaction).await?;
        sqlx::query("INSERT INTO migration (number, name) VALUES (?, ?)").bind(number).bind(*name).execute(&mut *transaction).await?;
        transaction.commit().await?;
    }
    Ok(names)
}

/// Opens the writer's connection after the schema has been found or brought right; with the number of wakes so far.
pub(crate) async fn open(options: &OpenOptions) -> Result<(SqliteConnection, i64)> {
    const OP: &str = "open the database";
    let path = &options.path;
    let fail = |fault: Fault| fault.into_error(OP, path);
    let mut conn = connect(path, options.create, OP).await?;
    if options.migrate {
        apply(&mut conn, false).await.map_err(fail)?;
    }
    let version = read_version(&mut conn).await.map_err(fail)?;
    refuse_newer(version).map_err(fail)?;
    if version < SCHEMA_VERSION {
        let text = format!("the database has schema version {version} and this build needs {SCHEMA_VERSION}; run `warp-host migrate`");
        return Err(StoreError::new(OP, StoreErrorKind::Schema, text));
    }
    use_log(&mut conn).await.map_err(fail)?;
    let wakes = read_wakes(&mut conn).await.map_err(fail)?;
    Ok((conn, wakes))
}

/// The write-ahead log is a property of the file that every later connection finds, and changing it writes: only
/// after the file is known to be ours. A copy that [`backup`] wrote comes without.
async fn use_log(conn: &mut SqliteConnection) -> std::result::Result<(), Fault> {
    sqlx::query("PRAGMA journal_mode = wal").fetch_one(conn).await?;
    Ok(())
}

async fn read_wakes(conn: &mut SqliteConnection) -> std::result::Result<i64, Fault> {
    Ok(sqlx::query("SELECT wakes FROM sequence").fetch_one(conn).await?.try_get(0)?)
}

/// Writes a consistent copy of the database to a file that must not exist yet, while others go on working.
pub(crate) async fn backup(path: &Path, to: &Path) -> Result<()> {
    const OP: &str = "back up the database";
    if to.exists() {
        let text = format!("{} exists already; name another file", to.display());
        return Err(StoreError::new(OP, StoreErrorKind::Invalid, text));
    }
    let name = to.to_str().ok_or_else(|| StoreError::new(OP, StoreErrorKind::Invalid, "the name of the copy is not valid UTF-8"))?;
    let mut conn = connect(path, false, OP).await?;
    let done = sqlx::query("VACUUM INTO ?").bind(name).execute(&mut conn).await;
    let _ = conn.close().await;
    let Err(error) = done else { return Ok(()) };
    let fault = Fault::Sql(error);
    if fault.kind() != StoreErrorKind::Unavailable {
        return Err(fault.into_error(OP, path));
    }
    // It is the copy that has no room or may not be written. What there is of it is no database, and would be in the
    // way of the next try.
    let error = fault.into_error(OP, to);
    let _ = std::fs::remove_file(to);
    Err(error)
}
