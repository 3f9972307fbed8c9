//! The host loop on the store in memory, with native handlers, a clock that jumps, and a store that fails on demand.

mod cancelling;
mod children;
mod faults;
mod groups;
mod local;
mod output;
mod pausing;
mod quiet;
mod running;
mod several;
mod state;
mod stopping;
mod waking;
mod world;
