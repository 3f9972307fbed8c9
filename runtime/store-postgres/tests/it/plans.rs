//! The plans that the driver relies on: whatever the number of ended, scheduled and parked rows, and whatever the
//! statistics say of them, a command reads a few rows by their indexes and no table as a whole.

use std::collections::BTreeMap;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use warp_store_postgres::StatementMode;
use warp_test_servers::{Database, database};

use crate::conformance::another;

/// Rows of each kind. Enough that reading a whole table is told from walking an index.
const ROWS: i64 = 20_000;

/// A database as it is after a day: nearly everything has ended, much is scheduled, long lines wait for a few keys.
async fn filled(database: &Database) -> PgConnection {
    drop(another(database, StatementMode::Prepared).await);
    let mut conn = PgConnection::connect(database.url()).await.expect("a connection");
    let fill = format!(
        "INSERT INTO warp.lane (contract, queue) SELECT 'c' || n, 'q' FROM generate_series(1, 8) n;
         INSERT INTO warp.lane (contract, queue) VALUES ('rare', 'seldom'), ('unused', 'seldom');
         INSERT INTO warp.policy (hash, body, slots, weight, skips, is_fifo, blocks) VALUES ('\\x00', '{{}}', 1, 1, false, false, false);
         SELECT warp.register_host('h', '1', 'ledger', 0), warp.register_host('i', '1', 'ledger', 0);
         SELECT warp.serve_host(1, array['c1', 'c2', 'c3', 'c4'], 0), warp.serve_host(2, array['c1', 'c2', 'c3', 'c4'], 0);
         INSERT INTO warp.conc_key (key) SELECT 'k' || n FROM generate_series(1, 20) n;
         INSERT INTO warp.job (handle, id, created_at, lane, payload)
         SELECT n, lpad(to_hex(n), 32, '0')::uuid, n, n % 8 + 1, '{{}}' FROM generate_series(1, {ROWS} * 4) n;
         INSERT INTO warp.ended (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, host, claimed_at, took_us, settled)
         SELECT n, n, n, n % 8 + 1, 1, 1, 0, 10 + n % 3, false, 1, n, 5, n FROM generate_series(1, {ROWS} * 2) n;
         UPDATE warp.ended SET lane = 9 WHERE handle <= 6;
         UPDATE warp.job SET lane = 9 WHERE handle <= 6;
         INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique)
         SELECT n, n, n, n % 8 + 1, 0, 0, 0, 0, false FROM generate_series({ROWS} * 2 + 1, {ROWS} * 3) n;
         INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, stamp, keys, ticket, parked_on, refusal)
         SELECT n, n, n, n % 4 + 1, 0, 0, 0, 2, false, 1, array[n % 20 + 1], n, n % 20 + 1, 'full' FROM generate_series({ROWS} * 3 + 1, {ROWS} * 4) n;
         INSERT INTO warp.slot (key, number, job, stamped, since, token, host) SELECT n, 0, n, 1, 0, n, 1 FROM generate_series(1, 20) n;
         INSERT INTO warp.job (handle, id, created_at, lane, payload)
         SELECT n, lpad(to_hex(n), 32, '0')::uuid, n, n % 4 + 1, '{{}}' FROM generate_series({ROWS} * 4 + 1, {ROWS} * 4 + 400) n;
         INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique)
         SELECT n, n, n, n % 4 + 1, 0, 0, 0, 1, false FROM generate_series({ROWS} * 4 + 1, {ROWS} * 4 + 200) n;
         INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, stamp, keys, ticket, parked_on)
         SELECT n, n, n, n % 4 + 1, 0, 0, 0, 3, false, 1, array[n % 20 + 1], n, n % 20 + 1 FROM generate_series({ROWS} * 4 + 201, {ROWS} * 4 + 220) n;
         INSERT INTO warp.running (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, host, claimed_at, token)
         SELECT n, n, n, n % 4 + 1, 1, 1, 0, 4, false, 1 + n % 2, n, n FROM generate_series({ROWS} * 4 + 301, {ROWS} * 4 + 400) n;
         SELECT setval('warp.handle', {ROWS} * 5), setval('warp.token', {ROWS} * 5), setval('warp.ticket', {ROWS} * 5);
         INSERT INTO warp.unique_key (key, job) SELECT 'u' || n, n FROM generate_series({ROWS} * 2 + 1, {ROWS} * 3) n;
         INSERT INTO warp.audit (job, at, event, run, runs) SELECT n, n, 6, 0, 0 FROM generate_series(1, {ROWS} * 4) n;
         INSERT INTO warp.log (job, at, run, stream, body) SELECT n, n, 1, 'stdout', 'x' FROM generate_series(1, {ROWS} * 2) n;
         INSERT INTO warp.outcome (job, result) SELECT n, 'x' FROM generate_series(1, {ROWS} * 2) n"
    );
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut conn).await.expect("fill");
    conn
}

/// Rows that a statement read one after another, and by an index, in each table. It is undone.
async fn read(conn: &mut PgConnection, sql: &str) -> BTreeMap<String, (i64, i64)> {
    // What the statement before it read is still counted, unless it is handed over now.
    sqlx::raw_sql("SELECT pg_stat_force_next_flush()").execute(&mut *conn).await.expect("flushed");
    sqlx::raw_sql("BEGIN").execute(&mut *conn).await.expect("begun");
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut *conn).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    let rows = sqlx::query(
        "SELECT relname::text, seq_tup_read, coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables \
         WHERE schemaname = 'warp' AND seq_tup_read + coalesce(idx_tup_fetch, 0) > 0",
    )
    .fetch_all(&mut *conn)
    .await
    .expect("what was read");
    sqlx::raw_sql("ROLLBACK").execute(&mut *conn).await.expect("undone");
    rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect()
}

#[tokio::test]
async fn commands_read_a_few_rows_by_their_indexes_whatever_the_statistics_say() {
    let database = database();
    let mut conn = filled(&database).await;
    let id = |n: i64| format!("'{n:032x}'::uuid");
    let (scheduled, parked, ended, running) = (ROWS * 2 + 5, ROWS * 3 + 7, ROWS, ROWS * 4 + 301);
    let ready = ROWS * 4 + 3;
    // Name, statement, and the most rows that it may fetch by indexes.
    let commands = [
        ("enqueue", "SELECT warp.enqueue('c1', '{}')".to_owned(), 20),
        ("enqueue for later", "SELECT warp.enqueue('c1', '{}', due => now() + interval '1 day', unique_key => 'u1')".to_owned(), 20),
        (
            "enqueue where ids and keys are taken",
            format!(
                "SELECT warp.enqueue_rows(array[{}, {}], '{{1,1}}', '{{NULL,NULL}}', '{{1,2}}', '{{NULL,NULL}}', '{{NULL,NULL}}', '{{NULL,NULL}}', \
                 array['u{}', 'u1'], 5)",
                id(5),
                id(ROWS * 9),
                ROWS * 2 + 1
            ),
            40,
        ),
        ("enqueue one", format!("SELECT warp.enqueue_one({}, 1, NULL, '1', NULL, NULL, 5, 'q')", id(ROWS * 9)), 5),
        ("claim from a lane with nothing in it", "SELECT * FROM warp.claim_one(1, 5, '{10}', '{1}', '{1}', 16)".to_owned(), 10),
        ("renew", format!("SELECT warp.renew_host(2, 1, array[{running}], array[{running}], 1000, {})", ROWS * 9), 2_500),
        ("rescue", "SELECT warp.rescue_host(2, 0, 5, 1)".to_owned(), 1_500),
        ("cancel a ready job", format!("SELECT warp.cancel_job({}, 'x', 1)", id(ready)), 60),
        ("cancel a scheduled job", format!("SELECT warp.cancel_job({}, 'x', 1)", id(scheduled)), 60),
        ("cancel a parked job", format!("SELECT warp.cancel_job({}, 'x', 1)", id(parked)), 100),
        ("cancel a running job", format!("SELECT warp.cancel_job({}, 'x', 1)", id(running)), 60),
        ("requeue an ended job", format!("SELECT warp.requeue_job({}, 'x', 1)", id(ended)), 60),
        ("delete an ended job", format!("SELECT warp.delete_job({}, 1)", id(ended)), 60),
        ("delete a parked job", format!("SELECT warp.delete_job({}, 1)", id(parked)), 100),
        ("raise a limit", "SELECT warp.set_limit('k3', 3, 'x', 1)".to_owned(), 300),
        ("pause the queue of a host", "SELECT warp.pause_host(1, 'x', 1)".to_owned(), 100),
        ("prune", "SELECT warp.prune(0, 0, 0, 100, 1000000)".to_owned(), 1_500),
        ("one job", format!("SELECT * FROM warp.job WHERE id = {}", id(ended)), 5),
        ("one key", "SELECT warp.key_seen(3, 10)".to_owned(), ROWS / 20 + 200),
        ("the newest jobs", "SELECT * FROM warp.list_jobs(NULL, NULL, NULL, NULL, NULL, 50)".to_owned(), 2_000),
        ("the newest that are parked", "SELECT * FROM warp.list_jobs('{2}', NULL, NULL, NULL, NULL, 50)".to_owned(), ROWS * 7),
        ("the newest that run", "SELECT * FROM warp.list_jobs('{4}', NULL, NULL, NULL, NULL, 50)".to_owned(), 2_000),
        ("the newest with a key", "SELECT * FROM warp.list_jobs(NULL, NULL, NULL, 'k7', NULL, 5)".to_owned(), ROWS),
        ("a contract that nobody has heard of", "SELECT * FROM warp.list_jobs(NULL, 'x', NULL, NULL, NULL, 50)".to_owned(), 5),
        ("a contract that nobody uses", "SELECT * FROM warp.list_jobs(NULL, 'unused', NULL, NULL, NULL, 50)".to_owned(), 300),
        ("a contract of a few old jobs", "SELECT * FROM warp.list_jobs(NULL, 'rare', NULL, NULL, NULL, 50)".to_owned(), 300),
        ("a queue of a few old jobs", "SELECT * FROM warp.list_jobs(NULL, NULL, 'seldom', NULL, NULL, 50)".to_owned(), 300),
        ("a contract's few Failed", "SELECT * FROM warp.list_jobs('{11}', 'rare', NULL, NULL, NULL, 50)".to_owned(), 50),
        ("the newest of a busy contract", "SELECT * FROM warp.list_jobs(NULL, 'c1', NULL, NULL, NULL, 50)".to_owned(), ROWS * 2),
        ("queues", "SELECT * FROM warp.queues_seen(100)".to_owned(), ROWS * 5),
        ("hosts", "SELECT * FROM warp.hosts_seen()".to_owned(), 300),
    ];
    // Whole by nature: a row for each contract and queue, for each policy, each host and what it serves; the counters.
    let small =
        ["lane", "policy", "host", "host_name", "host_contract", "queue_pause", "cancel_request", "setting", "counter", "conc_key", "slot"];
    for statistics in ["", "ANALYZE", "DELETE FROM pg_statistic"] {
        sqlx::raw_sql(statistics).execute(&mut conn).await.expect("statistics");
        for (name, sql, most) in &commands {
            let tables = read(&mut conn, sql).await;
            for (table, (in_turn, _)) in &tables {
                // What is running is a few rows as well.
                let allowed = if small.contains(&table.as_str()) {
                    1_000
                } else if table == "running" {
                    200
                } else {
                    0
                };
                assert!(*in_turn <= allowed, "{name}, after `{statistics}`: {in_turn} rows of {table} were read in turn: {tables:?}");
            }
            let fetched: i64 = tables.values().map(|(_, fetched)| fetched).sum();

            assert!(fetched <= *most, "{name}, after `{statistics}`: {fetched} rows were fetched: {tables:?}");
        }
    }
}

/// A few jobs in a state that hardly any is in: however many have ended otherwise since, they are found by their state rows,
/// and the jobs are reached one by one.
#[tokio::test]
async fn a_rare_state_is_found_without_a_walk() {
    let database = database();
    let mut conn = filled(&database).await;
    sqlx::raw_sql("UPDATE warp.ended SET place = 10 WHERE place = 11 AND handle > 9").execute(&mut conn).await.expect("changed");
    for statistics in ["", "ANALYZE", "VACUUM ANALYZE", "DELETE FROM pg_statistic"] {
        sqlx::raw_sql(statistics).execute(&mut conn).await.expect("statistics");
        let tables = read(&mut conn, "SELECT * FROM warp.list_jobs('{11}', NULL, NULL, NULL, NULL, 50)").await;
        let (in_turn, by_index) = tables["job"];
        assert!(in_turn == 0 && (1..=10).contains(&by_index), "after `{statistics}`: {tables:?}");
        let all: i64 = tables.iter().filter(|(table, _)| *table != "lane").map(|(_, (in_turn, by_index))| in_turn + by_index).sum();
        assert!(all < 200, "after `{statistics}`: {tables:?}");
        let found: Vec<i16> = sqlx::query_scalar("SELECT place FROM warp.list_jobs('{11}', NULL, NULL, NULL, NULL, 50)")
            .fetch_all(&mut conn)
            .await
            .expect("a list");
        assert_eq!(found, [11; 3]);
    }
}

/// Where many fit the filter, and none of them is near: the walk for the newest ends before it has passed everything.
#[tokio::test]
async fn a_walk_that_leads_far_is_given_up() {
    let database = database();
    let mut conn = filled(&database).await;
    // 25,000 that Failed long ago, and 60,000 jobs after them.
    let change = format!(
        "UPDATE warp.ended SET place = CASE WHEN handle <= 25000 THEN 11 ELSE 10 END; DELETE FROM warp.job WHERE handle BETWEEN 25001 AND {ROWS} * 2;
         INSERT INTO warp.job (handle, id, created_at, lane, payload)
         SELECT n, lpad(to_hex(n), 32, '0')::uuid, n, 1, '{{}}' FROM generate_series({ROWS} * 5, {ROWS} * 8) n;
         INSERT INTO warp.ended (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique)
         SELECT n, n, n, 1, 1, 1, 0, 10, false FROM generate_series({ROWS} * 5, {ROWS} * 8) n; ANALYZE"
    );
    sqlx::raw_sql(AssertSqlSafe(change)).execute(&mut conn).await.expect("changed");
    let found: Vec<i64> = sqlx::query_scalar("SELECT created_at FROM warp.list_jobs('{11}', NULL, NULL, NULL, NULL, 3)")
        .fetch_all(&mut conn)
        .await
        .expect("a list");
    assert_eq!(found, [25_000, 24_999, 24_998]);
    let tables = read(&mut conn, "SELECT * FROM warp.list_jobs('{11}', NULL, NULL, NULL, NULL, 3)").await;
    assert!(tables["job"].0 == 0 && tables["job"].1 <= 50_001 * 3 + 25_100, "{tables:?}");
}
