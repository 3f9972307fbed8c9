//! `doctor`: everything between this machine and a database.
//!
//! What it deliberately does not do: judge. What is looked at and what it means is the driver's.

use std::path::Path;

use warp_store_postgres::{Finding, Level, Report};

use crate::args::DoctorArgs;
use crate::clock;
use crate::config::Config;
use crate::failure::{Exit, Failure, Outcome};
use crate::stores::{self, Place};
use crate::text;

/// Runs it.
///
/// # Errors
/// A URL that names no database (2), a finding that would keep a host from running (4), a database that cannot be
/// reached (5).
pub async fn run(args: &DoctorArgs, config: &Config) -> Outcome {
    let place = match &args.url {
        Some(url) => stores::place_at(config, url, "the command line")?,
        None => stores::place(config)?,
    };
    let report = match place {
        Place::Sqlite(path) => file(&path).await,
        Place::Postgres(settings) => warp_store_postgres::doctor(&settings, stores::lock_kind(config), clock::now).await,
    };
    if config.json {
        text::print_json(&report)?;
    } else {
        let row = |finding: &Finding| [word(finding.level).to_owned(), finding.what.to_owned(), finding.text.clone()];
        text::print(format!("{}\n", text::line(&report.database)))?;
        text::print(text::table(["", "WHAT", "SEEN"], report.findings.iter().map(row)))?;
        for Finding { what, remedy, .. } in &report.findings {
            if let Some(remedy) = remedy {
                text::print(format!("\n{what}: {}", text::line(remedy)))?;
            }
        }
    }
    match exit(&report) {
        None => Ok(()),
        Some(exit) => Err(Failure::silent(exit)),
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Warn => "warn",
        Level::Fail => "FAIL",
    }
}

fn exit(report: &Report) -> Option<Exit> {
    let unreached = report.finding("connection").is_some_and(|finding| finding.level == Level::Fail);
    match report.worst() {
        Level::Ok | Level::Warn => None,
        Level::Fail if unreached => Some(Exit::Unavailable),
        Level::Fail => Some(Exit::Refused),
    }
}

/// A file has no network, no roles and no pooler.
async fn file(path: &Path) -> Report {
    let finding = |what, level, text: String, remedy: Option<&str>| Finding { what, level, text, remedy: remedy.map(str::to_owned) };
    let mut findings = Vec::new();
    if path.exists() {
        findings.push(finding("connection", Level::Ok, "the file is there".to_owned(), None));
        findings.push(match warp_store_sqlite::schema_version(path).await {
            Err(error) => finding("schema", Level::Fail, error.to_string(), Some("see the text")),
            Ok(version) if version == warp_store_sqlite::SCHEMA_VERSION => finding("schema", Level::Ok, format!("version {version}"), None),
            Ok(version) => finding(
                "schema",
                Level::Fail,
                format!("version {version}; this build knows {}", warp_store_sqlite::SCHEMA_VERSION),
                Some("run `warp-host migrate` if it is older, and the newer warp-host if it is newer"),
            ),
        });
    } else {
        let text = "there is no such file".to_owned();
        findings.push(finding(
            "connection",
            Level::Fail,
            text,
            Some("`warp-host migrate` creates it, and `warp-host run` does so by itself"),
        ));
    }
    Report { database: path.display().to_string(), findings }
}
