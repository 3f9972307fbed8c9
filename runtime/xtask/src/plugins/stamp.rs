//! Whether a plugin has to be built at all.
//!
//! A stamp is the digest of everything that goes into a component (sources, WIT, pinned tools, this program's
//! recipes) and the digest of the component that came out. Modification times are not used: a checkout changes them
//! all.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::{Paths, Plugin};

/// Raise it when a recipe in `language.rs` changes what comes out.
const RECIPES: u32 = 1;

pub fn inputs(paths: &Paths, plugin: &Plugin) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{RECIPES}\0{}\0", plugin.language.tool_versions(paths)?));
    for root in [&plugin.folder, &paths.wit] {
        for file in files(root)? {
            let content = fs::read(&file).with_context(|| format!("failed to read {}", file.display()))?;
            // Lengths keep a file's end apart from the next one's name.
            let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
            hash.update(format!("{}\0{}\0{name}", name.len(), content.len()));
            hash.update(content);
        }
    }
    Ok(hex(&hash.finalize()))
}

pub fn is_current(work: &Path, inputs: &str, finished: &Path) -> bool {
    let Ok(stamp) = fs::read_to_string(work.join("stamp")) else { return false };
    let Ok(component) = fs::read(finished) else { return false };
    stamp == format(inputs, &component)
}

pub fn write(work: &Path, inputs: &str, component: &[u8]) -> Result<()> {
    Ok(fs::write(work.join("stamp"), format(inputs, component))?)
}

fn format(inputs: &str, component: &[u8]) -> String {
    format!("{inputs} {}\n", digest(component))
}

pub fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Sorted, so that the digest does not depend on the file system. What tools leave behind and tests are no inputs.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).with_context(|| format!("failed to read {}", root.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if matches!(&*name, "target" | "node_modules" | "__pycache__" | "test" | "README.md") {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::language::Language;

    #[test]
    fn sources_count_and_texts_for_people_do_not() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths { plugins: root.path().into(), wit: root.path().join("wit"), target: root.path().join("target") };
        let plugin = Plugin { name: "p".into(), folder: root.path().join("p"), language: Language::JavaScript };
        let put = |name: &str, text: &str| {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        put("wit/job.wit", "package a:b;");
        put("p/src/handler.js", "1");
        let before = inputs(&paths, &plugin).unwrap();
        for ignored in ["p/README.md", "p/test/handler.test.js", "p/node_modules/x/index.js"] {
            put(ignored, "text");
            assert_eq!(inputs(&paths, &plugin).unwrap(), before, "{ignored}");
        }
        for (source, text) in [("p/src/handler.js", "2"), ("p/src/b.js", ""), ("wit/job.wit", "package a:c;")] {
            let earlier = inputs(&paths, &plugin).unwrap();
            put(source, text);
            assert_ne!(inputs(&paths, &plugin).unwrap(), earlier, "{source}");
        }
    }

    #[test]
    fn a_component_that_was_changed_or_removed_is_built_again() {
        let work = tempfile::tempdir().unwrap();
        let finished = work.path().join("p.wasm");
        fs::write(&finished, "component").unwrap();
        assert!(!is_current(work.path(), "inputs", &finished));
        write(work.path(), "inputs", b"component").unwrap();
        assert!(is_current(work.path(), "inputs", &finished));
        assert!(!is_current(work.path(), "other inputs", &finished));
        fs::write(&finished, "changed").unwrap();
        assert!(!is_current(work.path(), "inputs", &finished));
        fs::remove_file(&finished).unwrap();
        assert!(!is_current(work.path(), "inputs", &finished));
    }
}
