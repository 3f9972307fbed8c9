//! What a run may ask of its host: output, progress, children, shared state.
//!
//! Everything that is to commit with the settle is buffered here and taken by the settle, or dropped with the
//! run. Written by the guest's thread; output and progress are also taken by the control loop while the run
//! goes on. Every call with an effect first asks the lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, UnixMillis};
use warp_pipeline::{Child, ChildRefused, HostCalls, Level, StateFault, StateOp, StateReply};
use warp_store::{LogLine, NewJob, RunOutput, StateChange, StateVerdict, StateWrite, Store, StoreError};

use crate::config::RunCaps;
use crate::control::guarded;
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
    bound: Duration,
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
    /// Every progress name of the run; what has been stored still counts against the cap.
    names: BTreeSet<String>,
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
    /// What the store had when an [`StateChange::Add`] first read it, text for text.
    seen: Option<String>,
}

impl Value {
    fn bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let compared = match &self.change {
            StateChange::CompareAndSet { expected, .. } => text(expected),
            StateChange::Put(_) | StateChange::Add(_) => 0,
        };
        text(&self.now) + text(&self.seen) + compared
    }
}

/// Joins what was taken out earlier with what came later.
pub(crate) fn join_output(earlier: &mut RunOutput, later: RunOutput) {
    let RunOutput { lines, dropped_lines, dropped_bytes, progress } = later;
    earlier.lines.extend(lines);
    earlier.dropped_lines += dropped_lines;
    earlier.dropped_bytes += dropped_bytes;
    for (name, percent) in progress {
        match earlier.progress.iter().position(|(known, _)| *known == name) {
            Some(at) => earlier.progress[at].1 = percent,
            None => earlier.progress.push((name, percent)),
        }
    }
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
        bound: Duration,
    ) -> Self {
        RunCalls {
            parent,
            store,
            lease,
            surroundings,
            caps,
            bound,
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

    /// Whether the host may still act for this run.
    pub(crate) fn lease_is_good(&self) -> bool {
        self.lease.is_good()
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
        join_output(&mut output.pending, later);
    }

    /// Jobs to be enqueued with the settle.
    pub(crate) fn take_children(&self) -> Vec<NewJob> {
        let now = self.surroundings.now();
        let children = std::mem::take(&mut *lock(&self.children));
        children
            .into_iter()
            .map(|(child, id)| {
                let due = (!child.delay.is_zero()).then(|| now.after(child.delay));
                self.job_of(child, id, due)
            })
            .collect()
    }

    /// What a child inherits: queue, metadata and trace, its own values first. Never policy.
    fn job_of(&self, child: Child, id: JobId, due: Option<UnixMillis>) -> NewJob {
        let Child { contract, payload, queue, delay: _, unique_key, metadata } = child;
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
            due,
            explicit: warp_domain::policy::Declared::default(),
            unique_key,
        }
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

    async fn stored(&self, bucket: &str, key: &str) -> Result<Option<String>, StateFault> {
        guarded("read state", self.bound, self.store.state_get(bucket, key)).await.map_err(unavailable)
    }

    /// What the attempt reads at this value: its own write, else the store's.
    async fn current(&self, bucket: &str, key: &str) -> Result<(Option<String>, Option<Value>), StateFault> {
        let own = lock(&self.state).values.get(&(bucket.to_owned(), key.to_owned())).cloned();
        match own {
            Some(value) => Ok((value.now.clone(), Some(value))),
            None => Ok((self.stored(bucket, key).await?, None)),
        }
    }

    fn buffer(&self, bucket: &str, key: &str, value: Value) -> Result<(), StateFault> {
        let at = (bucket.to_owned(), key.to_owned());
        let mut state = lock(&self.state);
        // A value that is written again takes the place of what was buffered for it.
        let replaced = state.values.get(&at).map_or(0, |old| bucket.len() + key.len() + old.bytes());
        let bytes = state.bytes - replaced + bucket.len() + key.len() + value.bytes();
        if bytes > self.caps.state_bytes {
            return Err(too_large("the attempt's buffered state writes exceed", self.caps.state_bytes));
        }
        state.bytes = bytes;
        state.values.insert(at, value);
        Ok(())
    }

    /// What the settle does for a value that the attempt touches more than once:
    ///
    /// | before \\ now | put | compare-and-set | add |
    /// |---|---|---|---|
    /// | nothing | put | compare with `expected` | add |
    /// | put | put | put | put |
    /// | compare-and-set | the first comparison, new value | the same | the same |
    /// | add | put | compare with what the store had | add both |
    ///
    /// A comparison that the attempt has been told holds is never dropped, whatever it wrote afterwards.
    async fn buffered(&self, bucket: &str, key: &str, op: StateOp) -> Result<StateReply, StateFault> {
        let (now, own) = match &op {
            StateOp::Put(_) => (None, lock(&self.state).values.get(&(bucket.to_owned(), key.to_owned())).cloned()),
            StateOp::Get | StateOp::CompareAndSet { .. } | StateOp::Add(_) => self.current(bucket, key).await?,
        };
        let (value, change, seen) = match op {
            StateOp::Get => return Ok(StateReply::Value(now)),
            StateOp::Put(value) => {
                let change = match own.map(|own| own.change) {
                    Some(StateChange::CompareAndSet { expected, .. }) => StateChange::CompareAndSet { expected, value: value.clone() },
                    Some(StateChange::Put(_) | StateChange::Add(_)) | None => StateChange::Put(value.clone()),
                };
                (value, change, None)
            }
            StateOp::CompareAndSet { expected, value } => {
                if now != expected {
                    return Ok(StateReply::Differs);
                }
                let change = match own {
                    Some(Value { change: StateChange::Put(_), .. }) => StateChange::Put(value.clone()),
                    Some(Value { change: StateChange::CompareAndSet { expected, .. }, .. }) => {
                        StateChange::CompareAndSet { expected, value: value.clone() }
                    }
                    Some(Value { change: StateChange::Add(_), seen, .. }) => {
                        StateChange::CompareAndSet { expected: seen, value: value.clone() }
                    }
                    None => StateChange::CompareAndSet { expected, value: value.clone() },
                };
                (value, change, None)
            }
            StateOp::Add(amount) => {
                let sum = Some(add(number(now.as_deref())?, amount)?.to_string());
                let (change, seen) = match own {
                    Some(Value { change: StateChange::Put(_), .. }) => (StateChange::Put(sum.clone()), None),
                    Some(Value { change: StateChange::CompareAndSet { expected, .. }, .. }) => {
                        (StateChange::CompareAndSet { expected, value: sum.clone() }, None)
                    }
                    Some(Value { change: StateChange::Add(before), seen, .. }) => (StateChange::Add(add(before, amount)?), seen),
                    None => (StateChange::Add(amount), now),
                };
                (sum, change, seen)
            }
        };
        self.buffer(bucket, key, Value { now: value.clone(), change, seen })?;
        Ok(StateReply::Value(value))
    }

    async fn at_once(&self, bucket: &str, key: &str, op: StateOp) -> Result<StateReply, StateFault> {
        let change = match op {
            StateOp::Get => return Ok(StateReply::Value(self.stored(bucket, key).await?)),
            StateOp::Put(value) => StateChange::Put(value),
            StateOp::CompareAndSet { expected, value } => StateChange::CompareAndSet { expected, value },
            StateOp::Add(amount) => StateChange::Add(amount),
        };
        let written = match &change {
            StateChange::Put(value) | StateChange::CompareAndSet { value, .. } => value.as_ref().map_or(0, String::len),
            StateChange::Add(_) => 0,
        };
        if bucket.len() + key.len() + written > self.caps.state_bytes {
            return Err(too_large("the state write exceeds", self.caps.state_bytes));
        }
        let write = StateWrite { bucket: bucket.to_owned(), key: key.to_owned(), change };
        let Parent { host, handle, token, .. } = self.parent;
        let written = self.store.state_apply(host, handle, token, write);
        match guarded("write state", self.bound, written).await.map_err(unavailable)? {
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

fn too_large(what: &str, allowed: usize) -> StateFault {
    StateFault::TooLarge(format!("{what} {}", warp_domain::units::format_size(allowed as u64)))
}

fn add(value: i128, amount: i128) -> Result<i128, StateFault> {
    value.checked_add(amount).ok_or_else(|| StateFault::NotANumber("the sum exceeds 128 bits".to_owned()))
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
        output.pending.lines.push(LogLine { at: self.surroundings.now(), stream: level.name(), text });
    }

    fn dropped(&self, lines: u64, bytes: u64) {
        let mut output = lock(&self.output);
        output.pending.dropped_lines += lines;
        output.pending.dropped_bytes += bytes;
    }

    fn progress(&self, name: String, percent: f32) {
        let percent = if percent.is_nan() { 0.0 } else { percent.clamp(0.0, 100.0) };
        let mut output = lock(&self.output);
        if !output.names.contains(&name) {
            if output.names.len() >= self.caps.progress_names {
                output.pending.dropped_lines += 1;
                return;
            }
            output.names.insert(name.clone());
        }
        let reports = &mut output.pending.progress;
        match reports.iter().position(|(known, _)| *known == name) {
            Some(at) => reports[at].1 = percent,
            None => reports.push((name, percent)),
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
        let first = children.iter().find(|(other, _)| child.unique_key.is_some() && other.unique_key == child.unique_key);
        if let Some((_, id)) = first {
            return Ok(*id);
        }
        let id = self.surroundings.new_id();
        // As it will be written, with what it inherits: a child that cannot be stored must not poison the settle.
        let probe = self.job_of(child.clone(), id, None);
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
