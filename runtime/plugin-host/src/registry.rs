//! What serves at the moment: one pointer, swapped whole.
//!
//! What must stay true: whoever takes a version keeps it as long as he needs it. A swap changes what the next
//! claim finds and nothing that runs. Two plugins never serve one contract.
//!
//! What it deliberately does not do: decide what may serve (`directory.rs` does).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use tokio::sync::{Notify, watch};
use warp_domain::Digest;
use warp_domain::ending::{Observed, Outcome};
use warp_domain::resolve::Declarations;
use warp_manifest::Manifest;
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopSignal};

use crate::runner::{RunStats, Runnable};

/// One version of a plugin, ready to run. Dropped when it serves no longer and its last attempt has ended; its
/// code and memory go with it.
pub struct PluginVersion {
    manifest: Manifest,
    digest: Digest,
    runnable: Arc<Runnable>,
    totals: Totals,
    gone: Option<Arc<Notify>>,
}

#[derive(Default)]
struct Totals {
    runs: AtomicU64,
    trapped: AtomicU64,
    instantiate_micros: AtomicU64,
    call_micros: AtomicU64,
    peak_memory: AtomicU64,
}

/// What the attempts of one version have cost so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Attempts that ended.
    pub runs: u64,
    /// Of those, the ones that trapped.
    pub trapped: u64,
    /// Microseconds of instantiation, all together.
    pub instantiate_micros: u64,
    /// Microseconds in calls, all together.
    pub call_micros: u64,
    /// The most linear memory of any attempt.
    pub peak_memory: u64,
}

impl PluginVersion {
    pub(crate) fn new(manifest: Manifest, digest: Digest, runnable: Runnable, gone: Option<Arc<Notify>>) -> Self {
        PluginVersion { manifest, digest, runnable: Arc::new(runnable), totals: Totals::default(), gone }
    }

    /// What its author declared.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Code and manifest together.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The plugin's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.manifest.plugin.name
    }

    /// Its component, linked.
    #[must_use]
    pub fn runnable(&self) -> &Arc<Runnable> {
        &self.runnable
    }

    /// What its attempts have cost so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let read = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let Totals { runs, trapped, instantiate_micros, call_micros, peak_memory } = &self.totals;
        Usage {
            runs: read(runs),
            trapped: read(trapped),
            instantiate_micros: read(instantiate_micros),
            call_micros: read(call_micros),
            peak_memory: read(peak_memory),
        }
    }

    /// Runs one attempt and says what it cost.
    pub async fn run_measured(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> (Outcome, RunStats) {
        let (outcome, stats) = self.runnable.run(attempt, calls, stop).await;
        let add = |to: &AtomicU64, micros: u128| to.fetch_add(u64::try_from(micros).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.totals.runs.fetch_add(1, Ordering::Relaxed);
        if matches!(outcome, Outcome::Observed(Observed::Trapped(_))) {
            self.totals.trapped.fetch_add(1, Ordering::Relaxed);
        }
        add(&self.totals.instantiate_micros, stats.instantiate.as_micros());
        add(&self.totals.call_micros, stats.call.as_micros());
        self.totals.peak_memory.fetch_max(stats.peak_memory, Ordering::Relaxed);
        (outcome, stats)
    }
}

#[async_trait]
impl Handler for PluginVersion {
    async fn run(&self, attempt: AttemptInfo, calls: Arc<dyn HostCalls>, stop: Arc<StopSignal>) -> Outcome {
        self.run_measured(attempt, calls, stop).await.0
    }
}

impl Drop for PluginVersion {
    fn drop(&mut self) {
        // Whoever counts old versions sees this one gone: no strong reference is left at this point.
        if let Some(gone) = &self.gone {
            gone.notify_one();
        }
    }
}

/// One contract that can be run, with what is declared about it.
#[derive(Clone)]
pub struct Served {
    /// What plugin, contract and handler declare.
    pub declarations: Arc<Declarations>,
    /// The version that runs it.
    pub version: Arc<PluginVersion>,
}

/// What served at one instant.
#[derive(Default)]
pub struct Snapshot {
    plugins: BTreeMap<String, Arc<PluginVersion>>,
    contracts: BTreeMap<String, Served>,
}

impl Snapshot {
    /// Plugins by name.
    #[must_use]
    pub fn plugins(&self) -> &BTreeMap<String, Arc<PluginVersion>> {
        &self.plugins
    }

    /// Contracts by name.
    #[must_use]
    pub fn contracts(&self) -> &BTreeMap<String, Served> {
        &self.contracts
    }

    /// The caller has made sure that no two of them claim the same name or contract.
    fn of(versions: impl Iterator<Item = Arc<PluginVersion>>) -> Self {
        let mut snapshot = Snapshot::default();
        for version in versions {
            for declarations in version.manifest.declarations(version.digest) {
                let contract = declarations.contract.clone();
                let served = Served { declarations: Arc::new(declarations), version: Arc::clone(&version) };
                snapshot.contracts.insert(contract, served);
            }
            snapshot.plugins.insert(version.name().to_owned(), version);
        }
        snapshot
    }
}

/// The pointer to what serves. Written by the directory's task, read by every claim.
pub struct Registry {
    current: ArcSwap<Snapshot>,
    generation: watch::Sender<u64>,
}

impl Default for Registry {
    fn default() -> Self {
        Registry { current: ArcSwap::default(), generation: watch::Sender::new(0) }
    }
}

impl Registry {
    /// What serves now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Hears of every swap: the value grows with each.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    pub(crate) fn swap(&self, versions: impl Iterator<Item = Arc<PluginVersion>>) {
        self.current.store(Arc::new(Snapshot::of(versions)));
        self.generation.send_modify(|generation| *generation += 1);
    }
}
