//! What the store has answered, and what the control loop makes of it.
//!
//! Nothing here waits or calls the store, except that a dead host is rescued at once.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warp_domain::{ClaimToken, HostId};
use warp_pipeline::StopReason;
use warp_store::{
    CancelSignal, Exchanged, HostSeen, Pass, Renewed, Rescued, SettleVerdict, Signals, StoreError, StoreErrorKind, WaitersWanted,
};

use crate::calls::join_output;
use crate::control::{Control, Event, Handlers, PRUNE_BATCH, SLOTS_LOST, Standing, guarded};
use crate::exchanges::{Asked, Batch, trouble_delay};

/// How soon a renewal or a publication that failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// Whether a call that failed like this may have been carried out, or may yet be.
fn may_have_happened(kind: StoreErrorKind) -> bool {
    !matches!(kind, StoreErrorKind::HostLost | StoreErrorKind::Unavailable | StoreErrorKind::Busy)
}

impl Control {
    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Exchanged { id, handlers, result } => self.on_exchanged(id, &handlers, result),
            Event::Renewed { sent, result } => self.on_renewed(sent, result),
            Event::Swept(hosts) => {
                self.sweeping = false;
                match hosts {
                    Ok(hosts) => self.on_hosts(&hosts),
                    Err(error) => tracing::warn!(%error, "the other hosts could not be looked at"),
                }
            }
            Event::Rescued { host, result } => self.on_rescued(host, result),
            Event::Signals(result) => {
                self.asking_signals = false;
                match result {
                    Ok(signals) => self.on_signals(signals),
                    Err(error) => tracing::warn!(%error, "cancellations and pauses could not be read"),
                }
            }
            Event::Registered { sent, result } => {
                self.registering = false;
                self.on_registered(sent, result);
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
                match result {
                    Ok(0) => {}
                    // Each slot went on to the next, who may not be claimed either.
                    Ok(_) => self.look_for_reservations(),
                    Err(error) => {
                        tracing::warn!(%error, "unclaimed reservations could not be returned");
                        self.look_for_reservations();
                    }
                }
            }
            Event::Appended { token, result } => self.on_appended(token, result),
            // Of an earlier registration: all its runs have been stopped.
            Event::SlotsLost { host, .. } if host != self.host => {}
            Event::SlotsLost { runs, .. } => {
                if !runs.is_empty() {
                    self.on_slots_lost(&runs);
                }
                self.listen_for_slots();
            }
        }
    }

    /// Others may be given these slots at any moment: whoever holds them stops by force and is given back, uncharged. The
    /// answer of the claim that took them may come after this.
    fn on_slots_lost(&mut self, runs: &[CancelSignal]) {
        tracing::error!(runs = runs.len(), "slots were lost with their connection; stopping the runs that held them");
        let tokens: HashSet<ClaimToken> = runs.iter().map(|run| run.token).collect();
        for token in &tokens {
            match self.runs.get(token) {
                Some(run) => run.stop.stop(StopReason::HandBack),
                None if self.exchanges.is_claiming() => _ = self.lost_early.insert(*token),
                None => {}
            }
        }
        self.hand_back_queued(SLOTS_LOST, |run| tokens.contains(&run.claimed.token));
    }

    /// Something is reserved now; unless it is claimed, it goes back after the patience (B7).
    fn look_for_reservations(&mut self) {
        self.reserved_at = self.surroundings.boot();
        self.due.reservations = self.due.reservations.min(self.reserved_at.saturating_add(self.patience()));
    }

    fn on_registered(&mut self, sent: Duration, result: Result<HostId, StoreError>) {
        let boot = self.surroundings.boot();
        match result {
            Ok(host) => {
                tracing::warn!(host = host.0, "registered anew");
                self.host = host;
                self.standing = Standing::Good;
                self.unregistered = 0;
                self.reconcile = false;
                self.lease.extend(sent, self.config.lease, self.config.stop_before_lapse);
                self.listen_for_slots();
                self.due.renew = boot + self.config.renew_every;
                self.due.serve = boot;
                self.serve_again = true;
                self.hint_all();
            }
            Err(error) => {
                self.unregistered = self.unregistered.saturating_add(1);
                self.due.register = boot + trouble_delay(self.unregistered);
                tracing::warn!(%error, "registering anew failed; trying again");
            }
        }
    }

    fn on_exchanged(&mut self, id: u64, handlers: &Handlers, result: Result<Exchanged, StoreError>) {
        let Some(exchange) = self.exchanges.answered(id) else { return };
        let boot = self.surroundings.boot();
        let Exchanged { settled, claimed, more, next_due, parked, parked_again, skipped, unacceptable, reserved, not_passed } = match result
        {
            Ok(exchanged) => exchanged,
            Err(error) => {
                let kind = error.kind();
                if let Some(Asked { group, max, wanted, .. }) = exchange.asked {
                    self.groups[group].answered(max, None);
                    self.on_waiters_answered(&wanted);
                    if may_have_happened(kind) {
                        self.reconcile = true;
                        self.due.renew = boot;
                    }
                }
                if kind == StoreErrorKind::HostLost {
                    self.lose_host();
                } else {
                    // Sent again as it was: a repeat of a settle that did arrive is recognised by its token.
                    let retry_in = self.exchanges.failed(exchange.batch, boot);
                    tracing::warn!(%error, ?kind, ?retry_in, "the store did not take a batch");
                }
                return;
            }
        };
        self.exchanges.calm();
        self.exchanges.written(&exchange.batch);
        self.on_passed(&exchange.batch, &not_passed);
        let took = boot.saturating_sub(exchange.sent);
        for (at, group) in self.groups.iter_mut().enumerate() {
            let ran = exchange.ran.iter().find(|(of, ..)| *of == at);
            let (ended, together) = ran.map_or((0, Duration::ZERO), |(_, ended, together)| (*ended, *together));
            group.pace.observe(ended, together, took, boot);
        }
        for (settle, verdict) in exchange.batch.settles.iter().zip(&settled) {
            if *verdict == SettleVerdict::Late {
                self.counters.late.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(token = settle.token.0, "a settle came too late and changed nothing");
            }
        }
        let add = |counter: &AtomicU64, by: u64| counter.fetch_add(by, Ordering::Relaxed);
        add(&self.counters.exchanges, 1);
        add(&self.counters.settled, exchange.batch.settles.len() as u64);
        add(&self.counters.claimed, claimed.len() as u64);
        add(&self.counters.parked, u64::from(parked));
        add(&self.counters.parked_again, u64::from(parked_again));
        add(&self.counters.skipped, u64::from(skipped));
        if unacceptable > 0 {
            tracing::warn!(jobs = unacceptable, "failed because their policy cannot be applied; see `jobs show`");
        }
        if reserved > 0 {
            self.look_for_reservations();
        }
        if let Some(next) = next_due {
            // Answers of exchanges that were under way together come in any order: the earliest counts, and a look
            // too many finds the next. What a clock that is stepped meanwhile spoils, the poll makes good.
            let wait = next.since(self.surroundings.now());
            self.due.scheduled = self.due.scheduled.min(boot.saturating_add(wait));
        }
        if let Some(Asked { group, max, wanted, .. }) = exchange.asked {
            self.groups[group].answered(max, Some((u32::try_from(claimed.len()).unwrap_or(u32::MAX), more)));
            if !claimed.is_empty() {
                self.poll.found();
            }
            self.begin(claimed, group, handlers);
            self.on_waiters_answered(&wanted);
        }
        if !self.exchanges.is_claiming() {
            // Of those that were on their way, none is any more.
            self.lost_early.clear();
        }
    }

    /// Whatever local waiters there are have arrived: slots that were kept for them come free.
    fn on_waiters_answered(&mut self, wanted: &[WaitersWanted]) {
        let (free, back) = self.lines.answered(wanted);
        free.into_iter().for_each(|next| self.go_on(next));
        self.give_back_waiters(back);
    }

    /// Ends have been written, and where their slots have gone: whoever was to begin after that does.
    fn on_passed(&mut self, batch: &Batch, not_passed: &[ClaimToken]) {
        for Pass { from, .. } in batch.passes.iter() {
            let Some(run) = self.promised.remove(&from.1) else { continue };
            if self.may_begin() {
                self.groups[run.group].prefetched.push([run]);
            } else {
                self.give_back_unbegun(run, "its turn came while the host was stopping or its lease lapsed");
            }
        }
        if !not_passed.is_empty() {
            let runs = not_passed.iter().filter_map(|token| self.runs.get(token));
            let lost: Vec<_> = runs.map(|run| CancelSignal { handle: run.claimed.handle, token: run.claimed.token }).collect();
            self.on_slots_lost(&lost);
        }
    }

    fn on_renewed(&mut self, sent: Duration, result: Result<Renewed, StoreError>) {
        self.renewing = false;
        match result {
            Ok(Renewed { handed_back, lost, hosts, expired: _, reserved }) => {
                self.lease.extend(sent, self.config.lease, self.config.stop_before_lapse);
                self.reconcile = false;
                if self.standing == Standing::Lapsed && self.lease.is_good() {
                    tracing::info!("the lease is good again");
                    self.standing = Standing::Good;
                    self.hint_all();
                }
                if handed_back > 0 {
                    self.counters.unknown_rows.fetch_add(u64::from(handed_back), Ordering::Relaxed);
                    tracing::warn!(rows = handed_back, "handed back rows under this host's name that it did not know");
                }
                for (_, token) in lost {
                    if let Some(run) = self.runs.get(&token) {
                        tracing::warn!(job = %run.claimed.id, "the run is not this host's any more; stopping it");
                        run.stop.stop(StopReason::HandBack);
                    }
                }
                if reserved {
                    self.look_for_reservations();
                }
                if self.rescuing == 0 {
                    self.on_hosts(&hosts);
                }
            }
            Err(error) if error.kind() == StoreErrorKind::HostLost => self.lose_host(),
            Err(error) => {
                // The lease runs on; try again soon, not at the next regular renewal. If this one is carried out yet, it
                // must find nothing that it does not know: no claim before a later one has taken its place.
                self.due.renew = self.surroundings.boot() + AGAIN;
                self.reconcile |= may_have_happened(error.kind());
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
        self.exchanges.calm();
        self.unregistered = 0;
        self.due.register = self.surroundings.boot();
        self.lease.end();
        self.stop_all("the host was taken for dead");
    }

    fn on_hosts(&mut self, hosts: &[HostSeen]) {
        let dead = self.watch.observe(hosts, Some(self.host), self.surroundings.boot(), self.config.lease);
        for (host, renewals) in dead {
            let (store, bound) = (Arc::clone(&self.store), self.config.call_bound);
            let (max_deaths, now) = (self.config.max_host_deaths, self.surroundings.now());
            self.rescuing += 1;
            self.tasks.spawn(async move {
                let result = guarded("rescue a dead host", bound, store.rescue(host, renewals, max_deaths, now)).await;
                Event::Rescued { host, result }
            });
        }
    }

    fn on_rescued(&mut self, host: HostId, result: Result<Rescued, StoreError>) {
        self.rescuing -= 1;
        match result {
            Ok(Rescued { requeued, exhausted }) => {
                self.counters.rescued.fetch_add(u64::from(requeued), Ordering::Relaxed);
                tracing::warn!(host = host.0, requeued, exhausted, "rescued the jobs of a host that stopped renewing");
                self.hint_all();
                // Its slots went on to whoever waited for them.
                self.look_for_reservations();
            }
            Err(error) if error.kind() == StoreErrorKind::NotFound => {}
            Err(error) => tracing::warn!(host = host.0, %error, "a dead host could not be rescued; trying again"),
        }
    }

    fn on_signals(&mut self, Signals { cancelled, host_paused, paused_queues }: Signals) {
        if host_paused {
            self.hand_back_queued("its host is paused", |_| true);
        } else if !paused_queues.is_empty() {
            self.hand_back_queued("its queue is paused", |run| paused_queues.contains(&run.claimed.lane.queue));
        }
        let over = self.surroundings.boot().saturating_add(self.config.cancel_grace);
        for CancelSignal { handle: _, token } in cancelled {
            if let Some(run) = self.runs.get(&token)
                && run.calls.cancel()
            {
                tracing::info!(job = %run.claimed.id, grace = ?self.config.cancel_grace, "cancelling");
                self.cancelling.insert(token, over);
                self.look = self.look.min(over);
            }
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
}
