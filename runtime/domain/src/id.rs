//! Names of things: jobs, claims, hosts, keys, plugin versions, instants.

use std::fmt;
use std::str::FromStr;

/// A job's public name: a UUIDv7, so that ids sort by the time of their enqueue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u128);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = format!("{:032x}", self.0);
        write!(f, "{}-{}-{}-{}-{}", &hex[0..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..32])
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not a job id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a job id; expected the form 0192d4e0-1b2c-7def-8123-456789abcdef")]
pub struct ParseJobIdError(String);

impl FromStr for JobId {
    type Err = ParseJobIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseJobIdError(text.chars().take(60).collect());
        let bytes = text.as_bytes();
        let dashed = bytes.len() == 36 && [8, 13, 18, 23].iter().all(|&at| bytes[at] == b'-');
        if !dashed && bytes.len() != 32 {
            return Err(refuse());
        }
        let hex: String = text.chars().filter(|c| *c != '-').collect();
        if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(refuse());
        }
        u128::from_str_radix(&hex, 16).map(JobId).map_err(|_| refuse())
    }
}

/// The store's own number of a job row: narrow, cheap to index, never shown to people and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobHandle(pub i64);

/// What a claim writes on the row, and what every later write of that run must match (slots.md C1).
///
/// Tokens are drawn from one sequence per database *after* the slots are granted, so they also serve as the
/// fencing token of a keyed job: of two holders of one key, the later has the larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimToken(pub i64);

/// One registration of one host process. A host that was rescued never comes back under the same number: it
/// registers anew, so the number is also its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub i64);

/// The store's number of a concurrency key. Its order is the one global order in which keys are taken (C4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub i64);

/// How often a job has been started, counted from 1.
pub type RunNumber = u32;

/// An instant of the wall clock in milliseconds since 1970-01-01T00:00:00Z.
///
/// Used for what people see and for due times. Nothing that must exclude compares two of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMillis(pub i64);

impl UnixMillis {
    /// The instant `span` later; saturates at the end of time instead of wrapping.
    #[must_use]
    pub fn after(self, span: std::time::Duration) -> Self {
        let millis = i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        UnixMillis(self.0.saturating_add(millis))
    }

    /// How long after `earlier` this is; zero when it is not.
    #[must_use]
    pub fn since(self, earlier: UnixMillis) -> std::time::Duration {
        std::time::Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

/// A plugin version: SHA-256 over the whole file, code and manifest together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Digest {
    /// The first twelve hexadecimal digits, for tables.
    #[must_use]
    pub fn short(&self) -> String {
        self.0[..6].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseDigestError(text.chars().take(80).collect());
        let hex = text.strip_prefix("sha256:").ok_or_else(refuse)?;
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(refuse());
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).map_err(|_| refuse())?;
        }
        Ok(Digest(bytes))
    }
}

/// A text that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a digest; expected `sha256:` and 64 hexadecimal digits")]
pub struct ParseDigestError(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_id_survives_its_text_and_refuses_what_is_not_one() {
        let id = JobId(0x0192_d4e0_1b2c_7def_8123_4567_89ab_cdef);
        assert_eq!(id.to_string(), "0192d4e0-1b2c-7def-8123-456789abcdef");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "0192d4e0", "0192d4e0-1b2c-7def-8123-456789abcdeg", "0192d4e01-b2c-7def-8123-456789abcdef", "ä".repeat(16).as_str()]
        {
            assert!(bad.parse::<JobId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_digest_survives_its_text() {
        let digest = Digest(std::array::from_fn(|at| at as u8));
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert!("sha256:00".parse::<Digest>().is_err());
    }

    #[test]
    fn instants_saturate() {
        assert_eq!(UnixMillis(i64::MAX - 1).after(std::time::Duration::MAX), UnixMillis(i64::MAX));
        assert_eq!(UnixMillis(5).since(UnixMillis(9)), std::time::Duration::ZERO);
    }
}
