//! A store that fails, answers that are lost, a lease that lapses, a host that is taken for dead: nothing is lost,
//! nothing is doubled, and work goes on by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use warp_domain::ending::{Ending, Observed, Outcome, State};
use warp_pipeline::{Handler, StateFault, StateOp, StopReason};
use warp_store::StoreErrorKind;
use warp_worker::{HostConfig, StopLevel};

use crate::stopping::take_for_dead;
use crate::world::{Fault, Gate, World, code, config_of, done, mutex, no_op, offer, plain, retry, retryable};

const UNKNOWN: StoreErrorKind = StoreErrorKind::OutcomeUnknown;
const AWAY: StoreErrorKind = StoreErrorKind::Unavailable;

/// The first run waits to be stopped and then tries two writes, later ones complete. With it comes the number of
/// writes that were refused.
fn first_is_stopped(gate: &Gate) -> (Arc<dyn Handler>, Arc<AtomicU32>) {
    let (gate, refused) = (gate.clone(), Arc::new(AtomicU32::new(0)));
    let count = refused.clone();
    let handler = code(move |attempt, calls, stop| {
        let (gate, count) = (gate.clone(), count.clone());
        async move {
            if attempt.run > 1 {
                return done();
            }
            gate.open(1);
            gate.pass().await;
            assert_eq!(stop.stopped().await, StopReason::HandBack);
            for at_once in [true, false] {
                let late = calls.state("b", "k", StateOp::Put(Some("late".into())), at_once).await;
                count.fetch_add(u32::from(matches!(late, Err(StateFault::Unavailable(_)))), Ordering::SeqCst);
            }
            Outcome::Observed(Observed::HandedBack("stopped".into()))
        }
    });
    (handler, refused)
}

async fn a_host_that_was_taken_for_dead_stops_everything_and_works_on_under_a_new_number(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let (handler, refused) = first_is_stopped(&gate);
    let host =
        world.host(HostConfig { renew_every: Duration::from_millis(20), ..config_of(3, exchanges) }, vec![offer("a", plain(), handler)]);
    let ids = world.add_many("a", 3).await;
    world.until("three runs", || gate.came() == 3).await;
    take_for_dead(&world).await;
    world.all(&ids, State::Completed).await;
    for id in &ids {
        let details = world.details(*id).await;
        assert_eq!((details.summary.runs, details.summary.attempts), (2, 1));
        assert_eq!(world.events(*id).await, ["Created", "Processing", "Requeued", "Processing", "Completed"]);
    }
    assert_eq!(world.look(|model| model.hosts.keys().map(|host| host.0).collect::<Vec<_>>()), [2]);
    assert_eq!((refused.load(Ordering::SeqCst), world.look(|model| model.state.len())), (6, 0));
    assert!(world.look(|model| model.is_served("a")), "it has published what it runs");
    assert!(!host.task.is_finished());
}

/// A settle under the old number changes nothing, even if the run ends as Completed after all.
async fn a_run_that_ends_after_its_host_was_taken_for_dead_changes_nothing(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let body = {
        let gate = gate.clone();
        code(move |attempt, _, _| {
            let gate = gate.clone();
            async move {
                if attempt.run == 1 {
                    gate.pass().await;
                }
                crate::world::result(attempt.run.to_string())
            }
        })
    };
    let _host = world.host(config_of(1, exchanges), vec![offer("a", plain(), body)]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    take_for_dead(&world).await;
    gate.open(1);
    world.one(id, State::Completed).await;
    assert_eq!(world.details(id).await.result.as_deref(), Some("2"));
}

/// C3: stopped, given back, and only then renewed.
async fn a_lapsed_lease_gives_everything_back_before_it_renews(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let (handler, refused) = first_is_stopped(&gate);
    let host = world.host(config_of(2, exchanges), vec![offer("a", plain(), handler)]);
    let ids = world.add_many("a", 2).await;
    world.until("both", || gate.came() == 2).await;
    for call in ["exchange", "renew", "hosts"] {
        world.fault(call, Fault::Refused(AWAY), usize::MAX);
    }
    let before = world.history().len();
    world.jump(Duration::from_secs(13));
    world.until("the loop to try", || world.count("exchange") >= 3).await;
    // A renewal would be taken now, but nothing has been given back; a second passes with these.
    world.heal_only("renew");
    let tried = world.count("exchange");
    world.until("the loop to try again", || world.count("exchange") >= tried + 4).await;
    assert_eq!(world.look(|model| model.rows.values().filter(|row| row.host.is_some()).count()), 2, "nothing could be written");
    world.heal();
    world.all(&ids, State::Completed).await;
    let after = world.history()[before..].to_vec();
    let order = after.iter().filter(|(call, _)| ["exchange", "renew"].contains(call)).collect::<Vec<_>>();
    let renewed = order.iter().position(|(call, _)| *call == "renew").expect("a renewal");
    let given_back = |(_, settles): &&&(&str, Vec<warp_store::Settle>)| {
        settles.iter().filter(|settle| matches!(settle.ending, Ending::HandBack { .. })).count()
    };
    assert_eq!(order[..renewed].iter().map(|entry| given_back(&entry)).sum::<usize>(), 2);
    for id in ids {
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
    assert_eq!(refused.load(Ordering::SeqCst), 4);
    assert_eq!(host.numbers.report().unknown_rows, 0);
    assert_eq!(world.look(|model| model.hosts.keys().map(|host| host.0).collect::<Vec<_>>()), [1], "the registration is still there");
}

/// The store is away when there is nothing to settle, only to claim.
async fn a_claim_that_failed_is_made_again(exchanges: u32) {
    for kind in [AWAY, StoreErrorKind::Busy, UNKNOWN, StoreErrorKind::Internal] {
        let world = World::new();
        world.fault("exchange", Fault::Refused(kind), 2);
        let _host = world.host(config_of(1, exchanges), vec![offer("a", plain(), no_op())]);
        let id = world.add("a").await;
        world.one(id, State::Completed).await;
    }
}

async fn an_outage_loses_and_doubles_nothing(exchanges: u32) {
    for kind in [AWAY, UNKNOWN] {
        let world = World::new();
        let gate = Gate::new();
        let _host = world.host(config_of(4, exchanges), vec![offer("a", plain(), gate.handler())]);
        let ids = world.add_many("a", 12).await;
        world.until("four runs", || gate.came() == 4).await;
        for call in ["exchange", "renew", "hosts", "prune", "signals", "append_output", "expire_reservations"] {
            world.fault(call, Fault::Refused(kind), 5);
        }
        gate.open(12);
        world.all(&ids, State::Completed).await;
        for id in ids {
            assert_eq!(world.events(id).await, ["Created", "Processing", "Completed"]);
        }
    }
}

/// The settle was written and its answer lost: it is sent again and recognised.
async fn ends_whose_answer_was_lost_are_recognised_when_they_come_again(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let body = {
        let gate = gate.clone();
        code(move |attempt, calls, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                calls.state("b", "sum", StateOp::Add(1), false).await.expect("granted");
                if attempt.run == 1 { retryable("once more") } else { done() }
            }
        })
    };
    let host = world.host(config_of(2, exchanges), vec![offer("a", retry(1, Duration::from_secs(3600)), body)]);
    let ids = world.add_many("a", 2).await;
    world.until("both", || gate.came() == 2).await;
    world.fault("exchange", Fault::ReplyLost(UNKNOWN), 3);
    gate.open(2);
    world.all(&ids, State::Scheduled).await;
    world.until("an answer", || host.numbers.report().settled == 2).await;
    for id in &ids {
        assert_eq!(world.events(*id).await, ["Created", "Processing", "Scheduled"]);
        assert_eq!(world.details(*id).await.summary.attempts, 1);
    }
    // The second attempt completes, and its write to shared state counts once.
    for id in &ids {
        warp_store::Store::requeue(&*world.store, *id, "ada", world.now()).await.expect("requeue");
    }
    world.until("both again", || gate.came() == 4).await;
    world.fault("exchange", Fault::ReplyLost(UNKNOWN), 3);
    gate.open(2);
    world.all(&ids, State::Completed).await;
    world.until("an answer", || host.numbers.report().settled == 4).await;
    assert_eq!(world.look(|model| model.state.values().cloned().collect::<Vec<_>>()), ["2"]);
    for id in &ids {
        assert_eq!(world.events(*id).await.iter().filter(|event| *event == "Completed").count(), 1);
    }
    assert_eq!(host.numbers.report().late, 0);
}

/// The claim was made and its answer lost: a renewal gives its rows back at once, uncharged.
async fn rows_of_a_claim_whose_answer_was_lost_are_given_back(exchanges: u32) {
    let world = World::new();
    let ids = world.add_many("a", 3).await;
    world.fault("exchange", Fault::ReplyLost(UNKNOWN), 1);
    // Nothing but the renewal that the loss asks for could find them within an hour.
    let hour = Duration::from_secs(3600);
    let host = world.host(HostConfig { renew_every: hour, lease: 3 * hour, ..config_of(3, exchanges) }, vec![offer("a", plain(), no_op())]);
    world.all(&ids, State::Completed).await;
    for id in ids {
        assert_eq!(world.events(id).await, ["Created", "Processing", "Requeued", "Processing", "Completed"]);
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
    assert_eq!(host.numbers.report().unknown_rows, 3);
}

async fn a_driver_that_panics_does_not_take_the_loop_with_it(exchanges: u32) {
    let world = World::new();
    for call in ["exchange", "renew", "serve", "hosts", "prune", "signals", "expire_reservations", "append_output", "changed", "slots_lost"]
    {
        world.fault(call, Fault::Panic, 2);
    }
    let gate = Gate::new();
    let host = world
        .host(HostConfig { renew_every: Duration::from_millis(20), ..config_of(2, exchanges) }, vec![offer("a", plain(), gate.handler())]);
    let ids = world.add_many("a", 4).await;
    world.until("two runs", || gate.came() == 2).await;
    let renewals = world.count("renew");
    world.until("renewals go on", || world.count("renew") > renewals + 2).await;
    gate.open(4);
    world.all(&ids, State::Completed).await;
    world.until("what it runs to be known", || world.look(|model| model.is_served("a"))).await;
    assert!(host.end(StopLevel::Graceful).await.deregistered);
}

async fn a_renewal_never_overlaps_a_claim(exchanges: u32) {
    let world = World::new();
    world.fault("exchange", Fault::Slow(Duration::from_millis(1)), usize::MAX);
    world.fault("renew", Fault::Slow(Duration::from_millis(1)), usize::MAX);
    let host =
        world.host(HostConfig { renew_every: Duration::from_millis(2), ..config_of(2, exchanges) }, vec![offer("a", plain(), no_op())]);
    for reload in 0..4 {
        let ids = world.add_many("a", 500).await;
        world
            .until("a part", || world.look(|model| model.counters.get("stats:succeeded").is_some_and(|done| *done >= reload * 500 + 100)))
            .await;
        host.offer(vec![offer("a", plain(), no_op())]);
        world.all(&ids, State::Completed).await;
    }
    assert!(world.count("renew") > 5 && world.count("exchange") > 5 && world.count("serve") > 2, "too few of all to meet");
    assert_eq!(world.overlaps(), 0);
    assert!(world.most_at_once() <= exchanges as usize);
    assert_eq!(host.numbers.report().unknown_rows, 0);
}

/// Two hosts: what one of them held when it died is run by the other.
async fn a_dead_host_is_rescued_and_a_slow_one_is_not(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let dying = world.host(config_of(1, exchanges), vec![offer("a", plain(), gate.handler())]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    dying.task.abort();
    let count = Arc::new(AtomicU32::new(0));
    let counting = {
        let count = count.clone();
        code(move |_, _, _| {
            count.fetch_add(1, Ordering::SeqCst);
            async { done() }
        })
    };
    let other = world.host(config_of(1, exchanges), vec![offer("a", plain(), counting)]);
    crate::stopping::rescued(&world, &[id]).await;
    assert_eq!((count.load(Ordering::SeqCst), other.numbers.report().rescued), (1, 1));
    assert_eq!(world.look(|model| model.hosts.len()), 1, "the living one is still there");
}

/// A renewal that does not come back holds up claims, not ends: whoever waits for a slot need not wait for it.
async fn ends_go_on_beside_a_renewal(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let host = world.host(
        HostConfig { renew_every: Duration::from_millis(50), call_bound: Duration::from_secs(3600), ..config_of(3, exchanges) },
        vec![offer("a", plain(), gate.handler())],
    );
    let ids = world.add_many("a", 3).await;
    world.until("three runs", || gate.came() == 3).await;
    let renewal = Arc::new(Semaphore::new(0));
    world.fault("renew", Fault::Held(renewal.clone(), None), 1);
    world.until("the renewal", || world.met("renew")).await;
    gate.open(3);
    world.all(&ids, State::Completed).await;
    assert!(world.is_renewing(), "the ends have waited for it");
    let further = world.add("a").await;
    world.rounds().await;
    assert_eq!(world.state(further).await, State::Enqueued, "claimed beside a renewal");
    gate.open(1);
    renewal.add_permits(1);
    world.one(further, State::Completed).await;
    assert_eq!((host.numbers.report().late, host.numbers.report().unknown_rows), (0, 0));
}

/// A retried job is claimed again under another token while the answer about its first end is on the way: a renewal
/// that finds the first run gone must not stop the second.
async fn a_run_is_not_stopped_for_what_its_job_was_before(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let body = {
        let gate = gate.clone();
        code(move |attempt, _, stop| {
            let gate = gate.clone();
            async move {
                if attempt.run == 1 {
                    return retryable("once more");
                }
                tokio::select! {
                    () = gate.pass() => done(),
                    _ = stop.stopped() => Outcome::Observed(Observed::HandedBack("stopped".into())),
                }
            }
        })
    };
    let host = world.host(
        HostConfig { renew_every: Duration::from_millis(20), ..config_of(2, exchanges) },
        vec![offer("a", retry(1, Duration::ZERO), body)],
    );
    let id = world.add("a").await;
    world.until("the second run", || gate.came() == 1).await;
    let renewals = world.count("renew");
    world.until("renewals", || world.count("renew") > renewals + 3).await;
    gate.open(1);
    world.one(id, State::Completed).await;
    assert_eq!(world.details(id).await.summary.runs, 2);
    assert_eq!(host.numbers.report().late, 0);
}

/// Settings under which calls are given up soon.
fn impatient(workers: u32, exchanges: u32) -> HostConfig {
    HostConfig { call_bound: Duration::from_millis(60), renew_every: Duration::from_millis(50), ..config_of(workers, exchanges) }
}

/// Every call gets a bound of its own: whatever never comes back is done again, and nothing is lost or doubled.
async fn calls_that_never_return_are_made_again(exchanges: u32) {
    for fault in [Fault::Never, Fault::AnswerNever] {
        let world = World::new();
        let gate = Gate::new();
        let host = world.host(impatient(3, exchanges), vec![offer("a", plain(), gate.handler())]);
        let ids = world.add_many("a", 9).await;
        world.until("three runs", || gate.came() == 3).await;
        for call in ["exchange", "renew", "serve", "signals", "append_output", "expire_reservations", "prune"] {
            world.fault(call, fault.clone(), 3);
        }
        host.offer(vec![offer("a", plain(), gate.handler()), offer("b", plain(), no_op())]);
        gate.open(1000);
        world.all(&ids, State::Completed).await;
        for id in &ids {
            assert_eq!(world.events(*id).await.iter().filter(|event| *event == "Completed").count(), 1);
            assert_eq!(world.details(*id).await.summary.attempts, 1);
        }
        let other = world.add("b").await;
        world.one(other, State::Completed).await;
        assert_eq!(host.numbers.report().late, 0);
    }
}

/// A claim that hangs must not keep the lease from being renewed, and what it made after all is handed back.
async fn a_claim_that_never_returns_does_not_cost_the_lease(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let hanging = Arc::new(Semaphore::new(0));
    let host = world.host(impatient(2, exchanges), vec![offer("a", plain(), gate.handler()), offer("k", mutex("k"), no_op())]);
    let id = world.add("a").await;
    world.until("the run", || gate.came() == 1).await;
    // Every exchange until then: one that finds nothing may be under way already.
    world.fault("exchange", Fault::AnswerNever, usize::MAX);
    let claimed = world.add_many("k", 3).await;
    world
        .until("a claim without an answer", || {
            world.look(|model| model.rows.values().any(|row| row.host.is_some() && row.job.contract == "k"))
        })
        .await;
    world.fault("exchange", Fault::Held(hanging.clone(), None), usize::MAX);
    let renewals = world.count("renew");
    world.until("renewals", || world.count("renew") > renewals + 5).await;
    assert!(world.look(|model| model.rows.values().all(|row| row.host.is_none() || row.job.contract == "a")), "handed back, the slot too");
    world.heal();
    hanging.add_permits(1000);
    world.all(&claimed, State::Completed).await;
    gate.open(1);
    world.one(id, State::Completed).await;
    assert_eq!(world.details(id).await.summary.runs, 1);
    assert!(host.numbers.report().unknown_rows >= 1);
}

/// Nothing ever comes back: every run is stopped before the lease could lapse, nothing has an effect any more, and
/// when the store is there again everything is given back before anything else.
async fn a_host_without_answers_stops_by_itself(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let (handler, refused) = first_is_stopped(&gate);
    let host = world.host(impatient(2, exchanges), vec![offer("a", plain(), handler)]);
    let ids = world.add_many("a", 2).await;
    world.until("both", || gate.came() == 2).await;
    for call in ["exchange", "renew", "hosts", "signals", "register", "deregister"] {
        world.fault(call, Fault::Never, usize::MAX);
    }
    let renewals = world.count("renew");
    world.until("a renewal that hangs", || world.count("renew") > renewals).await;
    // The last good one was sent before: twelve seconds after it every run is over, three before the lease is.
    world.jump(Duration::from_secs(12));
    world.until("the refusal of every effect", || refused.load(Ordering::SeqCst) == 4).await;
    assert_eq!(world.look(|model| model.rows.values().filter(|row| row.host.is_some()).count()), 2, "nothing could be written");
    world.heal();
    world.all(&ids, State::Completed).await;
    for id in ids {
        assert_eq!(world.events(id).await, ["Created", "Processing", "Requeued", "Processing", "Completed"]);
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
    assert_eq!((host.numbers.report().late, host.numbers.report().unknown_rows), (0, 0));
}

/// Several batches on their way, every answer lost: each is recognised when it comes again.
async fn several_lost_answers_are_recognised(exchanges: u32) {
    let world = World::new();
    let host = world.host(config_of(8, exchanges), vec![offer("a", plain(), no_op()), offer("k", mutex("k:{n}"), no_op())]);
    world.fault("exchange", Fault::Slow(Duration::from_millis(1)), 6);
    world.fault("exchange", Fault::ReplyLost(UNKNOWN), 6);
    world.fault("exchange", Fault::Slow(Duration::from_millis(1)), 6);
    world.fault("exchange", Fault::ReplyLost(UNKNOWN), 3);
    let mut ids = world.add_many("a", 400).await;
    for n in 0..40 {
        ids.push(world.enqueue(world.job("k", &format!("{{\"n\":{}}}", n % 3))).await);
    }
    world.all(&ids, State::Completed).await;
    for id in ids {
        let events = world.events(id).await;
        assert_eq!(events.iter().filter(|event| *event == "Completed").count(), 1, "{events:?}");
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
    assert!(!host.task.is_finished());
}

/// The lease counts from the sending of the registration, however late its answer is.
async fn a_slow_registration_is_no_longer_lease(exchanges: u32) {
    let world = World::new();
    let answer = Arc::new(Semaphore::new(0));
    world.fault("register", Fault::AnswerHeld(answer.clone()), 1);
    world.fault("renew", Fault::Refused(AWAY), usize::MAX);
    let host = world.host(config_of(1, exchanges), vec![offer("a", plain(), no_op())]);
    world.until("the registration", || world.look(|model| !model.hosts.is_empty())).await;
    assert_eq!(host.numbers.lease_age(), None);
    world.jump(Duration::from_secs(7));
    answer.add_permits(1);
    world.until("the lease", || host.numbers.lease_age().is_some()).await;
    assert!(host.numbers.lease_age() >= Some(Duration::from_secs(7)));
    world.jump(Duration::from_secs(5));
    world.until("the lapse", || !host.numbers.lease_is_good()).await;
}

/// The slots of a run are gone before the answer of the claim that took them has come: it never begins, comes again
/// uncharged, and another of the same claim begins as if nothing were.
async fn a_run_that_lost_its_slots_on_its_way_does_not_begin(exchanges: u32) {
    let world = World::new();
    let (answer, began) = (Arc::new(Semaphore::new(0)), Arc::new(std::sync::Mutex::new(Vec::new())));
    let body = {
        let began = began.clone();
        code(move |attempt, _, _| {
            began.lock().unwrap().push((attempt.job_id, attempt.run));
            async { done() }
        })
    };
    // Before there is a host, so that its first claim finds both.
    let ids = world.add_many("a", 2).await;
    world.fault("exchange", Fault::AnswerHeld(answer.clone()), 1);
    let _host = world.host(config_of(2, exchanges), vec![offer("a", plain(), body)]);
    world
        .until("the claim", || world.look(|model| ids.iter().all(|id| model.rows[&model.handle(*id).expect("there")].host.is_some())))
        .await;
    world.lose_slots(&ids[..1]);
    world.until("the host to hear of it", || world.slots_are_told()).await;
    world.rounds().await;
    answer.add_permits(1);
    world.all(&ids, State::Completed).await;
    let mut began = std::mem::take(&mut *began.lock().unwrap());
    began.sort_unstable();
    assert_eq!(began, [(ids[0], 2), (ids[1], 1)]);
    assert_eq!(world.details(ids[0]).await.summary.attempts, 1);
}

/// The connection that held the slots of two runs is gone: these two stop by force and come again, uncharged, another
/// goes on; and again under a later registration.
async fn runs_that_lost_their_slots_are_stopped_and_given_back(exchanges: u32) {
    let world = World::new();
    let gate = Gate::new();
    let body = {
        let gate = gate.clone();
        code(move |_, _, stop| {
            let gate = gate.clone();
            async move {
                tokio::select! {
                    () = gate.pass() => done(),
                    reason = stop.stopped() => {
                        assert_eq!(reason, StopReason::HandBack);
                        Outcome::Observed(Observed::HandedBack("stopped".into()))
                    }
                }
            }
        })
    };
    let _host = world.host(config_of(3, exchanges), vec![offer("a", mutex("k:{n}"), body)]);
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(world.enqueue(world.job("a", &format!("{{\"n\":{n}}}"))).await);
    }
    let mut began = 3;
    world.until("three runs", || gate.came() == began).await;
    for again in [false, true] {
        if again {
            take_for_dead(&world).await;
            began += 3;
            world.until("three runs under the new number", || gate.came() == began).await;
        }
        world.lose_slots(&ids[..2]);
        began += 2;
        world.until("both again", || gate.came() == began).await;
    }
    gate.open(20);
    world.all(&ids, State::Completed).await;
    let runs = |at: usize| world.look(|model| model.rows[&model.handle(ids[at]).expect("there")].runs);
    assert_eq!([0, 1, 2].map(runs), [4, 4, 2]);
    for id in ids {
        assert_eq!(world.details(id).await.summary.attempts, 1);
    }
}

/// A renewal that was given up may be carried out yet, and would hand back what it does not know: nothing is claimed
/// until a later one is answered. One that was refused has not happened, and holds nothing up.
async fn nothing_is_claimed_behind_a_renewal_that_may_come_yet(exchanges: u32) {
    for (fault, claims) in [(Fault::Never, false), (Fault::Refused(UNKNOWN), false), (Fault::Refused(AWAY), true)] {
        let world = World::new();
        let gate = Gate::new();
        let _host = world.host(impatient(3, exchanges), vec![offer("a", plain(), gate.handler())]);
        let first = world.add("a").await;
        world.until("the run", || gate.came() == 1).await;
        world.fault("renew", fault, usize::MAX);
        let tried = world.count("renew");
        // The third is sent after the second was given up.
        world.until("renewals without an answer", || world.count("renew") >= tried + 3).await;
        let second = world.add("a").await;
        gate.open(1);
        world.one(first, State::Completed).await;
        if claims {
            world.until("the second run", || gate.came() == 2).await;
        } else {
            world.rounds().await;
            assert_eq!(world.state(second).await, State::Enqueued);
        }
        world.heal();
        gate.open(1);
        world.one(second, State::Completed).await;
        assert_eq!(world.details(second).await.summary.runs, 1);
    }
}

/// Every case with one exchange at a time, and with three.
macro_rules! with {
    ($($case:ident),+ $(,)?) => {
        mod with_one_exchange {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case(1).await; })+
        }
        mod with_three_exchanges {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case(3).await; })+
        }
    };
}

with! {
    a_host_that_was_taken_for_dead_stops_everything_and_works_on_under_a_new_number,
    a_run_that_ends_after_its_host_was_taken_for_dead_changes_nothing,
    a_lapsed_lease_gives_everything_back_before_it_renews,
    a_claim_that_failed_is_made_again,
    an_outage_loses_and_doubles_nothing,
    ends_whose_answer_was_lost_are_recognised_when_they_come_again,
    rows_of_a_claim_whose_answer_was_lost_are_given_back,
    a_driver_that_panics_does_not_take_the_loop_with_it,
    a_renewal_never_overlaps_a_claim,
    a_dead_host_is_rescued_and_a_slow_one_is_not,
    ends_go_on_beside_a_renewal,
    a_run_is_not_stopped_for_what_its_job_was_before,
    calls_that_never_return_are_made_again,
    a_claim_that_never_returns_does_not_cost_the_lease,
    a_host_without_answers_stops_by_itself,
    several_lost_answers_are_recognised,
    runs_that_lost_their_slots_are_stopped_and_given_back,
    a_run_that_lost_its_slots_on_its_way_does_not_begin,
    a_slow_registration_is_no_longer_lease,
    nothing_is_claimed_behind_a_renewal_that_may_come_yet,
}
