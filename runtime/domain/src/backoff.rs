//! When a failed attempt runs again.

use std::time::Duration;

use crate::policy::Retry;

/// The longest delay that is ever answered, so that no arithmetic further on can overflow.
pub const LONGEST_DELAY: Duration = Duration::from_secs(366 * 24 * 3600);

/// How long to wait before the attempt after number `attempt` (counted from 1), or `None` when the budget is
/// spent. `draw` is a uniform number in 0..=1000 and decides the jitter, multiplicative and symmetric.
#[must_use]
pub fn delay_after(policy: &Retry, attempt: u32, draw: u16) -> Option<Duration> {
    if attempt > policy.max {
        return None;
    }
    let nth = usize::try_from(attempt.saturating_sub(1)).unwrap_or(usize::MAX);
    let base = policy.delays.get(nth).or(policy.delays.last()).copied().unwrap_or(Duration::ZERO).min(LONGEST_DELAY);
    let swing = i64::from(policy.jitter_permille.min(1000)) * (2 * i64::from(draw.min(1000)) - 1000) / 1000;
    let permille = u128::try_from(1000 + swing).unwrap_or(0);
    let nanos = base.as_nanos() * permille / 1000;
    Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(LONGEST_DELAY))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_delay_repeats_and_the_budget_ends() {
        let policy = Retry { max: 4, delays: vec![Duration::from_secs(15), Duration::from_secs(60)], jitter_permille: 0 };
        let seconds: Vec<_> = (1..=5).map(|attempt| delay_after(&policy, attempt, 500).map(|d| d.as_secs())).collect();
        assert_eq!(seconds, [Some(15), Some(60), Some(60), Some(60), None]);
    }

    proptest! {
        /// A25 of the field's record: unchecked shifts wrapped, went negative or panicked from attempt 64 on.
        #[test]
        fn any_attempt_and_any_base_stay_within_the_jitter(attempt in 1u32..=10_000, base in 0u64..=u64::MAX, jitter in 0u16..=2000, draw in 0u16..=2000) {
            let policy = Retry { max: u32::MAX, delays: vec![Duration::from_secs(base)], jitter_permille: jitter };
            let delay = delay_after(&policy, attempt, draw).expect("within budget");
            let base = Duration::from_secs(base).min(LONGEST_DELAY);
            prop_assert!(delay <= (base * 2).min(LONGEST_DELAY));
            if jitter <= 100 {
                prop_assert!(delay >= base * 9 / 10);
            }
        }
    }
}
