//! What the cases have in common: a store that counts, records and fails on demand, a clock that jumps, handlers that
//! are closures, and waiting for what becomes true instead of for time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, Semaphore, watch};
use warp_domain::ending::{Outcome, Said, State};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry, Timeout, TimeoutMode};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, RunNumber, UnixMillis};
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopSignal};
use warp_store::{
    AdminLimit, CancelSignal, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HostInfo, HostSeen, JobDetails, JobFilter,
    JobSummary, KeySeen, LogLine, NewJob, Overview, Pause, QueueSeen, RenewParams, Renewed, Rescued, Result, Retention, RunOutput, Served,
    Settle, SettleVerdict, Signals, StateVerdict, StateWrite, Store, StoreError, StoreErrorKind,
};
use warp_testkit::model::{Model, Place};
use warp_testkit::store::ModelStore;
use warp_worker::{Catalog, Host, HostConfig, Numbers, Offer, StopLevel, Stopped, Surroundings};

/// No case takes longer, whatever else the machine does.
const LIMIT: Duration = Duration::from_secs(30);

// ------------------------------------------------------------------------------------------------- the store

/// What happens to a call instead of its answer.
#[derive(Clone)]
pub enum Fault {
    /// Nothing is done, and this is answered.
    Refused(StoreErrorKind),
    /// It is done, and this is answered: the reply is lost after the commit.
    ReplyLost(StoreErrorKind),
    /// It is done, and answered when somebody adds a permit.
    AnswerHeld(Arc<Semaphore>),
    /// It begins when somebody adds a permit, or is refused then.
    Held(Arc<Semaphore>, Option<StoreErrorKind>),
    /// It takes so long.
    Slow(Duration),
    /// The driver panics before it does anything.
    Panic,
    /// Nothing is done, and nothing is ever answered.
    Never,
    /// It is done, and that is never answered.
    AnswerNever,
}

struct Planned {
    call: &'static str,
    fault: Fault,
    times: usize,
}

/// What is known about the calls of all hosts.
#[derive(Default)]
pub struct Record {
    plan: Mutex<Vec<Planned>>,
    counts: Mutex<BTreeMap<&'static str, usize>>,
    /// Calls that were done, in order, with the settles of exchanges.
    done: Mutex<Vec<(&'static str, Vec<Settle>)>>,
    /// Exchanges under way, now and at most.
    exchanging: AtomicUsize,
    most_exchanging: AtomicUsize,
    claiming: AtomicUsize,
    renewing: AtomicUsize,
    /// Renewals and publications.
    comparing: AtomicUsize,
    overlaps: AtomicUsize,
    /// Jobs claimed and not settled, now and at most.
    outstanding: Mutex<(i64, i64)>,
    /// Slots that a host is to hear to have lost.
    slots_lost: Mutex<Vec<(HostId, CancelSignal)>>,
    slots_news: Notify,
}

/// The model as one process's store.
pub struct TestStore {
    model: Arc<ModelStore>,
    record: Arc<Record>,
    /// Announces as a driver does: what became runnable, or was asked to stop.
    version: watch::Sender<u64>,
    heard: AtomicU64,
    /// Grows with everything that happens; what tests wait on.
    activity: watch::Sender<u64>,
}

impl TestStore {
    fn plan(&self, call: &'static str) -> Option<Fault> {
        *self.record.counts.lock().unwrap().entry(call).or_default() += 1;
        let mut plan = self.record.plan.lock().unwrap();
        let planned = plan.iter_mut().find(|planned| planned.call == call && planned.times > 0)?;
        planned.times -= 1;
        Some(planned.fault.clone())
    }

    /// What never ends is no call to be counted; it may panic all the same.
    fn listens(&self, call: &'static str) {
        let mut plan = self.record.plan.lock().unwrap();
        let planned = plan.iter_mut().find(|planned| planned.call == call && planned.times > 0);
        let panics = planned.is_some_and(|planned| {
            planned.times -= 1;
            true
        });
        drop(plan);
        assert!(!panics, "the test says so");
    }

    /// One command, with whatever the plan has for it.
    async fn command<T>(&self, call: &'static str, settles: &[Settle], run: impl Future<Output = Result<T>> + Send) -> Result<T> {
        // `ends` are the exchanges that carry some: a claim that finds nothing must not use their fault up.
        let fault = if settles.is_empty() { None } else { self.plan("ends") };
        let fault = fault.or_else(|| self.plan(call));
        let failure = |kind| Err(StoreError::new(call, kind, "the test says so"));
        match &fault {
            Some(Fault::Refused(kind)) => {
                self.bump();
                return failure(*kind);
            }
            Some(Fault::Panic) => panic!("the test says so"),
            Some(Fault::Slow(span)) => tokio::time::sleep(*span).await,
            Some(Fault::Held(gate, refusal)) => {
                gate.acquire().await.expect("the gate is never closed").forget();
                if let Some(kind) = refusal {
                    return failure(*kind);
                }
            }
            Some(Fault::Never) => {
                self.bump();
                std::future::pending::<()>().await;
            }
            Some(Fault::ReplyLost(_) | Fault::AnswerHeld(_) | Fault::AnswerNever) | None => {}
        }
        let before = self.model.look(wanted);
        let answer = run.await;
        if answer.is_ok() {
            self.record.done.lock().unwrap().push((call, settles.to_vec()));
        }
        let after = self.model.look(wanted);
        if after.iter().any(|entry| !before.contains(entry)) || ANNOUNCED.contains(&call) {
            self.version.send_modify(|version| *version += 1);
        }
        self.bump();
        match fault {
            Some(Fault::ReplyLost(kind)) => failure(kind),
            Some(Fault::AnswerHeld(gate)) => {
                gate.acquire().await.expect("the gate is never closed").forget();
                answer
            }
            Some(Fault::AnswerNever) => std::future::pending().await,
            _ => answer,
        }
    }

    fn bump(&self) {
        self.activity.send_modify(|activity| *activity += 1);
    }
}

/// Calls after which somebody should look, whatever they changed.
const ANNOUNCED: [&str; 5] = ["serve", "pause_queue", "resume_queue", "pause_host", "resume_host"];

/// What somebody should hear of: runnable, due later, or to be cancelled.
fn wanted(model: &Model) -> Vec<(JobHandle, Place, UnixMillis)> {
    let rows = model.rows.iter().filter(|(_, row)| matches!(row.place, Place::Ready | Place::Reserved | Place::Scheduled));
    let cancels = model.cancels.keys().map(|job| (*job, Place::Deleted, UnixMillis(0)));
    rows.map(|(job, row)| (*job, row.place, row.changed_at)).chain(cancels).collect()
}

#[async_trait]
impl Store for TestStore {
    async fn enqueue(&self, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>> {
        self.command("enqueue", &[], self.model.enqueue(jobs, now)).await
    }
    async fn register(&self, info: HostInfo) -> Result<HostId> {
        self.command("register", &[], self.model.register(info)).await
    }
    async fn serve(&self, host: HostId, served: Vec<Served>) -> Result<()> {
        let _busy = Busy::new(&self.record, &self.record.comparing, &self.record.claiming);
        self.command("serve", &[], self.model.serve(host, served)).await
    }
    async fn renew(&self, params: RenewParams) -> Result<Renewed> {
        let _renewing = Busy::new(&self.record, &self.record.renewing, &NOTHING);
        let _busy = Busy::new(&self.record, &self.record.comparing, &self.record.claiming);
        self.command("renew", &[], self.model.renew(params)).await
    }
    async fn deregister(&self, host: HostId, now: UnixMillis) -> Result<()> {
        self.command("deregister", &[], self.model.deregister(host, now)).await
    }
    async fn hosts(&self) -> Result<Vec<HostSeen>> {
        self.command("hosts", &[], self.model.hosts()).await
    }
    async fn rescue(&self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued> {
        self.command("rescue", &[], self.model.rescue(host, renewals, max_deaths, now)).await
    }
    async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged> {
        let _exchanging = Busy::new(&self.record, &self.record.exchanging, &NOTHING);
        self.record.most_exchanging.fetch_max(self.record.exchanging.load(Ordering::SeqCst), Ordering::SeqCst);
        let _claiming = params.claim.is_some().then(|| Busy::new(&self.record, &self.record.claiming, &self.record.comparing));
        let settles = Arc::clone(&params.settles);
        let record = Arc::clone(&self.record);
        self.command("exchange", &settles, async {
            let answer = self.model.exchange(params).await?;
            let ended = answer.settled.iter().filter(|verdict| !matches!(verdict, SettleVerdict::Late | SettleVerdict::Repeated)).count();
            let (now, most) = &mut *record.outstanding.lock().unwrap();
            *now += answer.claimed.len() as i64 - ended as i64;
            *most = (*most).max(*now);
            Ok(answer)
        })
        .await
    }
    async fn append_output(&self, host: HostId, handle: JobHandle, token: ClaimToken, output: RunOutput) -> Result<SettleVerdict> {
        self.command("append_output", &[], self.model.append_output(host, handle, token, output)).await
    }
    async fn signals(&self, host: HostId) -> Result<Signals> {
        self.command("signals", &[], self.model.signals(host)).await
    }
    async fn expire_reservations(&self, patience: Duration, now: UnixMillis) -> Result<u32> {
        self.command("expire_reservations", &[], self.model.expire_reservations(patience, now)).await
    }
    async fn prune(&self, retention: Retention, max: u32, now: UnixMillis) -> Result<u32> {
        self.command("prune", &[], self.model.prune(retention, max, now)).await
    }
    async fn changed(&self) {
        self.listens("changed");
        let heard = self.heard.load(Ordering::Relaxed);
        let mut versions = self.version.subscribe();
        let version = *versions.wait_for(|version| *version != heard).await.expect("the store lives");
        self.heard.store(version, Ordering::Relaxed);
    }
    async fn slots_lost(&self, host: HostId) -> Vec<CancelSignal> {
        self.listens("slots_lost");
        loop {
            let news = self.record.slots_news.notified();
            let mine: Vec<_> = self.record.slots_lost.lock().unwrap().extract_if(.., |(of, _)| *of == host).map(|(_, run)| run).collect();
            if !mine.is_empty() {
                return mine;
            }
            news.await;
        }
    }
    async fn state_get(&self, bucket: &str, key: &str) -> Result<Option<String>> {
        self.command("state_get", &[], self.model.state_get(bucket, key)).await
    }
    async fn state_apply(&self, host: HostId, handle: JobHandle, token: ClaimToken, write: StateWrite) -> Result<StateVerdict> {
        self.command("state_apply", &[], self.model.state_apply(host, handle, token, write)).await
    }
    async fn jobs(&self, filter: JobFilter) -> Result<Vec<JobSummary>> {
        self.model.jobs(filter).await
    }
    async fn job(&self, id: JobId, now: UnixMillis) -> Result<Option<JobDetails>> {
        self.model.job(id, now).await
    }
    async fn job_logs(&self, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>> {
        self.model.job_logs(id, run).await
    }
    async fn cancel(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        self.command("cancel", &[], self.model.cancel(id, by, now)).await
    }
    async fn requeue(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        self.command("requeue", &[], self.model.requeue(id, by, now)).await
    }
    async fn delete(&self, id: JobId, now: UnixMillis) -> Result<CommandVerdict> {
        self.command("delete", &[], self.model.delete(id, now)).await
    }
    async fn limits(&self) -> Result<Vec<AdminLimit>> {
        self.model.limits().await
    }
    async fn set_limit(&self, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen> {
        self.command("set_limit", &[], self.model.set_limit(key, limit, by, now)).await
    }
    async fn remove_limit(&self, key: &str, now: UnixMillis) -> Result<bool> {
        self.command("remove_limit", &[], self.model.remove_limit(key, now)).await
    }
    async fn keys(&self, max: u32) -> Result<Vec<KeySeen>> {
        self.model.keys(max).await
    }
    async fn key(&self, key: &str) -> Result<Option<KeySeen>> {
        self.model.key(key).await
    }
    async fn pause_queue(&self, queue: &str, by: &str, now: UnixMillis) -> Result<bool> {
        self.command("pause_queue", &[], self.model.pause_queue(queue, by, now)).await
    }
    async fn resume_queue(&self, queue: &str, now: UnixMillis) -> Result<bool> {
        self.command("resume_queue", &[], self.model.resume_queue(queue, now)).await
    }
    async fn paused_queues(&self) -> Result<BTreeMap<String, Pause>> {
        self.model.paused_queues().await
    }
    async fn pause_host(&self, host: HostId, by: &str, now: UnixMillis) -> Result<bool> {
        self.command("pause_host", &[], self.model.pause_host(host, by, now)).await
    }
    async fn resume_host(&self, host: HostId, now: UnixMillis) -> Result<bool> {
        self.command("resume_host", &[], self.model.resume_host(host, now)).await
    }
    async fn overview(&self) -> Result<Overview> {
        self.model.overview().await
    }
    async fn queues(&self, max: u32) -> Result<Vec<QueueSeen>> {
        self.model.queues(max).await
    }
    async fn served_contracts(&self) -> Result<Vec<String>> {
        self.model.served_contracts().await
    }
}

/// What overlaps with nothing.
static NOTHING: AtomicUsize = AtomicUsize::new(0);

/// Counts a call as under way, and notes when one of the other kind is.
struct Busy<'a>(&'a AtomicUsize);

impl<'a> Busy<'a> {
    fn new(record: &Record, mine: &'a AtomicUsize, other: &AtomicUsize) -> Self {
        mine.fetch_add(1, Ordering::SeqCst);
        if other.load(Ordering::SeqCst) > 0 {
            record.overlaps.fetch_add(1, Ordering::SeqCst);
        }
        Busy(mine)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

// ------------------------------------------------------------------------------------------------- clock, code, catalog

/// Real time that jumps on demand, numbers instead of chance.
pub struct TestClock {
    origin: Instant,
    ahead: AtomicU64,
    ids: AtomicU64,
    /// How often anybody asked for the boot-time clock.
    pub asked: AtomicU64,
}

impl Surroundings for TestClock {
    fn now(&self) -> UnixMillis {
        let passed = self.origin.elapsed() + Duration::from_millis(self.ahead.load(Ordering::SeqCst));
        UnixMillis(1_000_000).after(passed)
    }
    fn boot(&self) -> Duration {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Duration::from_secs(1000) + self.origin.elapsed() + Duration::from_millis(self.ahead.load(Ordering::SeqCst))
    }
    fn new_id(&self) -> JobId {
        JobId(u128::from(self.ids.fetch_add(1, Ordering::Relaxed)))
    }
    fn draw(&self) -> u16 {
        500
    }
}

type Body = dyn Fn(AttemptInfo, Arc<dyn HostCalls>, Arc<StopSignal>) -> BoxFuture<'static, Outcome> + Send + Sync;

struct Native(Box<Body>);

impl Handler for Native {
    // Written without the macro, so that a closure may panic before there is a future.
    fn run<'a, 'f>(&'a self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> BoxFuture<'f, Outcome>
    where
        'a: 'f,
        Self: 'f,
    {
        (self.0)(attempt, calls, stop)
    }
}

/// A closure as a handler.
pub fn code<F>(body: impl Fn(AttemptInfo, Arc<dyn HostCalls>, Arc<StopSignal>) -> F + Send + Sync + 'static) -> Arc<dyn Handler>
where
    F: Future<Output = Outcome> + Send + 'static,
{
    Arc::new(Native(Box::new(move |attempt, calls, stop| Box::pin(body(attempt, calls, stop)))))
}

/// A handler that completes at once.
pub fn no_op() -> Arc<dyn Handler> {
    code(|_, _, _| async { done() })
}

/// Completed without a result.
pub fn done() -> Outcome {
    Outcome::Said(Said::Completed(None))
}

/// Completed with one.
pub fn result(text: impl Into<String>) -> Outcome {
    Outcome::Said(Said::Completed(Some(text.into())))
}

/// Failed, and to be tried again.
pub fn retryable(text: &str) -> Outcome {
    Outcome::Said(Said::Retryable(text.to_owned()))
}

/// One contract with its handler.
pub fn offer(contract: &str, declared: Declared, handler: Arc<dyn Handler>) -> Offer {
    offer_of(contract, 1, declared, handler)
}

/// The same from another version of the plugin.
pub fn offer_of(contract: &str, version: u8, declared: Declared, handler: Arc<dyn Handler>) -> Offer {
    let declarations = Declarations {
        contract: contract.to_owned(),
        handler: contract.to_owned(),
        digest: Digest([version; 32]),
        on_contract: Declared::default(),
        on_handler: declared,
    };
    Offer { declarations: Arc::new(declarations), handler }
}

/// Nothing declared.
pub fn plain() -> Declared {
    Declared::default()
}

/// So many retries, each after this long.
pub fn retry(max: u32, delay: Duration) -> Declared {
    Declared { retry: Some(Retry { max, delays: vec![delay], jitter_permille: 0 }), ..plain() }
}

/// A per-attempt timeout.
pub fn timeout(per_attempt: Duration, mode: TimeoutMode) -> Declared {
    Declared { timeout: Some(Timeout { per_attempt, mode }), ..plain() }
}

/// A mutex in Wait mode on this template.
pub fn mutex(key: &str) -> Declared {
    let concurrency = Concurrency {
        kind: ConcurrencyKind::Mutex,
        keys: vec![key.parse().expect("a key template")],
        limit: 1,
        weight: 1,
        mode: Mode::Wait,
        order: Order::Any,
        on_retry: OnRetry::Block,
    };
    Declared { concurrency: Some(concurrency), ..plain() }
}

struct TestCatalog {
    offers: Mutex<Vec<Offer>>,
    news: Notify,
}

#[async_trait]
impl Catalog for TestCatalog {
    fn offers(&self) -> Vec<Offer> {
        self.offers.lock().unwrap().clone()
    }
    async fn changed(&self) {
        self.news.notified().await;
    }
}

// ------------------------------------------------------------------------------------------------- the world

/// A database, a clock, and the hosts of a case.
pub struct World {
    /// The store as the tests see it.
    pub store: Arc<TestStore>,
    /// The clock.
    pub clock: Arc<TestClock>,
}

/// A host under test.
pub struct TestHost {
    /// Stops it.
    pub stop: watch::Sender<StopLevel>,
    /// Its numbers.
    pub numbers: Numbers,
    /// Its loop.
    pub task: tokio::task::JoinHandle<Result<Stopped>>,
    catalog: Arc<TestCatalog>,
}

impl TestHost {
    /// Stops it this way and answers how it ended.
    pub async fn end(self, level: StopLevel) -> Stopped {
        let _ = self.stop.send(level);
        limited("the host's end", self.task).await.expect("the loop does not panic").expect("it was registered")
    }

    /// Replaces what it offers.
    pub fn offer(&self, offers: Vec<Offer>) {
        *self.catalog.offers.lock().unwrap() = offers;
        self.catalog.news.notify_one();
    }
}

/// Waits for something that must come.
pub async fn limited<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("{what} did not come within {LIMIT:?}"))
}

/// Settings under which nothing but the case itself decides what happens.
pub fn config(workers: u32) -> HostConfig {
    HostConfig { poll_every: Some(Duration::from_secs(3600)), ..HostConfig::new("host", workers) }
}

/// The same with so many exchanges at once.
pub fn config_of(workers: u32, exchanges: u32) -> HostConfig {
    HostConfig { exchanges: Some(exchanges), ..config(workers) }
}

impl World {
    /// Nothing yet.
    pub fn new() -> Self {
        let store = TestStore {
            model: Arc::new(ModelStore::new()),
            record: Arc::default(),
            version: watch::Sender::new(0),
            heard: AtomicU64::new(0),
            activity: watch::Sender::new(0),
        };
        let clock = TestClock { origin: Instant::now(), ahead: AtomicU64::new(0), ids: AtomicU64::new(1), asked: AtomicU64::new(0) };
        World { store: Arc::new(store), clock: Arc::new(clock) }
    }

    /// The same database as another process sees it; calls, faults and announcements are shared.
    fn process(&self) -> Arc<TestStore> {
        Arc::new(TestStore {
            model: Arc::clone(&self.store.model),
            record: Arc::clone(&self.store.record),
            version: self.store.version.clone(),
            heard: AtomicU64::new(*self.store.version.borrow()),
            activity: self.store.activity.clone(),
        })
    }

    /// Starts a host.
    pub fn host(&self, config: HostConfig, offers: Vec<Offer>) -> TestHost {
        let (stop, stopped) = watch::channel(StopLevel::Run);
        let catalog = Arc::new(TestCatalog { offers: Mutex::new(offers), news: Notify::new() });
        let (store, clock) = (self.process(), Arc::clone(&self.clock));
        let host = Host::new(config, store, Arc::<TestCatalog>::clone(&catalog), clock, tokio::runtime::Handle::current(), stopped);
        let numbers = host.numbers();
        TestHost { stop, numbers, task: tokio::spawn(host.run()), catalog }
    }

    /// Now.
    pub fn now(&self) -> UnixMillis {
        self.clock.now()
    }

    /// Time passes at once, for everybody; hosts wake as from a suspended machine.
    pub fn jump(&self, span: Duration) {
        self.clock.ahead.fetch_add(u64::try_from(span.as_millis()).expect("a short span"), Ordering::SeqCst);
        self.nudge();
    }

    /// A change is announced without cause.
    pub fn nudge(&self) {
        self.store.version.send_modify(|version| *version += 1);
    }

    /// The next `times` of this call meet with the fault.
    pub fn fault(&self, call: &'static str, fault: Fault, times: usize) {
        self.store.record.plan.lock().unwrap().push(Planned { call, fault, times });
    }

    /// The host that runs these loses their slots.
    pub fn lose_slots(&self, ids: &[JobId]) {
        let runs = self.look(|model| {
            let run = |id: &JobId| {
                let handle = model.handle(*id)?;
                let row = &model.rows[&handle];
                Some((row.host?, CancelSignal { handle, token: row.token? }))
            };
            ids.iter().filter_map(run).collect::<Vec<_>>()
        });
        self.store.record.slots_lost.lock().unwrap().extend(runs);
        self.store.record.slots_news.notify_waiters();
    }

    /// Whether every host has heard of the slots that it lost.
    pub fn slots_are_told(&self) -> bool {
        self.store.record.slots_lost.lock().unwrap().is_empty()
    }

    /// Whether every fault that was planned for this call has been met with.
    pub fn met(&self, call: &'static str) -> bool {
        self.store.record.plan.lock().unwrap().iter().all(|planned| planned.call != call || planned.times == 0)
    }

    /// No more faults of this call.
    pub fn heal_only(&self, call: &'static str) {
        self.store.record.plan.lock().unwrap().retain(|planned| planned.call != call);
    }

    /// No more faults.
    pub fn heal(&self) {
        self.store.record.plan.lock().unwrap().clear();
    }

    /// Waits until every loop has gone round at least once more and has acted on all that had happened before.
    pub async fn rounds(&self) {
        for _ in 0..3 {
            let asked = self.clock.asked.load(Ordering::Relaxed);
            self.nudge();
            self.until("the loop's next round", || self.clock.asked.load(Ordering::Relaxed) > asked).await;
        }
    }

    /// How often this was called.
    pub fn count(&self, call: &'static str) -> usize {
        self.store.record.counts.lock().unwrap().get(call).copied().unwrap_or(0)
    }

    /// How often anything was called.
    pub fn calls(&self) -> usize {
        self.store.record.counts.lock().unwrap().values().sum()
    }

    /// What was done, in order.
    pub fn history(&self) -> Vec<(&'static str, Vec<Settle>)> {
        self.store.record.done.lock().unwrap().clone()
    }

    /// The most jobs that were claimed and not settled at once.
    pub fn most_outstanding(&self) -> i64 {
        self.store.record.outstanding.lock().unwrap().1
    }

    /// The most exchanges that were under way at once.
    pub fn most_at_once(&self) -> usize {
        self.store.record.most_exchanging.load(Ordering::SeqCst)
    }

    /// Whether a renewal is under way.
    pub fn is_renewing(&self) -> bool {
        self.store.record.renewing.load(Ordering::SeqCst) > 0
    }

    /// How often a claim was under way together with a renewal or a publication.
    pub fn overlaps(&self) -> usize {
        self.store.record.overlaps.load(Ordering::SeqCst)
    }

    /// Looks at the rows.
    pub fn look<T>(&self, at: impl FnOnce(&Model) -> T) -> T {
        self.store.model.look(at)
    }

    /// A job that nothing is said about.
    pub fn job(&self, contract: &str, payload: &str) -> NewJob {
        NewJob {
            id: self.clock.new_id(),
            contract: contract.to_owned(),
            queue: "default".to_owned(),
            payload: payload.to_owned(),
            metadata: Vec::new(),
            trace_parent: None,
            due: None,
            explicit: plain(),
            unique_key: None,
        }
    }

    /// Enqueues it.
    pub async fn enqueue(&self, job: NewJob) -> JobId {
        let verdicts = self.store.enqueue(vec![job], self.now()).await.expect("enqueue");
        match verdicts[..] {
            [EnqueueVerdict::Enqueued(id)] => id,
            ref other => panic!("{other:?}"),
        }
    }

    /// Enqueues a plain job.
    pub async fn add(&self, contract: &str) -> JobId {
        self.enqueue(self.job(contract, "{}")).await
    }

    /// Enqueues so many, in one command.
    pub async fn add_many(&self, contract: &str, count: usize) -> Vec<JobId> {
        let jobs: Vec<_> = (0..count).map(|_| self.job(contract, "{}")).collect();
        let ids = jobs.iter().map(|job| job.id).collect();
        self.store.enqueue(jobs, self.now()).await.expect("enqueue");
        ids
    }

    /// Everything about a job.
    pub async fn details(&self, id: JobId) -> JobDetails {
        self.store.job(id, self.now()).await.expect("read a job").expect("it is there")
    }

    /// Its state.
    pub async fn state(&self, id: JobId) -> State {
        self.details(id).await.summary.state
    }

    /// Its events.
    pub async fn events(&self, id: JobId) -> Vec<String> {
        self.details(id).await.audit.into_iter().map(|row| row.event).collect()
    }

    /// Waits until something is so. It is looked at after everything that happens in the store or in a handler.
    pub async fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        let mut activity = self.store.activity.subscribe();
        limited(what, async {
            while !so() {
                // Numbers of a host change a moment after the store's answer, which nobody announces.
                let _ = tokio::time::timeout(Duration::from_millis(5), activity.changed()).await;
            }
        })
        .await;
    }

    /// Waits until these jobs are in this state.
    pub async fn all(&self, ids: &[JobId], state: State) {
        let what = format!("{} jobs {state:?}", ids.len());
        self.until(&what, || {
            self.look(|model| {
                let row = |id: &JobId| model.handle(*id).and_then(|job| model.rows.get(&job));
                ids.iter().all(|id| row(id).is_some_and(|row| row.place.state() == state))
            })
        })
        .await;
    }

    /// Waits until this job is in this state.
    pub async fn one(&self, id: JobId, state: State) {
        self.all(&[id], state).await;
    }
}

/// Somebody who holds handlers up and lets them go.
#[derive(Clone)]
pub struct Gate(Arc<Semaphore>, Arc<AtomicUsize>);

impl Gate {
    /// Closed.
    pub fn new() -> Self {
        Gate(Arc::new(Semaphore::new(0)), Arc::default())
    }

    /// Waits to be let go.
    pub async fn pass(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.acquire().await.expect("never closed").forget();
    }

    /// How many have come so far.
    pub fn came(&self) -> usize {
        self.1.load(Ordering::SeqCst)
    }

    /// Lets so many go, now or when they come.
    pub fn open(&self, count: usize) {
        self.0.add_permits(count);
    }

    /// A handler that waits here, then completes.
    pub fn handler(&self) -> Arc<dyn Handler> {
        let gate = self.clone();
        code(move |_, _, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                done()
            }
        })
    }
}
