//! One attempt without a database, and loading one file outside a directory.

use std::sync::Arc;
use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::{Observed, Outcome, Said};
use warp_manifest::{RefusalKind, pack};
use warp_pipeline::Level;
use warp_plugin_host::{Grants, Loader, PluginVersion, TryParams, run_once};

use crate::guests::{guest, plugin_loader};

const MANIFEST: &str = r#"
format = 1
[plugin]
name = "hostile"
version = "1.0.0"
[handler.odd-jobs]
handles = ["odd", "even"]
[capabilities]
state = [{ bucket = "balances" }]
"#;

fn grants() -> Grants {
    let grant = warp_manifest::Grant { state: vec!["balances".to_owned()], ..warp_manifest::Grant::default() };
    Grants { plugins: [("hostile".to_owned(), grant)].into(), ..Grants::default() }
}

async fn load(loader: &Loader, manifest: &str, grants: &Grants) -> Result<Arc<PluginVersion>, Vec<warp_manifest::Refusal>> {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("hostile.wasm");
    std::fs::write(&path, pack(guest("hostile"), manifest).expect("packable")).expect("writable");
    loader.load_file(&path, grants).await
}

fn params(payload: &str) -> TryParams {
    TryParams {
        contract: "even".to_owned(),
        payload: payload.to_owned(),
        limit: Duration::from_secs(60),
        holds_slot: false,
        job_id: JobId(1),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_collects_what_the_guest_does() {
    let version = load(&plugin_loader(), MANIFEST, &grants()).await.expect("it loads");
    let report = run_once(&version, params("print-both")).await.expect("it runs that contract");
    assert_eq!(report.outcome, Outcome::Said(Said::Completed(None)));
    assert_eq!(report.lines.len(), 4);
    assert_eq!(report.lines[0], (Level::Stdout, "to stdout".to_owned()));
    assert!(report.stats.peak_memory > 0 && report.stats.instantiate > Duration::ZERO);

    let report = run_once(&version, params("enqueue {}")).await.expect("it runs that contract");
    assert_eq!(report.children.iter().map(|child| child.contract.as_str()).collect::<Vec<_>>(), ["child", "later"]);
    let report = run_once(&version, params("progress")).await.expect("it runs that contract");
    assert_eq!(report.progress.len(), 3);
    let report = run_once(&version, params("state balances")).await.expect("it runs that contract");
    assert!(matches!(&report.outcome, Outcome::Said(Said::Completed(Some(text))) if text.contains("Ok(\"4\")")), "{report:?}");
    assert!(report.state.is_empty(), "it removed its key");

    assert!(run_once(&version, TryParams { contract: "other".to_owned(), ..params("ok") }).await.is_none());
    assert_eq!(version.usage().runs, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_ends_at_its_limit() {
    let version = load(&plugin_loader(), MANIFEST, &grants()).await.expect("it loads");
    let limit = Duration::from_millis(50);
    let report = run_once(&version, TryParams { limit, ..params("spin") }).await.expect("it runs that contract");
    assert_eq!(report.outcome, Outcome::Observed(Observed::TimedOut(limit)));
}

#[tokio::test]
async fn what_is_asked_and_not_granted_or_not_there_stops_the_load() {
    let loader = plugin_loader();
    let refused = |result: Result<_, Vec<warp_manifest::Refusal>>| result.err().expect("refused");
    let reasons = refused(load(&loader, MANIFEST, &Grants::default()).await);
    assert_eq!(reasons[0].kind, RefusalKind::Grant);
    assert!(reasons[0].remedy.contains("[grant.hostile]"), "{reasons:?}");

    let no_state = MANIFEST.replace("state = [{ bucket = \"balances\" }]", "");
    let reasons = refused(load(&loader, &no_state, &grants()).await);
    assert_eq!(reasons[0].kind, RefusalKind::Imports, "the guest imports what its manifest does not ask for: {reasons:?}");

    let files = MANIFEST.replace("state =", "env = [\"TOKEN\"]\nfiles = [{ path = \"in\", mode = \"read\" }]\nstate =");
    let mut granted = grants();
    let grant = granted.plugins.get_mut("hostile").expect("there");
    grant.env = vec!["TOKEN".to_owned()];
    grant.files = [("in".to_owned(), warp_manifest::GrantedDirectory { host: "nowhere".to_owned(), mode: None })].into();
    let base = tempfile::tempdir().expect("a directory");
    granted.base = base.path().to_owned();
    let reasons = refused(load(&loader, &files, &granted).await);
    let text = reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(text.contains("nowhere") && text.contains("variable `TOKEN` is granted and not set"), "{text}");

    std::fs::create_dir(base.path().join("nowhere")).expect("writable");
    granted.env = [("TOKEN".to_owned(), "t".to_owned())].into();
    let version = load(&loader, &files, &granted).await.expect("everything is there");
    let permissions = version.runnable().permissions();
    assert_eq!(permissions.env, [("TOKEN".to_owned(), "t".to_owned())]);
    assert_eq!(permissions.files[0].guest, "/in");
    assert!(!permissions.files[0].writable);
}

#[tokio::test]
async fn a_file_without_a_manifest_is_refused_with_the_remedy() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("small.wasm");
    std::fs::write(&path, guest("small")).expect("writable");
    let reasons = plugin_loader().load_file(&path, &Grants::default()).await.err().expect("nobody declares it");
    assert!(reasons[0].remedy.contains("warp-host pack"), "{reasons:?}");
    let missing = plugin_loader().load_file(&scratch.path().join("none.wasm"), &Grants::default()).await.err().expect("missing");
    assert_eq!(missing[0].kind, RefusalKind::Io);
}
