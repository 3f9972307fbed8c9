//! `cargo xtask test`: every test that a change can break, on a machine that has only rustup and a C compiler.
//!
//! Brings PostgreSQL and PgBouncer with it (`servers.rs`). Prints the runner's output as it comes and ends with what was
//! not tested, which tests failed and why, what is broken, and one line that counts all of it: whoever has kept nothing but
//! the end knows where to look.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::{plugins, servers, tidy};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Only packages whose name contains this
    #[arg(long, value_name = "TEXT")]
    package: Option<String>,
    /// Leave the plugins as they are
    #[arg(long)]
    skip_plugins: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// Tests that did not run, each with the reason that its source gives.
    not_run: Vec<String>,
    /// Tests that failed.
    failures: Vec<String>,
    /// Where each thread panicked first, and with what.
    panics: BTreeMap<String, String>,
    /// The line that follows is the message of this thread's panic.
    panicking: Option<String>,
}

impl Tally {
    /// The last line. Whoever reads no other learns from it which tests did not run; why stands above.
    fn summary(&self) -> String {
        let Tally { passed, failed, ignored, not_run, .. } = self;
        let names: Vec<_> = not_run.iter().map(|what| what.split_once(' ').map_or(what.as_str(), |(name, _)| name)).collect();
        let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        format!("{passed} passed, {failed} failed, {ignored} not run{names}, SQL Server not tested")
    }

    /// Takes the counts out of a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`, out of `test name ... ignored,
    /// why` what did not run, out of `test name ... FAILED` what failed, and out of `thread 'name' (7) panicked at place:`, and
    /// the line after it, why. A test's own thread has its name.
    fn add(&mut self, line: &str) {
        if let Some(message) = self.panicking.take().and_then(|thread| self.panics.get_mut(&thread)) {
            message.push(' ');
            message.push_str(line);
        }
        if let Some((thread, place)) = line.strip_prefix("thread '").and_then(|rest| rest.split_once("' ")) {
            let place = place.split_once("panicked at ").map(|(_, place)| place);
            if let (Some(place), false) = (place, self.panics.contains_key(thread)) {
                self.panics.insert(thread.to_owned(), place.to_owned());
                self.panicking = Some(thread.to_owned());
            }
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failures.push(name.to_owned());
        }
        if let Some((name, why)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored")) {
            let why = why.strip_prefix(", ").unwrap_or("no reason given");
            self.not_run.push(format!("{name} ({why})"));
        }
        let Some(counts) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")).map(|(_, counts)| counts) else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            if let (Some(Ok(number)), Some(what)) = (words.next().map(str::parse::<u64>), words.next()) {
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    _ => {}
                }
            }
        }
    }
}

/// Runs everything; the exit code says whether all of it passed.
pub fn run(root: &Path, args: &Args) -> Result<ExitCode> {
    let mut broken = Vec::new();
    if args.package.is_none() {
        if tidy::run(root, &tidy::Args {})? != ExitCode::SUCCESS {
            broken.push("tidy".to_owned());
        }
        if !cargo(root, &["fmt", "--all", "--check"])? {
            broken.push("formatting (run `cargo fmt --all`)".to_owned());
        }
    }
    if !args.skip_plugins && plugins::run(root, &plugins::Args::everything())? != ExitCode::SUCCESS {
        broken.push("plugins".to_owned());
    }
    if args.package.is_none() && !args.skip_plugins && plugins::run(root, &plugins::Args::every_test())? != ExitCode::SUCCESS {
        broken.push("native tests of the plugins".to_owned());
    }
    // One package need not need a server. If it does and there is none, its tests fail and say so.
    if args.package.is_none()
        && let Err(error) = servers::install()
    {
        // Said now as well: the end may be half an hour away.
        let what = format!("servers for tests: {error:#}");
        println!("broken: {what}");
        broken.push(what);
    }
    // Without it each test process starts one of its own, or says why it cannot.
    let server = servers::Server::start();
    if let Err(error) = &server {
        println!("no PostgreSQL for the tests: {error:#}");
    }
    let mut tally = Tally::default();
    let packages = match &args.package {
        Some(text) => vec!["--package".to_owned(), format!("*{text}*")],
        None => vec!["--workspace".to_owned()],
    };
    // Ends in the libraries' tests, binaries and integration tests; there are no examples in doc comments that
    // would be worth a second linking of everything.
    let mut tests = Command::new(env!("CARGO"));
    tests.args(["test", "--no-fail-fast", "--lib", "--bins", "--tests"]).args(packages).current_dir(root).stdout(Stdio::piped());
    if let Ok(server) = &server {
        server.name_to(&mut tests);
    }
    let mut child = tests.spawn().context("cargo test")?;
    let output = child.stdout.take().context("cargo test's output")?;
    let mut screen = std::io::stdout().lock();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        tally.add(&line);
        writeln!(screen, "{line}")?;
    }
    drop(screen);
    if !child.wait()?.success() {
        broken.push("tests".to_owned());
    }
    drop(server);
    // With a server named there is still nothing to run on it.
    println!("not tested: SQL Server (there is no driver for it yet)");
    for what in &tally.not_run {
        println!("not run: {what}");
    }
    for name in &tally.failures {
        println!("failed: {name}: {}", tally.panics.get(name).map_or("see above", String::as_str));
    }
    for what in &broken {
        println!("broken: {what}");
    }
    println!("{}", tally.summary());
    Ok(if broken.is_empty() && tally.failed == 0 && tally.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn cargo(root: &Path, args: &[&str]) -> Result<bool> {
    Ok(Command::new(env!("CARGO")).args(args).current_dir(root).status().with_context(|| format!("cargo {}", args.join(" ")))?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_names_what_did_not_run() {
        let mut tally = Tally::default();
        tally.add("test a::slow ... ignored, minutes; `some command` runs it");
        tally.add("test b::other ... ignored");
        tally.add("test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 1.00s");
        assert_eq!(tally.summary(), "5 passed, 0 failed, 2 not run (a::slow, b::other), SQL Server not tested");
        assert_eq!(Tally::default().summary(), "0 passed, 0 failed, 0 not run, SQL Server not tested");
    }

    #[test]
    fn counts_are_added_up() {
        let mut tally = Tally::default();
        tally.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s");
        tally.add("test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s");
        tally.add("test some::test ... ok");
        tally.add("test long::one ... ignored, minutes; `cargo xtask soak` runs it");
        tally.add("test bare ... ignored");
        let not_run = vec!["long::one (minutes; `cargo xtask soak` runs it)".to_owned(), "bare (no reason given)".to_owned()];
        assert_eq!(tally, Tally { passed: 5, failed: 1, ignored: 1, not_run, ..Tally::default() });
    }

    #[test]
    fn a_failure_is_told_with_its_reason() {
        let mut tally = Tally::default();
        for line in [
            "test one::good ... ok",
            "test one::bad ... FAILED",
            "---- one::bad stdout ----",
            "thread 'one::bad' (712) panicked at src/one.rs:3:5:",
            "two of a key ran at once",
            "note: run with `RUST_BACKTRACE=1`",
            "thread 'one::bad' (712) panicked at src/one.rs:9:1:",
            "while it panicked",
        ] {
            tally.add(line);
        }
        assert_eq!(tally.failures, ["one::bad"]);
        assert_eq!(tally.panics["one::bad"], "src/one.rs:3:5: two of a key ran at once");
    }
}
