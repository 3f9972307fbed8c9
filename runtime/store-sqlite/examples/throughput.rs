//! How many claim-and-settle pairs a second the driver does, with history kept and durable commits.
//!
//! `cargo run --release -p warp-store-sqlite --example throughput [jobs] [batch] [keys]` prints one line per workload: jobs
//! without a key, on a hundred mutex keys, on one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_domain::ending::Ending;
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, JobId, UnixMillis};
use warp_store::{ClaimParams, ExchangeParams, HandOff, HostInfo, Lane, NewJob, RunOutput, Served, Settle, Store};
use warp_store_sqlite::{OpenOptions, SqliteStore};

type Error = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let jobs: u128 = arguments.next().map_or(Ok(100_000), |text| text.parse())?;
    let batch: u32 = arguments.next().map_or(Ok(256), |text| text.parse())?;
    let only: Option<u128> = arguments.next().map(|text| text.parse()).transpose()?;
    for keys in [0, 100, 1].into_iter().filter(|keys| only.is_none_or(|only| only == *keys)) {
        measure(jobs.min(if keys == 1 { 5_000 } else { u128::MAX }), batch, keys).await?;
    }
    Ok(())
}

async fn measure(jobs: u128, batch: u32, keys: u128) -> Result<(), Error> {
    let directory = tempfile::tempdir()?;
    let store = SqliteStore::open(OpenOptions::new(directory.path().join("warp.db"))).await?;
    let declarations = Arc::new(Declarations {
        contract: "no-op".into(),
        handler: "no-op".into(),
        digest: Digest([7; 32]),
        on_contract: Declared::default(),
        on_handler: Declared { concurrency: (keys > 0).then(mutex).transpose()?, ..Declared::default() },
    });
    let now = UnixMillis(1_700_000_000_000);
    let started = Instant::now();
    for first in (0..jobs).step_by(1000) {
        let new = |n: u128| NewJob {
            id: JobId(n),
            contract: "no-op".into(),
            queue: "default".into(),
            payload: format!(r#"{{"key": {}, "customer_id": 4711}}"#, n % keys.max(1)),
            metadata: Vec::new(),
            trace_parent: None,
            due: None,
            explicit: Declared::default(),
            unique_key: None,
        };
        store.enqueue((first..jobs.min(first + 1000)).map(new).collect(), now).await?;
    }
    let enqueued = started.elapsed();
    let host = store.register(HostInfo { name: "bench".into(), version: "0".into(), now }).await?;
    store.serve(host, vec![Served { declarations: declarations.clone() }]).await?;
    let lanes: Arc<[Lane]> = Arc::new([Lane { queue: "default".into(), declarations }]);
    let (started, cpu_before) = (Instant::now(), cpu());
    let (mut settles, mut done, mut exchanges) = (Vec::new(), 0u128, 0u32);
    while done < jobs {
        let claim = Some(ClaimParams { lanes: lanes.clone(), max: batch });
        let exchanged = store
            .exchange(ExchangeParams { host, now, settles: std::mem::take(&mut settles).into(), claim, hand_off: HandOff::default() })
            .await?;
        done += exchanged.settled.len() as u128;
        exchanges += 1;
        settles.extend(exchanged.claimed.iter().map(|claimed| Settle {
            handle: claimed.handle,
            token: claimed.token,
            ending: Ending::Completed { result: None },
            on_conflict: Ending::Completed { result: None },
            output: RunOutput::default(),
            children: Vec::new(),
            state: Vec::new(),
            took: Duration::from_micros(50),
        }));
    }
    let took = started.elapsed();
    println!(
        "{keys:>4} keys: {:>7.0} enqueues/s, {:>7.0} claim+settle/s ({jobs} jobs in {took:.2?}, {exchanges} exchanges, {:.1} µs of CPU each)",
        jobs as f64 / enqueued.as_secs_f64(),
        jobs as f64 / took.as_secs_f64(),
        (cpu() - cpu_before).as_secs_f64() * 1e6 / jobs as f64,
    );
    Ok(())
}

/// What this process has used: on a busy machine the only figure that can be compared.
fn cpu() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(used.tv_sec).unwrap_or(0), u32::try_from(used.tv_nsec).unwrap_or(0))
}

fn mutex() -> Result<Concurrency, Error> {
    Ok(Concurrency {
        kind: ConcurrencyKind::Mutex,
        keys: vec!["key:{key}".parse()?],
        limit: 1,
        weight: 1,
        mode: Mode::Wait,
        order: Order::Any,
        on_retry: OnRetry::Block,
    })
}
