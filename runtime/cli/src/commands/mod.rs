//! The commands, one module per noun. Each takes its arguments and what it needs from outside, prints, and
//! answers an [`crate::failure::Outcome`]. None of them reads the environment or the clock by itself.

pub mod attempt;
pub mod database;
pub mod doctor;
pub mod enqueue;
pub mod jobs;
pub mod keys;
pub mod locks;
pub mod overview;
pub mod pauses;
pub mod plugin_files;
pub mod project;
