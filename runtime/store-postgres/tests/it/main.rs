//! The PostgreSQL store on real servers.

mod conformance;
mod connections;
mod faults;
mod known_faults;
mod model;
mod poolers;
mod session;
mod tls;
