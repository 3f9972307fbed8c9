//! The file: made, brought up to date, copied, and everything that can be wrong with it.

use sqlx::Connection as _;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};

use crate::Ground;

/// Runs SQL on a file as another program would, and keeps the connection open until the answer is dropped.
pub(crate) fn sql(ground: &Ground, text: &'static str) -> (tokio::runtime::Runtime, SqliteConnection) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let options = SqliteConnectOptions::new().filename(ground.path("warp.db")).create_if_missing(true);
    let connection = runtime.block_on(async {
        let mut connection = SqliteConnection::connect_with(&options).await.expect("connects");
        sqlx::raw_sql(text).execute(&mut connection).await.expect("good SQL");
        connection
    });
    (runtime, connection)
}

#[test]
fn migrate_creates_once_and_a_dry_run_changes_nothing() {
    let ground = Ground::new();
    let sql = ground.run(&["migrate", "--dry-run"]).good();
    assert!(sql.contains("CREATE TABLE") && sql.starts_with("-- 0001"), "{sql}");
    assert!(!ground.path("warp.db").exists());
    assert_eq!(ground.run(&["migrate"]).good(), "created warp.db\n");
    assert_eq!(ground.run(&["migrate"]).good(), "warp.db is up to date\n");
    let ended = ground.run(&["migrate", "--dry-run"]);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", "warp.db is up to date\n"));
    let json = ground.run(&["migrate", "--json"]).json();
    assert_eq!(json, serde_json::json!({"database": "warp.db", "created": false, "dry_run": false, "migrations": []}));
}

#[test]
fn looking_never_creates_a_database() {
    let ground = Ground::new();
    for args in [&["status"][..], &["jobs", "list"], &["keys", "list"], &["hosts", "list"], &["enqueue", "c", "--payload", "{}"]] {
        let stderr = ground.run(args).bad(5);
        assert_eq!(
            stderr,
            "error: there is no database warp.db (from default); `warp-host migrate` creates it, and `warp-host run` does so by itself\n"
        );
    }
    assert!(!ground.path("warp.db").exists());
    let stderr = ground.run(&["status", "--database-url", "sqlite:no/such/warp.db"]).bad(5);
    assert_eq!(stderr, "error: the directory no/such does not exist\n");
    let stderr = ground.run(&["migrate", "--database-url", "sqlite:no/such/warp.db"]).bad(5);
    assert!(stderr.contains("no/such/warp.db cannot be opened") && stderr.contains("check that its directory exists"), "{stderr}");
}

#[test]
fn a_file_that_is_no_database_of_ours_is_left_alone() {
    let ground = Ground::new();
    ground.write("warp.db", "this is a text, and long enough to have been a header of something else entirely");
    for command in ["status", "migrate"] {
        let ended = ground.run(&[command]);
        assert_ne!(ended.code, 0);
        assert!(ended.stderr.contains("warp.db is not a SQLite database; name another file"), "{}", ended.stderr);
    }
    assert!(ground.read("warp.db").starts_with("this is a text"));

    let ground = Ground::new();
    drop(sql(&ground, "CREATE TABLE recipe (name TEXT)"));
    for command in ["status", "migrate"] {
        let stderr = ground.run(&[command]).bad(5);
        assert!(stderr.contains("holds a database of another program (it has `recipe`)"), "{stderr}");
    }
}

#[test]
fn a_newer_schema_is_refused_with_both_versions() {
    let ground = Ground::new();
    ground.run(&["migrate"]).good();
    drop(sql(&ground, "INSERT INTO migration (number, name) VALUES (99, '0099_future')"));
    for command in ["status", "migrate"] {
        let stderr = ground.run(&[command]).bad(5);
        assert!(stderr.contains("has schema version 99 and this build knows"), "{stderr}");
    }
}

#[test]
fn a_locked_file_is_named_and_nothing_is_half_done() {
    let ground = Ground::new();
    ground.run(&["migrate"]).good();
    let held = sql(&ground, "BEGIN IMMEDIATE");
    let stderr = ground.run(&["enqueue", "c", "--payload", "{}"]).bad(5);
    assert!(stderr.contains("warp.db is locked by another process"), "{stderr}");
    drop(held);
    assert_eq!(ground.run(&["jobs", "list", "--json"]).good(), "[]\n");
}

#[test]
fn a_backup_is_a_database_and_overwrites_nothing() {
    let ground = Ground::new();
    ground.run(&["migrate"]).good();
    let id = ground.run(&["enqueue", "c", "--payload", "{}"]).good();
    ground.run(&["backup", "copy.db"]).good();
    let jobs = ground.run(&["jobs", "list", "--json", "--database-url", "sqlite:copy.db"]).json();
    assert_eq!(jobs[0]["id"], id.trim());
    let stderr = ground.run(&["backup", "copy.db"]).bad(4);
    assert_eq!(stderr, "error: copy.db exists already; name another file\n");
}
