//! Every interleaving of small cases under session locks (kind A of slots.md), breadth first.
//!
//! Two hosts, each with the very [`Table`] that the PostgreSQL store uses, on a model of what the database adds: job rows,
//! a lock table with sessions, limits with `high` and `version`, and the server's function step by step as it runs there
//! ([`server`]). Statements on rows are one step each; a call of the lock session is many, and others run in between.
//!
//! In every state: the limit (P1, P5) counted over hosts whose lock session lives, mutual exclusion (P6), one good
//! attempt for each job (P3), every belief of a table backed by a lock, fences that grow. In fault-free cases: where
//! nothing but guests moves, nobody is parked beside a free slot, and no steps go round for ever (P2, P4). In all: from
//! every state the protocol's own steps can end every job.
//!
//! What must stay true: states are compared by what decides their future. Attempts count by job and by whether their
//! token is the row's, fences by rank; hosts, and jobs that are declared alike, may change places.
//!
//! What it deliberately does not do: real time (a wait inside the host may be over at any moment, a reading may be too old
//! at any moment), the half second in which one backend has died and its host has not noticed (the exception that slots.md
//! states), hash collisions, different stamps on one key.

mod server;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use warp_domain::ClaimToken;
use warp_domain::policy::Mode;
#[cfg(feature = "mutations")]
use warp_domain::session::Rule;
use warp_domain::session::{Ask, Bounds, Due, Lock, Reading, Started, Table, Wake, Want, free_slots, how_many};

use crate::oracle::Broken;
use server::Server;

/// A key, by its number.
type Key = u8;

/// One rule switched off.
#[cfg(feature = "mutations")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mutation {
    /// A decision of the host's table.
    Table(Rule),
    /// C1: a settle matches the job alone.
    SettleIgnoresToken,
    /// C5: a deleted job that had been woken passes nothing on.
    DeleteWakesNobody,
    /// A2, step 1: the first use of a higher limit is not recorded.
    HighIsForgotten,
    /// A2, step 3: nobody looks at the slots above a lowered limit.
    NoLookAbove,
    /// A2, step 5: the version is not read again after the lock.
    NoVerify,
    /// A2, step 5: an exclusive lock is given back too when the version has changed.
    VerifiesExclusive,
    /// A2, step 6: the fence is drawn before the locks.
    FenceBeforeLocks,
    /// A1 inside one call: an attempt does not see what an earlier one of the same call took.
    CallForgetsItself,
    /// A3: a refused attempt keeps what it took on earlier keys.
    RefusedKeepsEarlierKeys,
    /// A4: several rows parked together are woken by row count after their look.
    LookWakesByRowCount,
    /// A6: one row for one unlock.
    WakesOne,
    /// A6: the difference only, although an active row may be on its way out.
    WakesDifferenceOnly,
    /// A10: the limit changes and its wakes are chosen in one transaction.
    LimitWakesInside,
    /// A12: the rescuer leaves the frozen host's lock session.
    RescuerLeavesSession,
    /// A14: no sweep after faults.
    NoSweep,
}

/// A job of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Its keys, as written.
    pub keys: &'static [u8],
    /// What a full key does.
    pub mode: Mode,
}

/// How often each thing outside the protocol may happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Budget {
    /// A host is killed.
    pub crashes: u8,
    /// A lock session ends on the server.
    pub losses: u8,
    /// A call of the lock session fails half-way.
    pub failures: u8,
    /// A host freezes; its lease may lapse.
    pub freezes: u8,
    /// An operator deletes a waiting job, or one that has not started.
    pub deletes: u8,
    /// A run ends with a retry at once.
    pub retries: u8,
}

/// A case.
#[derive(Debug, Clone)]
pub struct Case {
    /// For the table.
    pub name: &'static str,
    /// The jobs.
    pub jobs: Vec<Spec>,
    /// The limit stamped on all of them.
    pub limit: u32,
    /// Admin limits of key 0 that an operator sets one after the other.
    pub limits: Vec<u32>,
    /// What may go wrong.
    pub budget: Budget,
    /// Hand-offs in a row; 0 is no waiting inside a host.
    pub hand_offs: u8,
    /// Whether a claim may park at once what exceeds the limit, counted in an old snapshot.
    pub claims_park: bool,
    /// The broken rule.
    #[cfg(feature = "mutations")]
    pub mutation: Option<Mutation>,
}

/// What was gone through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explored {
    /// Different states.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
}

/// A broken promise and the shortest way there.
#[derive(Debug, Clone)]
pub struct Found {
    /// Which promise.
    pub broken: Broken,
    /// The steps.
    pub path: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    Ready { woken_for: Option<Key> },
    Running { token: ClaimToken, host: usize },
    Parked { key: Key },
    Over,
}

/// Which session has a lock, and how often: a session is granted what it has once more, and then has to unlock it twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Owner {
    host: Option<usize>,
    times: u8,
}

impl Owner {
    fn is_free_for(self, host: usize) -> bool {
        self.host.is_none_or(|owner| owner == host)
    }

    fn take(&mut self, host: usize) {
        *self = Owner { host: Some(host), times: self.times + 1 };
    }

    fn give_back(&mut self, host: usize) {
        if self.host == Some(host) {
            let times = self.times - 1;
            *self = Owner { host: (times > 0).then_some(host), times };
        }
    }

    fn drop_all(&mut self, host: usize) {
        if self.host == Some(host) {
            *self = Owner::default();
        }
    }
}

/// One key as the server has it.
#[derive(Debug, Clone, Default)]
struct KeyRow {
    admin_limit: Option<u32>,
    high: u32,
    version: u64,
    /// Base lock, exclusive.
    whole: Owner,
    /// Base lock, shared: how often each host's session has it.
    base: [u8; 2],
    slots: [Owner; 3],
    /// The fence of its last holder.
    last_fence: u64,
}

#[derive(Clone)]
struct Host {
    up: bool,
    frozen: bool,
    lapsed: bool,
    /// Its lock session has ended on the server, and it has not noticed.
    lost: bool,
    table: Table<Key>,
    call: Option<Server>,
    /// Its attempts, started or not.
    runs: BTreeMap<ClaimToken, usize>,
    guests: BTreeSet<ClaimToken>,
    /// Stopped by force, to be given back.
    stopped: BTreeSet<ClaimToken>,
    /// The answer of a session that is gone, still on its way.
    stale: Option<Server>,
}

#[derive(Clone)]
struct World {
    rows: Vec<Row>,
    has_started: Vec<bool>,
    settled: Vec<u8>,
    keys: Vec<KeyRow>,
    hosts: [Host; 2],
    budget: Budget,
    next_limit: usize,
    /// An operator's change is committed and its wakes are not, or (mutation) the other way round.
    limit_wakes: Option<Vec<usize>>,
    limit_open: bool,
    next_token: i64,
    next_fence: u64,
}

struct Step {
    name: String,
    /// The protocol does it by itself.
    by_itself: bool,
    to: Result<World, Broken>,
}

/// Longer than every bound of a table.
const LATE: Duration = Duration::from_secs(1 << 40);
const NOW: Duration = Duration::ZERO;

/// Goes through every state of a case.
///
/// # Errors
/// The first broken promise by number of steps; steps that go round for ever in a fault-free case; or a state from which
/// some job can never end.
pub fn explore(case: &Case) -> Result<Explored, Box<Found>> {
    let seeds = seeds();
    let start = World::new(case);
    let mut numbers: HashMap<[u64; 2], u32> = HashMap::from([(start.fingerprint(case, seeds), 0)]);
    let mut came_from: Vec<(u32, String)> = vec![(0, String::new())];
    let mut edges: Vec<(u32, u32)> = Vec::new();
    let mut done = vec![start.is_done()];
    let mut open = VecDeque::from([(0u32, start)]);
    let mut steps = 0;
    while let Some((number, world)) = open.pop_front() {
        for Step { name, by_itself, to } in world.steps(case) {
            steps += 1;
            let to = match to.and_then(|to| to.check(case)) {
                Ok(to) => to,
                Err(broken) => {
                    let mut path = path_to(&came_from, number);
                    path.push(name);
                    return Err(Box::new(Found { broken, path }));
                }
            };
            let next = came_from.len() as u32;
            let reached = *numbers.entry(to.fingerprint(case, seeds)).or_insert(next);
            if reached == next {
                came_from.push((number, name));
                done.push(to.is_done());
                open.push_back((next, to));
            }
            if by_itself {
                edges.push((number, reached));
            }
        }
    }
    let states = came_from.len();
    let graph = Graph::new(states, &edges);
    if let Some(stuck) = graph.cannot_reach(&done) {
        return Err(Box::new(Found { broken: "some job can never end from here".to_owned(), path: path_to(&came_from, stuck) }));
    }
    if !case.has_faults()
        && let Some(circle) = graph.circle(&edges)
    {
        let path = tell(case, &numbers, &came_from, &circle);
        return Err(Box::new(Found { broken: "steps go round for ever".to_owned(), path }));
    }
    Ok(Explored { states, steps })
}

fn path_to(came_from: &[(u32, String)], mut at: u32) -> Vec<String> {
    let mut path = Vec::new();
    while at != 0 {
        path.push(came_from[at as usize].1.clone());
        at = came_from[at as usize].0;
    }
    path.reverse();
    path
}

type Seed = BuildHasherDefault<DefaultHasher>;

/// The protocol's own steps, backwards.
struct Graph {
    from: Vec<usize>,
    before: Vec<u32>,
    out: Vec<u32>,
}

impl Graph {
    fn new(states: usize, edges: &[(u32, u32)]) -> Self {
        let mut from = vec![0; states + 1];
        let mut out = vec![0; states];
        for (source, target) in edges {
            from[*target as usize + 1] += 1;
            out[*source as usize] += 1;
        }
        for at in 0..states {
            from[at + 1] += from[at];
        }
        let mut fill = from.clone();
        let mut before = vec![0; edges.len()];
        for (source, target) in edges {
            before[fill[*target as usize]] = *source;
            fill[*target as usize] += 1;
        }
        Graph { from, before, out }
    }

    fn before(&self, at: u32) -> &[u32] {
        &self.before[self.from[at as usize]..self.from[at as usize + 1]]
    }

    fn cannot_reach(&self, done: &[bool]) -> Option<u32> {
        let mut reached = done.to_vec();
        let mut queue: Vec<u32> = (0..done.len() as u32).filter(|at| done[*at as usize]).collect();
        while let Some(at) = queue.pop() {
            for &before in self.before(at) {
                if !std::mem::replace(&mut reached[before as usize], true) {
                    queue.push(before);
                }
            }
        }
        reached.iter().position(|reached| !reached).map(|at| at as u32)
    }

    /// A circle of steps, if there is one. Takes away whatever leads only to what has been taken away; from what is left one
    /// can go on for ever.
    fn circle(&self, edges: &[(u32, u32)]) -> Option<Vec<u32>> {
        let mut left = self.out.clone();
        let mut queue: Vec<u32> = (0..left.len() as u32).filter(|at| left[*at as usize] == 0).collect();
        while let Some(at) = queue.pop() {
            for &before in self.before(at) {
                left[before as usize] -= 1;
                if left[before as usize] == 0 {
                    queue.push(before);
                }
            }
        }
        let stays = |at: &u32| left[*at as usize] > 0;
        let next: HashMap<u32, u32> = edges.iter().filter(|(from, to)| stays(from) && stays(to)).copied().collect();
        let mut at = *next.keys().min()?;
        let mut seen = HashMap::new();
        let mut walked = Vec::new();
        while seen.insert(at, walked.len()).is_none() {
            walked.push(at);
            at = next[&at];
        }
        let mut circle = walked.split_off(seen[&at]);
        circle.push(at);
        Some(circle)
    }
}

/// The names of the steps to a circle and once around it, found by taking them again.
fn tell(case: &Case, numbers: &HashMap<[u64; 2], u32>, came_from: &[(u32, String)], circle: &[u32]) -> Vec<String> {
    let mut way = vec![circle[0]];
    while let Some(at) = way.last().filter(|at| **at != 0) {
        way.push(came_from[*at as usize].0);
    }
    way.reverse();
    let entry = way.len();
    way.extend(&circle[1..]);
    let mut world = World::new(case);
    let mut path = Vec::new();
    for (at, number) in way.iter().enumerate().skip(1) {
        let leads =
            |step: Step| step.to.ok().filter(|to| numbers.get(&to.fingerprint(case, seeds())) == Some(number)).map(|to| (step.name, to));
        let Some((name, to)) = world.steps(case).into_iter().find_map(leads) else { break };
        path.push(if at == entry { format!("(and round:) {name}") } else { name });
        world = to;
    }
    path
}

fn seeds() -> [u64; 2] {
    [Seed::default().hash_one(1u8), Seed::default().hash_one(2u8)]
}

impl Case {
    /// A case of jobs at one limit, with nothing else.
    #[must_use]
    pub fn new(name: &'static str, jobs: &[Spec], limit: u32) -> Self {
        Case {
            name,
            jobs: jobs.to_vec(),
            limit,
            limits: Vec::new(),
            budget: Budget::default(),
            hand_offs: 1,
            claims_park: true,
            #[cfg(feature = "mutations")]
            mutation: None,
        }
    }

    fn has_faults(&self) -> bool {
        let Budget { crashes, losses, failures, freezes, deletes: _, retries: _ } = self.budget;
        crashes + losses + failures + freezes > 0
    }

    #[cfg(feature = "mutations")]
    fn breaks(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn bounds(&self) -> Bounds {
        Bounds { hand_offs: self.hand_offs, ..Bounds::default() }
    }
}

/// Whether a rule outside the table is broken; never without the feature.
macro_rules! broken {
    ($case:expr, $mutation:ident) => {{
        #[cfg(feature = "mutations")]
        {
            $case.breaks($crate::session::Mutation::$mutation)
        }
        #[cfg(not(feature = "mutations"))]
        {
            let _ = $case;
            false
        }
    }};
}
pub(crate) use broken;

impl KeyRow {
    fn limit(&self, stamped: u32) -> u32 {
        self.admin_limit.unwrap_or(stamped)
    }

    fn reading(&self) -> Reading {
        Reading { admin_limit: self.admin_limit, version: self.version }
    }

    fn drop_session(&mut self, host: usize) {
        let KeyRow { whole, base, slots, .. } = self;
        base[host] = 0;
        for lock in slots.iter_mut().chain([whole]) {
            lock.drop_all(host);
        }
    }

    /// Every lock of a session, as often as it has it.
    fn locks(&self, number: Key, host: usize) -> Vec<Lock<Key>> {
        let times = |lock: Lock<Key>, times: u8| std::iter::repeat_n(lock, usize::from(times));
        let owned = |owner: &Owner| if owner.host == Some(host) { owner.times } else { 0 };
        let slots = self.slots.iter().enumerate().flat_map(|(slot, owner)| times(Lock::Slot(number, slot as u32), owned(owner)));
        slots.chain(times(Lock::Base(number), self.base[host])).chain(times(Lock::Whole(number), owned(&self.whole))).collect()
    }
}

impl Host {
    fn new(case: &Case) -> Self {
        let table = Table::new(case.bounds());
        #[cfg(feature = "mutations")]
        let table = {
            let mut table = table;
            if let Some(Mutation::Table(rule)) = case.mutation {
                table.break_rule(Some(rule));
            }
            table
        };
        Host {
            up: true,
            frozen: false,
            lapsed: false,
            lost: false,
            table,
            call: None,
            runs: BTreeMap::new(),
            guests: BTreeSet::new(),
            stopped: BTreeSet::new(),
            stale: None,
        }
    }

    /// Whether its claim to what it holds is good.
    fn is_good(&self) -> bool {
        self.up && !self.lost && !self.lapsed
    }

    fn start(&mut self, started: Vec<Started>) {
        self.guests.extend(started.into_iter().map(|started| started.token));
    }
}

impl World {
    fn new(case: &Case) -> Self {
        let keys = case.jobs.iter().flat_map(|job| job.keys).max().map_or(0, |key| usize::from(*key) + 1);
        World {
            rows: vec![Row::Ready { woken_for: None }; case.jobs.len()],
            has_started: vec![false; case.jobs.len()],
            settled: vec![0; case.jobs.len()],
            keys: vec![KeyRow { high: 1, ..KeyRow::default() }; keys],
            hosts: [Host::new(case), Host::new(case)],
            budget: case.budget,
            next_limit: 0,
            limit_wakes: None,
            limit_open: false,
            next_token: 1,
            next_fence: 256,
        }
    }

    fn is_done(&self) -> bool {
        !self.limit_open && self.rows.iter().all(|row| *row == Row::Over)
    }

    fn is_current(&self, job: usize, token: ClaimToken) -> bool {
        matches!(self.rows[job], Row::Running { token: current, .. } if current == token)
    }

    /// Attempts that hold a key by their own host's belief, on a lock session that lives, and what the server is about to
    /// admit.
    fn holders(&self, key: Key) -> u32 {
        let of_host = |host: &Host| {
            let held = host.table.holds().filter(|(held, _)| *held == key).map(|(_, hold)| hold.holders.len()).sum::<usize>();
            held + host.call.as_ref().map_or(0, |call| call.verified(key))
        };
        self.hosts.iter().filter(|host| host.up && !host.lost).map(of_host).sum::<usize>() as u32
    }

    /// Ready or running with this key (A6).
    fn active(&self, case: &Case, key: Key) -> u32 {
        let counts =
            |(job, row): &(usize, &Row)| case.jobs[*job].keys.contains(&key) && matches!(row, Row::Ready { .. } | Row::Running { .. });
        self.rows.iter().enumerate().filter(counts).count() as u32
    }

    /// Every way to wake so many of those parked on a key.
    fn woken(&self, key: Key, count: u32) -> Vec<World> {
        let parked: Vec<usize> = (0..self.rows.len()).filter(|job| self.rows[*job] == Row::Parked { key }).collect();
        let count = count.min(parked.len() as u32);
        let choices = (0u32..1 << parked.len()).filter(|choice| choice.count_ones() == count);
        choices
            .map(|choice| {
                let mut to = self.clone();
                for (_, job) in parked.iter().enumerate().filter(|(at, _)| choice >> at & 1 == 1) {
                    to.rows[*job] = Row::Ready { woken_for: Some(key) };
                }
                to
            })
            .collect()
    }

    fn wakes(&self, case: &Case, key: Key, wake: Wake) -> Vec<World> {
        let limit = self.keys[usize::from(key)].limit(case.limit);
        let active = self.active(case, key);
        let count = match wake {
            Wake::AtLeastOne if broken!(case, WakesOne) => 1,
            Wake::AtLeastOne if broken!(case, WakesDifferenceOnly) => how_many(limit, active, Wake::Difference),
            wake => how_many(limit, active, wake),
        };
        self.woken(key, count)
    }

    /// What must hold in every state.
    fn check(self, case: &Case) -> Result<Self, Broken> {
        for (job, settled) in self.settled.iter().enumerate() {
            if *settled > 1 {
                return Err(format!("P3: job {job} was settled twice"));
            }
        }
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.is_good()) {
            for token in &host.guests {
                let job = host.runs[token];
                if !self.is_current(job, *token) {
                    return Err(format!("P3: host {at}, whose claim is good, runs job {job}, which is {:?}", self.rows[job]));
                }
            }
            let mut real: Vec<_> = (0..self.keys.len()).flat_map(|key| self.keys[key].locks(key as Key, at)).collect();
            for lock in host.table.locks() {
                // A call that is out, or has failed, may have converted it.
                let backed = real.contains(&lock) || host.call.as_ref().is_some_and(|call| call.touches(lock.key()));
                if !backed && host.table.unsure().is_none() {
                    return Err(format!("P1: host {at} believes to hold {lock:?}"));
                }
            }
            // Between calls the session has what its table knows, and what it is about to give back: once each.
            if !host.table.is_out() && host.call.is_none() && host.table.unsure().is_none() {
                for known in host.table.locks().iter().chain(host.table.unlocks()) {
                    if let Some(place) = real.iter().position(|lock| lock == known) {
                        real.swap_remove(place);
                    }
                }
                if let Some(lock) = real.first() {
                    return Err(format!("P1: host {at} has {lock:?} and does not know it"));
                }
            }
        }
        for key in 0..self.keys.len() as u8 {
            let (mut holders, mut exclusive) = (0, false);
            for host in self.hosts.iter().filter(|host| host.up && !host.lost) {
                // A call that is out, or has failed, may have made it a slot.
                let converting = host.call.as_ref().is_some_and(|call| call.touches(key))
                    || host.table.unsure().is_some_and(|unsure| unsure.converts.contains(&key));
                for (_, hold) in host.table.holds().filter(|(held, _)| *held == key) {
                    holders += hold.holders.len();
                    exclusive |= hold.exclusive && !converting;
                }
            }
            if exclusive && holders > 1 {
                return Err(format!("P6: {holders} hold key {key}, one of them exclusively"));
            }
        }
        if !case.has_faults() && self.is_quiet() {
            for (job, row) in self.rows.iter().enumerate() {
                if let Row::Parked { key } = row
                    && self.holders(*key) < self.keys[usize::from(*key)].limit(case.limit)
                {
                    return Err(format!("P2: nothing moves, and job {job} is parked beside a free slot of key {key}"));
                }
            }
        }
        Ok(self)
    }

    /// Nothing but guests moves.
    fn is_quiet(&self) -> bool {
        let idle = |host: &Host| {
            let mut table = host.table.clone();
            let owes_nothing = host.stopped.is_empty() && !table.owes() && table.waiters().is_empty() && table.asks().next().is_none();
            owes_nothing && host.call.is_none() && self.unread(host).is_empty() && table.next_call(NOW).is_none()
        };
        !self.limit_open && self.rows.iter().all(|row| !matches!(row, Row::Ready { .. })) && self.hosts.iter().all(idle)
    }

    fn steps(&self, case: &Case) -> Vec<Step> {
        let mut steps = Vec::new();
        for at in 0..2 {
            if self.hosts[at].up {
                self.host_steps(case, at, &mut steps);
            }
        }
        self.rescue_steps(case, &mut steps);
        if case.has_faults() && !broken!(case, NoSweep) {
            for key in 0..self.keys.len() as u8 {
                let parked = self.rows.contains(&Row::Parked { key });
                let missing = self.keys[usize::from(key)].limit(case.limit).saturating_sub(self.active(case, key));
                if parked && missing > 0 {
                    for to in self.woken(key, missing) {
                        steps.push(Step { name: format!("sweep wakes key {key}"), by_itself: true, to: Ok(to) });
                    }
                }
            }
        }
        self.operator_steps(case, &mut steps);
        steps
    }

    fn host_steps(&self, case: &Case, at: usize, steps: &mut Vec<Step>) {
        let host = &self.hosts[at];
        let mut go = |name: String, by_itself: bool, act: &dyn Fn(&mut World) -> Result<(), Broken>| {
            let mut to = self.clone();
            let to = act(&mut to).map(|()| to);
            steps.push(Step { name, by_itself, to });
        };
        let other_lives = self.hosts[1 - at].up && !self.hosts[1 - at].frozen;
        if self.budget.crashes > 0 && other_lives {
            go(format!("host {at} is killed"), false, &|world| {
                world.budget.crashes -= 1;
                world.end_session(at);
                world.hosts[at] = Host { up: false, lapsed: true, ..Host::new(case) };
                Ok(())
            });
        }
        if self.budget.losses > 0 && !host.lost {
            go(format!("the lock session of host {at} dies"), false, &|world| {
                world.budget.losses -= 1;
                world.end_session(at);
                Ok(())
            });
        }
        if self.budget.failures > 0 && host.call.is_some() && !host.lost && !host.frozen {
            go(format!("the call of host {at} fails half-way"), false, &|world| {
                world.budget.failures -= 1;
                world.hosts[at].call = None;
                world.hosts[at].table.failed();
                Ok(())
            });
        }
        if self.budget.freezes > 0 && !host.frozen && other_lives {
            go(format!("host {at} freezes"), false, &|world| {
                world.budget.freezes -= 1;
                world.hosts[at].frozen = true;
                Ok(())
            });
        }
        // The server goes on with what it was sent, whether or not the host does.
        if let Some(call) = &host.call {
            let over = call.is_over();
            for (name, to) in if over { Vec::new() } else { call.clone().steps(self, case, at) } {
                steps.push(Step { name: format!("host {at}: {name}"), by_itself: true, to });
            }
            if over && !host.frozen && !host.lost {
                let mut to = self.clone();
                to.deliver(at);
                steps.push(Step { name: format!("host {at} hears the answer"), by_itself: true, to: Ok(to) });
            }
        }
        let mut go = |name: String, by_itself: bool, act: &dyn Fn(&mut World) -> Result<(), Broken>| {
            let mut to = self.clone();
            let to = act(&mut to).map(|()| to);
            steps.push(Step { name, by_itself, to });
        };
        if host.frozen {
            go(format!("host {at} thaws"), false, &|world| {
                world.hosts[at].frozen = false;
                Ok(())
            });
            if !host.lapsed {
                go(format!("the lease of host {at} lapses"), true, &|world| {
                    world.hosts[at].lapsed = true;
                    Ok(())
                });
            }
            return;
        }
        if host.lost || host.lapsed {
            go(format!("host {at} notices, stops by force, opens a new lock session"), true, &|world| {
                let lapsed = world.hosts[at].lapsed;
                if lapsed {
                    world.end_session(at);
                }
                let host = &mut world.hosts[at];
                let stopped = if lapsed { host.table.lapsed() } else { host.table.lost() };
                host.call = None;
                host.lost = false;
                host.lapsed = false;
                for token in &stopped {
                    host.guests.remove(token);
                }
                host.stopped.extend(stopped);
                Ok(())
            });
        }
        for &token in &host.stopped {
            let job = host.runs[&token];
            go(format!("host {at} gives job {job} back, uncharged"), true, &|world| {
                if world.is_current(job, token) {
                    world.rows[job] = Row::Ready { woken_for: None };
                }
                world.forget(at, token);
                Ok(())
            });
        }
        self.claim_steps(case, at, steps);
        self.run_steps(case, at, steps);
        self.due_steps(case, at, steps);
        let mut go = |name: String, act: &dyn Fn(&mut World) -> Result<(), Broken>| {
            let mut to = self.clone();
            let to = act(&mut to).map(|()| to);
            steps.push(Step { name, by_itself: true, to });
        };
        if host.call.is_none() && !host.lost {
            let mut table = host.table.clone();
            let call = table.next_call(NOW);
            let moved = call.is_some() || table.asks().count() != host.table.asks().count();
            if moved {
                go(format!("host {at} asks its lock session"), &|world| {
                    world.hosts[at].table = table.clone();
                    world.hosts[at].call = call.clone().map(Server::new);
                    Ok(())
                });
            }
        }
        if let Some(stale) = host.stale.as_ref().filter(|_| !host.lost) {
            go(format!("host {at} hears the answer of its old session"), &|world| {
                let host = &mut world.hosts[at];
                host.stale = None;
                let started = host.table.answered(stale.clone().into_answer(), NOW);
                host.start(started);
                Ok(())
            });
        }
        if !host.table.waiters().is_empty() {
            go(format!("host {at}: the wait inside is over"), &|world| {
                world.hosts[at].table.tick(LATE);
                Ok(())
            });
        }
    }

    fn claim_steps(&self, case: &Case, at: usize, steps: &mut Vec<Step>) {
        if self.hosts[at].lapsed {
            return;
        }
        for job in 0..self.rows.len() {
            let Row::Ready { woken_for } = self.rows[job] else { continue };
            let mut to = self.clone();
            to.claim(case, at, job, woken_for);
            steps.push(Step { name: format!("host {at} claims job {job}"), by_itself: true, to: Ok(to) });
            // The claim may park at once what exceeds limit − running rows, never what was just woken; several together,
            // and its snapshot may be old. Then one look for the key.
            let spec = case.jobs[job];
            if !case.claims_park || woken_for.is_some() || spec.mode == Mode::Skip || spec.keys.len() > 1 {
                continue;
            }
            let key = spec.keys[0];
            let alike = |other: &usize| case.jobs[*other] == spec && self.rows[*other] == Row::Ready { woken_for: None };
            let more: Vec<usize> = (job + 1..self.rows.len()).filter(alike).collect();
            for choice in 0u32..1 << more.len() {
                let mut to = self.clone();
                to.rows[job] = Row::Parked { key };
                for (_, other) in more.iter().enumerate().filter(|(bit, _)| choice >> bit & 1 == 1) {
                    to.rows[*other] = Row::Parked { key };
                }
                to.hosts[at].table.parked(key);
                let name = format!("host {at} claims: parks job {job} and {} more", choice.count_ones());
                steps.push(Step { name, by_itself: true, to: Ok(to) });
            }
        }
    }

    fn claim(&mut self, case: &Case, at: usize, job: usize, woken_for: Option<Key>) {
        let token = ClaimToken(self.next_token);
        self.next_token += 1;
        self.rows[job] = Row::Running { token, host: at };
        let spec = case.jobs[job];
        let mut keys = spec.keys.to_vec();
        // Two jobs write the same keys in unlike orders.
        if job % 2 == 1 {
            keys.reverse();
        }
        let wants = keys.into_iter().map(|key| Want { key, limit: case.limit }).collect();
        let mode = if spec.mode == Mode::Skip && !self.has_started[job] { Mode::Skip } else { Mode::Wait };
        self.hosts[at].runs.insert(token, job);
        self.hosts[at].table.ask(Ask { token, wants, mode, woken_for });
    }

    /// A guest ends: settle, then the table hears of it.
    fn run_steps(&self, case: &Case, at: usize, steps: &mut Vec<Step>) {
        let host = &self.hosts[at];
        for &token in &host.guests {
            let job = host.runs[&token];
            let current = self.is_current(job, token) || broken!(case, SettleIgnoresToken);
            for retries in [false, true] {
                if retries && (self.budget.retries == 0 || !current) {
                    continue;
                }
                // Its reading of the version may be too old for a hand-off, or not; and the statement may wake, beside the end
                // that it writes, who is to follow.
                let keys = case.jobs[job].keys;
                let follows = !host.table.may_follow([token].into_iter(), NOW).is_empty();
                let inside = host.table.waiters().iter().map(|waiter| &waiter.ask).chain(host.table.asks());
                let passes = inside.flat_map(|ask| &ask.wants).any(|want| keys.contains(&want.key));
                for (mono_now, wakes) in [(NOW, false), (LATE, false), (NOW, true)] {
                    if mono_now == LATE && !passes || wakes && !follows {
                        continue;
                    }
                    let mut to = self.clone();
                    to.has_started[job] = true;
                    if current && retries {
                        to.budget.retries -= 1;
                        to.rows[job] = Row::Ready { woken_for: None };
                    } else if current {
                        to.rows[job] = Row::Over;
                        to.settled[job] += 1;
                    }
                    // Every answer carries the versions of its keys.
                    for &key in keys {
                        let reading = self.keys[usize::from(key)].reading();
                        to.hosts[at].table.read(key, reading, NOW);
                    }
                    let started = to.hosts[at].table.settled(token, mono_now);
                    let passed = started.first().copied();
                    to.forget(at, token);
                    to.hosts[at].start(started);
                    let broken = passed.map_or(Ok(()), |passed| to.check_hand_off(case, at, passed));
                    let woken = if wakes { to.wakes(case, keys[0], Wake::Difference) } else { vec![to] };
                    let end = match (current, retries) {
                        (false, _) => "late",
                        (true, true) => "retries",
                        (true, false) => "settles",
                    };
                    let hand = if passed.is_some() { ", slot handed on" } else { "" };
                    let wake = if wakes { " and wakes" } else { "" };
                    for to in woken {
                        let name = format!("host {at}: job {job} {end}{wake}{hand}");
                        steps.push(Step { name, by_itself: true, to: broken.clone().map(|()| to) });
                    }
                }
            }
        }
        for key in self.unread(host) {
            let mut to = self.clone();
            to.hosts[at].table.read(key, self.keys[usize::from(key)].reading(), NOW);
            steps.push(Step { name: format!("host {at} reads the new limit of key {key}"), by_itself: true, to: Ok(to) });
        }
    }

    /// Keys that this host holds exclusively and whose new limit it has not read: any statement of it brings that (A11).
    fn unread(&self, host: &Host) -> Vec<Key> {
        let is_old = |key: Key| host.table.reading(key).is_some_and(|reading| reading.version < self.keys[usize::from(key)].version);
        host.table.holds().filter(|(key, hold)| hold.exclusive && is_old(*key)).map(|(key, _)| key).collect()
    }

    /// A8: it never raises the number of holders, and under a version that is current it stays within the limit.
    fn check_hand_off(&mut self, case: &Case, at: usize, passed: Started) -> Result<(), Broken> {
        let keys: Vec<Key> = self.hosts[at]
            .table
            .holds()
            .filter(|(_, hold)| hold.holders.iter().any(|holder| holder.token == passed.token))
            .map(|(key, _)| key)
            .collect();
        for key in keys {
            // What a host does before it has noticed that its session or lease is gone is the exception that slots.md
            // states; its fences are smaller than those of whoever came after.
            if !self.hosts[at].is_good() {
                continue;
            }
            let row = &mut self.keys[usize::from(key)];
            let (limit, version) = (row.limit(case.limit), row.version);
            let before = std::mem::replace(&mut row.last_fence, passed.fence);
            let holders = self.holders(key);
            let read = self.hosts[at].table.reading(key).is_some_and(|reading| reading.version == version);
            if read && holders > limit {
                return Err(format!("P5: handed on above the lowered limit of key {key}"));
            }
            if limit == 1 && holders == 1 && before >= passed.fence {
                return Err(format!("fences: the next holder of key {key} got {} after {before}", passed.fence));
            }
        }
        Ok(())
    }

    /// What the host owes to the rows, one by one.
    fn due_steps(&self, case: &Case, at: usize, steps: &mut Vec<Step>) {
        let mut table = self.hosts[at].table.clone();
        let due = table.take_due();
        let without = |left: Due<Key>| {
            let mut to = self.clone();
            let mut table = table.clone();
            table.owe(left);
            to.hosts[at].table = table;
            to
        };
        for (place, park) in due.parks.iter().enumerate() {
            let mut left = due.clone();
            left.parks.remove(place);
            let mut to = without(left);
            let job = self.hosts[at].runs[&park.token];
            let what = if !self.is_current(job, park.token) {
                "is not its any more"
            } else if park.skips {
                to.rows[job] = Row::Over;
                "is skipped"
            } else {
                to.rows[job] = Row::Parked { key: park.key };
                to.hosts[at].table.parked(park.key);
                "is parked"
            };
            to.forget(at, park.token);
            steps.push(Step { name: format!("host {at}: job {job} {what}"), by_itself: true, to: Ok(to) });
        }
        for (&key, &wake) in &due.wakes {
            let mut left = due.clone();
            left.wakes.remove(&key);
            for to in without(left).wakes(case, key, wake) {
                steps.push(Step { name: format!("host {at} wakes key {key}"), by_itself: true, to: Ok(to) });
            }
        }
        for &key in &due.looks {
            let mut left = due.clone();
            left.looks.remove(&key);
            let row = &self.keys[usize::from(key)];
            let slots = row.slots.iter().filter(|slot| slot.host.is_some()).count() as u32;
            let limit = row.limit(case.limit);
            let free = free_slots(limit, row.whole.host.is_some(), row.base != [0; 2], slots);
            let woken = if free > 0 && broken!(case, LookWakesByRowCount) {
                without(left).wakes(case, key, Wake::AtLeastOne)
            } else {
                without(left).woken(key, free)
            };
            for to in woken {
                steps.push(Step { name: format!("host {at} looks at key {key}: {free} free"), by_itself: true, to: Ok(to) });
            }
        }
    }

    fn rescue_steps(&self, case: &Case, steps: &mut Vec<Step>) {
        for at in 0..2 {
            let host = &self.hosts[at];
            let other_lives = self.hosts[1 - at].up && !self.hosts[1 - at].frozen;
            if !host.lapsed || !other_lives {
                continue;
            }
            for job in 0..self.rows.len() {
                if matches!(self.rows[job], Row::Running { host, .. } if host == at) {
                    let mut to = self.clone();
                    to.rows[job] = Row::Ready { woken_for: None };
                    steps.push(Step { name: format!("job {job} of host {at} is rescued"), by_itself: true, to: Ok(to) });
                }
            }
            if host.up && host.frozen && !host.lost && !broken!(case, RescuerLeavesSession) {
                let mut to = self.clone();
                to.end_session(at);
                steps.push(Step { name: format!("the rescuer ends the lock session of host {at}"), by_itself: true, to: Ok(to) });
            }
        }
    }

    fn operator_steps(&self, case: &Case, steps: &mut Vec<Step>) {
        if self.budget.deletes > 0 {
            for job in 0..self.rows.len() {
                let mut to = self.clone();
                to.budget.deletes -= 1;
                to.rows[job] = Row::Over;
                let woken = match self.rows[job] {
                    Row::Ready { woken_for: Some(key) } if !broken!(case, DeleteWakesNobody) => to.wakes(case, key, Wake::AtLeastOne),
                    Row::Ready { .. } | Row::Parked { .. } => vec![to],
                    Row::Running { token, host } if self.hosts[host].up && !self.hosts[host].frozen => {
                        if !self.hosts[host].table.unstarted().any(|unstarted| unstarted == token) {
                            continue;
                        }
                        to.hosts[host].table.withdraw(token, NOW);
                        // A call that is out answers first.
                        if !to.hosts[host].table.unstarted().any(|unstarted| unstarted == token) {
                            to.forget(host, token);
                        }
                        vec![to]
                    }
                    Row::Running { .. } | Row::Over => continue,
                };
                for to in woken {
                    steps.push(Step { name: format!("an operator deletes job {job}"), by_itself: false, to: Ok(to) });
                }
            }
        }
        if let Some(wakes) = &self.limit_wakes {
            // Mutation: chosen before the change was to be seen.
            let mut to = self.clone();
            to.change_limit(case);
            to.limit_wakes = None;
            to.limit_open = false;
            to.next_limit += 1;
            for &job in wakes {
                if let Row::Parked { key } = self.rows[job] {
                    to.rows[job] = Row::Ready { woken_for: Some(key) };
                }
            }
            steps.push(Step { name: "the operator's transaction commits".to_owned(), by_itself: true, to: Ok(to) });
        } else if self.limit_open {
            for mut to in self.wakes(case, 0, Wake::Difference) {
                to.limit_open = false;
                to.next_limit += 1;
                steps.push(Step { name: "the operator wakes the difference".to_owned(), by_itself: true, to: Ok(to) });
            }
        } else if let Some(limit) = case.limits.get(self.next_limit) {
            let name = format!("an operator sets the limit to {limit}");
            if broken!(case, LimitWakesInside) {
                let mut changed = self.clone();
                changed.change_limit(case);
                for woken in changed.wakes(case, 0, Wake::Difference) {
                    let mut to = self.clone();
                    to.limit_wakes = Some((0..self.rows.len()).filter(|job| woken.rows[*job] != self.rows[*job]).collect());
                    to.limit_open = true;
                    steps.push(Step { name: format!("{name} and chooses whom to wake"), by_itself: false, to: Ok(to) });
                }
            } else {
                let mut to = self.clone();
                to.change_limit(case);
                to.limit_open = true;
                steps.push(Step { name, by_itself: false, to: Ok(to) });
            }
        }
    }

    fn change_limit(&mut self, case: &Case) {
        let key = &mut self.keys[0];
        let limit = case.limits[self.next_limit];
        key.high = key.high.max(limit).max(key.admin_limit.unwrap_or(0));
        key.admin_limit = Some(limit);
        key.version += 1;
    }

    fn end_session(&mut self, at: usize) {
        for key in &mut self.keys {
            key.drop_session(at);
        }
        let host = &mut self.hosts[at];
        host.lost = true;
        host.stale = host.call.take().filter(Server::is_over);
    }

    fn deliver(&mut self, at: usize) {
        let Some(call) = self.hosts[at].call.take() else { return };
        let asked: Vec<ClaimToken> = call.asked().collect();
        let started = self.hosts[at].table.answered(call.into_answer(), NOW);
        self.hosts[at].start(started);
        // Withdrawn while the call was out.
        for token in asked {
            let host = &self.hosts[at];
            if !host.guests.contains(&token) && !host.table.unstarted().any(|unstarted| unstarted == token) {
                self.forget(at, token);
            }
        }
    }

    fn forget(&mut self, at: usize, token: ClaimToken) {
        let host = &mut self.hosts[at];
        host.runs.remove(&token);
        host.guests.remove(&token);
        host.stopped.remove(&token);
    }

    /// What decides this state's future: the smallest over all ways to rename hosts and jobs declared alike.
    fn fingerprint(&self, case: &Case, seeds: [u64; 2]) -> [u64; 2] {
        let mut smallest: Option<Vec<u8>> = None;
        for order in [[0, 1], [1, 0]] {
            for jobs in permutations(&case.jobs) {
                let print = self.print(order, &jobs);
                if smallest.as_ref().is_none_or(|smallest| print < *smallest) {
                    smallest = Some(print);
                }
            }
        }
        seeds.map(|seed| Seed::default().hash_one((seed, &smallest)))
    }

    /// `order`: the hosts in the order in which they are printed; `jobs`: which number each job goes by.
    fn print(&self, order: [usize; 2], jobs: &[u8]) -> Vec<u8> {
        let mut print = Vec::with_capacity(128);
        let name = |host: usize| 1 + u8::from(order[0] != host);
        let mut by_name: Vec<usize> = (0..jobs.len()).collect();
        by_name.sort_by_key(|job| jobs[*job]);
        for job in by_name {
            let row = match self.rows[job] {
                Row::Ready { woken_for } => 10 + woken_for.map_or(0, |key| 1 + key),
                Row::Running { host, .. } => 20 + name(host),
                Row::Parked { key } => 30 + key,
                Row::Over => 40,
            };
            let chosen = self.limit_wakes.as_ref().is_some_and(|wakes| wakes.contains(&job));
            print.extend([row, self.settled[job] * 4 + u8::from(self.has_started[job]) * 2 + u8::from(chosen)]);
        }
        let Budget { crashes, losses, failures, freezes, deletes, retries } = self.budget;
        print.extend([crashes, losses, failures, freezes, deletes, retries, self.next_limit as u8, u8::from(self.limit_open)]);
        let fences = self.fences();
        let rank =
            |fence: u64| fences.iter().position(|known| *known == fence / 256).map_or(0, |at| 1 + at as u8) * 8 + (fence % 256) as u8;
        for key in &self.keys {
            let KeyRow { admin_limit, high, version, whole, base, slots, last_fence } = key;
            let owner = |owner: Owner| owner.host.map_or(0, name) + 4 * owner.times;
            print.extend([admin_limit.unwrap_or(0) as u8, *high as u8, *version as u8, owner(*whole), rank(*last_fence)]);
            print.extend(order.map(|host| base[host]));
            print.extend(slots.map(owner));
        }
        for host in order.map(|at| &self.hosts[at]) {
            let attempt = |token: &ClaimToken| match host.runs.get(token) {
                Some(&job) => jobs[job] * 2 + u8::from(self.is_current(job, *token)),
                None => 99,
            };
            host.print(&mut print, &attempt, &rank);
        }
        print
    }

    /// Every drawn fence that still decides something, in order.
    fn fences(&self) -> Vec<u64> {
        let of_tables =
            self.hosts.iter().flat_map(|host| host.table.holds().flat_map(|(_, hold)| hold.holders.iter().map(|holder| holder.fence)));
        let of_calls = self.hosts.iter().flat_map(|host| host.call.iter().chain(&host.stale)).flat_map(Server::fences);
        let mut fences: Vec<u64> =
            of_tables.chain(of_calls).chain(self.keys.iter().map(|key| key.last_fence)).map(|fence| fence / 256).collect();
        fences.sort_unstable();
        fences.dedup();
        fences
    }
}

impl Host {
    fn print(&self, print: &mut Vec<u8>, attempt: &dyn Fn(&ClaimToken) -> u8, rank: &dyn Fn(u64) -> u8) {
        const END: u8 = 255;
        let Host { up, frozen, lapsed, lost, table, call, runs: _, guests, stopped, stale } = self;
        print.push([*up, *frozen, *lapsed, *lost].iter().fold(0, |sum, flag| sum * 2 + u8::from(*flag)));
        let ask = |print: &mut Vec<u8>, ask: &Ask<Key>| {
            print.extend([attempt(&ask.token), u8::from(ask.mode == Mode::Skip), ask.woken_for.map_or(0, |key| 1 + key)]);
        };
        table.asks().for_each(|asked| ask(print, asked));
        print.push(END);
        for (key, hold) in table.holds() {
            print.extend([key, u8::from(hold.exclusive)]);
            let mut holders: Vec<_> = hold
                .holders
                .iter()
                .map(|holder| [attempt(&holder.token), holder.slot as u8, holder.version as u8, rank(holder.fence)])
                .collect();
            holders.sort_unstable();
            print.extend(holders.iter().flatten());
            print.push(table.reading(key).map_or(END, |reading| reading.version as u8));
        }
        print.push(END);
        let lock = |lock: &Lock<Key>| match *lock {
            Lock::Whole(key) => key * 8,
            Lock::Base(key) => key * 8 + 1,
            Lock::Slot(key, slot) => key * 8 + 2 + slot as u8,
        };
        print.extend(table.locks().iter().map(lock));
        print.push(END);
        print.extend(table.unlocks().iter().map(lock));
        print.push(END);
        print.extend(table.yielded());
        print.push(END);
        for waiter in table.waiters() {
            ask(print, &waiter.ask);
        }
        print.push(END);
        if let Some(unsure) = table.unsure() {
            print.extend(unsure.keys.iter().copied().chain([END]).chain(unsure.converts.iter().copied()));
        }
        print.push(END);
        let due = table.due();
        let mut parks: Vec<_> = due.parks.iter().map(|park| [attempt(&park.token), park.key, u8::from(park.skips)]).collect();
        parks.sort_unstable();
        print.extend(parks.iter().flatten());
        print.push(END);
        print.extend(due.wakes.iter().flat_map(|(key, wake)| [*key, *wake as u8]));
        print.push(END);
        print.extend(&due.looks);
        print.push(END);
        if let Some((asks, unlocked)) = table.out() {
            asks.iter().for_each(|asked| ask(print, asked));
            print.push(END - 1);
            print.extend(unlocked);
        }
        print.push(END);
        for call in [call, stale] {
            if let Some(call) = call {
                call.print(print, attempt, &lock, rank);
            }
            print.push(END);
        }
        for set in [guests, stopped] {
            let mut set: Vec<u8> = set.iter().map(attempt).collect();
            set.sort_unstable();
            print.extend(set);
            print.push(END);
        }
    }
}

/// Every way to number jobs so that those declared alike change places.
fn permutations(jobs: &[Spec]) -> Vec<Vec<u8>> {
    fn extend(jobs: &[Spec], done: &mut Vec<u8>, all: &mut Vec<Vec<u8>>) {
        let at = done.len();
        if at == jobs.len() {
            all.push(done.clone());
            return;
        }
        for name in 0..jobs.len() {
            // In unlike orders of keys jobs are not alike, though declared so.
            let alike = jobs[name] == jobs[at] && (jobs[at].keys.len() < 2 || name % 2 == at % 2);
            if alike && !done.contains(&(name as u8)) {
                done.push(name as u8);
                extend(jobs, done, all);
                done.pop();
            }
        }
    }
    let mut all = Vec::new();
    extend(jobs, &mut Vec::new(), &mut all);
    all
}
