//! What the driver keeps apart and puts together again: the history of a job, counters that only grow.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use warp_store::{CommandVerdict, Served};
use warp_store_postgres::StatementMode;
use warp_store_tests::{Subject, World, gated, mutex, plain, retry_at};
use warp_test_servers::{Database, database};

use crate::conformance::another;

async fn world(database: &Database) -> World {
    let store = Arc::new(another(database, StatementMode::Prepared).await);
    World::new(Subject { store, keep: Box::new(()) })
}

async fn count(database: &Database, sql: &str) -> i64 {
    let mut conn = PgConnection::connect(database.url()).await.expect("a connection");
    sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_one(&mut conn).await.expect("a number").get(0)
}

/// A run that goes on, and the last one of a Completed job, tell of themselves; what they tell is written down when the
/// job goes on. Whoever reads sees one history in its order, with everybody's name, at every moment.
#[tokio::test]
async fn a_history_reads_alike_wherever_its_parts_stand() {
    let database = database();
    let world = world(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"])), gated("rival", 1, mutex(&["k"]))]).await;
    let id = world.enqueue_one("c").await;
    let mut told = vec!["Created".to_owned()];
    let mut more = async |events: &[&str], stored: i64| {
        told.extend(events.iter().map(|event| (*event).to_owned()));
        let details = world.details(id).await;
        assert_eq!(details.audit.iter().map(|row| row.event.clone()).collect::<Vec<_>>(), told);
        assert!(details.audit.is_sorted_by_key(|row| row.at), "{:?}", details.audit);
        assert_eq!(count(&database, "SELECT count(*) FROM warp.audit").await, stored, "rows of history after {told:?}");
        for row in details.audit.iter().filter(|row| row.run > 0 && ["Processing", "Completed", "Failed"].contains(&row.event.as_str())) {
            assert_eq!(row.host.as_deref(), Some("machine-1"), "{row:?}");
            assert!(row.digest.is_some(), "{row:?}");
            assert_eq!(row.took.is_some(), row.event != "Processing", "{row:?}");
        }
        world.pass(Duration::from_millis(1));
    };
    more(&[], 0).await;
    let first = world.claim_one(&host).await;
    more(&["Processing"], 0).await;
    world.cancel(id, CommandVerdict::Requested).await;
    more(&["CancellationRequested"], 1).await;
    world.complete(&host, &first).await;
    more(&["Completed"], 1).await;
    world.requeue(id, CommandVerdict::Done).await;
    more(&["Requeued"], 4).await;
    let second = world.claim_one(&host).await;
    more(&["Processing"], 4).await;
    world.end(&host, &second, retry_at(world.in_seconds(1))).await;
    more(&["Failed", "Scheduled"], 7).await;
    world.pass(Duration::from_secs(1));
    let rival = world.enqueue_one("rival").await;
    let holder = world.claim_one(&host).await;
    // The older due time comes first; so the job itself is the holder again, and the rival is parked.
    assert_eq!(holder.id, id);
    more(&["Enqueued", "Processing"], 8).await;
    world.rescue(&host).await;
    more(&["Requeued"], 10).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"])), gated("rival", 1, mutex(&["k"]))]).await;
    let rivals = world.claim(&host, 5).await;
    let third = rivals.iter().find(|run| run.id == id).expect("it runs again");
    assert!(rivals.iter().all(|run| run.id != rival), "one at a time");
    more(&["Processing"], 11).await;
    world.complete(&host, third).await;
    more(&["Completed"], 11).await;
}

/// Counters are rows that are added up by ticks: what is read is the same before and after.
#[tokio::test]
async fn counters_are_folded_and_count_the_same() {
    let database = database();
    let world = world(&database).await;
    let host = world.host(&[plain("c")]).await;
    for _ in 0..3 {
        world.enqueue_many("c", 4).await;
        for run in world.claim(&host, 4).await {
            world.complete(&host, &run).await;
        }
    }
    database.execute("INSERT INTO warp.counter SELECT 'stats:requeued', 1 FROM generate_series(1, 700)").expect("as after many exchanges");
    let before = world.store.overview().await.expect("overview");
    assert_eq!((before.counters["stats:succeeded"], before.counters["stats:requeued"]), (12, 700));
    world.renew(host.id, Vec::new()).await;
    assert_eq!(count(&database, "SELECT count(*) FROM warp.counter").await, 3, "one row for each name");
    assert_eq!(world.store.overview().await.expect("overview"), before);
    world.renew(host.id, Vec::new()).await;
    assert_eq!(world.store.overview().await.expect("overview"), before, "few rows are left alone");
}

/// The network may hold a publication back until a later one has been written.
#[tokio::test]
async fn a_publication_that_comes_late_changes_nothing() {
    let database = database();
    let world = world(&database).await;
    let host = world.host(&[plain("first")]).await;
    let served = async || world.store.served_contracts().await.expect("contracts");
    world.store.serve(host.id, vec![Served { declarations: Arc::new(plain("second")) }]).await.expect("published");
    assert_eq!(served().await, ["second"]);
    let again = |number: i64| format!("SELECT warp.serve_host({}, array['first'], 0, {number})", host.id.0);
    for late in [1, 2] {
        database.execute(&again(late)).expect("carried out");
        assert_eq!(served().await, ["second"], "number {late} has come after number 2");
    }
    database.execute(&again(3)).expect("carried out");
    assert_eq!(served().await, ["first"]);
}
