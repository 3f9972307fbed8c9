//! A directory that changes while jobs run: nobody who runs notices, and nothing bad ever serves.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::broadcast::Receiver;
use warp_domain::Digest;
use warp_domain::ending::{Outcome, Said};
use warp_manifest::{RefusalKind, pack};
use warp_pipeline::Handler;
use warp_plugin_host::{FileStatus, Grants, MAX_OLD_VERSIONS, Newest, PluginDir, PluginDirConfig, PluginEvent, PluginVersion};

use crate::guests::{Recorder, attempt, digest, guest, plugin_loader};

/// A test that waits longer for an event has failed.
const NEVER: Duration = Duration::from_secs(60);

/// A small plugin that runs `contract`, packed.
fn packed(plugin: &str, version: u32, contract: &str) -> Vec<u8> {
    let manifest = format!("format = 1\n[plugin]\nname = \"{plugin}\"\nversion = \"{version}.0.0\"\n[handler.{contract}]\n");
    pack(guest("small"), &manifest).expect("packable")
}

/// As every publisher should do it.
fn put(directory: &Path, name: &str, bytes: &[u8]) {
    let aside = directory.join(format!(".{name}.part"));
    fs::write(&aside, bytes).expect("writable");
    fs::rename(aside, directory.join(name)).expect("renamable");
}

struct Fixture {
    scratch: TempDir,
    plugins: PluginDir,
    events: Receiver<PluginEvent>,
}

impl Fixture {
    /// `before` fills the directory before it is opened.
    async fn open(before: impl FnOnce(&Path)) -> Self {
        Self::open_with(before, Duration::from_millis(100)).await
    }

    async fn open_with(before: impl FnOnce(&Path), rescan: Duration) -> Self {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("plugins");
        fs::create_dir(&path).expect("writable");
        before(&path);
        let config = PluginDirConfig { settle: Duration::from_millis(20), rescan, ..PluginDirConfig::new(path, Grants::default()) };
        let plugins = PluginDir::open(config, plugin_loader());
        let events = plugins.events();
        plugins.settled().await;
        Fixture { scratch, plugins, events }
    }

    fn path(&self) -> PathBuf {
        self.scratch.path().join("plugins")
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        put(&self.path(), name, bytes);
    }

    async fn event(&mut self) -> PluginEvent {
        tokio::time::timeout(NEVER, self.events.recv()).await.expect("an event comes").expect("the directory is watched")
    }

    async fn settle(&self) {
        tokio::time::timeout(NEVER, self.plugins.settled()).await.expect("it settles");
    }

    fn serving(&self, contract: &str) -> Option<Arc<PluginVersion>> {
        self.plugins.registry().snapshot().contracts().get(contract).map(|served| Arc::clone(&served.version))
    }

    fn serving_digest(&self, contract: &str) -> Option<Digest> {
        self.serving(contract).map(|version| version.digest())
    }

    fn status(&self, file: &str) -> FileStatus {
        self.plugins.status().into_iter().find(|status| status.file == file).expect("the file is listed")
    }

    fn refused(&self, file: &str) -> String {
        match self.status(file).newest {
            Newest::Refused(reasons) => reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
            other => panic!("{file}: {other:?}"),
        }
    }
}

async fn runs(version: &PluginVersion) {
    let outcome = version.run(attempt("p"), Arc::<Recorder>::default(), Arc::default()).await;
    assert_eq!(outcome, Outcome::Said(Said::Completed(Some("p".to_owned()))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_there_at_the_start_serves_and_hidden_files_do_not() {
    let fixture = Fixture::open(|path| {
        put(path, "a.wasm", &packed("a", 1, "first"));
        put(path, "b.wasm", &packed("b", 1, "second"));
        fs::write(path.join(".c.wasm"), packed("c", 1, "third")).expect("writable");
        fs::write(path.join("notes.txt"), "no plugin").expect("writable");
    })
    .await;
    let snapshot = fixture.plugins.registry().snapshot();
    assert_eq!(snapshot.contracts().keys().collect::<Vec<_>>(), ["first", "second"]);
    assert_eq!(snapshot.plugins().keys().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(snapshot.contracts()["first"].declarations.digest, digest(&packed("a", 1, "first")));
    runs(&fixture.serving("first").expect("serves")).await;
}

/// The rescan is an hour away here, so only the events of the system can tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_file_is_noticed_by_its_event() {
    let mut fixture = Fixture::open_with(|_| {}, Duration::from_secs(3600)).await;
    fixture.put("a.wasm", &packed("a", 1, "job"));
    let PluginEvent::Loaded { file, version } = fixture.event().await else { panic!("it is new") };
    assert_eq!((file.as_str(), version.plugin.as_str(), version.contracts), ("a.wasm", "a", vec!["job".to_owned()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replacement_serves_the_next_attempt_and_the_same_bytes_are_no_replacement() {
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &packed("a", 1, "job"))).await;
    let mut changes = fixture.plugins.registry().subscribe();
    let first = fixture.serving("job").expect("serves");
    fixture.put("a.wasm", &packed("a", 1, "job"));
    fixture.settle().await;
    assert_eq!(fixture.serving_digest("job"), Some(first.digest()));

    changes.mark_unchanged();
    fixture.put("a.wasm", &packed("a", 2, "job"));
    loop {
        if let PluginEvent::Replaced { old, version, .. } = fixture.event().await {
            assert_eq!((old.digest, version.digest), (first.digest(), digest(&packed("a", 2, "job"))));
            break;
        }
    }
    assert!(changes.has_changed().expect("watched"));
    assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", 2, "job"))));
    runs(&first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_content_keeps_the_version_before_it_and_says_why() {
    let good = packed("a", 1, "job");
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &good)).await;
    let next = packed("a", 2, "job");
    let mut nonsense = guest("small").to_vec();
    // Sound as far as sections go, and no valid code.
    let middle = nonsense.len() / 3;
    nonsense[middle..middle + 64].fill(0xff);
    let no_format = pack(guest("small"), "format = 9\n").expect("packable");
    let cases: [(&str, Vec<u8>); 6] = [
        ("zero length", Vec::new()),
        ("half written", next[..next.len() / 2].to_vec()),
        ("a good header and no more", next[..8].to_vec()),
        ("no manifest", guest("small").to_vec()),
        ("an unknown format", no_format),
        ("damaged code", pack(&nonsense, "format = 1\n[plugin]\nname = \"a\"\nversion = \"3.0.0\"\n[handler.job]\n").unwrap_or(nonsense)),
    ];
    for (what, bytes) in cases {
        fixture.put("a.wasm", &bytes);
        let refused = loop {
            if let PluginEvent::Refused { kept, reasons, .. } = fixture.event().await {
                assert!(!reasons.is_empty(), "{what}");
                break kept;
            }
        };
        assert_eq!(refused.map(|kept| kept.digest), Some(digest(&good)), "{what}");
        assert_eq!(fixture.serving_digest("job"), Some(digest(&good)), "{what}");
        runs(&fixture.serving("job").expect("serves")).await;
    }
    assert_eq!(fixture.status("a.wasm").serving.map(|serving| serving.digest), Some(digest(&good)));
    fixture.put("a.wasm", &next);
    fixture.settle().await;
    assert_eq!(fixture.status("a.wasm").newest, Newest::Serving);
    assert_eq!(fixture.serving_digest("job"), Some(digest(&next)));
}

/// A copy in place, in pieces: at no time does anything but a whole version serve.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_takes_its_time_serves_when_it_is_whole() {
    use std::io::Write;
    let fixture = Fixture::open(|_| {}).await;
    let bytes = packed("a", 1, "job");
    let mut file = fs::File::create(fixture.path().join("a.wasm")).expect("writable");
    for piece in bytes.chunks(bytes.len() / 5 + 1) {
        assert!(fixture.serving("job").is_none());
        file.write_all(piece).expect("writable");
        fixture.settle().await;
    }
    assert_eq!(fixture.serving_digest("job"), Some(digest(&bytes)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_file_serves_no_longer_and_its_attempts_finish() {
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &packed("a", 1, "job"))).await;
    let version = fixture.serving("job").expect("serves");
    let recorder = Arc::<Recorder>::default();
    let running = tokio::spawn({
        let (version, recorder) = (Arc::clone(&version), Arc::clone(&recorder));
        async move { version.run(attempt("wait"), recorder, Arc::default()).await }
    });
    fs::remove_file(fixture.path().join("a.wasm")).expect("removable");
    while !matches!(fixture.event().await, PluginEvent::Removed { .. }) {}
    assert!(fixture.serving("job").is_none());
    assert!(fixture.plugins.status().is_empty());
    recorder.cancelled.store(true, Ordering::Release);
    assert_eq!(running.await.expect("no panic"), Outcome::Said(Said::Completed(Some("wait".to_owned()))));
    // Put back, it serves again.
    fixture.put("a.wasm", &packed("a", 1, "job"));
    fixture.settle().await;
    assert_eq!(fixture.serving_digest("job"), Some(version.digest()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn symbolic_links_are_followed_and_their_swap_is_a_replacement() {
    let fixture = Fixture::open(|path| {
        // As a volume of a container does it: the plugin is a link through a link that is swapped.
        for version in [1, 2] {
            fs::create_dir(path.join(format!("..{version}"))).expect("writable");
            put(&path.join(format!("..{version}")), "a.wasm", &packed("a", version, "job"));
        }
        symlink("..1", path.join("..data")).expect("writable");
        symlink("..data/a.wasm", path.join("a.wasm")).expect("writable");
    })
    .await;
    assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", 1, "job"))));
    symlink("..2", fixture.path().join("..data_tmp")).expect("writable");
    fs::rename(fixture.path().join("..data_tmp"), fixture.path().join("..data")).expect("renamable");
    fixture.settle().await;
    assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", 2, "job"))));

    // Out of the directory, as with a link to what the build writes.
    put(fixture.scratch.path(), "built.wasm", &packed("b", 1, "other"));
    symlink("../built.wasm", fixture.path().join("b.wasm")).expect("writable");
    fixture.settle().await;
    assert_eq!(fixture.serving_digest("other"), Some(digest(&packed("b", 1, "other"))));
    put(fixture.scratch.path(), "built.wasm", &packed("b", 2, "other"));
    fixture.settle().await;
    assert_eq!(fixture.serving_digest("other"), Some(digest(&packed("b", 2, "other"))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_replaced_is_watched_again_and_one_that_is_gone_removes_nothing() {
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &packed("a", 1, "job"))).await;
    fs::rename(fixture.path(), fixture.scratch.path().join("moved")).expect("renamable");
    fixture.settle().await;
    assert!(fixture.serving("job").is_some(), "nobody removed a plugin");
    fs::create_dir(fixture.path()).expect("writable");
    fixture.put("b.wasm", &packed("b", 1, "other"));
    fixture.settle().await;
    assert!(fixture.serving("other").is_some() && fixture.serving("job").is_none());
    // The old directory is nobody's concern any more.
    put(&fixture.scratch.path().join("moved"), "a.wasm", &packed("a", 2, "job"));
    fixture.put("b.wasm", &packed("b", 2, "other"));
    while !matches!(fixture.event().await, PluginEvent::Replaced { .. }) {}
    assert!(fixture.serving("job").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sidecar_is_part_of_its_plugin() {
    let manifest = |version| format!("format = 1\n[plugin]\nname = \"a\"\nversion = \"{version}.0.0\"\n[handler.job]\n");
    let fixture = Fixture::open(|path| {
        put(path, "a.toml", manifest(1).as_bytes());
        put(path, "a.wasm", guest("small"));
    })
    .await;
    let first = fixture.serving("job").expect("serves");
    assert_eq!(first.manifest().plugin.version, "1.0.0");
    fixture.put("a.toml", manifest(2).as_bytes());
    fixture.settle().await;
    let second = fixture.serving("job").expect("serves");
    assert_eq!(second.manifest().plugin.version, "2.0.0");
    assert_ne!(first.digest(), second.digest());
    fs::remove_file(fixture.path().join("a.toml")).expect("removable");
    fixture.settle().await;
    assert!(fixture.refused("a.wasm").contains("no manifest"));
    assert_eq!(fixture.serving_digest("job"), Some(second.digest()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_plugins_never_serve_one_contract() {
    let fixture = Fixture::open(|path| {
        put(path, "a.wasm", &packed("a", 1, "job"));
        put(path, "b.wasm", &packed("b", 1, "job"));
        put(path, "c.wasm", &packed("a", 1, "other"));
    })
    .await;
    assert_eq!(fixture.serving("job").expect("serves").name(), "a");
    assert!(fixture.refused("b.wasm").contains("`job`"), "{}", fixture.refused("b.wasm"));
    assert!(fixture.refused("c.wasm").contains("plugin `a`"), "{}", fixture.refused("c.wasm"));
    // With the first gone there is nothing against the others.
    fs::remove_file(fixture.path().join("a.wasm")).expect("removable");
    fixture.settle().await;
    fixture.settle().await;
    assert_eq!(fixture.serving("job").expect("serves").name(), "b");
    assert_eq!(fixture.serving("other").expect("serves").name(), "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_grants_are_judged_at_once() {
    let manifest = "format = 1\n[plugin]\nname = \"a\"\nversion = \"1.0.0\"\n[handler.job]\n[capabilities]\nenv = [\"TOKEN\"]\n";
    let fixture = Fixture::open(|path| put(path, "a.wasm", &pack(guest("small"), manifest).expect("packable"))).await;
    assert!(fixture.refused("a.wasm").contains("[grant.a]"));
    let granted = |value: &str| Grants {
        plugins: [("a".to_owned(), warp_manifest::Grant { env: vec!["TOKEN".to_owned()], ..Default::default() })].into(),
        env: [("TOKEN".to_owned(), value.to_owned())].into(),
        ..Grants::default()
    };
    for value in ["one", "two"] {
        fixture.plugins.set_grants(granted(value)).await;
        fixture.settle().await;
        let version = fixture.serving("job").expect("serves");
        assert_eq!(version.runnable().permissions().env, [("TOKEN".to_owned(), value.to_owned())]);
    }
    fixture.plugins.set_grants(Grants::default()).await;
    fixture.settle().await;
    let Newest::Refused(reasons) = fixture.status("a.wasm").newest else { panic!("it is granted nothing") };
    assert_eq!(reasons[0].kind, RefusalKind::Grant);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_granted_directory_may_be_created_later_and_its_absence_is_said_once() {
    let manifest = "format = 1\n[plugin]\nname = \"a\"\nversion = \"1.0.0\"\n[handler.job]\n\
                    [capabilities]\nfiles = [{ path = \"in\", mode = \"read\" }]\n";
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &pack(guest("small"), manifest).expect("packable"))).await;
    let granted = warp_manifest::GrantedDirectory { host: "./in".to_owned(), mode: None };
    let base = fixture.scratch.path().to_owned();
    // What was said before it was granted anything is another matter.
    fixture.events = fixture.plugins.events();
    let plugins = [("a".to_owned(), warp_manifest::Grant { files: [("in".to_owned(), granted)].into(), ..Default::default() })].into();
    fixture.plugins.set_grants(Grants { plugins, base: base.clone(), ..Grants::default() }).await;
    for _ in 0..3 {
        fixture.settle().await;
        let Newest::Refused(reasons) = fixture.status("a.wasm").newest else { panic!("its directory is missing") };
        assert_eq!(reasons[0].kind, RefusalKind::Directory);
        assert!(reasons[0].problem.contains(&format!("granted as {}, which", base.join("in").display())), "{}", reasons[0]);
    }
    fs::create_dir(base.join("in")).expect("writable");
    // Not asked to look: the periodic look finds it.
    let mut events = Vec::new();
    while !matches!(events.last(), Some(PluginEvent::Loaded { .. })) {
        events.push(fixture.event().await);
    }
    assert!(matches!(events.as_slice(), [PluginEvent::Refused { .. }, PluginEvent::Loaded { .. }]), "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_replacements_under_running_attempts() {
    let fixture = Fixture::open(|path| put(path, "a.wasm", &packed("a", 0, "job"))).await;
    let over = Arc::new(AtomicBool::new(false));
    let runners: Vec<_> = (0..2)
        .map(|_| {
            let (registry, over) = (Arc::clone(fixture.plugins.registry()), Arc::clone(&over));
            tokio::spawn(async move {
                let mut ran_on = BTreeSet::new();
                while !over.load(Ordering::Acquire) {
                    let version = Arc::clone(&registry.snapshot().contracts()["job"].version);
                    runs(&version).await;
                    ran_on.insert(version.digest());
                }
                ran_on
            })
        })
        .collect();
    let mut existed: BTreeSet<_> = [digest(&packed("a", 0, "job"))].into();
    for number in 1..=100 {
        let bytes = packed("a", number, "job");
        existed.insert(digest(&bytes));
        fixture.put("a.wasm", &bytes);
        // Some are replaced before anybody has read them, which is as it should be.
        if number % 3 == 0 {
            fixture.settle().await;
        }
    }
    fixture.settle().await;
    over.store(true, Ordering::Release);
    for runner in runners {
        let ran_on = runner.await.expect("every attempt completes");
        assert!(ran_on.len() > 1 && ran_on.is_subset(&existed), "{} versions", ran_on.len());
    }
    assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", 100, "job"))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_versions_are_kept_while_they_run_up_to_a_number_and_then_given_back() {
    let mut fixture = Fixture::open(|path| put(path, "a.wasm", &packed("a", 0, "job"))).await;
    let mut held = Vec::new();
    let mut weak = Vec::new();
    for number in 1..=MAX_OLD_VERSIONS as u32 {
        let old = fixture.serving("job").expect("serves");
        weak.push(Arc::downgrade(&old));
        held.push(old);
        fixture.put("a.wasm", &packed("a", number, "job"));
        fixture.settle().await;
        assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", number, "job"))));
    }
    // All of the old ones are still there, so the next has to wait.
    let last = fixture.serving_digest("job");
    fixture.put("a.wasm", &packed("a", 99, "job"));
    while !matches!(fixture.event().await, PluginEvent::Waiting { old_versions: MAX_OLD_VERSIONS, .. }) {}
    assert_eq!(fixture.serving_digest("job"), last);
    assert!(matches!(fixture.status("a.wasm").newest, Newest::Waiting { .. }));
    // One ends, and it goes on by itself.
    held.pop();
    while !matches!(fixture.event().await, PluginEvent::Replaced { .. }) {}
    assert_eq!(fixture.serving_digest("job"), Some(digest(&packed("a", 99, "job"))));
    drop(held);
    assert_eq!(weak.iter().filter(|version| version.strong_count() > 0).count(), 0);
}
