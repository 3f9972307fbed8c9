//! When to look for work without having been told to: the safety net under announcements. Pure arithmetic.
//!
//! The pause grows from the shortest to the longest while nothing is found, and no two hosts keep in step.

use std::time::Duration;

use warp_store::Polling;

/// The next look.
#[derive(Debug)]
pub(crate) struct Poll {
    due: Duration,
    pause: Duration,
    found: bool,
}

impl Poll {
    /// The first look is at once.
    pub(crate) fn new(boot: Duration) -> Self {
        Poll { due: boot, pause: Duration::ZERO, found: true }
    }

    pub(crate) fn due(&self) -> Duration {
        self.due
    }

    /// Something was claimed: whoever enqueues without being heard may do so again.
    pub(crate) fn found(&mut self) {
        self.found = true;
    }

    /// It is looked now; `draw` is a uniform number in 0..=1000.
    pub(crate) fn looked(&mut self, boot: Duration, Polling { shortest, longest }: Polling, draw: u16) {
        self.pause =
            if std::mem::take(&mut self.found) { shortest } else { self.pause.saturating_mul(2).clamp(shortest, longest.max(shortest)) };
        // Three quarters to five quarters.
        let jittered = self.pause.saturating_mul(750 + u32::from(draw) / 2) / 1000;
        self.due = boot.saturating_add(jittered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_while_nothing_is_found() {
        let ms = Duration::from_millis;
        let polling = Polling { shortest: ms(200), longest: ms(2_000) };
        let (mut poll, mut boot) = (Poll::new(ms(5)), ms(5));
        let mut next = |poll: &mut Poll, draw| {
            assert!(poll.due() <= boot);
            poll.looked(boot, polling, draw);
            let pause = poll.due() - boot;
            boot = poll.due();
            pause
        };
        assert_eq!([0; 6].map(|_| next(&mut poll, 500)), [200, 400, 800, 1600, 2000, 2000].map(ms));
        assert_eq!([0, 1000].map(|draw| next(&mut poll, draw)), [1500, 2500].map(ms), "a quarter less or more");
        poll.found();
        assert_eq!([0; 2].map(|_| next(&mut poll, 500)), [200, 400].map(ms));
    }

    #[test]
    fn a_fixed_pause_stays() {
        let mut poll = Poll::new(Duration::ZERO);
        for _ in 0..3 {
            poll.looked(Duration::ZERO, Polling::every(Duration::from_secs(5)), 500);
            assert_eq!(poll.due(), Duration::from_secs(5));
        }
    }
}
