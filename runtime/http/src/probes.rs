//! `/ready`: whether work that is sent here would be done.
//!
//! Three things must hold: the host is registered with a good lease and was not told to stop, the database answers, and
//! at least one contract is served. A host that is not ready goes on: what is missing may come back, and only `/live`
//! says that a restart would help. From the moment a host is told to stop it is not ready, and says so without asking the
//! database, so that whoever routes work hears of it at once; it lives until its runs have ended.

use std::fmt;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time;
use warp_worker::Condition;

use crate::Sources;

/// For so long an answer of the database counts.
const FRESH_FOR: Duration = Duration::from_secs(2);
/// How long the database is waited for. Probes give up after some seconds of their own.
const DATABASE_WITHIN: Duration = Duration::from_secs(2);

/// Looks.
pub(crate) struct Probes {
    sources: Sources,
    /// When the database last answered or did not, on the boot-time clock. Held while it is asked.
    database: Mutex<Option<(Duration, bool)>>,
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    condition: Condition,
    /// Nothing where it does not matter any more.
    database: Option<bool>,
    contracts: usize,
}

impl Found {
    pub(crate) fn is_ready(self) -> bool {
        self.condition == Condition::Good && self.database == Some(true) && self.contracts > 0
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { condition, database, contracts } = *self;
        writeln!(f, "{}", if self.is_ready() { "ready" } else { "not ready" })?;
        let host = match condition {
            Condition::Good => "registered, its lease is good",
            Condition::Stopping => "stopping; it claims nothing any more",
            Condition::Lapsed => "its lease was not renewed in time; it claims nothing until it is",
            Condition::Unregistered => "not registered; it registers as soon as it can",
        };
        writeln!(f, "host: {host}")?;
        if let Some(answers) = database {
            writeln!(f, "database: {}", if answers { "answers" } else { "does not answer" })?;
        }
        writeln!(f, "contracts: {contracts} served")
    }
}

impl Probes {
    pub(crate) fn new(sources: Sources) -> Self {
        Probes { sources, database: Mutex::new(None) }
    }

    /// Dropped at an await, the question to the database is dropped with it, which the store allows.
    pub(crate) async fn ready(&self) -> Found {
        let asked = self.sources.numbers.condition() != Condition::Stopping;
        let database = if asked { Some(self.database_answers().await) } else { None };
        // Looked at last: the database may have taken its time.
        Found { condition: self.sources.numbers.condition(), database, contracts: self.sources.catalog.offers().len() }
    }

    async fn database_answers(&self) -> bool {
        let mut known = self.database.lock().await;
        if let Some((at, answers)) = *known
            && self.sources.surroundings.boot().saturating_sub(at) < FRESH_FOR
        {
            return answers;
        }
        let answers = matches!(time::timeout(DATABASE_WITHIN, self.sources.store.served_contracts()).await, Ok(Ok(_)));
        *known = Some((self.sources.surroundings.boot(), answers));
        answers
    }
}
