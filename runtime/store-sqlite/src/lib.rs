//! The store of jobs on SQLite.
//!
//! One file, any number of processes. In each process one task owns the writing connection ([`writer`]) and a few
//! readers answer questions. The file's write lock is the lock of every key: a command decides and writes under it
//! and nothing it has counted can change before its commit.
//!
//! What must stay true:
//! - a command is one transaction to its end, whoever still listens (slots.md C2);
//! - the write lock is taken with the first statement, never by upgrading a read (A29);
//! - jobs without a key never touch the ledger's tables, and jobs that have ended are in no index that a claim
//!   reads;
//! - commits are durable: WAL with `synchronous=FULL`.
//!
//! What it deliberately does not do: decide. Policy, keys and slots are decided by `warp-domain`; this crate loads
//! what a decision needs and writes down what it came to.

mod bulk;
mod changes;
mod claim;
mod enqueue;
mod error;
mod exchange;
mod hosts;
mod keys;
mod operator;
mod pause;
mod presence;
mod read;
mod rows;
mod schema;
mod settle;
mod shared_state;
mod upkeep;
mod work;
mod writer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{SqlitePool, SqlitePoolOptions};
use tokio::task::JoinHandle;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, RunNumber, UnixMillis};
use warp_store::{
    AdminLimit, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HostInfo, HostSeen, JobDetails, JobFilter, JobSummary, KeySeen,
    LogLine, NewJob, Overview, Pause, QueueSeen, RenewParams, Renewed, Rescued, Result, Retention, RunOutput, Served, SettleVerdict,
    Signals, StateVerdict, StateWrite, Store,
};

use crate::changes::Changes;
use crate::error::Fault;
use crate::presence::Presence;
use crate::writer::Writer;

pub use crate::schema::{MIGRATIONS, OpenOptions, SCHEMA_VERSION, migrate, schema_version};

/// Connections for questions. Pages and tables ask a few at a time; each costs a thread.
const READERS: u32 = 3;

/// An open database. Dropping it closes it after the commands that wait.
pub struct SqliteStore {
    writer: Writer,
    readers: SqlitePool,
    changes: Arc<Changes>,
    watcher: JoinHandle<()>,
    presence: Presence,
    path: PathBuf,
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl SqliteStore {
    /// Opens a database. The writer runs on the runtime that calls this.
    ///
    /// # Errors
    /// When the file cannot be opened, is no database of this program, or has another schema than this build knows.
    pub async fn open(options: OpenOptions) -> Result<Self> {
        let (conn, wakes) = schema::open(&options).await?;
        let changes = Arc::new(Changes::new(wakes));
        let watcher = tokio::spawn(changes::watch(options.path.clone(), changes.clone()));
        let writer = Writer::start(&options, conn, changes.clone());
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .idle_timeout(Duration::from_secs(60))
            .connect_lazy_with(schema::reader_options(&options.path));
        Ok(SqliteStore { writer, readers, changes, watcher, presence: Presence::new(&options.path), path: options.path })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a consistent copy to a file that must not exist yet, while others go on working.
    ///
    /// # Errors
    /// When the copy exists already or cannot be written.
    pub async fn backup(&self, to: &Path) -> Result<()> {
        schema::backup(&self.path, to).await
    }

    /// What the operating system knows of hosts.
    fn note_gone(&self, hosts: &mut [HostSeen]) {
        hosts.iter_mut().for_each(|seen| seen.gone = self.presence.is_gone(seen.host));
    }

    fn told<T>(&self, op: &'static str, answer: std::result::Result<T, Fault>) -> Result<T> {
        answer.map_err(|fault| fault.into_error(op, &self.path))
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn enqueue(&self, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>> {
        self.writer.run("enqueue jobs", move |work| Box::pin(enqueue::enqueue(work, jobs, now))).await
    }

    async fn register(&self, info: HostInfo) -> Result<HostId> {
        let host = self.writer.run("register a host", move |work| Box::pin(hosts::register(work, info))).await?;
        // Dropped before this line, the registration has no lock and is found dead by its lease.
        self.presence.announce(host);
        Ok(host)
    }

    async fn serve(&self, host: HostId, served: Vec<Served>) -> Result<()> {
        self.writer.run("publish what a host runs", move |work| Box::pin(hosts::serve(work, host, served))).await
    }

    async fn renew(&self, params: RenewParams) -> Result<Renewed> {
        let mut renewed = self.writer.run("renew a lease", move |work| Box::pin(hosts::renew(work, params))).await?;
        self.note_gone(&mut renewed.hosts);
        Ok(renewed)
    }

    async fn deregister(&self, host: HostId, now: UnixMillis) -> Result<()> {
        self.writer.run("deregister a host", move |work| Box::pin(hosts::deregister(work, host, now))).await?;
        self.presence.forget(host);
        Ok(())
    }

    async fn hosts(&self) -> Result<Vec<HostSeen>> {
        let mut hosts = self.told("list hosts", read::all_hosts(&self.readers).await)?;
        self.note_gone(&mut hosts);
        Ok(hosts)
    }

    async fn rescue(&self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued> {
        let rescued =
            self.writer.run("rescue a host's jobs", move |work| Box::pin(hosts::rescue(work, host, renewals, max_deaths, now))).await?;
        if self.presence.is_gone(host) {
            self.presence.forget(host);
        }
        Ok(rescued)
    }

    async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged> {
        self.writer.run("end and claim runs", move |work| Box::pin(exchange::exchange(work, params))).await
    }

    async fn append_output(&self, host: HostId, handle: JobHandle, token: ClaimToken, output: RunOutput) -> Result<SettleVerdict> {
        self.writer.run("store output", move |work| Box::pin(upkeep::append_output(work, host, handle, token, output))).await
    }

    async fn signals(&self, host: HostId) -> Result<Signals> {
        self.told("read signals", read::signals(&self.readers, host).await)
    }

    async fn expire_reservations(&self, patience: Duration, now: UnixMillis) -> Result<u32> {
        self.writer.run("expire reservations", move |work| Box::pin(upkeep::expire_reservations(work, patience, now))).await
    }

    async fn prune(&self, retention: Retention, max: u32, now: UnixMillis) -> Result<u32> {
        self.writer.run("prune ended jobs", move |work| Box::pin(upkeep::prune(work, retention, max, now))).await
    }

    async fn changed(&self) {
        self.changes.wait().await;
    }

    async fn state_get(&self, bucket: &str, key: &str) -> Result<Option<String>> {
        self.told("read state", read::state_get(&self.readers, bucket, key).await)
    }

    async fn state_apply(&self, host: HostId, handle: JobHandle, token: ClaimToken, write: StateWrite) -> Result<StateVerdict> {
        self.writer.run("write state", move |work| Box::pin(shared_state::write_now(work, host, handle, token, write))).await
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Vec<JobSummary>> {
        self.told("list jobs", read::jobs(&self.readers, filter).await)
    }

    async fn job(&self, id: JobId, now: UnixMillis) -> Result<Option<JobDetails>> {
        self.told("read a job", read::job(&self.readers, id, now).await)
    }

    async fn job_logs(&self, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>> {
        self.told("read a job's log", read::job_logs(&self.readers, id, run).await)
    }

    async fn cancel(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        let by = by.to_owned();
        self.writer.run("cancel a job", move |work| Box::pin(operator::cancel(work, id, by, now))).await
    }

    async fn requeue(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        let by = by.to_owned();
        self.writer.run("requeue a job", move |work| Box::pin(operator::requeue(work, id, by, now))).await
    }

    async fn delete(&self, id: JobId, now: UnixMillis) -> Result<CommandVerdict> {
        self.writer.run("delete a job", move |work| Box::pin(operator::delete(work, id, now))).await
    }

    async fn limits(&self) -> Result<Vec<AdminLimit>> {
        self.told("list limits", read::limits(&self.readers).await)
    }

    async fn set_limit(&self, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen> {
        let (key, by) = (key.to_owned(), by.to_owned());
        self.writer.run("set a limit", move |work| Box::pin(operator::set_limit(work, key, limit, by, now))).await
    }

    async fn remove_limit(&self, key: &str, now: UnixMillis) -> Result<bool> {
        let key = key.to_owned();
        self.writer.run("remove a limit", move |work| Box::pin(operator::remove_limit(work, key, now))).await
    }

    async fn keys(&self, max: u32) -> Result<Vec<KeySeen>> {
        self.told("list keys", read::keys(&self.readers, max).await)
    }

    async fn key(&self, key: &str) -> Result<Option<KeySeen>> {
        self.told("read a key", read::key(&self.readers, key).await)
    }

    async fn pause_queue(&self, queue: &str, by: &str, now: UnixMillis) -> Result<bool> {
        let (queue, by) = (queue.to_owned(), by.to_owned());
        self.writer.run("pause a queue", move |work| Box::pin(pause::pause_queue(work, queue, by, now))).await
    }

    async fn resume_queue(&self, queue: &str, now: UnixMillis) -> Result<bool> {
        let queue = queue.to_owned();
        self.writer.run("resume a queue", move |work| Box::pin(pause::resume_queue(work, queue, now))).await
    }

    async fn paused_queues(&self) -> Result<BTreeMap<String, Pause>> {
        self.told("list paused queues", read::all_paused_queues(&self.readers).await)
    }

    async fn pause_host(&self, host: HostId, by: &str, now: UnixMillis) -> Result<bool> {
        let by = by.to_owned();
        self.writer.run("pause a host", move |work| Box::pin(pause::pause_host(work, host, by, now))).await
    }

    async fn resume_host(&self, host: HostId, now: UnixMillis) -> Result<bool> {
        self.writer.run("resume a host", move |work| Box::pin(pause::resume_host(work, host, now))).await
    }

    async fn overview(&self) -> Result<Overview> {
        self.told("read the overview", read::overview(&self.readers).await)
    }

    async fn queues(&self, max: u32) -> Result<Vec<QueueSeen>> {
        self.told("read the queues", read::queues(&self.readers, max).await)
    }

    async fn served_contracts(&self) -> Result<Vec<String>> {
        self.told("list served contracts", read::served_contracts(&self.readers).await)
    }
}

/// The queries that must not slow down with the number of ended rows: name, text, and the indexes they rely on. For
/// the test of their plans.
#[doc(hidden)]
#[must_use]
pub fn hot_queries() -> Vec<(&'static str, &'static str, &'static [&'static str])> {
    vec![
        ("claim of ready rows", claim::READY, &["state_ready (lane=?)"]),
        ("claim of reserved rows", claim::RESERVED, &["state_reserved (lane=?)"]),
        ("activation", exchange::ACTIVATE, &["state_scheduled"]),
        ("heads of lines", keys::KEYS, &["state_parked", "SEARCH t USING PRIMARY KEY", "SEARCH b USING PRIMARY KEY"]),
        ("rest of a line", keys::REST_OF_LINE, &["state_parked"]),
        ("oldest candidate", claim::OLDEST, &["state_ready (lane=?)", "state_reserved (lane=?)"]),
        ("local waiters", claim::PARKED, &["SEARCH s USING INTEGER PRIMARY KEY", "SEARCH j USING INTEGER PRIMARY KEY"]),
        ("rescue", hosts::RUNNING_OF, &["state_running"]),
        ("unclaimed reservations", upkeep::STALE, &["state_reserved", "state_woken"]),
        ("ends of runs", settle::SETTLED_ROWS, &["SEARCH s USING INTEGER PRIMARY KEY"]),
    ]
}
