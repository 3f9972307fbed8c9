//! A lane with a long backlog is claimed from where the claim before ended. What comes to its front meanwhile must be
//! found all the same.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Connection as _;
use sqlx::postgres::PgConnection;
use warp_store_postgres::StatementMode;
use warp_store_tests::{Host, Subject, World, hand_back, plain};
use warp_test_servers::database;

use crate::conformance::another;

/// A host that has claimed this many of this many, and the first of them handed back since: nothing is due before it.
async fn handed_back(jobs: usize, claimed: u32) -> (World, Host, warp_domain::JobId) {
    let database = tokio::task::spawn_blocking(database).await.expect("an empty database");
    let store = Arc::new(another(&database, StatementMode::Prepared).await);
    let world = World::new(Subject { store, keep: Box::new(database) });
    let host = world.host(&[plain("c")]).await;
    world.enqueue_many("c", 1).await;
    world.pass(Duration::from_millis(1));
    world.enqueue_many("c", jobs - 1).await;
    let claimed = world.claim(&host, claimed).await;
    world.end(&host, &claimed[0], hand_back()).await;
    (world, host, claimed[0].id)
}

#[tokio::test]
async fn a_job_at_the_front_is_found_as_soon_as_there_is_not_enough_behind_it() {
    let (world, host, id) = handed_back(150, 64).await;
    assert!(!world.claim_ids(&host, 64).await.contains(&id), "there is enough, and the claim begins behind it");
    let rest = world.claim_ids(&host, 64).await;
    assert_eq!(rest.len(), 150 - 64 - 64 + 1);
    assert!(rest.contains(&id));
}

#[tokio::test]
async fn a_job_at_the_front_of_an_endless_backlog_is_found_after_a_number_of_claims() {
    let (world, host, id) = handed_back(70 * 64, 64).await;
    for _ in 0..66 {
        let ids = world.claim_ids(&host, 64).await;
        assert_eq!(ids.len(), 64, "the backlog goes on");
        if ids.contains(&id) {
            return;
        }
    }
    panic!("{id} was passed over by 66 claims");
}

/// Another host's claim is undone while this one's begin behind it.
#[tokio::test]
async fn what_others_have_touched_and_left_is_found() {
    let database = tokio::task::spawn_blocking(database).await.expect("an empty database");
    let store = Arc::new(another(&database, StatementMode::Prepared).await);
    let world = World::new(Subject { store, keep: Box::new(()) });
    let host = world.host(&[plain("c")]).await;
    let ids = world.enqueue_many("c", 200).await;
    let mut conn = PgConnection::connect(database.url()).await.expect("a connection");
    let touch = "BEGIN; SELECT FROM warp.ready ORDER BY due, handle OFFSET 64 LIMIT 10 FOR UPDATE; ROLLBACK";
    sqlx::raw_sql(touch).execute(&mut conn).await.expect("touched");
    let mut claimed = world.claim_ids(&host, 64).await;
    claimed.extend(world.claim_ids(&host, 64).await);
    assert!(!claimed.contains(&ids[64]), "there is enough that nobody has touched");
    claimed.extend(world.claim_ids(&host, 200).await);
    claimed.sort_unstable();
    let mut all = ids;
    all.sort_unstable();
    assert_eq!(claimed, all);
}

/// The plan of a claim, made while there is next to nothing and kept: it walks the lane's index as far as it must and reads
/// no table, whatever there is later and whatever the statistics say.
#[tokio::test]
async fn a_claim_reads_what_it_takes() {
    let database = tokio::task::spawn_blocking(database).await.expect("an empty database");
    drop(another(&database, StatementMode::Prepared).await);
    let mut conn = PgConnection::connect(database.url()).await.expect("a connection");
    let claim = "SELECT FROM warp.exchange(1, 0, '{}', '{}', '{}', '{}', '{}', NULL, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', \
                 '{}', '{}', '{}', '{}', '{}', '{1}', '{1}', '{false}', '{1}', 100, '{NULL}', '{NULL}', '{}', '{}', '{}', '{}', '{}', NULL, NULL, \
                 '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 0)";
    let few = "INSERT INTO warp.lane (contract, queue) VALUES ('c', 'q');
         SELECT warp.register_host('h', '1', 'ledger', 0);
         INSERT INTO warp.job (handle, id, created_at, lane, payload) SELECT n, gen_random_uuid(), 0, 1, '{}' FROM generate_series(1, 20001) n;
         INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique) VALUES (1, 0, 0, 1, 0, 0, 0, 1, false);
         ANALYZE warp.ready";
    let many = "INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique)
         SELECT n, n, 0, 1, 0, 0, 0, 1, false FROM generate_series(2, 20001) n;
         INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique)
         SELECT -n, 1 + n, 0, 1, 0, 0, 0, 0, false FROM generate_series(1, 20000) n";
    for sql in [few, claim, many] {
        sqlx::raw_sql(sql).execute(&mut conn).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }
    for statistics in ["", "ANALYZE", "DELETE FROM pg_statistic"] {
        sqlx::raw_sql(statistics).execute(&mut conn).await.expect("statistics");
        // What was done before is still counted, unless it is handed over now.
        sqlx::raw_sql("SELECT pg_stat_force_next_flush()").execute(&mut conn).await.expect("flushed");
        sqlx::raw_sql("BEGIN").execute(&mut conn).await.expect("begun");
        sqlx::raw_sql(claim).execute(&mut conn).await.expect("claimed");
        let read: (i64, i64) = sqlx::query_as(
            "SELECT sum(seq_tup_read)::bigint, sum(coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables \
             WHERE relname IN ('ready', 'waiting', 'job', 'running')",
        )
        .fetch_one(&mut conn)
        .await
        .expect("what was read");
        sqlx::raw_sql("ROLLBACK").execute(&mut conn).await.expect("undone");
        assert_eq!(read.0, 0, "after `{statistics}`: rows were read in turn");
        // The row, by its index, by its place, and the job.
        assert!((200..=600).contains(&read.1), "after `{statistics}`: {} rows were fetched for 100", read.1);
    }
}
