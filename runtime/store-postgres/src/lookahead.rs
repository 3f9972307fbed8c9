//! Candidates whose stamp and keys have been worked out and which a claim did not get to.
//!
//! A claim looks at more candidates than it can start, since some of them may have to wait. What it has looked up of the rest
//! the next claim brings with its first call, so that in a long backlog each payload is read and each key rendered once.
//!
//! What must stay true:
//! - what is brought says what a look now would: a job's payload and what it declared never change while it has no stamp, and
//!   what the lanes declare is compared. Where a row has got a stamp meanwhile, the database leaves aside what is brought;
//! - it is bounded, in number, bytes and age, and forgotten when another server may answer.

use std::time::Duration;

use warp_domain::UnixMillis;

/// So many are kept at most, and so many bytes of their payloads.
const MOST: usize = 2_048;
const MOST_BYTES: usize = 4 << 20;
/// Who is not claimed within this has probably been claimed by somebody else.
const KEPT_FOR: Duration = Duration::from_secs(2);

/// What a host has to say about one candidate.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    /// Due time and job: the order of claims.
    pub(crate) order: (i64, i64),
    pub(crate) stamp: Option<i32>,
    /// As an array's text, in the global order of keys (C4).
    pub(crate) keys: Option<String>,
    /// Why its policy cannot be applied to it.
    pub(crate) error: Option<String>,
    pub(crate) payload: String,
}

/// What the lanes declare: lane, stamp of jobs that declare nothing, plugin version.
pub(crate) type Declared = Vec<(i32, i32, i32)>;

/// What the last claim has left.
#[derive(Debug, Default)]
pub(crate) struct Lookahead {
    declared: Declared,
    since: Option<UnixMillis>,
    /// In the order of claims, the next one last.
    candidates: Vec<Candidate>,
}

impl Lookahead {
    /// Takes out the next ones, at most so many, if they were looked up under the same declarations.
    pub(crate) fn take(&mut self, declared: &Declared, most: usize, now: UnixMillis) -> Vec<Candidate> {
        let is_young = self.since.is_some_and(|since| now >= since && now.since(since) <= KEPT_FOR);
        if !is_young {
            self.candidates.clear();
        }
        // A claim in other lanes, or one that only writes ends, leaves them to whom they are for.
        if self.declared != *declared {
            return Vec::new();
        }
        let kept = self.candidates.len().saturating_sub(most);
        let mut taken = self.candidates.split_off(kept);
        taken.reverse();
        taken
    }

    /// Keeps these, in whatever order; what else is kept was looked up under other declarations or stands behind them.
    pub(crate) fn put_back(&mut self, declared: Declared, mut left: Vec<Candidate>, now: UnixMillis) {
        if self.declared != declared {
            self.candidates.clear();
            self.declared = declared;
        }
        if self.candidates.is_empty() {
            self.since = Some(now);
        }
        self.candidates.append(&mut left);
        self.candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.order));
        self.candidates.dedup_by_key(|candidate| candidate.order);
        let mut bytes = 0;
        let fits = self.candidates.iter().rev().take(MOST).take_while(|candidate| {
            bytes += candidate.payload.len();
            bytes <= MOST_BYTES
        });
        let over = self.candidates.len() - fits.count();
        self.candidates.drain(..over);
    }

    pub(crate) fn clear(&mut self) {
        *self = Lookahead::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(due: i64, bytes: usize) -> Candidate {
        Candidate { order: (due, due), stamp: Some(1), keys: Some("{1}".to_owned()), error: None, payload: "x".repeat(bytes) }
    }

    fn dues(candidates: &[Candidate]) -> Vec<i64> {
        candidates.iter().map(|candidate| candidate.order.0).collect()
    }

    #[test]
    fn the_next_ones_come_first_and_once() {
        let (declared, now) = (vec![(1, 1, 1)], UnixMillis(1_000));
        let mut ahead = Lookahead::default();
        ahead.put_back(declared.clone(), vec![candidate(3, 1), candidate(5, 1), candidate(4, 1)], now);
        ahead.put_back(declared.clone(), vec![candidate(2, 1), candidate(3, 1)], now);
        assert_eq!(dues(&ahead.take(&declared, 3, now)), [2, 3, 4]);
        assert_eq!(dues(&ahead.take(&declared, 3, now)), [5]);
        assert_eq!(dues(&ahead.take(&declared, 3, now)), [0i64; 0]);
    }

    #[test]
    fn nothing_outlasts_its_declarations_its_time_or_its_room() {
        let (declared, now) = (vec![(1, 1, 1)], UnixMillis(1_000));
        let filled = || {
            let mut ahead = Lookahead::default();
            ahead.put_back(declared.clone(), vec![candidate(1, 1)], now);
            ahead
        };
        assert!(filled().take(&vec![(1, 1, 2)], 9, now).is_empty(), "another version of the plugin");
        assert!(filled().take(&declared, 9, UnixMillis(3_001)).is_empty());
        assert!(filled().take(&declared, 9, UnixMillis(999)).is_empty(), "a clock that was set back says nothing about age");
        assert_eq!(filled().take(&declared, 9, UnixMillis(3_000)).len(), 1);
        let mut ahead = filled();
        ahead.put_back(declared.clone(), vec![candidate(2, MOST_BYTES - 1), candidate(3, 1)], now);
        assert_eq!(dues(&ahead.take(&declared, 9, now)), [1, 2]);
        ahead.put_back(declared.clone(), (0..5_000).map(|due| candidate(due, 1)).collect(), now);
        assert_eq!(ahead.take(&declared, 9_999, now).len(), MOST);
    }
}
