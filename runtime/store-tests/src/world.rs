//! What the cases have in common: a store, a clock that stands still until it is moved, and short words for long
//! parameters.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use warp_domain::ending::{Ending, State};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, UnixMillis};
use warp_store::{
    ClaimParams, Claimed, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HandOff, HostInfo, JobDetails, KeySeen, Lane, NewJob,
    RenewParams, Renewed, RunOutput, Served, Settle, SettleVerdict, Store, Waiting,
};

/// An empty store, and what must live as long as it does (a directory, a server).
pub struct Subject {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Dropped after it.
    pub keep: Box<dyn Any + Send + Sync>,
}

/// A store under test.
pub struct World {
    /// The store.
    pub store: Arc<dyn Store>,
    now: AtomicI64,
    ids: AtomicU64,
    _keep: Box<dyn Any + Send + Sync>,
}

/// A registered host and what it serves.
#[derive(Clone)]
pub struct Host {
    /// Its registration.
    pub id: HostId,
    /// Its lanes: every contract in the queue `default`.
    pub lanes: Arc<[Lane]>,
}

/// How long a reservation may stay unclaimed (B7).
pub const PATIENCE: Duration = Duration::from_secs(2);

/// The longest that a test waits to be told of something that happens at once.
const TOLD: Duration = Duration::from_secs(20);

/// The queue of every job here.
pub const QUEUE: &str = "default";

impl World {
    /// A world on an empty store.
    pub fn new(subject: Subject) -> Self {
        let Subject { store, keep } = subject;
        World { store, now: AtomicI64::new(1_000_000), ids: AtomicU64::new(1), _keep: keep }
    }

    /// Now.
    pub fn now(&self) -> UnixMillis {
        UnixMillis(self.now.load(Ordering::Relaxed))
    }

    /// Moves the clock.
    pub fn pass(&self, span: Duration) {
        self.now.fetch_add(i64::try_from(span.as_millis()).expect("a short span"), Ordering::Relaxed);
    }

    /// In so many seconds.
    pub fn in_seconds(&self, seconds: u64) -> UnixMillis {
        self.now().after(Duration::from_secs(seconds))
    }

    /// A job that nothing is said about.
    pub fn job(&self, contract: &str, payload: &str) -> NewJob {
        NewJob {
            id: JobId(u128::from(self.ids.fetch_add(1, Ordering::Relaxed))),
            contract: contract.to_owned(),
            queue: QUEUE.to_owned(),
            payload: payload.to_owned(),
            metadata: Vec::new(),
            trace_parent: None,
            due: None,
            explicit: Declared::default(),
            unique_key: None,
        }
    }

    /// Enqueues jobs that must all be taken.
    pub async fn enqueue(&self, jobs: Vec<NewJob>) -> Vec<JobId> {
        let ids: Vec<_> = jobs.iter().map(|job| job.id).collect();
        let verdicts = self.store.enqueue(jobs, self.now()).await.expect("enqueue");
        let expected: Vec<_> = ids.iter().map(|id| EnqueueVerdict::Enqueued(*id)).collect();
        assert_eq!(verdicts, expected);
        ids
    }

    /// Enqueues so many plain jobs of a contract.
    pub async fn enqueue_many(&self, contract: &str, count: usize) -> Vec<JobId> {
        self.enqueue((0..count).map(|_| self.job(contract, "{}")).collect()).await
    }

    /// Enqueues one plain job.
    pub async fn enqueue_one(&self, contract: &str) -> JobId {
        self.enqueue_many(contract, 1).await[0]
    }

    /// Registers a host that serves these.
    pub async fn host(&self, served: &[Declarations]) -> Host {
        let info = HostInfo { name: "machine-1".to_owned(), version: "0.1.0".to_owned(), now: self.now() };
        let id = self.store.register(info).await.expect("register");
        self.serve(id, served).await
    }

    /// Replaces what a host serves.
    pub async fn serve(&self, id: HostId, served: &[Declarations]) -> Host {
        let declarations: Vec<_> = served.iter().cloned().map(Arc::new).collect();
        self.store.serve(id, declarations.iter().cloned().map(|declarations| Served { declarations }).collect()).await.expect("serve");
        let lanes = declarations.into_iter().map(|declarations| Lane { queue: QUEUE.to_owned(), declarations }).collect();
        Host { id, lanes }
    }

    /// One round trip.
    pub async fn exchange(&self, host: &Host, settles: Vec<Settle>, max: u32) -> Exchanged {
        let claim = (max > 0).then(|| ClaimParams { lanes: host.lanes.clone(), max });
        let params = ExchangeParams { host: host.id, now: self.now(), settles: settles.into(), claim, hand_off: HandOff::default() };
        self.store.exchange(params).await.expect("exchange")
    }

    /// Claims.
    pub async fn claim(&self, host: &Host, max: u32) -> Vec<Claimed> {
        self.exchange(host, Vec::new(), max).await.claimed
    }

    /// Claims exactly one.
    pub async fn claim_one(&self, host: &Host) -> Claimed {
        let mut claimed = self.claim(host, 1).await;
        assert_eq!(claimed.len(), 1, "there is a job to claim");
        claimed.remove(0)
    }

    /// The ids that a claim gets.
    pub async fn claim_ids(&self, host: &Host, max: u32) -> Vec<JobId> {
        self.claim(host, max).await.iter().map(|claimed| claimed.id).collect()
    }

    /// Ends one run; it must be taken.
    pub async fn end(&self, host: &Host, claimed: &Claimed, ending: Ending) {
        assert_eq!(self.exchange(host, vec![settle(claimed, ending)], 0).await.settled, [SettleVerdict::Settled]);
    }

    /// Completes one run.
    pub async fn complete(&self, host: &Host, claimed: &Claimed) {
        self.end(host, claimed, done()).await;
    }

    /// Everything about a job.
    pub async fn details(&self, id: JobId) -> JobDetails {
        self.store.job(id, self.now()).await.expect("read a job").expect("the job is there")
    }

    /// Its state.
    pub async fn state(&self, id: JobId) -> State {
        self.details(id).await.summary.state
    }

    /// Whether it is parked.
    pub async fn is_parked(&self, id: JobId) -> bool {
        self.details(id).await.summary.parked
    }

    /// A key that must be known.
    pub async fn key(&self, key: &str) -> KeySeen {
        self.store.key(key).await.expect("read a key").expect("the key is known")
    }

    /// Who holds a key.
    pub async fn holders(&self, key: &str) -> Vec<JobId> {
        self.key(key).await.holders.into_iter().map(|holder| holder.job).collect()
    }

    /// Who waits for a key, in order.
    pub async fn waiters(&self, key: &str) -> Vec<JobId> {
        self.key(key).await.waiters.into_iter().map(|waiter| waiter.job).collect()
    }

    /// Its place in line, from 1.
    pub async fn place(&self, id: JobId) -> u32 {
        match self.details(id).await.waiting {
            Some(Waiting::ForKey { place, .. }) => place,
            other => panic!("{id} waits for no key: {other:?}"),
        }
    }

    /// A counter.
    pub async fn counter(&self, name: &str) -> i64 {
        self.store.overview().await.expect("overview").counters.get(name).copied().unwrap_or(0)
    }

    /// Events of a job's history.
    pub async fn events(&self, id: JobId) -> Vec<String> {
        self.details(id).await.audit.into_iter().map(|row| row.event).collect()
    }

    /// Cancels; the verdict must be this.
    pub async fn cancel(&self, id: JobId, expected: CommandVerdict) {
        assert_eq!(self.store.cancel(id, "ada", self.now()).await.expect("cancel"), expected);
    }

    /// Makes it Enqueued again.
    pub async fn requeue(&self, id: JobId, expected: CommandVerdict) {
        assert_eq!(self.store.requeue(id, "ada", self.now()).await.expect("requeue"), expected);
    }

    /// Sets an admin limit.
    pub async fn limit(&self, key: &str, limit: u32) -> KeySeen {
        self.store.set_limit(key, limit, "ada", self.now()).await.expect("set a limit")
    }

    /// One renewal by a host that knows these.
    pub async fn renew(&self, id: HostId, known: Vec<(JobHandle, ClaimToken)>) -> Renewed {
        self.try_renew(id, known).await.expect("renew")
    }

    /// The same, which may be refused.
    pub async fn try_renew(&self, host: HostId, known: Vec<(JobHandle, ClaimToken)>) -> warp_store::Result<Renewed> {
        self.store.renew(RenewParams { host, known, patience: PATIENCE, now: self.now() }).await
    }

    /// The host dies and is rescued at once.
    pub async fn rescue(&self, host: &Host) -> warp_store::Rescued {
        let seen = self.store.hosts().await.expect("hosts").into_iter().find(|seen| seen.host == host.id).expect("it is registered");
        self.store.rescue(host.id, seen.renewals, 5, self.now()).await.expect("rescue")
    }

    /// Completes whatever there is until all of these have ended; the ids in the order of their starts. Unlike
    /// [`World::drain`] it does not take an answer without work for the end: a host whose turn with a key is over leaves it to
    /// others, and gets the next job when it is told of it.
    pub async fn finish(&self, host: &Host, ids: &[JobId]) -> Vec<JobId> {
        let (mut order, mut ended) = (Vec::new(), 0);
        loop {
            order.extend(self.drain(host).await);
            while let Some(id) = ids.get(ended) {
                let job = self.details(*id).await;
                if matches!(job.summary.state, State::Scheduled | State::Enqueued | State::Awaiting | State::Processing) {
                    let told = tokio::time::timeout(TOLD, self.store.changed()).await;
                    assert!(told.is_ok(), "nobody is told of {job:?}");
                    break;
                }
                ended += 1;
            }
            if ended == ids.len() {
                return order;
            }
        }
    }

    /// Completes whatever there is until nothing more starts; the ids in the order of their starts.
    pub async fn drain(&self, host: &Host) -> Vec<JobId> {
        let (mut order, mut settles) = (Vec::new(), Vec::new());
        loop {
            let exchanged = self.exchange(host, std::mem::take(&mut settles), 64).await;
            order.extend(exchanged.claimed.iter().map(|claimed| claimed.id));
            settles = exchanged.claimed.iter().map(|claimed| settle(claimed, done())).collect();
            if settles.is_empty() && !exchanged.more {
                return order;
            }
        }
    }
}

/// An end that leaves nothing else.
pub fn settle(claimed: &Claimed, ending: Ending) -> Settle {
    Settle {
        handle: claimed.handle,
        token: claimed.token,
        ending,
        on_conflict: Ending::Failed {
            message: "a state write conflicted".to_owned(),
            reason: warp_domain::ending::FailedReason::Permanent,
        },
        output: RunOutput::default(),
        children: Vec::new(),
        state: Vec::new(),
        took: Duration::from_millis(3),
    }
}

/// Completed without a result.
pub fn done() -> Ending {
    Ending::Completed { result: None }
}

/// Failed and to be tried again then.
pub fn retry_at(at: UnixMillis) -> Ending {
    Ending::Retry { message: "boom".to_owned(), at }
}

/// Given back.
pub fn hand_back() -> Ending {
    Ending::HandBack { message: "stopping".to_owned() }
}

/// A contract whose handler declares nothing.
pub fn plain(contract: &str) -> Declarations {
    Declarations {
        contract: contract.to_owned(),
        handler: format!("{contract}-handler"),
        digest: Digest([1; 32]),
        on_contract: Declared::default(),
        on_handler: Declared::default(),
    }
}

/// A contract whose handler declares concurrency, in the version of that number.
pub fn gated(contract: &str, version: u8, concurrency: Concurrency) -> Declarations {
    Declarations {
        digest: Digest([version; 32]),
        on_handler: Declared { concurrency: Some(concurrency), ..Declared::default() },
        ..plain(contract)
    }
}

/// A mutex on one key or more that waits.
pub fn mutex(keys: &[&str]) -> Concurrency {
    Concurrency {
        kind: ConcurrencyKind::Mutex,
        keys: keys.iter().map(|key| key.parse().expect("a key template")).collect(),
        limit: 1,
        weight: 1,
        mode: Mode::Wait,
        order: Order::Any,
        on_retry: OnRetry::Block,
    }
}

/// A semaphore that waits.
pub fn semaphore(key: &str, limit: u32) -> Concurrency {
    Concurrency { kind: ConcurrencyKind::Semaphore, limit, ..mutex(&[key]) }
}

/// The same, skipping.
pub fn skipping(concurrency: Concurrency) -> Concurrency {
    Concurrency { mode: Mode::Skip, ..concurrency }
}

/// The same, first in, first out.
pub fn fifo(concurrency: Concurrency, on_retry: OnRetry) -> Concurrency {
    Concurrency { order: Order::Fifo, on_retry, ..concurrency }
}

/// A retry policy that can be told from others by its number.
pub fn retries(max: u32) -> Declared {
    Declared { retry: Some(Retry { max, delays: vec![Duration::from_secs(1)], jitter_permille: 0 }), ..Declared::default() }
}
