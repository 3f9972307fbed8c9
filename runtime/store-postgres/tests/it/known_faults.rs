//! What others were hurt by, and what keeps it from happening here: `runtime/docs/known-faults.md` lists it all by its
//! number in our collection (A1 to A30) with the test of each, and the first test below checks that page. The tests here
//! carry that number in their names; they are those that nothing else covers.
//!
//! What must stay true: nothing here waits for a time to pass, and no figure of speed is asserted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use warp_domain::ending::State;
use warp_domain::policy::Declared;
use warp_domain::resolve::Declarations;
use warp_store::{ClaimParams, EnqueueVerdict, ExchangeParams, HandOff, NewJob, Settle, SettleVerdict, StateChange, StateWrite, Store};
use warp_store_postgres::{ConnectSettings, StatementMode};
use warp_store_tests::{Host, Subject, World, done, gated, mutex, plain, semaphore, settle};
use warp_test_servers::{Database, PgBouncer, PoolMode, database};

use crate::conformance::another;
use crate::faults::{ELSEWHERE, number, open, until_zero};

/// A world on this database.
async fn world(connect: ConnectSettings) -> World {
    let store: Arc<dyn Store> = Arc::new(open(connect).await);
    World::new(Subject { store, keep: Box::new(()) })
}

async fn world_on(database: &Database) -> World {
    world(ConnectSettings::new(database.url())).await
}

async fn connection(database: &Database) -> PgConnection {
    PgConnection::connect(database.url()).await.expect("a connection")
}

/// A job with these fields of its payload.
fn with(world: &World, contract: &str, fields: &str) -> NewJob {
    world.job(contract, &format!("{{{fields}}}"))
}

/// Every row of the page, every test that it names is there, and every test here is on it.
#[test]
fn the_page_of_known_faults_names_tests_that_exist() {
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(runtime.join("docs/known-faults.md")).expect("the page");
    let rows: BTreeMap<&str, &str> = page.lines().filter_map(|line| line.strip_prefix("| A")?.split_once(" |")).collect();
    let numbers: Vec<String> = (1..=30).map(|number| number.to_string()).collect();
    assert!(numbers.iter().all(|number| rows.contains_key(number.as_str())) && rows.len() == 30, "rows: {:?}", rows.keys());
    for (number, row) in &rows {
        // `crate/path.rs::function`, or `command`.
        for named in row.split('`').skip(1).step_by(2).filter(|named| named.contains(".rs::")) {
            let (file, function) = named.split_once("::").expect("a file and a function");
            let text = std::fs::read_to_string(runtime.join(file)).unwrap_or_else(|error| panic!("A{number}: {file}: {error}"));
            assert!(text.contains(&format!("fn {function}(")), "A{number}: there is no {function} in {file}");
        }
    }
    let here: PathBuf = runtime.join("store-postgres/tests/it/known_faults.rs");
    let text = std::fs::read_to_string(here).expect("this file");
    for function in text.lines().filter_map(|line| line.strip_prefix("async fn a")?.split_once('(').map(|(name, _)| format!("a{name}"))) {
        let number = function[1..3].parse::<u32>();
        if let Ok(number) = number {
            assert!(rows[number.to_string().as_str()].contains(&function), "A{number} does not name {function}");
        }
    }
}

#[tokio::test]
async fn a01_ten_thousand_waiters_are_refused_once_each() {
    let database = database();
    let world = world_on(&database).await;
    let host = world.host(&[gated("ten", 1, semaphore("k", 10)), plain("free")]).await;
    world.enqueue_many("ten", 10_000).await;
    let (mut held, mut parked, mut again) = (Vec::new(), 0, 0);
    let mut count = async |settles, held: &mut Vec<_>| {
        let exchanged = world.exchange(&host, settles, 16).await;
        parked += exchanged.parked;
        again += exchanged.parked_again;
        held.extend(exchanged.claimed);
        exchanged.more
    };
    while count(Vec::new(), &mut held).await {}
    assert_eq!(held.len(), 10);
    // They pass the slots on, and nobody is refused again.
    for _ in 0..50 {
        let ends = held.drain(..).map(|run| settle(&run, done())).collect();
        count(ends, &mut held).await;
        assert_eq!(held.len(), 10);
    }
    assert_eq!((parked, again), (9_990, 0));
    assert_eq!(world.counter("stats:requeued:concurrency").await, 9_990);
    // Others start at once behind all of them.
    let free = world.enqueue_one("free").await;
    assert_eq!(world.claim_ids(&host, 1).await, [free]);
}

#[tokio::test]
async fn a03_a_claim_reads_what_it_takes_whatever_the_statistics_say() {
    let database = database();
    let world = world_on(&database).await;
    let host = world.host(&[gated("gated", 1, mutex(&["{k}"])), plain("free")]).await;
    world.enqueue((0..12_000).map(|at| with(&world, "gated", &format!(r#""k":{}"#, at % 115))).collect()).await;
    while world.exchange(&host, Vec::new(), 256).await.more {}
    world.enqueue_many("free", 36).await;
    let mut eyes = connection(&database).await;
    for statistics in ["", "ANALYZE", "DELETE FROM pg_statistic"] {
        sqlx::raw_sql(AssertSqlSafe(statistics)).execute(&mut eyes).await.expect("statistics");
        let claim = crate::faults::claim_statement(&mut eyes, &host, world.now(), "free", 36).await;
        sqlx::raw_sql("BEGIN").execute(&mut eyes).await.expect("begun");
        let claimed = sqlx::raw_sql(AssertSqlSafe(claim)).fetch_all(&mut eyes).await.expect("a claim").len();
        let read = "FROM pg_stat_xact_user_tables WHERE schemaname = 'warp' AND relname IN ('ready', 'waiting', 'running', 'job', 'slot')";
        let sequential = number(&mut eyes, &format!("SELECT sum(seq_tup_read)::int8 {read}")).await;
        let indexed = number(&mut eyes, &format!("SELECT sum(idx_tup_fetch)::int8 {read}")).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut eyes).await.expect("undone");
        // The runs and the summary.
        assert_eq!(claimed, 37, "after `{statistics}`");
        assert_eq!(sequential, 0, "rows read one after another, after `{statistics}`");
        assert!(indexed < 36 * 20, "{indexed} rows fetched for 36 runs, after `{statistics}`");
    }
}

/// Many claimers of a few keys, none of whose commits is prompt. Counts who holds what between a claim's answer and the
/// sending of the end.
async fn crowd(connect: ConnectSettings, database: &Database) {
    const CLAIMERS: usize = 64;
    const LIMITS: [u32; 3] = [1, 2, 3];
    let world = world(connect).await;
    // A commit in eight is held up, after everything has been decided.
    database
        .execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF NEW.handle % 8 = 0 THEN PERFORM pg_sleep(random() * 0.02); END IF; RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON warp.running DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()",
        )
        .expect("slow commits");
    let declared: Vec<_> = LIMITS.iter().map(|limit| gated(&format!("c{limit}"), 1, semaphore(&format!("k{limit}"), *limit))).collect();
    let hosts: Vec<Host> = join_all((0..CLAIMERS).map(|_| world.host(&declared))).await;
    let jobs = world.enqueue((0..600).map(|at| world.job(&format!("c{}", LIMITS[at % 3]), "{}")).collect()).await;
    let (holding, most) = ([const { AtomicU32::new(0) }; 3], [const { AtomicU32::new(0) }; 3]);
    let ended = AtomicU32::new(0);
    let claimer = async |host: &Host| {
        let mut runs: Vec<warp_store::Claimed> = Vec::new();
        while ended.load(Ordering::SeqCst) < 600 {
            let ends = runs.drain(..).map(|run| settle(&run, done())).collect::<Vec<_>>();
            let count = ends.len() as u32;
            runs = world.exchange(host, ends, 2).await.claimed;
            ended.fetch_add(count, Ordering::SeqCst);
            let at = |run: &warp_store::Claimed| {
                LIMITS.iter().position(|limit| run.lane.declarations.contract == format!("c{limit}")).expect("a contract")
            };
            for run in &runs {
                let now = holding[at(run)].fetch_add(1, Ordering::SeqCst) + 1;
                most[at(run)].fetch_max(now, Ordering::SeqCst);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            for run in &runs {
                holding[at(run)].fetch_sub(1, Ordering::SeqCst);
            }
        }
    };
    join_all(hosts.iter().map(claimer)).await;
    let most = most.map(|most| most.load(Ordering::SeqCst));
    assert!(most.iter().zip(LIMITS).all(|(most, limit)| *most <= limit), "most at once: {most:?} of {LIMITS:?}");
    assert!(most[2] > 1, "nobody ran beside another, so this test shows nothing");
    for id in jobs {
        assert_eq!(world.state(id).await, State::Completed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a05_sixty_four_claimers_with_slow_commits_never_exceed_a_limit() {
    let database = database();
    crowd(ConnectSettings { pool: 16, ..ConnectSettings::new(database.url()) }, &database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a14_limits_hold_behind_a_transaction_pooler() {
    let database = database();
    let pooler = PgBouncer::in_front_of(database.url()).mode(PoolMode::Transaction).pool_size(12).start().expect("a pooler");
    let connect = ConnectSettings { pool: 16, ..ConnectSettings::new(pooler.url(database.name())) };
    crowd(connect, &database).await;
}

#[tokio::test]
async fn a07_a_batch_of_five_hundred_brings_one_job_of_a_key() {
    let database = database();
    let world = world_on(&database).await;
    let host = world.host(&[gated("alone", 1, mutex(&["k"]))]).await;
    let jobs = world.enqueue_many("alone", 1_000).await;
    let mut order = Vec::new();
    let mut held: Vec<warp_store::Claimed> = Vec::new();
    loop {
        let ends = held.drain(..).map(|run| settle(&run, done())).collect();
        let exchanged = world.exchange(&host, ends, 500).await;
        assert!(exchanged.claimed.len() <= 1, "{} at once", exchanged.claimed.len());
        held = exchanged.claimed;
        order.extend(held.iter().map(|run| run.id));
        if held.is_empty() && !exchanged.more {
            break;
        }
    }
    order.sort_unstable();
    assert_eq!(order, jobs);
}

#[tokio::test]
async fn a09_a_free_slot_is_used_while_another_is_held_for_long() {
    let database = database();
    let world = world_on(&database).await;
    let host = world.host(&[gated("two", 1, semaphore("k", 2))]).await;
    let jobs = world.enqueue_many("two", 21).await;
    let mut claimed = world.claim(&host, 8).await;
    assert_eq!(claimed.len(), 2);
    let _long = claimed.remove(0);
    // Neither a renewal nor a poll comes to help: each end brings the next.
    for _ in 0..19 {
        claimed = world.exchange(&host, vec![settle(&claimed[0], done())], 8).await.claimed;
        assert_eq!(claimed.len(), 1, "the next one waits beside a free slot");
    }
    world.complete(&host, &claimed[0]).await;
    assert_eq!(world.counter("stats:succeeded").await, jobs.len() as i64 - 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a11_trades_in_opposite_directions_meet_no_deadlock() {
    let database = database();
    let watcher = another(&database, StatementMode::Simple).await;
    let world = world(ConnectSettings { pool: 8, ..ConnectSettings::new(database.url()) }).await;
    let trade = [gated("trade", 1, mutex(&["{from}", "{to}"]))];
    let hosts = join_all((0..8).map(|_| world.host(&trade))).await;
    let pairs = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "a")];
    let trades = (0..120).map(|at| with(&world, "trade", &format!(r#""from":"{}","to":"{}""#, pairs[at % 4].0, pairs[at % 4].1))).collect();
    world.enqueue(trades).await;
    let ended = AtomicU32::new(0);
    join_all(hosts.iter().map(async |host| {
        let mut runs: Vec<warp_store::Claimed> = Vec::new();
        while ended.load(Ordering::SeqCst) < 120 {
            let ends = runs.drain(..).map(|run| settle(&run, done())).collect::<Vec<_>>();
            let count = ends.len() as u32;
            runs = world.exchange(host, ends, 4).await.claimed;
            ended.fetch_add(count, Ordering::SeqCst);
        }
    }))
    .await;
    for (from, to) in [("a", "c"), ("c", "a")] {
        assert_keys_are_locked_in_their_order(&world, &hosts[0], &database, from, to).await;
    }
    drop((world, watcher));
    // The last session to end has told what it counted.
    let mut eyes = connection(&database).await;
    until_zero(&mut eyes, &format!("SELECT count(*) FROM pg_stat_activity WHERE {ELSEWHERE}")).await;
    assert_eq!(number(&mut eyes, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").await, 0);
}

/// Waits until a call waits for a lock.
async fn until_somebody_waits<T>(eyes: &mut PgConnection, calling: &tokio::task::JoinHandle<T>) {
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let begun = Instant::now();
    while number(eyes, waits).await == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20) && !calling.is_finished(), "the call does not wait for the lock");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A deadlock needs two who come within microseconds of each other, so the order itself is looked at: a claim that waits
/// for the first of its keys holds no later one.
async fn assert_keys_are_locked_in_their_order(world: &World, host: &Host, database: &Database, from: &str, to: &str) {
    world.enqueue(vec![with(world, "trade", &format!(r#""from":"{from}","to":"{to}""#))]).await;
    let (mut holder, mut eyes) = (connection(database).await, connection(database).await);
    sqlx::raw_sql("BEGIN; SELECT FROM warp.conc_key WHERE id = (SELECT min(id) FROM warp.conc_key WHERE key IN ('a', 'c')) FOR UPDATE")
        .execute(&mut holder)
        .await
        .expect("a lock");
    let claim = ClaimParams { lanes: host.lanes.clone(), max: 1 };
    let params =
        ExchangeParams { host: host.id, now: world.now(), settles: Arc::new([]), claim: Some(claim), hand_off: HandOff::default() };
    let store = world.store.clone();
    let claiming = tokio::spawn(async move { store.exchange(params).await });
    until_somebody_waits(&mut eyes, &claiming).await;
    let free = "WITH k AS (SELECT FROM warp.conc_key WHERE id = (SELECT max(id) FROM warp.conc_key WHERE key IN ('a', 'c')) FOR UPDATE SKIP LOCKED)
                SELECT count(*) FROM k";
    assert_eq!(number(&mut eyes, free).await, 1, "from {from} to {to}: the later key was locked first");
    sqlx::raw_sql("COMMIT").execute(&mut holder).await.expect("let go");
    let claimed = claiming.await.expect("a task").expect("a claim").claimed;
    assert_eq!(claimed.len(), 1);
    world.complete(host, &claimed[0]).await;
}

/// Runs that nothing keeps apart write the same values. A batch that locked them end by end would wait, with some of them
/// locked, for another batch that does the same in another order; so it is looked at whether it does.
#[tokio::test]
async fn a11_a_batch_locks_all_shared_state_that_it_writes_in_one_order() {
    let database = database();
    let world = world_on(&database).await;
    let host = world.host(&[plain("write")]).await;
    let (mut holder, mut eyes) = (connection(&database).await, connection(&database).await);
    let mut names = Vec::new();
    for key in ["x", "y"] {
        names.push((number(&mut eyes, &format!("SELECT warp.state_lock('purses', '{key}')")).await, key));
    }
    names.sort_unstable();
    let [(first, low), (last, high)] = names[..] else { unreachable!() };
    world.enqueue_many("write", 2).await;
    let runs = world.exchange(&host, Vec::new(), 2).await.claimed;
    let put = |key: &str| StateWrite { bucket: "purses".to_owned(), key: key.to_owned(), change: StateChange::Put(Some("1".to_owned())) };
    let ends = runs.iter().zip([high, low]).map(|(run, key)| Settle { state: vec![put(key)], ..settle(run, done()) });
    let settles: Vec<Settle> = ends.collect();
    sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; SELECT pg_advisory_xact_lock({first})"))).execute(&mut holder).await.expect("a lock");
    let params = ExchangeParams { host: host.id, now: world.now(), settles: settles.into(), claim: None, hand_off: HandOff::default() };
    let store = world.store.clone();
    let settling = tokio::spawn(async move { store.exchange(params).await });
    until_somebody_waits(&mut eyes, &settling).await;
    let free = format!("SELECT pg_try_advisory_xact_lock({last})::int::bigint");
    assert_eq!(number(&mut eyes, &free).await, 1, "it waits for the first name and holds the last");
    sqlx::raw_sql("COMMIT").execute(&mut holder).await.expect("the end");
    let settled = settling.await.expect("no panic").expect("it settles").settled;
    assert_eq!(settled, [SettleVerdict::Settled; 2]);
}

#[tokio::test]
async fn a13_a_rescue_is_not_stopped_by_a_unique_key() {
    let database = database();
    let world = world_on(&database).await;
    let (dead, other) = (world.host(&[plain("c")]).await, world.host(&[plain("c")]).await);
    let unique = |world: &World| NewJob { unique_key: Some("the one".to_owned()), ..world.job("c", "{}") };
    let old = world.enqueue(vec![unique(&world)]).await[0];
    world.enqueue_many("c", 99).await;
    assert_eq!(world.claim(&dead, 100).await.len(), 100);
    // While the old one lives there can be no twin, so its return finds its key its own.
    let twin = async || world.store.enqueue(vec![unique(&world)], world.now()).await.expect("an answer");
    assert_eq!(twin().await, [EnqueueVerdict::Duplicate(old)]);
    assert_eq!(world.rescue(&dead).await.requeued, 100);
    assert_eq!(twin().await, [EnqueueVerdict::Duplicate(old)]);
    assert_eq!(world.drain(&other).await.len(), 100);
    assert!(matches!(twin().await[..], [EnqueueVerdict::Enqueued(_)]));
}

#[tokio::test]
async fn a17_one_key_in_two_schemas_is_two_keys() {
    let database = database();
    let other = ConnectSettings { schema: "other".to_owned(), ..ConnectSettings::new(database.url()) };
    let (one, two) = (world_on(&database).await, world(other).await);
    for world in [&one, &two] {
        let host = world.host(&[gated("alone", 1, mutex(&["k"]))]).await;
        world.enqueue_many("alone", 2).await;
        assert_eq!(world.claim(&host, 2).await.len(), 1);
    }
    // A host of the same number in the other schema is another one: its rescue takes nothing away here.
    let host = one.store.hosts().await.expect("hosts")[0].host;
    let seen = two.store.hosts().await.expect("hosts").remove(0);
    assert_eq!(seen.host, host);
    two.store.rescue(seen.host, seen.renewals, 5, two.now()).await.expect("a rescue");
    assert_eq!((one.holders("k").await.len(), two.holders("k").await.len()), (1, 0));
}

#[tokio::test]
async fn a18_a_claim_that_is_given_up_holds_nothing() {
    let database = database();
    let connect = ConnectSettings { statement_timeout: Duration::from_millis(25), ..ConnectSettings::new(database.url()) };
    let world = world_on(&database).await;
    let hasty: Arc<dyn Store> = Arc::new(open(connect).await);
    let host = world.host(&[gated("alone", 1, mutex(&["k"]))]).await;
    let job = world.enqueue_many("alone", 1).await;
    // Known to the key from its first start on.
    let run = world.claim_one(&host).await;
    world.end(&host, &run, warp_store_tests::hand_back()).await;
    let mut eyes = connection(&database).await;
    for _ in 0..20 {
        sqlx::raw_sql("BEGIN; SELECT FROM warp.conc_key FOR UPDATE").execute(&mut eyes).await.expect("a lock");
        let claim = ClaimParams { lanes: host.lanes.clone(), max: 1 };
        let params =
            ExchangeParams { host: host.id, now: world.now(), settles: Arc::new([]), claim: Some(claim), hand_off: HandOff::default() };
        hasty.exchange(params).await.expect_err("the key is held by somebody else");
        sqlx::raw_sql("COMMIT").execute(&mut eyes).await.expect("let go");
        assert_eq!(number(&mut eyes, "SELECT count(*) FROM warp.slot").await, 0);
        assert_eq!(number(&mut eyes, "SELECT count(*) FROM warp.running").await, 0);
    }
    assert_eq!(world.claim_ids(&host, 1).await, job);
}

#[tokio::test]
async fn a27_an_announcement_is_the_name_of_a_queue_and_comes_once() {
    let database = database();
    let world = world_on(&database).await;
    let mut listener = PgListener::connect(database.url()).await.expect("a connection");
    listener.listen("warp").await.expect("listens");
    let long = "q".repeat(200);
    let queues = ["default", long.as_str()];
    let jobs =
        (0..2_000).map(|at| NewJob { queue: queues[at % 2].to_owned(), ..with(&world, "c", &format!(r#""x":"{}""#, "x".repeat(500))) });
    world.enqueue(jobs.collect()).await;
    database.execute("NOTIFY warp, 'the end'").expect("told");
    let mut heard: BTreeMap<String, u32> = BTreeMap::new();
    loop {
        let said = listener.recv().await.expect("an announcement").payload().to_owned();
        if said == "the end" {
            break;
        }
        *heard.entry(said).or_default() += 1;
    }
    assert!(heard.keys().all(|name| queues.contains(&name.as_str())) && heard.len() == 2, "{heard:?}");
    // Once for each statement, and 2,000 jobs are not 2,000 statements.
    assert!(heard.values().all(|count| *count <= 20), "{heard:?}");
}

/// Commits that announce something take turns in the whole cluster, so a burst must not consist of them.
#[tokio::test(flavor = "multi_thread")]
async fn a27_a_burst_of_enqueues_is_announced_now_and_then() {
    let database = database();
    let world = Arc::new(world_on(&database).await);
    world.enqueue_many("c", 1).await;
    let mut listener = PgListener::connect(database.url()).await.expect("a connection");
    listener.listen("warp").await.expect("listens");
    let begun = Instant::now();
    let callers = (0..16).map(|_| {
        let world = world.clone();
        tokio::spawn(async move {
            for _ in 0..60 {
                world.enqueue_many("c", 1).await;
            }
        })
    });
    for caller in join_all(callers).await {
        caller.expect("enqueued");
    }
    world.store.flush().await;
    let took = begun.elapsed();
    // A stranger's transaction announces itself, once, however much it enqueues.
    database.execute("BEGIN; SELECT warp.enqueue('c', n::text, 'stranger') FROM generate_series(1, 100) n; COMMIT").expect("enqueued");
    database.execute("NOTIFY warp, 'the end'").expect("told");
    let mut heard: BTreeMap<String, u128> = BTreeMap::new();
    while !heard.contains_key("the end") {
        *heard.entry(listener.recv().await.expect("an announcement").payload().to_owned()).or_default() += 1;
    }
    assert_eq!(heard["stranger"], 1);
    // Enqueues that are 4 ms apart are no burst, and a machine that slow is none to be spared.
    let most = took.as_millis() / 4 + 2;
    assert!((1..=most).contains(&heard["default"]), "{heard:?} in {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a28_hosts_keep_to_their_budget_of_connections() {
    let database = database();
    let mut eyes = connection(&database).await;
    let connect = || ConnectSettings { application_name: "budget".to_owned(), ..ConnectSettings::new(database.url()) };
    let worlds = join_all((0..3).map(|_| world(connect()))).await;
    let budget = i64::from(3 * (connect().pool + warp_store_postgres::BESIDE_POOL));
    let busy: Vec<_> = worlds
        .iter()
        .flat_map(|world| (0..64).map(move |_| world.store.clone()))
        .map(|store| {
            tokio::spawn(async move {
                for _ in 0..10 {
                    store.overview().await.expect("an answer");
                }
            })
        })
        .collect();
    let mut peak = 0;
    while !busy.iter().all(tokio::task::JoinHandle::is_finished) {
        peak = number(&mut eyes, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'budget%'").await.max(peak);
    }
    for task in busy {
        task.await.expect("an answer");
    }
    assert!(peak > 3 && peak <= budget, "{peak} connections of {budget}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a30_an_operators_limit_outlives_every_deploy_and_a_new_key_is_never_exceeded() {
    let database = database();
    let world = world(ConnectSettings { pool: 16, ..ConnectSettings::new(database.url()) }).await;
    world.limit("k", 2).await;
    for version in 1..=3u8 {
        let host = world.host(&[gated("c", version, semaphore("k", 4 + u32::from(version)))]).await;
        world.enqueue_many("c", 10).await;
        assert_eq!(world.key("k").await.admin_limit, Some(2));
        let claimed = world.claim(&host, 10).await;
        assert_eq!(claimed.len(), 2, "version {version}");
        world.store.deregister(host.id, world.now()).await.expect("it leaves");
    }
    // The first uses of keys that nobody has seen, all at once.
    let declared: [Declarations; 1] = [gated("new", 9, semaphore("{k}", 2))];
    let hosts = join_all((0..16).map(|_| world.host(&declared))).await;
    world
        .enqueue(
            (0..1_000)
                .map(|at| NewJob { explicit: Declared::default(), ..with(&world, "new", &format!(r#""k":"n{}""#, at % 20)) })
                .collect(),
        )
        .await;
    let begun = Instant::now();
    let claimed = join_all(hosts.iter().map(async |host| {
        let mut claimed = Vec::new();
        loop {
            let exchanged = world.exchange(host, Vec::new(), 8).await;
            claimed.extend(exchanged.claimed);
            if !exchanged.more || begun.elapsed() > Duration::from_secs(60) {
                return claimed.len();
            }
        }
    }))
    .await;
    assert!(claimed.iter().sum::<usize>() <= 40, "{claimed:?}");
    let mut eyes = connection(&database).await;
    assert_eq!(number(&mut eyes, "SELECT max(n)::int8 FROM (SELECT count(*) AS n FROM warp.slot GROUP BY key) s").await, 2);
}
