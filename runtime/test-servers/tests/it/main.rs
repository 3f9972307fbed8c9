//! The servers do what tests of the product rely on.

mod cluster;
mod pgbouncer;
mod proxy;
