//! Slots as session locks (kind A of slots.md): what one host knows and decides.
//!
//! A host has one lock session. A [`Table`] stands beside it and holds which attempt of this host has which lock (A1),
//! what is to be asked of the lock session next, and what is owed to the rows: jobs to park, keys to look at, keys to
//! wake. The driver does what it says: it takes [`Table::next_call`] to the server, brings [`Table::answered`] back, and
//! writes what [`Table::take_due`] owes. The explorer of `warp-testkit` drives this very table against a model of the
//! server's locks and rows, and breaks each [`Rule`] to show that it would notice.
//!
//! What must stay true:
//! - one call is out at a time, so the table is exact about its own session between two calls;
//! - an attempt holds all of its keys or none, taken in the order of `K`, which is the one global order (C4);
//! - whoever gives a lock back owes its key a wake, and the wake leaves only after the server has answered the unlock
//!   (A5, A7); whoever parks owes its key a look, and the look leaves only after the park is committed (A4);
//! - a slot passes from attempt to attempt inside the host only under the limit that the host has read last, for a
//!   bounded time and a bounded number of times, and every pass owes its key a wake of the difference (A8);
//! - nothing of a lost session outlives it but the wakes (A13).
//!
//! What it deliberately does not do: know rows, statements or hosts' leases; read a clock. `mono_now` is this host's
//! monotonic time and never leaves it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::id::ClaimToken;
use crate::policy::Mode;
#[cfg(not(feature = "mutations"))]
use rules::Rule;
#[cfg(feature = "mutations")]
pub use rules::Rule;
use rules::Rules;

/// How far hand-offs and local waiters may go before other hosts get their turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// A8: so often in a row one lock passes from attempt to attempt. At most 255, because a fence has that many
    /// numbers between two draws.
    pub hand_offs: u8,
    /// A8: and so long.
    pub streak: Duration,
    /// A8: how old the newest reading of a key's version may be when a slot passes.
    pub reading: Duration,
    /// A9: how long an attempt waits inside its host.
    pub patience: Duration,
    /// So many wait for one key, because the last of them has to be served within the patience.
    pub waiters_of_a_key: usize,
    /// So many wait in all: each is a running row that no worker runs.
    pub waiters: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        let patience = Duration::from_millis(20);
        Bounds { hand_offs: 100, streak: second, reading: second, patience, waiters_of_a_key: 8, waiters: 32 }
    }
}

/// One key that an attempt needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want<K> {
    /// The key.
    pub key: K,
    /// The limit stamped on the job; an operator's limit outranks it on the server.
    pub limit: u32,
}

/// An attempt that a claim has given to this host and that starts when it has its keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask<K> {
    /// The attempt.
    pub token: ClaimToken,
    /// Its keys; [`Table::ask`] puts them in order.
    pub wants: Vec<Want<K>>,
    /// What a full key does to it: [`Mode::Skip`] only before the job's first start.
    pub mode: Mode,
    /// The key for whose free slot the job was woken. If it ends without having tried that key, it passes the wake on (A7).
    pub woken_for: Option<K>,
}

/// A lock of the lock session by what it is for. The driver knows its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lock<K> {
    /// The key's base lock, exclusive: the one slot of a key at limit 1.
    Whole(K),
    /// The key's base lock, shared: "somebody of this session holds one of its slots".
    Base(K),
    /// One numbered slot.
    Slot(K, u32),
}

impl<K: Copy> Lock<K> {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> K {
        match *self {
            Lock::Whole(key) | Lock::Base(key) | Lock::Slot(key, _) => key,
        }
    }
}

/// One key of an [`Asked`], with what the server cannot tell from its lock table: what is this session's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step<K> {
    /// The key.
    pub key: K,
    /// The stamped limit.
    pub limit: u32,
    /// Whether this session has its base lock shared.
    pub has_base: bool,
    /// The slots of it that this session holds: the server would grant them again (A1).
    pub own: Vec<u32>,
    /// Whether this session holds the whole key, so that the attempt is refused here. Not before the keys in front of it
    /// have been tried: a wake for one of those would be passed on untried, and two such wakes can go round for ever.
    pub whole: bool,
}

/// An attempt as the lock session is asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked<K> {
    /// The attempt.
    pub token: ClaimToken,
    /// Its keys in order. Attempts of one call see what earlier ones of it took.
    pub steps: Vec<Step<K>>,
}

/// What the lock session does next, in this order, in one statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call<K> {
    /// Of which session; an answer of another one is not listened to (A13).
    pub generation: u64,
    /// An earlier call failed and may have left locks: first give back everything that is not listed here.
    pub keep: Option<BTreeSet<Lock<K>>>,
    /// Locks to give back, a key's slots before its base.
    pub unlocks: Vec<Lock<K>>,
    /// Keys held exclusively that become slot 0 under a raised limit: shared base, slot 0, then unlock (A11).
    pub converts: Vec<K>,
    /// Attempts to try (A2).
    pub asks: Vec<Asked<K>>,
}

/// A limit and its version as they were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The operator's limit.
    pub admin_limit: Option<u32>,
    /// Grows with every change.
    pub version: u64,
}

/// A key that the lock session has taken for an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant<K> {
    /// The key.
    pub key: K,
    /// The slot's number under the shared base; `None` is the whole key, exclusively.
    pub slot: Option<u32>,
    /// Verified after the lock was taken (A2, step 5).
    pub reading: Reading,
}

/// What the lock session says about one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply<K> {
    /// It has all its keys.
    Admitted {
        /// One for each of its keys, in order.
        grants: Vec<Grant<K>>,
        /// Drawn after the last lock.
        fence: u64,
    },
    /// The key at this place in its list is full; those before it were taken and given back (A3).
    Refused {
        /// The place.
        at: usize,
        /// The limit that counted.
        limit: u32,
    },
    /// A limit kept changing under it: everything is given back, ask again.
    Again,
}

/// Everything that a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer<K> {
    /// Of which session.
    pub generation: u64,
    /// What was read for each converted key.
    pub converted: Vec<(K, Reading)>,
    /// One for each attempt asked for.
    pub replies: Vec<(ClaimToken, Reply<K>)>,
}

/// An attempt that holds its keys from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// The attempt.
    pub token: ClaimToken,
    /// Grows with every holder of a key: 256 for each draw, one for each hand-off (A8).
    pub fence: u64,
}

/// A refused attempt that still has to be written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Park<K> {
    /// The attempt.
    pub token: ClaimToken,
    /// The key that refused it.
    pub key: K,
    /// The limit that counted.
    pub limit: u32,
    /// Whether its job is deleted instead: Skip, and full at the limit stamped on it.
    pub skips: bool,
}

/// How many a wake of a key wakes (A6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wake {
    /// What is missing to the limit.
    Difference,
    /// That, but at least one: a lock was given back.
    AtLeastOne,
}

/// What is owed to the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due<K> {
    /// To be written with the attempt's token. Then [`Table::parked`].
    pub parks: Vec<Park<K>>,
    /// To be woken by a statement that begins now or later.
    pub wakes: BTreeMap<K, Wake>,
    /// To be looked at by a statement that begins now or later; what is free is woken.
    pub looks: BTreeSet<K>,
}

impl<K> Due<K> {
    /// Whether nothing is owed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Due { parks, wakes, looks } = self;
        parks.is_empty() && wakes.is_empty() && looks.is_empty()
    }
}

impl<K> Default for Due<K> {
    fn default() -> Self {
        Due { parks: Vec::new(), wakes: BTreeMap::new(), looks: BTreeSet::new() }
    }
}

/// An attempt that holds a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The attempt.
    pub token: ClaimToken,
    /// Its slot; 0 if it has the whole key.
    pub slot: u32,
    /// Whether this is its only key, so that it can be handed on.
    pub alone: bool,
    /// The limit stamped on it. Without an operator's limit, only who has the same may follow it.
    pub stamped: u32,
    /// The version that its lock was verified under.
    pub version: u64,
    /// The fence of this holder.
    pub fence: u64,
    /// When the lock was taken from the server.
    pub since: Duration,
    /// When this holder got it.
    pub mine_since: Duration,
}

/// A key that this host holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// The whole key, or slots of it.
    pub exclusive: bool,
    /// Who.
    pub holders: Vec<Holder>,
}

/// An attempt that waits inside its host for a key which the host holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter<K> {
    /// The attempt.
    pub ask: Ask<K>,
    /// The limit that refused it.
    pub limit: u32,
    /// Since when.
    pub since: Duration,
}

#[derive(Debug, Clone)]
struct Out<K> {
    asks: Vec<Ask<K>>,
    unlocked: BTreeSet<K>,
    converts: Vec<K>,
    /// Attempts that nobody wants any more: what they are granted is given back.
    withdrawn: BTreeSet<ClaimToken>,
}

/// What a failed call leaves behind: it may have taken, given back and converted all, some or none of its locks.
#[derive(Debug, Clone)]
pub struct Unsure<K> {
    /// Keys that may have been given back, or held for a moment.
    pub keys: BTreeSet<K>,
    /// Keys that may be a slot or exclusive by now.
    pub converts: BTreeSet<K>,
}

/// What a host knows about its lock session. `K` is a key; its order is the one global order (C4).
#[derive(Debug, Clone)]
pub struct Table<K> {
    bounds: Bounds,
    generation: u64,
    asks: VecDeque<Ask<K>>,
    out: Option<Out<K>>,
    holds: BTreeMap<K, Hold>,
    /// Keys whose base lock this session has shared. Taken with the first slot, given back after the last.
    bases: BTreeSet<K>,
    unlocks: Vec<Lock<K>>,
    /// Keys that go back because they have passed on inside this host for long enough: until their wakes are on their way,
    /// this host does not ask for them again.
    yielded: BTreeSet<K>,
    waiters: Vec<Waiter<K>>,
    /// Only of keys that are held.
    readings: BTreeMap<K, (Reading, Duration)>,
    unsure: Option<Unsure<K>>,
    due: Due<K>,
    /// How long a key was held by the last that left it; decides how many may wait for it inside the host.
    pace: BTreeMap<K, Duration>,
    rules: Rules,
}

/// So many keys' pace is remembered; a host that sees more has no use for local waiters on most of them.
const MOST_PACES: usize = 1024;

impl<K: Ord + Copy> Table<K> {
    /// An empty table for the first lock session of a host.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Table {
            bounds,
            generation: 0,
            asks: VecDeque::new(),
            out: None,
            holds: BTreeMap::new(),
            bases: BTreeSet::new(),
            unlocks: Vec::new(),
            yielded: BTreeSet::new(),
            waiters: Vec::new(),
            readings: BTreeMap::new(),
            unsure: None,
            due: Due::default(),
            pace: BTreeMap::new(),
            rules: Rules::default(),
        }
    }

    /// An attempt that a claim has just given to this host. Its keys are put into their global order, each once (C4).
    pub fn ask(&mut self, mut ask: Ask<K>) {
        if self.rules.hold(Rule::KeysInOrder) {
            ask.wants.sort_by_key(|want| want.key);
        }
        ask.wants.dedup_by_key(|want| want.key);
        self.asks.push_back(ask);
    }

    /// What the lock session does next, if there is anything and no call is out. Attempts that the table refuses (A1)
    /// wait here or are parked; the rest is asked for in the order of arrival.
    pub fn next_call(&mut self, mono_now: Duration) -> Option<Call<K>> {
        if self.out.is_some() {
            return None;
        }
        let unsure = self.unsure.take();
        let mut converts = self.to_convert();
        converts.extend(unsure.iter().flat_map(|unsure| &unsure.converts).filter(|key| self.holds.contains_key(key)));
        converts.sort_unstable();
        converts.dedup();
        let mut asks = Vec::new();
        let mut asked = Vec::new();
        for ask in std::mem::take(&mut self.asks) {
            if self.refuses(&ask, &converts) {
                self.refuse(ask, 0, None, mono_now);
            } else {
                asked.push(self.asked(&ask, &converts));
                asks.push(ask);
            }
        }
        let mut unlocks = std::mem::take(&mut self.unlocks);
        let left: Vec<_> = self.bases.iter().copied().filter(|key| !self.holds.contains_key(key)).collect();
        for key in left {
            self.bases.remove(&key);
            unlocks.push(Lock::Base(key));
        }
        // Built before the bases were given back: what is asked for in this call takes them anew.
        for step in asked.iter_mut().flat_map(|asked: &mut Asked<K>| &mut asked.steps) {
            step.has_base = self.bases.contains(&step.key) || converts.contains(&step.key);
        }
        let keep = unsure.as_ref().filter(|_| self.rules.hold(Rule::FailedCallsAreReconciled)).map(|unsure| {
            let mut keep = self.locks();
            let converting = unsure.converts.iter().filter(|key| self.holds.contains_key(key));
            keep.extend(converting.flat_map(|key| [Lock::Base(*key), Lock::Slot(*key, 0)]));
            keep
        });
        if asked.is_empty() && converts.is_empty() && unlocks.is_empty() && keep.is_none() {
            return None;
        }
        let mut unlocked: BTreeSet<K> = unlocks.iter().map(Lock::key).collect();
        unlocked.extend(unsure.into_iter().flat_map(|unsure| unsure.keys));
        self.out = Some(Out { asks, unlocked, converts: converts.clone(), withdrawn: BTreeSet::new() });
        Some(Call { generation: self.generation, keep, unlocks, converts, asks: asked })
    }

    /// The answer of the call that was out. Who starts now; the rest waits here or is due to be parked.
    pub fn answered(&mut self, answer: Answer<K>, mono_now: Duration) -> Vec<Started> {
        if answer.generation != self.generation && self.rules.hold(Rule::CallsBelongToTheirSession) {
            return Vec::new();
        }
        let Some(Out { asks, unlocked, converts: _, withdrawn }) = self.out.take() else { return Vec::new() };
        // A5: the wake's snapshot begins after the unlock was answered, which is now.
        if self.rules.hold(Rule::WakeAfterUnlock) {
            for key in unlocked {
                self.owe_wake(key, Wake::AtLeastOne);
            }
        }
        for (key, reading) in answer.converted {
            self.converted(key, reading, mono_now);
        }
        let mut replies: BTreeMap<_, _> = answer.replies.into_iter().collect();
        let mut started = Vec::new();
        for ask in asks {
            let token = ask.token;
            match replies.remove(&token) {
                Some(Reply::Admitted { grants, fence }) => {
                    self.hold(&ask, &grants, fence, mono_now);
                    if withdrawn.contains(&token) {
                        self.give_back(token, mono_now);
                    } else {
                        started.push(Started { token, fence });
                    }
                }
                Some(Reply::Refused { at, .. }) if withdrawn.contains(&token) => {
                    self.given_back(&ask, at, true);
                    self.pass_ticket_on(&ask, Some((at, true)));
                }
                Some(Reply::Refused { at, limit }) => self.refuse(ask, at, Some(limit), mono_now),
                Some(Reply::Again) | None if withdrawn.contains(&token) => self.pass_ticket_on(&ask, None),
                Some(Reply::Again) | None => self.asks.push_front(ask),
            }
        }
        started
    }

    /// The call that was out failed on a session that still lives (cancelled, timed out): nobody knows what it took or
    /// gave back. The next call settles that first (A13).
    pub fn failed(&mut self) {
        let Some(Out { asks, unlocked, converts, withdrawn }) = self.out.take() else { return };
        let mut unsure = Unsure { keys: unlocked, converts: converts.into_iter().collect() };
        for ask in asks.into_iter().rev() {
            unsure.keys.extend(ask.wants.iter().map(|want| want.key));
            if withdrawn.contains(&ask.token) {
                self.pass_ticket_on(&ask, None);
            } else {
                self.asks.push_front(ask);
            }
        }
        self.unsure = Some(unsure);
    }

    /// Keys of which a free place is as good as taken: their one holder is among these attempts, which are about to be
    /// settled, its slot may pass on, and nobody waits for it yet. The statement that settles may wake and claim for them: who
    /// comes with its answer is told to [`Table::ask`] before [`Table::settled`] and follows without a call (A8).
    pub fn may_follow(&self, ended: impl Iterator<Item = ClaimToken>, mono_now: Duration) -> BTreeSet<K> {
        let ended: BTreeSet<ClaimToken> = ended.collect();
        let is_open = |hold: &Hold| match hold.holders.as_slice() {
            [holder] => hold.exclusive && ended.contains(&holder.token) && self.may_pass(holder, mono_now),
            _ => false,
        };
        let open = self.holds.iter().filter(|(_, hold)| is_open(hold)).map(|(key, _)| *key);
        open.filter(|key| self.waiters.iter().all(|waiter| waiter.ask.wants[0].key != *key)).collect()
    }

    /// Keys that go back for others to have their turn: nothing more should be claimed here before they are told.
    #[must_use]
    pub fn yielded(&self) -> &BTreeSet<K> {
        &self.yielded
    }

    /// The attempt has ended and its settle is committed (A5). A slot that may pass on does so at once (A8), to who waits
    /// inside the host or was claimed with that settle; every other lock of it goes back with the next call. An attempt that
    /// holds nothing is no error.
    pub fn settled(&mut self, token: ClaimToken, mono_now: Duration) -> Vec<Started> {
        if let Some(started) = self.hand_off(token, mono_now) {
            return vec![started];
        }
        self.give_back(token, mono_now);
        Vec::new()
    }

    /// Nobody wants this attempt any more, and it has not started: its job is cancelled, or the caller has gone. What it is
    /// granted after that goes back.
    pub fn withdraw(&mut self, token: ClaimToken, mono_now: Duration) {
        if let Some(out) = self.out.as_mut().filter(|out| out.asks.iter().any(|ask| ask.token == token)) {
            out.withdrawn.insert(token);
            return;
        }
        let asks = std::mem::take(&mut self.asks);
        let (gone, stay): (VecDeque<_>, VecDeque<_>) = asks.into_iter().partition(|ask| ask.token == token);
        self.asks = stay;
        for ask in gone {
            self.pass_ticket_on(&ask, None);
        }
        self.waiters.retain(|waiter| waiter.ask.token != token);
        self.due.parks.retain(|park| park.token != token);
        self.give_back(token, mono_now);
    }

    /// A newer reading of a key. A raise under an exclusive holder makes it a slot with the next call (A11).
    pub fn read(&mut self, key: K, reading: Reading, mono_now: Duration) {
        if self.holds.contains_key(&key) && self.readings.get(&key).is_none_or(|(old, _)| old.version <= reading.version) {
            self.readings.insert(key, (reading, mono_now));
        }
    }

    /// A9: attempts that have waited long enough are due to be parked.
    pub fn tick(&mut self, mono_now: Duration) {
        if !self.rules.hold(Rule::LocalWaitIsBounded) {
            return;
        }
        let patience = self.bounds.patience;
        self.send_away(|waiter| mono_now.saturating_sub(waiter.since) >= patience);
    }

    /// When the next local waiter has waited long enough.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        self.waiters.iter().map(|waiter| waiter.since.saturating_add(self.bounds.patience)).min()
    }

    /// What is owed to the rows. What could not be written comes back with [`Table::owe`].
    pub fn take_due(&mut self) -> Due<K> {
        let due = std::mem::take(&mut self.due);
        self.yielded.retain(|key| !due.wakes.contains_key(key));
        due
    }

    /// Whether something is owed to the rows.
    #[must_use]
    pub fn owes(&self) -> bool {
        !self.due.is_empty()
    }

    /// Puts back what could not be written.
    pub fn owe(&mut self, due: Due<K>) {
        self.due.parks.extend(due.parks);
        self.due.looks.extend(due.looks);
        for (key, wake) in due.wakes {
            self.owe_wake(key, wake);
        }
    }

    /// A4: jobs were parked on this key, by [`Due::parks`] or by a claim, and that is committed. Its slots are looked at
    /// once more, unless this host has the whole key: then its own unlock comes later and wakes.
    pub fn parked(&mut self, key: K) {
        let own = self.holds.get(&key).is_some_and(|hold| hold.exclusive);
        if self.rules.hold(Rule::LookAfterPark) && !own {
            self.due.looks.insert(key);
        }
    }

    /// A job that gave its place up before this host asked for its keys (deleted by the claim, say) passes its wake on.
    pub fn owe_wake(&mut self, key: K, wake: Wake) {
        let owed = self.due.wakes.entry(key).or_insert(wake);
        *owed = wake.max(*owed);
    }

    /// A13: the lock session is gone, and with it every lock. Who must be stopped by force, at once; what had not
    /// started asks the next session again, and every key that was held or about to be freed is woken.
    pub fn lost(&mut self) -> Vec<ClaimToken> {
        self.generation += 1;
        let mut keys: BTreeSet<K> = self.unsure.take().map(|unsure| unsure.keys).unwrap_or_default();
        if self.rules.hold(Rule::CallsBelongToTheirSession) {
            keys.extend(self.unlocks.drain(..).map(|lock| lock.key()));
        }
        keys.append(&mut self.bases);
        if let Some(Out { asks, unlocked, converts: _, withdrawn }) = self.out.take() {
            keys.extend(unlocked);
            for ask in asks.into_iter().rev() {
                keys.extend(ask.wants.iter().map(|want| want.key));
                if withdrawn.contains(&ask.token) {
                    self.pass_ticket_on(&ask, None);
                } else {
                    self.asks.push_front(ask);
                }
            }
        }
        let mut stopped = BTreeSet::new();
        for (key, hold) in std::mem::take(&mut self.holds) {
            keys.insert(key);
            stopped.extend(hold.holders.iter().map(|holder| holder.token));
        }
        self.readings.clear();
        self.yielded.clear();
        for key in keys {
            self.owe_wake(key, Wake::AtLeastOne);
        }
        self.send_away(|_| true);
        if !self.rules.hold(Rule::LossStopsHolders) {
            stopped.clear();
        }
        stopped.into_iter().collect()
    }

    /// C3: the host's lease has lapsed. Everything stops, begun or not, and each is given back by its token; the lock
    /// session is closed.
    pub fn lapsed(&mut self) -> Vec<ClaimToken> {
        let mut all: BTreeSet<ClaimToken> = self.lost().into_iter().collect();
        let unstarted = self.asks.drain(..).map(|ask| ask.token);
        let unstarted: Vec<_> = unstarted.chain(self.due.parks.drain(..).map(|park| park.token)).collect();
        if self.rules.hold(Rule::LapseGivesAllBack) {
            all.extend(unstarted);
        }
        all.into_iter().collect()
    }

    /// Of which session the next call will be.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether a call is out.
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.out.is_some()
    }

    /// Keys that this host holds.
    pub fn holds(&self) -> impl Iterator<Item = (K, &Hold)> {
        self.holds.iter().map(|(key, hold)| (*key, hold))
    }

    /// The newest reading of a held key.
    #[must_use]
    pub fn reading(&self, key: K) -> Option<Reading> {
        self.readings.get(&key).map(|(reading, _)| *reading)
    }

    /// Attempts waiting inside the host, oldest first.
    #[must_use]
    pub fn waiters(&self) -> &[Waiter<K>] {
        &self.waiters
    }

    /// Attempts that are running rows of this host and that no worker has: asked for, waiting, or due to be parked.
    pub fn unstarted(&self) -> impl Iterator<Item = ClaimToken> {
        let asks = self.asks.iter().chain(self.out.iter().flat_map(|out| &out.asks)).map(|ask| ask.token);
        let waiters = self.waiters.iter().map(|waiter| waiter.ask.token);
        asks.chain(waiters).chain(self.due.parks.iter().map(|park| park.token))
    }

    /// What is owed, without taking it.
    #[must_use]
    pub fn due(&self) -> &Due<K> {
        &self.due
    }

    /// Asked for by the next call, in order.
    pub fn asks(&self) -> impl Iterator<Item = &Ask<K>> {
        self.asks.iter()
    }

    /// Locks that the next call gives back.
    #[must_use]
    pub fn unlocks(&self) -> &[Lock<K>] {
        &self.unlocks
    }

    /// The call that is out: its attempts and the keys that it gives back.
    pub fn out(&self) -> Option<(&[Ask<K>], &BTreeSet<K>)> {
        self.out.as_ref().map(|out| (out.asks.as_slice(), &out.unlocked))
    }

    /// Keys whose locks are unknown since a call failed.
    #[must_use]
    pub fn unsure(&self) -> Option<&Unsure<K>> {
        self.unsure.as_ref()
    }

    /// Every lock that this session is known to have.
    #[must_use]
    pub fn locks(&self) -> BTreeSet<Lock<K>> {
        let mut locks: BTreeSet<_> = self.bases.iter().map(|key| Lock::Base(*key)).collect();
        for (key, hold) in &self.holds {
            locks.extend(hold.holders.iter().map(|holder| if hold.exclusive { Lock::Whole(*key) } else { Lock::Slot(*key, holder.slot) }));
        }
        locks
    }

    /// How many running rows of this key beyond its limit this host has use for: those who would be served inside the
    /// host within the patience, as long as runs take what the last one took. None for a key whose pace is unknown.
    #[must_use]
    pub fn room(&self, key: K) -> u32 {
        let Some(pace) = self.pace.get(&key) else { return 0 };
        let slots = self.holds.get(&key).map_or(1, |hold| hold.holders.len().max(1));
        let in_time = self.bounds.patience.as_micros() / pace.as_micros().max(1);
        // The one that holds the key now needs its time too.
        let in_time = usize::try_from(in_time.saturating_sub(1)).unwrap_or(usize::MAX);
        let others = self.waiters.iter().filter(|waiter| waiter.ask.wants[0].key != key).count();
        let room = in_time.saturating_mul(slots).min(self.bounds.waiters_of_a_key).min(self.bounds.waiters.saturating_sub(others));
        u32::try_from(room).unwrap_or(0)
    }

    // ---------------------------------------------------------------------------------------- inside

    /// A1: whether this host holds the attempt's first key so that the server must not be asked. Nobody is admitted beside an
    /// own exclusive holder. (Exclusive beside own slots is refused by the server's function, which alone knows the limit in
    /// force; it is told what is this session's own.) Nor does it get back at once what it has just left to others (A8).
    fn refuses(&self, ask: &Ask<K>, converts: &[K]) -> bool {
        let yields = ask.mode == Mode::Wait && matches!(ask.wants.as_slice(), [want] if self.yielded.contains(&want.key));
        yields || ask.wants.first().is_some_and(|want| self.has_whole(want.key, converts))
    }

    /// Whether this host has the whole key, and keeps it so through the next call.
    fn has_whole(&self, key: K, converts: &[K]) -> bool {
        let whole = self.holds.get(&key).is_some_and(|hold| hold.exclusive) && !converts.contains(&key);
        whole && self.rules.hold(Rule::TableFirst)
    }

    fn asked(&self, ask: &Ask<K>, converts: &[K]) -> Asked<K> {
        let step = |want: &Want<K>| {
            let own = self.holds.get(&want.key).filter(|_| self.rules.hold(Rule::TableFirst));
            let own = own.map_or_else(Vec::new, |hold| hold.holders.iter().map(|holder| holder.slot).collect());
            Step { key: want.key, limit: want.limit, has_base: false, own, whole: self.has_whole(want.key, converts) }
        };
        Asked { token: ask.token, steps: ask.wants.iter().map(step).collect() }
    }

    /// Refused at a place in its list, by the table (`limit` is none: nothing was tried) or by the server.
    fn refuse(&mut self, mut ask: Ask<K>, at: usize, limit: Option<u32>, mono_now: Duration) {
        self.given_back(&ask, at, limit.is_some());
        self.pass_ticket_on(&ask, Some((at, limit.is_some())));
        ask.woken_for = None;
        let Want { key, limit: stamped } = ask.wants[at];
        let limit = limit.unwrap_or(1);
        if ask.mode == Mode::Wait && self.may_wait(&ask) {
            self.waiters.push(Waiter { ask, limit, since: mono_now });
            return;
        }
        // Deleting work needs a key that is full at the limit stamped on it; an operator's lower one makes it wait.
        let skips = ask.mode == Mode::Skip && limit >= stamped;
        self.due.parks.push(Park { token: ask.token, key, limit, skips });
    }

    /// A7: for a moment it held these, and somebody may have been refused because of it.
    fn given_back(&mut self, ask: &Ask<K>, at: usize, tried: bool) {
        if tried && self.rules.hold(Rule::GiveBackWakes) {
            for want in &ask.wants[..at] {
                self.owe_wake(want.key, Wake::AtLeastOne);
            }
        }
    }

    /// A7: whoever was woken for a key and ends without having tried it wakes that key. `refused` is the place where it
    /// was refused and whether the server tried all before that place.
    fn pass_ticket_on(&mut self, ask: &Ask<K>, refused: Option<(usize, bool)>) {
        let Some(key) = ask.woken_for else { return };
        let place = ask.wants.iter().position(|want| want.key == key);
        let tried = matches!((place, refused), (Some(place), Some((at, all))) if place == at || all && place < at);
        if !tried && self.rules.hold(Rule::TicketPassesOn) {
            self.owe_wake(key, Wake::AtLeastOne);
        }
    }

    /// A9: only for a key of which an own attempt with no other key is holder, and within the bounds.
    fn may_wait(&self, ask: &Ask<K>) -> bool {
        let [Want { key, .. }] = ask.wants.as_slice() else { return false };
        let of_key = self.waiters.iter().filter(|waiter| waiter.ask.wants[0].key == *key).count();
        let held = self.holds.get(key).is_some_and(|hold| hold.holders.iter().any(|holder| holder.alone));
        held && self.bounds.hand_offs > 0 && of_key < self.bounds.waiters_of_a_key && self.waiters.len() < self.bounds.waiters
    }

    fn hold(&mut self, ask: &Ask<K>, grants: &[Grant<K>], fence: u64, mono_now: Duration) {
        let (token, alone) = (ask.token, grants.len() == 1);
        for (Grant { key, slot, reading }, stamped) in grants.iter().zip(ask.wants.iter().map(|want| want.limit)) {
            let hold = self.holds.entry(*key).or_insert_with(|| Hold { exclusive: slot.is_none(), holders: Vec::new() });
            let slot = slot.inspect(|_| _ = self.bases.insert(*key)).unwrap_or(0);
            let version = reading.version;
            hold.holders.push(Holder { token, slot, alone, stamped, version, fence, since: mono_now, mine_since: mono_now });
            self.read(*key, *reading, mono_now);
        }
    }

    /// A8: whether its slot may pass to another attempt of this host, as far as this host knows.
    fn may_pass(&self, holder: &Holder, mono_now: Duration) -> bool {
        let Bounds { hand_offs, streak, .. } = self.bounds;
        holder.alone && holder.fence % 256 < u64::from(hand_offs) && mono_now.saturating_sub(holder.since) <= streak
    }

    /// A8. The finished attempt's settle is in; the difference is woken with the same or the next batch.
    fn hand_off(&mut self, token: ClaimToken, mono_now: Duration) -> Option<Started> {
        let (&key, hold) = self.holds.iter().find(|(_, hold)| hold.holders.iter().any(|holder| holder.token == token))?;
        let (exclusive, holder) = (hold.exclusive, hold.holders.iter().find(|holder| holder.token == token)?.clone());
        let newest = self.readings.get(&key);
        let current = newest
            .is_some_and(|(reading, read)| reading.version == holder.version && mono_now.saturating_sub(*read) <= self.bounds.reading);
        if !self.may_pass(&holder, mono_now) || !current && self.rules.hold(Rule::HandOffChecksTheVersion) {
            return None;
        }
        let one_limit = newest.is_some_and(|(reading, _)| reading.admin_limit.is_some());
        let next = self.next_inside(key, exclusive, (!one_limit).then_some(holder.stamped))?;
        let (token, stamped) = (next.token, next.wants[0].limit);
        let fence = holder.fence + 1;
        let took = mono_now.saturating_sub(holder.mine_since);
        let places = self.holds.get_mut(&key).into_iter().flat_map(|hold| &mut hold.holders);
        for place in places.filter(|place| place.token == holder.token) {
            *place = Holder { token, stamped, fence, mine_since: mono_now, ..holder.clone() };
        }
        self.remember_pace(key, took);
        if self.rules.hold(Rule::HandOffWakesTheDifference) {
            self.owe_wake(key, Wake::Difference);
        }
        Some(Started { token, fence })
    }

    /// Who follows on a slot that passes on: whoever waits for the key inside the host, then who has been claimed and would
    /// ask for it next. Only under the limit of the one before (`stamped`), if no operator's limit is the same for all.
    ///
    /// Who was woken for one of several slots does not take this one: nobody would come for the other (A7). Of a key
    /// with one slot it is the same one.
    fn next_inside(&mut self, key: K, exclusive: bool, stamped: Option<u32>) -> Option<Ask<K>> {
        let fits = |ask: &Ask<K>| match ask.wants.as_slice() {
            [want] => want.key == key && stamped.is_none_or(|stamped| stamped == want.limit),
            _ => false,
        };
        if let Some(at) = self.waiters.iter().position(|waiter| fits(&waiter.ask)) {
            return Some(self.waiters.remove(at).ask);
        }
        let keeps_ticket = |ask: &Ask<K>| !exclusive && ask.woken_for.is_some() && self.rules.hold(Rule::TicketPassesOn);
        let at = self.asks.iter().position(|ask| fits(ask) && !keeps_ticket(ask))?;
        self.asks.remove(at)
    }

    /// Every lock of this attempt goes back with the next call.
    fn give_back(&mut self, token: ClaimToken, mono_now: Duration) {
        let has = |hold: &Hold| hold.holders.iter().any(|holder| holder.token == token);
        let keys: Vec<K> = self.holds.iter().filter(|(_, hold)| has(hold)).map(|(key, _)| *key).collect();
        for key in keys {
            let Some(hold) = self.holds.get_mut(&key) else { continue };
            let Some(at) = hold.holders.iter().position(|holder| holder.token == token) else { continue };
            let Holder { slot, mine_since, alone, fence, since, .. } = hold.holders.swap_remove(at);
            self.unlocks.push(if hold.exclusive { Lock::Whole(key) } else { Lock::Slot(key, slot) });
            // Where nothing is ever handed on, every run is a turn of its own; and one of several slots is soon another host's.
            let over = fence % 256 >= u64::from(self.bounds.hand_offs) || mono_now.saturating_sub(since) > self.bounds.streak;
            if hold.exclusive && alone && over && self.bounds.hand_offs > 0 {
                self.yielded.insert(key);
            }
            let followed = hold.holders.iter().any(|holder| holder.alone);
            if hold.holders.is_empty() {
                self.holds.remove(&key);
                self.readings.remove(&key);
            }
            self.remember_pace(key, mono_now.saturating_sub(mine_since));
            if !self.rules.hold(Rule::WakeAfterUnlock) {
                self.owe_wake(key, Wake::AtLeastOne);
            }
            // A9: nobody waits for a key without an own holder that can be followed.
            if !followed && self.rules.hold(Rule::LocalWaitIsBounded) {
                self.send_away(|waiter| waiter.ask.wants[0].key == key);
            }
        }
    }

    /// Local waiters that wait no longer: they are parked like any other (A4).
    fn send_away(&mut self, who: impl Fn(&Waiter<K>) -> bool) {
        for Waiter { ask, limit, since: _ } in self.waiters.extract_if(.., |waiter| who(waiter)) {
            self.due.parks.push(Park { token: ask.token, key: ask.wants[0].key, limit, skips: false });
        }
    }

    fn remember_pace(&mut self, key: K, took: Duration) {
        if self.pace.len() < MOST_PACES || self.pace.contains_key(&key) {
            self.pace.insert(key, took);
        }
    }

    fn to_convert(&self) -> Vec<K> {
        if !self.rules.hold(Rule::RaiseConverts) {
            return Vec::new();
        }
        let raised = |key: &K| self.readings.get(key).is_some_and(|(reading, _)| reading.admin_limit.is_some_and(|limit| limit > 1));
        self.holds.iter().filter(|(key, hold)| hold.exclusive && raised(key)).map(|(key, _)| *key).collect()
    }

    fn converted(&mut self, key: K, reading: Reading, mono_now: Duration) {
        let Some(hold) = self.holds.get_mut(&key) else {
            // Its holder left while the call was out: what the conversion took goes back.
            self.unlocks.retain(|lock| *lock != Lock::Whole(key));
            self.unlocks.push(Lock::Slot(key, 0));
            self.bases.insert(key);
            return;
        };
        hold.exclusive = false;
        for holder in &mut hold.holders {
            holder.version = reading.version;
        }
        self.bases.insert(key);
        self.read(key, reading, mono_now);
        self.owe_wake(key, Wake::Difference);
    }
}

/// A6: how many parked jobs of a key a wake wakes, given its limit and how many jobs with it are ready or running. The
/// statements repeat this.
#[must_use]
pub fn how_many(limit: u32, active: u32, wake: Wake) -> u32 {
    let difference = limit.saturating_sub(active);
    match wake {
        Wake::Difference => difference,
        Wake::AtLeastOne => difference.max(1),
    }
}

/// A2, step 3: slots below the answer may be tried at this limit; 0 refuses. `held` is every slot below the highest limit
/// ever used, by whether somebody holds it. Takers stay below the answer, so what is held above it only falls. The
/// server's function repeats this.
#[must_use]
pub fn usable_slots(limit: u32, held: &[bool]) -> u32 {
    let above = |from: u32| held.iter().skip(from as usize).filter(|held| **held).count() as u64;
    (0..=limit).rev().find(|&below| u64::from(below) + above(below) <= u64::from(limit)).unwrap_or(0)
}

/// A4: how many slots of a key the look after a park finds free. The statement repeats this.
#[must_use]
pub fn free_slots(limit: u32, whole_is_held: bool, base_is_held: bool, slots_held: u32) -> u32 {
    match (limit, whole_is_held) {
        (_, true) => 0,
        (1, false) => u32::from(!base_is_held),
        (limit, false) => limit.saturating_sub(slots_held),
    }
}

#[cfg(feature = "mutations")]
impl<K> Table<K> {
    /// Switches one rule off (`None`: all are in force), to show that a test notices. Only with the feature
    /// `mutations`, which nothing but `warp-testkit`'s own tests enables.
    pub fn break_rule(&mut self, rule: Option<Rule>) {
        self.rules = Rules::without(rule);
    }
}

/// The rules by name, so that a mutation test can switch one off. Without the feature they always hold.
mod rules {
    /// One rule of slots.md as it stands in this file.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Rule {
        /// C3: a lapsed host gives back what it had not begun, too.
        LapseGivesAllBack,
        /// C4: one global order.
        KeysInOrder,
        /// A1: the host's own table decides first.
        TableFirst,
        /// A4: look again after the park.
        LookAfterPark,
        /// A5: the wake comes after the unlock.
        WakeAfterUnlock,
        /// A7: a lock held for a moment wakes too when it is given back.
        GiveBackWakes,
        /// A7: a wake for a key that was not tried is passed on.
        TicketPassesOn,
        /// A8: only under the newest version read.
        HandOffChecksTheVersion,
        /// A8: a hand-off is followed by a wake of the difference.
        HandOffWakesTheDifference,
        /// A9: local waiters wait a bounded time, and not beyond the last own holder.
        LocalWaitIsBounded,
        /// A11: an exclusive holder becomes a slot under a raised limit.
        RaiseConverts,
        /// A13: calls, their answers and what was to be unlocked belong to their session.
        CallsBelongToTheirSession,
        /// A13: a lost session stops what holds.
        LossStopsHolders,
        /// A13: what a failed call took is found out before the next call.
        FailedCallsAreReconciled,
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

    const NOW: Duration = Duration::ZERO;
    const KEY: u8 = 7;
    const READING: Reading = Reading { admin_limit: None, version: 1 };

    fn table(hand_offs: u8) -> Table<u8> {
        Table::new(Bounds { hand_offs, ..Bounds::default() })
    }

    fn ask(token: i64, limit: u32) -> Ask<u8> {
        Ask { token: ClaimToken(token), wants: vec![Want { key: KEY, limit }], mode: Mode::Wait, woken_for: None }
    }

    fn woken(token: i64, limit: u32) -> Ask<u8> {
        Ask { woken_for: Some(KEY), ..ask(token, limit) }
    }

    /// Asks for it, and the server admits it: to a slot, or to the whole key.
    fn admit(table: &mut Table<u8>, ask: Ask<u8>, slot: Option<u32>, fence: u64) {
        let token = ask.token;
        table.ask(ask);
        let call = table.next_call(NOW).expect("there is something to ask");
        let grants = vec![Grant { key: KEY, slot, reading: READING }];
        let replies = vec![(token, Reply::Admitted { grants, fence })];
        let started = table.answered(Answer { generation: call.generation, converted: Vec::new(), replies }, NOW);
        assert_eq!(started, [Started { token, fence }]);
    }

    /// Who has its slot when this one is settled.
    fn follower(table: &mut Table<u8>, token: i64) -> Option<(i64, u64)> {
        table.settled(ClaimToken(token), NOW).first().map(|started| (started.token.0, started.fence))
    }

    #[test]
    fn who_was_just_claimed_follows_without_a_call() {
        let mut table = table(100);
        admit(&mut table, ask(1, 1), None, 256);
        assert_eq!(table.may_follow([ClaimToken(1)].into_iter(), NOW), BTreeSet::from([KEY]));
        assert_eq!(table.may_follow([ClaimToken(9)].into_iter(), NOW), BTreeSet::new(), "its holder goes on");
        // The one slot is the one that it was woken for.
        table.ask(woken(2, 1));
        assert_eq!(follower(&mut table, 1), Some((2, 257)));
        assert_eq!(table.due().wakes, BTreeMap::from([(KEY, Wake::Difference)]));
        assert_eq!(table.next_call(NOW), None, "nothing is asked and nothing goes back");
    }

    #[test]
    fn who_waits_inside_is_before_who_was_just_claimed() {
        let mut table = table(100);
        admit(&mut table, ask(1, 1), None, 256);
        table.ask(ask(2, 1));
        assert_eq!(table.next_call(NOW), None, "it waits inside");
        assert_eq!(table.may_follow([ClaimToken(1)].into_iter(), NOW), BTreeSet::new(), "one is there already");
        table.ask(ask(3, 1));
        assert_eq!(follower(&mut table, 1), Some((2, 257)));
    }

    #[test]
    fn nobody_follows_under_the_limit_of_another() {
        let mut table = table(100);
        admit(&mut table, ask(1, 3), Some(0), 256);
        table.ask(ask(2, 1));
        assert_eq!(follower(&mut table, 1), None, "at its own limit it may have nobody beside it");
        let mut table = self::table(100);
        admit(&mut table, ask(1, 3), Some(0), 256);
        table.ask(ask(2, 1));
        table.read(KEY, Reading { admin_limit: Some(3), ..READING }, NOW);
        assert_eq!(follower(&mut table, 1), Some((2, 257)), "an operator's limit is the same for all");
    }

    #[test]
    fn who_was_woken_for_one_slot_does_not_follow_on_another() {
        let mut table = table(100);
        admit(&mut table, ask(1, 2), Some(0), 256);
        assert_eq!(table.may_follow([ClaimToken(1)].into_iter(), NOW), BTreeSet::new(), "nobody is woken in its place");
        table.ask(woken(2, 2));
        table.ask(ask(3, 2));
        assert_eq!(follower(&mut table, 1), Some((3, 257)));
        let call = table.next_call(NOW).expect("the other asks");
        assert_eq!(call.asks.iter().map(|asked| asked.token.0).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_turn_that_is_over_is_left_to_others() {
        let mut table = table(1);
        admit(&mut table, ask(1, 1), None, 256);
        table.ask(ask(2, 1));
        assert_eq!(follower(&mut table, 1), Some((2, 257)));
        table.take_due();
        assert_eq!(table.may_follow([ClaimToken(2)].into_iter(), NOW), BTreeSet::new(), "it has passed on often enough");
        table.ask(ask(3, 1));
        assert_eq!(follower(&mut table, 2), None);
        assert_eq!(table.yielded(), &BTreeSet::from([KEY]));
        let skip = Ask { mode: Mode::Skip, ..ask(4, 1) };
        table.ask(skip);
        let call = table.next_call(NOW).expect("the key goes back");
        assert_eq!(call.unlocks, [Lock::Whole(KEY)]);
        assert_eq!(call.asks.iter().map(|asked| asked.token.0).collect::<Vec<_>>(), [4], "no work is deleted for a turn's sake");
        let replies = vec![(ClaimToken(4), Reply::Refused { at: 0, limit: 1 })];
        table.answered(Answer { generation: call.generation, converted: Vec::new(), replies }, NOW);
        let due = table.take_due();
        assert_eq!(due.parks.iter().map(|park| (park.token.0, park.skips)).collect::<Vec<_>>(), [(3, false), (4, true)]);
        assert_eq!(due.wakes, BTreeMap::from([(KEY, Wake::AtLeastOne)]));
        table.ask(ask(5, 1));
        assert!(table.next_call(NOW).is_some(), "the others have been told");
    }
}
