//! Telling other hosts of new jobs, and not too often.
//!
//! Commits with a NOTIFY in them take turns: each holds one lock of the whole cluster from before its write to the disk
//! until after it. So in a burst of enqueues the first transaction announces a queue, the others say nothing, and what
//! they would have said is said once, a moment later, by a statement that writes nothing and so waits for no disk.
//!
//! What must stay true:
//! - whatever was committed without a word is announced after its commit, at the latest [`APART`] after the announcement
//!   before it, whether or not its caller has gone and the store been dropped;
//! - of a burst a queue is announced at most once in [`APART`], by one process;
//! - whoever enqueues now and then announces at once, with the commit: enqueues that are [`BURST`] apart are no burst.
//!
//! What ends it early is the end of the runtime, or of the process: then hosts find the work by polling. A program that
//! ends in good order calls [`Announcer::flush`] before.
//!
//! What it deliberately does not do: hold back what an exchange announces. Exchanges are batches, a few at once for each
//! host, and they announce a slot that somebody else waits for: each hand-over would take as long as the burst.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::call::{Db, Sql};

/// Between two announcements of a queue in a burst.
const APART: Duration = Duration::from_millis(10);
/// Enqueues that follow each other this closely are a burst.
const BURST: Duration = Duration::from_millis(4);

/// What one process has announced, and what it still has to.
#[derive(Default)]
struct Told {
    queues: BTreeMap<String, Window>,
    /// A task is waiting to announce what is owed.
    waiting: bool,
}

/// The time after an announcement.
#[derive(Debug, Clone, Copy)]
struct Window {
    begun: Instant,
    /// Somebody has kept quiet since, so this is a burst.
    burst: bool,
    /// And has committed news.
    owed: bool,
}

impl Window {
    fn is_open(&self, now: Instant) -> bool {
        self.owed || now < self.begun + if self.burst { APART } else { BURST }
    }
}

impl Told {
    /// Which of these queues a transaction that begins now must not announce itself. The others it announces.
    fn begin<'q>(&mut self, queues: &BTreeSet<&'q str>, now: Instant) -> BTreeSet<&'q str> {
        self.queues.retain(|_, window| window.is_open(now));
        let mut quiet = BTreeSet::new();
        for queue in queues {
            if let Some(window) = self.queues.get_mut(*queue) {
                window.burst = true;
                quiet.insert(*queue);
            } else {
                self.queues.insert((*queue).to_owned(), Window { begun: now, burst: false, owed: false });
            }
        }
        quiet
    }

    /// A transaction that kept quiet about this queue may have committed news.
    fn owe(&mut self, queue: &str, now: Instant) {
        let over = Window { begun: now.checked_sub(APART).unwrap_or(now), burst: true, owed: true };
        let window = self.queues.entry(queue.to_owned()).or_insert(over);
        window.burst = true;
        window.owed = true;
    }

    /// When the next announcement is due.
    fn due(&self) -> Option<Instant> {
        self.queues.values().filter(|window| window.owed).map(|window| window.begun + APART).min()
    }

    /// Takes what is due by `until`; it is announced now.
    fn take(&mut self, until: Instant, now: Instant) -> Vec<String> {
        let mut taken = Vec::new();
        for (queue, window) in &mut self.queues {
            if window.owed && window.begun + APART <= until {
                *window = Window { begun: now, burst: true, owed: false };
                taken.push(queue.clone());
            }
        }
        taken
    }
}

/// Announces for one store. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Announcer {
    db: Db,
    told: Arc<Mutex<Told>>,
    /// Held from taking what is owed until it has been said, so that [`Announcer::flush`] waits for it.
    saying: Arc<tokio::sync::Mutex<()>>,
}

impl Announcer {
    pub(crate) fn new(db: Db) -> Self {
        Announcer { db, told: Arc::default(), saying: Arc::default() }
    }

    /// Which of these queues the transaction that begins now leaves to [`Announcer::owe`].
    pub(crate) fn begin<'q>(&self, queues: &BTreeSet<&'q str>) -> BTreeSet<&'q str> {
        self.locked().begin(queues, Instant::now())
    }

    /// What a transaction has left unsaid is announced soon, by a task that outlives this value.
    pub(crate) fn owe<'q>(&self, queues: impl IntoIterator<Item = &'q str>) {
        let mut told = self.locked();
        let now = Instant::now();
        for queue in queues {
            told.owe(queue, now);
        }
        if !std::mem::replace(&mut told.waiting, true) {
            tokio::spawn(self.clone().say_when_due());
        }
    }

    /// Announces what is still owed, at once, and waits for what is being announced. Dropped, what it has begun to say is
    /// said.
    pub(crate) async fn flush(&self) {
        let _saying = self.saying.lock().await;
        let owed = {
            let mut told = self.locked();
            let now = Instant::now();
            told.take(now + APART, now)
        };
        self.say(owed).await;
    }

    /// Until nothing is owed.
    async fn say_when_due(self) {
        loop {
            let due = {
                let mut told = self.locked();
                let Some(due) = told.due() else {
                    told.waiting = false;
                    return;
                };
                due
            };
            tokio::time::sleep_until(due).await;
            let _saying = self.saying.lock().await;
            let now = Instant::now();
            let owed = self.locked().take(now, now);
            self.say(owed).await;
        }
    }

    /// One statement that locks nothing before its commit. Hosts that it does not reach find the work by polling.
    async fn say(&self, queues: Vec<String>) {
        if queues.is_empty() {
            return;
        }
        let sql = Sql::new("SELECT pg_notify('warp', q.queue) FROM unnest($1::text[]) q (queue)").arg(queues);
        if let Err(fault) = self.db.rows(sql.repeatable()).await {
            tracing::warn!(why = fault.text(), "new jobs could not be announced; idle hosts find them at their next poll");
        }
    }

    fn locked(&self) -> MutexGuard<'_, Told> {
        // Each change is made as a whole.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Enqueues in one queue.
    fn is_quiet(told: &mut Told, now: Instant) -> bool {
        told.begin(&BTreeSet::from(["q"]), now).contains("q")
    }

    #[test]
    fn whoever_enqueues_now_and_then_announces_with_the_commit() {
        let (mut told, begin) = (Told::default(), Instant::now());
        for round in 0..10 {
            assert!(!is_quiet(&mut told, begin + BURST * round), "round {round}");
        }
        assert_eq!((told.due(), told.queues.len()), (None, 1));
    }

    #[test]
    fn a_burst_is_announced_by_its_first_and_then_once_in_a_while() {
        let (mut told, begin) = (Told::default(), Instant::now());
        let (mut loud, mut said) = (Vec::new(), Vec::new());
        // Each commits, with news, half a millisecond after it began.
        for step in 0..200u32 {
            let now = begin + MS / 2 * step;
            if told.due().is_some_and(|due| due <= now) {
                said.extend(told.take(now, now).iter().map(|_| now - begin));
            }
            if is_quiet(&mut told, now) {
                told.owe("q", now);
            } else {
                loud.push(now - begin);
            }
        }
        assert_eq!(loud, [Duration::ZERO]);
        assert_eq!(said, (1..10).map(|at| APART * at).collect::<Vec<_>>());
        assert_eq!(told.due(), Some(begin + APART * 10), "and the last of them is not forgotten");
        let over = begin + APART * 10;
        assert_eq!(told.take(over, over), ["q"]);
        assert_eq!(told.due(), None);
        assert!(is_quiet(&mut told, over + APART - MS), "that was an announcement too");
        assert!(!is_quiet(&mut told, over + APART * 2), "and the burst is over");
    }

    #[test]
    fn what_commits_late_is_owed_all_the_same() {
        let (mut told, begin) = (Told::default(), Instant::now() + APART);
        assert!(!is_quiet(&mut told, begin) && is_quiet(&mut told, begin + MS));
        // It commits after the window is over and forgotten.
        let late = begin + APART * 3;
        assert!(told.begin(&BTreeSet::from(["other"]), late).is_empty());
        told.owe("q", late);
        assert!(told.due().is_some_and(|due| due <= late), "at once");
        assert_eq!(told.take(late, late), ["q"]);
        // Or while somebody else's announcement is fresh, which may have come before its commit.
        assert!(!is_quiet(&mut told, late + APART * 2));
        told.owe("q", late + APART * 2 + MS);
        assert_eq!(told.due(), Some(late + APART * 3));
    }

    #[test]
    fn queues_do_not_hold_each_other_back() {
        let (mut told, now) = (Told::default(), Instant::now());
        assert!(told.begin(&BTreeSet::from(["a", "b"]), now).is_empty());
        assert_eq!(told.begin(&BTreeSet::from(["b", "c"]), now + MS), BTreeSet::from(["b"]));
        told.owe("b", now + MS);
        assert_eq!(told.take(now + APART, now + APART), ["b"]);
    }
}
