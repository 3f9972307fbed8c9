//! Every interleaving of small cases, breadth first.
//!
//! The simulation samples long runs; this goes through *all* short ones, in two parts:
//!
//! - [`explore`]: jobs, two hosts and an operator on the [`Model`], one command being one step. In every reachable
//!   state the [`Oracle`] checks its account; and from every reachable state the protocol's own steps (no fault, no
//!   operator) must be able to end every job. Shows C1, C3, C5 and B2 to B7, and with [`Case::inside`] B8: the hosts then
//!   ask for local waiters, begin them in place of what has ended, and write that in a later step.
//! - [`locks`]: what a command is made of. A transaction takes its key rows one by one, in some order, reads, decides
//!   with the ledger and commits; others run in between. Shows what makes a command one step: B1 (count after the
//!   locks), C2 (nobody stands still inside one) and C4 with W1 (one order of keys, and no further keys).
//!
//! What must stay true: states are compared by what decides their future. Tickets count by their rank, tokens by
//! whether they are current, slot numbers not at all.
//!
//! What it deliberately does not do: time (a delay is over at once, a lease lapses when the explorer says so), batches
//! of several claims, partly loaded lines. The simulation has those.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::{ClaimParams, Claimed, ExchangeParams, HandOff, HostInfo, Local, NewJob, Pass, RunOutput, Served, Settle, WaitersWanted};

use crate::model::{Model, Place, Row, lanes};
use crate::oracle::{Broken, Oracle, Stand};

const NOW: UnixMillis = UnixMillis(0);

/// A job of a case.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// Its keys.
    pub keys: &'static [&'static str],
    /// Its stamped limit.
    pub limit: u32,
    /// Its weight.
    pub weight: u32,
    /// What a full key does.
    pub mode: Mode,
    /// Its order.
    pub order: Order,
}

impl Spec {
    /// Waits, weighs one, in any order.
    #[must_use]
    pub const fn wait(keys: &'static [&'static str], limit: u32) -> Self {
        Spec { keys, limit, weight: 1, mode: Mode::Wait, order: Order::Any }
    }
}

/// How often each thing outside the protocol may happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// A host is killed.
    pub crashes: u8,
    /// A host freezes; its lease may lapse.
    pub freezes: u8,
    /// An operator deletes a waiting job.
    pub deletes: u8,
    /// A run ends with a retry at once.
    pub retries: u8,
    /// A sweep takes unclaimed reservations back.
    pub sweeps: u8,
    /// The answer to a host that writes its ends is lost, and it writes them again.
    pub losses: u8,
}

/// A case.
#[derive(Debug, Clone, Default)]
pub struct Case {
    /// For the table.
    pub name: &'static str,
    /// The jobs.
    pub jobs: Vec<Spec>,
    /// What may go wrong.
    pub budget: Budget,
    /// Limits of key `a` that an operator sets one after the other; the last `None` removes it.
    pub limits: Vec<Option<u32>>,
    /// Whether slots pass on inside the hosts.
    pub inside: bool,
    /// The broken rule.
    #[cfg(feature = "mutations")]
    pub mutation: Option<crate::model::Mutation>,
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

/// What a host knows of a run of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    job: JobHandle,
    token: ClaimToken,
    /// The key whose slot it has, or waits for, if that may pass on inside the host.
    key: Option<KeyId>,
    doing: Doing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// It waits inside the host.
    Waits,
    /// Its guest runs.
    Executes,
    /// Its guest has ended, which is not written yet, or the answer was lost.
    Ended(End),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Completed,
    Retry,
    HandBack,
    NotBegun,
}

impl Run {
    fn new(claimed: &Claimed) -> Self {
        let (key, doing) = match claimed.local {
            Some(Local::Waits(key)) => (Some(key), Doing::Waits),
            Some(Local::Holds(key)) => (Some(key), Doing::Executes),
            None => (None, Doing::Executes),
        };
        Run { job: claimed.handle, token: claimed.token, key, doing }
    }

    fn name(&self) -> (JobHandle, ClaimToken) {
        (self.job, self.token)
    }
}

#[derive(Clone, Default)]
struct Host {
    registration: Option<HostId>,
    dead: bool,
    frozen: bool,
    /// Its lease has lapsed: others may rescue it, and its guests are the exception that slots.md states.
    lapsed: bool,
    runs: Vec<Run>,
    /// Slots that have passed on and of which no answer has come yet.
    passes: Vec<Pass>,
}

impl Host {
    /// Whether the run at `to` may begin in place of the one at `from`: it waits for that key and was claimed after it.
    /// (So it was taken while that one's slot was there, and both were stamped with one limit.)
    fn may_pass(&self, from: usize, to: usize, is_broken: &dyn Fn(Fault) -> bool) -> bool {
        let (from, to) = (&self.runs[from], &self.runs[to]);
        from.doing == Doing::Executes
            && to.doing == Doing::Waits
            && from.key.is_some()
            && from.key == to.key
            && (from.token < to.token || is_broken(Fault::BeginsBehind))
    }
}

/// Rules of a host that a mutation breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    BeginsWithoutPass,
    BeginsBehind,
    BeginsBeside,
    EndOvertakesPass,
    KeepsWaiters,
}

#[derive(Clone)]
struct World {
    model: Model,
    oracle: Oracle,
    hosts: [Host; 2],
    budget: Budget,
    next_limit: usize,
}

/// What decides a state's future.
type Fingerprint = Vec<u64>;

/// One step: its name, whether the protocol does it by itself, and where it leads.
struct Step {
    name: String,
    by_itself: bool,
    to: Result<World, Broken>,
}

/// Goes through every state of a case.
///
/// # Errors
/// The first broken promise by number of steps, or a state from which some job can never end.
pub fn explore(case: &Case) -> Result<Explored, Box<Found>> {
    let served = case.jobs.iter().enumerate().map(|(at, spec)| declarations(at, spec)).collect::<Vec<_>>();
    let start = World::new(case, &served).map_err(|broken| Box::new(Found { broken, path: Vec::new() }))?;
    let mut numbers = HashMap::from([(start.fingerprint(), 0usize)]);
    let mut came_from: Vec<(usize, String)> = vec![(0, "start".to_owned())];
    let mut back: Vec<Vec<usize>> = vec![Vec::new()];
    let mut done = vec![start.is_done()];
    let mut open = VecDeque::from([(0usize, start)]);
    let mut steps = 0;
    while let Some((number, world)) = open.pop_front() {
        for Step { name, by_itself, to } in world.steps(case, &served) {
            steps += 1;
            let to = match to {
                Ok(to) => to,
                Err(broken) => {
                    let mut path = path_to(&came_from, number);
                    path.push(name);
                    return Err(Box::new(Found { broken, path }));
                }
            };
            let next = came_from.len();
            let reached = *numbers.entry(to.fingerprint()).or_insert(next);
            if reached == next {
                came_from.push((number, name));
                back.push(Vec::new());
                done.push(to.is_done());
                open.push_back((next, to));
            }
            if by_itself {
                back[reached].push(number);
            }
        }
    }
    // Backwards from the ends: whatever is not reached cannot end by itself.
    let mut can_end = done.clone();
    let mut queue: VecDeque<usize> = done.iter().enumerate().filter(|(_, done)| **done).map(|(at, _)| at).collect();
    while let Some(at) = queue.pop_front() {
        for &before in &back[at] {
            if !std::mem::replace(&mut can_end[before], true) {
                queue.push_back(before);
            }
        }
    }
    match can_end.iter().position(|can_end| !can_end) {
        Some(stuck) => Err(Box::new(Found { broken: "some job can never end from here".to_owned(), path: path_to(&came_from, stuck) })),
        None => Ok(Explored { states: came_from.len(), steps }),
    }
}

fn path_to(came_from: &[(usize, String)], mut at: usize) -> Vec<String> {
    let mut path = Vec::new();
    while at != 0 {
        path.push(came_from[at].1.clone());
        at = came_from[at].0;
    }
    path.reverse();
    path
}

fn declarations(at: usize, spec: &Spec) -> Arc<Declarations> {
    let concurrency = Concurrency {
        kind: if spec.limit == 1 { ConcurrencyKind::Mutex } else { ConcurrencyKind::Semaphore },
        keys: spec.keys.iter().filter_map(|key| key.parse().ok()).collect(),
        limit: spec.limit,
        weight: spec.weight,
        mode: spec.mode,
        order: spec.order,
        on_retry: OnRetry::Block,
    };
    Arc::new(Declarations {
        contract: format!("c{at}"),
        handler: format!("h{at}"),
        digest: Digest([0; 32]),
        on_contract: Declared::default(),
        on_handler: Declared { concurrency: Some(concurrency), ..Declared::default() },
    })
}

impl World {
    fn new(case: &Case, served: &[Arc<Declarations>]) -> Result<Self, Broken> {
        let mut world = World {
            model: Model::default(),
            oracle: Oracle::default(),
            hosts: [Host::default(), Host::default()],
            budget: case.budget,
            next_limit: 0,
        };
        world.model.without_history = true;
        #[cfg(feature = "mutations")]
        {
            world.model.mutation = case.mutation;
        }
        let jobs = (0..case.jobs.len()).map(|at| NewJob {
            id: JobId(at as u128 + 1),
            contract: format!("c{at}"),
            queue: "q".to_owned(),
            payload: "{}".to_owned(),
            metadata: Vec::new(),
            trace_parent: None,
            due: None,
            explicit: Declared::default(),
            unique_key: None,
        });
        world.model.enqueue(jobs.collect(), NOW);
        for host in 0..2 {
            world.register(host, served)?;
        }
        world.check()
    }

    fn register(&mut self, host: usize, served: &[Arc<Declarations>]) -> Result<(), Broken> {
        let registration = self.model.register(HostInfo { name: format!("host{host}"), version: "1".to_owned(), now: NOW });
        self.hosts[host] = Host { registration: Some(registration), ..Host::default() };
        let served = served.iter().map(|declarations| Served { declarations: declarations.clone() }).collect();
        self.model.serve(registration, served, NOW).map_err(|error| error.to_string())
    }

    fn check(mut self) -> Result<Self, Broken> {
        self.oracle.follow(&mut self.model)?;
        let mut executing = Vec::new();
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| !host.dead && !host.lapsed) {
            for run in host.runs.iter().filter(|run| matches!(run.doing, Doing::Executes | Doing::Waits)) {
                let stand = self.oracle.stand(run.job);
                let inside = run.doing == Doing::Waits || host.passes.iter().any(|pass| pass.to == run.name());
                let good = stand == Some(Stand::Running(run.token)) || inside && stand == Some(Stand::Slotless(run.token));
                if !good {
                    return Err(format!("host {at}, whose lease is good, runs {:?}, which is {stand:?}", run.job));
                }
                if let (Doing::Executes, Some(registration)) = (run.doing, host.registration) {
                    executing.push((registration, run.job));
                }
            }
        }
        self.oracle.executing(&self.model, &executing)?;
        Ok(self)
    }

    fn is_broken(&self, fault: Fault) -> bool {
        #[cfg(feature = "mutations")]
        {
            use crate::model::Mutation;
            self.model.mutation
                == Some(match fault {
                    Fault::BeginsWithoutPass => Mutation::BeginsWithoutPass,
                    Fault::BeginsBehind => Mutation::BeginsBehind,
                    Fault::BeginsBeside => Mutation::BeginsBeside,
                    Fault::EndOvertakesPass => Mutation::EndOvertakesPass,
                    Fault::KeepsWaiters => Mutation::KeepsWaiters,
                })
        }
        #[cfg(not(feature = "mutations"))]
        {
            let _ = fault;
            false
        }
    }

    fn is_done(&self) -> bool {
        self.oracle.finished(&self.model).is_ok()
    }

    fn fingerprint(&self) -> Fingerprint {
        let mut tickets: Vec<_> = self.model.rows.values().filter_map(|row| row.ticket).collect();
        tickets.sort_unstable();
        let Budget { crashes, freezes, deletes, retries, sweeps, losses } = self.budget;
        let mut print = vec![u64::from_be_bytes([0, losses, crashes, freezes, deletes, retries, sweeps, self.next_limit as u8])];
        let mut tokens: Vec<_> = self.hosts.iter().flat_map(|host| &host.runs).map(|run| run.token).collect();
        tokens.sort_unstable();
        for (job, row) in &self.model.rows {
            let rank = row.ticket.map_or(0, |ticket| tickets.partition_point(|other| *other < ticket) + 1);
            let host =
                row.host.map_or(0, |host| self.hosts.iter().position(|known| known.registration == Some(host)).map_or(9, |at| at + 1));
            let blocks = self.model.blockers.keys().any(|(_, blocker)| blocker == job);
            let slots = self.model.slots.values().filter(|slot| slot.job == *job).count();
            print.push(u64::from_be_bytes([
                job.0 as u8,
                row.place as u8,
                row.parked_on.map_or(0, |key| key.0 as u8),
                rank as u8,
                host as u8,
                u8::from(blocks) * 2 + u8::from(row.stamp.is_some()),
                slots as u8,
                u8::from(self.model.cancels.contains_key(job)),
            ]));
        }
        for host in &self.hosts {
            let alive = host.registration.is_some_and(|registration| self.model.hosts.contains_key(&registration));
            let flags = [host.dead, host.frozen, host.lapsed, alive].iter().fold(0, |sum, flag| sum * 2 + u64::from(*flag));
            print.push(u64::MAX - flags);
            let mut runs: Vec<_> = host
                .runs
                .iter()
                .map(|run| {
                    let current = self.model.rows.get(&run.job).is_some_and(|row| row.token == Some(run.token));
                    let doing = match run.doing {
                        Doing::Executes => 0,
                        Doing::Waits => 1,
                        Doing::Ended(end) => 2 + end as u8,
                    };
                    // Who may begin in whose place depends on the order of tokens.
                    let rank = if run.key.is_some() { tokens.partition_point(|token| *token < run.token) + 1 } else { 0 };
                    u64::from_be_bytes([0, 0, 0, 0, rank as u8, doing, u8::from(current), run.job.0 as u8])
                })
                .collect();
            runs.sort_unstable();
            print.extend(runs);
            print.extend(host.passes.iter().map(|pass| u64::from_be_bytes([1, 0, 0, 0, 0, 0, pass.from.0.0 as u8, pass.to.0.0 as u8])));
        }
        print
    }

    fn steps(&self, case: &Case, served: &[Arc<Declarations>]) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut go = |name: String, by_itself: bool, act: &dyn Fn(&mut World) -> Result<(), Broken>| {
            let mut to = self.clone();
            let to = act(&mut to).and_then(|()| to.check());
            steps.push(Step { name, by_itself, to });
        };
        for at in 0..2 {
            let host = &self.hosts[at];
            let other = &self.hosts[1 - at];
            let Some(registration) = host.registration else { continue };
            if host.dead {
                if !other.dead && !other.frozen && self.model.hosts.contains_key(&registration) {
                    go(format!("host {at}, dead, is rescued"), true, &|world| world.rescue(registration));
                }
                continue;
            }
            let other_lives = !other.dead && !other.frozen;
            if self.budget.crashes > 0 && other_lives {
                go(format!("host {at} is killed"), false, &|world| {
                    world.budget.crashes -= 1;
                    world.hosts[at] = Host { dead: true, registration: Some(registration), ..Host::default() };
                    Ok(())
                });
            }
            if host.frozen {
                if !host.lapsed {
                    go(format!("the lease of host {at} lapses"), false, &|world| {
                        world.hosts[at].lapsed = true;
                        Ok(())
                    });
                } else if other_lives && self.model.hosts.contains_key(&registration) {
                    go(format!("host {at}, lapsed, is rescued"), true, &|world| world.rescue(registration));
                }
                go(format!("host {at} thaws"), true, &|world| {
                    world.hosts[at].frozen = false;
                    Ok(())
                });
                continue;
            }
            if self.budget.freezes > 0 && other_lives {
                go(format!("host {at} freezes"), false, &|world| {
                    world.budget.freezes -= 1;
                    world.hosts[at].frozen = true;
                    Ok(())
                });
            }
            for (which, run) in host.runs.iter().enumerate().filter(|(_, run)| run.doing == Doing::Executes) {
                let ends: &[(&str, End, bool)] = match host.lapsed {
                    true => &[("is given back", End::HandBack, true)],
                    false => &[("ends", End::Completed, true), ("is retried", End::Retry, false)],
                };
                for &(how, end, by_itself) in ends.iter().filter(|(_, end, _)| *end != End::Retry || self.budget.retries > 0) {
                    let ended = move |world: &mut World| {
                        world.budget.retries -= u8::from(end == End::Retry);
                        world.hosts[at].runs[which].doing = Doing::Ended(end);
                    };
                    go(format!("on host {at} {:?} {how}", run.job), by_itself, &|world| {
                        ended(world);
                        world.write(at, registration, Which::All, served)
                    });
                    let places =
                        (0..host.runs.len()).filter(|next| !host.lapsed && host.may_pass(which, *next, &|fault| self.is_broken(fault)));
                    for next in places {
                        let begins = host.runs[next].job;
                        go(format!("on host {at} {:?} {how}, and {begins:?} begins in its place", run.job), by_itself, &|world| {
                            if !world.is_broken(Fault::BeginsBeside) {
                                ended(world);
                            }
                            world.begin(at, which, next);
                            Ok(())
                        });
                        go(format!("on host {at} {:?} {how}; once that is written, {begins:?} begins", run.job), by_itself, &|world| {
                            ended(world);
                            world.pass(at, which, next);
                            world.write(at, registration, Which::All, served)?;
                            // Unless it was rescued meanwhile.
                            if let Some(run) = world.hosts[at].runs.iter_mut().find(|run| run.job == begins) {
                                run.doing = Doing::Executes;
                            }
                            Ok(())
                        });
                    }
                }
            }
            for (which, run) in host.runs.iter().enumerate().filter(|(_, run)| run.doing == Doing::Waits) {
                if !host.lapsed && self.is_broken(Fault::KeepsWaiters) {
                    break;
                }
                go(format!("host {at} gives {:?} back, which has not begun", run.job), true, &|world| {
                    world.hosts[at].runs[which].doing = Doing::Ended(End::NotBegun);
                    world.write(at, registration, Which::All, served)
                });
            }
            let ended = host.runs.iter().filter(|run| matches!(run.doing, Doing::Ended(_))).count();
            if ended > 0 {
                go(format!("host {at} writes its ends"), true, &|world| world.write(at, registration, Which::All, served));
                if self.budget.losses > 0 {
                    go(format!("host {at} writes its ends, and the answer is lost"), false, &|world| {
                        world.budget.losses -= 1;
                        world.write(at, registration, Which::AllUnheard, served)
                    });
                }
            }
            if ended > 1 {
                go(format!("host {at} writes one end"), true, &|world| world.write(at, registration, Which::One, served));
            }
            if host.lapsed {
                if host.runs.is_empty() {
                    go(format!("host {at} renews after its lapse"), true, &|world| match world.model.renew(registration, &[], NOW) {
                        Ok(_) => {
                            world.hosts[at].lapsed = false;
                            Ok(())
                        }
                        Err(_) => world.register(at, served),
                    });
                }
                continue;
            }
            for (job, row) in &self.model.rows {
                if matches!(row.place, Place::Ready | Place::Reserved) {
                    let lane = served[(job.0 - 1) as usize].clone();
                    go(format!("host {at} claims {job:?}"), true, &|world| world.claim(at, registration, &lane, 0));
                    if case.inside && row.place == Place::Ready {
                        go(format!("host {at} claims {job:?}, which may wait inside"), true, &|world| {
                            world.claim(at, registration, &lane, 1)
                        });
                    }
                }
                if case.inside && row.place == Place::Parked {
                    let lane = served[(job.0 - 1) as usize].clone();
                    go(format!("host {at} takes {job:?} out of the line"), true, &|world| world.claim(at, registration, &lane, 1));
                }
            }
        }
        if self.budget.deletes > 0 {
            // A local waiter may be any moment in its host, which is told to stop it.
            let may_be_cancelled = |job: &JobHandle, row: &Row| match row.place {
                Place::Ready | Place::Parked | Place::Reserved => true,
                Place::Running => case.inside && !self.model.cancels.contains_key(job),
                _ => false,
            };
            for (_, row) in self.model.rows.iter().filter(|(job, row)| may_be_cancelled(job, row)) {
                let id = row.job.id;
                go(format!("an operator deletes job {}", id.0), false, &|world| {
                    world.budget.deletes -= 1;
                    world.model.cancel(id, NOW);
                    Ok(())
                });
            }
        }
        if self.budget.sweeps > 0 {
            go("unclaimed reservations expire".to_owned(), false, &|world| {
                world.budget.sweeps -= 1;
                world.model.expire_reservations(Duration::ZERO, NOW);
                Ok(())
            });
        }
        if let Some(limit) = case.limits.get(self.next_limit) {
            // Whoever has begun goes on, so that a paused key does not stand for ever.
            go(format!("an operator sets the limit to {limit:?}"), self.next_limit > 0, &|world| {
                world.next_limit += 1;
                world.model.set_limit("a", *limit, "op", NOW);
                Ok(())
            });
        }
        steps
    }

    fn rescue(&mut self, host: HostId) -> Result<(), Broken> {
        let renewals = self.model.hosts.get(&host).map_or(0, |row| row.renewals);
        self.model.rescue(host, renewals, u32::MAX, NOW);
        Ok(())
    }

    /// Claims from one lane, with so many local waiters of whatever key.
    fn claim(&mut self, at: usize, host: HostId, lane: &Arc<Declarations>, most: u32) -> Result<(), Broken> {
        let claim = Some(ClaimParams { lanes: lanes(&["q"], std::slice::from_ref(lane)), max: 1 });
        let wanted = self.model.keys.keys().filter(|_| most > 0).map(|&key| WaitersWanted { key, most });
        let hand_off = HandOff { wanted: wanted.collect(), ..HandOff::default() };
        let done = self.model.exchange(&ExchangeParams { host, now: NOW, settles: Arc::new([]), claim, hand_off });
        self.hosts[at].runs.extend(done.map_err(|error| error.to_string())?.claimed.iter().map(Run::new));
        Ok(())
    }

    /// The slot of one run is another's from now on.
    fn pass(&mut self, at: usize, from: usize, to: usize) {
        let host = &mut self.hosts[at];
        if let Some(key) = host.runs[from].key {
            host.passes.push(Pass { key, from: host.runs[from].name(), to: host.runs[to].name() });
        }
    }

    /// A local waiter begins in place of a run that has ended.
    fn begin(&mut self, at: usize, from: usize, to: usize) {
        if !self.is_broken(Fault::BeginsWithoutPass) {
            self.pass(at, from, to);
        }
        self.hosts[at].runs[to].doing = Doing::Executes;
    }

    /// Writes ends, and before them what has passed on.
    fn write(&mut self, at: usize, host: HostId, which: Which, served: &[Arc<Declarations>]) -> Result<(), Broken> {
        let Host { runs, passes, .. } = &self.hosts[at];
        let mut ended: Vec<_> = runs.iter().filter(|run| matches!(run.doing, Doing::Ended(_))).copied().collect();
        if which == Which::One {
            // Never one whose slot came by a pass that is not answered.
            let has_come = |run: &Run| !passes.iter().any(|pass| pass.to == run.name());
            ended.retain(|run| has_come(run) != self.is_broken(Fault::EndOvertakesPass));
            ended.truncate(1);
        }
        let passes: Vec<_> = passes.iter().filter(|pass| ended.iter().any(|run| run.name() == pass.from)).copied().collect();
        let settles = ended.iter().map(|run| Settle {
            handle: run.job,
            token: run.token,
            ending: match run.doing {
                Doing::Ended(End::Retry) => Ending::Retry { message: String::new(), at: NOW },
                Doing::Ended(End::HandBack) => Ending::HandBack { message: String::new() },
                Doing::Ended(End::NotBegun) => Ending::NotBegun,
                _ => Ending::Completed { result: None },
            },
            on_conflict: Ending::Failed { message: String::new(), reason: FailedReason::Permanent },
            output: RunOutput::default(),
            children: Vec::new(),
            state: Vec::new(),
            took: Duration::ZERO,
        });
        let hand_off = HandOff { passes: passes.as_slice().into(), ..HandOff::default() };
        let params = ExchangeParams { host, now: NOW, settles: settles.collect(), claim: None, hand_off };
        // Rescued: everything stops, and it registers anew (C3).
        let Ok(done) = self.model.exchange(&params) else { return self.register(at, served) };
        if !done.not_passed.is_empty() {
            return Err(format!("host {at} passed slots on to {:?}, and had none", done.not_passed));
        }
        if which != Which::AllUnheard {
            let Host { runs, passes: unanswered, .. } = &mut self.hosts[at];
            runs.retain(|run| !ended.contains(run));
            unanswered.retain(|pass| !passes.contains(pass));
        }
        Ok(())
    }
}

/// Which ends are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    /// All, and the host does not hear of it.
    AllUnheard,
    One,
}

/// What a transaction is made of: key rows taken one by one.
pub mod locks {
    use std::collections::{BTreeSet, HashSet};

    use warp_domain::KeyId;
    use warp_domain::ledger::{Candidate, Effect, KeyState, Ledger, Slot, Verdict, Waiter, Want};

    use super::{BTreeMap, Broken, JobHandle, Mode, Order, VecDeque};

    /// Which rule about transactions is broken.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum LockMutation {
        /// B1, W2: the slots are counted before the key rows are locked.
        CountsBeforeLocking,
        /// C4, W1: every second job takes its keys in the opposite order.
        UnlikeOrders,
        /// B4, W1: whoever settles gives its slot to a job with several keys and locks that job's further keys then.
        HandsOnFurtherKeys,
        /// C2, W9: the client works inside the transaction, and may freeze there.
        ClientInside,
    }

    /// Jobs by their keys, all at one limit.
    #[derive(Debug, Clone)]
    pub struct LockCase {
        /// Keys of each job.
        pub jobs: Vec<Vec<i64>>,
        /// The limit.
        pub limit: u32,
        /// The broken rule.
        pub mutation: Option<LockMutation>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Stand {
        Ready,
        Reserved,
        Parked(i64, u64),
        Running,
        Over,
    }

    /// An open transaction about one job: a claim if it is not running, a settle if it is.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct Tx {
        job: usize,
        /// Key rows it still wants, next one first.
        wants: Vec<i64>,
        has: Vec<i64>,
        /// Holders by key as it read them before locking (only when that rule is broken).
        read: Option<Vec<Vec<usize>>>,
        frozen: bool,
    }

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct State {
        jobs: Vec<Stand>,
        /// Holders by key.
        slots: Vec<Vec<usize>>,
        open: Vec<Tx>,
        froze: bool,
    }

    /// Goes through every interleaving; the number of states.
    ///
    /// # Errors
    /// A key above its limit, transactions that wait for each other for ever, or jobs that never end.
    pub fn explore(case: &LockCase) -> Result<usize, Broken> {
        let keys = case.jobs.iter().flatten().max().map_or(0, |key| *key as usize + 1);
        let start = State { jobs: vec![Stand::Ready; case.jobs.len()], slots: vec![Vec::new(); keys], open: Vec::new(), froze: false };
        let mut known = HashSet::from([start.clone()]);
        let mut queue = VecDeque::from([start]);
        while let Some(state) = queue.pop_front() {
            let next = case.steps(&state)?;
            let over = state.jobs.iter().all(|stand| *stand == Stand::Over);
            if next.is_empty() && !over {
                return Err(match state.open.iter().any(|tx| !tx.frozen && !tx.wants.is_empty()) {
                    true => format!("transactions wait for each other's key rows for ever: {:?}", state.open),
                    false => format!("nothing moves and jobs are left: {:?}", state.jobs),
                });
            }
            for to in next {
                if known.insert(to.clone()) {
                    queue.push_back(to);
                }
            }
        }
        Ok(known.len())
    }

    impl LockCase {
        fn order(&self, job: usize) -> Vec<i64> {
            let mut keys = self.jobs[job].clone();
            keys.sort_unstable();
            if self.mutation == Some(LockMutation::UnlikeOrders) && job % 2 == 1 {
                keys.reverse();
            }
            keys
        }

        fn steps(&self, state: &State) -> Result<Vec<State>, Broken> {
            let mut next = Vec::new();
            for (job, stand) in state.jobs.iter().enumerate() {
                let busy = state.open.iter().any(|tx| tx.job == job);
                if !busy && matches!(stand, Stand::Ready | Stand::Reserved | Stand::Running) {
                    let mut to = state.clone();
                    let read = (self.mutation == Some(LockMutation::CountsBeforeLocking)).then(|| state.slots.clone());
                    // A reserved job only gets its token: no key row is needed (B2).
                    let wants = if *stand == Stand::Reserved { Vec::new() } else { self.order(job) };
                    to.open.push(Tx { job, wants, has: Vec::new(), read, frozen: false });
                    next.push(to.sorted());
                }
            }
            let locked: BTreeSet<i64> = state.open.iter().flat_map(|tx| &tx.has).copied().collect();
            for (at, tx) in state.open.iter().enumerate().filter(|(_, tx)| !tx.frozen) {
                let mut to = state.clone();
                match tx.wants.first() {
                    Some(key) if locked.contains(key) => {}
                    Some(&key) => {
                        to.open[at].wants.remove(0);
                        to.open[at].has.push(key);
                        if let Some(further) = self.further_keys(&to, at, key) {
                            to.open[at].wants.extend(further);
                        }
                        next.push(to.sorted());
                    }
                    None => {
                        to.open.remove(at);
                        self.commit(&mut to, tx)?;
                        next.push(to.sorted());
                    }
                }
                if self.mutation == Some(LockMutation::ClientInside) && !state.froze && !tx.has.is_empty() {
                    let mut to = state.clone();
                    to.open[at].frozen = true;
                    to.froze = true;
                    next.push(to.sorted());
                }
            }
            Ok(next)
        }

        /// The keys beyond its own that a settle locks when it hands a slot to a job with several keys.
        fn further_keys(&self, state: &State, at: usize, key: i64) -> Option<Vec<i64>> {
            let tx = &state.open[at];
            if self.mutation != Some(LockMutation::HandsOnFurtherKeys) || state.jobs[tx.job] != Stand::Running {
                return None;
            }
            let waiter = state.jobs.iter().position(|stand| matches!(stand, Stand::Parked(on, _) if *on == key))?;
            Some(self.jobs[waiter].iter().copied().filter(|key| !tx.has.contains(key) && !tx.wants.contains(key)).collect())
        }

        fn view(&self, state: &State, key: i64, slots: &[Vec<usize>]) -> KeyState {
            let slot = |(number, job): (usize, &usize)| Slot {
                number: number as u32,
                job: JobHandle(*job as i64),
                limit: self.limit,
                reserved: state.jobs[*job] == Stand::Reserved,
            };
            let parked = state.jobs.iter().enumerate().filter_map(|(job, stand)| match stand {
                Stand::Parked(on, ticket) if *on == key => Some(Waiter {
                    job: JobHandle(job as i64),
                    ticket: *ticket,
                    limit: self.limit,
                    weight: 1,
                    several_keys: self.jobs[job].len() > 1,
                    claimable: true,
                }),
                _ => None,
            });
            let mut line: Vec<_> = parked.collect();
            line.sort_by_key(|waiter| waiter.ticket);
            KeyState { slots: slots[key as usize].iter().enumerate().map(slot).collect(), line, ..KeyState::default() }
        }

        fn commit(&self, state: &mut State, tx: &Tx) -> Result<(), Broken> {
            let job = JobHandle(tx.job as i64);
            let mut keys = self.jobs[tx.job].clone();
            keys.sort_unstable();
            let next_ticket =
                state.jobs.iter().map(|stand| if let Stand::Parked(_, ticket) = stand { *ticket } else { 0 }).max().unwrap_or(0) + 1;
            let slots = tx.read.as_ref().unwrap_or(&state.slots);
            let views = keys.iter().map(|&key| (KeyId(key), self.view(state, key, slots)));
            let mut ledger = Ledger::new(views.collect::<BTreeMap<_, _>>(), next_ticket);
            let ids: Vec<_> = keys.iter().map(|&key| KeyId(key)).collect();
            match state.jobs[tx.job] {
                Stand::Running => {
                    state.jobs[tx.job] = Stand::Over;
                    ledger.release(job, &ids);
                }
                stand => {
                    let verdict = ledger.claim(&Candidate {
                        job,
                        wants: ids.iter().map(|&key| Want { key, limit: self.limit, weight: 1 }).collect(),
                        mode: Mode::Wait,
                        order: Order::Any,
                        ticket: None,
                        reserved: stand == Stand::Reserved,
                        has_started: false,
                        local: false,
                    });
                    state.jobs[tx.job] = match verdict {
                        Verdict::Start => Stand::Running,
                        Verdict::Park { key, ticket, .. } => Stand::Parked(key.0, ticket),
                        Verdict::Skip { .. } => return Err("a waiting job was skipped".to_owned()),
                        Verdict::WaitLocally => return Err("a job waits inside a host that did not ask for it".to_owned()),
                    };
                }
            }
            for effect in ledger.take_effects() {
                match effect {
                    Effect::Take { key, job, .. } => state.slots[key.0 as usize].push(job.0 as usize),
                    Effect::Free { job } => state.slots.iter_mut().for_each(|held| held.retain(|holder| *holder != job.0 as usize)),
                    Effect::Reserve { job } => state.jobs[job.0 as usize] = Stand::Reserved,
                    Effect::Wake { job } => state.jobs[job.0 as usize] = Stand::Ready,
                    Effect::Pass { .. } | Effect::KeepTicket { .. } | Effect::Block { .. } | Effect::Unblock { .. } => {}
                }
            }
            match state.slots.iter().position(|held| held.len() > self.limit as usize) {
                Some(key) => Err(format!("{} hold key {key} at limit {}", state.slots[key].len(), self.limit)),
                None => Ok(()),
            }
        }
    }

    impl State {
        /// The order in which transactions were opened, or slots taken, decides nothing. Tickets count by rank.
        fn sorted(mut self) -> Self {
            self.open.sort_by_key(|tx| tx.job);
            self.slots.iter_mut().for_each(|held| held.sort_unstable());
            let mut tickets: Vec<_> =
                self.jobs.iter().filter_map(|stand| if let Stand::Parked(_, ticket) = stand { Some(*ticket) } else { None }).collect();
            tickets.sort_unstable();
            for stand in &mut self.jobs {
                if let Stand::Parked(_, ticket) = stand {
                    *ticket = tickets.partition_point(|other| other < ticket) as u64 + 1;
                }
            }
            self
        }
    }
}
