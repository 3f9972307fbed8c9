//! The model behind the `Store` trait.

use warp_testkit::diff::{compare, compare_seeds};
use warp_testkit::store::ModelStore;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

/// The comparison itself: two models agree, and one that has had a command more does not.
#[test]
fn two_models_agree_and_a_difference_shows() {
    runtime().block_on(async {
        let report = compare_seeds(0..200, 80, async || (ModelStore::new(), ModelStore::new(), ())).await;
        assert_eq!(report, Ok(()));
        let (left, right) = (ModelStore::new(), ModelStore::new());
        warp_store::Store::set_limit(&left, "z", 1, "somebody", warp_domain::UnixMillis(0)).await.expect("the model refuses no limit");
        let report = compare(&left, &right, 1, 80, &[]).await.expect_err("one key has a limit on the left only");
        assert!(report.contains("limits"), "{report}");
    });
}
