//! Connections: making one, and the pool of those that work uses.
//!
//! The pool is the crate's own because the driver's keeps one set of options for all its connections, and here every
//! new one asks for its password; and because it must be known of each fault whether a statement had been sent.
//!
//! What must stay true:
//! - a connection is handed out to one statement at a time and comes back only after that statement's end was read;
//! - at most `pool` statements run at once, and one more that is urgent; no more connections than that ever exist;
//! - what has been idle for a second is asked for a sign of life before a statement is sent on it, so that a restarted
//!   server is noticed while nothing has been sent;
//! - idle connections are given back to the server.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use warp_store::StoreErrorKind;

use crate::encryption;
use crate::error::{Fault, Phase};
use crate::settings::{ConnectSettings, Target};

/// How long a connection may have been idle to be trusted without a sign of life.
const TRUSTED: Duration = Duration::from_secs(1);
/// How long the sign of life may take, if a new connection may not take less. It is no statement, only a round trip.
const PING_PATIENCE: Duration = Duration::from_secs(3);
/// Even a busy connection is replaced after so long: a backend's caches only grow, and a new one asks for the password.
const LIFETIME: Duration = Duration::from_secs(30 * 60);
/// How long closing may wait for the network.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// Makes connections to one address.
#[derive(Clone)]
pub(crate) struct Connector {
    target: Target,
    patience: Duration,
}

impl Connector {
    /// For the settings' own address.
    pub(crate) fn new(settings: &ConnectSettings) -> Result<Self, Fault> {
        Self::to(settings, &settings.url)
    }

    /// For LISTEN: the settings' `listen_url`, or else its own address.
    pub(crate) fn for_listen(settings: &ConnectSettings) -> Result<Self, Fault> {
        Self::to(settings, settings.listen_url.as_ref().unwrap_or(&settings.url))
    }

    fn to(settings: &ConnectSettings, url: &str) -> Result<Self, Fault> {
        Ok(Connector { target: Target::new(settings, url)?, patience: settings.connect_timeout })
    }

    /// The address for people, without a password.
    pub(crate) fn name(&self) -> &str {
        &self.target.name
    }

    /// Whether nothing leaves this machine.
    pub(crate) fn is_local(&self) -> bool {
        self.target.is_local()
    }

    /// The longest time to get a connection.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// The driver's options for one new connection, with the password of this moment.
    pub(crate) async fn options(&self, suffix: &str) -> Result<PgConnectOptions, Fault> {
        self.target.options(suffix).await
    }

    /// Makes a connection, with the password of this moment. `suffix` is appended to the application's name. Takes at
    /// most the connect time-out. Dropped, it leaves nothing behind: the server sees a client that went away.
    pub(crate) async fn connect(&self, suffix: &str) -> Result<PgConnection, Fault> {
        let making = async {
            let options = self.target.options(suffix).await?;
            match options.connect().await {
                Ok(conn) => Ok(conn),
                Err(error) => Err(self.refused(&error).await),
            }
        };
        match tokio::time::timeout(self.patience, making).await {
            Ok(made) => made,
            Err(_) => Err(Fault::said(
                StoreErrorKind::Unavailable,
                format!("{} gave no connection in {:?}; check address, port and network", self.name(), self.patience),
            )),
        }
    }

    /// Why no connection was made. A file that could not be read is not named by the driver.
    async fn refused(&self, error: &sqlx::Error) -> Fault {
        let of_a_file = matches!(error, sqlx::Error::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::IsADirectory));
        if of_a_file && let Some(why) = encryption::unreadable(self.target.files()).await {
            return Fault::said(StoreErrorKind::Unavailable, why);
        }
        Fault::from_driver(error, Phase::Connecting, self.name())
    }

    /// Changes settings of a session. Simple statements in one message.
    pub(crate) async fn set_up(&self, conn: &mut PgConnection, setup: &str) -> Result<(), Fault> {
        let done = tokio::time::timeout(self.patience, sqlx::raw_sql(AssertSqlSafe(setup)).execute(conn)).await;
        done.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(|error| Fault::from_driver(&error, Phase::Connecting, self.name()))?;
        Ok(())
    }
}

/// Closes a connection in good form, or just drops it when that takes long.
pub(crate) async fn close(conn: PgConnection) {
    // Either way the connection is gone afterwards.
    let _ = tokio::time::timeout(CLOSE_PATIENCE, conn.close()).await;
}

/// How many connections a pool has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolState {
    /// With a statement under way, or waiting to be opened for one.
    pub busy: u32,
    /// Open, and no statement needs them.
    pub idle: u32,
    /// How many there may be, the one for what is urgent left out.
    pub most: u32,
}

/// The connections that work uses.
pub(crate) struct Pool {
    connector: Connector,
    /// Sent once on every new connection, where it has a session.
    session_setup: Option<String>,
    work: Arc<Semaphore>,
    urgent: Arc<Semaphore>,
    size: u32,
    idle_timeout: Duration,
    /// The one used last is on top. Locked for a push or a pop only.
    idle: Mutex<Vec<Idle>>,
}

struct Idle {
    conn: PgConnection,
    born: Instant,
    since: Instant,
}

/// A connection for one statement. Dropped without [`Pool::give_back`], the connection is closed.
pub(crate) struct Lease {
    pub(crate) conn: PgConnection,
    born: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Pool {
    /// A pool that begins with `first`. The task that closes idle connections runs on `runtime` until the pool is dropped.
    pub(crate) fn new(
        connector: Connector,
        (size, idle_timeout): (u32, Duration),
        session_setup: Option<String>,
        first: Vec<PgConnection>,
        runtime: &Handle,
    ) -> Arc<Self> {
        let now = Instant::now();
        let size = size.max(1);
        let pool = Arc::new(Pool {
            connector,
            session_setup,
            work: Arc::new(Semaphore::new(size as usize)),
            urgent: Arc::new(Semaphore::new(1)),
            size,
            idle_timeout,
            idle: Mutex::new(first.into_iter().take(size as usize).map(|conn| Idle { conn, born: now, since: now }).collect()),
        });
        runtime.spawn(close_idle(Arc::downgrade(&pool), idle_timeout / 4));
        pool
    }

    /// The address for people.
    pub(crate) fn name(&self) -> &str {
        self.connector.name()
    }

    /// How many are open. Three looks one after another: sums may be off by what happened between them.
    pub(crate) fn state(&self) -> PoolState {
        let free = |permits: &Semaphore| u32::try_from(permits.available_permits()).unwrap_or(u32::MAX);
        let busy = self.size.saturating_sub(free(&self.work)) + 1u32.saturating_sub(free(&self.urgent));
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).len();
        PoolState { busy, idle: u32::try_from(idle).unwrap_or(u32::MAX), most: self.size }
    }

    /// A connection, at most after the connect time-out for its turn and the same again for a new one. An urgent
    /// statement does not wait behind a full pool. Dropped, it leaves nothing behind.
    pub(crate) async fn lease(&self, urgent: bool) -> Result<Lease, Fault> {
        let permit = self.permit(urgent).await?;
        let patience = PING_PATIENCE.min(self.connector.patience);
        while let Some(Idle { mut conn, born, since }) = self.pop() {
            if since.elapsed() < TRUSTED || matches!(tokio::time::timeout(patience, conn.ping()).await, Ok(Ok(()))) {
                return Ok(Lease { conn, born, _permit: permit });
            }
            // Whoever restarted closed the others too.
            self.forget_idle();
        }
        let mut conn = self.connector.connect("").await?;
        if let Some(setup) = &self.session_setup {
            self.connector.set_up(&mut conn, setup).await?;
        }
        Ok(Lease { conn, born: Instant::now(), _permit: permit })
    }

    async fn permit(&self, urgent: bool) -> Result<OwnedSemaphorePermit, Fault> {
        if let Ok(permit) = self.work.clone().try_acquire_owned() {
            return Ok(permit);
        }
        let work = self.work.clone().acquire_owned();
        let got = tokio::time::timeout(self.connector.patience, async {
            if !urgent {
                return work.await;
            }
            tokio::select! {
                permit = work => permit,
                permit = self.urgent.clone().acquire_owned() => permit,
            }
        });
        match got.await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(Fault::said(
                StoreErrorKind::Unavailable,
                format!("all {} connections to {} were busy for {:?}", self.size, self.name(), self.connector.patience),
            )),
        }
    }

    fn pop(&self) -> Option<Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Puts a connection back whose statement has ended.
    pub(crate) fn give_back(&self, lease: Lease) {
        let Lease { conn, born, _permit } = lease;
        if born.elapsed() < LIFETIME {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(Idle { conn, born, since: Instant::now() });
        }
        // The permit goes last: whoever gets it finds the connection.
    }

    /// Drops what is idle: the server has gone, or is another one now.
    pub(crate) fn forget_idle(&self) {
        let gone = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        drop(gone);
    }

    /// Takes what has been idle for too long.
    fn take_old(&self) -> Vec<PgConnection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extract_if(.., |idle| idle.since.elapsed() >= self.idle_timeout || idle.born.elapsed() >= LIFETIME)
            .map(|idle| idle.conn)
            .collect()
    }
}

async fn close_idle(pool: Weak<Pool>, every: Duration) {
    loop {
        tokio::time::sleep(every.max(Duration::from_millis(10))).await;
        let Some(old) = pool.upgrade().map(|pool| pool.take_old()) else { return };
        for conn in old {
            close(conn).await;
        }
    }
}
