//! Several processes on one database. A store has connections and caches of its own, so stores in one process meet each
//! other exactly as processes do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::{Connection as _, PgConnection, Row as _};
use warp_store_postgres::StatementMode;
use warp_store_tests::{Subject, World, done, gated, hand_back, retry_at, semaphore, settle};
use warp_test_servers::{Database, database};

use crate::conformance::another;

async fn process(database: &Database) -> World {
    let store = Arc::new(another(database, StatementMode::Prepared).await);
    World::new(Subject { store, keep: Box::new(()) })
}

const PROCESSES: usize = 8;
const JOBS: usize = 400;
const LIMITS: [u32; 3] = [1, 2, 3];

/// Eight processes and three keys: every job ends once, no key ever has more holders than its limit, as they count
/// themselves and as the rows say at any moment, and nothing is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_three_limits() {
    let database = Arc::new(database());
    let publisher = process(&database).await;
    let jobs = (0..JOBS).map(|at| publisher.job(&format!("c{}", at % 3), "{}")).collect();
    let ids = publisher.enqueue(jobs).await;
    let holders = Arc::new([const { AtomicU32::new(0) }; 3]);
    let runners: Vec<_> = (0..PROCESSES)
        .map(|number| {
            let (database, holders) = (database.clone(), holders.clone());
            tokio::spawn(async move {
                let world = process(&database).await;
                let served = [0, 1, 2].map(|at: usize| gated(&format!("c{at}"), 1, semaphore(&format!("k{at}"), LIMITS[at])));
                let host = world.host(&served).await;
                let (mut ran, mut settles, mut round) = (Vec::new(), Vec::new(), number);
                loop {
                    let claimed = world.exchange(&host, std::mem::take(&mut settles), 4).await.claimed;
                    let key = |contract: &str| contract.as_bytes()[1] as usize - b'0' as usize;
                    for run in &claimed {
                        let key = key(&run.lane.declarations.contract);
                        let now = holders[key].fetch_add(1, Ordering::SeqCst) + 1;
                        assert!(now <= LIMITS[key], "{now} holders of k{key}");
                    }
                    tokio::task::yield_now().await;
                    for run in &claimed {
                        holders[key(&run.lane.declarations.contract)].fetch_sub(1, Ordering::SeqCst);
                        round += 1;
                        // Some fail, some are given back; what counts is how they end.
                        let ending = match round % 9 {
                            3 => retry_at(world.now()),
                            6 => hand_back(),
                            _ => {
                                ran.push(run.id);
                                done()
                            }
                        };
                        settles.push(settle(run, ending));
                    }
                    if settles.is_empty() && world.counter("stats:succeeded").await == JOBS as i64 {
                        return ran;
                    }
                }
            })
        })
        .collect();
    // Meanwhile somebody looks from outside.
    let mut eyes = PgConnection::connect(database.url()).await.expect("a connection");
    let over = "SELECT count(*) FROM (SELECT s.key FROM warp.slot s JOIN warp.conc_key c ON c.id = s.key \
                GROUP BY s.key, c.key HAVING count(*) > substr(c.key, 2)::int + 1) k";
    while publisher.counter("stats:succeeded").await < JOBS as i64 && !runners.iter().any(tokio::task::JoinHandle::is_finished) {
        let row = sqlx::query(over).fetch_one(&mut eyes).await.expect("a look");
        assert_eq!(row.get::<i64, _>(0), 0, "keys with more slots than their limit");
    }
    let mut ran = Vec::new();
    for runner in runners {
        ran.extend(runner.await.expect("a runner"));
    }
    ran.sort_unstable();
    assert_eq!(ran, ids, "each job ends once");
    let left = "SELECT (SELECT count(*) FROM warp.slot) + (SELECT count(*) FROM warp.ready) + (SELECT count(*) FROM warp.waiting) \
                + (SELECT count(*) FROM warp.running) + (SELECT count(*) FROM warp.blocker)";
    assert_eq!(sqlx::query(left).fetch_one(&mut eyes).await.expect("a look").get::<i64, _>(0), 0);
}
