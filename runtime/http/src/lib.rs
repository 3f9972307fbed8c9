//! What a host says about itself over HTTP: `/metrics` for Prometheus, `/live` and `/ready` for whoever restarts and
//! routes.
//!
//! What must stay true:
//! - nobody who asks can hurt the host: heads, requests and connections have a time limit, connections a number,
//!   bodies a size, and the database is asked at most once in [`metrics::FRESH_FOR`] however many ask;
//! - `/live` needs no database: a host that waits for its database is not restarted for it;
//! - no key, payload or id becomes a label: what is counted by name is bounded by what operators declare.
//!
//! What it deliberately does not do: change anything, know a driver or an engine, or run on a thread of its own. It
//! runs on the control thread, so that an answer from `/live` says that this thread still turns.

mod metrics;
mod probes;
mod server;

use std::sync::Arc;

use warp_store::Store;
use warp_worker::{Catalog, Numbers, Surroundings};

pub use server::{Limits, Server};

/// How many connections the store has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolState {
    /// Open and in use.
    pub busy: u32,
    /// Open and not in use.
    pub idle: u32,
    /// How many there may be at most.
    pub most: u32,
}

/// What can be asked about the connections of a store, if it has a pool.
pub type AskPool = Arc<dyn Fn() -> PoolState + Send + Sync>;

/// The host, as far as it is told about.
#[derive(Clone)]
pub struct Sources {
    /// The job database.
    pub store: Arc<dyn Store>,
    /// The host's own numbers.
    pub numbers: Numbers,
    /// What it can run now.
    pub catalog: Arc<dyn Catalog>,
    /// Its clocks.
    pub surroundings: Arc<dyn Surroundings>,
    /// Its connections.
    pub pool: Option<AskPool>,
    /// How many jobs it runs at once.
    pub workers: u32,
    /// The program's version.
    pub version: &'static str,
    /// `sqlite`, `postgres`.
    pub database: &'static str,
    /// `ledger`, `session`.
    pub locks: &'static str,
}
