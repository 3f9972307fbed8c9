//! Several hosts on one model, a simulated clock, and a scheduler that interleaves their steps.
//!
//! A seed decides everything: the contracts and how their policies change with each deploy, the jobs, which host does
//! what next, which guest ends how, which answer is lost after its commit, who freezes, dies or is deployed anew, and
//! what the operator does in between. After every command the [`Oracle`] checks its account; after the last step the
//! faults stop and every job must end.
//!
//! What must stay true: step *n* of a seed draws from a generator of its own, so leaving other steps out does not
//! change what it does as long as it can. That is how a failing run is cut down to the steps that matter.
//!
//! What it deliberately does not do: real time, real tasks. A command is one atomic step here; that a driver makes it
//! one is for the conformance suite to show, and what happens without is shown in [`crate::explore`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason, Observed, Outcome, RunFacts, Said, end_of};
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry};
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::{
    ClaimParams, Claimed, EnqueueVerdict, ExchangeParams, HandOff, HostInfo, Lane, Local, NewJob, Pass, Pause, RunOutput, Served, Settle,
    SettleVerdict, StateChange, StateWrite, StoreErrorKind, WaitersWanted,
};

#[cfg(feature = "mutations")]
use crate::model::Mutation;
use crate::model::{Model, Place, lanes};
use crate::oracle::{Broken, Oracle, Stand};
use crate::rng::Rng;

const LEASE: i64 = 15_000;
/// A host stops this long before its lease can lapse.
const MARGIN: i64 = 3_000;
const PATIENCE: Duration = Duration::from_secs(2);
const MAX_DEATHS: u32 = 5;
const KEYS: [&str; 3] = ["a", "b", "c"];
const QUEUES: [&str; 2] = ["q", "r"];
const CONTRACTS: usize = 4;
const DEPLOYS: usize = 3;
/// Rounds of one second each that the end of a run may take. Rescue and the longest line need a few dozen.
const DRAIN_ROUNDS: usize = 400;

/// One run to be made.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// What decides everything.
    pub seed: u64,
    /// How many steps before the faults stop.
    pub steps: usize,
    /// Steps to leave out, by number.
    pub without: Vec<bool>,
    /// Whether every step is kept for the trace, not only the last ones.
    pub whole_trace: bool,
    /// The broken rule.
    #[cfg(feature = "mutations")]
    pub mutation: Option<Mutation>,
}

/// What a run that kept its promises did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Starts.
    pub starts: u64,
    /// Jobs parked.
    pub parks: u64,
    /// Jobs skipped.
    pub skips: u64,
    /// Slots handed on.
    pub hand_ons: u64,
    /// Rows rescued.
    pub rescued: u64,
    /// Settles that came late.
    pub late: u64,
    /// Settles repeated after a lost answer.
    pub repeated: u64,
    /// Batches split because of a poison row.
    pub poisoned: u64,
    /// Reservations that expired.
    pub expired: u64,
    /// Jobs that waited inside a host.
    pub waits: u64,
    /// Slots that passed on inside a host.
    pub passes: u64,
}

/// A broken promise.
#[derive(Debug, Clone)]
pub struct Failure {
    /// After this step; steps beyond the plan's are the drain.
    pub step: usize,
    /// Which promise.
    pub broken: Broken,
    /// What had happened, one line a step.
    pub trace: Vec<String>,
}

#[derive(Debug, Clone)]
struct Run {
    job: JobHandle,
    token: ClaimToken,
    attempt: u32,
    retry: Option<Retry>,
    /// The key whose slot it has, or waits for, if that may pass on inside the host.
    key: Option<KeyId>,
    /// It has not begun: it waits inside the host.
    waits: bool,
    /// `None` while the guest runs.
    settle: Option<Settle>,
}

impl Run {
    fn new(claimed: Claimed) -> Self {
        Run {
            job: claimed.handle,
            token: claimed.token,
            attempt: claimed.attempt,
            retry: claimed.stamp.retry.as_ref().map(|stamped| stamped.value.clone()),
            key: claimed.local.map(|(Local::Holds(key) | Local::Waits(key))| key),
            waits: matches!(claimed.local, Some(Local::Waits(_))),
            settle: None,
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Host {
    up: bool,
    frozen: bool,
    registration: Option<HostId>,
    /// When the last good renewal was sent.
    renewed_at: i64,
    deploy: usize,
    serves: Vec<usize>,
    runs: Vec<Run>,
    /// Slots that have passed on inside, until that is answered.
    passes: Vec<Pass>,
    /// A request that had left when the host froze, and that the database gets at some later time.
    in_flight: Option<ExchangeParams>,
    /// What it believes to run and does not (only a broken host has any).
    phantoms: Vec<(JobHandle, ClaimToken)>,
    /// What this host last saw of the others' renewals, and since when.
    watched: BTreeMap<HostId, (i64, i64)>,
}

struct Sim {
    model: Model,
    oracle: Oracle,
    hosts: Vec<Host>,
    /// By contract and deploy.
    contracts: Vec<Vec<Arc<Declarations>>>,
    ids: Vec<JobId>,
    now: i64,
    seen: Seen,
    /// What `Add` writes should have summed up to.
    state_sum: i64,
    trace: Vec<String>,
    whole_trace: bool,
    #[cfg(feature = "mutations")]
    mutation: Option<Mutation>,
}

macro_rules! say {
    ($sim:expr, $($text:tt)*) => {{
        let mut line = format!("{:>6} ms  ", $sim.now);
        let _ = write!(line, $($text)*);
        if !$sim.whole_trace && $sim.trace.len() >= 60 {
            $sim.trace.remove(0);
        }
        $sim.trace.push(line);
    }};
}

/// Makes one run.
///
/// # Errors
/// The first broken promise, with what had happened.
pub fn run(plan: &Plan) -> Result<Seen, Box<Failure>> {
    let mut sim = Sim::new(plan);
    let fail = |sim: Sim, step, broken| Box::new(Failure { step, broken, trace: sim.trace });
    for step in 0..plan.steps {
        if plan.without.get(step).copied().unwrap_or(false) {
            continue;
        }
        let mut rng = Rng::new(plan.seed.wrapping_mul(0x1_0000).wrapping_add(step as u64 + 1));
        if let Err(broken) = sim.step(&mut rng) {
            return Err(fail(sim, step, broken));
        }
    }
    let mut rng = Rng::new(plan.seed.wrapping_mul(0x1_0000).wrapping_add(0xffff));
    match sim.drain(&mut rng) {
        Ok(()) => {
            let Oracle { starts, parks, skips, hand_ons, waits, passes, .. } = sim.oracle;
            Ok(Seen { starts, parks, skips, hand_ons, waits, passes, ..sim.seen })
        }
        Err(broken) => Err(fail(sim, plan.steps, broken)),
    }
}

/// The same failure with as few steps as leaving some out allows.
#[must_use]
pub fn cut_down(plan: &Plan, failure: Box<Failure>) -> (Plan, Box<Failure>) {
    let mut best = Plan { without: vec![false; plan.steps], whole_trace: true, ..plan.clone() };
    best.without.iter_mut().skip(failure.step + 1).for_each(|without| *without = true);
    let mut failure = match run(&best) {
        Err(again) => again,
        Ok(_) => {
            best.without.fill(false);
            failure
        }
    };
    let mut chunk = plan.steps.max(2) / 2;
    while chunk > 0 {
        for start in (0..plan.steps).step_by(chunk) {
            let end = (start + chunk).min(plan.steps);
            if best.without[start..end].iter().all(|without| *without) {
                continue;
            }
            let mut fewer = best.clone();
            fewer.without[start..end].fill(true);
            if let Err(still) = run(&fewer) {
                (best, failure) = (fewer, still);
            }
        }
        chunk /= 2;
    }
    (best, failure)
}

/// A report of a failing seed for people: what broke, the few steps that lead there, how to see it again.
#[must_use]
pub fn report(plan: &Plan, failure: Box<Failure>) -> String {
    let first = failure.broken.clone();
    let (short, failure) = cut_down(plan, failure);
    let kept = short.without.iter().filter(|without| !**without).count();
    let mut text = format!("seed {}: {first}\ncut down to {kept} of {} steps: {}\n", plan.seed, plan.steps, failure.broken);
    failure.trace.iter().for_each(|line| {
        let _ = writeln!(text, "  {line}");
    });
    let _ = write!(text, "replay: WARP_SIM_SEED={} cargo test -p warp-testkit replay -- --nocapture", plan.seed);
    text
}

pub(crate) fn policy(rng: &mut Rng) -> Declared {
    let order = if rng.chance(40) { Order::Fifo } else { Order::Any };
    let limit = [1, 1, 2, 2, 3][rng.below(5)];
    let templates = ["a", "b", "c", "{k}", "{l}"];
    let count = if rng.chance(30) { 2 } else { 1 };
    let keys = (0..count).filter_map(|_| templates[rng.below(templates.len())].parse().ok()).collect();
    let concurrency = Concurrency {
        kind: if limit == 1 { ConcurrencyKind::Mutex } else { ConcurrencyKind::Semaphore },
        keys,
        limit,
        weight: if rng.chance(30) { 1 + rng.below(limit as usize) as u32 } else { 1 },
        mode: if order == Order::Any && rng.chance(30) { Mode::Skip } else { Mode::Wait },
        order,
        on_retry: if rng.chance(60) { OnRetry::Block } else { OnRetry::Pass },
    };
    let delays = vec![Duration::from_millis(rng.below(3) as u64 * 1000), Duration::from_secs(4)];
    Declared {
        concurrency: rng.chance(92).then_some(concurrency),
        retry: rng.chance(70).then_some(Retry { max: 2, delays, jitter_permille: 100 }),
        timeout: None,
    }
}

impl Sim {
    fn new(plan: &Plan) -> Self {
        let mut rng = Rng::new(plan.seed);
        let contracts = (0..CONTRACTS).map(|contract| {
            // Contracts mostly share their rules across deploys, as people write them, and sometimes do not.
            let first = policy(&mut rng);
            let deploys = (0..DEPLOYS).map(|deploy| {
                let on_handler = if deploy > 0 && rng.chance(50) { policy(&mut rng) } else { first.clone() };
                Arc::new(Declarations {
                    contract: format!("c{contract}"),
                    handler: format!("h{contract}"),
                    digest: Digest([deploy as u8; 32]),
                    on_contract: Declared::default(),
                    on_handler,
                })
            });
            deploys.collect()
        });
        let contracts = contracts.collect();
        let mut sim = Sim {
            model: Model::with_window([0, 0, 1, 2][rng.below(4)]),
            oracle: Oracle::default(),
            hosts: vec![Host::default(); 2 + rng.below(3)],
            contracts,
            ids: Vec::new(),
            now: 1_000,
            seen: Seen::default(),
            state_sum: 0,
            trace: Vec::new(),
            whole_trace: plan.whole_trace,
            #[cfg(feature = "mutations")]
            mutation: plan.mutation,
        };
        #[cfg(feature = "mutations")]
        {
            sim.model.mutation = plan.mutation;
        }
        sim.model.splits_batches = rng.chance(70);
        for host in &mut sim.hosts {
            host.serves = (0..CONTRACTS).filter(|_| rng.chance(80)).collect();
        }
        sim
    }

    fn at(&self) -> UnixMillis {
        UnixMillis(self.now)
    }

    fn check(&mut self) -> Result<(), Broken> {
        self.oracle.follow(&mut self.model)?;
        // Every guest of a host whose claim is good is the run that the row says, so no job has two and no key more
        // than its rows hold.
        let mut executing = Vec::new();
        for (at, host) in self.hosts.iter().enumerate() {
            let Some(registration) = host.registration.filter(|_| host.up && self.now - host.renewed_at < LEASE) else { continue };
            for run in host.runs.iter().filter(|run| run.settle.is_none()) {
                let stand = self.oracle.stand(run.job);
                let inside = run.waits || host.passes.iter().any(|pass| pass.to == (run.job, run.token));
                if !run.waits {
                    executing.push((registration, run.job));
                }
                if stand != Some(Stand::Running(run.token)) && !(inside && stand == Some(Stand::Slotless(run.token))) {
                    return Err(format!("host {at}, whose lease is good, runs {:?} under {:?}, which is {stand:?}", run.job, run.token));
                }
            }
        }
        self.oracle.executing(&self.model, &executing)
    }

    fn step(&mut self, rng: &mut Rng) -> Result<(), Broken> {
        let host = rng.below(self.hosts.len());
        match rng.below(100) {
            0..14 => self.enqueue(rng),
            14..44 => self.exchange(host, rng)?,
            44..64 => self.guest_ends(host, rng),
            64..72 => self.renew(host)?,
            72..75 => self.crash(host, rng),
            75..79 => self.freeze_or_thaw(host, rng)?,
            79..81 => self.stop(host)?,
            81..84 => self.rescue(host)?,
            84..86 => self.deploy(host, rng)?,
            86..88 => self.expire()?,
            88..90 => self.arrive(host)?,
            90..94 => self.operate(rng),
            94..96 => self.lease_passes(host, rng)?,
            _ => {
                self.now += [50, 500, 1_500, 3_000, 6_000][rng.below(5)];
                say!(self, "time passes");
            }
        }
        self.check()
    }

    // ---------------------------------------------------------------------------------- jobs and operators

    fn enqueue(&mut self, rng: &mut Rng) {
        for _ in 0..1 + rng.below(3) {
            if self.ids.len() >= 14 {
                return;
            }
            let id = JobId(self.ids.len() as u128 + 1);
            let (k, l) = (KEYS[rng.below(3)], KEYS[rng.below(3)]);
            let job = NewJob {
                id,
                contract: format!("c{}", rng.below(CONTRACTS)),
                queue: QUEUES[usize::from(self.ids.len().is_multiple_of(3))].to_owned(),
                payload: if rng.chance(3) { "{}".to_owned() } else { format!(r#"{{"k":"{k}","l":"{l}"}}"#) },
                metadata: Vec::new(),
                trace_parent: None,
                due: rng.chance(15).then(|| UnixMillis(self.now + rng.below(4_000) as i64)),
                explicit: if rng.chance(10) { policy(rng) } else { Declared::default() },
                unique_key: None,
            };
            say!(self, "enqueue {} with {}", job.contract, job.payload);
            let verdicts = self.model.enqueue(vec![job], self.at());
            if matches!(verdicts[..], [EnqueueVerdict::Enqueued(_)]) {
                self.ids.push(id);
            }
        }
    }

    fn operate(&mut self, rng: &mut Rng) {
        let now = self.at();
        let Some(&id) = rng.pick(&self.ids) else { return };
        let key = KEYS[rng.below(3)];
        match rng.below(13) {
            10..13 => self.pause(rng),
            0 => {
                let verdict = self.model.delete(id, now);
                say!(self, "operator deletes {id}: {verdict:?}");
            }
            1 | 2 => {
                let verdict = self.model.cancel(id, now);
                say!(self, "operator cancels {id}: {verdict:?}");
            }
            3 | 4 => {
                let verdict = self.model.requeue(id, now);
                say!(self, "operator requeues {id}: {verdict:?}");
            }
            5 => {
                self.model.set_limit(key, None, "op", now);
                say!(self, "operator removes the limit of {key}");
            }
            _ => {
                let limit = [0, 1, 1, 2, 3, 4][rng.below(6)];
                self.model.set_limit(key, Some(limit), "op", now);
                say!(self, "operator sets the limit of {key} to {limit}");
            }
        }
    }

    /// An operator pauses or resumes a queue or a host.
    fn pause(&mut self, rng: &mut Rng) {
        let now = self.at();
        let pause = rng.chance(45).then(|| Pause { by: "op".to_owned(), at: now });
        let word = if pause.is_some() { "pauses" } else { "resumes" };
        if rng.chance(60) {
            let queue = QUEUES[rng.below(QUEUES.len())];
            let changed = self.model.pause_queue(queue, pause, now);
            say!(self, "operator {word} queue {queue}: {changed}");
        } else if let Some(host) = self.hosts[rng.below(self.hosts.len())].registration {
            // One that was rescued meanwhile is not there any more.
            let changed = self.model.pause_host(host, pause, now);
            say!(self, "operator {word} {host:?}: {:?}", changed.ok());
        }
    }

    /// B7: after the sweep nobody keeps a key longer than the patience without having claimed it.
    fn expire(&mut self) -> Result<(), Broken> {
        let now = self.at();
        let expired = self.model.expire_reservations(PATIENCE, now);
        self.seen.expired += u64::from(expired);
        if expired > 0 {
            say!(self, "{expired} reservations expire");
        }
        let stale = self.model.rows.iter().find(|(_, row)| row.place == Place::Reserved && now.since(row.changed_at) >= PATIENCE);
        stale.map_or(Ok(()), |(job, _)| Err(format!("{job:?} keeps a reservation that no host claims")))
    }

    // ---------------------------------------------------------------------------------- hosts

    fn is_broken(&self, which: Fault) -> bool {
        #[cfg(feature = "mutations")]
        return match which {
            Fault::DropsAndRenews => self.mutation == Some(Mutation::DropsAndRenews),
            Fault::GoesOnAfterLoss => self.mutation == Some(Mutation::GoesOnAfterLoss),
            Fault::BeginsWithoutPass => self.mutation == Some(Mutation::BeginsWithoutPass),
            Fault::BeginsBehind => self.mutation == Some(Mutation::BeginsBehind),
            Fault::KeepsWaiters => self.mutation == Some(Mutation::KeepsWaiters),
        };
        #[cfg(not(feature = "mutations"))]
        {
            let _ = which;
            false
        }
    }

    fn boot(&mut self, at: usize) -> Result<bool, Broken> {
        let now = self.now;
        let host = &mut self.hosts[at];
        if host.frozen {
            return Ok(false);
        }
        if host.registration.is_some() {
            return Ok(true);
        }
        let info = HostInfo { name: format!("host{at}"), version: "1".to_owned(), now: UnixMillis(now) };
        let registration = self.model.register(info);
        let kept = if self.is_broken(Fault::GoesOnAfterLoss) { std::mem::take(&mut self.hosts[at].runs) } else { Vec::new() };
        let host = &mut self.hosts[at];
        *host = Host {
            up: true,
            registration: Some(registration),
            renewed_at: now,
            deploy: host.deploy,
            serves: host.serves.clone(),
            runs: kept,
            in_flight: host.in_flight.take(),
            ..Host::default()
        };
        say!(self, "host {at} registers as {registration:?}");
        self.serve(at)?;
        Ok(true)
    }

    fn served(&self, at: usize) -> Vec<Arc<Declarations>> {
        self.hosts[at].serves.iter().map(|&contract| self.contracts[contract][self.hosts[at].deploy].clone()).collect()
    }

    fn serve(&mut self, at: usize) -> Result<(), Broken> {
        let Some(registration) = self.hosts[at].registration else { return Ok(()) };
        let served: Vec<_> = self.served(at).into_iter().map(|declarations| Served { declarations }).collect();
        say!(self, "host {at} serves {:?} of deploy {}", self.hosts[at].serves, self.hosts[at].deploy);
        match self.model.serve(registration, served, self.at()) {
            Ok(()) => self.check(),
            Err(_) => {
                self.lost(at);
                Ok(())
            }
        }
    }

    /// C3: whoever lost its registration stops everything and registers anew.
    fn lost(&mut self, at: usize) {
        say!(self, "host {at} hears that it was rescued");
        let stops = !self.is_broken(Fault::GoesOnAfterLoss);
        let host = &mut self.hosts[at];
        host.registration = None;
        host.passes.clear();
        if stops {
            host.runs.clear();
        }
    }

    fn has_lapsed(&self, at: usize) -> bool {
        self.now - self.hosts[at].renewed_at >= LEASE - MARGIN
    }

    /// C3: stops every run, started or not; each is given back, guarded by its token.
    fn stop_runs(&mut self, at: usize, why: &str) {
        if self.is_broken(Fault::GoesOnAfterLoss) && self.has_lapsed(at) {
            return;
        }
        if self.is_broken(Fault::DropsAndRenews) {
            let host = &mut self.hosts[at];
            host.phantoms.extend(host.runs.drain(..).filter(|run| run.settle.is_none()).map(|run| (run.job, run.token)));
            return;
        }
        for run in self.hosts[at].runs.iter_mut().filter(|run| run.settle.is_none()) {
            let ending = Ending::HandBack { message: why.to_owned() };
            run.settle = Some(settle(run.job, run.token, ending, Vec::new()));
        }
        say!(self, "host {at} stops its runs: {why}");
    }

    fn exchange(&mut self, at: usize, rng: &mut Rng) -> Result<(), Broken> {
        if !self.boot(at)? {
            return Ok(());
        }
        let lapsed = self.has_lapsed(at);
        if lapsed {
            self.stop_runs(at, "its lease has lapsed");
        }
        let (answer_is_lost, is_late) = (rng.chance(12), rng.chance(50));
        let claim =
            (!lapsed && rng.chance(85)).then(|| ClaimParams { lanes: lanes(&QUEUES, &self.served(at)), max: 1 + rng.below(4) as u32 });
        let most = if rng.chance(70) { 1 + rng.below(3) as u32 } else { 0 };
        if rng.chance(30) {
            self.give_waiters_back(at);
        }
        if answer_is_lost && is_late && self.hosts[at].in_flight.is_none() {
            return self.delay(at, claim, most);
        }
        self.send(at, claim, most, answer_is_lost)
    }

    /// B8: who has not begun goes back.
    fn give_waiters_back(&mut self, at: usize) {
        if self.is_broken(Fault::KeepsWaiters) {
            return;
        }
        let Host { runs, passes, .. } = &mut self.hosts[at];
        for run in runs.iter_mut().filter(|run| run.waits && run.settle.is_none()) {
            if !passes.iter().any(|pass| pass.to == (run.job, run.token)) {
                run.settle = Some(settle(run.job, run.token, Ending::NotBegun, Vec::new()));
            }
        }
    }

    /// What has passed on, and so many waiters of each key whose slots the host believes to hold.
    fn hand_off(&self, at: usize, most: u32) -> HandOff {
        let host = &self.hosts[at];
        let mut wanted: Vec<WaitersWanted> = Vec::new();
        for key in host.runs.iter().filter(|run| most > 0 && !run.waits).filter_map(|run| run.key) {
            if wanted.iter().all(|wanted| wanted.key != key) {
                wanted.push(WaitersWanted { key, most });
            }
        }
        HandOff { passes: host.passes.as_slice().into(), wanted: wanted.into(), extra: 0 }
    }

    /// The connection breaks while the request is under way. The host believes it lost and repeats it; the database
    /// runs it all the same, later.
    fn delay(&mut self, at: usize, claim: Option<ClaimParams>, most: u32) -> Result<(), Broken> {
        if let Some(host) = self.hosts[at].registration {
            let settles = self.hosts[at].runs.iter().filter_map(|run| run.settle.clone()).collect();
            let hand_off = self.hand_off(at, most);
            self.hosts[at].in_flight = Some(ExchangeParams { host, now: self.at(), settles, claim, hand_off });
            say!(self, "a request of host {at} is delayed, and the host believes it lost");
        }
        Ok(())
    }

    fn send(&mut self, at: usize, claim: Option<ClaimParams>, most: u32, answer_is_lost: bool) -> Result<(), Broken> {
        let host = &self.hosts[at];
        let Some(registration) = host.registration else { return Ok(()) };
        let settles: Arc<[Settle]> = host.runs.iter().filter_map(|run| run.settle.clone()).collect();
        let expected: Vec<_> = settles.iter().map(|settle| self.expect(registration, settle)).collect();
        let hand_off = self.hand_off(at, most);
        let passes: Vec<_> = hand_off.passes.iter().map(|pass| (pass.from.0.0, pass.to.0.0)).collect();
        let params = ExchangeParams { host: registration, now: self.at(), settles: settles.clone(), claim, hand_off };
        let done = match self.model.exchange(&params) {
            Ok(done) => done,
            Err(error) if error.kind() == StoreErrorKind::HostLost => {
                self.lost(at);
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        let waits = |claimed: &Claimed| if matches!(claimed.local, Some(Local::Waits(_))) { "waits" } else { "starts" };
        let claimed: Vec<_> = done.claimed.iter().map(|claimed| (claimed.handle.0, claimed.token.0, waits(claimed))).collect();
        let lost = if answer_is_lost { "; the answer is lost" } else { "" };
        let sent: Vec<_> = settles.iter().map(|settle| (settle.handle.0, ending_name(&settle.ending))).collect();
        say!(
            self,
            "host {at} passes {passes:?}, settles {sent:?}: {:?}, claims {claimed:?}, parks {}, skips {}{lost}",
            done.settled,
            done.parked,
            done.skipped
        );
        self.judge(&settles, &done.settled, &expected)?;
        if !done.not_passed.is_empty() {
            return Err(format!("host {at} passed slots on to {:?}, and had none", done.not_passed));
        }
        if !answer_is_lost {
            let host = &mut self.hosts[at];
            host.runs.retain(|run| run.settle.is_none());
            // Now at the latest whoever was passed a slot begins.
            for pass in host.passes.drain(..) {
                host.runs.iter_mut().filter(|run| pass.to == (run.job, run.token)).for_each(|run| run.waits = false);
            }
            host.runs.extend(done.claimed.into_iter().map(Run::new));
        }
        self.check()
    }

    /// Each settle was answered as the account says, and its writes to shared state happened once or not at all.
    fn judge(&mut self, settles: &[Settle], verdicts: &[SettleVerdict], expected: &[SettleVerdict]) -> Result<(), Broken> {
        if verdicts != expected {
            return Err(format!("settles were answered {verdicts:?}, and {expected:?} is true"));
        }
        for (settle, verdict) in settles.iter().zip(verdicts) {
            match verdict {
                SettleVerdict::Settled if matches!(settle.ending, Ending::Completed { .. }) => self.state_sum += settle.state.len() as i64,
                SettleVerdict::Late => self.seen.late += 1,
                SettleVerdict::Repeated => self.seen.repeated += 1,
                SettleVerdict::Poison => self.seen.poisoned += 1,
                _ => {}
            }
        }
        if self.model.state.get(&("s".to_owned(), "n".to_owned())).map_or("0", String::as_str) != self.state_sum.to_string() {
            return Err(format!("shared state is {:?}, and {} writes were settled", self.model.state, self.state_sum));
        }
        Ok(())
    }

    /// The answer that the account of the oracle makes true.
    fn expect(&self, host: HostId, settle: &Settle) -> SettleVerdict {
        let Some(row) = self.model.rows.get(&settle.handle) else { return SettleVerdict::Late };
        if self.oracle.stand(settle.handle).and_then(Stand::token) == Some(settle.token) && row.host == Some(host) {
            let poison = matches!(&settle.ending, Ending::Completed { result: Some(result) } if result.contains('\0'));
            return if poison { SettleVerdict::Poison } else { SettleVerdict::Settled };
        }
        if row.settled_by == Some(settle.token) { SettleVerdict::Repeated } else { SettleVerdict::Late }
    }

    fn guest_ends(&mut self, at: usize, rng: &mut Rng) {
        let host = &self.hosts[at];
        if !host.up || host.frozen {
            return;
        }
        let running: Vec<_> =
            host.runs.iter().enumerate().filter(|(_, run)| run.settle.is_none() && !run.waits).map(|(at, _)| at).collect();
        let Some(&which) = rng.pick(&running) else { return };
        let boom = || "boom".to_owned();
        let cancelled = self.model.cancels.get(&host.runs[which].job) == Some(&host.runs[which].token);
        let outcome = match rng.below(20) {
            _ if cancelled => Outcome::Observed(Observed::Cancelled),
            0..10 => Outcome::Said(Said::Completed(rng.chance(8).then(|| "a\0b".to_owned()))),
            10..15 => Outcome::Said(Said::Retryable(boom())),
            15 => Outcome::Said(Said::Permanent(boom())),
            16 => Outcome::Said(Said::Snooze(Duration::from_millis(rng.below(3_000) as u64))),
            17 => Outcome::Observed(Observed::Trapped(boom())),
            18 => Outcome::Observed(Observed::HandedBack(boom())),
            _ => Outcome::Observed(Observed::TimedOut(Duration::from_secs(1))),
        };
        let draw = rng.below(1001) as u16;
        self.guest_says(at, which, outcome, draw);
    }

    fn guest_says(&mut self, at: usize, which: usize, outcome: Outcome, draw: u16) {
        let now = self.at();
        let run = &mut self.hosts[at].runs[which];
        let facts = RunFacts { attempt: run.attempt, retry: run.retry.as_ref(), timeout: None, now, draw };
        let ending = end_of(outcome, &facts);
        let state = vec![StateWrite { bucket: "s".to_owned(), key: "n".to_owned(), change: StateChange::Add(1) }];
        let text = ending_name(&ending);
        let job = run.job;
        run.settle = Some(settle(job, run.token, ending, state));
        say!(self, "on host {at} {job:?} ends: {text}");
        // Some ends are written without anybody having begun in their place.
        if draw % 5 > 0 {
            self.begin_next(at, which, draw % 5 > 1);
        }
    }

    /// B8: the oldest local waiter of its key that was claimed after it begins in place of a run that has ended:
    /// at once, or when that is written.
    fn begin_next(&mut self, at: usize, which: usize, at_once: bool) {
        let behind = self.is_broken(Fault::BeginsBehind);
        let writes_pass = !self.is_broken(Fault::BeginsWithoutPass);
        let Host { runs, passes, .. } = &mut self.hosts[at];
        let (key, from) = (runs[which].key, (runs[which].job, runs[which].token));
        let Some(key) = key else { return };
        let may_begin = |run: &&mut Run| {
            run.waits
                && run.settle.is_none()
                && run.key == Some(key)
                && (run.token > from.1 || behind)
                && !passes.iter().any(|pass| pass.to == (run.job, run.token))
        };
        let Some(next) = runs.iter_mut().filter(may_begin).min_by_key(|run| run.token) else { return };
        next.waits = !at_once;
        let to = (next.job, next.token);
        if writes_pass {
            passes.push(Pass { key, from, to });
        }
        let when = if at_once { "at once" } else { "once that is written" };
        say!(self, "on host {at} {:?} begins in its place {when}", to.0);
    }

    fn renew(&mut self, at: usize) -> Result<(), Broken> {
        let host = &self.hosts[at];
        if !host.up || host.frozen {
            return Ok(());
        }
        let Some(registration) = host.registration else { return Ok(()) };
        if self.has_lapsed(at) && !host.runs.is_empty() {
            // C3: gives back first, renews then.
            self.stop_runs(at, "its lease has lapsed");
            if self.hosts[at].runs.iter().any(|run| run.settle.is_some()) {
                return self.send(at, None, 0, false);
            }
        }
        let host = &self.hosts[at];
        let known: Vec<_> = host.runs.iter().map(|run| (run.job, run.token)).chain(host.phantoms.iter().copied()).collect();
        match self.model.renew(registration, &known, self.at()) {
            Ok(renewed) => {
                say!(self, "host {at} renews: {} rows handed back, {:?} lost", renewed.handed_back, renewed.lost);
                let now = self.now;
                let host = &mut self.hosts[at];
                host.renewed_at = now;
                host.runs.retain(|run| run.settle.is_some() || !renewed.lost.contains(&(run.job, run.token)));
            }
            Err(_) => self.lost(at),
        }
        Ok(())
    }

    fn crash(&mut self, at: usize, rng: &mut Rng) {
        if self.hosts[at].up && rng.chance(70) {
            let host = &mut self.hosts[at];
            *host = Host { deploy: host.deploy, serves: host.serves.clone(), in_flight: host.in_flight.take(), ..Host::default() };
            say!(self, "host {at} is killed");
        }
    }

    fn freeze_or_thaw(&mut self, at: usize, rng: &mut Rng) -> Result<(), Broken> {
        let host = &mut self.hosts[at];
        if !host.up {
            return Ok(());
        }
        if host.frozen {
            host.frozen = false;
            say!(self, "host {at} thaws");
        } else if rng.chance(60) {
            host.frozen = true;
            say!(self, "host {at} freezes");
            if !self.has_lapsed(at) && rng.chance(40) {
                let claim = ClaimParams { lanes: lanes(&QUEUES, &self.served(at)), max: 2 };
                return self.delay(at, Some(claim), 1);
            }
        }
        Ok(())
    }

    /// C1: what a host had sent before it froze, died or gave up arrives, perhaps after its rescue. Nobody is there to hear the answer.
    fn arrive(&mut self, at: usize) -> Result<(), Broken> {
        let Some(mut params) = self.hosts[at].in_flight.take() else { return Ok(()) };
        params.now = self.at();
        // A host publishes less only when no claim of it is under way.
        if let (Some(claim), Some(row)) = (&mut params.claim, self.model.hosts.get(&params.host)) {
            let is_published = |lane: &Lane| {
                let mut contracts = row.served.iter().map(|served| &served.declarations.contract);
                contracts.any(|contract| *contract == lane.declarations.contract)
            };
            claim.lanes = claim.lanes.iter().filter(|lane| is_published(lane)).cloned().collect();
        }
        let expected: Vec<_> = params.settles.iter().map(|settle| self.expect(params.host, settle)).collect();
        match self.model.exchange(&params) {
            Ok(done) => {
                let claimed: Vec<_> = done.claimed.iter().map(|claimed| (claimed.handle.0, claimed.token.0)).collect();
                say!(self, "what host {at} had sent arrives: {:?}, claims {claimed:?}", done.settled);
                if !done.not_passed.is_empty() {
                    return Err(format!("host {at} had passed slots on to {:?}, and had none", done.not_passed));
                }
                self.judge(&params.settles, &done.settled, &expected)
            }
            Err(_) => {
                say!(self, "what host {at} had sent arrives and is refused");
                Ok(())
            }
        }
    }

    /// A graceful stop: hands back, settles, deregisters.
    fn stop(&mut self, at: usize) -> Result<(), Broken> {
        if !self.hosts[at].up || self.hosts[at].frozen || self.is_broken(Fault::DropsAndRenews) {
            return Ok(());
        }
        self.stop_runs(at, "its host is stopping");
        self.send(at, None, 0, false)?;
        if let Some(registration) = self.hosts[at].registration {
            let result = self.model.deregister(registration, self.at());
            say!(self, "host {at} deregisters: {}", if result.is_ok() { "done" } else { "was rescued" });
        }
        let host = &mut self.hosts[at];
        *host = Host { deploy: host.deploy, serves: host.serves.clone(), ..Host::default() };
        Ok(())
    }

    /// Looks at the others' renewal counters, and rescues whose stood still for a whole lease on the own clock.
    fn rescue(&mut self, at: usize) -> Result<(), Broken> {
        let host = &self.hosts[at];
        if !host.up || host.frozen || self.has_lapsed(at) {
            return Ok(());
        }
        let own = host.registration;
        let others: Vec<_> = self.model.hosts.iter().filter(|(id, _)| Some(**id) != own).map(|(id, row)| (*id, row.renewals)).collect();
        let now = self.now;
        for (id, renewals) in others {
            let watched = self.hosts[at].watched.entry(id).or_insert((renewals, now));
            if watched.0 != renewals {
                *watched = (renewals, now);
            } else if now - watched.1 >= LEASE {
                let rescued = self.model.rescue(id, renewals, MAX_DEATHS, UnixMillis(now));
                self.seen.rescued += u64::from(rescued.requeued + rescued.exhausted);
                say!(self, "host {at} rescues {id:?}: {rescued:?}");
                self.check()?;
            }
        }
        Ok(())
    }

    /// One host stands still for a whole lease while the others renew and watch: what a paused machine looks like.
    fn lease_passes(&mut self, at: usize, rng: &mut Rng) -> Result<(), Broken> {
        if self.hosts[at].up && !self.hosts[at].frozen && rng.chance(70) {
            self.hosts[at].frozen = true;
            say!(self, "host {at} freezes for long");
        }
        for _ in 0..5 {
            for other in 0..self.hosts.len() {
                self.renew(other)?;
                self.check()?;
                self.rescue(other)?;
            }
            self.now += 4_000;
            say!(self, "time passes");
        }
        self.hosts[at].frozen = self.hosts[at].frozen && rng.chance(50);
        Ok(())
    }

    fn deploy(&mut self, at: usize, rng: &mut Rng) -> Result<(), Broken> {
        if !self.hosts[at].up || self.hosts[at].frozen {
            return Ok(());
        }
        self.hosts[at].deploy = rng.below(DEPLOYS);
        self.hosts[at].serves = (0..CONTRACTS).filter(|_| rng.chance(75)).collect();
        self.serve(at)
    }

    // ---------------------------------------------------------------------------------- the end

    fn drain(&mut self, rng: &mut Rng) -> Result<(), Broken> {
        say!(self, "the faults stop");
        for key in KEYS {
            self.model.set_limit(key, None, "op", self.at());
            self.check()?;
        }
        for queue in QUEUES {
            self.model.pause_queue(queue, None, self.at());
            self.check()?;
        }
        for host in self.model.hosts.keys().copied().collect::<Vec<_>>() {
            let _ = self.model.pause_host(host, None, self.at());
            self.check()?;
        }
        // What was delayed arrives at some time, also after a rescue.
        let arrivals: Vec<_> = self.hosts.iter().map(|_| rng.below(40)).collect();
        for at in 0..self.hosts.len() {
            self.hosts[at].frozen = false;
            self.hosts[at].serves = (0..CONTRACTS).collect();
            // A thawed host looks at its lease before anything else.
            if self.hosts[at].up && self.has_lapsed(at) {
                self.renew(at)?;
                self.check()?;
            }
            self.serve(at)?;
        }
        for round in 0..DRAIN_ROUNDS {
            let nothing_to_come = self.hosts.iter().all(|host| host.in_flight.is_none());
            if nothing_to_come && self.model.rows.values().all(|row| row.place.state().is_final()) {
                break;
            }
            self.now += 1_000;
            for (at, &arrival) in arrivals.iter().enumerate() {
                if arrival == round {
                    self.arrive(at)?;
                    self.check()?;
                }
                self.rescue(at)?;
                let lane_count = 1 + rng.below(3) as u32;
                self.boot(at)?;
                if self.has_lapsed(at) {
                    self.stop_runs(at, "its lease has lapsed");
                } else {
                    let runs = self.hosts[at].runs.iter().enumerate();
                    let open = runs.filter(|(_, run)| run.settle.is_none() && !run.waits).map(|(which, _)| which);
                    for which in open.collect::<Vec<_>>() {
                        self.guest_says(at, which, Outcome::Said(Said::Completed(None)), 500 + round as u16 % 5);
                    }
                    self.give_waiters_back(at);
                }
                let claim = (!self.has_lapsed(at)).then(|| ClaimParams { lanes: lanes(&QUEUES, &self.served(at)), max: lane_count });
                self.send(at, claim, round as u32 % 3, false)?;
                self.renew(at)?;
                self.check()?;
            }
            self.expire()?;
            self.check()?;
        }
        self.oracle.finished(&self.model)
    }
}

/// Rules of a host that a mutation breaks.
#[derive(Clone, Copy)]
enum Fault {
    DropsAndRenews,
    GoesOnAfterLoss,
    BeginsWithoutPass,
    BeginsBehind,
    KeepsWaiters,
}

fn settle(handle: JobHandle, token: ClaimToken, ending: Ending, state: Vec<StateWrite>) -> Settle {
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

fn ending_name(ending: &Ending) -> &'static str {
    match ending {
        Ending::Completed { .. } => "completed",
        Ending::Failed { .. } => "failed",
        Ending::Retry { .. } => "retry",
        Ending::Snooze { .. } => "snooze",
        Ending::HandBack { .. } => "hand-back",
        Ending::NotBegun => "has not begun",
        Ending::Deleted { .. } => "deleted",
    }
}
