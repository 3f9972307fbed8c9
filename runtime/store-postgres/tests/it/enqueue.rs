//! What goes in: many rows at once, callers that meet, and `warp.enqueue` in the transaction of whoever calls it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use sqlx::postgres::{PgConnection, PgListener};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use uuid::Uuid;
use warp_domain::ending::State;
use warp_domain::policy::{Concurrency, Declared, Mode, Retry, Timeout, TimeoutMode};
use warp_domain::{JobId, UnixMillis};
use warp_store::{EnqueueVerdict, NewJob, Store as _, codec};
use warp_store_postgres::{ConnectSettings, OpenOptions, PostgresStore, StatementMode};
use warp_store_tests::{Subject, World, mutex, plain};
use warp_test_servers::{Database, database};

use crate::conformance::another;

/// The longest that an announcement may take.
const PATIENCE: Duration = Duration::from_secs(30);

async fn world(database: &Database) -> World {
    let store = Arc::new(another(database, StatementMode::Prepared).await);
    World::new(Subject { store, keep: Box::new(()) })
}

async fn connection(database: &Database) -> PgConnection {
    PgConnection::connect(database.url()).await.expect("a connection")
}

/// The id that a call of `warp.enqueue` with these arguments answers.
async fn enqueue(conn: &mut PgConnection, arguments: &str) -> Result<JobId, String> {
    let row = sqlx::query(AssertSqlSafe(format!("SELECT warp.enqueue({arguments})"))).fetch_one(conn).await;
    match row {
        Ok(row) => Ok(JobId(row.get::<Uuid, _>(0).as_u128())),
        Err(sqlx::Error::Database(error)) => {
            assert_eq!(error.code().as_deref(), Some("WH002"), "{error}");
            Err(error.message().to_owned())
        }
        Err(error) => panic!("{arguments}: {error}"),
    }
}

/// Hears all that was announced so far: an announcement of ours comes behind it.
async fn heard(world: &World) {
    let (_, woken) = tokio::join!(world.enqueue_one("nobody's"), tokio::time::timeout(PATIENCE, world.store.changed()));
    assert!(woken.is_ok(), "an enqueue wakes whoever waits");
    while world.store.changed().now_or_never().is_some() {}
}

#[tokio::test]
async fn a_job_belongs_to_the_transaction_of_whoever_enqueues_it() {
    let database = database();
    let world = world(&database).await;
    let host = world.host(&[plain("mail")]).await;
    let mut ear = PgListener::connect(database.url()).await.expect("a connection");
    ear.listen("warp").await.expect("listening");
    let mut next = async || {
        let told = tokio::time::timeout(PATIENCE, ear.recv()).await.expect("told in time");
        told.expect("a notification").payload().to_owned()
    };
    let mut caller = connection(&database).await;
    // Rolled back with whatever the caller did beside it.
    sqlx::raw_sql("BEGIN").execute(&mut caller).await.expect("begun");
    let id = enqueue(&mut caller, r#"'mail', '{"to": "ada"}'"#).await.expect("taken");
    assert_eq!(world.claim_ids(&host, 5).await, [], "nobody sees it before the commit");
    sqlx::raw_sql("ROLLBACK").execute(&mut caller).await.expect("undone");
    assert_eq!(world.store.job(id, world.now()).await.expect("read"), None, "and nobody ever will");
    // Committed: whoever waits hears of it with the commit, and not before.
    sqlx::raw_sql("BEGIN").execute(&mut caller).await.expect("begun");
    let id = enqueue(&mut caller, r#"'mail', '{"to": "ada"}', queue => 'default'"#).await.expect("taken");
    let mut other = connection(&database).await;
    sqlx::raw_sql("NOTIFY warp, 'in between'").execute(&mut other).await.expect("told");
    sqlx::raw_sql("COMMIT").execute(&mut caller).await.expect("committed");
    assert_eq!((next().await.as_str(), next().await.as_str()), ("in between", "default"), "nothing was told of what was rolled back");
    assert_eq!(world.claim_ids(&host, 5).await, [id]);
    // So does an idle host, though nobody polls.
    heard(&world).await;
    sqlx::raw_sql("BEGIN").execute(&mut caller).await.expect("begun");
    let id = enqueue(&mut caller, r#"'mail', '{"to": "eve"}'"#).await.expect("taken");
    let (_, woken) = tokio::join!(sqlx::raw_sql("COMMIT").execute(&mut caller), tokio::time::timeout(PATIENCE, world.store.changed()));
    assert!(woken.is_ok(), "the commit wakes whoever waits");
    assert_eq!(world.claim_ids(&host, 5).await, [id]);
}

#[tokio::test]
async fn everything_that_sql_says_stands_on_the_job() {
    let database = database();
    let world = world(&database).await;
    let mut caller = connection(&database).await;
    let payload = "{ \"ключ\":[1,2.50] }";
    let arguments = format!(
        r#"contract => 'résumé', payload => '{payload}', queue => 'night', metadata => '[["z","1"],["a",""],["z","2"]]', unique_key => 'einmal',
           trace_parent => '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01', due => now() + interval '1 hour',
           policy => '{{"timeout": {{"per_attempt_ms": 5000}}, "retry": {{"max": 3, "delays_ms": [1000, 60000], "jitter_permille": 100}},
                       "concurrency": {{"kind": "mutex", "keys": ["k:{{n}}"]}}}}'"#
    );
    let id = enqueue(&mut caller, &arguments).await.expect("taken");
    let details = world.details(id).await;
    assert_eq!((details.summary.contract.as_str(), details.summary.queue.as_str()), ("résumé", "night"));
    assert_eq!((details.summary.state, details.payload.as_str()), (State::Scheduled, payload));
    let pairs = [("z", "1"), ("a", ""), ("z", "2")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(details.metadata, pairs);
    assert_eq!(details.unique_key.as_deref(), Some("einmal"));
    assert_eq!(details.trace_parent.as_deref(), Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
    let explicit = Declared {
        concurrency: Some(Concurrency { mode: Mode::Skip, ..mutex(&["k:{n}"]) }),
        retry: Some(Retry { max: 3, delays: vec![Duration::from_secs(1), Duration::from_secs(60)], jitter_permille: 100 }),
        timeout: Some(Timeout { per_attempt: Duration::from_secs(5), mode: TimeoutMode::Fail }),
    };
    assert_eq!(details.explicit, explicit, "what is left out is what a manifest means by leaving it out");
    let (version, variant) = ((id.0 >> 76) & 0xf, (id.0 >> 62) & 0b11);
    assert_eq!((version, variant), (7, 0b10), "{id} is a UUIDv7");
    let created = i64::try_from(id.0 >> 80).expect("48 bits");
    assert_eq!(created, details.summary.created_at.0);
    // The same policy in the text that the hosts write, whose number it then shares.
    let stored = codec::encode_declared(&explicit).replace('\'', "''");
    let again = enqueue(&mut caller, &format!("'c', '1'::jsonb, policy => '{stored}'")).await.expect("taken");
    assert_eq!(world.details(again).await.explicit, explicit);
    assert_eq!(enqueue(&mut caller, "'other', '1'::json, unique_key => 'einmal'").await, Ok(id), "there is one already");
}

#[tokio::test]
async fn sql_is_refused_what_hosts_are_refused_in_the_same_words() {
    let database = database();
    let world = world(&database).await;
    let mut caller = connection(&database).await;
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let long = "x".repeat(201);
    let large = format!("\"{}\"", "x".repeat((10 << 20) - 1));
    // Contract, queue, payload, unique key.
    for (contract, queue, payload, unique) in [
        ("", "q", "1", None),
        (long.as_str(), "q", "1", None),
        ("a\u{1}\"b", "q", "1", None),
        ("a\u{7f}", "q", "1", None),
        ("c", "", "1", None),
        ("c", "tab\t\\", "1", None),
        ("c", "q", "1", Some("nel\u{85}")),
        ("c", "q", "1", Some("")),
        ("c", "q", r#"{"a": "\u0000"}"#, None),
        ("c", "q", r#"{"a": "\\\u0000"}"#, None),
        ("c", "q", large.as_str(), None),
        ("c", "q", &deep(128), None),
        ("c", "q", &format!(r#"["\"[[", {}]"#, deep(127)), None),
        ("c", "q", &"[".repeat(100_000), None),
    ] {
        let job = NewJob {
            contract: contract.to_owned(),
            queue: queue.to_owned(),
            unique_key: unique.map(str::to_owned),
            ..world.job("c", payload)
        };
        let why = codec::check_new_job(&job).expect_err("hosts refuse it");
        let call =
            sqlx::query("SELECT warp.enqueue($1, $2::text, $3, unique_key => $4)").bind(contract).bind(payload).bind(queue).bind(unique);
        match call.fetch_one(&mut caller).await {
            Err(sqlx::Error::Database(error)) => {
                assert_eq!((error.code().as_deref(), error.message()), (Some("WH002"), why.as_str()));
            }
            other => panic!("{why}: {other:?}"),
        }
    }
    for text in ["{", "", "nul", r#""\ud800""#, "1e400", "[1] 2", "{\"a\" 1}"] {
        let why = enqueue(&mut caller, &format!("'c', '{text}'")).await.expect_err("no host can parse it");
        assert!(why.starts_with("the payload is not JSON: "), "{text}: {why}");
        assert!(codec::JsonPayload::parse(text).is_err(), "{text}: hosts would have taken it");
    }
    for fits in [deep(127), format!("\"{}\"", "x".repeat((10 << 20) - 2)), r#"["\\u0000", "[[["]"#.to_owned(), "1e308".to_owned()] {
        let call = sqlx::query("SELECT warp.enqueue('c', $1::text)").bind(&fits);
        call.fetch_one(&mut caller).await.unwrap_or_else(|error| panic!("{:.40}: {error}", fits));
        assert!(codec::JsonPayload::parse(&fits).is_ok(), "{fits:.40}");
    }
    for (arguments, why) in [
        ("'c', NULL", "the payload is not JSON: it is NULL"),
        ("'c', '1', due => 'infinity'", "the due time is infinite"),
        ("'c', '1', metadata => '7'", "the metadata is neither an object nor a list of pairs"),
        ("'c', '1', metadata => '{\"a\": 1}'", "the metadata value of \"a\" is not a text"),
        ("'c', '1', metadata => '{\"\": \"x\"}'", "the metadata name is empty"),
        ("'c', '1', policy => '[]'", "the policy is not an object"),
        ("'c', '1', policy => '{\"mutex\": {}}'", "the policy has no family \"mutex\"; one of concurrency, retry, timeout is expected"),
        ("'c', '1', policy => '{\"retry\": {\"max\": -1}}'", "the policy's \"max\" must be a whole number from 0 to 4294967295"),
        ("'c', '1', policy => '{\"timeout\": {\"per_attempt_ms\": 1, \"x\": 1}}'", "the policy's \"timeout\" has no \"x\""),
        (
            "'c', '1', policy => '{\"concurrency\": {\"kind\": \"mutex\", \"keys\": [\"{\"]}}'",
            "the policy's \"keys\" must be a list of key templates, such as \"account:{id}\"",
        ),
    ] {
        assert_eq!(enqueue(&mut caller, arguments).await, Err(why.to_owned()), "{arguments}");
    }
}

/// A host sleeps until the next due time that it knows. So an earlier one is news, a later one is not.
#[tokio::test]
async fn an_earlier_due_time_is_announced_and_a_later_one_is_not() {
    let database = database();
    let world = world(&database).await;
    let mut listener = PgListener::connect(database.url()).await.expect("a connection");
    listener.listen("warp").await.expect("listening");
    let mut expected = Vec::new();
    for (queue, seconds, is_news) in [("a", 60, true), ("b", 90, false), ("c", 30, true), ("d", 60, false), ("e", 29, true), ("f", 0, true)]
    {
        let due = (seconds > 0).then(|| world.in_seconds(seconds));
        world.enqueue(vec![NewJob { queue: queue.to_owned(), due, ..world.job("c", "1") }]).await;
        expected.extend(is_news.then_some(queue));
    }
    // What is due within a second may be about to be activated, and the host's knowledge with it.
    world.enqueue(vec![NewJob { due: Some(world.now().after(Duration::from_millis(500))), ..world.job("c", "1") }]).await;
    world.enqueue(vec![NewJob { queue: "g".to_owned(), due: Some(world.in_seconds(20)), ..world.job("c", "1") }]).await;
    expected.extend(["default", "g"]);
    let mut heard = Vec::new();
    while heard.len() < expected.len() {
        let told = tokio::time::timeout(PATIENCE, listener.recv()).await.unwrap_or_else(|_| panic!("heard {heard:?} of {expected:?}"));
        heard.push(told.expect("a notification").payload().to_owned());
    }
    assert_eq!(heard, expected);
}

/// One batch tells each queue once.
#[tokio::test]
async fn a_batch_is_announced_once_for_each_queue() {
    let database = database();
    let world = world(&database).await;
    let mut listener = PgListener::connect(database.url()).await.expect("a connection");
    listener.listen("warp").await.expect("listening");
    let jobs = (0..300).map(|at| NewJob { queue: format!("q{}", at % 3), ..world.job(&format!("c{}", at % 7), "1") });
    world.enqueue(jobs.collect()).await;
    world.enqueue(vec![NewJob { queue: "last".to_owned(), ..world.job("c", "1") }]).await;
    let mut heard = Vec::new();
    while heard.last().is_none_or(|queue| queue != "last") {
        heard.push(tokio::time::timeout(PATIENCE, listener.recv()).await.expect("told").expect("a notification").payload().to_owned());
    }
    heard.sort_unstable();
    assert_eq!(heard, ["last", "q0", "q1", "q2"]);
}

/// The second of two transactions in a row may leave its word to the process: which keeps it, whether or not somebody
/// drops the store, and before the end of a program that asks.
#[tokio::test]
async fn what_a_burst_leaves_unsaid_is_said_after_it() {
    let database = database();
    let mut listener = PgListener::connect(database.url()).await.expect("a connection");
    let world = world(&database).await;
    listener.listen("warp").await.expect("listening");
    // In a queue that nobody has announced yet the first of the two is told by its own transaction.
    let mut said_twice = async |queue: &str| {
        for time in 1..=2 {
            let told = tokio::time::timeout(PATIENCE, listener.recv()).await.unwrap_or_else(|_| panic!("{queue}: {time} of 2"));
            assert_eq!(told.expect("a notification").payload(), queue);
        }
    };
    let twice = async |world: &World, queue: &str| {
        for _ in 0..2 {
            world.enqueue(vec![NewJob { queue: queue.to_owned(), ..world.job("c", "1") }]).await;
        }
    };
    for queue in ["a", "b", "c", "d", "e"] {
        twice(&world, queue).await;
        said_twice(queue).await;
    }
    twice(&world, "dropped").await;
    drop(world);
    said_twice("dropped").await;
    let url = database.url().to_owned();
    let program = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let options = OpenOptions { hosting: false, ..OpenOptions::new(ConnectSettings::new(url)) };
            let store = PostgresStore::open(options).await.expect("opened");
            let job = |at: u128| NewJob {
                id: JobId((1 << 120) + at),
                contract: "c".to_owned(),
                queue: "program".to_owned(),
                payload: "1".to_owned(),
                metadata: Vec::new(),
                trace_parent: None,
                due: None,
                explicit: Declared::default(),
                unique_key: None,
            };
            let (one, other) = tokio::join!(store.enqueue(vec![job(1)], UnixMillis(0)), store.enqueue(vec![job(2)], UnixMillis(0)));
            assert_eq!(one.expect("enqueued"), [EnqueueVerdict::Enqueued(job(1).id)]);
            assert_eq!(other.expect("enqueued"), [EnqueueVerdict::Enqueued(job(2).id)]);
            store.flush().await;
        });
    };
    tokio::task::spawn_blocking(program).await.expect("a program");
    said_twice("program").await;
}

/// More rows than one statement takes, a repeat of them all, and both mixed with unique keys: verdicts in order.
#[tokio::test]
async fn many_rows_have_their_verdicts_in_order() {
    let database = database();
    let world = world(&database).await;
    let jobs: Vec<_> = (0..12_345).map(|at| world.job("c", &format!("{at}"))).collect();
    let written: Vec<_> = jobs.iter().map(|job| EnqueueVerdict::Enqueued(job.id)).collect();
    assert_eq!(world.store.enqueue(jobs.clone(), world.now()).await.expect("enqueue"), written);
    let there: Vec<_> = jobs.iter().map(|job| EnqueueVerdict::Duplicate(job.id)).collect();
    assert_eq!(world.store.enqueue(jobs.clone(), world.now()).await.expect("enqueue"), there);
    let host = world.host(&[plain("c")]).await;
    assert_eq!(world.claim_ids(&host, 3).await, [jobs[0].id, jobs[1].id, jobs[2].id], "in the order of the call");
    // New ids, one that is there, one that comes twice, and a unique key in every second.
    let mut mixed: Vec<_> =
        (0..40).map(|at| NewJob { unique_key: (at % 2 == 0).then(|| format!("u{}", at / 4)), ..world.job("c", "1") }).collect();
    mixed[5].id = jobs[7].id;
    mixed[9].id = mixed[3].id;
    // Its key belongs to the first of its pair; so this id is not taken, and the next may have it.
    mixed[11].id = mixed[10].id;
    let verdicts = world.store.enqueue(mixed.clone(), world.now()).await.expect("enqueue");
    for (at, verdict) in verdicts.iter().enumerate() {
        let expected = match at {
            5 => EnqueueVerdict::Duplicate(jobs[7].id),
            9 => EnqueueVerdict::Duplicate(mixed[3].id),
            _ if at % 4 == 2 => EnqueueVerdict::Duplicate(mixed[at - 2].id),
            _ => EnqueueVerdict::Enqueued(mixed[at].id),
        };
        assert_eq!(*verdict, expected, "row {at}");
    }
}

/// Batches that want the same unique keys and the same ids, in opposite orders and at once: nobody is refused because of
/// the others, and each key and each id has one job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_that_meet_agree() {
    let database = database();
    let world = Arc::new(world(&database).await);
    let shared: Vec<_> = (0..30).map(|_| world.job("c", "1")).collect();
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let (world, mut jobs) = (world.clone(), shared.clone());
            jobs.extend((0..30).map(|at| NewJob { unique_key: Some(format!("u{at}")), ..world.job("c", "1") }));
            if caller % 2 == 1 {
                jobs.reverse();
            }
            tokio::spawn(async move {
                let mut verdicts = Vec::new();
                for _ in 0..5 {
                    verdicts.extend(world.store.enqueue(jobs.clone(), world.now()).await.expect("enqueue"));
                }
                verdicts
            })
        })
        .collect();
    let (mut written, mut named) = (Vec::new(), Vec::new());
    for caller in callers {
        for verdict in caller.await.expect("a caller") {
            match verdict {
                EnqueueVerdict::Enqueued(id) => written.push(id),
                EnqueueVerdict::Duplicate(id) => named.push(id),
                EnqueueVerdict::Refused(why) => panic!("{why}"),
            }
        }
    }
    written.sort_unstable();
    assert_eq!(written.len(), 60, "30 ids and 30 keys");
    assert!(written.windows(2).all(|pair| pair[0] < pair[1]), "each once");
    assert!(named.iter().all(|id| written.binary_search(id).is_ok()), "whoever was in the way is there");
}
