//! What a plugin may touch: what its manifest asks for and the operator grants, resolved to this machine.
//!
//! What must stay true: it is complete. A guest reaches no file, variable or bucket that is not listed here.

use std::path::PathBuf;

/// One plugin version's permissions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Environment variables, names and values.
    pub env: Vec<(String, String)>,
    /// Directories.
    pub files: Vec<Directory>,
    /// Buckets of shared state.
    pub buckets: Vec<Bucket>,
}

/// A directory of the machine that the guest sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    /// Where it is.
    pub host: PathBuf,
    /// What the guest calls it, such as `/in`.
    pub guest: String,
    /// Whether anything in it may change.
    pub writable: bool,
}

/// A bucket of shared state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Its name.
    pub name: String,
    /// Writes need a slot of a key.
    pub under_mutex: bool,
    /// Writes are applied at once and not with the settle.
    pub at_once: bool,
}
