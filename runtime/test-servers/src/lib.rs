//! Real servers for tests: PostgreSQL, PgBouncer, and a network between them that can be broken.
//!
//! [`database()`] is what most tests want: an empty database, gone when dropped. Tests of failures start a [`Cluster`] of
//! their own, put a [`PgBouncer`] or a [`Proxy`] in front of it, or ask for [`Tls`].
//!
//! What must stay true:
//! - nothing here uses, or stands in the way of, a server that the machine already runs: ports are free ones, files
//!   lie in a temporary directory;
//! - a server ends with its owner, however that ends: dropped, panicked, or killed (see `process.rs`);
//! - it works as root, which both servers refuse: they run as `postgres` or `nobody` then;
//! - where a server is not installed, a test fails and says how to get it. It is never skipped.
//!
//! What it deliberately does not do: know anything of the product. No schema, no store.

#[cfg(feature = "client")]
mod address;
mod cluster;
#[cfg(feature = "client")]
mod database;
mod installed;
#[cfg(feature = "client")]
mod pgbouncer;
mod process;
#[cfg(feature = "client")]
mod proxy;
mod tls;

pub use cluster::{Cluster, ClusterSettings, Stop};
#[cfg(feature = "client")]
pub use database::{Database, database};
pub use installed::missing;
#[cfg(feature = "client")]
pub use pgbouncer::{PgBouncer, PgBouncerSettings, PoolMode};
#[cfg(feature = "client")]
pub use proxy::Proxy;
pub use tls::Tls;

/// Why a server could not be started, stopped or asked. Says what to do where something can be done.
#[derive(thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    /// What was being done, and why it failed.
    pub(crate) fn new(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Self {
        Self(format!("failed to {what}: {why}"))
    }
}

/// The message itself: tests meet this error in `expect`, which prints the debug form.
impl std::fmt::Debug for Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{self}")
    }
}
