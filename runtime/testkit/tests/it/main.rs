//! The simulation over many seeds, the mutations it must notice, and the explorer.

mod explore;
mod mutations;
mod session;
mod sim;
mod store;
