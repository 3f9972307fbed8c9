//! The PostgreSQL store on real servers.

mod connections;
mod poolers;
mod tls;
