//! What a guest says reaches the worker as it was said, and what it cannot say is told apart.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use warp_domain::ending::{Observed, Outcome, Said};
use warp_pipeline::{Child, Level};

use crate::guests::{Recorder, hostile, run, run_with};

#[tokio::test]
async fn every_answer_of_the_interface_becomes_what_was_said() {
    let hostile = hostile().await;
    for (payload, said) in [
        ("ok", Said::Completed(None)),
        ("echo grüße", Said::Completed(Some("grüße".to_owned()))),
        ("retryable later", Said::Retryable("later".to_owned())),
        ("permanent never", Said::Permanent("never".to_owned())),
        ("snooze 1500", Said::Snooze(Duration::from_millis(1500))),
        ("long-failure 6000", Said::Permanent(format!("{}… (3808 bytes more)", "ä".repeat(4096)))),
    ] {
        assert_eq!(run(&hostile, payload).await.0, Outcome::Said(said), "{payload}");
    }
}

#[tokio::test]
async fn the_guest_is_told_everything_about_its_attempt() {
    let Outcome::Said(Said::Completed(Some(text))) = run(&hostile().await, "describe").await.0 else { panic!("it completes") };
    for part in [
        "00000000-0000-0000-0000-000000000007",
        "contract: \"contract\"",
        "handler: \"handler\"",
        "run: 3",
        "attempt: 2",
        "queue: \"default\"",
        "(\"tenant\", \"ä\")",
        "trace-parent: None",
        "time-left: Some(1234)",
        "fencing-token: Some(\"99\")",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

#[tokio::test]
async fn an_instance_is_used_once_and_a_trap_leaves_the_next_attempt_alone() {
    let hostile = hostile().await;
    for _ in 0..3 {
        assert!(matches!(run(&hostile, "trap").await.0, Outcome::Observed(Observed::Trapped(_))));
        assert_eq!(run(&hostile, "ok").await.0, Outcome::Said(Said::Completed(None)));
    }
}

#[tokio::test]
async fn a_panic_in_the_guest_names_its_functions_and_its_words_are_kept() {
    let (outcome, _, recorder) = run(&hostile().await, "trap").await;
    let Outcome::Observed(Observed::Trapped(text)) = outcome else { panic!("{outcome:?}") };
    assert!(text.starts_with("unreachable code reached"), "{text}");
    assert!(text.contains("inner_of_the_trap") && text.contains("outer_of_the_trap"), "{text}");
    assert!(text.lines().count() <= 21 && !text.contains("wasmtime::"), "no more than 20 frames, none of the host: {text}");
    let stderr = recorder.lines_of(Level::Stderr).join("\n");
    assert!(stderr.contains("this guest panics on purpose"), "{stderr}");
}

#[tokio::test]
async fn exit_is_not_an_answer() {
    let Outcome::Observed(Observed::Trapped(text)) = run(&hostile().await, "exit 3").await.0 else { panic!("it exits") };
    // The interface of WASI 0.2 carries only whether it was a success.
    assert!(text.starts_with("the guest called exit(1) instead of returning"), "{text}");
    let Outcome::Observed(Observed::Trapped(text)) = run(&hostile().await, "exit 0").await.0 else { panic!("it exits") };
    assert!(text.starts_with("the guest called exit(0) instead of returning"), "{text}");
}

#[tokio::test]
async fn text_that_is_none_is_refused_and_nul_cannot_reach_a_row() {
    let Outcome::Observed(Observed::Trapped(text)) = run(&hostile().await, "bad-utf8").await.0 else { panic!("it is no text") };
    assert!(text.starts_with("the result or a text of a host call is not UTF-8: invalid utf-8 sequence of 1 bytes from index 1"), "{text}");
    let Outcome::Observed(Observed::Unacceptable(text)) = run(&hostile().await, "nul-result").await.0 else { panic!("NUL") };
    assert!(text.contains("NUL"), "{text}");
    assert_eq!(run(&hostile().await, "permanent a\0b").await.0, Outcome::Said(Said::Permanent("a\u{FFFD}b".to_owned())));
}

#[tokio::test]
async fn progress_is_clamped() {
    let (_, _, recorder) = run(&hostile().await, "progress").await;
    let expected = [("half", 50.0), ("beyond", 100.0), ("nothing", 0.0)].map(|(name, percent)| (name.to_owned(), percent));
    assert_eq!(*recorder.progress.lock().expect("no panic"), expected);
}

#[tokio::test]
async fn children_reach_the_host_as_they_were_given() {
    let (outcome, _, recorder) = run(&hostile().await, "enqueue {\"n\":1}").await;
    let Outcome::Said(Said::Completed(Some(text))) = outcome else { panic!("{outcome:?}") };
    let ids = "00000000-0000-0000-0000-000000000001 00000000-0000-0000-0000-000000000002";
    assert_eq!(text, format!("{ids} Err(Error::Invalid(\"contract is empty\"))"));
    let child = Child {
        contract: "child".to_owned(),
        payload: "{\"n\":1}".to_owned(),
        queue: Some("other".to_owned()),
        delay: Duration::ZERO,
        unique_key: Some("once".to_owned()),
        metadata: vec![("a".to_owned(), "b".to_owned())],
    };
    let later = Child {
        contract: "later".to_owned(),
        delay: Duration::from_millis(1500),
        queue: None,
        unique_key: None,
        metadata: Vec::new(),
        ..child.clone()
    };
    assert_eq!(*recorder.children.lock().expect("no panic"), [child, later]);
}

#[tokio::test]
async fn a_defect_of_the_host_ends_one_attempt_and_nothing_else() {
    let hostile = hostile().await;
    let recorder = Arc::<Recorder>::default();
    recorder.panic_on_child.store(true, Ordering::Release);
    let outcome = run_with(&hostile, "enqueue {}", &recorder, &Arc::default()).await.0;
    assert_eq!(outcome, Outcome::Observed(Observed::Trapped("host fault: a defect of the host".to_owned())));
    assert_eq!(run(&hostile, "ok").await.0, Outcome::Said(Said::Completed(None)));
}
