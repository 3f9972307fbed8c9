//! Whether a connection is a session: tested, not guessed.
//!
//! Two clients at once: A reads its backend's process id, B opens a transaction and reads its own, A reads again. When
//! both have the same backend, when A's changes, when B may not open a transaction or when A gets no answer while B
//! holds one, a pooler hands out backends by the transaction or by the statement. The usual test, taking and releasing a
//! lock in two round trips, passes on an idle pooler, because it gives back the backend used last.
//!
//! What it deliberately does not do: look at host names and ports.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::time::Duration;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _};
use warp_store::StoreErrorKind;

use crate::connect::{self, Connector};
use crate::error::{Fault, Phase};
use crate::settings::ConnectSettings;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// A busy pooler may by chance give A the same backend again: measured with PgBouncer, 1 to 23 of 100 single rounds see a
/// session where there is none, most with a few backends and a few more clients. So often in a row it does not happen.
const ROUNDS: u32 = 10;

/// How long a backend belongs to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// As long as it stays connected: a direct connection, or a pooler in session mode.
    Session,
    /// For a transaction.
    Transaction,
    /// For a statement.
    Statement,
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pooling::Session => "session",
            Pooling::Transaction => "transaction",
            Pooling::Statement => "statement",
        })
    }
}

/// What the test found.
pub(crate) struct Probed {
    pub(crate) pooling: Pooling,
    /// What was seen, for people.
    pub(crate) evidence: String,
    /// The second client got no backend at all while the first kept its own.
    pub(crate) starved: bool,
    /// The connections of the test that can still be used.
    pub(crate) connections: Vec<PgConnection>,
}

impl Probed {
    /// Refuses a session pooler that has no second backend for this host: its statements would wait for each other
    /// until they time out.
    pub(crate) fn refuse_starved(&self, connector: &Connector, pool: u32) -> Result<(), Fault> {
        if !self.starved {
            return Ok(());
        }
        Err(Fault::said(
            StoreErrorKind::Unavailable,
            format!(
                "{}: {}. A host needs its pool + 3 = {} connections at once: raise the pooler's default_pool_size, close other clients, or connect to the server directly",
                connector.name(),
                self.evidence,
                pool.saturating_add(3),
            ),
        ))
    }
}

/// What the two-client test finds at the settings' address, with what it saw, for people.
///
/// # Errors
/// When the address cannot be read or reached.
pub async fn pooling(settings: &ConnectSettings) -> warp_store::Result<(Pooling, String)> {
    const OP: &str = "test the connection";
    let connector = Connector::new(settings).map_err(|fault| fault.into_error(OP))?;
    let Probed { pooling, evidence, starved: _, connections } = probe(&connector, "").await.map_err(|fault| fault.into_error(OP))?;
    for conn in connections {
        connect::close(conn).await;
    }
    Ok((pooling, evidence))
}

/// Runs the test with two new connections, within five seconds once the first statement was answered. Dropped, it leaves
/// nothing behind: the server rolls back what a client that has gone had open.
pub(crate) async fn probe(connector: &Connector, suffix: &str) -> Result<Probed, Fault> {
    let mut a = connector.connect(suffix).await?;
    let mut b = match connector.connect(suffix).await {
        Ok(b) => b,
        Err(fault) => {
            connect::close(a).await;
            return Err(fault);
        }
    };
    let mut kept = (0, 0);
    // A busy pooler may let a first statement wait; what is tested begins with its answer.
    let patience = connector.patience();
    for _ in 0..ROUNDS {
        match once(&mut a, &mut b, patience).await {
            Round::Kept(first, other) => kept = (first, other),
            Round::Found { pooling, evidence, starved } => {
                tokio::join!(connect::close(a), connect::close(b));
                return Ok(Probed { pooling, evidence, starved, connections: Vec::new() });
            }
            Round::Failed(error) => return Err(Fault::from_driver(&error, Phase::Connecting, connector.name())),
            Round::Nothing => {
                let text = format!("{}: the first statement got no answer in {patience:?}", connector.name());
                return Err(Fault::said(StoreErrorKind::Unavailable, text));
            }
        }
    }
    let evidence = format!("two clients at once kept their backends {} and {}, {ROUNDS} times in a row", kept.0, kept.1);
    Ok(Probed { pooling: Pooling::Session, evidence, starved: false, connections: vec![a, b] })
}

/// What one round of the test comes to.
enum Round {
    /// A and B had these backends, and A kept its own.
    Kept(i32, i32),
    /// It is decided.
    Found { pooling: Pooling, evidence: String, starved: bool },
    /// The connection broke.
    Failed(sqlx::Error),
    /// A was not answered at all.
    Nothing,
}

impl Round {
    fn found(pooling: Pooling, evidence: String) -> Self {
        Round::Found { pooling, evidence, starved: false }
    }
}

async fn once(a: &mut PgConnection, b: &mut PgConnection, patience: Duration) -> Round {
    let first = match bounded(patience, backend(a)).await {
        Answer::Said(pid) => pid,
        Answer::Failed(error) => return Round::Failed(error),
        Answer::Silence => return Round::Nothing,
    };
    match open_transaction(a, b, first).await {
        Ok(()) => {}
        Err(decided) => return decided,
    }
    let found = while_open(a, b, first).await;
    // A client that goes away with a transaction open costs the pooler its connection to the server.
    match bounded(PATIENCE, sqlx::raw_sql("ROLLBACK").execute(b)).await {
        Answer::Failed(error) if matches!(found, Round::Kept(..)) => Round::Failed(error),
        _ => found,
    }
}

/// B opens a transaction, or it is decided.
async fn open_transaction(a: &mut PgConnection, b: &mut PgConnection, first: i32) -> Result<(), Round> {
    /// B stands before A in the line of whoever hands out backends, so it is answered by now.
    const A_MOMENT: Duration = Duration::from_millis(200);
    let mut begin = pin!(sqlx::raw_sql("BEGIN").execute(b));
    let began = match bounded(PATIENCE, &mut begin).await {
        Answer::Silence => match bounded(PATIENCE, backend(a)).await {
            Answer::Said(again) if again != first => return Err(Round::found(Pooling::Transaction, moved(first, again))),
            Answer::Said(_) => bounded(A_MOMENT, &mut begin).await,
            Answer::Failed(error) => return Err(Round::Failed(error)),
            Answer::Silence => return Err(Round::found(Pooling::Transaction, silence("two clients at once"))),
        },
        answered => answered,
    };
    match began {
        Answer::Said(_) => Ok(()),
        Answer::Failed(error) => {
            let said = error.as_database_error().map_or_else(|| error.to_string(), |said| said.message().to_owned());
            Err(Round::found(Pooling::Statement, format!("BEGIN was refused ({said})")))
        }
        Answer::Silence => Err(Round::Found {
            pooling: Pooling::Session,
            evidence: format!("a first client keeps backend {first}, and a second one gets none in {PATIENCE:?}"),
            starved: true,
        }),
    }
}

/// Compares backends while B has a transaction open.
async fn while_open(a: &mut PgConnection, b: &mut PgConnection, first: i32) -> Round {
    let other = match bounded(PATIENCE, backend(b)).await {
        Answer::Said(pid) => pid,
        Answer::Failed(error) => {
            return Round::found(Pooling::Statement, format!("a transaction was open and its second statement was refused ({error})"));
        }
        Answer::Silence => return Round::found(Pooling::Statement, silence("the second statement of an open transaction")),
    };
    if other == first {
        return Round::found(Pooling::Transaction, format!("two clients were given the same backend {first}"));
    }
    match bounded(PATIENCE, backend(a)).await {
        Answer::Said(again) if again == first => Round::Kept(first, other),
        Answer::Said(again) => Round::found(Pooling::Transaction, moved(first, again)),
        Answer::Failed(error) => Round::Failed(error),
        Answer::Silence => Round::found(Pooling::Transaction, silence("a first client while a second one had a transaction open")),
    }
}

enum Answer<T> {
    Said(T),
    Failed(sqlx::Error),
    Silence,
}

async fn bounded<T>(patience: Duration, asked: impl Future<Output = Result<T, sqlx::Error>>) -> Answer<T> {
    match tokio::time::timeout(patience, asked).await {
        Ok(Ok(answer)) => Answer::Said(answer),
        Ok(Err(error)) => Answer::Failed(error),
        Err(_) => Answer::Silence,
    }
}

/// The backend that answers now. No lock, no index; a constant of the process.
async fn backend(conn: &mut PgConnection) -> Result<i32, sqlx::Error> {
    sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(conn).await?.try_get(0)
}

fn silence(of: &str) -> String {
    format!("{of} got no answer in {PATIENCE:?}")
}

fn moved(from: i32, to: i32) -> String {
    format!("one client was given backend {from} and then {to}")
}

/// What the usual test sees.
pub(crate) struct Naive {
    pub(crate) text: String,
    /// Its lock is left on a backend that cannot be reached any more.
    pub(crate) stranded: bool,
}

/// The usual test: takes a session lock and releases it in the next round trip. For comparison only. Its lock has a
/// random number that nothing else waits for. Dropped in the middle, the connection must be dropped too.
pub(crate) async fn naive(conn: &mut PgConnection, target: &str) -> Result<Naive, Fault> {
    /// So often the backend that has the lock is looked for.
    const LOOKS: u32 = 50;
    let number = i64::from_ne_bytes(RandomState::new().hash_one("naive").to_ne_bytes());
    let ask = |function: &'static str| format!("SELECT {function}({number})");
    let fault = |error: sqlx::Error| Fault::from_driver(&error, Phase::Connecting, target);
    let mut locked = async |function| {
        let row = sqlx::raw_sql(AssertSqlSafe(ask(function))).fetch_one(&mut *conn).await.map_err(fault)?;
        row.try_get::<bool, _>(0).map_err(fault)
    };
    let taken = locked("pg_try_advisory_lock").await?;
    let released = locked("pg_advisory_unlock").await?;
    let shown = |yes| if yes { "t" } else { "f" };
    let verdict = if taken && released { "it passes" } else { "it fails" };
    let text = format!("take and release in two round trips: {} then {}, {verdict}", shown(taken), shown(released));
    let mut stranded = taken && !released;
    for _ in 0..LOOKS {
        if !stranded {
            break;
        }
        stranded = !locked("pg_advisory_unlock").await?;
    }
    Ok(Naive { text, stranded })
}

/// What helps where session locks meet a pooler that cannot keep them.
pub(crate) fn remedies(found: Pooling) -> String {
    format!(
        "Use one of: (1) the server's direct address; (2) a pooler in session mode; (3) ledger locks, which work through any pooler \
         (`warp-host locks set ledger` while nothing holds a slot). What hands out backends by the {found}: PgBouncer with pool_mode = transaction or \
         statement (session is its default and is fine); Neon's `-pooler` host (use the host without it, DATABASE_URL_UNPOOLED); Supabase's port 6543 \
         (use 5432, or set it to session mode); Azure Flexible Server's port 6432 (use 5432, or pgbouncer.default_pool_mode = session)"
    )
}

/// Why a host with session locks does not start on this connection. Found by people who search for the error that a lost
/// lock gives elsewhere.
pub(crate) fn refusal(target: &str, found: Pooling, evidence: &str) -> Fault {
    Fault::said(
        StoreErrorKind::Invalid,
        format!(
            "{target} is behind a pooler in {found} mode ({evidence}). Slots are made of session locks here, and through it they exclude nobody: a \
             lock is taken on one backend and released on another (\"Attempted to release a lock that was not held\"), or stays on a backend that \
             nobody can reach. {}",
            remedies(found)
        ),
    )
}
