//! Who must look again, and when.

use std::sync::Mutex;

use tokio::sync::watch;

/// A counter of changes with people who wait for the next one.
pub(crate) struct Changes {
    count: watch::Sender<u64>,
    /// What the last call of [`Changes::wait`] has seen.
    seen: Mutex<u64>,
}

impl Changes {
    pub(crate) fn new() -> Self {
        Changes { count: watch::Sender::new(0), seen: Mutex::new(0) }
    }

    /// Something may have become runnable or cancelled.
    pub(crate) fn announce(&self) {
        self.count.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Completes when something was announced since the last call returned.
    pub(crate) async fn wait(&self) {
        let mut changes = self.count.subscribe();
        let seen = *self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *changes.borrow_and_update() == seen {
            // The sender lives in `self`, so this ends with a change and never with an error.
            let _ = changes.changed().await;
        }
        let now = *changes.borrow_and_update();
        *self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = now;
    }
}
