//! The rows of a job store and the commands on them, in memory.
//!
//! One command is one transaction: it loads the keys it touches from the rows into a [`Ledger`], decides there, and
//! writes verdicts and effects back. States, verdicts, who is claimed, parked or skipped, tickets, holders and
//! counters are meant to be exact; logs, listings and texts for people are as simple as they can be.
//!
//! What must stay true: the commands never look at the ledger's state to learn what a row is; rows are the truth and
//! a view is loaded from them. Every decision goes into the [`Model::journal`], which is how the oracle follows
//! without believing the rows.
//!
//! What it deliberately does not do: read a clock, lock, wait, or survive anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason, State};
use warp_domain::ledger::{Candidate, Effect, KeyState, Ledger, Slot, Verdict, Waiter, Want, keeps_ticket_on_retry};
use warp_domain::policy::{Concurrency, Order, Stamp};
use warp_domain::resolve::{Declarations, resolve};
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::codec::{JsonPayload, check_new_job};
use warp_store::{
    AuditRow, CancelSignal, ClaimParams, Claimed, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HandOff, HostInfo, Lane,
    Local, LogLine, NewJob, Pass, Pause, Rescued, RunOutput, Served, Settle, SettleVerdict, StateChange, StateVerdict, StateWrite,
    StoreError, StoreErrorKind,
};

/// Where a row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Due later.
    Scheduled,
    /// What the claim scans. With [`Row::parked_on`]: woken for that key.
    Ready,
    /// Waiting for the key in [`Row::parked_on`].
    Parked,
    /// Its slots are taken, its token is not drawn yet.
    Reserved,
    /// Claimed.
    Running,
    /// Ended well.
    Completed,
    /// Ended badly.
    Failed,
    /// Ended unwanted.
    Deleted,
}

impl Place {
    /// The state that people see.
    #[must_use]
    pub fn state(self) -> State {
        match self {
            Place::Scheduled => State::Scheduled,
            Place::Ready | Place::Parked | Place::Reserved => State::Enqueued,
            Place::Running => State::Processing,
            Place::Completed => State::Completed,
            Place::Failed => State::Failed,
            Place::Deleted => State::Deleted,
        }
    }
}

/// A job.
#[derive(Debug, Clone)]
pub struct Row {
    /// What was enqueued.
    pub job: Arc<NewJob>,
    /// When.
    pub created_at: UnixMillis,
    /// Where it stands.
    pub place: Place,
    /// When it may run.
    pub due: UnixMillis,
    /// Starts so far.
    pub runs: u32,
    /// Charged attempts so far; a running one counts.
    pub attempts: u32,
    /// Ends by host death.
    pub deaths: u32,
    /// The policy; written once.
    pub stamp: Option<Arc<Stamp>>,
    /// Its keys in ascending order, once rendered.
    pub keys: Option<Vec<KeyId>>,
    /// Its place in line.
    pub ticket: Option<u64>,
    /// The key it is parked on or was woken for.
    pub parked_on: Option<KeyId>,
    /// Why it is parked, in words.
    pub refusal: String,
    /// The run's token.
    pub token: Option<ClaimToken>,
    /// The last token that ended a run here.
    pub settled_by: Option<ClaimToken>,
    /// Who runs it.
    pub host: Option<HostId>,
    /// The plugin version of the last run.
    pub digest: Option<Digest>,
    /// When its place last changed.
    pub changed_at: UnixMillis,
    /// The result of a Completed job.
    pub result: Option<String>,
    /// The last failure.
    pub error: Option<String>,
    /// What happened to it.
    pub audit: Vec<AuditRow>,
    /// What its runs printed.
    pub logs: Vec<(u32, LogLine)>,
    /// The last report of each name.
    pub progress: BTreeMap<String, f32>,
    /// Lines and bytes that caps kept out.
    pub dropped: (u64, u64),
}

impl Row {
    /// The stamped concurrency family.
    #[must_use]
    pub fn concurrency(&self) -> Option<&Concurrency> {
        Some(&self.stamp.as_ref()?.concurrency.as_ref()?.value)
    }

    fn order(&self) -> Order {
        self.concurrency().map_or(Order::Any, |rules| rules.order)
    }

    fn keeps_its_place(&self) -> bool {
        self.concurrency().is_some_and(|rules| keeps_ticket_on_retry(rules.order, rules.on_retry))
    }

    /// Nothing says any more that it was claimed.
    fn unclaim(&mut self) {
        self.runs = self.runs.saturating_sub(1);
        self.attempts = self.attempts.saturating_sub(1);
        if let Some(at) = self.audit.iter().rposition(|row| row.event == "Processing") {
            self.audit.remove(at);
        }
        let of_it = self.runs.saturating_add(1);
        self.audit.iter_mut().filter(|row| row.run == of_it).for_each(|row| row.run = 0);
    }

    fn held_keys(&self) -> Vec<KeyId> {
        self.keys.clone().unwrap_or_default()
    }
}

/// A key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyRow {
    /// Its text.
    pub text: String,
    /// The operator's limit: value, who, when.
    pub admin: Option<(u32, String, UnixMillis)>,
}

/// A slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotRow {
    /// Who holds it.
    pub job: JobHandle,
    /// The limit stamped on the holder.
    pub limit: u32,
    /// The run's token; none while it is reserved.
    pub token: Option<ClaimToken>,
    /// Since when.
    pub since: UnixMillis,
}

/// A registration.
#[derive(Debug, Clone)]
pub struct HostRow {
    /// What it said.
    pub info: HostInfo,
    /// Grows with every renewal.
    pub renewals: i64,
    /// When it last renewed.
    pub renewed_at: UnixMillis,
    /// What it can run.
    pub served: Vec<Served>,
    /// Whether somebody has paused it.
    pub paused: Option<Pause>,
}

/// What a renewal compared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compared {
    /// Rows that the host did not know.
    pub handed_back: u32,
    /// Runs that are not the host's.
    pub lost: Vec<(JobHandle, ClaimToken)>,
}

/// Which lanes some host can claim from: who counts in a line (B7).
struct Claimable {
    contracts: BTreeSet<String>,
    paused: BTreeSet<String>,
}

impl Claimable {
    fn allows(&self, job: &NewJob) -> bool {
        self.contracts.contains(&job.contract) && !self.paused.contains(&job.queue)
    }
}

/// What a command decided, in the order in which it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A claim gave it a token.
    Started {
        /// The job.
        job: JobHandle,
        /// Its token.
        token: ClaimToken,
    },
    /// A claim gave it a token and no slot: it waits inside its host (B8).
    Waits {
        /// The job.
        job: JobHandle,
        /// Its token.
        token: ClaimToken,
        /// The key.
        key: KeyId,
    },
    /// A slot passed on inside a host (B8).
    Passed {
        /// The key.
        key: KeyId,
        /// Whose it was.
        from: JobHandle,
        /// Whose it is.
        to: JobHandle,
    },
    /// It stands in line.
    Parked {
        /// The job.
        job: JobHandle,
        /// The key.
        key: KeyId,
        /// Its place.
        ticket: u64,
    },
    /// Its slots are taken for it.
    Reserved(JobHandle),
    /// It may try again.
    Woken(JobHandle),
    /// A reservation was void, expired, or its slots were freed by the end of its run.
    Freed(JobHandle),
    /// Deleted because a key was full.
    Skipped {
        /// The job.
        job: JobHandle,
        /// The key.
        key: KeyId,
        /// The proof.
        holder: JobHandle,
    },
    /// A run ended, or a waiting job was moved: where it stands now, and whether it kept its place in line.
    Left {
        /// The job.
        job: JobHandle,
        /// Where it stands.
        place: Place,
        /// Whether its ticket and its keys are kept until it runs again.
        keeps_its_place: bool,
        /// Whether its ticket was given up.
        loses_its_ticket: bool,
    },
    /// An operator made it Enqueued again.
    Requeued(JobHandle),
    /// The row is gone.
    Removed(JobHandle),
    /// An operator's limit.
    Limit(KeyId, Option<u32>),
    /// A transaction ended; a command that had to split its batch has several.
    Committed,
}

/// Which rule a test has broken. The rules of the ledger are broken inside it, those of a driver in this file, those
/// of a host in [`crate::sim`].
#[cfg(feature = "mutations")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mutation {
    /// One rule of the ledger, everywhere.
    Ledger(warp_domain::ledger::Rule),
    /// B3: a settle does not hand on.
    SettleWithoutHandOn,
    /// B5: a rescue does not hand on.
    RescueWithoutHandOn,
    /// C5: a delete or cancel does not hand on.
    DeleteWithoutHandOn,
    /// C1: a settle matches the job alone.
    SettleIgnoresToken,
    /// C1, W3: a late settle frees the slots by job id.
    LateSettleFrees,
    /// C1: a claim does not check that its host is registered.
    ClaimIgnoresLease,
    /// C2, B1: a claim decides on the view of an earlier transaction.
    StaleView,
    /// C3: a host drops its runs and renews, and gives nothing back.
    DropsAndRenews,
    /// C3: a host that lost its registration goes on under a new one without stopping.
    GoesOnAfterLoss,
    /// B3: a settle leaves the slots to a later transaction.
    SettleKeepsSlots,
    /// B5, W8: a rescue frees slots in one transaction and rows in the next.
    RescueSlotsFirst,
    /// B5: a rescue returns rows in one transaction and frees slots in the next.
    RescueRowsFirst,
    /// B7: nobody takes unclaimed reservations back.
    NoExpiry,
    /// B7: an operator's deploy that makes waiters claimable does not hand on.
    ServeWithoutHandOn,
    /// C5, B7: a pause or its end does not hand on.
    PauseWithoutHandOn,
    /// A claim takes jobs of a paused queue.
    ClaimIgnoresPause,
    /// The stamp is resolved at every claim.
    StampAgain,
    /// The fencing token is drawn before the grant.
    TokenBeforeGrant,
    /// A batch with a poison row is dropped as a whole.
    PoisonTakesTheBatch,
    /// A repeated settle is applied again as if it were new.
    RepeatAppliesAgain,
    /// A job that is deleted in its retry delay leaves its block behind.
    DeleteKeepsBlock,
    /// A retry that should keep the key does not block it.
    RetryDoesNotBlock,
    /// A fifo start does not write its ticket.
    StartForgetsTicket,
    /// A line that was loaded in part and used up is not loaded further.
    NoReload,
    /// B8: what has passed on is written behind the ends.
    PassAfterEnds,
    /// B8: the end of a run frees its key's slot although it has passed on.
    EndFreesPassedSlot,
    /// B8: a host is given local waiters although it holds no slot.
    WaitersWithoutSlot,
    /// B8: a host begins a waiter and does not write that the slot has passed on.
    BeginsWithoutPass,
    /// B8: a host begins a waiter in place of a run that was claimed after it.
    BeginsBehind,
    /// B8: a host begins a waiter beside the run whose slot it is to have.
    BeginsBeside,
    /// B8: the end of a waiter is written before it is known that the slot has passed to it.
    EndOvertakesPass,
    /// B8: a waiter that does not begin is kept.
    KeepsWaiters,
}

#[cfg(feature = "mutations")]
impl Mutation {
    /// Whether it is about slots that pass on inside a host.
    #[must_use]
    pub fn is_about_waiters(self) -> bool {
        self >= Mutation::PassAfterEnds
    }
}

/// What is going on in one transaction.
struct Tx {
    ledger: Ledger,
    loaded: BTreeSet<KeyId>,
    now: UnixMillis,
}

/// The store.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Job rows.
    pub rows: BTreeMap<JobHandle, Row>,
    /// Keys.
    pub keys: BTreeMap<KeyId, KeyRow>,
    /// Slot rows.
    pub slots: BTreeMap<(KeyId, u32), SlotRow>,
    /// Heads that keep a key through their retry delay.
    pub blockers: BTreeMap<(KeyId, JobHandle), u64>,
    /// Live registrations.
    pub hosts: BTreeMap<HostId, HostRow>,
    /// Queues that somebody has paused.
    pub paused_queues: BTreeMap<String, Pause>,
    /// Names of hosts, also of those that have gone.
    pub host_names: BTreeMap<HostId, String>,
    /// Runs that somebody wants cancelled.
    pub cancels: BTreeMap<JobHandle, ClaimToken>,
    /// Shared state.
    pub state: BTreeMap<(String, String), String>,
    /// `stats:…`.
    pub counters: BTreeMap<String, i64>,
    /// What was decided since somebody took it.
    pub journal: Vec<Event>,
    /// How many waiters of a key a view loads at a time; 0 is all of them.
    pub window: usize,
    /// Whether a batch with a row that cannot be written is undone and split, instead of failing that row at once.
    pub splits_batches: bool,
    /// Whether audit rows are left out: the explorer keeps a hundred thousand models.
    pub without_history: bool,
    ids: BTreeMap<JobId, JobHandle>,
    key_ids: BTreeMap<String, KeyId>,
    last_handle: i64,
    last_token: i64,
    last_host: i64,
    last_ticket: u64,
    /// The broken rule, if this is a mutation test.
    #[cfg(feature = "mutations")]
    pub mutation: Option<Mutation>,
    #[cfg(feature = "mutations")]
    stale: BTreeMap<KeyId, KeyState>,
    #[cfg(feature = "mutations")]
    passed_on: BTreeMap<JobHandle, JobHandle>,
}

/// Whether this mutation is on. Without the feature none is, and its code is not there.
macro_rules! broken {
    ($model:expr, $which:ident) => {{
        #[cfg(feature = "mutations")]
        let on = $model.mutation == Some(Mutation::$which);
        #[cfg(not(feature = "mutations"))]
        let on = false;
        on
    }};
}

type Result<T> = std::result::Result<T, StoreError>;

fn host_lost(op: &'static str, host: HostId) -> StoreError {
    StoreError::new(op, StoreErrorKind::HostLost, format!("host {} is not registered", host.0))
}

// ------------------------------------------------------------------------------------------ transactions

impl Model {
    /// An empty store whose views load so many waiters of a key at a time; 0 is all of them.
    #[must_use]
    pub fn with_window(window: usize) -> Self {
        Model { window, ..Model::default() }
    }

    fn begin(&self, now: UnixMillis) -> Tx {
        #[cfg_attr(not(feature = "mutations"), expect(unused_mut, reason = "only a mutation changes it"))]
        let mut ledger = Ledger::new(BTreeMap::new(), self.last_ticket + 1);
        #[cfg(feature = "mutations")]
        if let Some(Mutation::Ledger(rule)) = self.mutation {
            ledger.break_rule(Some(rule));
        }
        Tx { ledger, loaded: BTreeSet::new(), now }
    }

    /// B1: what a driver reads once it holds the key rows.
    fn need(&self, tx: &mut Tx, keys: &[KeyId]) {
        for &key in keys {
            if tx.loaded.insert(key) {
                tx.ledger.load(key, self.view(key, self.window));
            }
        }
    }

    fn view(&self, key: KeyId, window: usize) -> KeyState {
        let slots = self.slots.range((key, 0)..=(key, u32::MAX)).map(|(&(_, number), slot)| Slot {
            number,
            job: slot.job,
            limit: slot.limit,
            reserved: slot.token.is_none(),
        });
        let mut line = self.line(key);
        let more_waiters = window > 0 && line.len() > window;
        if more_waiters {
            line.truncate(window);
        }
        let blockers = self.blockers.range((key, JobHandle(i64::MIN))..=(key, JobHandle(i64::MAX)));
        KeyState {
            admin_limit: self.keys.get(&key).and_then(|row| row.admin.as_ref()).map(|(limit, ..)| *limit),
            slots: slots.collect(),
            line,
            more_waiters,
            blockers: blockers.map(|(&(_, job), &ticket)| (ticket, job)).collect(),
        }
    }

    /// The jobs parked on a key, oldest first.
    #[must_use]
    pub fn line(&self, key: KeyId) -> Vec<Waiter> {
        let parked = self.rows.iter().filter(|(_, row)| row.place == Place::Parked && row.parked_on == Some(key));
        let mut line: Vec<_> = parked.filter_map(|(&job, row)| self.waiter(job, row)).collect();
        line.sort_by_key(|waiter| waiter.ticket);
        line
    }

    fn waiter(&self, job: JobHandle, row: &Row) -> Option<Waiter> {
        let rules = row.concurrency()?;
        Some(Waiter {
            job,
            ticket: row.ticket?,
            limit: rules.limit,
            weight: rules.weight,
            several_keys: row.keys.as_ref().is_some_and(|keys| keys.len() > 1),
            claimable: self.is_claimable(&row.job),
        })
    }

    /// Whether a live host that is not paused runs the contract.
    #[must_use]
    pub fn is_served(&self, contract: &str) -> bool {
        let mut hosts = self.hosts.values().filter(|host| host.paused.is_none());
        hosts.any(|host| host.served.iter().any(|served| served.declarations.contract == contract))
    }

    /// Whether some host could claim the job if it were ready.
    #[must_use]
    pub fn is_claimable(&self, job: &NewJob) -> bool {
        self.is_served(&job.contract) && !self.paused_queues.contains_key(&job.queue)
    }

    /// Writes what the ledger decided about other rows.
    fn write(&mut self, tx: &mut Tx) {
        let effects = tx.ledger.take_effects();
        self.write_effects(tx, effects);
    }

    fn write_effects(&mut self, tx: &mut Tx, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Take { key, number, job, limit, reserved: _ } => {
                    let taken = self.slots.insert((key, number), SlotRow { job, limit, token: None, since: tx.now });
                    assert!(taken.is_none() || self.is_mutated(), "slot {number} of {key:?} was taken twice");
                }
                Effect::Pass { key, from, to } => {
                    let token = self.rows.get(&to).and_then(|row| row.token);
                    let mut slots = self.slots.range_mut((key, 0)..=(key, u32::MAX));
                    if let Some((_, slot)) = slots.find(|(_, slot)| slot.job == from) {
                        (slot.job, slot.token, slot.since) = (to, token, tx.now);
                        self.journal.push(Event::Passed { key, from, to });
                    }
                }
                Effect::Reserve { job } => self.stand(job, Place::Reserved, tx.now, Event::Reserved(job)),
                Effect::Wake { job } => self.stand(job, Place::Ready, tx.now, Event::Woken(job)),
                Effect::Free { job } => {
                    self.slots.retain(|_, slot| slot.job != job);
                    self.journal.push(Event::Freed(job));
                }
                Effect::KeepTicket { job, ticket } => {
                    if !broken!(self, StartForgetsTicket)
                        && let Some(row) = self.rows.get_mut(&job)
                    {
                        row.ticket = Some(ticket);
                    }
                }
                Effect::Block { key, ticket, job } => {
                    self.blockers.insert((key, job), ticket);
                }
                Effect::Unblock { job } => self.blockers.retain(|(_, other), _| *other != job),
            }
        }
        self.last_ticket = tx.ledger.next_ticket() - 1;
    }

    fn stand(&mut self, job: JobHandle, place: Place, now: UnixMillis, event: Event) {
        if let Some(row) = self.rows.get_mut(&job) {
            row.place = place;
            row.changed_at = now;
            self.journal.push(event);
        }
    }

    fn commit(&mut self, mut tx: Tx) {
        self.hand_on_further(&mut tx);
        self.journal.push(Event::Committed);
    }

    /// Loads more of every line whose loaded part was used up, until nobody further could start.
    fn hand_on_further(&mut self, tx: &mut Tx) {
        self.write(tx);
        loop {
            let keys = tx.ledger.keys_to_reload();
            if keys.is_empty() || broken!(self, NoReload) {
                break;
            }
            for key in keys {
                // The window grows with every round, so a line of waiters that do not count ends it as well.
                let loaded = tx.ledger.key(key).map_or(0, |state| state.line.len());
                let line = self.line(key);
                let window = loaded + self.window.max(1);
                let more = line.len() > window;
                tx.ledger.extend_line(key, line.into_iter().take(window).collect(), more);
                self.write(tx);
            }
        }
    }

    fn is_mutated(&self) -> bool {
        #[cfg(feature = "mutations")]
        return self.mutation.is_some();
        #[cfg(not(feature = "mutations"))]
        return false;
    }

    /// Frees what the job holds and hands its keys on, unless the mutation that is on forgets that here.
    fn release(&mut self, tx: &mut Tx, job: JobHandle, forgets: bool) {
        let keys = self.rows.get(&job).map(Row::held_keys).unwrap_or_default();
        self.need(tx, &keys);
        #[cfg(feature = "mutations")]
        if forgets {
            tx.ledger.break_rule(Some(warp_domain::ledger::Rule::ReleaseHandsOn));
        }
        let _ = forgets;
        tx.ledger.release(job, &keys);
        #[cfg(feature = "mutations")]
        if forgets {
            tx.ledger.break_rule(None);
        }
        #[cfg(feature = "mutations")]
        if let (Some(Mutation::EndFreesPassedSlot), [key]) = (self.mutation, &keys[..])
            && let Some(to) = self.passed_on.remove(&job)
        {
            tx.ledger.release(to, &[*key]);
        }
        self.write(tx);
    }

    /// A job ends for good, or stops waiting: whatever it kept is free.
    fn let_go(&mut self, tx: &mut Tx, job: JobHandle, forgets: bool) {
        let keys = self.rows.get(&job).map(Row::held_keys).unwrap_or_default();
        self.need(tx, &keys);
        let may_block = self.rows.get(&job).is_some_and(Row::keeps_its_place);
        if may_block && !broken!(self, DeleteKeepsBlock) {
            tx.ledger.unblock(job, &keys);
        }
        self.release(tx, job, forgets);
    }

    fn count(&mut self, name: &str, reason: Option<&str>) {
        *self.counters.entry(format!("stats:{name}")).or_default() += 1;
        if let Some(reason) = reason {
            *self.counters.entry(format!("stats:{name}:{reason}")).or_default() += 1;
        }
    }

    fn note(&mut self, job: JobHandle, at: UnixMillis, event: &str, message: &str, took: Option<Duration>) {
        if self.without_history {
            return;
        }
        if let Some(row) = self.rows.get_mut(&job) {
            let host = row.host.and_then(|host| self.host_names.get(&host).cloned());
            let run = if row.place == Place::Running || took.is_some() { row.runs } else { 0 };
            row.audit.push(AuditRow { at, event: event.to_owned(), run, message: message.to_owned(), host, digest: row.digest, took });
        }
    }
}

// ------------------------------------------------------------------------------------------ enqueue

impl Model {
    /// Writes jobs; one verdict each.
    pub fn enqueue(&mut self, jobs: Vec<NewJob>, now: UnixMillis) -> Vec<EnqueueVerdict> {
        jobs.into_iter().map(|job| self.enqueue_one(job, now)).collect()
    }

    fn enqueue_one(&mut self, job: NewJob, now: UnixMillis) -> EnqueueVerdict {
        if let Err(why) = check_new_job(&job) {
            return EnqueueVerdict::Refused(why);
        }
        if self.ids.contains_key(&job.id) {
            return EnqueueVerdict::Duplicate(job.id);
        }
        if let Some(unique) = &job.unique_key
            && let Some(row) = self.rows.values().find(|row| row.job.unique_key.as_ref() == Some(unique) && !row.place.state().is_final())
        {
            return EnqueueVerdict::Duplicate(row.job.id);
        }
        self.last_handle += 1;
        let handle = JobHandle(self.last_handle);
        let id = job.id;
        let due = job.due.unwrap_or(now);
        let place = if due > now { Place::Scheduled } else { Place::Ready };
        self.ids.insert(id, handle);
        self.rows.insert(
            handle,
            Row {
                job: Arc::new(job),
                created_at: now,
                place,
                due,
                runs: 0,
                attempts: 0,
                deaths: 0,
                stamp: None,
                keys: None,
                ticket: None,
                parked_on: None,
                refusal: String::new(),
                token: None,
                settled_by: None,
                host: None,
                digest: None,
                changed_at: now,
                result: None,
                error: None,
                audit: Vec::new(),
                logs: Vec::new(),
                progress: BTreeMap::new(),
                dropped: (0, 0),
            },
        );
        self.note(handle, now, "Created", "", None);
        EnqueueVerdict::Enqueued(id)
    }

    /// The handle of a public id.
    #[must_use]
    pub fn handle(&self, id: JobId) -> Option<JobHandle> {
        self.ids.get(&id).copied()
    }

    /// The key with this text.
    #[must_use]
    pub fn key_id(&self, text: &str) -> Option<KeyId> {
        self.key_ids.get(text).copied()
    }

    fn intern(&mut self, text: &str) -> KeyId {
        if let Some(&key) = self.key_ids.get(text) {
            return key;
        }
        let key = KeyId(i64::try_from(self.keys.len()).unwrap_or(i64::MAX) + 1);
        self.key_ids.insert(text.to_owned(), key);
        self.keys.insert(key, KeyRow { text: text.to_owned(), admin: None });
        key
    }
}

// ------------------------------------------------------------------------------------------ hosts

impl Model {
    /// Registers a host under a number that was never used before.
    pub fn register(&mut self, info: HostInfo) -> HostId {
        self.last_host += 1;
        let host = HostId(self.last_host);
        self.host_names.insert(host, info.name.clone());
        let renewed_at = info.now;
        self.hosts.insert(host, HostRow { info, renewals: 0, renewed_at, served: Vec::new(), paused: None });
        host
    }

    /// Replaces what a host can run.
    ///
    /// # Errors
    /// When the registration is gone.
    pub fn serve(&mut self, host: HostId, served: Vec<Served>, now: UnixMillis) -> Result<()> {
        let before = self.claimable();
        self.hosts.get_mut(&host).ok_or_else(|| host_lost("publish contracts", host))?.served = served;
        let mut tx = self.begin(now);
        if !broken!(self, ServeWithoutHandOn) {
            self.pass_over_changed(&mut tx, &before);
        }
        self.commit(tx);
        Ok(())
    }

    fn claimable(&self) -> Claimable {
        let hosts = self.hosts.values().filter(|host| host.paused.is_none());
        let served = hosts.flat_map(|host| &host.served).map(|served| served.declarations.contract.clone());
        Claimable { contracts: served.collect(), paused: self.paused_queues.keys().cloned().collect() }
    }

    /// B7, C5: who counts in a line has changed, so every line in which such a job stands is looked at again.
    fn pass_over_changed(&mut self, tx: &mut Tx, before: &Claimable) {
        let after = self.claimable();
        let parked = self.rows.values().filter(|row| row.place == Place::Parked);
        let concerned = parked.filter(|row| before.allows(&row.job) != after.allows(&row.job));
        let keys: BTreeSet<KeyId> = concerned.filter_map(|row| row.parked_on).collect();
        for key in keys {
            // Keys that this transaction had loaded carry the old marks.
            tx.loaded.insert(key);
            tx.ledger.load(key, self.view(key, self.window));
            tx.ledger.hand_on(key);
            self.write(tx);
        }
    }

    /// Pauses a queue (`Some`) or resumes it; whether that changed anything.
    pub fn pause_queue(&mut self, queue: &str, pause: Option<Pause>, now: UnixMillis) -> bool {
        if self.paused_queues.contains_key(queue) == pause.is_some() {
            return false;
        }
        let before = self.claimable();
        match pause {
            Some(pause) => self.paused_queues.insert(queue.to_owned(), pause),
            None => self.paused_queues.remove(queue),
        };
        let mut tx = self.begin(now);
        if !broken!(self, PauseWithoutHandOn) {
            self.pass_over_changed(&mut tx, &before);
        }
        self.commit(tx);
        true
    }

    /// Pauses a host (`Some`) or resumes it; whether that changed anything.
    ///
    /// # Errors
    /// When it is not registered.
    pub fn pause_host(&mut self, host: HostId, pause: Option<Pause>, now: UnixMillis) -> Result<bool> {
        let before = self.claimable();
        let unknown = || StoreError::new("pause a host", StoreErrorKind::NotFound, format!("host {} is not registered", host.0));
        let row = self.hosts.get_mut(&host).ok_or_else(unknown)?;
        if row.paused.is_some() == pause.is_some() {
            return Ok(false);
        }
        row.paused = pause;
        let mut tx = self.begin(now);
        if !broken!(self, PauseWithoutHandOn) {
            self.pass_over_changed(&mut tx, &before);
        }
        self.commit(tx);
        Ok(true)
    }

    /// Whether something is reserved or woken that nobody has claimed yet.
    #[must_use]
    pub fn has_reserved(&self) -> bool {
        self.rows.values().any(is_unclaimed)
    }

    /// Renews a lease and compares.
    ///
    /// # Errors
    /// When the registration is gone.
    pub fn renew(&mut self, host: HostId, known: &[(JobHandle, ClaimToken)], now: UnixMillis) -> Result<Compared> {
        let row = self.hosts.get_mut(&host).ok_or_else(|| host_lost("renew the lease", host))?;
        row.renewals += 1;
        row.renewed_at = now;
        let mine = |row: &Row| row.place == Place::Running && row.host == Some(host);
        let lost = known.iter().filter(|(job, token)| !self.rows.get(job).is_some_and(|row| mine(row) && row.token == Some(*token)));
        let lost = lost.copied().collect();
        let unknown = self.rows.iter().filter(|(_, row)| mine(row)).map(|(&job, row)| (job, row.token));
        let unknown: Vec<_> = unknown.filter(|(job, token)| !known.iter().any(|(j, t)| j == job && Some(*t) == *token)).collect();
        let mut tx = self.begin(now);
        for (job, _) in &unknown {
            self.give_back(&mut tx, *job, ("its host does not know of this run", "hand-back"), false, false);
        }
        self.commit(tx);
        Ok(Compared { handed_back: u32::try_from(unknown.len()).unwrap_or(u32::MAX), lost })
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// When the registration is gone already.
    pub fn deregister(&mut self, host: HostId, now: UnixMillis) -> Result<()> {
        let before = self.claimable();
        self.hosts.remove(&host).ok_or_else(|| host_lost("deregister", host))?;
        let mut tx = self.begin(now);
        for job in self.running_on(host) {
            self.give_back(&mut tx, job, ("its host stopped", "hand-back"), false, false);
        }
        self.pass_over_changed(&mut tx, &before);
        self.commit(tx);
        Ok(())
    }

    fn running_on(&self, host: HostId) -> Vec<JobHandle> {
        self.rows.iter().filter(|(_, row)| row.place == Place::Running && row.host == Some(host)).map(|(&job, _)| job).collect()
    }

    /// B5. Gives the rows of a dead host back, if it has not renewed since.
    pub fn rescue(&mut self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Rescued {
        let mut rescued = Rescued::default();
        if self.hosts.get(&host).is_none_or(|row| row.renewals != renewals) {
            return rescued;
        }
        let jobs = self.running_on(host);
        if broken!(self, RescueSlotsFirst) && self.slots.values().any(|slot| jobs.contains(&slot.job)) {
            self.slots.retain(|_, slot| !jobs.contains(&slot.job));
            return rescued;
        }
        let before = self.claimable();
        self.hosts.remove(&host);
        let mut tx = self.begin(now);
        for job in jobs {
            let cancelled = self.cancels.contains_key(&job);
            if let Some(row) = self.rows.get_mut(&job) {
                row.deaths += 1;
                if row.deaths > max_deaths && !cancelled {
                    row.attempts = row.attempts.saturating_sub(1);
                    rescued.exhausted += 1;
                    let message = format!("its hosts died {} times", row.deaths);
                    self.end(&mut tx, job, Place::Failed, Some(&message), broken!(self, RescueWithoutHandOn));
                    self.count("failed", Some(FailedReason::RecoveryExhausted.name()));
                    continue;
                }
            }
            rescued.requeued += u32::from(!cancelled);
            let (forgets, keeps_slots) = (broken!(self, RescueWithoutHandOn), broken!(self, RescueRowsFirst));
            self.give_back(&mut tx, job, ("its host died", "recovery"), forgets, keeps_slots);
        }
        self.pass_over_changed(&mut tx, &before);
        self.commit(tx);
        rescued
    }

    /// Running → Enqueued, uncharged, with its place in line; or Deleted, if somebody has asked for that.
    fn give_back(&mut self, tx: &mut Tx, job: JobHandle, (why, reason): (&str, &str), forgets: bool, keeps_slots: bool) {
        if self.cancels.contains_key(&job) {
            return self.end_cancelled(tx, job, None);
        }
        self.note(job, tx.now, "Requeued", why, Some(Duration::ZERO));
        let Some(row) = self.rows.get_mut(&job) else { return };
        row.attempts = row.attempts.saturating_sub(1);
        let due = row.due;
        self.leave(tx, job, Place::Ready, due, false, forgets, keeps_slots);
        self.count("requeued", Some(reason));
    }

    fn end_cancelled(&mut self, tx: &mut Tx, job: JobHandle, took: Option<Duration>) {
        self.note(job, tx.now, "Deleted", "cancelled", took);
        self.end(tx, job, Place::Deleted, None, broken!(self, DeleteWithoutHandOn));
        self.count("deleted", Some("cancelled"));
    }

    /// The run is over, the job is not.
    #[expect(clippy::too_many_arguments, reason = "the last two exist for mutations only")]
    fn leave(&mut self, tx: &mut Tx, job: JobHandle, place: Place, due: UnixMillis, new_turn: bool, forgets: bool, keeps_slots: bool) {
        let Some(row) = self.rows.get_mut(&job) else { return };
        row.place = place;
        row.due = due;
        row.changed_at = tx.now;
        (row.token, row.host, row.parked_on) = (None, None, None);
        let keeps_its_place = row.keeps_its_place();
        let loses_its_ticket = new_turn && !keeps_its_place;
        if loses_its_ticket {
            row.ticket = None;
        }
        let (ticket, keys) = (row.ticket, row.held_keys());
        self.cancels.remove(&job);
        self.journal.push(Event::Left { job, place, keeps_its_place, loses_its_ticket });
        self.need(tx, &keys);
        if let (true, Some(ticket)) = (keeps_its_place && !broken!(self, RetryDoesNotBlock), ticket) {
            tx.ledger.block(job, ticket, &keys);
        }
        if !keeps_slots {
            self.release(tx, job, forgets);
        }
    }

    /// The job is over.
    fn end(&mut self, tx: &mut Tx, job: JobHandle, place: Place, error: Option<&str>, forgets: bool) {
        let Some(row) = self.rows.get_mut(&job) else { return };
        row.place = place;
        row.changed_at = tx.now;
        (row.token, row.host, row.parked_on, row.ticket) = (None, None, None, None);
        row.error = error.map(str::to_owned).or(row.error.take());
        self.cancels.remove(&job);
        self.journal.push(Event::Left { job, place, keeps_its_place: false, loses_its_ticket: true });
        if !broken!(self, SettleKeepsSlots) {
            self.let_go(tx, job, forgets);
        }
    }

    /// B7.
    pub fn expire_reservations(&mut self, patience: Duration, now: UnixMillis) -> u32 {
        if broken!(self, NoExpiry) {
            return 0;
        }
        let late = |row: &Row| is_unclaimed(row) && now.since(row.changed_at) >= patience;
        let mut due: Vec<_> = self.rows.iter().filter(|(_, row)| late(row)).map(|(&job, row)| (row.changed_at, job)).collect();
        due.sort_unstable();
        let mut tx = self.begin(now);
        let mut expired = 0;
        for (changed_at, job) in due {
            // An earlier one of this sweep may have touched it.
            let Some(row) = self.rows.get(&job).filter(|row| late(row) && row.changed_at == changed_at) else { continue };
            let key = row.parked_on.or(row.held_keys().first().copied());
            let (Some(key), Some(waiter), order) = (key, self.waiter(job, row), row.order()) else { continue };
            self.need(&mut tx, &[key]);
            let ticket = tx.ledger.unreserve(key, waiter, order);
            if let Some(row) = self.rows.get_mut(&job) {
                (row.place, row.parked_on, row.ticket, row.changed_at) = (Place::Parked, Some(key), Some(ticket), now);
            }
            self.journal.push(Event::Left { job, place: Place::Ready, keeps_its_place: false, loses_its_ticket: order == Order::Any });
            self.journal.push(Event::Parked { job, key, ticket });
            self.write(&mut tx);
            expired += 1;
        }
        self.commit(tx);
        expired
    }
}

// ------------------------------------------------------------------------------------------ settle and claim

/// Candidates that one claim looks at.
const MOST_CANDIDATES: usize = 2_000;

/// What ends a batch that must be split.
struct Poison;

impl Model {
    /// Ends runs and claims new ones.
    ///
    /// # Errors
    /// When the registration is gone.
    pub fn exchange(&mut self, params: &ExchangeParams) -> Result<Exchanged> {
        let registered = self.hosts.contains_key(&params.host);
        if !registered && !broken!(self, ClaimIgnoresLease) {
            return Err(host_lost("settle and claim", params.host));
        }
        #[cfg(feature = "mutations")]
        let before: BTreeMap<_, _> = self.keys.keys().map(|&key| (key, self.view(key, 0))).collect();
        let decided = self.journal.len();
        let HandOff { passes, wanted, .. } = &params.hand_off;
        // Before the ends: whoever ends has no slot any more that it could leave to others.
        let passes_first = !broken!(self, PassAfterEnds);
        let mut not_passed = if passes_first { self.pass(params.host, passes, params.now) } else { Vec::new() };
        // One view of the keys for both halves: what an end has promised to a wide job, the claims count.
        let (settled, mut tx) = self.settle_batch(params.host, &params.settles, params.now);
        if !passes_first {
            self.commit(tx);
            not_passed = self.pass(params.host, passes, params.now);
            tx = self.begin(params.now);
        }
        let mut done = Exchanged { settled, not_passed, ..Exchanged::default() };
        if let Some(claim) = &params.claim {
            let mut wanted: Vec<_> = wanted.iter().map(|wanted| (wanted.key, wanted.most)).collect();
            self.claim(&mut tx, params.host, claim, &mut wanted, params.hand_off.extra, &mut done);
        }
        self.commit(tx);
        let due = self.rows.values().filter(|row| row.place == Place::Scheduled).map(|row| row.due);
        done.next_due = due.min();
        let made = self.journal[decided..].iter().filter_map(|event| match event {
            Event::Reserved(job) | Event::Woken(job) => Some(*job),
            _ => None,
        });
        let made: BTreeSet<_> = made.filter(|job| self.rows.get(job).is_some_and(is_unclaimed)).collect();
        done.reserved = u32::try_from(made.len()).unwrap_or(u32::MAX);
        #[cfg(feature = "mutations")]
        {
            self.stale = before;
        }
        Ok(done)
    }

    /// B8. Slots that have passed on inside a host, in order; the waiters that have none after it. One that has passed
    /// before is found with the waiter, or the waiter has ended.
    fn pass(&mut self, host: HostId, passes: &[Pass], now: UnixMillis) -> Vec<ClaimToken> {
        let mut not_passed = Vec::new();
        if passes.is_empty() {
            return not_passed;
        }
        let mut tx = self.begin(now);
        for &Pass { key, from, to } in passes {
            let holds = |model: &Self, job| model.slots.range((key, 0)..=(key, u32::MAX)).any(|(_, slot)| slot.job == job);
            if !self.owns(host, to.0, to.1) || holds(self, to.0) {
                continue;
            }
            self.need(&mut tx, &[key]);
            if self.owns(host, from.0, from.1) && tx.ledger.pass(key, from.0, to.0) {
                self.write(&mut tx);
                #[cfg(feature = "mutations")]
                self.passed_on.insert(from.0, to.0);
            } else {
                not_passed.push(to.1);
            }
        }
        self.commit(tx);
        not_passed
    }

    /// Whether a run of this host holds a slot of the key.
    fn host_holds(&self, host: HostId, key: KeyId) -> bool {
        let runs_here = |job| self.rows.get(&job).is_some_and(|row| row.place == Place::Running && row.host == Some(host));
        let mut slots = self.slots.range((key, 0)..=(key, u32::MAX)).map(|(_, slot)| slot);
        slots.any(|slot| slot.token.is_some() && runs_here(slot.job)) || broken!(self, WaitersWithoutSlot)
    }

    /// One transaction, which is still open, or, when a row cannot be written, halves of the batch until that row stands
    /// alone; then the last of them is open. (A driver that sees the poison before it writes need not split;
    /// [`Model::splits_batches`] decides which one this is.)
    fn settle_batch(&mut self, host: HostId, settles: &[Settle], now: UnixMillis) -> (Vec<SettleVerdict>, Tx) {
        let may_split = self.splits_batches && settles.len() > 1;
        let before = (may_split && settles.iter().any(|settle| poison(settle).is_some())).then(|| self.clone());
        let mut tx = self.begin(now);
        let verdicts: std::result::Result<Vec<_>, Poison> =
            settles.iter().map(|settle| self.settle(&mut tx, host, settle, !may_split)).collect();
        match (verdicts, before) {
            (Ok(verdicts), _) => {
                self.hand_on_further(&mut tx);
                (verdicts, tx)
            }
            (Err(Poison), Some(before)) => {
                *self = before;
                if broken!(self, PoisonTakesTheBatch) {
                    return (vec![SettleVerdict::Poison; settles.len()], self.begin(now));
                }
                let (left, right) = settles.split_at(settles.len() / 2);
                let (mut verdicts, tx) = self.settle_batch(host, left, now);
                self.commit(tx);
                let (further, tx) = self.settle_batch(host, right, now);
                verdicts.extend(further);
                (verdicts, tx)
            }
            (Err(Poison), None) => (Vec::new(), tx),
        }
    }

    fn settle(&mut self, tx: &mut Tx, host: HostId, settle: &Settle, alone: bool) -> std::result::Result<SettleVerdict, Poison> {
        let job = settle.handle;
        let Some(row) = self.rows.get(&job) else { return Ok(SettleVerdict::Late) };
        let mine = row.place == Place::Running && row.host == Some(host) && row.token == Some(settle.token);
        let mine = mine || broken!(self, SettleIgnoresToken) && row.place == Place::Running;
        let repeated = !mine && row.settled_by == Some(settle.token);
        let applies_again = broken!(self, RepeatAppliesAgain) && repeated && !row.place.state().is_final();
        if !mine && !applies_again {
            if broken!(self, LateSettleFrees) {
                self.release(tx, job, false);
            }
            return Ok(if repeated { SettleVerdict::Repeated } else { SettleVerdict::Late });
        }
        if let Some(why) = poison(settle) {
            if !alone {
                return Err(Poison);
            }
            if let Some(row) = self.rows.get_mut(&job) {
                row.settled_by = Some(settle.token);
            }
            self.note(job, tx.now, "Failed", &why, Some(settle.took));
            self.end(tx, job, Place::Failed, Some(&why), false);
            self.count("failed", Some(FailedReason::Unacceptable.name()));
            return Ok(SettleVerdict::Poison);
        }
        if let Some(row) = self.rows.get_mut(&job) {
            row.settled_by = Some(settle.token);
        }
        self.write_output(job, &settle.output);
        let conflict = matches!(settle.ending, Ending::Completed { .. }) && !self.apply_all(&settle.state);
        let ending = if conflict { &settle.on_conflict } else { &settle.ending };
        if matches!(ending, Ending::Completed { .. }) {
            for child in &settle.children {
                self.enqueue_one(child.clone(), tx.now);
            }
        }
        // Somebody asked for its end: it does not run again.
        let cancelled = self.cancels.contains_key(&job) && !matches!(ending, Ending::Completed { .. } | Ending::Failed { .. });
        if let (true, Ending::NotBegun, Some(row)) = (cancelled, ending, self.rows.get_mut(&job)) {
            row.unclaim();
        }
        match cancelled {
            true => self.end_cancelled(tx, job, Some(settle.took)),
            false => self.finish(tx, job, ending, settle.took),
        }
        Ok(if conflict { SettleVerdict::Conflicted } else { SettleVerdict::Settled })
    }

    fn finish(&mut self, tx: &mut Tx, job: JobHandle, ending: &Ending, took: Duration) {
        let forgets = broken!(self, SettleWithoutHandOn);
        let now = tx.now;
        let later = |at: UnixMillis| if at > now { Place::Scheduled } else { Place::Ready };
        match ending {
            Ending::Completed { result } => {
                self.note(job, now, "Completed", "", Some(took));
                if let Some(row) = self.rows.get_mut(&job) {
                    row.result.clone_from(result);
                }
                self.end(tx, job, Place::Completed, None, forgets);
                self.count("succeeded", None);
            }
            Ending::Failed { message, reason } => {
                self.note(job, now, "Failed", message, Some(took));
                self.end(tx, job, Place::Failed, Some(message), forgets);
                self.count("failed", Some(reason.name()));
            }
            Ending::Deleted { message } => {
                self.note(job, now, "Deleted", message, Some(took));
                self.end(tx, job, Place::Deleted, None, forgets);
                self.count("deleted", None);
            }
            Ending::Retry { message, at } => {
                self.note(job, now, "Scheduled", message, Some(took));
                if let Some(row) = self.rows.get_mut(&job) {
                    row.error = Some(message.clone());
                }
                self.leave(tx, job, later(*at), *at, true, forgets, false);
                self.count("requeued", Some("retry"));
            }
            Ending::Snooze { at } => {
                self.note(job, now, "Scheduled", "snoozed", Some(took));
                if let Some(row) = self.rows.get_mut(&job) {
                    row.attempts = row.attempts.saturating_sub(1);
                }
                self.leave(tx, job, later(*at), *at, true, forgets, false);
                self.count("requeued", Some("snooze"));
            }
            Ending::HandBack { message } => {
                self.give_back(tx, job, (message, "hand-back"), forgets, false);
            }
            Ending::NotBegun => self.stand_again(tx, job, forgets),
        }
    }

    /// B8. Running → where the claim found it, as if it had not been claimed.
    fn stand_again(&mut self, tx: &mut Tx, job: JobHandle, forgets: bool) {
        let Some(row) = self.rows.get_mut(&job) else { return };
        row.unclaim();
        let (due, parked_on) = (row.due, row.parked_on);
        let waiter = self.rows.get(&job).and_then(|row| self.waiter(job, row));
        let (Some(key), Some(waiter)) = (parked_on, waiter) else {
            return self.leave(tx, job, Place::Ready, due, false, forgets, false);
        };
        let ticket = waiter.ticket;
        self.need(tx, &[key]);
        tx.ledger.stand_again(key, waiter);
        if let Some(row) = self.rows.get_mut(&job) {
            (row.place, row.changed_at, row.token, row.host) = (Place::Parked, tx.now, None, None);
        }
        self.journal.push(Event::Left { job, place: Place::Ready, keeps_its_place: false, loses_its_ticket: false });
        self.journal.push(Event::Parked { job, key, ticket });
        self.write(tx);
    }

    /// Page by page, what is reserved first, oldest due first; what a page has woken is in the next. Waiters out of the
    /// lines of the wanted keys come before that, as far as they are older than everything else, and after it.
    fn claim(&mut self, tx: &mut Tx, host: HostId, params: &ClaimParams, wanted: &mut [(KeyId, u32)], extra: u32, done: &mut Exchanged) {
        let now = tx.now;
        for row in self.rows.values_mut().filter(|row| row.place == Place::Scheduled && row.due <= now) {
            row.place = Place::Ready;
            row.changed_at = now;
        }
        // Inside the transaction: what is paused from now on is not claimed.
        let host_paused = self.hosts.get(&host).is_some_and(|row| row.paused.is_some());
        let open = |lane: &&Lane| !host_paused && !self.paused_queues.contains_key(&lane.queue);
        let lanes: Vec<_> = params.lanes.iter().filter(|lane| open(lane) || broken!(self, ClaimIgnoresPause)).cloned().collect();
        let most = usize::try_from(params.max).unwrap_or(usize::MAX);
        let runnable = |row: &&Row| matches!(row.place, Place::Ready | Place::Reserved);
        let is_its = |row: &Row, lane: &Lane| row.job.queue == lane.queue && row.job.contract == lane.declarations.contract;
        let in_sight = self.rows.values().filter(runnable).filter(|row| lanes.iter().any(|lane| is_its(row, lane)));
        let bound = in_sight.map(|row| row.due).min();
        let in_all = most.saturating_add(extra as usize);
        self.take_waiters(tx, host, wanted, in_all, bound, &lanes, done);
        let (mut page, mut seen) = (most, 0);
        while done.counted(extra) < most && seen < MOST_CANDIDATES {
            let mut found = self.page(&lanes, Place::Reserved, page);
            if found.is_empty() {
                found = self.page(&lanes, Place::Ready, page);
            }
            if found.is_empty() {
                break;
            }
            seen += found.len();
            self.name_keys(&found);
            for (job, lane) in found {
                if done.counted(extra) < most {
                    self.claim_one(tx, host, job, lane, wanted, done);
                }
            }
            self.hand_on_further(tx);
            page = (page * 2).clamp(64, 1024);
        }
        done.more = done.counted(extra) >= most || seen >= MOST_CANDIDATES;
        self.take_waiters(tx, host, wanted, in_all, None, &lanes, done);
    }

    /// B8: out of the lines, as far as their oldest may wait inside the host and are not due after the bound.
    #[expect(clippy::too_many_arguments, reason = "a claim in progress is these")]
    fn take_waiters(
        &mut self,
        tx: &mut Tx,
        host: HostId,
        wanted: &mut [(KeyId, u32)],
        most: usize,
        bound: Option<UnixMillis>,
        lanes: &[Lane],
        done: &mut Exchanged,
    ) {
        for (key, left) in wanted {
            let room = u32::try_from(most.saturating_sub(done.claimed.len())).unwrap_or(u32::MAX);
            let taken = self.take_from_line(tx, host, *key, room.min(*left), bound, lanes, done);
            *left -= taken;
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a claim in progress is these")]
    fn take_from_line(
        &mut self,
        tx: &mut Tx,
        host: HostId,
        key: KeyId,
        most: u32,
        bound: Option<UnixMillis>,
        lanes: &[Lane],
        done: &mut Exchanged,
    ) -> u32 {
        let mut count = 0;
        self.need(tx, &[key]);
        loop {
            let is_bound = |row: &Row| bound.is_none_or(|bound| row.due <= bound);
            let lane_of = |job| {
                let row = self.rows.get(&job).filter(|row| row.order() == Order::Any && is_bound(row))?;
                let is_its = |lane: &&Lane| row.job.queue == lane.queue && row.job.contract == lane.declarations.contract;
                lanes.iter().find(is_its).cloned()
            };
            let left = if self.host_holds(host, key) { (most - count) as usize } else { 0 };
            let taken = tx.ledger.take_waiters(key, left, |waiter| lane_of(waiter.job).is_some());
            let taken: Vec<_> = taken.into_iter().filter_map(|waiter| Some((waiter.job, lane_of(waiter.job)?))).collect();
            if taken.is_empty() {
                return count;
            }
            count += u32::try_from(taken.len()).unwrap_or(u32::MAX);
            // Whoever comes next in the line comes after all who were taken.
            let effects = tx.ledger.take_effects();
            for (job, lane) in taken {
                self.start(tx, host, job, lane, Some(key), done);
            }
            self.write_effects(tx, effects);
            self.hand_on_further(tx);
        }
    }

    fn page(&self, lanes: &[Lane], place: Place, most: usize) -> Vec<(JobHandle, Lane)> {
        let mut found: Vec<_> = self
            .rows
            .iter()
            .filter(|(_, row)| row.place == place)
            .filter_map(|(&job, row)| {
                let mut lanes = lanes.iter();
                let lane = lanes.find(|lane| row.job.queue == lane.queue && row.job.contract == lane.declarations.contract)?;
                Some((row.due, job, lane.clone()))
            })
            .collect();
        found.sort_by_key(|(due, job, _)| (*due, *job));
        found.truncate(most);
        found.into_iter().map(|(_, job, lane)| (job, lane)).collect()
    }

    /// Keys get their numbers, and with them their place in the global order (C4), when a page that needs them is read.
    fn name_keys(&mut self, page: &[(JobHandle, Lane)]) {
        let mut texts = BTreeSet::new();
        for (job, lane) in page {
            let Some(row) = self.rows.get(job).filter(|row| row.keys.is_none()) else { continue };
            let stamp = row.stamp.clone().unwrap_or_else(|| Arc::new(resolve(&row.job.explicit, &lane.declarations)));
            texts.extend(render(row, &stamp).unwrap_or_default());
        }
        for text in texts {
            self.intern(&text);
        }
    }

    fn claim_one(&mut self, tx: &mut Tx, host: HostId, job: JobHandle, lane: Lane, wanted: &mut [(KeyId, u32)], done: &mut Exchanged) {
        let Some(row) = self.rows.get(&job) else { return };
        let has_started = row.stamp.is_some();
        let reserved = row.place == Place::Reserved;
        let again = row.parked_on.is_some();
        let stamp = match &row.stamp {
            Some(stamp) if !broken!(self, StampAgain) => stamp.clone(),
            _ => Arc::new(resolve(&row.job.explicit, &lane.declarations)),
        };
        let ticket = row.ticket;
        let wants = match self.wants(job, &stamp) {
            Ok(wants) => wants,
            Err(why) => {
                if let Some(row) = self.rows.get_mut(&job) {
                    row.stamp = Some(stamp);
                }
                self.note(job, tx.now, "Failed", &why, None);
                self.end(tx, job, Place::Failed, Some(&why), false);
                self.count("failed", Some(FailedReason::Unacceptable.name()));
                done.unacceptable += 1;
                return;
            }
        };
        let keys: Vec<_> = wants.iter().map(|want| want.key).collect();
        if let Some(row) = self.rows.get_mut(&job) {
            row.stamp = Some(stamp.clone());
            row.keys = Some(keys.clone());
        }
        let mut wanted = wanted.iter_mut().find(|(key, left)| keys == [*key] && *left > 0 && self.host_holds(host, *key));
        let verdict = match stamp.concurrency.as_ref().map(|stamped| &stamped.value) {
            None => Verdict::Start,
            Some(rules) => {
                self.need(tx, &keys);
                #[cfg(feature = "mutations")]
                if self.mutation == Some(Mutation::StaleView) {
                    for key in &keys {
                        if let Some(state) = self.stale.get(key) {
                            tx.ledger.load(*key, state.clone());
                        }
                    }
                }
                tx.ledger.claim(&Candidate {
                    job,
                    wants,
                    mode: rules.mode,
                    order: rules.order,
                    ticket,
                    reserved,
                    has_started,
                    local: wanted.is_some(),
                })
            }
        };
        match verdict {
            Verdict::Start => self.start(tx, host, job, lane, None, done),
            Verdict::WaitLocally => {
                if let Some((key, left)) = &mut wanted {
                    *left -= 1;
                    self.start(tx, host, job, lane, Some(*key), done);
                }
            }
            Verdict::Park { key, ticket, refusal } => {
                if let Some(row) = self.rows.get_mut(&job) {
                    (row.place, row.parked_on, row.ticket, row.changed_at) = (Place::Parked, Some(key), Some(ticket), tx.now);
                    row.refusal = format!("{refusal:?}");
                }
                done.parked += 1;
                done.parked_again += u32::from(again);
                if !again {
                    self.note(job, tx.now, "Requeued", &format!("{refusal:?}"), None);
                    self.count("requeued", Some("concurrency"));
                }
                // A void reservation is freed before its job stands in line again.
                let effects_first = self.journal.len();
                self.write(tx);
                let freed = self.journal.iter().skip(effects_first).position(|event| *event == Event::Freed(job));
                let at = freed.map_or(effects_first, |at| effects_first + at + 1);
                self.journal.insert(at, Event::Parked { job, key, ticket });
            }
            Verdict::Skip { key, limit, holder } => {
                self.journal.push(Event::Skipped { job, key, holder });
                let holder = self.rows.get(&holder).map(|row| row.job.id.to_string()).unwrap_or_default();
                let name = self.keys.get(&key).map(|row| row.text.clone()).unwrap_or_default();
                let message = format!("Cancelled — '{name}' full ({limit} slots); held by {holder}");
                self.note(job, tx.now, "Deleted", &message, None);
                self.write(tx);
                self.end(tx, job, Place::Deleted, Some(&message), false);
                self.count("deleted", Some("skip"));
                done.skipped += 1;
            }
        }
    }

    /// With a key: without a slot of it, to wait inside the host.
    fn start(&mut self, tx: &mut Tx, host: HostId, job: JobHandle, lane: Lane, waits: Option<KeyId>, done: &mut Exchanged) {
        // Drawn after the grant, so that of two holders the later has the larger (C1, §4 of the design).
        self.last_token += 1;
        let mut token = ClaimToken(self.last_token);
        if broken!(self, TokenBeforeGrant) {
            // As if every host drew its tokens ahead: they are unique, and grow per host only.
            token = ClaimToken(self.last_token + if host.0 % 2 == 0 { 1000 } else { 0 });
        }
        // Before the effects: one of them may hand on what this start no longer keeps.
        self.journal.push(match waits {
            None => Event::Started { job, token },
            Some(key) => Event::Waits { job, token, key },
        });
        self.write(tx);
        for slot in self.slots.values_mut().filter(|slot| slot.job == job) {
            slot.token = Some(token);
        }
        let Some(row) = self.rows.get_mut(&job) else { return };
        row.place = Place::Running;
        (row.token, row.host, row.changed_at) = (Some(token), Some(host), tx.now);
        // Where a waiter goes if it does not begin.
        row.parked_on = row.parked_on.filter(|_| waits.is_some());
        row.runs += 1;
        row.attempts += 1;
        row.digest = Some(lane.declarations.digest);
        let passes = |rules: &&Concurrency| rules.weight == 1 && rules.order == Order::Any;
        let holds = match row.keys.as_deref() {
            Some([key]) => row.concurrency().filter(passes).map(|_| Local::Holds(*key)),
            _ => None,
        };
        done.claimed.push(Claimed {
            handle: job,
            id: row.job.id,
            token,
            run: row.runs,
            attempt: row.attempts,
            payload: row.job.payload.as_str().into(),
            metadata: row.job.metadata.clone(),
            trace_parent: row.job.trace_parent.clone(),
            stamp: row.stamp.clone().unwrap_or_default(),
            keyed: row.keys.as_ref().is_some_and(|keys| !keys.is_empty()),
            fence: row.keys.as_ref().filter(|keys| !keys.is_empty()).map(|_| token.0.unsigned_abs()),
            local: waits.map(Local::Waits).or(holds),
            created_at: row.created_at,
            claimed_at: tx.now,
            lane,
        });
        self.note(job, tx.now, "Processing", "", None);
    }

    /// C4: the job's keys in their one global order, each once.
    fn wants(&mut self, job: JobHandle, stamp: &Stamp) -> std::result::Result<Vec<Want>, String> {
        let Some(rules) = stamp.concurrency.as_ref().map(|stamped| &stamped.value) else { return Ok(Vec::new()) };
        let Some(row) = self.rows.get(&job) else { return Ok(Vec::new()) };
        let mut keys = match &row.keys {
            Some(keys) if !broken!(self, StampAgain) => keys.clone(),
            _ => render(row, stamp)?.iter().map(|text| self.intern(text)).collect(),
        };
        keys.sort_unstable();
        keys.dedup();
        Ok(keys.into_iter().map(|key| Want { key, limit: rules.limit, weight: rules.weight }).collect())
    }

    fn write_output(&mut self, job: JobHandle, output: &RunOutput) {
        if let Some(row) = self.rows.get_mut(&job) {
            let RunOutput { lines, dropped_lines, dropped_bytes, progress } = output;
            row.logs.extend(lines.iter().map(|line| (row.runs, line.clone())));
            row.dropped = (row.dropped.0 + dropped_lines, row.dropped.1 + dropped_bytes);
            row.progress.extend(progress.iter().cloned());
        }
    }

    fn owns(&self, host: HostId, job: JobHandle, token: ClaimToken) -> bool {
        self.hosts.contains_key(&host)
            && self.rows.get(&job).is_some_and(|row| row.place == Place::Running && row.host == Some(host) && row.token == Some(token))
    }

    /// Stores output of a run that goes on.
    pub fn append_output(&mut self, host: HostId, job: JobHandle, token: ClaimToken, output: &RunOutput) -> SettleVerdict {
        if !self.owns(host, job, token) {
            return SettleVerdict::Late;
        }
        self.write_output(job, output);
        SettleVerdict::Settled
    }

    /// Runs of this host that somebody wants cancelled.
    #[must_use]
    pub fn cancel_signals(&self, host: HostId) -> Vec<CancelSignal> {
        let mine = self.cancels.iter().filter(|(job, token)| self.owns(host, **job, **token));
        mine.map(|(&handle, &token)| CancelSignal { handle, token }).collect()
    }

    /// Writes shared state at once.
    pub fn state_apply(&mut self, host: HostId, job: JobHandle, token: ClaimToken, write: &StateWrite) -> StateVerdict {
        if !self.owns(host, job, token) {
            return StateVerdict::Late;
        }
        self.apply(write)
    }

    /// All of them or none; whether they were written.
    fn apply_all(&mut self, writes: &[StateWrite]) -> bool {
        let before = (!writes.is_empty()).then(|| self.state.clone());
        let written = writes.iter().all(|write| matches!(self.apply(write), StateVerdict::Written(_)));
        if let (false, Some(before)) = (written, before) {
            self.state = before;
        }
        written
    }

    fn apply(&mut self, write: &StateWrite) -> StateVerdict {
        let at = (write.bucket.clone(), write.key.clone());
        let there = self.state.get(&at).cloned();
        let value = match &write.change {
            StateChange::Put(value) => value.clone(),
            StateChange::CompareAndSet { expected, value } if *expected == there => value.clone(),
            StateChange::CompareAndSet { .. } => return StateVerdict::Conflict(there),
            StateChange::Add(by) => {
                let text = there.unwrap_or_else(|| "0".to_owned());
                match text.parse::<i128>().ok().and_then(|number| number.checked_add(*by)) {
                    Some(sum) => Some(sum.to_string()),
                    None => return StateVerdict::NotANumber(text),
                }
            }
        };
        match &value {
            Some(value) => self.state.insert(at, value.clone()),
            None => self.state.remove(&at),
        };
        StateVerdict::Written(value)
    }
}

/// Reserved, or woken for a key, and not claimed yet.
fn is_unclaimed(row: &Row) -> bool {
    row.place == Place::Reserved || row.place == Place::Ready && row.parked_on.is_some()
}

fn render(row: &Row, stamp: &Stamp) -> std::result::Result<Vec<String>, String> {
    let Some(rules) = stamp.concurrency.as_ref().map(|stamped| &stamped.value) else { return Ok(Vec::new()) };
    let payload = JsonPayload::parse(&row.job.payload).map_err(|error| error.to_string())?;
    rules.keys.iter().map(|key| key.render(&payload).map_err(|error| error.to_string())).collect()
}

/// What no row can hold.
fn poison(settle: &Settle) -> Option<String> {
    if let Ending::Completed { result: Some(result) } = &settle.ending
        && result.contains('\0')
    {
        return Some("the result contains a NUL character".to_owned());
    }
    settle.children.iter().find_map(|child| check_new_job(child).err())
}

// ------------------------------------------------------------------------------------------ operators

impl Model {
    /// Ends a job as Deleted, or asks its host to.
    pub fn cancel(&mut self, id: JobId, now: UnixMillis) -> CommandVerdict {
        let Some(job) = self.handle(id) else { return CommandVerdict::Unknown };
        let Some(row) = self.rows.get(&job) else { return CommandVerdict::Unknown };
        match (row.place, row.token) {
            (Place::Running, Some(token)) => {
                self.cancels.insert(job, token);
                self.note(job, now, "CancellationRequested", "", None);
                CommandVerdict::Requested
            }
            (place, _) if place.state().is_final() => CommandVerdict::NotNow(place.state()),
            _ => {
                let mut tx = self.begin(now);
                self.end_cancelled(&mut tx, job, None);
                self.commit(tx);
                CommandVerdict::Done
            }
        }
    }

    /// Makes an ended or Scheduled job Enqueued again.
    pub fn requeue(&mut self, id: JobId, now: UnixMillis) -> CommandVerdict {
        let Some(job) = self.handle(id) else { return CommandVerdict::Unknown };
        let Some(row) = self.rows.get(&job) else { return CommandVerdict::Unknown };
        let state = row.place.state();
        if !state.is_final() && state != State::Scheduled {
            return CommandVerdict::NotNow(state);
        }
        let taken = |unique: &String| {
            let mut others = self.rows.iter().filter(|(other, _)| **other != job);
            others.any(|(_, row)| row.job.unique_key.as_ref() == Some(unique) && !row.place.state().is_final())
        };
        if row.job.unique_key.as_ref().is_some_and(taken) {
            return CommandVerdict::NotNow(state);
        }
        if let Some(row) = self.rows.get_mut(&job) {
            (row.place, row.due, row.changed_at, row.attempts, row.deaths) = (Place::Ready, now, now, 0, 0);
            (row.result, row.error) = (None, None);
        }
        self.journal.push(Event::Requeued(job));
        self.note(job, now, "Requeued", "by an operator", None);
        self.count("requeued", Some("manual"));
        CommandVerdict::Done
    }

    /// Removes a job and everything about it.
    pub fn delete(&mut self, id: JobId, now: UnixMillis) -> CommandVerdict {
        let Some(job) = self.handle(id) else { return CommandVerdict::Unknown };
        let Some(row) = self.rows.get(&job) else { return CommandVerdict::Unknown };
        if row.place == Place::Running {
            return CommandVerdict::NotNow(State::Processing);
        }
        let mut tx = self.begin(now);
        if !row.place.state().is_final() {
            self.journal.push(Event::Left { job, place: Place::Deleted, keeps_its_place: false, loses_its_ticket: true });
            if let Some(row) = self.rows.get_mut(&job) {
                row.place = Place::Deleted;
            }
            self.let_go(&mut tx, job, broken!(self, DeleteWithoutHandOn));
        }
        self.journal.push(Event::Removed(job));
        self.rows.remove(&job);
        self.ids.remove(&id);
        self.commit(tx);
        CommandVerdict::Done
    }

    /// B6. Sets or, with `None`, removes an admin limit.
    pub fn set_limit(&mut self, key: &str, limit: Option<u32>, by: &str, now: UnixMillis) -> KeyId {
        let key = self.intern(key);
        let mut tx = self.begin(now);
        self.need(&mut tx, &[key]);
        if let Some(row) = self.keys.get_mut(&key) {
            row.admin = limit.map(|limit| (limit, by.to_owned(), now));
        }
        self.journal.push(Event::Limit(key, limit));
        tx.ledger.set_admin_limit(key, limit);
        self.commit(tx);
        key
    }
}

/// The lanes of a host that serves these declarations from these queues.
#[must_use]
pub fn lanes(queues: &[&str], served: &[Arc<Declarations>]) -> Arc<[Lane]> {
    let lane = |queue: &str, declarations: &Arc<Declarations>| Lane { queue: queue.to_owned(), declarations: declarations.clone() };
    queues.iter().flat_map(|queue| served.iter().map(|declarations| lane(queue, declarations))).collect()
}
