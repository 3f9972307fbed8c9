//! The driver beside the model: the same random commands on both, and everything that can be seen of either after
//! each.
//!
//! `WARP_DIFF_SEED=<n>` replays one seed, `WARP_DIFF_SEEDS=<n>` runs as many as one likes.

use std::ops::Range;

use warp_store_sqlite::{OpenOptions, SqliteStore};
use warp_testkit::diff::compare_seeds;
use warp_testkit::store::ModelStore;

fn seeds(usual: u64) -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match (number("WARP_DIFF_SEED"), number("WARP_DIFF_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(usual),
    }
}

async fn compare(seeds: Range<u64>) {
    let fresh = async || {
        let directory = tempfile::tempdir().expect("a directory");
        let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await.expect("an empty store");
        (ModelStore::new(), store, directory)
    };
    if let Err(report) = compare_seeds(seeds, 120, fresh).await {
        panic!("left is the model, right the driver; WARP_DIFF_SEED replays it\n{report}");
    }
}

#[tokio::test]
async fn the_driver_does_what_the_model_does() {
    compare(seeds(30)).await;
}

/// 266: the first waiters of a line are too heavy for the limit in force, and somebody behind them is not. 62: the part of a
/// line that was loaded is used up in the middle of a page, and nobody who counts is behind it.
#[tokio::test]
async fn seeds_that_differed_once() {
    for seed in [62, 266] {
        compare(seed..seed + 1).await;
    }
}
