//! Faults that a store meets inside its own process: callers that go away in the middle of a call, and a client that
//! no longer reads what it asked for.
//!
//! What must stay true: whatever a dropped call left undone or done unheard is put right by what a host does anyway
//! (say it again, renew its lease), and neither the server nor the pool is left with anything.
//!
//! `WARP_FAULT_SEED=<n>` replays one run of the first test.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use warp_domain::ending::State;
use warp_domain::{ClaimToken, JobHandle, JobId, UnixMillis};
use warp_store::{ClaimParams, Claimed, EnqueueVerdict, ExchangeParams, HandOff, NewJob, RenewParams, Settle, SettleVerdict, Store};
use warp_store_postgres::{Clock, ConnectSettings, LockKind, OpenOptions, PostgresStore, migrate};
use warp_store_tests::{Host, Subject, World, done, gated, hand_back, mutex, plain, semaphore, settle};
use warp_test_servers::{Database, PgBouncer, PoolMode, database};
use warp_testkit::rng::Rng;

/// The name by which the server knows the store's connections here.
const NAME: &str = "dropped";
const POOL: u32 = 3;
/// Everybody else's sessions in this database.
pub const ELSEWHERE: &str = "datname = current_database() AND pid <> pg_backend_pid()";
/// How long a reservation may stay unclaimed.
const PATIENCE: Duration = Duration::from_secs(2);
/// More jobs of a key than pass on inside a host without a break.
const LINE: usize = 110;
/// The longest that a call is left alone, in microseconds: enough for nearly all of them to end.
const LONGEST: usize = 5_000;

pub async fn open(connect: ConnectSettings) -> PostgresStore {
    open_with(connect, LockKind::Ledger).await
}

/// A database that is made with this kind of slots.
async fn open_with(connect: ConnectSettings, locks: LockKind) -> PostgresStore {
    let options = OpenOptions { migrate: true, clock: Clock::Caller, locks: Some(locks), ..OpenOptions::new(connect) };
    PostgresStore::open(options).await.expect("open the database")
}

/// Drives a call for a random while and drops it if it has not ended by then: after so many polls, or so many
/// microseconds.
async fn cut<T>(rng: &mut Rng, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    if rng.chance(30) {
        let mut polls = rng.below(6);
        return poll_fn(|context| match polls.checked_sub(1) {
            None => Poll::Ready(None),
            Some(left) => {
                polls = left;
                call.as_mut().poll(context).map(Some)
            }
        })
        .await;
    }
    let until = Instant::now() + Duration::from_micros(rng.below(LONGEST) as u64);
    poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending if Instant::now() >= until => Poll::Ready(None),
        Poll::Pending => {
            // A timer would round to milliseconds.
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// A host as it knows itself: what it runs, and ends whose answer it has not heard.
struct Knowledge {
    running: Vec<Claimed>,
    unheard: Vec<Settle>,
    jobs: Vec<JobId>,
    /// How many calls of each kind were dropped before their end.
    dropped: BTreeMap<&'static str, u32>,
}

impl Knowledge {
    fn known(&self) -> Vec<(JobHandle, ClaimToken)> {
        let unheard = self.unheard.iter().map(|settle| (settle.handle, settle.token));
        self.running.iter().map(|run| (run.handle, run.token)).chain(unheard).collect()
    }

    fn count(&mut self, op: &'static str, was_heard: bool) {
        if !was_heard {
            *self.dropped.entry(op).or_default() += 1;
        }
    }
}

async fn enqueue(world: &World, rng: &mut Rng, knowledge: &mut Knowledge) {
    let contract = ["plain", "alone", "three"][rng.below(3)];
    let jobs: Vec<NewJob> = (0..=rng.below(4)).map(|_| world.job(contract, &format!(r#"{{"k":{}}}"#, rng.below(3)))).collect();
    let heard = cut(rng, world.store.enqueue(jobs.clone(), world.now())).await;
    knowledge.count("enqueue", heard.is_some());
    // Whoever has heard nothing says it again, with the same ids.
    let verdicts = match heard {
        Some(verdicts) => verdicts,
        None => world.store.enqueue(jobs.clone(), world.now()).await,
    };
    for (job, verdict) in jobs.iter().zip(verdicts.expect("enqueue")) {
        assert!(matches!(verdict, EnqueueVerdict::Enqueued(_) | EnqueueVerdict::Duplicate(_)), "{verdict:?}");
        knowledge.jobs.push(job.id);
    }
}

async fn exchange(world: &World, host: &Host, rng: &mut Rng, knowledge: &mut Knowledge, (claims, settles): (bool, bool)) {
    let mut ends = std::mem::take(&mut knowledge.unheard);
    if settles {
        let count = rng.below(knowledge.running.len() + 1);
        ends.extend(knowledge.running.drain(..count).map(|run| settle(&run, done())));
    }
    let claim = claims.then(|| ClaimParams { lanes: host.lanes.clone(), max: 1 + rng.below(8) as u32 });
    let params = ExchangeParams { host: host.id, now: world.now(), settles: ends.clone().into(), claim, hand_off: HandOff::default() };
    let heard = cut(rng, world.store.exchange(params)).await;
    knowledge.count(if settles { "settle" } else { "claim" }, heard.is_some());
    let Some(exchanged) = heard else {
        knowledge.unheard = ends;
        return;
    };
    let exchanged = exchanged.expect("exchange");
    for verdict in exchanged.settled {
        assert!(matches!(verdict, SettleVerdict::Settled | SettleVerdict::Repeated), "{verdict:?}");
    }
    knowledge.running.extend(exchanged.claimed);
}

async fn renew(world: &World, host: &Host, rng: &mut Rng, knowledge: &mut Knowledge) {
    let renewal = RenewParams { host: host.id, known: knowledge.known(), patience: PATIENCE, now: world.now() };
    let heard = cut(rng, world.store.renew(renewal)).await;
    knowledge.count("renew", heard.is_some());
    // Whoever has heard nothing renews again before it claims. The first may still be under way, and knows less.
    let renewed = match heard {
        Some(renewed) => renewed.expect("renew"),
        None => world.renew(host.id, knowledge.known()).await,
    };
    // Of what this host runs nothing may be gone; an end whose answer was lost may have been written.
    let is_end = |lost: &(JobHandle, ClaimToken)| knowledge.unheard.iter().any(|settle| (settle.handle, settle.token) == *lost);
    assert!(renewed.lost.iter().all(is_end), "{:?}", renewed.lost);
}

/// Drops so many calls of a host, then lets it do what a host does, and looks at what is left.
async fn drop_calls(store: PostgresStore, database: Database, url: &str, points: usize) {
    let seed = std::env::var("WARP_FAULT_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()).wrapping_mul(7_919) + points as u64);
    let mut rng = Rng::new(seed);
    let store: Arc<dyn Store> = Arc::new(store);
    let world = World::new(Subject { store, keep: Box::new(()) });
    let declared = [plain("plain"), gated("alone", 1, mutex(&["alone:{k}"])), gated("three", 2, semaphore("three:{k}", 3))];
    let host = world.host(&declared).await;
    let mut knowledge = Knowledge { running: Vec::new(), unheard: Vec::new(), jobs: Vec::new(), dropped: BTreeMap::new() };
    for point in 0..points {
        match rng.below(10) {
            0..3 => enqueue(&world, &mut rng, &mut knowledge).await,
            3..5 => exchange(&world, &host, &mut rng, &mut knowledge, (true, false)).await,
            5..8 => exchange(&world, &host, &mut rng, &mut knowledge, (true, true)).await,
            8 => renew(&world, &host, &mut rng, &mut knowledge).await,
            // Migrations of other schemas of this database, so that the lock of a migration is there to be left behind.
            _ => {
                let settings = ConnectSettings {
                    schema: format!("other_{}", point % 4),
                    application_name: NAME.to_owned(),
                    ..ConnectSettings::new(url)
                };
                let heard = cut(&mut rng, migrate(&settings, None, false)).await;
                knowledge.count("migrate", heard.is_some());
                if let Some(migrated) = heard {
                    migrated.expect("migrate");
                    database.execute(&format!("DROP SCHEMA {} CASCADE", settings.schema)).expect("a schema");
                }
            }
        }
    }
    eprintln!("seed {seed}: {} jobs, {points} calls, dropped: {:?}", knowledge.jobs.len(), knowledge.dropped);
    assert!(knowledge.dropped.values().sum::<u32>() as usize >= points / 4, "the calls were left alone: {:?}", knowledge.dropped);

    // The first renewal waits for the calls that may have claimed what nobody heard of. What another dropped call has
    // locked at that moment it leaves to the next, as it would under way.
    let unheard = std::mem::take(&mut knowledge.unheard);
    world.exchange(&host, unheard, 0).await;
    let first = world.renew(host.id, knowledge.known()).await.handed_back;
    let mut eyes = PgConnection::connect(database.url()).await.expect("a connection");
    until_zero(&mut eyes, &format!("SELECT count(*) FROM pg_stat_activity WHERE {ELSEWHERE} AND xact_start IS NOT NULL")).await;
    let second = world.renew(host.id, knowledge.known()).await.handed_back;
    eprintln!("handed back by the last two renewals: {first}, {second}");
    let ends = knowledge.running.iter().map(|run| settle(run, done())).collect();
    assert!(world.exchange(&host, ends, 0).await.settled.iter().all(|verdict| *verdict == SettleVerdict::Settled));
    // A line that is longer than one turn with its key (A8), so that the rest goes by more than one answer.
    let line = (0..LINE).map(|_| world.job("alone", r#"{"k":1}"#)).collect();
    knowledge.jobs.extend(world.enqueue(line).await);
    world.finish(&host, &knowledge.jobs).await;
    for schema in 0..4 {
        let settings = ConnectSettings { schema: format!("other_{schema}"), ..ConnectSettings::new(url) };
        migrate(&settings, None, false).await.expect("no lock is in the way");
    }
    nothing_is_left(&world, &knowledge.jobs, &database).await;
}

async fn nothing_is_left(world: &World, jobs: &[JobId], database: &Database) {
    for id in jobs {
        let job = world.details(*id).await;
        let ends = job.audit.iter().filter(|row| row.event == "Completed").count();
        assert_eq!((job.summary.state, job.summary.attempts, ends), (State::Completed, 1, 1), "{job:?}");
    }
    assert_eq!(world.counter("stats:succeeded").await, jobs.len() as i64);
    let mut eyes = PgConnection::connect(database.url()).await.expect("a connection");
    for table in ["slot", "running", "ready", "waiting", "blocker", "unique_key"] {
        assert_eq!(number(&mut eyes, &format!("SELECT count(*) FROM warp.{table}")).await, 0, "rows of warp.{table}");
    }
    // A backend notices a client that has gone when it is done with its message.
    until_zero(
        &mut eyes,
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = current_database() AND l.locktype = 'advisory'",
    )
    .await;
    until_zero(&mut eyes, &format!("SELECT count(*) FROM pg_stat_activity WHERE {ELSEWHERE} AND xact_start IS NOT NULL")).await;
    let connections =
        number(&mut eyes, &format!("SELECT count(*) FROM pg_stat_activity WHERE {ELSEWHERE} AND application_name = '{NAME}'")).await;
    assert!(connections <= i64::from(POOL + 1), "{connections} connections of a pool of {POOL}");
    all_connections_work(world, &mut eyes).await;
}

/// No turn of the pool is lost: as many statements as it has connections reach the server at once.
async fn all_connections_work(world: &World, eyes: &mut PgConnection) {
    sqlx::raw_sql("BEGIN; LOCK TABLE warp.job IN ACCESS EXCLUSIVE MODE").execute(&mut *eyes).await.expect("a lock");
    let waiting: Vec<_> = (0..POOL)
        .map(|_| {
            let (store, job, now) = (world.store.clone(), world.job("nobody", "{}"), world.now());
            tokio::spawn(async move { store.enqueue(vec![job], now).await })
        })
        .collect();
    let blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'warp.job'::regclass";
    let begun = Instant::now();
    while number(eyes, blocked).await < i64::from(POOL) {
        assert!(begun.elapsed() < Duration::from_secs(20), "a connection of the pool is missing");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sqlx::raw_sql("COMMIT").execute(eyes).await.expect("let go");
    for task in waiting {
        task.await.expect("a task").expect("enqueued");
    }
}

pub async fn number(conn: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
}

pub async fn until_zero(conn: &mut PgConnection, sql: &str) {
    let begun = Instant::now();
    loop {
        let count = number(conn, sql).await;
        if count == 0 {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "still {count}: {sql}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_dropped_at_a_thousand_points_leave_nothing_behind() {
    let database = database();
    let connect = ConnectSettings { pool: POOL, application_name: NAME.to_owned(), ..ConnectSettings::new(database.url()) };
    let url = database.url().to_owned();
    drop_calls(open(connect).await, database, &url, 1_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_dropped_under_session_locks_leave_nothing_behind() {
    let database = database();
    let connect = ConnectSettings { pool: POOL, application_name: NAME.to_owned(), ..ConnectSettings::new(database.url()) };
    let url = database.url().to_owned();
    drop_calls(open_with(connect, LockKind::Session).await, database, &url, 1_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_dropped_behind_a_transaction_pooler_leave_nothing_behind() {
    let database = database();
    let bouncer = PgBouncer::in_front_of(database.url()).mode(PoolMode::Transaction).pool_size(POOL + 1).start().expect("a pooler");
    let url = bouncer.url(database.name());
    let connect = ConnectSettings { pool: POOL, application_name: NAME.to_owned(), ..ConnectSettings::new(&url) };
    let store = open(connect).await;
    drop_calls(store, database, &url, 300).await;
}

/// A frozen host may have asked for more than the network holds. Its statement cannot end, and the locks of a statement
/// last as long as it does: whoever rescues the host must not wait for a client that never reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_reading_its_claim_is_rescued() {
    let database = database();
    let store: Arc<dyn Store> = Arc::new(open(ConnectSettings::new(database.url())).await);
    let world = World::new(Subject { store, keep: Box::new(()) });
    let declared = [gated("alone", 1, mutex(&["k"]))];
    let (frozen, other) = (world.host(&declared).await, world.host(&declared).await);
    let large = world.job("alone", &format!(r#"{{"x":"{}"}}"#, "x".repeat(10 << 20 >> 1)));
    let jobs = world.enqueue(vec![large]).await;
    // From its first start on it has its stamp and its keys, so the claim below needs one call.
    let run = world.claim_one(&frozen).await;
    world.end(&frozen, &run, hand_back()).await;

    let mut eyes = PgConnection::connect(database.url()).await.expect("a connection");
    let claim = claim_statement(&mut eyes, &frozen, world.now(), "alone", 1).await;
    sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; {claim}; ROLLBACK"))).execute(&mut eyes).await.expect("a claim, undone");
    let _deaf = Deaf::ask(database.url(), &claim);
    let begun = Instant::now();
    while number(&mut eyes, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'").await
        == 0
    {
        assert!(begun.elapsed() < Duration::from_secs(20), "the answer fits into the network, so this test shows nothing");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    let rescued =
        tokio::time::timeout(Duration::from_secs(20), world.rescue(&frozen)).await.expect("a rescue waits for nobody who is dead");
    // The claim never committed, so there was nothing to give back; the job is there for the other.
    assert_eq!(rescued.requeued, 0);
    assert_eq!(world.claim_ids(&other, 1).await, jobs);
}

/// The statement by which a host claims what is ready of one contract, which may have a key, and ends nothing.
pub async fn claim_statement(conn: &mut PgConnection, host: &Host, now: UnixMillis, contract: &str, max: u32) -> String {
    let written = format!(
        "SELECT 'SELECT * FROM warp.exchange(' || string_agg(format('%I => %s::%s', a.name, coalesce(o.value,
                    CASE WHEN a.type::regtype::text LIKE '%[]' THEN '''{{}}''' WHEN a.type = 'bool'::regtype THEN 'false' ELSE 'NULL' END),
                    a.type::regtype), ', ') || ')'
           FROM pg_proc p CROSS JOIN LATERAL unnest(p.proargnames, p.proargmodes, p.proallargtypes) a (name, mode, type)
           LEFT JOIN (VALUES ('p_host', '{}'), ('p_now', '{}'), ('c_max', '{max}'), ('c_stamp', '''{{NULL}}'''), ('c_keyed', '''{{false}}'''),
                             ('c_digest', '''{{1}}'''), ('c_lane', format('''{{%s}}''', (SELECT l.id FROM warp.lane l WHERE l.contract = '{contract}'))))
                     o (name, value) ON o.name = a.name
          WHERE p.oid = 'warp.exchange'::regproc AND a.mode = 'i'",
        host.id.0, now.0
    );
    sqlx::query_scalar(AssertSqlSafe(written)).fetch_one(conn).await.expect("a statement")
}

/// A client of PostgreSQL that asks one question and does not listen to the answer.
struct Deaf(#[expect(dead_code, reason = "held open")] std::net::TcpStream);

impl Deaf {
    fn ask(url: &str, sql: &str) -> Self {
        use std::io::{Read as _, Write as _};
        let (_, rest) = url.split_once('@').expect("a user");
        let (address, name) = rest.split_once('/').expect("a database");
        let mut stream = std::net::TcpStream::connect(address).expect("a connection");
        let mut send = |kind: Option<u8>, body: &[u8]| {
            let length = u32::try_from(body.len() + 4).expect("a short message").to_be_bytes();
            let message: Vec<u8> = kind.into_iter().chain(length).chain(body.iter().copied()).collect();
            stream.write_all(&message).expect("sent");
        };
        let mut start = 196_608u32.to_be_bytes().to_vec();
        start.extend(format!("user\0postgres\0database\0{name}\0\0").bytes());
        send(None, &start);
        send(Some(b'Q'), format!("{sql}\0").as_bytes());
        // The server has taken the client in, and its question, once it says anything at all.
        stream.read_exact(&mut [0; 1]).expect("an answer");
        Deaf(stream)
    }
}
