//! The one place that reads the wall clock, and the texts of instants.
//!
//! Everything below the command line takes the time as an argument.

use jiff::Timestamp;
use warp_domain::UnixMillis;

/// Now, by the wall clock.
pub fn now() -> UnixMillis {
    UnixMillis(Timestamp::now().as_millisecond())
}

/// Reads an RFC 3339 instant, which must carry its offset.
///
/// # Errors
/// A sentence that says what to write.
pub fn parse_instant(text: &str) -> Result<UnixMillis, String> {
    let refuse = |_| format!("{text:?} is not an instant; write one with its offset, such as 2030-01-31T12:00:00Z");
    text.parse::<Timestamp>().map(|at| UnixMillis(at.as_millisecond())).map_err(refuse)
}

/// RFC 3339 in UTC with milliseconds. An instant outside the calendar is clamped to its edge.
pub fn rfc3339(at: UnixMillis) -> String {
    let edge = if at.0 < 0 { Timestamp::MIN } else { Timestamp::MAX };
    format!("{:.3}", Timestamp::from_millisecond(at.0).unwrap_or(edge))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_have_milliseconds_and_an_offset() {
        assert_eq!(rfc3339(UnixMillis(1_700_000_000_000)), "2023-11-14T22:13:20.000Z");
        assert_eq!(rfc3339(UnixMillis(1_700_000_000_007)), "2023-11-14T22:13:20.007Z");
        assert_eq!(parse_instant("2023-11-14T23:13:20+01:00"), Ok(UnixMillis(1_700_000_000_000)));
        assert!(parse_instant("2023-11-14T22:13:20").is_err(), "without an offset it is not an instant");
        assert!(rfc3339(UnixMillis(i64::MAX)).starts_with("9999-12-3"));
    }
}
