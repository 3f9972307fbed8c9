//! What one attempt may use, and how exceeding it is told apart from every other trap.
//!
//! What must stay true: each cap that ends a guest names itself in the trap, so that a reader of the job knows
//! which number to raise. Memory is counted over all linear memories of the attempt together, since some guests
//! (the QuickJS ones) have two.
//!
//! What it deliberately does not do: bound time (the stop signal does) or what is printed (`output.rs` does).

use std::time::Duration;

use warp_domain::units::format_size;
use wasmtime::ResourceLimiter;

use crate::output::OutputCaps;

/// Caps of one attempt. `memory` comes from the manifest and the grant; the others belong to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caps {
    /// Bytes of linear memory, all memories together.
    pub memory: u64,
    /// Elements of one table. The largest guests measured (SpiderMonkey) need 7,690.
    pub table_elements: usize,
    /// Tables of one attempt.
    pub tables: usize,
    /// Linear memories of one attempt.
    pub memories: usize,
    /// Core instances of one attempt. A Python component takes 14.
    pub core_instances: usize,
    /// Bytes that one host call or the result may carry out of the guest.
    pub call_bytes: usize,
    /// Bytes of the result that is kept with the job.
    pub result_bytes: usize,
    /// Bytes of an error message or trap text that is kept with the attempt.
    pub message_bytes: usize,
    /// Handles (files, streams, pollables) that one attempt may hold.
    pub resources: usize,
    /// Random bytes of one call.
    pub random_bytes: u64,
    /// Bytes of a key of shared state.
    pub state_key_bytes: usize,
    /// Bytes of a value of shared state.
    pub state_value_bytes: usize,
    /// Lines and bytes of output.
    pub output: OutputCaps,
    /// How long an attempt waits for a free place in the engine before it is handed back.
    pub admission: Duration,
}

impl Default for Caps {
    fn default() -> Self {
        Caps {
            memory: 256 << 20,
            table_elements: 100_000,
            tables: 32,
            memories: 8,
            core_instances: 64,
            call_bytes: 8 << 20,
            result_bytes: 1 << 20,
            message_bytes: 8 << 10,
            resources: 4096,
            random_bytes: 1 << 20,
            state_key_bytes: 512,
            state_value_bytes: 256 << 10,
            output: OutputCaps::default(),
            admission: Duration::from_secs(1),
        }
    }
}

/// A rule of the host that ended the guest. It travels through the engine as the cause of the trap.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// More linear memory than granted.
    #[error("memory cap of {} exceeded: the guest asked for {}; raise `memory` in the manifest and its grant", format_size(*cap), format_size(*wanted))]
    Memory {
        /// Bytes allowed.
        cap: u64,
        /// Bytes asked for in all.
        wanted: u64,
    },
    /// A table with too many elements.
    #[error("table cap of {cap} elements exceeded: the guest asked for {wanted}")]
    Table {
        /// Elements allowed.
        cap: usize,
        /// Elements asked for.
        wanted: usize,
    },
    /// A write without a slot to a bucket that demands one.
    #[error("bucket `{bucket}` is written under a mutex only, and this attempt holds no slot; declare a mutex or semaphore on the handler")]
    NoSlot {
        /// The bucket.
        bucket: String,
    },
    /// A text that not every database can keep.
    #[error("{what} contains a NUL character at byte {at}, which not every database can keep")]
    Nul {
        /// Which text.
        what: String,
        /// Where.
        at: usize,
    },
}

/// Counts what the engine is about to allocate for one attempt.
#[derive(Debug)]
pub(crate) struct Limiter {
    memory: u64,
    table_elements: usize,
    tables: usize,
    memories: usize,
    core_instances: usize,
    used: u64,
    peak: u64,
    /// Allowed last and taken back if the engine then fails to allocate it.
    last_growth: u64,
}

impl Limiter {
    pub(crate) fn new(caps: &Caps) -> Self {
        Limiter {
            memory: caps.memory,
            table_elements: caps.table_elements,
            tables: caps.tables,
            memories: caps.memories,
            core_instances: caps.core_instances,
            used: 0,
            peak: 0,
            last_growth: 0,
        }
    }

    /// The most linear memory that the attempt had at once.
    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        // A guest that exceeds its own declared maximum gets the failure that WebAssembly specifies.
        if maximum.is_some_and(|maximum| desired > maximum) && desired as u64 <= self.memory {
            return Ok(false);
        }
        let growth = desired.saturating_sub(current) as u64;
        let wanted = self.used.saturating_add(growth);
        if wanted > self.memory {
            // An error and not `false`: most languages turn a failed growth into a bare `unreachable`, which
            // tells nobody what happened.
            return Err(wasmtime::Error::new(Refused::Memory { cap: self.memory, wanted }));
        }
        self.used = wanted;
        self.peak = self.peak.max(wanted);
        self.last_growth = growth;
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.used = self.used.saturating_sub(std::mem::take(&mut self.last_growth));
        Ok(())
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        if desired > self.table_elements {
            return Err(wasmtime::Error::new(Refused::Table { cap: self.table_elements, wanted: desired }));
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        self.core_instances
    }

    fn tables(&self) -> usize {
        self.tables
    }

    fn memories(&self) -> usize {
        self.memories
    }
}

/// Cuts a text at a character boundary and says how much is gone. NUL becomes U+FFFD, because PostgreSQL
/// refuses it in text and a message must not make its own row unwritable.
pub(crate) fn bounded(text: &str, cap: usize) -> String {
    let mut out = if text.len() <= cap {
        text.to_owned()
    } else {
        let at = text.floor_char_boundary(cap);
        format!("{}… ({} bytes more)", &text[..at], text.len() - at)
    };
    if out.contains('\0') {
        out = out.replace('\0', "\u{FFFD}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_over_all_memories_and_given_back_when_a_growth_fails() {
        let mut limiter = Limiter::new(&Caps { memory: 100, ..Caps::default() });
        assert!(limiter.memory_growing(0, 40, None).expect("fits"));
        assert!(limiter.memory_growing(0, 50, None).expect("fits"));
        let refused = limiter.memory_growing(40, 60, None).expect_err("10 bytes are left");
        assert_eq!(refused.downcast_ref(), Some(&Refused::Memory { cap: 100, wanted: 110 }));
        limiter.memory_grow_failed(wasmtime::Error::msg("no room")).expect("never an error");
        assert!(limiter.memory_growing(40, 60, None).expect("the 50 bytes are free again"));
        assert_eq!(limiter.peak(), 90);
    }

    #[test]
    fn a_text_is_cut_between_characters_and_loses_its_nul() {
        assert_eq!(bounded("ok\0", 10), "ok\u{FFFD}");
        assert_eq!(bounded("ääää", 3), "ä… (6 bytes more)");
    }
}
