//! How to reach the database: one configuration for the work pool, the lock connection and the LISTEN connection.
//!
//! What must stay true: a password never stands in a text that this crate shows; every new connection asks its source
//! for the password again, so tokens may rotate.
//!
//! What it deliberately does not do: read the environment itself. What libpq's variables and `~/.pgpass` say, the driver
//! takes for whatever is not given here, as every PostgreSQL program does.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::ConnectOptions as _;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use warp_store::StoreErrorKind;

use crate::error::Fault;

/// PostgreSQL cuts a name of an application after so many bytes.
const MAX_APPLICATION_NAME: usize = 63;
/// The longest name of a schema and of the channel of the same name.
const MAX_SCHEMA_NAME: usize = 63;
/// How long a `password_command` may take.
const PASSWORD_COMMAND_PATIENCE: Duration = Duration::from_secs(10);

/// How statements are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StatementMode {
    /// Found out when the store is opened: prepared where two clients have sessions of their own, else simple.
    #[default]
    Auto,
    /// Prepared statements with binary parameters. Needs a session: a direct connection or a session-mode pooler.
    Prepared,
    /// Simple queries with literals. Works through every pooler.
    Simple,
}

/// How to reach the database.
#[derive(Clone)]
pub struct ConnectSettings {
    /// `postgres://user@host:port/database?…`, or libpq's `host=… dbname=…`.
    pub url: String,
    /// The schema that the tables live in.
    pub schema: String,
    /// Replaces the `sslmode` of the address: `disable`, `prefer`, `require`, `verify-ca`, `verify-full`.
    pub ssl_mode: Option<String>,
    /// A file with root certificates to trust besides those of the system. With `require` it means `verify-ca`, as in libpq.
    pub ssl_root_cert: Option<PathBuf>,
    /// A file with this client's certificate.
    pub ssl_cert: Option<PathBuf>,
    /// A file with its key.
    pub ssl_key: Option<PathBuf>,
    /// A file with the password, alone or in the form of `.pgpass`; read for every new connection.
    pub password_file: Option<PathBuf>,
    /// A shell command whose output's first line is the password; run for every new connection.
    pub password_command: Option<String>,
    /// The most connections that work uses at once.
    pub pool: u32,
    /// Another address for LISTEN, where `url` is behind a pooler in transaction mode.
    pub listen_url: Option<String>,
    /// What the server shows for these connections.
    pub application_name: String,
    /// The longest time that one statement may take. Afterwards its connection is closed.
    pub statement_timeout: Duration,
    /// The longest time to get a connection.
    pub connect_timeout: Duration,
    /// After so long without work a connection is given back.
    pub idle_timeout: Duration,
    /// How statements are sent.
    pub mode: StatementMode,
}

impl ConnectSettings {
    /// The defaults for an address.
    pub fn new(url: impl Into<String>) -> Self {
        ConnectSettings {
            url: url.into(),
            schema: "warp".to_owned(),
            ssl_mode: None,
            ssl_root_cert: None,
            ssl_cert: None,
            ssl_key: None,
            password_file: None,
            password_command: None,
            pool: 5,
            listen_url: None,
            application_name: "warp-host".to_owned(),
            statement_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            mode: StatementMode::Auto,
        }
    }
}

/// An address and a command may hold a password.
impl fmt::Debug for ConnectSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = Target::new(self, &self.url).map_or_else(|_| "(an address that cannot be read)".to_owned(), |target| target.name);
        f.debug_struct("ConnectSettings")
            .field("database", &target)
            .field("schema", &self.schema)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// What a connection is made with.
#[derive(Clone)]
pub(crate) struct Target {
    options: PgConnectOptions,
    password: PasswordSource,
    application_name: String,
    /// Files that the driver reads for each connection, and what they are.
    files: Vec<(&'static str, PathBuf)>,
    /// The address for people: no password in it.
    pub(crate) name: String,
}

#[derive(Clone)]
enum PasswordSource {
    /// In the address, in the environment or in `~/.pgpass`: the driver has it, or none is needed.
    Driver,
    File(PathBuf),
    Command(String),
}

impl Target {
    /// Reads an address of the settings.
    pub(crate) fn new(settings: &ConnectSettings, url: &str) -> Result<Self, Fault> {
        check_schema_name(&settings.schema)?;
        let mut address = Address::read(url)?;
        let given = |path: &Option<PathBuf>| path.clone();
        address.ssl_mode = settings.ssl_mode.clone().or(address.ssl_mode);
        address.ssl_root_cert = given(&settings.ssl_root_cert).or(address.ssl_root_cert);
        address.ssl_cert = given(&settings.ssl_cert).or(address.ssl_cert);
        address.ssl_key = given(&settings.ssl_key).or(address.ssl_key);
        let password = match (&settings.password_command, settings.password_file.as_ref().or(address.password_file.as_ref())) {
            (Some(_), Some(_)) => return Err(refused("both a password file and a password command are given; keep one")),
            (Some(command), None) => PasswordSource::Command(command.clone()),
            (None, Some(file)) => PasswordSource::File(file.clone()),
            (None, None) => PasswordSource::Driver,
        };
        let files = [
            ("the root certificate (sslrootcert, `root_cert`)", &address.ssl_root_cert),
            ("the client's certificate (sslcert, `client_cert`)", &address.ssl_cert),
            ("the client's key (sslkey, `client_key`)", &address.ssl_key),
        ];
        let files = files.into_iter().filter_map(|(what, path)| Some((what, path.clone()?))).collect();
        let options = address.into_options()?;
        let name = name_of(&options);
        Ok(Target { options, password, application_name: settings.application_name.clone(), files, name })
    }

    /// Files that the driver reads for each connection, and what they are.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.files.iter().map(|(what, path)| (*what, path.as_path()))
    }

    /// The options for one new connection, with the password of this moment. `suffix` tells this host's kinds of
    /// connections apart (`:warp-locks`). Dropped, it leaves nothing behind; a command that runs is killed.
    pub(crate) async fn options(&self, suffix: &str) -> Result<PgConnectOptions, Fault> {
        let options = self.options.clone().application_name(&application_name(&self.application_name, suffix));
        match &self.password {
            PasswordSource::Driver => Ok(options),
            PasswordSource::File(path) => {
                let text = tokio::fs::read_to_string(path).await.map_err(|error| {
                    unavailable(format!("the password file {} cannot be read ({error}); check its path and rights", path.display()))
                })?;
                match self.password_in(&text) {
                    Some(password) => Ok(options.password(&password)),
                    None => Err(unavailable(format!("the password file {} has no password for {}", path.display(), self.name))),
                }
            }
            PasswordSource::Command(command) => Ok(options.password(&run_password_command(command).await?)),
        }
    }

    /// Whether it names this machine.
    pub(crate) fn is_local(&self) -> bool {
        self.options.get_socket().is_some()
            || matches!(self.options.get_host(), "localhost" | "127.0.0.1" | "::1" | "[::1]")
            || self.options.get_host().starts_with('/')
    }

    /// A file in the form of `.pgpass` is searched; any other is the password itself.
    fn password_in(&self, text: &str) -> Option<String> {
        let lines = || text.lines().map(|line| line.trim_end_matches('\r')).filter(|line| !line.is_empty());
        let entries: Vec<[String; 5]> = lines().filter(|line| !line.starts_with('#')).filter_map(pgpass_fields).collect();
        if entries.is_empty() {
            return lines().next().map(str::to_owned);
        }
        let host = self.options.get_socket().map_or_else(|| self.options.get_host().to_owned(), |path| path.display().to_string());
        let user = self.options.get_username();
        let ours = [host, self.options.get_port().to_string(), self.options.get_database().unwrap_or(user).to_owned(), user.to_owned()];
        entries
            .into_iter()
            .find(|entry| entry.iter().zip(&ours).all(|(given, own)| given == "*" || given == own))
            .map(|[_, _, _, _, password]| password)
    }
}

/// One line of `.pgpass`: `host:port:database:user:password`, with `\:` and `\\`.
fn pgpass_fields(line: &str) -> Option<[String; 5]> {
    let mut fields = vec![String::new()];
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            // The password itself may hold plain colons.
            ':' if fields.len() < 5 => fields.push(String::new()),
            '\\' => fields.last_mut()?.push(chars.next()?),
            c => fields.last_mut()?.push(c),
        }
    }
    let fields: [String; 5] = fields.try_into().ok()?;
    (fields[1] == "*" || fields[1].parse::<u16>().is_ok()).then_some(fields)
}

async fn run_password_command(command: &str) -> Result<String, Fault> {
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let running = tokio::process::Command::new(shell).args([flag, command]).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = match tokio::time::timeout(PASSWORD_COMMAND_PATIENCE, running).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(unavailable(format!("the password command cannot be started ({error})"))),
        Err(_) => {
            let seconds = PASSWORD_COMMAND_PATIENCE.as_secs();
            return Err(unavailable(format!("the password command gave no answer in {seconds} s and was killed")));
        }
    };
    if !output.status.success() {
        let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
        return Err(unavailable(format!("the password command failed ({}): {said}", output.status)));
    }
    let text = String::from_utf8(output.stdout).map_err(|_| unavailable("the password command printed no valid UTF-8".to_owned()))?;
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(password.to_owned()),
        _ => Err(unavailable("the password command printed nothing".to_owned())),
    }
}

/// A schema's name stands unquoted in every statement.
pub(crate) fn check_schema_name(name: &str) -> Result<(), Fault> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let fits = name.len() <= MAX_SCHEMA_NAME && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_') && name.chars().all(plain);
    if fits && !name.starts_with("pg_") && name != "public" {
        return Ok(());
    }
    Err(refused(format!(
        "the schema name {name:?} cannot be used: up to {MAX_SCHEMA_NAME} lower-case letters, digits and _, not `public`, not beginning with `pg_`"
    )))
}

/// The user's name, cut so that the suffix survives.
fn application_name(user: &str, suffix: &str) -> String {
    let room = MAX_APPLICATION_NAME.saturating_sub(suffix.len());
    let end = (0..=room.min(user.len())).rev().find(|at| user.is_char_boundary(*at)).unwrap_or(0);
    format!("{}{suffix}", &user[..end])
}

/// An address in parts: what the driver reads, and what is not left to it.
struct Address {
    /// `postgres://user@host:port/database`, or only `postgres://`.
    front: String,
    /// Further parameters for the driver.
    parameters: String,
    ssl_mode: Option<String>,
    ssl_root_cert: Option<PathBuf>,
    ssl_cert: Option<PathBuf>,
    ssl_key: Option<PathBuf>,
    password_file: Option<PathBuf>,
}

impl Address {
    fn read(url: &str) -> Result<Self, Fault> {
        if url.contains("://") { Self::read_url(url) } else { Self::read_pairs(url) }
    }

    fn new(front: &str) -> Self {
        Address {
            front: front.to_owned(),
            parameters: String::new(),
            ssl_mode: None,
            ssl_root_cert: None,
            ssl_cert: None,
            ssl_key: None,
            password_file: None,
        }
    }

    fn read_url(url: &str) -> Result<Self, Fault> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(refused("the address of the database must begin with postgres:// or be of the form `host=… dbname=…`"));
        }
        let (front, query) = url.split_once('?').unwrap_or((url, ""));
        let mut address = Address::new(front);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            address.set(&decode_percent(name)?, decode_percent(value)?)?;
        }
        Ok(address)
    }

    /// libpq's `name=value` pairs; values may stand in single quotes, with `\'` and `\\`.
    fn read_pairs(text: &str) -> Result<Self, Fault> {
        let mut address = Address::new("postgres://");
        let mut chars = text.chars().peekable();
        loop {
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            if chars.peek().is_none() {
                break;
            }
            let name: String = std::iter::from_fn(|| chars.next_if(|c| *c != '=' && !c.is_whitespace())).collect();
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            if chars.next() != Some('=') {
                // What stands there may be a password with a space in it.
                return Err(refused("the address of the database is not valid: a name without `=`; quote values with spaces"));
            }
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            let quoted = chars.next_if_eq(&'\'').is_some();
            let mut value = String::new();
            loop {
                match chars.next() {
                    Some('\\') => value.extend(chars.next()),
                    Some('\'') if quoted => break,
                    None if quoted => return Err(refused("the address of the database is not valid: a quote is not closed")),
                    None => break,
                    Some(c) if c.is_whitespace() && !quoted => break,
                    Some(c) => value.push(c),
                }
            }
            address.set(&name, value)?;
        }
        Ok(address)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), Fault> {
        match name {
            "sslmode" => self.ssl_mode = Some(value),
            "sslrootcert" => self.ssl_root_cert = Some(value.into()),
            "sslcert" => self.ssl_cert = Some(value.into()),
            "sslkey" => self.ssl_key = Some(value.into()),
            "passfile" => self.password_file = Some(value.into()),
            "host" | "hostaddr" | "port" | "user" | "password" | "dbname" | "options" => {
                let _ = write!(self.parameters, "&{name}={}", encode_percent(&value));
            }
            // The settings name the application and bound the waiting; the rest has no meaning for this driver.
            "application_name"
            | "fallback_application_name"
            | "connect_timeout"
            | "gssencmode"
            | "keepalives"
            | "keepalives_idle"
            | "keepalives_interval"
            | "keepalives_count"
            | "tcp_user_timeout"
            | "sslcompression"
            | "sslnegotiation"
            | "pgbouncer" => {}
            "channel_binding" if value != "require" => {}
            "channel_binding" => {
                tracing::warn!(
                    "channel_binding=require is not supported and is left out; use sslmode=verify-full against a man in the middle"
                );
            }
            "target_session_attrs" if matches!(value.as_str(), "any" | "read-write" | "primary") => {}
            other => {
                return Err(refused(format!(
                    "the address of the database has the parameter {other:?}, which is not supported; leave it out"
                )));
            }
        }
        Ok(())
    }

    fn into_options(self) -> Result<PgConnectOptions, Fault> {
        let Address { front, parameters, ssl_mode, ssl_root_cert, ssl_cert, ssl_key, password_file: _ } = self;
        // The driver's text may repeat the address, and with it the password.
        let options = PgConnectOptions::from_str(&format!("{front}?{parameters}"))
            .map_err(|_| refused("the address of the database is not valid; expected postgres://user@host:port/database, with one host"))?;
        let mut options = options
            // PgBouncer refuses a connection that sets it, and the server's default is exact since version 12.
            .extra_float_digits(None)
            .statement_cache_capacity(256)
            // Simple statements hold payloads.
            .disable_statement_logging();
        if let Some(mode) = ssl_mode {
            options = options.ssl_mode(match mode.as_str() {
                "disable" => PgSslMode::Disable,
                // The driver knows no `allow`; who does not mind either way does not mind an encrypted connection.
                "allow" | "prefer" => PgSslMode::Prefer,
                // A root certificate that is given is checked, as in libpq; the driver alone would not.
                "require" if ssl_root_cert.is_none() => PgSslMode::Require,
                "require" | "verify-ca" => PgSslMode::VerifyCa,
                "verify-full" => PgSslMode::VerifyFull,
                other => {
                    return Err(refused(format!(
                        "sslmode {other:?} is unknown; one of disable, prefer, require, verify-ca, verify-full is expected"
                    )));
                }
            });
        }
        if let Some(path) = ssl_root_cert {
            options = options.ssl_root_cert(path);
        }
        match (ssl_cert, ssl_key) {
            (Some(cert), Some(key)) => options = options.ssl_client_cert(cert).ssl_client_key(key),
            (None, None) => {}
            (Some(_), None) => return Err(refused("a client certificate is given (sslcert) without its key (sslkey)")),
            (None, Some(_)) => return Err(refused("a client key is given (sslkey) without its certificate (sslcert)")),
        }
        Ok(options)
    }
}

fn name_of(options: &PgConnectOptions) -> String {
    let host = options.get_socket().map_or_else(|| options.get_host().to_owned(), |path| path.display().to_string());
    let user = options.get_username();
    format!("postgres://{user}@{host}:{}/{}", options.get_port(), options.get_database().unwrap_or(user))
}

fn encode_percent(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

fn decode_percent(text: &str) -> Result<String, Fault> {
    let broken = || refused("the address of the database is not valid: a % in it is not followed by two hexadecimal digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        match first {
            b'%' => {
                let [high, low, tail @ ..] = rest else { return Err(broken()) };
                let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
                bytes.push(digit(high).zip(digit(low)).map(|(high, low)| high * 16 + low).ok_or_else(broken)?);
                rest = tail;
            }
            byte => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).map_err(|_| refused("the address of the database is not valid UTF-8"))
}

fn refused(text: impl Into<String>) -> Fault {
    Fault::said(StoreErrorKind::Invalid, text)
}

fn unavailable(text: String) -> Fault {
    Fault::said(StoreErrorKind::Unavailable, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, Fault> {
        Target::new(&ConnectSettings::new(url), url)
    }

    fn refusal(url: &str) -> String {
        target(url).map_or_else(|fault| fault.text().to_owned(), |target| panic!("accepted: {}", target.name))
    }

    #[test]
    fn both_forms_of_an_address_mean_the_same_and_show_no_password() {
        for url in [
            "postgres://ada:p%40ss@db.example:6000/jobs?sslmode=require&application_name=x",
            r"host=db.example port=6000 user=ada password='p@ss' dbname = jobs sslmode=require",
            "postgresql://db.example/jobs?user=ada&password=p%40ss&port=6000",
        ] {
            let target = target(url).unwrap_or_else(|fault| panic!("{url}: {}", fault.text()));
            assert_eq!(target.name, "postgres://ada@db.example:6000/jobs");
            assert!(!format!("{:?}", ConnectSettings::new(url)).contains("ss@"), "the password is shown");
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_and_not_repeated() {
        for (url, part) in [
            ("mysql://secret@db/x", "must begin with postgres://"),
            ("postgres://u:secret@a:1,b:2/x", "with one host"),
            ("postgres://db/x?sslmode=very", "sslmode \"very\" is unknown"),
            ("postgres://db/x?target_session_attrs=standby", "target_session_attrs"),
            ("postgres://db/x?sslcert=a", "without its key"),
            ("host=db password='secret", "a quote is not closed"),
            ("host=db password=sec ret", "a name without `=`"),
            ("postgres://db/x?user=%zz", "two hexadecimal digits"),
        ] {
            let text = refusal(url);
            assert!(text.contains(part), "{url}: {text}");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn the_suffix_of_the_application_survives_and_characters_are_not_cut() {
        assert_eq!(application_name("payments", ":warp-locks"), "payments:warp-locks");
        let long = application_name(&"é".repeat(60), ":warp-locks");
        assert!(long.len() <= MAX_APPLICATION_NAME && long.ends_with("é:warp-locks"), "{long}");
    }

    #[test]
    fn a_password_file_may_be_a_pgpass_or_the_password() {
        let target = target("postgres://ada@db:6000/jobs").unwrap_or_else(|fault| panic!("{}", fault.text()));
        for (text, password) in [
            ("secret\n", Some("secret")),
            ("se:cr:et\r\n", Some("se:cr:et")),
            ("# all of ours\nother:*:*:*:no\ndb:6000:*:ada:se\\:c:ret\n", Some("se:c:ret")),
            ("db:6000:jobs:bob:no\n", None),
            ("", None),
        ] {
            assert_eq!(target.password_in(text).as_deref(), password, "{text:?}");
        }
    }

    #[test]
    fn schema_names_that_would_need_quotes_are_refused() {
        for good in ["warp", "jobs_2", "_x"] {
            assert!(check_schema_name(good).is_ok(), "{good}");
        }
        for bad in ["", "Jobs", "a-b", "2x", "pg_x", "public", "a\"b", &"a".repeat(64)] {
            assert!(check_schema_name(bad).is_err(), "{bad}");
        }
    }
}
