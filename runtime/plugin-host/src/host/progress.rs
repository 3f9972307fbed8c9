//! `warp:job/progress`: how far the attempt has come.

use super::HostState;
use super::bindings::warp::job::progress::Host;
use crate::limits::bounded;

/// A name is a label on a bar; what is longer is cut.
const NAME_BYTES: usize = 100;

impl Host for HostState {
    fn report(&mut self, name: String, percent: f32) -> wasmtime::Result<()> {
        // NaN, which clamp would keep, means that the guest divided by a total of zero: nothing done yet.
        let percent = if percent.is_nan() { 0.0 } else { percent.clamp(0.0, 100.0) };
        self.calls.progress(bounded(&name, NAME_BYTES), percent);
        Ok(())
    }
}
