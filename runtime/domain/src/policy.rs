//! The declared rules, family by family, as plain values.
//!
//! A [`Declared`] is what one place says (the enqueue call, a handler, a contract). A [`Stamp`] is what won,
//! family by family, with where it came from; it is written on the job's row and from then on nothing else is
//! consulted. Concurrency, retry and the per-attempt timeout exist in this version; the manifest refuses the
//! others by name.

use std::fmt;
use std::time::Duration;

use crate::id::Digest;
use crate::key::KeyTemplate;

/// A group of rules that is resolved as a whole. Mutex and semaphore are one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Mutex or semaphore.
    Concurrency,
    /// How often and when a failed attempt runs again.
    Retry,
    /// How long one attempt may take.
    Timeout,
}

/// Which of the two words the author used. They behave alike but for the limit and the default mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConcurrencyKind {
    /// Limit 1, Skip unless written otherwise.
    Mutex,
    /// Any limit, Wait unless written otherwise.
    Semaphore,
}

/// What a full key does to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The job is Deleted; decided once, before its first start.
    Skip,
    /// The job is parked, Enqueued for everybody to see, until a slot is free.
    Wait,
}

/// Whether jobs of a key start in the order in which they became runnable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Oldest waiter first, no promise beyond that.
    Any,
    /// By ticket. Skip cannot be combined with it.
    Fifo,
}

/// What a first-in-first-out key does while its head waits out a retry delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnRetry {
    /// The key is kept for the head.
    Block,
    /// The others go on, and the head queues again behind them.
    Pass,
}

/// The concurrency family.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Concurrency {
    /// Mutex or semaphore.
    pub kind: ConcurrencyKind,
    /// One or more keys, all of which are taken or none.
    pub keys: Vec<KeyTemplate>,
    /// How many may run per key; 1 for a mutex.
    pub limit: u32,
    /// How many slots one job takes on each key.
    pub weight: u32,
    /// What a full key does.
    pub mode: Mode,
    /// The order within a key.
    pub order: Order,
    /// Only meaningful with [`Order::Fifo`].
    pub on_retry: OnRetry,
}

/// The retry family.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Retry {
    /// How many further attempts after the first may be charged. 0 switches retrying off.
    pub max: u32,
    /// Waits between attempts; the last one repeats.
    pub delays: Vec<Duration>,
    /// By how many thousandths a delay may be longer or shorter, 0 to 1000.
    pub jitter_permille: u16,
}

/// What the end of the time does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TimeoutMode {
    /// The attempt has failed, and the retry policy decides what follows.
    Fail,
    /// The job is Deleted and not retried.
    Delete,
}

/// The per-attempt timeout family.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Timeout {
    /// How long instantiation and call together may take.
    pub per_attempt: Duration,
    /// What happens then.
    pub mode: TimeoutMode,
}

/// What one place declares. An absent family is not declared there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Declared {
    /// Mutex or semaphore.
    pub concurrency: Option<Concurrency>,
    /// Retry.
    pub retry: Option<Retry>,
    /// Per-attempt timeout.
    pub timeout: Option<Timeout>,
}

impl Declared {
    /// Whether nothing at all is declared.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Declared::default()
    }
}

/// The place that won a family.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Source {
    /// Given by whoever enqueued the job.
    Enqueue,
    /// Declared on the handler, in this version of the plugin.
    Handler {
        /// The handler's name.
        name: String,
        /// The plugin version.
        digest: Digest,
    },
    /// Declared on the contract, in this version of the plugin.
    Contract {
        /// The contract's name.
        name: String,
        /// The plugin version.
        digest: Digest,
    },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Enqueue => f.write_str("enqueue"),
            Source::Handler { name, digest } => write!(f, "handler {name}@{digest}"),
            Source::Contract { name, digest } => write!(f, "contract {name}@{digest}"),
        }
    }
}

/// A family's winner and where it came from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stamped<T> {
    /// The rules.
    pub value: T,
    /// The place that declared them.
    pub source: Source,
}

/// The resolved policy of a job. Global defaults are never in it: an absent family means that the default of
/// the process applies, live.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Mutex or semaphore.
    pub concurrency: Option<Stamped<Concurrency>>,
    /// Retry.
    pub retry: Option<Stamped<Retry>>,
    /// Per-attempt timeout.
    pub timeout: Option<Stamped<Timeout>>,
}
