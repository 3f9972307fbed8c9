//! A private PostgreSQL cluster.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    Error, Tls, installed,
    process::{Home, Server, free_port},
};

/// The superuser of every cluster here.
const USER: &str = "postgres";

/// How a cluster is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Closes every session, then writes a checkpoint.
    Fast,
    /// Drops everything; the next start recovers. What a power failure would leave, for committed transactions.
    Immediate,
}

/// What a cluster shall be like. Begin with [`Cluster::functional`] or [`Cluster::durable`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ClusterSettings {
    settings: Vec<(String, String)>,
    password: Option<String>,
    tls: Option<(Tls, bool)>,
    statistics: bool,
}

impl ClusterSettings {
    fn new(settings: &[(&str, &str)]) -> Self {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        // Test binaries run one after another, but each with as many threads as it likes, and every test has a pool.
        Self { settings, password: None, tls: None, statistics: false }.set("max_connections", "300")
    }

    /// One line of postgresql.conf. The last one of a name counts.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sessions authenticate with this password (scram-sha-256), which goes into URLs as it is. Without one everybody on
    /// this machine is trusted.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Only encrypted sessions, with the server certificate of `tls`.
    pub fn tls(mut self, tls: &Tls) -> Self {
        self.tls = Some((tls.clone(), false));
        self
    }

    /// Only encrypted sessions that show a client certificate of `tls` in the name of their user (`clientcert=verify-full`).
    pub fn tls_with_client_certificate(mut self, tls: &Tls) -> Self {
        self.tls = Some((tls.clone(), true));
        self
    }

    /// Preloads pg_stat_statements where the installation has it; see [`Cluster::counts_statements`].
    /// `CREATE EXTENSION` is left to the caller.
    pub fn count_statements(mut self) -> Self {
        self.statistics = true;
        self
    }

    /// Makes and starts it. Takes about a second.
    pub fn start(self) -> Result<Cluster, Error> {
        let Self { mut settings, password, tls, statistics } = self;
        let programs = installed::postgresql()?;
        let pg_ctl = programs.join("pg_ctl");
        // pg_ctl checks that the process in postmaster.pid is a postmaster before it sends anything.
        let home = Home::new(&format!("'{}' stop -D \"$home/data\" -m immediate -s", pg_ctl.display()))?;
        initialise(&home, &programs, password.as_deref())?;

        let counts_statements = statistics && installed::has_statistics(&programs);
        if counts_statements {
            settings.push(("shared_preload_libraries".to_owned(), "pg_stat_statements".to_owned()));
        }
        if let Some((tls, client_certificate)) = &tls {
            settings.push(("ssl".to_owned(), "on".to_owned()));
            // Copies, since the server refuses a key that another account could read.
            for (name, path) in
                [("ssl_cert_file", tls.server_certificate()), ("ssl_key_file", tls.server_key()), ("ssl_ca_file", tls.root())]
            {
                if name == "ssl_ca_file" && !client_certificate {
                    continue;
                }
                let text = fs::read(&path).map_err(|error| Error::new(format_args!("read {}", path.display()), error))?;
                let copy = home.write(name, text)?;
                settings.push((name.to_owned(), copy.display().to_string()));
            }
        }
        let method = if password.is_some() { "scram-sha-256" } else { "trust" };
        let access = match &tls {
            None => format!("host all all 127.0.0.1/32 {method}\n"),
            Some((_, false)) => format!("hostssl all all 127.0.0.1/32 {method}\n"),
            Some((_, true)) => format!("hostssl all all 127.0.0.1/32 {method} clientcert=verify-full\n"),
        };
        home.write("data/pg_hba.conf", access)?;
        let mut text = "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\n".to_owned();
        for (name, value) in &settings {
            let _ = writeln!(text, "{name} = '{}'", value.replace('\'', "''"));
        }
        home.write("data/postgresql.conf", text)?;

        let mut cluster = Cluster { server: Server::new(home), programs, port: free_port()?, password, tls, counts_statements };
        // Between the choice of a port and its use somebody else may have taken it.
        for _ in 0..5 {
            match cluster.start() {
                Err(_) if cluster.log().contains("Address already in use") => cluster.port = free_port()?,
                other => return other.map(|()| cluster),
            }
        }
        cluster.start().map(|()| cluster)
    }
}

/// A private PostgreSQL cluster on 127.0.0.1, in a directory of its own.
///
/// Dropping it stops it and removes the directory. So does the end of this process, however it comes.
#[derive(Debug)]
pub struct Cluster {
    server: Server,
    programs: PathBuf,
    port: u16,
    password: Option<String>,
    tls: Option<(Tls, bool)>,
    counts_statements: bool,
}

impl Cluster {
    /// For tests of what the product does: nothing waits for the disk. Not for tests of a failing *machine*; a killed
    /// or restarted server loses nothing that was committed, with one exception: `synchronous_commit=off` gives up the
    /// last moments before [`Stop::Immediate`].
    pub fn functional() -> ClusterSettings {
        ClusterSettings::new(&[("fsync", "off"), ("synchronous_commit", "off"), ("full_page_writes", "off")])
    }

    /// For tests of failures and for measurements: the defaults of PostgreSQL, by which a commit is on disk when it returns.
    pub fn durable() -> ClusterSettings {
        ClusterSettings::new(&[])
    }

    /// The URL of a database of this cluster, for its superuser, TLS parameters included.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let mut url = format!("postgres://{}@127.0.0.1:{}/{database}", self.credentials(), self.port);
        if let Some((tls, client_certificate)) = &self.tls {
            let _ = write!(url, "?sslmode=verify-full&sslrootcert={}", tls.root().display());
            if *client_certificate {
                let _ = write!(url, "&sslcert={}&sslkey={}", tls.client_certificate().display(), tls.client_key().display());
            }
        }
        url
    }

    /// `user`, or `user:password`.
    fn credentials(&self) -> String {
        self.password.as_ref().map_or_else(|| USER.to_owned(), |password| format!("{USER}:{password}"))
    }

    /// Its port on 127.0.0.1, the same after a restart.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The superuser.
    #[must_use]
    pub fn user(&self) -> &str {
        USER
    }

    /// Whether pg_stat_statements was asked for and is loaded.
    #[must_use]
    pub fn counts_statements(&self) -> bool {
        self.counts_statements
    }

    /// What the server has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// The directory of its data.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.server.home().path().join("data")
    }

    /// The process id of the postmaster while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.server.pid()
    }

    /// Starts it again after [`stop`](Self::stop) and waits until it accepts connections. Does nothing if it runs.
    pub fn start(&self) -> Result<(), Error> {
        let data = self.data();
        let mut command = self.server.home().command(&self.programs.join("postgres"));
        command.arg("-D").arg(&data).arg("-p").arg(self.port.to_string());
        let status = data.join("postmaster.pid");
        // The first line is the process, the eighth its state; pg_ctl waits for the same.
        self.server.start(command, |pid| {
            let text = fs::read_to_string(&status).unwrap_or_default();
            let mut lines = text.lines();
            lines.next() == Some(&pid.to_string()) && lines.nth(6).is_some_and(|state| state.trim_end() == "ready")
        })
    }

    /// Stops it and waits until all of its processes have ended. Does nothing if it does not run.
    pub fn stop(&self, how: Stop) -> Result<(), Error> {
        self.server.stop(match how {
            Stop::Fast => Signal::INT,
            Stop::Immediate => Signal::QUIT,
        })
    }

    /// Stops and starts it.
    pub fn restart(&self, how: Stop) -> Result<(), Error> {
        self.stop(how)?;
        self.start()
    }

    /// Ends one backend as `pg_terminate_backend` does, without a session of our own. Take the number from
    /// `pg_backend_pid()` or `pg_stat_activity`.
    pub fn kill_backend(&self, pid: i32) -> Result<(), Error> {
        let failed = |why: &dyn std::fmt::Display| Error::new(format_args!("end backend {pid}"), why);
        let pid = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 1).ok_or_else(|| failed(&"not the number of a process"))?;
        kill_process(pid, Signal::TERM).map_err(|error| failed(&error))
    }
}

fn initialise(home: &Home, programs: &Path, password: Option<&str>) -> Result<(), Error> {
    let password_file = password.map(|password| home.write("password", password)).transpose()?;
    let run = |locale: &[&str]| {
        let mut command = home.command(&programs.join("initdb"));
        command.args(["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username", USER, "--pgdata"]);
        command.arg(home.path().join("data")).args(locale);
        if let Some(file) = &password_file {
            command.arg("--pwfile").arg(file);
        }
        command.output().map_err(|error| Error::new("run initdb", error))
    };
    // A language's order rather than that of bytes, where PostgreSQL was built with one: SQL that orders text as Rust
    // orders it by accident only shall fail here, not at the user's.
    let mut output = run(&["--locale-provider=icu", "--icu-locale=en-US"])?;
    if String::from_utf8_lossy(&output.stderr).contains("ICU is not supported") {
        output = run(&[])?;
    }
    if output.status.success() {
        return Ok(());
    }
    Err(Error::new(
        "make a cluster",
        format_args!("initdb: {}\n{}{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)),
    ))
}
