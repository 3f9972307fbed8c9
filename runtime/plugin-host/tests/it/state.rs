//! Shared state: only what is granted, only as it is granted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use warp_domain::ending::{Observed, Outcome, Said};
use warp_plugin_host::{Bucket, Caps, Permissions};

use crate::guests::{Recorder, engine, hostile, run, run_with, runnable_on};

fn bucket(under_mutex: bool, at_once: bool) -> Permissions {
    Permissions { buckets: vec![Bucket { name: "balances".to_owned(), under_mutex, at_once }], ..Permissions::default() }
}

#[tokio::test]
async fn a_bucket_that_is_not_granted_does_not_exist() {
    let (outcome, _, recorder) = run(&hostile().await, "state balances").await;
    let Outcome::Said(Said::Completed(Some(text))) = outcome else { panic!("{outcome:?}") };
    assert_eq!(text.matches("Err(Error::Denied(").count(), 8, "every call but the one with a bad number: {text}");
    assert!(recorder.state_ops.lock().expect("no panic").is_empty());
}

/// With and without granted directories, because those runs reach the database from another runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_reach_the_host_and_their_answers_the_guest() {
    let directory = tempfile::tempdir().expect("a directory");
    for files in [Vec::new(), crate::files::reading(directory.path()).files] {
        let permissions = Permissions { files, ..bucket(false, true) };
        let hostile = runnable_on(&engine(), "hostile", permissions, Caps::default()).await;
        let (outcome, _, recorder) = run(&hostile, "state balances").await;
        let Outcome::Said(Said::Completed(Some(text))) = outcome else { panic!("{outcome:?}") };
        let answers = [
            "Ok(None)",
            "Ok(())",
            "Ok(\"4\")",
            "Ok(true)",
            "Ok(false)",
            "Err(Error::NotANumber(\"`many` is not a decimal integer\"))",
            "Ok(())",
            "Ok(None)",
            "Err(Error::TooLarge(\"the key has 10000 bytes; 512 are allowed\"))",
        ];
        assert_eq!(text, answers.join("; "));
        let ops = recorder.state_ops.lock().expect("no panic");
        assert_eq!(ops.len(), 7);
        assert!(ops.iter().all(|(_, at_once)| *at_once), "{ops:?}");
    }
}

#[tokio::test]
async fn a_bucket_under_a_mutex_is_read_by_all_and_written_by_holders_only() {
    let hostile = runnable_on(&engine(), "hostile", bucket(true, false), Caps::default()).await;
    let recorder = Arc::<Recorder>::default();
    let outcome = run_with(&hostile, "state balances", &recorder, &Arc::default()).await.0;
    let Outcome::Observed(Observed::Trapped(text)) = outcome else { panic!("{outcome:?}") };
    assert!(text.starts_with("bucket `balances` is written under a mutex only"), "{text}");
    assert_eq!(*recorder.state_ops.lock().expect("no panic"), [("Get".to_owned(), false)]);

    recorder.holds_slot.store(true, Ordering::Release);
    assert!(matches!(run_with(&hostile, "state balances", &recorder, &Arc::default()).await.0, Outcome::Said(Said::Completed(_))));
}
