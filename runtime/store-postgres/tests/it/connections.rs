//! Statements, connections and the schema on a direct connection, and when it breaks.

use std::time::Duration;

use sqlx::{Connection as _, Row as _};
use warp_store::StoreErrorKind;
use warp_store_postgres::bare::{Db, Listener, Sql, Texts, get, get_id};
use warp_store_postgres::{ConnectSettings, Level, LockKind, MIGRATIONS, Pooling, SCHEMA_VERSION, StatementMode};
use warp_store_postgres::{doctor, migrate, migration_sql, pooling, schema_version};
use warp_test_servers::{Cluster, Proxy, Stop, database};

pub fn settings(url: &str, mode: StatementMode) -> ConnectSettings {
    ConnectSettings { mode, ..ConnectSettings::new(url) }
}

pub async fn open(settings: &ConnectSettings) -> Db {
    Db::open(settings).await.unwrap_or_else(|fault| panic!("open {settings:?}: {}", fault.text()))
}

pub async fn number(db: &Db, sql: &'static str) -> i64 {
    let row = db.row(Sql::new(sql)).await.unwrap_or_else(|fault| panic!("{sql}: {}", fault.text()));
    get(&row, 0).unwrap_or_else(|fault| panic!("{sql}: {}", fault.text()))
}

/// Every kind of argument comes back as it went.
pub async fn check_arguments(db: &Db) {
    let texts = ["", "NULL", "it's", r#"a\b"c'd{,}"#, "é\n\t", "$1"].map(str::to_owned).to_vec();
    let sql = Sql::new(
        "SELECT $1 IS NOT DISTINCT FROM true, $2 = -5::int2, $3 = 7, $4 = -9000000000, $5 = 1.5::float4, $6, $7, $8, $9, $10, $11, $12,
                $13 = decode('00ff5c27', 'hex'), $14 IS NULL, $15 IS NULL, '\\'::text",
    )
    .arg(true)
    .arg(-5i16)
    .arg(7)
    .arg(-9_000_000_000i64)
    .arg(1.5f32)
    .arg(r#"a\'"$2"#)
    .arg(u128::MAX - 1)
    .arg(texts.clone())
    .arg(vec![Some(1i64), None, Some(-3)])
    .arg(vec![1u128, 2])
    .arg(Vec::<i32>::new())
    .arg(vec![Some("x".to_owned()), None])
    .arg(vec![0u8, 255, b'\\', b'\''])
    .arg(None::<String>)
    .arg(None::<i64>);
    let row = db.row(sql).await.unwrap_or_else(|fault| panic!("{}", fault.text()));
    for at in [0, 1, 2, 3, 4, 12, 13, 14] {
        assert!(get::<bool>(&row, at).expect("a boolean"), "column {at}");
    }
    assert_eq!(get::<String>(&row, 5).expect("text"), r#"a\'"$2"#);
    assert_eq!(get_id(&row, 6).expect("an id"), u128::MAX - 1);
    assert_eq!(get::<Texts>(&row, 7).expect("texts").0, texts.into_iter().map(Some).collect::<Vec<_>>());
    assert_eq!(get::<Vec<Option<i64>>>(&row, 8).expect("numbers"), [Some(1), None, Some(-3)]);
    assert_eq!(get::<Vec<i32>>(&row, 10).expect("no numbers"), [0; 0]);
    assert_eq!(get::<Texts>(&row, 11).expect("texts").0, [Some("x".to_owned()), None]);
    assert_eq!(get::<String>(&row, 15).expect("text"), r"\");
}

#[tokio::test]
async fn arguments_arrive_as_they_are_in_both_ways_of_sending() {
    let database = database();
    for mode in [StatementMode::Prepared, StatementMode::Simple, StatementMode::Auto] {
        check_arguments(&open(&settings(database.url(), mode)).await).await;
    }
}

#[tokio::test]
async fn literals_hold_whatever_the_server_takes_for_an_escape() {
    let database = database();
    database.execute(&format!("ALTER DATABASE {} SET standard_conforming_strings = off", database.name())).expect("a setting");
    let db = open(&settings(database.url(), StatementMode::Simple)).await;
    let sql = Sql::new("SELECT $1, $2").arg(r"\' OR true --").arg(vec![r"\'".to_owned()]);
    let row = db.row(sql).await.unwrap_or_else(|fault| panic!("{}", fault.text()));
    assert_eq!(get::<String>(&row, 0).expect("text"), r"\' OR true --");
    assert_eq!(get::<Texts>(&row, 1).expect("texts").0, [Some(r"\'".to_owned())]);
}

#[tokio::test]
async fn a_nul_is_refused_before_it_is_sent() {
    let database = database();
    for mode in [StatementMode::Prepared, StatementMode::Simple] {
        let db = open(&settings(database.url(), mode)).await;
        let fault = db.row(Sql::new("SELECT $1").arg("a\0b")).await.err().expect("a refusal");
        assert_eq!(fault.kind(), StoreErrorKind::Invalid);
    }
}

#[tokio::test]
async fn a_statement_outlives_its_caller() {
    let database = database();
    database.execute("CREATE TABLE t (x int)").expect("a table");
    for mode in [StatementMode::Prepared, StatementMode::Simple] {
        // With one connection the second statement waits for the first to end.
        let db = open(&ConnectSettings { pool: 1, ..settings(database.url(), mode) }).await;
        let before = number(&db, "SELECT count(*) FROM t").await;
        let dropped = db.rows(Sql::new("INSERT INTO t SELECT 1 FROM pg_sleep(0.2)"));
        assert!(tokio::time::timeout(Duration::from_millis(50), dropped).await.is_err(), "it sleeps");
        assert_eq!(number(&db, "SELECT count(*) FROM t").await, before + 1, "the row is there, in {mode:?}");
    }
}

#[tokio::test]
async fn a_statement_that_takes_too_long_ends_and_the_next_one_works() {
    let database = database();
    for (mode, kind) in [(StatementMode::Simple, StoreErrorKind::OutcomeUnknown), (StatementMode::Prepared, StoreErrorKind::Busy)] {
        let settings = ConnectSettings { statement_timeout: Duration::from_millis(200), pool: 1, ..settings(database.url(), mode) };
        let db = open(&settings).await;
        let fault = db.rows(Sql::new("SELECT pg_sleep(60)")).await.expect_err("too long");
        assert_eq!(fault.kind(), kind, "{mode:?}: {}", fault.text());
        assert_eq!(number(&db, "SELECT 1::int8").await, 1);
    }
}

#[tokio::test]
async fn a_deadlock_is_settled_by_another_try() {
    let database = database();
    database
        .execute(&format!(
            "ALTER DATABASE {} SET deadlock_timeout = '20ms'; CREATE TABLE t (x int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 0), (2, 0);
             CREATE FUNCTION update_both(a int, b int) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
               UPDATE t SET n = n + 1 WHERE x = a; PERFORM pg_sleep(0.1); UPDATE t SET n = n + 1 WHERE x = b; END $$",
            database.name()
        ))
        .expect("two rows");
    let db = open(&settings(database.url(), StatementMode::Prepared)).await;
    let (one, other) = tokio::join!(db.rows(Sql::new("SELECT update_both(1, 2)")), db.rows(Sql::new("SELECT update_both(2, 1)")));
    for done in [one, other] {
        done.unwrap_or_else(|fault| panic!("{}", fault.text()));
    }
    assert_eq!(number(&db, "SELECT sum(n)::int8 FROM t").await, 4);
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    // The counters are written a moment later, at the latest when a session ends.
    drop(db);
    let db = open(&settings(database.url(), StatementMode::Simple)).await;
    tokio::time::timeout(Duration::from_secs(20), async {
        while number(&db, deadlocks).await == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("there was a deadlock, or this test shows nothing");
}

#[tokio::test]
async fn the_pool_is_bounded_and_what_is_urgent_passes() {
    let database = database();
    let mut blocker = sqlx::PgConnection::connect(database.url()).await.expect("a connection");
    sqlx::raw_sql("SELECT pg_advisory_lock(1)").execute(&mut blocker).await.expect("a lock");
    let settings = ConnectSettings {
        pool: 3,
        connect_timeout: Duration::from_secs(1),
        application_name: "bounded".to_owned(),
        ..settings(database.url(), StatementMode::Simple)
    };
    let db = open(&settings).await;
    let blocked: Vec<_> = (0..3)
        .map(|_| {
            let db = db.clone();
            tokio::spawn(async move { db.rows(Sql::new("SELECT pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1)")).await })
        })
        .collect();
    let seen = async |db: &Db| {
        let row = db.row(Sql::new("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bounded'").urgent()).await;
        get::<i64>(&row.unwrap_or_else(|fault| panic!("{}", fault.text())), 0).expect("a number")
    };
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bounded' AND wait_event = 'advisory'";
    while sqlx::raw_sql(waiting).fetch_one(&mut blocker).await.expect("a number").get::<i64, _>(0) < 3 {}
    let fault = db.row(Sql::new("SELECT 1")).await.err().expect("no room");
    assert_eq!(fault.kind(), StoreErrorKind::Unavailable, "{}", fault.text());
    assert!(fault.text().contains("all 3 connections"), "{}", fault.text());
    assert_eq!(seen(&db).await, 4, "three, and the urgent one");
    assert_eq!(seen(&db).await, 4, "and no more");
    sqlx::raw_sql("SELECT pg_advisory_unlock(1)").execute(&mut blocker).await.expect("unlocked");
    for statement in blocked {
        statement.await.expect("a task").unwrap_or_else(|fault| panic!("{}", fault.text()));
    }
    assert!(seen(&db).await <= 4);
}

#[tokio::test]
async fn idle_connections_are_given_back() {
    let database = database();
    let watcher = open(&settings(database.url(), StatementMode::Simple)).await;
    let idle = ConnectSettings {
        application_name: "idle".to_owned(),
        idle_timeout: Duration::from_millis(100),
        ..settings(database.url(), StatementMode::Simple)
    };
    let db = open(&idle).await;
    assert_eq!(number(&db, "SELECT 1::int8").await, 1);
    tokio::time::timeout(Duration::from_secs(10), async {
        while number(&watcher, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idle'").await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the connection is closed");
    assert_eq!(number(&db, "SELECT 1::int8").await, 1, "and made again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_is_found_again() {
    let cluster = Cluster::functional().start().expect("a cluster");
    let database = cluster.database().expect("a database");
    for mode in [StatementMode::Prepared, StatementMode::Simple] {
        let db = open(&settings(database.url(), mode)).await;
        number(&db, "SELECT 1::int8").await;
        cluster.stop(Stop::Immediate).expect("stopped");
        // The first one may have been sent to a server that was just ending; from then on nothing is sent.
        let _ = db.row(Sql::new("SELECT 1")).await;
        let fault = db.row(Sql::new("SELECT 1")).await.err().expect("nobody is there");
        assert_eq!(fault.kind(), StoreErrorKind::Unavailable, "{}", fault.text());
        cluster.start().expect("started");
        assert_eq!(number(&db, "SELECT 1::int8").await, 1, "without opening it again, in {mode:?}");
    }
}

#[tokio::test]
async fn after_a_second_of_silence_a_lost_connection_costs_no_statement() {
    let database = database();
    let other = open(&settings(database.url(), StatementMode::Simple)).await;
    for mode in [StatementMode::Prepared, StatementMode::Simple] {
        let settings = ConnectSettings { application_name: "lost".to_owned(), ..settings(database.url(), mode) };
        let db = open(&settings).await;
        number(&db, "SELECT 1::int8").await;
        number(&other, "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE application_name = 'lost'").await;
        // What has been idle for less is not asked whether it lives.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(number(&db, "SELECT 1::int8").await, 1, "{mode:?}");
    }
}

#[tokio::test]
async fn a_network_that_has_gone_silent_costs_no_statement_and_is_used_again() {
    let database = database();
    let proxy = Proxy::in_front_of(database.url()).expect("a proxy");
    let settings = ConnectSettings {
        connect_timeout: Duration::from_millis(300),
        statement_timeout: Duration::from_millis(500),
        ..settings(&proxy.url(database.url()), StatementMode::Simple)
    };
    let db = open(&settings).await;
    number(&db, "SELECT 1::int8").await;
    proxy.freeze();
    let fault = db.row(Sql::new("SELECT 1")).await.err().expect("silence");
    assert_eq!(fault.kind(), StoreErrorKind::OutcomeUnknown, "it had been sent: {}", fault.text());
    proxy.thaw();
    number(&db, "SELECT 1::int8").await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    proxy.freeze();
    let fault = db.row(Sql::new("SELECT 1")).await.err().expect("silence");
    assert_eq!(fault.kind(), StoreErrorKind::Unavailable, "it was not sent: {}", fault.text());
    proxy.thaw();
    assert_eq!(number(&db, "SELECT 1::int8").await, 1);
}

#[tokio::test]
async fn a_sign_of_life_is_no_statement() {
    let cluster = Cluster::functional().start().expect("a cluster");
    let database = cluster.database().expect("a database");
    let other = cluster.database().expect("another database, where nothing is counted");
    let watcher = open(&settings(other.url(), StatementMode::Simple)).await;
    let db = open(&ConnectSettings { application_name: "asked".to_owned(), ..settings(database.url(), StatementMode::Simple) }).await;
    for _ in 0..3 {
        number(&db, "SELECT 1::int8").await;
        tokio::time::sleep(Duration::from_millis(1050)).await;
    }
    drop(db);
    while number(&watcher, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'asked'").await > 0 {}
    // Three, and the beginning of the one session that all three used.
    let row = watcher.row(Sql::new("SELECT xact_commit, sessions FROM pg_stat_database WHERE datname = $1").arg(database.name())).await;
    let row = row.unwrap_or_else(|fault| panic!("{}", fault.text()));
    let (commits, sessions): (i64, i64) = (get(&row, 0).expect("a number"), get(&row, 1).expect("a number"));
    assert_eq!((commits, sessions), (4, 1));
}

#[tokio::test]
async fn a_primary_that_was_demoted_is_left_for_the_next_one() {
    let database = database();
    let name = database.name();
    database.execute(&format!("CREATE TABLE t (x int8); ALTER DATABASE {name} SET default_transaction_read_only = on")).expect("read-only");
    for mode in [StatementMode::Prepared, StatementMode::Simple] {
        let db = open(&settings(database.url(), mode)).await;
        let write = || Sql::new("INSERT INTO t VALUES (1)");
        let fault = db.rows(write()).await.expect_err("read-only");
        assert_eq!(fault.kind(), StoreErrorKind::Unavailable, "{}", fault.text());
        assert!(fault.text().contains("name the primary"), "{}", fault.text());
        // The address leads to another server from now on; only a new connection sees that.
        database
            .execute(&format!("SET transaction_read_only = off; ALTER DATABASE {name} RESET default_transaction_read_only"))
            .expect("the next one");
        db.rows(write()).await.unwrap_or_else(|fault| panic!("{mode:?}: {}", fault.text()));
        database.execute(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).expect("read-only");
    }
}

#[tokio::test]
async fn a_migration_under_prepared_statements_costs_none() {
    let database = database();
    database.execute("CREATE TABLE t (x int8); INSERT INTO t VALUES (1)").expect("a table");
    // More connections than a statement has tries, each with it prepared.
    let db = open(&ConnectSettings { pool: 8, ..settings(database.url(), StatementMode::Prepared) }).await;
    let all = || db.rows(Sql::new("SELECT * FROM t, pg_sleep(0.2)"));
    for done in futures_util::future::join_all((0..8).map(|_| all())).await {
        done.unwrap_or_else(|fault| panic!("{}", fault.text()));
    }
    database.execute("ALTER TABLE t ADD y int8").expect("another shape");
    let rows = all().await.unwrap_or_else(|fault| panic!("{}", fault.text()));
    assert_eq!(rows[0].len(), 3, "x, y and the sleep");
}

#[tokio::test]
async fn a_backend_that_is_killed_leaves_the_outcome_unknown() {
    let database = database();
    let other = open(&settings(database.url(), StatementMode::Simple)).await;
    let victim = ConnectSettings { application_name: "victim".to_owned(), ..settings(database.url(), StatementMode::Prepared) };
    let db = open(&victim).await;
    let killed = tokio::spawn({
        let db = db.clone();
        async move { db.rows(Sql::new("SELECT pg_sleep(60)")).await }
    });
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'victim' AND wait_event = 'PgSleep'";
    while number(&other, kill).await == 0 {}
    let fault = killed.await.expect("a task").expect_err("killed");
    assert_eq!(fault.kind(), StoreErrorKind::OutcomeUnknown, "{}", fault.text());

    // A question is asked again by itself.
    database.execute("CREATE TABLE calm (yes bool)").expect("a table");
    let question = "SELECT count(pg_sleep(CASE WHEN EXISTS (SELECT FROM calm) THEN 0 ELSE 60 END))";
    let asked = tokio::spawn(async move { db.rows(Sql::new(question).repeatable()).await });
    while number(&other, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'victim' AND wait_event = 'PgSleep'").await == 0 {}
    database.execute("INSERT INTO calm VALUES (true)").expect("calm");
    number(&other, kill).await;
    let rows = asked.await.expect("a task").unwrap_or_else(|fault| panic!("{}", fault.text()));
    assert_eq!(rows.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rotating_passwords_are_asked_for_with_every_new_connection() {
    let cluster = Cluster::functional().password("one").start().expect("a cluster");
    let url = format!("postgres://{}@127.0.0.1:{}/postgres", cluster.user(), cluster.port());
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("token");
    std::fs::write(&file, "one\n").expect("a password");
    let by_command = ConnectSettings { password_command: Some(format!("cat '{}'", file.display())), ..ConnectSettings::new(&url) };
    let by_file = ConnectSettings { password_file: Some(file.clone()), ..ConnectSettings::new(&url) };
    let dbs = [open(&by_command).await, open(&by_file).await];
    let listener = Listener::start(&by_command, Some(Pooling::Session)).unwrap_or_else(|fault| panic!("{}", fault.text()));
    listener.changes().wait().await;

    cluster.execute("postgres", "ALTER ROLE postgres PASSWORD 'two'").expect("another password");
    std::fs::write(&file, "two\n").expect("a password");
    number(&dbs[0], "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'").await;
    // The listener connects with the new password and says so.
    tokio::time::timeout(Duration::from_secs(20), listener.changes().wait()).await.expect("listening again");
    for db in dbs {
        // Its connection may be one of those that were ended a moment ago.
        let again = db.row(Sql::new("SELECT 1").repeatable()).await;
        assert!(again.is_ok(), "{}", again.err().map_or_else(String::new, |fault| fault.text().to_owned()));
    }
    assert_eq!(number(&open(&by_command).await, "SELECT 1::int8").await, 1);
    assert_eq!(number(&open(&by_file).await, "SELECT 1::int8").await, 1);

    std::fs::write(&file, "wrong\n").expect("a password");
    let fault = Db::open(&by_command).await.err().expect("a wrong password");
    assert_eq!(fault.kind(), StoreErrorKind::Unavailable);
    assert!(fault.text().contains("refuses this login") && !fault.text().contains("wrong"), "{}", fault.text());
    let failing = ConnectSettings { password_command: Some("echo no token today >&2; exit 3".to_owned()), ..ConnectSettings::new(&url) };
    let fault = Db::open(&failing).await.err().expect("no password");
    assert!(fault.text().contains("no token today"), "{}", fault.text());
}

#[tokio::test]
async fn the_schema_is_installed_once_by_however_many() {
    let database = database();
    let settings = settings(database.url(), StatementMode::Auto);
    let pending = migrate(&settings, None, true).await.expect("a look");
    assert_eq!(pending, MIGRATIONS.map(|(name, _)| name));
    assert_eq!(schema_version(&settings).await.expect("a version"), 0, "a dry run changes nothing");
    let (a, b, c) = tokio::join!(migrate(&settings, None, false), migrate(&settings, None, false), migrate(&settings, None, false));
    let mut applied: Vec<_> = [a, b, c].into_iter().flat_map(|names| names.expect("a migration")).collect();
    applied.sort_unstable();
    assert_eq!(applied, MIGRATIONS.map(|(name, _)| name), "each by one of them");
    assert_eq!(schema_version(&settings).await.expect("a version"), SCHEMA_VERSION);
    assert_eq!(migrate(&settings, None, false).await.expect("nothing to do"), [""; 0]);
    let error = migrate(&settings, Some(LockKind::Session), false).await.expect_err("it has a kind");
    assert!(error.to_string().contains("locks set session"), "{error}");
}

#[tokio::test]
async fn what_another_build_has_made_is_refused() {
    let database = database();
    let settings = ConnectSettings { schema: "jobs".to_owned(), ..settings(database.url(), StatementMode::Auto) };
    migrate(&settings, Some(LockKind::Session), false).await.expect("a migration");
    assert_eq!(number(&open(&settings).await, "SELECT count(*) FROM warp.setting WHERE locks = 'session'").await, 1);

    database.execute("UPDATE jobs.migration SET checksum = 'x' WHERE number = 1").expect("a change");
    let error = migrate(&settings, None, false).await.expect_err("changed");
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("0001_jobs"), "{error}");

    database.execute("DELETE FROM jobs.migration; INSERT INTO jobs.migration VALUES (977, 'later', 'x')").expect("a change");
    let error = migrate(&settings, None, false).await.expect_err("newer");
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("977") && error.to_string().contains(&format!("knows {SCHEMA_VERSION}")), "{error}");
}

#[tokio::test]
async fn the_script_installs_the_same_schema() {
    let (by_script, by_migrate) = (database(), database());
    by_script.execute(&migration_sql("jobs", LockKind::Ledger, 0).expect("a script")).expect("installed");
    let settings = |url| ConnectSettings { schema: "jobs".to_owned(), ..settings(url, StatementMode::Auto) };
    migrate(&settings(by_migrate.url()), None, false).await.expect("a migration");
    assert_eq!(migrate(&settings(by_script.url()), None, false).await.expect("nothing to do"), [""; 0]);
    let objects = "SELECT coalesce(sum(hashtext(c.relname || a.attname || a.atttypid::regtype)::int8), 0)::int8
         FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid WHERE c.relnamespace = 'jobs'::regnamespace";
    let there = number(&open(&settings(by_script.url())).await, objects).await;
    assert_ne!(there, 0);
    assert_eq!(there, number(&open(&settings(by_migrate.url())).await, objects).await);
}

#[tokio::test]
async fn a_role_without_rights_and_a_database_with_other_rules_are_told_what_to_do() {
    let database = database();
    let name = database.name();
    database.execute(&format!("CREATE ROLE {name}_poor LOGIN; REVOKE CREATE ON DATABASE {name} FROM PUBLIC")).expect("a role");
    let poor = database.url().replacen("://postgres@", &format!("://{name}_poor@"), 1);
    assert_ne!(poor, database.url(), "the URL names its user");
    let settings = settings(&poor, StatementMode::Auto);
    let error = migrate(&settings, None, false).await.expect_err("no right");
    assert!(error.to_string().contains("AUTHORIZATION"), "{error}");
    database.execute(&format!("CREATE SCHEMA warp AUTHORIZATION {name}_poor")).expect("a schema");
    migrate(&settings, None, false).await.expect("it owns its schema, and that is enough");

    for (setting, part) in
        [("default_transaction_isolation = 'repeatable read'", "read committed"), ("default_transaction_read_only = on", "read-only")]
    {
        database.execute(&format!("ALTER ROLE {name}_poor SET {setting}")).expect("a setting");
        let error = migrate(&settings, None, true).await.expect_err("refused");
        assert!(error.to_string().contains(part), "{error}");
        database.execute(&format!("ALTER ROLE {name}_poor RESET ALL")).expect("as before");
    }
    database
        .execute(&format!("REASSIGN OWNED BY {name}_poor TO postgres; DROP OWNED BY {name}_poor; DROP ROLE {name}_poor"))
        .expect("gone");
}

#[tokio::test]
async fn dropped_migrations_leave_no_lock() {
    let database = database();
    let settings = settings(database.url(), StatementMode::Auto);
    let db = open(&settings).await;
    for at in 0..60 {
        let _ = tokio::time::timeout(Duration::from_micros(at * 331 % 20_000), migrate(&settings, None, false)).await;
        if at % 8 == 0 {
            database.execute("DROP SCHEMA IF EXISTS warp CASCADE").expect("as before");
        }
    }
    // A backend notices a client that has gone when it is done with its message.
    migrate(&settings, None, false).await.expect("nobody holds it");
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    tokio::time::timeout(Duration::from_secs(10), async {
        while number(&db, held).await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("no lock is left");
}

#[tokio::test]
async fn a_direct_connection_is_a_session_and_doctor_has_no_complaint() {
    let cluster = Cluster::durable().start().expect("a cluster");
    let database = cluster.database().expect("a database");
    let settings = settings(database.url(), StatementMode::Auto);
    let (found, evidence) = pooling(&settings).await.expect("a test");
    assert_eq!(found, Pooling::Session, "{evidence}");
    let empty = doctor(&settings, None, || warp_domain::UnixMillis(0)).await;
    assert_eq!(empty.finding("schema").expect("looked at").level, Level::Fail);
    assert_eq!(empty.finding("clock").expect("looked at").level, Level::Warn, "it is not 1970");

    migrate(&settings, Some(LockKind::Session), false).await.expect("a migration");
    let clock = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        warp_domain::UnixMillis(i64::try_from(since.as_millis()).expect("not yet"))
    };
    let report = doctor(&settings, Some(LockKind::Session), clock).await;
    assert_eq!(report.worst(), Level::Ok, "{report:#?}");
    assert!(report.finding("budget").expect("looked at").text.contains("8 connections (pool 5 + 3)"), "{report:#?}");
    assert!(report.finding("naive-test").expect("looked at").text.contains("t then t"));
    let other = doctor(&settings, Some(LockKind::Ledger), clock).await;
    assert_eq!(other.finding("locks").expect("looked at").level, Level::Fail);
}

#[tokio::test]
async fn changes_are_heard_again_after_the_connection_was_lost() {
    let database = database();
    let proxy = Proxy::in_front_of(database.url()).expect("a proxy");
    let settings = ConnectSettings { application_name: "ears".to_owned(), ..settings(&proxy.url(database.url()), StatementMode::Auto) };
    let listener = Listener::start(&settings, None).unwrap_or_else(|fault| panic!("{}", fault.text()));
    let changes = listener.changes();
    let heard = async || tokio::time::timeout(Duration::from_secs(40), changes.wait()).await.expect("an announcement");
    heard().await;
    assert!(changes.is_listening());
    database.execute("NOTIFY warp, 'default'").expect("told");
    heard().await;
    proxy.close_all();
    heard().await;
    database.execute("NOTIFY warp, 'default'").expect("told");
    heard().await;
    // Silence: the connection is open and nothing comes through. It is given up, and made anew once that is possible.
    proxy.freeze();
    while changes.is_listening() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    proxy.thaw();
    heard().await;
    assert!(changes.is_listening());
}
