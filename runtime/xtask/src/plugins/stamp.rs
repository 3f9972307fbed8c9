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
