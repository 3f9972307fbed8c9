//! The state machine: which ending follows what a run came to.
//!
//! The guest says a [`Said`]; the host observes an [`Observed`]. They are never merged into one type, because
//! a guest must not be able to claim a timeout or a lost host. [`end_of`] is the only place where a run becomes
//! an ending.

use std::time::Duration;

use crate::backoff::delay_after;
use crate::id::UnixMillis;
use crate::policy::{Retry, Timeout, TimeoutMode};

/// A job's state as everybody sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Due later.
    Scheduled,
    /// May run now; waiting for a worker or, parked, for a key.
    Enqueued,
    /// Waiting for another job.
    Awaiting,
    /// Claimed by a host.
    Processing,
    /// Ended well.
    Completed,
    /// Ended badly; kept until somebody looks.
    Failed,
    /// Ended without its work having been wanted or allowed.
    Deleted,
}

impl State {
    /// Every state, in the order of a job's life.
    pub const ALL: [State; 7] =
        [State::Scheduled, State::Enqueued, State::Awaiting, State::Processing, State::Completed, State::Failed, State::Deleted];

    /// The name in every interface.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            State::Scheduled => "Scheduled",
            State::Enqueued => "Enqueued",
            State::Awaiting => "Awaiting",
            State::Processing => "Processing",
            State::Completed => "Completed",
            State::Failed => "Failed",
            State::Deleted => "Deleted",
        }
    }

    /// Whether nothing follows by itself.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, State::Completed | State::Failed | State::Deleted)
    }
}

/// What the handler answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It finished, with or without a result.
    Completed(Option<String>),
    /// It failed and asks for another attempt.
    Retryable(String),
    /// It failed and asks for none.
    Permanent(String),
    /// It asks to run again after this long, at no cost.
    Snooze(Duration),
}

/// What the host saw instead of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// The guest trapped or exceeded a cap; the text is what the trap said.
    Trapped(String),
    /// The per-attempt timeout passed.
    TimedOut(Duration),
    /// Somebody cancelled the job.
    Cancelled,
    /// The host is stopping, has no room, or lost its claim: the run is given back and costs nothing.
    HandedBack(String),
    /// The answer or the policy cannot be honoured; another attempt would end alike.
    Unacceptable(String),
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The handler answered.
    Said(Said),
    /// It did not.
    Observed(Observed),
}

/// Where the job goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// → Completed.
    Completed {
        /// The handler's result, kept with the job.
        result: Option<String>,
    },
    /// → Failed.
    Failed {
        /// Why.
        message: String,
        /// Why nothing follows.
        reason: FailedReason,
    },
    /// → Scheduled (or Enqueued, for a zero delay), charged.
    Retry {
        /// Why the attempt failed.
        message: String,
        /// When the next attempt is due.
        at: UnixMillis,
    },
    /// → Scheduled, not charged.
    Snooze {
        /// When it is due again.
        at: UnixMillis,
    },
    /// → Enqueued at once, not charged.
    HandBack {
        /// Why it was given back.
        message: String,
    },
    /// → where the claim found it, its place in line included, as if it had not been claimed: nothing is counted and the
    /// history says nothing. For a job that has waited inside its host for a slot and did not begin (slots.md B8), or whose
    /// version is gone by the time that its slots are there; slots that it has are free.
    NotBegun,
    /// → Deleted.
    Deleted {
        /// Why.
        message: String,
    },
}

/// Why a Failed job is not tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailedReason {
    /// The handler said so.
    Permanent,
    /// The retry budget was there and is spent.
    RetryExhausted,
    /// No retry policy applies.
    NoRetry,
    /// Its hosts died under it too often.
    RecoveryExhausted,
    /// Its policy cannot be applied to it, such as a key whose field is missing.
    Unacceptable,
}

impl FailedReason {
    /// The name in audit rows and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FailedReason::Permanent => "permanent",
            FailedReason::RetryExhausted => "retry-exhausted",
            FailedReason::NoRetry => "no-retry",
            FailedReason::RecoveryExhausted => "recovery-exhausted",
            FailedReason::Unacceptable => "unacceptable",
        }
    }
}

/// What is known about the run that ended.
#[derive(Debug, Clone)]
pub struct RunFacts<'a> {
    /// The number of this attempt in the budget, counted from 1.
    pub attempt: u32,
    /// The retry policy in force: the stamp's, else the global default.
    pub retry: Option<&'a Retry>,
    /// The timeout in force: the stamp's, else the global default.
    pub timeout: Option<&'a Timeout>,
    /// Now.
    pub now: UnixMillis,
    /// A uniform number in 0..=1000 for the retry jitter.
    pub draw: u16,
}

/// Where a job goes after this outcome.
#[must_use]
pub fn end_of(outcome: Outcome, facts: &RunFacts<'_>) -> Ending {
    match outcome {
        Outcome::Said(Said::Completed(result)) => Ending::Completed { result },
        Outcome::Said(Said::Permanent(message)) => Ending::Failed { message, reason: FailedReason::Permanent },
        Outcome::Said(Said::Snooze(span)) => Ending::Snooze { at: facts.now.after(span) },
        Outcome::Said(Said::Retryable(message)) => retry_or_fail(message, facts),
        Outcome::Observed(Observed::Trapped(message)) => retry_or_fail(message, facts),
        Outcome::Observed(Observed::TimedOut(limit)) => {
            let message = format!("timed out after {}", crate::units::format_duration(limit));
            match facts.timeout.map_or(TimeoutMode::Fail, |timeout| timeout.mode) {
                TimeoutMode::Fail => retry_or_fail(message, facts),
                TimeoutMode::Delete => Ending::Deleted { message },
            }
        }
        Outcome::Observed(Observed::Cancelled) => Ending::Deleted { message: "cancelled".to_owned() },
        Outcome::Observed(Observed::HandedBack(message)) => Ending::HandBack { message },
        Outcome::Observed(Observed::Unacceptable(message)) => Ending::Failed { message, reason: FailedReason::Unacceptable },
    }
}

fn retry_or_fail(message: String, facts: &RunFacts<'_>) -> Ending {
    let Some(retry) = facts.retry.filter(|retry| retry.max > 0) else {
        return Ending::Failed { message, reason: FailedReason::NoRetry };
    };
    match delay_after(retry, facts.attempt, facts.draw) {
        Some(delay) => Ending::Retry { message, at: facts.now.after(delay) },
        None => Ending::Failed { message, reason: FailedReason::RetryExhausted },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_has_its_ending() {
        let retry = Retry { max: 1, delays: vec![Duration::from_secs(1)], jitter_permille: 0 };
        let delete = Timeout { per_attempt: Duration::from_secs(2), mode: TimeoutMode::Delete };
        let facts = RunFacts { attempt: 1, retry: Some(&retry), timeout: None, now: UnixMillis(0), draw: 500 };
        let at = UnixMillis(1000);
        let boom = || "boom".to_owned();
        let retried = |message: &str| Ending::Retry { message: message.to_owned(), at };
        let cases = [
            (Outcome::Said(Said::Completed(None)), Ending::Completed { result: None }),
            (Outcome::Said(Said::Retryable(boom())), retried("boom")),
            (Outcome::Said(Said::Permanent(boom())), Ending::Failed { message: boom(), reason: FailedReason::Permanent }),
            (Outcome::Said(Said::Snooze(Duration::from_secs(1))), Ending::Snooze { at }),
            (Outcome::Observed(Observed::Trapped(boom())), retried("boom")),
            (Outcome::Observed(Observed::TimedOut(Duration::from_secs(2))), retried("timed out after 2s")),
            (Outcome::Observed(Observed::Cancelled), Ending::Deleted { message: "cancelled".to_owned() }),
            (Outcome::Observed(Observed::HandedBack(boom())), Ending::HandBack { message: boom() }),
            (Outcome::Observed(Observed::Unacceptable(boom())), Ending::Failed { message: boom(), reason: FailedReason::Unacceptable }),
        ];
        for (outcome, expected) in cases {
            assert_eq!(end_of(outcome.clone(), &facts), expected, "{outcome:?}");
        }
        let failing = Outcome::Said(Said::Retryable(boom()));
        let exhausted = RunFacts { attempt: 2, ..facts.clone() };
        assert_eq!(end_of(failing.clone(), &exhausted), Ending::Failed { message: boom(), reason: FailedReason::RetryExhausted });
        let none = RunFacts { retry: None, ..facts.clone() };
        assert_eq!(end_of(failing, &none), Ending::Failed { message: boom(), reason: FailedReason::NoRetry });
        let deleting = RunFacts { timeout: Some(&delete), ..facts };
        let timed_out = Outcome::Observed(Observed::TimedOut(Duration::from_secs(2)));
        assert_eq!(end_of(timed_out, &deleting), Ending::Deleted { message: "timed out after 2s".to_owned() });
    }
}
