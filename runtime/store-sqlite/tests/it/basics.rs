//! A first path through the driver.

use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Ending, State};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, JobId, UnixMillis};
use warp_store::*;
use warp_store_sqlite::{OpenOptions, SqliteStore};

fn job(id: u128, payload: &str) -> NewJob {
    NewJob {
        id: JobId(id),
        contract: "c".into(),
        queue: "default".into(),
        payload: payload.into(),
        metadata: vec![("a".into(), "b".into())],
        trace_parent: None,
        due: None,
        explicit: Declared::default(),
        unique_key: None,
    }
}

#[tokio::test]
async fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(OpenOptions::new(dir.path().join("w.db"))).await.unwrap();
    let now = UnixMillis(1000);
    let verdicts = store.enqueue((0..5).map(|n| job(n, r#"{"k":"x"}"#)).collect(), now).await.unwrap();
    assert!(verdicts.iter().all(|v| matches!(v, EnqueueVerdict::Enqueued(_))));
    let host = store.register(HostInfo { name: "h".into(), version: "1".into(), now }).await.unwrap();
    let mutex = Concurrency {
        kind: ConcurrencyKind::Mutex,
        keys: vec!["m:{k}".parse().unwrap()],
        limit: 1,
        weight: 1,
        mode: Mode::Wait,
        order: Order::Any,
        on_retry: OnRetry::Block,
    };
    let declarations = Arc::new(Declarations {
        contract: "c".into(),
        handler: "c".into(),
        digest: Digest([1; 32]),
        on_contract: Declared::default(),
        on_handler: Declared { concurrency: Some(mutex), ..Declared::default() },
    });
    store.serve(host, vec![Served { declarations: declarations.clone() }]).await.unwrap();
    let lanes: Arc<[Lane]> = vec![Lane { queue: "default".into(), declarations }].into();
    let mut settles: Vec<Settle> = Vec::new();
    for round in 0..5u128 {
        let claim = Some(ClaimParams { lanes: lanes.clone(), max: 10 });
        let exchanged = store.exchange(ExchangeParams { host, now, settles: std::mem::take(&mut settles).into(), claim }).await.unwrap();
        assert_eq!(exchanged.claimed.len(), 1, "{exchanged:?}");
        let claimed = &exchanged.claimed[0];
        assert_eq!(claimed.id, JobId(round));
        if round == 0 {
            let details = store.job(JobId(3), now).await.unwrap().unwrap();
            assert!(matches!(details.waiting, Some(Waiting::ForKey { place: 3, limit: 1, .. })), "{details:?}");
            assert_eq!(exchanged.parked, 4);
        }
        settles.push(Settle {
            handle: claimed.handle,
            token: claimed.token,
            ending: Ending::Completed { result: Some("r".into()) },
            on_conflict: Ending::HandBack { message: "x".into() },
            output: RunOutput::default(),
            children: vec![],
            state: vec![],
            took: Duration::from_millis(1),
        });
    }
    let exchanged = store.exchange(ExchangeParams { host, now, settles: settles.into(), claim: None }).await.unwrap();
    assert_eq!(exchanged.settled, [SettleVerdict::Settled]);
    let listed = store.jobs(JobFilter { limit: 10, ..JobFilter::default() }).await.unwrap();
    assert!(listed.iter().all(|job| job.state == State::Completed), "{listed:?}");
}
