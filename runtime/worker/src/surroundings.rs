//! Time and chance, as an argument.

use std::time::Duration;

use warp_domain::{JobId, UnixMillis};

/// Where a host gets time, ids and randomness from. The program passes the machine's, a test its own.
pub trait Surroundings: Send + Sync + 'static {
    /// The wall clock, for due times and for people.
    fn now(&self) -> UnixMillis;
    /// A clock that never goes back and goes on while the machine is suspended, from any origin. Leases are
    /// measured on it: a laptop that slept past its lease must find that out before it does anything else.
    fn boot(&self) -> Duration;
    /// A fresh UUIDv7.
    fn new_id(&self) -> JobId;
    /// A uniform number in 0..=1000.
    fn draw(&self) -> u16;
}
