//! Durations and sizes as people write them: a number and its unit, never a bare number.

use std::time::Duration;

/// Why a duration or size was refused; the text says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Not a number followed by a unit.
    #[error("`{text}` is not a duration; write a whole number and a unit, such as `250ms`, `30s`, `5m`, `2h` or `1d`")]
    Duration {
        /// What was written.
        text: String,
    },
    /// Not a number followed by a unit.
    #[error("`{text}` is not a size; write a whole number and a unit, such as `512B`, `64KiB`, `64MiB` or `2GiB`")]
    Size {
        /// What was written.
        text: String,
    },
}

fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number = text[..digits].parse().ok()?;
    Some((number, text[digits..].trim_start()))
}

/// Reads `250ms`, `30s`, `5m`, `2h` or `1d`.
///
/// # Errors
/// When there is no unit, another unit, a fraction, or more than the type can hold.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let refuse = || UnitError::Duration { text: text.to_owned() };
    let (number, unit) = number_and_unit(text).ok_or_else(refuse)?;
    let millis_each: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(refuse()),
    };
    number.checked_mul(millis_each).map(Duration::from_millis).ok_or_else(refuse)
}

/// Writes a duration so that [`parse_duration`] reads the same one: in the largest unit that loses nothing.
/// What is finer than a millisecond is dropped.
#[must_use]
pub fn format_duration(span: Duration) -> String {
    let millis = span.as_millis();
    for (each, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
        if millis != 0 && millis.is_multiple_of(each) {
            return format!("{}{unit}", millis / each);
        }
    }
    format!("{millis}ms")
}

/// Reads `512B`, `64KiB`, `64MiB` or `2GiB` as bytes.
///
/// # Errors
/// When there is no unit, another unit, a fraction, or more than the type can hold.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let refuse = || UnitError::Size { text: text.to_owned() };
    let (number, unit) = number_and_unit(text).ok_or_else(refuse)?;
    let shift = match unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(refuse()),
    };
    number.checked_mul(1 << shift).ok_or_else(refuse)
}

/// Writes a size in the largest unit that loses nothing.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_required() {
        assert_eq!(parse_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        for bad in ["", "30", "s", "1.5s", "-1s", "30sec", "99999999999999999999s", "18446744073709551615d", "1 parsec"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(millis in 0u64..=u64::MAX / 2, bytes: u64) {
            let span = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&format_duration(span)), Ok(span));
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
    }
}
