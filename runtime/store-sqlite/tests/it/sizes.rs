//! How much one exchange holds at once.

use std::sync::Arc;

use warp_store_sqlite::{OpenOptions, SqliteStore};
use warp_store_tests::{Subject, World, done, gated, mutex, plain, settle};

async fn world(directory: &tempfile::TempDir) -> World {
    let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await.expect("open");
    World::new(Subject { store: Arc::new(store), keep: Box::new(()) })
}

/// Text of so many bytes as a payload, told apart by its number.
fn payload(n: usize, bytes: usize) -> String {
    format!(r#"{{"n": {n}, "text": "{}"}}"#, "x".repeat(bytes))
}

#[tokio::test]
async fn large_payloads_are_claimed_a_few_at_a_time_and_in_order() {
    const MIB: usize = 1 << 20;
    let directory = tempfile::tempdir().expect("a directory");
    let world = world(&directory).await;
    let host = world.host(&[plain("c")]).await;
    // The first is larger than half of what an exchange may hold together with the next three.
    let sizes = [9 * MIB, 3 * MIB, 3 * MIB, 3 * MIB, 9 * MIB, 9 * MIB, 10, 10, MIB];
    let mut ids = Vec::new();
    for (n, bytes) in sizes.into_iter().enumerate() {
        ids.extend(world.enqueue(vec![world.job("c", &payload(n, bytes))]).await);
    }
    let (mut ran, mut most) = (Vec::new(), 0);
    let mut settles = Vec::new();
    loop {
        let exchanged = world.exchange(&host, std::mem::take(&mut settles), 256).await;
        if exchanged.claimed.is_empty() {
            assert!(!exchanged.more, "nothing is left");
            break;
        }
        let bytes: usize = exchanged.claimed.iter().map(|run| run.payload.len()).sum();
        most = most.max(bytes);
        ran.extend(exchanged.claimed.iter().map(|run| run.id));
        assert_eq!(exchanged.more, ran.len() < ids.len(), "whoever got a part is told to come again");
        for run in &exchanged.claimed {
            let n = ids.iter().position(|id| *id == run.id).expect("one of them");
            assert_eq!(run.payload.len(), payload(n, sizes[n]).len());
        }
        settles = exchanged.claimed.iter().map(|run| settle(run, done())).collect();
    }
    assert_eq!(ran, ids);
    assert!(most <= 17 * MIB, "{most} bytes were claimed at once");
}

/// Candidates that only park are bounded too, and each exchange gets on by one at least.
#[tokio::test]
async fn large_payloads_behind_one_key_all_run() {
    let directory = tempfile::tempdir().expect("a directory");
    let world = world(&directory).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    let ids = world.enqueue((0..5).map(|n| world.job("c", &payload(n, 9 << 20))).collect()).await;
    let (mut ran, mut settles) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let exchanged = world.exchange(&host, std::mem::take(&mut settles), 256).await;
        ran.extend(exchanged.claimed.iter().map(|run| run.id));
        settles = exchanged.claimed.iter().map(|run| settle(run, done())).collect();
        if settles.is_empty() && !exchanged.more {
            break;
        }
    }
    assert_eq!(ran, ids);
}
