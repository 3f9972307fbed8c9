//! What is wrong with a file, where, and what to do about it.
//!
//! A [`Refusal`] stops a load, a [`Warning`] does not; both print as one line that an editor can jump to:
//! `payments.toml:12:3: handler.call-bank.semaphore.limit: must not be 0; write …`.

use std::fmt;

/// A place in a text, both counted from 1. Columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

impl Position {
    /// The place of byte `at` in `text`; the end of the text when it lies beyond.
    #[must_use]
    pub(crate) fn of(text: &str, at: usize) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Position { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
    }
}

/// Where something is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The file, as the caller named it.
    pub file: String,
    /// The place in it; absent when the whole file is meant.
    pub at: Option<Position>,
    /// The path of the key, such as `handler.call-bank.semaphore.limit`; empty when no key is meant.
    pub key: String,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(Position { line, column }) = self.at {
            write!(f, ":{line}:{column}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        Ok(())
    }
}

/// What a caller can do about a refusal. Nothing else belongs here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalKind {
    /// The author has to correct the manifest.
    Manifest,
    /// The manifest is right, and this version of the host cannot enforce it: upgrade the host, or do without.
    NotSupported,
    /// The file is not a component that a host can load, or carries its manifest wrongly.
    Component,
    /// The component needs what this host does not offer, or lacks what the host calls.
    Imports,
    /// The operator has not granted what the manifest asks for.
    Grant,
    /// A directory that is granted cannot be opened; it may be created while the host runs.
    Directory,
    /// Another plugin already has what this one claims.
    Taken,
    /// The file could not be read.
    Io,
}

/// Why a plugin is not loaded. A load that is refused leaves the previous version serving.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{location}: {problem}; {remedy}")]
pub struct Refusal {
    /// What a caller can do about it.
    pub kind: RefusalKind,
    /// Where it is wrong.
    pub location: Location,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

/// What is allowed and yet probably not meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it stands.
    pub location: Location,
    /// What is odd.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: warning: {}; {}", self.location, self.problem, self.remedy)
    }
}
