//! The store of jobs on PostgreSQL: any number of hosts on one database.
//!
//! What must stay true:
//! - a command that changes anything is one statement, mostly a call of a function of the schema, and nothing waits
//!   for a client in the middle of a transaction (slots.md C2);
//! - a statement that has been sent runs to its end, whoever still listens;
//! - with the ledger nothing needs a session: no lock, setting or prepared statement outlives a statement, so the
//!   store works through a transaction-mode pooler.
//!
//! What it deliberately does not do: render keys or read payloads in SQL.

#![allow(dead_code, reason = "the statements that use the connection layer come next")]

mod call;
mod clock;
mod connect;
mod doctor;
mod error;
mod exchange;
mod intern;
mod listen;
mod observe;
mod pooler;
mod rows;
mod schema;
mod settings;

pub use crate::clock::Clock;
pub use crate::doctor::{BESIDE_POOL, Finding, Level, Report, doctor};
pub use crate::observe::Observer;
pub use crate::pooler::{Pooling, pooling};
pub use crate::schema::{LockKind, MIGRATIONS, SCHEMA_VERSION, migrate, migration_sql, schema_version};
pub use crate::settings::{ConnectSettings, StatementMode};

/// The connection layer by itself, for tests of poolers and failures.
#[doc(hidden)]
pub mod bare {
    pub use crate::call::{Arg, Db, Sql, Texts, get, get_id};
    pub use crate::error::Fault;
    pub use crate::listen::{Changes, Listener};
}
