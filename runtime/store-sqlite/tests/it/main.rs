//! Tests of the driver against real files.

mod basics;
mod conformance;
mod model;
