//! Ends of runs: by token, with everything that belongs to them, once.

use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason, State};
use warp_domain::{ClaimToken, JobHandle, JobId};
use warp_store::{LogLine, NewJob, RunOutput, SettleVerdict, StateChange, StateVerdict, StateWrite};

use crate::world::{World, done, gated, hand_back, mutex, plain, retry_at, settle};

/// Every ending leads where it says, with its counters and history.
pub async fn every_ending_leads_where_it_says(world: World) {
    let host = world.host(&[plain("c")]).await;
    let at = world.in_seconds(7);
    let cases = [
        (done(), State::Completed, 1, "stats:succeeded", vec!["Created", "Processing", "Completed"]),
        (
            Ending::Failed { message: "no".into(), reason: FailedReason::Permanent },
            State::Failed,
            1,
            "stats:failed:permanent",
            vec!["Created", "Processing", "Failed"],
        ),
        (retry_at(at), State::Scheduled, 1, "stats:requeued:retry", vec!["Created", "Processing", "Failed", "Scheduled"]),
        (Ending::Snooze { at }, State::Scheduled, 0, "stats:requeued:snooze", vec!["Created", "Processing", "Scheduled"]),
        (hand_back(), State::Enqueued, 0, "stats:requeued:hand-back", vec!["Created", "Processing", "Requeued"]),
        (Ending::Deleted { message: "no use".into() }, State::Deleted, 1, "stats:deleted", vec!["Created", "Processing", "Deleted"]),
    ];
    for (ending, state, attempts, counter, events) in cases {
        let id = world.enqueue_one("c").await;
        let claimed = world.claim(&host, 10).await.into_iter().find(|claimed| claimed.id == id).expect("it is claimed");
        world.end(&host, &claimed, ending.clone()).await;
        let details = world.details(id).await;
        assert_eq!((details.summary.state, details.summary.attempts), (state, attempts), "{ending:?}");
        assert_eq!(details.summary.due, (state == State::Scheduled).then_some(at), "{ending:?}");
        assert_eq!(details.running, None, "{ending:?}");
        assert_eq!(world.events(id).await, events, "{ending:?}");
        assert_eq!(world.counter(counter).await, 1, "{ending:?}");
        let last_of_run = details.audit.iter().find(|row| row.took.is_some()).expect("the run's end is in the history");
        assert_eq!((last_of_run.run, last_of_run.took), (1, Some(Duration::from_millis(3))), "{ending:?}");
        assert_eq!(last_of_run.host.as_deref(), Some("machine-1"), "{ending:?}");
    }
    assert_eq!(world.counter("stats:requeued").await, 3);
}

/// Who has not begun stands where the claim found it: no run, no attempt, no word in the history, and its slot is free.
pub async fn who_has_not_begun_was_never_claimed(world: World) {
    let host = world.host(&[plain("c"), gated("g", 1, mutex(&["k"]))]).await;
    for contract in ["c", "g"] {
        let id = world.enqueue_one(contract).await;
        let claimed = world.claim_one(&host).await;
        world.end(&host, &claimed, Ending::NotBegun).await;
        let summary = world.details(id).await.summary;
        assert_eq!((summary.state, summary.runs, summary.attempts), (State::Enqueued, 0, 0), "{contract}");
        assert_eq!(world.events(id).await, ["Created"], "{contract}");
        assert_eq!(world.exchange(&host, vec![settle(&claimed, done())], 0).await.settled, [SettleVerdict::Repeated], "{contract}");
        let again = world.claim_one(&host).await;
        assert_eq!((again.id, again.run, again.attempt), (id, 1, 1), "{contract}");
        assert!(again.token > claimed.token, "{contract}");
        world.complete(&host, &again).await;
        assert_eq!(world.events(id).await, ["Created", "Processing", "Completed"], "{contract}");
    }
    assert_eq!(world.counter("stats:requeued").await, 0);
}

/// Result and error are kept, as they were said.
pub async fn result_and_error_are_kept(world: World) {
    let host = world.host(&[plain("c")]).await;
    let id = world.enqueue_one("c").await;
    let claimed = world.claim_one(&host).await;
    world.end(&host, &claimed, Ending::Retry { message: "disk „voll“\n".into(), at: world.now() }).await;
    assert_eq!(world.details(id).await.error.as_deref(), Some("disk „voll“\n"));
    let claimed = world.claim_one(&host).await;
    world.end(&host, &claimed, Ending::Completed { result: Some("{\"ok\": true}".into()) }).await;
    assert_eq!(world.details(id).await.result.as_deref(), Some("{\"ok\": true}"));
}

/// C1, W3: after a rescue the late end of the first run changes nothing and frees nothing of the second.
pub async fn a_late_end_changes_and_frees_nothing(world: World) {
    let served = [gated("c", 1, mutex(&["k"]))];
    let (frozen, other) = (world.host(&served).await, world.host(&served).await);
    let ids = world.enqueue_many("c", 2).await;
    let first = world.claim_one(&frozen).await;
    world.rescue(&frozen).await;
    // The rescue hands the slot on; the job that was running queues again.
    let second = world.claim_one(&other).await;
    let holders = world.holders("k").await;
    let thawed = world.host(&served).await;
    for host in [&thawed, &other] {
        let mut late = settle(&first, Ending::Completed { result: Some("late".into()) });
        late.children = vec![world.job("child", "{}")];
        let child = late.children[0].id;
        assert_eq!(world.exchange(host, vec![late], 0).await.settled, [SettleVerdict::Late]);
        assert_eq!(world.store.job(child, world.now()).await.expect("read"), None);
    }
    assert_eq!(world.holders("k").await, holders);
    assert_eq!(world.state(second.id).await, State::Processing);
    assert_eq!(world.claim_ids(&thawed, 10).await, [], "the slot is still taken");
    world.complete(&other, &second).await;
    let mut ran = world.drain(&other).await;
    ran.push(second.id);
    ran.sort_unstable();
    assert_eq!(ran, ids);
}

/// A26 of the retries: an end of a run that another host has, or that never was, is late.
pub async fn ends_of_others_are_late(world: World) {
    let (one, two) = (world.host(&[plain("c")]).await, world.host(&[plain("c")]).await);
    world.enqueue_one("c").await;
    let claimed = world.claim_one(&one).await;
    let mut foreign = settle(&claimed, done());
    foreign.token = ClaimToken(claimed.token.0 + 1);
    let mut unknown = settle(&claimed, done());
    unknown.handle = JobHandle(987_654);
    let of_two = world.exchange(&two, vec![settle(&claimed, done())], 0).await.settled;
    assert_eq!(of_two, [SettleVerdict::Late]);
    let of_one = world.exchange(&one, vec![foreign, unknown, settle(&claimed, done())], 0).await.settled;
    assert_eq!(of_one, [SettleVerdict::Late, SettleVerdict::Late, SettleVerdict::Settled]);
}

/// The repeat of an end whose answer was lost is recognised, even when the job has gone on since.
pub async fn a_repeated_end_is_recognised(world: World) {
    let host = world.host(&[plain("c")]).await;
    world.enqueue_one("c").await;
    let first = world.claim_one(&host).await;
    let end = settle(&first, retry_at(world.now()));
    let twice = world.exchange(&host, vec![end.clone(), end.clone()], 0).await.settled;
    assert_eq!(twice, [SettleVerdict::Settled, SettleVerdict::Repeated]);
    let second = world.claim_one(&host).await;
    assert_eq!(world.exchange(&host, vec![end.clone()], 0).await.settled, [SettleVerdict::Repeated]);
    assert_eq!(world.details(first.id).await.summary.attempts, 2, "a repeat charges nothing");
    world.complete(&host, &second).await;
    let done = settle(&second, done());
    assert_eq!(world.exchange(&host, vec![done, end], 0).await.settled, [SettleVerdict::Repeated, SettleVerdict::Late]);
    assert_eq!(world.counter("stats:requeued:retry").await, 1);
    assert_eq!(world.counter("stats:succeeded").await, 1);
}

fn write(key: &str, change: StateChange) -> StateWrite {
    StateWrite { bucket: "b".into(), key: key.into(), change }
}

/// State is written with the Completed end, reads its own writes, and is all or nothing.
pub async fn state_commits_with_the_end(world: World) {
    let host = world.host(&[plain("c")]).await;
    world.enqueue_many("c", 4).await;
    let claimed = world.claim(&host, 4).await;
    let get = async |key: &str| world.store.state_get("b", key).await.expect("read state");
    let mut first = settle(&claimed[0], done());
    first.state = vec![
        write("gold", StateChange::Add(1_000)),
        write("gold", StateChange::Add(-1)),
        write("name", StateChange::Put(Some("ada".into()))),
        write("gone", StateChange::Put(None)),
    ];
    let mut retried = settle(&claimed[1], retry_at(world.in_seconds(1)));
    retried.state = vec![write("gold", StateChange::Put(Some("0".into())))];
    // In one batch the second sees what the first wrote.
    let mut third = settle(&claimed[2], done());
    third.state = vec![write("gold", StateChange::CompareAndSet { expected: Some("999".into()), value: Some("1000".into()) })];
    let verdicts = world.exchange(&host, vec![first, retried, third], 0).await.settled;
    assert_eq!(verdicts, [SettleVerdict::Settled; 3]);
    assert_eq!((get("gold").await.as_deref(), get("name").await.as_deref(), get("gone").await), (Some("1000"), Some("ada"), None));
    let mut conflict = settle(&claimed[3], done());
    conflict.state = vec![
        write("name", StateChange::Put(Some("eve".into()))),
        write("gold", StateChange::CompareAndSet { expected: None, value: Some("1".into()) }),
    ];
    conflict.children = vec![world.job("child", "{}")];
    conflict.on_conflict = retry_at(world.in_seconds(3));
    let child = conflict.children[0].id;
    assert_eq!(world.exchange(&host, vec![conflict], 0).await.settled, [SettleVerdict::Conflicted]);
    assert_eq!((get("name").await.as_deref(), get("gold").await.as_deref()), (Some("ada"), Some("1000")));
    assert_eq!(world.store.job(child, world.now()).await.expect("read"), None);
    let details = world.details(claimed[3].id).await;
    assert_eq!((details.summary.state, details.summary.due), (State::Scheduled, Some(world.in_seconds(3))));
}

/// State that is written at once, and only by a run that goes on.
pub async fn state_at_once_needs_a_live_run(world: World) {
    let host = world.host(&[plain("c")]).await;
    world.enqueue_one("c").await;
    let run = world.claim_one(&host).await;
    let apply =
        async |change: StateChange| world.store.state_apply(host.id, run.handle, run.token, write("n", change)).await.expect("write state");
    let written = |value: &str| StateVerdict::Written(Some(value.to_owned()));
    assert_eq!(apply(StateChange::Add(5)).await, written("5"));
    assert_eq!(apply(StateChange::Add(i128::from(i64::MAX))).await, written("9223372036854775812"));
    let swap = |expected: &str, value: &str| StateChange::CompareAndSet { expected: Some(expected.into()), value: Some(value.into()) };
    assert_eq!(apply(swap("1", "2")).await, StateVerdict::Conflict(Some("9223372036854775812".into())));
    assert_eq!(apply(swap("9223372036854775812", "ten")).await, written("ten"));
    assert_eq!(apply(StateChange::Add(1)).await, StateVerdict::NotANumber("ten".into()));
    assert_eq!(apply(StateChange::Put(None)).await, StateVerdict::Written(None));
    assert_eq!(world.store.state_get("b", "n").await.expect("read"), None);
    world.complete(&host, &run).await;
    assert_eq!(apply(StateChange::Add(1)).await, StateVerdict::Late);
    assert_eq!(world.store.state_get("b", "n").await.expect("read"), None);
}

/// One end that can never be stored is found, and the rest of its batch is written.
pub async fn a_poison_end_takes_nobody_with_it(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    let ids = world.enqueue((0..7).map(|n| world.job("c", &format!("{{\"n\": {n}}}"))).collect()).await;
    let claimed = world.claim(&host, 7).await;
    let mut settles: Vec<_> = claimed.iter().map(|claimed| settle(claimed, done())).collect();
    settles[2].children = vec![world.job("child", "{}"), NewJob { id: JobId(77), ..world.job("bad\0name", "{}") }];
    let lost_child = settles[2].children[0].id;
    settles[5].ending = Ending::Completed { result: Some("a\0b".into()) };
    let verdicts = world.exchange(&host, settles, 0).await.settled;
    for (at, verdict) in verdicts.iter().enumerate() {
        let (expected, state) =
            if at == 2 || at == 5 { (SettleVerdict::Poison, State::Failed) } else { (SettleVerdict::Settled, State::Completed) };
        assert_eq!((*verdict, world.state(ids[at]).await), (expected, state), "settle {at}");
        assert_eq!(world.holders(&format!("k:{at}")).await, [], "settle {at} frees its slot");
    }
    assert!(world.details(ids[2]).await.error.expect("the reason is kept").contains("NUL") || world.details(ids[2]).await.error.is_some());
    assert_eq!(world.store.job(lost_child, world.now()).await.expect("read"), None, "nothing else of it is written");
}

/// Output in order, per run; the last progress of each name; what caps kept out is summed.
pub async fn output_is_kept_in_order(world: World) {
    let host = world.host(&[plain("c")]).await;
    let id = world.enqueue_one("c").await;
    let line = |world: &World, text: &str| LogLine { at: world.now(), stream: "stdout", text: text.into() };
    let first = world.claim_one(&host).await;
    let early = RunOutput {
        lines: vec![line(&world, "one"), line(&world, "zwei – два")],
        dropped_lines: 2,
        dropped_bytes: 200,
        progress: vec![("load".into(), 10.0), ("write".into(), 0.5)],
    };
    let verdict = world.store.append_output(host.id, first.handle, first.token, early).await.expect("append");
    assert_eq!(verdict, SettleVerdict::Settled);
    let mut end = settle(&first, retry_at(world.now()));
    end.output =
        RunOutput { lines: vec![line(&world, "three")], dropped_lines: 1, dropped_bytes: 50, progress: vec![("load".into(), 99.5)] };
    world.exchange(&host, vec![end], 0).await;
    let second = world.claim_one(&host).await;
    let late = world.store.append_output(
        host.id,
        first.handle,
        first.token,
        RunOutput { lines: vec![line(&world, "late")], ..RunOutput::default() },
    );
    assert_eq!(late.await.expect("append"), SettleVerdict::Late);
    let mut end = settle(&second, done());
    end.output = RunOutput { lines: vec![line(&world, "four")], ..RunOutput::default() };
    world.exchange(&host, vec![end], 0).await;
    let texts = async |run: Option<u32>| {
        let lines = world.store.job_logs(id, run).await.expect("read the log");
        lines.into_iter().map(|(run, line)| (run, line.text)).collect::<Vec<_>>()
    };
    let expected: Vec<_> = [(1, "one"), (1, "zwei – два"), (1, "three"), (2, "four")].map(|(run, text)| (run, text.to_owned())).to_vec();
    assert_eq!(texts(None).await, expected);
    assert_eq!(texts(Some(2)).await, expected[3..]);
    let details = world.details(id).await;
    assert_eq!(details.dropped, (3, 250));
    assert_eq!(details.progress, [("load".into(), 99.5), ("write".into(), 0.5)]);
}

/// A26: whatever a failing job prints, its failure is stored.
pub async fn hostile_output_does_not_keep_a_job_running(world: World) {
    let host = world.host(&[plain("c")]).await;
    let id = world.enqueue_one("c").await;
    let claimed = world.claim_one(&host).await;
    let mut end = settle(&claimed, Ending::Failed { message: "bad \0 byte".into(), reason: FailedReason::Permanent });
    end.output.lines = vec![LogLine { at: world.now(), stream: "stderr", text: "nul \0 and \u{1b}[31m".into() }];
    end.output.progress = vec![("p\0".into(), f32::NAN), ("q".into(), f32::INFINITY)];
    assert_ne!(world.exchange(&host, vec![end], 0).await.settled, [SettleVerdict::Late]);
    assert_eq!(world.state(id).await, State::Failed);
}
