//! The store of jobs: what a database driver must do, and nothing about how.
//!
//! One trait ([`Store`]), two drivers, one conformance suite. A driver owns its SQL entirely; what all share is
//! the meaning of each command, the decisions of `warp-domain` and the encodings in [`codec`].
//!
//! What must stay true of every driver:
//! - a claim, settle, rescue or limit change is one transaction without client work inside (slots.md C2), and a
//!   caller that drops the returned future leaves neither a lock nor a half-done batch: the command runs to its
//!   end or not at all;
//! - every write about a run matches job *and* claim token (C1);
//! - nothing acknowledged by [`Store::enqueue`] is lost by a crash of a host or of the database.
//!
//! What it deliberately does not do: run anything, decide policy, read the environment.

pub mod codec;
mod error;
mod store;

pub use error::{StoreError, StoreErrorKind};
pub use store::*;
