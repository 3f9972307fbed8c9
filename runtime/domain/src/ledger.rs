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
//! - whenever a transaction ends, the oldest claimable waiter of a key is one that could not start (B3–B6);
//! - nobody overtakes an older claimable waiter of the same key, so neither a heavy job nor one that stamped a
//!   smaller limit starves behind a stream of light ones. (Stricter than slots.md asks of B; jobs with several
//!   keys are woken without a reservation and may lose to a newcomer, but keep their ticket.)
//!
//! What it deliberately does not do: know rows, tokens, hosts' leases or time. A driver has checked token and
//! host (C1) before it calls.

use std::collections::BTreeMap;

use crate::id::{JobHandle, KeyId};
use crate::policy::{Mode, OnRetry, Order};

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
    /// Whether its slots were reserved for it, so that it only needs its token (B2).
    pub reserved: bool,
    /// Whether it has been started or parked before. Skip is decided once, before that.
    pub has_started: bool,
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
}

impl KeyState {
    /// The limit that counts for a job that was stamped with `stamped`: admin limit → stamp → 1.
    #[must_use]
    pub fn effective_limit(&self, stamped: u32) -> u32 {
        self.admin_limit.unwrap_or(stamped.max(1))
    }

    /// Whether a job may start here, the others in line aside. `promised` slots count as held.
    fn capacity(&self, admin_limit: Option<u32>, stamped: u32, weight: u32, promised: u32) -> Result<(), Refusal> {
        let limit = admin_limit.unwrap_or(stamped.max(1));
        if limit == 0 {
            return Err(Refusal::Paused);
        }
        if weight > limit {
            return Err(Refusal::TooHeavy { limit });
        }
        let held = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let Some(first) = self.slots.first() else {
            // Only `hand_on` promises, and it asks no more than whether.
            return if promised.saturating_add(weight) <= limit { Ok(()) } else { Err(Refusal::Blocked) };
        };
        if held.saturating_add(promised).saturating_add(weight) > limit {
            return Err(Refusal::Full { limit, holder: first.job });
        }
        // A holder at limit 1 excludes everybody, whatever the newcomer was stamped with. With an admin limit
        // every effective limit is that one, and the count above has decided.
        match self.slots.iter().find(|slot| admin_limit.is_none() && slot.limit <= 1) {
            Some(exclusive) => Err(Refusal::Full { limit: 1, holder: exclusive.job }),
            None => Ok(()),
        }
    }

    /// Whether a job with this ticket (none: it was never in line) would overtake somebody.
    fn turn(&self, ticket: Option<u64>) -> Result<(), Refusal> {
        let mine = ticket.unwrap_or(u64::MAX);
        if self.blockers.iter().any(|&(blocker, _)| blocker < mine) {
            return Err(Refusal::Blocked);
        }
        match self.line.iter().find(|waiter| waiter.claimable && waiter.ticket < mine) {
            Some(waiter) => Err(Refusal::Behind { waiter: waiter.job }),
            None => Ok(()),
        }
    }

    fn take(&mut self, key: KeyId, job: JobHandle, limit: u32, weight: u32, reserved: bool, effects: &mut Vec<Effect>) {
        for _ in 0..weight {
            let number = (0..).find(|number| self.slots.iter().all(|slot| slot.number != *number)).unwrap_or(u32::MAX);
            self.slots.push(Slot { number, job, limit, reserved });
            effects.push(Effect::Take { key, number, job, limit, reserved });
        }
    }
}

impl Ledger {
    /// A ledger over these keys. `next_ticket` is larger than every ticket ever drawn.
    #[must_use]
    pub fn new(keys: BTreeMap<KeyId, KeyState>, next_ticket: u64) -> Self {
        Ledger { keys, effects: Vec::new(), next_ticket }
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

    /// The next ticket to be drawn; to be stored when the transaction ends.
    #[must_use]
    pub fn next_ticket(&self) -> u64 {
        self.next_ticket
    }

    /// What must be written, in order, since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Keys whose loaded line was used up although a further waiter might start: load more and call
    /// [`Ledger::hand_on`] again, in the same transaction.
    #[must_use]
    pub fn keys_to_reload(&self) -> Vec<KeyId> {
        let idle = |state: &&KeyState| state.more_waiters && state.line.iter().all(|waiter| !waiter.claimable);
        self.keys.iter().filter(|(_, state)| idle(state)).map(|(key, _)| *key).collect()
    }

    /// B2. All keys or none, in their global order (C4); what cannot start is parked on the first key that
    /// refused it or, before its first start, skipped.
    pub fn claim(&mut self, candidate: &Candidate) -> Verdict {
        debug_assert!(candidate.wants.is_sorted_by(|a, b| a.key < b.key), "C4: keys in ascending order, each once");
        if candidate.reserved {
            for want in &candidate.wants {
                for slot in self.state(want.key).slots.iter_mut().filter(|slot| slot.job == candidate.job) {
                    slot.reserved = false;
                }
            }
            return Verdict::Start;
        }
        for want in &candidate.wants {
            let state = self.state(want.key);
            let refused = state.turn(candidate.ticket).and_then(|()| state.capacity(state.admin_limit, want.limit, want.weight, 0));
            if let Err(refusal) = refused {
                return self.refuse(candidate, want, refusal);
            }
        }
        for want in &candidate.wants {
            let state = self.keys.entry(want.key).or_default();
            state.take(want.key, candidate.job, want.limit, want.weight, false, &mut self.effects);
        }
        let keys: Vec<_> = candidate.wants.iter().map(|want| want.key).collect();
        self.unblock(candidate.job, &keys);
        Verdict::Start
    }

    fn refuse(&mut self, candidate: &Candidate, want: &Want, refusal: Refusal) -> Verdict {
        if candidate.mode == Mode::Skip && !candidate.has_started {
            // Only a full key at the *stamped* limit proves that the work is surplus. What an operator's lower
            // limit, somebody's place in line or a retry delay refuses, waits.
            let state = self.state(want.key);
            let by_stamp = state.capacity(None, want.limit, want.weight, 0);
            if let (Refusal::Full { .. }, Err(Refusal::Full { limit, holder })) = (&refusal, by_stamp) {
                self.pass_on(candidate, None);
                return Verdict::Skip { key: want.key, limit, holder };
            }
        }
        let ticket = candidate.ticket.unwrap_or_else(|| self.draw_ticket());
        let waiter = Waiter {
            job: candidate.job,
            ticket,
            limit: want.limit,
            weight: want.weight,
            several_keys: candidate.wants.len() > 1,
            claimable: true,
        };
        let state = self.state(want.key);
        let place = state.line.partition_point(|other| other.ticket < ticket);
        // Beyond the loaded part of the line the driver's next load finds it by its row.
        if !(state.more_waiters && place == state.line.len()) {
            state.line.insert(place, waiter);
        }
        self.pass_on(candidate, Some(want.key));
        Verdict::Park { key: want.key, ticket, refusal }
    }

    /// W4: a job that was woken for one key and did not take it hands that key on.
    fn pass_on(&mut self, candidate: &Candidate, except: Option<KeyId>) {
        for want in &candidate.wants {
            if Some(want.key) != except {
                self.hand_on(want.key);
            }
        }
    }

    /// B3, B5, C5: a job leaves its slots, its reservation or its place in line (settled, requeued, deleted,
    /// rescued, moved), and each of its keys is handed on. `keys` are all keys it has ever rendered.
    pub fn release(&mut self, job: JobHandle, keys: &[KeyId]) {
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
        for key in keys {
            self.hand_on(*key);
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

    /// The job has started or ended and keeps no key any more; each is handed on.
    pub fn unblock(&mut self, job: JobHandle, keys: &[KeyId]) {
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
        self.hand_on(key);
    }

    /// B7: a reservation that nobody claimed goes back into the line, at its end unless its order is kept, and
    /// the slot on to the next one. Returns its ticket.
    pub fn unreserve(&mut self, key: KeyId, waiter: Waiter, order: Order) -> u64 {
        let job = waiter.job;
        self.state(key).slots.retain(|slot| slot.job != job);
        self.effects.push(Effect::Free { job });
        let ticket = match order {
            Order::Fifo => waiter.ticket,
            Order::Any => self.draw_ticket(),
        };
        let state = self.state(key);
        let place = state.line.partition_point(|other| other.ticket < ticket);
        if !(state.more_waiters && place == state.line.len()) {
            state.line.insert(place, Waiter { ticket, ..waiter });
        }
        self.hand_on(key);
        ticket
    }

    /// B4: while the oldest claimable waiter could start, it is given its slots, oldest first. One that needs
    /// further keys is only woken and counted as one against this round, because taking its other keys here
    /// would lock key rows out of order (W1).
    pub fn hand_on(&mut self, key: KeyId) {
        let mut promised = 0u32;
        let Ledger { keys, effects, .. } = self;
        let state = keys.entry(key).or_default();
        while let Some(at) = state.line.iter().position(|waiter| waiter.claimable) {
            let next = &state.line[at];
            let blocked = state.blockers.iter().any(|&(blocker, _)| blocker < next.ticket);
            if blocked || state.capacity(state.admin_limit, next.limit, next.weight, promised).is_err() {
                return;
            }
            let next = state.line.remove(at);
            if next.several_keys {
                promised = promised.saturating_add(next.weight);
                effects.push(Effect::Wake { job: next.job });
            } else {
                state.take(key, next.job, next.limit, next.weight, true, effects);
                effects.push(Effect::Reserve { job: next.job });
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

/// Whether a retry keeps its place: only first in, first out with [`OnRetry::Block`].
#[must_use]
pub fn keeps_ticket_on_retry(order: Order, on_retry: OnRetry) -> bool {
    order == Order::Fifo && on_retry == OnRetry::Block
}
