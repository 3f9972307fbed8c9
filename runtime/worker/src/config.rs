//! What a host is told when it starts.

use std::time::Duration;

use warp_domain::policy::{Retry, Timeout};
use warp_store::Retention;

/// How much of what a run says is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunCaps {
    /// Lines of output and log.
    pub lines: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Named progress reports.
    pub progress_names: usize,
    /// Jobs that one attempt may enqueue.
    pub children: usize,
    /// Bytes of all buffered state writes.
    pub state_bytes: usize,
}

impl Default for RunCaps {
    fn default() -> Self {
        RunCaps { lines: 2_000, bytes: 256 << 10, progress_names: 64, children: 1_000, state_bytes: 4 << 20 }
    }
}

/// Workers with queues of their own: however slow the jobs of one group are, they take no worker of another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerGroup {
    /// The queues that these workers serve. A queue may be served by several groups.
    pub queues: Vec<String>,
    /// How many runs at once; 0 counts as 1.
    pub workers: u32,
}

/// A host's settings. Durations carry their meaning in their names.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// For people: shown in `hosts list` and on every attempt.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// Its workers and what they serve.
    pub groups: Vec<WorkerGroup>,
    /// How many claimed jobs of a group may wait in memory beyond its workers, at most. How many really do follows
    /// from how fast they end: enough for the time that one exchange takes, so slow jobs are never hoarded.
    pub prefetch_limit: u32,
    /// How many exchanges may be under way at once; `None` is what the store says.
    pub exchanges: Option<u32>,
    /// How long a store call may take before its outcome counts as unknown. A renewal waits for the claims before
    /// it, so twice this and [`HostConfig::renew_every`] together should stay below the lease less
    /// [`HostConfig::stop_before_lapse`].
    pub call_bound: Duration,
    /// How long a lease lasts; another host rescues after it has seen no renewal for this long.
    pub lease: Duration,
    /// How often it is renewed, and with that how often the others are looked at.
    pub renew_every: Duration,
    /// How long before the lease could lapse every run is stopped.
    pub stop_before_lapse: Duration,
    /// How long a cancelled run may take to end by itself.
    pub cancel_grace: Duration,
    /// How long a graceful stop waits for runs.
    pub stop_grace: Duration,
    /// The safety net under the notification of changes, give or take a quarter; `None` is what the store says.
    pub poll_every: Option<Duration>,
    /// How long a reservation may stay unclaimed (B7).
    pub reservation_patience: Duration,
    /// After how many deaths of its hosts a job is Failed.
    pub max_host_deaths: u32,
    /// How long ended jobs are kept.
    pub retention: Retention,
    /// The global default of the retry family; live, never stamped.
    pub default_retry: Option<Retry>,
    /// The global default of the timeout family; live, never stamped.
    pub default_timeout: Option<Timeout>,
    /// Caps on what a run says.
    pub caps: RunCaps,
}

impl HostConfig {
    /// The documented defaults for a host of this name.
    #[must_use]
    pub fn new(name: impl Into<String>, workers: u32) -> Self {
        HostConfig {
            name: name.into(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            groups: vec![WorkerGroup { queues: vec!["default".to_owned()], workers }],
            prefetch_limit: 1024,
            exchanges: None,
            call_bound: Duration::from_millis(3_500),
            lease: Duration::from_secs(15),
            renew_every: Duration::from_secs(5),
            stop_before_lapse: Duration::from_secs(3),
            cancel_grace: Duration::from_secs(5),
            stop_grace: Duration::from_secs(30),
            poll_every: None,
            reservation_patience: Duration::from_secs(2),
            max_host_deaths: 5,
            retention: Retention::default(),
            default_retry: None,
            default_timeout: None,
            caps: RunCaps::default(),
        }
    }
}
