//! Ending a run from outside.

use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::Notify;

/// Why a run is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum StopReason {
    /// Its time is over.
    TimedOut = 1,
    /// Somebody cancelled the job, and the grace is over.
    Cancelled = 2,
    /// The host may not run it any longer (stopping, lease lapsed): it costs no attempt.
    HandBack = 3,
}

/// Set once by the worker's control thread, read by the guest's thread. The first reason stays.
///
/// Two ways to hear it, since a guest is either computing or waiting: [`StopSignal::reason`] is asked by the
/// engine at every epoch tick, [`StopSignal::stopped`] wakes whoever drops a waiting guest.
#[derive(Debug, Default)]
pub struct StopSignal {
    reason: AtomicU8,
    wake: Notify,
}

impl StopSignal {
    /// Asks the run to end now.
    pub fn stop(&self, reason: StopReason) {
        // Relaxed would do for the flag alone; Release pairs with the Acquire below so that whatever the
        // control thread wrote before is seen by whoever acts on the reason.
        let _ = self.reason.compare_exchange(0, reason as u8, Ordering::Release, Ordering::Relaxed);
        self.wake.notify_waiters();
    }

    /// The reason, if the run is to end.
    #[must_use]
    pub fn reason(&self) -> Option<StopReason> {
        match self.reason.load(Ordering::Acquire) {
            1 => Some(StopReason::TimedOut),
            2 => Some(StopReason::Cancelled),
            3 => Some(StopReason::HandBack),
            _ => None,
        }
    }

    /// Completes when the run is to end. Dropping it has no effect.
    pub async fn stopped(&self) -> StopReason {
        loop {
            let heard = self.wake.notified();
            tokio::pin!(heard);
            // Registered before the flag is read, so that a stop between the two is not missed.
            heard.as_mut().enable();
            if let Some(reason) = self.reason() {
                return reason;
            }
            heard.await;
        }
    }
}
