//! PgBouncer, the real one.

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, TcpStream},
    path::PathBuf,
};

use rustix::process::Signal;

use crate::{
    Error,
    address::Address,
    installed,
    process::{Home, Server, free_port},
};

/// What a client keeps its server connection for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// As long as it is connected.
    Session,
    /// For one transaction.
    Transaction,
    /// For one statement; a transaction of several is refused.
    Statement,
}

/// What a PgBouncer shall be like. Begin with [`PgBouncer::in_front_of`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PgBouncerSettings {
    server: String,
    settings: Vec<(String, String)>,
    prepared_statements: u32,
}

impl PgBouncerSettings {
    /// `pool_mode`, by default that of a transaction: the one that takes most away.
    pub fn mode(self, mode: PoolMode) -> Self {
        let name = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
            PoolMode::Statement => "statement",
        };
        self.set("pool_mode", name)
    }

    /// `default_pool_size`: connections to the server for each pair of user and database, by default 20.
    pub fn pool_size(self, connections: u32) -> Self {
        self.set("default_pool_size", &connections.to_string())
    }

    /// `max_prepared_statements`, by default 0: clients see no prepared statements of theirs outside session mode. Versions
    /// before 1.21 know no other; see [`PgBouncer::keeps_prepared_statements`].
    pub fn prepared_statements(mut self, count: u32) -> Self {
        self.prepared_statements = count;
        self
    }

    /// One line of pgbouncer.ini. The last one of a name counts.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts it and waits until it accepts connections.
    pub fn start(self) -> Result<PgBouncer, Error> {
        let Self { server: url, settings, prepared_statements } = self;
        let address = Address::of(&url);
        if address.parameters.contains("ssl") || address.credentials.contains('%') {
            return Err(Error::new("start PgBouncer", "its settings here know neither TLS towards the server nor escapes in credentials"));
        }
        let (user, password) = address.credentials.split_once(':').unwrap_or((address.credentials, ""));
        let (host, server_port) = address.host_and_port();
        let program = installed::pgbouncer()?;
        let can_prepare = installed::pgbouncer_version(&program).is_some_and(|version| version >= (1, 21));

        let home = Home::new("kill -KILL \"$(cat \"$home/pid\")\"")?;
        // Clients are trusted; the password is for the server.
        let users = home.write("users", format!("\"{user}\" \"{password}\"\n"))?;
        let mut text = format!(
            "[databases]\n* = host={host} port={server_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nunix_socket_dir =\nauth_type = trust\n\
             auth_file = {}\nadmin_users = {user}\npidfile = {}\nmax_client_conn = 300\nignore_startup_parameters = extra_float_digits\n",
            users.display(),
            home.path().join("pid").display(),
        );
        if can_prepare {
            let _ = writeln!(text, "max_prepared_statements = {prepared_statements}");
        }
        for (name, value) in &settings {
            let _ = writeln!(text, "{name} = {value}");
        }
        let base = text;
        let mut bouncer = PgBouncer {
            server: Server::new(home),
            program,
            port: free_port()?,
            user: user.to_owned(),
            keeps_prepared_statements: can_prepare && prepared_statements > 0,
        };
        // Between the choice of a port and its use somebody else may have taken it.
        for _ in 0..5 {
            bouncer.server.home().write("pgbouncer.ini", format!("{base}listen_port = {}\n", bouncer.port))?;
            match bouncer.start() {
                Err(_) if bouncer.log().contains("Address already in use") => bouncer.port = free_port()?,
                other => return other.map(|()| bouncer),
            }
        }
        Err(Error::new("start PgBouncer", "five free ports were taken before it could listen on them"))
    }
}

/// A PgBouncer on 127.0.0.1. Dropping it ends it, and so does the end of this process.
#[derive(Debug)]
pub struct PgBouncer {
    server: Server,
    program: PathBuf,
    port: u16,
    user: String,
    keeps_prepared_statements: bool,
}

impl PgBouncer {
    /// In front of the server of this URL, every database of it: [`crate::Cluster::url`] or [`crate::Database::url`]. Clients
    /// connect as the URL's user and are trusted.
    pub fn in_front_of(url: &str) -> PgBouncerSettings {
        let settings = PgBouncerSettings { server: url.to_owned(), settings: Vec::new(), prepared_statements: 0 };
        settings.mode(PoolMode::Transaction)
    }

    /// The URL of a database behind it.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{}@127.0.0.1:{}/{database}", self.user, self.port)
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether prepared statements of clients follow them from connection to connection: asked for, and not too old for it.
    #[must_use]
    pub fn keeps_prepared_statements(&self) -> bool {
        self.keeps_prepared_statements
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// Starts it again after [`kill`](Self::kill), on the same port. Does nothing if it runs.
    pub fn start(&self) -> Result<(), Error> {
        let mut command = self.server.home().command(&self.program);
        command.arg(self.server.home().path().join("pgbouncer.ini"));
        let pid_file = self.pid_file();
        // It writes the file before it listens. Only the two together are this process, listening.
        self.server.start(command, |pid| {
            let written = fs::read_to_string(&pid_file).unwrap_or_default();
            written.trim() == pid.to_string() && TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok()
        })
    }

    /// Ends it at once, with every connection through it. (Its own signals mean different things in different versions.)
    pub fn kill(&self) -> Result<(), Error> {
        self.server.stop(Signal::KILL)?;
        // It might take the file for a running process of the same number when it starts again.
        fs::remove_file(self.pid_file()).map_err(|error| Error::new("remove the pid file of PgBouncer", error))
    }

    fn pid_file(&self) -> PathBuf {
        self.server.home().path().join("pid")
    }
}
