//! Keys: who starts, who waits, who is next (slots.md, kind B).

use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::policy::{Concurrency, OnRetry};
use warp_store::{CommandVerdict, NewJob, Waiting};

use crate::world::{World, done, fifo, gated, hand_back, mutex, plain, retry_at, semaphore, settle, skipping};

/// A mutex: one at a time, and a chain on one host costs one round trip per job.
pub async fn a_mutex_runs_one_at_a_time(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 6).await;
    let mut settles = Vec::new();
    for id in &ids {
        let exchanged = world.exchange(&host, std::mem::take(&mut settles), 10).await;
        assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [*id], "the slot goes on in the same exchange");
        assert_eq!(world.holders("k").await, [*id]);
        settles.push(settle(&exchanged.claimed[0], done()));
    }
    world.exchange(&host, settles, 10).await;
    assert_eq!(world.holders("k").await, []);
    assert_eq!(world.counter("stats:requeued:concurrency").await, 5);
    assert_eq!(world.counter("stats:succeeded").await, 6);
}

/// A7: one batch of one key holds one job of it, whatever its size.
pub async fn one_batch_holds_no_key_twice(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    world.enqueue((0..500).map(|n| world.job("c", &format!("{{\"n\": {}}}", n % 5))).collect()).await;
    let mut settles = Vec::new();
    let mut ran = 0;
    while ran < 500 {
        let claimed = world.exchange(&host, std::mem::take(&mut settles), 500).await.claimed;
        let mut keys: Vec<_> = claimed.iter().map(|claimed| claimed.payload.to_string()).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), claimed.len(), "two jobs of one key in a batch");
        assert_eq!(claimed.len(), 5, "every key has a runner as long as there are jobs");
        ran += claimed.len();
        settles = claimed.iter().map(|claimed| settle(claimed, done())).collect();
    }
}

/// A semaphore is filled and not overfilled, over two hosts.
pub async fn a_semaphore_is_filled_and_not_overfilled(world: World) {
    let served = [gated("c", 1, semaphore("k", 3))];
    let (one, two) = (world.host(&served).await, world.host(&served).await);
    world.enqueue_many("c", 8).await;
    let first = world.claim(&one, 2).await;
    let second = world.claim(&two, 5).await;
    assert_eq!((first.len(), second.len()), (2, 1));
    assert_eq!(world.key("k").await.holders.iter().map(|holder| (holder.slot, holder.limit)).collect::<Vec<_>>(), [(0, 3), (1, 3), (2, 3)]);
    assert_eq!(world.key("k").await.waiting, 5);
    world.complete(&one, &first[1]).await;
    // Reserved for the oldest waiter; whoever claims first runs it.
    assert_eq!(world.holders("k").await.len(), 3);
    assert_eq!(world.claim(&two, 5).await.len(), 1);
    assert_eq!(world.claim(&one, 5).await.len(), 0);
}

/// Skip deletes what is surplus and names the holder; the text is the reference's.
pub async fn skip_deletes_what_is_surplus_and_says_who_held(world: World) {
    let host = world.host(&[gated("c", 1, skipping(semaphore("k", 2)))]).await;
    let ids = world.enqueue_many("c", 4).await;
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!((exchanged.claimed.len(), exchanged.skipped), (2, 2));
    for id in &ids[2..] {
        let details = world.details(*id).await;
        assert_eq!((details.summary.state, details.summary.runs), (State::Deleted, 0));
        let row = details.audit.last().expect("history");
        assert_eq!(row.event, "Deleted");
        assert!(row.message.starts_with("Cancelled — 'k' full (2 slots)"), "{}", row.message);
        assert!(row.message.contains(&ids[0].to_string()), "the holder is named: {}", row.message);
    }
    assert_eq!((world.counter("stats:deleted").await, world.counter("stats:deleted:skip").await), (2, 2));
    for claimed in &exchanged.claimed {
        world.complete(&host, claimed).await;
    }
    let next = world.enqueue_one("c").await;
    assert_eq!(world.claim_ids(&host, 10).await, [next]);
}

/// Skip is decided once: what has run before waits (retry, hand-back, rescue, requeue).
pub async fn skip_never_deletes_what_has_run(world: World) {
    let served = [gated("c", 1, skipping(mutex(&["k"])))];
    let host = world.host(&served).await;
    for way in ["retry", "hand-back", "rescue", "requeue"] {
        let id = world.enqueue_one("c").await;
        let doomed = world.host(&served).await;
        let claimed = world.claim_one(&doomed).await;
        match way {
            "retry" => world.end(&doomed, &claimed, retry_at(world.now())).await,
            "hand-back" => world.end(&doomed, &claimed, hand_back()).await,
            "rescue" => assert_eq!(world.rescue(&doomed).await.requeued, 1),
            _ => {
                world.complete(&doomed, &claimed).await;
            }
        }
        // Somebody else takes the key before it comes back.
        let holder = NewJob { contract: "other".into(), ..world.job("c", "{}") };
        world.enqueue(vec![holder.clone()]).await;
        let rival = world.host(&[gated("other", 1, mutex(&["k"]))]).await;
        let held = world.claim_one(&rival).await;
        assert_eq!(held.id, holder.id, "{way}");
        if way == "requeue" {
            world.requeue(id, CommandVerdict::Done).await;
        }
        let exchanged = world.exchange(&host, Vec::new(), 10).await;
        assert_eq!((exchanged.skipped, exchanged.parked), (0, 1), "{way}");
        assert!(world.is_parked(id).await, "{way}");
        world.complete(&rival, &held).await;
        assert_eq!(world.drain(&host).await, [id], "{way}");
    }
}

/// What only an operator's lower limit refuses is not surplus: it waits.
pub async fn skip_does_not_count_an_operators_limit(world: World) {
    let host = world.host(&[gated("c", 1, skipping(semaphore("k", 3)))]).await;
    world.limit("k", 1).await;
    world.enqueue_many("c", 3).await;
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!((exchanged.claimed.len(), exchanged.parked, exchanged.skipped), (1, 2, 0));
}

/// A wait is one row of history and one count, however often the job is refused in it.
pub async fn a_wait_is_told_once(world: World) {
    let host = world.host(&[gated("wide", 1, mutex(&["a", "b"])), gated("a", 1, mutex(&["a"])), gated("b", 1, mutex(&["b"]))]).await;
    world.enqueue_one("a").await;
    let on_a = world.claim_one(&host).await;
    world.enqueue_one("b").await;
    let on_b = world.claim_one(&host).await;
    let wide = world.enqueue_one("wide").await;
    assert_eq!(world.exchange(&host, Vec::new(), 10).await.parked, 1);
    // Which key refuses first is the store's one order of keys.
    let Some(Waiting::ForKey { key, .. }) = world.details(wide).await.waiting else { panic!("it waits for a key") };
    let (first, second) = if key.key == "a" { (on_a, on_b) } else { (on_b, on_a) };
    // Woken for the first, refused on the second.
    let exchanged = world.exchange(&host, vec![settle(&first, done())], 10).await;
    assert_eq!((exchanged.parked, exchanged.parked_again), (1, 1));
    let requeued = || async { world.events(wide).await.into_iter().filter(|event| event == "Requeued").count() };
    assert_eq!((requeued().await, world.counter("stats:requeued:concurrency").await), (1, 1));
    let row = world.details(wide).await.audit.into_iter().find(|row| row.event == "Requeued").expect("history");
    assert_eq!(row.message, format!("Requeued — '{}' full (1 slots)", key.key));
    let exchanged = world.exchange(&host, vec![settle(&second, done())], 10).await;
    assert_eq!(exchanged.claimed[0].id, wide);
    assert_eq!(requeued().await, 1);
}

/// A waiting job shows key, place, limit and whose limit that is.
pub async fn a_parked_job_says_what_it_waits_for(world: World) {
    let host = world.host(&[gated("c", 1, semaphore("k", 2))]).await;
    let ids = world.enqueue_many("c", 5).await;
    world.claim(&host, 10).await;
    let Some(Waiting::ForKey { key, place, limit, limit_is_admin, refusal }) = world.details(ids[4]).await.waiting else {
        panic!("it waits for the key");
    };
    assert_eq!((key.key.as_str(), place, limit, limit_is_admin), ("k", 3, 2, false));
    assert!(refusal.contains("'k'"), "{refusal}");
    assert_eq!(key.holders.iter().map(|holder| holder.job).collect::<Vec<_>>(), ids[..2]);
    assert_eq!(key.holders[0].host.as_deref(), Some("machine-1"));
    assert_eq!(key.waiters.iter().map(|waiter| waiter.job).collect::<Vec<_>>(), ids[2..]);
    assert!(key.waiters.iter().all(|waiter| waiter.claimable && waiter.limit == 2 && waiter.weight == 1));
    world.limit("k", 1).await;
    let Some(Waiting::ForKey { limit, limit_is_admin, .. }) = world.details(ids[4]).await.waiting else { panic!("it waits still") };
    assert_eq!((limit, limit_is_admin), (1, true));
    assert_eq!(world.details(ids[4]).await.keys, ["k"]);
}

/// First in, first out, also for those who were refused at different times and by different hosts.
pub async fn fifo_keeps_the_order(world: World) {
    let served = [gated("c", 1, fifo(mutex(&["k"]), OnRetry::Block))];
    let (one, two) = (world.host(&served).await, world.host(&served).await);
    let ids = world.enqueue_many("c", 3).await;
    let mut order = Vec::new();
    let mut running = world.claim_one(&one).await;
    world.claim(&two, 10).await;
    let late = world.enqueue_many("c", 2).await;
    for round in 0..5 {
        order.push(running.id);
        world.complete(&one, &running).await;
        let next = world.claim(if round % 2 == 0 { &two } else { &one }, 10).await;
        let Some(next) = next.into_iter().next() else { break };
        let owner = if round % 2 == 0 { &two } else { &one };
        world.end(owner, &next, done()).await;
        order.push(next.id);
        let Some(next) = world.claim(&one, 10).await.into_iter().next() else { break };
        running = next;
    }
    assert_eq!(order, [ids, late].concat());
}

/// `on_retry = "block"` keeps the key for the head through its delay, even if it started without waiting.
pub async fn a_blocking_head_keeps_the_key_through_its_delay(world: World) {
    let host = world.host(&[gated("c", 1, fifo(mutex(&["k"]), OnRetry::Block))]).await;
    let ids = world.enqueue_many("c", 3).await;
    let head = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    world.end(&host, &head, retry_at(world.in_seconds(60))).await;
    assert_eq!(world.holders("k").await, [], "its slot is free before the delay");
    assert_eq!(world.claim_ids(&host, 10).await, [], "and nobody passes it");
    world.pass(Duration::from_secs(60));
    assert_eq!(world.drain(&host).await, ids);
}

/// … and passing on when the head is cancelled in its delay (C5).
pub async fn a_blocking_head_that_is_cancelled_lets_go(world: World) {
    let host = world.host(&[gated("c", 1, fifo(mutex(&["k"]), OnRetry::Block))]).await;
    let ids = world.enqueue_many("c", 3).await;
    let head = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    world.end(&host, &head, retry_at(world.in_seconds(60))).await;
    world.cancel(head.id, CommandVerdict::Done).await;
    assert_eq!(world.drain(&host).await, ids[1..]);
}

/// `on_retry = "pass"` lets the others by, and the head queues again behind them.
pub async fn a_passing_head_lets_others_by(world: World) {
    let host = world.host(&[gated("c", 1, fifo(mutex(&["k"]), OnRetry::Pass))]).await;
    let ids = world.enqueue_many("c", 3).await;
    let head = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    world.end(&host, &head, retry_at(world.now())).await;
    assert_eq!(world.drain(&host).await, [ids[1], ids[2], ids[0]]);
}

/// A12: one job that is due in an hour does not freeze its key.
pub async fn a_job_of_the_far_future_freezes_nothing(world: World) {
    for on_retry in [OnRetry::Block, OnRetry::Pass] {
        let key = format!("k-{on_retry:?}");
        let host = world.host(&[gated("c", 1, fifo(mutex(&[&key]), on_retry))]).await;
        let later = NewJob { due: Some(world.in_seconds(3_600)), ..world.job("c", "{}") };
        world.enqueue(vec![later.clone()]).await;
        let ids = world.enqueue_many("c", 10).await;
        assert_eq!(world.drain(&host).await, ids);
        assert_eq!(world.state(later.id).await, State::Scheduled);
        world.cancel(later.id, CommandVerdict::Done).await;
    }
}

/// Weights: a heavy job takes several slots, waits for them, and is not starved by light ones.
pub async fn weights_are_counted_and_heavy_jobs_do_not_starve(world: World) {
    let weighing = |weight| Concurrency { weight, ..semaphore("k", 3) };
    let host = world.host(&[gated("light", 1, weighing(1)), gated("heavy", 1, weighing(2))]).await;
    world.enqueue_many("light", 2).await;
    let light = world.claim(&host, 2).await;
    let heavy = world.enqueue_one("heavy").await;
    assert_eq!(world.claim_ids(&host, 5).await, [], "two of three slots are taken");
    let young = world.enqueue_one("light").await;
    assert_eq!(world.claim_ids(&host, 5).await, [], "nobody overtakes the heavy one");
    let exchanged = world.exchange(&host, vec![settle(&light[0], done())], 5).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [heavy]);
    assert_eq!(world.holders("k").await.iter().filter(|holder| **holder == heavy).count(), 2);
    world.complete(&host, &light[1]).await;
    assert_eq!(world.claim_ids(&host, 5).await, [young]);
    world.complete(&host, &exchanged.claimed[0]).await;
    assert_eq!(world.holders("k").await, [young], "both its slots are free");
}

/// A weight above the limit in force waits, says so, and holds nobody up.
pub async fn a_job_too_heavy_for_the_limit_holds_nobody_up(world: World) {
    let weighing = |weight| Concurrency { weight, ..semaphore("k", 3) };
    let host = world.host(&[gated("light", 1, weighing(1)), gated("heavy", 1, weighing(3))]).await;
    world.limit("k", 2).await;
    let heavy = world.enqueue_one("heavy").await;
    assert_eq!(world.claim_ids(&host, 5).await, []);
    assert!(
        matches!(world.details(heavy).await.waiting, Some(Waiting::ForKey { refusal, .. }) if refusal.contains("cannot run at limit 2"))
    );
    let light = world.enqueue_one("light").await;
    let running = world.claim_one(&host).await;
    assert_eq!(running.id, light);
    world.complete(&host, &running).await;
    assert!(world.store.remove_limit("k", world.now()).await.expect("remove"));
    assert_eq!(world.drain(&host).await, [heavy]);
}

/// C4: two keys in opposite orders finish; all or none.
pub async fn several_keys_are_taken_all_or_none_in_one_order(world: World) {
    let host = world.host(&[gated("trade", 1, mutex(&["player:{from}", "player:{to}"]))]).await;
    let trades = (0..40).map(|n| world.job("trade", if n % 2 == 0 { r#"{"from": 1, "to": 2}"# } else { r#"{"from": 2, "to": 1}"# }));
    let ids = world.enqueue(trades.collect()).await;
    let first = world.claim(&host, 10).await;
    assert_eq!(first.len(), 1);
    assert_eq!((world.holders("player:1").await, world.holders("player:2").await), (vec![ids[0]], vec![ids[0]]));
    world.complete(&host, &first[0]).await;
    assert_eq!(world.drain(&host).await.len(), 39);
    assert_eq!((world.holders("player:1").await, world.waiters("player:2").await), (vec![], vec![]));
    // Twice the same key is that key once.
    let one = world.enqueue(vec![world.job("trade", r#"{"from": 5, "to": 5}"#)]).await;
    assert_eq!(world.claim_ids(&host, 1).await, one);
    assert_eq!(world.holders("player:5").await, one);
}

/// W4: a wide job that is woken for one key and refused on the other hands the first one on.
pub async fn a_wide_job_that_is_refused_hands_on_what_it_was_woken_for(world: World) {
    let host = world.host(&[gated("wide", 1, mutex(&["a", "b"])), gated("a", 1, mutex(&["a"])), gated("b", 1, mutex(&["b"]))]).await;
    world.enqueue_one("b").await;
    let on_b = world.claim_one(&host).await;
    world.enqueue_one("a").await;
    let on_a = world.claim_one(&host).await;
    let wide = world.enqueue_one("wide").await;
    assert_eq!(world.claim_ids(&host, 5).await, []);
    let behind = world.enqueue_one("a").await;
    assert_eq!(world.claim_ids(&host, 5).await, []);
    // `a` is free: the wide one is woken, refused on `b`, and the other `a` must not stay beside a free slot.
    let mut started = world.exchange(&host, vec![settle(&on_a, done())], 5).await.claimed;
    started.extend(world.claim(&host, 5).await);
    assert_eq!(started.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [behind]);
    world.complete(&host, &started[0]).await;
    world.complete(&host, &on_b).await;
    assert_eq!(world.drain(&host).await, [wide]);
}

/// B6: lowering kills nobody, and nobody starts until few enough hold; the operator is told who is over.
pub async fn lowering_a_limit_kills_nobody(world: World) {
    let host = world.host(&[gated("c", 1, semaphore("k", 3))]).await;
    world.enqueue_many("c", 6).await;
    let running = world.claim(&host, 10).await;
    let seen = world.limit("k", 1).await;
    assert_eq!((seen.admin_limit, seen.holders.len(), seen.waiting), (Some(1), 3, 3));
    world.complete(&host, &running[0]).await;
    world.complete(&host, &running[1]).await;
    assert_eq!(world.claim_ids(&host, 10).await, [], "one holds, one is allowed");
    world.complete(&host, &running[2]).await;
    assert_eq!(world.claim(&host, 10).await.len(), 1);
}

/// B6, W7: raising starts the difference at once, and removing goes back to the stamps.
pub async fn raising_a_limit_starts_the_difference(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    world.enqueue_many("c", 8).await;
    world.claim(&host, 10).await;
    world.limit("k", 4).await;
    assert_eq!(world.holders("k").await.len(), 4, "three are reserved in that transaction");
    assert_eq!(world.claim(&host, 10).await.len(), 3);
    assert!(world.store.remove_limit("k", world.now()).await.expect("remove"));
    assert!(!world.store.remove_limit("k", world.now()).await.expect("remove"), "there is none any more");
    assert_eq!(world.claim_ids(&host, 10).await, []);
    assert_eq!(world.key("k").await.waiting, 4);
}

/// 0 pauses the key: nothing starts, nobody is skipped; and a limit outlives the jobs, since it is the operator's.
pub async fn zero_pauses_a_key(world: World) {
    world.limit("k", 0).await;
    let host = world.host(&[gated("c", 1, skipping(mutex(&["k"]))), plain("free")]).await;
    let ids = world.enqueue_many("c", 2).await;
    let free = world.enqueue_one("free").await;
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!((exchanged.claimed[0].id, exchanged.claimed.len(), exchanged.skipped), (free, 1, 0));
    for id in &ids {
        // The second stands behind the first, and yet it is the pause that its reader must hear of.
        let waiting = world.details(*id).await.waiting;
        assert!(matches!(&waiting, Some(Waiting::ForKey { refusal, .. }) if refusal.contains("paused")), "{waiting:?}");
    }
    let limits = world.store.limits().await.expect("limits");
    assert_eq!((limits.len(), limits[0].key.as_str(), limits[0].limit, limits[0].set_by.as_str()), (1, "k", 0, "ada"));
    world.limit("k", 5).await;
    assert_eq!(world.drain(&host).await, ids);
}

/// A reservation that was made before the limit was lowered does not start above it.
pub async fn a_reservation_obeys_a_limit_lowered_since(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 2).await;
    let running = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    world.complete(&host, &running).await;
    assert_eq!(world.holders("k").await, [ids[1]], "reserved");
    assert_eq!(world.details(ids[1]).await.waiting, Some(Waiting::Reserved));
    world.limit("k", 0).await;
    assert_eq!(world.claim_ids(&host, 10).await, []);
    world.limit("k", 1).await;
    assert_eq!(world.claim_ids(&host, 10).await, [ids[1]]);
}

/// Five jobs wait while a new version raises the limit from 1 to 10: they stay at 1, and an admin limit changes
/// them. New jobs take the new policy, and still nobody runs beside a holder at 1.
pub async fn waiters_keep_the_limit_they_were_stamped_with(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 6).await;
    let first = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    let host = world.serve(host.id, &[gated("c", 2, semaphore("k", 10))]).await;
    let young = world.enqueue_many("c", 3).await;
    let exchanged = world.exchange(&host, vec![settle(&first, done())], 10).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [ids[1]], "one at a time, as stamped");
    for id in &ids[1..] {
        let stamp = world.details(*id).await.stamp.expect("stamped when it was parked");
        assert_eq!(stamp.concurrency.expect("declared").value.limit, 1);
    }
    world.limit("k", 4).await;
    assert_eq!(world.claim_ids(&host, 10).await, ids[2..5], "the admin limit counts for all");
    world.store.remove_limit("k", world.now()).await.expect("remove");
    for _ in 0..2 {
        let mut rest = world.drain(&host).await;
        rest.retain(|id| young.contains(id));
        assert!(rest.is_empty() || rest == young);
    }
}

/// A holder at limit 1 lets nobody start beside it, whatever the newcomer was stamped with, and the reverse.
pub async fn a_holder_at_one_is_alone(world: World) {
    let host = world.host(&[gated("one", 1, mutex(&["k"])), gated("ten", 1, semaphore("k", 10))]).await;
    world.enqueue_one("one").await;
    let exclusive = world.claim_one(&host).await;
    let tens = world.enqueue_many("ten", 3).await;
    assert_eq!(world.claim_ids(&host, 10).await, []);
    let exchanged = world.exchange(&host, vec![settle(&exclusive, done())], 10).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), tens);
    let one = world.enqueue_one("one").await;
    assert_eq!(world.claim_ids(&host, 10).await, []);
    let late_ten = world.enqueue_one("ten").await;
    assert_eq!(world.claim_ids(&host, 10).await, [], "it would overtake the older waiter");
    for claimed in &exchanged.claimed {
        world.complete(&host, claimed).await;
    }
    assert_eq!(world.claim_ids(&host, 10).await, [one]);
    assert!(world.is_parked(late_ten).await);
}

/// C5: a waiter or a reserved job that is cancelled or deleted passes its place on.
pub async fn who_leaves_the_line_passes_on(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue_many("c", 6).await;
    let running = world.claim_one(&host).await;
    world.claim(&host, 10).await;
    world.cancel(ids[2], CommandVerdict::Done).await;
    assert_eq!(world.waiters("k").await, [ids[1], ids[3], ids[4], ids[5]]);
    world.complete(&host, &running).await;
    assert_eq!(world.holders("k").await, [ids[1]]);
    world.cancel(ids[1], CommandVerdict::Done).await;
    assert_eq!(world.holders("k").await, [ids[3]], "the reservation goes on");
    assert_eq!(world.store.delete(ids[3], world.now()).await.expect("delete"), CommandVerdict::Done);
    assert_eq!(world.holders("k").await, [ids[4]]);
    assert_eq!(world.place(ids[5]).await, 1);
    assert_eq!(world.drain(&host).await, ids[4..]);
}

/// B7: a reservation that nobody claims goes to the next whom somebody can run.
pub async fn an_unclaimed_reservation_goes_on(world: World) {
    let a = world.host(&[gated("a", 1, mutex(&["k"]))]).await;
    let b = world.host(&[gated("b", 1, mutex(&["k"]))]).await;
    world.enqueue_one("a").await;
    let running = world.claim_one(&a).await;
    let of_b = world.enqueue_one("b").await;
    world.claim(&b, 5).await;
    let of_a = world.enqueue_one("a").await;
    world.claim(&a, 5).await;
    world.complete(&a, &running).await;
    assert_eq!(world.holders("k").await, [of_b]);
    let patience = Duration::from_secs(2);
    assert_eq!(world.store.expire_reservations(patience, world.now()).await.expect("expire"), 0);
    world.pass(patience);
    assert_eq!(world.store.expire_reservations(patience, world.now()).await.expect("expire"), 1);
    assert_eq!((world.holders("k").await, world.waiters("k").await), (vec![of_a], vec![of_b]));
    assert_eq!(world.claim_ids(&a, 5).await, [of_a]);
}

/// B7: waiters that no live host runs are passed over, and counted again when somebody serves them.
pub async fn waiters_without_a_host_are_passed_over(world: World) {
    let a = world.host(&[gated("a", 1, mutex(&["k"]))]).await;
    let b = world.host(&[gated("b", 1, mutex(&["k"]))]).await;
    world.enqueue_one("a").await;
    let running = world.claim_one(&a).await;
    let of_b = world.enqueue_one("b").await;
    world.claim(&b, 5).await;
    let of_a = world.enqueue_one("a").await;
    world.claim(&a, 5).await;
    world.store.deregister(b.id, world.now()).await.expect("deregister");
    assert!(!world.key("k").await.waiters[0].claimable);
    world.complete(&a, &running).await;
    assert_eq!(world.holders("k").await, [of_a]);
    let claimed = world.claim_one(&a).await;
    world.complete(&a, &claimed).await;
    assert_eq!(world.holders("k").await, [], "nobody can run the one that is left");
    let b = world.host(&[gated("b", 1, mutex(&["k"]))]).await;
    assert_eq!(world.holders("k").await, [of_b], "serving it hands the key on");
    assert_eq!(world.claim_ids(&b, 5).await, [of_b]);
}

/// A4: five thousand gated jobs first, one runnable last: it starts with the first claim.
pub async fn gated_jobs_in_front_hide_nobody(world: World) {
    let host = world.host(&[gated("gated", 1, mutex(&["k"])), plain("free")]).await;
    for _ in 0..5 {
        world.enqueue_many("gated", 1_000).await;
    }
    world.pass(Duration::from_millis(1));
    let free = world.enqueue_one("free").await;
    let exchanged = world.exchange(&host, Vec::new(), 16).await;
    assert_eq!(exchanged.claimed.len(), 2);
    assert_eq!(exchanged.claimed[1].id, free);
    assert_eq!(exchanged.parked, 4_999);
    assert_eq!(world.key("k").await.waiting, 4_999);
}

/// A long line is walked to its end, whatever part of it a driver loads.
pub async fn a_long_line_is_served_to_its_end(world: World) {
    let host = world.host(&[gated("c", 1, fifo(mutex(&["k"]), OnRetry::Block))]).await;
    let ids = world.enqueue_many("c", 700).await;
    let running = world.claim_one(&host).await;
    world.claim(&host, 1_000).await;
    world.limit("k", 600).await;
    assert_eq!(world.holders("k").await.len(), 600, "raising starts the difference, all of it");
    let claimed = world.claim_ids(&host, 1_000).await;
    assert_eq!(claimed, ids[1..600]);
    world.complete(&host, &running).await;
    assert_eq!(world.claim_ids(&host, 10).await, ids[600..601]);
}

/// What needs no key never waits for one, however many do.
pub async fn waiters_cost_others_nothing(world: World) {
    let host = world.host(&[gated("gated", 1, mutex(&["k"])), plain("free")]).await;
    world.enqueue_many("gated", 1_000).await;
    world.claim(&host, 1_000).await;
    let free = world.enqueue_many("free", 100).await;
    let exchanged = world.exchange(&host, Vec::new(), 100).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), free);
    assert!(exchanged.claimed.iter().all(|claimed| !claimed.keyed));
    assert_eq!(exchanged.parked, 0, "waiters are not looked at again");
}

/// Of two holders of a key, the later has the larger token: it fences.
pub async fn later_holders_have_larger_tokens(world: World) {
    let served = [gated("c", 1, mutex(&["k"]))];
    let hosts = [world.host(&served).await, world.host(&served).await];
    world.enqueue_many("c", 10).await;
    let mut last = None;
    for round in 0..10 {
        let host = &hosts[round % 2];
        let claimed = world.claim_one(host).await;
        assert!(claimed.keyed);
        assert!(last < Some(claimed.token), "{last:?} then {:?}", claimed.token);
        last = Some(claimed.token);
        world.complete(host, &claimed).await;
    }
}
