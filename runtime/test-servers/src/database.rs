//! Databases that last as long as a test.
//!
//! What must stay true: no test sees what another one wrote, whether they run in one process or in many. Each has a
//! database with a name of its own on a server that they share.

use std::{
    env,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use sqlx::{AssertSqlSafe, ConnectOptions, Connection, postgres::PgConnectOptions};

use crate::{Cluster, Error, address::Address};

/// A database, empty when it is made. Dropping it drops it on the server, with every session in it.
#[derive(Debug)]
pub struct Database {
    /// Where databases are made and dropped.
    server: PgConnectOptions,
    name: String,
    url: String,
}

/// An empty database on the server that `WARP_TEST_POSTGRES_URL` names (`cargo xtask test` sets it), or else on a cluster
/// that this process starts at the first call. Takes some 20 ms.
///
/// # Panics
/// Where there is no server; the message says how to get one.
#[must_use]
pub fn database() -> Database {
    static OWN: OnceLock<Result<Cluster, Error>> = OnceLock::new();
    let made = match env::var("WARP_TEST_POSTGRES_URL") {
        Ok(url) => Database::create(&url),
        // Never dropped, as statics are not: its guard sees the end of the process.
        Err(_) => match OWN.get_or_init(|| Cluster::functional().start()) {
            Ok(cluster) => cluster.database(),
            Err(error) => panic!("a database for this test: {error}"),
        },
    };
    made.unwrap_or_else(|error| panic!("a database for this test: {error}"))
}

impl Cluster {
    /// An empty database of this cluster. Drop it before the cluster, or it complains on stderr.
    pub fn database(&self) -> Result<Database, Error> {
        Database::create(&self.url("postgres"))
    }

    /// Runs statements in one of its databases, by the simple protocol.
    pub fn execute(&self, database: &str, statements: &str) -> Result<(), Error> {
        execute(&parse(&self.url(database))?, statements)
    }
}

impl Database {
    /// Makes one through a URL whose user may create databases.
    fn create(server_url: &str) -> Result<Self, Error> {
        let server = parse(server_url)?;
        let name = unique_name();
        // Copying through the WAL costs 20–35 ms where `file_copy`, which waits for two checkpoints, costs 45 (PostgreSQL
        // 15, fsync off, 40 in a row). template0, since nobody can be connected to it, which would refuse the copy.
        execute(&server, &format!("CREATE DATABASE {name} TEMPLATE template0 STRATEGY wal_log"))?;
        let url = Address::of(server_url).with_database(&name);
        Ok(Self { server, name, url })
    }

    /// For any client, credentials and TLS parameters included.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name on the server.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs statements in it, by the simple protocol: several separated by semicolons are one transaction.
    pub fn execute(&self, statements: &str) -> Result<(), Error> {
        execute(&parse(&self.url)?, statements)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // A test that failed has said why; a second panic would hide it.
        if let Err(error) = execute(&self.server, &format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name)) {
            eprintln!("{error}");
        }
    }
}

fn parse(url: &str) -> Result<PgConnectOptions, Error> {
    url.parse().map_err(|error| Error::new("read the URL of a PostgreSQL server", error))
}

/// Runs statements on a connection of their own. On a thread of their own too: callers are inside and outside of
/// runtimes, and a runtime's thread must not enter a second one.
fn execute(server: &PgConnectOptions, statements: &str) -> Result<(), Error> {
    let run = async || {
        let mut connection = server.clone().disable_statement_logging().connect().await?;
        sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut connection).await?;
        connection.close().await
    };
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(sqlx::Error::Io)?;
        runtime.block_on(run())
    };
    let done: Result<(), sqlx::Error> =
        thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    done.map_err(|error| Error::new(format_args!("run `{statements}`"), error))
}

/// Unique over processes and over the life of a server that is not ours.
fn unique_name() -> String {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
    format!("warp_test_{}_{now}_{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ() {
        assert_ne!(unique_name(), unique_name());
    }
}
