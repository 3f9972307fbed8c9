//! Tests of the driver against real files.

mod conformance;
mod files;
mod model;
mod plans;
mod processes;
mod sizes;
