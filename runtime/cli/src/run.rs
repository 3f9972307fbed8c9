//! `run`: the host.
//!
//! The main thread is the control thread: host loop, store calls, watching. Guests have a runtime of their own
//! with a thread for each core, so that nothing they do delays a lease.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use warp_domain::ending::State;
use warp_http::{Limits, Server, Sources};
use warp_plugin_host::{PluginDir, PluginDirConfig, Registry};
use warp_store::{JobFilter, Store};
use warp_worker::{Catalog, Host, HostConfig, HostReport, Numbers, StopLevel, Stopped, Surroundings, WorkerGroup};

use crate::args::RunArgs;
use crate::config::{Config, Group, LogFormat};
use crate::failure::{Exit, Failure, Outcome};
use crate::hosting::{self, DirectoryCatalog};
use crate::stores::{self, Opened};
use crate::system::System;
use crate::text;

/// Runs jobs until told to stop.
pub fn run(args: RunArgs, config: Config) -> Outcome {
    start_log(&config)?;
    let control = hosting::control_runtime()?;
    let guests = hosting::guest_runtime()?;
    let outcome = control.block_on(serve(&args, &config, guests.handle().clone()));
    // Guests that ignored every stop have been handed back; their threads must not hold up the exit.
    guests.shutdown_timeout(Duration::from_millis(200));
    outcome
}

async fn serve(args: &RunArgs, config: &Config, guests: tokio::runtime::Handle) -> Outcome {
    let plugins_dir = &config.plugins.value;
    if args.until_idle && !plugins_dir.is_dir() {
        // Otherwise a mistyped name would run nothing and report success.
        return Err(Failure::usage(format!("there is no directory {} (from {})", plugins_dir.display(), config.plugins.origin)));
    }
    let server = listen_http(config).await?;
    let opened = stores::open_for_host(config, args.migrate).await?;
    let store = Arc::clone(&opened.store);
    let loader = hosting::loader(config.workers.value, &config.cache.value)?;
    // Dropping it would end the watching, so it lives as long as the host.
    let plugins = Arc::new(PluginDir::open(PluginDirConfig::new(plugins_dir.clone(), hosting::grants(config)), loader));
    let registry = Arc::clone(plugins.registry());

    let (stop, stopped) = watch::channel(StopLevel::Run);
    let surroundings: Arc<dyn Surroundings> = Arc::new(System::new());
    let catalog: Arc<dyn Catalog> = Arc::new(DirectoryCatalog::new(Arc::clone(&registry)));
    let host_config = host_config(config);
    text::note(format!(
        "warp-host {} runs jobs of {} with {} workers on {}, plugins from {}; stop with SIGTERM or Ctrl-C",
        env!("CARGO_PKG_VERSION"),
        config.queues.value.join(", "),
        config.workers.value,
        opened.name,
        plugins_dir.display(),
    ));
    if let Some(budget) = opened.budget {
        let pool = config.database.pool.value;
        text::note(format!(
            "it opens at most {budget} connections (a pool of {pool} and {}), and takes slots by {} locks",
            budget - pool,
            opened.locks.name()
        ));
    }
    let workers = config.workers.value;
    let host = Host::new(host_config, Arc::clone(&store), Arc::clone(&catalog), Arc::clone(&surroundings), guests, stopped);
    let numbers = host.numbers();
    let signals = tokio::spawn(listen(stop.clone()));
    let idle = args.until_idle.then(|| tokio::spawn(stop_when_idle(stop.clone(), store, Arc::clone(&plugins), registry)));
    let http = server.map(|server| tokio::spawn(server.serve(sources(opened, numbers.clone(), catalog, surroundings, workers))));
    let begin = Instant::now();
    let Stopped { abandoned, deregistered } = host.run().await?;
    signals.abort();
    if let Some(idle) = idle {
        idle.abort();
    }
    if let Some(http) = http {
        http.abort();
    }
    drop(plugins);
    let report = numbers.report();
    log_numbers(&report);
    let runs = text::count(report.settled, "run");
    text::note(format!("stopped after {} and {runs}", text::rough(begin.elapsed())));
    if !deregistered {
        return Err(Failure::new(
            Exit::Unavailable,
            "the database did not answer at the end; what was still running is given back after the lease",
        ));
    }
    if abandoned > 0 {
        text::note(format!("{} handed back, uncharged", text::count(abandoned as u64, "run")));
    }
    Ok(())
}

/// Before anything else, so that an address in use stops the start and not a host that runs.
async fn listen_http(config: &Config) -> Outcome<Option<Server>> {
    let Some(address) = config.http.value else { return Ok(None) };
    let failed = |error| Failure::new(Exit::Runtime, format!("failed to listen on {address} (from {}): {error}", config.http.origin));
    let server = Server::bind(address, Limits::default()).await.map_err(failed)?;
    text::note(format!("metrics and probes at http://{}", server.address().map_err(failed)?));
    Ok(Some(server))
}

fn sources(opened: Opened, numbers: Numbers, catalog: Arc<dyn Catalog>, surroundings: Arc<dyn Surroundings>, workers: u32) -> Sources {
    let Opened { store, kind, name: _, locks, pool, budget: _ } = opened;
    Sources {
        store,
        numbers,
        catalog,
        surroundings,
        pool,
        workers,
        version: env!("CARGO_PKG_VERSION"),
        database: kind,
        locks: locks.name(),
    }
}

/// What this host did, for whoever looks into how it did it.
fn log_numbers(report: &HostReport) {
    let HostReport { exchanges, claimed, settled, late, parked, parked_again, skipped, unknown_rows, rescued, running } = *report;
    tracing::debug!(
        exchanges,
        claimed,
        settled,
        late,
        parked,
        parked_again,
        skipped,
        unknown_rows,
        rescued,
        running,
        "numbers of this host"
    );
}

fn host_config(config: &Config) -> HostConfig {
    let name = format!("{}:{}", machine_name(), std::process::id());
    let lease = config.lease.value;
    let group = |queues: &[String], workers| WorkerGroup { queues: queues.to_vec(), workers };
    let groups = if config.groups.is_empty() {
        vec![group(&config.queues.value, config.workers.value)]
    } else {
        config.groups.iter().map(|(Group { name: _, queues, count }, _)| group(queues, *count)).collect()
    };
    HostConfig {
        groups,
        prefetch_limit: config.prefetch.value,
        lease,
        // Three renewals fit into a lease, as with the default of 15 s and 5 s.
        renew_every: (lease / 3).min(Duration::from_secs(5)),
        stop_grace: config.grace.value,
        retention: config.retention(),
        default_retry: config.default_retry.value.clone(),
        default_timeout: config.default_timeout.value.clone(),
        ..HostConfig::new(name, config.workers.value)
    }
}

fn machine_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_str().map_or_else(|_| "host".to_owned(), str::to_owned)
}

/// The first signal stops gracefully, the second at once.
async fn listen(stop: watch::Sender<StopLevel>) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    for level in [StopLevel::Graceful, StopLevel::Now] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // A receiver that is gone means that the host has ended by itself.
        let _ = stop.send(level);
    }
    Ok(())
}

/// Stops the host when nothing is left that it runs or could run.
async fn stop_when_idle(stop: watch::Sender<StopLevel>, store: Arc<dyn Store>, plugins: Arc<PluginDir>, registry: Arc<Registry>) {
    plugins.settled().await;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let filter = JobFilter { states: vec![State::Enqueued, State::Processing], limit: 10_000, ..JobFilter::default() };
        // A store that does not answer says nothing about idleness.
        let Ok(jobs) = store.jobs(filter).await else { continue };
        let snapshot = registry.snapshot();
        if jobs.iter().all(|job| !snapshot.contracts().contains_key(&job.contract)) {
            let _ = stop.send(StopLevel::Graceful);
            return;
        }
    }
}

fn start_log(config: &Config) -> Outcome {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_new(&config.log_level.value)
        .map_err(|error| Failure::usage(format!("{}: {error}; write `info`, or `warn,warp_worker=debug`", config.log_level.origin)))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second subscriber could only be a test's, which then keeps its own.
    let _ = match config.log_format.value {
        LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()).try_init(),
        LogFormat::Json => log.json().try_init(),
    };
    Ok(())
}
