//! Every `ui/*.toml` beside its verdict: `.err` holds the exact refusals, `.ok` the values and warnings.
//!
//! `WARP_BLESS=1 cargo test -p warp-manifest` writes the verdicts anew, to be read as a diff before they are
//! committed. A text without a verdict, or a verdict without its text, fails.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use warp_manifest::Manifest;

fn texts() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/ui");
    let mut paths: Vec<_> = fs::read_dir(directory).expect("the ui directory").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

/// The verdict as text, and the extension of the file that holds it.
fn judge(text: &str, name: &str) -> (&'static str, String) {
    match Manifest::parse(text, name) {
        Err(refusals) => {
            assert!(!refusals.is_empty(), "{name} is refused without a reason");
            ("err", refusals.iter().map(|refusal| format!("{refusal}\n")).collect())
        }
        Ok(manifest) => {
            let warnings: String = manifest.warnings.iter().map(|warning| format!("{warning}\n")).collect();
            ("ok", format!("{warnings}{}", summary(&manifest)))
        }
    }
}

fn summary(manifest: &Manifest) -> String {
    let mut out = format!("plugin {} {}\n", manifest.plugin.name, manifest.plugin.version);
    if !manifest.must_understand.is_empty() {
        out.push_str(&format!("must understand {}\n", manifest.must_understand.join(", ")));
    }
    for (name, contract) in &manifest.contracts {
        out.push_str(&format!("contract {name}: {:?}\n", contract.declared));
    }
    for (name, handler) in &manifest.handlers {
        out.push_str(&format!("handler {name} ({}) of {}: {:?}\n", handler.kind.name(), handler.handles.join(", "), handler.declared));
    }
    out.push_str(&format!("{:?}\n", manifest.capabilities));
    out
}

#[test]
fn every_text_gets_its_verdict() {
    let bless = std::env::var_os("WARP_BLESS").is_some();
    let (mut wrong, mut verdicts, mut used) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let mut count = 0;
    for path in texts() {
        if path.extension().is_none_or(|extension| extension != "toml") {
            verdicts.insert(path);
            continue;
        }
        count += 1;
        let text = fs::read_to_string(&path).expect("a text");
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let (extension, got) = judge(&text, name);
        let verdict = path.with_extension(extension);
        if bless {
            fs::write(&verdict, &got).expect("a verdict can be written");
        }
        let expected = fs::read_to_string(&verdict).unwrap_or_else(|_| format!("no file {}\n", verdict.display()));
        if got != expected {
            wrong.push(format!("--- {name}: expected\n{expected}--- got\n{got}"));
        }
        used.insert(verdict);
    }
    assert!(count > 60, "only {count} texts were found");
    verdicts.retain(|verdict| !used.contains(verdict));
    assert!(verdicts.is_empty(), "verdicts without a text that gets them: {verdicts:?}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The texts that ship with the project are its first users.
#[test]
fn every_first_party_manifest_is_accepted_without_a_warning() {
    let plugins = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins");
    let mut count = 0;
    for entry in fs::read_dir(plugins).expect("the plugins directory") {
        let path = entry.expect("an entry").path().join("warp.toml");
        let Ok(text) = fs::read_to_string(&path) else { continue };
        count += 1;
        let (extension, verdict) = judge(&text, "warp.toml");
        assert_eq!(extension, "ok", "{}:\n{verdict}", path.display());
        assert!(!verdict.contains("warning"), "{}:\n{verdict}", path.display());
    }
    assert!(count > 0, "no manifest was found");
}
