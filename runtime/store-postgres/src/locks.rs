//! A host's lock session: one connection, one task that owns it, one call at a time (slots.md A13).
//!
//! What must stay true:
//! - the connection belongs to a task that nobody can drop in the middle of a statement; callers hold one end of a
//!   channel, and a call that has been handed over is sent, answered and heard by the table whoever still listens;
//! - a session that has ended is noticed at once where the server closes the connection, and within [`NOTICE`] where it is
//!   silent; the server gives up on a silent host only after [`SERVER_PATIENCE`], which is longer;
//! - one [`LockSession`] is one session: it never connects again, and a backend that is not the first one is a loss.
//!
//! What it deliberately does not do: decide anything. What is asked for, and what follows, is `domain::session`'s.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{AssertSqlSafe, Executor as _, Row as _};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use warp_domain::session::{Answer, Call, Grant, Lock, Reading, Reply};
use warp_domain::{ClaimToken, KeyId};
use warp_store::StoreErrorKind;

use crate::call::place;
use crate::connect::Connector;
use crate::error::{Fault, Phase};
use crate::pooler::{self, Pooling};

/// What follows the application's name.
pub(crate) const SUFFIX: &str = ":warp-locks";
/// How often a silent session is asked for a sign of life, and how long that, or a call, may take.
const PING_EVERY: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest time in which a lost session is not noticed.
pub(crate) const NOTICE: Duration = Duration::from_secs(3);
/// How long a forced stop may take until nothing of a run is left.
pub(crate) const STOP: Duration = Duration::from_secs(1);
/// After so long the server ends a session whose host does not answer. More than [`NOTICE`] and [`STOP`] together (A13a).
const SERVER_PATIENCE: Duration = Duration::from_secs(10);
const _: () = assert!(SERVER_PATIENCE.as_millis() > NOTICE.as_millis() + STOP.as_millis());
const _: () = assert!(NOTICE.as_millis() >= PING_EVERY.as_millis() + PATIENCE.as_millis());

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The server refused it or gave it up; the session lives, and what the call did is unknown.
    Failed(Fault),
    /// The session is gone, and with it every lock.
    Lost,
}

/// One lock session. Dropping it closes the connection after the call that is under way, and the server frees its locks.
pub(crate) struct LockSession {
    calls: mpsc::Sender<Request>,
    /// Written by the task that owns the connection, once.
    lost: Arc<AtomicBool>,
    backend: i32,
}

struct Request {
    text: String,
    reply: oneshot::Sender<Result<String, NoAnswer>>,
}

/// Refuses an address behind which no session is kept. Within five seconds; dropped, it leaves nothing behind.
pub(crate) async fn check(connector: &Connector) -> Result<(), Fault> {
    let probed = pooler::probe(connector, SUFFIX).await?;
    for conn in probed.connections {
        crate::connect::close(conn).await;
    }
    match probed.pooling {
        Pooling::Session => Ok(()),
        found => Err(pooler::refusal(connector.name(), found, &probed.evidence)),
    }
}

impl LockSession {
    /// Opens a session. Dropped before it returns, it leaves nothing behind.
    ///
    /// `when_lost` is called once when the session has ended, by the task that notices: nobody has to wait for somebody
    /// who waits for a statement. It must not block.
    pub(crate) async fn open(connector: &Connector, schema: &str, when_lost: impl FnOnce() + Send + 'static) -> Result<Self, Fault> {
        let fault = |error: sqlx::Error| Fault::from_driver(&error, Phase::Connecting, connector.name());
        let options = connector.options(SUFFIX).await?;
        // The driver notices the end of an idle connection only where it listens. Its listener wants a pool, which holds
        // this connection and no other.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .acquire_timeout(connector.patience())
            .connect_lazy_with(options);
        let mut conn = PgListener::connect_with(&pool).await.map_err(fault)?;
        conn.eager_reconnect(false);
        // The session's own settings: the lock connection is never a pooler's (see `check`).
        let patience = SERVER_PATIENCE.as_millis();
        let setup = format!(
            "SET statement_timeout = '{}ms'; SET idle_session_timeout = 0; SET tcp_user_timeout = {patience}; \
             SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3",
            PATIENCE.as_millis() - 500
        );
        conn.execute(AssertSqlSafe(setup)).await.map_err(fault)?;
        let backend = backend(&mut conn).await.map_err(fault)?;
        // Bounded by the one call that is out; the others wait in their host.
        let (calls, requests) = mpsc::channel(1);
        let lost = Arc::new(AtomicBool::new(false));
        let is_lost = Arc::clone(&lost);
        let statement = place("SELECT warp.session_call($1::jsonb)", schema);
        let name = connector.name().to_owned();
        tokio::spawn(async move {
            let why = serve(&mut conn, requests, &statement, backend, &name).await;
            if let Some(why) = why {
                tracing::warn!(database = name, backend, why = why.text(), "the lock session is gone; its runs are stopped");
            }
            is_lost.store(true, Ordering::Release);
            when_lost();
        });
        Ok(LockSession { calls, lost, backend })
    }

    /// The server's process, so that a rescuer can end it (A12).
    pub(crate) fn backend(&self) -> i32 {
        self.backend
    }

    /// Whether it is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// One call. Dropped, it still runs to its end, and its answer is lost: whoever does that must not go on with the
    /// table, so this is awaited on tasks that run to their end.
    pub(crate) async fn call(&self, call: &Call<KeyId>) -> Result<Answer<KeyId>, NoAnswer> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Request { text: write(call), reply }).await.map_err(|_| NoAnswer::Lost)?;
        let text = answer.await.unwrap_or(Err(NoAnswer::Lost))?;
        read(call, &text).map_err(NoAnswer::Failed)
    }
}

/// Serves calls until the session is lost, with the reason, or until nobody can call any more.
async fn serve(conn: &mut PgListener, mut requests: mpsc::Receiver<Request>, statement: &str, backend: i32, name: &str) -> Option<Fault> {
    loop {
        // Receiving can be dropped between two messages and loses none. A call, once taken, is not dropped.
        let heard = tokio::select! {
            request = requests.recv() => Err(request),
            heard = timeout(PING_EVERY, conn.try_recv()) => Ok(heard),
        };
        match heard {
            Err(None) => return None,
            Err(Some(Request { text, reply })) => {
                let query = sqlx::query(AssertSqlSafe(statement)).bind(text);
                let answer = match timeout(PATIENCE, conn.fetch_one(query)).await {
                    Ok(answer) => answer.and_then(|row| row.try_get(0)),
                    Err(_) => Err(sqlx::Error::PoolTimedOut),
                };
                let fault = match answer {
                    Ok(text) => {
                        // The caller has gone: its table goes with it.
                        let _ = reply.send(Ok(text));
                        continue;
                    }
                    Err(error @ sqlx::Error::Database(_)) => Fault::from_driver(&error, Phase::Sent, name),
                    Err(error) => {
                        let _ = reply.send(Err(NoAnswer::Lost));
                        return Some(Fault::from_driver(&error, Phase::Sent, name));
                    }
                };
                if fault.ends_connection() {
                    let _ = reply.send(Err(NoAnswer::Lost));
                    return Some(fault);
                }
                let _ = reply.send(Err(NoAnswer::Failed(fault)));
            }
            // Nothing is listened to, so nothing is said but the end.
            Ok(Ok(Ok(Some(_)))) => {}
            Ok(Ok(Ok(None))) => return Some(Fault::said(StoreErrorKind::Unavailable, "the server has closed the connection")),
            Ok(Ok(Err(error))) => return Some(Fault::from_driver(&error, Phase::Sent, name)),
            Ok(Err(_)) => match timeout(PATIENCE, self::backend(conn)).await {
                Ok(Ok(now)) if now == backend => {}
                Ok(Ok(now)) => {
                    let moved = format!("the connection was given backend {backend} and then {now}: a pooler stands between");
                    return Some(Fault::said(StoreErrorKind::Unavailable, moved));
                }
                Ok(Err(error)) => return Some(Fault::from_driver(&error, Phase::Sent, name)),
                Err(_) => return Some(Fault::said(StoreErrorKind::Unavailable, format!("no sign of life in {PATIENCE:?}"))),
            },
        }
    }
}

/// The sign of life. No lock, no index.
async fn backend(conn: &mut PgListener) -> Result<i32, sqlx::Error> {
    conn.fetch_one("SELECT pg_backend_pid()").await?.try_get(0)
}

// ------------------------------------------------------------------------------------------------ texts

/// What `warp.session_call` takes.
fn write(call: &Call<KeyId>) -> String {
    let lock = |lock: &Lock<KeyId>| match *lock {
        Lock::Whole(key) => json!([0, key.0]),
        Lock::Base(key) => json!([1, key.0]),
        Lock::Slot(key, slot) => json!([2, key.0, slot]),
    };
    let Call { generation: _, keep, unlocks, converts, asks } = call;
    let ask = |asked: &warp_domain::session::Asked<KeyId>| -> Value {
        asked.steps.iter().map(|step| json!([step.key.0, step.limit, step.has_base, step.own, step.whole])).collect()
    };
    json!({
        "keep": keep.as_ref().map(|keep| keep.iter().map(lock).collect::<Vec<_>>()),
        "unlocks": unlocks.iter().map(lock).collect::<Vec<_>>(),
        "converts": converts.iter().map(|key| key.0).collect::<Vec<_>>(),
        "asks": asks.iter().map(ask).collect::<Vec<_>>(),
    })
    .to_string()
}

/// What it answers.
#[derive(Deserialize)]
struct Said {
    unheld: Vec<String>,
    converted: Vec<(i64, Option<u32>, u64)>,
    replies: Vec<SaidReply>,
}

/// By its first number.
#[derive(Deserialize)]
#[serde(untagged)]
enum SaidReply {
    Admitted(u8, u64, Vec<(Option<u32>, Option<u32>, u64)>),
    Refused(u8, usize, u32),
    Again([u8; 1]),
}

fn read(call: &Call<KeyId>, text: &str) -> Result<Answer<KeyId>, Fault> {
    let wrong = |what: String| Fault::said(StoreErrorKind::Internal, format!("the answer of the lock session: {what}"));
    let Said { unheld, converted, replies } = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    for key in unheld {
        // The work is done, and the next holder is told by the wake: nothing fails (A7).
        tracing::warn!(lock = format!("warp:concurrency:{key}"), "a lock was given back that was not held");
    }
    if replies.len() != call.asks.len() {
        return Err(wrong(format!("{} replies to {} attempts", replies.len(), call.asks.len())));
    }
    let reply = |(asked, said): (&warp_domain::session::Asked<KeyId>, SaidReply)| -> Result<(ClaimToken, Reply<KeyId>), Fault> {
        let reply = match said {
            SaidReply::Admitted(0, fence, grants) if grants.len() == asked.steps.len() => {
                let grant = |(step, (slot, admin_limit, version)): (&warp_domain::session::Step<KeyId>, _)| Grant {
                    key: step.key,
                    slot,
                    reading: Reading { admin_limit, version },
                };
                Reply::Admitted { grants: asked.steps.iter().zip(grants).map(grant).collect(), fence }
            }
            SaidReply::Refused(1, at, limit) if at < asked.steps.len() => Reply::Refused { at, limit },
            SaidReply::Again([2]) => Reply::Again,
            _ => return Err(wrong("a reply that fits no attempt".to_owned())),
        };
        Ok((asked.token, reply))
    };
    let reading = |(key, admin_limit, version)| (KeyId(key), Reading { admin_limit, version });
    Ok(Answer {
        generation: call.generation,
        converted: converted.into_iter().map(reading).collect(),
        replies: call.asks.iter().zip(replies).map(reply).collect::<Result<BTreeMap<_, _>, _>>()?.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use warp_domain::session::{Asked, Step};

    use super::*;

    #[test]
    fn an_answer_is_read_by_its_shape() {
        let step = |key| Step { key: KeyId(key), limit: 2, has_base: false, own: vec![1], whole: false };
        let asks = vec![
            Asked { token: ClaimToken(7), steps: vec![step(1), step(2)] },
            Asked { token: ClaimToken(8), steps: vec![step(1)] },
            Asked { token: ClaimToken(9), steps: vec![step(3)] },
        ];
        let call = Call { generation: 4, keep: None, unlocks: vec![Lock::Slot(KeyId(5), 3)], converts: vec![KeyId(6)], asks };
        let sent: Value = serde_json::from_str(&write(&call)).expect("it is JSON");
        assert_eq!(sent["unlocks"], json!([[2, 5, 3]]));
        assert_eq!(sent["asks"][0], json!([[1, 2, false, [1], false], [2, 2, false, [1], false]]));
        let text = r#"{"unheld": [], "converted": [[6, 3, 2]], "replies": [[0, 256, [[null, null, 0], [1, 2, 5]]], [1, 0, 1], [2]]}"#;
        let answer = read(&call, text).expect("it is read");
        let reading = |admin_limit, version| Reading { admin_limit, version };
        assert_eq!(answer.converted, [(KeyId(6), reading(Some(3), 2))]);
        let grants = vec![
            Grant { key: KeyId(1), slot: None, reading: reading(None, 0) },
            Grant { key: KeyId(2), slot: Some(1), reading: reading(Some(2), 5) },
        ];
        assert_eq!(
            answer.replies,
            [
                (ClaimToken(7), Reply::Admitted { grants, fence: 256 }),
                (ClaimToken(8), Reply::Refused { at: 0, limit: 1 }),
                (ClaimToken(9), Reply::Again),
            ]
        );
        assert!(read(&call, r#"{"unheld": [], "converted": [], "replies": [[2]]}"#).is_err(), "an attempt is missing");
    }
}
