//! Whether this host may still act.
//!
//! Written by the control loop, read by every run before each effect. The number is an instant of the boot-time
//! clock, so a machine that was suspended past its lease finds it lapsed in the first call after waking.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Surroundings;

/// Until when the host's claim to its runs is certainly good.
pub(crate) struct Lease {
    surroundings: Arc<dyn Surroundings>,
    /// Milliseconds on the boot-time clock; 0 while there is no lease.
    stop_at: AtomicU64,
    /// When the last good renewal was sent, on that clock; for people only.
    sent_at: AtomicU64,
}

impl Lease {
    pub(crate) fn new(surroundings: Arc<dyn Surroundings>) -> Self {
        Lease { surroundings, stop_at: AtomicU64::new(0), sent_at: AtomicU64::new(0) }
    }

    /// A renewal that was *sent* at `sent` succeeded: runs may go on until shortly before it could lapse.
    pub(crate) fn extend(&self, sent: Duration, lease: Duration, stop_before: Duration) {
        let until = sent.saturating_add(lease.saturating_sub(stop_before));
        self.stop_at.fetch_max(millis(until), Ordering::AcqRel);
        self.sent_at.fetch_max(millis(sent), Ordering::AcqRel);
    }

    /// The registration is gone.
    pub(crate) fn end(&self) {
        self.stop_at.store(0, Ordering::Release);
    }

    /// How long ago the last good renewal was sent; `None` without a registration.
    pub(crate) fn age(&self) -> Option<Duration> {
        let sent = Duration::from_millis(self.sent_at.load(Ordering::Acquire));
        (!self.stop_at().is_zero()).then(|| self.surroundings.boot().saturating_sub(sent))
    }

    /// Whether an effect is allowed now.
    pub(crate) fn is_good(&self) -> bool {
        self.surroundings.boot() < self.stop_at()
    }

    /// When every run must have been told to stop.
    pub(crate) fn stop_at(&self) -> Duration {
        Duration::from_millis(self.stop_at.load(Ordering::Acquire))
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
