//! Whose clock decides what is due.

use warp_domain::UnixMillis;

/// Whose clock decides what is due, and what history says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Clock {
    /// The server's: hosts whose clocks differ agree on what is due.
    #[default]
    Server,
    /// The caller's, which tests move as they like.
    Caller,
}

impl Clock {
    /// What a function of the schema is told: nothing, and then it reads its own clock.
    pub(crate) fn tell(self, now: UnixMillis) -> Option<i64> {
        match self {
            Clock::Server => None,
            Clock::Caller => Some(now.0),
        }
    }

    /// A time of the database on the clock of a caller for whom it was `now` when the database had `theirs`.
    pub(crate) fn to_caller(self, time: i64, theirs: i64, now: UnixMillis) -> UnixMillis {
        match self {
            Clock::Server => UnixMillis(now.0.saturating_add(time.saturating_sub(theirs))),
            Clock::Caller => UnixMillis(time),
        }
    }
}
