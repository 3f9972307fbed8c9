//! A cluster: starts, comes back, and goes away with its owner.

use std::{
    env,
    io::{BufRead, BufReader},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection};
use warp_test_servers::{Cluster, Stop, Tls, database};

async fn one<T>(connection: &mut PgConnection, query: &'static str) -> T
where
    T: Send + Unpin + sqlx::Type<sqlx::Postgres> + for<'r> sqlx::Decode<'r, sqlx::Postgres>,
{
    sqlx::query_scalar(query).fetch_one(connection).await.expect(query)
}

#[tokio::test]
async fn commits_survive_an_immediate_restart() {
    let cluster = Cluster::durable().start().expect("cluster");
    let database = cluster.database().expect("database");
    database.execute("CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").expect("insert");
    let mut old = PgConnection::connect(database.url()).await.expect("connect");
    assert_eq!(one::<String>(&mut old, "SHOW fsync").await, "on");
    cluster.restart(Stop::Immediate).expect("restart");
    sqlx::query("SELECT 1").execute(&mut old).await.expect_err("the session did not survive");
    let mut new = PgConnection::connect(database.url()).await.expect("connect to the same URL");
    assert_eq!(one::<i32>(&mut new, "SELECT x FROM kept").await, 7);
    assert!(cluster.log().contains("was not properly shut down"), "{}", cluster.log());
}

#[tokio::test]
async fn a_killed_backend_takes_only_its_session() {
    let cluster = Cluster::functional().start().expect("cluster");
    let mut victim = PgConnection::connect(&cluster.url("postgres")).await.expect("connect");
    let mut other = PgConnection::connect(&cluster.url("postgres")).await.expect("connect");
    let pid = one(&mut victim, "SELECT pg_backend_pid()").await;
    cluster.kill_backend(pid).expect("kill");
    sqlx::query("SELECT 1").execute(&mut victim).await.expect_err("killed");
    assert_eq!(one::<i32>(&mut other, "SELECT 1").await, 1);
    cluster.kill_backend(0).expect_err("0 would mean a whole process group");
}

#[test]
fn stopped_it_refuses_and_dropped_it_is_gone() {
    let cluster = Cluster::functional().start().expect("cluster");
    let (port, data) = (cluster.port(), cluster.data());
    TcpStream::connect(("127.0.0.1", port)).expect("it runs");
    cluster.stop(Stop::Fast).expect("stop");
    assert_eq!(cluster.pid(), None);
    TcpStream::connect(("127.0.0.1", port)).expect_err("it is stopped");
    cluster.start().expect("start");
    TcpStream::connect(("127.0.0.1", port)).expect("it runs again, on the same port");
    drop(cluster);
    TcpStream::connect(("127.0.0.1", port)).expect_err("it is gone");
    assert!(!data.parent().is_some_and(Path::exists), "its directory too");
}

#[tokio::test]
async fn settings_and_statistics_arrive() {
    let cluster = Cluster::functional().set("work_mem", "7MB").count_statements().start().expect("cluster");
    let mut connection = PgConnection::connect(&cluster.url("postgres")).await.expect("connect");
    assert_eq!(one::<String>(&mut connection, "SHOW work_mem").await, "7MB");
    assert_eq!(one::<String>(&mut connection, "SHOW fsync").await, "off");
    let available = "SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_stat_statements')";
    assert_eq!(one::<bool>(&mut connection, available).await, cluster.counts_statements());
    if cluster.counts_statements() {
        cluster.execute("postgres", "CREATE EXTENSION pg_stat_statements").expect("extension");
        assert!(one::<i64>(&mut connection, "SELECT count(*) FROM pg_stat_statements").await > 0);
    }
}

#[tokio::test]
async fn a_password_is_asked_for() {
    let cluster = Cluster::functional().password("open-sesame").start().expect("cluster");
    let right = cluster.url("postgres");
    PgConnection::connect(&right).await.expect("the right one");
    let wrong = right.replace("sesame", "barley");
    assert_ne!(right, wrong);
    let error = PgConnection::connect(&wrong).await.expect_err("the wrong one");
    assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some("28P01"), "{error}");
}

#[tokio::test]
async fn tls_is_required_and_the_authority_counts() {
    let tls = Tls::new("postgres").expect("certificates");
    let cluster = Cluster::functional().tls(&tls).start().expect("cluster");
    let mut connection = PgConnection::connect(&cluster.url("postgres")).await.expect("with the right authority");
    assert!(one::<bool>(&mut connection, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").await);

    let plain = format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable", cluster.port());
    PgConnection::connect(&plain).await.expect_err("not encrypted");
    let stranger = Tls::new("postgres").expect("certificates");
    let strange = cluster.url("postgres").replace(&tls.root().display().to_string(), &stranger.root().display().to_string());
    PgConnection::connect(&strange).await.expect_err("another authority");
}

#[tokio::test]
async fn a_client_certificate_names_its_user() {
    let tls = Tls::new("postgres").expect("certificates");
    let cluster = Cluster::functional().tls_with_client_certificate(&tls).start().expect("cluster");
    PgConnection::connect(&cluster.url("postgres")).await.expect("with the certificate");
    let without = cluster.url("postgres").split_once("&sslcert").expect("it has one").0.to_owned();
    PgConnection::connect(&without).await.expect_err("without it");
    cluster.execute("postgres", "CREATE ROLE other LOGIN").expect("role");
    let other = cluster.url("postgres").replace("//postgres@", "//other@");
    PgConnection::connect(&other).await.expect_err("in another name");
}

#[tokio::test]
async fn databases_are_separate_and_go_away() {
    let (one_database, other) = (database(), database());
    one_database.execute("CREATE TABLE mine ()").expect("create");
    other.execute("CREATE TABLE mine ()").expect("not there yet");
    let mut connection = PgConnection::connect(other.url()).await.expect("connect");
    let name = one_database.name().to_owned();
    let exists = "SELECT count(*) FROM pg_database WHERE datname = $1";
    let count =
        async |connection: &mut PgConnection| -> i64 { sqlx::query_scalar(exists).bind(&name).fetch_one(connection).await.expect(exists) };
    assert_eq!(count(&mut connection).await, 1);
    // A session in it does not keep it.
    let _open = PgConnection::connect(one_database.url()).await.expect("connect");
    drop(one_database);
    assert_eq!(count(&mut connection).await, 0);
}

/// Set in the process that starts a cluster to be killed over it.
const OWNER: &str = "WARP_TEST_OWNER";

/// This test runs itself once more in a process of its own, and kills that.
#[test]
fn a_cluster_ends_with_its_killed_owner() {
    if env::var_os(OWNER).is_some() {
        let cluster = Cluster::functional().start().expect("cluster");
        println!("\nowner: {} {}", cluster.port(), cluster.data().display());
        loop {
            thread::park();
        }
    }
    let mut owner = Command::new(env::current_exe().expect("this binary"))
        .args(["--exact", "cluster::a_cluster_ends_with_its_killed_owner", "--nocapture"])
        .env(OWNER, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a second process");
    let output = BufReader::new(owner.stdout.take().expect("its output"));
    let line =
        output.lines().map_while(Result::ok).find_map(|line| line.strip_prefix("owner: ").map(str::to_owned)).expect("it starts a cluster");
    let (port, data) = line.split_once(' ').expect("port and directory");
    let (port, data): (u16, PathBuf) = (port.parse().expect("port"), data.into());
    TcpStream::connect(("127.0.0.1", port)).expect("the cluster runs");

    owner.kill().expect("kill -9");
    owner.wait().expect("reap");
    // Nobody is left who could tell when it is over.
    let begun = Instant::now();
    while data.parent().is_some_and(Path::exists) {
        assert!(begun.elapsed() < Duration::from_secs(30), "the directory is still there");
        thread::sleep(Duration::from_millis(20));
    }
    TcpStream::connect(("127.0.0.1", port)).expect_err("the server has ended");
}
