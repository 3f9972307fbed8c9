//! Where a scene plays: a database of its own, and the commands of `warp-host` on it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tempfile::TempDir;
use warp_test_servers::{Database, database, missing};

use crate::build;
use crate::host::HostProcess;

/// The shortest lease that a host accepts: what a killed host ran comes back after it.
const LEASE: &str = "6s";
/// A story in which nothing has ended for so long does not go on. Far beyond a lease and a slow machine's pauses.
const STALLED: Duration = Duration::from_secs(120);
const GLANCE: Duration = Duration::from_millis(100);

/// What the slots of a PostgreSQL database are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Slots {
    /// Rows of a table.
    Ledger,
    /// Advisory locks.
    Session,
}

impl Slots {
    /// For `--locks`.
    fn name(self) -> &'static str {
        match self {
            Slots::Ledger => "ledger",
            Slots::Session => "session",
        }
    }
}

/// The folder of the whole story: the packed plugin, one cache of compiled code, and a stage for each scene.
pub struct Theatre {
    host: PathBuf,
    folder: TempDir,
    /// `None` is a SQLite file for each stage.
    server: Option<Slots>,
}

impl Theatre {
    /// Packs the component with its manifest, as its author would.
    pub fn new(host: PathBuf, component: &Path, server: Option<Slots>) -> Result<Self> {
        let packages = missing();
        if server.is_some() && std::env::var_os("WARP_TEST_POSTGRES_URL").is_none() && !packages.is_empty() {
            bail!("missing: {}; install it, or name a server in WARP_TEST_POSTGRES_URL", packages.join(" "));
        }
        let folder = tempfile::Builder::new().prefix("gold-").tempdir().context("failed to make a temporary folder")?;
        let theatre = Theatre { host, folder, server };
        fs::create_dir(theatre.plugins())?;
        let mut pack = theatre.command();
        pack.arg("pack").arg(component).arg(build::manifest()).arg("-o").arg(theatre.plugins().join("gold.wasm"));
        output(pack)?;
        Ok(theatre)
    }

    /// A new stage.
    pub fn stage(&self, name: &str) -> Result<Stage<'_>> {
        let server = self.server.map(|_| database());
        let stage = Stage { theatre: self, folder: self.folder.path().join(name), hosts: Vec::new(), started: 0, server };
        fs::create_dir(&stage.folder)?;
        fs::write(
            stage.config(),
            format!("database.url = \"sqlite:warp.db\"\nplugins = \"../plugins\"\ncache = \"../cache\"\nlease = \"{LEASE}\"\n"),
        )?;
        // The manifest asks for buckets; this is the operator who grants them.
        stage.run(&["grant", "gold"])?;
        match self.server {
            None => stage.run(&["migrate"])?,
            Some(slots) => stage.run(&["migrate", "--locks", slots.name()])?,
        };
        Ok(stage)
    }

    /// Leaves the folder where it is.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }

    fn plugins(&self) -> PathBuf {
        self.folder.path().join("plugins")
    }

    /// `warp-host`, hearing nothing from the environment that the story did not say.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.host);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("WARP_")) {
            command.env_remove(name);
        }
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }
}

/// A database and the hosts on it.
pub struct Stage<'a> {
    theatre: &'a Theatre,
    folder: PathBuf,
    hosts: Vec<HostProcess>,
    started: usize,
    /// Dropped after the hosts, which would miss it.
    server: Option<Database>,
}

/// Jobs by state, and what has been counted.
pub struct Status {
    states: BTreeMap<String, u64>,
    counters: BTreeMap<String, i64>,
}

impl Status {
    /// Jobs that have not ended.
    fn open(&self) -> u64 {
        ["Scheduled", "Enqueued", "Awaiting", "Processing"].iter().map(|name| self.jobs(name)).sum()
    }

    /// Jobs in a state.
    pub fn jobs(&self, state: &str) -> u64 {
        self.states.get(state).copied().unwrap_or(0)
    }

    /// A counter; one that nobody has raised is 0.
    pub fn counter(&self, name: &str) -> i64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

impl Stage<'_> {
    /// The database's file, where it is one.
    pub fn file(&self) -> PathBuf {
        self.folder.join("warp.db")
    }

    /// The database's address, where it is on a server.
    pub fn url(&self) -> Option<&str> {
        self.server.as_ref().map(Database::url)
    }

    /// How many hosts play.
    pub fn cast(&self) -> usize {
        if self.server.is_some() { 3 } else { 2 }
    }

    fn config(&self) -> PathBuf {
        self.folder.join("warp.toml")
    }

    fn command(&self) -> Command {
        let mut command = self.theatre.command();
        command.arg("--config").arg(self.config());
        if let Some(url) = self.url() {
            command.env("WARP_DATABASE_URL", url);
        }
        command
    }

    fn run(&self, args: &[&str]) -> Result<String> {
        let mut command = self.command();
        command.args(args);
        output(command)
    }

    fn ask(&self, args: &[&str]) -> Result<Value> {
        let text = self.run(&[&["--json"], args].concat())?;
        serde_json::from_str(&text).with_context(|| format!("warp-host {} did not print JSON: {text}", args.join(" ")))
    }

    /// Starts all hosts, with so many workers among them.
    pub fn start_hosts(&mut self, workers: usize) -> Result<()> {
        for at in 0..self.cast() {
            let host = self.new_host(self.share(workers, at))?;
            self.hosts.push(host);
        }
        Ok(())
    }

    /// `kill -9` for a host, and a new one in its place.
    pub fn kill_and_restart(&mut self, at: usize, workers: usize) -> Result<()> {
        // The old one first: there is never one host more.
        self.hosts[at].kill()?;
        self.hosts[at] = self.new_host(self.share(workers, at))?;
        Ok(())
    }

    /// How many of so many workers are this host's.
    fn share(&self, workers: usize, at: usize) -> usize {
        workers / self.cast() + usize::from(at < workers % self.cast())
    }

    fn new_host(&mut self, workers: usize) -> Result<HostProcess> {
        self.started += 1;
        let mut command = self.command();
        command.args(["run", "--workers", &workers.to_string()]);
        HostProcess::start(command, &self.folder.join(format!("host-{}.log", self.started)))
    }

    /// Stops every host as an operator would.
    pub fn stop_hosts(&mut self) -> Result<()> {
        self.hosts.drain(..).try_for_each(HostProcess::stop)
    }

    /// Enqueues one job per payload, in order, and answers their ids.
    pub fn enqueue(&self, contract: &str, payloads: &[Value]) -> Result<Vec<String>> {
        self.enqueue_with(contract, payloads, &[])
    }

    /// The same, with a policy that outranks the manifest's.
    pub fn enqueue_with(&self, contract: &str, payloads: &[Value], policy: &[&str]) -> Result<Vec<String>> {
        let batch = self.folder.join("batch.jsonl");
        let lines: String = payloads.iter().map(|payload| format!("{payload}\n")).collect();
        fs::write(&batch, lines)?;
        let mut command = self.command();
        command.args(["--json", "enqueue", contract]).args(policy).arg("--batch").arg(&batch);
        let ids: Vec<String> = output(command)?
            .lines()
            .map(|line| {
                let verdict: Value = serde_json::from_str(line)?;
                ensure!(verdict["verdict"] == "enqueued", "not enqueued: {line}");
                text(&verdict["id"])
            })
            .collect::<Result<_>>()?;
        ensure!(ids.len() == payloads.len(), "{} payloads, {} jobs", payloads.len(), ids.len());
        Ok(ids)
    }

    /// Enqueues one job, waits until nothing is left to do, and answers its result, a JSON text.
    pub fn result_of(&mut self, contract: &str, payload: Value) -> Result<Value> {
        let ids = self.enqueue(contract, &[payload])?;
        self.wait()?;
        self.result(&ids[0])
    }

    /// The result of a job that has Completed with a JSON text.
    pub fn result(&self, id: &str) -> Result<Value> {
        let job = self.job(id)?;
        ensure!(job["state"] == "Completed", "job {id} is {}: {}", job["state"], job["error"]);
        Ok(serde_json::from_str(&text(&job["result"])?)?)
    }

    /// Everything about a job.
    pub fn job(&self, id: &str) -> Result<Value> {
        self.ask(&["jobs", "show", id])
    }

    /// Makes an ended job run again.
    pub fn requeue(&self, id: &str) -> Result<()> {
        self.run(&["jobs", "requeue", id]).map(drop)
    }

    /// How many hold a slot of a key.
    pub fn holders(&self, key: &str) -> Result<usize> {
        let seen = self.ask(&["keys", "show", key])?;
        seen["holders"].as_array().map(Vec::len).context("a key without holders")
    }

    /// The whole at a glance.
    pub fn status(&self) -> Result<Status> {
        let seen = self.ask(&["status"])?;
        let states = serde_json::from_value(seen["states"].clone())?;
        let counters = serde_json::from_value(seen["counters"].clone())?;
        Ok(Status { states, counters })
    }

    /// Waits until every job has ended.
    pub fn wait(&mut self) -> Result<Status> {
        self.wait_while(|_, _| Ok(()))
    }

    /// The same, and calls `meanwhile` after every look. Fails if a host ends by itself, or if for long no job ends.
    pub fn wait_while(&mut self, mut meanwhile: impl FnMut(&mut Self, &Status) -> Result<()>) -> Result<Status> {
        let mut status = self.status()?;
        let (total, mut open, mut since) = (status.open(), status.open(), Instant::now());
        let bar = ProgressBar::new(total).with_style(style()?);
        while open > 0 {
            self.hosts.iter_mut().try_for_each(HostProcess::check)?;
            meanwhile(self, &status)?;
            sleep(GLANCE);
            status = self.status()?;
            if status.open() != open {
                (open, since) = (status.open(), Instant::now());
                bar.set_position(total.saturating_sub(open));
            }
            if since.elapsed() > STALLED {
                bail!("{open} jobs have not ended, and for {} s none has", STALLED.as_secs());
            }
        }
        bar.finish_and_clear();
        Ok(status)
    }
}

fn style() -> Result<ProgressStyle> {
    Ok(ProgressStyle::with_template("   {bar:30} {pos}/{len} jobs  {elapsed}")?)
}

/// A JSON text.
pub fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).with_context(|| format!("{value} is not a text"))
}

/// Runs a command to its end and answers what it printed.
fn output(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("failed to start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} did not print UTF-8"))
}
