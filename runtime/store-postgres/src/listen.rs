//! Hearing of changes: one connection that listens, and the people who wait.
//!
//! Every commit after which somebody should look for work announces it on the channel named like the schema. Listening
//! is a hint only. Without it (through a pooler that hands out backends by the transaction, or while the connection is
//! away) polling finds the work, later.
//!
//! What must stay true:
//! - it is listened only where the two-client test finds a session, on the own address or on `listen_url`;
//! - after a connection was lost, one announcement is made when the next one listens, since something may have been
//!   missed;
//! - a connection that has gone silent is noticed: it is asked for a sign of life, which is no statement.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{Acquire as _, Connection as _};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::connect::Connector;
use crate::error::{Fault, Phase};
use crate::pooler::{self, Pooling};
use crate::settings::ConnectSettings;

/// What follows the application's name.
const SUFFIX: &str = ":warp-listen";
/// How often a silent connection is asked for a sign of life, and how long that may take.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_PATIENCE: Duration = Duration::from_secs(5);
/// The pauses between two tries to connect: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A counter of changes with people who wait for the next one.
pub struct Changes {
    count: watch::Sender<u64>,
    /// What the last call of [`Changes::wait`] has seen.
    seen: Mutex<u64>,
    listening: AtomicBool,
}

impl Changes {
    fn new() -> Self {
        Changes { count: watch::Sender::new(0), seen: Mutex::new(0), listening: AtomicBool::new(false) }
    }

    /// Somebody should look: called by the connection that listens, and by this process after a commit of its own where
    /// nothing listens.
    pub fn announce(&self) {
        self.count.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Completes when something was announced since the last call returned. Dropped, nothing is taken.
    pub async fn wait(&self) {
        let mut changes = self.count.subscribe();
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *changes.borrow_and_update() == seen {
            // The sender lives in `self`, so this ends with a change and never with an error.
            let _ = changes.changed().await;
        }
        let now = *changes.borrow_and_update();
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Whether announcements of other processes are heard right now.
    pub fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }
}

/// The connection that listens. Dropping it closes it.
pub struct Listener {
    changes: Arc<Changes>,
    /// Nothing where nobody listens.
    task: Option<JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Listener {
    /// Begins to listen, on the runtime that calls this. `known` is what the two-client test has found at the settings'
    /// own address. Connecting happens in the background and is repeated for as long as it fails.
    ///
    /// # Errors
    /// When the address cannot be read.
    pub fn start(settings: &ConnectSettings, known: Option<Pooling>) -> Result<Self, Fault> {
        let connector = Connector::for_listen(settings)?;
        let known = known.filter(|_| settings.listen_url.is_none());
        let changes = Arc::new(Changes::new());
        let task = tokio::spawn(listen(connector, settings.schema.clone(), known, changes.clone()));
        Ok(Listener { changes, task: Some(task) })
    }

    /// Hears of what this process announces itself, and opens no connection.
    pub fn deaf() -> Self {
        Listener { changes: Arc::new(Changes::new()), task: None }
    }

    /// Completes when it has been found out that nothing can be heard at this address. For tests.
    pub async fn until_given_up(mut self) -> Arc<Changes> {
        if let Some(task) = &mut self.task {
            // It ends with that alone, or with a panic of its own.
            let _ = task.await;
        }
        self.changes.clone()
    }

    /// Where changes are heard of.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }
}

/// Listens until it is aborted, or until it is found out that it cannot. Aborted anywhere it leaves nothing behind.
async fn listen(connector: Connector, channel: String, mut known: Option<Pooling>, changes: Arc<Changes>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let why = match session(&connector, &mut known).await {
            Ok(true) => {
                let ended = hear(&connector, &channel, &changes).await;
                if changes.listening.swap(false, Ordering::AcqRel) {
                    pause = FIRST_PAUSE;
                }
                ended
            }
            Ok(false) => {
                tracing::info!(
                    database = connector.name(),
                    "not listening: a pooler hands out a backend for each transaction or statement, so new work is found by polling; set listen_url to a direct address to be told at once"
                );
                return;
            }
            Err(fault) => fault,
        };
        tracing::warn!(database = connector.name(), why = why.text(), "not listening for now; polling finds new work");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether the address gives sessions. Asked until it is known.
async fn session(connector: &Connector, known: &mut Option<Pooling>) -> Result<bool, Fault> {
    if known.is_none() {
        *known = Some(pooler::probe(connector, SUFFIX).await?.pooling);
    }
    Ok(*known == Some(Pooling::Session))
}

/// Connects and hears until the connection is lost; returns why.
async fn hear(connector: &Connector, channel: &str, changes: &Changes) -> Fault {
    match try_hear(connector, channel, changes).await {
        Ok(never) => match never {},
        Err(Lost::Fault(fault)) => fault,
        Err(Lost::Driver(error)) => Fault::from_driver(&error, Phase::Connecting, connector.name()),
    }
}

enum Lost {
    Fault(Fault),
    Driver(sqlx::Error),
}

impl From<sqlx::Error> for Lost {
    fn from(error: sqlx::Error) -> Self {
        Lost::Driver(error)
    }
}

async fn try_hear(connector: &Connector, channel: &str, changes: &Changes) -> Result<std::convert::Infallible, Lost> {
    let options = connector.options(SUFFIX).await.map_err(Lost::Fault)?;
    // The driver's listener wants a pool; it is given one that holds this connection and no other.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        .acquire_timeout(connector.patience())
        .connect_lazy_with(options);
    let mut listener = PgListener::connect_with(&pool).await?;
    // Connecting again is done here, with a new password and an announcement.
    listener.eager_reconnect(false);
    listener.listen(channel).await?;
    changes.listening.store(true, Ordering::Release);
    changes.announce();
    loop {
        // Receiving can be dropped between two messages and loses none.
        match tokio::time::timeout(PING_EVERY, listener.try_recv()).await {
            Ok(Ok(Some(_))) => changes.announce(),
            Ok(Ok(None)) => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionAborted.into()).into()),
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {
                let alive = async { (&mut listener).acquire().await?.ping().await };
                tokio::time::timeout(PING_PATIENCE, alive).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn what_was_announced_before_the_wait_ends_it_once() {
        let changes = Changes::new();
        assert!(changes.wait().now_or_never().is_none(), "nothing was announced");
        changes.announce();
        changes.announce();
        assert!(changes.wait().now_or_never().is_some(), "announced before");
        assert!(changes.wait().now_or_never().is_none(), "and taken");
    }
}
