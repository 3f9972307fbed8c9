//! Runs handlers that are WebAssembly components.
//!
//! What this crate is: the engine, what one attempt may use and touch, the host's side of the WIT package, and
//! the plugins directory: loading, checking and replacing plugins while jobs run. A loaded plugin is a
//! [`warp_pipeline::Handler`] like any other.
//!
//! What must stay true: a guest harms neither the host nor its neighbours, whatever it does; an attempt that has
//! started finishes on the version it started with; a bad file leaves the version before it serving.
//!
//! What it deliberately does not do: know a database, a queue or a policy. It depends on neither the store nor
//! the worker.

mod cache;
mod code;
mod compiler;
mod directory;
mod engine;
mod host;
mod limits;
mod loader;
mod output;
mod permissions;
mod registry;
mod runner;
mod try_run;
mod watch;

pub use cache::Cache;
pub use code::CodeLoader;
pub use directory::{FileStatus, MAX_OLD_VERSIONS, Newest, PluginDir, PluginDirConfig, PluginEvent, VersionInfo};
pub use engine::{Engine, EngineConfig, EngineInfo, TICK};
pub use limits::Caps;
pub use loader::{Grants, Loader, OFFERED};
pub use output::OutputCaps;
pub use permissions::{Bucket, Directory, Permissions};
pub use registry::{PluginVersion, Registry, Served, Snapshot, Usage};
pub use runner::{RunStats, Runnable};
pub use try_run::{TryParams, TryReport, run_once};

/// Why something of this crate could not be done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PluginHostError {
    /// The engine does not start on this machine.
    #[error("{0}")]
    Engine(String),
    /// The component does not compile.
    #[error("failed to compile: {0}")]
    Compile(String),
    /// The component and the host do not fit together.
    #[error("failed to link: {0}")]
    Link(String),
    /// The component cannot run within its caps.
    #[error("{0}")]
    Unfit(String),
}
