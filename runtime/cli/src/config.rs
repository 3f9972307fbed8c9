//! Every setting, its value, and where the value came from.
//!
//! A flag outranks the environment (`WARP_…`), which outranks `warp.toml`, which outranks the default. What must
//! stay true: a key of `warp.toml` that this version does not know is refused with its line and the nearest
//! known key, so that a misspelt setting never silently does nothing; and every value can say its origin.
//!
//! Relative paths in `warp.toml` are relative to that file; those of flags and environment to the working
//! directory.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml_edit::{Document, Item, Table, Value};
use warp_domain::policy::{Retry, Timeout, TimeoutMode};
use warp_domain::units;
use warp_manifest::Grant;
use warp_store::Retention;

use crate::args::{self, Cli, Command, DatabaseArgs, Locks, RunArgs};
use crate::failure::{Failure, Outcome};
use crate::grants;

/// The file that is looked for in the working directory.
pub const FILE: &str = "warp.toml";

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody said anything.
    Default,
    /// A line of the file.
    File {
        /// As it was named.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// A variable of the environment.
    Env(&'static str),
    /// A flag.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Env(name) => f.write_str(name),
            Origin::Flag(name) => f.write_str(name),
        }
    }
}

/// A value and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Where it came from.
    pub origin: Origin,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// Workers that take jobs from queues of their own, written as `[[workers]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// For people.
    pub name: String,
    /// The queues they serve.
    pub queues: Vec<String>,
    /// How many jobs they run at once.
    pub count: u32,
}

/// How statements are sent to PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statements {
    /// Found out when a connection is made.
    Auto,
    /// Prepared once on each connection.
    Prepared,
    /// As text, which every pooler passes on.
    Simple,
}

/// The job database and how to reach it. All but `url` concern PostgreSQL alone.
#[derive(Debug, Clone)]
pub struct DatabaseConfig {
    /// Where it is; may hold a password, so it is printed by [`without_password`] alone.
    pub url: Setting<String>,
    /// The schema that holds everything.
    pub schema: Setting<String>,
    /// How many connections work at once.
    pub pool: Setting<u32>,
    /// How connections are encrypted; `None` leaves it to the URL.
    pub sslmode: Setting<Option<String>>,
    /// Who may vouch for the server.
    pub root_cert: Setting<Option<PathBuf>>,
    /// This host's certificate.
    pub client_cert: Setting<Option<PathBuf>>,
    /// Its key.
    pub client_key: Setting<Option<PathBuf>>,
    /// Whose first line is the password.
    pub password_file: Setting<Option<PathBuf>>,
    /// What prints the password.
    pub password_command: Setting<Option<String>>,
    /// Where to listen, if not at `url`; may hold a password.
    pub listen_url: Setting<Option<String>>,
    /// How statements are sent.
    pub statements: Setting<Statements>,
    /// What the slots must be made of; `None` takes what the database says.
    pub locks: Setting<Option<Locks>>,
}

/// Everything that can be set.
#[derive(Debug, Clone)]
pub struct Config {
    /// The job database.
    pub database: DatabaseConfig,
    /// The directory of plugins.
    pub plugins: Setting<PathBuf>,
    /// Where compiled code is kept.
    pub cache: Setting<PathBuf>,
    /// How many jobs run at once, all groups together.
    pub workers: Setting<u32>,
    /// Which queues are served, by any group.
    pub queues: Setting<Vec<String>>,
    /// Groups of workers; without any, all workers serve all queues.
    pub groups: Vec<(Group, Origin)>,
    /// How many jobs are claimed ahead of free workers, at most.
    pub prefetch: Setting<u32>,
    /// How long running jobs may take when the host stops.
    pub grace: Setting<Duration>,
    /// How long a silent host keeps its jobs.
    pub lease: Setting<Duration>,
    /// How long Completed jobs are kept; `None` is for ever.
    pub retention_completed: Setting<Option<Duration>>,
    /// How long Deleted jobs are kept.
    pub retention_deleted: Setting<Option<Duration>>,
    /// How long Failed jobs are kept.
    pub retention_failed: Setting<Option<Duration>>,
    /// What applies to jobs for which nobody declares a retry policy.
    pub default_retry: Setting<Option<Retry>>,
    /// What applies to jobs for which nobody declares a timeout.
    pub default_timeout: Setting<Option<Timeout>>,
    /// Which log lines are printed.
    pub log_level: Setting<String>,
    /// How they look.
    pub log_format: Setting<LogFormat>,
    /// Where metrics and probes are served; `None` is nowhere.
    pub http: Setting<Option<SocketAddr>>,
    /// What each plugin is granted, with the line of its table.
    pub grants: BTreeMap<String, (Grant, Origin)>,
    /// The file that was read, or that `grant` would create.
    pub file: PathBuf,
    /// Whether the file of that name in the working directory is a plugin's manifest: handler projects have one,
    /// and nothing is read from it or written to it.
    pub file_is_manifest: bool,
    /// Whether to print for machines; a flag alone, no setting.
    pub json: bool,
}

impl Config {
    /// How long ended jobs are kept.
    pub fn retention(&self) -> Retention {
        Retention { completed: self.retention_completed.value, deleted: self.retention_deleted.value, failed: self.retention_failed.value }
    }

    /// Every setting as name, value and origin, in the order of the documentation.
    pub fn rows(&self) -> Vec<(String, String, String)> {
        fn row<T>(name: &str, setting: &Setting<T>, show: impl Fn(&T) -> String) -> (String, String, String) {
            (name.to_owned(), show(&setting.value), setting.origin.to_string())
        }
        fn keep(span: &Option<Duration>) -> String {
            span.map_or_else(|| "forever".to_owned(), units::format_duration)
        }
        // Without `..`, so that a new setting cannot be forgotten here.
        let Config {
            database,
            plugins,
            cache,
            workers,
            queues,
            groups,
            prefetch,
            grace,
            lease,
            retention_completed,
            retention_deleted,
            retention_failed,
            default_retry,
            default_timeout,
            log_level,
            log_format,
            http,
            grants,
            file: _,
            file_is_manifest: _,
            json: _,
        } = self;
        let DatabaseConfig {
            url,
            schema,
            pool,
            sslmode,
            root_cert,
            client_cert,
            client_key,
            password_file,
            password_command,
            listen_url,
            statements,
            locks,
        } = database;
        fn path(path: &Option<PathBuf>) -> String {
            path.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string())
        }
        let mut rows = vec![
            row("database.url", url, |url| without_password(url)),
            row("database.schema", schema, Clone::clone),
            row("database.pool", pool, u32::to_string),
            row("database.sslmode", sslmode, |mode| mode.clone().unwrap_or_else(|| "as the url says".to_owned())),
            row("database.root_cert", root_cert, path),
            row("database.client_cert", client_cert, path),
            row("database.client_key", client_key, path),
            row("database.password_file", password_file, path),
            // Its arguments may be secret, so only the program is named.
            row("database.password_command", password_command, |command| {
                let program = command.as_ref().and_then(|command| command.split_whitespace().next());
                program.map_or_else(|| "none".to_owned(), |program| format!("{program} …"))
            }),
            row("database.listen_url", listen_url, |url| url.as_ref().map_or_else(|| "the same".to_owned(), |url| without_password(url))),
            row("database.statements", statements, |mode| match mode {
                Statements::Auto => "auto".to_owned(),
                Statements::Prepared => "prepared".to_owned(),
                Statements::Simple => "simple".to_owned(),
            }),
            row("database.locks", locks, |kind| kind.map_or("as the database says", Locks::name).to_owned()),
            row("plugins", plugins, |path| path.display().to_string()),
            row("cache", cache, |path| path.display().to_string()),
            row("workers", workers, u32::to_string),
            row("queues", queues, |names| names.join(",")),
            row("prefetch", prefetch, u32::to_string),
            row("grace", grace, |span| units::format_duration(*span)),
            row("lease", lease, |span| units::format_duration(*span)),
            row("retention.completed", retention_completed, keep),
            row("retention.deleted", retention_deleted, keep),
            row("retention.failed", retention_failed, keep),
            row("defaults.retry", default_retry, |retry| retry.as_ref().map_or_else(|| "none".to_owned(), retry_text)),
            row("defaults.timeout", default_timeout, |timeout| timeout.as_ref().map_or_else(|| "none".to_owned(), timeout_text)),
            row("log.level", log_level, Clone::clone),
            row("log.format", log_format, |format| match format {
                LogFormat::Text => "text".to_owned(),
                LogFormat::Json => "json".to_owned(),
            }),
            row("http", http, |address| address.map_or_else(|| "off".to_owned(), |address| address.to_string())),
        ];
        rows.extend(groups.iter().map(|(Group { name, queues, count }, origin)| {
            (format!("workers.{name}"), format!("{count} for {}", queues.join(",")), origin.to_string())
        }));
        rows.extend(grants.iter().map(|(name, (grant, origin))| (format!("grant.{name}"), grants::in_words(grant), origin.to_string())));
        rows
    }
}

/// A retry policy in the form that `--retry` reads.
pub fn retry_text(retry: &Retry) -> String {
    let delays: Vec<_> = retry.delays.iter().map(|delay| units::format_duration(*delay)).collect();
    let mut text = retry.max.to_string();
    if !delays.is_empty() {
        text = format!("{text}:{}", delays.join(","));
    }
    if retry.jitter_permille > 0 {
        text = format!("{text}~{}", f64::from(retry.jitter_permille) / 1000.0);
    }
    text
}

/// A timeout in the form that `--timeout` reads.
pub fn timeout_text(timeout: &Timeout) -> String {
    let mode = match timeout.mode {
        TimeoutMode::Fail => "fail",
        TimeoutMode::Delete => "delete",
    };
    format!("{}:{mode}", units::format_duration(timeout.per_attempt))
}

/// A connection text without its passwords, for printing.
pub fn without_password(url: &str) -> String {
    let Some(scheme) = url.find("://").map(|at| at + 3) else { return url.to_owned() };
    let (address, parameters) = match url.find('?') {
        Some(at) => (&url[..at], Some(&url[at + 1..])),
        None => (url, None),
    };
    let authority = &url[scheme..].split(['/', '?']).next().unwrap_or_default();
    let mut shown = match (address.rfind('@'), authority.split_once(':')) {
        (Some(at), _) if scheme <= at => match address[scheme..at].find(':') {
            Some(colon) => format!("{}:***{}", &address[..scheme + colon], &address[at..]),
            None => address.to_owned(),
        },
        // A password that should have been escaped, with a `?` in it: such a text is no URL, but it is printed as one.
        (None, Some((user, rest))) if !user.starts_with('[') && !rest.chars().all(|c| c.is_ascii_digit()) => {
            return format!("{}{user}:***", &url[..scheme]);
        }
        _ => address.to_owned(),
    };
    if let Some(parameters) = parameters {
        let hide = |pair: &str| match pair.split_once('=') {
            Some((name, _)) if name.to_lowercase().contains("password") => format!("{name}=***"),
            _ => pair.to_owned(),
        };
        shown = format!("{shown}?{}", parameters.split('&').map(hide).collect::<Vec<_>>().join("&"));
    }
    shown
}

/// What the outside world says, so that a test can say something else.
pub struct Outside<'a> {
    /// A variable of the environment.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Cores that this process may use.
    pub cores: u32,
}

/// Reads file, environment and flags.
///
/// # Errors
/// With the file and line, the variable or the flag, and what to write instead.
pub fn load(cli: &Cli, outside: &Outside<'_>) -> Outcome<Config> {
    let (path, asked) = match (&cli.config, (outside.env)("WARP_CONFIG")) {
        (Some(path), _) => (path.clone(), true),
        (None, Some(path)) => (PathBuf::from(path), true),
        (None, None) => (PathBuf::from(FILE), false),
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !asked => String::new(),
        Err(error) => return Err(Failure::usage(format!("failed to read the configuration {}: {error}", path.display()))),
    };
    let file_is_manifest = is_manifest(&text);
    if file_is_manifest && asked {
        return Err(Failure::usage(format!("{} is a plugin's manifest, and no configuration of a host", path.display())));
    }
    let file = File::parse(&path, if file_is_manifest { "" } else { &text }).map_err(Failure::usage)?;
    let none = RunArgs::default();
    let (run, plugins) = match &cli.command {
        Command::Run(run) => (run, &run.plugins),
        Command::Plugins(args) => (&none, &args.plugins),
        Command::Grant(args) => (&none, &args.plugins),
        Command::Bench(args) => (&none, &args.plugins),
        _ => (&none, &None),
    };
    let config = resolve(&file, run, plugins.as_deref(), &cli.database, outside).map_err(Failure::usage)?;
    Ok(Config { file_is_manifest, json: cli.json, ..config })
}

/// Both kinds of file may be called `warp.toml`. A manifest must have these two keys, and a configuration has neither.
fn is_manifest(text: &str) -> bool {
    Document::parse(text).is_ok_and(|document| document.contains_key("format") && document.contains_key("plugin"))
}

fn resolve(file: &File, run: &RunArgs, plugins: Option<&Path>, database: &DatabaseArgs, outside: &Outside<'_>) -> Result<Config, String> {
    let text = |path: &Option<PathBuf>| path.as_ref().map(|path| path.to_string_lossy().into_owned());
    let plugins_flag = plugins.map(|path| path.to_string_lossy().into_owned());
    let layers = Layers { file, env: outside.env };
    let keep = |text: &str| match text {
        "forever" => Ok(None),
        span => units::parse_duration(span).map(Some).map_err(|error| format!("{error}; or `forever`")),
    };
    let retention = Retention::default();
    let config = Config {
        database: database_config(&layers, database)?,
        plugins: layers.path("plugins", "WARP_PLUGINS", ("--plugins", plugins_flag.as_deref()), "plugins")?,
        cache: layers.path("cache", "WARP_CACHE", ("--cache", text(&run.cache).as_deref()), ".warp-cache")?,
        workers: layers.get(
            "workers",
            "WARP_WORKERS",
            Some(("--workers", run.workers.as_deref())),
            (2 * outside.cores).clamp(4, MOST_WORKERS),
            |text| at_most(text, 1, MOST_WORKERS),
        )?,
        queues: layers.get("queues", "WARP_QUEUES", Some(("--queues", run.queues.as_deref())), vec!["default".to_owned()], queue_names)?,
        groups: Vec::new(),
        prefetch: layers
            .get("prefetch", "WARP_PREFETCH", Some(("--prefetch", run.prefetch.as_deref())), 1024, |text| at_most(text, 0, 10_000))?,
        grace: layers.get("grace", "WARP_GRACE", Some(("--grace", run.grace.as_deref())), Duration::from_secs(30), span)?,
        lease: layers.get("lease", "WARP_LEASE", Some(("--lease", run.lease.as_deref())), Duration::from_secs(15), |text| {
            let lease = span(text)?;
            // A host stops its runs 3 s before its lease can lapse, and must have had time to renew it before.
            if lease < SHORTEST_LEASE {
                return Err(format!("a lease of {text} is too short; {} is the least", units::format_duration(SHORTEST_LEASE)));
            }
            Ok(lease)
        })?,
        retention_completed: layers.get("retention.completed", "WARP_RETENTION_COMPLETED", None, retention.completed, keep)?,
        retention_deleted: layers.get("retention.deleted", "WARP_RETENTION_DELETED", None, retention.deleted, keep)?,
        retention_failed: layers.get("retention.failed", "WARP_RETENTION_FAILED", None, retention.failed, keep)?,
        default_retry: layers.get("defaults.retry", "WARP_DEFAULT_RETRY", None, None, |text| args::parse_retry(text).map(Some))?,
        default_timeout: layers.get("defaults.timeout", "WARP_DEFAULT_TIMEOUT", None, None, |text| args::parse_timeout(text).map(Some))?,
        log_level: layers
            .get("log.level", "WARP_LOG", Some(("--log-level", run.log_level.as_deref())), "info".to_owned(), |text| Ok(text.to_owned()))?,
        log_format: layers.get(
            "log.format",
            "WARP_LOG_FORMAT",
            Some(("--log-format", run.log_format.as_deref())),
            LogFormat::Text,
            |text| match text {
                "text" => Ok(LogFormat::Text),
                "json" => Ok(LogFormat::Json),
                other => Err(format!("{other:?} is not a log format; write `text` or `json`")),
            },
        )?,
        http: layers.get("http", "WARP_HTTP", Some(("--http", run.http.as_deref())), None, |text| match text {
            "off" => Ok(None),
            text => text
                .parse()
                .map(Some)
                .map_err(|_| format!("{text:?} is not an address with a port; write one such as 127.0.0.1:9464, or `off`")),
        })?,
        grants: file.grants.clone(),
        file: file.path.clone(),
        file_is_manifest: false,
        json: false,
    };
    Ok(with_groups(config, &file.groups))
}

/// What is said about workers or queues above the file replaces the file's groups whole.
fn with_groups(config: Config, groups: &[(Group, Origin)]) -> Config {
    let above = |origin: &Origin| matches!(origin, Origin::Env(_) | Origin::Flag(_));
    let Some((_, origin)) = groups.first() else { return config };
    if above(&config.workers.origin) || above(&config.queues.origin) {
        return config;
    }
    let mut queues: Vec<String> = Vec::new();
    for queue in groups.iter().flat_map(|(group, _)| &group.queues) {
        if !queues.contains(queue) {
            queues.push(queue.clone());
        }
    }
    Config {
        workers: Setting { value: groups.iter().map(|(group, _)| group.count).sum(), origin: origin.clone() },
        queues: Setting { value: queues, origin: origin.clone() },
        groups: groups.to_vec(),
        ..config
    }
}

fn database_config(layers: &Layers<'_>, flags: &DatabaseArgs) -> Result<DatabaseConfig, String> {
    // Without `..`, so that a new flag cannot be forgotten here.
    let DatabaseArgs {
        database_url,
        database_schema,
        database_pool,
        database_sslmode,
        database_root_cert,
        database_client_cert,
        database_client_key,
        database_password_file,
        database_password_command,
        database_listen_url,
        database_statements,
        database_locks,
    } = flags;
    let text = |text: &str| Ok(text.to_owned());
    let config = DatabaseConfig {
        url: layers.file.anchored_url(layers.get(
            "database.url",
            "WARP_DATABASE_URL",
            Some(("--database-url", database_url.as_deref())),
            "sqlite:warp.db".to_owned(),
            text,
        )?),
        schema: layers.get(
            "database.schema",
            "WARP_DATABASE_SCHEMA",
            Some(("--database-schema", database_schema.as_deref())),
            "warp".to_owned(),
            schema_name,
        )?,
        pool: layers.get(
            "database.pool",
            "WARP_DATABASE_POOL",
            Some(("--database-pool", database_pool.as_deref())),
            DEFAULT_POOL,
            |text| at_most(text, 1, 100),
        )?,
        sslmode: layers.get(
            "database.sslmode",
            "WARP_DATABASE_SSLMODE",
            Some(("--database-sslmode", database_sslmode.as_deref())),
            None,
            |text| {
                let known = ["disable", "prefer", "require", "verify-ca", "verify-full"];
                if known.contains(&text) {
                    return Ok(Some(text.to_owned()));
                }
                Err(format!("{text:?} is not a mode; there are {}", known.join(", ")))
            },
        )?,
        root_cert: layers.file_name(
            "database.root_cert",
            "WARP_DATABASE_ROOT_CERT",
            ("--database-root-cert", database_root_cert.as_deref()),
        )?,
        client_cert: layers.file_name(
            "database.client_cert",
            "WARP_DATABASE_CLIENT_CERT",
            ("--database-client-cert", database_client_cert.as_deref()),
        )?,
        client_key: layers.file_name(
            "database.client_key",
            "WARP_DATABASE_CLIENT_KEY",
            ("--database-client-key", database_client_key.as_deref()),
        )?,
        password_file: layers.file_name(
            "database.password_file",
            "WARP_DATABASE_PASSWORD_FILE",
            ("--database-password-file", database_password_file.as_deref()),
        )?,
        password_command: layers.get(
            "database.password_command",
            "WARP_DATABASE_PASSWORD_COMMAND",
            Some(("--database-password-command", database_password_command.as_deref())),
            None,
            |text| match text.trim() {
                "" => Err("a command must not be empty".to_owned()),
                _ => Ok(Some(text.to_owned())),
            },
        )?,
        listen_url: layers.get(
            "database.listen_url",
            "WARP_DATABASE_LISTEN_URL",
            Some(("--database-listen-url", database_listen_url.as_deref())),
            None,
            |url| Ok(Some(url.to_owned())),
        )?,
        statements: layers.get(
            "database.statements",
            "WARP_DATABASE_STATEMENTS",
            Some(("--database-statements", database_statements.as_deref())),
            Statements::Auto,
            |text| match text {
                "auto" => Ok(Statements::Auto),
                "prepared" => Ok(Statements::Prepared),
                "simple" => Ok(Statements::Simple),
                other => Err(format!("{other:?} is no way to send statements; write `auto`, `prepared` or `simple`")),
            },
        )?,
        locks: layers.get(
            "database.locks",
            "WARP_DATABASE_LOCKS",
            Some(("--database-locks", database_locks.as_deref())),
            None,
            |text| args::locks(text).map(Some),
        )?,
    };
    let (file, command) = (&config.password_file, &config.password_command);
    if file.value.is_some() && command.value.is_some() {
        return Err(format!("{}: the password comes from a file, and by {} from a command; keep one of them", file.origin, command.origin));
    }
    let (cert, key) = (&config.client_cert, &config.client_key);
    if cert.value.is_some() != key.value.is_some() {
        let (given, missing) =
            if cert.value.is_some() { (&cert.origin, "database.client_key") } else { (&key.origin, "database.client_cert") };
        return Err(format!("{given}: a client's certificate and its key belong together; set {missing} as well"));
    }
    Ok(config)
}

/// A name that needs no quotes in SQL, since it stands in every statement.
fn schema_name(text: &str) -> Result<String, String> {
    let starts = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let goes_on = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !starts || !goes_on || text.len() > 48 || text == "public" || text.starts_with("pg_") {
        return Err(format!(
            "{text:?} is not a schema's name; write at most 48 lower case letters, digits and _, not `public` and not beginning with pg_"
        ));
    }
    Ok(text.to_owned())
}

const MOST_WORKERS: u32 = 1024;
/// Enough for one exchange, one renewal and what guests and operators ask beside them.
const DEFAULT_POOL: u32 = 5;
const SHORTEST_LEASE: Duration = Duration::from_secs(6);

fn span(text: &str) -> Result<Duration, String> {
    units::parse_duration(text).map_err(|error| error.to_string())
}

fn at_most(text: &str, least: u32, most: u32) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{text:?} is not a number from {least} to {most}")),
    }
}

fn queue_names(text: &str) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    for name in text.split(',').map(str::trim) {
        warp_store::codec::check_name("queue", name)?;
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// The layers above the default, and how one value is looked up in them.
struct Layers<'a> {
    file: &'a File,
    env: &'a dyn Fn(&str) -> Option<String>,
}

impl Layers<'_> {
    fn get<T>(
        &self,
        key: &str,
        env: &'static str,
        flag: Option<(&'static str, Option<&str>)>,
        default: T,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Setting<T>, String> {
        let (text, origin) = if let Some((name, Some(text))) = flag {
            (text.to_owned(), Origin::Flag(name))
        } else if let Some(text) = (self.env)(env) {
            (text, Origin::Env(env))
        } else if let Some((text, line)) = self.file.values.get(key) {
            (text.clone(), Origin::File { path: self.file.path.clone(), line: *line })
        } else {
            return Ok(Setting { value: default, origin: Origin::Default });
        };
        let value = read(&text).map_err(|why| match &origin {
            Origin::File { .. } => format!("{origin}: {key}: {why}"),
            _ => format!("{origin}: {why}"),
        })?;
        Ok(Setting { value, origin })
    }

    fn path(&self, key: &str, env: &'static str, flag: (&'static str, Option<&str>), default: &str) -> Result<Setting<PathBuf>, String> {
        let mut setting = self.get(key, env, Some(flag), PathBuf::from(default), |text| match text {
            "" => Err("a path must not be empty".to_owned()),
            text => Ok(PathBuf::from(text)),
        })?;
        if matches!(setting.origin, Origin::File { .. }) {
            setting.value = beside(&self.file.path, &setting.value);
        }
        Ok(setting)
    }

    /// A file that need not be named.
    fn file_name(
        &self,
        key: &str,
        env: &'static str,
        (name, flag): (&'static str, Option<&Path>),
    ) -> Result<Setting<Option<PathBuf>>, String> {
        let flag = flag.map(|path| path.to_string_lossy().into_owned());
        let Setting { value, origin } = self.path(key, env, (name, flag.as_deref()), "")?;
        Ok(Setting { value: (origin != Origin::Default).then_some(value), origin })
    }
}

/// The kinds of values in the file.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    Number,
    Texts,
    Retry,
    Timeout,
}

/// Every key that the file may have, tables written with dots. `grant.<plugin>` is beside these.
const KEYS: [(&str, Kind); 27] = [
    ("database.url", Kind::Text),
    ("database.schema", Kind::Text),
    ("database.pool", Kind::Number),
    ("database.sslmode", Kind::Text),
    ("database.root_cert", Kind::Text),
    ("database.client_cert", Kind::Text),
    ("database.client_key", Kind::Text),
    ("database.password_file", Kind::Text),
    ("database.password_command", Kind::Text),
    ("database.listen_url", Kind::Text),
    ("database.statements", Kind::Text),
    ("database.locks", Kind::Text),
    ("plugins", Kind::Text),
    ("cache", Kind::Text),
    ("workers", Kind::Number),
    ("queues", Kind::Texts),
    ("prefetch", Kind::Number),
    ("grace", Kind::Text),
    ("lease", Kind::Text),
    ("retention.completed", Kind::Text),
    ("retention.deleted", Kind::Text),
    ("retention.failed", Kind::Text),
    ("defaults.retry", Kind::Retry),
    ("defaults.timeout", Kind::Timeout),
    ("log.level", Kind::Text),
    ("log.format", Kind::Text),
    ("http", Kind::Text),
];
const TABLES: [&str; 5] = ["database", "retention", "defaults", "log", "grant"];

/// The file, read: each value in the text form of its flag, with its line.
struct File {
    path: PathBuf,
    values: BTreeMap<&'static str, (String, usize)>,
    groups: Vec<(Group, Origin)>,
    grants: BTreeMap<String, (Grant, Origin)>,
}

impl File {
    fn parse(path: &Path, text: &str) -> Result<File, String> {
        let document = Document::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            format!("{}:{line}: {}", path.display(), error.message())
        })?;
        let mut file = File { path: path.to_owned(), values: BTreeMap::new(), groups: Vec::new(), grants: BTreeMap::new() };
        file.read_table(text, "", document.as_table())?;
        if let (Some((_, line)), false) = (file.values.get("queues"), file.groups.is_empty()) {
            return Err(format!("{}:{line}: queues: each group of [[workers]] names its own; remove this one", path.display()));
        }
        Ok(file)
    }

    fn read_table(&mut self, text: &str, prefix: &str, table: &Table) -> Result<(), String> {
        for (name, item) in table.iter() {
            let key = table.key(name);
            let start = key.and_then(|key| key.span()).or_else(|| item.span()).map_or(0, |span| span.start);
            let line = line_of(text, start);
            let here = format!("{}:{line}", self.path.display());
            let full = format!("{prefix}{name}");
            if prefix.is_empty() && TABLES.contains(&name) {
                let inner = as_table(item).ok_or_else(|| format!("{here}: {name} must be a table"))?;
                if name == "grant" {
                    self.read_grants(text, &inner, line)?;
                } else {
                    self.read_table(text, &format!("{name}."), &inner)?;
                }
                continue;
            }
            if let ("workers", Item::ArrayOfTables(tables)) = (full.as_str(), item) {
                self.read_groups(text, tables)?;
                continue;
            }
            let Some((known, kind)) = KEYS.iter().find(|(known, _)| *known == full) else {
                return Err(match nearest(&full) {
                    Some(nearest) => format!("{here}: unknown key `{full}`; the nearest that exists is `{nearest}`"),
                    None => {
                        let names: Vec<_> = KEYS.iter().map(|(name, _)| *name).collect();
                        format!("{here}: unknown key `{full}`; there are {} and `[grant.PLUGIN]`", names.join(", "))
                    }
                });
            };
            let value = item.as_value().ok_or_else(|| format!("{here}: {full} must be a value, not a table"))?;
            let text = value_text(*kind, value).map_err(|why| format!("{here}: {full}: {why}"))?;
            self.values.insert(known, (text, line));
        }
        Ok(())
    }

    fn read_groups(&mut self, text: &str, tables: &toml_edit::ArrayOfTables) -> Result<(), String> {
        for table in tables {
            let line = line_of(text, table.span().map_or(0, |span| span.start));
            let here = format!("{}:{line}: [[workers]]", self.path.display());
            let group = group(table).map_err(|why| format!("{here}: {why}"))?;
            if self.groups.iter().any(|(known, _)| known.name == group.name) {
                return Err(format!("{here}: there is a group {:?} already", group.name));
            }
            self.groups.push((group, Origin::File { path: self.path.clone(), line }));
        }
        let workers: u32 = self.groups.iter().map(|(group, _)| group.count).sum();
        if workers > MOST_WORKERS {
            return Err(format!("{}: [[workers]]: {workers} workers in all; {MOST_WORKERS} are allowed", self.path.display()));
        }
        Ok(())
    }

    fn read_grants(&mut self, text: &str, table: &Table, table_line: usize) -> Result<(), String> {
        let grants = grants::read(text).map_err(|(at, why)| format!("{}:{}: {why}", self.path.display(), line_of(text, at)))?;
        for (plugin, grant) in grants {
            let line = table.key(&plugin).and_then(|key| key.span()).map_or(table_line, |span| line_of(text, span.start));
            self.grants.insert(plugin, (grant, Origin::File { path: self.path.clone(), line }));
        }
        Ok(())
    }

    /// A relative SQLite path of the file is relative to the file.
    fn anchored_url(&self, url: Setting<String>) -> Setting<String> {
        let from_file = matches!(url.origin, Origin::File { .. });
        match url.value.strip_prefix("sqlite:") {
            Some(path) if from_file => Setting { value: format!("sqlite:{}", beside(&self.path, Path::new(path)).display()), ..url },
            _ => url,
        }
    }
}

fn beside(file: &Path, path: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.join(path),
        _ => path.to_owned(),
    }
}

/// A table however it was written: `[a]`, `a.b = …` or `a = { … }`.
fn as_table(item: &Item) -> Option<Table> {
    match item {
        Item::Table(table) => Some(table.clone()),
        Item::Value(Value::InlineTable(table)) => Some(table.clone().into_table()),
        _ => None,
    }
}

/// A value of the file in the text form that flag and environment have too.
fn value_text(kind: Kind, value: &Value) -> Result<String, String> {
    match (kind, value) {
        (Kind::Text | Kind::Retry | Kind::Timeout, Value::String(text)) => Ok(text.value().clone()),
        (Kind::Number, Value::Integer(number)) => Ok(number.value().to_string()),
        (Kind::Texts, Value::Array(items)) => {
            let texts: Option<Vec<_>> = items.iter().map(Value::as_str).collect();
            match texts {
                Some(texts) if texts.iter().any(|text| text.contains(',')) => Err("a name must not contain a comma".to_owned()),
                Some(texts) => Ok(texts.join(",")),
                None => Err("every element must be text".to_owned()),
            }
        }
        (Kind::Retry, Value::InlineTable(table)) => retry_table(table),
        (Kind::Timeout, Value::InlineTable(table)) => timeout_table(table),
        (Kind::Text, _) => Err("must be text in quotes".to_owned()),
        (Kind::Number, _) => Err("must be a whole number without quotes".to_owned()),
        (Kind::Texts, _) => Err("must be a list of texts, such as [\"default\", \"reports\"]".to_owned()),
        (Kind::Retry, _) => Err("write { max = 3, delays = [\"15s\", \"1m\"], jitter = 0.1 }".to_owned()),
        (Kind::Timeout, _) => Err("write { per_attempt = \"30s\", mode = \"fail\" }".to_owned()),
    }
}

/// `name = "reports"`, `queues = ["reports"]`, `count = 2`.
fn group(table: &Table) -> Result<Group, String> {
    let (mut name, mut queues, mut count) = (None, None, None);
    for (key, item) in table.iter() {
        let value = item.as_value().ok_or_else(|| format!("`{key}` must be a value, not a table"))?;
        let in_words = |why: String| format!("{key}: {why}");
        match key {
            "name" => name = Some(value_text(Kind::Text, value).map_err(in_words)?),
            "queues" => queues = Some(value_text(Kind::Texts, value).and_then(|text| queue_names(&text)).map_err(in_words)?),
            "count" => {
                count = Some(value_text(Kind::Number, value).and_then(|text| at_most(&text, 1, MOST_WORKERS)).map_err(in_words)?);
            }
            other => return Err(format!("unknown key `{other}`; a group has name, queues and count")),
        }
    }
    let name = name.filter(|name| !name.is_empty()).ok_or("a group needs `name`")?;
    Ok(Group { name, queues: queues.ok_or("a group needs `queues`")?, count: count.ok_or("a group needs `count`")? })
}

/// `{ max = 3, delays = ["15s"], jitter = 0.1 }`, as in a manifest, as `3:15s~0.1`.
fn retry_table(table: &toml_edit::InlineTable) -> Result<String, String> {
    let (mut max, mut delays, mut jitter) = (None, String::new(), String::new());
    for (name, value) in table.iter() {
        match (name, value) {
            ("max", Value::Integer(number)) => max = Some(number.value().to_string()),
            ("delays", Value::Array(_)) => delays = format!(":{}", value_text(Kind::Texts, value)?),
            ("jitter", Value::Float(number)) => jitter = format!("~{}", number.value()),
            ("jitter", Value::Integer(number)) => jitter = format!("~{}", number.value()),
            ("max" | "delays" | "jitter", _) => return Err(format!("`{name}` has the wrong type")),
            (other, _) => return Err(format!("unknown key `{other}`; a retry has max, delays and jitter")),
        }
    }
    let max = max.ok_or("a retry needs `max`")?;
    Ok(format!("{max}{}{jitter}", if delays == ":" { "" } else { &delays }))
}

/// `{ per_attempt = "30s", mode = "fail" }`, as in a manifest, as `30s:fail`.
fn timeout_table(table: &toml_edit::InlineTable) -> Result<String, String> {
    let (mut span, mut mode) = (None, "fail");
    for (name, value) in table.iter() {
        match (name, value) {
            ("per_attempt", Value::String(text)) => span = Some(text.value().as_str()),
            ("mode", Value::String(text)) => mode = text.value(),
            ("per_attempt" | "mode", _) => return Err(format!("`{name}` must be text in quotes")),
            (other, _) => return Err(format!("unknown key `{other}`; a timeout has per_attempt and mode")),
        }
    }
    Ok(format!("{}:{mode}", span.ok_or("a timeout needs `per_attempt`")?))
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// The known key that was probably meant, if one is near enough.
fn nearest(unknown: &str) -> Option<&'static str> {
    let most = (unknown.chars().count() / 3).clamp(1, 3);
    let names = KEYS.iter().map(|(name, _)| *name).chain(["grant"]);
    names.map(|name| (edits(unknown, name), name)).filter(|(edits, _)| *edits <= most).min().map(|(_, name)| name)
}

/// Levenshtein's distance.
pub fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const FULL: &str = r#"workers = 3
queues = ["a", "b"]
plugins = "/srv/plugins"
http = "127.0.0.1:9464"

[database]
url = "postgres://ada:secret@db/jobs?sslpassword=hidden&sslrootcert=a.pem"
schema = "jobs"
pool = 8
sslmode = "verify-full"
root_cert = "ca.pem"
client_cert = "ada.pem"
client_key = "/keys/ada.key"
password_command = "vault read --token=hidden"
listen_url = "postgres://ada:secret@db:5432/jobs"
statements = "simple"
locks = "session"

[retention]
completed = "7d"
failed = "forever"

[defaults]
retry = { max = 3, delays = ["15s", "1m"], jitter = 0.1 }
timeout = { per_attempt = "5m" }

[log]
level = "debug"

[grant.thumbnail]
files = { in = { host = "./photos", mode = "read" } }
"#;

    fn resolved(file: &str, env: &[(&str, &str)], flags: &[&str]) -> Result<Config, String> {
        let file = File::parse(Path::new("conf/warp.toml"), file)?;
        let cli = Cli::parse_from(["warp-host", "run"].iter().chain(flags));
        let Command::Run(run) = &cli.command else { unreachable!("the command is run") };
        let env = |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        resolve(&file, run, run.plugins.as_deref(), &cli.database, &Outside { env: &env, cores: 1 })
    }

    fn table(config: &Config) -> String {
        config.rows().iter().map(|(name, value, origin)| format!("{name:<26} {value:<50} {origin}\n")).collect()
    }

    #[test]
    fn defaults() {
        insta::assert_snapshot!(table(&resolved("", &[], &[]).expect("nothing to refuse")));
    }

    #[test]
    fn a_full_file_with_its_lines() {
        insta::assert_snapshot!(table(&resolved(FULL, &[], &[]).expect("a good file")));
    }

    /// Every setting, at every layer that it has: the layer above must win, and say so.
    #[test]
    fn a_flag_outranks_the_environment_and_that_outranks_the_file() {
        let cases = [
            ("workers", "workers = 3", "WARP_WORKERS", "4", "--workers", "5"),
            ("prefetch", "prefetch = 3", "WARP_PREFETCH", "4", "--prefetch", "5"),
            ("plugins", "plugins = '/file'", "WARP_PLUGINS", "/env", "--plugins", "/flag"),
            ("cache", "cache = '/file'", "WARP_CACHE", "/env", "--cache", "/flag"),
            ("queues", "queues = ['file']", "WARP_QUEUES", "env", "--queues", "flag"),
            ("grace", "grace = '7s'", "WARP_GRACE", "8s", "--grace", "9s"),
            ("lease", "lease = '7s'", "WARP_LEASE", "8s", "--lease", "9s"),
            ("log.level", "log.level = 'file'", "WARP_LOG", "env", "--log-level", "flag"),
            ("http", "http = '127.0.0.1:1'", "WARP_HTTP", "127.0.0.1:2", "--http", "127.0.0.1:3"),
            ("database.url", "database.url = 'sqlite:/file'", "WARP_DATABASE_URL", "sqlite:/env", "--database-url", "sqlite:/flag"),
            ("database.schema", "database.schema = 'file'", "WARP_DATABASE_SCHEMA", "env", "--database-schema", "flag"),
            ("database.pool", "database.pool = 7", "WARP_DATABASE_POOL", "8", "--database-pool", "9"),
            ("database.sslmode", "database.sslmode = 'disable'", "WARP_DATABASE_SSLMODE", "require", "--database-sslmode", "verify-ca"),
            ("database.root_cert", "database.root_cert = '/file'", "WARP_DATABASE_ROOT_CERT", "/env", "--database-root-cert", "/flag"),
            (
                "database.password_file",
                "database.password_file = '/file'",
                "WARP_DATABASE_PASSWORD_FILE",
                "/env",
                "--database-password-file",
                "/flag",
            ),
            (
                "database.password_command",
                "database.password_command = 'file'",
                "WARP_DATABASE_PASSWORD_COMMAND",
                "env …",
                "--database-password-command",
                "flag …",
            ),
            (
                "database.listen_url",
                "database.listen_url = 'postgres://file'",
                "WARP_DATABASE_LISTEN_URL",
                "postgres://env",
                "--database-listen-url",
                "postgres://flag",
            ),
            (
                "database.statements",
                "database.statements = 'prepared'",
                "WARP_DATABASE_STATEMENTS",
                "simple",
                "--database-statements",
                "prepared",
            ),
            ("database.locks", "database.locks = 'ledger'", "WARP_DATABASE_LOCKS", "session", "--database-locks", "ledger"),
        ];
        for (name, file, env, env_value, flag, flag_value) in cases {
            let row = |file: &str, env: &[(&str, &str)], flags: &[&str]| {
                let config = resolved(file, env, flags).expect("good values");
                let (_, value, origin) = config.rows().into_iter().find(|(known, ..)| known == name).expect("a known setting");
                (value, origin)
            };
            let (default, origin) = row("", &[], &[]);
            assert_eq!(origin, "default", "{name}");
            let (from_file, origin) = row(file, &[], &[]);
            assert_eq!(origin, "conf/warp.toml:1", "{name}");
            assert_ne!(from_file, default, "{name}");
            assert_eq!(row(file, &[(env, env_value)], &[]), (env_value.to_owned(), env.to_owned()));
            assert_eq!(row(file, &[(env, env_value)], &[flag, flag_value]), (flag_value.to_owned(), flag.to_owned()));
        }
    }

    #[test]
    fn paths_of_the_file_are_beside_it() {
        let config = resolved("plugins = 'p'\ndatabase = { url = 'sqlite:j.db', root_cert = 'ca.pem' }", &[], &[]).expect("a good file");
        assert_eq!(config.plugins.value, Path::new("conf/p"));
        assert_eq!(config.database.url.value, "sqlite:conf/j.db");
        assert_eq!(config.database.root_cert.value.as_deref(), Some(Path::new("conf/ca.pem")));
        let absolute = resolved("plugins = '/p'", &[], &[]).expect("a good file");
        assert_eq!(absolute.plugins.value, Path::new("/p"));
        let config = resolved("", &[("WARP_PLUGINS", "p")], &[]).expect("a good variable");
        assert_eq!(config.plugins.value, Path::new("p"));
    }

    #[test]
    fn groups_of_workers_have_queues_of_their_own_until_somebody_says_otherwise() {
        let file = "[[workers]]\nname = 'fast'\nqueues = ['mail', 'default']\ncount = 6\n\n[[workers]]\nname = 'slow'\nqueues = ['reports', 'mail']\ncount = 2\n";
        let config = resolved(file, &[], &[]).expect("good groups");
        let group = |name: &str, queues: &[&str], count| Group {
            name: name.to_owned(),
            queues: queues.iter().map(|queue| (*queue).to_owned()).collect(),
            count,
        };
        let groups: Vec<_> = config.groups.iter().map(|(group, _)| group.clone()).collect();
        assert_eq!(groups, [group("fast", &["mail", "default"], 6), group("slow", &["reports", "mail"], 2)]);
        assert_eq!((config.workers.value, config.queues.value.join(",").as_str()), (8, "mail,default,reports"));
        let rows = table(&config);
        assert!(rows.contains("workers.slow               2 for reports,mail                                 conf/warp.toml:6"), "{rows}");
        for (env, flags) in [(&[("WARP_WORKERS", "3")][..], &[][..]), (&[], &["--queues", "default"])] {
            let config = resolved(file, env, flags).expect("good values");
            assert!(config.groups.is_empty(), "what is above the file replaces its groups");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let file = |text: &str| resolved(text, &[], &[]).expect_err(text);
        let cases = [
            ("worker = 3", "conf/warp.toml:1: unknown key `worker`; the nearest that exists is `workers`"),
            (
                "\n[retention]\ncomplete = '1d'",
                "conf/warp.toml:3: unknown key `retention.complete`; the nearest that exists is `retention.completed`",
            ),
            (
                "log.color = true",
                "conf/warp.toml:1: unknown key `log.color`; there are database.url, database.schema, database.pool, database.sslmode, \
                 database.root_cert, database.client_cert, database.client_key, database.password_file, database.password_command, \
                 database.listen_url, database.statements, database.locks, plugins, cache, workers, queues, prefetch, grace, lease, \
                 retention.completed, retention.deleted, retention.failed, defaults.retry, defaults.timeout, log.level, log.format, \
                 http and `[grant.PLUGIN]`",
            ),
            ("retention.delete = '1d'", "conf/warp.toml:1: unknown key `retention.delete`; the nearest that exists is `retention.deleted`"),
            ("workers = '3'", "conf/warp.toml:1: workers: must be a whole number without quotes"),
            ("workers = 0", "conf/warp.toml:1: workers: \"0\" is not a number from 1 to 1024"),
            (
                "\ngrace = '30'",
                "conf/warp.toml:2: grace: `30` is not a duration; write a whole number and a unit, such as `250ms`, `30s`, `5m`, `2h` or `1d`",
            ),
            ("grace = 30", "conf/warp.toml:1: grace: must be text in quotes"),
            ("lease = '5s'", "conf/warp.toml:1: lease: a lease of 5s is too short; 6s is the least"),
            ("queues = 'a'", "conf/warp.toml:1: queues: must be a list of texts, such as [\"default\", \"reports\"]"),
            ("queues = []", "conf/warp.toml:1: queues: the queue is empty"),
            ("log = 3", "conf/warp.toml:1: log must be a table"),
            ("log.format = 'xml'", "conf/warp.toml:1: log.format: \"xml\" is not a log format; write `text` or `json`"),
            ("defaults.retry = { delays = ['1s'] }", "conf/warp.toml:1: defaults.retry: a retry needs `max`"),
            (
                "defaults.retry = { max = 1, backoff = 2 }",
                "conf/warp.toml:1: defaults.retry: unknown key `backoff`; a retry has max, delays and jitter",
            ),
            ("a = 1\na = 2", "conf/warp.toml:2: duplicate key"),
            ("\n[[workers]]\nname = 'a'\ncount = 1", "conf/warp.toml:2: [[workers]]: a group needs `queues`"),
            ("[[workers]]\nqueues = ['a']\ncount = 1", "conf/warp.toml:1: [[workers]]: a group needs `name`"),
            (
                "[[workers]]\nname = 'a'\nqueues = ['a']\ncount = 0",
                "conf/warp.toml:1: [[workers]]: count: \"0\" is not a number from 1 to 1024",
            ),
            ("[[workers]]\nqueue = 'a'", "conf/warp.toml:1: [[workers]]: unknown key `queue`; a group has name, queues and count"),
            (
                "queues = ['b']\n[[workers]]\nname = 'a'\nqueues = ['a']\ncount = 1",
                "conf/warp.toml:1: queues: each group of [[workers]] names its own; remove this one",
            ),
            ("database_url = 'x'", "conf/warp.toml:1: unknown key `database_url`; the nearest that exists is `database.url`"),
            ("http = ':80'", "conf/warp.toml:1: http: \":80\" is not an address with a port; write one such as 127.0.0.1:9464, or `off`"),
            (
                "database.schema = 'War p'",
                "conf/warp.toml:1: database.schema: \"War p\" is not a schema's name; write at most 48 lower case letters, digits and _, not \
                 `public` and not beginning with pg_",
            ),
            ("database.pool = 0", "conf/warp.toml:1: database.pool: \"0\" is not a number from 1 to 100"),
            (
                "database.sslmode = 'on'",
                "conf/warp.toml:1: database.sslmode: \"on\" is not a mode; there are disable, prefer, require, verify-ca, verify-full",
            ),
            (
                "database.locks = 'rows'",
                "conf/warp.toml:1: database.locks: \"rows\" is not what slots can be made of; write `ledger` or `session`",
            ),
            (
                "[database]\npassword_file = 'a'\npassword_command = 'b'",
                "conf/warp.toml:2: the password comes from a file, and by conf/warp.toml:3 from a command; keep one of them",
            ),
            (
                "database.client_key = 'a'",
                "conf/warp.toml:1: a client's certificate and its key belong together; set database.client_cert as well",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(file(text), expected);
        }
        assert!(file("workers = ").starts_with("conf/warp.toml:1: "));
        assert!(file("\n\n[grant.pay]\nnetwork = true").starts_with("conf/warp.toml:4: unknown field `network`"));
        let env = resolved("", &[("WARP_WORKERS", "many")], &[]).expect_err("no number");
        assert_eq!(env, "WARP_WORKERS: \"many\" is not a number from 1 to 1024");
        let flag = resolved("", &[], &["--grace", "soon"]).expect_err("no duration");
        assert!(flag.starts_with("--grace: `soon` is not a duration"), "{flag}");
    }

    #[test]
    fn passwords_are_not_printed() {
        assert_eq!(without_password("postgres://ada:secret@db/jobs"), "postgres://ada:***@db/jobs");
        assert_eq!(without_password("postgres://ada@db/jobs"), "postgres://ada@db/jobs");
        assert_eq!(without_password("sqlite:a@b.db"), "sqlite:a@b.db");
        assert_eq!(without_password("postgres://ada:p@ss@db/jobs"), "postgres://ada:***@db/jobs");
        assert_eq!(
            without_password("postgres://db/jobs?user=ada&password=secret&sslpassword=more&sslmode=require"),
            "postgres://db/jobs?user=ada&password=***&sslpassword=***&sslmode=require"
        );
        // Nothing of what stands behind the `@` of a parameter is taken for an address.
        assert_eq!(without_password("postgres://ada:secret@db/jobs?options=a@b"), "postgres://ada:***@db/jobs?options=a@b");
        assert_eq!(without_password("postgres://ada:sec?ret@db/jobs"), "postgres://ada:***");
        assert_eq!(without_password("postgres://db:5432/jobs?options=a@b"), "postgres://db:5432/jobs?options=a@b");
        let settings = table(&resolved(FULL, &[], &[]).expect("a good file"));
        assert!(!settings.contains("secret") && !settings.contains("hidden"), "{settings}");
    }

    #[test]
    fn distances() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("abc", "abc"), 0);
    }
}
