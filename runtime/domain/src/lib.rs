//! Values and rules of warp-host.
//!
//! What this crate is: the words of the product as types (job, attempt, policy, key, slot) and every decision
//! that needs no input or output: which declaration of a policy wins, what key a payload renders to, who may
//! take a slot, when a failed attempt runs again, which state follows which ending.
//!
//! What must stay true: it reads no clock, no environment and no random source, does no I/O, and knows no
//! format, driver or engine. Time and randomness are arguments, so that the simulation can choose them.
//!
//! What it deliberately does not do: decide *where* the rows live. The drivers load a view, call these
//! functions and write down what they answer.

pub mod backoff;
pub mod ending;
pub mod id;
pub mod key;
pub mod ledger;
pub mod policy;
pub mod resolve;
pub mod session;
pub mod units;

pub use id::{ClaimToken, Digest, HostId, JobHandle, JobId, KeyId, RunNumber, UnixMillis};
