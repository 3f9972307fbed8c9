//! The host loop.
//!
//! What this is: one [`Host`] claims jobs for the handlers that a [`Catalog`] offers, runs them on a runtime of
//! their own, settles them in batches, renews its lease, rescues hosts that died, and stops gracefully.
//!
//! What must stay true:
//! - the control loop never waits for a guest: store calls, lease, deadlines and stops run on its own thread;
//! - no run outlives the host's claim to it: three seconds before the lease could lapse, counted from the
//!   *sending* of the last good renewal on a clock that also counts suspended time, every run is stopped (C3);
//! - the slow jobs of one worker group take no worker of another;
//! - every run that was claimed is settled, handed back, or left to a rescue; none is forgotten;
//! - a handler that panics ends its own attempt and nothing else.
//!
//! What it deliberately does not do: know a database, an engine, the environment or a signal.

mod answers;
mod calls;
mod config;
mod control;
mod exchanges;
mod group;
mod host;
mod lease;
mod lines;
mod pace;
mod poll;
mod rescue;
mod run;
mod surroundings;

pub use config::{HostConfig, RunCaps, WorkerGroup};
pub use host::{Catalog, Condition, Host, HostReport, Numbers, Offer, StopLevel, Stopped};
pub use rescue::Watch;
pub use surroundings::Surroundings;
