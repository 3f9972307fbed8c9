//! An account of its own of who runs, waits and holds, kept from the journal, and the promises checked against it.
//!
//! What must stay true: nothing here calls the ledger. Limits, turns and proofs are computed from first principles
//! out of the stamps, so that an error of the ledger is not repeated here. After every command the rows are compared
//! with this account: slots, tokens, lines and blocks agree exactly, or somebody leaked, doubled or lost one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warp_domain::policy::{Concurrency, Mode, OnRetry, Order, Stamp};
use warp_domain::{ClaimToken, HostId, JobHandle, KeyId};

use crate::model::{Event, Model, Place, Row};

/// A broken promise, in words.
pub type Broken = String;

/// Where a job stands by this account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    /// Scheduled or ready.
    Idle,
    /// Ready, because this key had room.
    Woken(KeyId),
    /// In this key's line.
    Parked(KeyId),
    /// Slots taken, no token.
    Reserved,
    /// A run that holds a slot of each of its keys.
    Running(ClaimToken),
    /// A run of its host without one: a local waiter, or one whose slot has passed on (B8).
    Slotless(ClaimToken),
    /// Completed, Failed or Deleted.
    Over,
}

impl Stand {
    /// The token of a run.
    #[must_use]
    pub fn token(self) -> Option<ClaimToken> {
        match self {
            Stand::Running(token) | Stand::Slotless(token) => Some(token),
            _ => None,
        }
    }
}

#[derive(Debug, Clone)]
struct Account {
    stand: Stand,
    ticket: Option<u64>,
    /// Keeps its keys through a delay.
    blocks: bool,
    /// Has been started or parked before.
    seen: bool,
    stamp: Option<Arc<Stamp>>,
    /// Who runs or ran it last.
    host: Option<HostId>,
}

/// The account.
#[derive(Debug, Clone, Default)]
pub struct Oracle {
    jobs: BTreeMap<JobHandle, Account>,
    limits: BTreeMap<KeyId, u32>,
    /// Keys that an operator has ever limited: their holders may be more than any stamp allows.
    limited: BTreeSet<KeyId>,
    /// The largest token that ever held the key.
    fences: BTreeMap<KeyId, ClaimToken>,
    /// Starts seen.
    pub starts: u64,
    /// Jobs parked.
    pub parks: u64,
    /// Jobs skipped.
    pub skips: u64,
    /// Slots handed on.
    pub hand_ons: u64,
    /// Jobs that waited inside a host.
    pub waits: u64,
    /// Slots that passed on inside a host.
    pub passes: u64,
}

/// A job's rules, read from its row's stamp.
#[derive(Clone, Copy)]
struct Rules<'a> {
    keys: &'a [KeyId],
    family: &'a Concurrency,
}

fn rules(row: &Row) -> Option<Rules<'_>> {
    Some(Rules { keys: row.keys.as_deref()?, family: row.concurrency()? })
}

impl Oracle {
    /// Where a job stands.
    #[must_use]
    pub fn stand(&self, job: JobHandle) -> Option<Stand> {
        self.jobs.get(&job).map(|account| account.stand)
    }

    /// Takes the journal of one command into account, then compares the rows.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn follow(&mut self, model: &mut Model) -> Result<(), Broken> {
        let mut woken = BTreeMap::new();
        for event in std::mem::take(&mut model.journal) {
            self.event(model, &event, &mut woken).map_err(|broken| format!("{broken} [{event:?}]"))?;
        }
        self.compare(model)
    }

    fn account(&mut self, job: JobHandle) -> &mut Account {
        self.jobs.entry(job).or_insert(Account { stand: Stand::Idle, ticket: None, blocks: false, seen: false, stamp: None, host: None })
    }

    fn limit(&self, key: KeyId, stamped: u32) -> u32 {
        self.limits.get(&key).copied().unwrap_or(stamped.max(1))
    }

    /// Slots of a key held by runs and, if asked, by reservations, without those of `job`; and whether one of the
    /// holders must be alone.
    fn held(&self, model: &Model, key: KeyId, job: JobHandle, with_reserved: bool) -> (u32, bool) {
        let mut sum = 0;
        let mut exclusive = false;
        for (other, account) in &self.jobs {
            let holds = matches!(account.stand, Stand::Running(_)) || with_reserved && account.stand == Stand::Reserved;
            if !holds || *other == job {
                continue;
            }
            let Some(rules) = model.rows.get(other).and_then(rules).filter(|rules| rules.keys.contains(&key)) else { continue };
            sum += rules.family.weight;
            exclusive |= self.limit(key, rules.family.limit) == 1;
        }
        (sum, exclusive)
    }

    fn fits(
        &self,
        model: &Model,
        key: KeyId,
        job: JobHandle,
        family: &Concurrency,
        with_reserved: bool,
        promised: u32,
    ) -> Result<(), Broken> {
        let (held, exclusive) = self.held(model, key, job, with_reserved);
        let limit = self.limit(key, family.limit);
        if promised.saturating_add(held + family.weight) > limit {
            return Err(format!(
                "{job:?} of weight {} beside {held} held and {promised} promised at limit {limit} of {key:?}",
                family.weight
            ));
        }
        if exclusive {
            return Err(format!("{job:?} beside a holder at limit 1 of {key:?}"));
        }
        Ok(())
    }

    /// Nobody older who counts stands in this line, and nobody older keeps the key through a delay.
    fn overtakes(&self, model: &Model, key: KeyId, job: JobHandle) -> Result<(), Broken> {
        let mine = self.jobs.get(&job).and_then(|account| account.ticket).unwrap_or(u64::MAX);
        for (other, account) in self.jobs.iter().filter(|(other, _)| **other != job) {
            let (Some(ticket), Some(row)) = (account.ticket, model.rows.get(other)) else { continue };
            let Some(rules) = rules(row).filter(|rules| rules.keys.contains(&key)) else { continue };
            if ticket >= mine {
                continue;
            }
            let limit = self.limit(key, rules.family.limit);
            let can_ever = limit == 0 || rules.family.weight <= limit;
            if account.stand == Stand::Parked(key) && can_ever && model.is_claimable(&row.job) {
                return Err(format!("{job:?} (ticket {mine}) overtakes {other:?} (ticket {ticket}) on {key:?}"));
            }
            if account.blocks {
                return Err(format!("{job:?} (ticket {mine}) passes {other:?} (ticket {ticket}) in its retry delay on {key:?}"));
            }
        }
        Ok(())
    }

    fn event(&mut self, model: &Model, event: &Event, woken: &mut BTreeMap<JobHandle, (KeyId, u32)>) -> Result<(), Broken> {
        match *event {
            Event::Started { job, token } => {
                woken.remove(&job);
                self.starts += 1;
                let before = self.account(job).stand;
                if !matches!(before, Stand::Idle | Stand::Woken(_) | Stand::Reserved) {
                    return Err(format!("{job:?} started while {before:?}"));
                }
                let Some(row) = model.rows.get(&job) else { return Err(format!("{job:?} started without a row")) };
                let host_paused = row.host.and_then(|host| model.hosts.get(&host)).is_some_and(|host| host.paused.is_some());
                if host_paused || model.paused_queues.contains_key(&row.job.queue) {
                    return Err(format!("{job:?} started although its queue or its host is paused"));
                }
                if let Some(rules) = rules(row) {
                    let reserved = before == Stand::Reserved;
                    for &key in rules.keys {
                        self.fits(model, key, job, rules.family, !reserved, 0)?;
                        if !reserved {
                            self.overtakes(model, key, job)?;
                        }
                        let fence = self.fences.insert(key, token);
                        if fence.is_some_and(|fence| fence >= token) {
                            return Err(format!("fencing token {token:?} of {key:?} does not grow: {fence:?} was there"));
                        }
                    }
                }
                let account = self.account(job);
                account.stand = Stand::Running(token);
                account.seen = true;
                account.blocks = false;
                account.host = row.host;
            }
            Event::Waits { job, token, key } => {
                self.waits += 1;
                self.waits_inside(model, job, key)?;
                let account = self.account(job);
                account.stand = Stand::Slotless(token);
                account.seen = true;
                account.host = model.rows.get(&job).and_then(|row| row.host);
            }
            Event::Passed { key, from, to } => {
                self.passes += 1;
                self.passed(model, key, from, to)?;
            }
            Event::Parked { job, key, ticket } => {
                woken.remove(&job);
                self.parks += 1;
                let account = self.account(job);
                if !matches!(account.stand, Stand::Idle | Stand::Woken(_)) {
                    return Err(format!("{job:?} parked while {:?}", account.stand));
                }
                if account.ticket.is_some_and(|old| old != ticket) {
                    return Err(format!("{job:?} lost its place in line: {:?} became {ticket}", account.ticket));
                }
                (account.stand, account.ticket, account.seen, account.blocks) = (Stand::Parked(key), Some(ticket), true, false);
            }
            Event::Reserved(job) | Event::Woken(job) => {
                self.hand_ons += 1;
                let Stand::Parked(key) = self.account(job).stand else {
                    return Err(format!("{job:?} was handed a key while {:?}", self.account(job).stand));
                };
                let row = model.rows.get(&job).ok_or("a job without a row was handed a key")?;
                let rules = rules(row).ok_or("a job without keys was handed one")?;
                if !model.is_claimable(&row.job) {
                    return Err(format!("{job:?} was handed {key:?}, and no host could claim it"));
                }
                let promised = woken.values().filter(|(other, _)| *other == key).map(|(_, weight)| weight).sum();
                self.fits(model, key, job, rules.family, true, promised)?;
                self.overtakes(model, key, job)?;
                if matches!(event, Event::Reserved(_)) {
                    if rules.keys.len() > 1 {
                        return Err(format!("{job:?} was given one slot, and it needs {:?}", rules.keys));
                    }
                    self.account(job).stand = Stand::Reserved;
                } else {
                    woken.insert(job, (key, rules.family.weight));
                    self.account(job).stand = Stand::Woken(key);
                }
            }
            Event::Freed(job) => {
                let account = self.account(job);
                match account.stand {
                    Stand::Running(_) => return Err(format!("the slots of {job:?} were freed under its run")),
                    Stand::Reserved => account.stand = Stand::Idle,
                    _ => {}
                }
            }
            Event::Skipped { job, key, holder } => self.skipped(model, job, key, holder)?,
            Event::Left { job, place, keeps_its_place: _, loses_its_ticket } => {
                woken.remove(&job);
                let blocks = model.rows.get(&job).and_then(rules).is_some_and(|rules| {
                    rules.family.order == Order::Fifo && rules.family.on_retry == OnRetry::Block && !rules.keys.is_empty()
                });
                let account = self.account(job);
                if account.stand == Stand::Over {
                    return Err(format!("{job:?} left, and it was over"));
                }
                account.blocks = blocks && matches!(account.stand, Stand::Running(_)) && !place.state().is_final();
                account.stand = if place.state().is_final() { Stand::Over } else { Stand::Idle };
                if loses_its_ticket {
                    account.ticket = None;
                }
            }
            Event::Requeued(job) => {
                let account = self.account(job);
                if account.stand == Stand::Over {
                    account.stand = Stand::Idle;
                }
            }
            Event::Removed(job) => {
                self.jobs.remove(&job);
            }
            Event::Committed => woken.clear(),
            Event::Limit(key, limit) => {
                self.limited.insert(key);
                match limit {
                    Some(limit) => self.limits.insert(key, limit),
                    None => self.limits.remove(&key),
                };
            }
        }
        Ok(())
    }

    /// B8. Whoever waits inside a host is the next in line anyway, and its host holds what will come to it.
    fn waits_inside(&mut self, model: &Model, job: JobHandle, key: KeyId) -> Result<(), Broken> {
        let before = self.account(job).stand;
        let seen = self.account(job).seen;
        let row = model.rows.get(&job).ok_or("a job without a row waits inside a host")?;
        let rules = rules(row).filter(|rules| rules.keys == [key]).ok_or("a job that has not this key alone waits inside a host")?;
        if !(before == Stand::Idle || before == Stand::Parked(key)) {
            return Err(format!("{job:?} was taken to wait inside a host while {before:?}"));
        }
        if rules.family.weight != 1 || rules.family.order != Order::Any || rules.family.mode == Mode::Skip && !seen {
            return Err(format!("{job:?} waits inside a host, and by its policy it must not"));
        }
        let host_paused = row.host.and_then(|host| model.hosts.get(&host)).is_some_and(|host| host.paused.is_some());
        if host_paused || model.paused_queues.contains_key(&row.job.queue) {
            return Err(format!("{job:?} waits inside a host although its queue or its host is paused"));
        }
        let wants = |other: &JobHandle| model.rows.get(other).and_then(self::rules).is_some_and(|rules| rules.keys.contains(&key));
        let blocked = self.jobs.iter().any(|(other, account)| account.blocks && wants(other));
        if self.limits.contains_key(&key) || blocked {
            return Err(format!("{job:?} waits inside a host for {key:?}, which an operator or a retry delay restricts"));
        }
        if self.fits(model, key, job, rules.family, true, self.promised(model, key)).is_ok() {
            return Err(format!("{job:?} waits inside a host for {key:?}, which has room"));
        }
        self.overtakes(model, key, job)?;
        let others = self.jobs.iter().filter(|(other, _)| **other != job).filter_map(|(other, account)| {
            let rules = model.rows.get(other).and_then(self::rules)?;
            (matches!(account.stand, Stand::Running(_)) && rules.keys.contains(&key)).then_some(account.host)
        });
        if !others.into_iter().any(|host| host == row.host) {
            return Err(format!("{job:?} waits inside a host that holds no slot of {key:?}"));
        }
        Ok(())
    }

    /// B8. The number of holders and the limits that they are held to stay what they were.
    fn passed(&mut self, model: &Model, key: KeyId, from: JobHandle, to: JobHandle) -> Result<(), Broken> {
        let (Stand::Running(old), Stand::Slotless(token)) = (self.account(from).stand, self.account(to).stand) else {
            return Err(format!("a slot passed from {from:?} to {to:?}, which are {:?} and {:?}", self.stand(from), self.stand(to)));
        };
        let (here, there) = (self.account(from).host, self.account(to).host);
        let keyed = |job| model.rows.get(&job).and_then(rules);
        let (Some(giver), Some(taker)) = (keyed(from), keyed(to)) else {
            return Err(format!("a slot passed from {from:?} to {to:?}, which have not both keys"));
        };
        if here != there || giver.keys != [key] || taker.keys != [key] || giver.family.weight != 1 {
            return Err(format!("a slot of {key:?} passed from {from:?} to {to:?}, which do not both run on one host for that key alone"));
        }
        if giver.family.limit != taker.family.limit {
            return Err(format!("a slot passed from {from:?} at limit {} to {to:?} at {}", giver.family.limit, taker.family.limit));
        }
        // Beside others who may hold the key they need not grow: of a mutex they do.
        let fence = self.fences.entry(key).or_insert(token);
        if taker.family.limit <= 1 && !self.limited.contains(&key) && (*fence > token || old > token) {
            return Err(format!("fencing token {token:?} of {key:?} does not grow: {fence:?} was there"));
        }
        *fence = token.max(*fence);
        self.account(from).stand = Stand::Slotless(old);
        self.account(to).stand = Stand::Running(token);
        Ok(())
    }

    /// Attempts that are being executed now, by hosts whose claims are good, with the registration: on a host never more
    /// than slots name its runs, and over all hosts no more than their stamps allow.
    ///
    /// # Errors
    /// The key and who runs beside whom.
    pub fn executing(&self, model: &Model, runs: &[(HostId, JobHandle)]) -> Result<(), Broken> {
        let mut by_key: BTreeMap<KeyId, Vec<(HostId, JobHandle, &Concurrency)>> = BTreeMap::new();
        for &(host, job) in runs {
            let Some(rules) = model.rows.get(&job).and_then(rules) else { continue };
            for key in rules.keys {
                by_key.entry(*key).or_default().push((host, job, rules.family));
            }
        }
        for (key, runs) in by_key {
            for &(host, ..) in &runs {
                let here: u32 = runs.iter().filter(|(of, ..)| *of == host).map(|(.., family)| family.weight).sum();
                let named = |job| model.rows.get(&job).is_some_and(|row| row.place == Place::Running && row.host == Some(host));
                let slots = model.slots.iter().filter(|((of, _), slot)| *of == key && named(slot.job)).count();
                if here as usize > slots {
                    return Err(format!("{host:?} executes {here} of {key:?}, and holds {slots} slots: {runs:?}"));
                }
            }
            if self.limited.contains(&key) {
                continue;
            }
            for (_, job, family) in &runs {
                let limit = family.limit.max(1);
                let bound = runs.iter().filter(|(.., other)| other.limit.max(1) <= limit);
                let beside: u32 = if limit == 1 {
                    runs.iter().map(|(.., other)| other.weight).sum()
                } else {
                    bound.map(|(.., other)| other.weight).sum()
                };
                if beside > limit {
                    return Err(format!("{job:?} is executed at limit {limit} of {key:?}, and {runs:?} are"));
                }
            }
        }
        Ok(())
    }

    /// Work is dropped before its first start only, and somebody who holds the key at the stamped limit is the proof.
    fn skipped(&mut self, model: &Model, job: JobHandle, key: KeyId, holder: JobHandle) -> Result<(), Broken> {
        self.skips += 1;
        let rules = model.rows.get(&job).and_then(rules).ok_or("a job without keys was skipped")?;
        if rules.family.mode != Mode::Skip || self.account(job).seen {
            return Err(format!("{job:?} was skipped, and it waits by its policy or has been started or parked before"));
        }
        let holds = matches!(self.stand(holder), Some(Stand::Running(_) | Stand::Reserved));
        if !holds || !model.rows.get(&holder).and_then(self::rules).is_some_and(|rules| rules.keys.contains(&key)) {
            return Err(format!("{job:?} was skipped for {holder:?}, which does not hold {key:?}"));
        }
        let stamped = rules.family.limit.max(1);
        let (held, _) = self.held(model, key, job, true);
        let alone = self.jobs.iter().any(|(other, account)| {
            matches!(account.stand, Stand::Running(_) | Stand::Reserved)
                && model.rows.get(other).and_then(self::rules).is_some_and(|other| other.keys.contains(&key) && other.family.limit <= 1)
        });
        if held + rules.family.weight <= stamped && !alone {
            return Err(format!("{job:?} was skipped beside {held} held at its own limit {stamped} of {key:?}"));
        }
        // An operator may requeue it: then it waits.
        self.account(job).seen = true;
        Ok(())
    }

    fn compare(&mut self, model: &Model) -> Result<(), Broken> {
        let mut slots: BTreeMap<(KeyId, JobHandle), (u32, Option<ClaimToken>)> = BTreeMap::new();
        let mut blocks = BTreeMap::new();
        for (&job, row) in &model.rows {
            let keyed = rules(row);
            let account = self.account(job);
            if account.stamp.is_some() && account.stamp != row.stamp {
                return Err(format!("the stamp of {job:?} was rewritten"));
            }
            account.stamp.clone_from(&row.stamp);
            if matches!(account.stand, Stand::Running(_)) && keyed.is_some_and(|rules| rules.family.order == Order::Fifo) {
                if row.ticket.is_none() {
                    return Err(format!("{job:?} is first in, first out, and runs without a place in line"));
                }
                account.ticket = row.ticket;
            }
            let agrees = match account.stand {
                Stand::Idle => matches!(row.place, Place::Scheduled | Place::Ready),
                Stand::Woken(key) => row.place == Place::Ready && row.parked_on == Some(key),
                Stand::Parked(key) => row.place == Place::Parked && row.parked_on == Some(key) && row.ticket == account.ticket,
                Stand::Reserved => row.place == Place::Reserved,
                Stand::Running(token) | Stand::Slotless(token) => row.place == Place::Running && row.token == Some(token),
                Stand::Over => row.place.state().is_final(),
            };
            if !agrees {
                return Err(format!("{job:?} is {:?} by what was decided and {:?} by its row", account.stand, row.place));
            }
            let token = match account.stand {
                Stand::Running(token) => Some(Some(token)),
                Stand::Reserved => Some(None),
                _ => None,
            };
            let Some(rules) = keyed else { continue };
            for &key in rules.keys {
                if let Some(token) = token {
                    slots.insert((key, job), (rules.family.weight, token));
                }
                if let (true, Some(ticket)) = (account.blocks, account.ticket) {
                    blocks.insert((key, job), ticket);
                }
            }
        }
        self.jobs.retain(|job, _| model.rows.contains_key(job));
        let mut there: BTreeMap<(KeyId, JobHandle), (u32, Option<ClaimToken>)> = BTreeMap::new();
        for ((key, number), slot) in &model.slots {
            let entry = there.entry((*key, slot.job)).or_insert((0, slot.token));
            entry.0 += 1;
            if entry.1 != slot.token {
                return Err(format!("slot {number} of {key:?} has another token than the others of {:?}", slot.job));
            }
        }
        if there != slots {
            return Err(format!("slot rows are {there:?}, and what runs or is reserved takes {slots:?}"));
        }
        if model.blockers != blocks {
            return Err(format!("blocks are {:?}, and those in a delay keep {blocks:?}", model.blockers));
        }
        self.quiet(model)
    }

    /// Progress: the oldest waiter of each key that counts could not start now. Jobs that were woken for the key and
    /// have not tried it yet count as taking it: they take it or hand it on.
    fn quiet(&self, model: &Model) -> Result<(), Broken> {
        let lines: BTreeSet<KeyId> =
            self.jobs.values().filter_map(|account| if let Stand::Parked(key) = account.stand { Some(key) } else { None }).collect();
        for key in lines {
            let mut line: Vec<_> = self
                .jobs
                .iter()
                .filter(|(_, account)| account.stand == Stand::Parked(key))
                .filter_map(|(job, account)| Some((account.ticket?, *job, model.rows.get(job).and_then(rules)?, &model.rows.get(job)?.job)))
                .filter(|(_, _, rules, row)| model.is_claimable(row) && rules.family.weight <= self.limit(key, rules.family.limit))
                .collect();
            line.sort_by_key(|(ticket, ..)| *ticket);
            let Some((_, job, rules, _)) = line.first() else { continue };
            let promised = self.promised(model, key);
            if self.fits(model, key, *job, rules.family, true, promised).is_ok() && self.overtakes(model, key, *job).is_ok() {
                return Err(format!("{job:?} stands at the head of the line of {key:?}, which has room"));
            }
        }
        Ok(())
    }

    /// What jobs that were woken for the key and have not tried it yet will take.
    fn promised(&self, model: &Model, key: KeyId) -> u32 {
        let woken = self.jobs.iter().filter(|(_, account)| account.stand == Stand::Woken(key));
        let takes = woken.filter_map(|(job, _)| {
            let rules = model.rows.get(job).and_then(rules)?;
            Some(if self.limit(key, rules.family.limit) <= 1 { u32::MAX } else { rules.family.weight })
        });
        takes.fold(0, u32::saturating_add)
    }

    /// After everything has ended: nothing is held, kept or waited for.
    ///
    /// # Errors
    /// What is left.
    pub fn finished(&self, model: &Model) -> Result<(), Broken> {
        let open: Vec<_> = model.rows.iter().filter(|(_, row)| !row.place.state().is_final()).map(|(job, row)| (*job, row.place)).collect();
        if !open.is_empty() {
            return Err(format!("lost: without faults, and with every contract served and no admin limit, {open:?} never end"));
        }
        if !model.slots.is_empty() || !model.blockers.is_empty() || !model.cancels.is_empty() {
            return Err(format!("left over: {:?} {:?} {:?}", model.slots, model.blockers, model.cancels));
        }
        Ok(())
    }
}
