//! What the hosts of a measurement run: a native function or a component, watched from outside.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use warp_domain::ending::{Outcome as RunOutcome, Said};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, JobId};
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopSignal};
use warp_store::NewJob;
use warp_worker::{Catalog, Offer, Surroundings};

use crate::failure::{Failure, Outcome};
use crate::system::System;

/// The contract that most workloads enqueue.
pub const CONTRACT: &str = "noop";

/// What is offered, unchanging.
#[derive(Clone)]
pub struct Fixed(pub Vec<Offer>);

#[async_trait]
impl Catalog for Fixed {
    fn offers(&self) -> Vec<Offer> {
        self.0.clone()
    }

    async fn changed(&self) {
        std::future::pending().await
    }
}

/// A native function, or a component, with a record of when each job started and how many ran at once.
pub struct Recorder {
    inner: Option<Arc<dyn Handler>>,
    work: Duration,
    started: Mutex<HashMap<JobId, Instant>>,
    spans: Mutex<Vec<(Instant, Instant)>>,
    record: bool,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Recorder {
    /// Runs `inner` or nothing, after so much waiting. Only with `record` it remembers each run.
    pub fn new(inner: Option<Arc<dyn Handler>>, work: Duration, record: bool) -> Arc<Self> {
        Arc::new(Recorder {
            inner,
            work,
            started: Mutex::default(),
            spans: Mutex::default(),
            record,
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        })
    }

    /// When a job started, if it has.
    pub fn started(&self, id: JobId) -> Option<Instant> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied()
    }

    /// When every job started.
    pub fn starts(&self) -> HashMap<JobId, Instant> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begin and end of every run, in the order in which they ended.
    pub fn spans(&self) -> Vec<(Instant, Instant)> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The most runs at one moment.
    pub fn most(&self) -> usize {
        self.most.load(Ordering::Acquire)
    }
}

#[async_trait]
impl Handler for Recorder {
    async fn run(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> RunOutcome {
        let begin = Instant::now();
        if self.record {
            self.started.lock().unwrap_or_else(PoisonError::into_inner).insert(attempt.job_id, begin);
        }
        let now = self.now.fetch_add(1, Ordering::AcqRel) + 1;
        self.most.fetch_max(now, Ordering::AcqRel);
        if !self.work.is_zero() {
            tokio::time::sleep(self.work).await;
        }
        let outcome = match &self.inner {
            Some(inner) => inner.run(attempt, calls, stop).await,
            None => RunOutcome::Said(Said::Completed(None)),
        };
        self.now.fetch_sub(1, Ordering::AcqRel);
        if self.record {
            self.spans.lock().unwrap_or_else(PoisonError::into_inner).push((begin, Instant::now()));
        }
        outcome
    }
}

/// A contract with its handler and what that declares.
pub fn offer(handler: Arc<dyn Handler>, contract: &str, on_handler: Declared) -> Offer {
    let declarations = Declarations {
        contract: contract.to_owned(),
        handler: contract.to_owned(),
        digest: Digest([0; 32]),
        on_contract: Declared::default(),
        on_handler,
    };
    Offer { declarations: Arc::new(declarations), handler }
}

/// One key, or a template of one, in Wait mode.
pub fn limited(kind: ConcurrencyKind, key: &str, limit: u32) -> Outcome<Declared> {
    let key = key.parse().map_err(|error| Failure::usage(format!("{error}")))?;
    let concurrency =
        Concurrency { kind, keys: vec![key], limit, weight: 1, mode: Mode::Wait, order: Order::Any, on_retry: OnRetry::Block };
    Ok(Declared { concurrency: Some(concurrency), ..Declared::default() })
}

/// A job whose payload says its number, and one of `groups` for the template `{k}`.
pub fn job(surroundings: &System, contract: &str, number: u64, groups: u64) -> NewJob {
    NewJob {
        id: surroundings.new_id(),
        contract: contract.to_owned(),
        queue: "default".to_owned(),
        payload: format!("{{\"n\":{number},\"k\":{}}}", number % groups.max(1)),
        metadata: Vec::new(),
        trace_parent: None,
        due: None,
        explicit: Declared::default(),
        unique_key: None,
    }
}

/// An attempt that no store knows of.
pub fn attempt(number: u64) -> AttemptInfo {
    AttemptInfo {
        job_id: JobId(u128::from(number)),
        contract: CONTRACT.to_owned(),
        handler: CONTRACT.to_owned(),
        payload: "{}".into(),
        run: 1,
        attempt: 1,
        queue: "default".to_owned(),
        metadata: Vec::new(),
        trace_parent: None,
        time_left: None,
        fencing_token: None,
    }
}

/// Answers nothing, for attempts without a store.
#[derive(Default)]
pub struct Deaf {
    children: AtomicU64,
}

#[async_trait]
impl HostCalls for Deaf {
    fn line(&self, _: warp_pipeline::Level, _: String) {}
    fn dropped(&self, _: u64, _: u64) {}
    fn progress(&self, _: String, _: f32) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn enqueue(&self, _: warp_pipeline::Child) -> Result<JobId, warp_pipeline::ChildRefused> {
        Ok(JobId(u128::from(self.children.fetch_add(1, Ordering::Relaxed))))
    }
    fn holds_slot(&self) -> bool {
        false
    }
    async fn state(
        &self,
        _: &str,
        _: &str,
        _: warp_pipeline::StateOp,
        _: bool,
    ) -> Result<warp_pipeline::StateReply, warp_pipeline::StateFault> {
        Err(warp_pipeline::StateFault::Unavailable("there is no database".to_owned()))
    }
}
