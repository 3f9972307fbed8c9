//! The file: made, migrated, refused, backed up.

use std::path::Path;

use sqlx::{Connection as _, SqliteConnection};
use warp_store::{Store as _, StoreError, StoreErrorKind};
use warp_store_sqlite::{OpenOptions, SCHEMA_VERSION, SqliteStore, migrate, schema_version};
use warp_store_tests::{Subject, World, done, plain};

async fn run_sql(path: &Path, sql: &'static str) {
    let mut conn = SqliteConnection::connect(&format!("sqlite://{}?mode=rwc", path.display())).await.expect("open the file");
    sqlx::raw_sql(sql).execute(&mut conn).await.expect("the statement");
    conn.close().await.expect("close");
}

async fn refusal(options: OpenOptions) -> StoreError {
    SqliteStore::open(options).await.err().expect("it is refused")
}

#[tokio::test]
async fn a_missing_file_is_made_only_on_request() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    let error = refusal(OpenOptions { create: false, ..OpenOptions::new(&path) }).await;
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("warp.db"), "{error}");
    assert!(!path.exists());
    let _store = SqliteStore::open(OpenOptions::new(&path)).await.expect("made");
    assert_eq!(schema_version(&path).await.expect("read"), SCHEMA_VERSION);
}

#[tokio::test]
async fn a_dry_run_says_what_a_migration_would_do_and_does_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    run_sql(&path, "PRAGMA user_version = 0").await;
    let planned = migrate(&path, true).await.expect("plan");
    assert_eq!(planned.len(), SCHEMA_VERSION as usize);
    assert_eq!(schema_version(&path).await.expect("read"), 0);
    let error = refusal(OpenOptions { migrate: false, ..OpenOptions::new(&path) }).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().ends_with("run `warp-host migrate`"), "{error}");
    assert_eq!(migrate(&path, false).await.expect("migrate"), planned);
    assert!(migrate(&path, false).await.expect("migrate").is_empty());
    SqliteStore::open(OpenOptions { migrate: false, ..OpenOptions::new(&path) }).await.expect("it is up to date");
}

#[tokio::test]
async fn a_newer_file_is_refused_with_both_versions() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    drop(SqliteStore::open(OpenOptions::new(&path)).await.expect("made"));
    run_sql(&path, "INSERT INTO migration (number, name) VALUES (99, '0099_from_the_future')").await;
    for options in [OpenOptions::new(&path), OpenOptions { migrate: false, ..OpenOptions::new(&path) }] {
        let error = refusal(options).await;
        assert_eq!(error.kind(), StoreErrorKind::Schema);
        let expected = format!("schema version 99 and this build knows {SCHEMA_VERSION}");
        assert!(error.to_string().contains(&expected), "{error}");
    }
    assert_eq!(migrate(&path, false).await.expect_err("refused").kind(), StoreErrorKind::Schema);
}

#[tokio::test]
async fn what_is_no_database_of_ours_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let text = directory.path().join("notes.txt");
    std::fs::write(&text, "these are notes and no database, long enough to have a header of a hundred bytes.".repeat(3)).expect("write");
    let before = std::fs::read(&text).expect("read");
    let error = refusal(OpenOptions::new(&text)).await;
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("is not a SQLite database"), "{error}");
    assert_eq!(std::fs::read(&text).expect("read"), before);
    let foreign = directory.path().join("other.db");
    run_sql(&foreign, "CREATE TABLE customer (id INTEGER PRIMARY KEY)").await;
    let error = refusal(OpenOptions::new(&foreign)).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("`customer`"), "{error}");
    let error = refusal(OpenOptions::new(directory.path().join("no/such/directory/warp.db"))).await;
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("check that its directory exists"), "{error}");
}

/// What was acknowledged is there after the store is closed and opened again, and a run of the old process is known.
#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    let open = async || {
        let store = SqliteStore::open(OpenOptions::new(&path)).await.expect("open");
        World::new(Subject { store: std::sync::Arc::new(store), keep: Box::new(()) })
    };
    let world = open().await;
    let host = world.host(&[plain("c")]).await;
    let ids = world.enqueue_many("c", 3).await;
    let claimed = world.claim(&host, 2).await;
    world.complete(&host, &claimed[0]).await;
    drop(world);
    let world = open().await;
    // Nothing is remembered here: the end of the other run is decided by its row.
    world.end(&host, &claimed[1], done()).await;
    assert_eq!(world.claim_ids(&host, 5).await, ids[2..]);
    assert_eq!(world.counter("stats:succeeded").await, 2);
}

#[tokio::test]
async fn a_backup_is_a_database_of_its_own_and_overwrites_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await.expect("open");
    let copy = directory.path().join("copy.db");
    let world = World::new(Subject { store: std::sync::Arc::new(store), keep: Box::new(()) });
    let id = world.enqueue_one("c").await;
    let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await.expect("a second one on the file");
    store.backup(&copy).await.expect("copy");
    let error = store.backup(&copy).await.expect_err("it exists");
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    let copied = SqliteStore::open(OpenOptions { create: false, migrate: false, ..OpenOptions::new(&copy) }).await.expect("open the copy");
    assert!(copied.job(id, world.now()).await.expect("read").is_some());
}
