//! Local waiters: jobs that wait inside this host for a slot that it holds (slots.md B8).
//!
//! A slot that comes free with a settle passes once for each commit, so a short job under a limit would wait for the disk
//! longer than it runs. Where this host holds slots of a key and its runs of that key are short, it therefore takes a few
//! further jobs of the key without a slot, and begins one of them in the place of a run that has ended; the store hears
//! of it with that end.
//!
//! What must stay true:
//! - of each key no more runs have begun and not ended than this host holds slots of it: a waiter begins only when a run
//!   that held a slot has ended, and only one does;
//! - what the ended run wrote through the host is committed before the next one begins;
//! - a waiter begins only in the place of a run with a smaller token: so the fences of a mutex grow, and what held a slot
//!   when the waiter was taken has held it, or its place, since, under the same limit;
//! - a waiter waits [`PATIENCE`] at most, and no longer than the host has a slot of its key; then it goes back to
//!   where it was, as if it had not been claimed.
//!
//! What it deliberately does not do: know the store, exchanges, or how a run is executed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use warp_domain::{ClaimToken, KeyId};
use warp_store::{Local, Pass, WaitersWanted};

use crate::run::{Ended, Run};

/// How long a job may wait inside its host. Whoever reads a limit that an operator has just set for the first time may see
/// a run begin for so long that could not have been claimed under it.
const PATIENCE: Duration = Duration::from_millis(20);
/// So many waiters are asked for as will probably have begun within this: less than the patience, or many would be
/// given back when a run takes longer than those before it.
const HORIZON: Duration = Duration::from_millis(15);
/// Of so many keys it is remembered how long their runs took, though none goes on.
const REMEMBERED: usize = 1_000;
/// Weight of a new observation of how long runs take.
const WEIGHT: f64 = 0.2;

/// Who waits for which key.
#[derive(Default)]
pub(crate) struct Lines {
    keys: HashMap<KeyId, Line>,
    /// Runs whose slot came from another one: the run that claimed it.
    chains: HashMap<ClaimToken, ClaimToken>,
    /// How many wait, and how many have ended, by worker group.
    waiting: Vec<u32>,
    held: Vec<u32>,
    /// Nobody has waited too long before this.
    look: Duration,
}

#[derive(Default)]
struct Line {
    group: usize,
    /// Slots of this host: those of runs that go on, and those of [`Line::ended`].
    slots: u32,
    /// In the order of their tokens.
    waiters: VecDeque<(Duration, Arc<Run>)>,
    /// Slots that came free with ends which have not been sent: their next holders may be claimed with those.
    freed: u32,
    /// Claims under way that may bring waiters, and how many they may.
    asking: u32,
    asked: u32,
    /// Ended while waiters were on their way, each with the run that its slot was claimed for.
    ended: VecDeque<Ended>,
    run_seconds: Option<f64>,
}

/// What becomes of the slot of a run that has ended.
pub(crate) enum Next {
    /// It goes to this waiter, which begins now, or once the end has been written.
    Pass { ended: Ended, pass: Pass, to: Arc<Run>, at_once: bool },
    /// It comes free with the end.
    Free(Ended),
    /// It waits for the answer that may bring waiters.
    Held,
}

/// What becomes of a job that was claimed to wait here.
pub(crate) enum Arrival {
    /// It waits.
    Waits,
    /// A slot has been kept for it.
    Begins(Box<Next>),
    /// There is no slot for it: it goes back.
    Back,
}

/// The key whose slots pass through this run.
pub(crate) fn key_of(run: &Run) -> Option<KeyId> {
    match run.claimed.local? {
        Local::Holds(key) | Local::Waits(key) => Some(key),
    }
}

impl Lines {
    /// A run has been claimed with a slot.
    pub(crate) fn holds(&mut self, key: KeyId, run: &Run) {
        let line = self.keys.entry(key).or_default();
        line.group = run.group;
        line.slots += 1;
    }

    /// A run has been claimed to wait.
    pub(crate) fn arrives(&mut self, key: KeyId, run: &Arc<Run>, boot: Duration) -> Arrival {
        let Some(line) = self.keys.get_mut(&key) else { return Arrival::Back };
        let token = run.claimed.token;
        if line.slots == 0 {
            return Arrival::Back;
        }
        if let Some(at) = line.ended.iter().position(|ended| ended.run.claimed.token < token)
            && let Some(ended) = line.ended.remove(at)
        {
            count_out(&mut self.held, [&ended.run]);
            return Arrival::Begins(Box::new(self.pass(key, ended, Arc::clone(run))));
        }
        let place = line.waiters.partition_point(|(_, other)| other.claimed.token < token);
        line.waiters.insert(place, (boot, Arc::clone(run)));
        count_in(&mut self.waiting, run.group);
        let over = boot.saturating_add(PATIENCE);
        self.look = if self.look > boot { self.look.min(over) } else { over };
        Arrival::Waits
    }

    /// A run that held a slot has ended; what becomes of its slot, and who has waited for too long meanwhile.
    pub(crate) fn ended(&mut self, key: KeyId, ended: Ended, boot: Duration) -> (Next, Vec<Arc<Run>>) {
        let Some(line) = self.keys.get_mut(&key) else { return (Next::Free(ended), Vec::new()) };
        let seconds = ended.settle.took.as_secs_f64();
        line.run_seconds = Some(line.run_seconds.map_or(seconds, |mean| mean + WEIGHT * (seconds - mean)));
        let (mut late, mut next) = (Vec::new(), None);
        let first = line.waiters.partition_point(|(_, waiter)| waiter.claimed.token < ended.run.claimed.token);
        while let Some((since, waiter)) = line.waiters.remove(first) {
            if boot.saturating_sub(since) <= PATIENCE {
                next = Some(waiter);
                break;
            }
            late.push(waiter);
        }
        let is_asking = line.asking > 0;
        count_out(&mut self.waiting, &late);
        if let Some(next) = next {
            count_out(&mut self.waiting, [&next]);
            return (self.pass(key, ended, next), late);
        }
        if let Some(line) = self.keys.get_mut(&key).filter(|_| is_asking) {
            let group = ended.run.group;
            line.ended.push_back(ended);
            count_in(&mut self.held, group);
            return (Next::Held, late);
        }
        (self.free(key, ended, &mut late), late)
    }

    /// A run that holds a slot goes back without having begun: the slot comes free with it.
    pub(crate) fn gone(&mut self, key: KeyId, ended: Ended) -> (Next, Vec<Arc<Run>>) {
        let mut back = Vec::new();
        (self.free(key, ended, &mut back), back)
    }

    /// The slot of a run comes free with its end. With the last one whoever waits goes back.
    fn free(&mut self, key: KeyId, ended: Ended, back: &mut Vec<Arc<Run>>) -> Next {
        if let Some(line) = self.keys.get_mut(&key) {
            line.slots = line.slots.saturating_sub(1);
            line.freed += 1;
            if line.slots == 0 {
                let without: Vec<_> = line.waiters.drain(..).map(|(_, run)| run).collect();
                count_out(&mut self.waiting, &without);
                back.extend(without);
            }
        }
        Next::Free(ended)
    }

    fn pass(&mut self, key: KeyId, ended: Ended, to: Arc<Run>) -> Next {
        let from = &ended.run.claimed;
        let chain = self.chain_of(from.token);
        self.chains.insert(to.claimed.token, chain);
        let pass = Pass { key, from: (from.handle, from.token), to: (to.claimed.handle, to.claimed.token) };
        // What it wrote at once is there already.
        let at_once = ended.settle.children.is_empty() && ended.settle.state.is_empty();
        Next::Pass { ended, pass, to, at_once }
    }

    /// The run for which the slot was claimed that this one has.
    pub(crate) fn chain_of(&self, token: ClaimToken) -> ClaimToken {
        self.chains.get(&token).copied().unwrap_or(token)
    }

    /// The end of this run is among the exchanges'.
    pub(crate) fn forget(&mut self, token: ClaimToken) {
        self.chains.remove(&token);
    }

    /// What a claim of this group asks for besides: at most so many.
    pub(crate) fn wanted(&self, group: usize, most: u32) -> Vec<WaitersWanted> {
        let mut left = most;
        let mut wanted = Vec::new();
        for (key, line) in &self.keys {
            let most = line.wanted().min(left);
            if line.group == group && most > 0 {
                left -= most;
                wanted.push(WaitersWanted { key: *key, most });
            }
        }
        wanted
    }

    /// A claim with these is sent.
    pub(crate) fn ask(&mut self, wanted: &[WaitersWanted]) {
        self.keys.values_mut().for_each(|line| line.freed = 0);
        if self.keys.len() > REMEMBERED {
            self.keys.retain(|_, line| line.slots > 0 || line.asking > 0);
        }
        for WaitersWanted { key, most } in wanted {
            let line = self.keys.entry(*key).or_default();
            line.asking += 1;
            line.asked += most;
        }
    }

    /// It has been answered, and what it brought has arrived: whose slot waited for that and what it comes to, and who
    /// goes back.
    pub(crate) fn answered(&mut self, wanted: &[WaitersWanted]) -> (Vec<Next>, Vec<Arc<Run>>) {
        let (mut free, mut back) = (Vec::new(), Vec::new());
        for WaitersWanted { key, most } in wanted {
            let Some(line) = self.keys.get_mut(key) else { continue };
            line.asking = line.asking.saturating_sub(1);
            line.asked = line.asked.saturating_sub(*most);
            if line.asking > 0 {
                continue;
            }
            let ended = std::mem::take(&mut line.ended);
            ended.iter().for_each(|ended| count_out(&mut self.held, [&ended.run]));
            free.extend(ended.into_iter().map(|ended| self.free(*key, ended, &mut back)));
        }
        (free, back)
    }

    /// Gives up what waits for an answer: their slots come free.
    pub(crate) fn let_go(&mut self) -> (Vec<Next>, Vec<Arc<Run>>) {
        let (mut free, mut back) = (Vec::new(), Vec::new());
        let held: Vec<_> = self.keys.iter_mut().flat_map(|(key, line)| line.ended.drain(..).map(|ended| (*key, ended))).collect();
        held.iter().for_each(|(_, ended)| count_out(&mut self.held, [&ended.run]));
        free.extend(held.into_iter().map(|(key, ended)| self.free(key, ended, &mut back)));
        (free, back)
    }

    /// How many jobs of this group wait here.
    pub(crate) fn waiting(&self, group: usize) -> u32 {
        self.waiting.get(group).copied().unwrap_or_default()
    }

    /// How many runs of this group have ended and wait for somebody who takes their slot.
    pub(crate) fn held(&self, group: usize) -> u32 {
        self.held.get(group).copied().unwrap_or_default()
    }

    /// Takes out waiters.
    pub(crate) fn take_back(&mut self, which: impl Fn(&Run) -> bool) -> Vec<Arc<Run>> {
        let mut taken = Vec::new();
        for line in self.keys.values_mut() {
            let (out, kept): (VecDeque<_>, VecDeque<_>) = line.waiters.drain(..).partition(|(_, run)| which(run));
            line.waiters = kept;
            taken.extend(out.into_iter().map(|(_, run)| run));
        }
        count_out(&mut self.waiting, &taken);
        taken
    }

    /// When somebody may have waited for too long.
    pub(crate) fn look(&self) -> Duration {
        if self.waiting.iter().all(|count| *count == 0) { Duration::MAX } else { self.look }
    }

    /// Takes out whoever has waited for too long.
    pub(crate) fn overdue(&mut self, boot: Duration) -> Vec<Arc<Run>> {
        if boot < self.look() {
            return Vec::new();
        }
        let over = |since: Duration| boot.saturating_sub(since) > PATIENCE;
        let mut taken = Vec::new();
        let mut look = Duration::MAX;
        for line in self.keys.values_mut().filter(|line| !line.waiters.is_empty()) {
            if line.waiters.iter().any(|(since, _)| over(*since)) {
                let (out, kept): (VecDeque<_>, VecDeque<_>) = line.waiters.drain(..).partition(|(since, _)| over(*since));
                line.waiters = kept;
                taken.extend(out.into_iter().map(|(_, run)| run));
                // Whatever runs there now takes longer than those before it: nobody else is asked for until runs are short again.
                line.run_seconds = Some(line.run_seconds.unwrap_or_default().max(PATIENCE.as_secs_f64()));
            }
            // A moment later, so that by then it is over.
            let next = line.waiters.iter().map(|(since, _)| since.saturating_add(PATIENCE + Duration::from_millis(1))).min();
            look = look.min(next.unwrap_or(Duration::MAX));
        }
        self.look = look;
        count_out(&mut self.waiting, &taken);
        taken
    }

    /// Whether some slot will probably come free with the end of its run: nobody waits here for its key.
    pub(crate) fn may_free(&self) -> bool {
        self.keys.values().any(|line| line.slots > 0 && line.waiters.is_empty())
    }

    /// The registration is gone, and every run with it.
    pub(crate) fn clear(&mut self) {
        *self = Lines::default();
    }
}

impl Line {
    fn wanted(&self) -> u32 {
        let Some(seconds) = self.run_seconds else { return 0 };
        let each = (HORIZON.as_secs_f64() / seconds.max(1e-6)) as u32;
        let here = u32::try_from(self.waiters.len()).unwrap_or(u32::MAX).saturating_add(self.asked);
        (self.slots + self.freed).saturating_mul(each).saturating_sub(here)
    }
}

fn count_in(counts: &mut Vec<u32>, group: usize) {
    if counts.len() <= group {
        counts.resize(group + 1, 0);
    }
    counts[group] += 1;
}

fn count_out<'a>(counts: &mut [u32], runs: impl IntoIterator<Item = &'a Arc<Run>>) {
    for run in runs {
        if let Some(count) = counts.get_mut(run.group) {
            *count = count.saturating_sub(1);
        }
    }
}
