//! Ends that wait, batches that are on their way, and when the next batch goes.
//!
//! Several exchanges may be under way at once; what each carries is remembered until it is answered. What must stay
//! true:
//! - an end is in exactly one place: waiting, under way, or in a batch to be sent again;
//! - a batch whose outcome is not known is sent again as it was, before anything else and alone, so that a repeat is
//!   recognised by its tokens and a store in trouble is not hurried;
//! - the end of a keyed run never waits for others to fill its batch, nor behind a large one: whoever waits for its
//!   slots waits with it;
//! - with nothing under way and not much to do, nothing waits for a timer.
//!
//! What it deliberately does not do: know the store, runs or leases.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use warp_domain::{ClaimToken, JobHandle};
use warp_store::{Lane, Settle};

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
}

/// An exchange that has not been answered.
pub(crate) struct UnderWay {
    id: u64,
    pub(crate) settles: Arc<[Settle]>,
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
    again: VecDeque<Arc<[Settle]>>,
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
            again: VecDeque::new(),
            under_way: Vec::new(),
            last_id: 0,
            trouble: 0,
            not_before: Duration::ZERO,
        }
    }

    pub(crate) fn add(&mut self, end: End) {
        if end.keyed { self.keyed.push_back(end) } else { self.plain.push_back(end) }
    }

    /// Ends that are not on their way.
    pub(crate) fn has_ends(&self) -> bool {
        !(self.keyed.is_empty() && self.plain.is_empty() && self.again.is_empty())
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
        let waiting = self.keyed.iter().chain(&self.plain).map(|end| &end.settle);
        let sent = self.under_way.iter().map(|exchange| &exchange.settles).chain(&self.again);
        waiting.chain(sent.flat_map(|batch| batch.iter())).map(|settle| (settle.handle, settle.token))
    }

    /// The registration under which they would have counted is gone. Nothing is under way.
    pub(crate) fn forget(&mut self) {
        self.keyed.clear();
        self.plain.clear();
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
        if self.under_way.len() >= most || !self.has_ends() && appetite == Appetite::None {
            return None;
        }
        if self.in_trouble() {
            return Some(self.not_before);
        }
        let now = Some(Duration::ZERO);
        let pressing = !self.again.is_empty() || !self.keyed.is_empty() || appetite == Appetite::Starving;
        if pressing {
            return now;
        }
        let is_last = self.under_way.len() + 1 == most;
        if is_last && most > 1 && keyed_runs {
            return None;
        }
        let gathers = self.is_under_way() || in_full_swing;
        if !gathers || self.plain.len() >= FULL || appetite == Appetite::Large {
            return now;
        }
        self.plain.front().map(|oldest| oldest.at.saturating_add(GATHER))
    }

    /// Sends the next batch with this claim; its number and its ends.
    pub(crate) fn send(&mut self, boot: Duration, asked: Option<Asked>) -> (u64, Arc<[Settle]>) {
        let mut ran: Vec<(usize, u32, Duration)> = Vec::new();
        let settles = match self.again.pop_front() {
            Some(batch) => batch,
            None => {
                let share = self.share();
                let keyed = self.keyed.len().min(share);
                let beside = if keyed > 0 && self.most > 1 && !self.in_trouble() { WITH_KEYED } else { share };
                let plain = self.plain.len().min(beside).min(share - keyed);
                let ends = self.keyed.drain(..keyed).chain(self.plain.drain(..plain));
                ends.map(|End { settle, ran_in, .. }| {
                    if let Some(group) = ran_in {
                        match ran.iter_mut().find(|(of, ..)| *of == group) {
                            Some((_, count, together)) => (*count, *together) = (*count + 1, together.saturating_add(settle.took)),
                            None => ran.push((group, 1, settle.took)),
                        }
                    }
                    settle
                })
                .collect()
            }
        };
        self.last_id += 1;
        self.under_way.push(UnderWay { id: self.last_id, settles: Arc::clone(&settles), asked, sent: boot, ran });
        (self.last_id, settles)
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
        self.keyed.front().or(plain).and_then(|end| end.ran_in)
    }

    /// An exchange has been answered, in whatever way.
    pub(crate) fn answered(&mut self, id: u64) -> Option<UnderWay> {
        let at = self.under_way.iter().position(|exchange| exchange.id == id)?;
        Some(self.under_way.swap_remove(at))
    }

    /// Its answer was an error: its ends go again, later. How much later is answered.
    pub(crate) fn failed(&mut self, settles: Arc<[Settle]>, boot: Duration) -> Duration {
        if !settles.is_empty() {
            self.again.push_back(settles);
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
        End { settle, keyed, ran_in: Some(0), at: ms(100) }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn with(most: u32, ends: impl IntoIterator<Item = End>) -> Exchanges {
        let mut exchanges = Exchanges::new(most);
        ends.into_iter().for_each(|end| exchanges.add(end));
        exchanges
    }

    fn tokens(settles: &[Settle]) -> Vec<i64> {
        settles.iter().map(|settle| settle.token.0).collect()
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
        let sent = [(); 3].map(|()| exchanges.send(ms(100), None).1.len());
        assert_eq!(sent, [FULL, FULL, 600 - 2 * FULL]);
        assert_eq!(with(1, ends()).send(ms(100), None).1.len(), 600, "where there is one, all go");
    }

    #[test]
    fn keyed_ends_do_not_go_behind_a_large_batch() {
        let ends = || (0..2000).map(|token| end(token, false)).chain([end(9999, true)]);
        let (_, settles) = with(3, ends()).send(ms(100), None);
        assert_eq!((settles[0].token.0, settles.len()), (9999, 1 + WITH_KEYED));
        let (_, settles) = with(1, ends()).send(ms(100), None);
        assert_eq!((settles[0].token.0, settles.len()), (9999, MOST_ENDS), "where there is one, all go");
    }

    #[test]
    fn what_failed_goes_again_first_as_it_was_and_alone() {
        let mut exchanges = with(3, [end(1, true), end(2, false)]);
        let (first, sent) = exchanges.send(ms(100), None);
        exchanges.add(end(3, true));
        let (second, _) = exchanges.send(ms(100), None);
        exchanges.add(end(4, true));
        assert_eq!(exchanges.known().map(|(_, token)| token.0).collect::<Vec<_>>(), [4, 1, 2, 3]);
        let UnderWay { settles, .. } = exchanges.answered(first).expect("under way");
        assert_eq!(exchanges.failed(settles, ms(110)), ms(40));
        assert_eq!(exchanges.when(&QUIET), None, "another is under way");
        let UnderWay { settles, .. } = exchanges.answered(second).expect("under way");
        assert_eq!(exchanges.failed(settles, ms(120)), ms(80));
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
}
