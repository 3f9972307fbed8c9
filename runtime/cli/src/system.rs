//! This machine's time and chance, for the host loop.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warp_domain::{JobId, UnixMillis};
use warp_worker::Surroundings;

use crate::clock;

/// The machine's clocks and a generator that is seeded once by the operating system.
pub struct System {
    state: AtomicU64,
}

impl System {
    /// Seeded from the same source as new ids.
    pub fn new() -> Self {
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        System { state: AtomicU64::new(seed) }
    }
}

impl Surroundings for System {
    fn now(&self) -> UnixMillis {
        clock::now()
    }

    fn boot(&self) -> Duration {
        // Counts while the machine is suspended, unlike std's Instant on Linux.
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    fn new_id(&self) -> JobId {
        JobId(uuid::Uuid::now_v7().as_u128())
    }

    fn draw(&self) -> u16 {
        // SplitMix64 (Steele, Lea, Flood 2014) over a Weyl sequence: enough for jitter, and never blocks.
        let mut z = self.state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        u16::try_from((z ^ (z >> 31)) % 1001).unwrap_or(500)
    }
}
