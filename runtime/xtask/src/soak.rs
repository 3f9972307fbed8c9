//! `cargo xtask soak`: the acceptance and fault tests at the sizes of a long night.
//!
//! They are the tests that `cargo xtask test` runs too, told by `WARP_SOAK` to kill, replace and enqueue more often.
//! What they measure is printed as they go, one test at a time, so that none disturbs another's figures. Before them come the
//! large cases of the explorer of session locks, optimised, since they walk millions of states, and the statements of a job under
//! session locks.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::{plugins, servers};

/// The part that needs no program and no server.
const INTERLEAVINGS: &str = "interleavings";
/// What a job costs in statements under session locks, held to the bars of the design: counted, so alone on the machine.
const STATEMENTS: &str = "statements";

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Only this part: crowd, killed, replaced, shipped or stopped of the acceptance; faults, or one of them by its path
    /// such as faults::cases::ledger::the_network_falls_silent; interleavings of session locks and of local waiters;
    /// statements of session locks
    #[arg(value_name = "PART")]
    part: Option<String>,
    /// Repeat so often, or until something fails
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u32,
}

/// Runs them; the exit code says whether all passed.
pub fn run(root: &Path, args: &Args) -> Result<ExitCode> {
    let part = args.part.as_deref();
    if part.is_none_or(|part| part == INTERLEAVINGS) {
        // Every interleaving is walked once: a second round could find nothing else.
        let status = Command::new(env!("CARGO"))
            .args(["test", "--release", "--package", "warp-testkit", "--test", "it", "--"])
            .args(["session::", "explore::", "--ignored", "--nocapture", "--test-threads", "1"])
            .current_dir(root)
            .status()
            .context("cargo test")?;
        if !status.success() || part.is_some() {
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
    let mut counted = true;
    if part.is_none_or(|part| part == STATEMENTS) {
        servers::install()?;
        let status = Command::new(env!("CARGO"))
            .args(["test", "--package", "warp-store-postgres", "--test", "it", "--"])
            .args(["session::", "--ignored", "--nocapture", "--test-threads", "1"])
            .current_dir(root)
            .status()
            .context("cargo test")?;
        // A bar that is missed keeps nobody from the faults.
        counted = status.success();
        if part.is_some() {
            return Ok(if counted { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
    // Plugins that cannot be built here are left out by the test that needs them, which says so.
    plugins::run(root, &plugins::Args::everything())?;
    for round in 1..=args.repeat {
        println!("soak: round {round} of {}", args.repeat);
        let status = Command::new(env!("CARGO"))
            .args(["test", "--package", "warp-host", "--test", "it", "--"])
            .args(filters(part))
            .args(["--nocapture", "--test-threads", "1"])
            .env("WARP_SOAK", "1")
            .current_dir(root)
            .status()
            .context("cargo test")?;
        if !status.success() {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(if counted { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What selects the tests of a part.
fn filters(part: Option<&str>) -> Vec<String> {
    match part {
        None => vec!["acceptance::".to_owned(), "faults::cases::".to_owned()],
        Some(part) if part.starts_with("faults") => vec![part.to_owned()],
        Some(part) => vec![format!("acceptance::{part}")],
    }
}
