//! `cargo xtask run`: the product on the shipped plugins, from a fresh clone, with one command.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::plugins;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Given to `warp-host run`, such as `--database-url postgres://USER@HOST/NAME`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    rest: Vec<String>,
}

/// The settings and inputs that the shipped plugins are shown with; its folder holds what they read.
const CONFIG: &str = "examples/inputs/warp.toml";

/// What to try, one command for each plugin.
const TRY: &[(&str, &str)] = &[
    ("make-thumbnail", r#"--payload '{"source":"photo.png","target":"photo-small.jpeg","width":160,"height":120,"format":"jpeg"}'"#),
    ("render-invoice", "--payload-file examples/inputs/invoice.json"),
    ("profile-csv", r#"--payload '{"file":"sales.csv"}'"#),
    ("sha256-file", r#"--payload '{"file":"report.bin"}'"#),
];

/// Builds host and plugins, prints what to try, and becomes the host.
pub fn run(root: &Path, args: &Args) -> Result<ExitCode> {
    println!("Building the host (the first time takes some minutes) …");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--release", "--package", "warp-host"])
        .current_dir(root)
        .status()
        .context("cargo build")?;
    if !built.success() {
        return Ok(ExitCode::FAILURE);
    }
    println!("Building the plugins …");
    // A plugin whose tool is missing is left out with a line of its own; the others are shown without it.
    plugins::run(root, &plugins::Args::everything())?;
    std::fs::create_dir_all(root.join("examples/inputs/out"))?;
    let host = format!("target/release/warp-host --config {CONFIG}");
    let elsewhere = args.rest.iter().any(|arg| arg.starts_with("--database-url"));
    // The URL may hold a password, so it is not repeated.
    let first = if elsewhere { ", with WARP_DATABASE_URL set to the URL that you gave" } else { "" };
    println!("\nThe host starts now. In another terminal, in this directory{first}:\n");
    for (contract, payload) in TRY {
        println!("  {host} enqueue {contract} {payload}");
    }
    println!("\nThen look at them (Ctrl-C here stops the host):\n");
    println!("  {host} jobs list\n  {host} jobs show ID\n");
    let mut run = Command::new(root.join("target/release/warp-host"));
    // Somebody who tries the product has one host, whose schema may be made as it starts.
    run.args(["--config", CONFIG, "run", "--plugins", "plugins", "--migrate"]).args(&args.rest).current_dir(root);
    become_it(run)
}

/// Replaces this process where the system can, so that signals reach the host itself.
#[cfg(unix)]
fn become_it(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec()).context("failed to start the host")
}

#[cfg(not(unix))]
fn become_it(mut command: Command) -> Result<ExitCode> {
    let status = command.status().context("failed to start the host")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
