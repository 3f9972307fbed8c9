//! The trait, its parameters and its results.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use warp_domain::ending::{Ending, State};
use warp_domain::policy::{Declared, Stamp};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, RunNumber, UnixMillis};

use crate::StoreError;

/// The result of a store call.
pub type Result<T> = std::result::Result<T, StoreError>;

/// The largest payload, in bytes, that any entry path accepts.
pub const MAX_PAYLOAD_BYTES: usize = 10 << 20;
/// The deepest nesting of a payload: one less than what the parser takes apart, so that its own limit is never met.
pub const MAX_PAYLOAD_DEPTH: usize = 127;
/// The longest contract, handler or queue name, in bytes.
pub const MAX_NAME_BYTES: usize = 200;
/// The most waiters of one key that a question about it lists.
pub const MAX_LISTED: u32 = 1000;

// --------------------------------------------------------------------------------------------- enqueue

/// A job to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct NewJob {
    /// Its id, drawn by the caller, so that a repeat after an unknown outcome is recognised.
    pub id: JobId,
    /// The contract.
    pub contract: String,
    /// The queue.
    pub queue: String,
    /// JSON text, stored exactly.
    pub payload: String,
    /// User metadata in order. Children inherit it; policy is never inherited.
    pub metadata: Vec<(String, String)>,
    /// W3C `traceparent`.
    pub trace_parent: Option<String>,
    /// When it becomes runnable; `None` is at once.
    pub due: Option<UnixMillis>,
    /// What the caller declares; it outranks handler and contract, and is stamped at once.
    pub explicit: Declared,
    /// At most one job with this key exists among those that have not ended.
    pub unique_key: Option<String>,
}

/// What became of one [`NewJob`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnqueueVerdict {
    /// It is stored and will not be lost.
    Enqueued(JobId),
    /// A job with its unique key, or with its id, is there already: this one.
    Duplicate(JobId),
    /// It can never be stored; why.
    Refused(String),
}

// --------------------------------------------------------------------------------------------- hosts

/// One contract that a host can run now.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// What plugin, contract and handler declare; carries the names and the plugin's digest.
    pub declarations: Arc<Declarations>,
}

/// A host that says hello.
#[derive(Debug, Clone)]
pub struct HostInfo {
    /// For people: machine name and process id.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// Now.
    pub now: UnixMillis,
}

/// A host as others see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSeen {
    /// Its registration.
    pub host: HostId,
    /// For people.
    pub name: String,
    /// Grows with every renewal. A rescuer must have seen the same number for a whole lease on its own
    /// monotonic clock; the number is watched, not compared with a time, so a stepped clock rescues nobody.
    pub renewals: i64,
    /// When it registered, by its own clock.
    pub started_at: UnixMillis,
    /// When it last renewed, by its own clock; for people only.
    pub renewed_at: UnixMillis,
    /// How many rows it is running.
    pub running: u32,
    /// Whether the driver knows for certain that its process has ended, so that nobody need wait for its lease.
    pub gone: bool,
    /// Who paused it, if somebody has: it starts nothing new.
    pub paused: Option<Pause>,
}

/// An operator's word that a queue or a host starts nothing new until somebody takes it back. What runs goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// Who.
    pub by: String,
    /// When.
    pub at: UnixMillis,
}

/// A host's regular tick: one call that does all that is due for it.
#[derive(Debug, Clone)]
pub struct RenewParams {
    /// Whose lease. A host that was rescued gets [`crate::StoreErrorKind::HostLost`].
    pub host: HostId,
    /// Every run that the host knows and has no answer for yet: what runs or waits in it, and ends that are on their
    /// way. No claim of this host is under way meanwhile, ends may be.
    pub known: Vec<(JobHandle, ClaimToken)>,
    /// How long a reservation (or wake) of any host may stay unclaimed (B7), as in [`Store::expire_reservations`].
    pub patience: Duration,
    /// Now.
    pub now: UnixMillis,
}

/// What a renewal found and did besides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Renewed {
    /// Rows under this host's name that it did not know; they have been handed back uncharged.
    pub handed_back: u32,
    /// Runs among the known ones, in their order, that the store does not have under this host: nothing they say
    /// counts. Ends that were written while the renewal was on its way are among them.
    pub lost: Vec<(JobHandle, ClaimToken)>,
    /// Every registered host after the renewal, the one that renews included, as in [`Store::hosts`].
    pub hosts: Vec<HostSeen>,
    /// Reservations (and wakes) that nobody claimed within the patience and that went back into their lines. A fault
    /// among these does not fail the renewal.
    pub expired: u32,
    /// Whether, after that, something is reserved or woken that nobody has claimed yet.
    pub reserved: bool,
}

/// What a rescue did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rescued {
    /// Rows given back, uncharged.
    pub requeued: u32,
    /// Rows Failed because their hosts died under them too often.
    pub exhausted: u32,
}

// --------------------------------------------------------------------------------------------- settle and claim

/// A lane: one contract in one queue. A claim visits the lanes its host can run, each with its own limit.
#[derive(Debug, Clone)]
pub struct Lane {
    /// The queue.
    pub queue: String,
    /// Contract, handler, digest and what they declare.
    pub declarations: Arc<Declarations>,
}

/// What a host would like to start.
#[derive(Debug, Clone)]
pub struct ClaimParams {
    /// The lanes.
    pub lanes: Arc<[Lane]>,
    /// At most so many rows.
    pub max: u32,
}

/// How a claimed run of one key stands with it, where a slot of that key may pass from run to run inside a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// It holds a slot.
    Holds(KeyId),
    /// A *local waiter*: it holds none, and begins in the place of a run of this host that does (slots.md B8), or not
    /// at all.
    Waits(KeyId),
}

/// Of this key a host would take so many jobs more that wait inside it, because it holds slots of the key and its runs
/// are short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitersWanted {
    /// The key.
    pub key: KeyId,
    /// At most so many.
    pub most: u32,
}

/// A slot goes from one run of a host to a local waiter of it (slots.md B8). It is written with the end of the run
/// that it comes from, or after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The key.
    pub key: KeyId,
    /// Whose slot it was.
    pub from: (JobHandle, ClaimToken),
    /// Whose it is.
    pub to: (JobHandle, ClaimToken),
}

/// Slots that pass on inside a host. A driver that never answers with [`Claimed::local`] is never sent anything here.
#[derive(Debug, Clone, Default)]
pub struct HandOff {
    /// What has passed, in order: a slot may go through several runs. They are written before the ends.
    pub passes: Arc<[Pass]>,
    /// Local waiters that the claim may bring. Without a claim it has no meaning.
    pub wanted: Arc<[WaitersWanted]>,
    /// How many of them may come beyond [`ClaimParams::max`]; further ones are among those.
    pub extra: u32,
}

/// A job that this host now runs.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The store's name of the row.
    pub handle: JobHandle,
    /// The public id.
    pub id: JobId,
    /// To be shown with every write about this run.
    pub token: ClaimToken,
    /// How often it has been started, this time included.
    pub run: RunNumber,
    /// Its number in the retry budget, this time included.
    pub attempt: u32,
    /// The lane it came through: contract, handler and plugin digest of this run.
    pub lane: Lane,
    /// JSON text.
    pub payload: Arc<str>,
    /// User metadata.
    pub metadata: Vec<(String, String)>,
    /// W3C `traceparent`.
    pub trace_parent: Option<String>,
    /// The policy on its row.
    pub stamp: Arc<Stamp>,
    /// Whether it holds slots.
    pub keyed: bool,
    /// If it holds slots: a number that grows with every holder of its keys, drawn after the grant.
    pub fence: Option<u64>,
    /// Whether its slot may pass on inside this host, or whether it waits here for one that does.
    pub local: Option<Local>,
    /// When it was enqueued.
    pub created_at: UnixMillis,
    /// When it was claimed.
    pub claimed_at: UnixMillis,
}

/// One line of output or log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// When.
    pub at: UnixMillis,
    /// `stdout`, `stderr`, or the level of a `log` call: `trace`, `debug`, `info`, `warn`, `error`.
    pub stream: &'static str,
    /// The text, valid UTF-8, without its line end; fields of a log call are appended as `name=value`.
    pub text: String,
}

/// What a run left to read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunOutput {
    /// Lines in order.
    pub lines: Vec<LogLine>,
    /// Lines that a cap kept out.
    pub dropped_lines: u64,
    /// Their bytes.
    pub dropped_bytes: u64,
    /// The last report of each name.
    pub progress: Vec<(String, f32)>,
}

/// One write to shared state that commits with a settle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateWrite {
    /// The bucket.
    pub bucket: String,
    /// The key.
    pub key: String,
    /// What to do.
    pub change: StateChange,
}

/// A change of one value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateChange {
    /// Write it whatever was there; `None` removes.
    Put(Option<String>),
    /// Write `value` if the value is `expected`, else conflict.
    CompareAndSet {
        /// What must be there; `None` is nothing.
        expected: Option<String>,
        /// What to write; `None` removes.
        value: Option<String>,
    },
    /// Add a decimal integer to what is there (nothing counts as 0).
    Add(i128),
}

/// What a state write answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateVerdict {
    /// Written; the value now there.
    Written(Option<String>),
    /// `expected` was not there; this was.
    Conflict(Option<String>),
    /// The value is not a decimal integer.
    NotANumber(String),
    /// The run is not this host's any more; nothing was written.
    Late,
}

/// A run's end.
#[derive(Debug, Clone)]
pub struct Settle {
    /// The row.
    pub handle: JobHandle,
    /// The run's token.
    pub token: ClaimToken,
    /// Where the job goes.
    pub ending: Ending,
    /// Where it goes instead if a state write conflicts; then no child and no state is written.
    pub on_conflict: Ending,
    /// What it left to read (what [`Store::append_output`] has not stored yet).
    pub output: RunOutput,
    /// Written with a Completed ending, or not at all.
    pub children: Vec<NewJob>,
    /// Written with a Completed ending, or not at all.
    pub state: Vec<StateWrite>,
    /// How long the run took.
    pub took: Duration,
}

/// What became of a [`Settle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SettleVerdict {
    /// Written.
    Settled,
    /// It had been written before, by an earlier try of this very settle whose answer was lost.
    Repeated,
    /// The token is not the row's any more; nothing was changed (C1).
    Late,
    /// A state write conflicted, and the job took `on_conflict`.
    Conflicted,
    /// Its data can never be stored; the job was Failed with that message and nothing else of it was written.
    Poison,
}

/// One round trip of a host: ends first, then new work, in one transaction.
#[derive(Debug, Clone)]
pub struct ExchangeParams {
    /// Who asks. A host that was rescued gets [`crate::StoreErrorKind::HostLost`].
    pub host: HostId,
    /// Now, for due times and for people. Drivers whose server has a clock use that one.
    pub now: UnixMillis,
    /// Ends of runs.
    pub settles: Arc<[Settle]>,
    /// New work, if any is wanted.
    pub claim: Option<ClaimParams>,
    /// Slots that pass on inside the host.
    pub hand_off: HandOff,
}

/// What an exchange did.
#[derive(Debug, Clone, Default)]
pub struct Exchanged {
    /// One verdict for each settle, in order.
    pub settled: Vec<SettleVerdict>,
    /// What the host now runs. Nothing where no claim was asked for.
    pub claimed: Vec<Claimed>,
    /// Whether another claim would find more at once. Lanes that are paused have none, and a driver may leave what others
    /// should have first: that [`Store::changed`] tells of, here too.
    pub more: bool,
    /// When the next scheduled job falls due, if there is one, on the caller's clock: a driver that decides by its
    /// server's clock gives [`ExchangeParams::now`] plus what the server would wait.
    pub next_due: Option<UnixMillis>,
    /// How many rows this exchange reserved (or woke for a key) and did not claim itself: somebody must look after
    /// the patience whether they have been claimed (B7).
    pub reserved: u32,
    /// How many candidates were parked.
    pub parked: u32,
    /// How many of those had been parked before.
    pub parked_again: u32,
    /// How many were skipped.
    pub skipped: u32,
    /// How many Failed because their policy could not be applied.
    pub unacceptable: u32,
    /// Local waiters to which a slot was passed that the store does not know of: what they began is stopped by force.
    /// Nobody is, unless a host has passed on what it did not hold.
    pub not_passed: Vec<ClaimToken>,
}

/// Something a host must hear about a run of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CancelSignal {
    /// The row.
    pub handle: JobHandle,
    /// The run.
    pub token: ClaimToken,
}

/// What a host must hear soon while it has something to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signals {
    /// Runs of this host that somebody wants cancelled.
    pub cancelled: Vec<CancelSignal>,
    /// Whether the host is paused: what it has claimed and not begun goes back.
    pub host_paused: bool,
    /// Queues that are paused: the same for their jobs.
    pub paused_queues: Vec<String>,
}

impl Exchanged {
    /// How many of the claimed count against [`ClaimParams::max`]: all but so many local waiters that come beside it
    /// ([`HandOff::extra`]).
    #[must_use]
    pub fn counted(&self, extra: u32) -> usize {
        let waits = self.claimed.iter().filter(|claimed| matches!(claimed.local, Some(Local::Waits(_)))).take(extra as usize);
        self.claimed.len() - waits.count()
    }
}

/// How often a host should look for work without having been told to: the safety net under [`Store::changed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Polling {
    /// The pause after a look that found something.
    pub shortest: Duration,
    /// The longest pause. After each look that finds nothing the pause doubles up to here.
    pub longest: Duration,
}

impl Polling {
    /// Always the same pause.
    #[must_use]
    pub const fn every(pause: Duration) -> Self {
        Polling { shortest: pause, longest: pause }
    }
}

// --------------------------------------------------------------------------------------------- operators

/// Which jobs to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Only these states; empty is all.
    pub states: Vec<State>,
    /// Only this contract.
    pub contract: Option<String>,
    /// Only this queue.
    pub queue: Option<String>,
    /// Only jobs that rendered this key.
    pub key: Option<String>,
    /// Only ids before this one.
    pub before: Option<JobId>,
    /// At most so many.
    pub limit: u32,
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct JobSummary {
    /// The id.
    pub id: JobId,
    /// The contract.
    pub contract: String,
    /// The queue.
    pub queue: String,
    /// The state.
    pub state: State,
    /// Whether it is Enqueued and parked on a key.
    pub parked: bool,
    /// Starts so far.
    pub runs: u32,
    /// Charged attempts so far.
    pub attempts: u32,
    /// When it was enqueued.
    pub created_at: UnixMillis,
    /// When its state last changed.
    pub changed_at: UnixMillis,
    /// When it is due, if Scheduled.
    pub due: Option<UnixMillis>,
}

/// One audit row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRow {
    /// When.
    pub at: UnixMillis,
    /// `Created`, `Processing`, `Completed`, `Failed`, `Scheduled`, `Enqueued`, `Requeued`, `Deleted`, `CancellationRequested`.
    pub event: String,
    /// The run it is about; 0 for none.
    pub run: RunNumber,
    /// The text for people.
    pub message: String,
    /// The host, by name.
    pub host: Option<String>,
    /// The plugin version that ran or would have run.
    pub digest: Option<Digest>,
    /// How long the run took, on its last row.
    pub took: Option<Duration>,
}

/// Who holds a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderSeen {
    /// The job.
    pub job: JobId,
    /// Its contract.
    pub contract: String,
    /// Its host; `None` while the slot is reserved for a job that no host has claimed yet.
    pub host: Option<String>,
    /// The slot's number.
    pub slot: u32,
    /// The limit stamped on the holder.
    pub limit: u32,
    /// Since when.
    pub since: UnixMillis,
}

/// Who waits for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaiterSeen {
    /// The job.
    pub job: JobId,
    /// Its contract.
    pub contract: String,
    /// The limit stamped on it.
    pub limit: u32,
    /// How many slots it takes.
    pub weight: u32,
    /// Since when it has been parked.
    pub since: UnixMillis,
    /// Whether a live host runs its contract.
    pub claimable: bool,
}

/// A key with everybody who wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySeen {
    /// The key.
    pub key: String,
    /// The operator's limit.
    pub admin_limit: Option<u32>,
    /// Slots taken.
    pub holders: Vec<HolderSeen>,
    /// Parked jobs in the order of their turn, at most [`MAX_LISTED`].
    pub waiters: Vec<WaiterSeen>,
    /// How many are parked in all.
    pub waiting: u32,
}

/// Why a job is not running.
#[derive(Debug, Clone, PartialEq)]
pub enum Waiting {
    /// Not due yet.
    Due(UnixMillis),
    /// Parked on a key.
    ForKey {
        /// The key with holders and waiters.
        key: KeySeen,
        /// Its place in line, from 1.
        place: u32,
        /// The limit that counts for it.
        limit: u32,
        /// Whether that is the operator's.
        limit_is_admin: bool,
        /// What refused it, in words.
        refusal: String,
    },
    /// A slot is reserved for it and a host will claim it any moment.
    Reserved,
    /// Runnable; hosts that run its contract are busy.
    ForWorker {
        /// How many jobs of its lane are ahead of it, counted up to [`MAX_LISTED`].
        ahead: u32,
    },
    /// No live host that is not paused runs its contract.
    ForHost,
    /// Runnable, and its queue is paused.
    Paused(Pause),
}

/// Everything about one job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobDetails {
    /// What a list shows.
    pub summary: JobSummary,
    /// JSON text.
    pub payload: String,
    /// User metadata.
    pub metadata: Vec<(String, String)>,
    /// W3C `traceparent`.
    pub trace_parent: Option<String>,
    /// The unique key, if it has one.
    pub unique_key: Option<String>,
    /// What the caller declared.
    pub explicit: Declared,
    /// The policy on the row; `None` before the first claim.
    pub stamp: Option<Stamp>,
    /// The keys it rendered to.
    pub keys: Vec<String>,
    /// The host that runs it and the plugin version.
    pub running: Option<(String, Digest)>,
    /// Why it is not running, if it is Scheduled or Enqueued.
    pub waiting: Option<Waiting>,
    /// The result of a Completed job.
    pub result: Option<String>,
    /// The last failure's text.
    pub error: Option<String>,
    /// Every audit row, oldest first.
    pub audit: Vec<AuditRow>,
    /// The last report of each name.
    pub progress: Vec<(String, f32)>,
    /// Lines and bytes that caps kept out of the log, over all runs.
    pub dropped: (u64, u64),
}

/// What became of an operator's command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommandVerdict {
    /// Done.
    Done,
    /// The job is running: the host has been told, and it ends within the grace.
    Requested,
    /// The job's state does not allow it; this one.
    NotNow(State),
    /// No such job.
    Unknown,
}

/// An admin limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminLimit {
    /// The key.
    pub key: String,
    /// The limit; 0 pauses the key.
    pub limit: u32,
    /// Who set it.
    pub set_by: String,
    /// When.
    pub set_at: UnixMillis,
}

/// How long ended jobs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Completed; `None` keeps them for ever.
    pub completed: Option<Duration>,
    /// Deleted.
    pub deleted: Option<Duration>,
    /// Failed.
    pub failed: Option<Duration>,
}

impl Default for Retention {
    /// Completed and Deleted one day, Failed for ever.
    fn default() -> Self {
        let day = Some(Duration::from_secs(24 * 3600));
        Retention { completed: day, deleted: day, failed: None }
    }
}

/// The database as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overview {
    /// Jobs by state, never by scanning ended ones.
    pub states: BTreeMap<State, u64>,
    /// How many of the Enqueued are parked.
    pub parked: u64,
    /// `stats:succeeded`, `stats:failed`, `stats:deleted`, `stats:requeued`, each also with `:reason`.
    pub counters: BTreeMap<String, i64>,
    /// Queues that are paused, and by whom.
    pub paused_queues: BTreeMap<String, Pause>,
}

/// What lies in one queue. Figures are counted up to a bound, for each contract or in all; see [`Store::queues`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueSeen {
    /// The queue.
    pub queue: String,
    /// Jobs that could run now, those with a reserved slot among them.
    pub ready: u64,
    /// Jobs that run.
    pub running: u64,
    /// Jobs that are due later.
    pub scheduled: u64,
    /// Jobs that wait for a key.
    pub parked: u64,
    /// Since when the first of the ready ones could run, reserved ones aside; `None` if there is none.
    pub oldest_ready: Option<UnixMillis>,
}

/// A store of jobs.
///
/// Every future may be dropped at any await: a command that has been taken by the driver runs to its end.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Writes jobs; one verdict each, in order. One bad job refuses only itself.
    async fn enqueue(&self, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>>;
    /// Completes when other processes have been told of all that this one has enqueued. In a burst that may be some
    /// milliseconds after the answer; a program that is about to end calls this, or idle hosts find the last of it by
    /// polling.
    async fn flush(&self) {}

    /// Registers a host.
    async fn register(&self, info: HostInfo) -> Result<HostId>;
    /// Replaces what a host can run. Waiters of contracts that no live host runs are passed over.
    async fn serve(&self, host: HostId, served: Vec<Served>) -> Result<()>;
    /// Renews a lease, compares the rows under the host's name with those it knows, gives unclaimed reservations back
    /// (B7) and looks at the other hosts: all that an idle host asks at regular times, in one call.
    ///
    /// A caller that gives up waiting claims nothing until a later renewal is answered. One that is carried out after a
    /// later one of its host hands nothing back: it does not know what was claimed since.
    async fn renew(&self, params: RenewParams) -> Result<Renewed>;
    /// Ends a registration; whatever it still runs is handed back uncharged.
    async fn deregister(&self, host: HostId, now: UnixMillis) -> Result<()>;
    /// Every registered host.
    async fn hosts(&self) -> Result<Vec<HostSeen>>;
    /// Gives the rows of a dead host back, if it has not renewed since `renewals` was read (B5). After
    /// `max_deaths` uncharged ends by host death a job is Failed instead.
    async fn rescue(&self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued>;

    /// Ends runs and claims new ones, in one transaction.
    async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged>;
    /// Stores output of a run that goes on.
    async fn append_output(&self, host: HostId, handle: JobHandle, token: ClaimToken, output: RunOutput) -> Result<SettleVerdict>;
    /// What this host must hear: runs to be cancelled, and whether it or a queue is paused.
    async fn signals(&self, host: HostId) -> Result<Signals>;
    /// Reservations (and wakes) that nobody claimed within `patience` go back into their lines (B7); how many.
    async fn expire_reservations(&self, patience: Duration, now: UnixMillis) -> Result<u32>;
    /// Deletes what has ended long enough ago, at most `max` jobs; how many.
    async fn prune(&self, retention: Retention, max: u32, now: UnixMillis) -> Result<u32>;
    /// Completes when something may have become runnable or cancelled since the last call returned, in this
    /// process or another. It may complete without cause, and a poll is still needed as the safety net.
    async fn changed(&self);
    /// Completes with runs of this host whose slots are gone although it lives: others may be given them at any moment.
    /// They are to be stopped by force and handed back. It may name runs of a claim whose answer is still on its way:
    /// those must not begin. Never completes where slots outlive a connection.
    async fn slots_lost(&self, _host: HostId) -> Vec<CancelSignal> {
        std::future::pending().await
    }
    /// The poll that this store needs at the moment; it may change with what [`Store::changed`] can promise.
    fn polling(&self) -> Polling {
        Polling::every(Duration::from_secs(5))
    }
    /// How many exchanges of one host are worth having under way at once. One where the writer is serial.
    fn concurrent_exchanges(&self) -> u32 {
        1
    }

    /// Reads shared state.
    async fn state_get(&self, bucket: &str, key: &str) -> Result<Option<String>>;
    /// Writes shared state at once, if the run is still this host's.
    async fn state_apply(&self, host: HostId, handle: JobHandle, token: ClaimToken, write: StateWrite) -> Result<StateVerdict>;

    /// Lists jobs, newest first.
    async fn jobs(&self, filter: JobFilter) -> Result<Vec<JobSummary>>;
    /// Everything about one job.
    async fn job(&self, id: JobId, now: UnixMillis) -> Result<Option<JobDetails>>;
    /// Lines of a job's runs in order, with the run each belongs to; of one run, or of all.
    async fn job_logs(&self, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>>;
    /// Ends a job as Deleted; a running one is asked to stop, then stopped by force.
    async fn cancel(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict>;
    /// Makes an ended or Scheduled job Enqueued again. It keeps its stamp; its retry budget starts afresh.
    async fn requeue(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict>;
    /// Removes a job and everything about it; refused while it runs.
    async fn delete(&self, id: JobId, now: UnixMillis) -> Result<CommandVerdict>;

    /// Every admin limit.
    async fn limits(&self) -> Result<Vec<AdminLimit>>;
    /// Sets an admin limit (B6); returns the key with those who now hold more than it allows.
    async fn set_limit(&self, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen>;
    /// Removes an admin limit; `false` if there was none.
    async fn remove_limit(&self, key: &str, now: UnixMillis) -> Result<bool>;
    /// Keys that somebody holds or waits for, busiest first, at most `max`. Their `waiters` are not filled.
    async fn keys(&self, max: u32) -> Result<Vec<KeySeen>>;
    /// One key.
    async fn key(&self, key: &str) -> Result<Option<KeySeen>>;
    /// Pauses a queue: from the commit on no claim of any host takes a job of it, and its waiters are passed over as
    /// if no host ran them (C5, B7). `false` if it was paused already; then the first word stands.
    async fn pause_queue(&self, queue: &str, by: &str, now: UnixMillis) -> Result<bool>;
    /// Ends that; its waiters count again. `false` if it was not paused.
    async fn resume_queue(&self, queue: &str, now: UnixMillis) -> Result<bool>;
    /// Every paused queue.
    async fn paused_queues(&self) -> Result<BTreeMap<String, Pause>>;
    /// Pauses a host until it is resumed or its registration ends: no claim of it takes anything, and what only it
    /// runs is passed over. `false` if it was paused already; [`crate::StoreErrorKind::NotFound`] if it is not
    /// registered.
    async fn pause_host(&self, host: HostId, by: &str, now: UnixMillis) -> Result<bool>;
    /// Ends that. `false` if it was not paused.
    async fn resume_host(&self, host: HostId, now: UnixMillis) -> Result<bool>;
    /// States and counters.
    async fn overview(&self) -> Result<Overview>;
    /// Queues in which something lies now, deepest first, at most `max`. No figure costs more than a bounded look at an
    /// index: what is more than some ten thousand is told as that.
    async fn queues(&self, max: u32) -> Result<Vec<QueueSeen>>;
    /// Contracts that a live host runs.
    async fn served_contracts(&self) -> Result<Vec<String>>;
}
