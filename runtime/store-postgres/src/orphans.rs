//! Work that goes on although its caller has gone.
//!
//! A statement runs to its end by itself; what consists of several runs here. An exchange whose caller went away may claim
//! jobs that nobody hears of. The next renewal hands them back, if it looks after that exchange has ended: so renewals ask
//! here first.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use warp_store::StoreErrorKind;

use crate::error::Fault;

/// Runs on a task of its own, to its end. Dropped, only the answer is lost.
pub(crate) async fn detached<T: Send + 'static>(work: impl Future<Output = Result<T, Fault>> + Send + 'static) -> Result<T, Fault> {
    let (reply, answer) = oneshot::channel();
    tokio::spawn(async move {
        let _ = reply.send(work.await);
    });
    answer.await.unwrap_or_else(|_| Err(ended()))
}

fn ended() -> Fault {
    Fault::said(StoreErrorKind::OutcomeUnknown, "the command's task has ended without an answer; whether it took effect is unknown")
}

/// Those whose callers have gone.
#[derive(Default)]
pub(crate) struct Orphans(Mutex<Vec<JoinHandle<()>>>);

impl Orphans {
    /// Like [`detached`]; dropped, the rest of it is waited for by the next [`Orphans::wait`].
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl Future<Output = Result<T, Fault>> + Send + 'static) -> Result<T, Fault> {
        let (reply, answer) = oneshot::channel();
        let task = tokio::spawn(async move {
            let _ = reply.send(work.await);
        });
        let _guard = Guard { orphans: self, task: Some(task) };
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Completes when all have ended, or after this long. Dropped, those that are left are waited for the next time.
    pub(crate) async fn wait(&self, patience: Duration) {
        let mut left = Left { orphans: self, tasks: std::mem::take(&mut *self.locked()) };
        let all = async {
            while let Some(task) = left.tasks.last_mut() {
                // It ended, if only by a panic.
                let _ = task.await;
                left.tasks.pop();
            }
        };
        let _ = tokio::time::timeout(patience, all).await;
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those that are being waited for.
struct Left<'a> {
    orphans: &'a Orphans,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.orphans.locked().append(&mut self.tasks);
    }
}

struct Guard<'a> {
    orphans: &'a Orphans,
    task: Option<JoinHandle<()>>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take().filter(|task| !task.is_finished()) {
            let mut orphans = self.orphans.locked();
            orphans.retain(|orphan| !orphan.is_finished());
            orphans.push(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn what_goes_on_without_its_caller_is_waited_for() {
        let orphans = Orphans::default();
        let (gate, ended) = (std::sync::Arc::new(Notify::new()), std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)));
        let work = {
            let (gate, ended) = (gate.clone(), ended.clone());
            async move {
                gate.notified().await;
                ended.store(true, std::sync::atomic::Ordering::SeqCst);
                Ok(())
            }
        };
        assert!(orphans.run(work).now_or_never().is_none(), "its caller goes away");
        assert!(orphans.wait(Duration::from_secs(60)).now_or_never().is_none(), "somebody waits, and goes away too");
        gate.notify_one();
        orphans.wait(Duration::from_secs(60)).await;
        assert!(ended.load(std::sync::atomic::Ordering::SeqCst), "it has run to its end");
        assert!(orphans.wait(Duration::from_secs(60)).now_or_never().is_some(), "nobody is left");
        let heard = orphans.run(async { Ok(7) }).await.map_err(|fault| fault.text().to_owned());
        assert_eq!((heard, orphans.locked().len()), (Ok(7), 0), "whose caller is there is no orphan");
    }
}
