//! `warp:job/cancellation`: whether somebody wants the attempt to stop.

use super::HostState;
use super::bindings::warp::job::cancellation::Host;

impl Host for HostState {
    fn cancelled(&mut self) -> wasmtime::Result<bool> {
        Ok(self.calls.cancelled())
    }
}
