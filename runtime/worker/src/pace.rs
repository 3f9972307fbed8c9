//! How many jobs to claim: pure arithmetic.
//!
//! A claim should bring what can start now, plus what will have started by the time the next answer arrives.
//! Claiming less leaves workers idle while a commit waits for the disk; claiming more hoards jobs (and slots)
//! that another host could run. So the prefetch is the rate of endings times the duration of an exchange, both
//! measured. The rate is also bounded by how long the runs take: many slow ones that happen to end together look
//! like a high rate for an instant, and slow jobs are never prefetched.

use std::time::Duration;

/// Moving averages of what the host has seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    ended_per_second: f64,
    exchange_seconds: f64,
    run_seconds: f64,
}

/// Weight of a new observation. Small enough to ride out one slow flush, large enough to follow a change of
/// workload within some ten exchanges.
const WEIGHT: f64 = 0.2;
/// Slack for uneven batches.
const HEADROOM: f64 = 2.0;

impl Pace {
    /// `ended` runs, which together took `ran`, were settled by an exchange that took `took`, `since_last` after the
    /// one before.
    pub(crate) fn observe(&mut self, ended: usize, ran: Duration, took: Duration, since_last: Duration) {
        let rate = ended as f64 / since_last.as_secs_f64().max(1e-6);
        self.ended_per_second += WEIGHT * (rate - self.ended_per_second);
        self.exchange_seconds += WEIGHT * (took.as_secs_f64() - self.exchange_seconds);
        if ended > 0 {
            self.run_seconds += WEIGHT * (ran.as_secs_f64() / ended as f64 - self.run_seconds);
        }
    }

    /// How many jobs may wait in memory beyond the workers.
    pub(crate) fn prefetch(&self, workers: u32, limit: u32) -> u32 {
        let possible = f64::from(workers) / self.run_seconds.max(1e-6);
        let wanted = self.ended_per_second.min(possible) * self.exchange_seconds * HEADROOM;
        // Saturating by definition of `as` for floats; never negative.
        (wanted as u32).min(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(ended: u32, each: Duration, took: Duration, since_last: Duration) -> u32 {
        let mut pace = Pace::default();
        (0..100).for_each(|_| pace.observe(ended as usize, each * ended, took, since_last));
        pace.prefetch(16, 1024)
    }

    #[test]
    fn fast_jobs_are_prefetched_and_slow_ones_are_not() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        assert_eq!(settled(250, us(20), ms(10), ms(10)), 499, "25,000 a second, 10 ms to settle: two exchanges' worth");
        assert_eq!(settled(16, ms(1000), ms(3), ms(1000)), 0, "16 runs of a second: none");
        assert_eq!(settled(100_000, us(1), ms(100), ms(100)), 1024, "the limit holds");
        assert_eq!(settled(16, ms(1000), ms(3), ms(3)), 0, "runs of a second that end together: none");
        assert_eq!(Pace::default().prefetch(16, 1024), 0, "nothing is known yet: none");
    }
}
