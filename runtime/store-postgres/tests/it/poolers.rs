//! Behind a real PgBouncer: every mode, one client and fifty, idle and busy, one server connection and twenty, prepared
//! and simple statements.

use std::time::{Duration, Instant};

use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinHandle;
use warp_store::StoreErrorKind;
use warp_store_postgres::bare::{Db, Listener, Sql};
use warp_store_postgres::{ConnectSettings, Level, LockKind, Pooling, StatementMode};
use warp_store_postgres::{doctor, migrate, pooling, schema_version};
use warp_test_servers::{Database, PgBouncer, PoolMode, Proxy, database};

use crate::connections::{check_arguments, number, open, settings};

fn behind(database: &Database, mode: PoolMode, size: u32) -> (PgBouncer, String) {
    let pooler = PgBouncer::in_front_of(database.url()).mode(mode).pool_size(size).start().expect("a pooler");
    let url = pooler.url(database.name());
    (pooler, url)
}

/// Other clients of the pooler, each with short statements one after another. They end with this value.
struct Crowd(Vec<JoinHandle<()>>);

impl Crowd {
    async fn new(url: &str, clients: usize) -> Self {
        let mut crowd = Vec::new();
        for _ in 0..clients {
            let mut client = PgConnection::connect(&format!("{url}?sslmode=disable")).await.expect("a client");
            crowd.push(tokio::spawn(async move { while sqlx::raw_sql("SELECT pg_sleep(0.002)").execute(&mut client).await.is_ok() {} }));
        }
        Crowd(crowd)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_test_finds_every_mode_idle_and_busy() {
    let database = database();
    for (mode, expected) in [(PoolMode::Transaction, Pooling::Transaction), (PoolMode::Statement, Pooling::Statement)] {
        // With few backends and a few more clients, one round of the test is wrong in a quarter of the cases.
        for (size, clients) in [(1, 0), (1, 50), (2, 3), (5, 20), (20, 0), (20, 50)] {
            let (_pooler, url) = behind(&database, mode, size);
            let _crowd = Crowd::new(&url, clients).await;
            for _ in 0..25 {
                let began = Instant::now();
                let (found, evidence) = pooling(&settings(&url, StatementMode::Auto)).await.expect("a test");
                assert_eq!(found, expected, "{mode:?}, {size} server connections, {clients} others: {evidence}");
                assert!(began.elapsed() < Duration::from_secs(5), "found in time");
            }
        }
    }
    let (_pooler, url) = behind(&database, PoolMode::Session, 20);
    for clients in [0, 10] {
        let _crowd = Crowd::new(&url, clients).await;
        for _ in 0..20 {
            let (found, evidence) = pooling(&settings(&url, StatementMode::Auto)).await.expect("a test");
            assert_eq!(found, Pooling::Session, "{clients} others: {evidence}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_test_costs_the_pooler_no_connection_to_the_server() {
    let database = database();
    for size in [1, 20] {
        let (_pooler, url) = behind(&database, PoolMode::Transaction, size);
        let db = open(&settings(&url, StatementMode::Simple)).await;
        let backend = "SELECT pg_backend_pid()::int8";
        let before = number(&db, backend).await;
        pooling(&settings(&url, StatementMode::Auto)).await.expect("a test");
        assert_eq!(number(&db, backend).await, before, "{size} server connections");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_pooler_with_one_connection_is_refused_with_the_budget() {
    let database = database();
    let (_pooler, url) = behind(&database, PoolMode::Session, 1);
    let began = Instant::now();
    let fault = Db::open(&settings(&url, StatementMode::Auto)).await.err().expect("refused");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(fault.kind(), StoreErrorKind::Unavailable);
    assert!(fault.text().contains("pool + 3 = 8 connections") && fault.text().contains("default_pool_size"), "{}", fault.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_work_through_every_mode_with_one_client_and_fifty() {
    let database = database();
    database.execute("CREATE TABLE t (x int8)").expect("a table");
    let mut expected = 0;
    for mode in [PoolMode::Session, PoolMode::Transaction, PoolMode::Statement] {
        for size in [1, 20] {
            if mode == PoolMode::Session && size == 1 {
                continue;
            }
            let (_pooler, url) = behind(&database, mode, size);
            for sending in [StatementMode::Auto, StatementMode::Simple] {
                let proxy = Proxy::in_front_of(&url).expect("a proxy");
                let lone = open(&settings(&proxy.url(&url), sending)).await;
                check_arguments(&lone).await;
                // After a second it is asked for a sign of life; the pooler passes that on, and no new connection is made.
                tokio::time::sleep(Duration::from_millis(1100)).await;
                let made = proxy.accepted();
                check_arguments(&lone).await;
                assert_eq!(proxy.accepted(), made, "{mode:?}");
                drop((lone, proxy));
                // Fifty hosts with a pool of one, or as many as there are surely sessions for: two each, while they are opened.
                let clients = if mode == PoolMode::Session { 6 } else { 50 };
                let hosts: Vec<_> = (0..clients)
                    .map(|_| {
                        let settings = ConnectSettings { pool: 1, ..settings(&url, sending) };
                        tokio::spawn(async move {
                            let db = open(&settings).await;
                            for x in 0..10i64 {
                                db.rows(Sql::new("INSERT INTO t VALUES ($1)").arg(x))
                                    .await
                                    .unwrap_or_else(|fault| panic!("{}", fault.text()));
                            }
                        })
                    })
                    .collect();
                for host in hosts {
                    host.await.expect("its statements");
                }
                expected += 10 * clients;
            }
        }
    }
    assert_eq!(number(&open(&settings(database.url(), StatementMode::Auto)).await, "SELECT count(*) FROM t").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn prepared_statements_through_a_transaction_pooler_are_refused_with_the_way_out() {
    let database = database();
    let (_pooler, url) = behind(&database, PoolMode::Transaction, 1);
    let settings = settings(&url, StatementMode::Prepared);
    let (one, other) = (open(&settings).await, open(&settings).await);
    let mut faults = Vec::new();
    for _ in 0..4 {
        faults.extend(one.rows(Sql::new("SELECT 1")).await.err());
        faults.extend(other.rows(Sql::new("SELECT 2")).await.err());
    }
    assert!(!faults.is_empty(), "two clients with statements of the same name share one backend");
    for fault in faults {
        assert_eq!(fault.kind(), StoreErrorKind::Unavailable);
        assert!(fault.text().contains("`simple` or `auto`"), "{}", fault.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_is_installed_through_every_mode() {
    for mode in [PoolMode::Session, PoolMode::Transaction, PoolMode::Statement] {
        let database = database();
        let (_pooler, url) = behind(&database, mode, 20);
        let settings = settings(&url, StatementMode::Auto);
        let (one, other) = tokio::join!(migrate(&settings, None, false), migrate(&settings, None, false));
        let applied = one.expect("a migration").len() + other.expect("a migration").len();
        assert_eq!(applied, usize::try_from(schema_version(&settings).await.expect("a version")).expect("small"), "{mode:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_shows_that_the_usual_test_passes_where_session_locks_cannot_work() {
    let database = database();
    for (mode, found) in [(PoolMode::Transaction, "transaction"), (PoolMode::Statement, "statement")] {
        let (_pooler, url) = behind(&database, mode, 20);
        let settings = settings(&url, StatementMode::Auto);
        database.execute("DROP SCHEMA IF EXISTS warp CASCADE").expect("as new");
        migrate(&settings, Some(LockKind::Session), false).await.expect("a migration");
        let report = doctor(&settings, None, || warp_domain::UnixMillis(0)).await;
        let pooling = report.finding("pooling").expect("looked at");
        assert_eq!(pooling.level, Level::Fail, "{report:#?}");
        assert!(pooling.text.contains(found), "{report:#?}");
        let remedy = pooling.remedy.as_deref().unwrap_or_default();
        for named in ["direct address", "session mode", "ledger", "Neon", "Supabase", "Azure", "PgBouncer"] {
            assert!(remedy.contains(named), "{named} is not named: {remedy}");
        }
        let naive = report.finding("naive-test").expect("looked at");
        assert!(naive.text.contains("t then t"), "on an idle pooler it passes: {naive:?}");
        assert_eq!(report.finding("listen").expect("looked at").level, Level::Warn);

        database.execute("UPDATE warp.setting SET locks = 'ledger'").expect("another kind");
        let report = doctor(&settings, None, || warp_domain::UnixMillis(0)).await;
        assert_eq!(report.finding("pooling").expect("looked at").level, Level::Ok, "{report:#?}");
        let direct = ConnectSettings { listen_url: Some(database.url().to_owned()), ..settings };
        let report = doctor(&direct, None, || warp_domain::UnixMillis(0)).await;
        assert_eq!(report.finding("listen").expect("looked at").level, Level::Ok, "{report:#?}");
    }
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(number(&open(&settings(database.url(), StatementMode::Simple)).await, held).await, 0, "no lock is stranded");
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_heard_where_there_is_a_session() {
    let database = database();
    for mode in [PoolMode::Session, PoolMode::Transaction] {
        let (_pooler, url) = behind(&database, mode, 20);
        let pooled = settings(&url, StatementMode::Auto);
        let direct = ConnectSettings { listen_url: Some(database.url().to_owned()), ..pooled.clone() };
        let hearing = if mode == PoolMode::Session { vec![&pooled, &direct] } else { vec![&direct] };
        for settings in hearing {
            let db = open(settings).await;
            let listener = Listener::start(settings, db.pooling()).unwrap_or_else(|fault| panic!("{}", fault.text()));
            let heard = async || tokio::time::timeout(Duration::from_secs(20), listener.changes().wait()).await.expect("an announcement");
            heard().await;
            db.rows(Sql::new("SELECT pg_notify('warp', 'default')")).await.unwrap_or_else(|fault| panic!("{}", fault.text()));
            heard().await;
        }
        if mode == PoolMode::Transaction {
            let listener = Listener::start(&pooled, Some(Pooling::Transaction)).unwrap_or_else(|fault| panic!("{}", fault.text()));
            assert!(!listener.until_given_up().await.is_listening());
        }
    }
}
