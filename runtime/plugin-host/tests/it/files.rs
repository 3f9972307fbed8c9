//! A guest sees the files, variables and network that it was granted, and a run with files ends exactly.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Observed, Outcome, Said};
use warp_pipeline::{StopReason, StopSignal};
use warp_plugin_host::{Caps, Directory, EngineConfig, Permissions, Runnable};

use crate::guests::{Recorder, engine, hostile, new_engine, run, run_with, runnable_on};

pub fn reading(path: &Path) -> Permissions {
    granted(path, "/in", false)
}

fn granted(path: &Path, guest: &str, writable: bool) -> Permissions {
    Permissions { files: vec![Directory { host: path.to_owned(), guest: guest.to_owned(), writable }], ..Permissions::default() }
}

async fn said(runnable: &Arc<Runnable>, payload: &str) -> String {
    match run(runnable, payload).await.0 {
        Outcome::Said(Said::Completed(Some(text))) => text,
        other => panic!("{payload}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_is_all_that_a_guest_sees_of_the_machine() {
    let outside = tempfile::tempdir().expect("a directory");
    let inside = outside.path().join("inside");
    std::fs::create_dir(&inside).expect("writable");
    std::fs::write(outside.path().join("secret"), "secret").expect("writable");
    std::fs::write(inside.join("plain"), "plain").expect("writable");
    symlink("plain", inside.join("within")).expect("writable");
    symlink("../secret", inside.join("out")).expect("writable");
    symlink(outside.path().join("secret"), inside.join("absolute")).expect("writable");

    let reader = runnable_on(&engine(), "hostile", reading(&inside), Caps::default()).await;
    for (payload, expected) in [
        ("read /in/plain", "ok: plain"),
        ("read /in/within", "ok: plain"),
        ("list /in", "ok: absolute,out,plain,within"),
        ("read /in/../secret", "error: PermissionDenied"),
        ("read /in/out", "error: PermissionDenied"),
        ("read /in/absolute", "error: PermissionDenied"),
        ("read /etc/hostname", "error: NotFound"),
        ("write /in/new", "error: PermissionDenied"),
        ("write /in/plain", "error: PermissionDenied"),
    ] {
        assert_eq!(said(&reader, payload).await, expected, "{payload}");
    }

    let writer = runnable_on(&engine(), "hostile", granted(&inside, "/out", true), Caps::default()).await;
    assert_eq!(said(&writer, "write /out/new").await, "ok: written");
    assert_eq!(std::fs::read_to_string(inside.join("new")).expect("written"), "written");
    assert_eq!(said(&writer, "write /out/out").await, "error: PermissionDenied");
    assert_eq!(std::fs::read_to_string(outside.path().join("secret")).expect("there"), "secret");
}

#[tokio::test]
async fn nothing_else_is_there() {
    let env = vec![("TOKEN".to_owned(), "t".to_owned())];
    let granted = runnable_on(&engine(), "hostile", Permissions { env, ..Permissions::default() }, Caps::default()).await;
    assert_eq!(said(&granted, "env").await, "[(\"TOKEN\", \"t\")] args=[]");
    let hostile = hostile().await;
    assert_eq!(said(&hostile, "env").await, "[] args=[]");
    assert_eq!(said(&hostile, "stdin").await, "Ok(\"\")");
    assert_eq!(said(&hostile, "read /etc/hostname").await, "error: NotFound");
    assert_eq!(said(&hostile, "connect 127.0.0.1:1").await, "error: PermissionDenied");
    assert_eq!(said(&hostile, "clock").await, "true");
}

#[tokio::test]
async fn a_directory_that_went_away_is_named() {
    let gone = tempfile::tempdir().expect("a directory").path().to_owned();
    let reader = runnable_on(&engine(), "hostile", reading(&gone), Caps::default()).await;
    let Outcome::Observed(Observed::Trapped(text)) = run(&reader, "ok").await.0 else { panic!("it is gone") };
    assert!(text.contains(&gone.display().to_string()) && text.contains("/in"), "{text}");
}

/// The kernel does not give a blocked call back. The run must not claim to have ended while its call goes on, and
/// must not keep anybody else waiting: the engine has one thread here.
#[tokio::test(flavor = "current_thread")]
async fn a_run_in_a_file_call_ends_when_the_call_returns_and_delays_nobody() {
    let directory = tempfile::tempdir().expect("a directory");
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0).expect("a pipe");
    let engine = new_engine(&EngineConfig { slots: 2, ..EngineConfig::default() });
    let reader = runnable_on(&engine, "hostile", reading(directory.path()), Caps::default()).await;
    let plain = runnable_on(&engine, "hostile", Permissions::default(), Caps::default()).await;
    let (stop, recorder) = (Arc::<StopSignal>::default(), Arc::<Recorder>::default());
    let mut reading = tokio::spawn({
        let (stop, recorder) = (Arc::clone(&stop), Arc::clone(&recorder));
        async move { run_with(&reader, "print-then-read /in/pipe", &recorder, &stop).await.0 }
    });
    recorder.heard.notified().await;
    // Nothing can be heard from inside the call, and it follows the line within microseconds.
    tokio::time::sleep(Duration::from_millis(50)).await;
    stop.stop(StopReason::TimedOut);
    for _ in 0..20 {
        assert_eq!(run(&plain, "ok").await.0, Outcome::Said(Said::Completed(None)));
        assert!(!reading.is_finished(), "its call has not returned");
    }
    assert_eq!(engine.free_slots(), 1, "its place is not free either");
    // Opening the other end lets the call return.
    let other_end = tokio::task::spawn_blocking(move || std::fs::OpenOptions::new().write(true).open(pipe));
    let outcome = (&mut reading).await.expect("no panic");
    assert!(matches!(outcome, Outcome::Observed(Observed::TimedOut(_))), "{outcome:?}");
    drop(other_end.await.expect("no panic").expect("opened"));
    assert_eq!(engine.free_slots(), 2);
}

/// A guest with files spins on a thread of its own, which must hear the stop too, and the drop of its caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spinning_guest_with_files_is_stopped_like_any_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let engine = new_engine(&EngineConfig { slots: 1, ..EngineConfig::default() });
    let reader = runnable_on(&engine, "hostile", reading(directory.path()), Caps::default()).await;
    let (stop, recorder) = (Arc::<StopSignal>::default(), Arc::<Recorder>::default());
    let run_it = run_with(&reader, "print-then-spin ready", &recorder, &stop);
    let stop_it = async {
        recorder.heard.notified().await;
        stop.stop(StopReason::Cancelled);
    };
    let ((outcome, _), ()) = tokio::join!(run_it, stop_it);
    assert_eq!(outcome, Outcome::Observed(Observed::Cancelled));

    let never = Arc::default();
    tokio::select! {
        _ = run_with(&reader, "print-then-spin ready", &recorder, &never) => panic!("it spins for ever"),
        () = recorder.heard.notified() => {}
    }
    assert_eq!(run(&reader, "ok").await.0, Outcome::Said(Said::Completed(None)));
}
