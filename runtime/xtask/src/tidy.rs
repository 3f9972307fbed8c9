//! `cargo xtask tidy`: what the compiler does not check.
//!
//! The dependency direction between crates, a header on every module, the glossary's words, and documents that
//! name files which exist. Runs first in `cargo xtask test`, because it costs a second.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

/// Each crate and everything of this workspace or of the listed outsiders that it may depend on, tests aside.
/// The order is the architecture: a crate may only name crates above it.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("warp-domain", &[]),
    ("warp-store", &["warp-domain"]),
    ("warp-pipeline", &["warp-domain"]),
    ("warp-manifest", &["warp-domain"]),
    ("warp-testkit", &["warp-domain", "warp-store"]),
    ("warp-test-servers", &[]),
    ("warp-store-tests", &["warp-domain", "warp-store"]),
    ("warp-store-sqlite", &["warp-domain", "warp-store"]),
    ("warp-store-postgres", &["warp-domain", "warp-store"]),
    ("warp-plugin-host", &["warp-domain", "warp-pipeline", "warp-manifest"]),
    ("warp-worker", &["warp-domain", "warp-store", "warp-pipeline"]),
    ("warp-http", &["warp-domain", "warp-store", "warp-worker"]),
    (
        "warp-host",
        &[
            "warp-domain",
            "warp-store",
            "warp-pipeline",
            "warp-manifest",
            "warp-store-sqlite",
            "warp-store-postgres",
            "warp-plugin-host",
            "warp-worker",
            "warp-http",
        ],
    ),
    // A story told from outside; the stores are there to play one host that behaves badly, the servers to play on.
    ("gold", &["warp-domain", "warp-store", "warp-store-sqlite", "warp-store-postgres", "warp-test-servers"]),
    ("xtask", &["warp-manifest", "warp-test-servers"]),
];

/// Outside crates that only the named crates may use: drivers, engine, formats, environment.
const RESERVED: &[(&str, &[&str])] = &[
    ("sqlx", &["warp-store-sqlite", "warp-store-postgres", "warp-store-tests", "warp-test-servers"]),
    ("wasmtime", &["warp-plugin-host"]),
    ("wasmtime-wasi", &["warp-plugin-host"]),
    ("anyhow", &["warp-host", "gold", "xtask"]),
    ("clap", &["warp-host", "gold", "xtask"]),
    (
        "tokio",
        &[
            "warp-pipeline",
            "warp-testkit",
            "warp-test-servers",
            "warp-store-tests",
            "warp-store-sqlite",
            "warp-store-postgres",
            "warp-plugin-host",
            "warp-worker",
            "warp-http",
            "warp-host",
            "gold",
        ],
    ),
    (
        "serde",
        &["warp-store", "warp-manifest", "warp-store-sqlite", "warp-store-postgres", "warp-host", "warp-testkit", "warp-plugin-host"],
    ),
];

/// Words that the glossary replaces, as whole words in comments and names of Rust sources. Kept short: only
/// those that were found in drafts.
const AVOID: &[(&str, &str)] = &[("dequeue", "claim"), ("acknowledge the job", "settle"), ("un-park", "wake")];

/// The command line.
#[derive(clap::Args)]
pub struct Args {}

/// Runs every check and prints each finding.
pub fn run(root: &Path, _: &Args) -> Result<ExitCode> {
    let mut findings = dependencies(root)?;
    let sources = files(&root.join("runtime"), "rs")?;
    for path in &sources {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        findings.extend(header(&name, &text));
        findings.extend(words(&name, &text));
    }
    for document in ["README.md", "runtime/ARCHITECTURE.md", "CHANGELOG.md"] {
        let path = root.join(document);
        let text = std::fs::read_to_string(&path).with_context(|| format!("{document} is part of the product"))?;
        findings.extend(named_paths(root, document, &text));
    }
    findings.iter().for_each(|finding| println!("tidy: {finding}"));
    if findings.is_empty() {
        println!("tidy: {} sources, nothing found", sources.len());
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::FAILURE)
}

fn dependencies(root: &Path) -> Result<Vec<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata's answer")?;
    let mut findings = Vec::new();
    let mut seen = BTreeSet::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        seen.insert(name.to_owned());
        let Some((_, allowed)) = MAY_DEPEND_ON.iter().find(|(known, _)| *known == name) else {
            findings.push(format!("crate {name} is not in the table of dependencies; add it to tidy.rs and to runtime/ARCHITECTURE.md"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            if dependency["kind"].as_str() == Some("dev") {
                continue;
            }
            let ours = MAY_DEPEND_ON.iter().any(|(known, _)| *known == to);
            if ours && !allowed.contains(&to) {
                findings.push(format!("crate {name} must not depend on {to}; it may use {allowed:?}"));
            }
            if let Some((_, users)) = RESERVED.iter().find(|(reserved, _)| *reserved == to)
                && !users.contains(&name)
            {
                findings.push(format!("crate {name} must not depend on {to}; only {users:?} may"));
            }
        }
    }
    findings.extend(
        MAY_DEPEND_ON
            .iter()
            .filter(|(name, _)| !seen.contains(*name))
            .map(|(name, _)| format!("the table of dependencies names {name}, which does not exist")),
    );
    Ok(findings)
}

fn header(name: &str, text: &str) -> Option<String> {
    (!text.starts_with("//!")).then(|| format!("{name}:1: a module opens with what it is (`//! …`)"))
}

fn words(name: &str, text: &str) -> Vec<String> {
    let own = name.ends_with("tidy.rs");
    let lines = text.lines().enumerate().filter(|_| !own);
    lines
        .flat_map(|(at, line)| {
            let lower = line.to_lowercase();
            AVOID
                .iter()
                .filter(move |(word, _)| lower.contains(word))
                .map(move |(word, instead)| format!("{name}:{}: `{word}`; the glossary says `{instead}`", at + 1))
        })
        .collect()
}

/// Paths in backquotes that look like files of this repository must exist.
fn named_paths(root: &Path, document: &str, text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let ours = ["runtime/", "plugins/", "wit/", "examples/", "migrations/"];
    quoted
        .filter(|path| ours.iter().any(|folder| path.starts_with(folder)))
        .filter(|path| !path.contains(['*', '<', ' ', '{', '…', ':']) && !path.ends_with(".wasm"))
        .filter(|path| !root.join(path).exists())
        .map(|path| format!("{document} names `{path}`, which does not exist"))
        .collect()
}

fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            let skipped = path.file_name().is_some_and(|name| name == "target" || name == "node_modules");
            if !skipped {
                found.extend(files(&path, ending)?);
            }
        } else if path.extension().is_some_and(|known| known == ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_found() {
        assert!(header("a.rs", "use std;").is_some());
        assert!(header("a.rs", "//! A thing.").is_none());
        assert_eq!(words("a.rs", "// we Dequeue a job").len(), 1);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        assert_eq!(named_paths(&root, "x.md", "see `runtime/xtask` and `runtime/no-such-thing`").len(), 1);
    }

    #[test]
    fn the_table_allows_no_way_back() {
        for (at, (name, allowed)) in MAY_DEPEND_ON.iter().enumerate() {
            for to in *allowed {
                let below = MAY_DEPEND_ON.iter().position(|(known, _)| known == to);
                assert!(below.is_some_and(|below| below < at), "{name} → {to} points upwards");
            }
        }
    }

    /// The dependency direction of the design, checked on the real manifests.
    #[test]
    fn dependencies_point_one_way() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        assert_eq!(dependencies(&root).expect("cargo metadata"), Vec::<String>::new());
    }
}
