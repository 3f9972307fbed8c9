//! The two traits at which worker and plugin host meet.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use warp_domain::ending::Outcome;
use warp_domain::{JobId, RunNumber};

use crate::StopSignal;

/// What a handler is told about its attempt.
#[derive(Debug, Clone)]
pub struct AttemptInfo {
    /// The job.
    pub job_id: JobId,
    /// The contract.
    pub contract: String,
    /// The handler's name.
    pub handler: String,
    /// JSON text.
    pub payload: Arc<str>,
    /// Starts so far, this one included.
    pub run: RunNumber,
    /// Charged attempts so far, this one included.
    pub attempt: u32,
    /// The queue.
    pub queue: String,
    /// User metadata.
    pub metadata: Vec<(String, String)>,
    /// W3C `traceparent`.
    pub trace_parent: Option<String>,
    /// What the per-attempt timeout leaves.
    pub time_left: Option<Duration>,
    /// Decimal text, for a job that holds slots.
    pub fencing_token: Option<String>,
}

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The guest's standard output.
    Stdout,
    /// The guest's standard error.
    Stderr,
    /// A `log` call.
    Trace,
    /// A `log` call.
    Debug,
    /// A `log` call.
    Info,
    /// A `log` call.
    Warn,
    /// A `log` call.
    Error,
}

impl Level {
    /// The name under which lines of it are stored and shown.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Level::Stdout => "stdout",
            Level::Stderr => "stderr",
            Level::Trace => "trace",
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
        }
    }
}

/// A job that a handler enqueues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The contract.
    pub contract: String,
    /// JSON text.
    pub payload: String,
    /// `None`: the parent's queue.
    pub queue: Option<String>,
    /// Counted from the settle.
    pub delay: Duration,
    /// At most one such job among those not ended.
    pub unique_key: Option<String>,
    /// Added to what it inherits from the parent.
    pub metadata: Vec<(String, String)>,
}

/// Why a child was refused; the handler may go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChildRefused {
    /// It could never be stored.
    Invalid(String),
    /// The attempt has enqueued as much as it may.
    TooMany(String),
}

/// An operation on shared state. Whether the bucket is granted has been checked by the plugin host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateOp {
    /// Read.
    Get,
    /// Write; `None` removes.
    Put(Option<String>),
    /// Write `value` if `expected` is there.
    CompareAndSet {
        /// What must be there.
        expected: Option<String>,
        /// What to write.
        value: Option<String>,
    },
    /// Add a decimal integer.
    Add(i128),
}

/// What it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateReply {
    /// The value now there.
    Value(Option<String>),
    /// `expected` was not there.
    Differs,
}

/// Why it did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateFault {
    /// The value is no decimal integer.
    NotANumber(String),
    /// A cap was exceeded.
    TooLarge(String),
    /// The database does not answer, or the run is not this host's any more.
    Unavailable(String),
}

/// What a handler may ask of its host while it runs. One value per run; every call with an effect first checks
/// that the host's lease is good, so that a run which has been given away changes nothing.
#[async_trait]
pub trait HostCalls: Send + Sync {
    /// One line of output or log, without its line end. Lines beyond the caps are counted and dropped.
    fn line(&self, level: Level, text: String);
    /// Bytes of output that the guest's stream dropped before they became lines.
    fn dropped(&self, lines: u64, bytes: u64);
    /// The last report of each name is kept.
    fn progress(&self, name: String, percent: f32);
    /// Whether somebody wants the run to stop.
    fn cancelled(&self) -> bool;
    /// Buffers a child until the run completes; answers the id that it will have.
    ///
    /// # Errors
    /// When it could never be stored, or there are too many.
    fn enqueue(&self, child: Child) -> Result<JobId, ChildRefused>;
    /// Whether this run holds a slot of a key.
    fn holds_slot(&self) -> bool;
    /// Reads or writes shared state; `at_once` is the bucket's `commit = "now"`.
    async fn state(&self, bucket: &str, key: &str, op: StateOp, at_once: bool) -> Result<StateReply, StateFault>;
}

/// Code that runs one contract.
#[async_trait]
pub trait Handler: Send + Sync {
    /// Runs one attempt to its end. It never panics on what a guest does and ends within 50 ms of `stop`, with
    /// every effect of the run over: when this returns, the guest's memory is gone and nothing of it goes on.
    ///
    /// Dropping the future stops the guest at its next tick or host call; the worker does so only at exit.
    async fn run(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> Outcome;
}
