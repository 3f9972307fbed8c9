//! Slots that pass on inside a host, and jobs that wait there for one (slots.md B8).
//!
//! A store that never says [`Local`] of a run has no such slots; of these cases it does nothing.

use std::time::Duration;

use warp_domain::KeyId;
use warp_domain::ending::{Ending, State};
use warp_domain::policy::{Concurrency, OnRetry};
use warp_store::{
    ClaimParams, Claimed, CommandVerdict, ExchangeParams, Exchanged, HandOff, Local, Pass, Settle, SettleVerdict, WaitersWanted, Waiting,
};

use crate::world::{Host, World, done, fifo, gated, mutex, retry_at, semaphore, settle, skipping};

/// One round trip with what has passed on, and with so many local waiters of the key.
async fn exchange(world: &World, host: &Host, passes: &[Pass], settles: Vec<Settle>, max: u32, wanted: Option<(KeyId, u32)>) -> Exchanged {
    let wanted = wanted.into_iter().map(|(key, most)| WaitersWanted { key, most });
    let hand_off = HandOff { passes: passes.into(), wanted: wanted.collect(), extra: 0 };
    let claim = (max > 0).then(|| ClaimParams { lanes: host.lanes.clone(), max });
    let params = ExchangeParams { host: host.id, now: world.now(), settles: settles.into(), claim, hand_off };
    world.store.exchange(params).await.expect("exchange")
}

/// A claim with local waiters.
async fn claim(world: &World, host: &Host, max: u32, key: KeyId, most: u32) -> Vec<Claimed> {
    exchange(world, host, &[], Vec::new(), max, Some((key, most))).await.claimed
}

/// The key whose slot a run holds; `None` where slots do not pass on.
fn held(claimed: &Claimed) -> Option<KeyId> {
    match claimed.local? {
        Local::Holds(key) => Some(key),
        Local::Waits(key) => panic!("{} waits for {key:?} instead of holding it", claimed.id),
    }
}

fn waits(claimed: &Claimed, key: KeyId) -> bool {
    claimed.local == Some(Local::Waits(key))
}

fn pass(key: KeyId, from: &Claimed, to: &Claimed) -> Pass {
    Pass { key, from: (from.handle, from.token), to: (to.handle, to.token) }
}

/// A host that runs the first of so many jobs of a mutex, with the name of its key.
async fn holding(world: &World, count: usize) -> Option<(Host, Vec<warp_domain::JobId>, Claimed, KeyId)> {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", count).await;
    let first = world.claim_one(&host).await;
    let key = held(&first)?;
    Some((host, ids, first, key))
}

/// What would be parked becomes a run of the host that holds the key: without a slot, so many as it asks for, and no
/// other host is given any.
pub async fn a_job_waits_inside_the_host_that_holds_its_key(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 5).await else { return };
    let claimed = claim(&world, &host, 10, key, 2).await;
    assert_eq!(claimed.iter().map(|run| run.id).collect::<Vec<_>>(), ids[1..3]);
    for run in &claimed {
        assert!(waits(run, key) && run.keyed && run.token > first.token, "{:?}", run.local);
        assert_eq!((run.run, run.attempt), (1, 1));
        assert_eq!(world.state(run.id).await, State::Processing);
    }
    assert_eq!(world.holders("k").await, ids[..1]);
    assert_eq!(world.waiters("k").await, ids[3..]);
    let other = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let last = world.enqueue_one("c").await;
    assert!(claim(&world, &other, 10, key, 5).await.is_empty(), "it holds nothing that could pass on");
    assert_eq!(world.waiters("k").await, [ids[3], ids[4], last]);
}

/// What is parked comes out of its line in order: nobody from behind one who may not, and no newcomer before.
pub async fn waiters_are_taken_in_their_order(world: World) {
    let Some((host, ids, _, key)) = holding(&world, 4).await else { return };
    world.claim(&host, 10).await;
    world.pass(Duration::from_millis(1));
    let fresh = world.enqueue_one("c").await;
    let claimed = claim(&world, &host, 2, key, 5).await;
    assert_eq!(claimed.iter().map(|run| run.id).collect::<Vec<_>>(), ids[1..3], "no more than the claim's most");
    assert!(claimed.is_sorted_by(|a, b| a.token < b.token));
    let claimed = claim(&world, &host, 5, key, 5).await;
    assert_eq!(claimed.iter().map(|run| run.id).collect::<Vec<_>>(), [ids[3], fresh]);
    assert_eq!(world.waiters("k").await, []);
    // Who keeps his place in line, and whoever stands behind him, stays in it.
    let order = [gated("c", 1, mutex(&["k"])), gated("f", 1, fifo(mutex(&["k"]), OnRetry::Pass)), gated("g", 1, mutex(&["k"]))];
    let all = world.serve(host.id, &order).await;
    let in_line = [world.enqueue_one("f").await, world.enqueue_one("c").await];
    assert!(world.claim(&all, 5).await.is_empty());
    assert!(claim(&world, &all, 5, key, 5).await.is_empty());
    assert_eq!(world.waiters("k").await, in_line);
    // Nor does anybody who comes.
    let late = world.enqueue_one("g").await;
    assert!(claim(&world, &all, 5, key, 5).await.is_empty());
    assert_eq!(world.waiters("k").await, [in_line[0], in_line[1], late]);
}

/// Whoever is older than every candidate comes before them: they are not parked behind a line that waits for its turn.
pub async fn older_waiters_come_before_new_jobs(world: World) {
    let Some((host, ids, _, key)) = holding(&world, 3).await else { return };
    world.claim(&host, 10).await;
    world.pass(Duration::from_millis(1));
    let fresh = world.enqueue_many("c", 3).await;
    let claimed = claim(&world, &host, 2, key, 2).await;
    assert_eq!(claimed.iter().map(|run| run.id).collect::<Vec<_>>(), ids[1..]);
    for id in fresh {
        assert!(!world.is_parked(id).await, "nobody had to look at it");
    }
}

/// A waiter of another lane is not taken, and a job under another limit does not wait inside.
pub async fn only_what_could_have_the_slot_waits_inside(world: World) {
    let heavy = gated("heavy", 1, Concurrency { weight: 2, ..semaphore("k", 2) });
    let host = world.host(&[gated("two", 1, semaphore("k", 2)), gated("three", 1, semaphore("k", 3)), heavy]).await;
    let ids = world.enqueue_many("two", 2).await;
    let running = world.claim(&host, 2).await;
    assert_eq!(running.len(), ids.len());
    let Some(key) = held(&running[0]) else { return };
    let third = world.enqueue_one("three").await;
    let started = claim(&world, &host, 5, key, 5).await;
    assert_eq!(started.iter().map(|run| (run.id, run.local)).collect::<Vec<_>>(), [(third, Some(Local::Holds(key)))]);
    // Beside a holder under another limit nobody waits inside.
    let two = world.enqueue_one("two").await;
    assert!(claim(&world, &host, 5, key, 5).await.is_empty());
    assert!(world.is_parked(two).await);
    world.complete(&host, &started[0]).await;
    let heavy = world.enqueue_one("heavy").await;
    assert_eq!(claim(&world, &host, 5, key, 5).await.iter().map(|run| run.id).collect::<Vec<_>>(), [two]);
    assert!(world.is_parked(heavy).await);
}

/// A slot goes through several runs with the ends of all but the last, and nobody else is handed it.
pub async fn a_slot_passes_on_with_the_ends(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 4).await else { return };
    let inside = claim(&world, &host, 2, key, 2).await;
    let other = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    world.claim(&other, 5).await;
    assert_eq!(world.waiters("k").await, ids[3..]);
    let passes = [pass(key, &first, &inside[0]), pass(key, &inside[0], &inside[1])];
    let ends = || vec![settle(&first, done()), settle(&inside[0], done())];
    let exchanged = exchange(&world, &host, &passes, ends(), 0, None).await;
    assert_eq!(exchanged.settled, [SettleVerdict::Settled, SettleVerdict::Settled]);
    assert_eq!((exchanged.not_passed, exchanged.reserved), (Vec::new(), 0));
    assert_eq!(world.holders("k").await, ids[2..3]);
    assert_eq!(world.waiters("k").await, ids[3..]);
    // After an unknown outcome the same is sent again.
    let again = exchange(&world, &host, &passes, ends(), 0, None).await;
    assert_eq!(again.settled, [SettleVerdict::Repeated, SettleVerdict::Repeated]);
    assert_eq!(again.not_passed, []);
    assert_eq!(world.holders("k").await, ids[2..3]);
    world.complete(&host, &inside[1]).await;
    assert_eq!(world.holders("k").await, ids[3..], "it was handed on at last");
    assert_eq!(world.claim_ids(&other, 5).await, ids[3..]);
    // Even when the one that it passed to has ended.
    let again = exchange(&world, &host, &passes, ends(), 0, None).await;
    assert_eq!(again.not_passed, []);
    assert_eq!(world.holders("k").await, ids[3..]);
}

/// Whatever becomes of the run whose slot has passed on.
pub async fn a_slot_passes_on_whatever_the_end(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 2).await else { return };
    let inside = claim(&world, &host, 1, key, 1).await;
    let end = settle(&first, retry_at(world.now()));
    let exchanged = exchange(&world, &host, &[pass(key, &first, &inside[0])], vec![end], 0, None).await;
    assert_eq!((exchanged.settled, exchanged.not_passed), (vec![SettleVerdict::Settled], Vec::new()));
    assert_eq!(world.holders("k").await, ids[1..]);
    assert!(world.claim(&host, 5).await.is_empty(), "the retry finds the key full");
    assert_eq!(world.waiters("k").await, ids[..1]);
    world.complete(&host, &inside[0]).await;
    assert_eq!(world.claim_ids(&host, 5).await, ids[..1]);
}

/// A host hears of a slot that it did not have, and nobody has one more or less for it.
pub async fn a_slot_that_is_not_there_does_not_pass(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    let inside = claim(&world, &host, 2, key, 2).await;
    // From one who waits itself.
    let exchanged = exchange(&world, &host, &[pass(key, &inside[0], &inside[1])], Vec::new(), 0, None).await;
    assert_eq!(exchanged.not_passed, [inside[1].token]);
    // By an old name of the run.
    let old = Claimed { token: warp_domain::ClaimToken(first.token.0 - 1), ..first.clone() };
    let exchanged = exchange(&world, &host, &[pass(key, &old, &inside[0])], Vec::new(), 0, None).await;
    assert_eq!(exchanged.not_passed, [inside[0].token]);
    // By another host.
    let other = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    exchange(&world, &other, &[pass(key, &first, &inside[0])], Vec::new(), 0, None).await;
    assert_eq!(world.holders("k").await, ids[..1]);
    // After its end, which has freed it.
    world.complete(&host, &first).await;
    let exchanged = exchange(&world, &host, &[pass(key, &first, &inside[0])], Vec::new(), 0, None).await;
    assert_eq!(exchanged.not_passed, [inside[0].token]);
    assert_eq!(world.holders("k").await, []);
}

/// Who has not begun goes back uncharged, with its place in line if it had one, and hands nothing on.
pub async fn a_local_waiter_goes_back_as_it_came(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    world.claim(&host, 5).await;
    assert_eq!(world.waiters("k").await, ids[1..]);
    let inside = claim(&world, &host, 1, key, 1).await;
    assert_eq!(inside[0].id, ids[1]);
    let (requeued, late) = (world.counter("stats:requeued").await, inside[0].clone());
    world.end(&host, &inside[0], Ending::NotBegun).await;
    assert_eq!(world.holders("k").await, ids[..1]);
    assert_eq!(world.waiters("k").await, ids[1..], "it stands where it stood, and no claim has to park it again");
    let details = world.details(ids[1]).await;
    assert_eq!((details.summary.state, details.summary.attempts), (State::Enqueued, 0));
    assert_eq!(world.events(ids[1]).await, world.events(ids[2]).await, "nobody is told that it was away");
    assert!(matches!(details.waiting, Some(Waiting::ForKey { place: 1, .. })), "{:?}", details.waiting);
    assert_eq!(world.counter("stats:requeued").await, requeued);
    // The same end once more, and another of that run, change nothing.
    let again = exchange(&world, &host, &[], vec![settle(&late, Ending::NotBegun)], 0, None).await;
    assert_eq!(again.settled, [SettleVerdict::Repeated]);
    assert_eq!(world.waiters("k").await, ids[1..]);
    // The key comes free beside it: it starts like anybody else.
    let inside = claim(&world, &host, 2, key, 2).await;
    assert_eq!(inside.iter().map(|run| (run.id, run.run, run.attempt)).collect::<Vec<_>>(), [(ids[1], 1, 1), (ids[2], 1, 1)]);
    world.complete(&host, &first).await;
    assert_eq!(world.holders("k").await, []);
    for run in inside.iter().rev() {
        world.end(&host, run, Ending::NotBegun).await;
    }
    let next = world.claim_one(&host).await;
    // The later one was back first, when nobody stood before it.
    assert_eq!((next.id, next.run, next.attempt, held(&next)), (ids[2], 1, 1, Some(key)));
    assert_eq!(world.waiters("k").await, ids[1..2]);
}

/// Whoever never stood in line and does not begin is ready again, unknown to it; somebody who wants it gone finds it gone.
pub async fn a_fresh_local_waiter_goes_back_as_it_came(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    let inside = claim(&world, &host, 2, key, 2).await;
    assert_eq!(inside.iter().map(|run| run.id).collect::<Vec<_>>(), ids[1..]);
    world.end(&host, &inside[0], Ending::NotBegun).await;
    assert_eq!(world.waiters("k").await, []);
    assert_eq!(world.events(ids[1]).await, ["Created"]);
    assert_eq!(world.details(ids[1]).await.summary.attempts, 0);
    world.cancel(ids[2], CommandVerdict::Requested).await;
    world.end(&host, &inside[1], Ending::NotBegun).await;
    assert_eq!(world.state(ids[2]).await, State::Deleted);
    let history = world.details(ids[2]).await.audit;
    let history: Vec<_> = history.iter().map(|row| (row.event.as_str(), row.run)).collect();
    assert_eq!(history, [("Created", 0), ("CancellationRequested", 0), ("Deleted", 0)], "it has never been executed");
    assert!(world.claim(&host, 5).await.is_empty());
    assert_eq!(world.waiters("k").await, ids[1..2], "now it is parked, and told of");
    assert_eq!(world.events(ids[1]).await, ["Created", "Requeued"]);
    world.complete(&host, &first).await;
    assert_eq!(world.claim_one(&host).await.run, 1);
}

/// Back and claimed again in one round trip, as every host does: it is the same run's number, and the history knows one.
pub async fn a_local_waiter_goes_back_and_comes_again_at_once(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    world.claim(&host, 5).await;
    let inside = claim(&world, &host, 1, key, 1).await;
    let settles = vec![settle(&first, done()), settle(&inside[0], Ending::NotBegun)];
    // The end of the first reserves the slot for whoever stands in line, which is the third until the second is back.
    let again = exchange(&world, &host, &[], settles.into_iter().rev().collect(), 5, None).await;
    assert_eq!(again.claimed.iter().map(|run| (run.id, run.run, run.attempt)).collect::<Vec<_>>(), [(ids[1], 1, 1)]);
    world.complete(&host, &again.claimed[0]).await;
    let details = world.details(ids[1]).await;
    assert_eq!((details.summary.state, details.summary.runs, details.summary.attempts), (State::Completed, 1, 1));
    assert_eq!(world.events(ids[1]).await, ["Created", "Requeued", "Processing", "Completed"]);
}

/// One to whom a slot has come and who does not begin all the same gives it to whoever is next.
pub async fn a_slot_that_came_to_a_waiter_that_does_not_begin_is_handed_on(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    world.claim(&host, 5).await;
    let inside = claim(&world, &host, 1, key, 1).await;
    exchange(&world, &host, &[pass(key, &first, &inside[0])], vec![settle(&first, done())], 0, None).await;
    assert_eq!(world.holders("k").await, ids[1..2]);
    world.end(&host, &inside[0], Ending::NotBegun).await;
    let next = world.claim_one(&host).await;
    assert_eq!((next.id, next.run, next.attempt), (ids[1], 1, 1));
    assert_eq!(world.waiters("k").await, ids[2..]);
}

/// Under an operator's limit nobody new waits inside. Who does already may still take a slot's place: no more hold it.
pub async fn an_operators_limit_stops_new_local_waiters(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 3).await else { return };
    let inside = claim(&world, &host, 1, key, 1).await;
    world.limit("k", 1).await;
    assert!(claim(&world, &host, 5, key, 5).await.is_empty());
    assert_eq!(world.waiters("k").await, ids[2..]);
    assert!(claim(&world, &host, 5, key, 5).await.is_empty());
    let exchanged = exchange(&world, &host, &[pass(key, &first, &inside[0])], vec![settle(&first, done())], 0, None).await;
    assert_eq!(exchanged.not_passed, []);
    assert_eq!(world.holders("k").await, ids[1..2]);
    world.store.remove_limit("k", world.now()).await.expect("remove a limit");
    assert_eq!(claim(&world, &host, 5, key, 5).await.iter().map(|run| run.id).collect::<Vec<_>>(), ids[2..]);
}

/// Surplus work is deleted, wherever it could wait; what has run before may wait inside.
pub async fn skip_is_decided_before_anybody_waits_inside(world: World) {
    let host = world.host(&[gated("c", 1, skipping(mutex(&["k"])))]).await;
    let ids = world.enqueue_many("c", 1).await;
    let first = world.claim_one(&host).await;
    let Some(key) = held(&first) else { return };
    world.end(&host, &first, retry_at(world.now())).await;
    world.pass(Duration::from_millis(1));
    let other = world.job("c", "{}");
    let other = world.enqueue(vec![warp_store::NewJob { due: Some(warp_domain::UnixMillis(1)), ..other }]).await[0];
    let second = world.claim_one(&host).await;
    assert_eq!(second.id, other);
    let surplus = world.enqueue_one("c").await;
    let claimed = claim(&world, &host, 5, key, 5).await;
    assert_eq!(claimed.iter().map(|run| (run.id, run.local)).collect::<Vec<_>>(), [(ids[0], Some(Local::Waits(key)))]);
    assert_eq!(world.state(surplus).await, State::Deleted);
}

/// A dead host's local waiters come back like all its runs, and the key goes on.
pub async fn a_rescue_gives_local_waiters_back(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 4).await else { return };
    let inside = claim(&world, &host, 2, key, 2).await;
    // One has begun in place of the first, and nobody has heard of it.
    assert_eq!(inside.len(), 2);
    let other = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    assert!(world.claim(&other, 5).await.is_empty());
    let rescued = world.rescue(&host).await;
    assert_eq!((rescued.requeued, rescued.exhausted), (3, 0));
    assert_eq!(world.holders("k").await, ids[3..], "who stood in line is next");
    let late = exchange(&world, &other, &[pass(key, &first, &inside[0])], vec![settle(&first, done())], 0, None).await;
    assert_eq!(late.settled, [SettleVerdict::Late]);
    let mut ran = world.drain(&other).await;
    ran.sort_unstable();
    assert_eq!(ran, ids, "each runs to its end, once");
    for id in ids {
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
}

/// A renewal that does not know a local waiter hands it back, as it does with every run.
pub async fn a_renewal_hands_back_a_local_waiter_that_its_host_does_not_know(world: World) {
    let Some((host, ids, first, key)) = holding(&world, 2).await else { return };
    let inside = claim(&world, &host, 1, key, 1).await;
    let known = [&first, &inside[0]].map(|run| (run.handle, run.token)).to_vec();
    let renewed = world.renew(host.id, known).await;
    assert_eq!((renewed.handed_back, renewed.lost), (0, Vec::new()));
    let renewed = world.renew(host.id, vec![(first.handle, first.token)]).await;
    assert_eq!(renewed.handed_back, 1);
    assert_eq!(world.holders("k").await, ids[..1]);
    assert_eq!(world.state(ids[1]).await, State::Enqueued);
}
