//! Slots as session locks, on a real server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use sqlx::{Connection as _, PgConnection};
use tokio::sync::mpsc;
use warp_domain::ending::State;
use warp_domain::{JobId, UnixMillis};
use warp_store::{ClaimParams, Claimed, ExchangeParams, HandOff, Settle, SettleVerdict, Store, StoreErrorKind};
use warp_store_postgres::{Clock, ConnectSettings, LockKind, OpenOptions, PostgresStore, set_locks};
use warp_store_tests::{Host, Subject, World, done, gated, hand_back, mutex, semaphore, settle, skipping};
use warp_test_servers::{Cluster, Database, PgBouncer, PoolMode, database};

/// A process on a database whose slots are session locks, on the clock of its callers.
async fn process(database: &Database) -> PostgresStore {
    let connect = ConnectSettings::new(database.url());
    let options = OpenOptions { migrate: true, clock: Clock::Caller, locks: Some(LockKind::Session), ..OpenOptions::new(connect) };
    PostgresStore::open(options).await.expect("open the database")
}

/// A process on a database, whatever its slots are made of.
async fn any_process(database: &Database) -> PostgresStore {
    let options = OpenOptions { clock: Clock::Caller, ..OpenOptions::new(ConnectSettings::new(database.url())) };
    PostgresStore::open(options).await.expect("open the database")
}

/// An empty store.
pub async fn open() -> Subject {
    let database = tokio::task::spawn_blocking(database).await.expect("an empty database");
    Subject { store: Arc::new(process(&database).await), keep: Box::new(database) }
}

/// What is promised under session locks as well. The rest of the suite is about what only the ledger has: reservations,
/// `order = "fifo"`, weights, one line for different stamps, and a hand-on in the transaction that frees. (A job that waits
/// inside its host for some milliseconds counts as running.)
mod suite {
    warp_store_tests::conformance! { crate::session::open, enqueue:
        a_job_is_stored_exactly, a_scheduled_job_waits_until_it_is_due, a_unique_key_has_one_live_job,
        children_come_with_a_completed_end_or_not_at_all, one_bad_job_refuses_only_itself, the_largest_payload_fits,
        the_same_id_again_is_a_duplicate, thousands_that_fall_due_together_all_run
    }
    warp_store_tests::conformance! { crate::session::open, claims:
        a_claim_keeps_to_its_lanes, a_host_without_registration_is_told_so, a_key_without_its_field_fails_that_job_alone,
        a_stamp_outlives_everything, a_waiting_job_says_why, no_job_goes_to_two_hosts, runs_and_attempts_are_counted_apart,
        ten_thousand_jobs_of_another_host_hide_nothing, the_claim_stamps_what_won_and_where_it_came_from,
        the_oldest_due_comes_first_over_all_lanes
    }
    warp_store_tests::conformance! { crate::session::open, settles:
        a_late_end_changes_and_frees_nothing, a_poison_end_takes_nobody_with_it, a_repeated_end_is_recognised,
        ends_of_others_are_late, every_ending_leads_where_it_says, hostile_output_does_not_keep_a_job_running,
        output_is_kept_in_order, result_and_error_are_kept, state_at_once_needs_a_live_run, state_commits_with_the_end,
        who_has_not_begun_was_never_claimed
    }
    warp_store_tests::conformance! { crate::session::open, keys:
        a_mutex_runs_one_at_a_time, a_parked_job_says_what_it_waits_for, a_wait_is_told_once,
        a_wide_job_that_is_refused_hands_on_what_it_was_woken_for, later_holders_have_larger_tokens,
        lowering_a_limit_kills_nobody, one_batch_holds_no_key_twice, several_keys_are_taken_all_or_none_in_one_order,
        skip_deletes_what_is_surplus_and_says_who_held, skip_does_not_count_an_operators_limit,
        skip_never_deletes_what_has_run, waiters_cost_others_nothing, zero_pauses_a_key
    }
    warp_store_tests::conformance! { crate::session::open, entries:
        a_child_of_a_handler, a_scheduled_job, an_enqueued_job, an_explicit_policy_outranks
    }
    warp_store_tests::conformance! { crate::session::open, hosts:
        a_job_that_kills_its_hosts_is_failed, a_renewal_compares_what_both_sides_know, hosts_are_seen
    }
    warp_store_tests::conformance! { crate::session::open, operators:
        a_cancelled_run_does_not_come_back, cancelling_depends_on_the_state, deleting_removes_everything,
        requeueing_starts_afresh, retention_removes_what_is_old_enough, the_overview_adds_up
    }
    warp_store_tests::conformance! { crate::session::open, pauses:
        a_paused_host_starts_nothing_new, a_paused_queue_starts_nothing_new, hosts_hear_of_pauses
    }
    // Not `whatever_makes_a_job_runnable_wakes`: it wants a raised limit to find somebody parked. Here a look at the free
    // lock (A4) may have woken both waiters by then, and there is nothing left to announce.
    warp_store_tests::conformance! { crate::session::open, calls:
        a_dropped_call_is_done_or_not_begun, many_callers_at_once
    }
}

async fn empty() -> Database {
    tokio::task::spawn_blocking(database).await.expect("an empty database")
}

async fn world_on(database: &Database) -> World {
    World::new(Subject { store: Arc::new(process(database).await), keep: Box::new(()) })
}

/// So many jobs of one mutex on two hosts: the first runs on one of them, the others stand in line, which both have seen.
struct Line {
    database: Database,
    world: World,
    host: Host,
    other: World,
    next: Host,
    ids: Vec<JobId>,
    run: Claimed,
}

async fn in_line(jobs: usize) -> Line {
    let database = empty().await;
    let (world, other) = (world_on(&database).await, world_on(&database).await);
    let served = [gated("c", 1, mutex(&["k"]))];
    let (host, next) = (world.host(&served).await, other.host(&served).await);
    let ids = world.enqueue_many("c", jobs).await;
    let run = world.claim_one(&host).await;
    assert_eq!(other.claim_ids(&next, 4).await, [], "the others stand in line");
    Line { database, world, host, other, next, ids, run }
}

async fn connected(database: &Database) -> PgConnection {
    PgConnection::connect(database.url()).await.expect("connect")
}

/// What the server itself says about advisory locks: how many are held in this database.
async fn locks(conn: &mut PgConnection) -> i64 {
    const LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1
                         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    sqlx::query_scalar(LOCKS).fetch_one(conn).await.expect("look at the locks")
}

async fn lock_backend(conn: &mut PgConnection) -> i32 {
    const BACKEND: &str = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%:warp-locks'";
    sqlx::query_scalar(BACKEND).fetch_one(conn).await.expect("one lock session")
}

/// Hosts of different builds share these locks, so their numbers never change.
#[tokio::test]
async fn lock_numbers_are_what_they_always_were() {
    let database = empty().await;
    drop(process(&database).await);
    let mut conn = connected(&database).await;
    for (key, slot, golden) in
        [("k", None, GOLDEN[0]), ("k", Some(0), GOLDEN[1]), ("k:7", Some(12), GOLDEN[2]), ("Zürich ☃", None, GOLDEN[3])]
    {
        let number: i64 =
            sqlx::query_scalar("SELECT warp.lock_number($1, $2)").bind(key).bind(slot).fetch_one(&mut conn).await.expect("hash");
        let name = slot.map_or_else(|| format!("warp:warp:concurrency:{key}"), |slot: i32| format!("warp:warp:slot:{slot}:{key}"));
        let digest = Sha256::digest(name.as_bytes());
        assert_eq!(number, i64::from_be_bytes(digest[..8].try_into().expect("eight bytes")), "{name}");
        assert_eq!(number, golden, "{name}");
    }
}

/// The first eight bytes of the SHA-256 of each name, as the test above names them.
const GOLDEN: [i64; 4] = [-2_912_067_793_614_507_825, -9_147_477_083_336_578_731, 2_848_314_698_204_754_089, 2_771_782_518_053_387_190];

/// A transaction pooler cannot keep a session, and says so with what helps. Whoever takes no slot needs none.
#[tokio::test]
async fn a_transaction_pooler_is_refused() {
    let database = empty().await;
    let behind = world_on(&database).await;
    let host = behind.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let (url, name) = (database.url().to_owned(), database.name().to_owned());
    let pooler = tokio::task::spawn_blocking(move || PgBouncer::in_front_of(&url).mode(PoolMode::Transaction).start());
    let pooler = pooler.await.expect("no panic").expect("start PgBouncer");
    let options = OpenOptions { clock: Clock::Caller, ..OpenOptions::new(ConnectSettings::new(pooler.url(&name))) };
    let refused = PostgresStore::open(options.clone()).await;
    let error = refused.err().expect("it is refused");
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    for part in ["transaction mode", "Attempted to release a lock that was not held", "session mode", "ledger"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    let commands = PostgresStore::open(OpenOptions { hosting: false, ..options }).await.expect("open for commands");
    let commands = World::new(Subject { store: Arc::new(commands), keep: Box::new(()) });
    let ids = commands.enqueue_many("c", 2).await;
    commands.store.changed().await;
    assert!(commands.store.polling().longest <= Duration::from_secs(3), "what others do is found by polling");
    assert_eq!(behind.claim_ids(&host, 1).await, [ids[0]]);
    let seen = commands.store.keys(10).await.expect("keys");
    assert_eq!(
        seen.iter().map(|seen| (seen.key.as_str(), seen.holders.len())).collect::<Vec<_>>(),
        [("k", 1)],
        "a holder, and nobody waits"
    );
    behind.claim(&host, 1).await;
    commands.limit("k", 2).await;
    assert_eq!(behind.claim_ids(&host, 1).await, [ids[1]], "woken by the change of the limit");
    assert_eq!(commands.details(ids[1]).await.summary.state, State::Processing);
    let claim = ExchangeParams { host: host.id, now: commands.now(), settles: [].into(), claim: None, hand_off: HandOff::default() };
    let refused = commands.store.exchange(claim).await.expect_err("it would run without slots");
    assert_eq!(refused.kind(), StoreErrorKind::Internal);
    assert!(refused.to_string().contains("opened for commands"), "{refused}");
}

/// Whoever compares fences compares those of both kinds.
#[tokio::test]
async fn fences_grow_across_a_change_of_the_kind() {
    let database = empty().await;
    drop(process(&database).await);
    let settings = ConnectSettings::new(database.url());
    let writer = World::new(Subject { store: Arc::new(any_process(&database).await), keep: Box::new(()) });
    let mut last = 0;
    for kind in [LockKind::Session, LockKind::Ledger, LockKind::Session, LockKind::Ledger] {
        set_locks(&settings, kind, "a test", UnixMillis(1)).await.expect("change").expect("nobody is there");
        let store = any_process(&database).await;
        assert_eq!(store.locks(), kind);
        let world = World::new(Subject { store: Arc::new(store), keep: Box::new(()) });
        let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
        // The second gets its slot inside the host, where it can.
        writer.enqueue_many("c", 2).await;
        for _ in 0..2 {
            let claimed = world.claim_one(&host).await;
            let fence = claimed.fence.expect("it has a slot");
            assert!(fence > last, "{kind}: {fence} after {last}");
            last = fence;
            world.complete(&host, &claimed).await;
        }
        world.store.deregister(host.id, world.now()).await.expect("deregister");
    }
}

/// The lock of a run outlives its row for a moment. Who is skipped in it is told who had it.
#[tokio::test]
async fn skip_names_a_holder_that_has_just_ended() {
    let database = empty().await;
    let world = world_on(&database).await;
    let served = [gated("c", 1, skipping(mutex(&["k"])))];
    let (host, other) = (world.host(&served).await, world.host(&served).await);
    let id = world.enqueue_one("c").await;
    let first = world.claim_one(&host).await;
    // Its row ends, and the session still has the lock: as if between the two.
    let mut conn = connected(&database).await;
    end_row(&mut conn, first.handle.0).await;
    let surplus = world.enqueue_one("c").await;
    let exchanged = world.exchange(&other, Vec::new(), 10).await;
    assert_eq!((exchanged.claimed.len(), exchanged.skipped), (0, 1));
    let details = world.details(surplus).await;
    let message = &details.audit.last().expect("history").message;
    assert!(message.starts_with("Cancelled — 'k' full (1 slots)") && message.contains(&id.to_string()), "{message}");
}

/// Moves a running row to the completed ones by hand.
async fn end_row(conn: &mut PgConnection, job: i64) {
    const END: &str = "WITH gone AS (DELETE FROM warp.running r WHERE r.handle = $1
                           RETURNING r.handle, r.due, r.changed_at, r.lane, r.run, r.attempt, r.stamp, r.digest, r.host, r.claimed_at, r.token, r.keys)
                       INSERT INTO warp.ended (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, stamp, digest, host, claimed_at,
                                               took_us, settled, keys)
                       SELECT g.handle, g.due, g.changed_at, g.lane, g.run, g.attempt, 0, 10, false, g.stamp, g.digest, g.host, g.claimed_at, 1, g.token, g.keys
                         FROM gone g";
    let ended = sqlx::query(END).bind(job).execute(conn).await.expect("end a row");
    assert_eq!(ended.rows_affected(), 1);
}

/// A13: the server ends the lock session. Its runs are named, their hand-back is taken, and the next holder has a larger
/// fence, after the pause in which every host has noticed.
#[tokio::test]
async fn a_lost_lock_session_stops_its_runs() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 2).await;
    let first = world.claim_one(&host).await;
    world.claim(&host, 1).await;
    assert!(world.is_parked(ids[1]).await);
    let mut conn = connected(&database).await;
    let backend = lock_backend(&mut conn).await;
    let ended = sqlx::query_scalar::<_, bool>("SELECT pg_terminate_backend($1)").bind(backend);
    let began = std::time::Instant::now();
    let (lost, _) = tokio::join!(world.store.slots_lost(host.id), ended.fetch_one(&mut conn));
    println!("noticed after {:?}", began.elapsed());
    assert_eq!(lost.iter().map(|run| (run.handle, run.token)).collect::<Vec<_>>(), [(first.handle, first.token)]);
    let verdicts = world.exchange(&host, vec![settle(&first, hand_back())], 0).await.settled;
    assert_eq!(verdicts, [SettleVerdict::Settled], "its row is still its own");
    assert_eq!(world.details(first.id).await.summary.attempts, 0, "uncharged");
    let mut next = Vec::new();
    while next.is_empty() {
        next = world.claim(&host, 5).await;
        // Told by the host's keeper, or looked for.
        let _ = tokio::time::timeout(Duration::from_millis(100), world.store.changed()).await;
    }
    assert!(began.elapsed() >= Duration::from_secs(4), "a new session takes nothing before all have noticed");
    assert!(next[0].fence > first.fence, "{:?} after {:?}", next[0].fence, first.fence);
    assert_ne!(lock_backend(&mut conn).await, backend);
}

/// A13: whoever holds slots hears of their loss at once, however long the exchange takes that is under way, and the keeper
/// who waits for it.
#[tokio::test]
async fn a_loss_is_told_while_an_exchange_is_under_way() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    world.enqueue_many("c", 2).await;
    let (mut conn, mut other) = (connected(&database).await, connected(&database).await);
    let first = world.claim_one(&host).await;
    let backend = lock_backend(&mut conn).await;
    sqlx::raw_sql("BEGIN; LOCK TABLE warp.ready").execute(&mut other).await.expect("a lock that claims wait for");
    let exchange = world.claim(&host, 1);
    let told = async {
        const WAITING: &str = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'warp.ready'::regclass AND NOT granted)";
        while !sqlx::query_scalar::<_, bool>(WAITING).fetch_one(&mut conn).await.expect("look at the locks") {}
        sqlx::query("SELECT pg_terminate_backend($1, 10000)").bind(backend).execute(&mut conn).await.expect("end it");
        world.store.slots_lost(host.id).await
    };
    tokio::pin!(exchange);
    let lost = tokio::select! {
        lost = told => lost,
        _ = &mut exchange => panic!("it waits"),
    };
    assert_eq!(lost.iter().map(|run| run.token).collect::<Vec<_>>(), [first.token]);
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.expect("give the lock back");
    assert_eq!(exchange.await.len(), 0, "nothing is taken before all have noticed");
}

/// A slot that comes while nobody claims is told of with the next claim: the worker listens for runs nowhere else, and a
/// renewal that is under way beside an exchange of ends alone would hand back what it does not know.
#[tokio::test]
async fn a_slot_that_comes_late_is_told_of_with_a_claim() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    // The first claim opens the session. When it is lost, a claimed run has to wait for the next one.
    assert_eq!(world.claim_ids(&host, 1).await, []);
    let mut conn = connected(&database).await;
    let backend = lock_backend(&mut conn).await;
    sqlx::query("SELECT pg_terminate_backend($1, 10000)").bind(backend).execute(&mut conn).await.expect("end it");
    let id = world.enqueue_one("c").await;
    assert_eq!(world.claim_ids(&host, 1).await, [], "nothing is taken before all have noticed");
    assert_eq!(world.state(id).await, State::Processing);
    while locks(&mut conn).await == 0 {
        let _ = tokio::time::timeout(Duration::from_millis(100), world.store.changed()).await;
    }
    assert_eq!(world.exchange(&host, Vec::new(), 0).await.claimed.len(), 0, "nobody asked for a run");
    let renewed = world.renew(host.id, Vec::new()).await;
    assert_eq!((renewed.handed_back, renewed.lost), (0, Vec::new()), "it is this host's own");
    let claimed = world.claim_one(&host).await;
    assert_eq!((claimed.id, claimed.run), (id, 1));
    world.complete(&host, &claimed).await;
    assert_eq!(world.state(id).await, State::Completed);
}

/// A host that stops ends its runs and claims no more: its slots go to others, not to whoever waits inside it.
#[tokio::test]
async fn a_slot_is_handed_on_only_where_somebody_claims() {
    let database = empty().await;
    let (stopping, other) = (world_on(&database).await, world_on(&database).await);
    let served = [gated("c", 1, mutex(&["k"]))];
    let (host, next) = (stopping.host(&served).await, other.host(&served).await);
    let ids = stopping.enqueue_many("c", 2).await;
    let first = stopping.claim_one(&host).await;
    // The second waits inside the host for some milliseconds.
    assert_eq!(stopping.claim_ids(&host, 1).await, []);
    stopping.complete(&host, &first).await;
    assert_eq!(locks(&mut connected(&database).await).await, 0, "nobody has a slot");
    assert_eq!(other.claim_ids(&next, 1).await, [ids[1]]);
}

/// A8: who is claimed with the end of a run has its slot next, without a call of the lock session: the fence tells. Nobody
/// else is woken beside it, so no host is refused.
#[tokio::test]
async fn who_is_claimed_with_an_end_follows_in_its_slot() {
    let Line { database, world, host, other, next, ids, mut run } = in_line(4).await;
    for follower in &ids[1..] {
        let exchanged = world.exchange(&host, vec![settle(&run, done())], 1).await;
        assert_eq!(exchanged.claimed.iter().map(|run| run.id).collect::<Vec<_>>(), [*follower]);
        assert_eq!(exchanged.claimed[0].fence, run.fence.map(|fence| fence + 1), "handed on");
        let elsewhere = other.exchange(&next, Vec::new(), 4).await;
        assert_eq!((elsewhere.claimed.len(), elsewhere.parked), (0, 0), "nobody was woken for others");
        run = exchanged.claimed.into_iter().next().expect("one");
    }
    world.complete(&host, &run).await;
    assert_eq!(locks(&mut connected(&database).await).await, 0);
}

/// A8: after a hundred hand-offs, or a second, others have their turn, before the host that gives the key back.
#[tokio::test]
async fn a_turn_that_is_over_is_left_to_others() {
    let Line { database: _database, world, host, other, next, ids, mut run } = in_line(105).await;
    let mut ran = 0;
    loop {
        ran += 1;
        let exchanged = world.exchange(&host, vec![settle(&run, done())], 1).await;
        assert_eq!(exchanged.settled, [SettleVerdict::Settled]);
        match exchanged.claimed.into_iter().next() {
            Some(follower) => run = follower,
            None => break,
        }
    }
    assert!((2..=101).contains(&ran), "{ran} runs in one turn");
    let exchanged = other.exchange(&next, Vec::new(), 1).await;
    assert_eq!(exchanged.claimed.iter().map(|run| run.id).collect::<Vec<_>>(), [ids[ran]], "the first in line, elsewhere");
    assert_eq!(exchanged.parked_again, 0, "nobody was refused");
}

/// A8: where nobody else comes, the host that has left a key to others hears of it, and goes on.
#[tokio::test]
async fn a_host_alone_is_told_of_what_it_left_to_others() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 105).await;
    let turn = world.drain(&host).await.len();
    assert!((1..=101).contains(&turn), "{turn} runs in one turn");
    assert_eq!(world.finish(&host, &ids).await.len(), ids.len() - turn);
    assert_eq!(locks(&mut connected(&database).await).await, 0);
}

/// With a store its lock sessions end, and with them their locks.
#[tokio::test]
async fn a_store_that_is_dropped_holds_nothing() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    world.enqueue_one("c").await;
    world.claim_one(&host).await;
    let mut conn = connected(&database).await;
    assert_eq!(locks(&mut conn).await, 1);
    drop(world);
    let free = async { while locks(&mut conn).await > 0 {} };
    tokio::time::timeout(Duration::from_secs(60), free).await.expect("the server has given it back");
}

/// A12: the locks of a host that stands still would stay for ever.
#[tokio::test]
async fn a_rescue_ends_the_lock_session() {
    let database = empty().await;
    let (frozen, alive) = (world_on(&database).await, world_on(&database).await);
    let served = [gated("c", 1, mutex(&["k"]))];
    let host = frozen.host(&served).await;
    let id = frozen.enqueue_one("c").await;
    let first = frozen.claim_one(&host).await;
    let mut conn = connected(&database).await;
    assert_eq!(locks(&mut conn).await, 1);
    alive.rescue(&host).await;
    let rescuer = alive.host(&served).await;
    let mut next = Vec::new();
    while next.is_empty() {
        // Until the server has ended the session, the key is held and the job goes back into the line; the sweep wakes it.
        next = alive.claim(&rescuer, 5).await;
        alive.renew(rescuer.id, next.iter().map(|run| (run.handle, run.token)).collect()).await;
    }
    assert_eq!(next[0].id, id);
    assert!(next[0].fence > first.fence);
    let late = frozen.store.exchange(ExchangeParams {
        host: host.id,
        now: frozen.now(),
        settles: [settle(&first, done())].into(),
        claim: None,
        hand_off: HandOff::default(),
    });
    assert_eq!(late.await.expect_err("it is not registered any more").kind(), StoreErrorKind::HostLost);
}

/// C3: a host that hears from a renewal that it is not registered any more holds nothing from then on, though nobody could
/// end its lock session (A12 needs a right).
#[tokio::test]
async fn a_lapsed_registration_lets_its_locks_go() {
    let database = empty().await;
    let (slow, alive) = (world_on(&database).await, world_on(&database).await);
    let host = slow.host(&[gated("c", 1, mutex(&["k"]))]).await;
    slow.enqueue_one("c").await;
    let first = slow.claim_one(&host).await;
    let mut conn = connected(&database).await;
    sqlx::query("UPDATE warp.host SET lock_backend = NULL").execute(&mut conn).await.expect("nobody knows it");
    alive.rescue(&host).await;
    assert_eq!(locks(&mut conn).await, 1);
    let lost = slow.try_renew(host.id, vec![(first.handle, first.token)]).await.expect_err("it is not registered any more");
    assert_eq!(lost.kind(), StoreErrorKind::HostLost);
    let free = async { while locks(&mut conn).await > 0 {} };
    tokio::time::timeout(Duration::from_secs(60), free).await.expect("the server has given it back");
}

/// A11: the holder of the whole key becomes one of two.
#[tokio::test]
async fn a_raise_starts_somebody_beside_an_exclusive_holder() {
    let database = empty().await;
    let world = world_on(&database).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 3).await;
    let first = world.claim_one(&host).await;
    world.claim(&host, 5).await;
    world.limit("k", 2).await;
    assert_eq!(world.claim_ids(&host, 5).await, [ids[1]]);
    let mut conn = connected(&database).await;
    assert_eq!(locks(&mut conn).await, 3, "the base shared, and two slots");
    world.limit("k", 1).await;
    world.complete(&host, &first).await;
    assert_eq!(world.claim_ids(&host, 5).await, [], "one is still above the lowered limit");
}

/// A host with its workers: claims, lets each run take its time, settles; until nothing is left.
struct Crew<'a> {
    store: &'a PostgresStore,
    world: &'a World,
    host: &'a Host,
    workers: u32,
    takes: Duration,
}

/// Who runs on which key, from outside.
#[derive(Default)]
struct Watch {
    running: BTreeMap<String, u32>,
    most: u32,
    fences: BTreeMap<String, u64>,
    /// Several may hold a key, so that their fences are in no order.
    is_shared: bool,
    ran: Vec<JobId>,
}

impl Crew<'_> {
    async fn work(&self, watch: &std::sync::Mutex<Watch>, until: usize) {
        let (end, mut ended) = mpsc::unbounded_channel::<Claimed>();
        let mut busy = 0;
        loop {
            let mut settles: Vec<Settle> = Vec::new();
            let mut note = |claimed: Claimed| {
                let mut watch = watch.lock().expect("no panic");
                *watch.running.entry(claimed.payload.to_string()).or_default() -= 1;
                watch.ran.push(claimed.id);
                settles.push(settle(&claimed, done()));
            };
            if busy > 0 {
                if let Ok(Some(claimed)) = tokio::time::timeout(Duration::from_millis(50), ended.recv()).await {
                    note(claimed);
                }
                while let Ok(claimed) = ended.try_recv() {
                    note(claimed);
                }
            }
            busy -= settles.len() as u32;
            let claim = Some(ClaimParams { lanes: self.host.lanes.clone(), max: self.workers - busy });
            let params =
                ExchangeParams { host: self.host.id, now: self.world.now(), settles: settles.into(), claim, hand_off: HandOff::default() };
            let exchanged = self.store.exchange(params).await.expect("exchange");
            assert!(exchanged.settled.iter().all(|verdict| *verdict == SettleVerdict::Settled), "{:?}", exchanged.settled);
            for claimed in exchanged.claimed {
                busy += 1;
                {
                    let mut watch = watch.lock().expect("no panic");
                    let key = claimed.payload.to_string();
                    let now = watch.running.entry(key.clone()).or_default();
                    *now += 1;
                    let now = *now;
                    watch.most = watch.most.max(now);
                    let fence = claimed.fence.expect("it has slots");
                    let before = watch.fences.insert(key, fence).unwrap_or(0);
                    assert!(watch.is_shared || fence > before, "a later holder has a larger fence: {fence} after {before}");
                }
                let (end, takes) = (end.clone(), self.takes);
                tokio::spawn(async move {
                    tokio::time::sleep(takes).await;
                    // The crew is gone when a test has failed.
                    let _ = end.send(claimed);
                });
            }
            if busy == 0 {
                if watch.lock().expect("no panic").ran.len() >= until {
                    return;
                }
                // A host would poll more seldom; here the end of the last job, of which nobody speaks, is to be seen.
                let _ = tokio::time::timeout(Duration::from_millis(200), self.store.changed()).await;
            }
        }
    }
}

async fn statements(conn: &mut PgConnection) -> i64 {
    const COUNT: &str = "SELECT coalesce(sum(calls), 0)::int8 FROM pg_stat_statements WHERE toplevel
                         AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())";
    sqlx::query_scalar(COUNT).fetch_one(conn).await.expect("count")
}

/// That no two of a key ever overlap, on one host and on three. What it costs is measured below: how long exchanges take, and so
/// how much fits into one, depends on the machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_of_a_key_take_turns() {
    take_turns(60, &[(1, 8, SANE), (3, 1, SANE)]).await;
}

/// Beyond that something asks in circles.
const SANE: f64 = 30.0;

/// What a job costs in statements, counted by the server. Alone on the machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "counts statements, alone on the machine; `cargo xtask soak statements` runs it"]
async fn jobs_of_a_key_cost_few_statements() {
    take_turns(400, &[(1, 8, 2.0), (1, 1, 3.0), (3, 8, 3.0), (3, 1, 5.0)]).await;
}

/// Sixteen workers on each host, runs of five milliseconds: (hosts, keys, statements of a job at most).
async fn take_turns(jobs_of_host: usize, cases: &[(usize, usize, f64)]) {
    let cluster = tokio::task::spawn_blocking(|| Cluster::functional().count_statements().start().expect("start a cluster"));
    let cluster = cluster.await.expect("no panic");
    let mut above = Vec::new();
    for &(hosts, keys, most) in cases {
        let database = tokio::task::block_in_place(|| cluster.database()).expect("an empty database");
        let mut conn = connected(&database).await;
        sqlx::query("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").execute(&mut conn).await.expect("extension");
        let mut stores = Vec::new();
        for _ in 0..hosts {
            stores.push(Arc::new(process(&database).await));
        }
        let worlds: Vec<World> =
            stores.iter().map(|store| World::new(Subject { store: Arc::<PostgresStore>::clone(store), keep: Box::new(()) })).collect();
        let served = [gated("c", 1, mutex(&["k:{n}"]))];
        let mut registered = Vec::new();
        for world in &worlds {
            registered.push(world.host(&served).await);
        }
        let jobs = jobs_of_host * hosts;
        let payloads = (0..jobs).map(|n| worlds[0].job("c", &format!("{{\"n\": {}}}", n % keys))).collect();
        worlds[0].enqueue(payloads).await;
        let before = statements(&mut conn).await;
        let watch = std::sync::Mutex::new(Watch::default());
        let crews: Vec<_> = (0..hosts)
            .map(|at| Crew { store: &stores[at], world: &worlds[at], host: &registered[at], workers: 16, takes: Duration::from_millis(5) })
            .collect();
        let began = std::time::Instant::now();
        futures_util::future::join_all(crews.iter().map(|crew| crew.work(&watch, jobs))).await;
        let cost = (statements(&mut conn).await - before) as f64 / jobs as f64;
        let watch = watch.into_inner().expect("no panic");
        println!("{hosts} hosts, {keys} keys: {cost:.2} statements a job, {jobs} jobs in {:?}", began.elapsed());
        assert_eq!(watch.most, 1, "two of a key ran at once");
        let mut ran = watch.ran;
        ran.sort_unstable();
        ran.dedup();
        assert_eq!(ran.len(), jobs, "each ran once");
        if cost > most {
            above.push(format!("{hosts} hosts, {keys} keys: {cost:.2} statements a job, at most {most}"));
        }
        for (world, host) in worlds.iter().zip(&registered) {
            world.store.deregister(host.id, world.now()).await.expect("deregister");
        }
        assert_eq!(locks(&mut conn).await, 0, "locks were left behind");
    }
    assert!(above.is_empty(), "{}", above.join("; "));
}

/// A semaphore of three over two hosts, raised and lowered while jobs run.
#[tokio::test]
async fn a_semaphore_is_never_overfilled() {
    let database = empty().await;
    let stores = [Arc::new(process(&database).await), Arc::new(process(&database).await)];
    let worlds = stores.each_ref().map(|store| World::new(Subject { store: Arc::<PostgresStore>::clone(store), keep: Box::new(()) }));
    let served = [gated("c", 1, semaphore("k", 3))];
    let hosts = [worlds[0].host(&served).await, worlds[1].host(&served).await];
    worlds[0].enqueue_many("c", 120).await;
    let watch = std::sync::Mutex::new(Watch { is_shared: true, ..Watch::default() });
    let crew = |at: usize| Crew { store: &stores[at], world: &worlds[at], host: &hosts[at], workers: 8, takes: Duration::from_millis(3) };
    let (one, two) = (crew(0), crew(1));
    let limits = async {
        for limit in [1, 3, 2, 3] {
            tokio::time::sleep(Duration::from_millis(30)).await;
            worlds[1].limit("k", limit).await;
        }
    };
    tokio::join!(one.work(&watch, 120), two.work(&watch, 120), limits);
    let watch = watch.into_inner().expect("no panic");
    assert_eq!(watch.ran.len(), 120);
    assert!(watch.most <= 3, "{} ran at once", watch.most);
}
