//! `cargo run -p gold`: the lost update, told by real hosts.
//!
//! Every scene starts `warp-host run` processes on a database of its own, enqueues jobs, waits for their end and
//! compares what was found with what has to be found. The table of all scenes goes to standard output; the exit code
//! is 1 if one of them is wrong.
//!
//! What must stay true: the scenes use the command line as an operator would, and nothing behind it. The one exception
//! is [`scenes::slots`], which needs a host that settles wrongly on purpose and plays it through the store's trait.

mod build;
mod host;
mod outside;
mod report;
mod scenes;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use report::Report;
use scenes::{SCENES, Size};
use stage::{Slots, Theatre};

/// Shows what a lost update costs, and what each rule of warp-host does about it.
#[derive(Debug, Parser)]
#[command(name = "gold")]
struct Cli {
    /// The host to use [default: the one beside this program, built anew if its sources have changed]
    #[arg(long, value_name = "FILE")]
    host: Option<PathBuf>,
    /// Fewer jobs: the same story in under a minute
    #[arg(long)]
    quick: bool,
    /// Only these scenes, by their letters, such as `a,b`
    #[arg(long, value_name = "LETTERS", value_delimiter = ',')]
    scene: Vec<char>,
    /// On a PostgreSQL server of its own, three hosts to a scene, with slots of this kind [default: SQLite files, two hosts]
    ///
    /// WARP_TEST_POSTGRES_URL names another server; its user must be allowed to make databases.
    #[arg(long, value_name = "SLOTS")]
    postgres: Option<Slots>,
    /// Keep files and logs; a server's databases are dropped all the same
    #[arg(long)]
    keep: bool,
}

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    if let Some(unknown) = cli.scene.iter().find(|letter| SCENES.iter().all(|scene| scene.letter != **letter)) {
        let known: Vec<String> = SCENES.iter().map(|scene| scene.letter.to_string()).collect();
        anyhow::bail!("there is no scene {unknown:?}; there are {}", known.join(", "));
    }
    let host = match cli.host {
        Some(path) => path.canonicalize().with_context(|| format!("no host at {}", path.display()))?,
        None => build::host()?,
    };
    let theatre = Theatre::new(host, &build::component()?, cli.postgres)?;
    let size = if cli.quick { Size::QUICK } else { Size::FULL };

    let mut report = Report::default();
    for scene in SCENES.iter().filter(|scene| cli.scene.is_empty() || cli.scene.contains(&scene.letter)) {
        report.scene(scene.letter, scene.title, |rows| (scene.play)(&theatre, size, rows));
    }
    println!("{}", report.table());
    if cli.keep || !report.all_right() {
        eprintln!("files and logs are kept in {}", theatre.keep().display());
    }
    Ok(if report.all_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
