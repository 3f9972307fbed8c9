//! Slots as session locks: what a host's exchange does beside its statement (slots.md A).
//!
//! An exchange is the statement that ends and claims (`warp.exchange`), and then one call of the host's lock session, which
//! gives back what ended, and takes what the claimed runs need. Those who are admitted are the exchange's answer. What
//! a refusal or an unlock leaves to be written (parks, wakes, looks) rides in the next exchange, or is written by the host's
//! keeper when none comes. A slot that may stay in the host passes to the next run without any statement (A8).
//!
//! What must stay true:
//! - an end is committed before its locks go back (A5), a park before its key is looked at again (A4), and no wake leaves
//!   before the unlock was answered;
//! - the table belongs to whoever holds the host's state, and a statement or call about it is awaited to its end by a task
//!   that nobody drops;
//! - a lost session stops its runs at the moment in which the loss is noticed, whatever else is under way; nothing that
//!   held its slots by it begins after that; and the next session takes nothing until every session that may have died
//!   with it must have been noticed (A13);
//! - whoever has got its slots is told of with an exchange that claims, and with no other: no renewal is under way then,
//!   so none takes a run for unknown whose answer is still on its way;
//! - rows that are claimed and have no slot yet are this module's: a renewal knows them, a stop hands them back.
//!
//! What it deliberately does not do: decide who may have a slot. That is `domain::session`, and the function of the schema.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use warp_domain::policy::Mode;
use warp_domain::session::{Ask, Bounds, Due, Reading, Started, Table, Wake, Want};
use warp_domain::{ClaimToken, HostId, JobHandle, KeyId, UnixMillis};
use warp_store::{CancelSignal, ClaimParams, Claimed, ExchangeParams, Exchanged, HandOff, SettleVerdict, StoreErrorKind};

use crate::Core;
use crate::call::Sql;
use crate::connect::Connector;
use crate::error::Fault;
use crate::exchange::{Exchange, Heard, Ride, Wanted};
use crate::listen::Changes;
use crate::locks::{LockSession, NOTICE, NoAnswer, STOP};
use crate::rows::host_number;

/// How long what is owed waits for an exchange to ride in.
const RIDE: Duration = Duration::from_millis(5);
/// And if it is only the wake that follows a hand-off (A8): it finds somebody where a limit was raised just then, and the
/// exchange that ends the next run brings it.
const LONG_RIDE: Duration = Duration::from_millis(100);
/// A call may fail so often in a row before the session is given up.
const MOST_FAILURES: u32 = 3;
/// Statements of one exchange: what is given back is claimed anew, and what that refuses is looked at.
const MOST_ROUNDS: usize = 4;
/// How soon the keeper looks again where an exchange was under way.
const BUSY: Duration = Duration::from_millis(20);
/// The pause between two tries to open a session, or to write what is owed.
const RETRY: Duration = Duration::from_millis(500);

/// The hosts of this process, each with its lock session.
pub(crate) struct Sessions {
    core: Arc<Core>,
    connector: Connector,
    changes: Arc<Changes>,
    hosts: Mutex<HashMap<HostId, Arc<Host>>>,
}

/// One host.
pub(crate) struct Host {
    id: HostId,
    core: Arc<Core>,
    connector: Connector,
    changes: Arc<Changes>,
    state: AsyncMutex<State>,
    holders: Arc<Holders>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

/// Runs that hold slots and that the worker was told of. Apart from [`State`], which an exchange may hold for long, and the
/// keeper with it: they are stopped at the moment in which their session is lost, by the task that notices.
#[derive(Default)]
struct Holders {
    held: Mutex<Held>,
    /// There is something in `lost`.
    was_lost: Notify,
    /// The keeper should look.
    poke: Notify,
}

#[derive(Default)]
struct Held {
    /// The session by which they hold their slots. Nothing before the first, nor from the loss of one to the next.
    session: Option<u64>,
    running: HashMap<ClaimToken, JobHandle>,
    /// Runs whose slots are gone, until somebody has heard of them.
    lost: Vec<CancelSignal>,
}

impl Holders {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new session. What held its slots by an earlier one has been stopped.
    fn begin(&self, session: u64) {
        self.held().session = Some(session);
    }

    /// These are told of now; `false`, and none of them is, if their session is gone.
    fn tell(&self, runs: impl IntoIterator<Item = (ClaimToken, JobHandle)>) -> bool {
        let mut held = self.held();
        if held.session.is_some() {
            held.running.extend(runs);
        }
        held.session.is_some()
    }

    /// This one has ended.
    fn remove(&self, token: ClaimToken) {
        self.held().running.remove(&token);
    }

    /// Forgets whoever is not among these.
    fn retain(&self, known: &HashSet<ClaimToken>) -> Vec<ClaimToken> {
        self.held().running.extract_if(|token, _| !known.contains(token)).map(|(token, _)| token).collect()
    }

    /// Forgets all, and their session.
    fn clear(&self) {
        let mut held = self.held();
        held.session = None;
        held.running.clear();
    }

    /// A13: this session is gone, or whichever it is. Its runs are to be stopped.
    fn lose(&self, session: Option<u64>) {
        let mut held = self.held();
        if session.is_some() && held.session != session {
            // Told already, with the session itself.
            return;
        }
        let Held { session, running, lost } = &mut *held;
        *session = None;
        lost.extend(running.drain().map(|(token, handle)| CancelSignal { handle, token }));
        // One permit, for a listener that is between two waits.
        self.was_lost.notify_one();
    }

    /// Completes with runs whose slots are gone. Dropped, it takes none.
    async fn lost(&self) -> Vec<CancelSignal> {
        loop {
            let heard = self.was_lost.notified();
            let lost = std::mem::take(&mut self.held().lost);
            if !lost.is_empty() {
                return lost;
            }
            heard.await;
        }
    }
}

/// A run that is claimed and has no slot yet.
struct Unstarted {
    claimed: Claimed,
    ask: Ask<KeyId>,
}

struct State {
    table: Table<KeyId>,
    session: Option<LockSession>,
    /// How many there have been.
    sessions: u64,
    /// A new session takes nothing before this (A13b).
    not_before: Instant,
    unstarted: HashMap<ClaimToken, Unstarted>,
    /// Runs that have their slots and that nobody was told of yet.
    started: Vec<Unstarted>,
    failures: u32,
    /// The database did not take what is owed: the keeper does not try again before this.
    owed_not_before: Instant,
    born: Instant,
    /// The latest instant that a caller has named.
    now: UnixMillis,
    closed: bool,
}

impl Sessions {
    pub(crate) fn new(core: Arc<Core>, connector: Connector, changes: Arc<Changes>) -> Self {
        Sessions { core, connector, changes, hosts: Mutex::default() }
    }

    /// The host, from its registration or its first exchange here.
    pub(crate) fn begin(&self, id: HostId) -> Arc<Host> {
        let start = || Host::start(id, self.core.clone(), self.connector.clone(), self.changes.clone());
        self.hosts().entry(id).or_insert_with(start).clone()
    }

    /// The host, if it is here.
    pub(crate) fn host(&self, id: HostId) -> Option<Arc<Host>> {
        self.hosts().get(&id).cloned()
    }

    /// C3: the registration is gone, whoever has heard of it. Its rows have been given back, and nothing of it may take a
    /// slot again: what waited for one would hold it for nobody, for ever. The session ends with the exchange that is under
    /// way, if one is.
    pub(crate) fn lapse(&self, id: HostId) {
        self.hosts().remove(&id);
    }

    /// Takes a host out. Whoever has it closes it ([`Host::close`]), on a task that nobody drops.
    pub(crate) fn take(&self, id: HostId) -> Option<Arc<Host>> {
        self.hosts().remove(&id)
    }

    /// Completes with runs of a host whose slots are gone. Dropped, it takes none. Does not keep the host alive.
    pub(crate) async fn slots_lost(&self, id: HostId) -> Vec<CancelSignal> {
        match self.host(id).map(|host| Arc::clone(&host.holders)) {
            Some(holders) => holders.lost().await,
            None => std::future::pending().await,
        }
    }

    fn hosts(&self) -> MutexGuard<'_, HashMap<HostId, Arc<Host>>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host {
    fn start(id: HostId, core: Arc<Core>, connector: Connector, changes: Arc<Changes>) -> Arc<Self> {
        let now = Instant::now();
        let state = State {
            table: Table::new(Bounds::default()),
            session: None,
            sessions: 0,
            not_before: now,
            unstarted: HashMap::new(),
            started: Vec::new(),
            failures: 0,
            owed_not_before: now,
            born: now,
            now: UnixMillis(0),
            closed: false,
        };
        let host = Arc::new(Host {
            id,
            core,
            connector,
            changes,
            state: AsyncMutex::new(state),
            holders: Arc::default(),
            keeper: Mutex::default(),
        });
        let keeper = tokio::spawn(keep(Arc::downgrade(&host)));
        *host.keeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(keeper);
        host
    }

    /// Ends runs, gives their slots back or on, claims, and takes slots. Run to its end by its caller's task.
    pub(crate) async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged, Fault> {
        let mut guard = self.state.lock().await;
        let state = &mut *guard;
        state.now = params.now;
        self.mend(state).await;
        let mut exchanged = self.round(state, &params).await?;
        // Where a slot came free, or may have, whoever is woken for it is claimed at once, as under the ledger.
        for _ in 1..MOST_ROUNDS {
            let Some(ClaimParams { lanes, max }) = &params.claim else { break };
            let claimed = exchanged.claimed.len() + state.started.len();
            let left = max.saturating_sub(u32::try_from(claimed).unwrap_or(u32::MAX));
            if left == 0 || !state.is_pressed() || !state.table.yielded().is_empty() {
                break;
            }
            let claim = Some(ClaimParams { lanes: lanes.clone(), max: left });
            let again = ExchangeParams { settles: Arc::new([]), claim, hand_off: HandOff::default(), ..params };
            match self.round(state, &again).await {
                Ok(more) => add(&mut exchanged, more),
                // What came before is committed; whatever this is, the next exchange meets it too.
                Err(fault) => {
                    tracing::warn!(why = fault.text(), "no further round of an exchange");
                    break;
                }
            }
        }
        // Nobody here has room for whoever may start, or it is the others' turn (A8).
        if state.is_pressed() {
            self.pay(state).await;
        }
        if params.claim.is_some() {
            self.deliver(state, &mut exchanged);
        } else if !state.started.is_empty() {
            // Those who had to wait for a session, say: a claim brings them.
            self.changes.announce();
        }
        if state.next_look().is_some() {
            self.holders.poke.notify_one();
        }
        Ok(exchanged)
    }

    /// Tells of whoever has got its slots, if the session by which it did still lives. No await lies between that look and
    /// the answer's way to the worker, who may hear of a loss first and remembers it (see [`warp_store::Store::slots_lost`]).
    fn deliver(&self, state: &mut State, exchanged: &mut Exchanged) {
        if state.started.is_empty() {
            return;
        }
        if self.holders.tell(state.started.iter().map(|Unstarted { claimed, .. }| (claimed.token, claimed.handle))) {
            exchanged.claimed.extend(state.started.drain(..).map(|unstarted| unstarted.claimed));
        } else {
            // Their slots are gone already: they ask the next session instead of beginning.
            self.lose(state);
        }
    }

    /// One statement, and what the lock session then has to do.
    async fn round(&self, state: &mut State, params: &ExchangeParams) -> Result<Exchanged, Fault> {
        let due = state.table.take_due();
        let ride = ride(state, &due, params);
        let Core { db, interned, clock, announcer: _ } = &*self.core;
        let answer = Exchange { db, interned, clock: *clock, ride: Some(&ride) }.run(params.clone()).await;
        let Ride { owed, heard, room: _, held: _ } = ride;
        if owed.into_inner().unwrap_or_else(PoisonError::into_inner).is_some() {
            state.table.owe(due);
        } else {
            state.written(due);
        }
        let Heard { wants, readings, parked } = heard.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut exchanged = match answer {
            Ok(exchanged) => exchanged,
            Err(fault) if fault.kind() == StoreErrorKind::HostLost => {
                state.lapse();
                self.holders.clear();
                return Err(fault);
            }
            Err(fault) => {
                // One of its statements may have been answered before. What that claimed a renewal hands back, and what it ended
                // is told again; whom it parked nobody else looks after (A4).
                parked.into_iter().for_each(|key| state.table.parked(KeyId(key)));
                self.holders.poke.notify_one();
                return Err(fault);
            }
        };
        let now = state.mono_now();
        for (key, admin_limit, version) in readings {
            state.table.read(KeyId(key), reading(admin_limit, version), now);
        }
        // Before the ends are told of: whoever was claimed with them may follow at once.
        state.ask(&mut exchanged, wants);
        let mut started = Vec::new();
        for (settle, verdict) in params.settles.iter().zip(&exchanged.settled) {
            self.holders.remove(settle.token);
            match verdict {
                SettleVerdict::Late => state.table.withdraw(settle.token, now),
                // Whoever would follow inside the host is not told of here, and a host that stops never claims again: its
                // slots go back.
                _ if params.claim.is_none() => state.table.withdraw(settle.token, now),
                _ => started.extend(state.table.settled(settle.token, now)),
            }
        }
        state.collect(started);
        for key in parked {
            state.table.parked(KeyId(key));
        }
        self.drive(state).await;
        Ok(exchanged)
    }

    /// Rows of this host that no worker knows: claimed, and without a slot yet.
    pub(crate) async fn unstarted(&self) -> Vec<(JobHandle, ClaimToken)> {
        let state = self.state.lock().await;
        state.unstarted.values().chain(&state.started).map(|Unstarted { claimed, .. }| (claimed.handle, claimed.token)).collect()
    }

    /// What a renewal has found: `known` are the worker's runs, `lost` rows that are not this host's any more.
    pub(crate) async fn compare(&self, known: &[(JobHandle, ClaimToken)], lost: &[(JobHandle, ClaimToken)]) {
        let mut guard = self.state.lock().await;
        let state = &mut *guard;
        let now = state.mono_now();
        for (_, token) in lost {
            let was_started = state.started.extract_if(.., |unstarted| unstarted.claimed.token == *token).count() > 0;
            if state.unstarted.remove(token).is_some() || was_started {
                state.table.withdraw(*token, now);
            }
        }
        // A grant whose caller has gone before it heard of it.
        for token in self.holders.retain(&known.iter().map(|(_, token)| *token).collect()) {
            state.table.withdraw(token, now);
        }
        self.holders.poke.notify_one();
    }

    /// Gives back everything that the host holds and ends its session; what was owed is written first. Run to its end by its
    /// caller's task: dropped, nobody would write that.
    pub(crate) async fn close(&self) {
        let mut guard = self.state.lock().await;
        let state = &mut *guard;
        // Not before the state is here: a keeper that is stopped in the middle of a call or a statement would leave a table that
        // waits for an answer for ever, and take what it was about to write with it.
        if let Some(keeper) = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take() {
            keeper.abort();
        }
        state.closed = true;
        self.drive(state).await;
        self.pay(state).await;
        state.session = None;
    }

    /// Opens a session where there is none, after whatever was lost has been stopped.
    async fn mend(&self, state: &mut State) {
        if state.session.as_ref().is_some_and(LockSession::is_lost) {
            self.lose(state);
        }
        if state.session.is_some() || state.closed || Instant::now() < state.not_before {
            return;
        }
        state.sessions += 1;
        let (number, holders) = (state.sessions, Arc::clone(&self.holders));
        // Before it can be lost.
        holders.begin(number);
        let when_lost = move || {
            holders.lose(Some(number));
            // What the table knows of it is the keeper's to clear, when it can have the state.
            holders.poke.notify_one();
        };
        match LockSession::open(&self.connector, self.core.db.schema(), when_lost).await {
            Ok(session) => {
                self.tell_backend(session.backend()).await;
                state.session = Some(session);
                state.failures = 0;
            }
            Err(fault) => {
                tracing::warn!(database = self.connector.name(), why = fault.text(), "no lock session for now; runs with keys wait");
                state.not_before = Instant::now() + RETRY;
            }
        }
    }

    /// A12: so that a rescuer can end it. Without it a frozen host keeps its locks until its session ends by itself.
    async fn tell_backend(&self, backend: i32) {
        let Ok(host) = host_number(self.id) else { return };
        let told = self.core.db.row(Sql::new("SELECT warp.session_is($1, $2)").arg(host).arg(backend).repeatable()).await;
        if let Err(fault) = told {
            tracing::warn!(why = fault.text(), "the number of the lock session could not be told");
        }
    }

    /// A13: what the table knows of the lost session.
    fn lose(&self, state: &mut State) {
        state.session = None;
        // Most of the time the session itself has told already. Not where it was given up.
        self.holders.lose(None);
        state.not_before = Instant::now() + NOTICE + STOP;
        for token in state.table.lost() {
            if let Some(at) = state.started.iter().position(|unstarted| unstarted.claimed.token == token) {
                // Nobody has begun it: it asks the next session.
                let unstarted = state.started.swap_remove(at);
                state.table.ask(unstarted.ask.clone());
                state.unstarted.insert(token, unstarted);
            }
        }
    }

    /// Takes the table's calls to the lock session until it has none.
    async fn drive(&self, state: &mut State) {
        loop {
            let Some(session) = &state.session else { return };
            let Some(call) = state.table.next_call(state.born.elapsed()) else { return };
            match session.call(&call).await {
                Ok(answer) => {
                    state.failures = 0;
                    let started = state.table.answered(answer, state.born.elapsed());
                    state.collect(started);
                }
                Err(NoAnswer::Failed(fault)) if state.failures < MOST_FAILURES => {
                    tracing::warn!(why = fault.text(), "a call of the lock session failed; what it holds is found out");
                    state.failures += 1;
                    state.table.failed();
                }
                Err(_) => {
                    self.lose(state);
                    return;
                }
            }
        }
    }

    /// Writes what is owed, in statements of its own.
    async fn pay(&self, state: &mut State) {
        let Ok(host) = host_number(self.id) else { return };
        let now = self.core.clock.tell(state.now);
        // A look begins after the parks before it are committed, so there may be two rounds.
        for _ in 0..2 {
            let due = state.table.take_due();
            if due.is_empty() {
                return;
            }
            // Woken for everybody: nobody beyond what is free has a place.
            let owed = owed(state, &due, 0);
            let (parks, wakes) = (owed["parks"].to_string(), owed["wakes"].to_string());
            if !due.parks.is_empty() || !due.wakes.is_empty() {
                let sql = Sql::new("SELECT warp.session_owed($1, $2::jsonb, $3::jsonb, $4)").arg(host).arg(parks).arg(wakes).arg(now);
                // Parks are matched by their tokens, and a wake too many is harmless.
                if let Err(fault) = self.core.db.row(sql.repeatable()).await {
                    tracing::warn!(why = fault.text(), "what session locks owe to the rows could not be written; it is tried again");
                    state.table.owe(due);
                    state.owed_not_before = Instant::now() + RETRY;
                    return;
                }
            }
            let looks: Vec<i64> = due.looks.iter().map(|key| key.0).collect();
            if !looks.is_empty() {
                let sql = Sql::new("SELECT warp.session_look($1, $2)").arg(looks).arg(now);
                if let Err(fault) = self.core.db.row(sql.repeatable()).await {
                    tracing::warn!(why = fault.text(), "keys could not be looked at; it is tried again");
                    state.table.owe(Due { looks: due.looks.clone(), ..Due::default() });
                    state.owed_not_before = Instant::now() + RETRY;
                }
            }
            state.written(due);
            if !self.changes.is_listening() {
                // The server tells whoever listens. This host is perhaps the one that may claim.
                self.changes.announce();
            }
        }
    }

    /// What nobody's exchange has done: bounded waits, debts, lost sessions.
    async fn tend(&self) {
        let mut guard = self.state.lock().await;
        let state = &mut *guard;
        self.mend(state).await;
        state.table.tick(state.born.elapsed());
        self.drive(state).await;
        self.pay(state).await;
        if !state.started.is_empty() {
            // Their host's next exchange brings them.
            self.changes.announce();
        }
    }
}

/// The keeper of a host: looks when something was left for it, when a wait is over, and when the session is lost. While it
/// waits it does not keep the host alive: with the store its sessions end.
async fn keep(host: Weak<Host>) {
    loop {
        let Some(strong) = host.upgrade() else { return };
        // An exchange that is under way looks itself when it ends.
        let look = match strong.state.try_lock() {
            Ok(state) => state.next_look(),
            Err(_) => Some(Instant::now() + BUSY),
        };
        let holders = Arc::clone(&strong.holders);
        drop(strong);
        let look = async {
            match look {
                Some(look) => tokio::time::sleep_until(look).await,
                None => std::future::pending().await,
            }
        };
        let is_due = tokio::select! {
            () = look => true,
            () = holders.poke.notified() => false,
        };
        if is_due && let Some(strong) = host.upgrade() {
            strong.tend().await;
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            keeper.abort();
        }
    }
}

impl State {
    fn mono_now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Keyed runs that were just claimed ask for their slots; the others are the exchange's answer.
    fn ask(&mut self, exchanged: &mut Exchanged, wants: Vec<Wanted>) {
        let mut wants: BTreeMap<JobHandle, Wanted> = wants.into_iter().map(|wanted| (wanted.job, wanted)).collect();
        for claimed in exchanged.claimed.extract_if(.., |claimed| claimed.keyed) {
            let Some(Wanted { job: _, keys, woken_for, has_started }) = wants.remove(&claimed.handle) else { continue };
            let concurrency = claimed.stamp.concurrency.as_ref().map(|stamped| &stamped.value);
            let limit = concurrency.map_or(1, |concurrency| concurrency.limit.max(1));
            let mode = concurrency.map_or(Mode::Wait, |concurrency| concurrency.mode);
            let ask = Ask {
                token: claimed.token,
                wants: keys.into_iter().map(|key| Want { key: KeyId(key), limit }).collect(),
                mode: if has_started { Mode::Wait } else { mode },
                woken_for: woken_for.map(KeyId),
            };
            self.table.ask(ask.clone());
            self.unstarted.insert(claimed.token, Unstarted { claimed, ask });
        }
    }

    /// Those who got their slots are told with the next answer.
    fn collect(&mut self, started: Vec<Started>) {
        for Started { token, fence } in started {
            match self.unstarted.remove(&token) {
                Some(mut unstarted) => {
                    unstarted.claimed.fence = Some(fence);
                    self.started.push(unstarted);
                }
                None => self.table.withdraw(token, self.born.elapsed()),
            }
        }
    }

    /// What was owed is committed; whoever was parked is looked after once more (A4).
    fn written(&mut self, due: Due<KeyId>) {
        for park in due.parks {
            self.unstarted.remove(&park.token);
            self.table.parked(park.key);
        }
    }

    /// C3: the registration is gone. Its rows are given back already; nothing of it is listened to any more.
    fn lapse(&mut self) {
        // The worker stops its runs itself.
        self.table.lapsed();
        self.table.take_due();
        self.unstarted.clear();
        self.started.clear();
        self.session = None;
    }

    /// Whether a slot may be free for somebody until what is owed has been written.
    fn is_pressed(&self) -> bool {
        let Due { parks, wakes, looks } = self.table.due();
        !parks.is_empty() || !looks.is_empty() || wakes.values().any(|wake| *wake == Wake::AtLeastOne)
    }

    /// When the keeper has something to do, if no exchange comes first.
    fn next_look(&self) -> Option<Instant> {
        let lost = self.session.as_ref().is_some_and(LockSession::is_lost).then(Instant::now);
        let ride = if self.is_pressed() { RIDE } else { LONG_RIDE };
        let owed = self.table.owes().then(|| self.owed_not_before.max(Instant::now() + ride));
        let wait = self.table.next_tick().map(|tick| self.born + tick);
        let asks = self.table.asks().next().is_some() || !self.table.unlocks().is_empty();
        let session = asks.then(|| self.not_before.max(Instant::now() + RIDE));
        lost.into_iter().chain(owed).chain(wait).chain(session).min()
    }
}

/// Adds what a further round did.
fn add(exchanged: &mut Exchanged, more: Exchanged) {
    let Exchanged { settled: _, claimed, more, next_due, parked, parked_again, skipped, unacceptable, reserved, not_passed: _ } = more;
    exchanged.claimed.extend(claimed);
    exchanged.more = more;
    exchanged.next_due = next_due;
    exchanged.parked += parked;
    exchanged.parked_again += parked_again;
    exchanged.skipped += skipped;
    exchanged.unacceptable += unacceptable;
    exchanged.reserved = reserved;
}

fn reading(admin_limit: Option<i32>, version: i64) -> Reading {
    Reading { admin_limit: admin_limit.map(i32::unsigned_abs), version: version.unsigned_abs() }
}

/// What is owed, as the functions take it. At most so many are woken beyond a key's limit.
fn owed(state: &State, due: &Due<KeyId>, most: u32) -> Value {
    let parks = due.parks.iter().filter_map(|park| {
        let row = state.unstarted.get(&park.token)?;
        Some(json!([row.claimed.handle.0, park.token.0, park.key.0, park.limit, park.skips]))
    });
    let wake = |(key, wake): (&KeyId, &Wake)| json!([key.0, u32::from(*wake == Wake::AtLeastOne), state.table.room(*key).min(most)]);
    json!({
        "parks": parks.collect::<Vec<_>>(),
        "wakes": due.wakes.iter().map(wake).collect::<Vec<_>>(),
        "looks": due.looks.iter().map(|key| key.0).collect::<Vec<_>>(),
    })
}

fn ride(state: &State, due: &Due<KeyId>, params: &ExchangeParams) -> Ride {
    let held = || state.table.holds().map(|(key, _)| key);
    // What is woken beside a holder, or in its place, is for this exchange to claim: others would be refused.
    let most = params.claim.as_ref().map_or(0, |claim| claim.max);
    let room = most.saturating_sub(1);
    let mut owed = owed(state, due, room);
    if let (true, Some(wakes)) = (most > 0, owed["wakes"].as_array_mut()) {
        let ended = params.settles.iter().map(|settle| settle.token);
        let follow = state.table.may_follow(ended, state.mono_now()).into_iter().filter(|key| !due.wakes.contains_key(key));
        wakes.extend(follow.map(|key| json!([key.0, 0, state.table.room(key).min(room)])));
    }
    Ride {
        owed: Mutex::new(Some(owed)),
        room: held().map(|key| json!([key.0, state.table.room(key)])).collect(),
        held: held().map(|key| json!(key.0)).collect(),
        heard: Mutex::default(),
    }
}
