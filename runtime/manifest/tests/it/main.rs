//! The manifest crate from outside: texts in, refusals out; components packed and read; grants and versions compared.

mod compare;
mod component;
mod fuzz;
mod ui;
