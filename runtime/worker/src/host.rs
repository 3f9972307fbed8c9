//! The control loop: one task that owns everything a host knows.
//!
//! It takes all that has happened, acts on it, starts what store calls are due, and waits. Store calls run as
//! tasks and come back as [`Event`]s, so the loop itself never waits for one. Two rules order them:
//!
//! - one exchange is in flight at a time; what ends meanwhile makes the next batch;
//! - a renewal compares the rows under the host's name with the runs it knows, so it never overlaps an exchange,
//!   which could have claimed rows whose answer is still on its way.
//!
//! What a run says while it goes on is stored beside both, and its end waits for that, so that no line is lost or
//! overtaken.
//!
//! Cancellation: dropping the loop at any await ends its workers and tells every run to stop. A store call that is
//! dropped with it runs to its end in the driver; what it claimed then belongs to a host that no longer renews, and
//! is rescued.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle};
use warp_pipeline::{Handler, StopReason, StopSignal};
use warp_store::{
    CancelSignal, ClaimParams, Claimed, ExchangeParams, Exchanged, HostInfo, Lane, RenewParams, Renewed, Served, Settle, SettleVerdict,
    Signals, Store, StoreError, StoreErrorKind,
};

use crate::calls::{Parent, RunCalls, join_output};
use crate::config::HostConfig;
use crate::lease::Lease;
use crate::pace::Pace;
use crate::rescue::Watch;
use crate::run::{Ended, Lanes, Run, hand_back, work};
use crate::surroundings::Surroundings;

/// One contract that this host can run, and the code for it.
#[derive(Clone)]
pub struct Offer {
    /// What plugin, contract and handler declare.
    pub declarations: Arc<Declarations>,
    /// The code.
    pub handler: Arc<dyn Handler>,
}

/// What can be run at the moment. Implemented over the plugin registry by the program.
#[async_trait]
pub trait Catalog: Send + Sync + 'static {
    /// One offer for each contract.
    fn offers(&self) -> Vec<Offer>;
    /// Completes when the offers may have changed since the last call returned.
    async fn changed(&self);
}

/// How urgently a host is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopLevel {
    /// Not at all.
    Run,
    /// Claim nothing more, hand back what has not begun, wait out the grace, stop the rest, settle, deregister. What
    /// ignores its stop, or a store that does not take the ends, is given up some seconds after the grace.
    Graceful,
    /// Hand everything back with one statement and end.
    Now,
}

/// How a host ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Runs that were still going when the host gave up on them; their rows were handed back.
    pub abandoned: usize,
    /// Whether the registration has ended; if not, another host rescues it after the lease.
    pub deregistered: bool,
}

#[derive(Default)]
struct Counters {
    exchanges: AtomicU64,
    claimed: AtomicU64,
    settled: AtomicU64,
    late: AtomicU64,
    parked: AtomicU64,
    parked_again: AtomicU64,
    skipped: AtomicU64,
    unknown_rows: AtomicU64,
    rescued: AtomicU64,
    running: AtomicU64,
}

/// Numbers since the host started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostReport {
    /// Store round trips that settled or claimed.
    pub exchanges: u64,
    /// Jobs claimed.
    pub claimed: u64,
    /// Runs settled.
    pub settled: u64,
    /// Settles that came too late and changed nothing.
    pub late: u64,
    /// Jobs that a claim of this host parked.
    pub parked: u64,
    /// Of those, how many had been parked before.
    pub parked_again: u64,
    /// Jobs that a claim of this host skipped.
    pub skipped: u64,
    /// Rows found under this host's name that it did not know (0 in normal running).
    pub unknown_rows: u64,
    /// Rows given back from dead hosts.
    pub rescued: u64,
    /// Jobs claimed and not yet settled.
    pub running: u64,
}

/// A host, to be run by [`Host::run`].
pub struct Host {
    config: Arc<HostConfig>,
    store: Arc<dyn Store>,
    catalog: Arc<dyn Catalog>,
    surroundings: Arc<dyn Surroundings>,
    guests: tokio::runtime::Handle,
    stop: watch::Receiver<StopLevel>,
    counters: Arc<Counters>,
    lease: Arc<Lease>,
}

/// A handle to a running host's numbers.
#[derive(Clone)]
pub struct Numbers {
    counters: Arc<Counters>,
    lease: Arc<Lease>,
}

impl Numbers {
    /// The numbers now.
    #[must_use]
    pub fn report(&self) -> HostReport {
        let Counters { exchanges, claimed, settled, late, parked, parked_again, skipped, unknown_rows, rescued, running } = &*self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HostReport {
            exchanges: read(exchanges),
            claimed: read(claimed),
            settled: read(settled),
            late: read(late),
            parked: read(parked),
            parked_again: read(parked_again),
            skipped: read(skipped),
            unknown_rows: read(unknown_rows),
            rescued: read(rescued),
            running: read(running),
        }
    }

    /// How long ago the last good renewal of the lease was sent; `None` before the first and after the registration
    /// has ended.
    #[must_use]
    pub fn lease_age(&self) -> Option<Duration> {
        self.lease.age()
    }

    /// Whether runs may go on: the lease cannot lapse yet.
    #[must_use]
    pub fn lease_is_good(&self) -> bool {
        self.lease.is_good()
    }
}

impl Host {
    /// A host that will run its control loop on the runtime that calls [`Host::run`] and its handlers on `guests`.
    pub fn new(
        config: HostConfig,
        store: Arc<dyn Store>,
        catalog: Arc<dyn Catalog>,
        surroundings: Arc<dyn Surroundings>,
        guests: tokio::runtime::Handle,
        stop: watch::Receiver<StopLevel>,
    ) -> Self {
        let lease = Arc::new(Lease::new(Arc::clone(&surroundings)));
        Host { config: Arc::new(config), store, catalog, surroundings, guests, stop, counters: Arc::default(), lease }
    }

    /// Access to the host's numbers while it runs.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        Numbers { counters: Arc::clone(&self.counters), lease: Arc::clone(&self.lease) }
    }

    /// Runs until told to stop.
    ///
    /// # Errors
    /// When the host cannot register at all. Once registered it survives a store that is away.
    pub async fn run(self) -> Result<Stopped, StoreError> {
        let info = self.info();
        let host = self.store.register(info).await?;
        Control::new(self, host).run().await
    }

    fn info(&self) -> HostInfo {
        HostInfo { name: self.config.name.clone(), version: self.config.version.clone(), now: self.surroundings.now() }
    }
}

/// The lanes of one moment and the code behind them.
struct LaneSet {
    lanes: Arc<[Lane]>,
    served: Vec<Served>,
    handlers: HashMap<(String, Digest), Arc<dyn Handler>>,
}

impl LaneSet {
    fn new(offers: Vec<Offer>, queues: &[String]) -> Self {
        let lanes = queues
            .iter()
            .flat_map(|queue| offers.iter().map(|offer| Lane { queue: queue.clone(), declarations: Arc::clone(&offer.declarations) }))
            .collect();
        let served = offers.iter().map(|offer| Served { declarations: Arc::clone(&offer.declarations) }).collect();
        let handlers = offers
            .into_iter()
            .map(|Offer { declarations, handler }| ((declarations.contract.clone(), declarations.digest), handler))
            .collect();
        LaneSet { lanes, served, handlers }
    }
}

/// What a store call came back with.
enum Event {
    Exchanged { settles: Arc<[Settle]>, lanes: Arc<LaneSet>, asked: u32, sent: Duration, result: Result<Exchanged, StoreError> },
    Renewed { sent: Duration, result: Result<Renewed, StoreError> },
    Swept { hosts: Result<Vec<warp_store::HostSeen>, StoreError> },
    Rescued { host: HostId, result: Result<warp_store::Rescued, StoreError> },
    Signals(Result<Signals, StoreError>),
    Registered(Result<HostId, StoreError>),
    Served(Result<(), StoreError>),
    Pruned(Result<u32, StoreError>),
    Expired(Result<u32, StoreError>),
    Appended { token: ClaimToken, result: Result<SettleVerdict, StoreError> },
}

/// A driver that panics has not answered: whatever it was doing may have happened.
async fn guarded<T>(op: &'static str, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let panicked = |_| Err(StoreError::new(op, StoreErrorKind::OutcomeUnknown, "the driver panicked"));
    AssertUnwindSafe(call).catch_unwind().await.unwrap_or_else(panicked)
}

/// Periodic work and when it is next due, on the boot-time clock.
struct Due {
    renew: Duration,
    sweep: Duration,
    reservations: Duration,
    prune: Duration,
    signals: Duration,
    output: Duration,
    poll: Duration,
    exchange_again: Duration,
    serve: Duration,
    register: Duration,
}

/// Whether the host may claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Registered with a good lease.
    Good,
    /// The lease lapsed while the registration may still be there: everything is given back, then renewed (C3).
    Lapsed,
    /// The registration is gone: everything stops, then the host registers anew.
    Lost,
}

struct Control {
    config: Arc<HostConfig>,
    store: Arc<dyn Store>,
    catalog: Arc<dyn Catalog>,
    surroundings: Arc<dyn Surroundings>,
    guests: tokio::runtime::Handle,
    stop: watch::Receiver<StopLevel>,
    counters: Arc<Counters>,

    host: HostId,
    standing: Standing,
    lease: Arc<Lease>,
    lanes: Arc<Lanes>,
    lane_set: Arc<LaneSet>,
    /// Workers and listeners; ended when this is dropped.
    others: Vec<AbortHandle>,
    /// Claimed, and its end not yet among `pending`.
    runs: HashMap<JobHandle, Arc<Run>>,
    /// Cancelled runs and when their grace is over.
    cancelling: HashMap<JobHandle, (ClaimToken, Duration)>,
    /// When the next run may be over its time or its grace; until then nobody looks at them one by one.
    look: Duration,

    pending: Vec<Settle>,
    /// A batch whose outcome is unknown or that could not be written; sent again as it was.
    resend: Option<Arc<[Settle]>>,
    /// Runs whose output is on its way to the store.
    appending: HashSet<ClaimToken>,
    /// Ends that wait for that output.
    held: HashMap<ClaimToken, Ended>,
    /// The answer of a claim was lost: what it may have claimed is handed back by a renewal before the next claim.
    reconcile: bool,
    tasks: JoinSet<Event>,
    exchanging: bool,
    renewing: bool,
    /// The last of the two was a renewal: an exchange that is wanted goes first, however slow the store is.
    exchange_next: bool,
    sweeping: bool,
    rescuing: usize,
    expiring: bool,
    registering: bool,
    asking_signals: bool,
    asked_signals: Duration,
    pruning: bool,
    serving: bool,
    serve_again: bool,
    /// Whether a claim might find something.
    hint: bool,
    pace: Pace,
    last_exchange: Duration,
    /// How many exchanges (or, without a registration, attempts to register) have failed in a row.
    trouble: u32,
    watch: Watch,
    due: Due,
    /// Set by a graceful stop: when the grace is over.
    draining: Option<Duration>,
    news: Arc<Notify>,
    catalog_news: Arc<Notify>,
}

/// How long to wait before a failed exchange is sent again: doubling from 20 ms to 2 s.
fn trouble_delay(trouble: u32) -> Duration {
    Duration::from_millis(20 << trouble.min(7)).min(Duration::from_secs(2))
}

impl Control {
    fn new(host: Host, id: HostId) -> Self {
        let Host { config, store, catalog, surroundings, guests, stop, counters, lease } = host;
        let boot = surroundings.boot();
        lease.extend(boot, config.lease, config.stop_before_lapse);
        let due = Due {
            renew: boot + config.renew_every,
            // At once: the process before this one may have died on this very machine.
            sweep: boot,
            reservations: boot + config.reservation_patience,
            prune: boot + Duration::from_secs(10),
            signals: boot,
            output: boot + Duration::from_secs(1),
            poll: boot,
            exchange_again: boot,
            serve: boot,
            register: boot,
        };
        Control {
            host: id,
            standing: Standing::Good,
            lease,
            lanes: Arc::new(Lanes::new()),
            lane_set: Arc::new(LaneSet::new(Vec::new(), &[])),
            others: Vec::new(),
            runs: HashMap::new(),
            cancelling: HashMap::new(),
            look: boot,
            pending: Vec::new(),
            resend: None,
            appending: HashSet::new(),
            held: HashMap::new(),
            reconcile: false,
            tasks: JoinSet::new(),
            exchanging: false,
            renewing: false,
            exchange_next: false,
            sweeping: false,
            rescuing: 0,
            expiring: false,
            registering: false,
            asking_signals: false,
            asked_signals: Duration::ZERO,
            pruning: false,
            serving: false,
            serve_again: true,
            hint: true,
            pace: Pace::default(),
            last_exchange: boot,
            trouble: 0,
            watch: Watch::default(),
            due,
            draining: None,
            news: Arc::new(Notify::new()),
            catalog_news: Arc::new(Notify::new()),
            config,
            store,
            catalog,
            surroundings,
            guests,
            stop,
            counters,
        }
    }

    async fn run(mut self) -> Result<Stopped, StoreError> {
        self.others.push(tokio::spawn(listen_store(Arc::clone(&self.store), Arc::clone(&self.news))).abort_handle());
        self.others.push(tokio::spawn(listen_catalog(Arc::clone(&self.catalog), Arc::clone(&self.catalog_news))).abort_handle());
        for _ in 0..self.workers() {
            let worker = work(Arc::clone(&self.lanes), Arc::clone(&self.config), Arc::clone(&self.surroundings));
            self.others.push(self.guests.spawn(worker).abort_handle());
        }
        self.look_at_offers();
        Ok(self.until_stopped().await)
    }

    fn workers(&self) -> u32 {
        self.config.workers.max(1)
    }

    async fn until_stopped(&mut self) -> Stopped {
        loop {
            let level = *self.stop.borrow();
            if level == StopLevel::Now {
                return self.leave(self.runs.len()).await;
            }
            let boot = self.surroundings.boot();
            self.absorb_ended();
            if level == StopLevel::Graceful {
                self.drain(boot);
            }
            self.watch_time(boot);
            self.start_due(boot);
            if let Some(over) = self.draining {
                if self.is_idle() {
                    return self.leave(0).await;
                }
                if boot >= over.saturating_add(LAST_ENDS) {
                    tracing::error!(running = self.runs.len(), "giving up on runs that do not end or cannot be settled");
                    return self.leave(self.runs.len()).await;
                }
            }
            let wake = self.next_wake(boot).saturating_sub(boot);
            let lanes = Arc::clone(&self.lanes);
            tokio::select! {
                event = self.tasks.join_next(), if !self.tasks.is_empty() => match event {
                    Some(Ok(event)) => self.handle(event),
                    Some(Err(error)) => tracing::error!(%error, "a store call of the host loop panicked"),
                    None => {}
                },
                () = lanes.news.notified() => {}
                () = self.news.notified() => {
                    self.hint = true;
                    // Looked at soon, but not as often as somebody enqueues.
                    self.due.signals = self.due.signals.min(self.asked_signals.saturating_add(SIGNALS_APART));
                }
                () = self.catalog_news.notified() => self.look_at_offers(),
                changed = self.stop.changed() => if changed.is_err() {
                    // Whoever could have stopped the host is gone; so is the reason to run.
                    return self.leave(self.runs.len()).await;
                },
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    /// Nothing is running, waiting to be written, or on its way. Without a registration there is nothing to write.
    fn is_idle(&self) -> bool {
        self.runs.is_empty() && !self.exchanging && (self.standing == Standing::Lost || !self.has_ends())
    }

    fn has_ends(&self) -> bool {
        !self.pending.is_empty() || self.resend.is_some()
    }

    /// Whether a claimed job may begin.
    fn may_begin(&self) -> bool {
        self.standing == Standing::Good && self.draining.is_none() && self.lease.is_good()
    }

    // ------------------------------------------------------------------------------------ runs

    fn absorb_ended(&mut self) {
        for ended in self.lanes.take_ended() {
            let token = ended.settle.token;
            if self.appending.contains(&token) {
                self.held.insert(token, ended);
            } else {
                self.end(ended);
            }
        }
        self.count_running();
    }

    fn end(&mut self, Ended { run, settle }: Ended) {
        let handle = run.claimed.handle;
        if self.runs.get(&handle).is_some_and(|known| known.claimed.token == settle.token) {
            self.runs.remove(&handle);
            self.cancelling.remove(&handle);
        }
        self.pending.push(settle);
    }

    fn count_running(&self) {
        self.counters.running.store(self.runs.len() as u64, Ordering::Relaxed);
    }

    fn begin(&mut self, claimed: Vec<Claimed>, lanes: &LaneSet) {
        let (may_begin, boot) = (self.may_begin(), self.surroundings.boot());
        let mut begun = Vec::with_capacity(claimed.len());
        for claimed in claimed {
            let declarations = &claimed.lane.declarations;
            let parent = Parent {
                host: self.host,
                handle: claimed.handle,
                token: claimed.token,
                queue: claimed.lane.queue.clone(),
                metadata: claimed.metadata.clone(),
                trace_parent: claimed.trace_parent.clone(),
                keyed: claimed.keyed,
            };
            let Some(handler) = lanes.handlers.get(&(declarations.contract.clone(), declarations.digest)) else {
                // Impossible unless a driver answers with a lane it was not asked for; the row must not be lost.
                tracing::error!(job = %claimed.id, contract = declarations.contract, "claimed a contract that was not asked for");
                self.pending.push(Settle {
                    handle: claimed.handle,
                    token: claimed.token,
                    ending: warp_domain::ending::Ending::HandBack { message: "claimed by a host that does not run it".to_owned() },
                    on_conflict: warp_domain::ending::Ending::HandBack { message: String::new() },
                    output: warp_store::RunOutput::default(),
                    children: Vec::new(),
                    state: Vec::new(),
                    took: Duration::ZERO,
                });
                continue;
            };
            let calls =
                RunCalls::new(parent, Arc::clone(&self.store), Arc::clone(&self.lease), Arc::clone(&self.surroundings), self.config.caps);
            let timeout = claimed.stamp.timeout.as_ref().map(|stamped| &stamped.value).or(self.config.default_timeout.as_ref());
            let run = Arc::new(Run {
                timeout: timeout.map(|timeout| timeout.per_attempt),
                handler: Arc::clone(handler),
                calls: Arc::new(calls),
                stop: Arc::new(StopSignal::default()),
                started: std::sync::OnceLock::new(),
                claimed,
            });
            if !may_begin {
                self.pending.push(hand_back(&run, "claimed while the host was stopping or its lease lapsed"));
                continue;
            }
            if let Some(timeout) = run.timeout {
                self.look = self.look.min(boot.saturating_add(timeout));
            }
            self.runs.insert(run.claimed.handle, Arc::clone(&run));
            begun.push(run);
        }
        self.lanes.push(begun);
        self.count_running();
    }

    /// Gives back what no worker has begun.
    fn hand_back_queued(&mut self, message: &str) {
        for run in self.lanes.take_queued() {
            self.runs.remove(&run.claimed.handle);
            self.cancelling.remove(&run.claimed.handle);
            self.pending.push(hand_back(&run, message));
        }
        self.count_running();
    }

    fn stop_all(&mut self, message: &str) {
        self.hand_back_queued(message);
        self.runs.values().for_each(|run| run.stop.stop(StopReason::HandBack));
    }

    fn drain(&mut self, boot: Duration) {
        match self.draining {
            None => {
                self.draining = Some(boot.saturating_add(self.config.stop_grace));
                tracing::info!(running = self.runs.len(), grace = ?self.config.stop_grace, "stopping: no new claims");
                self.hand_back_queued("the host is stopping");
            }
            Some(over) if boot >= over => self.stop_all("the host is stopping and the grace is over"),
            Some(_) => {}
        }
    }

    /// Deadlines, cancellations and the lease.
    fn watch_time(&mut self, boot: Duration) {
        if boot >= self.look {
            self.look = self.stop_overdue(boot);
        }
        if self.standing == Standing::Good && boot >= self.lease.stop_at() {
            tracing::error!("the lease is about to lapse without a renewal; every run is being stopped and handed back");
            self.standing = Standing::Lapsed;
        }
        if self.standing != Standing::Good {
            self.stop_all("the host's lease lapsed");
        }
    }

    /// Stops what is over its time or its grace; answers when the next could be.
    fn stop_overdue(&self, boot: Duration) -> Duration {
        let mut next = boot.saturating_add(Duration::from_secs(3600));
        for run in self.runs.values() {
            let Some(timeout) = run.timeout else { continue };
            // Not begun yet: it may begin at any moment, so look again before its time could be over.
            let over = run.started.get().copied().unwrap_or(boot).saturating_add(timeout);
            if over <= boot && run.started.get().is_some() {
                run.stop.stop(StopReason::TimedOut);
            } else {
                next = next.min(over);
            }
        }
        for (handle, (token, over)) in &self.cancelling {
            if *over > boot {
                next = next.min(*over);
            } else if let Some(run) = self.runs.get(handle).filter(|run| run.claimed.token == *token) {
                run.stop.stop(StopReason::Cancelled);
            }
        }
        next
    }

    /// When the loop must act even if nothing happens. What cannot start before an answer arrives is looked at when
    /// it does; counting it here would spin.
    fn next_wake(&self, boot: Duration) -> Duration {
        let registered = self.standing != Standing::Lost;
        let running = !self.runs.is_empty();
        let draining = self.draining.is_some();
        let renewable = registered && !self.renewing && !self.exchanging && !self.serving && self.may_renew();
        let exchangeable = registered && !self.renewing && !self.exchanging && !self.serving && self.wants_exchange();
        let dues = [
            (true, self.due.poll),
            (!self.expiring, self.due.reservations),
            (!self.pruning, self.due.prune),
            (!self.sweeping && self.rescuing == 0, self.due.sweep),
            (renewable, self.due.renew),
            (exchangeable, if self.trouble > 0 { self.due.exchange_again } else { boot }),
            (registered && self.serve_again && !self.serving && !self.exchanging && !self.renewing, self.due.serve),
            (!registered && !running && !self.registering && !draining, self.due.register),
            (running && !self.asking_signals, self.due.signals),
            (running && self.trouble == 0, self.due.output),
            (running, self.look),
            (self.standing == Standing::Good, self.lease.stop_at()),
        ];
        let mut wake = dues.into_iter().filter(|(counts, _)| *counts).map(|(_, due)| due).fold(Duration::MAX, Duration::min);
        if let Some(over) = self.draining {
            wake = wake.min(if over > boot { over } else { over.saturating_add(LAST_ENDS) });
        }
        // Of what was due now nothing is left but what time alone decides.
        wake.max(boot + Duration::from_millis(1))
    }

    // ------------------------------------------------------------------------------------ store calls

    fn start_due(&mut self, boot: Duration) {
        if boot >= self.due.poll {
            self.due.poll = boot.saturating_add(self.config.poll_every);
            self.hint = true;
        }
        if self.standing == Standing::Lost {
            let may_register = self.runs.is_empty() && !self.registering && !self.exchanging && !self.renewing && self.draining.is_none();
            if may_register && boot >= self.due.register {
                self.register_anew();
            }
        } else {
            // First, and never beside an exchange: a claim with the old lanes could pass over a waiter that the new
            // set has just made count, and leave it beside a free slot until the key's next event.
            if self.serve_again && !self.serving && !self.exchanging && !self.renewing && boot >= self.due.serve {
                self.start_serving();
            }
            if self.exchange_next {
                self.start_exchange(boot);
            }
            if boot >= self.due.renew && !self.renewing && !self.exchanging && !self.serving && self.may_renew() {
                self.start_renewal(boot);
            }
            self.start_exchange(boot);
        }
        if boot >= self.due.sweep && !self.sweeping && self.rescuing == 0 {
            self.due.sweep = boot + self.config.renew_every;
            self.sweeping = true;
            let store = Arc::clone(&self.store);
            self.tasks.spawn(async move { Event::Swept { hosts: guarded("look at the other hosts", store.hosts()).await } });
        }
        if boot >= self.due.reservations && !self.expiring {
            self.due.reservations = boot + self.config.reservation_patience;
            self.expiring = true;
            let (store, patience, now) = (Arc::clone(&self.store), self.config.reservation_patience, self.surroundings.now());
            self.tasks.spawn(async move {
                Event::Expired(guarded("return unclaimed reservations", store.expire_reservations(patience, now)).await)
            });
        }
        if boot >= self.due.prune && !self.pruning {
            self.due.prune = boot + Duration::from_secs(60);
            self.pruning = true;
            let (store, retention, now) = (Arc::clone(&self.store), self.config.retention, self.surroundings.now());
            self.tasks.spawn(async move { Event::Pruned(guarded("prune ended jobs", store.prune(retention, PRUNE_BATCH, now)).await) });
        }
        if !self.runs.is_empty() && boot >= self.due.signals && !self.asking_signals {
            self.due.signals = boot + SIGNALS_AT_LEAST;
            self.asked_signals = boot;
            self.asking_signals = true;
            let (store, host) = (Arc::clone(&self.store), self.host);
            self.tasks.spawn(async move { Event::Signals(guarded("read signals", store.signals(host)).await) });
        }
        if !self.runs.is_empty() && boot >= self.due.output && self.trouble == 0 {
            self.due.output = boot + OUTPUT_APART;
            self.flush_output(boot);
        }
    }

    /// C3: after a lapse everything is given back first, then the lease is renewed.
    fn may_renew(&self) -> bool {
        self.standing == Standing::Good || (self.standing == Standing::Lapsed && self.is_idle())
    }

    fn start_renewal(&mut self, boot: Duration) {
        self.due.renew = boot + self.config.renew_every;
        self.renewing = true;
        self.exchange_next = true;
        let known = self
            .runs
            .values()
            .map(|run| (run.claimed.handle, run.claimed.token))
            .chain(self.pending.iter().chain(self.resend.iter().flat_map(|batch| batch.iter())).map(|settle| (settle.handle, settle.token)))
            .collect();
        let params =
            RenewParams { host: self.host, known, patience: self.config.reservation_patience, now: self.surroundings.now() };
        let store = Arc::clone(&self.store);
        self.tasks.spawn(async move { Event::Renewed { sent: boot, result: guarded("renew the lease", store.renew(params)).await } });
    }

    /// How many more jobs may be claimed now.
    fn room(&self) -> u32 {
        // After a failure the ends go first, alone: a claim whose answer is lost leaves rows that must be handed back.
        let ends_first = self.trouble > 0 && self.has_ends();
        let standing = self.standing == Standing::Good && self.draining.is_none() && !self.reconcile;
        if !standing || ends_first || self.lane_set.lanes.is_empty() {
            return 0;
        }
        let target = self.workers() + self.pace.prefetch(self.workers(), self.config.prefetch_limit);
        target.saturating_sub(u32::try_from(self.runs.len()).unwrap_or(u32::MAX))
    }

    fn wants_exchange(&self) -> bool {
        self.has_ends() || (self.hint && self.room() > 0)
    }

    fn start_exchange(&mut self, boot: Duration) {
        let waiting = self.exchanging || self.renewing || self.serving || (self.trouble > 0 && boot < self.due.exchange_again);
        if waiting || !self.wants_exchange() {
            return;
        }
        let room = self.room();
        let settles: Arc<[Settle]> = match self.resend.take() {
            Some(batch) => batch,
            None => {
                let rest = self.pending.split_off(self.pending.len().min(SETTLE_BATCH));
                std::mem::replace(&mut self.pending, rest).into()
            }
        };
        self.exchanging = true;
        self.exchange_next = false;
        // Cleared before the question is asked: what changes while it is under way sets it again. An exchange that
        // claims nothing asks nothing.
        if room > 0 {
            self.hint = false;
        }
        let lanes = Arc::clone(&self.lane_set);
        let params = ExchangeParams {
            host: self.host,
            now: self.surroundings.now(),
            settles: Arc::clone(&settles),
            claim: (room > 0).then(|| ClaimParams { lanes: Arc::clone(&lanes.lanes), max: room }),
        };
        let store = Arc::clone(&self.store);
        self.tasks.spawn(async move {
            let result = guarded("settle and claim", store.exchange(params)).await;
            Event::Exchanged { settles, lanes, asked: room, sent: boot, result }
        });
    }

    /// Claims for what the catalog offers now, at once; what it no longer offers is not claimed any more.
    fn look_at_offers(&mut self) {
        self.lane_set = Arc::new(LaneSet::new(self.catalog.offers(), &self.config.queues));
        self.serve_again = true;
        self.hint = true;
    }

    fn start_serving(&mut self) {
        self.serve_again = false;
        self.serving = true;
        let (store, host, served) = (Arc::clone(&self.store), self.host, self.lane_set.served.clone());
        self.tasks.spawn(async move { Event::Served(guarded("publish contracts", store.serve(host, served)).await) });
    }

    fn register_anew(&mut self) {
        self.registering = true;
        self.pending.clear();
        self.resend = None;
        let store = Arc::clone(&self.store);
        let info = HostInfo { name: self.config.name.clone(), version: self.config.version.clone(), now: self.surroundings.now() };
        self.tasks.spawn(async move { Event::Registered(guarded("register", store.register(info)).await) });
    }

    /// Stores what long runs have said so far. A run has one such call under way at a time, which keeps its lines in
    /// order; after an unknown outcome they are sent again, and may be there twice.
    fn flush_output(&mut self, boot: Duration) {
        for run in self.runs.values() {
            let token = run.claimed.token;
            let old_enough = run.started.get().is_some_and(|started| boot >= started.saturating_add(OUTPUT_APART));
            if !old_enough || self.appending.contains(&token) {
                continue;
            }
            let output = run.calls.take_output();
            if output == warp_store::RunOutput::default() {
                continue;
            }
            self.appending.insert(token);
            let (store, host, run) = (Arc::clone(&self.store), self.host, Arc::clone(run));
            self.tasks.spawn(async move {
                let call = store.append_output(host, run.claimed.handle, token, output.clone());
                let result = guarded("store the output of a run", call).await;
                if result.is_err() {
                    run.calls.put_back(output);
                }
                Event::Appended { token, result }
            });
        }
    }

    fn on_appended(&mut self, token: ClaimToken, result: Result<SettleVerdict, StoreError>) {
        self.appending.remove(&token);
        if let Err(error) = result {
            tracing::warn!(%error, "output of a run could not be stored; trying again");
        }
        if let Some(mut ended) = self.held.remove(&token) {
            // What the store did not take was put back after the run had ended.
            let mut output = ended.run.calls.take_output();
            join_output(&mut output, std::mem::take(&mut ended.settle.output));
            ended.settle.output = output;
            self.end(ended);
            self.count_running();
        }
    }

    // ------------------------------------------------------------------------------------ answers

    fn handle(&mut self, event: Event) {
        match event {
            Event::Exchanged { settles, lanes, asked, sent, result } => self.on_exchanged(settles, &lanes, asked, sent, result),
            Event::Renewed { sent, result } => self.on_renewed(sent, result),
            Event::Swept { hosts } => {
                self.sweeping = false;
                match hosts {
                    Ok(hosts) => self.on_swept(&hosts),
                    Err(error) => tracing::warn!(%error, "the other hosts could not be looked at"),
                }
            }
            Event::Rescued { host, result } => {
                self.rescuing -= 1;
                match result {
                    Ok(rescued) => {
                        self.counters.rescued.fetch_add(u64::from(rescued.requeued), Ordering::Relaxed);
                        tracing::warn!(
                            host = host.0,
                            requeued = rescued.requeued,
                            exhausted = rescued.exhausted,
                            "rescued the jobs of a host that stopped renewing"
                        );
                        self.hint = true;
                    }
                    Err(error) if error.kind() == StoreErrorKind::NotFound => {}
                    Err(error) => tracing::warn!(host = host.0, %error, "a dead host could not be rescued; trying again"),
                }
            }
            Event::Signals(result) => {
                self.asking_signals = false;
                match result {
                    Ok(signals) => self.on_signals(signals.cancelled),
                    Err(error) => tracing::warn!(%error, "cancellations could not be read"),
                }
            }
            Event::Registered(result) => {
                self.registering = false;
                self.on_registered(result);
            }
            Event::Served(result) => {
                self.serving = false;
                match result {
                    Ok(()) => {}
                    Err(error) if error.kind() == StoreErrorKind::HostLost => self.lose_host(),
                    Err(error) => {
                        tracing::warn!(%error, "the contracts of this host could not be published; trying again");
                        self.serve_again = true;
                        self.due.serve = self.surroundings.boot() + AGAIN;
                    }
                }
            }
            Event::Pruned(result) => {
                self.pruning = false;
                match result {
                    Ok(PRUNE_BATCH) => self.due.prune = self.surroundings.boot(),
                    Ok(_) => {}
                    Err(error) => tracing::warn!(%error, "ended jobs could not be pruned"),
                }
            }
            Event::Expired(result) => {
                self.expiring = false;
                if let Err(error) = result {
                    tracing::warn!(%error, "unclaimed reservations could not be returned");
                }
            }
            Event::Appended { token, result } => self.on_appended(token, result),
        }
    }

    fn on_registered(&mut self, result: Result<HostId, StoreError>) {
        let boot = self.surroundings.boot();
        match result {
            Ok(host) => {
                tracing::warn!(host = host.0, "registered anew");
                self.host = host;
                self.standing = Standing::Good;
                self.trouble = 0;
                self.reconcile = false;
                self.lease.extend(boot, self.config.lease, self.config.stop_before_lapse);
                self.due.renew = boot + self.config.renew_every;
                self.due.serve = boot;
                self.serve_again = true;
                self.hint = true;
            }
            Err(error) => {
                self.trouble = self.trouble.saturating_add(1);
                self.due.register = boot + trouble_delay(self.trouble);
                tracing::warn!(%error, "registering anew failed; trying again");
            }
        }
    }

    fn on_exchanged(&mut self, settles: Arc<[Settle]>, lanes: &LaneSet, asked: u32, sent: Duration, result: Result<Exchanged, StoreError>) {
        self.exchanging = false;
        let boot = self.surroundings.boot();
        let exchanged = match result {
            Ok(exchanged) => exchanged,
            Err(error) => {
                match error.kind() {
                    StoreErrorKind::HostLost => self.lose_host(),
                    kind => {
                        // Sent again as it was: a repeat of a settle that did arrive is recognised by its token.
                        if !settles.is_empty() {
                            self.resend = Some(settles);
                        }
                        if asked > 0 {
                            self.hint = true;
                            if !matches!(kind, StoreErrorKind::Unavailable | StoreErrorKind::Busy) {
                                self.reconcile = true;
                                self.due.renew = boot;
                            }
                        }
                        self.trouble = self.trouble.saturating_add(1);
                        self.due.exchange_again = boot + trouble_delay(self.trouble);
                        tracing::warn!(%error, ?kind, retry_in = ?trouble_delay(self.trouble), "the store did not take a batch");
                    }
                }
                return;
            }
        };
        self.trouble = 0;
        let Exchanged { settled, claimed, more, next_due, parked, parked_again, skipped, unacceptable, reserved: _ } = exchanged;
        let ran = settles.iter().map(|settle| settle.took).fold(Duration::ZERO, Duration::saturating_add);
        self.pace.observe(settles.len(), ran, boot.saturating_sub(sent), boot.saturating_sub(self.last_exchange));
        self.last_exchange = boot;
        for (settle, verdict) in settles.iter().zip(&settled) {
            if *verdict == SettleVerdict::Late {
                self.counters.late.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(token = settle.token.0, "a settle came too late and changed nothing");
            }
        }
        let add = |counter: &AtomicU64, by: u64| counter.fetch_add(by, Ordering::Relaxed);
        add(&self.counters.exchanges, 1);
        add(&self.counters.settled, settles.len() as u64);
        add(&self.counters.claimed, claimed.len() as u64);
        add(&self.counters.parked, u64::from(parked));
        add(&self.counters.parked_again, u64::from(parked_again));
        add(&self.counters.skipped, u64::from(skipped));
        if unacceptable > 0 {
            tracing::warn!(jobs = unacceptable, "failed because their policy cannot be applied; see `jobs show`");
        }
        // A claim that came back full may have left more behind.
        self.hint |= more || (asked > 0 && claimed.len() as u32 == asked);
        if let Some(next) = next_due {
            let wait = next.since(self.surroundings.now());
            self.due.poll = self.due.poll.min(boot.saturating_add(wait.min(self.config.poll_every)));
        }
        self.begin(claimed, lanes);
    }

    fn on_renewed(&mut self, sent: Duration, result: Result<Renewed, StoreError>) {
        self.renewing = false;
        match result {
            Ok(Renewed { handed_back, lost, .. }) => {
                self.lease.extend(sent, self.config.lease, self.config.stop_before_lapse);
                self.reconcile = false;
                if self.standing == Standing::Lapsed && self.lease.is_good() {
                    tracing::info!("the lease is good again");
                    self.standing = Standing::Good;
                    self.hint = true;
                }
                if handed_back > 0 {
                    self.counters.unknown_rows.fetch_add(u64::from(handed_back), Ordering::Relaxed);
                    tracing::warn!(rows = handed_back, "handed back rows under this host's name that it did not know");
                }
                for (handle, token) in lost {
                    if let Some(run) = self.runs.get(&handle).filter(|run| run.claimed.token == token) {
                        tracing::warn!(job = %run.claimed.id, "the run is not this host's any more; stopping it");
                        run.stop.stop(StopReason::HandBack);
                    }
                }
            }
            Err(error) if error.kind() == StoreErrorKind::HostLost => self.lose_host(),
            Err(error) => {
                // The lease runs on; try again soon, not at the next regular renewal.
                self.due.renew = self.surroundings.boot() + AGAIN;
                tracing::warn!(%error, "the lease could not be renewed; trying again");
            }
        }
    }

    fn lose_host(&mut self) {
        if self.standing == Standing::Lost {
            return;
        }
        tracing::error!(host = self.host.0, "this host was taken for dead and its jobs were given back; stopping every run");
        self.standing = Standing::Lost;
        self.trouble = 0;
        self.due.register = self.surroundings.boot();
        self.lease.end();
        self.stop_all("the host was taken for dead");
    }

    fn on_swept(&mut self, hosts: &[warp_store::HostSeen]) {
        let dead = self.watch.observe(hosts, self.host, self.surroundings.boot(), self.config.lease);
        for (host, renewals) in dead {
            let (store, max_deaths, now) = (Arc::clone(&self.store), self.config.max_host_deaths, self.surroundings.now());
            self.rescuing += 1;
            self.tasks.spawn(async move {
                let result = guarded("rescue a dead host", store.rescue(host, renewals, max_deaths, now)).await;
                Event::Rescued { host, result }
            });
        }
    }

    fn on_signals(&mut self, signals: Vec<CancelSignal>) {
        let over = self.surroundings.boot().saturating_add(self.config.cancel_grace);
        for CancelSignal { handle, token } in signals {
            if let Some(run) = self.runs.get(&handle)
                && run.claimed.token == token
                && run.calls.cancel()
            {
                tracing::info!(job = %run.claimed.id, grace = ?self.config.cancel_grace, "cancelling");
                self.cancelling.insert(handle, (token, over));
                self.look = self.look.min(over);
            }
        }
    }

    /// The last thing a host does: whatever is still under its name goes back uncharged with one statement.
    async fn leave(&mut self, abandoned: usize) -> Stopped {
        self.runs.values().for_each(|run| run.stop.stop(StopReason::HandBack));
        self.lease.end();
        if self.standing == Standing::Lost {
            return Stopped { abandoned, deregistered: true };
        }
        // Dropping this future, or the time running out, leaves the registration to a rescue.
        let goodbye = guarded("deregister", self.store.deregister(self.host, self.surroundings.now()));
        let deregistered = match tokio::time::timeout(Duration::from_secs(5), goodbye).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) if error.kind() == StoreErrorKind::HostLost => true,
            Ok(Err(error)) => {
                tracing::warn!(%error, "could not deregister; another host will rescue what is left");
                false
            }
            Err(_) => {
                tracing::warn!("the store did not answer within 5 s; another host will rescue what is left");
                false
            }
        };
        Stopped { abandoned, deregistered }
    }
}

impl Drop for Control {
    /// However the loop ends, nothing of it goes on: no worker begins another run, and no run has an effect.
    fn drop(&mut self) {
        self.lease.end();
        self.runs.values().for_each(|run| run.stop.stop(StopReason::HandBack));
        self.others.iter().for_each(AbortHandle::abort);
    }
}

/// How long after the grace of a graceful stop the host waits for runs that were stopped and for a store that is to
/// take the last ends.
const LAST_ENDS: Duration = Duration::from_secs(5);
/// Cancellations are read so often while something runs, even if no change is announced.
const SIGNALS_AT_LEAST: Duration = Duration::from_secs(1);
/// And no more often than this, however many changes are.
const SIGNALS_APART: Duration = Duration::from_millis(50);
/// Output of long runs is stored so often.
const OUTPUT_APART: Duration = Duration::from_secs(1);
/// How soon a renewal or a publication that failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);
/// At most so many settles in one exchange: bounds the transaction, so that other processes get their turn.
const SETTLE_BATCH: usize = 1024;
/// At most so many ended jobs are deleted in one transaction.
const PRUNE_BATCH: u32 = 1000;

async fn listen_store(store: Arc<dyn Store>, news: Arc<Notify>) {
    loop {
        store.changed().await;
        news.notify_one();
    }
}

async fn listen_catalog(catalog: Arc<dyn Catalog>, news: Arc<Notify>) {
    loop {
        catalog.changed().await;
        news.notify_one();
    }
}
