//! One run, and the tasks on the guests' runtime that execute runs one after another.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, Semaphore};
use warp_domain::ending::{Ending, FailedReason, Observed, Outcome, RunFacts, end_of};
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopReason, StopSignal};
use warp_store::{Claimed, Settle};

use crate::calls::RunCalls;
use crate::config::HostConfig;
use crate::surroundings::Surroundings;

/// A claimed job on its way through this host. Shared by the control loop and the worker that runs it.
pub(crate) struct Run {
    pub(crate) claimed: Claimed,
    /// The worker group that it was claimed for.
    pub(crate) group: usize,
    pub(crate) handler: Arc<dyn Handler>,
    pub(crate) calls: Arc<RunCalls>,
    pub(crate) stop: Arc<StopSignal>,
    /// The timeout in force, if any.
    pub(crate) timeout: Option<Duration>,
    /// Set by the worker when it begins, on the boot-time clock; read by the control loop for the deadline.
    pub(crate) started: OnceLock<Duration>,
}

/// A run that is over and what is to be written about it.
pub(crate) struct Ended {
    pub(crate) run: Arc<Run>,
    pub(crate) settle: Settle,
}

/// Runs of one worker group that no worker has begun. Bounded by what the control loop claims: workers plus prefetch.
pub(crate) struct Prefetched {
    queue: Mutex<VecDeque<Arc<Run>>>,
    queued: Semaphore,
}

impl Prefetched {
    pub(crate) fn new() -> Self {
        Prefetched { queue: Mutex::default(), queued: Semaphore::new(0) }
    }

    pub(crate) fn push(&self, runs: impl IntoIterator<Item = Arc<Run>>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let before = queue.len();
        queue.extend(runs);
        let added = queue.len() - before;
        drop(queue);
        self.queued.add_permits(added);
    }

    /// Takes back runs that no worker has begun.
    pub(crate) fn take_back(&self, which: impl Fn(&Run) -> bool) -> Vec<Arc<Run>> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let (taken, kept): (VecDeque<_>, VecDeque<_>) = queue.drain(..).partition(|run| which(run));
        *queue = kept;
        drop(queue);
        // A worker that has a permit but finds the queue empty simply waits again.
        self.queued.forget_permits(taken.len());
        taken.into()
    }

    /// The next run. Dropping the future loses nothing: a run is taken from the queue after the last await.
    async fn next(&self) -> Arc<Run> {
        loop {
            // Closing the semaphore is how workers end; they are aborted with their runtime instead.
            if let Ok(permit) = self.queued.acquire().await {
                permit.forget();
            }
            if let Some(run) = self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front() {
                return run;
            }
        }
    }
}

/// Ends that wait for the control loop. Bounded by what it has claimed.
#[derive(Default)]
pub(crate) struct Ends {
    ended: Mutex<Vec<Ended>>,
    pub(crate) news: Notify,
}

impl Ends {
    pub(crate) fn take(&self) -> Vec<Ended> {
        std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, ended: Ended) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        self.news.notify_one();
    }
}

/// A worker: runs one job after another until it is aborted, which happens only when the host is gone.
pub(crate) async fn work(prefetched: Arc<Prefetched>, ends: Arc<Ends>, config: Arc<HostConfig>, surroundings: Arc<dyn Surroundings>) {
    loop {
        let run = prefetched.next().await;
        let began = surroundings.boot();
        let _ = run.started.set(began);
        let outcome = execute(&run).await;
        let took = surroundings.boot().saturating_sub(began);
        let settle = settle_of(&run, outcome, took, &config, &*surroundings);
        ends.push(Ended { run, settle });
    }
}

async fn execute(run: &Arc<Run>) -> Outcome {
    // Asked once more on this side: a run that was stopped or cancelled while it waited must not begin, nor one
    // whose host has lost its claim to it since (C3).
    let reason = run.stop.reason().or_else(|| run.calls.is_cancelled().then_some(StopReason::Cancelled));
    if let Some(reason) = reason.or_else(|| (!run.calls.lease_is_good()).then_some(StopReason::HandBack)) {
        return stopped_before_start(reason, run.timeout);
    }
    let Claimed { id, run: number, attempt, lane, payload, metadata, trace_parent, fence, .. } = &run.claimed;
    let info = AttemptInfo {
        job_id: *id,
        contract: lane.declarations.contract.clone(),
        handler: lane.declarations.handler.clone(),
        payload: Arc::clone(payload),
        run: *number,
        attempt: *attempt,
        queue: lane.queue.clone(),
        metadata: metadata.clone(),
        trace_parent: trace_parent.clone(),
        time_left: run.timeout,
        fencing_token: fence.map(|fence| fence.to_string()),
    };
    let calls: Arc<dyn HostCalls> = Arc::<RunCalls>::clone(&run.calls);
    // The call itself is inside: a handler may panic before it has returned its future.
    let attempt = AssertUnwindSafe(async { run.handler.run(info, calls, Arc::clone(&run.stop)).await });
    match attempt.catch_unwind().await {
        Ok(outcome) => outcome,
        Err(panic) => Outcome::Observed(Observed::Trapped(format!("the host panicked while it ran the handler: {}", panic_text(&*panic)))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

fn stopped_before_start(reason: StopReason, timeout: Option<Duration>) -> Outcome {
    Outcome::Observed(match reason {
        StopReason::TimedOut => Observed::TimedOut(timeout.unwrap_or_default()),
        StopReason::Cancelled => Observed::Cancelled,
        StopReason::HandBack => Observed::HandedBack("the host gave it back before it began".to_owned()),
    })
}

fn settle_of(run: &Run, outcome: Outcome, took: Duration, config: &HostConfig, surroundings: &dyn Surroundings) -> Settle {
    run.calls.close();
    let stamp = &run.claimed.stamp;
    let facts = RunFacts {
        attempt: run.claimed.attempt,
        retry: stamp.retry.as_ref().map(|stamped| &stamped.value).or(config.default_retry.as_ref()),
        timeout: stamp.timeout.as_ref().map(|stamped| &stamped.value).or(config.default_timeout.as_ref()),
        now: surroundings.now(),
        draw: surroundings.draw(),
    };
    let ending = match end_of(outcome, &facts) {
        // Somebody asked for the end of this job. What was finished counts, and so does a permanent failure;
        // whatever would start it again, had it the budget or not, does not.
        Ending::Retry { .. }
        | Ending::Snooze { .. }
        | Ending::HandBack { .. }
        | Ending::Failed { reason: FailedReason::NoRetry | FailedReason::RetryExhausted, .. }
            if run.calls.is_cancelled() =>
        {
            Ending::Deleted { message: "cancelled".to_owned() }
        }
        ending => ending,
    };
    let completed = matches!(ending, Ending::Completed { .. });
    let conflict = Outcome::Said(warp_domain::ending::Said::Retryable(
        "shared state changed while the attempt ran; nothing of it was written".to_owned(),
    ));
    let (children, state) = if completed { (run.calls.take_children(), run.calls.take_state()) } else { (Vec::new(), Vec::new()) };
    Settle {
        handle: run.claimed.handle,
        token: run.claimed.token,
        ending,
        on_conflict: end_of(conflict, &facts),
        output: run.calls.take_output(),
        children,
        state,
        took,
    }
}

/// A settle that gives a run back although no worker has begun it.
pub(crate) fn hand_back(run: &Run, message: &str) -> Settle {
    let cancelled = run.calls.is_cancelled();
    let ending =
        if cancelled { Ending::Deleted { message: "cancelled".to_owned() } } else { Ending::HandBack { message: message.to_owned() } };
    unbegun(run, ending)
}

/// A settle of a job that has waited here and does not begin: it goes back to where it was, and nothing of it is told. Who
/// wants it cancelled is known to the store.
pub(crate) fn not_begun(run: &Run) -> Settle {
    unbegun(run, Ending::NotBegun)
}

fn unbegun(run: &Run, ending: Ending) -> Settle {
    run.calls.close();
    Settle {
        handle: run.claimed.handle,
        token: run.claimed.token,
        on_conflict: ending.clone(),
        ending,
        output: run.calls.take_output(),
        children: Vec::new(),
        state: Vec::new(),
        took: Duration::ZERO,
    }
}
