//! The suite that every driver must pass, with statements prepared and, once more, simple as through a pooler.

use std::sync::Arc;

use warp_store_postgres::{Clock, ConnectSettings, OpenOptions, PostgresStore, StatementMode};
use warp_store_tests::Subject;
use warp_test_servers::{Database, database};

/// Another process on a database, on the clock of its callers.
pub async fn another(database: &Database, mode: StatementMode) -> PostgresStore {
    let connect = ConnectSettings { mode, ..ConnectSettings::new(database.url()) };
    let options = OpenOptions { migrate: true, clock: Clock::Caller, ..OpenOptions::new(connect) };
    PostgresStore::open(options).await.expect("open the database")
}

async fn subject(mode: StatementMode) -> Subject {
    let database = tokio::task::spawn_blocking(database).await.expect("an empty database");
    Subject { store: Arc::new(another(&database, mode).await), keep: Box::new(database) }
}

/// An empty store.
pub async fn open() -> Subject {
    subject(StatementMode::Prepared).await
}

/// An empty store that works through any pooler.
pub async fn open_simple() -> Subject {
    subject(StatementMode::Simple).await
}

mod prepared {
    warp_store_tests::conformance!(crate::conformance::open);
}

mod simple {
    warp_store_tests::conformance!(crate::conformance::open_simple);
}
