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
    /// Ends per exchange, and seconds between two: their quotient is the rate. Each is averaged by itself, because
    /// answers of exchanges that were under way together arrive together.
    ended: f64,
    between_seconds: f64,
    exchange_seconds: f64,
    run_seconds: f64,
    /// When the last exchange was answered.
    last: Option<Duration>,
    /// How many have been, as far as that matters.
    seen: u32,
}

/// Weight of a new observation. Small enough to ride out one slow flush, large enough to follow a change of
/// workload within some ten exchanges.
const WEIGHT: f64 = 0.2;
/// Slack for uneven batches.
const HEADROOM: f64 = 2.0;
/// A longer pause between two exchanges counts as this: after it the rate is soon the new one.
const LONGEST_PAUSE: f64 = 0.1;

impl Pace {
    /// `ended` runs, which together took `ran`, were settled by an exchange that took `took` and was answered at `boot`.
    pub(crate) fn observe(&mut self, ended: u32, ran: Duration, took: Duration, boot: Duration) {
        let between = self.last.map_or(took, |last| boot.saturating_sub(last)).as_secs_f64().min(LONGEST_PAUSE);
        self.last = Some(boot);
        // The first few count as much as they are: an average that starts at nothing would be believed for ten exchanges.
        self.seen = self.seen.saturating_add(1);
        let weight = WEIGHT.max(1.0 / f64::from(self.seen));
        self.ended += weight * (f64::from(ended) - self.ended);
        self.between_seconds += weight * (between - self.between_seconds);
        self.exchange_seconds += weight * (took.as_secs_f64() - self.exchange_seconds);
        if ended > 0 {
            self.run_seconds += weight * (ran.as_secs_f64() / f64::from(ended) - self.run_seconds);
        }
    }

    /// Ends in a second: as measured, and no more than so many workers could bring about.
    fn rate(&self, workers: u32) -> f64 {
        let possible = f64::from(workers) / self.run_seconds.max(1e-6);
        (self.ended / self.between_seconds.max(1e-6)).min(possible)
    }

    /// How many jobs may wait in memory, or be on their way, beyond the workers, if ends that come fast are gathered
    /// for so long before they go.
    pub(crate) fn prefetch(&self, workers: u32, limit: u32, gather: Duration) -> u32 {
        let gather = if self.is_brisk(workers, gather) { gather } else { Duration::ZERO };
        // Saturating by definition of `as` for floats; never negative.
        ((self.rate(workers) * (self.exchange_seconds + gather.as_secs_f64()) * HEADROOM) as u32).min(limit)
    }

    /// Whether a batch fills up so fast that waiting a moment for it saves more statements than it costs time.
    pub(crate) fn is_brisk(&self, workers: u32, within: Duration) -> bool {
        self.rate(workers) * within.as_secs_f64() >= 5.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(ended: u32, each: Duration, took: Duration, since_last: Duration) -> u32 {
        pace(ended, each, took, since_last).prefetch(16, 1024, Duration::ZERO)
    }

    fn pace(ended: u32, each: Duration, took: Duration, since_last: Duration) -> Pace {
        let mut pace = Pace::default();
        (1..=100).for_each(|at| pace.observe(ended, each * ended, took, since_last * at));
        pace
    }

    #[test]
    fn fast_jobs_are_prefetched_and_slow_ones_are_not() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        assert_eq!(settled(250, us(20), ms(10), ms(10)), 500, "25,000 a second, 10 ms to settle: two exchanges' worth");
        assert_eq!(settled(16, ms(1000), ms(3), ms(1000)), 0, "16 runs of a second: none");
        assert_eq!(settled(100_000, us(1), ms(100), ms(100)), 1024, "the limit holds");
        assert_eq!(settled(16, ms(1000), ms(3), ms(3)), 0, "runs of a second that end together: none");
        assert_eq!(Pace::default().prefetch(16, 1024, ms(5)), 0, "nothing is known yet: none");
        assert_eq!(
            pace(16, ms(5), ms(1), ms(5)).prefetch(16, 1024, ms(5)),
            38,
            "16 workers, 5 ms each: what ends while the batch fills up too"
        );
        assert_eq!(pace(16, ms(1000), ms(3), ms(3)).prefetch(16, 1024, ms(5)), 0, "slow ones are not gathered");
    }

    /// Three exchanges that are answered in one instant are no reason to believe in an endless rate.
    #[test]
    fn answers_that_come_together_are_no_rush() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        let mut pace = Pace::default();
        for at in 1..=300 {
            pace.observe(2, us(20), ms(3), ms(10) * (at / 3));
        }
        let prefetched = pace.prefetch(16, 1024, Duration::ZERO);
        assert!((2..=8).contains(&prefetched), "600 a second, 3 ms to settle: a few, not {prefetched}");
        assert!(!pace.is_brisk(16, ms(5)));
    }

    #[test]
    fn the_first_exchanges_are_believed() {
        let mut pace = Pace::default();
        (1..=3)
            .for_each(|at| pace.observe(250, Duration::from_micros(20) * 250, Duration::from_millis(10), Duration::from_millis(10) * at));
        assert_eq!(pace.prefetch(16, 1024, Duration::ZERO), 500, "as after a hundred of them");
    }

    #[test]
    fn a_pause_is_soon_forgotten() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        let mut pace = pace(250, us(20) * 250, ms(10), ms(10));
        assert!(pace.is_brisk(16, ms(5)));
        pace.observe(1, us(20), ms(10), ms(3_600_000));
        assert!(pace.prefetch(16, 1024, Duration::ZERO) < 250, "an hour without work");
        (1..=20).for_each(|at| pace.observe(250, us(20) * 250, ms(10), ms(3_600_000) + ms(10) * at));
        assert!(pace.prefetch(16, 1024, Duration::ZERO) > 350);
    }
}
