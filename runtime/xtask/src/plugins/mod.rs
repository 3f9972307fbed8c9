//! `cargo xtask plugins`: every folder of `plugins/` that has a manifest becomes `plugins/<name>.wasm`.
//!
//! One language's missing tool or failed build never stops another's: each plugin ends in one printed line. What is
//! up to date is left alone. A finished component appears by renaming, because a running host may be watching the
//! folder. Tools are installed below `target/toolchains` on demand and nowhere else.
//!
//! Deliberately sequential: the slow builds use all cores by themselves, and the installs share folders.

mod language;
mod pack;
mod stamp;
mod toolchain;

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use language::Language;

const MANIFEST: &str = "warp.toml";
/// As much of a failed build's log as fits on a screen.
const TAIL_LINES: usize = 25;

#[derive(clap::Args)]
pub struct Args {
    /// Which plugins; without a name all of them.
    names: Vec<String>,
    /// Fail if any plugin cannot be built, not only a named one.
    #[arg(long)]
    strict: bool,
    /// Run the plugins' native tests instead of building them.
    #[arg(long)]
    check: bool,
    /// Build even what is up to date.
    #[arg(long)]
    force: bool,
    /// A person who builds all plugins wants those that can be built; a test run wants to hear of a broken one.
    #[arg(skip)]
    failed_counts: bool,
}

impl Args {
    /// Builds every plugin; a missing tool is no failure, a failed build is.
    pub fn everything() -> Self {
        Self { names: Vec::new(), strict: false, check: false, force: false, failed_counts: true }
    }

    /// Builds this one, or fails.
    pub fn one(name: &str) -> Self {
        Self { names: vec![name.to_owned()], ..Self::everything() }
    }

    /// Runs every plugin's native tests, under the same rule.
    pub fn every_test() -> Self {
        Self { check: true, ..Self::everything() }
    }
}

/// Where things are. Everything that a build writes, except the finished component, lies below `target`.
pub struct Paths {
    plugins: PathBuf,
    wit: PathBuf,
    target: PathBuf,
}

impl Paths {
    fn work(&self, plugin: &Plugin) -> PathBuf {
        self.target.join("plugins").join(&plugin.name)
    }
    fn toolchains(&self) -> PathBuf {
        self.target.join("toolchains")
    }
}

pub struct Plugin {
    name: String,
    folder: PathBuf,
    language: Language,
}

/// How one plugin ended.
enum Outcome {
    Built {
        bytes: u64,
        took: Duration,
    },
    UpToDate {
        bytes: u64,
    },
    Passed {
        took: Duration,
    },
    /// A tool is not on this machine; says which.
    LeftOut(String),
    Failed {
        reason: String,
        log: PathBuf,
    },
}

/// Why a build or a check stopped.
enum Stop {
    Missing(String),
    Failed(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

pub fn run(root: &Path, args: &Args) -> Result<ExitCode> {
    let paths = Paths { plugins: root.join("plugins"), wit: root.join("wit/warp-job@1.0.0"), target: root.join("target") };
    let plugins = select(discover(&paths.plugins)?, &args.names)?;

    fs::create_dir_all(paths.target.join("plugins"))?;
    // A test run and a person may both build; the second waits and then finds everything up to date.
    let lock = File::create(paths.target.join("plugins/.lock"))?;
    lock.lock().context("failed to lock target/plugins")?;

    let width = plugins.iter().map(|p| p.name.len()).max().unwrap_or(0);
    let mut bad = false;
    for plugin in &plugins {
        let outcome = if args.check { check(&paths, plugin)? } else { build(&paths, plugin, args.force)? };
        println!("{:width$}  {outcome}", plugin.name);
        let demanded = args.strict || !args.names.is_empty();
        match outcome {
            Outcome::Built { .. } | Outcome::UpToDate { .. } | Outcome::Passed { .. } => {}
            Outcome::LeftOut(_) => bad |= demanded,
            // A failed test is never a matter of what is installed.
            Outcome::Failed { log, .. } if demanded || args.failed_counts || args.check => {
                bad = true;
                print_tail(&log);
            }
            Outcome::Failed { .. } => {}
        }
    }
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn discover(folder: &Path) -> Result<Vec<Plugin>> {
    let mut plugins = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))? {
        let folder = entry?.path();
        if !folder.join(MANIFEST).is_file() {
            continue;
        }
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(language) = Language::of(&folder) else {
            bail!("plugins/{name} is in no language that xtask can build");
        };
        plugins.push(Plugin { name, folder, language });
    }
    plugins.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(plugins)
}

fn select(plugins: Vec<Plugin>, names: &[String]) -> Result<Vec<Plugin>> {
    let known: BTreeSet<&str> = plugins.iter().map(|p| p.name.as_str()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name.as_str())) {
        bail!("there is no plugin {unknown}; there are {}", known.into_iter().collect::<Vec<_>>().join(", "));
    }
    Ok(plugins.into_iter().filter(|p| names.is_empty() || names.contains(&p.name)).collect())
}

fn build(paths: &Paths, plugin: &Plugin, force: bool) -> Result<Outcome> {
    let finished = paths.plugins.join(format!("{}.wasm", plugin.name));
    let work = paths.work(plugin);
    fs::create_dir_all(&work)?;
    let inputs = stamp::inputs(paths, plugin)?;
    if !force && stamp::is_current(&work, &inputs, &finished) {
        return Ok(Outcome::UpToDate { bytes: fs::metadata(&finished)?.len() });
    }

    let started = Instant::now();
    let log = work.join("build.log");
    let result = toolchain::Log::create(&log).map_err(Stop::from).and_then(|log| {
        let component = plugin.language.build(paths, plugin, &log)?;
        let manifest = fs::read_to_string(plugin.folder.join(MANIFEST))?;
        let packed = pack::pack(&fs::read(&component)?, &manifest, &format!("plugins/{}/{MANIFEST}", plugin.name))?;
        // Begins with a dot, so that a host that watches the folder leaves it alone until it is renamed.
        let partial = paths.plugins.join(format!(".{}.wasm.part", plugin.name));
        fs::write(&partial, &packed)?;
        fs::rename(&partial, &finished)?;
        stamp::write(&work, &inputs, &packed)?;
        Ok(Outcome::Built { bytes: packed.len() as u64, took: started.elapsed() })
    });
    Ok(settle(result, log))
}

fn check(paths: &Paths, plugin: &Plugin) -> Result<Outcome> {
    let started = Instant::now();
    let work = paths.work(plugin);
    fs::create_dir_all(&work)?;
    let log = work.join("check.log");
    let result = toolchain::Log::create(&log).map_err(Stop::from).and_then(|log| {
        plugin.language.check(paths, plugin, &log)?;
        Ok(Outcome::Passed { took: started.elapsed() })
    });
    Ok(settle(result, log))
}

fn settle(result: Result<Outcome, Stop>, log: PathBuf) -> Outcome {
    match result {
        Ok(outcome) => outcome,
        Err(Stop::Missing(what)) => Outcome::LeftOut(what),
        Err(Stop::Failed(error)) => Outcome::Failed { reason: format!("{error:#}"), log },
    }
}

fn print_tail(log: &Path) {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
        println!("    {line}");
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = |bytes: &u64| bytes.div_ceil(1024);
        match self {
            Self::Built { bytes, took } => write!(f, "built ({} KiB, {:.1} s)", kib(bytes), took.as_secs_f64()),
            Self::UpToDate { bytes } => write!(f, "up to date ({} KiB)", kib(bytes)),
            Self::Passed { took } => write!(f, "native tests passed ({:.1} s)", took.as_secs_f64()),
            Self::LeftOut(what) => write!(f, "left out: needs {what}"),
            Self::Failed { reason, log } => write!(f, "failed: {reason}; the log is {}", log.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugins() -> Vec<Plugin> {
        ["a", "b"].map(|name| Plugin { name: name.into(), folder: name.into(), language: Language::C }).into()
    }

    #[test]
    fn names_select_and_an_unknown_name_is_refused() {
        let names = |of: Vec<Plugin>| of.into_iter().map(|p| p.name).collect::<Vec<_>>();
        assert_eq!(names(select(plugins(), &[]).unwrap()), ["a", "b"]);
        assert_eq!(names(select(plugins(), &["b".into()]).unwrap()), ["b"]);
        let refusal = select(plugins(), &["c".into()]).err().unwrap().to_string();
        assert_eq!(refusal, "there is no plugin c; there are a, b");
    }

    #[test]
    fn every_outcome_is_one_line() {
        for (outcome, line) in [
            (Outcome::Built { bytes: 2049, took: Duration::from_millis(1250) }, "built (3 KiB, 1.2 s)"),
            (Outcome::LeftOut("Node 20".into()), "left out: needs Node 20"),
            (Outcome::Failed { reason: "no".into(), log: "x.log".into() }, "failed: no; the log is x.log"),
        ] {
            assert_eq!(outcome.to_string(), line);
        }
    }
}
