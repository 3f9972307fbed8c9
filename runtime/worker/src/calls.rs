//! What a run may ask of its host: output, progress, children, shared state.
//!
//! Everything that is to commit with the settle is buffered here and taken by the settle, or dropped with the
//! run. Written by the guest's thread; output and progress are also taken by the control loop while the run
//! goes on. Every call with an effect first asks the lease.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId};
use warp_pipeline::{Child, ChildRefused, HostCalls, Level, StateFault, StateOp, StateReply};
use warp_store::{LogLine, NewJob, RunOutput, StateChange, StateVerdict, StateWrite, Store, StoreError};

use crate::config::RunCaps;
use crate::lease::Lease;
use crate::surroundings::Surroundings;

/// The parts of a job that its children inherit.
pub(crate) struct Parent {
    pub(crate) host: HostId,
    pub(crate) handle: JobHandle,
    pub(crate) token: ClaimToken,
    pub(crate) queue: String,
    pub(crate) metadata: Vec<(String, String)>,
    pub(crate) trace_parent: Option<String>,
    pub(crate) keyed: bool,
}

/// The host's side of one run.
pub(crate) struct RunCalls {
    parent: Parent,
    store: Arc<dyn Store>,
    lease: Arc<Lease>,
    surroundings: Arc<dyn Surroundings>,
    caps: RunCaps,
    cancelled: AtomicBool,
    /// Set when the run has ended, so that a call which outlives it is refused.
    over: AtomicBool,
    output: Mutex<Output>,
    children: Mutex<Vec<(Child, JobId)>>,
    state: Mutex<Buffered>,
}

#[derive(Default)]
struct Output {
    pending: RunOutput,
    lines: usize,
    bytes: usize,
}

/// State writes that wait for the settle, one entry for each value touched.
#[derive(Default)]
struct Buffered {
    values: BTreeMap<(String, String), Value>,
    bytes: usize,
}

/// What this attempt has done to a value.
#[derive(Clone)]
struct Value {
    /// What the attempt reads.
    now: Option<String>,
    /// What the settle will do.
    change: StateChange,
}

/// A poisoned lock holds plain data that every writer leaves whole between two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RunCalls {
    pub(crate) fn new(
        parent: Parent,
        store: Arc<dyn Store>,
        lease: Arc<Lease>,
        surroundings: Arc<dyn Surroundings>,
        caps: RunCaps,
    ) -> Self {
        RunCalls {
            parent,
            store,
            lease,
            surroundings,
            caps,
            cancelled: AtomicBool::new(false),
            over: AtomicBool::new(false),
            output: Mutex::default(),
            children: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Somebody wants the run to stop; returns whether that is news.
    pub(crate) fn cancel(&self) -> bool {
        !self.cancelled.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Nothing of the run counts from here on.
    pub(crate) fn close(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Output since the last call.
    pub(crate) fn take_output(&self) -> RunOutput {
        std::mem::take(&mut lock(&self.output).pending)
    }

    /// The store did not take this output: it goes out with the next, in order.
    pub(crate) fn put_back(&self, earlier: RunOutput) {
        let mut output = lock(&self.output);
        let later = std::mem::replace(&mut output.pending, earlier);
        let RunOutput { lines, dropped_lines, dropped_bytes, progress } = later;
        output.pending.lines.extend(lines);
        output.pending.dropped_lines += dropped_lines;
        output.pending.dropped_bytes += dropped_bytes;
        for (name, percent) in progress {
            match output.pending.progress.iter().position(|(known, _)| *known == name) {
                Some(at) => output.pending.progress[at].1 = percent,
                None => output.pending.progress.push((name, percent)),
            }
        }
    }

    /// Jobs to be enqueued with the settle.
    pub(crate) fn take_children(&self) -> Vec<NewJob> {
        let now = self.surroundings.now();
        let children = std::mem::take(&mut *lock(&self.children));
        children
            .into_iter()
            .map(|(child, id)| {
                let Child { contract, payload, queue, delay, unique_key, metadata } = child;
                let mut inherited = self.parent.metadata.clone();
                inherited.retain(|(name, _)| metadata.iter().all(|(own, _)| own != name));
                inherited.extend(metadata);
                NewJob {
                    id,
                    contract,
                    queue: queue.unwrap_or_else(|| self.parent.queue.clone()),
                    payload,
                    metadata: inherited,
                    trace_parent: self.parent.trace_parent.clone(),
                    due: (!delay.is_zero()).then(|| now.after(delay)),
                    explicit: warp_domain::policy::Declared::default(),
                    unique_key,
                }
            })
            .collect()
    }

    /// State writes to commit with the settle.
    pub(crate) fn take_state(&self) -> Vec<StateWrite> {
        let values = std::mem::take(&mut lock(&self.state).values);
        values.into_iter().map(|((bucket, key), value)| StateWrite { bucket, key, change: value.change }).collect()
    }

    fn may_act(&self) -> Result<(), StateFault> {
        if self.over.load(Ordering::Acquire) {
            return Err(StateFault::Unavailable("the run has ended".to_owned()));
        }
        if !self.lease.is_good() {
            return Err(StateFault::Unavailable("this host's lease has lapsed; the run is being given back".to_owned()));
        }
        Ok(())
    }

    /// What the attempt reads at this value: its own write, else the store's.
    async fn current(&self, bucket: &str, key: &str) -> Result<(Option<String>, Option<Value>), StateFault> {
        let own = lock(&self.state).values.get(&(bucket.to_owned(), key.to_owned())).cloned();
        match own {
            Some(value) => Ok((value.now.clone(), Some(value))),
            None => Ok((self.store.state_get(bucket, key).await.map_err(unavailable)?, None)),
        }
    }

    fn buffer(&self, bucket: &str, key: &str, value: Value) -> Result<(), StateFault> {
        let mut state = lock(&self.state);
        let size = bucket.len() + key.len() + value.now.as_ref().map_or(0, String::len);
        if state.bytes + size > self.caps.state_bytes {
            let allowed = warp_domain::units::format_size(self.caps.state_bytes as u64);
            return Err(StateFault::TooLarge(format!("the attempt's buffered state writes exceed {allowed}")));
        }
        state.bytes += size;
        state.values.insert((bucket.to_owned(), key.to_owned()), value);
        Ok(())
    }

    async fn buffered(&self, bucket: &str, key: &str, op: StateOp) -> Result<StateReply, StateFault> {
        let (now, own) = self.current(bucket, key).await?;
        match op {
            StateOp::Get => Ok(StateReply::Value(now)),
            StateOp::Put(value) => {
                self.buffer(bucket, key, Value { now: value.clone(), change: StateChange::Put(value.clone()) })?;
                Ok(StateReply::Value(value))
            }
            StateOp::CompareAndSet { expected, value } => {
                if now != expected {
                    return Ok(StateReply::Differs);
                }
                let change = match own.map(|own| own.change) {
                    // The attempt has decided this value itself: nobody else's matters.
                    Some(StateChange::Put(_)) => StateChange::Put(value.clone()),
                    // It compared before: that comparison still has to hold.
                    Some(StateChange::CompareAndSet { expected: first, .. }) => {
                        StateChange::CompareAndSet { expected: first, value: value.clone() }
                    }
                    // It added to what the store had: what the store had is what must not have changed.
                    Some(StateChange::Add(added)) => {
                        StateChange::CompareAndSet { expected: Some((number(now.as_deref())? - added).to_string()), value: value.clone() }
                    }
                    None => StateChange::CompareAndSet { expected, value: value.clone() },
                };
                self.buffer(bucket, key, Value { now: value.clone(), change })?;
                Ok(StateReply::Value(value))
            }
            StateOp::Add(amount) => {
                let sum = number(now.as_deref())?
                    .checked_add(amount)
                    .ok_or_else(|| StateFault::NotANumber("the sum exceeds 128 bits".to_owned()))?;
                let sum_text = Some(sum.to_string());
                let change = match own.map(|own| own.change) {
                    Some(StateChange::Put(_)) => StateChange::Put(sum_text.clone()),
                    Some(StateChange::CompareAndSet { expected, .. }) => StateChange::CompareAndSet { expected, value: sum_text.clone() },
                    Some(StateChange::Add(added)) => StateChange::Add(
                        added.checked_add(amount).ok_or_else(|| StateFault::NotANumber("the sum exceeds 128 bits".to_owned()))?,
                    ),
                    None => StateChange::Add(amount),
                };
                self.buffer(bucket, key, Value { now: sum_text.clone(), change })?;
                Ok(StateReply::Value(sum_text))
            }
        }
    }

    async fn at_once(&self, bucket: &str, key: &str, op: StateOp) -> Result<StateReply, StateFault> {
        let change = match op {
            StateOp::Get => return Ok(StateReply::Value(self.store.state_get(bucket, key).await.map_err(unavailable)?)),
            StateOp::Put(value) => StateChange::Put(value),
            StateOp::CompareAndSet { expected, value } => StateChange::CompareAndSet { expected, value },
            StateOp::Add(amount) => StateChange::Add(amount),
        };
        let write = StateWrite { bucket: bucket.to_owned(), key: key.to_owned(), change };
        let Parent { host, handle, token, .. } = self.parent;
        match self.store.state_apply(host, handle, token, write).await.map_err(unavailable)? {
            StateVerdict::Written(value) => Ok(StateReply::Value(value)),
            StateVerdict::Conflict(_) => Ok(StateReply::Differs),
            StateVerdict::NotANumber(value) => Err(not_a_number(&value)),
            StateVerdict::Late => Err(StateFault::Unavailable("the run is not this host's any more".to_owned())),
        }
    }
}

fn unavailable(error: StoreError) -> StateFault {
    StateFault::Unavailable(error.to_string())
}

fn not_a_number(value: &str) -> StateFault {
    let shown: String = value.chars().take(80).collect();
    StateFault::NotANumber(format!("{shown:?} is not a decimal integer"))
}

fn number(value: Option<&str>) -> Result<i128, StateFault> {
    value.map_or(Ok(0), |value| value.parse().map_err(|_| not_a_number(value)))
}

#[async_trait]
impl HostCalls for RunCalls {
    fn line(&self, level: Level, text: String) {
        let mut output = lock(&self.output);
        if output.lines >= self.caps.lines || output.bytes + text.len() > self.caps.bytes {
            output.pending.dropped_lines += 1;
            output.pending.dropped_bytes += text.len() as u64;
            return;
        }
        output.lines += 1;
        output.bytes += text.len();
        let stream = match level {
            Level::Stdout => "stdout",
            Level::Stderr => "stderr",
            Level::Trace => "trace",
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
        };
        output.pending.lines.push(LogLine { at: self.surroundings.now(), stream, text });
    }

    fn dropped(&self, lines: u64, bytes: u64) {
        let mut output = lock(&self.output);
        output.pending.dropped_lines += lines;
        output.pending.dropped_bytes += bytes;
    }

    fn progress(&self, name: String, percent: f32) {
        let percent = if percent.is_nan() { 0.0 } else { percent.clamp(0.0, 100.0) };
        let mut output = lock(&self.output);
        let reports = &mut output.pending.progress;
        match reports.iter().position(|(known, _)| *known == name) {
            Some(at) => reports[at].1 = percent,
            None if reports.len() < self.caps.progress_names => reports.push((name, percent)),
            None => output.pending.dropped_lines += 1,
        }
    }

    fn cancelled(&self) -> bool {
        self.is_cancelled()
    }

    fn enqueue(&self, child: Child) -> Result<JobId, ChildRefused> {
        self.may_act().map_err(|_| ChildRefused::Invalid("the run is not this host's any more".to_owned()))?;
        let mut children = lock(&self.children);
        if children.len() >= self.caps.children {
            return Err(ChildRefused::TooMany(format!("one attempt may enqueue {} jobs", self.caps.children)));
        }
        let id = self.surroundings.new_id();
        let probe = NewJob {
            id,
            contract: child.contract.clone(),
            queue: child.queue.clone().unwrap_or_else(|| self.parent.queue.clone()),
            payload: child.payload.clone(),
            metadata: child.metadata.clone(),
            trace_parent: None,
            due: None,
            explicit: warp_domain::policy::Declared::default(),
            unique_key: child.unique_key.clone(),
        };
        warp_store::codec::check_new_job(&probe).map_err(ChildRefused::Invalid)?;
        children.push((child, id));
        Ok(id)
    }

    fn holds_slot(&self) -> bool {
        self.parent.keyed
    }

    async fn state(&self, bucket: &str, key: &str, op: StateOp, at_once: bool) -> Result<StateReply, StateFault> {
        self.may_act()?;
        if at_once { self.at_once(bucket, key, op).await } else { self.buffered(bucket, key, op).await }
    }
}
