//! The command line: every command, flag and help text, and nothing that acts on them.
//!
//! What must stay true: a flag that is also a setting of `warp.toml` is an `Option` here and has no default, so
//! that [`crate::config`] can say where the value in force came from. Values with a unit keep it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use warp_domain::ending::State;
use warp_domain::key::KeyTemplate;
use warp_domain::policy::{Mode, OnRetry, Order, Retry, Timeout, TimeoutMode};
use warp_domain::{JobId, UnixMillis, units};

use crate::clock;

/// What every exit code means. Printed by `--help` and kept in step with [`crate::failure::Exit`] by a test.
const EXIT_CODES: &str = "\
Exit codes:
  0  done (a duplicate of a unique job counts as done, with a note on stderr)
  1  failed while working
  2  wrong usage or bad input
  3  what was named does not exist
  4  refused: the state of the job, or a rule, does not allow it
  5  the database is unavailable";

/// Runs background jobs whose handlers are WebAssembly components.
#[derive(Debug, Parser)]
#[command(name = "warp-host", version, after_help = EXIT_CODES, max_term_width = 100, propagate_version = true)]
pub struct Cli {
    /// Settings and grants; without it `warp.toml` in the working directory, if there is one
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub config: Option<PathBuf>,
    /// The job database and how to reach it.
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Print for machines: documented shapes, RFC 3339 times in UTC, durations with units
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The job database and how to reach it. Each flag is also a key of `[database]` in `warp.toml` and a variable: the
/// flag `--database-pool` is the key `pool` and the variable `WARP_DATABASE_POOL`.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = DATABASE_OPTIONS)]
pub struct DatabaseArgs {
    /// The job database: `sqlite:PATH` or `postgres://USER@HOST/NAME` [default: sqlite:warp.db]
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    pub database_url: Option<String>,
    /// The schema that holds everything, on PostgreSQL [default: warp]
    #[arg(long, global = true, value_name = "NAME")]
    pub database_schema: Option<String>,
    /// How many connections work at once; one host opens at most three more [default: 5]
    #[arg(long, global = true, value_name = "N")]
    pub database_pool: Option<String>,
    /// disable, prefer, require, verify-ca or verify-full [default: what the URL says, else prefer]
    #[arg(long, global = true, value_name = "MODE")]
    pub database_sslmode: Option<String>,
    /// Certificates of those who may vouch for the server, PEM
    #[arg(long, global = true, value_name = "FILE")]
    pub database_root_cert: Option<PathBuf>,
    /// This host's own certificate, PEM
    #[arg(long, global = true, value_name = "FILE")]
    pub database_client_cert: Option<PathBuf>,
    /// The key of that certificate, PEM
    #[arg(long, global = true, value_name = "FILE")]
    pub database_client_key: Option<PathBuf>,
    /// A file with the password, or in the form of .pgpass; read again for each connection
    #[arg(long, global = true, value_name = "FILE")]
    pub database_password_file: Option<PathBuf>,
    /// A command that prints the password; run by `sh -c` again for each connection
    #[arg(long, global = true, value_name = "COMMAND")]
    pub database_password_command: Option<String>,
    /// Where to LISTEN, if the URL leads to a pooler that cannot [default: the same URL]
    #[arg(long, global = true, value_name = "URL")]
    pub database_listen_url: Option<String>,
    /// `prepared`, `simple` (for poolers), or `auto`: find out [default: auto]
    #[arg(long, global = true, value_name = "MODE")]
    pub database_statements: Option<String>,
    /// What the slots must be, `ledger` or `session`; a database of the other kind is refused
    #[arg(long, global = true, value_name = "KIND")]
    pub database_locks: Option<String>,
}

/// The heading of what only `warp-host --help` explains.
const DATABASE_OPTIONS: &str = "Database options, of every command that uses one; [database] in warp.toml and WARP_DATABASE_… alike";

/// The command line. The database's options are accepted by every command and explained once, on the first page.
pub fn command() -> clap::Command {
    let mut command = Cli::command();
    // Only a built command has its global options in its subcommands.
    command.build();
    command.mut_subcommands(hide_database_options)
}

fn hide_database_options(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| if arg.get_help_heading() == Some(DATABASE_OPTIONS) { arg.hide(true) } else { arg })
        .mut_subcommands(hide_database_options)
}

/// Every command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run jobs until told to stop
    Run(RunArgs),
    /// Enqueue jobs
    Enqueue(EnqueueArgs),
    /// Look at jobs and act on them
    #[command(subcommand)]
    Jobs(JobsCommand),
    /// Look at concurrency keys: who holds them, who waits
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Look at and change the operator's limits, which outrank every declaration
    #[command(subcommand)]
    Limits(LimitsCommand),
    /// Look at the processes that run jobs, and pause them
    #[command(subcommand)]
    Hosts(HostsCommand),
    /// Pause queues
    #[command(subcommand)]
    Queues(QueuesCommand),
    /// Count jobs by state, and what has happened so far
    Status,
    /// Show the plugins in the directory and whether each would load; runs nothing
    Plugins(PluginsArgs),
    /// Grant a plugin what its manifest asks for, by writing it into warp.toml
    Grant(GrantArgs),
    /// Start a handler project that builds anywhere
    New(NewArgs),
    /// Print the WIT package that handlers are written against, or write it to a directory
    Wit(WitArgs),
    /// Run a component once, without a database, and show everything it does
    Try(TryArgs),
    /// Check manifests and packed components as loading would
    Check(CheckArgs),
    /// Show what a packed component is: manifest, policies, capabilities, imports, digest
    Inspect(InspectArgs),
    /// Put a manifest into a component
    Pack(PackArgs),
    /// Show how the policy of one plugin file differs from another's
    Diff(DiffArgs),
    /// Create the database or bring its schema up to date
    Migrate(MigrateArgs),
    /// Look at and change what slots are made of on PostgreSQL: a ledger or session locks
    #[command(subcommand)]
    Locks(LocksCommand),
    /// Look at everything between this machine and a database, and say what is wrong
    Doctor(DoctorArgs),
    /// Copy the database to a file while it is in use
    Backup(BackupArgs),
    /// Measure this machine
    Bench(BenchArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
}

// ------------------------------------------------------------------------------------------------- run, bench

/// `run`: the host itself.
#[derive(Debug, Clone, Default, Args)]
#[command(after_help = "\
Examples:
  warp-host run --plugins ./plugins
  warp-host run --workers 8 --queues default,reports
  warp-host run --database-url postgres://warp@db/jobs --http 127.0.0.1:9464
  warp-host run --print-config

Groups of workers with queues of their own are written as [[workers]] in warp.toml: name, queues,
count.

A new SQLite file is created by itself; on PostgreSQL `warp-host migrate` comes first. SIGTERM or
Ctrl-C stops claiming, lets running jobs finish within the grace and hands the rest back uncharged;
a second signal hands everything back and exits at once.")]
pub struct RunArgs {
    /// The directory of plugins [default: plugins]
    #[arg(long, value_name = "DIR")]
    pub plugins: Option<PathBuf>,
    /// Where compiled code is kept between starts [default: .warp-cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// How many jobs run at once [default: twice the cores, at least 4]
    #[arg(long, value_name = "N")]
    pub workers: Option<String>,
    /// Which queues to take jobs from, separated by commas [default: default]
    #[arg(long, value_name = "NAMES")]
    pub queues: Option<String>,
    /// How many jobs to claim ahead of free workers, at most [default: 1024]
    #[arg(long, value_name = "N")]
    pub prefetch: Option<String>,
    /// How long running jobs may take to finish when the host stops [default: 30s]
    #[arg(long, value_name = "DURATION")]
    pub grace: Option<String>,
    /// How long this host's jobs stay its own after it has gone silent [default: 15s]
    #[arg(long, value_name = "DURATION")]
    pub lease: Option<String>,
    /// Which log lines to print, such as `info` or `warn,warp_worker=debug` [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,
    /// `text` or `json` [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Serve /metrics, /live and /ready on this address, such as `127.0.0.1:9464` [default: off]
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// Bring an older or missing schema up to date first; a SQLite file needs no flag
    #[arg(long)]
    pub migrate: bool,
    /// Print every setting with where it came from, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Exit as soon as no job is left that this host could start or is running
    #[arg(long)]
    pub until_idle: bool,
}

/// `bench`: what this machine does.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host bench
  warp-host bench --workload noop --jobs 100000 --repeat 3 --json
  warp-host bench --database-url postgres://app@db/app --workload mutex --hosts 3 --html bench.html
  warp-host bench --workload noop --continuous --rate 5000 --for 5m

Each workload runs on a new database with durable commits and is reported as one row, or with --json
as one object. On SQLite that is a file in a temporary directory. On PostgreSQL it is a database of
its own on the server that --database-url names, removed afterwards; the user must be allowed to
create databases. The hosts are threads of this process, each with its own connections.")]
pub struct BenchArgs {
    /// Only these workloads, separated by commas; without it all of them (`history` only when named)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub workload: Vec<String>,
    /// How many jobs each workload runs [default: what the workload needs to be steady]
    #[arg(long, value_name = "N")]
    pub jobs: Option<u64>,
    /// How many jobs run at once, on each host
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// How many hosts share the work
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub hosts: u32,
    /// Repeat each workload so often and report the median
    #[arg(long, visible_alias = "repeats", value_name = "N", default_value_t = 1)]
    pub repeat: u32,
    /// Write a page with plots, complete in one file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Enqueue while the hosts run, instead of before: at --rate, or as fast as jobs end
    #[arg(long)]
    pub continuous: bool,
    /// Jobs a second, with --continuous
    #[arg(long, value_name = "N", requires = "continuous", value_parser = rate)]
    pub rate: Option<f64>,
    /// Without --rate, how many jobs are kept enqueued and not ended [default: 4 for each worker]
    #[arg(long, value_name = "N", requires = "continuous", conflicts_with = "rate")]
    pub outstanding: Option<u64>,
    /// How long `idle`, the stillness of `waiters` and --continuous last [default: idle 120s, 20s on
    /// SQLite; waiters 10s; continuous 60s]
    #[arg(long = "for", value_name = "DURATION", value_parser = units::parse_duration)]
    pub span: Option<Duration>,
    /// How many keys `mutex` has
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub groups: u64,
    /// How many jobs of `waiters` wait for one key
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub waiters: u64,
    /// How many jobs `bulk-enqueue` enqueues with one call
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub per_call: u64,
    /// How many finished jobs `history` begins with
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub finished: u64,
    /// How many scheduled jobs `history` begins with
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub scheduled: u64,
    /// How many parked jobs `history` begins with
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub parked: u64,
    /// The directory of plugins that component workloads use [default: plugins]
    #[arg(long, value_name = "DIR")]
    pub plugins: Option<PathBuf>,
    /// Where the temporary databases are made; a file system in memory would measure nothing durable
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1e6 => Ok(rate),
        _ => Err("is not a number of jobs a second above 0".to_owned()),
    }
}

// ------------------------------------------------------------------------------------------------- enqueue

/// `enqueue`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host enqueue render-invoice --payload '{\"customer_id\": 42}'
  generate-payload | warp-host enqueue import -
  warp-host enqueue remind --payload '{}' --delay 5m --unique remind:42
  warp-host enqueue sync --payload '{\"id\": 7}' --mutex 'sync:{id}' --mode wait
  warp-host enqueue fetch --payload '{}' --semaphore bank-api --limit 5 --retry 3:15s,1m,5m
  warp-host enqueue import --batch rows.jsonl

What is declared here outranks the handler and the contract, whole family at a time, and is
stamped at once. Prints one id per job. With --json, one object per line:
  {\"verdict\": \"enqueued\" | \"duplicate\" | \"refused\", \"id\": …, \"reason\": …, \"line\": …}")]
#[command(group = clap::ArgGroup::new("source").required(true).args(["payload", "payload_file", "stdin", "batch"]))]
pub struct EnqueueArgs {
    /// The contract (job type)
    pub contract: String,
    /// `-` reads the payload from standard input
    #[arg(value_name = "-", value_parser = dash)]
    pub stdin: Option<()>,
    /// The payload, JSON text; it is stored exactly as written
    #[arg(long, value_name = "JSON")]
    pub payload: Option<String>,
    /// A file with the payload
    #[arg(long, value_name = "FILE")]
    pub payload_file: Option<PathBuf>,
    /// A file with one payload per line (`-` is standard input); a verdict per line, and one bad line refuses only itself
    #[arg(long, value_name = "FILE", conflicts_with_all = ["count", "unique"])]
    pub batch: Option<PathBuf>,
    /// Enqueue the same payload so many times
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000_000), conflicts_with = "unique")]
    pub count: u32,
    /// The queue
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub queue: String,
    /// Not before this long from now
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration, conflicts_with = "at")]
    pub delay: Option<Duration>,
    /// Not before this instant, such as 2030-01-31T12:00:00Z
    #[arg(long, value_name = "RFC3339", value_parser = clock::parse_instant)]
    pub at: Option<UnixMillis>,
    /// At most one job with this key exists among those that have not ended; a second answers with the first one's id
    #[arg(long, value_name = "KEY")]
    pub unique: Option<String>,
    /// Metadata that the job and its children carry; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    pub meta: Vec<(String, String)>,
    /// The W3C `traceparent` that the job continues
    #[arg(long, value_name = "TEXT")]
    pub trace_parent: Option<String>,

    /// Run one at a time per key; `{field}` stands for a field of the payload. Several keys are taken together
    #[arg(long, value_name = "KEY", conflicts_with_all = ["semaphore", "limit"], help_heading = "Policy")]
    pub mutex: Vec<KeyTemplate>,
    /// Run at most `--limit` at a time per key
    #[arg(long, value_name = "KEY", requires = "limit", help_heading = "Policy")]
    pub semaphore: Vec<KeyTemplate>,
    /// How many at a time
    #[arg(long, value_name = "N", requires = "semaphore", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Policy")]
    pub limit: Option<u32>,
    /// What a full key does: delete the job, or let it wait [default: skip for a mutex, wait for a semaphore]
    #[arg(long, value_name = "MODE", value_parser = mode, help_heading = "Policy")]
    pub mode: Option<Mode>,
    /// How many slots of the limit the job takes
    #[arg(long, value_name = "N", requires = "semaphore", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Policy")]
    pub weight: Option<u32>,
    /// `any`, or `fifo`: in the order in which jobs became runnable
    #[arg(long, value_name = "ORDER", value_parser = order, help_heading = "Policy")]
    pub order: Option<Order>,
    /// While the head of a fifo key waits for its retry: `block` the key, or let others `pass`
    #[arg(long, value_name = "WHAT", value_parser = on_retry, requires = "order", help_heading = "Policy")]
    pub on_retry: Option<OnRetry>,
    /// Retry so often, after these delays (the last repeats), with this much jitter: `3`, `3:15s,1m,5m`, `3:15s~0.1`
    #[arg(long, value_name = "N[:DELAYS][~JITTER]", value_parser = parse_retry, help_heading = "Policy")]
    pub retry: Option<Retry>,
    /// How long one attempt may take, and whether that fails it (retry sees it) or deletes the job
    #[arg(long, value_name = "DURATION[:fail|delete]", value_parser = parse_timeout, help_heading = "Policy")]
    pub timeout: Option<Timeout>,
}

// ------------------------------------------------------------------------------------------------- jobs, keys, limits

/// `jobs`.
#[derive(Debug, Clone, Subcommand)]
pub enum JobsCommand {
    /// List jobs, newest first
    #[command(after_help = "\
Examples:
  warp-host jobs list --state Failed
  warp-host jobs list --contract render-invoice --state enqueued,processing
  warp-host jobs list --key payment:42 --limit 20
  warp-host jobs list --before 0192d4e0-1b2c-7def-8123-456789abcdef")]
    List(JobsListArgs),
    /// Show everything about a job: its policy and where each rule came from, why it waits, its history
    #[command(after_help = "\
Examples:
  warp-host jobs show 0192d4e0-1b2c-7def-8123-456789abcdef
  warp-host jobs show 0192d4e0-1b2c-7def-8123-456789abcdef --json")]
    Show {
        /// The job
        id: JobId,
    },
    /// Print what a job's runs wrote
    #[command(after_help = "\
Control characters and terminal escapes of the guest are shown as visible symbols (ESC as ␛).
--raw writes them as they are, and only into a pipe or file.

Examples:
  warp-host jobs logs 0192d4e0-1b2c-7def-8123-456789abcdef
  warp-host jobs logs 0192d4e0-1b2c-7def-8123-456789abcdef --run 2 --raw > run-2.log")]
    Logs {
        /// The job
        id: JobId,
        /// Only this run
        #[arg(long, value_name = "N")]
        run: Option<u32>,
        /// The texts alone, as the guest wrote them; refused on a terminal
        #[arg(long, conflicts_with = "json")]
        raw: bool,
    },
    /// End jobs as Deleted; a running one is asked to stop, then stopped by force
    #[command(after_help = "Example:\n  warp-host jobs cancel 0192d4e0-1b2c-7def-8123-456789abcdef")]
    Cancel(IdsArgs),
    /// Make ended or Scheduled jobs Enqueued again; they keep their policy, and their retry budget starts afresh
    #[command(after_help = "Example:\n  warp-host jobs requeue 0192d4e0-1b2c-7def-8123-456789abcdef")]
    Requeue(IdsArgs),
    /// Remove jobs and everything about them; refused while they run
    #[command(after_help = "Example:\n  warp-host jobs delete 0192d4e0-1b2c-7def-8123-456789abcdef")]
    Delete(IdsArgs),
}

/// `jobs list`.
#[derive(Debug, Clone, Args)]
pub struct JobsListArgs {
    /// Only these states, separated by commas
    #[arg(long, value_name = "STATES", value_delimiter = ',', value_parser = state)]
    pub state: Vec<State>,
    /// Only this contract
    #[arg(long, value_name = "NAME")]
    pub contract: Option<String>,
    /// Only this queue
    #[arg(long, value_name = "NAME")]
    pub queue: Option<String>,
    /// Only jobs whose policy rendered to this key
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Only jobs enqueued before this one: the next page
    #[arg(long, value_name = "ID")]
    pub before: Option<JobId>,
}

/// Several jobs.
#[derive(Debug, Clone, Args)]
pub struct IdsArgs {
    /// The jobs
    #[arg(required = true, value_name = "ID")]
    pub ids: Vec<JobId>,
}

/// `keys`.
#[derive(Debug, Clone, Subcommand)]
pub enum KeysCommand {
    /// List keys that somebody holds or waits for, busiest first
    #[command(after_help = "Example:\n  warp-host keys list --limit 10")]
    List {
        /// At most so many
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
    },
    /// Show a key: its limit, holders, and waiters with their place in line
    #[command(after_help = "Example:\n  warp-host keys show payment:42")]
    Show {
        /// The key, as jobs render it
        key: String,
    },
}

/// `limits`.
#[derive(Debug, Clone, Subcommand)]
pub enum LimitsCommand {
    /// List the limits that operators have set
    List,
    /// Set a key's limit; 0 pauses the key. Jobs that run are left alone
    #[command(after_help = "\
Examples:
  warp-host limits set bank-api 20
  warp-host limits set bank-api 0")]
    Set {
        /// The key, as jobs render it
        key: String,
        /// How many may run at a time
        #[arg(value_parser = count)]
        limit: u32,
        /// Who is remembered as having set it [default: the user's name]
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
    },
    /// Remove a key's limit, so that what jobs declare counts again
    #[command(after_help = "Example:\n  warp-host limits remove bank-api")]
    Remove {
        /// The key
        key: String,
    },
}

/// `hosts`.
#[derive(Debug, Clone, Subcommand)]
pub enum HostsCommand {
    /// List the processes that run jobs on this database
    List,
    /// Let a host start nothing new until it is resumed or ends; what it runs goes on
    #[command(after_help = "Example:\n  warp-host hosts pause db7:4711")]
    Pause {
        /// The host, as `hosts list` names it
        name: String,
        /// Who is remembered as having paused it [default: the user's name]
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
    },
    /// Let a paused host start jobs again
    #[command(after_help = "Example:\n  warp-host hosts resume db7:4711")]
    Resume {
        /// The host
        name: String,
    },
}

/// `queues`.
#[derive(Debug, Clone, Subcommand)]
pub enum QueuesCommand {
    /// List the queues that are paused
    List,
    /// Let no host start a job of a queue until it is resumed; what runs goes on, and jobs can be enqueued
    #[command(after_help = "Example:\n  warp-host queues pause reports")]
    Pause {
        /// The queue
        queue: String,
        /// Who is remembered as having paused it [default: the user's name]
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
    },
    /// Let jobs of a paused queue start again
    #[command(after_help = "Example:\n  warp-host queues resume reports")]
    Resume {
        /// The queue
        queue: String,
    },
}

// ------------------------------------------------------------------------------------------------- plugins

/// `plugins`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  warp-host plugins --plugins ./plugins")]
pub struct PluginsArgs {
    /// The directory of plugins [default: plugins]
    #[arg(long, value_name = "DIR")]
    pub plugins: Option<PathBuf>,
}

/// `grant`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host grant thumbnail
  warp-host grant thumbnail --dir in=/srv/photos --dir out=/srv/thumbs
  warp-host grant payments --dry-run

Writes the table [grant.NAME] of warp.toml and leaves everything else in the file, comments
included, as it is. A running host reads it when it is started again.")]
pub struct GrantArgs {
    /// The plugin
    pub name: String,
    /// The directory on this machine that the plugin sees under a name [default: the name itself]
    #[arg(long, value_name = "NAME=DIR", value_parser = name_and_value)]
    pub dir: Vec<(String, String)>,
    /// The directory of plugins [default: plugins]
    #[arg(long, value_name = "DIR")]
    pub plugins: Option<PathBuf>,
    /// Print the table without writing it
    #[arg(long)]
    pub dry_run: bool,
}

/// The languages that `new` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    /// Built by cargo alone
    Rust,
    /// QuickJS, built by componentize-qjs
    Js,
    /// CPython, built by componentize-py
    Python,
    /// Built by zig cc or clang
    C,
}

/// `new`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host new rust send-mail
  warp-host new python report --dir ./handlers/report

The project has the WIT package in it and needs nothing else of this repository. Its README has
the commands.")]
pub struct NewArgs {
    /// The language
    pub lang: Lang,
    /// The plugin's name: lower case letters, digits and dashes
    pub name: String,
    /// Where to write it [default: a directory of that name]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// `wit`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  warp-host wit\n  warp-host wit --out my-handler/wit")]
pub struct WitArgs {
    /// Write `job.wit` into this directory instead of printing it
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `try`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host try plugins/checksum.wasm --payload '{\"file\": \"a.bin\"}' --dir in=./data
  warp-host try target/handler.wasm --payload '{}' --timeout 5s --memory 32MiB

Nothing is stored: jobs that it would enqueue are printed. Exit code 0 if it completed, 1 if not.")]
pub struct TryArgs {
    /// A packed component, or one with a manifest of the same name beside it
    pub file: PathBuf,
    /// The payload, JSON text
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub payload: String,
    /// Which contract, if the file has several
    #[arg(long, value_name = "NAME")]
    pub contract: Option<String>,
    /// How long it may take [default: what the manifest says, else 1m]
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    pub timeout: Option<Duration>,
    /// How much memory it may use [default: what the manifest asks for]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    pub memory: Option<u64>,
    /// The directory on this machine that the component sees under a name it asks for
    #[arg(long, value_name = "NAME=DIR", value_parser = name_and_value)]
    pub dir: Vec<(String, String)>,
}

/// `check`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host check warp.toml
  warp-host check plugins/*.wasm

Prints FILE:LINE:COLUMN for each finding. Exit code 2 if anything would be refused; warnings alone
are 0.")]
pub struct CheckArgs {
    /// Manifests (.toml) and packed components (.wasm)
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// `inspect`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  warp-host inspect plugins/checksum.wasm")]
pub struct InspectArgs {
    /// A component
    pub file: PathBuf,
}

/// `pack`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host pack target/wasm32-wasip2/release/send_mail.wasm warp.toml -o plugins/send-mail.wasm
  warp-host pack handler.wasm warp.toml --in-place

The result appears whole or not at all. The manifest is checked first.")]
pub struct PackArgs {
    /// The component
    pub component: PathBuf,
    /// Its manifest
    pub manifest: PathBuf,
    /// Where to write the result [default: <plugin name>.wasm beside the manifest]
    #[arg(short, long, value_name = "FILE", conflicts_with = "in_place")]
    pub out: Option<PathBuf>,
    /// Replace the component by the result
    #[arg(long)]
    pub in_place: bool,
    /// Overwrite an existing file, and replace a manifest that the component already has
    #[arg(long)]
    pub force: bool,
}

/// `diff`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host diff plugins/payments.wasm build/payments.wasm
  git show main:warp.toml > old.toml; warp-host diff old.toml warp.toml

Shows what changes for new jobs. Jobs that have started or wait for a key keep the policy written
on them.")]
pub struct DiffArgs {
    /// A manifest or packed component
    pub old: PathBuf,
    /// Another
    pub new: PathBuf,
}

// ------------------------------------------------------------------------------------------------- database, shell

/// `migrate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host migrate
  warp-host migrate --dry-run --database-url sqlite:/var/lib/warp/warp.db
  warp-host migrate --database-url postgres://warp_owner@db/jobs --locks ledger
  warp-host migrate --sql > warp.sql

--sql asks no database: it is for whoever applies changes by hand or by another tool. Needs neither
superuser nor extension, only the right to create a schema.")]
pub struct MigrateArgs {
    /// Print the SQL that would be run, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print the SQL of the whole schema without asking a database
    #[arg(long, conflicts_with = "dry_run")]
    pub sql: bool,
    /// What slots are made of, if the database is new; one that exists is changed by `locks set`
    #[arg(long, value_name = "KIND", value_parser = locks)]
    pub locks: Option<Locks>,
}

/// What slots are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locks {
    /// Rows of the database.
    Ledger,
    /// Advisory locks of a session.
    Session,
}

impl Locks {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Locks::Ledger => "ledger",
            Locks::Session => "session",
        }
    }
}

/// `locks`.
#[derive(Debug, Clone, Subcommand)]
pub enum LocksCommand {
    /// Show what slots are made of, and who said so
    Show,
    /// Change it; refused while anybody holds a slot or a host is registered
    #[command(after_help = "\
Examples:
  warp-host locks set session
  warp-host locks set ledger --by ada
  warp-host locks set ledger --wait 2m

Stop every host first. One that was killed stays registered until somebody has watched it for a
lease and taken it for dead: another host or, with --wait, this command, which gives its jobs back.

`ledger` works everywhere. `session` writes no row for a slot, needs a connection of its own for
each host that no transaction-mode pooler stands before, and refuses `order = \"fifo\"` and weights.")]
    Set {
        /// `ledger` or `session`
        #[arg(value_parser = locks)]
        kind: Locks,
        /// Who is remembered as having set it [default: the user's name]
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
        /// Wait until it can be done, for at most so long [without a value: 1m]
        #[arg(long, value_name = "DURATION", value_parser = units::parse_duration, num_args = 0..=1, default_missing_value = "1m")]
        wait: Option<Duration>,
    },
}

/// `doctor`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  warp-host doctor
  warp-host doctor postgres://warp@pooler:6432/jobs

Exit code 0 if nothing is wrong or there are warnings only, 4 if a finding would keep a host from
running as it is configured, 5 if the database cannot be reached. Changes nothing.")]
pub struct DoctorArgs {
    /// The database [default: the one that the settings name]
    pub url: Option<String>,
}

/// `backup`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  warp-host backup /backups/warp-2030-01-31.db")]
pub struct BackupArgs {
    /// The file to write; it must not exist
    pub out: PathBuf,
}

/// `completions`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  warp-host completions bash > ~/.local/share/bash-completion/completions/warp-host")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

// ------------------------------------------------------------------------------------------------- values

/// Reads `ledger` or `session`. Also used for the setting.
pub fn locks(text: &str) -> Result<Locks, String> {
    match text {
        "ledger" => Ok(Locks::Ledger),
        "session" => Ok(Locks::Session),
        other => Err(format!("{other:?} is not what slots can be made of; write `ledger` or `session`")),
    }
}

fn dash(text: &str) -> Result<(), String> {
    match text {
        "-" => Ok(()),
        other => Err(format!("{other:?} is not `-`; a payload is given with --payload or --payload-file")),
    }
}

fn count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number from 0 to {}", u32::MAX))
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

fn state(text: &str) -> Result<State, String> {
    State::ALL.into_iter().find(|state| state.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
        let names: Vec<_> = State::ALL.iter().map(|state| state.name()).collect();
        format!("the states are {}", names.join(", "))
    })
}

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "skip" => Ok(Mode::Skip),
        "wait" => Ok(Mode::Wait),
        _ => Err("write `skip` (the job is deleted) or `wait`".to_owned()),
    }
}

fn order(text: &str) -> Result<Order, String> {
    match text {
        "any" => Ok(Order::Any),
        "fifo" => Ok(Order::Fifo),
        _ => Err("write `any` or `fifo`".to_owned()),
    }
}

fn on_retry(text: &str) -> Result<OnRetry, String> {
    match text {
        "block" => Ok(OnRetry::Block),
        "pass" => Ok(OnRetry::Pass),
        _ => Err("write `block` or `pass`".to_owned()),
    }
}

/// Reads `3`, `3:15s,1m,5m` or `3:15s~0.1`. Also used for `WARP_DEFAULT_RETRY`.
pub fn parse_retry(text: &str) -> Result<Retry, String> {
    let (rest, jitter) = match text.split_once('~') {
        Some((rest, jitter)) => (rest, parse_jitter(jitter)?),
        None => (text, 0),
    };
    let (max, delays) = match rest.split_once(':') {
        Some((max, delays)) => (max, delays.split(',').map(|delay| units::parse_duration(delay.trim())).collect::<Result<_, _>>()),
        None => (rest, Ok(Vec::new())),
    };
    let max = max.trim().parse().map_err(|_| format!("{max:?} is not a number of retries; write `3`, `3:15s,1m,5m` or `3:15s~0.1`"))?;
    Ok(Retry { max, delays: delays.map_err(|error| error.to_string())?, jitter_permille: jitter })
}

fn parse_jitter(text: &str) -> Result<u16, String> {
    let refuse = || format!("{text:?} is not a jitter; write a fraction from 0 to 1, such as 0.1");
    let fraction: f64 = text.trim().parse().map_err(|_| refuse())?;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(refuse());
    }
    // In range, so the cast is exact to the thousandth.
    Ok((fraction * 1000.0).round() as u16)
}

/// Reads `30s`, `30s:fail` or `30s:delete`. Also used for `WARP_DEFAULT_TIMEOUT`.
pub fn parse_timeout(text: &str) -> Result<Timeout, String> {
    let (span, mode) = match text.split_once(':') {
        None | Some((_, "fail")) => (text.split(':').next().unwrap_or(text), TimeoutMode::Fail),
        Some((span, "delete")) => (span, TimeoutMode::Delete),
        Some((_, other)) => return Err(format!("{other:?} is not what a timeout can do; write `fail` or `delete`")),
    };
    let per_attempt = units::parse_duration(span).map_err(|error| error.to_string())?;
    if per_attempt.is_zero() {
        return Err("a timeout of 0 would end every attempt; leave it out instead".to_owned());
    }
    Ok(Timeout { per_attempt, mode })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        command().debug_assert();
    }

    #[test]
    fn every_exit_code_is_explained() {
        use crate::failure::Exit;
        let codes = EXIT_CODES.lines().skip(1).map(|line| line.trim().split(' ').next().unwrap_or_default().to_owned());
        let known = [Exit::Runtime, Exit::Usage, Exit::NotFound, Exit::Refused, Exit::Unavailable].map(|exit| (exit as u8).to_string());
        assert_eq!(codes.collect::<Vec<_>>(), [&["0".to_owned()][..], &known].concat());
    }

    #[test]
    fn retry_and_timeout_texts() {
        let retry = |max, delays: &[u64], jitter_permille| Retry {
            max,
            delays: delays.iter().map(|s| Duration::from_secs(*s)).collect(),
            jitter_permille,
        };
        assert_eq!(parse_retry("3"), Ok(retry(3, &[], 0)));
        assert_eq!(parse_retry("3:15s,1m"), Ok(retry(3, &[15, 60], 0)));
        assert_eq!(parse_retry("2:1s~0.25"), Ok(retry(2, &[1], 250)));
        for bad in ["", "-1", "x", "3:", "3:15", "3:15s~", "3:15s~1.1", "3:15s~NaN"] {
            assert!(parse_retry(bad).is_err(), "{bad}");
        }
        let timeout = |seconds, mode| Timeout { per_attempt: Duration::from_secs(seconds), mode };
        assert_eq!(parse_timeout("30s"), Ok(timeout(30, TimeoutMode::Fail)));
        assert_eq!(parse_timeout("30s:fail"), Ok(timeout(30, TimeoutMode::Fail)));
        assert_eq!(parse_timeout("2m:delete"), Ok(timeout(120, TimeoutMode::Delete)));
        for bad in ["", "30", "0s", "30s:explode", ":fail"] {
            assert!(parse_timeout(bad).is_err(), "{bad}");
        }
    }
}
