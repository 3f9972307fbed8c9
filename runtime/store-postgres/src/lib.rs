//! The store of jobs on PostgreSQL: any number of hosts on one database.
//!
//! What must stay true:
//! - a command that changes anything is one statement, mostly a call of a function of the schema, and nothing waits
//!   for a client in the middle of a transaction (slots.md C2);
//! - a statement that has been sent runs to its end, whoever still listens;
//! - with the ledger nothing needs a session, and under session locks nothing but a host does: no lock, setting or
//!   prepared statement outlives a statement, so the store works through a transaction-mode pooler.
//!
//! What it deliberately does not do: render keys or read payloads in SQL.

mod announce;
mod call;
mod clock;
mod connect;
mod doctor;
mod encryption;
mod enqueue;
mod error;
mod exchange;
mod hosts;
mod intern;
mod listen;
mod locks;
mod lookahead;
mod observe;
mod operator;
mod orphans;
mod pooler;
mod read;
mod rows;
mod schema;
mod session;
mod settings;
mod shared_state;
mod upkeep;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, RunNumber, UnixMillis};
use warp_store::{
    AdminLimit, CancelSignal, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HostInfo, HostSeen, JobDetails, JobFilter,
    JobSummary, KeySeen, LogLine, NewJob, Overview, Pause, Polling, QueueSeen, RenewParams, Renewed, Rescued, Result, Retention, RunOutput,
    Served, SettleVerdict, Signals, StateVerdict, StateWrite, Store, StoreErrorKind,
};

use crate::announce::Announcer;
use crate::call::Db;
use crate::connect::Connector;
use crate::enqueue::Enqueued;
use crate::error::Fault;
use crate::exchange::Exchange;
use crate::hosts::Sent;
use crate::intern::Interned;
use crate::listen::Listener;
use crate::orphans::Orphans;
use crate::session::Sessions;

pub use crate::clock::Clock;
pub use crate::connect::PoolState;
pub use crate::doctor::{BESIDE_POOL, Finding, Level, Report, doctor};
pub use crate::observe::Observer;
pub use crate::pooler::{Pooling, pooling};
pub use crate::schema::{
    LockKind, LocksInUse, LocksSeen, MIGRATIONS, SCHEMA_VERSION, locks, migrate, migration_sql, schema_version, set_locks,
};
pub use crate::settings::{ConnectSettings, StatementMode};

/// The poll while announcements are heard: for what was due and nobody spoke of, such as a host that died.
const HEARING: Polling = Polling::every(Duration::from_secs(10));
/// The poll without them. The longest pause is what an idle host may cost; the shortest is what a busy one waits.
const NOT_HEARING: Polling = Polling { shortest: Duration::from_millis(100), longest: Duration::from_secs(3) };
/// Exchanges of one host that are worth having under way at once: while one waits for the disk, the server works on the
/// others.
const EXCHANGES: u32 = 3;
/// How long a renewal waits for exchanges whose callers have gone, so that it sees what they claimed. Longer it must not:
/// a lease must not lapse behind them.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(3);

/// How to open a database.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// How to reach it, and the name of its schema.
    pub connect: ConnectSettings,
    /// The kind of slots that this host is configured for; another kind in the database is refused. `None` takes what
    /// is there.
    pub locks: Option<LockKind>,
    /// Whether an older (or empty) schema is brought up to date. Without it such a database is refused.
    pub migrate: bool,
    /// Whose clock decides what is due.
    pub clock: Clock,
    /// Whether hosts work through this store. Without it nothing is listened to and no lock session is opened, so that
    /// commands need no session of the server, whatever slots are made of; `register` and `exchange` are refused.
    pub hosting: bool,
}

impl OpenOptions {
    /// A database that must be up to date, by its server's clock, for a host.
    pub fn new(connect: ConnectSettings) -> Self {
        OpenOptions { connect, locks: None, migrate: false, clock: Clock::Server, hosting: true }
    }
}

/// An open database. Dropping it closes its connections after the statements that are under way.
pub struct PostgresStore {
    core: Arc<Core>,
    listener: Listener,
    sent: Sent,
    orphans: Orphans,
    locks: LockKind,
    hosting: bool,
    /// The lock sessions of this process's hosts; nothing where slots are the ledger's, or nobody works here.
    sessions: Option<Sessions>,
    /// The latest instant that a caller has named, for the one command that names none; see [`Clock::Caller`].
    latest: AtomicI64,
}

/// What a statement needs. Exchanges that outlive their callers hold it too.
struct Core {
    db: Db,
    interned: Interned,
    clock: Clock,
    announcer: Announcer,
}

impl PostgresStore {
    /// Opens a database. Statements, and the connection that listens, run on the runtime that calls this. Dropped, it
    /// leaves nothing behind, or a migration as a whole.
    ///
    /// # Errors
    /// When the database cannot be reached, has another schema than this build knows, or another kind of slots.
    pub async fn open(options: OpenOptions) -> Result<Self> {
        let OpenOptions { connect, locks, migrate, clock, hosting } = options;
        if migrate {
            schema::migrate(&connect, locks, false).await?;
        }
        let opened = async {
            let db = Db::open(&connect).await?;
            let locks = schema::check(&db, locks).await?;
            let listener = if hosting { Listener::start(&connect, db.pooling())? } else { Listener::deaf() };
            Ok((db, locks, listener))
        };
        let (db, locks, listener) = opened.await.map_err(|fault: Fault| fault.into_error("open the database"))?;
        let core = Arc::new(Core { announcer: Announcer::new(db.clone()), db, interned: Interned::default(), clock });
        let sessions = match locks {
            LockKind::Session if hosting => {
                let tested = async {
                    let connector = Connector::new(&connect)?;
                    locks::check(&connector).await.map(|()| connector)
                };
                let connector = tested.await.map_err(|fault: Fault| fault.into_error("open the database"))?;
                Some(Sessions::new(core.clone(), connector, listener.changes().clone()))
            }
            LockKind::Session | LockKind::Ledger => None,
        };
        Ok(PostgresStore {
            core,
            listener,
            orphans: Orphans::default(),
            sent: Sent::default(),
            locks,
            hosting,
            sessions,
            latest: AtomicI64::new(0),
        })
    }

    /// The address for people, without a password.
    #[must_use]
    pub fn name(&self) -> &str {
        self.core.db.name()
    }

    /// What this database's slots are made of.
    #[must_use]
    pub fn locks(&self) -> LockKind {
        self.locks
    }

    /// How many connections of the pool are open; the one that listens and the one for locks are beside it.
    #[must_use]
    pub fn pool_state(&self) -> PoolState {
        self.core.db.pool_state()
    }

    /// Whether other processes' announcements are heard at the moment; otherwise polling finds the work.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.listener.changes().is_listening()
    }

    /// A10: under session locks the wakes of a limit's change are chosen by a statement after its commit.
    async fn limit_changed(&self, key: &str, now: UnixMillis) -> Result<()> {
        if self.locks == LockKind::Ledger {
            return Ok(());
        }
        self.tell("wake for a limit", Some(now), operator::limit_changed(&self.core.db, self.core.clock, key, now)).await
    }

    /// Only a hosting store has what a run needs: under session locks a claim of another would run without its slots.
    fn check_hosting(&self, op: &'static str) -> Result<()> {
        const WHY: &str = "this store was opened for commands; a host opens one with `hosting`";
        if self.hosting { Ok(()) } else { Err(Fault::said(StoreErrorKind::Internal, WHY).into_error(op)) }
    }

    /// What a host has heard. Whatever call it was that found its registration gone, nothing of it takes a slot again (C3).
    fn of_host<T>(&self, host: HostId, heard: Result<T>) -> Result<T> {
        heard.inspect_err(|error| {
            if let (StoreErrorKind::HostLost, Some(sessions)) = (error.kind(), &self.sessions) {
                sessions.lapse(host);
            }
        })
    }

    /// A question, or a command that makes nothing runnable.
    async fn ask<T>(&self, op: &'static str, asked: impl Future<Output = std::result::Result<T, Fault>>) -> Result<T> {
        asked.await.map_err(|fault| {
            self.core.interned.note(&fault);
            fault.into_error(op)
        })
    }

    /// A command after which somebody in this process may have to look, at this instant. The server tells the others.
    async fn tell<T>(
        &self,
        op: &'static str,
        now: Option<UnixMillis>,
        told: impl Future<Output = std::result::Result<T, Fault>>,
    ) -> Result<T> {
        if let Some(now) = now {
            self.latest.fetch_max(now.0, Ordering::Relaxed);
        }
        let answer = self.ask(op, told).await;
        if !self.is_listening() {
            self.listener.changes().announce();
        }
        answer
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn enqueue(&self, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>> {
        let core = self.core.clone();
        // On a task of its own, so that all of a long list is written, and announced, whoever still listens.
        let written = orphans::detached(async move { enqueue::enqueue(&core, jobs, now).await });
        let Enqueued { verdicts, unsaid } = self.tell("enqueue jobs", Some(now), written).await?;
        if unsaid {
            // Others hear of it in a moment; whoever waits in this process need not.
            self.listener.changes().announce();
        }
        Ok(verdicts)
    }

    async fn flush(&self) {
        self.core.announcer.flush().await;
    }

    async fn register(&self, info: HostInfo) -> Result<HostId> {
        self.check_hosting("register a host")?;
        let now = info.now;
        let registered = hosts::register(&self.core.db, self.core.clock, self.locks, info);
        self.tell("register a host", Some(now), registered).await.inspect(|host| {
            self.sent.begin(*host);
            if let Some(sessions) = &self.sessions {
                sessions.begin(*host);
            }
        })
    }

    async fn serve(&self, host: HostId, served: Vec<Served>) -> Result<()> {
        let latest = UnixMillis(self.latest.load(Ordering::Relaxed));
        let published = hosts::serve(&self.core.db, &self.sent, host, served, self.core.clock.tell(latest));
        self.of_host(host, self.tell("publish what a host runs", None, published).await)
    }

    async fn renew(&self, params: RenewParams) -> Result<Renewed> {
        self.orphans.wait(ORPHAN_PATIENCE).await;
        let Some(sessions) = &self.sessions else {
            return self.tell("renew a lease", Some(params.now), hosts::renew(&self.core.db, self.core.clock, &self.sent, &params)).await;
        };
        // Rows that wait for a slot are this host's too, and no worker knows them.
        let session = sessions.host(params.host);
        let known = params.known.clone();
        let waiting = match &session {
            Some(session) => session.unstarted().await,
            None => Vec::new(),
        };
        let params = RenewParams { known: [params.known, waiting].concat(), ..params };
        let renewed = self.tell("renew a lease", Some(params.now), hosts::renew(&self.core.db, self.core.clock, &self.sent, &params)).await;
        let mut renewed = self.of_host(params.host, renewed)?;
        if let Some(session) = session {
            session.compare(&known, &renewed.lost).await;
        }
        renewed.lost.retain(|run| known.contains(run));
        Ok(renewed)
    }

    async fn deregister(&self, host: HostId, now: UnixMillis) -> Result<()> {
        self.sent.end(host);
        let (core, session) = (self.core.clone(), self.sessions.as_ref().and_then(|sessions| sessions.take(host)));
        // On a task of its own: what the host owes for slots is written, whoever still listens.
        let ended = orphans::detached(async move {
            // Its locks first: whoever claims what it hands back finds them free.
            if let Some(session) = session {
                session.close().await;
            }
            hosts::deregister(&core.db, core.clock, host, now).await
        });
        self.tell("deregister a host", Some(now), ended).await
    }

    async fn hosts(&self) -> Result<Vec<HostSeen>> {
        self.ask("list hosts", hosts::hosts(&self.core.db)).await
    }

    async fn rescue(&self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued> {
        let rescued = hosts::rescue(&self.core.db, self.core.clock, host, renewals, max_deaths, now);
        self.tell("rescue a host's jobs", Some(now), rescued).await
    }

    async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged> {
        self.check_hosting("end and claim runs")?;
        self.latest.fetch_max(params.now.0, Ordering::Relaxed);
        let core = self.core.clone();
        let host = params.host;
        let session = self.sessions.as_ref().map(|sessions| sessions.begin(host));
        let exchanged = self.orphans.run(async move {
            if let Some(session) = session {
                return session.exchange(params).await;
            }
            let Core { db, interned, clock, announcer: _ } = &*core;
            Exchange { db, interned, clock: *clock, ride: None }.run(params).await
        });
        self.of_host(host, self.tell("end and claim runs", None, exchanged).await)
    }

    async fn append_output(&self, host: HostId, handle: JobHandle, token: ClaimToken, output: RunOutput) -> Result<SettleVerdict> {
        self.ask("store output", hosts::append_output(&self.core.db, host, handle, token, output)).await
    }

    async fn signals(&self, host: HostId) -> Result<Signals> {
        self.ask("read signals", read::signals(&self.core.db, host)).await
    }

    async fn expire_reservations(&self, patience: Duration, now: UnixMillis) -> Result<u32> {
        let expired = upkeep::expire_reservations(&self.core.db, self.core.clock, patience, now);
        self.tell("expire reservations", Some(now), expired).await
    }

    async fn prune(&self, retention: Retention, max: u32, now: UnixMillis) -> Result<u32> {
        self.ask("prune ended jobs", upkeep::prune(&self.core.db, self.core.clock, retention, max, now)).await
    }

    async fn changed(&self) {
        self.listener.changes().wait().await;
    }

    fn polling(&self) -> Polling {
        if self.is_listening() { HEARING } else { NOT_HEARING }
    }

    fn concurrent_exchanges(&self) -> u32 {
        // A host's lock session takes one call at a time, and what rides in an exchange is owed once.
        if self.sessions.is_some() { 1 } else { EXCHANGES }
    }

    async fn slots_lost(&self, host: HostId) -> Vec<CancelSignal> {
        match &self.sessions {
            Some(sessions) => sessions.slots_lost(host).await,
            None => std::future::pending().await,
        }
    }

    async fn state_get(&self, bucket: &str, key: &str) -> Result<Option<String>> {
        self.ask("read state", shared_state::get_value(&self.core.db, bucket, key)).await
    }

    async fn state_apply(&self, host: HostId, handle: JobHandle, token: ClaimToken, write: StateWrite) -> Result<StateVerdict> {
        self.ask("write state", shared_state::write_now(&self.core.db, host, handle, token, &write)).await
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Vec<JobSummary>> {
        self.ask("list jobs", read::jobs(&self.core.db, filter)).await
    }

    async fn job(&self, id: JobId, _now: UnixMillis) -> Result<Option<JobDetails>> {
        self.ask("read a job", read::job(&self.core.db, id)).await
    }

    async fn job_logs(&self, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>> {
        self.ask("read a job's log", read::job_logs(&self.core.db, id, run)).await
    }

    async fn cancel(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        self.tell("cancel a job", Some(now), operator::cancel(&self.core.db, self.core.clock, id, by, now)).await
    }

    async fn requeue(&self, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        self.tell("requeue a job", Some(now), operator::requeue(&self.core.db, self.core.clock, id, by, now)).await
    }

    async fn delete(&self, id: JobId, now: UnixMillis) -> Result<CommandVerdict> {
        self.tell("delete a job", Some(now), operator::delete(&self.core.db, self.core.clock, id, now)).await
    }

    async fn limits(&self) -> Result<Vec<AdminLimit>> {
        self.ask("list limits", read::limits(&self.core.db)).await
    }

    async fn set_limit(&self, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen> {
        let seen = self.tell("set a limit", Some(now), operator::set_limit(&self.core.db, self.core.clock, key, limit, by, now)).await?;
        self.limit_changed(key, now).await?;
        Ok(seen)
    }

    async fn remove_limit(&self, key: &str, now: UnixMillis) -> Result<bool> {
        let was_there = self.tell("remove a limit", Some(now), operator::remove_limit(&self.core.db, self.core.clock, key, now)).await?;
        if was_there {
            self.limit_changed(key, now).await?;
        }
        Ok(was_there)
    }

    async fn keys(&self, max: u32) -> Result<Vec<KeySeen>> {
        self.ask("list keys", read::keys(&self.core.db, max)).await
    }

    async fn key(&self, key: &str) -> Result<Option<KeySeen>> {
        self.ask("read a key", read::key(&self.core.db, key)).await
    }

    async fn pause_queue(&self, queue: &str, by: &str, now: UnixMillis) -> Result<bool> {
        self.tell("pause a queue", Some(now), operator::pause_queue(&self.core.db, self.core.clock, queue, by, now)).await
    }

    async fn resume_queue(&self, queue: &str, now: UnixMillis) -> Result<bool> {
        self.tell("resume a queue", Some(now), operator::resume_queue(&self.core.db, self.core.clock, queue, now)).await
    }

    async fn paused_queues(&self) -> Result<BTreeMap<String, Pause>> {
        self.ask("list paused queues", read::paused_queues(&self.core.db)).await
    }

    async fn pause_host(&self, host: HostId, by: &str, now: UnixMillis) -> Result<bool> {
        self.tell("pause a host", Some(now), operator::pause_host(&self.core.db, self.core.clock, host, Some(by), now)).await
    }

    async fn resume_host(&self, host: HostId, now: UnixMillis) -> Result<bool> {
        self.tell("resume a host", Some(now), operator::pause_host(&self.core.db, self.core.clock, host, None, now)).await
    }

    async fn overview(&self) -> Result<Overview> {
        self.ask("read the overview", read::overview(&self.core.db)).await
    }

    async fn queues(&self, max: u32) -> Result<Vec<QueueSeen>> {
        self.ask("read the queues", read::queues(&self.core.db, max)).await
    }

    async fn served_contracts(&self) -> Result<Vec<String>> {
        self.ask("list served contracts", read::served_contracts(&self.core.db)).await
    }
}

/// The connection layer by itself, for tests of poolers and failures.
#[doc(hidden)]
pub mod bare {
    pub use crate::call::{Arg, Db, Sql, Texts, get, get_id};
    pub use crate::error::Fault;
    pub use crate::listen::{Changes, Listener};
}
