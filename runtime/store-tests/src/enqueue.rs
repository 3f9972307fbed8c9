//! What goes in: stored exactly, or refused with a reason.

use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::State;
use warp_domain::policy::Declared;
use warp_store::{CommandVerdict, EnqueueVerdict, NewJob, Waiting};

use crate::world::{World, done, mutex, plain, retry_at, settle};

/// Every field comes back byte for byte, at the reader's end and at the claimer's.
pub async fn a_job_is_stored_exactly(world: World) {
    let payload = "{ \"ключ\" : [1, 2.50, \"\\ud83d\\ude00 \u{1F600} \\\\u0000 'quoted' --\"],\n\t\"deep\": {\"x\": null} }";
    let job = NewJob {
        metadata: vec![("z".into(), "1".into()), ("a".into(), "'; DROP TABLE job; --".into()), ("a".into(), String::new())],
        trace_parent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()),
        explicit: Declared { concurrency: Some(mutex(&["k:{ключ[0]}"])), ..Declared::default() },
        unique_key: Some("einmal – once".into()),
        ..world.job("résumé", payload)
    };
    world.enqueue(vec![job.clone()]).await;
    let details = world.details(job.id).await;
    assert_eq!(details.payload, payload);
    assert_eq!(details.metadata, job.metadata);
    assert_eq!(details.trace_parent, job.trace_parent);
    assert_eq!(details.unique_key, job.unique_key);
    assert_eq!(details.explicit, job.explicit);
    assert_eq!((details.stamp, details.keys.len()), (None, 0), "nothing is stamped before the first claim");
    assert_eq!((details.summary.contract.as_str(), details.summary.state), ("résumé", State::Enqueued));
    assert_eq!((details.summary.created_at, details.summary.runs, details.summary.attempts), (world.now(), 0, 0));
    let claimed = world.claim_one(&world.host(&[plain("résumé")]).await).await;
    assert_eq!((claimed.id, &*claimed.payload, claimed.metadata, claimed.trace_parent), (job.id, payload, job.metadata, job.trace_parent));
}

/// Ten million bytes go in, one more does not.
pub async fn the_largest_payload_fits(world: World) {
    let fill = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
    let (fits, too_large) = (world.job("c", &fill(10 << 20)), world.job("c", &fill((10 << 20) + 1)));
    let verdicts = world.store.enqueue(vec![fits.clone(), too_large], world.now()).await.expect("enqueue");
    assert_eq!(verdicts[0], EnqueueVerdict::Enqueued(fits.id));
    assert!(matches!(&verdicts[1], EnqueueVerdict::Refused(why) if why.contains("10485761")), "{verdicts:?}");
    assert_eq!(world.details(fits.id).await.payload.len(), 10 << 20);
}

/// A26: hostile text is refused with a reason, beside jobs that are taken.
pub async fn one_bad_job_refuses_only_itself(world: World) {
    let good = [world.job("c", "1"), world.job("c", "{}")];
    let bad = [
        world.job("c", "{"),
        world.job("c", "\"\\u0000\""),
        world.job("c", &"[".repeat(129)),
        world.job("a\0b", "{}"),
        world.job("", "{}"),
        NewJob { queue: "q\u{1}".into(), ..world.job("c", "{}") },
        NewJob { unique_key: Some("u\0".into()), ..world.job("c", "{}") },
        NewJob { metadata: vec![("m".into(), "\0".into())], ..world.job("c", "{}") },
        NewJob { explicit: Declared { concurrency: Some(mutex(&["{missing}"])), ..Declared::default() }, ..world.job("c", "{}") },
    ];
    let mut jobs = vec![good[0].clone()];
    jobs.extend(bad.iter().cloned());
    jobs.push(good[1].clone());
    let verdicts = world.store.enqueue(jobs, world.now()).await.expect("enqueue");
    assert_eq!(verdicts.len(), bad.len() + 2);
    assert_eq!((&verdicts[0], &verdicts[bad.len() + 1]), (&EnqueueVerdict::Enqueued(good[0].id), &EnqueueVerdict::Enqueued(good[1].id)));
    for (job, verdict) in bad.iter().zip(&verdicts[1..]) {
        assert!(matches!(verdict, EnqueueVerdict::Refused(why) if !why.is_empty()), "{job:?}: {verdict:?}");
        assert_eq!(world.store.job(job.id, world.now()).await.expect("read"), None);
    }
}

/// A repeat after an unknown outcome is recognised, also within one call, and never runs twice.
pub async fn the_same_id_again_is_a_duplicate(world: World) {
    let job = world.job("c", "1");
    let again = NewJob { payload: "2".into(), ..job.clone() };
    let verdicts = world.store.enqueue(vec![job.clone(), again.clone()], world.now()).await.expect("enqueue");
    assert_eq!(verdicts, [EnqueueVerdict::Enqueued(job.id), EnqueueVerdict::Duplicate(job.id)]);
    assert_eq!(world.store.enqueue(vec![again], world.now()).await.expect("enqueue"), [EnqueueVerdict::Duplicate(job.id)]);
    assert_eq!(world.details(job.id).await.payload, "1");
    let host = world.host(&[plain("c")]).await;
    assert_eq!(world.claim_ids(&host, 10).await, [job.id]);
}

/// One live job per unique key: through retry, hand-back and rescue, until it has ended.
pub async fn a_unique_key_has_one_live_job(world: World) {
    let unique = |world: &World| NewJob { unique_key: Some("report-7".into()), ..world.job("c", "{}") };
    let first = unique(&world);
    world.enqueue(vec![first.clone()]).await;
    let duplicate = async |when: &str| {
        let verdicts = world.store.enqueue(vec![unique(&world), world.job("other", "{}")], world.now()).await.expect("enqueue");
        assert_eq!(verdicts[0], EnqueueVerdict::Duplicate(first.id), "{when}");
        assert!(matches!(verdicts[1], EnqueueVerdict::Enqueued(_)), "{when}");
    };
    duplicate("ready").await;
    let host = world.host(&[plain("c")]).await;
    let claimed = world.claim_one(&host).await;
    duplicate("running").await;
    world.end(&host, &claimed, retry_at(world.in_seconds(5))).await;
    duplicate("in a retry delay").await;
    world.pass(Duration::from_secs(5));
    world.claim_one(&host).await;
    world.rescue(&host).await;
    duplicate("rescued").await;
    let host = world.host(&[plain("c")]).await;
    let claimed = world.claim_one(&host).await;
    world.complete(&host, &claimed).await;
    let second = unique(&world);
    world.enqueue(vec![second.clone()]).await;
    // The first may not come back beside the second.
    world.requeue(first.id, CommandVerdict::NotNow(State::Completed)).await;
    world.cancel(second.id, CommandVerdict::Done).await;
    world.requeue(first.id, CommandVerdict::Done).await;
    duplicate("requeued").await;
}

/// A due job waits for its instant, and a past one does not.
pub async fn a_scheduled_job_waits_until_it_is_due(world: World) {
    let host = world.host(&[plain("c")]).await;
    let later = NewJob { due: Some(world.in_seconds(10)), ..world.job("c", "{}") };
    let sooner = NewJob { due: Some(world.in_seconds(4)), ..world.job("c", "{}") };
    let past = NewJob { due: Some(warp_domain::UnixMillis(5)), ..world.job("c", "{}") };
    world.enqueue(vec![later.clone(), sooner.clone(), past.clone()]).await;
    assert_eq!((world.state(later.id).await, world.state(past.id).await), (State::Scheduled, State::Enqueued));
    assert_eq!(world.details(later.id).await.waiting, Some(Waiting::Due(world.in_seconds(10))));
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!(exchanged.claimed.iter().map(|claimed| claimed.id).collect::<Vec<_>>(), [past.id]);
    assert_eq!(exchanged.next_due, Some(world.in_seconds(4)));
    world.pass(Duration::from_millis(3_999));
    assert_eq!(world.claim_ids(&host, 10).await, []);
    world.pass(Duration::from_millis(1));
    assert_eq!(world.claim_ids(&host, 10).await, [sooner.id]);
    world.pass(Duration::from_secs(100));
    let exchanged = world.exchange(&host, Vec::new(), 10).await;
    assert_eq!((exchanged.claimed[0].id, exchanged.next_due), (later.id, None));
}

/// More due jobs at one instant than any bound of one exchange.
pub async fn thousands_that_fall_due_together_all_run(world: World) {
    let host = world.host(&[plain("c")]).await;
    let due = Some(world.in_seconds(1));
    let ids = world.enqueue((0..2_500).map(|_| NewJob { due, ..world.job("c", "{}") }).collect()).await;
    world.pass(Duration::from_secs(1));
    let mut ran = world.drain(&host).await;
    ran.sort_unstable();
    assert_eq!(ran, ids);
}

/// What a run enqueues goes in with its Completed end and not otherwise.
pub async fn children_come_with_a_completed_end_or_not_at_all(world: World) {
    let host = world.host(&[plain("c")]).await;
    world.enqueue_many("c", 3).await;
    let claimed = world.claim(&host, 3).await;
    let child = |n: u128| NewJob { id: JobId(9_000 + n), ..world.job("child", "{}") };
    let exists = async |n: u128| world.store.job(JobId(9_000 + n), world.now()).await.expect("read").is_some();
    let mut retried = settle(&claimed[0], retry_at(world.in_seconds(1)));
    retried.children = vec![child(1)];
    let mut completed = settle(&claimed[1], done());
    completed.children = vec![child(2), child(3)];
    let mut late = settle(&claimed[2], done());
    late.token = claimed[1].token;
    late.children = vec![child(4)];
    world.exchange(&host, vec![retried, completed.clone(), late], 0).await;
    assert_eq!((exists(1).await, exists(2).await, exists(3).await, exists(4).await), (false, true, true, false));
    // The repeat of a settle whose answer was lost does not enqueue again.
    completed.children = vec![child(5)];
    world.exchange(&host, vec![completed], 0).await;
    assert!(!exists(5).await);
}
