//! Several processes on one file. A store has its own connections and its own writer, so two stores in one process
//! meet each other exactly as two processes do.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_store_sqlite::{OpenOptions, SqliteStore};
use warp_store_tests::{Subject, World, done, gated, mutex, plain, settle};

async fn another(path: &Path) -> World {
    let store = SqliteStore::open(OpenOptions::new(path)).await.expect("open");
    World::new(Subject { store: Arc::new(store), keep: Box::new(()) })
}

/// A29: no busy error surfaces, no job runs twice, no key is held twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn four_processes_share_a_file_without_a_busy_error() {
    const JOBS: usize = 400;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    let publisher = another(&path).await;
    let jobs = (0..JOBS).map(|n| publisher.job("c", &format!("{{\"n\": {}}}", n % 5))).collect();
    let ids = publisher.enqueue(jobs).await;
    let holders = Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let runners: Vec<_> = (0..4)
        .map(|_| {
            let (path, holders) = (path.clone(), holders.clone());
            tokio::spawn(async move {
                let world = another(&path).await;
                let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
                let (mut ran, mut settles) = (Vec::new(), Vec::new());
                loop {
                    let claimed = world.exchange(&host, std::mem::take(&mut settles), 8).await.claimed;
                    for run in &claimed {
                        assert!(holders.lock().expect("no panic").insert(run.payload.to_string()), "two runs of {}", run.payload);
                    }
                    tokio::task::yield_now().await;
                    for run in &claimed {
                        holders.lock().expect("no panic").remove(&*run.payload);
                    }
                    ran.extend(claimed.iter().map(|run| run.id));
                    settles = claimed.iter().map(|run| settle(run, done())).collect();
                    if settles.is_empty() && world.counter("stats:succeeded").await == JOBS as i64 {
                        return ran;
                    }
                }
            })
        })
        .collect();
    let mut ran = Vec::new();
    for runner in runners {
        ran.extend(runner.await.expect("a runner"));
    }
    ran.sort_unstable();
    assert_eq!(ran, ids);
}

/// What one process commits wakes those who wait in another, long before they would look by themselves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_is_woken() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    let (here, there) = (another(&path).await, another(&path).await);
    let host = here.host(&[plain("c"), gated("k", 1, mutex(&["k"]))]).await;
    let mut spans = Vec::new();
    for _ in 0..20 {
        while tokio::time::timeout(Duration::from_millis(5), here.store.changed()).await.is_ok() {}
        let since = Instant::now();
        let (_, woken) = tokio::join!(there.enqueue_one("c"), tokio::time::timeout(Duration::from_secs(30), here.store.changed()),);
        assert!(woken.is_ok(), "an enqueue elsewhere wakes nobody here");
        spans.push(since.elapsed());
        assert_eq!(here.claim(&host, 5).await.len(), 1, "whoever was woken finds the job");
    }
    // No assertion: a loaded machine is no fault of the driver. `cargo test -- --nocapture` shows it.
    spans.sort_unstable();
    println!("of {} enqueues elsewhere half were noticed within {:.2?}, the last after {:.2?}", spans.len(), spans[10], spans[19]);
}

/// A run that this process remembers and that another has taken away: its end is late, and the rest of the batch is
/// written.
#[tokio::test]
async fn a_remembered_run_that_is_gone_is_late() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    let (here, there) = (another(&path).await, another(&path).await);
    let host = here.host(&[plain("c")]).await;
    here.enqueue_many("c", 3).await;
    let claimed = here.claim(&host, 3).await;
    // The other process ends one in the host's name, and hands one back at a renewal that knows only the third.
    there.complete(&host, &claimed[0]).await;
    there.renew(host.id, vec![(claimed[2].handle, claimed[2].token)]).await;
    let verdicts = here.exchange(&host, claimed.iter().map(|run| settle(run, done())).collect(), 0).await.settled;
    use warp_store::SettleVerdict::{Late, Repeated, Settled};
    assert_eq!(verdicts, [Repeated, Late, Settled]);
    assert_eq!(here.counter("stats:succeeded").await, 2);
}
