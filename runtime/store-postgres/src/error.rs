//! What PostgreSQL says, sorted by what a caller can do about it.
//!
//! What must stay true: an error is `Unavailable` or `Busy` only when the statement certainly changed nothing. When
//! the connection ends while a statement is under way, nobody knows, and that is `OutcomeUnknown`.

use std::fmt::Write as _;

use sqlx::postgres::{PgDatabaseError, PgSeverity};
use warp_store::{StoreError, StoreErrorKind};

use crate::encryption;

/// SQLSTATEs that the functions of the schema raise themselves.
pub(crate) mod own {
    /// The host's registration is gone.
    pub(crate) const HOST_LOST: &str = "WH001";
    /// The input can never be stored; the message says why.
    pub(crate) const INVALID: &str = "WH002";
    /// The schema is not the one that the caller knows.
    pub(crate) const SCHEMA: &str = "WH003";
}

/// A fault inside a command, before it is known which command it was.
#[derive(Debug, Clone)]
pub struct Fault {
    kind: StoreErrorKind,
    text: String,
    /// The SQLSTATE, when the server (or a pooler) said it.
    code: Option<Box<str>>,
    /// Whether the connection is of no more use.
    ends_connection: bool,
}

/// How far a statement had come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing of it had been sent.
    Connecting,
    /// It, or part of it, may have reached the server.
    Sent,
}

impl Fault {
    /// A fault that this driver finds by itself.
    pub(crate) fn said(kind: StoreErrorKind, text: impl Into<String>) -> Self {
        Fault { kind, text: text.into(), code: None, ends_connection: false }
    }

    /// What the driver reports about the database `target` (its address without a password).
    pub(crate) fn from_driver(error: &sqlx::Error, phase: Phase, target: &str) -> Self {
        match postgres(error) {
            Some(said) => Fault {
                kind: classify_code(said.code(), said.message(), phase),
                text: describe(said, target),
                code: Some(said.code().into()),
                ends_connection: matches!(said.severity(), PgSeverity::Fatal | PgSeverity::Panic) || is_stale(said.code())
                    // The next connection may find the new primary.
                    || said.code() == "25006",
            },
            None => {
                let kind = classify_driver(error, phase);
                let text = match (kind, phase) {
                    (StoreErrorKind::Unavailable, _) if let Some(text) = encryption::explain(error, target) => text,
                    (StoreErrorKind::OutcomeUnknown, _) => {
                        format!("the connection to {target} was lost while a statement ran ({error}); whether it took effect is unknown")
                    }
                    (StoreErrorKind::Unavailable, _) => format!("{target} cannot be reached ({error}); check address, port and network"),
                    _ => format!("{target}: {error}"),
                };
                let ends_connection = !matches!(error, sqlx::Error::Encode(_) | sqlx::Error::RowNotFound);
                Fault { kind, text, code: None, ends_connection }
            }
        }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// The text for people.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The SQLSTATE, when the server said one.
    pub fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }

    /// Whether the connection must not be used again.
    pub(crate) fn ends_connection(&self) -> bool {
        self.ends_connection
    }

    /// Whether the server rolled the statement back because of others, or refused it because a migration has changed what
    /// it was prepared for, so that the same statement may pass now.
    pub(crate) fn may_pass_again(&self) -> bool {
        self.code().is_some_and(|code| matches!(code, "40P01" | "40001" | "55P03" | "0A000"))
    }

    /// The error for the caller of `op`.
    pub(crate) fn into_error(self, op: &'static str) -> StoreError {
        StoreError::new(op, self.kind, self.text)
    }
}

/// A row that does not hold what its query promises.
impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::from_driver(&error, Phase::Sent, "the database")
    }
}

fn postgres(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error.as_database_error()?.try_downcast_ref()
}

/// A prepared statement that outlived what it was prepared for: a migration changed its result, or the session behind
/// a pooler is another one. It was refused before it ran.
fn is_stale(code: &str) -> bool {
    matches!(code, "0A000" | "26000" | "42P05")
}

fn classify_driver(error: &sqlx::Error, phase: Phase) -> StoreErrorKind {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed if phase == Phase::Sent => {
            StoreErrorKind::OutcomeUnknown
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Tls(_)
        | sqlx::Error::Configuration(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed => StoreErrorKind::Unavailable,
        _ => StoreErrorKind::Internal,
    }
}

/// What PgBouncer says (all with 08P01) when it has not found a server for a statement yet.
const POOLER_NOT_SENT: [&str; 4] =
    ["query_wait_timeout", "server login has been failing", "pgbouncer cannot connect to server", "no more connections allowed"];

fn classify_code(code: &str, message: &str, phase: Phase) -> StoreErrorKind {
    match code {
        own::HOST_LOST => StoreErrorKind::HostLost,
        own::INVALID => StoreErrorKind::Invalid,
        own::SCHEMA => StoreErrorKind::Schema,
        // Whatever is said before anything was sent, nothing was written.
        _ if phase == Phase::Connecting => StoreErrorKind::Unavailable,
        "08P01" if POOLER_NOT_SENT.iter().any(|said| message.starts_with(said)) => StoreErrorKind::Unavailable,
        "40P01" | "40001" | "55P03" | "55006" | "57014" => StoreErrorKind::Busy,
        // A backend that is told to end may have committed already.
        "57P01" | "57P02" | "57P03" | "57P05" | "40003" => StoreErrorKind::OutcomeUnknown,
        "25006" | "42501" | "26000" | "42P05" => StoreErrorKind::Unavailable,
        "3F000" | "42P01" | "42703" | "42883" | "42704" => StoreErrorKind::Schema,
        _ => match code.get(..2).unwrap_or_default() {
            "08" => StoreErrorKind::OutcomeUnknown,
            "53" | "58" | "28" | "3D" => StoreErrorKind::Unavailable,
            "22" | "54" => StoreErrorKind::Invalid,
            _ => StoreErrorKind::Internal,
        },
    }
}

fn describe(said: &PgDatabaseError, target: &str) -> String {
    let message = said.message();
    let code = said.code();
    match code {
        own::HOST_LOST | own::INVALID | own::SCHEMA => message.to_owned(),
        "25006" => format!(
            "{target} is read-only ({message}): a standby, or a primary that was demoted; name the primary, or the address that follows it"
        ),
        "3D000" => format!("{target}: {message}; create it, or name another database"),
        "28000" if message.contains("client certificate") => format!(
            "{target} asks for a client certificate ({message}); give one with sslcert and sslkey (`client_cert`, `client_key`), as the server's pg_hba.conf demands"
        ),
        "28P01" | "28000" => format!("{target} refuses this login ({message}); check user, password and the server's pg_hba.conf"),
        "42501" => format!("{target}: {message}; grant it to this role, or migrate with the role that the hosts use"),
        "53100" => format!("{target} has no space left ({message}); free some, and running hosts go on by themselves"),
        "53300" => format!("{target} has no connection left ({message}); each host takes its pool + 3, see `warp-host doctor`"),
        "57P03" => format!("{target} is not ready yet ({message})"),
        "3F000" | "42P01" | "42703" | "42883" | "42704" => {
            format!("{target} has not the schema that this build knows ({message}); run `warp-host migrate`")
        }
        "26000" | "42P05" => format!(
            "{target} lost a prepared statement ({message}); it is behind a pooler in transaction mode: set the statement mode to `simple` or `auto`"
        ),
        "57014" => format!("{target} ended a statement that took too long ({message})"),
        _ => {
            let mut text = format!("{target}: {message} [{code}]");
            if let Some(detail) = said.detail() {
                let _ = write!(text, "; {detail}");
            }
            if let Some(place) = said.r#where() {
                let _ = write!(text, "; in {place}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sqlstate_says_what_a_caller_can_do() {
        use StoreErrorKind::{Busy, HostLost, Internal, Invalid, OutcomeUnknown, Schema, Unavailable};
        for (code, kind) in [
            ("WH001", HostLost),
            ("WH002", Invalid),
            ("WH003", Schema),
            ("40P01", Busy),
            ("40001", Busy),
            ("55P03", Busy),
            ("57014", Busy),
            ("57P01", OutcomeUnknown),
            ("57P02", OutcomeUnknown),
            ("08006", OutcomeUnknown),
            ("08P01", OutcomeUnknown),
            ("25006", Unavailable),
            ("53100", Unavailable),
            ("53300", Unavailable),
            ("58030", Unavailable),
            ("28P01", Unavailable),
            ("42501", Unavailable),
            ("42P01", Schema),
            ("3F000", Schema),
            ("22021", Invalid),
            ("54000", Invalid),
            ("XX000", Internal),
            ("23505", Internal),
            ("", Internal),
        ] {
            assert_eq!(classify_code(code, "", Phase::Sent), kind, "SQLSTATE {code}");
        }
        assert_eq!(classify_code("57P03", "", Phase::Connecting), Unavailable, "nothing was sent");
        assert_eq!(classify_code("08P01", "query_wait_timeout", Phase::Sent), Unavailable, "the pooler never passed it on");
    }

    #[test]
    fn a_lost_connection_is_unknown_only_after_something_was_sent() {
        let lost = || sqlx::Error::Io(std::io::ErrorKind::UnexpectedEof.into());
        assert_eq!(Fault::from_driver(&lost(), Phase::Sent, "x").kind(), StoreErrorKind::OutcomeUnknown);
        assert_eq!(Fault::from_driver(&lost(), Phase::Connecting, "x").kind(), StoreErrorKind::Unavailable);
        assert!(Fault::from_driver(&lost(), Phase::Sent, "x").ends_connection());
    }
}
