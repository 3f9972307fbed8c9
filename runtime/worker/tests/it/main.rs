//! The host loop on the store in memory, with native handlers, a clock that jumps, and a store that fails on demand.

mod cancelling;
mod children;
mod faults;
mod output;
mod quiet;
mod running;
mod state;
mod stopping;
mod waking;
mod world;
