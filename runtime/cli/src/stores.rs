//! Which database the settings name, and how it is opened.
//!
//! What must stay true: everything above this module sees a [`Store`], and asks here for what only one kind of
//! database has; no text of this module shows a password; a command that only looks never creates a database, because
//! a mistyped name would then look like an empty one.
//!
//! What it deliberately does not do: migrate PostgreSQL unless it is told to. A fleet that is rolled out host by host
//! must not change the schema under the hosts that still run.

use std::path::PathBuf;
use std::sync::Arc;

use warp_http::{AskPool, PoolState};
use warp_store::Store;
use warp_store_postgres::{BESIDE_POOL, ConnectSettings, LockKind, PostgresStore, StatementMode};
use warp_store_sqlite::SqliteStore;

use crate::args::Locks;
use crate::config::{Config, Statements, without_password};
use crate::failure::{Exit, Failure, Outcome};

/// Said to whoever wants the other kind.
pub const ONLY_LEDGER: &str = "a SQLite file keeps its slots in a ledger; session locks need PostgreSQL";

/// Where the jobs are.
#[derive(Debug, Clone)]
pub enum Place {
    /// A file of this machine.
    Sqlite(PathBuf),
    /// A server.
    Postgres(Box<ConnectSettings>),
}

/// An open database.
pub struct Opened {
    /// For everything that every database can do.
    pub store: Arc<dyn Store>,
    /// What it is called in figures: `sqlite`, `postgres`.
    pub kind: &'static str,
    /// What it is called in texts: the path, or the address without a password.
    pub name: String,
    /// What its slots are made of.
    pub locks: Locks,
    /// What can be asked about its connections.
    pub pool: Option<AskPool>,
    /// How many connections a host opens at most.
    pub budget: Option<u32>,
}

/// The database that the settings name.
///
/// # Errors
/// A URL that names none.
pub fn place(config: &Config) -> Outcome<Place> {
    place_at(config, &config.database.url.value, &config.database.url.origin.to_string())
}

/// The database at another URL, reached by the same settings. `origin` is where it came from.
///
/// # Errors
/// A URL that names none.
pub fn place_at(config: &Config, url: &str, origin: &str) -> Outcome<Place> {
    const KINDS: &str = "write `sqlite:PATH` or `postgres://USER@HOST/NAME`";
    let refuse = |why: String| Failure::usage(format!("{} (from {origin}): {why}", without_password(url)));
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(refuse(format!("is not a database URL; write `sqlite:{url}` for a file")));
    };
    match scheme {
        "sqlite" => {}
        "postgres" | "postgresql" => return Ok(Place::Postgres(Box::new(connect_settings(config, url)))),
        "sqlserver" | "mssql" => return Err(refuse(format!("{scheme} is not supported by this version; {KINDS}"))),
        other => return Err(refuse(format!("`{other}` is no kind of database that is known; {KINDS}"))),
    }
    match rest.strip_prefix("//").unwrap_or(rest) {
        "" => Err(refuse("has no path; write `sqlite:PATH`".to_owned())),
        ":memory:" => Err(refuse("a database in memory would be gone with each command; write `sqlite:PATH`".to_owned())),
        path => Ok(Place::Sqlite(PathBuf::from(path))),
    }
}

/// Every setting of the database but those of opening it.
fn connect_settings(config: &Config, url: &str) -> ConnectSettings {
    let database = &config.database;
    ConnectSettings {
        schema: database.schema.value.clone(),
        ssl_mode: database.sslmode.value.clone(),
        ssl_root_cert: database.root_cert.value.clone(),
        ssl_cert: database.client_cert.value.clone(),
        ssl_key: database.client_key.value.clone(),
        password_file: database.password_file.value.clone(),
        password_command: database.password_command.value.clone(),
        pool: database.pool.value,
        listen_url: database.listen_url.value.clone(),
        mode: match database.statements.value {
            Statements::Auto => StatementMode::Auto,
            Statements::Prepared => StatementMode::Prepared,
            Statements::Simple => StatementMode::Simple,
        },
        ..ConnectSettings::new(url)
    }
}

/// Opens a database that exists and is up to date, for a command: no host can work through it, and no session is needed.
///
/// # Errors
/// With the file or address and what to do.
pub async fn open(config: &Config) -> Outcome<Opened> {
    open_at(place(config)?, config).await
}

/// The same at this place.
///
/// # Errors
/// With the file or address and what to do.
pub async fn open_at(place: Place, config: &Config) -> Outcome<Opened> {
    match place {
        Place::Sqlite(path) => sqlite(existing(path, config)?, config, false).await,
        Place::Postgres(settings) => postgres(*settings, config, false, false).await,
    }
}

/// Opens a database for a host: a file is created and brought up to date by itself, a schema on a server only if
/// `migrate` says so.
///
/// # Errors
/// With the file or address and what to do.
pub async fn open_for_host(config: &Config, migrate: bool) -> Outcome<Opened> {
    match place(config)? {
        Place::Sqlite(path) => sqlite(path, config, true).await,
        Place::Postgres(settings) => postgres(*settings, config, migrate, true).await,
    }
}

/// Opens a database and makes whatever is missing in it: for `bench`, whose databases are its own.
///
/// # Errors
/// With the file or address and what to do.
pub async fn open_new(place: Place, config: &Config) -> Outcome<Opened> {
    match place {
        Place::Sqlite(path) => sqlite(path, config, true).await,
        Place::Postgres(settings) => postgres(*settings, config, true, true).await,
    }
}

/// What the settings say that slots must be made of.
pub fn lock_kind(config: &Config) -> Option<LockKind> {
    config.database.locks.value.map(kind_of)
}

/// As the driver writes it.
pub fn kind_of(locks: Locks) -> LockKind {
    match locks {
        Locks::Ledger => LockKind::Ledger,
        Locks::Session => LockKind::Session,
    }
}

/// The address of a server for people, without its password and parameters.
pub fn address(settings: &ConnectSettings) -> String {
    let url = without_password(&settings.url);
    url.split('?').next().unwrap_or(&url).to_owned()
}

/// A server's database for people: the address, and the schema if it is not the usual one.
pub fn shown(settings: &ConnectSettings) -> String {
    let address = address(settings);
    if settings.schema == "warp" { address } else { format!("{address}, schema {}", settings.schema) }
}

/// A SQLite file that is there.
///
/// # Errors
/// With what creates it.
pub fn existing(path: PathBuf, config: &Config) -> Outcome<PathBuf> {
    if path.exists() {
        return Ok(path);
    }
    let message = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.exists() => {
            format!("the directory {} does not exist", parent.display())
        }
        _ => format!(
            "there is no database {} (from {}); `warp-host migrate` creates it, and `warp-host run` does so by itself",
            path.display(),
            config.database.url.origin
        ),
    };
    Err(Failure::new(Exit::Unavailable, message))
}

async fn sqlite(path: PathBuf, config: &Config, create_and_migrate: bool) -> Outcome<Opened> {
    if config.database.locks.value == Some(Locks::Session) {
        let origin = &config.database.locks.origin;
        return Err(Failure::usage(format!("{origin}: {ONLY_LEDGER}")));
    }
    let name = path.display().to_string();
    let options = warp_store_sqlite::OpenOptions { path, create: create_and_migrate, migrate: create_and_migrate };
    let store = Arc::new(SqliteStore::open(options).await?);
    Ok(Opened { store, kind: "sqlite", name, locks: Locks::Ledger, pool: None, budget: None })
}

async fn postgres(settings: ConnectSettings, config: &Config, migrate: bool, hosting: bool) -> Outcome<Opened> {
    let (name, budget) = (shown(&settings), settings.pool + BESIDE_POOL);
    let options =
        warp_store_postgres::OpenOptions { locks: lock_kind(config), migrate, hosting, ..warp_store_postgres::OpenOptions::new(settings) };
    let store = PostgresStore::open(options).await?;
    let locks = match store.locks() {
        LockKind::Ledger => Locks::Ledger,
        LockKind::Session => Locks::Session,
    };
    let store = Arc::new(store);
    let asked = Arc::clone(&store);
    let pool: AskPool = Arc::new(move || {
        let warp_store_postgres::PoolState { busy, idle, most } = asked.pool_state();
        PoolState { busy, idle, most }
    });
    Ok(Opened { store, kind: "postgres", name, locks, pool: Some(pool), budget: Some(budget) })
}
