//! The program as people and scripts meet it: the real binary, its output, its exit codes.
//!
//! Each test has a directory of its own, which is the working directory of what it runs, and an environment
//! without anything of whoever runs the tests.

/// Makes two tests of each function, one for each database. The function is given a database that is up to date.
macro_rules! on_each_database {
    ($($test:ident)*) => {
        mod sqlite {
            $(#[test] fn $test() { super::$test(&crate::Ground::migrated()) })*
        }
        mod postgres {
            $(#[test] fn $test() { super::$test(&crate::Ground::on_postgres()) })*
        }
    };
}

mod acceptance;
mod bad_input;
mod bench;
mod database;
mod faults;
mod help;
mod http;
mod jobs;
mod pauses;
mod plugin_files;
mod postgres;
mod settings;
mod stage;
mod tried;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use warp_store::Store;

/// A directory and the program in it.
pub(crate) struct Ground {
    dir: tempfile::TempDir,
    /// `None` is the file `warp.db` of the directory.
    server: Option<warp_test_servers::Database>,
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Standard output of a command that must have ended well.
    #[track_caller]
    pub(crate) fn good(self) -> String {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stdout
    }

    /// Standard error of a command that must have ended with this code.
    #[track_caller]
    pub(crate) fn bad(self, code: i32) -> String {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stderr
    }

    /// Standard output of a command that must have ended well, as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> serde_json::Value {
        let text = self.good();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

impl Ground {
    pub(crate) fn new() -> Self {
        Ground { dir: tempfile::tempdir().expect("a temporary directory"), server: None }
    }

    /// With a SQLite file that is up to date.
    pub(crate) fn migrated() -> Self {
        let ground = Ground::new();
        ground.run(&["migrate"]).good();
        ground
    }

    /// With a database on a server, and nothing in it.
    pub(crate) fn on_empty_server() -> Self {
        Ground { server: Some(warp_test_servers::database()), ..Ground::new() }
    }

    /// With a database on a server that is up to date.
    pub(crate) fn on_postgres() -> Self {
        let ground = Ground::on_empty_server();
        ground.run(&["migrate"]).good();
        ground
    }

    /// The same with slots that are session locks.
    pub(crate) fn on_session_locks() -> Self {
        let ground = Ground::on_empty_server();
        ground.run(&["migrate", "--locks", "session"]).good();
        ground
    }

    /// The database on the server.
    pub(crate) fn server(&self) -> &warp_test_servers::Database {
        self.server.as_ref().expect("a test on PostgreSQL")
    }

    /// Whether the database is on a server.
    pub(crate) fn on_server(&self) -> bool {
        self.server.is_some()
    }

    /// Opens what the program opens, to look at it from the side.
    pub(crate) async fn store(&self) -> Arc<dyn Store> {
        match &self.server {
            None => {
                let options = warp_store_sqlite::OpenOptions::new(self.path("warp.db"));
                Arc::new(warp_store_sqlite::SqliteStore::open(options).await.expect("opens"))
            }
            Some(server) => {
                let settings = warp_store_postgres::ConnectSettings::new(server.url());
                let options = warp_store_postgres::OpenOptions::new(settings);
                Arc::new(warp_store_postgres::PostgresStore::open(options).await.expect("opens"))
            }
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("inside the directory")).expect("a directory");
        std::fs::write(path, bytes).expect("a file");
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("a file")
    }

    /// The program, ready to be given arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warp-host"));
        command.current_dir(self.dir.path()).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("USER", "ada").stdin(Stdio::null());
        if let Some(server) = &self.server {
            command.env("WARP_DATABASE_URL", server.url());
        }
        command
    }

    /// Runs the program to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        ended(self.command().args(args).output().expect("the program starts"))
    }

    /// Runs it to its end with these variables of the environment beside the usual ones.
    pub(crate) fn run_in(&self, args: &[&str], variables: &[(&str, &str)]) -> Ended {
        ended(self.command().args(args).envs(variables.iter().copied()).output().expect("the program starts"))
    }

    /// Runs it with something on standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Ended {
        use std::io::Write as _;
        let mut child = self
            .command()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        // The program may end without having read everything.
        let _ = stdin.write_all(input);
        drop(stdin);
        ended(child.wait_with_output().expect("the program ends"))
    }
}

fn ended(output: Output) -> Ended {
    let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
    Ended { code: output.status.code().expect("it exits by itself"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Replaces what differs from run to run, so that a snapshot can hold the rest.
pub(crate) fn settled(text: &str, replacements: &[(&str, &str)]) -> String {
    replacements.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Below the build's own directory, so that a second run of the tests finds what the first one compiled.
pub(crate) fn shared_target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("templates")
}
