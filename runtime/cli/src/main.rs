//! The program: configuration, wiring, signals and exit codes.
//!
//! What must stay true: this crate is the only place that reads the environment and the wall clock; everything
//! below takes them as arguments. A command prints its answer on standard output and everything else on standard
//! error, and its exit code means what `--help` says.
//!
//! What it deliberately does not do: decide anything about jobs, keys or plugins. It asks the crates that do, and
//! turns their answers into text.

mod args;
mod bench;
mod clock;
mod commands;
mod config;
mod failure;
mod files;
mod grants;
mod hosting;
mod json;
mod progress;
mod run;
mod stores;
mod system;
mod text;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use warp_store::Store;

use crate::args::{Cli, Command};
use crate::commands::{attempt, database, doctor, enqueue, jobs, keys, locks, overview, pauses, plugin_files, project};
use crate::config::{Config, Outside};
use crate::failure::{Failure, Outcome};

fn main() -> ExitCode {
    let cli = Cli::from_arg_matches(&args::command().get_matches()).unwrap_or_else(|error| error.exit());
    match dispatch(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { exit, error }) => {
            if let Some(error) = error {
                // Causes on one line, as every message of this program; what a guest wrote in them is harmless.
                text::note(format!("error: {}", text::harmless(&format!("{error:#}"), true)));
            }
            ExitCode::from(exit as u8)
        }
    }
}

fn dispatch(cli: Cli) -> Outcome {
    let outside = Outside {
        env: &|name| std::env::var(name).ok().filter(|value| !value.is_empty()),
        cores: std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
    };
    // Read only by the commands that need it: an author's commands work beside whatever lies in the directory.
    let settings = config::load(&cli, &outside);
    let Cli { json, command, .. } = cli;
    match command {
        Command::New(args) => project::new(&args, json),
        Command::Wit(args) => project::wit(&args),
        Command::Check(args) => plugin_files::check_files(&args, json),
        Command::Inspect(args) => plugin_files::inspect(&args, json),
        Command::Pack(args) => plugin_files::pack(&args, json),
        Command::Diff(args) => plugin_files::diff(&args, json),
        Command::Completions(args) => completions(args.shell),
        Command::Plugins(_) => plugin_files::plugins(&settings?),
        Command::Grant(args) => plugin_files::grant(&args, &settings?),
        Command::Run(args) if args.print_config => print_config(&settings?),
        Command::Run(args) => run::run(args, settings?),
        Command::Bench(args) => bench::bench(args, settings?),
        Command::Migrate(args) => block_on(database::migrate(&args, &settings?)),
        Command::Locks(command) => block_on(locks::run(&command, &settings?, &user(&outside))),
        Command::Doctor(args) => block_on(doctor::run(&args, &settings?)),
        Command::Backup(args) => block_on(database::backup(&args, &settings?)),
        Command::Enqueue(args) => with_store(&settings?, async |store| enqueue::run(&args, store, json, clock::now()).await),
        Command::Jobs(command) => {
            with_store(&settings?, async |store| jobs::run(&command, store, json, &user(&outside), clock::now()).await)
        }
        Command::Keys(command) => with_store(&settings?, async |store| keys::keys(&command, store, json, clock::now()).await),
        Command::Limits(command) => {
            with_store(&settings?, async |store| keys::limits(&command, store, json, &user(&outside), clock::now()).await)
        }
        Command::Hosts(command) => {
            with_store(&settings?, async |store| pauses::hosts(&command, store, json, &user(&outside), clock::now()).await)
        }
        Command::Queues(command) => {
            with_store(&settings?, async |store| pauses::queues(&command, store, json, &user(&outside), clock::now()).await)
        }
        Command::Status => with_store(&settings?, async |store| overview::status(store, json).await),
        Command::Try(args) => attempt::run(&args, &settings?, &outside),
    }
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "warp-host", &mut script);
    text::print(String::from_utf8_lossy(&script))
}

fn print_config(config: &Config) -> Outcome {
    if let Err(Failure { error: Some(error), .. }) = stores::place(config) {
        // Not refused here: this is where somebody looks up which setting it was.
        text::note(text::line(&format!("{error:#}")));
    }
    let rows = config.rows();
    if config.json {
        let rows: Vec<_> = rows.into_iter().map(|(name, value, origin)| json::SettingRow { name, value, origin }).collect();
        return text::print_json(&rows);
    }
    text::print(text::table(["SETTING", "VALUE", "FROM"], rows.into_iter().map(|(name, value, origin)| [name, value, origin])))
}

/// Who the history names as having done something.
fn user(outside: &Outside<'_>) -> String {
    ["WARP_USER", "USER", "LOGNAME"].into_iter().find_map(outside.env).unwrap_or_else(|| "operator".to_owned())
}

fn with_store(config: &Config, command: impl AsyncFnOnce(&dyn Store) -> Outcome) -> Outcome {
    block_on(async {
        let opened = stores::open(config).await?;
        let outcome = command(&*opened.store).await;
        opened.store.flush().await;
        outcome
    })
}

/// One thread is enough for one command. `run` and `bench` build runtimes of their own.
fn block_on<T>(future: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}
