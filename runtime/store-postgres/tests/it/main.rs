//! The PostgreSQL store on real servers.

mod backlog;
mod claim;
mod conformance;
mod connections;
mod enqueue;
mod faults;
mod known_faults;
mod lookahead;
mod model;
mod plans;
mod poolers;
mod processes;
mod session;
mod tls;
mod upkeep;
