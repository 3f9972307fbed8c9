//! `warp:job/jobs`: children, buffered by the host until the attempt is settled.
//!
//! Only the shape is checked here; whether the contract exists and the payload is JSON is for whoever stores it.

use std::time::Duration;

use warp_pipeline::{Child, ChildRefused};

use super::bindings::warp::job::jobs::{Error, Host, Options};
use super::{HostState, no_nul};

impl HostState {
    fn child(&mut self, contract: String, payload: String, delay: Duration, options: Options) -> wasmtime::Result<Result<String, Error>> {
        let Options { queue, unique_key, metadata } = options;
        let named = [("contract", Some(&contract)), ("queue", queue.as_ref()), ("unique-key", unique_key.as_ref())];
        for (what, text) in named {
            match text.map(String::as_str) {
                Some("") => return Ok(Err(Error::Invalid(format!("{what} is empty")))),
                Some(text) if text.contains('\0') => return Ok(Err(Error::Invalid(format!("{what} contains a NUL character")))),
                _ => {}
            }
        }
        for (key, value) in &metadata {
            no_nul("a metadata key", key)?;
            no_nul("a metadata value", value)?;
        }
        let child = Child { contract, payload, queue, delay, unique_key, metadata };
        Ok(match self.calls.enqueue(child) {
            Ok(id) => Ok(id.to_string()),
            Err(ChildRefused::Invalid(why)) => Err(Error::Invalid(why)),
            Err(ChildRefused::TooMany(why)) => Err(Error::TooMany(why)),
        })
    }
}

impl Host for HostState {
    fn enqueue(&mut self, contract: String, payload: String, options: Options) -> wasmtime::Result<Result<String, Error>> {
        self.child(contract, payload, Duration::ZERO, options)
    }

    fn schedule(&mut self, contract: String, payload: String, delay: u32, options: Options) -> wasmtime::Result<Result<String, Error>> {
        self.child(contract, payload, Duration::from_millis(u64::from(delay)), options)
    }
}
