//! Compiled code on disk: a damaged file is a miss, and nobody else's directory is trusted.

use std::fs::{self, Permissions as Mode};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Outcome, Said};
use warp_plugin_host::{Cache, Caps, CodeLoader, Permissions, Runnable};

use crate::guests::{digest, engine, guest, run};

fn loader(path: &Path) -> CodeLoader {
    let cache = Cache::open(path, &engine()).expect("the cache opens");
    CodeLoader::new(engine(), Some(cache), Duration::from_secs(300)).expect("a thread")
}

fn code_file(path: &Path) -> PathBuf {
    let files = fs::read_dir(path).expect("a directory").map(|entry| entry.expect("readable").path());
    files.into_iter().find(|file| file.extension().is_some_and(|e| e == "cwasm")).expect("one compiled file")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_file_is_a_miss_and_a_mapped_one_is_never_written() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("code");
    let bytes = guest("small");
    let code = digest(bytes);
    assert!(loader(&path).cached(code).await.is_none());
    let first = loader(&path).component(bytes.into(), code).await.expect("it compiles");
    assert!(loader(&path).cached(code).await.is_some());
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o700);

    let file = code_file(&path);
    let good = fs::read(&file).expect("readable");
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for damage in [Vec::new(), good[..good.len() / 2].to_vec(), flipped, b"not code at all".to_vec()] {
        // As a broken disk or a hasty administrator would leave it, under another inode than the mapped one.
        fs::remove_file(&file).expect("removable");
        fs::write(&file, &damage).expect("writable");
        let damaged = fs::metadata(&file).expect("there").ino();
        assert!(loader(&path).cached(code).await.is_none(), "{} bytes", damage.len());
        loader(&path).component(bytes.into(), code).await.expect("it compiles again");
        assert_ne!(fs::metadata(&file).expect("there").ino(), damaged, "it was renamed over, not written");
        assert!(loader(&path).cached(code).await.is_some());
    }
    // What was mapped all the time still runs.
    let runnable = Arc::new(Runnable::new(engine(), &first, code, Permissions::default(), Caps::default()).expect("it links"));
    assert_eq!(run(&runnable, "ok").await.0, Outcome::Said(Said::Completed(Some("ok".to_owned()))));
    let left: Vec<_> = fs::read_dir(&path).expect("there").map(|entry| entry.expect("readable").file_name()).collect();
    assert_eq!(left.len(), 2, "code and checksum, no temporary file: {left:?}");
}

#[test]
fn a_directory_that_others_may_write_to_is_not_used() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("code");
    fs::create_dir(&path).expect("writable");
    fs::set_permissions(&path, Mode::from_mode(0o777)).expect("ours");
    let error = Cache::open(&path, &engine()).err().expect("anybody could put code there").to_string();
    assert!(error.contains("chmod 700"), "{error}");
}

#[tokio::test]
async fn what_is_no_component_is_refused_with_a_reason() {
    for bytes in [&b""[..], b"\0asm\x01\0\0\0", b"\0asm\x0d\0\x01\0garbage", &guest("small")[..1000]] {
        let code = CodeLoader::new(engine(), None, Duration::from_secs(300)).expect("a thread");
        let error = code.component(bytes.into(), digest(bytes)).await.expect_err("it is none").to_string();
        assert!(error.starts_with("failed to compile: "), "{error}");
    }
}
