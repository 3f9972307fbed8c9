//! The plugin host against guests that misbehave, and against a directory that changes under it.

mod guests;
mod stopping;
