//! Where a workload runs: a database that is its own, and hosts of this process on it.
//!
//! What must stay true: every workload begins on an empty database and leaves nothing behind; each host has a thread, a
//! store and connections of its own, as it has in a process of its own. Hosts share the threads that guests run on.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::watch;
use warp_store::{EnqueueVerdict, NewJob, Store};
use warp_store_postgres::{ConnectSettings, Observer};
use warp_worker::{Host, HostConfig, HostReport, Numbers, StopLevel, Surroundings};

use super::meter::{self, Backends, Cost, Mark, Meter, Watch};
use super::subject::{Fixed, job};
use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::hosting;
use crate::stores::{self, Place};
use crate::system::System;

/// The application's name on connections that enqueue and are no host's.
pub const PUBLISHER: &str = "warp-bench-publisher";
/// How many jobs one call enqueues where that is not what is measured.
const BATCH: u64 = 1_000;
/// After so long without a settled job a workload is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A database and the runtimes around it.
pub struct Ground {
    config: Config,
    place: Place,
    server: Option<Server>,
    /// Goes last: the files of SQLite.
    _dir: Option<tempfile::TempDir>,
    /// Of the side that measures.
    pub runtime: Runtime,
    guests: Runtime,
    pub surroundings: Arc<System>,
}

/// The databases on a server that this ground made and removes.
struct Server {
    admin: ConnectSettings,
    measured: String,
    meters: String,
}

impl Ground {
    /// An empty database of the kind that the settings name.
    pub fn new(config: &Config, dir: Option<&Path>) -> Outcome<Self> {
        let runtime = hosting::control_runtime()?;
        let guests = hosting::guest_runtime()?;
        let surroundings = Arc::new(System::new());
        let (place, server, dir) = match stores::place(config)? {
            Place::Sqlite(_) => {
                let dir = match dir {
                    Some(parent) => tempfile::TempDir::with_prefix_in("warp-bench-", parent)?,
                    None => tempfile::TempDir::with_prefix("warp-bench-")?,
                };
                (Place::Sqlite(dir.path().join("bench.db")), None, Some(dir))
            }
            Place::Postgres(settings) => {
                let (settings, server) = runtime.block_on(create_databases(*settings))?;
                (Place::Postgres(Box::new(settings)), Some(server), None)
            }
        };
        let ground = Ground { config: config.clone(), place, server, _dir: dir, runtime, guests, surroundings };
        // Creates the schema.
        ground.runtime.block_on(async { stores::open_new(ground.place_as("warp-bench"), &ground.config).await.map(drop) })?;
        Ok(ground)
    }

    /// The settings of the measured database, if a server holds it.
    fn settings(&self) -> Option<&ConnectSettings> {
        match &self.place {
            Place::Sqlite(_) => None,
            Place::Postgres(settings) => Some(settings),
        }
    }

    fn place_as(&self, application: &str) -> Place {
        match &self.place {
            Place::Sqlite(path) => Place::Sqlite(path.clone()),
            Place::Postgres(settings) => {
                Place::Postgres(Box::new(ConnectSettings { application_name: application.to_owned(), ..(**settings).clone() }))
            }
        }
    }

    /// Whether SQL can be asked for beside the store.
    pub fn is_on_a_server(&self) -> bool {
        self.server.is_some()
    }

    /// Asks the measured database itself, for what no store does: filling it with history, ANALYZE.
    pub async fn ask(&self, sql: &str) -> Outcome<Vec<Vec<Option<String>>>> {
        let Some(settings) = self.settings() else {
            return Err(Failure::usage("this database is not on a server"));
        };
        let mut observer = Observer::connect(&ConnectSettings { application_name: PUBLISHER.to_owned(), ..settings.clone() }).await?;
        let rows = observer.ask(&sql.replace("warp.", &format!("{}.", settings.schema))).await?;
        observer.close().await;
        Ok(rows)
    }

    /// A store that claims, without a host's loop.
    pub async fn claimer(&self) -> Outcome<Arc<dyn Store>> {
        Ok(stores::open_new(self.place_as(PUBLISHER), &self.config).await?.store)
    }

    /// A store beside those of the hosts, as another process has that only gives commands: it listens to nothing.
    pub async fn publisher(&self) -> Outcome<Arc<dyn Store>> {
        Ok(stores::open_at(self.place_as(PUBLISHER), &self.config).await?.store)
    }

    /// Writes jobs and waits until they are stored.
    pub async fn enqueue(&self, store: &dyn Store, contract: &str, jobs: u64, groups: u64) -> Outcome {
        let mut number = 0;
        while number < jobs {
            let batch: Vec<_> =
                (number..jobs.min(number + BATCH)).map(|number| job(&self.surroundings, contract, number, groups)).collect();
            number += batch.len() as u64;
            self.enqueue_batch(store, batch).await?;
        }
        Ok(())
    }

    /// Writes one batch; a workload's job is never refused.
    pub async fn enqueue_batch(&self, store: &dyn Store, batch: Vec<NewJob>) -> Outcome {
        let verdicts = store.enqueue(batch, self.surroundings.now()).await?;
        match verdicts.iter().find(|verdict| !matches!(verdict, EnqueueVerdict::Enqueued(_))) {
            Some(refused) => Err(Failure::usage(format!("a job of the workload was not accepted: {refused:?}"))),
            None => Ok(()),
        }
    }

    /// Starts a host on a thread of its own. When this returns, it has opened its store.
    pub fn start(&self, name: &str, offers: Fixed, config: HostConfig) -> Outcome<Running> {
        let (stop, stopped) = watch::channel(StopLevel::Run);
        let (opened, opening) = mpsc::channel();
        let place = self.place_as(name);
        let settings = self.config.clone();
        let surroundings: Arc<dyn Surroundings> = Arc::<System>::clone(&self.surroundings);
        let guests = self.guests.handle().clone();
        let body = move || {
            let open = || -> Outcome<_> {
                let runtime = hosting::control_runtime()?;
                let store = runtime.block_on(stores::open_new(place, &settings))?.store;
                Ok((runtime, store))
            };
            let (runtime, store) = match open() {
                Ok(open) => open,
                Err(failure) => {
                    // Whoever started this waits for it; it cannot have gone.
                    let _ = opened.send(Err(failure));
                    return;
                }
            };
            let host = Host::new(config, Arc::clone(&store), Arc::new(offers), surroundings, guests, stopped);
            let _ = opened.send(Ok((host.numbers(), Arc::clone(&store))));
            let ended = runtime.block_on(host.run());
            drop(store);
            if let Err(error) = ended {
                tracing::warn!(%error, "a host of the bench ended by itself");
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body)?;
        let answer = opening.recv().map_err(|error| Failure::from(anyhow::Error::from(error)))?;
        let (numbers, store) = answer?;
        Ok(Running { thread, stop, numbers, store })
    }

    /// The server's counters for this database, if there is a server.
    pub async fn meter(&self) -> Outcome<Gauge> {
        let Some(server) = &self.server else { return Ok(Gauge(None)) };
        let meter = Meter::connect(&named(&server.admin, &server.meters), &server.measured).await?;
        Ok(Gauge(Some(meter)))
    }

    /// Rows that were deleted or replaced and not cleaned up yet. Asked when the hosts have gone.
    pub async fn dead_rows(&self) -> Outcome<Option<u64>> {
        match self.settings() {
            Some(settings) => meter::dead_rows(settings).await.map(Some),
            None => Ok(None),
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let Some(Server { admin, measured, meters }) = self.server.take() else { return };
        let removal = async {
            let mut observer = Observer::connect(&admin).await?;
            for database in [measured, meters] {
                observer.ask(&format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)")).await?;
            }
            observer.close().await;
            Ok::<_, warp_store::StoreError>(())
        };
        if let Err(error) = self.runtime.block_on(removal) {
            tracing::warn!(%error, "a database of the bench could not be removed; its name begins with warp_bench_");
        }
    }
}

/// The same server, another database. A later `dbname` outranks the one in the address, in both of its forms.
fn named(settings: &ConnectSettings, database: &str) -> ConnectSettings {
    let url = &settings.url;
    let url = match (url.contains("://"), url.contains('?')) {
        (false, _) => format!("{url} dbname={database}"),
        (true, true) => format!("{url}&dbname={database}"),
        (true, false) => format!("{url}?dbname={database}"),
    };
    ConnectSettings { url, listen_url: None, ..settings.clone() }
}

async fn create_databases(admin: ConnectSettings) -> Outcome<(ConnectSettings, Server)> {
    let admin = ConnectSettings { application_name: "warp-bench".to_owned(), ..admin };
    let unique = uuid::Uuid::now_v7().simple();
    let server = Server { measured: format!("warp_bench_{unique}"), meters: format!("warp_bench_meter_{unique}"), admin };
    let mut observer = Observer::connect(&server.admin).await?;
    for database in [&server.measured, &server.meters] {
        let created = observer.ask(&format!("CREATE DATABASE {database}")).await;
        created.map_err(|error| {
            Failure::from(error)
                .context("bench makes databases of its own on the server that --database-url names; its user needs CREATEDB")
        })?;
    }
    observer.close().await;
    Ok((named(&server.admin, &server.measured), server))
}

/// A host that runs.
pub struct Running {
    thread: std::thread::JoinHandle<()>,
    stop: watch::Sender<StopLevel>,
    numbers: Numbers,
    /// The host's own; of no use once it has stopped.
    pub store: Arc<dyn Store>,
}

impl Running {
    /// Its numbers now.
    pub fn report(&self) -> HostReport {
        self.numbers.report()
    }

    /// Stops it at once and waits for its end.
    pub fn stop(self) {
        let Running { thread, stop, numbers: _, store } = self;
        drop(store);
        // A receiver that is gone means that the host has ended by itself.
        let _ = stop.send(StopLevel::Now);
        if thread.join().is_err() {
            tracing::warn!("a host of the bench panicked");
        }
    }
}

/// What all hosts together say.
pub fn sum(hosts: &[Running]) -> HostReport {
    hosts.iter().map(Running::report).fold(HostReport::default(), |sum, one| HostReport {
        exchanges: sum.exchanges + one.exchanges,
        claimed: sum.claimed + one.claimed,
        settled: sum.settled + one.settled,
        late: sum.late + one.late,
        parked: sum.parked + one.parked,
        parked_again: sum.parked_again + one.parked_again,
        skipped: sum.skipped + one.skipped,
        unknown_rows: sum.unknown_rows + one.unknown_rows,
        rescued: sum.rescued + one.rescued,
        running: sum.running + one.running,
    })
}

/// How a workload went.
pub struct Progressed {
    pub report: HostReport,
    /// From the start to the last settle.
    pub took: Duration,
    /// Seconds since the start, and how many were settled.
    pub counts: Vec<(f64, u64)>,
}

/// Waits until so many jobs are settled, or nothing has been for a minute.
pub async fn work_off(hosts: &[Running], begin: Instant, jobs: u64) -> Progressed {
    let mut counts = vec![(0.0, 0)];
    let (mut last, mut changed) = (0, begin);
    loop {
        let report = sum(hosts);
        if report.settled != last {
            (last, changed) = (report.settled, Instant::now());
        }
        let enough = counts.last().is_none_or(|(at, _)| begin.elapsed().as_secs_f64() - at > 0.02);
        if enough {
            counts.push((begin.elapsed().as_secs_f64(), report.settled));
        }
        if report.settled >= jobs || changed.elapsed() > PATIENCE {
            counts.push((changed.duration_since(begin).as_secs_f64(), report.settled));
            return Progressed { report, took: changed.duration_since(begin), counts };
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A meter where there is a server to ask.
pub struct Gauge(Option<Meter>);

impl Gauge {
    /// The counters now.
    pub async fn mark(&mut self) -> Outcome<Option<Mark>> {
        match &mut self.0 {
            Some(meter) => meter.mark().await.map(Some),
            None => Ok(None),
        }
    }

    /// Begins to count connections.
    pub async fn watch(&self) -> Outcome<Option<Watch>> {
        match &self.0 {
            Some(meter) => meter.watch().await.map(Some),
            None => Ok(None),
        }
    }

    /// What lies between two marks, once the hosts have gone.
    pub async fn cost(&mut self, from: &Option<Mark>, to: &Option<Mark>) -> Outcome<Option<Cost>> {
        match (&mut self.0, from, to) {
            (Some(meter), Some(from), Some(to)) => meter.cost(from, to).await.map(Some),
            _ => Ok(None),
        }
    }

    /// What the server says about itself.
    pub async fn settings(&mut self) -> Outcome<serde_json::Map<String, serde_json::Value>> {
        match &mut self.0 {
            Some(meter) => meter.settings().await,
            None => Ok(serde_json::Map::new()),
        }
    }

    /// Ends the meter, so that its database can be removed.
    pub async fn close(self) {
        if let Some(meter) = self.0 {
            meter.close().await;
        }
    }
}

/// The end of a [`Watch`], where there is one.
pub async fn backends(watch: Option<Watch>) -> Outcome<Backends> {
    match watch {
        Some(watch) => watch.finish().await,
        None => Ok(Backends::default()),
    }
}
