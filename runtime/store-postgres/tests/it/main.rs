//! The PostgreSQL store on real servers.

mod conformance;
mod connections;
mod model;
mod poolers;
mod tls;
