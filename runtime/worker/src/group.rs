//! A worker group: its lanes, the runs that wait for its workers, and how much may be claimed for it.
//!
//! What must stay true: what has been claimed and what has been asked for and not answered count together, so several
//! claims under way never bring more than one alone would have.

use std::sync::Arc;
use std::time::Duration;

use warp_store::Lane;

use crate::config::WorkerGroup;
use crate::pace::Pace;
use crate::run::Prefetched;

/// A claim for so many is worth a statement while another is under way.
const WORTHWHILE: u32 = 32;

/// One group of a host.
pub(crate) struct Group {
    pub(crate) queues: Vec<String>,
    pub(crate) workers: u32,
    /// What it serves of what the catalog offers now.
    pub(crate) lanes: Arc<[Lane]>,
    /// Claimed, and no worker has begun it.
    pub(crate) prefetched: Arc<Prefetched>,
    pub(crate) pace: Pace,
    /// How long ends that come fast are gathered.
    gather: Duration,
    /// Something may have become runnable since the last claim was sent.
    hint: bool,
    /// The last answer left something behind.
    backlog: bool,
    /// Claimed, and its end not taken over yet.
    claimed: u32,
    /// Asked for by claims that are under way.
    asked: u32,
    asking: u32,
}

impl Group {
    pub(crate) fn new(config: &WorkerGroup, gather: Duration) -> Self {
        Group {
            queues: config.queues.clone(),
            workers: config.workers.max(1),
            lanes: Vec::new().into(),
            prefetched: Arc::new(Prefetched::new()),
            pace: Pace::default(),
            gather,
            hint: true,
            backlog: false,
            claimed: 0,
            asked: 0,
            asking: 0,
        }
    }

    /// How many more jobs may be claimed: up to the target, and always as many as workers have nothing to do. `waiting`
    /// of the claimed wait for a slot and keep none busy.
    pub(crate) fn room(&self, prefetch_limit: u32, waiting: u32) -> u32 {
        if self.lanes.is_empty() {
            return 0;
        }
        let target = self.workers.saturating_add(self.pace.prefetch(self.workers, prefetch_limit, self.gather));
        let room = target.saturating_sub(self.claimed.saturating_add(self.asked));
        room.max(self.idle(waiting).saturating_sub(self.asked))
    }

    /// How many workers have nothing to do, if so many of the claimed wait for a slot.
    pub(crate) fn idle(&self, waiting: u32) -> u32 {
        self.workers.saturating_sub(self.claimed.saturating_sub(waiting))
    }

    /// Whether a claim might find something.
    pub(crate) fn is_hopeful(&self) -> bool {
        self.hint || self.backlog
    }

    /// Whether a worker may be idle, and one more claim for so many would help: none is under way, or there is
    /// certainly more than those under way bring.
    pub(crate) fn is_starving(&self, room: u32, waiting: u32) -> bool {
        self.idle(waiting) > 0 && (self.asking == 0 || self.backlog && room >= WORTHWHILE)
    }

    /// Whether every worker has something, and ends come fast.
    pub(crate) fn is_in_full_swing(&self, waiting: u32) -> bool {
        self.idle(waiting) == 0 && self.pace.is_brisk(self.workers, self.gather)
    }

    pub(crate) fn hint(&mut self) {
        self.hint = true;
    }

    /// A claim for so many is sent. The hint goes before the question is asked: what changes while it is under way
    /// sets it again.
    pub(crate) fn ask(&mut self, max: u32) {
        self.hint = false;
        self.asked += max;
        self.asking += 1;
    }

    /// Its answer has come: how many it brought and whether there is more; `None` if it failed or is not known.
    pub(crate) fn answered(&mut self, max: u32, brought: Option<(u32, bool)>) {
        self.asked = self.asked.saturating_sub(max);
        self.asking = self.asking.saturating_sub(1);
        match brought {
            Some((claimed, more)) => {
                // A claim that came back full may have left more behind.
                self.backlog = more || claimed >= max;
                self.hint |= self.backlog;
            }
            None => self.hint = true,
        }
    }

    pub(crate) fn began(&mut self) {
        self.claimed += 1;
    }

    pub(crate) fn ended(&mut self) {
        self.claimed = self.claimed.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use warp_domain::policy::Declared;
    use warp_domain::{Digest, resolve::Declarations};

    use super::*;

    fn group(workers: u32) -> Group {
        let declarations = Declarations {
            contract: "a".to_owned(),
            handler: "a".to_owned(),
            digest: Digest([1; 32]),
            on_contract: Declared::default(),
            on_handler: Declared::default(),
        };
        let lane = Lane { queue: "q".to_owned(), declarations: Arc::new(declarations) };
        Group { lanes: vec![lane].into(), ..Group::new(&WorkerGroup { queues: vec!["q".to_owned()], workers }, Duration::ZERO) }
    }

    #[test]
    fn what_is_under_way_takes_room() {
        let mut group = group(16);
        assert_eq!(group.room(1024, 0), 16);
        group.ask(10);
        assert_eq!(group.room(1024, 0), 6);
        group.ask(6);
        assert_eq!(group.room(1024, 0), 0);
        group.answered(10, Some((4, false)));
        (0..4).for_each(|_| group.began());
        assert_eq!(group.room(1024, 0), 6);
        group.answered(6, None);
        group.ended();
        assert_eq!(group.room(1024, 0), 13);
    }

    /// A claim that found less than it asked for, answered after a full one that was sent later.
    #[test]
    fn a_short_answer_does_not_hide_what_a_full_one_left() {
        let mut group = group(4);
        group.ask(2);
        group.ask(2);
        assert!(!group.is_hopeful());
        assert!(!group.is_starving(64, 0), "two claims are under way, and nobody knows of more");
        group.answered(2, Some((2, true)));
        assert!(group.is_starving(64, 0));
        group.answered(2, Some((0, false)));
        assert!(group.is_hopeful());
        group.ask(1);
        group.answered(1, Some((0, false)));
        assert!(!group.is_hopeful());
    }
}
