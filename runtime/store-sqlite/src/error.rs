//! What SQLite says, sorted by what a caller can do about it.

use std::path::Path;

use warp_store::{StoreError, StoreErrorKind};

/// A fault inside a command, before it is known which command it was.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The database said so.
    Sql(sqlx::Error),
    /// This driver says so.
    Said(StoreErrorKind, String),
    /// A row was not what this process remembered; the command starts again from the file.
    Outdated,
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::Sql(error)
    }
}

impl Fault {
    /// What a caller can do about it.
    pub(crate) fn kind(&self) -> StoreErrorKind {
        match self {
            Fault::Sql(error) => classify(error),
            Fault::Said(kind, _) => *kind,
            Fault::Outdated => StoreErrorKind::Internal,
        }
    }

    /// The error for the caller of `op`.
    pub(crate) fn into_error(self, op: &'static str, path: &Path) -> StoreError {
        let kind = self.kind();
        StoreError::new(op, kind, self.text(path))
    }

    /// The text for people, with the file where it matters.
    pub(crate) fn text(&self, path: &Path) -> String {
        match self {
            Fault::Said(_, text) => text.clone(),
            Fault::Outdated => "a running row was changed behind this process".to_owned(),
            Fault::Sql(error) => describe(error, path),
        }
    }
}

/// SQLite's primary result codes that are told apart.
mod code {
    pub const BUSY: i64 = 5;
    pub const LOCKED: i64 = 6;
    pub const READONLY: i64 = 8;
    pub const IOERR: i64 = 10;
    pub const CORRUPT: i64 = 11;
    pub const FULL: i64 = 13;
    pub const CANTOPEN: i64 = 14;
    pub const PROTOCOL: i64 = 15;
    pub const TOOBIG: i64 = 18;
    pub const NOTADB: i64 = 26;
}

/// The primary code (the low byte) of an extended result code.
fn primary(error: &sqlx::Error) -> Option<i64> {
    let extended: i64 = error.as_database_error()?.code()?.parse().ok()?;
    Some(extended & 0xff)
}

/// What a caller can do about an error of the driver.
pub(crate) fn classify(error: &sqlx::Error) -> StoreErrorKind {
    match error {
        sqlx::Error::Database(_) => primary(error).map_or(StoreErrorKind::Internal, classify_code),
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
            StoreErrorKind::Unavailable
        }
        _ => StoreErrorKind::Internal,
    }
}

fn classify_code(primary: i64) -> StoreErrorKind {
    match primary {
        code::BUSY | code::LOCKED | code::PROTOCOL => StoreErrorKind::Busy,
        code::FULL | code::IOERR | code::READONLY | code::CANTOPEN => StoreErrorKind::Unavailable,
        code::NOTADB | code::CORRUPT | code::TOOBIG => StoreErrorKind::Invalid,
        _ => StoreErrorKind::Internal,
    }
}

fn describe(error: &sqlx::Error, path: &Path) -> String {
    let file = path.display();
    match primary(error) {
        Some(code::FULL) => no_space(path),
        // A new log or its index does not fit, and SQLite only says that writing failed.
        Some(code::IOERR | code::CANTOPEN) if free_bytes(path).is_some_and(|left| left < LEAST_SPACE) => no_space(path),
        Some(code::READONLY) => {
            format!("{file} is read-only for this process ({error}); allow it to write the file and its directory, or name another file")
        }
        Some(code::CANTOPEN) => format!("{file} cannot be opened ({error}); check that its directory exists and may be written"),
        Some(code::IOERR) => format!("{file} cannot be read or written ({error}); check the disk"),
        Some(code::NOTADB) => format!("{file} is not a SQLite database; name another file, or move this one away to start afresh"),
        Some(code::CORRUPT) => {
            format!("{file} is damaged ({error}); restore a backup, or recover what can be read with `sqlite3 {file} .recover`")
        }
        Some(code::BUSY | code::LOCKED) => {
            format!("{file} is locked by another process ({error}); end its transaction, or try again")
        }
        _ => error.to_string(),
    }
}

fn no_space(path: &Path) -> String {
    let left = free_bytes(path).map_or_else(String::new, |bytes| format!(", {} left", warp_domain::units::format_size(bytes)));
    format!("no space left for {}{left}; free some, and running hosts go on by themselves", path.display())
}

/// The index of the log grows by so much at once.
const LEAST_SPACE: u64 = 32 << 10;

/// Refuses to be the first that opens the file where that would kill this process instead of failing. Where blocks
/// are smaller than a page of memory, SQLite makes the index of the log by writing one byte of each page and maps all
/// of it; on a full disk the rest of a page has no block, and touching it is a bus error. While a host runs, the index
/// is there.
pub(crate) fn check_room_to_open(path: &Path) -> Result<(), Fault> {
    let small_blocks = rustix::fs::statvfs(directory(path)).is_ok_and(|about| about.f_frsize < PAGE);
    if small_blocks && free_bytes(path).is_some_and(|left| left < LEAST_SPACE) && !crate::presence::somebody_runs(path) {
        return Err(Fault::Said(StoreErrorKind::Unavailable, no_space(path)));
    }
    Ok(())
}

/// What SQLite takes for a page of memory.
const PAGE: u64 = 4096;

/// What is left on the file system of the database.
fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(directory(path)).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The directory that the database lies in.
pub(crate) fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_says_what_a_caller_can_do() {
        let cases = [
            (5, StoreErrorKind::Busy),
            (6, StoreErrorKind::Busy),
            (15, StoreErrorKind::Busy),
            (8, StoreErrorKind::Unavailable),
            (10, StoreErrorKind::Unavailable),
            (13, StoreErrorKind::Unavailable),
            (14, StoreErrorKind::Unavailable),
            (11, StoreErrorKind::Invalid),
            (18, StoreErrorKind::Invalid),
            (26, StoreErrorKind::Invalid),
            (1, StoreErrorKind::Internal),
            (19, StoreErrorKind::Internal),
        ];
        for (code, kind) in cases {
            assert_eq!(classify_code(code), kind, "result code {code}");
        }
        assert_eq!(classify(&sqlx::Error::PoolTimedOut), StoreErrorKind::Unavailable);
        assert_eq!(classify(&sqlx::Error::RowNotFound), StoreErrorKind::Internal);
    }
}
