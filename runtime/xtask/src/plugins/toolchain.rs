//! Finding tools, installing them below `target/toolchains`, and running them with their output in a log.
//!
//! An install is marked as done only after it succeeded, so that one cut off in the middle is made again. Installed
//! tools are used without the network.

use std::{
    env,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use super::{Paths, Plugin, Stop, stamp};

/// The commands that ran, and everything that they printed.
pub struct Log(File);

impl Log {
    pub fn create(path: &Path) -> Result<Self> {
        Ok(Self(File::create(path).with_context(|| format!("failed to write {}", path.display()))?))
    }

    /// Runs to the end and fails unless the command succeeds.
    pub fn run(&self, command: &mut Command) -> Result<()> {
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        writeln!(&self.0, "$ {command:?}")?;
        let status = command
            .stdin(Stdio::null())
            .stdout(self.0.try_clone()?)
            .stderr(self.0.try_clone()?)
            .status()
            .with_context(|| format!("failed to start {program}"))?;
        if !status.success() {
            bail!("{program} ended with {status}");
        }
        Ok(())
    }
}

/// What a command prints when asked for its version; None if it is not there.
fn version_of(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// `v20.11.1` and `3.11` alike, as far as major and minor.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Meant for the host; a flag such as `target-cpu=native` is no use to a component.
    for flags in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS"] {
        command.env_remove(flags);
    }
    command
}

pub fn rust_target(target: &str) -> Result<(), Stop> {
    let sysroot = version_of("rustc", &["--print", "sysroot"]).ok_or_else(|| Stop::Missing("rustc".into()))?;
    if Path::new(&sysroot).join("lib/rustlib").join(target).is_dir() {
        return Ok(());
    }
    Err(Stop::Missing(format!("the target {target}: rustup target add {target}")))
}

pub fn rustc_version() -> String {
    version_of("rustc", &["--version"]).unwrap_or_default()
}

/// A Python of the machine, for tests and for making the private environment.
pub fn python() -> Result<&'static str, Stop> {
    const VERSION: &[&str] = &["-c", "import sys; print('%d.%d' % sys.version_info[:2])"];
    ["python3", "python"]
        .into_iter()
        .find(|program| version_of(program, VERSION).and_then(|text| parse_version(&text)).is_some_and(|version| version >= (3, 11)))
        .ok_or_else(|| Stop::Missing("Python 3.11".into()))
}

/// The private environment with everything of plugins/requirements.txt.
pub struct PythonTools(PathBuf);

impl PythonTools {
    pub fn install(paths: &Paths, log: &Log) -> Result<Self, Stop> {
        let python = python()?;
        let folder = paths.toolchains().join("python");
        let requirements = requirements(paths);
        let tools = Self(folder.clone());
        let pinned = fs::read(&requirements)?;
        once(&folder, &pinned, "Python tools", || {
            // Debian splits the module off, and then making an environment is the first thing that fails.
            log.run(Command::new(python).args(["-m", "venv", "--clear"]).arg(&folder))
                .map_err(|_| Stop::Missing("Python 3.11 with its venv module (Debian: python3-venv)".into()))?;
            let mut pip = tools.python();
            pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-r"]).arg(&requirements);
            Ok(log.run(&mut pip).context("failed to install plugins/requirements.txt")?)
        })?;
        Ok(tools)
    }

    pub fn python(&self) -> Command {
        Command::new(self.program("python"))
    }

    pub fn tool(&self, name: &str) -> Command {
        Command::new(self.program(name))
    }

    fn program(&self, name: &str) -> PathBuf {
        let folder = self.0.join(if cfg!(windows) { "Scripts" } else { "bin" });
        folder.join(name).with_extension(env::consts::EXE_EXTENSION)
    }
}

fn requirements(paths: &Paths) -> PathBuf {
    paths.plugins.join("requirements.txt")
}

pub fn pinned_python_tools(paths: &Paths) -> Result<String> {
    Ok(fs::read_to_string(requirements(paths))?)
}

pub fn node() -> Result<(), Stop> {
    let version = version_of("node", &["--version"]).and_then(|text| parse_version(&text));
    if version.is_some_and(|(major, _)| major >= 20) { Ok(()) } else { Err(Stop::Missing("Node 20".into())) }
}

/// The packages of the plugin's lock file, in a folder of their own: the source folder stays as it is in git.
/// Returns that folder's node_modules.
pub fn npm_packages(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
    const FILES: [&str; 3] = ["package.json", "package-lock.json", ".npmrc"];
    const NPM: &str = if cfg!(windows) { "npm.cmd" } else { "npm" };
    node()?;
    version_of(NPM, &["--version"]).ok_or_else(|| Stop::Missing("npm, which comes with Node 20".into()))?;

    let folder = paths.toolchains().join("node").join(&plugin.name);
    let mut pinned = Vec::new();
    for name in FILES {
        pinned.extend(fs::read(plugin.folder.join(name))?);
    }
    once(&folder, &pinned, "Node packages", || {
        fs::create_dir_all(&folder)?;
        for name in FILES {
            fs::copy(plugin.folder.join(name), folder.join(name))?;
        }
        let mut npm = Command::new(NPM);
        npm.args(["ci", "--no-audit", "--no-fund"]).current_dir(&folder);
        Ok(log.run(&mut npm).context("failed to install the packages of package-lock.json")?)
    })?;
    Ok(folder.join("node_modules"))
}

/// Installs into `folder` unless exactly `pinned` has been installed there. The path counts too: the programs of a
/// Python environment name their interpreter by it, and do not start after the checkout has been moved.
fn once(folder: &Path, pinned: &[u8], what: &str, install: impl FnOnce() -> Result<(), Stop>) -> Result<(), Stop> {
    let marker = folder.join(".installed");
    let digest = stamp::digest(&[folder.as_os_str().as_encoded_bytes(), b"\0", pinned].concat());
    if fs::read_to_string(&marker).is_ok_and(|installed| installed == digest) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    eprintln!("installing {what} into {} (once)", folder.display());
    install()?;
    Ok(fs::write(marker, digest)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(parse_version("v20.11.1"), Some((20, 11)));
        assert!(parse_version("3.9").unwrap() < (3, 11));
        assert_eq!(parse_version("none"), None);
    }
}
