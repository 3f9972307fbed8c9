//! A host as its program sees it: what it offers, how it is run, stopped and watched.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use warp_domain::resolve::Declarations;
use warp_pipeline::Handler;
use warp_store::{HostInfo, Store, StoreError};

use crate::config::HostConfig;
use crate::control::{Control, guarded};
use crate::lease::Lease;
use crate::surroundings::Surroundings;

/// How long the first registration may take: a program that starts beside busy others is patient.
const FIRST_REGISTRATION: Duration = Duration::from_secs(30);

/// One contract that this host can run, and the code for it.
#[derive(Clone)]
pub struct Offer {
    /// What plugin, contract and handler declare.
    pub declarations: Arc<Declarations>,
    /// The code.
    pub handler: Arc<dyn Handler>,
}

/// What can be run at the moment. Implemented over the plugin registry by the program.
#[async_trait]
pub trait Catalog: Send + Sync + 'static {
    /// One offer for each contract.
    fn offers(&self) -> Vec<Offer>;
    /// Completes when the offers may have changed since the last call returned.
    async fn changed(&self);
}

/// How urgently a host is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopLevel {
    /// Not at all.
    Run,
    /// Claim nothing more, hand back what has not begun, wait out the grace, stop the rest, settle, deregister. What
    /// ignores its stop, or a store that does not take the ends, is given up some seconds after the grace.
    Graceful,
    /// Hand everything back with one statement and end.
    Now,
}

/// How a host ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Runs that were still going when the host gave up on them; their rows were handed back.
    pub abandoned: usize,
    /// Whether the registration has ended; if not, another host rescues it after the lease.
    pub deregistered: bool,
}

/// Whether work that is sent to a host's queues may reach this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Condition {
    /// Registered, and its lease is good.
    Good,
    /// It was told to stop and claims nothing any more, whatever else is true.
    Stopping,
    /// It was not able to renew its lease in time: it gives back what it runs, and claims nothing until it has renewed.
    Lapsed,
    /// No registration: not yet, or not any more, because it was taken for dead. It registers as soon as it can.
    Unregistered,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) exchanges: AtomicU64,
    pub(crate) claimed: AtomicU64,
    pub(crate) settled: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) parked: AtomicU64,
    pub(crate) parked_again: AtomicU64,
    pub(crate) skipped: AtomicU64,
    pub(crate) unknown_rows: AtomicU64,
    pub(crate) rescued: AtomicU64,
    pub(crate) running: AtomicU64,
}

/// Numbers since the host started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostReport {
    /// Store round trips that settled or claimed.
    pub exchanges: u64,
    /// Jobs claimed.
    pub claimed: u64,
    /// Runs settled.
    pub settled: u64,
    /// Settles that came too late and changed nothing.
    pub late: u64,
    /// Jobs that a claim of this host parked.
    pub parked: u64,
    /// Of those, how many had been parked before.
    pub parked_again: u64,
    /// Jobs that a claim of this host skipped.
    pub skipped: u64,
    /// Rows found under this host's name that it did not know (0 in normal running).
    pub unknown_rows: u64,
    /// Rows given back from dead hosts.
    pub rescued: u64,
    /// Jobs claimed and not yet settled.
    pub running: u64,
}

/// A host, to be run by [`Host::run`].
pub struct Host {
    pub(crate) config: Arc<HostConfig>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) surroundings: Arc<dyn Surroundings>,
    pub(crate) guests: tokio::runtime::Handle,
    pub(crate) stop: watch::Receiver<StopLevel>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) lease: Arc<Lease>,
}

/// A handle to a running host's numbers.
#[derive(Clone)]
pub struct Numbers {
    counters: Arc<Counters>,
    lease: Arc<Lease>,
    stop: watch::Receiver<StopLevel>,
}

impl Numbers {
    /// The numbers now.
    #[must_use]
    pub fn report(&self) -> HostReport {
        let Counters { exchanges, claimed, settled, late, parked, parked_again, skipped, unknown_rows, rescued, running } = &*self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HostReport {
            exchanges: read(exchanges),
            claimed: read(claimed),
            settled: read(settled),
            late: read(late),
            parked: read(parked),
            parked_again: read(parked_again),
            skipped: read(skipped),
            unknown_rows: read(unknown_rows),
            rescued: read(rescued),
            running: read(running),
        }
    }

    /// How long ago the last good renewal of the lease was sent; `None` before the first and after the registration
    /// has ended.
    #[must_use]
    pub fn lease_age(&self) -> Option<Duration> {
        self.lease.age()
    }

    /// Whether runs may go on: the lease cannot lapse yet.
    #[must_use]
    pub fn lease_is_good(&self) -> bool {
        self.lease.is_good()
    }

    /// What the host is doing. That it is stopping is known from the moment it is told to, before it has noticed.
    #[must_use]
    pub fn condition(&self) -> Condition {
        if *self.stop.borrow() != StopLevel::Run {
            Condition::Stopping
        } else if self.lease.is_good() {
            Condition::Good
        } else if self.lease.stop_at().is_zero() {
            Condition::Unregistered
        } else {
            Condition::Lapsed
        }
    }
}

impl Host {
    /// A host that will run its control loop on the runtime that calls [`Host::run`] and its handlers on `guests`.
    pub fn new(
        config: HostConfig,
        store: Arc<dyn Store>,
        catalog: Arc<dyn Catalog>,
        surroundings: Arc<dyn Surroundings>,
        guests: tokio::runtime::Handle,
        stop: watch::Receiver<StopLevel>,
    ) -> Self {
        let lease = Arc::new(Lease::new(Arc::clone(&surroundings)));
        Host { config: Arc::new(config), store, catalog, surroundings, guests, stop, counters: Arc::default(), lease }
    }

    /// Access to the host's numbers while it runs.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        Numbers { counters: Arc::clone(&self.counters), lease: Arc::clone(&self.lease), stop: self.stop.clone() }
    }

    /// Runs until told to stop.
    ///
    /// # Errors
    /// When the host cannot register at all. Once registered it survives a store that is away.
    pub async fn run(self) -> Result<Stopped, StoreError> {
        let (info, sent) = (info(&self.config, &*self.surroundings), self.surroundings.boot());
        // Dropped or given up here, a registration that was made after all is rescued.
        let host = guarded("register", FIRST_REGISTRATION, self.store.register(info)).await?;
        Control::new(self, host, sent).run().await
    }
}

/// What a host says about itself when it registers.
pub(crate) fn info(config: &HostConfig, surroundings: &dyn Surroundings) -> HostInfo {
    HostInfo { name: config.name.clone(), version: config.version.clone(), now: surroundings.now() }
}
