//! Every cap ends or bounds what exceeds it, says its name, and costs the host nothing.

use warp_domain::ending::{Observed, Outcome, Said};
use warp_pipeline::Level;
use warp_plugin_host::{Caps, OutputCaps, Permissions};

use crate::guests::{engine, hostile, run, runnable_on};

async fn trapped(payload: &str, caps: Caps) -> String {
    let hostile = runnable_on(&engine(), "hostile", Permissions::default(), caps).await;
    match run(&hostile, payload).await.0 {
        Outcome::Observed(Observed::Trapped(text)) => text,
        other => panic!("{payload}: {other:?}"),
    }
}

#[tokio::test]
async fn memory() {
    let text = trapped("alloc 4096", Caps { memory: 32 << 20, ..Caps::default() }).await;
    assert!(text.starts_with("memory cap of 32MiB exceeded: the guest asked for 3"), "{text}");
    assert!(text.contains("hostile.wasm!handle"), "the backtrace says who asked: {text}");

    let hostile = runnable_on(&engine(), "hostile", Permissions::default(), Caps { memory: 32 << 20, ..Caps::default() }).await;
    let (outcome, stats, _) = run(&hostile, "alloc 20").await;
    assert_eq!(outcome, Outcome::Said(Said::Completed(Some("20 MiB".to_owned()))));
    assert!((20 << 20..32 << 20).contains(&stats.peak_memory), "{stats:?}");
}

#[tokio::test]
async fn a_component_that_starts_with_more_than_it_may_use_is_refused_before_it_runs() {
    let bytes = crate::guests::guest("hostile");
    let component = crate::guests::code(&engine()).component(bytes.into(), crate::guests::digest(bytes)).await.expect("it compiles");
    let caps = Caps { memory: 64 << 10, ..Caps::default() };
    let refused = warp_plugin_host::Runnable::new(engine(), &component, crate::guests::digest(bytes), Permissions::default(), caps);
    let text = refused.err().expect("it needs more").to_string();
    assert!(text.contains("may use 64KiB"), "{text}");
}

#[tokio::test]
async fn stack() {
    // The guest's own stack lies in its memory and ends first.
    let text = trapped("recurse 100000000", Caps::default()).await;
    assert!(text.contains("out of bounds memory access") || text.contains("stack exhausted"), "{text}");
}

#[tokio::test]
async fn core_instances_and_tables() {
    let text = trapped("ok", Caps { core_instances: 1, ..Caps::default() }).await;
    assert!(text.contains("instance count too high"), "{text}");
    let text = trapped("ok", Caps { table_elements: 1, ..Caps::default() }).await;
    assert!(text.contains("table cap of 1 elements exceeded"), "{text}");
}

#[tokio::test]
async fn what_one_call_carries() {
    for payload in ["big-result 200000000", "big-log 9000000"] {
        let text = trapped(payload, Caps { memory: 1 << 30, ..Caps::default() }).await;
        assert!(text.starts_with("a host call or the result carried more than 8MiB"), "{payload}: {text}");
    }
}

#[tokio::test]
async fn the_result() {
    let hostile = hostile().await;
    let just_right = 1 << 20;
    assert!(
        matches!(run(&hostile, &format!("big-result {just_right}")).await.0, Outcome::Said(Said::Completed(Some(text))) if text.len() == just_right)
    );
    let outcome = run(&hostile, &format!("big-result {}", just_right + 1)).await.0;
    assert_eq!(outcome, Outcome::Observed(Observed::Unacceptable("the result has 1048577B; 1MiB are kept".to_owned())));
}

#[tokio::test]
async fn handles() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("f"), "x").expect("writable");
    let permissions = crate::files::reading(directory.path());
    let hostile = runnable_on(&engine(), "hostile", permissions, Caps { resources: 50, ..Caps::default() }).await;
    let outcome = run(&hostile, "exhaust-handles /in/f").await.0;
    let Outcome::Observed(Observed::Trapped(text)) = outcome else { panic!("{outcome:?}") };
    assert!(text.starts_with("more than 50 files, streams and timers"), "{text}");
}

#[tokio::test]
async fn output_is_kept_up_to_its_caps_and_a_full_sink_never_fails_the_guest() {
    let caps = OutputCaps { line_bytes: 100, total_bytes: 1000, lines: 7 };
    let hostile = runnable_on(&engine(), "hostile", Permissions::default(), Caps { output: caps, ..Caps::default() }).await;
    // 64 MiB in lines of 4 KiB: of each the first 100 bytes, of all the first 7.
    let (outcome, stats, recorder) = run(&hostile, &format!("print-bytes {}", 64 << 20)).await;
    assert_eq!(outcome, Outcome::Said(Said::Completed(None)));
    assert!(stats.peak_memory < 4 << 20);
    let lines = recorder.lines_of(Level::Stdout);
    assert_eq!(lines, vec![format!("{}…", "x".repeat(100)); 7]);
    let all = 64 << 20;
    let line_ends = all / 4096;
    assert_eq!(*recorder.dropped.lock().expect("no panic"), (line_ends - 7, all - line_ends - 7 * 100));

    let small = OutputCaps { line_bytes: 100, total_bytes: 250, lines: 100 };
    let hostile = runnable_on(&engine(), "hostile", Permissions::default(), Caps { output: small, ..Caps::default() }).await;
    let (_, _, recorder) = run(&hostile, "print-bytes 40960").await;
    assert_eq!(recorder.lines_of(Level::Stdout).len(), 2);
}

#[tokio::test]
async fn lines_are_lines_whatever_the_writes_were() {
    let hostile = hostile().await;
    // "ä" in two writes, a line end of two bytes, a lone continuation byte, a NUL, an escape sequence, no line end.
    let (_, _, recorder) = run(&hostile, "print-raw c3 a4 0d 0a 80 0a 61 00 0a 1b 5b 33 31 6d").await;
    assert_eq!(recorder.lines_of(Level::Stdout), ["ä", "\u{FFFD}", "a\u{FFFD}", "\u{1b}[31m"]);

    let (_, _, recorder) = run(&hostile, "print-long-line 100000").await;
    assert_eq!(recorder.lines_of(Level::Stdout), [format!("{}…", "y".repeat(8192))]);
    assert_eq!(*recorder.dropped.lock().expect("no panic"), (0, 100_000 - 8192));
}

#[tokio::test]
async fn streams_and_log_keep_their_order_and_their_names() {
    let (_, _, recorder) = run(&hostile().await, "print-both").await;
    let expected = [
        (Level::Stdout, "to stdout"),
        (Level::Stderr, "to stderr"),
        (Level::Warn, "to log key=\"two words\""),
        (Level::Stdout, "without an end"),
    ];
    assert_eq!(*recorder.lines.lock().expect("no panic"), expected.map(|(level, text)| (level, text.to_owned())));
}
