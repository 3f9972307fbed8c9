//! `cargo xtask bench-peers`: this product beside other queues, on one server, in one run.
//!
//! The peers come from their registries, as `runtime/bench/` pins them, each in the settings that it was found fastest
//! with. Every round runs everybody once, so that what else the machine does hits all alike, and of all rounds and settings
//! the best figure of each counts. Ours is `warp-host bench`; its bars are those of the design.
//!
//! What must stay true: nobody's figures come from another server, or from another day, than those they are compared with;
//! commits are durable, and where the server says otherwise the run is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use warp_test_servers::Cluster;

use crate::{plugins, servers};

/// The oldest Node that the peers' newest versions accept.
const NODE: (u32, u32) = (22, 18);
/// What the registry calls a Node of its own.
const NODE_PACKAGE: &str = "node@24";
/// Waits are measured over so many jobs.
const SAMPLES: u64 = 1_000;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// A server with durable commits; without it one is started for this run. Databases and schemas named `warp_bench…` are
    /// made and dropped there
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
    /// How many jobs are worked off, several sizes separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100_000, 1_000_000])]
    jobs: Vec<u64>,
    /// How many rounds; the best of each counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    repeat: u32,
    /// Only these: graphile-worker, pg-boss, rust-peer, warp-host
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Only these workloads: burn, bulk, latency
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    workload: Vec<String>,
    /// A host that is built already
    #[arg(long, value_name = "FILE")]
    host: Option<PathBuf>,
    /// Also write every figure to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One way to run one peer.
struct Way {
    peer: &'static str,
    workload: &'static str,
    settings: &'static str,
}

/// The settings that each peer was found fastest with on two cores, and its own recommendation where that is another.
const WAYS: &[Way] = &[
    Way { peer: "graphile-worker", workload: "burn", settings: r#"{"concurrency":24,"size":500,"refetch":10,"processes":2}"# },
    Way { peer: "graphile-worker", workload: "burn", settings: r#"{"concurrency":24,"size":5000}"# },
    Way { peer: "graphile-worker", workload: "bulk", settings: r#"{"per_call":10000}"# },
    Way { peer: "graphile-worker", workload: "bulk", settings: r#"{"per_call":100000}"# },
    Way { peer: "graphile-worker", workload: "latency", settings: r#"{"concurrency":24,"size":500}"# },
    Way { peer: "graphile-worker", workload: "latency", settings: r#"{"concurrency":10,"batched":false}"# },
    Way { peer: "pg-boss", workload: "burn", settings: r#"{"batch":500,"concurrency":4}"# },
    Way { peer: "pg-boss", workload: "bulk", settings: r#"{"per_call":10000}"# },
    Way { peer: "pg-boss", workload: "latency", settings: "{}" },
    Way { peer: "rust-peer", workload: "burn", settings: r#"{"concurrency":500,"size":5000}"# },
    Way { peer: "rust-peer", workload: "burn", settings: r#"{"concurrency":100,"size":2000}"# },
    Way { peer: "rust-peer", workload: "bulk", settings: r#"{"per_call":10000}"# },
    Way { peer: "rust-peer", workload: "latency", settings: r#"{"concurrency":24,"size":500}"# },
];

/// A figure of ours, the peer's that it is compared with, and the ratio that the design asks for.
struct Bar {
    what: &'static str,
    ours: &'static str,
    theirs: &'static str,
    ratio: f64,
    /// Whether the ratio must be at least, or at most, that.
    at_least: bool,
}

const PEER: &str = "graphile-worker";

/// `{jobs}` stands for each of the sizes.
const BARS: &[Bar] = &[
    Bar { what: "no-op, native", ours: "warp-host native-noop {jobs}", theirs: "burn {jobs}", ratio: 1.2, at_least: true },
    Bar { what: "no-op, Rust component", ours: "warp-host noop {jobs}", theirs: "burn {jobs}", ratio: 0.8, at_least: true },
    Bar { what: "bulk enqueue", ours: "warp-host bulk", theirs: "bulk", ratio: 1.0, at_least: true },
    Bar { what: "enqueue to start, p50", ours: "warp-host latency p50", theirs: "latency p50", ratio: 0.8, at_least: false },
    Bar { what: "enqueue to start, p99", ours: "warp-host latency p99", theirs: "latency p99", ratio: 0.8, at_least: false },
    Bar {
        what: "the same in the host's process, p50",
        ours: "warp-host latency-here p50",
        theirs: "latency p50",
        ratio: 0.8,
        at_least: false,
    },
    Bar {
        what: "the same in the host's process, p99",
        ours: "warp-host latency-here p99",
        theirs: "latency p99",
        ratio: 0.8,
        at_least: false,
    },
];

/// Runs them; the exit code says whether every bar was met.
pub fn run(root: &Path, args: &Args) -> Result<ExitCode> {
    let bench = Bench { args, tools: Tools::find(root, args)? };
    // Ends with this function, and its files with it.
    let cluster = match &args.database_url {
        Some(_) => None,
        None => Some(start_server()?),
    };
    let url = match (&args.database_url, &cluster) {
        (Some(url), _) => url.clone(),
        (None, Some(cluster)) => cluster.url("postgres"),
        (None, None) => bail!("there is no server"),
    };
    let mut figures = Figures::default();
    for round in 1..=args.repeat.max(1) {
        println!("round {round} of {}", args.repeat.max(1));
        bench.round(&url, &mut figures)?;
    }
    figures.print();
    let verdicts = verdicts(&figures, &args.jobs);
    let missed = verdicts.iter().filter(|verdict| verdict["met"] == false).count();
    print_verdicts(&verdicts);
    if let Some(file) = &args.json {
        let report = json!({ "rounds": args.repeat, "figures": figures.everything, "bars": verdicts });
        std::fs::write(file, format!("{report:#}\n")).with_context(|| format!("failed to write {}", file.display()))?;
    }
    Ok(if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn start_server() -> Result<Cluster> {
    servers::install()?;
    let settings = Cluster::durable().count_statements().set("shared_buffers", "1GB").set("max_wal_size", "4GB");
    settings.start().context("failed to start a server for this run")
}

struct Bench<'a> {
    args: &'a Args,
    tools: Tools,
}

impl Bench<'_> {
    fn wants(&self, peer: &str, workload: &str) -> bool {
        let named = |list: &[String], name: &str| list.is_empty() || list.iter().any(|wanted| wanted == name);
        named(&self.args.only, peer) && named(&self.args.workload, workload)
    }

    fn round(&self, url: &str, figures: &mut Figures) -> Result<()> {
        for way in WAYS.iter().filter(|way| self.wants(way.peer, way.workload)) {
            match way.workload {
                "burn" => {
                    for jobs in &self.args.jobs {
                        let found = self.peer(way, url, *jobs)?;
                        figures.most(&format!("{} burn {jobs}", way.peer), &found, "jobs_per_s");
                    }
                }
                "bulk" => figures.most(&format!("{} bulk", way.peer), &self.peer(way, url, 100_000)?, "jobs_per_s"),
                _ => {
                    let found = self.peer(way, url, SAMPLES)?;
                    figures.least(&format!("{} latency p50", way.peer), &found, "p50_ms");
                    figures.least(&format!("{} latency p99", way.peer), &found, "p99_ms");
                }
            }
        }
        if self.wants("warp-host", "burn") {
            for jobs in &self.args.jobs {
                for workload in ["native-noop", "noop"] {
                    let found = self.ours(url, workload, *jobs, &[])?;
                    figures.most(&format!("warp-host {workload} {jobs}"), &found, "jobs_per_s");
                }
            }
        }
        if self.wants("warp-host", "bulk") {
            for per_call in ["1000", "10000"] {
                figures.most("warp-host bulk", &self.ours(url, "bulk-enqueue", 100_000, &["--per-call", per_call])?, "jobs_per_s");
            }
        }
        if self.wants("warp-host", "latency") {
            for (workload, name) in [("latency-other", "latency"), ("latency", "latency-here")] {
                let found = self.ours(url, workload, SAMPLES, &[])?;
                // The peers count from the call, so ours does here.
                let waits = &found["beside"]["figures"];
                figures.least(&format!("warp-host {name} p50"), waits, "from_call_p50_ms");
                figures.least(&format!("warp-host {name} p99"), waits, "from_call_p99_ms");
            }
        }
        Ok(())
    }

    /// One peer, one workload; what it prints last.
    fn peer(&self, way: &Way, url: &str, jobs: u64) -> Result<Value> {
        let mut settings: Value = serde_json::from_str(way.settings).context("the settings of a way")?;
        settings["url"] = url.into();
        settings["jobs"] = jobs.into();
        settings["samples"] = jobs.into();
        let mut command = match way.peer {
            "rust-peer" => Command::new(&self.tools.rust_peer),
            peer => {
                let mut node = Command::new(&self.tools.node);
                node.arg(self.tools.peers.join(match peer {
                    "pg-boss" => "pg-boss.mjs",
                    _ => "graphile.mjs",
                }));
                node
            }
        };
        command.args([way.workload, &settings.to_string()]);
        let found = answer(&mut command).with_context(|| format!("{} {} {}", way.peer, way.workload, way.settings))?;
        println!("  {} {} {}: {}", way.peer, way.workload, way.settings, brief(&found));
        Ok(found)
    }

    fn ours(&self, url: &str, workload: &str, jobs: u64, more: &[&str]) -> Result<Value> {
        let mut command = Command::new(&self.tools.host);
        command
            .args(["--database-url", url, "--json", "bench", "--workload", workload, "--jobs", &jobs.to_string()])
            .args(more)
            .current_dir(&self.tools.root);
        let found = answer(&mut command).with_context(|| format!("warp-host bench --workload {workload}"))?;
        println!("  warp-host {workload} {jobs} {}: {}", more.join(" "), brief(&found));
        if found["settings"]["synchronous_commit"] != "on" || found["settings"]["fsync"] != "on" {
            bail!("the server's commits are not durable (fsync and synchronous_commit must be on), so no figure means anything");
        }
        Ok(found)
    }
}

/// The last line that a program prints, as JSON.
fn answer(command: &mut Command) -> Result<Value> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("failed to start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("it ended with {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next_back().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("it printed {line:?}"))
}

fn brief(found: &Value) -> String {
    match (found["jobs_per_s"].as_f64(), found["p50_ms"].as_f64(), found["p99_ms"].as_f64()) {
        (Some(rate), ..) => format!("{rate:.0} jobs/s"),
        (None, Some(p50), Some(p99)) => format!("p50 {p50:.2} ms, p99 {p99:.2} ms"),
        _ => found.to_string(),
    }
}

/// Everything that was measured, and the best of each name.
#[derive(Default)]
struct Figures {
    best: BTreeMap<String, f64>,
    everything: BTreeMap<String, Vec<Value>>,
}

impl Figures {
    fn most(&mut self, name: &str, found: &Value, figure: &str) {
        self.keep(name, found, figure, f64::max);
    }

    fn least(&mut self, name: &str, found: &Value, figure: &str) {
        self.keep(name, found, figure, f64::min);
    }

    fn keep(&mut self, name: &str, found: &Value, figure: &str, better: fn(f64, f64) -> f64) {
        self.everything.entry(name.to_owned()).or_default().push(found.clone());
        if let Some(value) = found[figure].as_f64() {
            self.best.entry(name.to_owned()).and_modify(|best| *best = better(*best, value)).or_insert(value);
        }
    }

    fn print(&self) {
        println!("\nbest of all rounds");
        for (name, value) in &self.best {
            let runs = self.everything.get(name).map_or(0, Vec::len);
            println!("  {name:<42} {value:>12.2}   of {runs}");
        }
    }
}

/// Each bar with the figures that it compares, for those that were measured.
fn verdicts(figures: &Figures, sizes: &[u64]) -> Vec<Value> {
    let mut verdicts = Vec::new();
    for bar in BARS {
        let sizes = if bar.ours.contains("{jobs}") { sizes } else { &[0] };
        for jobs in sizes {
            let name = |text: &str| text.replace("{jobs}", &jobs.to_string());
            let ours = figures.best.get(&name(bar.ours));
            let theirs = figures.best.get(&format!("{PEER} {}", name(bar.theirs)));
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                let ratio = ours / theirs;
                let met = if bar.at_least { ratio >= bar.ratio } else { ratio <= bar.ratio };
                let what = if *jobs > 0 { format!("{}, {jobs} jobs", bar.what) } else { bar.what.to_owned() };
                let sign = if bar.at_least { "≥" } else { "≤" };
                verdicts.push(json!({ "what": what, "ours": ours, "theirs": theirs, "ratio": ratio, "bar": format!("{sign} {}", bar.ratio), "met": met }));
            }
        }
    }
    verdicts
}

fn print_verdicts(verdicts: &[Value]) {
    println!("\nours ÷ {PEER}");
    for verdict in verdicts {
        let number = |name: &str| verdict[name].as_f64().unwrap_or(0.0);
        let met = if verdict["met"] == true { "met" } else { "MISSED" };
        println!(
            "  {:<40} {:>10.2} ÷ {:>10.2} = {:>5.2}   bar {}  {met}",
            verdict["what"].as_str().unwrap_or_default(),
            number("ours"),
            number("theirs"),
            number("ratio"),
            verdict["bar"].as_str().unwrap_or_default()
        );
    }
}

/// What has to be built or fetched before anything can be measured.
struct Tools {
    root: PathBuf,
    node: PathBuf,
    /// The peers for Node, with their packages.
    peers: PathBuf,
    rust_peer: PathBuf,
    host: PathBuf,
}

impl Tools {
    fn find(root: &Path, args: &Args) -> Result<Self> {
        let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
        let peers = root.join("runtime/bench/peers");
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let mut node = PathBuf::from("node");
        if wanted("graphile-worker") || wanted("pg-boss") {
            println!("Fetching the peers for Node …");
            done(Command::new("npm").args(["ci", "--no-audit", "--no-fund", "--loglevel", "error"]).current_dir(&peers))?;
            if !node_is_new_enough(&node) {
                // A Node of the project's own, beside the one of the machine.
                let own = target.join("bench-node");
                node = own.join("node_modules/.bin/node");
                if !node_is_new_enough(&node) {
                    let package = ["install", "--no-save", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix"];
                    done(Command::new("npm").args(package).arg(&own).arg(NODE_PACKAGE))?;
                }
                if !node_is_new_enough(&node) {
                    bail!("the peers need Node {}.{} or later", NODE.0, NODE.1);
                }
            }
        }
        let rust_target = target.join("bench-rust-peer");
        if wanted("rust-peer") {
            println!("Building the Rust peer …");
            let manifest = root.join("runtime/bench/rust-peer/Cargo.toml");
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest).arg("--target-dir").arg(&rust_target);
            done(&mut build)?;
        }
        if wanted("warp-host") && plugins::run(root, &plugins::Args::one("noop"))? != ExitCode::SUCCESS {
            bail!("the component that does nothing could not be built");
        }
        let host = match &args.host {
            Some(host) => std::path::absolute(host)?,
            None if wanted("warp-host") => {
                println!("Building the host …");
                done(Command::new(env!("CARGO")).args(["build", "--release", "--package", "warp-host"]).current_dir(root))?;
                target.join("release/warp-host")
            }
            None => PathBuf::new(),
        };
        Ok(Tools { root: root.to_owned(), node, peers, rust_peer: rust_target.join("release/warp-bench-rust-peer"), host })
    }
}

fn done(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("failed to start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

fn node_is_new_enough(node: &Path) -> bool {
    let Ok(output) = Command::new(node).arg("--version").output() else { return false };
    node_version(&String::from_utf8_lossy(&output.stdout)).is_some_and(|version| version >= NODE)
}

/// The first two numbers of a text such as `v22.18.0`.
fn node_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().trim_start_matches('v').split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_node_are_compared_by_number() {
        assert_eq!(node_version("v20.20.2\n"), Some((20, 20)));
        assert!(
            node_version("v22.9.0").is_some_and(|version| version < NODE) && node_version("v24.0.1").is_some_and(|version| version >= NODE)
        );
        assert_eq!(node_version("node"), None);
    }

    #[test]
    fn the_best_counts_and_a_bar_says_which_side_is_good() {
        let mut figures = Figures::default();
        for rate in [100.0, 120.0, 90.0] {
            figures.most("graphile-worker burn 10", &json!({ "jobs_per_s": rate }), "jobs_per_s");
        }
        figures.most("warp-host native-noop 10", &json!({ "jobs_per_s": 150.0 }), "jobs_per_s");
        figures.most("warp-host noop 10", &json!({ "jobs_per_s": 60.0 }), "jobs_per_s");
        for p50 in [2.0, 1.0] {
            figures.least("graphile-worker latency p50", &json!({ "p50_ms": p50 }), "p50_ms");
        }
        figures.least("warp-host latency p50", &json!({ "p50_ms": 0.9 }), "p50_ms");
        let met: Vec<_> = verdicts(&figures, &[10]).iter().map(|verdict| verdict["met"] == true).collect();
        assert_eq!(met, [true, false, false], "150 of 120, 60 of 120, 0.9 ms of 1.0 ms");
    }
}
