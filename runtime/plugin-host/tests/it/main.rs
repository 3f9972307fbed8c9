//! The plugin host against guests that misbehave, and against a directory that changes under it.

mod answers;
mod caps;
mod code;
mod files;
mod guests;
mod reload;
mod state;
mod stopping;
mod trying;
