//! What the product survives on PostgreSQL: three hosts that are the shipped program, a load under three limits, a fault,
//! and an outside ledger that says afterwards what ran beside what.
//!
//! The three limits: eight mutex keys, a semaphore of three, and a semaphore whose limit an operator lowers and raises
//! while everything runs. Every job must be done exactly once and be charged once, no limit be exceeded at any instant,
//! no end of an earlier run be taken after a later one has begun, and no host end that nobody killed.
//!
//! What must stay true: overlaps and losses are read from the ledger (`witness.rs`). Rates and times of recovery are
//! printed, not asserted; that everything ends within some minutes is.
//!
//! `WARP_SOAK=1` runs the same for five minutes each (`cargo xtask soak faults`).

mod cases;
mod witness;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use warp_domain::JobId;
use warp_domain::policy::Declared;
use warp_store::{NewJob, Store};
use warp_store_postgres::{ConnectSettings, OpenOptions, PostgresStore};
use warp_test_servers::{Cluster, Database};

use self::witness::{Rule, Verdict, Witness};
use crate::Ground;
use crate::acceptance::{Host, PATIENCE, ended, ledger_guest, size, target, wall};
use crate::stage::now;

/// How long a silent host keeps its jobs here.
const LEASE: Duration = Duration::from_secs(6);
/// Jobs that are there and have not ended, so that every key always has somebody waiting.
const BACKLOG: usize = 120;
/// Keys of the mutex.
const KEYS: usize = 8;
/// The key whose limit changes, and what it changes to, round and round.
const CHANGING: &str = "limited:k";
const LIMITS: [u32; 6] = [4, 1, 6, 2, 3, 5];
/// Before an operator has said anything: what the manifest declares.
const DECLARED: u32 = 6;
const MANIFEST: &str = r#"
[contract.alone]
[handler.alone]
mutex = { key = "{key}", mode = "wait" }
[contract.three]
[handler.three]
semaphore = { key = "{key}", limit = 3 }
[contract.limited]
[handler.limited]
semaphore = { key = "{key}", limit = 6 }
"#;

/// How long the faults go on.
fn duration(usual: u64) -> Duration {
    Duration::from_secs(size(usual as usize, 300) as u64)
}

/// Numbers that nobody can foresee, and that a printed seed repeats.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        // Knuth's multiplier; the upper half is the random one.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Asks until the store answers: it is away now and then.
macro_rules! again {
    ($call:expr) => {{
        let deadline = Instant::now() + PATIENCE;
        loop {
            match $call.await {
                Ok(answer) => break answer,
                Err(error) => assert!(Instant::now() < deadline, "the store does not come back: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }};
}

/// A cluster with a database for the hosts, their directory, and a second database for the ledger.
struct Field {
    ground: Ground,
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn Store>,
    witness: Witness,
    database: Database,
    cluster: Cluster,
    /// What slots are made of.
    locks: &'static str,
    /// Hosts started so far, which numbers their names in the ledger.
    started: usize,
}

/// A host and its name in the ledger.
struct Named {
    host: Host,
    name: String,
}

impl Named {
    /// What its log complains of, for whoever reads why a test has failed.
    fn print_troubles(&self) {
        for line in self.host.lines(|line| line.contains("\"level\":\"ERROR\"") || line.contains("\"target\":\"warp_store_postgres")) {
            eprintln!("{}: {line}", self.name);
        }
    }
}

impl Field {
    /// `locks` is what slots are made of.
    fn new(locks: &'static str) -> Self {
        let cluster = Cluster::durable().start().expect("a cluster");
        let database = cluster.database().expect("a database");
        let ground = Ground::new();
        for folder in ["plugins", "out"] {
            std::fs::create_dir(ground.path(folder)).expect("a directory");
        }
        let grant = "[grant.ledger]\nfiles = { out = \"out\" }\nenv = [\"LEDGER_HOST\"]\n";
        ground.write("warp.toml", format!("cache = {:?}\n{grant}", target().join("test-cache")));
        let manifest = format!(
            "format = 1\n[plugin]\nname = \"ledger\"\nversion = \"1.0.0\"\n{MANIFEST}\n\
             [capabilities]\nfiles = [{{ path = \"out\", mode = \"write\" }}]\nenv = [\"LEDGER_HOST\"]\n"
        );
        ground.write("ledger.toml", manifest);
        let guest = ledger_guest();
        ground.run(&["pack", guest.to_str().expect("UTF-8"), "ledger.toml", "-o", "plugins/ledger.wasm"]).good();
        let migrated = ground.command().env("WARP_DATABASE_URL", database.url()).args(["migrate", "--locks", locks]).output();
        assert!(migrated.is_ok_and(|ended| ended.status.success()), "the database is made");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let (store, witness) = runtime.block_on(async {
            // Under a name of its own, so that a test that ends the hosts' connections spares this one.
            let settings = ConnectSettings { application_name: "eyes".to_owned(), ..ConnectSettings::new(database.url()) };
            let store: Arc<dyn Store> = Arc::new(PostgresStore::open(OpenOptions::new(settings)).await.expect("opens"));
            let other = tokio::task::spawn_blocking(warp_test_servers::database).await.expect("a second database");
            (store, Witness::new(other).await)
        });
        Field { ground, runtime, store, witness, database, cluster, locks, started: 0 }
    }

    /// Starts a host that reaches its database at this URL.
    #[track_caller]
    fn host_at(&mut self, url: &str) -> Named {
        self.started += 1;
        let name = format!("host-{}", self.started);
        let mut command: Command = self.ground.command();
        command.env("WARP_DATABASE_URL", url).env("LEDGER_HOST", &name);
        Named { host: Host::spawn(command, &["--workers", "8", "--lease", "6s", "--database-pool", "3"], "ledger.wasm"), name }
    }

    #[track_caller]
    fn host(&mut self) -> Named {
        let url = self.database.url().to_owned();
        self.host_at(&url)
    }

    #[track_caller]
    fn three_hosts(&mut self) -> Vec<Named> {
        (0..3).map(|_| self.host()).collect()
    }

    /// Begins to enqueue and to change the limit. Ends with [`Load::stop`].
    fn load(&self) -> Load {
        let seed = wall();
        eprintln!("seed of the load: {seed}");
        let shared = Arc::new(Shared::default());
        let enqueuing = self.runtime.spawn(enqueue(self.store.clone(), shared.clone(), Draw(seed)));
        let limiting = self.runtime.spawn(change_limits(self.store.clone(), shared.clone()));
        Load { shared, tasks: vec![enqueuing, limiting] }
    }

    /// Enqueues jobs with long attempts, each under a mutex of its own, so that some are in the middle of their work when a
    /// fault meets them, and far from their end.
    fn long_jobs(&self) -> Enqueued {
        let keys = (0..12).map(|key| format!("long:{key}"));
        let jobs: Vec<_> = keys.map(|key| (watch("alone", &key, 4_000), key)).collect();
        self.runtime.block_on(async { again!(self.store.enqueue(jobs.iter().map(|(job, _)| job.clone()).collect(), now())) });
        Enqueued {
            rules: jobs.iter().map(|(_, key)| Rule::fixed(key.clone(), 1)).collect(),
            jobs: jobs.into_iter().map(|(job, key)| (job.id, key)).collect(),
        }
    }

    /// On which host each start of these jobs was.
    fn starts_of(&self, jobs: &[(JobId, String)]) -> Vec<String> {
        let ids: Vec<_> = jobs.iter().map(|(id, _)| id.to_string()).collect();
        let host = |entry: std::io::Result<std::fs::DirEntry>| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
            let is_start = name.ends_with(".start") && ids.iter().any(|id| name.starts_with(id));
            // Made, and not written yet: the next look finds it.
            is_start.then(|| std::fs::read_to_string(&path).ok()?.split(' ').nth(2).map(str::to_owned)).flatten()
        };
        std::fs::read_dir(self.ground.path("out")).expect("a folder").filter_map(host).collect()
    }

    /// Waits until some jobs have ended, so that the fault meets a system at work.
    #[track_caller]
    fn until_ended(&self, count: u64) {
        self.runtime.block_on(async {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let overview = again!(self.store.overview());
                if ended(&overview) >= count {
                    return;
                }
                assert!(Instant::now() < deadline, "{count} jobs do not end: {overview:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }

    /// The number of jobs that have ended by now.
    fn ended(&self) -> u64 {
        self.runtime.block_on(async { ended(&again!(self.store.overview())) })
    }

    /// Ends the load, waits until everything that was enqueued is done, stops the hosts, and fills the ledger.
    #[track_caller]
    fn finish(&mut self, load: Load, hosts: Vec<Named>, more: Enqueued) -> Sum {
        let Enqueued { mut jobs, mut rules } = load.stop(self);
        jobs.extend(more.jobs);
        rules.extend(more.rules);
        self.until_ended(jobs.len() as u64);
        let (mut numbers, mut losses) = (Vec::new(), Vec::new());
        for mut named in hosts {
            named.print_troubles();
            assert!(named.host.is_alive(), "{} has ended by itself", named.name);
            losses.push((named.name, named.host.lines(|line| line.contains("\"the lock session is gone"))));
            numbers.push(named.host.stop());
        }
        let of = |name: &str| numbers.iter().map(|of| of[name].as_i64().expect("a number")).sum::<i64>();
        let (store, witness, out, locks) = (&self.store, &mut self.witness, self.ground.path("out"), self.locks);
        let attempts = self.runtime.block_on(async {
            let mut verdicts = Vec::new();
            for (id, key) in &jobs {
                let job = again!(store.job(*id, now())).expect("the job is there");
                verdicts.push(Verdict {
                    job: id.to_string(),
                    key: key.clone(),
                    state: format!("{:?}", job.summary.state),
                    attempts: job.summary.attempts,
                    accepted: job.result.and_then(|result| result.parse().ok()),
                });
            }
            witness.load(&out).await;
            witness.verdicts(&verdicts).await;
            witness.rules(&rules).await;
            for (host, log) in &losses {
                witness.losses(host, log).await;
            }
            if locks == "session" {
                // Slots are handed on inside a host for a second at most on what it has read of the limit.
                witness.execute("INSERT INTO lag VALUES (1500000000)").await;
            }
            witness.number("SELECT count(*) FROM attempt").await
        });
        let sum = Sum { rescued: of("rescued") };
        eprintln!(
            "{} jobs, {attempts} attempts, {} changes of the limit, {} late ends refused, {} runs rescued, {} handed back unknown",
            jobs.len(),
            rules.len(),
            of("late"),
            sum.rescued,
            of("unknown_rows")
        );
        sum
    }

    /// Nothing that no fault may bring about has happened.
    #[track_caller]
    fn assert_promises(&mut self) {
        self.runtime.block_on(self.witness.assert_promises());
        let crowds = self.runtime.block_on(self.witness.rows("(SELECT key, max(count) AS most FROM crowd GROUP BY key ORDER BY key)"));
        eprintln!("most at once: {}", crowds.join(" "));
    }

    /// A number out of the ledger.
    #[track_caller]
    fn number(&mut self, sql: &str) -> i64 {
        self.runtime.block_on(self.witness.number(sql))
    }

    /// Prints how soon the hosts were as fast as before.
    fn print_recovery(&mut self, what: &str, at: u64) {
        let (before, after) = self.runtime.block_on(self.witness.recovery(at));
        match after {
            Some(after) => eprintln!("{what}: 95 % of {before:.0} jobs/s again after {after:.1} s"),
            None => eprintln!("{what}: {before:.0} jobs/s were not reached again before the end"),
        }
    }
}

/// What the hosts say about themselves, added up.
struct Sum {
    /// Runs given back from hosts that were taken for dead.
    rescued: i64,
}

/// What the load and the test have in common.
#[derive(Default)]
struct Shared {
    over: AtomicBool,
    /// Written by the task that enqueues: each job with its key.
    jobs: Mutex<Vec<(JobId, String)>>,
    /// Written by the task that changes the limit.
    rules: Mutex<Vec<Rule>>,
}

struct Load {
    shared: Arc<Shared>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// What was asked for.
#[derive(Default)]
struct Enqueued {
    jobs: Vec<(JobId, String)>,
    rules: Vec<Rule>,
}

impl Load {
    fn stop(self, field: &Field) -> Enqueued {
        self.shared.over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            field.runtime.block_on(task).expect("the load");
        }
        let mut rules: Vec<_> = (0..KEYS).map(|key| Rule::fixed(format!("alone:k{key}"), 1)).collect();
        rules.push(Rule::fixed("three:k".to_owned(), 3));
        rules.push(Rule::fixed(CHANGING.to_owned(), DECLARED));
        rules.append(&mut self.shared.rules.lock().expect("no panic"));
        Enqueued { jobs: std::mem::take(&mut *self.shared.jobs.lock().expect("no panic")), rules }
    }
}

/// Keeps a backlog. A batch whose answer was lost is sent again with the same ids.
async fn enqueue(store: Arc<dyn Store>, shared: Arc<Shared>, mut draw: Draw) {
    let mut asked = 0;
    while !shared.over.load(Ordering::Relaxed) {
        let done = ended(&again!(store.overview())) as usize;
        let batch: Vec<_> = (asked..done + BACKLOG).map(|_| job(&mut draw)).collect();
        asked += batch.len();
        if !batch.is_empty() {
            let jobs: Vec<_> = batch.iter().map(|(job, _)| job.clone()).collect();
            again!(store.enqueue(jobs.clone(), now()));
            let named = batch.into_iter().map(|(job, key)| (job.id, key));
            shared.jobs.lock().expect("no panic").extend(named);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A job under one of the three limits, and its key.
fn job(draw: &mut Draw) -> (NewJob, String) {
    let (contract, key) = match draw.below(4) {
        0..2 => ("alone", format!("alone:k{}", draw.below(KEYS as u64))),
        2 => ("three", "three:k".to_owned()),
        _ => ("limited", CHANGING.to_owned()),
    };
    (watch(contract, &key, 10 + draw.below(40)), key)
}

/// A job whose attempt watches for so many milliseconds.
fn watch(contract: &str, key: &str, ms: u64) -> NewJob {
    NewJob {
        id: JobId(uuid::Uuid::now_v7().as_u128()),
        contract: contract.to_owned(),
        queue: "default".to_owned(),
        payload: format!(r#"{{"does":"watch","ms":"{ms}","key":"{key}"}}"#),
        metadata: Vec::new(),
        trace_parent: None,
        due: None,
        explicit: Declared::default(),
        unique_key: None,
    }
}

async fn change_limits(store: Arc<dyn Store>, shared: Arc<Shared>) {
    for slots in LIMITS.into_iter().cycle() {
        if shared.over.load(Ordering::Relaxed) {
            return;
        }
        let since = wall();
        let seen = again!(store.set_limit(CHANGING, slots, "the test", now()));
        let held = seen.holders.into_iter().map(|holder| holder.job.to_string()).collect();
        shared.rules.lock().expect("no panic").push(Rule { key: CHANGING.to_owned(), slots, since, until: wall(), held });
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
}
