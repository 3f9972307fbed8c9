//! A PgBouncer in each mode is in that mode.

use sqlx::{Connection, PgConnection, Row};
use warp_test_servers::{Cluster, PgBouncer, PoolMode, database};

/// By the simple protocol, since prepared statements are what some modes lack.
async fn pid(client: &mut PgConnection) -> i32 {
    sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(client).await.expect("pid").get(0)
}

/// Whether two clients share a server connection while neither does anything, and whether BEGIN is accepted.
async fn observed(mode: PoolMode) -> (bool, bool) {
    let database = database();
    let bouncer = PgBouncer::in_front_of(database.url()).mode(mode).pool_size(2).start().expect("PgBouncer");
    let url = bouncer.url(database.name());
    let mut first = PgConnection::connect(&url).await.expect("connect");
    let mut second = PgConnection::connect(&url).await.expect("connect");
    let shared = pid(&mut first).await == pid(&mut second).await;
    let begins = sqlx::raw_sql("BEGIN").execute(&mut first).await.is_ok();
    (shared, begins)
}

#[tokio::test]
async fn session_mode_keeps_a_connection_for_each_client() {
    assert_eq!(observed(PoolMode::Session).await, (false, true));
}

#[tokio::test]
async fn transaction_mode_shares_connections_between_transactions() {
    assert_eq!(observed(PoolMode::Transaction).await, (true, true));
}

#[tokio::test]
async fn statement_mode_refuses_transactions() {
    assert_eq!(observed(PoolMode::Statement).await, (true, false));
}

#[tokio::test]
async fn a_prepared_statement_is_lost_unless_it_is_kept() {
    let database = database();
    for count in [0, 100] {
        let bouncer = PgBouncer::in_front_of(database.url()).prepared_statements(count).start().expect("PgBouncer");
        let url = bouncer.url(database.name());
        let mut first = PgConnection::connect(&url).await.expect("connect");
        let mut second = PgConnection::connect(&url).await.expect("connect");
        // sqlx counts its statements from 1 on in every connection: both name theirs alike, and they share a server.
        let alone = sqlx::query("SELECT 1").execute(&mut first).await;
        let beside = sqlx::query("SELECT 2").execute(&mut second).await;
        assert_eq!(alone.is_ok() && beside.is_ok(), bouncer.keeps_prepared_statements(), "{count}: {alone:?}, {beside:?}");
    }
}

#[tokio::test]
async fn it_logs_in_with_the_password_of_the_server_and_can_be_killed() {
    let cluster = Cluster::functional().password("secret").start().expect("cluster");
    let bouncer = PgBouncer::in_front_of(&cluster.url("postgres")).start().expect("PgBouncer");
    let url = bouncer.url("postgres");
    let mut client = PgConnection::connect(&url).await.expect("connect");
    pid(&mut client).await;
    bouncer.kill().expect("kill");
    sqlx::raw_sql("SELECT 1").execute(&mut client).await.expect_err("its connection is gone");
    bouncer.start().expect("start");
    let mut client = PgConnection::connect(&url).await.expect("connect to the same URL");
    pid(&mut client).await;
    let port = bouncer.port();
    drop(bouncer);
    std::net::TcpStream::connect(("127.0.0.1", port)).expect_err("it is gone");
}
