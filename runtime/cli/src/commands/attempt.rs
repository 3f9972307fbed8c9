//! `try`: one attempt of a component, without a database.
//!
//! What must stay true: the component runs under the same engine and caps as in a host, and nothing that it does
//! lasts but what it writes into directories that it was given.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use warp_domain::JobId;
use warp_domain::ending::{Observed, Outcome as RunOutcome, Said};
use warp_domain::policy::Declared;
use warp_domain::resolve::resolve;
use warp_domain::units::{format_duration, format_size};
use warp_manifest::{Manifest, Refusal};
use warp_plugin_host::{Grants, PluginVersion, TryParams, TryReport, run_once};

use crate::args::TryArgs;
use crate::commands::{enqueue, plugin_files};
use crate::config::{Config, Outside};
use crate::failure::{Exit, Failure, Outcome};
use crate::progress::Progress;
use crate::{hosting, json, text};

/// How long an attempt may take when nobody says.
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);

/// Runs the attempt and shows what it did.
///
/// # Errors
/// A file that a host would refuse (2), or an attempt that did not complete (1).
pub fn run(args: &TryArgs, config: &Config, outside: &Outside<'_>) -> Outcome {
    enqueue::check_payload(&args.payload)?;
    let manifest = plugin_files::manifest_of(&args.file)?;
    let contract = chosen_contract(&manifest, args.contract.as_deref())?;
    let runtime = hosting::guest_runtime()?;
    let loader = hosting::loader(1, &config.cache.value)?;
    let progress = Progress::spinner(format!("compiling {}", args.file.display()));
    let loaded = runtime.block_on(loader.load_file_within(&args.file, &everything_asked(&manifest, args, outside), args.memory));
    progress.finish();
    let version = loaded.map_err(|refusals| Failure::usage(refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("\n")))?;

    let params = params(&version, &contract, args);
    let limit = params.limit;
    let progress = Progress::spinner(format!("running {contract}"));
    let report = runtime.block_on(run_once(&version, params));
    progress.finish();
    let report = report.ok_or_else(|| Failure::not_found(format!("{} runs no contract `{contract}`", args.file.display())))?;
    if config.json {
        text::print_json(&row(&report))?;
    } else {
        show(&report, limit)?;
    }
    match report.outcome {
        RunOutcome::Said(Said::Completed(_)) => Ok(()),
        _ => Err(Failure::silent(Exit::Runtime)),
    }
}

/// The only contract, or the one that was named.
fn chosen_contract(manifest: &Manifest, named: Option<&str>) -> Outcome<String> {
    let handled: Vec<_> = manifest.handled().map(|(contract, _)| contract).collect();
    match (named, handled.as_slice()) {
        (Some(named), _) if handled.contains(&named) => Ok(named.to_owned()),
        (Some(named), _) => {
            Err(Failure::not_found(format!("{} runs no contract `{named}`; it runs {}", manifest.file, handled.join(", "))))
        }
        (None, [only]) => Ok((*only).to_owned()),
        (None, _) => Err(Failure::usage(format!("{} runs {}; choose one with --contract", manifest.file, handled.join(", ")))),
    }
}

/// The author is the operator here: whatever the manifest asks for is granted, with the directories of the flags
/// and the variables of this environment. What is missing of those is refused by the loader, by name.
fn everything_asked(manifest: &Manifest, args: &TryArgs, outside: &Outside<'_>) -> Grants {
    let dirs: BTreeMap<&str, &str> = args.dir.iter().map(|(name, dir)| (name.as_str(), dir.as_str())).collect();
    let mut grant = warp_manifest::Grant {
        env: manifest.capabilities.env.clone(),
        state: manifest.capabilities.state.iter().map(|bucket| bucket.bucket.clone()).collect(),
        memory: manifest.capabilities.memory,
        ..warp_manifest::Grant::default()
    };
    for file in &manifest.capabilities.files {
        let host = dirs.get(file.path.as_str()).copied().unwrap_or(&file.path).to_owned();
        grant.files.insert(file.path.clone(), warp_manifest::GrantedDirectory { host, mode: None });
    }
    let env = grant.env.iter().filter_map(|name| (outside.env)(name).map(|value| (name.clone(), value))).collect();
    Grants { plugins: BTreeMap::from([(manifest.plugin.name.clone(), grant)]), base: PathBuf::from("."), env }
}

fn params(version: &PluginVersion, contract: &str, args: &TryArgs) -> TryParams {
    let declarations = version.manifest().declarations(version.digest()).into_iter().find(|declared| declared.contract == contract);
    let stamp = declarations.map(|declared| resolve(&Declared::default(), &declared)).unwrap_or_default();
    TryParams {
        contract: contract.to_owned(),
        payload: args.payload.clone(),
        limit: args.timeout.or(stamp.timeout.map(|timeout| timeout.value.per_attempt)).unwrap_or(DEFAULT_LIMIT),
        // Nobody else runs, so a job with a key would hold its slot.
        holds_slot: stamp.concurrency.is_some(),
        job_id: JobId(uuid::Uuid::now_v7().as_u128()),
    }
}

/// The end as a word and a text.
fn ended(outcome: &RunOutcome) -> (&'static str, String) {
    match outcome {
        RunOutcome::Said(Said::Completed(result)) => ("completed", result.clone().unwrap_or_default()),
        RunOutcome::Said(Said::Retryable(message)) => ("retryable", message.clone()),
        RunOutcome::Said(Said::Permanent(message)) => ("permanent", message.clone()),
        RunOutcome::Said(Said::Snooze(span)) => ("snooze", format_duration(*span)),
        RunOutcome::Observed(Observed::Trapped(message)) => ("trapped", message.clone()),
        RunOutcome::Observed(Observed::TimedOut(limit)) => ("timed-out", format!("after {}", format_duration(*limit))),
        RunOutcome::Observed(Observed::Cancelled) => ("cancelled", String::new()),
        RunOutcome::Observed(Observed::HandedBack(message)) => ("handed-back", message.clone()),
        RunOutcome::Observed(Observed::Unacceptable(message)) => ("unacceptable", message.clone()),
    }
}

fn row(report: &TryReport) -> json::Tried {
    let TryReport { outcome, lines, dropped, progress, children, state, stats } = report;
    let (ended, text) = ended(outcome);
    json::Tried {
        outcome: ended,
        text,
        lines: lines.iter().map(|(level, text)| json::TriedLine { stream: level.name(), text: text.clone() }).collect(),
        dropped: json::Dropped { lines: dropped.0, bytes: dropped.1 },
        progress: progress.iter().cloned().collect(),
        children: children
            .iter()
            .map(|child| json::TriedChild {
                contract: child.contract.clone(),
                payload: child.payload.clone(),
                queue: child.queue.clone(),
                delay: format_duration(child.delay),
                unique_key: child.unique_key.clone(),
            })
            .collect(),
        state: state
            .iter()
            .map(|((bucket, key), value)| json::TriedState { bucket: bucket.clone(), key: key.clone(), value: value.clone() })
            .collect(),
        instantiate_ms: millis(stats.instantiate),
        call_ms: millis(stats.call),
        peak_memory_bytes: stats.peak_memory,
    }
}

fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1000.0
}

fn show(report: &TryReport, limit: Duration) -> Outcome {
    let TryReport { outcome, lines, dropped, progress, children, state, stats } = report;
    for (level, said) in lines {
        text::print(format!("{:<7} {}", level.name(), text::line(said)))?;
    }
    if *dropped != (0, 0) {
        text::print(format!("        {} lines ({} bytes) beyond the caps were dropped", dropped.0, dropped.1))?;
    }
    for (name, percent) in progress {
        text::print(format!("progress {} {percent:.0} %", text::line(name)))?;
    }
    for child in children {
        let delay = if child.delay.is_zero() { String::new() } else { format!(" in {}", format_duration(child.delay)) };
        text::print(format!("would enqueue {}{delay} {}", text::line(&child.contract), text::short(&child.payload, 500)))?;
    }
    for ((bucket, key), value) in state {
        text::print(format!("state {} {} = {}", text::line(bucket), text::line(key), text::short(value, 500)))?;
    }
    let (word, said) = ended(outcome);
    text::print(format!("{word} {}", text::harmless(&said, true)).trim_end())?;
    text::note(format!(
        "{:.2} ms to start, {:.2} ms to run of {} allowed, {} of memory at most",
        millis(stats.instantiate),
        millis(stats.call),
        format_duration(limit),
        format_size(stats.peak_memory)
    ));
    Ok(())
}
