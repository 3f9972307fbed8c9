//! Developer commands: `cargo xtask <command>`. One module per command; this file only takes the command line apart.
//!
//! Nothing here is part of the product, and no crate of the product depends on it.

mod bench_peers;
mod plugins;
mod run;
mod servers;
mod soak;
mod test;
mod tidy;

use std::{
    env,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(bin_name = "cargo xtask", about = "Developer commands of warp-host", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run other queues beside this one on the same server and compare.
    BenchPeers(bench_peers::Args),
    /// Build the first-party plugins into plugins/*.wasm, or run their native tests.
    Plugins(plugins::Args),
    /// Build host and plugins and start the host on them, with an embedded database.
    Run(run::Args),
    /// Run the acceptance tests at the sizes of a long night.
    Soak(soak::Args),
    /// Run every test that a change can break.
    Test(test::Args),
    /// Check the dependency direction, module headers, words and documents.
    Tidy(tidy::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::BenchPeers(args) => bench_peers::run(&root(), &args),
        Command::Plugins(args) => plugins::run(&root(), &args),
        Command::Run(args) => run::run(&root(), &args),
        Command::Soak(args) => soak::run(&root(), &args),
        Command::Test(args) => test::run(&root(), &args),
        Command::Tidy(args) => tidy::run(&root(), &args),
    };
    result.unwrap_or_else(|error| {
        // Not left to the runtime, which adds a backtrace of this program where the environment asks for one.
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The workspace. Cargo says where this crate lies; a binary started by itself remembers where it was built.
fn root() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.ancestors().nth(2).map_or_else(|| here.clone(), Path::to_path_buf)
}
