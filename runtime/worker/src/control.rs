//! The control loop: one task that owns everything a host knows.
//!
//! It takes all that has happened, acts on it, starts what store calls are due, and waits. Store calls run as
//! tasks and come back as [`Event`]s, so the loop itself never waits for one. Three rules order them:
//!
//! - several exchanges may be under way at once ([`crate::exchanges`] says when one goes); what ends meanwhile makes
//!   the next batch;
//! - a renewal compares the rows under the host's name with the runs it knows, so it never overlaps a *claim*, which
//!   could have made rows whose answer is still on its way: a renewal that is due lets no further claim go and waits
//!   for those under way. Ends go on beside it: what is on its way is among the runs that the host knows, and one that
//!   is written before the comparison comes back as lost under a token that nobody runs any more;
//! - publishing contracts never overlaps a claim either: with the old lanes it could pass over a waiter that the new
//!   set has just made count, and leave it beside a free slot until the key's next event.
//!
//! A call that has no answer within [`HostConfig::call_bound`] counts as one whose outcome is unknown: ends are sent
//! again and recognised; of a claim the next renewal hands back whatever it made, or, if the store carries it out
//! later still, the one after that. Nothing of it is ever begun here. And after a renewal with an unknown outcome nothing
//! is claimed until a later one has been answered: carried out late, it would hand back what it does not know.
//!
//! What a run says while it goes on is stored beside all that, and its end waits for it, so that no line is lost or
//! overtaken.
//!
//! Cancellation: dropping the loop at any await ends its workers and tells every run to stop. A store call that is
//! dropped with it runs to its end in the driver; what it claimed then belongs to a host that no longer renews, and
//! is rescued.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use warp_domain::ending::Ending;
use warp_domain::{ClaimToken, Digest, HostId};
use warp_pipeline::{Handler, StopReason, StopSignal};
use warp_store::{
    CancelSignal, ClaimParams, Claimed, ExchangeParams, Exchanged, HandOff, HostSeen, Lane, Local, Pass, Polling, RenewParams, Renewed,
    Rescued, RunOutput, Served, Settle, SettleVerdict, Signals, Store, StoreError, StoreErrorKind,
};

use crate::calls::{Parent, RunCalls};
use crate::config::HostConfig;
use crate::exchanges::{Appetite, Asked, Batch, End, Exchanges, FULL, GATHER, Situation};
use crate::group::Group;
use crate::host::{Catalog, Counters, Host, Offer, StopLevel, Stopped, info};
use crate::lease::Lease;
use crate::lines::{Arrival, Lines, Next, key_of};
use crate::poll::Poll;
use crate::rescue::Watch;
use crate::run::{Ended, Ends, Run, hand_back, not_begun, work};
use crate::surroundings::Surroundings;

/// The code behind the lanes of one moment.
pub(crate) type Handlers = HashMap<(String, Digest), Arc<dyn Handler>>;

/// What a store call came back with.
pub(crate) enum Event {
    Exchanged { id: u64, handlers: Arc<Handlers>, result: Result<Exchanged, StoreError> },
    Renewed { sent: Duration, result: Result<Renewed, StoreError> },
    Swept(Result<Vec<HostSeen>, StoreError>),
    Rescued { host: HostId, result: Result<Rescued, StoreError> },
    Signals(Result<Signals, StoreError>),
    Registered { sent: Duration, result: Result<HostId, StoreError> },
    Served(Result<(), StoreError>),
    Pruned(Result<u32, StoreError>),
    Expired(Result<u32, StoreError>),
    Appended { token: ClaimToken, result: Result<SettleVerdict, StoreError> },
    SlotsLost { host: HostId, runs: Vec<CancelSignal> },
}

/// A driver that panics or does not answer in time has not answered: whatever it was doing may have happened, or may
/// happen yet.
pub(crate) async fn guarded<T>(
    op: &'static str,
    bound: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let unknown = |why: String| StoreError::new(op, StoreErrorKind::OutcomeUnknown, why);
    match tokio::time::timeout(bound, AssertUnwindSafe(call).catch_unwind()).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(unknown("the driver panicked".to_owned())),
        Err(_) => Err(unknown(format!("the store did not answer within {bound:?}"))),
    }
}

/// What is due when, on the boot-time clock. [`Duration::MAX`] is: not before something happens.
pub(crate) struct Due {
    pub(crate) renew: Duration,
    sweep: Duration,
    /// Reservations that this host knows of will have been unclaimed for the patience.
    pub(crate) reservations: Duration,
    pub(crate) prune: Duration,
    signals: Duration,
    output: Duration,
    /// The next scheduled job.
    pub(crate) scheduled: Duration,
    pub(crate) serve: Duration,
    pub(crate) register: Duration,
}

/// Whether the host may claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Registered with a good lease.
    Good,
    /// The lease lapsed while the registration may still be there: everything is given back, then renewed (C3).
    Lapsed,
    /// The registration is gone: everything stops, then the host registers anew.
    Lost,
}

/// Everything that the loop knows. What answers of the store change about it is in [`crate::answers`].
pub(crate) struct Control {
    pub(crate) config: Arc<HostConfig>,
    pub(crate) store: Arc<dyn Store>,
    catalog: Arc<dyn Catalog>,
    pub(crate) surroundings: Arc<dyn Surroundings>,
    guests: tokio::runtime::Handle,
    stop: watch::Receiver<StopLevel>,
    pub(crate) counters: Arc<Counters>,

    pub(crate) host: HostId,
    pub(crate) standing: Standing,
    pub(crate) lease: Arc<Lease>,
    pub(crate) groups: Vec<Group>,
    /// Whose turn it is to claim when several groups would like to.
    turn: usize,
    ends: Arc<Ends>,
    handlers: Arc<Handlers>,
    served: Vec<Served>,
    /// Workers and listeners; ended when this is dropped.
    others: Vec<AbortHandle>,
    /// Claimed, and the end not yet among the exchanges'.
    pub(crate) runs: HashMap<ClaimToken, Arc<Run>>,
    /// How many of them hold slots that do not pass on inside the host.
    keyed: usize,
    /// Who waits here for which of the slots that do.
    pub(crate) lines: Lines,
    /// Runs that begin when the end before them has been written, by the token of that end.
    pub(crate) promised: HashMap<ClaimToken, Arc<Run>>,
    /// Cancelled runs and when their grace is over.
    pub(crate) cancelling: HashMap<ClaimToken, Duration>,
    /// When the next run may be over its time or its grace; until then nobody looks at them one by one.
    pub(crate) look: Duration,

    pub(crate) exchanges: Exchanges,
    /// Runs that lost their slots before the answer of the claim that took them has come: they must not begin.
    pub(crate) lost_early: HashSet<ClaimToken>,
    /// Runs whose output is on its way to the store.
    pub(crate) appending: HashSet<ClaimToken>,
    /// Ends that wait for that output.
    pub(crate) held: HashMap<ClaimToken, Ended>,
    /// The answer of a claim or of a renewal was lost: a renewal is answered before the next claim. It hands back what
    /// the claim may have made, and takes the place of the renewal that may still be under way in the store.
    pub(crate) reconcile: bool,
    pub(crate) tasks: JoinSet<Event>,
    pub(crate) renewing: bool,
    /// The last of the two was a renewal: a claim that is wanted goes first, however slow the store is.
    claim_first: bool,
    pub(crate) sweeping: bool,
    pub(crate) rescuing: usize,
    pub(crate) expiring: bool,
    /// When something was last known to have been reserved.
    pub(crate) reserved_at: Duration,
    pub(crate) registering: bool,
    pub(crate) asking_signals: bool,
    asked_signals: Duration,
    pub(crate) pruning: bool,
    pub(crate) serving: bool,
    pub(crate) serve_again: bool,
    pub(crate) poll: Poll,
    /// How many attempts to register have failed in a row.
    pub(crate) unregistered: u32,
    pub(crate) watch: Watch,
    pub(crate) due: Due,
    /// Set by a graceful stop: when the grace is over.
    draining: Option<Duration>,
    news: Arc<Notify>,
    catalog_news: Arc<Notify>,
    /// Who listens for slots that this registration loses.
    listening: Option<AbortHandle>,
}

impl Control {
    /// The registration under `id` was sent at `sent`.
    pub(crate) fn new(host: Host, id: HostId, sent: Duration) -> Self {
        let Host { config, store, catalog, surroundings, guests, stop, counters, lease } = host;
        lease.extend(sent, config.lease, config.stop_before_lapse);
        let boot = surroundings.boot();
        let due = Due {
            // At once: the process before this one may have died on this very machine.
            renew: boot,
            sweep: boot,
            reservations: Duration::MAX,
            prune: boot + FIRST_PRUNE,
            signals: boot,
            output: boot + OUTPUT_APART,
            scheduled: Duration::MAX,
            serve: boot,
            register: boot,
        };
        let exchanges = config.exchanges.unwrap_or_else(|| store.concurrent_exchanges());
        // Where one exchange at a time is all, its duration is what gathers the next batch.
        let gather = if exchanges > 1 { GATHER } else { Duration::ZERO };
        Control {
            host: id,
            standing: Standing::Good,
            lease,
            groups: config.groups.iter().map(|group| Group::new(group, gather)).collect(),
            turn: 0,
            ends: Arc::default(),
            handlers: Arc::default(),
            served: Vec::new(),
            others: Vec::new(),
            runs: HashMap::new(),
            keyed: 0,
            lines: Lines::default(),
            promised: HashMap::new(),
            cancelling: HashMap::new(),
            look: boot,
            exchanges: Exchanges::new(exchanges),
            lost_early: HashSet::new(),
            appending: HashSet::new(),
            held: HashMap::new(),
            reconcile: false,
            tasks: JoinSet::new(),
            renewing: false,
            claim_first: true,
            sweeping: false,
            rescuing: 0,
            expiring: false,
            reserved_at: Duration::ZERO,
            registering: false,
            asking_signals: false,
            asked_signals: Duration::ZERO,
            pruning: false,
            serving: false,
            serve_again: true,
            poll: Poll::new(boot),
            unregistered: 0,
            watch: Watch::default(),
            due,
            draining: None,
            news: Arc::new(Notify::new()),
            catalog_news: Arc::new(Notify::new()),
            listening: None,
            config,
            store,
            catalog,
            surroundings,
            guests,
            stop,
            counters,
        }
    }

    pub(crate) async fn run(mut self) -> Result<Stopped, StoreError> {
        self.others.push(tokio::spawn(listen_store(Arc::clone(&self.store), Arc::clone(&self.news))).abort_handle());
        self.others.push(tokio::spawn(listen_catalog(Arc::clone(&self.catalog), Arc::clone(&self.catalog_news))).abort_handle());
        for group in &self.groups {
            for _ in 0..group.workers {
                let (prefetched, ends) = (Arc::clone(&group.prefetched), Arc::clone(&self.ends));
                let worker = work(prefetched, ends, Arc::clone(&self.config), Arc::clone(&self.surroundings));
                self.others.push(self.guests.spawn(worker).abort_handle());
            }
        }
        self.listen_for_slots();
        self.look_at_offers();
        Ok(self.until_stopped().await)
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
            let ends = Arc::clone(&self.ends);
            tokio::select! {
                event = self.tasks.join_next(), if !self.tasks.is_empty() => match event {
                    Some(Ok(event)) => self.handle(event),
                    Some(Err(error)) if error.is_cancelled() => {}
                    Some(Err(error)) => tracing::error!(%error, "a store call of the host loop panicked"),
                    None => {}
                },
                () = ends.news.notified() => {}
                () = self.news.notified() => {
                    self.hint_all();
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
        self.runs.is_empty() && !self.exchanges.is_under_way() && (self.standing == Standing::Lost || !self.exchanges.has_ends())
    }

    pub(crate) fn hint_all(&mut self) {
        self.groups.iter_mut().for_each(Group::hint);
    }

    /// Whether a claimed job may begin.
    pub(crate) fn may_begin(&self) -> bool {
        self.standing == Standing::Good && self.draining.is_none() && self.lease.is_good()
    }

    // ------------------------------------------------------------------------------------ runs

    fn absorb_ended(&mut self) {
        for ended in self.ends.take() {
            let token = ended.settle.token;
            if self.appending.contains(&token) {
                self.held.insert(token, ended);
            } else {
                self.end(ended);
            }
        }
        self.count_running();
    }

    pub(crate) fn end(&mut self, ended: Ended) {
        match key_of(&ended.run) {
            None => self.settle(ended, None, true),
            Some(key) => {
                let boot = self.surroundings.boot();
                let (next, late) = self.lines.ended(key, ended, boot);
                self.go_on(next);
                self.give_back_waiters(late);
            }
        }
    }

    /// B8: what becomes of a slot whose run has ended.
    pub(crate) fn go_on(&mut self, next: Next) {
        match next {
            Next::Held => {}
            Next::Free(ended) => {
                let began = ended.run.started.get().is_some();
                self.settle(ended, None, began);
            }
            Next::Pass { ended, pass, to, at_once } => {
                if at_once {
                    self.groups[to.group].prefetched.push([to]);
                } else {
                    self.promised.insert(ended.settle.token, to);
                }
                self.settle(ended, Some(pass), true);
            }
        }
    }

    /// The end of a run is to be written. `pass` says where its slot has gone.
    fn settle(&mut self, Ended { run, settle }: Ended, pass: Option<Pass>, in_its_group: bool) {
        self.forget(&run);
        let token = run.claimed.token;
        let chain = run.claimed.local.map(|_| self.lines.chain_of(token));
        self.lines.forget(token);
        let ran_in = in_its_group.then_some(run.group);
        self.exchanges.add(End { settle, keyed: run.claimed.keyed, chain, pass, ran_in, at: self.surroundings.boot() });
    }

    /// Gives back local waiters, which have waited for too long, or whose host has no slot of their key any more.
    pub(crate) fn give_back_waiters(&mut self, runs: Vec<Arc<Run>>) {
        for run in runs {
            let settle = not_begun(&run);
            self.settle(Ended { run, settle }, None, false);
        }
    }

    /// The run is no longer among those that go on or wait.
    fn forget(&mut self, run: &Run) {
        let token = run.claimed.token;
        self.cancelling.remove(&token);
        if self.runs.remove(&token).is_some() {
            self.keyed -= usize::from(run.claimed.keyed && run.claimed.local.is_none());
            self.groups[run.group].ended();
        }
    }

    /// An end of a run that no worker has begun.
    fn give_back(&mut self, settle: Settle, keyed: bool) {
        self.exchanges.add(End { settle, keyed, chain: None, pass: None, ran_in: None, at: self.surroundings.boot() });
    }

    pub(crate) fn count_running(&self) {
        self.counters.running.store(self.runs.len() as u64, Ordering::Relaxed);
    }

    pub(crate) fn begin(&mut self, claimed: Vec<Claimed>, group: usize, handlers: &Handlers) {
        let (may_begin, boot) = (self.may_begin(), self.surroundings.boot());
        let mut begun = Vec::with_capacity(claimed.len());
        for claimed in claimed {
            let declarations = &claimed.lane.declarations;
            let Some(handler) = handlers.get(&(declarations.contract.clone(), declarations.digest)) else {
                // Its slots came with a later claim than its row (session locks), and in between this version was replaced.
                tracing::warn!(job = %claimed.id, contract = declarations.contract, "claimed under a version that is gone; it goes back");
                self.give_back(without_handler(&claimed), claimed.keyed);
                continue;
            };
            let run = Arc::new(self.run_of(claimed, group, Arc::clone(handler)));
            if !may_begin {
                let settle = match run.claimed.local {
                    Some(Local::Waits(_)) => not_begun(&run),
                    _ => hand_back(&run, "claimed while the host was stopping or its lease lapsed"),
                };
                self.give_back(settle, run.claimed.keyed);
                continue;
            }
            if self.lost_early.remove(&run.claimed.token) {
                self.give_back(hand_back(&run, SLOTS_LOST), run.claimed.keyed);
                continue;
            }
            if let Some(timeout) = run.timeout {
                self.look = self.look.min(boot.saturating_add(timeout));
            }
            self.keyed += usize::from(run.claimed.keyed && run.claimed.local.is_none());
            self.groups[group].began();
            self.runs.insert(run.claimed.token, Arc::clone(&run));
            match run.claimed.local {
                None => begun.push(run),
                Some(Local::Holds(key)) => {
                    self.lines.holds(key, &run);
                    begun.push(run);
                }
                Some(Local::Waits(key)) => match self.lines.arrives(key, &run, boot) {
                    Arrival::Waits => {}
                    Arrival::Begins(next) => self.go_on(*next),
                    Arrival::Back => self.give_back_waiters(vec![run]),
                },
            }
        }
        self.groups[group].prefetched.push(begun);
        self.count_running();
    }

    fn run_of(&self, claimed: Claimed, group: usize, handler: Arc<dyn Handler>) -> Run {
        let parent = Parent {
            host: self.host,
            handle: claimed.handle,
            token: claimed.token,
            queue: claimed.lane.queue.clone(),
            metadata: claimed.metadata.clone(),
            trace_parent: claimed.trace_parent.clone(),
            keyed: claimed.keyed,
        };
        let (store, lease, surroundings) = (Arc::clone(&self.store), Arc::clone(&self.lease), Arc::clone(&self.surroundings));
        let calls = RunCalls::new(parent, store, lease, surroundings, self.config.caps, self.config.call_bound);
        let timeout = claimed.stamp.timeout.as_ref().map(|stamped| &stamped.value).or(self.config.default_timeout.as_ref());
        Run {
            timeout: timeout.map(|timeout| timeout.per_attempt),
            group,
            handler,
            calls: Arc::new(calls),
            stop: Arc::new(StopSignal::default()),
            started: std::sync::OnceLock::new(),
            claimed,
        }
    }

    /// Gives back what no worker has begun, all of it or some.
    pub(crate) fn hand_back_queued(&mut self, message: &str, which: impl Fn(&Run) -> bool) {
        let queued: Vec<_> = self.groups.iter().flat_map(|group| group.prefetched.take_back(&which)).collect();
        queued.into_iter().for_each(|run| self.give_back_unbegun(run, message));
        let waiting = self.lines.take_back(&which);
        self.give_back_waiters(waiting);
        self.count_running();
    }

    /// Gives back a run that no worker has begun, with the slots that it has.
    pub(crate) fn give_back_unbegun(&mut self, run: Arc<Run>, message: &str) {
        let settle = hand_back(&run, message);
        let ended = Ended { run, settle };
        match key_of(&ended.run) {
            None => self.settle(ended, None, false),
            Some(key) => {
                let (next, back) = self.lines.gone(key, ended);
                self.go_on(next);
                self.give_back_waiters(back);
            }
        }
    }

    /// The slots of runs that have ended and wait for waiters come free now.
    fn let_go(&mut self) {
        let (free, back) = self.lines.let_go();
        free.into_iter().for_each(|next| self.go_on(next));
        self.give_back_waiters(back);
    }

    pub(crate) fn stop_all(&mut self, message: &str) {
        self.hand_back_queued(message, |_| true);
        self.let_go();
        if self.standing == Standing::Lost {
            // What they were promised will never be answered.
            let promised: Vec<_> = self.promised.drain().map(|(_, run)| run).collect();
            promised.into_iter().for_each(|run| self.give_back_unbegun(run, message));
        }
        self.runs.values().for_each(|run| run.stop.stop(StopReason::HandBack));
    }

    fn drain(&mut self, boot: Duration) {
        match self.draining {
            None => {
                self.draining = Some(boot.saturating_add(self.config.stop_grace));
                tracing::info!(running = self.runs.len(), grace = ?self.config.stop_grace, "stopping: no new claims");
                self.hand_back_queued("the host is stopping", |_| true);
                self.let_go();
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
        let overdue = self.lines.overdue(boot);
        self.give_back_waiters(overdue);
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
        for (token, over) in &self.cancelling {
            if *over > boot {
                next = next.min(*over);
            } else if let Some(run) = self.runs.get(token) {
                run.stop.stop(StopReason::Cancelled);
            }
        }
        next
    }

    // ------------------------------------------------------------------------------------ store calls

    /// When the loop must act even if nothing happens. What cannot start before an answer arrives is looked at when
    /// it does; counting it here would spin.
    fn next_wake(&self, boot: Duration) -> Duration {
        let registered = self.standing != Standing::Lost;
        let running = !self.runs.is_empty();
        let draining = self.draining.is_some();
        let exchange = if registered { self.exchanges.when(&self.situation(self.may_claim(boot))) } else { None };
        let dues = [
            (true, self.poll.due()),
            (true, self.due.scheduled),
            (!self.expiring, self.due.reservations),
            (!self.pruning, self.due.prune),
            (self.may_sweep(), self.due.sweep),
            (registered && self.is_alone() && self.may_renew(), self.due.renew),
            (exchange.is_some(), exchange.unwrap_or_default().max(boot)),
            (registered && self.serve_again && self.is_alone(), self.due.serve),
            (!registered && !running && !self.registering && !draining, self.due.register),
            (running && !self.asking_signals, self.due.signals),
            (running && !self.exchanges.in_trouble(), self.due.output),
            (running, self.look),
            (running, self.lines.look()),
            (self.standing == Standing::Good, self.lease.stop_at()),
        ];
        let mut wake = dues.into_iter().filter(|(counts, _)| *counts).map(|(_, due)| due).fold(Duration::MAX, Duration::min);
        if let Some(over) = self.draining {
            wake = wake.min(if over > boot { over } else { over.saturating_add(LAST_ENDS) });
        }
        // Of what was due now nothing is left but what time alone decides.
        wake.max(boot + Duration::from_millis(1))
    }

    fn start_due(&mut self, boot: Duration) {
        if boot >= self.poll.due() {
            let polling = self.config.poll_every.map_or_else(|| self.store.polling(), Polling::every);
            self.poll.looked(boot, polling, self.surroundings.draw());
            self.hint_all();
        }
        if boot >= self.due.scheduled {
            self.due.scheduled = Duration::MAX;
            self.hint_all();
        }
        if self.standing == Standing::Lost {
            let quiet = self.runs.is_empty() && !self.registering && !self.exchanges.is_under_way() && !self.renewing;
            if quiet && self.draining.is_none() && boot >= self.due.register {
                self.register_anew(boot);
            }
        } else {
            if self.serve_again && self.is_alone() && boot >= self.due.serve {
                self.start_serving();
            }
            if self.claim_first {
                self.start_exchanges(boot);
            }
            if boot >= self.due.renew && self.is_alone() && self.may_renew() {
                self.start_renewal(boot);
            }
            self.start_exchanges(boot);
        }
        if boot >= self.due.sweep && self.may_sweep() {
            self.due.sweep = boot + self.config.renew_every;
            self.sweeping = true;
            let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
            self.tasks.spawn(async move { Event::Swept(guarded("look at the other hosts", bound, store.hosts()).await) });
        }
        if boot >= self.due.reservations && !self.expiring {
            self.start_expiring(boot);
        }
        if boot >= self.due.prune && !self.pruning {
            self.due.prune = boot + PRUNE_APART;
            self.pruning = true;
            let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
            let (retention, now) = (self.config.retention, self.surroundings.now());
            self.tasks
                .spawn(async move { Event::Pruned(guarded("prune ended jobs", bound, store.prune(retention, PRUNE_BATCH, now)).await) });
        }
        if !self.runs.is_empty() && boot >= self.due.signals && !self.asking_signals {
            self.due.signals = boot + SIGNALS_AT_LEAST;
            self.asked_signals = boot;
            self.asking_signals = true;
            let (store, bound, host) = (Arc::clone(&self.store), self.config.call_bound, self.host);
            self.tasks.spawn(async move { Event::Signals(guarded("read signals", bound, store.signals(host)).await) });
        }
        if !self.runs.is_empty() && boot >= self.due.output && !self.exchanges.in_trouble() {
            self.due.output = boot + OUTPUT_APART;
            self.flush_output(boot);
        }
    }

    /// Nothing is under way that a renewal or a publication must not overlap.
    fn is_alone(&self) -> bool {
        !self.renewing && !self.serving && !self.exchanges.is_claiming()
    }

    /// C3: after a lapse everything is given back first, then the lease is renewed.
    fn may_renew(&self) -> bool {
        self.standing == Standing::Good || (self.standing == Standing::Lapsed && self.is_idle())
    }

    /// A renewal tells of the other hosts. Without one, while runs that ignore their stop keep this host from renewing
    /// or from registering anew, it looks for itself.
    fn may_sweep(&self) -> bool {
        self.standing != Standing::Good && !self.sweeping && self.rescuing == 0
    }

    fn start_renewal(&mut self, boot: Duration) {
        self.due.renew = boot + self.config.renew_every;
        self.renewing = true;
        self.claim_first = true;
        let going_on = self.runs.values().map(|run| (run.claimed.handle, run.claimed.token));
        let params = RenewParams {
            host: self.host,
            known: going_on.chain(self.exchanges.known()).collect(),
            patience: self.config.reservation_patience,
            now: self.surroundings.now(),
        };
        let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
        self.tasks
            .spawn(async move { Event::Renewed { sent: boot, result: guarded("renew the lease", bound, store.renew(params)).await } });
    }

    /// Whether a claim may go now.
    fn may_claim(&self, boot: Duration) -> bool {
        let standing = self.standing == Standing::Good && self.draining.is_none() && !self.reconcile;
        // After a failure the ends go first, alone: a claim whose answer is lost leaves rows that must be handed back.
        let ends_first = self.exchanges.in_trouble() && self.exchanges.has_ends();
        let gives_way = self.renewing || self.serving || self.serve_again && boot >= self.due.serve;
        let renewal_waits = boot >= self.due.renew && !self.claim_first;
        standing && !ends_first && !gives_way && !renewal_waits
    }

    fn room(&self, group: usize) -> u32 {
        self.groups[group].room(self.config.prefetch_limit, self.lines.waiting(group))
    }

    fn situation(&self, may_claim: bool) -> Situation {
        let hopeful = (0..self.groups.len()).filter(|group| may_claim && self.groups[*group].is_hopeful());
        let appetite = hopeful.map(|group| match self.room(group) {
            0 => Appetite::None,
            room if self.groups[group].is_starving(room, self.lines.waiting(group)) => Appetite::Starving,
            room if room as usize >= FULL => Appetite::Large,
            _ => Appetite::Some,
        });
        Situation {
            appetite: appetite.max().unwrap_or(Appetite::None),
            in_full_swing: self
                .groups
                .iter()
                .enumerate()
                .any(|(at, group)| group.is_in_full_swing(self.lines.waiting(at) + self.lines.held(at))),
            keyed_runs: self.keyed > 0 || self.lines.may_free(),
        }
    }

    /// The claim that goes with the next exchange: for a group that hopes for something, idle workers first, in turn;
    /// else for the one to which an end in it probably hands on.
    fn next_claim(&mut self, may_claim: bool) -> Option<Asked> {
        if !may_claim {
            return None;
        }
        let count = self.groups.len();
        let with_room = |group: &usize| self.room(*group) > 0;
        let in_turn = (0..count).map(|at| (self.turn + at) % count);
        let hopeful: Vec<usize> = in_turn.filter(|group| self.groups[*group].is_hopeful()).filter(with_room).collect();
        let starving = hopeful.iter().copied().find(|group| self.groups[*group].is_starving(self.room(*group), self.lines.waiting(*group)));
        let group = starving.or(hopeful.first().copied()).or_else(|| self.exchanges.claims_along().filter(with_room))?;
        self.turn = (group + 1) % count;
        let share = u32::try_from(self.exchanges.share()).unwrap_or(u32::MAX);
        let max = self.room(group).min(share);
        // What idle workers need is not asked for as waiters, who keep none busy. Twice as many as there are workers may wait in
        // any case: where a slot passes from run to run the pace of ends says too little about the next.
        let waiting = self.lines.waiting(group);
        let beside = max.saturating_sub(self.groups[group].idle(waiting));
        let floor = self.groups[group].workers.saturating_mul(2).saturating_sub(waiting);
        let wanted: Arc<[_]> = self.lines.wanted(group, beside.max(floor)).into();
        let extra = wanted.iter().map(|wanted| wanted.most).sum::<u32>().saturating_sub(beside);
        Some(Asked { group, max, lanes: Arc::clone(&self.groups[group].lanes), wanted, extra })
    }

    /// Starts what is ready to go, a handful at most.
    fn start_exchanges(&mut self, boot: Duration) {
        loop {
            let may_claim = self.may_claim(boot);
            if self.exchanges.when(&self.situation(may_claim)).is_none_or(|when| when > boot) {
                return;
            }
            self.start_exchange(boot, may_claim);
        }
    }

    fn start_exchange(&mut self, boot: Duration, may_claim: bool) {
        let asked = self.next_claim(may_claim);
        let claim = asked.as_ref().map(|asked| ClaimParams { lanes: Arc::clone(&asked.lanes), max: asked.max });
        let (mut wanted, mut extra) = (Arc::default(), 0);
        if let Some(asked) = &asked {
            self.claim_first = false;
            self.groups[asked.group].ask(asked.max);
            self.lines.ask(&asked.wanted);
            (wanted, extra) = (Arc::clone(&asked.wanted), asked.extra);
        }
        let (id, Batch { settles, passes, .. }) = self.exchanges.send(boot, asked);
        let params =
            ExchangeParams { host: self.host, now: self.surroundings.now(), settles, claim, hand_off: HandOff { passes, wanted, extra } };
        let (store, bound, handlers) = (Arc::clone(&self.store), self.config.call_bound, Arc::clone(&self.handlers));
        self.tasks.spawn(async move {
            let result = guarded("settle and claim", bound, store.exchange(params)).await;
            Event::Exchanged { id, handlers, result }
        });
    }

    /// Claims for what the catalog offers now, at once; what it no longer offers is not claimed any more.
    fn look_at_offers(&mut self) {
        let offers = self.catalog.offers();
        for group in &mut self.groups {
            let lane = |queue: &str, offer: &Offer| Lane { queue: queue.to_owned(), declarations: Arc::clone(&offer.declarations) };
            group.lanes = group.queues.iter().flat_map(|queue| offers.iter().map(move |offer| lane(queue, offer))).collect();
        }
        self.served = offers.iter().map(|offer| Served { declarations: Arc::clone(&offer.declarations) }).collect();
        let code = |Offer { declarations, handler }: Offer| ((declarations.contract.clone(), declarations.digest), handler);
        self.handlers = Arc::new(offers.into_iter().map(code).collect());
        self.serve_again = true;
        self.hint_all();
    }

    fn start_serving(&mut self) {
        self.serve_again = false;
        self.serving = true;
        let (store, bound, host, served) = (Arc::clone(&self.store), self.config.call_bound, self.host, self.served.clone());
        self.tasks.spawn(async move { Event::Served(guarded("publish contracts", bound, store.serve(host, served)).await) });
    }

    fn start_expiring(&mut self, boot: Duration) {
        // What was reserved since the time was set is due later.
        let next = self.reserved_at.saturating_add(self.patience());
        self.due.reservations = if next > boot { next } else { Duration::MAX };
        self.expiring = true;
        let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
        let (patience, now) = (self.config.reservation_patience, self.surroundings.now());
        self.tasks.spawn(async move {
            Event::Expired(guarded("return unclaimed reservations", bound, store.expire_reservations(patience, now)).await)
        });
    }

    /// After this the store agrees that the patience is over: databases count whole milliseconds.
    pub(crate) fn patience(&self) -> Duration {
        self.config.reservation_patience.saturating_add(Duration::from_millis(1))
    }

    fn register_anew(&mut self, boot: Duration) {
        self.registering = true;
        self.exchanges.forget();
        self.lines.clear();
        let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
        let info = info(&self.config, &*self.surroundings);
        self.tasks.spawn(async move { Event::Registered { sent: boot, result: guarded("register", bound, store.register(info)).await } });
    }

    /// Listens for slots that are lost although the host lives (their connection is gone), under the registration of
    /// now.
    pub(crate) fn listen_for_slots(&mut self) {
        if let Some(before) = self.listening.take() {
            before.abort();
        }
        let (store, host) = (Arc::clone(&self.store), self.host);
        let lost = async move {
            let runs = listened("slots_lost", store.slots_lost(host)).await.unwrap_or_default();
            Event::SlotsLost { host, runs }
        };
        self.listening = Some(self.tasks.spawn(lost));
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
            if output == RunOutput::default() {
                continue;
            }
            self.appending.insert(token);
            let (store, bound, host, run) = (Arc::clone(&self.store), self.config.call_bound, self.host, Arc::clone(run));
            self.tasks.spawn(async move {
                let call = store.append_output(host, run.claimed.handle, token, output.clone());
                let result = guarded("store the output of a run", bound, call).await;
                if result.is_err() {
                    run.calls.put_back(output);
                }
                Event::Appended { token, result }
            });
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
        let goodbye = guarded("deregister", GOODBYE, self.store.deregister(self.host, self.surroundings.now()));
        let deregistered = match goodbye.await {
            Ok(()) => true,
            Err(error) if error.kind() == StoreErrorKind::HostLost => true,
            Err(error) => {
                tracing::warn!(%error, "could not deregister; another host will rescue what is left");
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

/// Why a run is given back whose slots were lost before it began.
pub(crate) const SLOTS_LOST: &str = "its slots were lost";

fn without_handler(claimed: &Claimed) -> Settle {
    Settle {
        handle: claimed.handle,
        token: claimed.token,
        ending: Ending::NotBegun,
        on_conflict: Ending::NotBegun,
        output: RunOutput::default(),
        children: Vec::new(),
        state: Vec::new(),
        took: Duration::ZERO,
    }
}

/// How long after the grace of a graceful stop the host waits for runs that were stopped and for a store that is to
/// take the last ends.
const LAST_ENDS: Duration = Duration::from_secs(5);
/// How long a host that leaves waits for the store to hear of it.
const GOODBYE: Duration = Duration::from_secs(5);
/// After a driver has panicked while it listened.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);
/// Cancellations and pauses are read so often while something runs, even if no change is announced.
const SIGNALS_AT_LEAST: Duration = Duration::from_secs(1);
/// And no more often than this, however many changes are.
const SIGNALS_APART: Duration = Duration::from_millis(50);
/// Output of long runs is stored so often.
const OUTPUT_APART: Duration = Duration::from_secs(1);
/// At most so many ended jobs are deleted in one transaction.
pub(crate) const PRUNE_BATCH: u32 = 1000;
/// How soon ended jobs are first pruned, and how often then.
const FIRST_PRUNE: Duration = Duration::from_secs(10);
const PRUNE_APART: Duration = Duration::from_secs(60);

/// A listener that panics has heard nothing; whoever listens again does so a moment later.
async fn listened<T>(what: &'static str, hearing: impl Future<Output = T>) -> Option<T> {
    match AssertUnwindSafe(hearing).catch_unwind().await {
        Ok(heard) => Some(heard),
        Err(_) => {
            tracing::error!(what, "the driver panicked while it listened");
            tokio::time::sleep(LISTEN_AGAIN).await;
            None
        }
    }
}

async fn listen_store(store: Arc<dyn Store>, news: Arc<Notify>) {
    loop {
        listened("changed", store.changed()).await;
        news.notify_one();
    }
}

async fn listen_catalog(catalog: Arc<dyn Catalog>, news: Arc<Notify>) {
    loop {
        catalog.changed().await;
        news.notify_one();
    }
}
