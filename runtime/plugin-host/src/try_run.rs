//! One attempt without a database: what `warp-host try` runs.
//!
//! What must stay true: the guest cannot tell it from a real attempt, and nothing that it does lasts. Children are
//! collected, shared state lives in memory for the length of the attempt.
//!
//! What it deliberately does not do: apply a policy other than the time limit, or enqueue anything.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use warp_domain::JobId;
use warp_domain::ending::Outcome;
use warp_pipeline::{AttemptInfo, Child, ChildRefused, HostCalls, Level, StateFault, StateOp, StateReply, StopReason, StopSignal};

use crate::registry::PluginVersion;
use crate::runner::RunStats;

/// More children than any real host takes from one attempt; it only keeps the memory of the command small.
const MAX_CHILDREN: usize = 10_000;
/// Keys of shared state, for the same reason.
const MAX_KEYS: usize = 10_000;

/// What to try.
#[derive(Debug, Clone)]
pub struct TryParams {
    /// The contract; decides the handler that the guest is told.
    pub contract: String,
    /// JSON text.
    pub payload: String,
    /// How long it may take.
    pub limit: Duration,
    /// Whether to act as if the attempt held a slot, for buckets that demand one.
    pub holds_slot: bool,
    /// The id that the guest is told. Randomness is the caller's.
    pub job_id: JobId,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct TryReport {
    /// How it ended.
    pub outcome: Outcome,
    /// What it printed and logged, in order.
    pub lines: Vec<(Level, String)>,
    /// Lines and bytes beyond the caps.
    pub dropped: (u64, u64),
    /// The last report of each name, in the order of their first.
    pub progress: Vec<(String, f32)>,
    /// What it would have enqueued, if it had completed.
    pub children: Vec<Child>,
    /// Shared state as it left it, by bucket and key.
    pub state: BTreeMap<(String, String), String>,
    /// What it cost.
    pub stats: RunStats,
}

/// Runs one attempt of a plugin and collects what it does. `None` if the plugin does not run that contract.
pub async fn run_once(version: &PluginVersion, params: TryParams) -> Option<TryReport> {
    let TryParams { contract, payload, limit, holds_slot, job_id } = params;
    let (_, handler) = version.manifest().handled().find(|(handled, _)| *handled == contract)?;
    let attempt = AttemptInfo {
        job_id,
        handler: handler.to_owned(),
        contract,
        payload: payload.into(),
        run: 1,
        attempt: 1,
        queue: "default".to_owned(),
        metadata: Vec::new(),
        trace_parent: None,
        time_left: Some(limit),
        fencing_token: holds_slot.then(|| "1".to_owned()),
    };
    let calls = Arc::new(Collector { holds_slot, collected: Mutex::default() });
    let stop = Arc::<StopSignal>::default();
    let run = version.run_measured(attempt, Arc::clone(&calls) as Arc<dyn HostCalls>, Arc::clone(&stop));
    let deadline = async {
        tokio::time::sleep(limit).await;
        stop.stop(StopReason::TimedOut);
        // The run answers when it has ended, which is what is waited for.
        std::future::pending::<Infallible>().await
    };
    let (outcome, stats) = tokio::select! {
        finished = run => finished,
        never = deadline => match never {},
    };
    let Collected { lines, dropped, progress, children, state } = std::mem::take(&mut *calls.lock());
    Some(TryReport { outcome, lines, dropped, progress, children, state, stats })
}

#[derive(Default)]
struct Collected {
    lines: Vec<(Level, String)>,
    dropped: (u64, u64),
    progress: Vec<(String, f32)>,
    children: Vec<Child>,
    state: BTreeMap<(String, String), String>,
}

struct Collector {
    holds_slot: bool,
    collected: Mutex<Collected>,
}

impl Collector {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        // Nothing under this lock panics half way.
        self.collected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl HostCalls for Collector {
    fn line(&self, level: Level, text: String) {
        self.lock().lines.push((level, text));
    }

    fn dropped(&self, lines: u64, bytes: u64) {
        self.lock().dropped = (lines, bytes);
    }

    fn progress(&self, name: String, percent: f32) {
        let progress = &mut self.lock().progress;
        match progress.iter().position(|(known, _)| *known == name) {
            Some(at) => progress[at].1 = percent,
            // A bar needs a name; a thousand of them are no progress report.
            None if progress.len() < 1000 => progress.push((name, percent)),
            None => {}
        }
    }

    fn cancelled(&self) -> bool {
        false
    }

    fn enqueue(&self, child: Child) -> Result<JobId, ChildRefused> {
        let children = &mut self.lock().children;
        if children.len() >= MAX_CHILDREN {
            return Err(ChildRefused::TooMany(format!("this attempt has enqueued {MAX_CHILDREN} jobs, which is as much as it may")));
        }
        children.push(child);
        Ok(JobId(children.len() as u128))
    }

    fn holds_slot(&self) -> bool {
        self.holds_slot
    }

    async fn state(&self, bucket: &str, key: &str, op: StateOp, _at_once: bool) -> Result<StateReply, StateFault> {
        let state = &mut self.lock().state;
        let place = (bucket.to_owned(), key.to_owned());
        let now = state.get(&place);
        let next = match op {
            StateOp::Get => return Ok(StateReply::Value(now.cloned())),
            StateOp::Put(value) => value,
            StateOp::CompareAndSet { expected, value } if expected.as_ref() == now => value,
            StateOp::CompareAndSet { .. } => return Ok(StateReply::Differs),
            StateOp::Add(amount) => {
                let text = now.map_or("0", String::as_str);
                let sum = text.parse::<i128>().ok().and_then(|number| number.checked_add(amount));
                let sum =
                    sum.ok_or_else(|| StateFault::NotANumber(format!("`{text}` plus {amount} is not a decimal integer of 128 bits")))?;
                Some(sum.to_string())
            }
        };
        if now.is_none() && next.is_some() && state.len() >= MAX_KEYS {
            return Err(StateFault::TooLarge(format!("this attempt has written {MAX_KEYS} keys, which is as much as can be tried")));
        }
        match &next {
            Some(value) => state.insert(place, value.clone()),
            None => state.remove(&place),
        };
        Ok(StateReply::Value(next))
    }
}
