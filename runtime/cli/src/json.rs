//! The shapes that `--json` prints.
//!
//! What must stay true: these are an interface. A field is added, never renamed, retyped or removed; absent is
//! `null`, not left out. Instants are RFC 3339 in UTC with milliseconds, durations are texts with a unit. Golden
//! tests hold every shape. A command prints one document, except `enqueue` and `jobs logs`, which print one
//! object per line so that they stream.

use std::collections::BTreeMap;

use serde::Serialize;
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry, Source, Stamp, Timeout, TimeoutMode};
use warp_domain::{RunNumber, units};
use warp_store::{
    AdminLimit, AuditRow, CommandVerdict, EnqueueVerdict, HolderSeen, HostSeen, JobDetails, JobSummary, KeySeen, LogLine, Overview, Pause,
    WaiterSeen, Waiting,
};

use crate::clock::rfc3339;

/// A verdict of `enqueue`, one per job and line.
#[derive(Debug, Serialize)]
pub struct Enqueued {
    /// `enqueued`, `duplicate` or `refused`.
    pub verdict: &'static str,
    /// The job; for a duplicate the one that was there before.
    pub id: Option<String>,
    /// Why it was refused.
    pub reason: Option<String>,
    /// The line of the batch file, from 1.
    pub line: Option<u64>,
}

impl Enqueued {
    /// Of the store's verdict.
    pub fn new(verdict: &EnqueueVerdict, line: Option<u64>) -> Self {
        let (verdict, id, reason) = match verdict {
            EnqueueVerdict::Enqueued(id) => ("enqueued", Some(id.to_string()), None),
            EnqueueVerdict::Duplicate(id) => ("duplicate", Some(id.to_string()), None),
            EnqueueVerdict::Refused(why) => ("refused", None, Some(why.clone())),
        };
        Enqueued { verdict, id, reason, line }
    }
}

/// A job in a list.
#[derive(Debug, Serialize)]
pub struct Job {
    /// The id.
    pub id: String,
    /// The contract.
    pub contract: String,
    /// The queue.
    pub queue: String,
    /// The state's name.
    pub state: &'static str,
    /// Whether it waits for a key.
    pub parked: bool,
    /// Starts so far.
    pub runs: u32,
    /// Charged attempts so far.
    pub attempts: u32,
    /// When it was enqueued.
    pub created_at: String,
    /// When its state last changed.
    pub changed_at: String,
    /// When it is due, if Scheduled.
    pub due: Option<String>,
}

impl From<&JobSummary> for Job {
    fn from(job: &JobSummary) -> Self {
        let JobSummary { id, contract, queue, state, parked, runs, attempts, created_at, changed_at, due } = job;
        Job {
            id: id.to_string(),
            contract: contract.clone(),
            queue: queue.clone(),
            state: state.name(),
            parked: *parked,
            runs: *runs,
            attempts: *attempts,
            created_at: rfc3339(*created_at),
            changed_at: rfc3339(*changed_at),
            due: due.map(rfc3339),
        }
    }
}

/// Everything about a job.
#[derive(Debug, Serialize)]
pub struct Details {
    /// What a list shows.
    #[serde(flatten)]
    pub job: Job,
    /// The payload, as the text that was enqueued.
    pub payload: String,
    /// User metadata in order.
    pub metadata: Vec<(String, String)>,
    /// W3C `traceparent`.
    pub trace_parent: Option<String>,
    /// The unique key.
    pub unique_key: Option<String>,
    /// What the caller declared.
    pub declared: Policy,
    /// The policy on the row; `null` before the first claim.
    pub stamp: Option<Policy>,
    /// The keys that it rendered to.
    pub keys: Vec<String>,
    /// Who runs it.
    pub running: Option<Running>,
    /// Why it does not run.
    pub waiting: Option<WaitingFor>,
    /// The result of a Completed job.
    pub result: Option<String>,
    /// The last failure.
    pub error: Option<String>,
    /// The history, oldest first.
    pub audit: Vec<Audit>,
    /// The last report of each name, in percent.
    pub progress: BTreeMap<String, f32>,
    /// Lines and bytes of output that caps kept out.
    pub dropped: Dropped,
}

/// Who runs a job.
#[derive(Debug, Serialize)]
pub struct Running {
    /// The host's name.
    pub host: String,
    /// The plugin version.
    pub digest: String,
}

/// What caps kept out.
#[derive(Debug, Serialize)]
pub struct Dropped {
    /// Lines.
    pub lines: u64,
    /// Bytes.
    pub bytes: u64,
}

impl From<&JobDetails> for Details {
    fn from(details: &JobDetails) -> Self {
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
            dropped: (lines, bytes),
        } = details;
        Details {
            job: summary.into(),
            payload: payload.clone(),
            metadata: metadata.clone(),
            trace_parent: trace_parent.clone(),
            unique_key: unique_key.clone(),
            declared: explicit.into(),
            stamp: stamp.as_ref().map(Policy::from),
            keys: keys.clone(),
            running: running.as_ref().map(|(host, digest)| Running { host: host.clone(), digest: digest.to_string() }),
            waiting: waiting.as_ref().map(WaitingFor::from),
            result: result.clone(),
            error: error.clone(),
            audit: audit.iter().map(Audit::from).collect(),
            progress: progress.iter().cloned().collect(),
            dropped: Dropped { lines: *lines, bytes: *bytes },
        }
    }
}

/// A policy, family by family; `null` where nothing is declared.
#[derive(Debug, Serialize)]
pub struct Policy {
    /// Mutex or semaphore.
    pub concurrency: Option<ConcurrencyRule>,
    /// Retry.
    pub retry: Option<RetryRule>,
    /// Per-attempt timeout.
    pub timeout: Option<TimeoutRule>,
}

/// The concurrency family.
#[derive(Debug, Serialize)]
pub struct ConcurrencyRule {
    /// `mutex` or `semaphore`.
    pub kind: &'static str,
    /// Key templates.
    pub keys: Vec<String>,
    /// How many at a time.
    pub limit: u32,
    /// Slots that one job takes.
    pub weight: u32,
    /// `skip` or `wait`.
    pub mode: &'static str,
    /// `any` or `fifo`.
    pub order: &'static str,
    /// `block` or `pass`.
    pub on_retry: &'static str,
    /// Where it came from: `enqueue`, `handler NAME@DIGEST`, `contract NAME@DIGEST`.
    pub source: String,
}

/// The retry family.
#[derive(Debug, Serialize)]
pub struct RetryRule {
    /// Further attempts after the first.
    pub max: u32,
    /// Waits between them; the last repeats.
    pub delays: Vec<String>,
    /// From 0 to 1.
    pub jitter: f64,
    /// Where it came from.
    pub source: String,
}

/// The timeout family.
#[derive(Debug, Serialize)]
pub struct TimeoutRule {
    /// How long one attempt may take.
    pub per_attempt: String,
    /// `fail` or `delete`.
    pub mode: &'static str,
    /// Where it came from.
    pub source: String,
}

/// `mutex` or `semaphore`.
pub fn kind_name(kind: ConcurrencyKind) -> &'static str {
    match kind {
        ConcurrencyKind::Mutex => "mutex",
        ConcurrencyKind::Semaphore => "semaphore",
    }
}

/// `skip` or `wait`.
pub fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Skip => "skip",
        Mode::Wait => "wait",
    }
}

/// `any` or `fifo`.
pub fn order_name(order: Order) -> &'static str {
    match order {
        Order::Any => "any",
        Order::Fifo => "fifo",
    }
}

fn concurrency_rule(value: &Concurrency, source: &Source) -> ConcurrencyRule {
    let Concurrency { kind, keys, limit, weight, mode, order, on_retry } = value;
    ConcurrencyRule {
        kind: kind_name(*kind),
        keys: keys.iter().map(ToString::to_string).collect(),
        limit: *limit,
        weight: *weight,
        mode: mode_name(*mode),
        order: order_name(*order),
        on_retry: match on_retry {
            OnRetry::Block => "block",
            OnRetry::Pass => "pass",
        },
        source: source.to_string(),
    }
}

fn retry_rule(value: &Retry, source: &Source) -> RetryRule {
    let Retry { max, delays, jitter_permille } = value;
    RetryRule {
        max: *max,
        delays: delays.iter().map(|delay| units::format_duration(*delay)).collect(),
        jitter: f64::from(*jitter_permille) / 1000.0,
        source: source.to_string(),
    }
}

fn timeout_rule(value: &Timeout, source: &Source) -> TimeoutRule {
    let Timeout { per_attempt, mode } = value;
    TimeoutRule {
        per_attempt: units::format_duration(*per_attempt),
        mode: match mode {
            TimeoutMode::Fail => "fail",
            TimeoutMode::Delete => "delete",
        },
        source: source.to_string(),
    }
}

impl From<&Stamp> for Policy {
    fn from(stamp: &Stamp) -> Self {
        let Stamp { concurrency, retry, timeout } = stamp;
        Policy {
            concurrency: concurrency.as_ref().map(|stamped| concurrency_rule(&stamped.value, &stamped.source)),
            retry: retry.as_ref().map(|stamped| retry_rule(&stamped.value, &stamped.source)),
            timeout: timeout.as_ref().map(|stamped| timeout_rule(&stamped.value, &stamped.source)),
        }
    }
}

impl From<&Declared> for Policy {
    fn from(declared: &Declared) -> Self {
        let Declared { concurrency, retry, timeout } = declared;
        Policy {
            concurrency: concurrency.as_ref().map(|value| concurrency_rule(value, &Source::Enqueue)),
            retry: retry.as_ref().map(|value| retry_rule(value, &Source::Enqueue)),
            timeout: timeout.as_ref().map(|value| timeout_rule(value, &Source::Enqueue)),
        }
    }
}

/// Why a job does not run.
#[derive(Debug, Serialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum WaitingFor {
    /// Its time.
    Due {
        /// When.
        at: String,
    },
    /// A key.
    Key {
        /// The key with holders and waiters.
        key: Key,
        /// From 1.
        place: u32,
        /// The limit that counts for it.
        limit: u32,
        /// `admin` or `stamp`. A stamped limit is outranked by an admin limit, whenever one is set.
        limit_from: &'static str,
        /// What refused it.
        refusal: String,
    },
    /// Nothing: a slot is reserved, and a host will claim it any moment.
    Reserved,
    /// A free worker.
    Worker {
        /// Jobs ahead of it in its lane, counted up to 1,000.
        ahead: u32,
    },
    /// A host that runs its contract and is not paused; none is alive.
    Host,
    /// Its queue, which is paused.
    Queue {
        /// By whom.
        paused: Paused,
    },
}

impl From<&Waiting> for WaitingFor {
    fn from(waiting: &Waiting) -> Self {
        match waiting {
            Waiting::Due(at) => WaitingFor::Due { at: rfc3339(*at) },
            Waiting::ForKey { key, place, limit, limit_is_admin, refusal } => WaitingFor::Key {
                key: key.into(),
                place: *place,
                limit: *limit,
                limit_from: if *limit_is_admin { "admin" } else { "stamp" },
                refusal: refusal.clone(),
            },
            Waiting::Reserved => WaitingFor::Reserved,
            Waiting::ForWorker { ahead } => WaitingFor::Worker { ahead: *ahead },
            Waiting::ForHost => WaitingFor::Host,
            Waiting::Paused(pause) => WaitingFor::Queue { paused: pause.into() },
        }
    }
}

/// One row of a job's history.
#[derive(Debug, Serialize)]
pub struct Audit {
    /// When.
    pub at: String,
    /// What happened.
    pub event: String,
    /// In which run; 0 for none.
    pub run: RunNumber,
    /// In words.
    pub message: String,
    /// On which host.
    pub host: Option<String>,
    /// With which plugin version.
    pub digest: Option<String>,
    /// How long the run took, on its last row.
    pub took: Option<String>,
}

impl From<&AuditRow> for Audit {
    fn from(row: &AuditRow) -> Self {
        let AuditRow { at, event, run, message, host, digest, took } = row;
        Audit {
            at: rfc3339(*at),
            event: event.clone(),
            run: *run,
            message: message.clone(),
            host: host.clone(),
            digest: digest.map(|digest| digest.to_string()),
            took: took.map(units::format_duration),
        }
    }
}

/// A key with everybody who wants it.
#[derive(Debug, Serialize)]
pub struct Key {
    /// The key.
    pub key: String,
    /// The operator's limit.
    pub admin_limit: Option<u32>,
    /// Slots taken.
    pub holders: Vec<Holder>,
    /// In the order of their turn; `keys list` leaves them out.
    pub waiters: Vec<Waiter>,
    /// How many wait in all.
    pub waiting: u32,
}

/// Who holds a slot.
#[derive(Debug, Serialize)]
pub struct Holder {
    /// The job.
    pub job: String,
    /// Its contract.
    pub contract: String,
    /// Its host; `null` while the slot is reserved for a job that no host has claimed yet.
    pub host: Option<String>,
    /// The slot's number.
    pub slot: u32,
    /// The limit stamped on it.
    pub limit: u32,
    /// Since when.
    pub since: String,
}

/// Who waits.
#[derive(Debug, Serialize)]
pub struct Waiter {
    /// Its place in line, from 1.
    pub place: usize,
    /// The job.
    pub job: String,
    /// Its contract.
    pub contract: String,
    /// The limit stamped on it.
    pub limit: u32,
    /// Slots that it takes.
    pub weight: u32,
    /// Since when.
    pub since: String,
    /// Whether a live host runs its contract.
    pub claimable: bool,
}

impl From<&KeySeen> for Key {
    fn from(seen: &KeySeen) -> Self {
        let KeySeen { key, admin_limit, holders, waiters, waiting } = seen;
        let holder = |holder: &HolderSeen| {
            let HolderSeen { job, contract, host, slot, limit, since } = holder;
            Holder {
                job: job.to_string(),
                contract: contract.clone(),
                host: host.clone(),
                slot: *slot,
                limit: *limit,
                since: rfc3339(*since),
            }
        };
        let waiter = |(at, waiter): (usize, &WaiterSeen)| {
            let WaiterSeen { job, contract, limit, weight, since, claimable } = waiter;
            Waiter {
                place: at + 1,
                job: job.to_string(),
                contract: contract.clone(),
                limit: *limit,
                weight: *weight,
                since: rfc3339(*since),
                claimable: *claimable,
            }
        };
        Key {
            key: key.clone(),
            admin_limit: *admin_limit,
            holders: holders.iter().map(holder).collect(),
            waiters: waiters.iter().enumerate().map(waiter).collect(),
            waiting: *waiting,
        }
    }
}

/// An admin limit.
#[derive(Debug, Serialize)]
pub struct Limit {
    /// The key.
    pub key: String,
    /// 0 pauses the key.
    pub limit: u32,
    /// Who set it.
    pub set_by: String,
    /// When.
    pub set_at: String,
}

impl From<&AdminLimit> for Limit {
    fn from(seen: &AdminLimit) -> Self {
        let AdminLimit { key, limit, set_by, set_at } = seen;
        Limit { key: key.clone(), limit: *limit, set_by: set_by.clone(), set_at: rfc3339(*set_at) }
    }
}

/// What `limits remove` did.
#[derive(Debug, Serialize)]
pub struct LimitRemoved {
    /// The key.
    pub key: String,
    /// Whether there was a limit.
    pub removed: bool,
}

/// A host.
#[derive(Debug, Serialize)]
pub struct Host {
    /// Its registration.
    pub host: i64,
    /// Machine name and process id.
    pub name: String,
    /// Grows while the host is alive.
    pub renewals: i64,
    /// When it registered.
    pub started_at: String,
    /// When it last renewed, by its own clock.
    pub renewed_at: String,
    /// Jobs that it runs.
    pub running: u32,
    /// Whether its process has certainly ended; its jobs are about to be given back.
    pub gone: bool,
    /// Who paused it, if it starts nothing new.
    pub paused: Option<Paused>,
}

/// An operator's pause.
#[derive(Debug, Serialize)]
pub struct Paused {
    /// Who.
    pub by: String,
    /// When.
    pub at: String,
}

impl From<&Pause> for Paused {
    fn from(pause: &Pause) -> Self {
        let Pause { by, at } = pause;
        Paused { by: by.clone(), at: rfc3339(*at) }
    }
}

/// A queue that is paused.
#[derive(Debug, Serialize)]
pub struct PausedQueue {
    /// The queue.
    pub queue: String,
    /// By whom.
    pub paused: Paused,
}

impl From<(&String, &Pause)> for PausedQueue {
    fn from((queue, pause): (&String, &Pause)) -> Self {
        PausedQueue { queue: queue.clone(), paused: pause.into() }
    }
}

/// What `pause` or `resume` did.
#[derive(Debug, Serialize)]
pub struct PauseChanged {
    /// `queue` or `host`.
    pub what: &'static str,
    /// Which.
    pub name: String,
    /// Whether it is paused now.
    pub paused: bool,
    /// Whether that is new.
    pub changed: bool,
}

impl From<&HostSeen> for Host {
    fn from(seen: &HostSeen) -> Self {
        let HostSeen { host, name, renewals, started_at, renewed_at, running, gone, paused } = seen;
        Host {
            host: host.0,
            name: name.clone(),
            renewals: *renewals,
            started_at: rfc3339(*started_at),
            renewed_at: rfc3339(*renewed_at),
            running: *running,
            gone: *gone,
            paused: paused.as_ref().map(Paused::from),
        }
    }
}

/// States and counters.
#[derive(Debug, Serialize)]
pub struct Status {
    /// Jobs by state, every state present.
    pub states: BTreeMap<&'static str, u64>,
    /// How many of the Enqueued wait for a key.
    pub parked: u64,
    /// What has happened so far.
    pub counters: BTreeMap<String, i64>,
    /// Contracts that a live host runs.
    pub served: Vec<String>,
    /// Queues that are paused.
    pub paused_queues: Vec<PausedQueue>,
}

impl Status {
    /// Of what the store answered.
    pub fn new(overview: &Overview, served: Vec<String>) -> Self {
        let Overview { states, parked, counters, paused_queues } = overview;
        let all = warp_domain::ending::State::ALL;
        Status {
            states: all.into_iter().map(|state| (state.name(), states.get(&state).copied().unwrap_or(0))).collect(),
            parked: *parked,
            counters: counters.clone(),
            served,
            paused_queues: paused_queues.iter().map(PausedQueue::from).collect(),
        }
    }
}

/// What a command on a job did.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// The job.
    pub id: String,
    /// `done`, `requested`, `not-now` or `unknown`.
    pub verdict: &'static str,
    /// The state that does not allow it.
    pub state: Option<&'static str>,
}

impl Verdict {
    /// Of the store's verdict.
    pub fn new(id: String, verdict: CommandVerdict) -> Self {
        let (verdict, state) = match verdict {
            CommandVerdict::Done => ("done", None),
            CommandVerdict::Requested => ("requested", None),
            CommandVerdict::NotNow(state) => ("not-now", Some(state.name())),
            CommandVerdict::Unknown => ("unknown", None),
        };
        Verdict { id, verdict, state }
    }
}

/// A line of a job's output, one object per line.
#[derive(Debug, Serialize)]
pub struct Log {
    /// The run.
    pub run: RunNumber,
    /// When.
    pub at: String,
    /// `stdout`, `stderr` or a log level.
    pub stream: &'static str,
    /// The text as the guest wrote it; JSON escapes what is not printable.
    pub text: String,
}

impl Log {
    /// Of a stored line.
    pub fn new(run: RunNumber, line: &LogLine) -> Self {
        let LogLine { at, stream, text } = line;
        Log { run, at: rfc3339(*at), stream, text: text.clone() }
    }
}

/// A setting of `run --print-config`.
#[derive(Debug, Serialize)]
pub struct SettingRow {
    /// The key in `warp.toml`.
    pub name: String,
    /// The value in force.
    pub value: String,
    /// `default`, `warp.toml:LINE`, a variable or a flag.
    pub origin: String,
}

/// What `migrate` did or, with `--dry-run`, would do.
#[derive(Debug, Serialize)]
pub struct Migrated {
    /// The file, or the address without a password.
    pub database: String,
    /// Whether the file or the schema was made.
    pub created: bool,
    /// Whether nothing was changed.
    pub dry_run: bool,
    /// What was applied, or would be.
    pub migrations: Vec<String>,
}

/// What slots are made of.
#[derive(Debug, Serialize)]
pub struct LocksSeen {
    /// `ledger` or `session`.
    pub locks: &'static str,
    /// Who said so; `null` where there is no choice.
    pub set_by: Option<String>,
    /// When; `null` when the schema was made with it.
    pub set_at: Option<String>,
}

/// What `backup` did.
#[derive(Debug, Serialize)]
pub struct BackedUp {
    /// The file.
    pub database: String,
    /// Its copy.
    pub copy: String,
    /// The copy's size.
    pub bytes: u64,
}

/// What `new` wrote.
#[derive(Debug, Serialize)]
pub struct Created {
    /// The project's directory.
    pub dir: String,
    /// Its files, relative to it.
    pub files: Vec<String>,
}

/// A contract that a plugin runs.
#[derive(Debug, Serialize)]
pub struct PluginContract {
    /// The contract.
    pub contract: String,
    /// The handler.
    pub handler: String,
    /// What its jobs follow unless the enqueue call says otherwise.
    pub policy: Policy,
}

/// A file of the directory of plugins.
#[derive(Debug, Serialize)]
pub struct Plugin {
    /// The file.
    pub file: String,
    /// The plugin's name, if its manifest is good.
    pub name: Option<String>,
    /// The author's version.
    pub version: Option<String>,
    /// The plugin version.
    pub digest: Option<String>,
    /// What it runs.
    pub contracts: Vec<PluginContract>,
    /// `would load` or `refused`.
    pub state: &'static str,
    /// Why it is refused, one line each.
    pub refusals: Vec<String>,
    /// What is odd about it.
    pub warnings: Vec<String>,
}

/// Something that is wrong or odd about a file.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// The file.
    pub file: String,
    /// From 1; `null` when the whole file is meant.
    pub line: Option<usize>,
    /// From 1, in characters.
    pub column: Option<usize>,
    /// The path of the key in the manifest.
    pub key: Option<String>,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

/// What `check` found.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// Whether a host would load all of it.
    pub good: bool,
    /// File by file.
    pub files: Vec<Checked>,
    /// What the files say against each other.
    pub together: CheckedTogether,
}

/// What `check` found in a file.
#[derive(Debug, Serialize)]
pub struct Checked {
    /// The file.
    pub file: String,
    /// Whether a host would load it, as far as can be told without grants.
    pub good: bool,
    /// Why not.
    pub refusals: Vec<Finding>,
    /// What is odd.
    pub warnings: Vec<Finding>,
}

/// What several files say against each other.
#[derive(Debug, Serialize)]
pub struct CheckedTogether {
    /// Why they cannot serve together.
    pub refusals: Vec<Finding>,
    /// What is odd.
    pub warnings: Vec<Finding>,
}

/// What `inspect` shows.
#[derive(Debug, Serialize)]
pub struct Inspected {
    /// The file.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// The plugin version.
    pub digest: String,
    /// The plugin's name.
    pub name: String,
    /// The author's version.
    pub version: String,
    /// What it runs.
    pub contracts: Vec<PluginContract>,
    /// What it asks the operator for.
    pub capabilities: Capabilities,
    /// Interfaces that it imports.
    pub imports: Vec<String>,
    /// Functions that it exports.
    pub exports: Vec<String>,
    /// Why a host would not link it.
    pub refusals: Vec<Finding>,
    /// What is odd about it.
    pub warnings: Vec<Finding>,
}

/// What a manifest asks for.
#[derive(Debug, Serialize)]
pub struct Capabilities {
    /// Directories.
    pub files: Vec<AskedFile>,
    /// Variables.
    pub env: Vec<String>,
    /// Buckets of shared state.
    pub state: Vec<AskedBucket>,
    /// Memory, with its unit; `null` is the default.
    pub memory: Option<String>,
}

/// A directory that a manifest asks for.
#[derive(Debug, Serialize)]
pub struct AskedFile {
    /// As the guest names it.
    pub path: String,
    /// `read` or `write`.
    pub mode: &'static str,
}

/// A bucket that a manifest asks for.
#[derive(Debug, Serialize)]
pub struct AskedBucket {
    /// Its name.
    pub bucket: String,
    /// `settle` or `now`.
    pub commit: &'static str,
    /// `any` or `under-mutex`.
    pub write: &'static str,
}

/// What `pack` wrote.
#[derive(Debug, Serialize)]
pub struct Packed {
    /// The file.
    pub file: String,
    /// The plugin's name.
    pub name: String,
    /// The author's version.
    pub version: String,
    /// The plugin version.
    pub digest: String,
    /// The file's size.
    pub bytes: u64,
}

/// A change between two manifests.
#[derive(Debug, Serialize)]
pub struct PolicyChange {
    /// The path of what changes.
    pub path: String,
    /// From what to what.
    pub what: String,
    /// What it means for jobs in flight.
    pub in_flight: String,
}

/// What `grant` wrote or, with `--dry-run`, would write.
#[derive(Debug, Serialize)]
pub struct GrantWritten {
    /// The plugin.
    pub plugin: String,
    /// The file.
    pub file: String,
    /// Whether nothing was written.
    pub dry_run: bool,
    /// What is granted now and was not before.
    pub changes: Vec<String>,
    /// The whole table of the plugin.
    pub table: String,
}

/// What `try` saw.
#[derive(Debug, Serialize)]
pub struct Tried {
    /// `completed`, `retryable`, `permanent`, `snooze`, `trapped`, `timed-out` or `unacceptable`.
    pub outcome: &'static str,
    /// The result, or why there is none.
    pub text: String,
    /// What it printed and logged.
    pub lines: Vec<TriedLine>,
    /// What caps kept out.
    pub dropped: Dropped,
    /// The last report of each name, in percent.
    pub progress: BTreeMap<String, f32>,
    /// What it would have enqueued.
    pub children: Vec<TriedChild>,
    /// Shared state as it left it.
    pub state: Vec<TriedState>,
    /// Until the instance was ready.
    pub instantiate_ms: f64,
    /// From then to the end.
    pub call_ms: f64,
    /// The most memory that it had at once.
    pub peak_memory_bytes: u64,
}

/// A line of output.
#[derive(Debug, Serialize)]
pub struct TriedLine {
    /// `stdout`, `stderr` or a log level.
    pub stream: &'static str,
    /// The text.
    pub text: String,
}

/// A job that would have been enqueued.
#[derive(Debug, Serialize)]
pub struct TriedChild {
    /// The contract.
    pub contract: String,
    /// The payload, as text.
    pub payload: String,
    /// The queue; `null` is the parent's.
    pub queue: Option<String>,
    /// Counted from the parent's end.
    pub delay: String,
    /// At most one such job among those not ended.
    pub unique_key: Option<String>,
}

/// A value of shared state.
#[derive(Debug, Serialize)]
pub struct TriedState {
    /// The bucket.
    pub bucket: String,
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
}
