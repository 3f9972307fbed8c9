//! Building what the story needs: the host beside this program, and the component.
//!
//! What cargo writes for it lies below the target directory that this program was built into.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const HERE: &str = env!("CARGO_MANIFEST_DIR");
const TARGET: &str = "wasm32-wasip2";

/// The host, in the profile of this program: the one that lies beside it, unless it is missing or older than its
/// sources.
///
/// Cargo is not asked when there is nothing to do: a test run has built the host with the features of the whole
/// workspace, and asked for the host alone cargo would build the engine a second time.
pub fn host() -> Result<PathBuf> {
    let folder = own_folder()?;
    let host = folder.join(format!("warp-host{}", env::consts::EXE_SUFFIX));
    if is_current(&host).unwrap_or(false) {
        return Ok(host);
    }
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(profile) => profile,
        None => bail!("{} is no folder of a cargo profile; name the host with --host", folder.display()),
    };
    eprintln!("building the host (the first time takes some minutes)");
    let root = Path::new(HERE).join("../..");
    cargo(&root, &["build", "--package", "warp-host", "--profile", profile], &target_dir()?)?;
    Ok(host)
}

/// Whether nothing that a program was made of has changed since. Cargo writes the list beside it.
fn is_current(program: &Path) -> Result<bool> {
    let built = program.metadata()?.modified()?;
    let list = fs::read_to_string(program.with_extension("d"))?;
    for source in sources(&list) {
        if source.metadata()?.modified()? > built {
            return Ok(false);
        }
    }
    Ok(true)
}

/// `program: source source …`, where a space that belongs to a path has a backslash before it.
fn sources(list: &str) -> Vec<PathBuf> {
    let (_, sources) = list.split_once(": ").unwrap_or_default();
    let held = sources.trim().replace("\\ ", "\0");
    held.split(' ').filter(|path| !path.is_empty()).map(|path| path.replace('\0', " ").into()).collect()
}

/// The component, without its manifest.
pub fn component() -> Result<PathBuf> {
    let target = target_dir()?.join("gold-plugin");
    cargo(&Path::new(HERE).join("plugin"), &["build", "--locked", "--release", "--target", TARGET], &target)?;
    Ok(target.join(TARGET).join("release/gold.wasm"))
}

/// The component's manifest.
pub fn manifest() -> PathBuf {
    Path::new(HERE).join("plugin/warp.toml")
}

fn cargo(folder: &Path, args: &[&str], target_dir: &Path) -> Result<()> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).arg("--quiet").arg("--target-dir").arg(target_dir).current_dir(folder).stdin(Stdio::null());
    if args.contains(&TARGET) {
        // Meant for this machine; a flag such as `target-cpu=native` is no use to a component.
        for flags in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS"] {
            command.env_remove(flags);
        }
    }
    // Standard output belongs to the table.
    let status = command.stdout(Stdio::null()).status().context("failed to start cargo")?;
    if !status.success() {
        bail!("cargo {} in {} ended with {status}", args.join(" "), folder.display());
    }
    Ok(())
}

/// `target/<profile>`, where this program lies.
fn own_folder() -> Result<PathBuf> {
    let program = env::current_exe().context("failed to find this program")?;
    program.parent().map(Path::to_owned).with_context(|| format!("{} lies in no folder", program.display()))
}

fn target_dir() -> Result<PathBuf> {
    let folder = own_folder()?;
    folder.parent().map(Path::to_owned).with_context(|| format!("{} lies in no target directory", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_sources_is_read() {
        assert_eq!(sources("/t/a: /s/b.rs /s/c\\ d.rs\n"), [PathBuf::from("/s/b.rs"), PathBuf::from("/s/c d.rs")]);
        assert_eq!(sources("/t/a:\n"), Vec::<PathBuf>::new());
    }
}
