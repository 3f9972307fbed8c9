//! What stands between a claimed job and its handler.
//!
//! What this is: the [`Handler`] that the worker calls and the plugin host implements, the [`HostCalls`] that a
//! handler may make and the worker implements, the [`StopSignal`] that ends a run from outside, and
//! [`BEHAVIOURS`], the one list of what wraps a handler and in which order.
//!
//! What it deliberately does not do: know a database or an engine. Both sides meet here.

mod behaviours;
mod handler;
mod stop;

pub use behaviours::{BEHAVIOURS, Behaviour, Where};
pub use handler::{AttemptInfo, Child, ChildRefused, Handler, HostCalls, Level, StateFault, StateOp, StateReply};
pub use stop::{StopReason, StopSignal};
