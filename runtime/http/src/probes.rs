//! `/ready`: whether work that is sent here would be done.
//!
//! Three things must hold: the database answers, the lease is good, and at least one contract is served. A host that
//! is not ready goes on: what is missing may come back, and only `/live` says that a restart would help.

use std::fmt;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time;

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
    database: bool,
    lease: bool,
    contracts: usize,
}

impl Found {
    pub(crate) fn is_ready(self) -> bool {
        self.database && self.lease && self.contracts > 0
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { database, lease, contracts } = *self;
        writeln!(f, "{}", if self.is_ready() { "ready" } else { "not ready" })?;
        writeln!(f, "database: {}", if database { "answers" } else { "does not answer" })?;
        writeln!(f, "lease: {}", if lease { "good" } else { "not good" })?;
        writeln!(f, "contracts: {contracts} served")
    }
}

impl Probes {
    pub(crate) fn new(sources: Sources) -> Self {
        Probes { sources, database: Mutex::new(None) }
    }

    /// Dropped at an await, the question to the database is dropped with it, which the store allows.
    pub(crate) async fn ready(&self) -> Found {
        let database = self.database_answers().await;
        Found { database, lease: self.sources.numbers.lease_is_good(), contracts: self.sources.catalog.offers().len() }
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
