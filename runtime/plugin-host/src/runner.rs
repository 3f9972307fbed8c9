//! One attempt: a fresh instance, stopped from outside, its end told apart.
//!
//! What must stay true:
//! - Instantiation and call are under the same stop signal, so that start code which spins is stopped as well.
//! - A guest stops in three ways, whichever comes first: it yields at every tick and the runner, woken by the
//!   signal, drops it; at every tick it is asked itself and traps, which works when nobody polls the runner; and
//!   a guest that waits in a host call is dropped with the call.
//! - When [`Runnable::run`] answers, the store is gone and nothing that the guest started goes on. File calls
//!   cannot be taken back from the kernel, so a plugin with granted directories runs on a thread and a small
//!   runtime of its own: its calls block that thread and nobody else, and the runtime is not left before the
//!   last of them has returned. Such a run can outlast its stop by the length of one file call (a pipe that nobody
//!   writes to: for ever); until then it has not ended, and its slot is not free. Its memory is given back first.
//! - Nothing that a guest does panics the host: the whole run stands behind a panic boundary.
//!
//! What it deliberately does not do: time a deadline (the worker's control thread sets the signal), retry, or
//! decide what the outcome means for the job.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use warp_domain::Digest;
use warp_domain::ending::{Observed, Outcome, Said};
use warp_domain::units::format_size;
use warp_pipeline::{AttemptInfo, HostCalls, StopReason, StopSignal};
use wasmtime::component::{Component, ResourceTableError};
use wasmtime::{PoolConcurrencyLimitError, Store, Trap, UpdateDeadline, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::PluginHostError;
use crate::engine::{Engine, Place};
use crate::host::bindings::warp::job::types::Failure;
use crate::host::{self, Home, HostParams, HostState, StatefulHandlerPre};
use crate::limits::{Caps, Refused, bounded};
use crate::output::Output;
use crate::permissions::Permissions;

/// What an attempt cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Until the instance was ready; zero if it never was.
    pub instantiate: Duration,
    /// From then until the guest answered or was stopped.
    pub call: Duration,
    /// The most linear memory that it had at once.
    pub peak_memory: u64,
}

/// A compiled and linked component with its permissions: all that an attempt needs.
pub struct Runnable {
    digest: Digest,
    engine: Arc<Engine>,
    pre: StatefulHandlerPre<HostState>,
    permissions: Arc<Permissions>,
    caps: Arc<Caps>,
}

impl Runnable {
    /// Links a component.
    ///
    /// # Errors
    /// When it imports what the host has not, exports no handler, or could never be placed within its caps.
    pub fn new(
        engine: Arc<Engine>,
        component: &Component,
        digest: Digest,
        permissions: Permissions,
        caps: Caps,
    ) -> Result<Self, PluginHostError> {
        if let Some(needs) = component.resources_required() {
            let smallest = needs.max_initial_memory_size.unwrap_or(0).saturating_mul(64 << 10);
            if smallest > caps.memory {
                return Err(PluginHostError::Unfit(format!(
                    "it starts with {} of memory and may use {}",
                    format_size(smallest),
                    format_size(caps.memory)
                )));
            }
        }
        let link = |e: wasmtime::Error| PluginHostError::Link(format!("{e:#}"));
        let linker = host::linker(engine.raw()).map_err(link)?;
        let pre = linker.instantiate_pre(component).and_then(StatefulHandlerPre::new).map_err(link)?;
        // The first attempt would pay for it otherwise.
        component.initialize_copy_on_write_image().map_err(link)?;
        Ok(Runnable { digest, engine, pre, permissions: Arc::new(permissions), caps: Arc::new(caps) })
    }

    /// The file that it was made from.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What it may touch.
    #[must_use]
    pub fn permissions(&self) -> &Permissions {
        &self.permissions
    }

    /// What an attempt may use.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Runs one attempt to its end. See [`warp_pipeline::Handler::run`] for what that promises.
    pub async fn run(self: &Arc<Self>, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> (Outcome, RunStats) {
        // A small guest answers without ever waiting; a caller that runs one after the other still has to let others
        // have its thread now and then.
        tokio::task::coop::consume_budget().await;
        let place = tokio::select! {
            biased;
            reason = stop.stopped() => return (never_started(reason), RunStats::default()),
            place = self.engine.place(self.caps.admission) => place,
        };
        let Some(place) = place else {
            return (no_room(&self.engine), RunStats::default());
        };
        let output = Output::new(Arc::clone(&calls), self.caps.output);
        let run = Run { runnable: Arc::clone(self), attempt, calls, stop, output: Arc::clone(&output), dropped: Arc::default() };
        let finished = if self.permissions.files.is_empty() { run.guarded(place, None).await } else { run.on_own_thread(place).await };
        output.close();
        finished
    }
}

/// One attempt under way.
struct Run {
    runnable: Arc<Runnable>,
    attempt: AttemptInfo,
    calls: Arc<dyn HostCalls>,
    stop: Arc<StopSignal>,
    output: Arc<Output>,
    /// Set when the caller of a run that has its own thread is dropped.
    dropped: Arc<StopSignal>,
}

/// Stops a run whose caller went away: its thread would not notice.
struct StopOnDrop(Arc<StopSignal>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop(StopReason::HandBack);
    }
}

/// What ends a guest from inside its tick.
#[derive(Debug, thiserror::Error)]
#[error("stopped by the host")]
struct Stopped(StopReason);

impl Run {
    /// For a plugin with granted directories; see the head of this file.
    async fn on_own_thread(self, place: Place) -> (Outcome, RunStats) {
        let (open, mut all_closed) = mpsc::channel(1);
        let home = Home { runtime: Handle::current(), open };
        let _stop_on_drop = StopOnDrop(Arc::clone(&self.dropped));
        let thread = tokio::task::spawn_blocking(move || {
            // Time for clocks and sleeps; no network is granted, so nothing else is asked of it.
            match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => {
                    let finished = runtime.block_on(self.guarded(place, Some(home)));
                    // Waits for reads and writes that the guest started and did not wait for.
                    drop(runtime);
                    finished
                }
                Err(e) => {
                    let message = format!("failed to start a runtime for file calls: {e}");
                    (Outcome::Observed(Observed::HandedBack(message)), RunStats::default())
                }
            }
        });
        let finished = match thread.await {
            Ok(finished) => finished,
            Err(e) => (host_fault(e.try_into_panic().ok().as_deref()), RunStats::default()),
        };
        // Nothing is ever sent: this ends when the last state call has ended.
        let _: Option<()> = all_closed.recv().await;
        finished
    }

    async fn guarded(self, place: Place, home: Option<Home>) -> (Outcome, RunStats) {
        match AssertUnwindSafe(self.attempt(place, home)).catch_unwind().await {
            Ok(finished) => finished,
            Err(panic) => (host_fault(Some(&*panic)), RunStats::default()),
        }
    }

    async fn attempt(&self, place: Place, home: Option<Home>) -> (Outcome, RunStats) {
        let Runnable { pre, permissions, caps, .. } = &*self.runnable;
        let params = HostParams {
            calls: Arc::clone(&self.calls),
            output: Arc::clone(&self.output),
            permissions: Arc::clone(permissions),
            caps: Arc::clone(caps),
            home,
        };
        let state = match HostState::new(params) {
            Ok(state) => state,
            Err(message) => return (Outcome::Observed(Observed::Trapped(message)), RunStats::default()),
        };
        let mut store = Store::new(place.engine(), state);
        store.limiter(|state| &mut state.limiter);
        store.set_hostcall_fuel(caps.call_bytes);
        // Before instantiation: a new store's deadline has always passed.
        store.set_epoch_deadline(1);
        let (stop, dropped) = (Arc::clone(&self.stop), Arc::clone(&self.dropped));
        store.epoch_deadline_callback(move |_| match stop.reason().or_else(|| dropped.reason()) {
            Some(reason) => Err(wasmtime::Error::new(Stopped(reason))),
            None => Ok(UpdateDeadline::Yield(1)),
        });

        let started = Instant::now();
        let mut instantiated = None;
        let attempt = host::attempt(&self.attempt);
        let call = async {
            let handler = pre.instantiate_async(&mut store).await?;
            instantiated = Some(started.elapsed());
            handler.call_handle(&mut store, &attempt).await
        };
        let ended = tokio::select! {
            biased;
            reason = self.stop.stopped() => Err(wasmtime::Error::new(Stopped(reason))),
            reason = self.dropped.stopped() => Err(wasmtime::Error::new(Stopped(reason))),
            ended = call => ended,
        };
        let instantiate = instantiated.unwrap_or_default();
        let stats = RunStats { instantiate, call: started.elapsed().saturating_sub(instantiate), peak_memory: store.data().limiter.peak() };
        drop(store);
        drop(place);
        let outcome = match ended {
            Ok(answer) => said(answer, caps),
            Err(error) => self.observed(&error, started.elapsed()),
        };
        (outcome, stats)
    }

    fn observed(&self, error: &wasmtime::Error, elapsed: Duration) -> Outcome {
        if let Some(Stopped(reason)) = error.downcast_ref() {
            return Outcome::Observed(match reason {
                StopReason::TimedOut => Observed::TimedOut(self.attempt.time_left.unwrap_or(elapsed)),
                StopReason::Cancelled => Observed::Cancelled,
                StopReason::HandBack => Observed::HandedBack("the host stopped the run".to_owned()),
            });
        }
        if error.is::<PoolConcurrencyLimitError>() {
            return no_room(&self.runnable.engine);
        }
        Outcome::Observed(Observed::Trapped(trap_text(error, &self.runnable.caps)))
    }
}

fn said(answer: Result<Option<String>, Failure>, caps: &Caps) -> Outcome {
    let unacceptable = |why: String| Outcome::Observed(Observed::Unacceptable(why));
    match answer {
        Ok(Some(result)) if result.len() > caps.result_bytes => {
            unacceptable(format!("the result has {}; {} are kept", format_size(result.len() as u64), format_size(caps.result_bytes as u64)))
        }
        Ok(Some(result)) if result.contains('\0') => {
            unacceptable("the result contains a NUL character, which not every database can keep".to_owned())
        }
        Ok(result) => Outcome::Said(Said::Completed(result)),
        Err(Failure::Retryable(message)) => Outcome::Said(Said::Retryable(bounded(&message, caps.message_bytes))),
        Err(Failure::Permanent(message)) => Outcome::Said(Said::Permanent(bounded(&message, caps.message_bytes))),
        Err(Failure::Snooze(millis)) => Outcome::Said(Said::Snooze(Duration::from_millis(u64::from(millis)))),
    }
}

/// A stop that came before there was a place: the guest did nothing, so a timeout charges nothing either.
fn never_started(reason: StopReason) -> Outcome {
    Outcome::Observed(match reason {
        StopReason::Cancelled => Observed::Cancelled,
        StopReason::TimedOut => Observed::HandedBack("its time ran out while it waited for a place in the engine".to_owned()),
        StopReason::HandBack => Observed::HandedBack("the host stopped the run before it started".to_owned()),
    })
}

fn no_room(engine: &Engine) -> Outcome {
    Outcome::Observed(Observed::HandedBack(format!("no place in the engine: all {} are taken", engine.info().slots)))
}

fn host_fault(panic: Option<&(dyn Any + Send)>) -> Outcome {
    let said = panic
        .and_then(|panic| panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&'static str>().copied()));
    let message = format!("host fault: {}", said.unwrap_or("a panic without a message"));
    tracing::error!(%message, "a run panicked inside the host; please report it");
    Outcome::Observed(Observed::Trapped(message))
}

/// What the trap was, in words, and where the guest stood: at most as many frames as the engine keeps (20), and
/// none of the host.
fn trap_text(error: &wasmtime::Error, caps: &Caps) -> String {
    let cause = cause(error, caps);
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else {
        return bounded(&cause, caps.message_bytes);
    };
    // The first line of a backtrace says that it is one.
    let frames = backtrace.to_string();
    let frames = frames.split_once('\n').map_or("", |(_, frames)| frames);
    bounded(&format!("{cause}\n{frames}"), caps.message_bytes)
}

fn cause(error: &wasmtime::Error, caps: &Caps) -> String {
    if let Some(refused) = error.downcast_ref::<Refused>() {
        return refused.to_string();
    }
    if let Some(I32Exit(code)) = error.downcast_ref() {
        return format!("the guest called exit({code}) instead of returning");
    }
    if let Some(ResourceTableError::Full) = error.downcast_ref() {
        return format!("more than {} files, streams and timers were open at once", caps.resources);
    }
    if let Some(bad) = error.downcast_ref::<std::str::Utf8Error>() {
        return format!("the result or a text of a host call is not UTF-8: {bad}");
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => "stack exhausted".to_owned(),
        Some(Trap::UnreachableCodeReached) => "unreachable code reached: the guest panicked or aborted; its output says why".to_owned(),
        Some(trap) => {
            let text = trap.to_string();
            text.strip_prefix("wasm trap: ").unwrap_or(&text).to_owned()
        }
        None => {
            let text = error.root_cause().to_string();
            // The engine's type for this is private, so its words have to do; a test holds on to them.
            if text.contains("allocated for hostcalls has been exhausted") {
                return format!("a host call or the result carried more than {}", format_size(caps.call_bytes as u64));
            }
            text
        }
    }
}
