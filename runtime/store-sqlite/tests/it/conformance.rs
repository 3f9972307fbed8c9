//! The suite that every driver must pass.

use std::sync::Arc;

use warp_store_sqlite::{OpenOptions, SqliteStore};
use warp_store_tests::Subject;

/// An empty store in a directory of its own.
pub async fn open() -> Subject {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await.expect("an empty store");
    Subject { store: Arc::new(store), keep: Box::new(directory) }
}

warp_store_tests::conformance!(crate::conformance::open);
