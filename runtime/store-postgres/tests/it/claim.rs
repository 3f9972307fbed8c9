//! The short ways of one job: `warp.enqueue_one` and `warp.claim_one` do what the functions for many do.

use std::sync::Arc;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use warp_store::EnqueueVerdict;
use warp_store_postgres::StatementMode;
use warp_store_tests::{Subject, World, plain};
use warp_test_servers::{Database, database};

use crate::conformance::another;

/// The claim of a host that tells nothing, by either function.
const SHORT: &str = "warp.claim_one(1, 1000, '{1,2}', '{1,2}', '{1,2}', 16)";
const LONG: &str = "warp.exchange(
    p_host => 1, p_now => 1000, c_lane => '{1,2}', c_stamp => '{1,2}', c_digest => '{1,2}', c_max => 16, c_keyed => '{f,f}',
    s_ord => '{}', s_job => '{}', s_token => '{}', s_took => '{}', s_result => '{}', s_other => NULL,
    l_ord => '{}', l_job => '{}', l_at => '{}', l_stream => '{}', l_body => '{}', h_ord => '{}', h_id => '{}', h_lane => '{}',
    h_payload => '{}', h_metadata => '{}', h_trace => '{}', h_due => '{}', h_explicit => '{}', h_unique => '{}',
    c_from_due => '{NULL,NULL}', c_from_job => '{NULL,NULL}', k_job => '{}', k_stamp => '{}', k_keys => '{}', k_error => '{}',
    k_reserved => '{}', k_page => NULL, p_session => NULL, n_key => '{}', n_from => '{}', n_from_token => '{}', n_to => '{}',
    n_to_token => '{}', s_passed => '{}', w_key => '{}', w_most => '{}', w_extra => 0)";

/// A host that serves `c` in two queues, and a few jobs that nobody has put anywhere.
async fn prepared(database: &Database) -> PgConnection {
    drop(another(database, StatementMode::Prepared).await);
    let mut conn = connection(database).await;
    let fill = "INSERT INTO warp.lane (contract, queue) VALUES ('c', 'q'), ('c', 'r');
         INSERT INTO warp.policy (hash, body, slots, weight, skips, is_fifo, blocks) VALUES ('\\x00', '{}', 1, 1, false, false, false), ('\\x01', '{}', 1, 1, false, false, false);
         INSERT INTO warp.digest (sha256) VALUES ('\\x00'), ('\\x01');
         INSERT INTO warp.conc_key (key) VALUES ('k');
         SELECT warp.register_host('h', '1', 'ledger', 0);
         INSERT INTO warp.job (handle, id, created_at, lane, payload, metadata)
         SELECT n, lpad(to_hex(n), 32, '0')::uuid, n, 1, '[' || n || ']', '[[\"a\",\"b\"]]' FROM generate_series(1, 5) n;
         SELECT setval('warp.handle', 100)";
    sqlx::raw_sql(fill).execute(&mut conn).await.expect("filled");
    conn
}

async fn connection(database: &Database) -> PgConnection {
    PgConnection::connect(database.url()).await.expect("a connection")
}

/// What a claim answers and what is in the tables then, without tokens, which are never the same twice. It is undone.
async fn outcome(conn: &mut PgConnection, claim: &str) -> Vec<String> {
    sqlx::raw_sql("SAVEPOINT before").execute(&mut *conn).await.expect("marked");
    let mut found = Vec::new();
    for question in [
        format!(
            "SELECT (kind, ord, job, id, run, attempt, lane, stamp, keyed, created_at, due, metadata, explicit, slot_key)::text
                    || CASE kind WHEN 0 THEN token || (payload::jsonb - 'page')::text ELSE payload END FROM {claim} ORDER BY kind, ord, due, job"
        ),
        "SELECT (to_jsonb(r) - 'token')::text FROM warp.running r ORDER BY r.handle".to_owned(),
        "SELECT to_jsonb(r)::text FROM warp.ready r ORDER BY r.handle".to_owned(),
    ] {
        let rows = sqlx::query(AssertSqlSafe(question)).fetch_all(&mut *conn).await.unwrap_or_else(|error| panic!("{claim}: {error}"));
        found.extend(rows.iter().map(|row| row.get::<String, _>(0)));
        found.push("--".to_owned());
    }
    sqlx::raw_sql("ROLLBACK TO before").execute(&mut *conn).await.expect("undone");
    found
}

#[tokio::test]
async fn a_claim_finds_the_same_by_the_short_way_and_by_the_long_one() {
    let database = database();
    let mut conn = prepared(&database).await;
    let ready = |columns: &str, values: &str| {
        format!(
            "INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique{columns}) VALUES ({values});"
        )
    };
    let one = ready("", "1, 500, 500, 2, 0, 0, 0, 1, false");
    let scheduled = |due: i64| {
        format!(
            "INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique) \
             VALUES (5, {due}, 5, 1, 0, 0, 0, 0, false);"
        )
    };
    // What is there, and how many runs the claim starts.
    let cases = [
        ("nothing", String::new(), 0),
        ("one job", one.clone(), 1),
        ("one that has run before", ready(", stamp, settled, ticket", "2, 500, 500, 1, 3, 2, 1, 1, true, 2, 77, 8"), 1),
        ("one of a lane that the host does not serve", ready("", "1, 500, 500, 3, 0, 0, 0, 1, false"), 0),
        ("one in each lane", one.clone() + &ready("", "2, 400, 400, 1, 0, 0, 0, 1, false"), 2),
        ("two in one lane", one.clone() + &ready("", "2, 400, 400, 2, 0, 0, 0, 1, false"), 2),
        ("one that declared something", ready(", explicit", "1, 500, 500, 1, 0, 0, 0, 1, false, 1"), 0),
        ("a large one", ready(", bytes", "1, 500, 500, 1, 0, 0, 0, 1, false, 99999"), 1),
        ("one with a key", ready(", stamp, keys", "1, 500, 500, 1, 0, 0, 0, 1, false, 1, '{1}'"), 1),
        (
            "a reserved one",
            ready(", stamp, keys, ticket, parked_on", "1, 500, 500, 1, 0, 0, 0, 3, false, 1, '{1}', 5, 1")
                + "INSERT INTO warp.slot (key, number, job, stamped, since, token, host) VALUES (1, 0, 1, 1, 0, 1, NULL);",
            1,
        ),
        (
            "a reserved one beside a free one",
            {
                let reserved = ready(", stamp, keys, ticket, parked_on", "2, 500, 500, 2, 0, 0, 0, 3, false, 1, '{1}', 5, 1");
                reserved + &one + "INSERT INTO warp.slot (key, number, job, stamped, since, token, host) VALUES (1, 0, 2, 1, 0, 1, NULL);"
            },
            2,
        ),
        ("one that is due now", scheduled(1000), 1),
        ("one that is due later", one.clone() + &scheduled(1001), 1),
        ("a paused host", one.clone() + "UPDATE warp.host SET paused_at = 5, paused_by = 'x';", 0),
        ("a paused queue", one.clone() + "INSERT INTO warp.queue_pause (queue, paused_by, paused_at) VALUES ('r', 'x', 5);", 0),
        ("another queue paused", one.clone() + "INSERT INTO warp.queue_pause (queue, paused_by, paused_at) VALUES ('q', 'x', 5);", 1),
    ];
    for (name, change, starts) in cases {
        sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; {change}"))).execute(&mut conn).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (short, long) = (outcome(&mut conn, SHORT).await, outcome(&mut conn, LONG).await);
        sqlx::raw_sql("ROLLBACK").execute(&mut conn).await.expect("undone");
        assert_eq!(short, long, "{name}");
        let started = short.iter().take_while(|row| *row != "--").filter(|row| row.starts_with("(2,")).count();
        assert_eq!(started, starts, "{name}: {short:#?}");
    }
    // A job that somebody else is about to take is left to him, and nobody waits.
    sqlx::raw_sql(AssertSqlSafe(one)).execute(&mut conn).await.expect("enqueued");
    let mut other = connection(&database).await;
    sqlx::raw_sql("BEGIN; SELECT FROM warp.ready FOR UPDATE").execute(&mut other).await.expect("locked");
    sqlx::raw_sql("BEGIN; SET LOCAL lock_timeout = '10s'").execute(&mut conn).await.expect("begun");
    let (short, long) = (outcome(&mut conn, SHORT).await, outcome(&mut conn, LONG).await);
    assert_eq!(short, long);
    assert!(short[0].starts_with("(0,"), "{short:#?}");
    sqlx::raw_sql("ROLLBACK; DELETE FROM warp.host").execute(&mut conn).await.expect("gone");
    for claim in [SHORT, LONG] {
        let refused = sqlx::raw_sql(AssertSqlSafe(format!("SELECT * FROM {claim}"))).execute(&mut conn).await.expect_err("no such host");
        assert_eq!(refused.as_database_error().and_then(|error| error.code()).as_deref(), Some("WH001"), "{refused}");
    }
}

/// The functions for many are not there.
#[tokio::test]
async fn one_job_takes_the_short_way_from_its_enqueue_to_its_claim() {
    let database = Arc::new(tokio::task::spawn_blocking(database).await.expect("an empty database"));
    let store = Arc::new(another(&database, StatementMode::Prepared).await);
    let world = World::new(Subject { store, keep: Box::new(Arc::clone(&database)) });
    let host = world.host(&[plain("c")]).await;
    let mut conn = connection(&database).await;
    let away = "ALTER FUNCTION warp.exchange RENAME TO exchange_away; ALTER FUNCTION warp.enqueue_rows RENAME TO enqueue_rows_away";
    sqlx::raw_sql(away).execute(&mut conn).await.expect("renamed");
    let job = world.job("c", "{}");
    let verdicts = world.store.enqueue(vec![job.clone()], world.now()).await.expect("written");
    assert_eq!(verdicts, [EnqueueVerdict::Enqueued(job.id)]);
    let again = world.store.enqueue(vec![job.clone()], world.now()).await.expect("looked for");
    assert_eq!(again, [EnqueueVerdict::Duplicate(job.id)], "the same call again writes nothing");
    assert_eq!(world.claim_ids(&host, 16).await, [job.id]);
    assert_eq!(world.claim_ids(&host, 16).await, [], "it is there once");
    let many = vec![world.job("c", "{}"), world.job("c", "{}")];
    world.store.enqueue(many, world.now()).await.expect_err("two jobs take the way for many");
}
