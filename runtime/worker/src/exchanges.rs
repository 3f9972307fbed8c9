//! Ends that wait, batches that are on their way, and when the next batch goes.
//!
//! Several exchanges may be under way at once; what each carries is remembered until it is answered. What must stay
//! true:
//! - an end is in exactly one place: waiting, under way, or in a batch to be sent again;
//! - a batch whose outcome is not known is sent again as it was, before anything else and alone, so that a repeat is
//!   recognised by its tokens and a store in trouble is not hurried;
//! - the end of a keyed run never waits for others to fill its batch, nor behind a large one: whoever waits for its
//!   slots waits with it;
//! - the ends of runs through which one slot passed (slots.md B8) are sent in their order: one whose slot came from a run
//!   of an unanswered batch waits for that answer;
//! - with nothing under way and not much to do, nothing waits for a timer.
//!
//! What it deliberately does not do: know the store, runs or leases.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use warp_domain::{ClaimToken, JobHandle};
use warp_store::{Lane, Pass, Settle, WaitersWanted};

/// So many ends are worth a statement of their own while others are under way. Where several exchanges may be under way, none
/// carries or asks for more: runs that end together are divided among them, else one would do all the work and the
/// others wait.
pub(crate) const FULL: usize = 256;
/// At most so many ends where one exchange at a time is all: bounds the transaction, so that others get their turn.
const MOST_ENDS: usize = 1024;
/// At most so many ends of runs without a key go with those of keyed runs, if more than one exchange may be under way.
const WITH_KEYED: usize = 64;
/// An end waits so long for company, at most.
pub(crate) const GATHER: Duration = Duration::from_millis(5);

/// The end of a run.
pub(crate) struct End {
    pub(crate) settle: Settle,
    /// Whether the run holds slots.
    pub(crate) keyed: bool,
    /// If its slot may pass on inside the host: the run that the slot was claimed for.
    pub(crate) chain: Option<ClaimToken>,
    /// Where its slot has gone, if it comes not free with this end.
    pub(crate) pass: Option<Pass>,
    /// The worker group that ran it; `None` if no worker did.
    pub(crate) ran_in: Option<usize>,
    /// When it came.
    pub(crate) at: Duration,
}

/// A claim that goes with an exchange.
#[derive(Clone)]
pub(crate) struct Asked {
    /// For which group.
    pub(crate) group: usize,
    /// At most so many.
    pub(crate) max: u32,
    /// From which lanes.
    pub(crate) lanes: Arc<[Lane]>,
    /// Local waiters that it may bring.
    pub(crate) wanted: Arc<[WaitersWanted]>,
    /// How many of these may come beyond the most.
    pub(crate) extra: u32,
}

/// Ends that go together, and where their slots have gone.
#[derive(Clone)]
pub(crate) struct Batch {
    pub(crate) settles: Arc<[Settle]>,
    pub(crate) passes: Arc<[Pass]>,
    /// The slots that pass with it.
    chains: Arc<[ClaimToken]>,
}

/// An exchange that has not been answered.
pub(crate) struct UnderWay {
    id: u64,
    pub(crate) batch: Batch,
    pub(crate) asked: Option<Asked>,
    pub(crate) sent: Duration,
    /// How many runs of each group ended, and how long they took together.
    pub(crate) ran: Vec<(usize, u32, Duration)>,
}

/// How much the control loop would like to claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Appetite {
    /// Nothing may be claimed, or nothing is hoped for.
    None,
    /// A claim might find something.
    Some,
    /// As much as fills a batch.
    Large,
    /// A worker is idle.
    Starving,
}

/// What decides whether a batch goes now, besides what is here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation {
    pub(crate) appetite: Appetite,
    /// Every worker is busy and ends come fast: waiting for company costs nobody anything.
    pub(crate) in_full_swing: bool,
    /// Whether keyed runs are going on, for whose ends one exchange is kept free.
    pub(crate) keyed_runs: bool,
}

/// The bookkeeping.
pub(crate) struct Exchanges {
    most: usize,
    keyed: VecDeque<End>,
    plain: VecDeque<End>,
    /// Ends of runs whose slots may pass on, in their order, and how many of them free theirs.
    chained: VecDeque<End>,
    freeing: usize,
    /// Slots that pass with a batch that has not been answered, and the ends that wait for that.
    busy: HashSet<ClaimToken>,
    behind: HashMap<ClaimToken, VecDeque<End>>,
    again: VecDeque<Batch>,
    under_way: Vec<UnderWay>,
    last_id: u64,
    /// How many exchanges have failed in a row.
    trouble: u32,
    not_before: Duration,
}

/// How long to wait before what failed is tried again: doubling from 20 ms to 2 s.
pub(crate) fn trouble_delay(trouble: u32) -> Duration {
    Duration::from_millis(20 << trouble.min(7)).min(Duration::from_secs(2))
}

impl Exchanges {
    /// At most so many under way at once.
    pub(crate) fn new(most: u32) -> Self {
        Exchanges {
            most: usize::try_from(most.max(1)).unwrap_or(usize::MAX),
            keyed: VecDeque::new(),
            plain: VecDeque::new(),
            chained: VecDeque::new(),
            freeing: 0,
            busy: HashSet::new(),
            behind: HashMap::new(),
            again: VecDeque::new(),
            under_way: Vec::new(),
            last_id: 0,
            trouble: 0,
            not_before: Duration::ZERO,
        }
    }

    pub(crate) fn add(&mut self, end: End) {
        match end.chain {
            Some(chain) if self.busy.contains(&chain) => self.behind.entry(chain).or_default().push_back(end),
            Some(_) => {
                self.freeing += usize::from(end.pass.is_none());
                self.chained.push_back(end);
            }
            None if end.keyed => self.keyed.push_back(end),
            None => self.plain.push_back(end),
        }
    }

    /// Ends that could go with the next batch.
    fn has_ready(&self) -> bool {
        !(self.keyed.is_empty() && self.plain.is_empty() && self.chained.is_empty() && self.again.is_empty())
    }

    /// Ends that are not on their way.
    pub(crate) fn has_ends(&self) -> bool {
        self.has_ready() || !self.behind.is_empty()
    }

    pub(crate) fn is_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Whether a claim is under way.
    pub(crate) fn is_claiming(&self) -> bool {
        self.under_way.iter().any(|exchange| exchange.asked.is_some())
    }

    pub(crate) fn in_trouble(&self) -> bool {
        self.trouble > 0
    }

    /// The most that one exchange carries, or asks for.
    pub(crate) fn share(&self) -> usize {
        if self.most > 1 && !self.in_trouble() { FULL } else { MOST_ENDS }
    }

    /// Every run whose end has not been answered.
    pub(crate) fn known(&self) -> impl Iterator<Item = (JobHandle, ClaimToken)> {
        let behind = self.behind.values().flatten();
        let waiting = self.keyed.iter().chain(&self.plain).chain(&self.chained).chain(behind).map(|end| &end.settle);
        let sent = self.under_way.iter().map(|exchange| &exchange.batch).chain(&self.again);
        waiting.chain(sent.flat_map(|batch| batch.settles.iter())).map(|settle| (settle.handle, settle.token))
    }

    /// The registration under which they would have counted is gone. Nothing is under way.
    pub(crate) fn forget(&mut self) {
        self.keyed.clear();
        self.plain.clear();
        self.chained.clear();
        self.freeing = 0;
        self.busy.clear();
        self.behind.clear();
        self.again.clear();
        self.calm();
    }

    pub(crate) fn calm(&mut self) {
        self.trouble = 0;
        self.not_before = Duration::ZERO;
    }

    /// When the next exchange should go if nothing else happens; zero is now, `None` is not before something does.
    pub(crate) fn when(&self, situation: &Situation) -> Option<Duration> {
        let Situation { appetite, in_full_swing, keyed_runs } = *situation;
        let most = if self.in_trouble() { 1 } else { self.most };
        if self.under_way.len() >= most || !self.has_ready() && appetite == Appetite::None {
            return None;
        }
        if self.in_trouble() {
            return Some(self.not_before);
        }
        let now = Some(Duration::ZERO);
        let frees = !self.keyed.is_empty() || self.freeing > 0;
        let pressing = !self.again.is_empty() || frees || appetite == Appetite::Starving;
        if pressing {
            return now;
        }
        let is_last = self.under_way.len() + 1 == most;
        if is_last && most > 1 && keyed_runs {
            return None;
        }
        let gathers = self.is_under_way() || in_full_swing;
        if !gathers || self.plain.len() + self.chained.len() >= FULL || appetite == Appetite::Large {
            return now;
        }
        let oldest = self.plain.front().into_iter().chain(self.chained.front()).map(|end| end.at).min();
        oldest.map(|oldest| oldest.saturating_add(GATHER))
    }

    /// Sends the next batch with this claim; its number and what is in it.
    pub(crate) fn send(&mut self, boot: Duration, asked: Option<Asked>) -> (u64, Batch) {
        let mut ran: Vec<(usize, u32, Duration)> = Vec::new();
        let batch = match self.again.pop_front() {
            Some(batch) => batch,
            None => self.next_batch(&mut ran),
        };
        self.last_id += 1;
        self.under_way.push(UnderWay { id: self.last_id, batch: batch.clone(), asked, sent: boot, ran });
        (self.last_id, batch)
    }

    fn next_batch(&mut self, ran: &mut Vec<(usize, u32, Duration)>) -> Batch {
        let frees = !self.keyed.is_empty() || self.freeing > 0;
        // So many that they are worth two exchanges: those of every second slot, so that the others can go beside them.
        let share = self.share();
        let mut beside_these = VecDeque::new();
        if self.chained.len() > share / 2 && self.most > 1 && !self.in_trouble() {
            let parity = |end: &End| end.chain.map(|chain| chain.0 & 1);
            let first = self.chained.front().and_then(parity);
            let (these, others) = std::mem::take(&mut self.chained).into_iter().partition(|end| parity(end) == first);
            (self.chained, beside_these) = (these, others);
        }
        // A prefix of them: whoever's slot came from another goes with that one or later.
        let chained = self.chained.len().min(share);
        let keyed = self.keyed.len().min(share - chained);
        let beside = if frees && self.most > 1 && !self.in_trouble() { WITH_KEYED } else { share };
        let plain = self.plain.len().min(beside).min(share - chained - keyed);
        let (mut passes, mut chains) = (Vec::new(), Vec::new());
        let ends = self.chained.drain(..chained).chain(self.keyed.drain(..keyed)).chain(self.plain.drain(..plain));
        let settles = ends.map(|End { settle, ran_in, chain, pass, .. }| {
            if let (Some(chain), Some(pass)) = (chain, pass) {
                passes.push(pass);
                chains.push(chain);
            } else {
                self.freeing -= usize::from(chain.is_some());
            }
            if let Some(group) = ran_in {
                match ran.iter_mut().find(|(of, ..)| *of == group) {
                    Some((_, count, together)) => (*count, *together) = (*count + 1, together.saturating_add(settle.took)),
                    None => ran.push((group, 1, settle.took)),
                }
            }
            settle
        });
        let settles = settles.collect();
        self.busy.extend(&chains);
        self.chained.append(&mut beside_these);
        // Beyond a full batch there may be more of the same slots.
        for end in std::mem::take(&mut self.chained) {
            self.freeing -= usize::from(end.pass.is_none());
            self.add(end);
        }
        Batch { settles, passes: passes.into(), chains: chains.into() }
    }

    /// The group that should claim together with the next batch although it hopes for nothing: the slots of a keyed
    /// run are probably handed on to a job of the same group. Where one exchange at a time is all, a claim costs
    /// nothing and whatever an end makes runnable is found with it; else it would only hold room that a claim with
    /// better hopes could use.
    pub(crate) fn claims_along(&self) -> Option<usize> {
        if !self.again.is_empty() {
            return None;
        }
        let plain = if self.most == 1 { self.plain.front() } else { None };
        self.keyed.front().or(self.chained.front()).or(plain).and_then(|end| end.ran_in)
    }

    /// An exchange has been answered, in whatever way.
    pub(crate) fn answered(&mut self, id: u64) -> Option<UnderWay> {
        let at = self.under_way.iter().position(|exchange| exchange.id == id)?;
        Some(self.under_way.swap_remove(at))
    }

    /// Its answer was good: whoever waited behind its slots may go.
    pub(crate) fn written(&mut self, batch: &Batch) {
        for chain in batch.chains.iter() {
            self.busy.remove(chain);
            for end in self.behind.remove(chain).unwrap_or_default() {
                self.add(end);
            }
        }
    }

    /// Its answer was an error: its ends go again, later. How much later is answered.
    pub(crate) fn failed(&mut self, batch: Batch, boot: Duration) -> Duration {
        if !batch.settles.is_empty() {
            self.again.push_back(batch);
        }
        self.trouble = self.trouble.saturating_add(1);
        let delay = trouble_delay(self.trouble);
        self.not_before = boot.saturating_add(delay);
        delay
    }
}

#[cfg(test)]
mod tests {
    use warp_domain::ending::Ending;
    use warp_store::RunOutput;

    use super::*;

    const QUIET: Situation = Situation { appetite: Appetite::None, in_full_swing: false, keyed_runs: false };
    const BUSY: Situation = Situation { in_full_swing: true, ..QUIET };
    const NOW: Option<Duration> = Some(Duration::ZERO);

    fn end(token: i64, keyed: bool) -> End {
        let ending = Ending::Completed { result: None };
        let settle = Settle {
            handle: JobHandle(token),
            token: ClaimToken(token),
            on_conflict: ending.clone(),
            ending,
            output: RunOutput::default(),
            children: Vec::new(),
            state: Vec::new(),
            took: ms(1),
        };
        End { settle, keyed, chain: None, pass: None, ran_in: Some(0), at: ms(100) }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn with(most: u32, ends: impl IntoIterator<Item = End>) -> Exchanges {
        let mut exchanges = Exchanges::new(most);
        ends.into_iter().for_each(|end| exchanges.add(end));
        exchanges
    }

    fn tokens(batch: &Batch) -> Vec<i64> {
        batch.settles.iter().map(|settle| settle.token.0).collect()
    }

    #[test]
    fn nothing_waits_for_a_timer_when_nothing_else_is_going_on() {
        for most in [1, 3] {
            assert_eq!(with(most, [end(1, false)]).when(&QUIET), NOW);
            assert_eq!(with(most, []).when(&Situation { appetite: Appetite::Some, ..QUIET }), NOW);
            assert_eq!(with(most, []).when(&QUIET), None);
        }
    }

    #[test]
    fn in_full_swing_a_batch_fills_up() {
        assert_eq!(with(3, [end(1, false)]).when(&BUSY), Some(ms(105)));
        assert_eq!(with(3, (0..256).map(|token| end(token, false))).when(&BUSY), NOW);
        assert_eq!(with(3, [end(1, false), end(2, true)]).when(&BUSY), NOW, "a keyed end goes at once");
        let starving = Situation { appetite: Appetite::Starving, ..BUSY };
        assert_eq!(with(3, [end(1, false)]).when(&starving), NOW);
    }

    #[test]
    fn beside_others_a_batch_fills_up_and_one_exchange_is_kept_for_keyed_ends() {
        let mut exchanges = with(2, [end(1, false)]);
        exchanges.send(ms(100), None);
        exchanges.add(end(2, false));
        assert_eq!(exchanges.when(&QUIET), Some(ms(105)));
        let keyed_runs = Situation { keyed_runs: true, ..QUIET };
        assert_eq!(exchanges.when(&keyed_runs), None);
        exchanges.add(end(3, true));
        assert_eq!(exchanges.when(&keyed_runs), NOW);
        let (_, settles) = exchanges.send(ms(101), None);
        assert_eq!(tokens(&settles), [3, 2]);
        exchanges.add(end(4, true));
        assert_eq!(exchanges.when(&keyed_runs), None, "no more than two");
    }

    #[test]
    fn what_ends_together_is_divided_among_exchanges() {
        let ends = || (0..600).map(|token| end(token, false));
        let mut exchanges = with(3, ends());
        let sent = [(); 3].map(|()| exchanges.send(ms(100), None).1.settles.len());
        assert_eq!(sent, [FULL, FULL, 600 - 2 * FULL]);
        assert_eq!(with(1, ends()).send(ms(100), None).1.settles.len(), 600, "where there is one, all go");
    }

    #[test]
    fn keyed_ends_do_not_go_behind_a_large_batch() {
        let ends = || (0..2000).map(|token| end(token, false)).chain([end(9999, true)]);
        let (_, settles) = with(3, ends()).send(ms(100), None);
        assert_eq!((settles.settles[0].token.0, settles.settles.len()), (9999, 1 + WITH_KEYED));
        let (_, settles) = with(1, ends()).send(ms(100), None);
        assert_eq!((settles.settles[0].token.0, settles.settles.len()), (9999, MOST_ENDS), "where there is one, all go");
    }

    #[test]
    fn what_failed_goes_again_first_as_it_was_and_alone() {
        let mut exchanges = with(3, [end(1, true), end(2, false)]);
        let (first, sent) = exchanges.send(ms(100), None);
        exchanges.add(end(3, true));
        let (second, _) = exchanges.send(ms(100), None);
        exchanges.add(end(4, true));
        assert_eq!(exchanges.known().map(|(_, token)| token.0).collect::<Vec<_>>(), [4, 1, 2, 3]);
        let UnderWay { batch, .. } = exchanges.answered(first).expect("under way");
        assert_eq!(exchanges.failed(batch, ms(110)), ms(40));
        assert_eq!(exchanges.when(&QUIET), None, "another is under way");
        let UnderWay { batch, .. } = exchanges.answered(second).expect("under way");
        assert_eq!(exchanges.failed(batch, ms(120)), ms(80));
        assert_eq!(exchanges.when(&QUIET), Some(ms(200)));
        let (first, again) = exchanges.send(ms(200), None);
        assert_eq!(tokens(&again), tokens(&sent));
        assert_eq!(exchanges.when(&QUIET), None, "alone");
        assert_eq!(exchanges.known().count(), 4);
        exchanges.answered(first).expect("under way");
        exchanges.calm();
        assert_eq!(tokens(&exchanges.send(ms(210), None).1), [3]);
        assert_eq!(tokens(&exchanges.send(ms(210), None).1), [4]);
        assert!(!exchanges.has_ends());
    }

    /// One slot goes from 1 to 2 to 3, another from 7 to 8.
    #[test]
    fn the_ends_of_one_slot_go_in_their_order() {
        let chained = |token: i64, chain: i64, to: Option<i64>| {
            let run = |token: i64| (JobHandle(token), ClaimToken(token));
            let pass = to.map(|to| Pass { key: warp_domain::KeyId(1), from: run(token), to: run(to) });
            End { chain: Some(ClaimToken(chain)), pass, ..end(token, true) }
        };
        let mut exchanges = with(3, [chained(1, 1, Some(2)), end(5, false)]);
        assert_eq!(exchanges.when(&BUSY), Some(ms(105)), "nobody waits for a slot that has passed on");
        let (first, batch) = exchanges.send(ms(100), None);
        assert_eq!((tokens(&batch), batch.passes.len()), (vec![1, 5], 1));
        exchanges.add(chained(2, 1, Some(3)));
        exchanges.add(chained(3, 1, None));
        assert!(exchanges.has_ends());
        assert_eq!(exchanges.when(&QUIET), None, "both wait for the answer");
        exchanges.add(chained(7, 7, Some(8)));
        exchanges.add(chained(8, 7, None));
        assert_eq!(exchanges.when(&BUSY), NOW, "one frees its slot");
        let (second, batch) = exchanges.send(ms(101), None);
        assert_eq!((tokens(&batch), batch.passes.len()), (vec![7, 8], 1), "together, in order");
        assert_eq!(exchanges.known().map(|(_, token)| token.0).collect::<Vec<_>>(), [2, 3, 1, 5, 7, 8]);
        let UnderWay { batch, .. } = exchanges.answered(first).expect("under way");
        exchanges.failed(batch, ms(110));
        exchanges.answered(second).expect("under way");
        let (again, batch) = exchanges.send(ms(200), None);
        assert_eq!((tokens(&batch), batch.passes.len()), (vec![1, 5], 1), "as it was");
        let UnderWay { batch, .. } = exchanges.answered(again).expect("under way");
        exchanges.calm();
        exchanges.written(&batch);
        assert_eq!(tokens(&exchanges.send(ms(210), None).1), [2, 3]);
        assert!(!exchanges.has_ends());
    }
}
