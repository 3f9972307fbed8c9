//! `jobs`: what is there, why it waits, what it wrote, and the operator's commands.

use std::io::{self, IsTerminal, Write as _};

use warp_domain::policy::{Concurrency, Declared, Source, Stamp};
use warp_domain::{Digest, JobId, UnixMillis};
use warp_store::{CommandVerdict, JobDetails, JobFilter, JobSummary, KeySeen, Store, Waiting};

use crate::args::{IdsArgs, JobsCommand, JobsListArgs};
use crate::clock::rfc3339;
use crate::config::{retry_text, timeout_text};
use crate::failure::{Exit, Failure, Outcome};
use crate::{json, text};

/// How many holders and waiters a person wants to see; `--json` prints all that the store lists.
const SHOWN: usize = 10;

/// Runs one of them. `by` is the person whom the history names.
///
/// # Errors
/// An unknown job (3), a state that does not allow it (4), or what the store says.
pub async fn run(command: &JobsCommand, store: &dyn Store, as_json: bool, by: &str, now: UnixMillis) -> Outcome {
    match command {
        JobsCommand::List(args) => list(args, store, as_json, now).await,
        JobsCommand::Show { id } => show(*id, store, as_json, now).await,
        JobsCommand::Logs { id, run, raw } => logs(*id, *run, *raw, store, as_json, now).await,
        JobsCommand::Cancel(args) => act(Act::Cancel, args, store, as_json, by, now).await,
        JobsCommand::Requeue(args) => act(Act::Requeue, args, store, as_json, by, now).await,
        JobsCommand::Delete(args) => act(Act::Delete, args, store, as_json, by, now).await,
    }
}

async fn list(args: &JobsListArgs, store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    let JobsListArgs { state, contract, queue, key, limit, before } = args.clone();
    let chosen = !state.is_empty() || contract.is_some() || queue.is_some() || key.is_some() || before.is_some();
    let jobs = store.jobs(JobFilter { states: state, contract, queue, key, before, limit }).await?;
    if as_json {
        return text::print_json(&jobs.iter().map(json::Job::from).collect::<Vec<_>>());
    }
    if jobs.is_empty() {
        text::note(if chosen { "no such jobs" } else { "no jobs" });
        return Ok(());
    }
    let row = |job: &JobSummary| {
        [
            job.id.to_string(),
            state_text(job, now),
            job.contract.clone(),
            job.queue.clone(),
            job.runs.to_string(),
            text::age(job.created_at, now),
            text::age(job.changed_at, now),
        ]
    };
    text::print(text::table(["ID", "STATE", "CONTRACT", "QUEUE", "RUNS", "AGE", "IN STATE FOR"], jobs.iter().map(row)))?;
    if let Some(last) = jobs.last().filter(|_| jobs.len() == limit as usize) {
        text::note(format!("there may be more: --before {}", last.id));
    }
    Ok(())
}

fn state_text(job: &JobSummary, now: UnixMillis) -> String {
    match (job.parked, job.due) {
        (true, _) => format!("{} (waits for a key)", job.state.name()),
        (_, Some(due)) if due > now => format!("{} (in {})", job.state.name(), text::rough(due.since(now))),
        _ => job.state.name().to_owned(),
    }
}

async fn show(id: JobId, store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    let details = store.job(id, now).await?.ok_or_else(|| unknown(id))?;
    if as_json {
        return text::print_json(&json::Details::from(&details));
    }
    text::print(describe(&details, now))
}

fn unknown(id: JobId) -> Failure {
    Failure::not_found(format!("there is no job {id}; it may have been removed by retention"))
}

/// The page of a job.
fn describe(details: &JobDetails, now: UnixMillis) -> String {
    let JobDetails {
        summary,
        payload,
        metadata,
        trace_parent,
        unique_key,
        explicit,
        stamp,
        keys,
        running,
        waiting,
        result,
        error,
        audit,
        progress,
        dropped: (dropped_lines, dropped_bytes),
    } = details;
    let mut page = Page::default();
    page.fact("job", &summary.id.to_string());
    page.fact("contract", &summary.contract);
    page.fact("queue", &summary.queue);
    page.fact("state", &state_text(summary, now));
    page.fact("enqueued", &format!("{} ({} ago)", rfc3339(summary.created_at), text::age(summary.created_at, now)));
    page.fact("changed", &format!("{} ({} ago)", rfc3339(summary.changed_at), text::age(summary.changed_at, now)));
    if let Some(due) = summary.due {
        page.fact("due", &rfc3339(due));
    }
    page.fact("runs", &format!("{}, of which {} charged to the retry budget", summary.runs, summary.attempts));
    if let Some(unique) = unique_key {
        page.fact("unique key", unique);
    }
    if let Some(trace) = trace_parent {
        page.fact("trace", trace);
    }
    for (name, value) in metadata {
        page.fact("metadata", &format!("{name}={value}"));
    }
    page.fact("payload", &text::short(payload, 2000));
    if let Some((host, digest)) = running {
        page.fact("running on", &format!("{host}, plugin {digest}"));
    }
    if let Some(result) = result {
        page.fact("result", &text::short(result, 2000));
    }
    if let Some(error) = error {
        page.fact("error", error);
    }
    for (name, percent) in progress {
        page.fact("progress", &format!("{name} {percent:.0} %"));
    }
    if *dropped_lines > 0 || *dropped_bytes > 0 {
        page.fact("output", &format!("{dropped_lines} lines ({dropped_bytes} bytes) beyond the caps were dropped"));
    }

    page.heading("policy");
    match stamp {
        Some(stamp) => page.lines(policy_lines(stamp)),
        None => {
            page.line("not stamped yet: handler and contract are read when the job is first claimed");
            page.lines(policy_lines(&as_stamp(explicit)));
        }
    }
    for key in keys {
        page.line(&format!("key          {key}"));
    }
    if let Some(waiting) = waiting {
        page.heading("why it is waiting");
        page.lines(waiting_lines(waiting, &summary.queue, stamp.as_ref(), now));
    }
    page.heading("history");
    for row in audit {
        let mut line = format!("{}  {}", rfc3339(row.at), row.event);
        if row.run > 0 {
            line += &format!("  run {}", row.run);
        }
        if let Some(host) = &row.host {
            line += &format!("  on {host}");
        }
        if let Some(digest) = &row.digest {
            line += &format!("  plugin {}", digest.short());
        }
        if let Some(took) = row.took {
            line += &format!("  took {}", text::rough(took));
        }
        if !row.message.is_empty() {
            line += &format!("  {}", row.message);
        }
        page.line(&line);
    }
    page.text
}

fn as_stamp(declared: &Declared) -> Stamp {
    use warp_domain::policy::Stamped;
    let Declared { concurrency, retry, timeout } = declared.clone();
    Stamp {
        concurrency: concurrency.map(|value| Stamped { value, source: Source::Enqueue }),
        retry: retry.map(|value| Stamped { value, source: Source::Enqueue }),
        timeout: timeout.map(|value| Stamped { value, source: Source::Enqueue }),
    }
}

/// One family in words.
pub fn concurrency_text(value: &Concurrency) -> String {
    let Concurrency { kind, keys, limit, weight, mode, order, on_retry: _ } = value;
    let keys: Vec<_> = keys.iter().map(|key| format!("`{key}`")).collect();
    let mut text = format!("{} on {}, limit {limit}, {}", json::kind_name(*kind), keys.join(" and "), json::mode_name(*mode));
    if *weight > 1 {
        text += &format!(", weight {weight}");
    }
    if *order == warp_domain::policy::Order::Fifo {
        text += ", fifo";
    }
    text
}

fn policy_lines(stamp: &Stamp) -> Vec<String> {
    let Stamp { concurrency, retry, timeout } = stamp;
    let family = |name: &str, rule: Option<(String, &Source)>, otherwise: &str| match rule {
        Some((rule, source)) => format!("{name:<12} {rule}   from {}", source_text(source)),
        None => format!("{name:<12} {otherwise}"),
    };
    let mut lines = vec![
        family("concurrency", concurrency.as_ref().map(|c| (concurrency_text(&c.value), &c.source)), "none"),
        family("retry", retry.as_ref().map(|r| (retry_text(&r.value), &r.source)), "none declared: the default of the host that runs it"),
        family(
            "timeout",
            timeout.as_ref().map(|t| (timeout_text(&t.value), &t.source)),
            "none declared: the default of the host that runs it",
        ),
    ];
    let sources = [concurrency.as_ref().map(|c| &c.source), retry.as_ref().map(|r| &r.source), timeout.as_ref().map(|t| &t.source)];
    let mut digests: Vec<_> = sources.into_iter().flatten().filter_map(declared_by).collect();
    digests.dedup();
    // In full once: the lines above have enough of it to tell two versions apart.
    lines.extend(digests.into_iter().map(|digest| format!("plugin       {digest}")));
    lines
}

fn declared_by(source: &Source) -> Option<Digest> {
    match source {
        Source::Enqueue => None,
        Source::Handler { digest, .. } | Source::Contract { digest, .. } => Some(*digest),
    }
}

/// A source with as much of the digest as the history shows.
fn source_text(source: &Source) -> String {
    match source {
        Source::Enqueue => source.to_string(),
        Source::Handler { name, digest } => format!("handler {name}@{}", digest.short()),
        Source::Contract { name, digest } => format!("contract {name}@{}", digest.short()),
    }
}

/// Why a job does not run, and what would change it.
fn waiting_lines(waiting: &Waiting, queue: &str, stamp: Option<&Stamp>, now: UnixMillis) -> Vec<String> {
    match waiting {
        Waiting::Due(at) => vec![format!("it is due at {}, in {}", rfc3339(*at), text::rough(at.since(now)))],
        Waiting::Reserved => vec!["a slot is reserved for it; a host will claim it any moment".to_owned()],
        // Which queues a host takes is not in the database, so this cannot say which of the two it is.
        Waiting::ForWorker { ahead } => vec![
            format!("it could run now; {} ahead of it in its lane", text::count(u64::from(*ahead), "job")),
            format!(
                "every worker that runs its contract is busy, or none of their hosts takes the queue `{queue}` (`warp-host run --queues {queue}`)"
            ),
        ],
        Waiting::ForHost => {
            vec!["no live host runs its contract; start one with a plugin for it (`warp-host hosts list`, `warp-host plugins`)".to_owned()]
        }
        Waiting::Paused(pause) => vec![format!(
            "its queue `{queue}` is paused by {} for {} (`warp-host queues resume {queue}`)",
            pause.by,
            text::age(pause.at, now)
        )],
        Waiting::ForKey { key, place, limit, limit_is_admin, refusal } => {
            let mut lines =
                vec![format!("it waits for the key `{}`: {refusal}", key.key), format!("place        {place} of {} in line", key.waiting)];
            let source =
                stamp.and_then(|stamp| stamp.concurrency.as_ref()).map_or_else(|| "the job".to_owned(), |c| source_text(&c.source));
            lines.push(if *limit_is_admin {
                format!(
                    "limit        {limit}, set by an operator; it outranks what is stamped on the job (`warp-host limits set` changes it)"
                )
            } else {
                format!(
                    "limit        {limit}, stamped on the job from {source}; a new plugin version does not change it, an admin limit would \
                     (`warp-host limits set '{}' N`)",
                    key.key
                )
            });
            lines.extend(holder_lines(key, now));
            lines
        }
    }
}

fn holder_lines(key: &KeySeen, now: UnixMillis) -> Vec<String> {
    let mut lines: Vec<_> = key
        .holders
        .iter()
        .take(SHOWN)
        .map(|holder| {
            let by = holder.host.as_deref().map_or_else(|| "reserved, not claimed yet".to_owned(), |host| format!("on {host}"));
            format!(
                "held by      {} ({}) {by}, for {}, at limit {}",
                holder.job,
                holder.contract,
                text::age(holder.since, now),
                holder.limit
            )
        })
        .collect();
    if key.holders.len() > SHOWN {
        lines.push(format!("             and {} more", key.holders.len() - SHOWN));
    }
    lines
}

/// Text of facts under headings. Every line is made harmless here, so no caller can forget to.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn fact(&mut self, name: &str, value: &str) {
        self.push(&format!("{name:<12} {value}"));
    }

    fn heading(&mut self, name: &str) {
        self.push("");
        self.push(name);
    }

    fn line(&mut self, line: &str) {
        self.push(&format!("  {line}"));
    }

    fn lines(&mut self, lines: Vec<String>) {
        lines.iter().for_each(|line| self.line(line));
    }

    fn push(&mut self, line: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(&text::line(line));
    }
}

async fn logs(id: JobId, run: Option<u32>, raw: bool, store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    if raw && io::stdout().is_terminal() {
        return Err(Failure::new(Exit::Refused, "--raw could let the job steer this terminal; write it to a file or a pipe"));
    }
    let lines = store.job_logs(id, run).await?;
    // No lines and no job look alike in the answer, and differ for whoever asks.
    if lines.is_empty() {
        store.job(id, now).await?.ok_or_else(|| unknown(id))?;
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let write = |out: &mut io::BufWriter<_>| -> io::Result<()> {
        for (run, line) in &lines {
            if as_json {
                writeln!(out, "{}", serde_json::to_string(&json::Log::new(*run, line))?)?;
            } else if raw {
                writeln!(out, "{}", line.text)?;
            } else {
                writeln!(out, "{run:>3}  {}  {:<6}  {}", rfc3339(line.at), line.stream, text::line(&line.text))?;
            }
        }
        out.flush()
    };
    match write(&mut out) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

#[derive(Clone, Copy)]
enum Act {
    Cancel,
    Requeue,
    Delete,
}

async fn act(act: Act, args: &IdsArgs, store: &dyn Store, as_json: bool, by: &str, now: UnixMillis) -> Outcome {
    let mut verdicts = Vec::new();
    for id in &args.ids {
        let verdict = match act {
            Act::Cancel => store.cancel(*id, by, now).await?,
            Act::Requeue => store.requeue(*id, by, now).await?,
            Act::Delete => store.delete(*id, now).await?,
        };
        if !as_json {
            text::print(format!("{id}  {}", in_words(act, verdict)))?;
        }
        verdicts.push((*id, verdict));
    }
    if as_json {
        text::print_json(&verdicts.iter().map(|(id, verdict)| json::Verdict::new(id.to_string(), *verdict)).collect::<Vec<_>>())?;
    }
    let any = |wanted: fn(&CommandVerdict) -> bool| verdicts.iter().any(|(_, verdict)| wanted(verdict));
    if any(|verdict| matches!(verdict, CommandVerdict::NotNow(_))) {
        return Err(Failure::silent(Exit::Refused));
    }
    if any(|verdict| matches!(verdict, CommandVerdict::Unknown)) {
        return Err(Failure::silent(Exit::NotFound));
    }
    Ok(())
}

fn in_words(act: Act, verdict: CommandVerdict) -> String {
    match (act, verdict) {
        (Act::Cancel, CommandVerdict::Done) => "deleted before it ran".to_owned(),
        (Act::Requeue, CommandVerdict::Done) => "enqueued again".to_owned(),
        (Act::Delete, CommandVerdict::Done) => "removed".to_owned(),
        (_, CommandVerdict::Requested) => "runs; its host has been told to stop it and does so by force after a grace".to_owned(),
        (Act::Delete, CommandVerdict::NotNow(state)) => format!("refused: it is {}; cancel it first", state.name()),
        (Act::Requeue, CommandVerdict::NotNow(state)) => format!("refused: it is {} already", state.name()),
        (Act::Cancel, CommandVerdict::NotNow(state)) => format!("refused: it is {}, so there is nothing to cancel", state.name()),
        (_, CommandVerdict::Unknown) => "no such job".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warp_domain::policy::{Stamped, Timeout, TimeoutMode};

    use super::*;

    #[test]
    fn a_policy_names_its_plugin_in_full_once() {
        let digest = Digest([0xab; 32]);
        let from = || Source::Handler { name: "h".to_owned(), digest };
        let retry = warp_domain::policy::Retry { max: 3, delays: Vec::new(), jitter_permille: 0 };
        let timeout = Timeout { per_attempt: Duration::from_secs(30), mode: TimeoutMode::Fail };
        let stamp = Stamp {
            concurrency: None,
            retry: Some(Stamped { value: retry, source: from() }),
            timeout: Some(Stamped { value: timeout, source: from() }),
        };
        let lines = policy_lines(&stamp);
        assert_eq!(
            lines,
            [
                "concurrency  none".to_owned(),
                "retry        3   from handler h@abababababab".to_owned(),
                "timeout      30s:fail   from handler h@abababababab".to_owned(),
                format!("plugin       {digest}"),
            ]
        );
    }
}
