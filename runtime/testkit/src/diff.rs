//! A driver beside the model, or beside another driver: the same random commands, and everything that can be seen of
//! both after each.
//!
//! What is compared: verdicts, who is claimed, parked and skipped, who waits inside a host and to whom no slot could
//! pass, states, run and attempt numbers, stamps, keys, places in line, slots with their numbers and holders, admin
//! limits, counters by reason. What is not: texts for people, audit rows, logs, and the numbers by which a store names
//! rows, tokens and hosts.
//!
//! What must stay true: a step draws from a generator of its own, so a failing run can be cut down like one of the
//! simulation. The report names the seed; the caller's test says how it is replayed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason, Observed, Outcome, RunFacts, Said, end_of};
use warp_domain::policy::{Declared, Retry};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::{
    ClaimParams, Claimed, ExchangeParams, HandOff, HostInfo, JobFilter, Local, NewJob, Pass, RenewParams, Renewed, RunOutput, Served,
    Settle, StateChange, StateWrite, Store, WaitersWanted, Waiting,
};

use crate::model::lanes;
use crate::rng::Rng;
use crate::sim::policy;

const HOSTS: usize = 2;
const CONTRACTS: usize = 4;
const KEYS: [&str; 3] = ["a", "b", "c"];
const QUEUES: [&str; 2] = ["q", "r"];
const PATIENCE: Duration = Duration::from_secs(2);

/// A run of one host, by the names that each store gave it.
#[derive(Clone)]
struct Run {
    id: JobId,
    attempt: u32,
    retry: Option<Retry>,
    names: [(JobHandle, ClaimToken); 2],
    /// The key whose slot it has, or waits for, by the name that each store gave it.
    keys: Option<[KeyId; 2]>,
    /// It waits inside its host (B8).
    waits: bool,
    settle: Option<(Ending, Vec<StateWrite>)>,
}

/// A slot that passed on inside a host, by the names that each store gave.
#[derive(Clone, Copy)]
struct Passed {
    jobs: [JobId; 2],
    passes: [Pass; 2],
}

fn key_of(claimed: &Claimed) -> Option<KeyId> {
    claimed.local.map(|(Local::Holds(key) | Local::Waits(key))| key)
}

struct Pair<'a> {
    stores: [&'a dyn Store; 2],
    contracts: Vec<Arc<Declarations>>,
    hosts: Vec<Option<[HostId; 2]>>,
    serves: Vec<Vec<usize>>,
    runs: Vec<Vec<Run>>,
    /// Settles whose answer was lost: they are sent once more.
    repeats: Vec<Vec<Run>>,
    /// What has passed on inside each host and is to be written with the end that it began with.
    passed: Vec<Vec<Passed>>,
    /// The same whose answer was lost.
    passed_before: Vec<Vec<Passed>>,
    ids: Vec<JobId>,
    now: i64,
    trace: Vec<String>,
}

/// Runs the commands of a seed on both stores, which must be empty, leaving out steps by number.
///
/// # Errors
/// The first difference and the commands that led there.
pub async fn compare(left: &dyn Store, right: &dyn Store, seed: u64, steps: usize, without: &[bool]) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let contracts = (0..CONTRACTS).map(|contract| {
        Arc::new(Declarations {
            contract: format!("c{contract}"),
            handler: format!("h{contract}"),
            digest: Digest([7; 32]),
            on_contract: Declared::default(),
            on_handler: policy(&mut rng),
        })
    });
    let mut pair = Pair {
        stores: [left, right],
        contracts: contracts.collect(),
        hosts: vec![None; HOSTS],
        serves: (0..HOSTS).map(|_| (0..CONTRACTS).collect()).collect(),
        runs: vec![Vec::new(); HOSTS],
        repeats: vec![Vec::new(); HOSTS],
        passed: vec![Vec::new(); HOSTS],
        passed_before: vec![Vec::new(); HOSTS],
        ids: Vec::new(),
        now: 1_700_000_000_000,
        trace: Vec::new(),
    };
    pair.name_keys().await?;
    for step in 0..steps {
        if without.get(step).copied().unwrap_or(false) {
            continue;
        }
        let mut rng = Rng::new(seed.wrapping_mul(0x1_0000).wrapping_add(step as u64 + 1));
        // From a generator of its own, so that what the other steps of a seed do does not depend on it.
        let mut pauses = Rng::new(seed.wrapping_mul(0x1_0000).wrapping_add(step as u64 + 1) ^ 0x5eed_0000_0000_0000);
        let stepped = match pair.step(&mut rng).await {
            Ok(()) if pauses.chance(6) => pair.pause(&mut pauses).await,
            stepped => stepped,
        };
        let compared = match stepped {
            Ok(()) => pair.look().await,
            Err(difference) => Err(difference),
        };
        if let Err(difference) = compared {
            return Err(format!("seed {seed}, step {step}: {difference}\n  {}", pair.trace.join("\n  ")));
        }
    }
    Ok(())
}

/// Compares many seeds on fresh pairs of stores, and cuts the first failing one down. With each pair comes what must
/// outlive it, such as the directory of a file.
///
/// # Errors
/// A report for people.
pub async fn compare_seeds<L: Store, R: Store, K>(
    seeds: std::ops::Range<u64>,
    steps: usize,
    mut fresh: impl AsyncFnMut() -> (L, R, K),
) -> Result<(), String> {
    for seed in seeds {
        let (left, right, _keep) = fresh().await;
        let Err(mut report) = compare(&left, &right, seed, steps, &[]).await else { continue };
        let mut without = vec![false; steps];
        let mut chunk = steps.max(2) / 2;
        while chunk > 0 {
            for start in (0..steps).step_by(chunk) {
                let mut fewer = without.clone();
                fewer[start..(start + chunk).min(steps)].fill(true);
                if fewer == without {
                    continue;
                }
                let (left, right, _keep) = fresh().await;
                if let Err(still) = compare(&left, &right, seed, steps, &fewer).await {
                    (without, report) = (fewer, still);
                }
            }
            chunk /= 2;
        }
        return Err(report);
    }
    Ok(())
}

macro_rules! both {
    ($pair:expr, |$store:ident, $side:ident| $call:expr) => {{
        let mut answers = Vec::with_capacity(2);
        for ($side, $store) in $pair.stores.iter().enumerate() {
            answers.push($call.await.map_err(|error| format!("{:?} ({error})", error.kind())));
        }
        let (Some(right), Some(left)) = (answers.pop(), answers.pop()) else { return Err("two stores answer".to_owned()) };
        (left, right)
    }};
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, (left, right): (T, T)) -> Result<T, String> {
    if left == right { Ok(left) } else { Err(format!("{what}:\n    left  {left:?}\n    right {right:?}")) }
}

/// Errors are the same when a caller would do the same.
fn kind<T>(answer: Result<T, String>) -> Result<T, String> {
    answer.map_err(|text| text.split(' ').next().unwrap_or_default().to_owned())
}

fn kinds<T>((left, right): (Result<T, String>, Result<T, String>)) -> (Result<T, String>, Result<T, String>) {
    (kind(left), kind(right))
}

impl Pair<'_> {
    fn at(&self) -> UnixMillis {
        UnixMillis(self.now)
    }

    fn say(&mut self, text: impl FnOnce(&mut String) -> std::fmt::Result) {
        let mut line = format!("+{:<6} ", self.now - 1_700_000_000_000);
        let _ = text(&mut line);
        self.trace.push(line);
    }

    /// The one order of keys is that of their numbers, and a store may draw those earlier than it must: so they are drawn
    /// first of all, in the same order on both.
    async fn name_keys(&self) -> Result<(), String> {
        let now = self.at();
        for key in KEYS {
            same("set limit", kinds(both!(self, |store, _side| store.set_limit(key, 1, "op", now)))).map(drop)?;
            same("remove limit", kinds(both!(self, |store, _side| store.remove_limit(key, now)))).map(drop)?;
        }
        Ok(())
    }

    async fn step(&mut self, rng: &mut Rng) -> Result<(), String> {
        let host = rng.below(HOSTS);
        self.boot(host).await?;
        match rng.below(100) {
            0..16 => self.enqueue(rng).await,
            16..46 => self.exchange(host, rng).await,
            46..64 => {
                self.guest_ends(host, rng);
                Ok(())
            }
            64..68 => self.renew(host, rng).await,
            68..71 => self.leave(host, rng).await,
            71..74 => self.serve(host, rng).await,
            74..79 => {
                let now = self.at();
                self.say(|line| write!(line, "reservations expire"));
                let expired = both!(self, |store, _side| store.expire_reservations(PATIENCE, now));
                same("expired reservations", kinds(expired)).map(drop)
            }
            79..92 => self.operate(rng).await,
            _ => {
                self.now += [1, 700, 2_500, 6_000][rng.below(4)];
                Ok(())
            }
        }
    }

    async fn boot(&mut self, at: usize) -> Result<(), String> {
        if self.hosts[at].is_some() {
            return Ok(());
        }
        let info = HostInfo { name: format!("host{at}"), version: "1".to_owned(), now: self.at() };
        self.say(|line| write!(line, "host {at} registers"));
        let (left, right) = both!(self, |store, _side| store.register(info.clone()));
        self.hosts[at] = Some([left?, right?]);
        self.publish(at).await
    }

    fn served(&self, at: usize) -> Vec<Arc<Declarations>> {
        self.serves[at].iter().map(|&contract| self.contracts[contract].clone()).collect()
    }

    async fn publish(&mut self, at: usize) -> Result<(), String> {
        let Some(host) = self.hosts[at] else { return Ok(()) };
        let served: Vec<_> = self.served(at).into_iter().map(|declarations| Served { declarations }).collect();
        let serves = self.serves[at].clone();
        self.say(|line| write!(line, "host {at} serves {serves:?}"));
        same("publishing", kinds(both!(self, |store, side| store.serve(host[side], served.clone()))))?
    }

    async fn serve(&mut self, at: usize, rng: &mut Rng) -> Result<(), String> {
        self.serves[at] = (0..CONTRACTS).filter(|_| rng.chance(75)).collect();
        self.publish(at).await
    }

    async fn enqueue(&mut self, rng: &mut Rng) -> Result<(), String> {
        let now = self.at();
        let mut jobs = Vec::new();
        for _ in 0..1 + rng.below(3) {
            let id = JobId(0x0192_0000_0000_7000_8000_0000_0000_0000 + self.ids.len() as u128 + jobs.len() as u128);
            let (k, l) = (KEYS[rng.below(3)], KEYS[rng.below(3)]);
            jobs.push(NewJob {
                id,
                contract: format!("c{}", rng.below(CONTRACTS)),
                queue: QUEUES[usize::from(self.ids.len().is_multiple_of(3))].to_owned(),
                payload: if rng.chance(4) { "{}".to_owned() } else { format!(r#"{{"k":"{k}","l":"{l}"}}"#) },
                metadata: Vec::new(),
                trace_parent: None,
                due: rng.chance(20).then(|| UnixMillis(self.now + rng.below(4_000) as i64)),
                explicit: if rng.chance(15) { policy(rng) } else { Declared::default() },
                unique_key: rng.chance(15).then(|| format!("u{}", rng.below(3))),
            });
        }
        self.ids.extend(jobs.iter().map(|job| job.id));
        let texts: Vec<_> = jobs.iter().map(|job| format!("{} {} {}", short(job.id), job.contract, job.payload)).collect();
        self.say(|line| write!(line, "enqueue {texts:?}"));
        same("enqueue", kinds(both!(self, |store, _side| store.enqueue(jobs.clone(), now)))).map(drop)
    }

    async fn exchange(&mut self, at: usize, rng: &mut Rng) -> Result<(), String> {
        let Some(host) = self.hosts[at] else { return Ok(()) };
        let now = self.at();
        let mut ending: Vec<Run> = self.repeats[at].drain(..).collect();
        let fresh: Vec<Run> = self.runs[at].extract_if(.., |run| run.settle.is_some()).collect();
        let ends = |passed: &Passed| fresh.iter().any(|run| run.names[0] == passed.passes[0].from);
        let mut passed: Vec<Passed> = self.passed_before[at].drain(..).collect();
        let with_ends: Vec<Passed> = self.passed[at].extract_if(.., |passed| ends(passed)).collect();
        if rng.chance(15) {
            self.repeats[at] = fresh.clone();
            self.passed_before[at] = with_ends.clone();
        }
        passed.extend(with_ends);
        ending.extend(fresh);
        let claim = rng.chance(85).then(|| ClaimParams { lanes: lanes(&QUEUES, &self.served(at)), max: 1 + rng.below(4) as u32 });
        let most = if rng.chance(70) { 1 + rng.below(3) as u32 } else { 0 };
        let extra = if rng.chance(50) { rng.below(4) as u32 } else { 0 };
        let mut wanted: Vec<[KeyId; 2]> = Vec::new();
        for run in self.runs[at].iter().chain(&ending).filter(|run| most > 0 && !run.waits) {
            wanted.extend(run.keys.filter(|keys| !wanted.contains(keys)));
        }
        // Sometimes what is not there is passed on: between two who wait.
        let waiting: Vec<_> = self.runs[at].iter().filter(|run| run.waits && run.settle.is_none()).collect();
        if let ([from, to, ..], true) = (&waiting[..], rng.chance(10))
            && let (Some(keys), true) = (from.keys, from.keys == to.keys)
        {
            let pass = |side: usize| Pass { key: keys[side], from: from.names[side], to: to.names[side] };
            passed.push(Passed { jobs: [from.id, to.id], passes: [pass(0), pass(1)] });
        }
        let names: Vec<_> = ending.iter().map(|run| (short(run.id), run.settle.as_ref().map(|(ending, _)| ending.clone()))).collect();
        let max = claim.as_ref().map(|claim| claim.max);
        let moved: Vec<_> = passed.iter().map(|passed| passed.jobs.map(short)).collect();
        self.say(|line| {
            write!(line, "host {at} passes {moved:?}, settles {names:?} and claims {max:?}, {most} more of {wanted:?}, {extra} beside")
        });
        let (left, right) = both!(self, |store, side| {
            let settles = ending.iter().filter_map(|run| {
                let (ending, state) = run.settle.clone()?;
                Some(settle(run.names[side], ending, state))
            });
            store.exchange(ExchangeParams {
                host: host[side],
                now,
                settles: settles.collect(),
                claim: claim.clone(),
                hand_off: HandOff {
                    passes: passed.iter().map(|passed| passed.passes[side]).collect(),
                    wanted: wanted.iter().map(|keys| WaitersWanted { key: keys[side], most }).collect(),
                    extra,
                },
            })
        });
        let (left, right) = match (left, right) {
            (Ok(left), Ok(right)) => (left, right),
            (left, right) => {
                same("exchange", (kind(left.map(drop)), kind(right.map(drop))))?
                    .map_err(|error| format!("an exchange was refused: {error}"))?;
                return Ok(());
            }
        };
        same("verdicts", (&left.settled, &right.settled))?;
        let refused = |tokens: &[ClaimToken], side: usize| {
            let mut refused: Vec<_> = passed.iter().filter(|passed| tokens.contains(&passed.passes[side].to.1)).map(|p| p.jobs).collect();
            refused.sort_unstable();
            refused
        };
        same("not passed", (refused(&left.not_passed, 0), refused(&right.not_passed, 1)))?;
        let seen = |done: &warp_store::Exchanged| {
            let stands = |run: &Claimed| run.local.map(|local| matches!(local, Local::Waits(_)));
            let claimed: Vec<_> = done.claimed.iter().map(|run| (short(run.id), run.run, run.attempt, run.keyed, stands(run))).collect();
            (
                claimed,
                ("parked", done.parked),
                ("again", done.parked_again),
                ("skipped", done.skipped),
                ("unacceptable", done.unacceptable),
                ("reserved", done.reserved),
            )
        };
        same("claimed", (seen(&left), seen(&right)))?;
        same("next due", (left.next_due, right.next_due))?;
        for (left, right) in left.claimed.iter().zip(&right.claimed) {
            same("stamp", (&left.stamp, &right.stamp))?;
            self.runs[at].push(Run {
                id: left.id,
                attempt: left.attempt,
                retry: left.stamp.retry.as_ref().map(|stamped| stamped.value.clone()),
                names: [(left.handle, left.token), (right.handle, right.token)],
                keys: key_of(left).zip(key_of(right)).map(|(left, right)| [left, right]),
                waits: matches!(left.local, Some(Local::Waits(_))),
                settle: None,
            });
        }
        Ok(())
    }

    fn guest_ends(&mut self, at: usize, rng: &mut Rng) {
        let now = self.at();
        let open: Vec<_> = self.runs[at].iter().enumerate().filter(|(_, run)| run.settle.is_none()).map(|(which, _)| which).collect();
        let Some(&which) = rng.pick(&open) else { return };
        if self.runs[at][which].waits {
            // It does not begin in time.
            self.runs[at][which].settle = Some((Ending::NotBegun, Vec::new()));
            return;
        }
        if rng.chance(80) {
            self.begin_next(at, which);
        }
        let boom = || "boom".to_owned();
        let outcome = match rng.below(20) {
            0..9 => Outcome::Said(Said::Completed(rng.chance(8).then(|| "a\0b".to_owned()))),
            9..14 => Outcome::Said(Said::Retryable(boom())),
            14 => Outcome::Said(Said::Permanent(boom())),
            15 => Outcome::Said(Said::Snooze(Duration::from_millis(rng.below(3_000) as u64))),
            16 => Outcome::Observed(Observed::Cancelled),
            17 => Outcome::Observed(Observed::Trapped(boom())),
            _ => Outcome::Observed(Observed::HandedBack(boom())),
        };
        let run = &mut self.runs[at][which];
        let facts = RunFacts { attempt: run.attempt, retry: run.retry.as_ref(), timeout: None, now, draw: rng.below(1001) as u16 };
        let change = match rng.below(4) {
            0 => StateChange::Put(Some("7".to_owned())),
            1 => StateChange::CompareAndSet { expected: Some("7".to_owned()), value: Some("8".to_owned()) },
            _ => StateChange::Add(1),
        };
        let state = if rng.chance(30) { vec![StateWrite { bucket: "s".to_owned(), key: "n".to_owned(), change }] } else { Vec::new() };
        run.settle = Some((end_of(outcome, &facts), state));
    }

    /// B8: the oldest local waiter of its key that was claimed after it begins in place of a run that ends.
    fn begin_next(&mut self, at: usize, which: usize) {
        let ended = self.runs[at][which].clone();
        let Some(keys) = ended.keys else { return };
        let may_begin = |run: &&mut Run| run.waits && run.settle.is_none() && run.keys == Some(keys) && run.names[0].1 > ended.names[0].1;
        let Some(next) = self.runs[at].iter_mut().filter(may_begin).min_by_key(|run| run.names[0].1) else { return };
        next.waits = false;
        let pass = |side: usize| Pass { key: keys[side], from: ended.names[side], to: next.names[side] };
        self.passed[at].push(Passed { jobs: [ended.id, next.id], passes: [pass(0), pass(1)] });
    }

    async fn renew(&mut self, at: usize, rng: &mut Rng) -> Result<(), String> {
        let Some(host) = self.hosts[at] else { return Ok(()) };
        let now = self.at();
        if rng.chance(30) {
            // It forgets a run, as if the answer to its claim had been lost.
            self.runs[at].pop();
        }
        let runs = self.runs[at].clone();
        self.say(|line| write!(line, "host {at} renews, knowing {:?}", runs.iter().map(|run| short(run.id)).collect::<Vec<_>>()));
        let (left, right) = both!(self, |store, side| {
            let known = runs.iter().map(|run| run.names[side]).collect();
            store.renew(RenewParams { host: host[side], known, patience: PATIENCE, now })
        });
        let (left, right) = (left?, right?);
        let told = |renewed: &Renewed| (renewed.handed_back, ("expired", renewed.expired), ("reserved", renewed.reserved));
        same("handed back", (told(&left), told(&right)))?;
        let others = |renewed: &Renewed| {
            let seen =
                renewed.hosts.iter().map(|seen| (seen.name.clone(), seen.renewals, seen.renewed_at, seen.running, seen.paused.clone()));
            seen.collect::<Vec<_>>()
        };
        same("hosts", (others(&left), others(&right)))?;
        let named = |lost: &[(JobHandle, ClaimToken)], side: usize| {
            let mut lost: Vec<_> = runs.iter().filter(|run| lost.contains(&run.names[side])).map(|run| short(run.id)).collect();
            lost.sort_unstable();
            lost
        };
        let lost = same("lost", (named(&left.lost, 0), named(&right.lost, 1)))?;
        self.runs[at].retain(|run| !lost.contains(&short(run.id)));
        Ok(())
    }

    /// The host stops, or dies and is rescued at once.
    async fn leave(&mut self, at: usize, rng: &mut Rng) -> Result<(), String> {
        let Some(host) = self.hosts[at] else { return Ok(()) };
        let now = self.at();
        self.runs[at].clear();
        self.passed[at].clear();
        self.passed_before[at].clear();
        self.hosts[at] = None;
        if rng.chance(40) {
            self.say(|line| write!(line, "host {at} deregisters"));
            return same("deregistered", kinds(both!(self, |store, side| store.deregister(host[side], now)))).map(drop);
        }
        self.say(|line| write!(line, "host {at} dies and is rescued"));
        let (left, right) = both!(self, |store, side| async move {
            let hosts = store.hosts().await?;
            let renewals = hosts.iter().find(|seen| seen.host == host[side]).map_or(-1, |seen| seen.renewals);
            store.rescue(host[side], renewals, 1, now).await
        });
        same("rescued", (left, right)).map(drop)
    }

    async fn operate(&mut self, rng: &mut Rng) -> Result<(), String> {
        let now = self.at();
        let Some(&id) = rng.pick(&self.ids) else { return Ok(()) };
        let key = KEYS[rng.below(3)];
        let limit = rng.below(4) as u32;
        match rng.below(12) {
            0 => {
                self.say(|line| write!(line, "operator deletes {}", short(id)));
                same("delete", kinds(both!(self, |store, _side| store.delete(id, now)))).map(drop)
            }
            1..4 => {
                self.say(|line| write!(line, "operator cancels {}", short(id)));
                same("cancel", kinds(both!(self, |store, _side| store.cancel(id, "op", now)))).map(drop)
            }
            4..7 => {
                self.say(|line| write!(line, "operator requeues {}", short(id)));
                same("requeue", kinds(both!(self, |store, _side| store.requeue(id, "op", now)))).map(drop)
            }
            7..9 => {
                self.say(|line| write!(line, "operator removes the limit of {key}"));
                same("remove limit", kinds(both!(self, |store, _side| store.remove_limit(key, now)))).map(drop)
            }
            _ => {
                self.say(|line| write!(line, "operator sets the limit of {key} to {limit}"));
                same("set limit", kinds(both!(self, |store, _side| store.set_limit(key, limit, "op", now)))).map(drop)
            }
        }
    }

    /// An operator pauses or resumes a queue or a host.
    async fn pause(&mut self, rng: &mut Rng) -> Result<(), String> {
        let now = self.at();
        let pauses = rng.chance(45);
        let word = if pauses { "pauses" } else { "resumes" };
        if rng.chance(60) {
            let queue = QUEUES[rng.below(QUEUES.len())];
            self.say(|line| write!(line, "operator {word} queue {queue}"));
            let told = both!(self, |store, _side| async move {
                if pauses { store.pause_queue(queue, "op", now).await } else { store.resume_queue(queue, now).await }
            });
            return same("pausing a queue", kinds(told)).map(drop);
        }
        let at = rng.below(HOSTS);
        let Some(host) = self.hosts[at] else { return Ok(()) };
        self.say(|line| write!(line, "operator {word} host {at}"));
        let told = both!(self, |store, side| async move {
            if pauses { store.pause_host(host[side], "op", now).await } else { store.resume_host(host[side], now).await }
        });
        same("pausing a host", kinds(told)).map(drop)
    }

    /// Everything that can be seen from outside.
    async fn look(&self) -> Result<(), String> {
        let now = self.at();
        let filter = JobFilter { limit: 1000, ..JobFilter::default() };
        same("jobs", both!(self, |store, _side| store.jobs(filter.clone())))??;
        for key in KEYS {
            same(&format!("key {key}"), both!(self, |store, _side| store.key(key)))??;
        }
        same("limits", both!(self, |store, _side| store.limits()))??;
        let (left, right) = both!(self, |store, _side| store.overview());
        let told = |overview: warp_store::Overview| {
            let states: BTreeMap<_, _> = overview.states.into_iter().filter(|(_, count)| *count > 0).collect();
            let counters = overview.counters.into_iter().filter(|(name, count)| name.starts_with("stats:") && *count != 0);
            (states, overview.parked, counters.collect::<BTreeMap<_, _>>(), overview.paused_queues)
        };
        same("overview", (told(left?), told(right?)))?;
        let (left, right) = both!(self, |store, _side| store.queues(100));
        same("queues", (left?, right?))?;
        same("state", both!(self, |store, _side| store.state_get("s", "n")))??;
        for &id in &self.ids {
            let (left, right) = both!(self, |store, _side| store.job(id, now));
            let told = |job: warp_store::JobDetails| {
                let place = match &job.waiting {
                    Some(Waiting::ForKey { key, place, limit, limit_is_admin, .. }) => {
                        format!("for {} in place {place}, limit {limit} ({limit_is_admin})", key.key)
                    }
                    Some(Waiting::Due(at)) => format!("due {at:?}"),
                    Some(Waiting::Reserved) => "reserved".to_owned(),
                    Some(Waiting::ForWorker { .. }) => "for a worker".to_owned(),
                    Some(Waiting::ForHost) => "for a host".to_owned(),
                    Some(Waiting::Paused(pause)) => format!("{pause:?}"),
                    None => String::new(),
                };
                (place, job.summary, job.stamp, job.keys, job.explicit, job.result, job.running.map(|(host, _)| host))
            };
            same(&format!("job {}", short(id)), (left?.map(told), right?.map(told)))?;
        }
        Ok(())
    }
}

fn short(id: JobId) -> u64 {
    id.0 as u64 & 0xffff
}

fn settle((handle, token): (JobHandle, ClaimToken), ending: Ending, state: Vec<StateWrite>) -> Settle {
    Settle {
        handle,
        token,
        ending,
        on_conflict: Ending::Failed { message: "a state write conflicted".to_owned(), reason: FailedReason::Permanent },
        output: RunOutput::default(),
        children: Vec::new(),
        state,
        took: Duration::from_millis(1),
    }
}
