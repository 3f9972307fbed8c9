//! How a command ends when it does not end well: a message for people and an exit code for scripts.

use warp_store::{StoreError, StoreErrorKind};

/// The exit codes. Their meaning is printed by `--help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Failed while working.
    Runtime = 1,
    /// Wrong usage or bad input.
    Usage = 2,
    /// What was named does not exist.
    NotFound = 3,
    /// A state or a rule does not allow it.
    Refused = 4,
    /// The database cannot be used now.
    Unavailable = 5,
}

/// A command's failure.
#[derive(Debug)]
pub struct Failure {
    /// For scripts.
    pub exit: Exit,
    /// For people; `None` when everything has been said on the way (a table of verdicts).
    pub error: Option<anyhow::Error>,
}

/// What a command answers.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// With a message.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Failure { exit, error: Some(anyhow::Error::msg(message.into())) }
    }

    /// Everything has been said already.
    pub fn silent(exit: Exit) -> Self {
        Failure { exit, error: None }
    }

    /// Wrong usage or bad input.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, message)
    }

    /// What was named does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Failure::new(Exit::NotFound, message)
    }

    /// Adds what was being done.
    #[must_use]
    pub fn context(mut self, what: impl Into<String>) -> Self {
        self.error = self.error.map(|error| error.context(what.into()));
        self
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Failure { exit: Exit::Runtime, error: Some(error) }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::from(anyhow::Error::from(error))
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let exit = match error.kind() {
            StoreErrorKind::Unavailable | StoreErrorKind::Busy | StoreErrorKind::OutcomeUnknown | StoreErrorKind::Schema => {
                Exit::Unavailable
            }
            StoreErrorKind::NotFound => Exit::NotFound,
            StoreErrorKind::Invalid => Exit::Usage,
            // HostLost concerns hosts alone, and new kinds are faults until this list knows them.
            _ => Exit::Runtime,
        };
        Failure { exit, error: Some(anyhow::Error::msg(error.to_string())) }
    }
}
