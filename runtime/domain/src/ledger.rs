//! The decisions about slots: who starts, who waits, who is next.
//!
//! This is the ledger of slots.md (kind B) as a pure state machine. A driver opens one write transaction, loads
//! the keys that the batch touches into a [`Ledger`], calls [`Ledger::release`], [`Ledger::claim`] and so on in
//! the order of the batch, writes every [`Effect`] and verdict, and commits (B1: job rows first, then all key
//! rows in global order, then decide; C2: one transaction without client work in between).
//!
//! What must stay true:
//! - a run starts only if, counting it, at most *its own* effective limit run on each of its keys, and a holder
//!   whose effective limit is 1 lets nobody start beside it (B2);
//! - whenever a transaction ends, the oldest waiter of a key that counts is one that could not start (B3–B6);
//!   a waiter does not count while no live host runs its contract (B7) or while its weight is above the limit;
//! - nobody overtakes an older waiter of the same key that counts, so neither a heavy job nor one that stamped a
//!   smaller limit starves behind a stream of light ones. (Stricter than slots.md asks of B; jobs with several
//!   keys are woken without a reservation and may lose to a newcomer, but keep their ticket.)
//!
//! What a driver owes, beside writing the effects in order *after* the verdict's own change of the row:
//! - the view holds every slot and every blocker of a key, and its line from the oldest row on. Waiters whose
//!   contract no live host runs may be left out or marked; when that set changes (a host serves, leaves or is
//!   rescued), every key where such a row is parked is handed on in that transaction. A head in its retry delay
//!   keeps its keys whether or not its contract is served just now: a host that restarts must not cost it its turn;
//! - a candidate comes through a host that has published its contract, so whoever is parked counts;
//! - a start that was reserved gets its token on its slot rows;
//! - a candidate may wait [locally](Candidate::local), and waiters be [taken](Ledger::take_waiters), only by a host that
//!   holds a slot of the key by a run of its own; the job is its run then, without a slot row;
//! - whoever leaves is [`Ledger::release`]d; a job that keeps its place ([`keeps_ticket_on_retry`]) is
//!   [`Ledger::block`]ed before that when its run ends and it does not (retry, snooze, hand-back, rescue), and
//!   [`Ledger::unblock`]ed before that when it ends without running again (delete, cancel);
//! - before it commits it asks [`Ledger::keys_to_reload`] and extends those lines until the answer is empty.
//!
//! What it deliberately does not do: know rows, tokens, hosts' leases or time. A driver has checked token and
//! host (C1) before it calls. The simulation in `warp-testkit` proves the rules, and breaks each of them through
//! [`Rule`] to show that it would notice.

use std::collections::BTreeMap;

use crate::id::{JobHandle, KeyId};
use crate::policy::{Mode, OnRetry, Order};
#[cfg(not(feature = "mutations"))]
use rules::Rule;
#[cfg(feature = "mutations")]
pub use rules::Rule;
use rules::Rules;

/// One taken unit of a key: a slot row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The slot's number; with the key the primary key of the row, the second fence against a third holder (B1).
    pub number: u32,
    /// Who holds it.
    pub job: JobHandle,
    /// The limit stamped on the holder.
    pub limit: u32,
    /// Handed on to a parked job that no host has claimed yet (B4).
    pub reserved: bool,
}

/// A parked job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter {
    /// The job.
    pub job: JobHandle,
    /// Its place in line; smaller is earlier.
    pub ticket: u64,
    /// The limit stamped on it.
    pub limit: u32,
    /// How many slots it takes.
    pub weight: u32,
    /// Whether it needs further keys, so that a slot of this one cannot be reserved for it (B4).
    pub several_keys: bool,
    /// Whether a live host runs its contract; the others are passed over (B7).
    pub claimable: bool,
}

/// What the ledger knows of one key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyState {
    /// The operator's limit; it outranks every stamp.
    pub admin_limit: Option<u32>,
    /// Every slot row of the key.
    pub slots: Vec<Slot>,
    /// The jobs parked here, oldest first. A driver may load only the oldest; then [`KeyState::more_waiters`] is set.
    pub line: Vec<Waiter>,
    /// Whether there are parked jobs beyond `line`.
    pub more_waiters: bool,
    /// First-in-first-out jobs that keep the key through a retry delay ([`OnRetry::Block`]), with their tickets.
    pub blockers: Vec<(u64, JobHandle)>,
}

/// What a job wants of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// The key.
    pub key: KeyId,
    /// The stamped limit.
    pub limit: u32,
    /// How many slots.
    pub weight: u32,
}

/// A keyed job that a host would like to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The job.
    pub job: JobHandle,
    /// Its keys in ascending order of their id, each once (C4).
    pub wants: Vec<Want>,
    /// What a full key does to it.
    pub mode: Mode,
    /// Whether its place in line is kept.
    pub order: Order,
    /// Its ticket, if it was parked before.
    pub ticket: Option<u64>,
    /// Whether its slots were reserved for it, so that it only needs its token (B2) if the limit still allows it.
    pub reserved: bool,
    /// Whether it has been started or parked before. Skip is decided once, before that.
    pub has_started: bool,
    /// Whether the host that asks holds a slot of its one key and would take one more job that waits inside it (B8).
    pub local: bool,
}

/// Why a job cannot start on a key now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// As many as its limit allows are running.
    Full {
        /// The limit that counted.
        limit: u32,
        /// One who holds the key.
        holder: JobHandle,
    },
    /// An operator set the key's limit to 0.
    Paused,
    /// Its weight is above the limit: it cannot run until one of the two changes.
    TooHeavy {
        /// The limit that counted.
        limit: u32,
    },
    /// An older job waits for the key.
    Behind {
        /// The oldest of them.
        waiter: JobHandle,
    },
    /// A first-in-first-out job keeps the key through its retry delay.
    Blocked,
}

/// What becomes of a candidate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It starts; its slots are taken.
    Start,
    /// It is parked on `key` (B2).
    Park {
        /// The first of its keys that refused it.
        key: KeyId,
        /// Its place in line, kept until it starts.
        ticket: u64,
        /// Why.
        refusal: Refusal,
    },
    /// It waits inside the host for a slot that the host holds (B8).
    WaitLocally,
    /// It is deleted, and `holder` is the proof.
    Skip {
        /// The full key.
        key: KeyId,
        /// The limit that counted.
        limit: u32,
        /// Who holds it.
        holder: JobHandle,
    },
}

/// A row that must change because of a decision about another job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Insert a slot row; `reserved` means without a token.
    Take {
        /// The key.
        key: KeyId,
        /// The slot's number.
        number: u32,
        /// Who holds it.
        job: JobHandle,
        /// The limit stamped on the job, kept in the row.
        limit: u32,
        /// Whether it is held for a job that no host has claimed yet.
        reserved: bool,
    },
    /// A parked job's slots are reserved: parked → reserved.
    Reserve {
        /// The job.
        job: JobHandle,
    },
    /// A parked job with several keys may try again: parked → ready.
    Wake {
        /// The job.
        job: JobHandle,
    },
    /// The job's slot rows are gone.
    Free {
        /// The job.
        job: JobHandle,
    },
    /// The slot row of `from` is the one of `to` from here on; its token goes with it.
    Pass {
        /// The key.
        key: KeyId,
        /// Whose it was.
        from: JobHandle,
        /// Whose it is.
        to: JobHandle,
    },
    /// A first-in-first-out job started without having waited. Its place in line belongs on its row all the
    /// same: a retry that keeps the key must stand in front of those who queued behind this start.
    KeepTicket {
        /// The job.
        job: JobHandle,
        /// Its place in line.
        ticket: u64,
    },
    /// The job keeps the key through its retry delay.
    Block {
        /// The key.
        key: KeyId,
        /// Its place in line.
        ticket: u64,
        /// The job.
        job: JobHandle,
    },
    /// It no longer keeps any key so.
    Unblock {
        /// The job.
        job: JobHandle,
    },
}

/// The keys of one transaction and what has been decided so far.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    keys: BTreeMap<KeyId, KeyState>,
    effects: Vec<Effect>,
    next_ticket: u64,
    /// Jobs with several keys that this transaction has woken: they count against every later round of it, else
    /// each settle of a batch would wake one more for the same slot.
    promises: BTreeMap<KeyId, Vec<Promise>>,
    rules: Rules,
}

#[derive(Debug, Clone, Copy)]
struct Promise {
    job: JobHandle,
    weight: u32,
    exclusive: bool,
}

impl KeyState {
    /// The limit that counts for a job that was stamped with `stamped`: admin limit → stamp → 1.
    #[must_use]
    pub fn effective_limit(&self, stamped: u32) -> u32 {
        self.admin_limit.unwrap_or(stamped.max(1))
    }

    /// Whether this waiter holds nobody up: no live host could start it, or the limit in force never will. (A
    /// paused key passes over nobody: all stand, and nothing needs to be looked for.)
    #[must_use]
    pub fn passed_over(&self, waiter: &Waiter) -> bool {
        let limit = self.effective_limit(waiter.limit);
        !waiter.claimable || (limit > 0 && waiter.weight > limit)
    }

    fn counts(&self, waiter: &Waiter, rules: Rules) -> bool {
        let unclaimable_count = !waiter.claimable && !rules.hold(Rule::UnclaimableArePassedOver);
        let too_heavy_count = waiter.claimable && !rules.hold(Rule::TooHeavyArePassedOver);
        !self.passed_over(waiter) || unclaimable_count || too_heavy_count
    }

    /// Whether a job may start here, the others in line aside.
    fn room(&self, admin_limit: Option<u32>, stamped: u32, weight: u32, rules: Rules) -> Result<(), Refusal> {
        let limit = match admin_limit {
            Some(limit) if rules.hold(Rule::AdminLimitOutranks) => limit,
            _ => stamped.max(1),
        };
        if limit == 0 {
            return Err(Refusal::Paused);
        }
        let weight = if rules.hold(Rule::WeightsCount) { weight } else { 1 };
        if weight > limit {
            return Err(Refusal::TooHeavy { limit });
        }
        // A run is a better proof for whoever is skipped than a job that only has its slot reserved.
        let Some(first) = self.slots.iter().find(|slot| !slot.reserved).or(self.slots.first()) else {
            return Ok(());
        };
        let own = if rules.hold(Rule::OwnLimitCounts) { limit } else { limit.max(first.limit) };
        if count(self.slots.iter()).saturating_add(weight) > own {
            return Err(Refusal::Full { limit, holder: first.job });
        }
        match self.exclusive_holder(admin_limit, |_| true) {
            Some(holder) if rules.hold(Rule::ExclusiveHolder) => Err(Refusal::Full { limit: 1, holder }),
            _ => Ok(()),
        }
    }

    /// A holder at limit 1 excludes everybody, whatever the newcomer was stamped with. With an admin limit every
    /// effective limit is that one, and counting decides.
    fn exclusive_holder(&self, admin_limit: Option<u32>, among: impl Fn(&Slot) -> bool) -> Option<JobHandle> {
        self.slots.iter().find(|slot| admin_limit.is_none() && slot.limit <= 1 && among(slot)).map(|slot| slot.job)
    }

    /// Whether a reserved job may still start: the limit may have been lowered since. Only runs count against it,
    /// so that of two reservations under a lowered limit the first to be claimed starts.
    fn reservation_holds(&self, job: JobHandle, stamped: u32) -> bool {
        let mine = count(self.slots.iter().filter(|slot| slot.job == job));
        let others = |slot: &Slot| slot.job != job && !slot.reserved;
        let running = count(self.slots.iter().filter(|slot| others(slot)));
        mine > 0
            && running.saturating_add(mine) <= self.effective_limit(stamped)
            && self.exclusive_holder(self.admin_limit, others).is_none()
    }

    /// Whether a job with this ticket (none: it was never in line) would overtake somebody.
    fn turn(&self, ticket: Option<u64>, rules: Rules) -> Result<(), Refusal> {
        let mine = ticket.unwrap_or(u64::MAX);
        if rules.hold(Rule::BlockKeepsTheKey) && self.blockers.iter().any(|&(blocker, _)| blocker < mine) {
            return Err(Refusal::Blocked);
        }
        if !rules.hold(Rule::NewcomersQueue) {
            return Ok(());
        }
        let mut ahead = self.line.iter().filter(|waiter| waiter.ticket < mine);
        if let Some(waiter) = ahead.find(|waiter| self.counts(waiter, rules)) {
            return Err(Refusal::Behind { waiter: waiter.job });
        }
        if !rules.hold(Rule::UnloadedMayCount) {
            return Ok(());
        }
        // Of those who were not loaded one may count. Parking is safe: the reload finds whoever is next.
        match self.line.last() {
            Some(last) if self.more_waiters && last.ticket < mine => Err(Refusal::Behind { waiter: last.job }),
            None if self.more_waiters => Err(Refusal::Blocked),
            _ => Ok(()),
        }
    }

    /// Whether a job of this stamped limit may wait inside a host for one of the slots that the host holds (B8): every
    /// slot of the key was taken under that limit, no operator's limit is in force, and nobody keeps the key through a
    /// retry delay. So the slot that it gets is one that it could have been given.
    fn passes_inside(&self, stamped: u32, rules: Rules) -> bool {
        let alike = self.slots.iter().all(|slot| slot.limit == stamped) || !rules.hold(Rule::PassBetweenLikes);
        let unlimited = self.admin_limit.is_none() || !rules.hold(Rule::PassWithoutAdminLimit);
        alike && unlimited && self.blockers.is_empty()
    }

    fn take(&mut self, key: KeyId, slot: &Slot, weight: u32, effects: &mut Vec<Effect>) {
        let mut taken: Vec<_> = self.slots.iter().map(|slot| slot.number).collect();
        taken.sort_unstable();
        let mut taken = taken.into_iter().peekable();
        let free = (0..=u32::MAX).filter(|number| taken.next_if_eq(number).is_none());
        for number in free.take(usize::try_from(weight).unwrap_or(usize::MAX)) {
            let Slot { number: _, job, limit, reserved } = *slot;
            self.slots.push(Slot { number, job, limit, reserved });
            effects.push(Effect::Take { key, number, job, limit, reserved });
        }
    }

    fn is_used_up(&self) -> bool {
        self.more_waiters && self.line.iter().all(|waiter| self.passed_over(waiter))
    }

    fn insert(&mut self, waiter: Waiter) {
        let place = self.line.partition_point(|other| other.ticket < waiter.ticket);
        // Beyond the loaded part of the line the driver's next load finds it by its row.
        if !(self.more_waiters && place == self.line.len()) {
            self.line.insert(place, waiter);
        }
    }
}

fn count<'a>(slots: impl Iterator<Item = &'a Slot>) -> u32 {
    u32::try_from(slots.count()).unwrap_or(u32::MAX)
}

impl Ledger {
    /// A ledger over these keys. `next_ticket` is larger than every ticket ever drawn.
    #[must_use]
    pub fn new(keys: BTreeMap<KeyId, KeyState>, next_ticket: u64) -> Self {
        Ledger { keys, next_ticket, ..Ledger::default() }
    }

    /// The key's state as decided so far.
    #[must_use]
    pub fn key(&self, key: KeyId) -> Option<&KeyState> {
        self.keys.get(&key)
    }

    /// Adds or replaces a key that turned out to be needed.
    pub fn load(&mut self, key: KeyId, state: KeyState) {
        self.keys.insert(key, state);
    }

    /// Appends further waiters to a line that was loaded in part and hands the key on. A driver answers
    /// [`Ledger::keys_to_reload`] with it; rows whose job this transaction has parked, woken or given a slot may
    /// be among them only if the driver has written the effects so far.
    pub fn extend_line(&mut self, key: KeyId, waiters: Vec<Waiter>, more_waiters: bool) {
        let state = self.state(key);
        state.line.extend(waiters);
        state.line.sort_by_key(|waiter| waiter.ticket);
        state.line.dedup_by_key(|waiter| waiter.job);
        state.more_waiters = more_waiters;
        self.hand_on(key);
    }

    /// The next ticket to be drawn; to be stored when the transaction ends.
    #[must_use]
    pub fn next_ticket(&self) -> u64 {
        self.next_ticket
    }

    /// What must be written, in order, since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Keys whose loaded line was used up although a further waiter might start: load more, [`Ledger::load`] or
    /// [`Ledger::extend_line`] them and [`Ledger::hand_on`] again, in the same transaction.
    #[must_use]
    pub fn keys_to_reload(&self) -> Vec<KeyId> {
        self.keys.iter().filter(|(_, state)| state.is_used_up()).map(|(key, _)| *key).collect()
    }

    /// Whether the loaded part of one of these lines is used up. Who is claimed then may be refused for the sake of somebody
    /// unloaded who does not count, so the driver loads further first.
    #[must_use]
    pub fn needs_reload(&self, keys: &[KeyId]) -> bool {
        keys.iter().filter_map(|key| self.keys.get(key)).any(KeyState::is_used_up)
    }

    /// B2. All keys or none, in their global order (C4); what cannot start is parked on the first key that
    /// refused it or, before its first start, skipped.
    pub fn claim(&mut self, candidate: &Candidate) -> Verdict {
        debug_assert!(candidate.wants.is_sorted_by(|a, b| a.key < b.key), "C4: keys in ascending order, each once");
        let keys: Vec<_> = candidate.wants.iter().map(|want| want.key).collect();
        self.forget_promises(candidate.job, &keys);
        if candidate.reserved && self.start_reserved(candidate) {
            self.unblock(candidate.job, &keys);
            return Verdict::Start;
        }
        for (at, want) in candidate.wants.iter().enumerate() {
            let rules = self.rules;
            let state = self.state(want.key);
            let refused = state.turn(candidate.ticket, rules).and_then(|()| state.room(state.admin_limit, want.limit, want.weight, rules));
            if let Err(refusal) = refused {
                if !rules.hold(Rule::AllKeysOrNone) {
                    self.take_all(candidate, &candidate.wants[..at]);
                }
                if self.waits_locally(candidate, want, &refusal) {
                    return Verdict::WaitLocally;
                }
                return self.refuse(candidate, want, refusal);
            }
        }
        self.take_all(candidate, &candidate.wants);
        if candidate.order == Order::Fifo && candidate.ticket.is_none() {
            let ticket = self.draw_ticket();
            self.effects.push(Effect::KeepTicket { job: candidate.job, ticket });
        }
        self.unblock(candidate.job, &keys);
        Verdict::Start
    }

    /// B2: a reserved job only gets its token, unless an operator has lowered the limit in the meantime. Then its
    /// reservation is void, and it is a candidate like any other, with its place in line.
    fn start_reserved(&mut self, candidate: &Candidate) -> bool {
        let job = candidate.job;
        let holds = candidate.wants.iter().all(|want| self.state(want.key).reservation_holds(job, want.limit))
            || !self.rules.hold(Rule::ReservationRechecked);
        for want in &candidate.wants {
            let slots = &mut self.state(want.key).slots;
            if holds {
                slots.iter_mut().filter(|slot| slot.job == job).for_each(|slot| slot.reserved = false);
            } else {
                slots.retain(|slot| slot.job != job);
            }
        }
        if !holds {
            self.effects.push(Effect::Free { job });
        }
        holds
    }

    /// B8. A full key refuses it, nobody who is older waits (that would be [`Refusal::Behind`]), and its host has a slot
    /// that will come to it. Skip is decided before.
    fn waits_locally(&mut self, candidate: &Candidate, want: &Want, refusal: &Refusal) -> bool {
        let rules = self.rules;
        let plain = candidate.wants.len() == 1 && want.weight == 1 && candidate.order == Order::Any;
        let may_skip = candidate.mode == Mode::Skip && !candidate.has_started;
        let full = match refusal {
            Refusal::Full { .. } => true,
            Refusal::Behind { .. } => !rules.hold(Rule::WaitsInsideOnlyWhenFull),
            _ => false,
        };
        // A reservation that turned out to be void frees a slot, and only whoever is parked hands it on.
        candidate.local && !candidate.reserved && plain && !may_skip && full && self.state(want.key).passes_inside(want.limit, rules)
    }

    /// B8: takes up to `most` of the oldest waiters that count out of the line, in its order, for a host that holds a slot
    /// of the key: as far as they may pass inside a host and `may` agrees to each. Nobody behind one who may not is taken.
    /// Whoever is the oldest after that may have room (it was stamped with a larger limit), so the key is handed on.
    ///
    /// Where the driver has loaded the line in part, it asks again once it has loaded more, until nobody is taken.
    pub fn take_waiters(&mut self, key: KeyId, most: usize, may: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let rules = self.rules;
        let state = self.state(key);
        let fit = |waiter: &Waiter| waiter.weight == 1 && !waiter.several_keys && waiter.claimable && may(waiter);
        let mut taken = Vec::new();
        let mut at = 0;
        while taken.len() < most
            && let Some(waiter) = state.line.get(at)
        {
            if fit(waiter) && state.passes_inside(waiter.limit, rules) {
                taken.push(state.line.remove(at));
            } else if state.counts(waiter, rules) && rules.hold(Rule::WaitersAreTakenInOrder) {
                break;
            } else {
                at += 1;
            }
        }
        if !taken.is_empty() && rules.hold(Rule::TakenWaitersHandOn) {
            self.hand_on(key);
        }
        taken
    }

    /// B8: the slot of a run whose host has begun a local waiter in its place goes to that one; whether there was such a
    /// slot. The number of slots stays what it is, so nobody else is affected and nothing is handed on.
    pub fn pass(&mut self, key: KeyId, from: JobHandle, to: JobHandle) -> bool {
        let Some(slot) = self.state(key).slots.iter_mut().find(|slot| slot.job == from && !slot.reserved) else { return false };
        slot.job = to;
        self.effects.push(Effect::Pass { key, from, to });
        true
    }

    fn take_all(&mut self, candidate: &Candidate, wants: &[Want]) {
        let weights_count = self.rules.hold(Rule::WeightsCount);
        for want in wants {
            let state = self.keys.entry(want.key).or_default();
            let slot = Slot { number: 0, job: candidate.job, limit: want.limit, reserved: false };
            state.take(want.key, &slot, if weights_count { want.weight } else { 1 }, &mut self.effects);
        }
    }

    fn refuse(&mut self, candidate: &Candidate, want: &Want, refusal: Refusal) -> Verdict {
        if candidate.mode == Mode::Skip && (!candidate.has_started || !self.rules.hold(Rule::SkipBeforeFirstStart)) {
            // Only a full key at the *stamped* limit proves that the work is surplus. What an operator's lower
            // limit, somebody's place in line or a retry delay refuses, waits.
            let rules = self.rules;
            let full_by_stamp = matches!(self.state(want.key).room(None, want.limit, want.weight, rules), Err(Refusal::Full { .. }));
            if let (Refusal::Full { limit, holder }, true) = (&refusal, full_by_stamp || !rules.hold(Rule::SkipByStampOnly)) {
                self.pass_on(candidate);
                return Verdict::Skip { key: want.key, limit: *limit, holder: *holder };
            }
        }
        let kept = candidate.ticket.filter(|_| self.rules.hold(Rule::TicketIsKept));
        let ticket = kept.unwrap_or_else(|| self.draw_ticket());
        self.state(want.key).insert(Waiter {
            job: candidate.job,
            ticket,
            limit: want.limit,
            weight: want.weight,
            several_keys: candidate.wants.len() > 1,
            claimable: true,
        });
        // From here on its place in line stands for it. A blocker besides would outlast its start.
        let keys: Vec<_> = candidate.wants.iter().map(|want| want.key).collect();
        self.unblock(candidate.job, &keys);
        self.pass_on(candidate);
        Verdict::Park { key: want.key, ticket, refusal }
    }

    /// W4: a job that was woken for one key and did not take it hands that key on. On the key that refused it
    /// this finds nobody who could start, unless it is itself passed over there.
    fn pass_on(&mut self, candidate: &Candidate) {
        if self.rules.hold(Rule::RefusedHandsOn) {
            for want in &candidate.wants {
                self.hand_on(want.key);
            }
        }
    }

    /// B3, B5, C5: a job leaves its slots, its reservation or its place in line (settled, requeued, deleted,
    /// rescued, moved), and each of its keys is handed on. `keys` are all keys it has ever rendered. It does not
    /// end a block: a retry blocks first and releases then.
    pub fn release(&mut self, job: JobHandle, keys: &[KeyId]) {
        self.forget_promises(job, keys);
        let mut held = false;
        for key in keys {
            let state = self.state(*key);
            held |= state.slots.iter().any(|slot| slot.job == job);
            state.slots.retain(|slot| slot.job != job);
            state.line.retain(|waiter| waiter.job != job);
        }
        if held {
            self.effects.push(Effect::Free { job });
        }
        if self.rules.hold(Rule::ReleaseHandsOn) {
            for key in keys {
                self.hand_on(*key);
            }
        }
    }

    /// A first-in-first-out job goes into a retry delay and keeps its keys ([`OnRetry::Block`]). Its slots are
    /// free, and nobody behind it starts. Call it before [`Ledger::release`].
    pub fn block(&mut self, job: JobHandle, ticket: u64, keys: &[KeyId]) {
        for &key in keys {
            let state = self.state(key);
            if state.blockers.iter().all(|(_, other)| *other != job) {
                state.blockers.push((ticket, job));
                self.effects.push(Effect::Block { key, ticket, job });
            }
        }
    }

    /// The job has started, stands in line again or ends without running again, and keeps no key any more: each is
    /// handed on. Costs nothing for a job that keeps none.
    pub fn unblock(&mut self, job: JobHandle, keys: &[KeyId]) {
        if !self.rules.hold(Rule::StartEndsTheBlock) {
            return;
        }
        let mut blocked = false;
        for &key in keys {
            let state = self.state(key);
            blocked |= state.blockers.iter().any(|(_, other)| *other == job);
            state.blockers.retain(|(_, other)| *other != job);
        }
        if blocked {
            self.effects.push(Effect::Unblock { job });
            for &key in keys {
                self.hand_on(key);
            }
        }
    }

    /// B6: the operator's limit changes. Lowering kills nobody; raising starts the difference.
    pub fn set_admin_limit(&mut self, key: KeyId, limit: Option<u32>) {
        self.state(key).admin_limit = limit;
        if self.rules.hold(Rule::RaiseHandsOn) {
            self.hand_on(key);
        }
    }

    /// B7: a reservation or wake that nobody claimed goes back into the line, at its end unless its order is kept,
    /// and the slot on to the next one. Returns its ticket; the row is parked with it before the effects are
    /// written, since one of them may reserve the slot for the same job again.
    pub fn unreserve(&mut self, key: KeyId, waiter: Waiter, order: Order) -> u64 {
        let job = waiter.job;
        self.forget_promises(job, &[key]);
        let ticket = match order {
            Order::Fifo if self.rules.hold(Rule::FifoKeepsItsTicket) => waiter.ticket,
            Order::Fifo | Order::Any => self.draw_ticket(),
        };
        self.stand_again(key, Waiter { ticket, ..waiter });
        ticket
    }

    /// B8: a job that was taken out of the line to wait inside a host and has not begun stands where it stood, and what it
    /// held is handed on. Nobody who came after it has started without its place being looked at: whoever holds the key now
    /// was given it while it counted as a run. The row is parked before the effects are written, as with [`Ledger::unreserve`].
    pub fn stand_again(&mut self, key: KeyId, waiter: Waiter) {
        let job = waiter.job;
        let state = self.state(key);
        let held = state.slots.len();
        state.slots.retain(|slot| slot.job != job);
        if state.slots.len() < held {
            self.effects.push(Effect::Free { job });
        }
        self.state(key).insert(waiter);
        self.hand_on(key);
    }

    /// B4: while the oldest waiter that counts could start, it is given its slots, oldest first. One that needs
    /// further keys is only woken and counted against this transaction's rounds, because taking its other keys
    /// here would lock key rows out of order (W1).
    pub fn hand_on(&mut self, key: KeyId) {
        let Ledger { keys, effects, promises, rules, .. } = self;
        let (rules, state, promises) = (*rules, keys.entry(key).or_default(), promises.entry(key).or_default());
        let mut from = 0;
        while let Some(at) = state.line[from..].iter().position(|waiter| state.counts(waiter, rules)).map(|at| from + at) {
            let next = &state.line[at];
            let blocked = rules.hold(Rule::BlockKeepsTheKey) && state.blockers.iter().any(|&(blocker, _)| blocker < next.ticket);
            let promised = promises.iter().fold(0u32, |sum, promise| sum.saturating_add(promise.weight));
            let promised = if rules.hold(Rule::WideJobsCount) { promised } else { 0 };
            let promised_away = rules.hold(Rule::WideJobsCount) && promises.iter().any(|promise| promise.exclusive);
            let fits = state.room(state.admin_limit, next.limit, next.weight.saturating_add(promised), rules).is_ok();
            if blocked || promised_away || !fits && rules.hold(Rule::HandOnObeysTheLimit) {
                if rules.hold(Rule::HeadOfLine) {
                    return;
                }
                from = at + 1;
                continue;
            }
            let next = state.line.remove(at);
            if next.several_keys && rules.hold(Rule::WideJobsAreWoken) {
                let exclusive = state.admin_limit.is_none() && next.limit <= 1;
                promises.push(Promise { job: next.job, weight: next.weight, exclusive });
                effects.push(Effect::Wake { job: next.job });
            } else {
                let weight = if rules.hold(Rule::WeightsCount) { next.weight } else { 1 };
                let slot = Slot { number: 0, job: next.job, limit: next.limit, reserved: true };
                state.take(key, &slot, weight, effects);
                effects.push(Effect::Reserve { job: next.job });
            }
            if !rules.hold(Rule::HandOnObeysTheLimit) {
                return;
            }
        }
    }

    fn forget_promises(&mut self, job: JobHandle, keys: &[KeyId]) {
        for key in keys {
            if let Some(promises) = self.promises.get_mut(key) {
                promises.retain(|promise| promise.job != job);
            }
        }
    }

    fn state(&mut self, key: KeyId) -> &mut KeyState {
        self.keys.entry(key).or_default()
    }

    fn draw_ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }
}

#[cfg(feature = "mutations")]
impl Ledger {
    /// Switches one rule off (`None`: all are in force), to show that a test notices. Only with the feature
    /// `mutations`, which nothing but `warp-testkit`'s own tests enables.
    pub fn break_rule(&mut self, rule: Option<Rule>) {
        self.rules = Rules::without(rule);
    }
}

/// Whether a job keeps its place, and its keys, until it runs again (retry, snooze, hand-back, rescue): only first
/// in, first out with [`OnRetry::Block`]. Everybody else draws a new ticket if it has to wait again, except that a
/// hand-back or a rescue never costs a place in line.
#[must_use]
pub fn keeps_ticket_on_retry(order: Order, on_retry: OnRetry) -> bool {
    order == Order::Fifo && on_retry == OnRetry::Block
}

/// The rules by name, so that a mutation test can switch one off. Without the feature they always hold, and the
/// questions cost nothing.
mod rules {
    /// One rule of slots.md, or of what it leaves open, as it stands in this file.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Rule {
        /// B2, B6: the operator's limit outranks the stamp.
        AdminLimitOutranks,
        /// A job counts with its weight.
        WeightsCount,
        /// A start is counted against the starter's own limit, not a holder's larger one.
        OwnLimitCounts,
        /// A holder at limit 1 is alone, whatever others were stamped with.
        ExclusiveHolder,
        /// A reservation made before the limit was lowered does not start above it.
        ReservationRechecked,
        /// A newcomer does not overtake the line.
        NewcomersQueue,
        /// A head in its retry delay keeps the key.
        BlockKeepsTheKey,
        /// The block ends when the head starts, stands in line again, or is gone.
        StartEndsTheBlock,
        /// C4: all keys or none.
        AllKeysOrNone,
        /// Skip is decided before the first start only.
        SkipBeforeFirstStart,
        /// Skip needs a key that is full at the stamped limit.
        SkipByStampOnly,
        /// A refused job that comes back keeps its ticket.
        TicketIsKept,
        /// B2, W4: a job that is refused hands its keys on.
        RefusedHandsOn,
        /// B3, B5, C5: whoever leaves hands its keys on.
        ReleaseHandsOn,
        /// B6, W7: a raised limit is handed on.
        RaiseHandsOn,
        /// B4, W6: a freed slot is handed on only while the limit allows it.
        HandOnObeysTheLimit,
        /// B4: a woken job with several keys counts against the round.
        WideJobsCount,
        /// B4, W1: a job with several keys is woken, never given one slot of many.
        WideJobsAreWoken,
        /// B7: who cannot be claimed holds nobody up and is given nothing.
        UnclaimableArePassedOver,
        /// Who is heavier than the limit in force holds nobody up.
        TooHeavyArePassedOver,
        /// Beyond the loaded part of a line somebody older may stand.
        UnloadedMayCount,
        /// B7: first in, first out, keeps its place through an expired reservation.
        FifoKeepsItsTicket,
        /// Nobody overtakes an older waiter that could not start.
        HeadOfLine,
        /// B8: a slot passes on inside a host only between jobs of one stamped limit.
        PassBetweenLikes,
        /// B8: nobody waits inside a host for a key that an operator has limited.
        PassWithoutAdminLimit,
        /// B8: a newcomer waits inside a host only where it would be the next in line.
        WaitsInsideOnlyWhenFull,
        /// B8: a host takes the oldest waiters, and nobody from behind one whom it may not take.
        WaitersAreTakenInOrder,
        /// B8: who stands behind waiters that were taken may have room.
        TakenWaitersHandOn,
    }

    /// Which rules are in force: all of them, but for a mutation test.
    #[derive(Debug, Clone, Copy, Default)]
    pub struct Rules {
        #[cfg(feature = "mutations")]
        broken: Option<Rule>,
    }

    impl Rules {
        #[cfg(feature = "mutations")]
        pub fn without(broken: Option<Rule>) -> Self {
            Rules { broken }
        }

        #[cfg(feature = "mutations")]
        pub fn hold(self, rule: Rule) -> bool {
            self.broken != Some(rule)
        }

        #[cfg(not(feature = "mutations"))]
        #[inline(always)]
        pub fn hold(self, _: Rule) -> bool {
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: KeyId = KeyId(1);

    fn fifo(job: i64, limit: u32, ticket: Option<u64>, reserved: bool) -> Candidate {
        Candidate {
            job: JobHandle(job),
            wants: vec![Want { key: K, limit, weight: 1 }],
            mode: Mode::Wait,
            order: Order::Fifo,
            ticket,
            reserved,
            has_started: ticket.is_some(),
            local: false,
        }
    }

    fn any(job: i64, limit: u32, weight: u32) -> Candidate {
        Candidate { order: Order::Any, wants: vec![Want { key: K, limit, weight }], ..fifo(job, limit, None, false) }
    }

    fn parked(verdict: Verdict) -> u64 {
        match verdict {
            Verdict::Park { ticket, .. } => ticket,
            other => panic!("expected to be parked, got {other:?}"),
        }
    }

    /// The head started without waiting. Had it drawn its ticket only when it retried, those who had queued in
    /// the meantime would have passed it in its delay.
    #[test]
    fn a_head_that_never_waited_still_keeps_the_key_through_its_delay() {
        let mut ledger = Ledger::new(BTreeMap::new(), 1);
        assert_eq!(ledger.claim(&fifo(1, 1, None, false)), Verdict::Start);
        let kept = ledger.take_effects().into_iter().find_map(|effect| match effect {
            Effect::KeepTicket { job: JobHandle(1), ticket } => Some(ticket),
            _ => None,
        });
        let ticket = kept.expect("its place in line is handed to the driver");
        parked(ledger.claim(&fifo(2, 1, None, false)));
        ledger.block(JobHandle(1), ticket, &[K]);
        ledger.release(JobHandle(1), &[K]);
        assert!(ledger.key(K).expect("loaded").slots.is_empty(), "the second passed the head in its delay");
        assert_eq!(ledger.claim(&fifo(1, 1, Some(ticket), false)), Verdict::Start);
        ledger.release(JobHandle(1), &[K]);
        assert_eq!(ledger.key(K).expect("loaded").slots[0].job, JobHandle(2));
    }

    /// The blocked head is refused when it comes back (paused key), waits, is handed its slot and starts by
    /// reservation: the block must not outlast that.
    #[test]
    fn a_block_ends_with_a_reserved_start_too() {
        let mut ledger = Ledger::new(BTreeMap::new(), 10);
        ledger.block(JobHandle(1), 5, &[K]);
        ledger.set_admin_limit(K, Some(0));
        assert_eq!(parked(ledger.claim(&fifo(1, 1, Some(5), false))), 5);
        ledger.set_admin_limit(K, None);
        assert_eq!(ledger.claim(&fifo(1, 1, Some(5), true)), Verdict::Start);
        assert!(ledger.key(K).expect("loaded").blockers.is_empty());
        assert!(ledger.take_effects().contains(&Effect::Unblock { job: JobHandle(1) }));
    }

    #[test]
    fn a_reservation_does_not_outlive_a_lowered_limit() {
        let mut ledger = Ledger::new(BTreeMap::new(), 1);
        assert_eq!(ledger.claim(&any(1, 1, 1)), Verdict::Start);
        let ticket = parked(ledger.claim(&any(2, 1, 1)));
        ledger.release(JobHandle(1), &[K]);
        ledger.set_admin_limit(K, Some(0));
        ledger.take_effects();
        let back = Candidate { ticket: Some(ticket), reserved: true, ..any(2, 1, 1) };
        assert_eq!(ledger.claim(&back), Verdict::Park { key: K, ticket, refusal: Refusal::Paused });
        assert_eq!(ledger.take_effects(), [Effect::Free { job: JobHandle(2) }]);
    }

    #[test]
    fn a_job_too_heavy_for_the_limit_holds_nobody_up() {
        let mut ledger = Ledger::new(BTreeMap::new(), 1);
        ledger.set_admin_limit(K, Some(1));
        let heavy = ledger.claim(&any(1, 3, 2));
        assert!(matches!(heavy, Verdict::Park { refusal: Refusal::TooHeavy { limit: 1 }, .. }), "{heavy:?}");
        assert_eq!(ledger.claim(&any(2, 3, 1)), Verdict::Start);
        // At a limit that it fits, it is the oldest again, and a light newcomer waits behind it.
        ledger.set_admin_limit(K, Some(2));
        let light = ledger.claim(&any(3, 3, 1));
        assert!(matches!(light, Verdict::Park { refusal: Refusal::Behind { waiter: JobHandle(1) }, .. }), "{light:?}");
    }

    /// The loaded part of the line is used up, or nobody in it counts: a newcomer must not slip in front of the
    /// rest, and the driver is asked for more.
    #[test]
    fn a_line_loaded_in_part_lets_nobody_slip_in() {
        let waiter = |job, ticket, claimable| Waiter { job: JobHandle(job), ticket, limit: 1, weight: 1, several_keys: false, claimable };
        for line in [vec![], vec![waiter(1, 1, false)]] {
            let state = KeyState { line, more_waiters: true, ..KeyState::default() };
            let mut ledger = Ledger::new(BTreeMap::from([(K, state)]), 10);
            parked(ledger.claim(&any(9, 1, 1)));
            assert_eq!(ledger.keys_to_reload(), [K]);
            ledger.extend_line(K, vec![waiter(2, 2, true), waiter(9, 10, true)], false);
            assert_eq!(ledger.key(K).expect("loaded").slots[0].job, JobHandle(2));
            assert!(ledger.keys_to_reload().is_empty());
        }
    }

    /// A local waiter neither takes a slot nor stands in line; the pass re-points the slot and frees nothing.
    #[test]
    fn a_slot_passes_inside_a_host_without_coming_free() {
        let mut ledger = Ledger::new(BTreeMap::new(), 1);
        assert_eq!(ledger.claim(&any(1, 1, 1)), Verdict::Start);
        let waits = |job| Candidate { local: true, ..any(job, 1, 1) };
        assert_eq!(ledger.claim(&waits(2)), Verdict::WaitLocally);
        parked(ledger.claim(&any(3, 1, 1)));
        parked(ledger.claim(&waits(4)));
        ledger.take_effects();
        assert!(ledger.pass(K, JobHandle(1), JobHandle(2)));
        ledger.release(JobHandle(1), &[K]);
        assert_eq!(ledger.take_effects(), [Effect::Pass { key: K, from: JobHandle(1), to: JobHandle(2) }]);
        assert!(!ledger.pass(K, JobHandle(1), JobHandle(9)), "it has no slot any more");
        assert_eq!(ledger.take_waiters(K, 9, |_| true).iter().map(|waiter| waiter.job.0).collect::<Vec<_>>(), [3, 4]);
        ledger.release(JobHandle(2), &[K]);
        assert_eq!(ledger.take_effects(), [Effect::Free { job: JobHandle(2) }], "nobody is left in line");
    }

    #[test]
    fn nobody_waits_inside_a_host_where_the_slot_could_not_be_his() {
        let waits = |job, limit, weight| Candidate { local: true, ..any(job, limit, weight) };
        let held = || {
            let mut ledger = Ledger::new(BTreeMap::new(), 1);
            assert_eq!(ledger.claim(&any(1, 1, 1)), Verdict::Start);
            ledger
        };
        // Of another limit: neither when it comes, nor out of the line.
        let mut ledger = held();
        parked(ledger.claim(&waits(2, 2, 1)));
        assert_eq!(ledger.take_waiters(K, 9, |_| true), []);
        // Whose place in line is kept.
        parked(held().claim(&Candidate { order: Order::Fifo, ..waits(2, 1, 1) }));
        // Under an operator's limit.
        let mut ledger = held();
        ledger.set_admin_limit(K, Some(1));
        parked(ledger.claim(&waits(2, 1, 1)));
        assert_eq!(ledger.take_waiters(K, 9, |_| true), []);
        // While somebody keeps the key through a retry delay.
        let mut ledger = held();
        parked(ledger.claim(&any(2, 1, 1)));
        ledger.block(JobHandle(7), 99, &[K]);
        assert_eq!(ledger.take_waiters(K, 9, |_| true), []);
        // Surplus work is deleted, wherever it could wait.
        let skips = held().claim(&Candidate { mode: Mode::Skip, ..waits(2, 1, 1) });
        assert!(matches!(skips, Verdict::Skip { .. }), "{skips:?}");
        // And nobody behind one who may not.
        let mut ledger = held();
        (2..=4).for_each(|job| assert!(parked(ledger.claim(&any(job, 1, 1))) > 0));
        let taken = ledger.take_waiters(K, 9, |waiter| waiter.job != JobHandle(3));
        assert_eq!(taken.iter().map(|waiter| waiter.job.0).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn slot_numbers_fill_the_lowest_gaps() {
        let mut ledger = Ledger::new(BTreeMap::new(), 1);
        for job in 1..=4 {
            assert_eq!(ledger.claim(&any(job, 9, 1)), Verdict::Start);
        }
        ledger.release(JobHandle(1), &[K]);
        ledger.release(JobHandle(3), &[K]);
        assert_eq!(ledger.claim(&any(5, 9, 3)), Verdict::Start);
        let numbers: Vec<_> =
            ledger.key(K).expect("loaded").slots.iter().filter(|slot| slot.job == JobHandle(5)).map(|slot| slot.number).collect();
        assert_eq!(numbers, [0, 2, 4]);
    }
}
