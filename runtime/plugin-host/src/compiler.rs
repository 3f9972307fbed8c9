//! Compiling, one component at a time and away from the jobs.
//!
//! What must stay true: at most one compilation runs that is within its time; the smallest that waits is next, so
//! that a plugin of a few kilobytes does not stand behind one of many megabytes.
//!
//! A compilation cannot be killed. One that exceeds its time is reported as refused and goes on alone: another
//! thread takes over the queue, and what the late one finds still goes to the cache, so that loading the same file
//! again succeeds at once. While [`MAX_OVERDUE`] such compilations go on, nothing further is compiled, so that files
//! made to be slow cannot take one core after the other.
//!
//! What it deliberately does not do: know what it compiles.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::PluginHostError;

/// Late compilations that may go on at once.
pub(crate) const MAX_OVERDUE: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// By size and then by order of arrival.
    waiting: BTreeMap<(u64, u64), (oneshot::Sender<()>, Job)>,
    arrivals: u64,
    /// Which thread may take from the queue; one that was late finds another number here and ends.
    serving: u64,
    overdue: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Jobs run outside the lock and behind a panic boundary, so its state is good even if it is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The compile thread and its queue.
pub(crate) struct Compiler {
    shared: Arc<Shared>,
    limit: Duration,
}

impl Compiler {
    pub(crate) fn new(limit: Duration) -> Result<Self, PluginHostError> {
        let shared = Arc::<Shared>::default();
        spawn(Arc::clone(&shared), 0)?;
        Ok(Compiler { shared, limit })
    }

    /// Runs `work` on the compile thread.
    ///
    /// # Errors
    /// What `work` says; that it panicked; or that it takes too long, while it goes on.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> Result<T, PluginHostError> + Send + 'static,
    ) -> Result<T, PluginHostError> {
        self.run_within(self.limit, bytes, work).await
    }

    async fn run_within<T: Send + 'static>(
        &self,
        limit: Duration,
        bytes: u64,
        work: impl FnOnce() -> Result<T, PluginHostError> + Send + 'static,
    ) -> Result<T, PluginHostError> {
        let refuse = |why: String| Err(PluginHostError::Compile(why));
        let (started, has_started) = oneshot::channel();
        let (done, is_done) = oneshot::channel();
        let job: Job = Box::new(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err(PluginHostError::Compile("the compiler panicked on this component".to_owned())));
            // Nobody waits any more for what is late.
            let _ = done.send(result);
        });
        {
            let mut state = self.shared.lock();
            if state.overdue >= MAX_OVERDUE {
                return refuse(too_many_overdue());
            }
            state.arrivals += 1;
            let place = (bytes, state.arrivals);
            state.waiting.insert(place, (started, job));
        }
        self.shared.wake.notify_one();
        if has_started.await.is_err() {
            let closed = self.shared.lock().closed;
            return refuse(if closed { "the host is stopping".to_owned() } else { too_many_overdue() });
        }
        match tokio::time::timeout(limit, is_done).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => refuse("the host is stopping".to_owned()),
            Err(_) => {
                self.replace_late_thread()?;
                refuse(format!(
                    "it took longer than {:?}; it goes on aside, and if it ends, loading the file again succeeds at once",
                    limit
                ))
            }
        }
    }

    fn replace_late_thread(&self) -> Result<(), PluginHostError> {
        let serving = {
            let mut state = self.shared.lock();
            state.serving += 1;
            state.overdue += 1;
            if state.overdue >= MAX_OVERDUE {
                // Their callers hear that the queue is gone instead of waiting for ever.
                state.waiting.clear();
            }
            state.serving
        };
        spawn(Arc::clone(&self.shared), serving)
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.waiting.clear();
        drop(state);
        self.shared.wake.notify_all();
    }
}

fn too_many_overdue() -> String {
    format!("{MAX_OVERDUE} compilations are overdue and still going on; restart the host to be rid of them")
}

fn spawn(shared: Arc<Shared>, number: u64) -> Result<(), PluginHostError> {
    let serve = move || {
        loop {
            let job = {
                let mut state = shared.lock();
                loop {
                    if state.closed || state.serving != number {
                        return;
                    }
                    match state.waiting.pop_first() {
                        Some((_, (started, job))) => match started.send(()) {
                            Ok(()) => break job,
                            // Its caller gave up while it waited.
                            Err(()) => continue,
                        },
                        None => state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            job();
            let mut state = shared.lock();
            if state.serving != number {
                state.overdue -= 1;
                return;
            }
        }
    };
    let started = std::thread::Builder::new().name("warp-compile".to_owned()).spawn(serve);
    started.map(drop).map_err(|e| PluginHostError::Engine(format!("failed to start the compile thread: {e}")))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The first job holds the thread until the others stand in the queue.
    #[tokio::test]
    async fn the_smallest_that_waits_is_next() {
        let compiler = Arc::new(Compiler::new(Duration::from_secs(60)).expect("a thread"));
        let (order, seen) = mpsc::channel();
        let (release, held) = mpsc::channel::<()>();
        let (running, is_running) = oneshot::channel();
        let first = {
            let compiler = Arc::clone(&compiler);
            tokio::spawn(async move {
                compiler
                    .run(0, move || {
                        let _ = running.send(());
                        held.recv().map_err(|_| PluginHostError::Compile("never released".to_owned()))
                    })
                    .await
            })
        };
        is_running.await.expect("it runs");
        let mut rest = Vec::new();
        for bytes in [30, 10, 20] {
            let order = order.clone();
            let compiler = Arc::clone(&compiler);
            rest.push(tokio::spawn(async move {
                compiler.run(bytes, move || order.send(bytes).map_err(|_| PluginHostError::Compile(String::new()))).await
            }));
        }
        while compiler.shared.lock().waiting.len() < 3 {
            tokio::task::yield_now().await;
        }
        release.send(()).expect("the first job waits for it");
        first.await.expect("no panic").expect("released");
        for job in rest {
            job.await.expect("no panic").expect("sent");
        }
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), [10, 20, 30]);
    }

    #[tokio::test]
    async fn a_late_job_is_reported_and_the_queue_goes_on_until_too_many_are_late() {
        let compiler = Compiler::new(Duration::from_secs(60)).expect("a thread");
        let mut releases = Vec::new();
        for late in 1..=MAX_OVERDUE {
            let (release, held) = mpsc::channel::<()>();
            releases.push(release);
            let soon = Duration::from_millis(1);
            let error = compiler
                .run_within(soon, 1, move || held.recv().map_err(|_| PluginHostError::Compile(String::new())))
                .await
                .expect_err("late");
            assert!(error.to_string().contains("took longer"), "{error}");
            if late < MAX_OVERDUE {
                assert_eq!(compiler.run(1, || Ok(7)).await, Ok(7));
            }
        }
        let error = compiler.run(1, || Ok(7)).await.expect_err("too many are late");
        assert!(error.to_string().contains("overdue"), "{error}");
        drop(releases);
        while compiler.shared.lock().overdue > 0 {
            std::thread::yield_now();
        }
        assert_eq!(compiler.run(1, || Ok(7)).await, Ok(7));
    }

    #[tokio::test]
    async fn a_panicking_compiler_is_an_answer() {
        let compiler = Compiler::new(Duration::from_secs(60)).expect("a thread");
        let error = compiler.run::<()>(1, || panic!("on purpose")).await.expect_err("it panicked");
        assert!(error.to_string().contains("panicked"), "{error}");
        assert_eq!(compiler.run(1, || Ok(1)).await, Ok(1));
    }
}
