//! What can go wrong in a store, sorted by what a caller can do about it.

/// A boxed cause.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// What a caller can do about an error. Nothing else belongs here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The host's registration is gone (it was rescued): stop every run, register anew (C3).
    HostLost,
    /// The thing named does not exist.
    NotFound,
    /// Somebody else holds what is needed; the same call may succeed in a moment.
    Busy,
    /// The database cannot be reached or cannot write now (down, disk full, read-only). Nothing was written.
    Unavailable,
    /// The connection was lost during commit: it happened or it did not. Repeat only what a token makes safe.
    OutcomeUnknown,
    /// The input can never be stored; the text says why.
    Invalid,
    /// The database's schema is not the one that this build knows.
    Schema,
    /// A driver or data fault that no caller can mend.
    Internal,
}

/// An error of a store, with what was being done and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("failed to {op}: {cause}")]
pub struct StoreError {
    op: &'static str,
    kind: StoreErrorKind,
    #[source]
    cause: Cause,
}

impl StoreError {
    /// An error while doing `op` ("claim jobs").
    pub fn new(op: &'static str, kind: StoreErrorKind, cause: impl Into<Cause>) -> Self {
        StoreError { op, kind, cause: cause.into() }
    }

    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// What was being done.
    #[must_use]
    pub fn op(&self) -> &'static str {
        self.op
    }
}
