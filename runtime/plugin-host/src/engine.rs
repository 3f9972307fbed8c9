//! The one engine of a host: how guests are compiled, placed in memory and interrupted.
//!
//! What must stay true:
//! - A guest that computes gives its thread back at every tick, [`TICK`] apart, and no store is entered without
//!   a deadline that the next tick reaches.
//! - The tick never carries anybody's deadline. It is the same for all guests, so that one guest's timeout cannot
//!   interrupt another.
//! - While no store lives, nothing ticks: an idle host sleeps.
//! - A place in the engine is taken before a store is made; a full engine is backpressure, not an error.
//!
//! What it deliberately does not do: know plugins, files or policies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::{Config, Enabled, EngineWeak, InstanceAllocationStrategy, PoolingAllocationConfig};

use crate::PluginHostError;

/// How often a computing guest is made to look up. A spinning guest ends within one tick of the stop if there
/// are as many cores as spinners, which leaves most of the promised 50 ms to a busy machine.
pub const TICK: Duration = Duration::from_millis(10);

/// How to set an engine up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Attempts that may run at once: the workers and a margin for runs that are still being stopped.
    pub slots: u32,
    /// Whether to reserve memory for all of them at once. `false` allocates on demand: for small machines, and
    /// for tests of the fallback.
    pub pooling: bool,
    /// The largest linear memory of any plugin, in bytes.
    pub max_memory: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig { slots: 64, pooling: true, max_memory: 4 << 30 }
    }
}

/// What the engine came to be, for the log and whoever shows the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInfo {
    /// Attempts that may run at once.
    pub slots: u32,
    /// Whether memory is pooled.
    pub pooling: bool,
    /// Why it is not, if it was asked for.
    pub fallback: Option<String>,
}

/// The engine and what belongs to it. One per process.
pub struct Engine {
    engine: wasmtime::Engine,
    slots: Arc<Semaphore>,
    info: EngineInfo,
    ticker: Ticker,
}

impl Engine {
    /// Sets the engine up and starts its ticker thread.
    ///
    /// # Errors
    /// When this machine cannot run compiled WebAssembly at all. A machine on which the pool cannot be reserved
    /// is not an error: guests are then placed on demand, which [`EngineInfo`] and the log say.
    pub fn new(config: &EngineConfig) -> Result<Arc<Self>, PluginHostError> {
        let slots = config.slots.clamp(1, 10_000);
        let (engine, fallback) = if config.pooling {
            match wasmtime::Engine::new(&pooled(slots, config.max_memory)) {
                Ok(engine) => (engine, None),
                Err(e) => {
                    let why = format!("{e:#}");
                    tracing::warn!(
                        slots,
                        reason = %why,
                        "guest memory cannot be reserved in advance, so it is allocated per attempt, which is slower; \
                         fewer workers or a larger address space limit (`ulimit -v`) would allow it"
                    );
                    (on_demand()?, Some(why))
                }
            }
        } else {
            (on_demand()?, None)
        };
        let info = EngineInfo { slots, pooling: config.pooling && fallback.is_none(), fallback };
        tracing::info!(slots, pooling = info.pooling, "engine is ready");
        let ticker =
            Ticker::start(engine.weak()).map_err(|e| PluginHostError::Engine(format!("failed to start the ticker thread: {e}")))?;
        Ok(Arc::new(Engine { engine, slots: Arc::new(Semaphore::new(slots as usize)), info, ticker }))
    }

    /// What it came to be.
    #[must_use]
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Places not taken.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.slots.available_permits()
    }

    pub(crate) fn raw(&self) -> &wasmtime::Engine {
        &self.engine
    }

    /// A place for one store; `None` if none comes free in time.
    pub(crate) async fn place(self: &Arc<Self>, patience: Duration) -> Option<Place> {
        let permit = match Arc::clone(&self.slots).try_acquire_owned() {
            Ok(permit) => permit,
            // The semaphore is never closed, so an error can only be the time.
            Err(_) => tokio::time::timeout(patience, Arc::clone(&self.slots).acquire_owned()).await.ok()?.ok()?,
        };
        self.ticker.shared.enter();
        Some(Place { engine: Arc::clone(self), _permit: permit })
    }
}

/// A store may live while this does. It must be dropped after the store.
pub(crate) struct Place {
    engine: Arc<Engine>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    pub(crate) fn engine(&self) -> &wasmtime::Engine {
        &self.engine.engine
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.engine.ticker.shared.leave();
    }
}

fn common() -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .epoch_interruption(true)
        .parallel_compilation(true)
        // Names without files and lines: reading debug information at a trap costs more than it tells.
        .wasm_backtrace_details(wasmtime::WasmBacktraceDetails::Disable);
    config
}

fn on_demand() -> Result<wasmtime::Engine, PluginHostError> {
    wasmtime::Engine::new(&common()).map_err(|e| PluginHostError::Engine(format!("failed to set up the engine: {e:#}")))
}

/// Sizes follow the hungriest guests measured: a Python component takes 14 core instances, a QuickJS one two
/// memories, SpiderMonkey 7,690 table elements. The totals are address space, not memory.
fn pooled(slots: u32, max_memory: usize) -> Config {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(slots)
        .total_core_instances(slots.saturating_mul(20))
        .total_memories(slots.saturating_mul(2))
        .total_tables(slots.saturating_mul(8))
        .total_stacks(slots)
        .max_core_instances_per_component(64)
        .max_memories_per_component(8)
        .max_tables_per_component(32)
        .max_memories_per_module(4)
        .max_tables_per_module(8)
        .max_component_instance_size(16 << 20)
        .max_core_instance_size(16 << 20)
        .table_elements(100_000)
        .max_memory_size(max_memory)
        // Measured: with pages kept and the page map asked which ones were touched, two cores run 89,000 small
        // instances a second; with the defaults they run 22,000, fewer than one core alone.
        .linear_memory_keep_resident(16 << 20)
        .table_keep_resident(64 << 10)
        .async_stack_keep_resident(64 << 10)
        .pagemap_scan(Enabled::Auto);
    let mut config = common();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}

/// Moves the epoch on, while there is anybody to notice.
struct Ticker {
    shared: Arc<Ticking>,
    thread: Option<JoinHandle<()>>,
}

struct Ticking {
    live: AtomicUsize,
    over: AtomicBool,
    /// Set once, before the ticker is shared.
    thread: std::sync::OnceLock<Thread>,
}

impl Ticking {
    fn enter(&self) {
        // The park token makes an unpark that comes before the park count, so the thread cannot miss the first
        // store. While it is not parked this is one atomic write.
        if self.live.fetch_add(1, Ordering::AcqRel) == 0
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn leave(&self) {
        self.live.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Ticker {
    fn start(engine: EngineWeak) -> std::io::Result<Self> {
        let shared = Arc::new(Ticking { live: AtomicUsize::new(0), over: AtomicBool::new(false), thread: std::sync::OnceLock::new() });
        let ticking = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("warp-tick".to_owned()).spawn(move || {
            while !ticking.over.load(Ordering::Acquire) {
                if ticking.live.load(Ordering::Acquire) == 0 {
                    std::thread::park();
                    continue;
                }
                std::thread::sleep(TICK);
                let Some(engine) = engine.upgrade() else { return };
                engine.increment_epoch();
            }
        })?;
        let _ = shared.thread.set(thread.thread().clone());
        Ok(Ticker { shared, thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It waits for no guest: at most one tick. A ticker that panicked has nothing left to say.
            let _ = thread.join();
        }
    }
}
