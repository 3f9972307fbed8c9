//! Questions: what people and pages ask. They run on connections of their own and never wait for the writer.

use std::collections::BTreeMap;

use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection};
use warp_domain::ending::State;
use warp_domain::policy::{Concurrency, Declared, Stamp};
use warp_domain::{Digest, HostId, JobId, KeyId, RunNumber, UnixMillis};
use warp_store::{
    AdminLimit, AuditRow, CancelSignal, HolderSeen, HostSeen, JobDetails, JobFilter, JobSummary, KeySeen, LogLine, MAX_LISTED, Overview,
    Pause, QueueSeen, Signals, StoreErrorKind, WaiterSeen, Waiting, codec,
};

use crate::enqueue::{read_id, read_metadata};
use crate::error::Fault;
use crate::rows::{Event, Place, StateRow, json_numbers, state_columns};

/// The columns of a [`JobSummary`].
const SUMMARY: &str = "j.id, l.contract, l.queue, s.place, s.run, s.attempt, j.created_at, s.changed_at, s.due";

fn read_summary(row: &SqliteRow) -> Result<JobSummary, Fault> {
    let place = Place::read(row.try_get(3)?)?;
    Ok(JobSummary {
        id: read_id(row.try_get(0)?)?,
        contract: row.try_get(1)?,
        queue: row.try_get(2)?,
        state: place.state(),
        parked: place == Place::Parked,
        runs: row.try_get(4)?,
        attempts: row.try_get(5)?,
        created_at: UnixMillis(row.try_get(6)?),
        changed_at: UnixMillis(row.try_get(7)?),
        due: if place == Place::Scheduled { Some(UnixMillis(row.try_get(8)?)) } else { None },
    })
}

fn places_of(state: State) -> &'static [i64] {
    match state {
        State::Scheduled => &[0],
        State::Enqueued => &[1, 2, 3],
        State::Awaiting => &[5],
        State::Processing => &[4],
        State::Completed => &[10],
        State::Failed => &[11],
        State::Deleted => &[12],
    }
}

/// Newest first by id. Walks the unique index of `job (id)` backwards and stops at the limit; a rare state or key
/// among many others makes it walk far, which a list for people may.
pub(crate) async fn jobs(pool: &SqlitePool, filter: JobFilter) -> Result<Vec<JobSummary>, Fault> {
    let JobFilter { states, contract, queue, key, before, limit } = filter;
    let mut query: QueryBuilder<Sqlite> = QueryBuilder::new("SELECT ");
    query.push(SUMMARY).push(" FROM job j JOIN job_state s ON s.handle = j.handle JOIN lane l ON l.id = j.lane WHERE 1");
    if !states.is_empty() {
        query.push(" AND s.place IN (SELECT value FROM json_each(");
        query.push_bind(json_numbers(states.iter().flat_map(|state| places_of(*state)).copied())).push("))");
    }
    if let Some(contract) = contract {
        query.push(" AND l.contract = ").push_bind(contract);
    }
    if let Some(queue) = queue {
        query.push(" AND l.queue = ").push_bind(queue);
    }
    if let Some(key) = key {
        query
            .push(" AND s.keys IS NOT NULL AND EXISTS (SELECT 1 FROM conc_key c JOIN json_each(s.keys) k ON k.value = c.id WHERE c.key = ");
        query.push_bind(key).push(")");
    }
    if let Some(before) = before {
        query.push(" AND j.id < ").push_bind(before.0.to_be_bytes().to_vec());
    }
    query.push(" ORDER BY j.id DESC LIMIT ").push_bind(i64::from(limit.max(1)));
    let rows = query.build().fetch_all(pool).await?;
    rows.iter().map(read_summary).collect()
}

/// One snapshot for all parts of an answer: a transaction that only reads.
async fn snapshot(pool: &SqlitePool) -> Result<sqlx::Transaction<'static, Sqlite>, Fault> {
    Ok(pool.begin().await?)
}

/// Everything about one job.
pub(crate) async fn job(pool: &SqlitePool, id: JobId, now: UnixMillis) -> Result<Option<JobDetails>, Fault> {
    let mut conn = snapshot(pool).await?;
    let conn: &mut SqliteConnection = &mut conn;
    let row = sqlx::query(concat!(
        "SELECT ",
        state_columns!(),
        ", l.contract, l.queue, j.payload, j.metadata, j.trace_parent, j.unique_key, j.created_at, e.body, p.body, n.name, d.sha256, \
         o.result, o.error, o.dropped_lines, o.dropped_bytes \
         FROM job j JOIN job_state s ON s.handle = j.handle JOIN lane l ON l.id = j.lane \
         LEFT JOIN policy e ON e.id = j.explicit LEFT JOIN policy p ON p.id = s.stamp LEFT JOIN host_name n ON n.id = s.host \
         LEFT JOIN digest d ON d.id = s.digest LEFT JOIN outcome o ON o.job = s.handle WHERE j.id = ?"
    ))
    .bind(id.0.to_be_bytes().to_vec())
    .fetch_optional(&mut *conn)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let at = crate::rows::STATE_COLUMNS;
    let state = StateRow::read(&row)?;
    let summary = JobSummary {
        id,
        contract: row.try_get(at)?,
        queue: row.try_get(at + 1)?,
        state: state.place.state(),
        parked: state.place == Place::Parked,
        runs: state.run,
        attempts: state.attempt,
        created_at: UnixMillis(row.try_get(at + 6)?),
        changed_at: UnixMillis(state.changed_at),
        due: (state.place == Place::Scheduled).then_some(UnixMillis(state.due)),
    };
    let declared = row.try_get::<Option<&str>, _>(at + 7)?.map(codec::decode_declared).transpose().map_err(unreadable)?;
    let stamp = row.try_get::<Option<&str>, _>(at + 8)?.map(codec::decode_stamp).transpose().map_err(unreadable)?;
    let host: Option<String> = row.try_get(at + 9)?;
    let digest = row.try_get::<Option<&[u8]>, _>(at + 10)?.map(read_digest).transpose()?;
    let running = if state.place == Place::Running { host.zip(digest) } else { None };
    let keys = key_texts(conn, &state.keys).await?;
    let waiting = waiting(conn, &state, &summary, stamp.as_ref(), now).await?;
    Ok(Some(JobDetails {
        payload: row.try_get(at + 2)?,
        metadata: read_metadata(row.try_get(at + 3)?)?,
        trace_parent: row.try_get(at + 4)?,
        unique_key: row.try_get(at + 5)?,
        explicit: declared.unwrap_or_else(Declared::default),
        stamp,
        keys,
        running,
        waiting,
        result: if state.place == Place::Completed { row.try_get(at + 11)? } else { None },
        error: row.try_get(at + 12)?,
        audit: audit(conn, state.handle).await?,
        progress: progress(conn, state.handle).await?,
        dropped: (count(&row, at + 13)?, count(&row, at + 14)?),
        summary,
    }))
}

fn count(row: &SqliteRow, at: usize) -> Result<u64, Fault> {
    Ok(u64::try_from(row.try_get::<Option<i64>, _>(at)?.unwrap_or(0)).unwrap_or(0))
}

fn unreadable(error: codec::PolicyTextError) -> Fault {
    Fault::Said(StoreErrorKind::Schema, error.to_string())
}

fn read_digest(bytes: &[u8]) -> Result<Digest, Fault> {
    let bytes = bytes.try_into().map_err(|_| Fault::Said(StoreErrorKind::Internal, format!("a digest of {} bytes", bytes.len())))?;
    Ok(Digest(bytes))
}

async fn key_texts(conn: &mut SqliteConnection, keys: &[KeyId]) -> Result<Vec<String>, Fault> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query("SELECT key FROM conc_key WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id")
        .bind(json_numbers(keys.iter().map(|key| key.0)))
        .fetch_all(conn)
        .await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

async fn audit(conn: &mut SqliteConnection, job: i64) -> Result<Vec<AuditRow>, Fault> {
    let rows = sqlx::query(
        "SELECT a.at, a.event, a.run, a.message, n.name, d.sha256, a.took_us FROM audit a \
         LEFT JOIN host_name n ON n.id = a.host LEFT JOIN digest d ON d.id = a.digest WHERE a.job = ? ORDER BY a.entry",
    )
    .bind(job)
    .fetch_all(conn)
    .await?;
    rows.iter()
        .map(|row| {
            let took: Option<i64> = row.try_get(6)?;
            Ok(AuditRow {
                at: UnixMillis(row.try_get(0)?),
                event: Event::name(row.try_get(1)?).to_owned(),
                run: row.try_get(2)?,
                message: row.try_get::<Option<String>, _>(3)?.unwrap_or_default(),
                host: row.try_get(4)?,
                digest: row.try_get::<Option<&[u8]>, _>(5)?.map(read_digest).transpose()?,
                took: took.map(|micros| std::time::Duration::from_micros(u64::try_from(micros).unwrap_or(0))),
            })
        })
        .collect()
}

async fn progress(conn: &mut SqliteConnection, job: i64) -> Result<Vec<(String, f32)>, Fault> {
    let rows = sqlx::query("SELECT name, percent FROM progress WHERE job = ? ORDER BY entry").bind(job).fetch_all(conn).await?;
    rows.iter()
        .map(|row| {
            #[expect(clippy::cast_possible_truncation, reason = "it was an f32 when it was written")]
            let percent = row.try_get::<f64, _>(1)? as f32;
            Ok((row.try_get(0)?, percent))
        })
        .collect()
}

/// Why a job is not running.
async fn waiting(
    conn: &mut SqliteConnection,
    row: &StateRow,
    summary: &JobSummary,
    stamp: Option<&Stamp>,
    now: UnixMillis,
) -> Result<Option<Waiting>, Fault> {
    let _ = now;
    Ok(Some(match row.place {
        Place::Scheduled => Waiting::Due(UnixMillis(row.due)),
        Place::Reserved => Waiting::Reserved,
        Place::Ready => match paused_queues(conn).await?.remove(&summary.queue) {
            Some(pause) => Waiting::Paused(pause),
            None if !is_claimable(conn, row.lane).await? => Waiting::ForHost,
            None => Waiting::ForWorker { ahead: ahead(conn, row).await? },
        },
        Place::Parked => {
            let Some(key) = row.parked_on else { return Ok(None) };
            let stamped = stamp.and_then(|stamp| stamp.concurrency.as_ref()).map_or(1, |concurrency| concurrency.value.limit);
            let place: i64 =
                sqlx::query("SELECT count(*) FROM job_state INDEXED BY state_parked WHERE place = 2 AND parked_on = ? AND ticket <= ?")
                    .bind(key.0)
                    .bind(row.ticket.map(u64::cast_signed))
                    .fetch_one(&mut *conn)
                    .await?
                    .try_get(0)?;
            let Some(key) = key_by_id(conn, key).await? else { return Ok(None) };
            Waiting::ForKey {
                place: u32::try_from(place).unwrap_or(u32::MAX),
                limit: key.admin_limit.unwrap_or(stamped),
                limit_is_admin: key.admin_limit.is_some(),
                refusal: row.refusal.clone().unwrap_or_default(),
                key,
            }
        }
        _ => return Ok(None),
    }))
}

async fn is_claimable(conn: &mut SqliteConnection, lane: i64) -> Result<bool, Fault> {
    let found = sqlx::query("SELECT 1 FROM claimable_lane WHERE lane = ?").bind(lane).fetch_optional(conn).await?;
    Ok(found.is_some())
}

/// A table that is small by nature.
async fn paused_queues(conn: &mut SqliteConnection) -> Result<BTreeMap<String, Pause>, Fault> {
    let rows = sqlx::query("SELECT queue, paused_by, paused_at FROM queue_pause").fetch_all(conn).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, Pause { by: row.try_get(1)?, at: UnixMillis(row.try_get(2)?) }))).collect()
}

/// Every paused queue.
pub(crate) async fn all_paused_queues(pool: &SqlitePool) -> Result<BTreeMap<String, Pause>, Fault> {
    let mut conn = pool.acquire().await?;
    paused_queues(&mut conn).await
}

async fn ahead(conn: &mut SqliteConnection, row: &StateRow) -> Result<u32, Fault> {
    let ahead: i64 = sqlx::query(
        "SELECT count(*) FROM (SELECT 1 FROM job_state INDEXED BY state_ready WHERE place = 1 AND lane = ?1 AND (due, handle) < (?2, ?3) LIMIT ?4)",
    )
    .bind(row.lane)
    .bind(row.due)
    .bind(row.handle)
    .bind(MAX_LISTED)
    .fetch_one(conn)
    .await?
    .try_get(0)?;
    Ok(u32::try_from(ahead).unwrap_or(u32::MAX))
}

/// Lines of a job's runs in order.
pub(crate) async fn job_logs(pool: &SqlitePool, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>, Fault> {
    let rows = sqlx::query(
        "SELECT g.run, g.at, g.stream, g.body FROM log g JOIN job j ON j.handle = g.job WHERE j.id = ?1 AND (?2 IS NULL OR g.run = ?2) ORDER BY g.entry",
    )
    .bind(id.0.to_be_bytes().to_vec())
    .bind(run)
    .fetch_all(pool)
    .await?;
    rows.iter()
        .map(|row| {
            let stream = stream_name(row.try_get(2)?);
            Ok((row.try_get(0)?, LogLine { at: UnixMillis(row.try_get(1)?), stream, text: row.try_get(3)? }))
        })
        .collect()
}

fn stream_name(name: &str) -> &'static str {
    ["stdout", "stderr", "trace", "debug", "info", "warn", "error"].into_iter().find(|known| *known == name).unwrap_or("stdout")
}

/// Every registered host.
pub(crate) async fn all_hosts(pool: &SqlitePool) -> Result<Vec<HostSeen>, Fault> {
    let mut conn = pool.acquire().await?;
    hosts(&mut conn).await
}

/// Every registered host, as this connection sees them. Index: `state_running`.
pub(crate) async fn hosts(conn: &mut SqliteConnection) -> Result<Vec<HostSeen>, Fault> {
    let rows = sqlx::query(
        "SELECT h.id, n.name, h.renewals, h.started_at, h.renewed_at, \
         (SELECT count(*) FROM job_state s INDEXED BY state_running WHERE s.place = 4 AND s.host = h.id), h.paused_by, h.paused_at \
         FROM host h JOIN host_name n ON n.id = h.id ORDER BY h.id",
    )
    .fetch_all(conn)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(HostSeen {
                host: HostId(row.try_get(0)?),
                name: row.try_get(1)?,
                renewals: row.try_get(2)?,
                started_at: UnixMillis(row.try_get(3)?),
                renewed_at: UnixMillis(row.try_get(4)?),
                running: row.try_get(5)?,
                gone: false,
                paused: read_pause(row, 6)?,
            })
        })
        .collect()
}

/// Who paused a host and when, from two columns that are both null if nobody has.
fn read_pause(row: &SqliteRow, from: usize) -> Result<Option<Pause>, Fault> {
    let (by, at): (Option<String>, Option<i64>) = (row.try_get(from)?, row.try_get(from + 1)?);
    Ok(by.zip(at).map(|(by, at)| Pause { by, at: UnixMillis(at) }))
}

/// What a host must hear. Tables that are small by nature, and the primary key of `job_state`.
pub(crate) async fn signals(pool: &SqlitePool, host: HostId) -> Result<Signals, Fault> {
    let mut conn = snapshot(pool).await?;
    let row = sqlx::query("SELECT paused_at IS NOT NULL FROM host WHERE id = ?").bind(host.0).fetch_optional(&mut *conn).await?;
    let host_paused = row.map(|row| row.try_get(0)).transpose()?.unwrap_or(false);
    let paused_queues = paused_queues(&mut conn).await?.into_keys().collect();
    Ok(Signals { cancelled: cancelled(&mut conn, host).await?, host_paused, paused_queues })
}

async fn cancelled(conn: &mut SqliteConnection, host: HostId) -> Result<Vec<CancelSignal>, Fault> {
    let rows = sqlx::query(
        "SELECT s.handle, s.token FROM cancel_request c JOIN job_state s ON s.handle = c.job AND s.token = c.token WHERE s.place = 4 AND s.host = ?",
    )
    .bind(host.0)
    .fetch_all(conn)
    .await?;
    rows.iter()
        .map(|row| Ok(CancelSignal { handle: warp_domain::JobHandle(row.try_get(0)?), token: warp_domain::ClaimToken(row.try_get(1)?) }))
        .collect()
}

/// Every admin limit.
pub(crate) async fn limits(pool: &SqlitePool) -> Result<Vec<AdminLimit>, Fault> {
    let rows = sqlx::query(
        "SELECT key, admin_limit, coalesce(set_by, ''), coalesce(set_at, 0) FROM conc_key INDEXED BY conc_key_limited \
         WHERE admin_limit IS NOT NULL ORDER BY key",
    )
    .fetch_all(pool)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(AdminLimit { key: row.try_get(0)?, limit: row.try_get(1)?, set_by: row.try_get(2)?, set_at: UnixMillis(row.try_get(3)?) })
        })
        .collect()
}

/// One key by its text.
pub(crate) async fn key(pool: &SqlitePool, key: &str) -> Result<Option<KeySeen>, Fault> {
    let mut conn = snapshot(pool).await?;
    let found = sqlx::query("SELECT id FROM conc_key WHERE key = ?").bind(key).fetch_optional(&mut *conn).await?;
    match found {
        Some(row) => key_by_id(&mut conn, KeyId(row.try_get(0)?)).await,
        None => Ok(None),
    }
}

pub(crate) async fn key_by_id(conn: &mut SqliteConnection, id: KeyId) -> Result<Option<KeySeen>, Fault> {
    let Some(mut seen) = key_with_holders(conn, id).await? else { return Ok(None) };
    let rows = sqlx::query(
        "SELECT j.id, l.contract, p.body, s.changed_at, EXISTS (SELECT 1 FROM claimable_lane c WHERE c.lane = s.lane) \
         FROM job_state s INDEXED BY state_parked JOIN job j ON j.handle = s.handle JOIN lane l ON l.id = s.lane LEFT JOIN policy p ON p.id = s.stamp \
         WHERE s.place = 2 AND s.parked_on = ? ORDER BY s.ticket LIMIT ?",
    )
    .bind(id.0)
    .bind(MAX_LISTED)
    .fetch_all(&mut *conn)
    .await?;
    let mut known: BTreeMap<String, Concurrency> = BTreeMap::new();
    for row in &rows {
        let body: &str = row.try_get::<Option<&str>, _>(2)?.unwrap_or("{}");
        if !known.contains_key(body) {
            let stamp = codec::decode_stamp(body).map_err(unreadable)?;
            if let Some(concurrency) = stamp.concurrency {
                known.insert(body.to_owned(), concurrency.value);
            }
        }
        let (limit, weight) = known.get(body).map_or((1, 1), |concurrency| (concurrency.limit, concurrency.weight));
        seen.waiters.push(WaiterSeen {
            job: read_id(row.try_get(0)?)?,
            contract: row.try_get(1)?,
            limit,
            weight,
            since: UnixMillis(row.try_get(3)?),
            claimable: row.try_get(4)?,
        });
    }
    Ok(Some(seen))
}

async fn key_with_holders(conn: &mut SqliteConnection, id: KeyId) -> Result<Option<KeySeen>, Fault> {
    let found = sqlx::query(
        "SELECT key, admin_limit, (SELECT count(*) FROM job_state INDEXED BY state_parked WHERE place = 2 AND parked_on = ?1) FROM conc_key WHERE id = ?1",
    )
    .bind(id.0)
    .fetch_optional(&mut *conn)
    .await?;
    let Some(row) = found else { return Ok(None) };
    let holders = sqlx::query(
        "SELECT j.id, l.contract, n.name, t.number, t.stamped, t.since FROM slot t JOIN job j ON j.handle = t.job \
         JOIN job_state s ON s.handle = t.job JOIN lane l ON l.id = j.lane LEFT JOIN host_name n ON n.id = s.host \
         WHERE t.key = ? ORDER BY t.number",
    )
    .bind(id.0)
    .fetch_all(&mut *conn)
    .await?;
    let holders = holders
        .iter()
        .map(|row| {
            Ok(HolderSeen {
                job: read_id(row.try_get(0)?)?,
                contract: row.try_get(1)?,
                host: row.try_get(2)?,
                slot: row.try_get(3)?,
                limit: row.try_get(4)?,
                since: UnixMillis(row.try_get(5)?),
            })
        })
        .collect::<Result<_, Fault>>()?;
    Ok(Some(KeySeen { key: row.try_get(0)?, admin_limit: row.try_get(1)?, holders, waiters: Vec::new(), waiting: row.try_get(2)? }))
}

/// Keys that somebody holds or waits for, busiest first.
pub(crate) async fn keys(pool: &SqlitePool, max: u32) -> Result<Vec<KeySeen>, Fault> {
    let mut conn = snapshot(pool).await?;
    let rows = sqlx::query(
        "SELECT key, sum(waiting) AS waits, sum(held) AS holds FROM ( \
           SELECT parked_on AS key, count(*) AS waiting, 0 AS held FROM job_state INDEXED BY state_parked WHERE place = 2 GROUP BY parked_on \
           UNION ALL SELECT key, 0, count(*) FROM slot GROUP BY key) GROUP BY key ORDER BY waits DESC, holds DESC, key LIMIT ?",
    )
    .bind(max)
    .fetch_all(&mut *conn)
    .await?;
    let mut seen = Vec::with_capacity(rows.len());
    for row in &rows {
        seen.extend(key_with_holders(&mut conn, KeyId(row.try_get(0)?)).await?);
    }
    Ok(seen)
}

/// States and counters. What has ended is counted by counters, the rest by its partial indexes.
pub(crate) async fn overview(pool: &SqlitePool) -> Result<Overview, Fault> {
    let mut conn = snapshot(pool).await?;
    let counted = sqlx::query(
        "SELECT (SELECT count(*) FROM job_state INDEXED BY state_scheduled WHERE place = 0), \
                (SELECT count(*) FROM job_state INDEXED BY state_ready WHERE place = 1), \
                (SELECT count(*) FROM job_state INDEXED BY state_parked WHERE place = 2), \
                (SELECT count(*) FROM job_state INDEXED BY state_reserved WHERE place = 3), \
                (SELECT count(*) FROM job_state INDEXED BY state_running WHERE place = 4)",
    )
    .fetch_one(&mut *conn)
    .await?;
    let number = |at: usize| -> Result<u64, Fault> { count(&counted, at) };
    let mut overview = Overview { parked: number(2)?, paused_queues: paused_queues(&mut conn).await?, ..Overview::default() };
    let mut states = BTreeMap::from([
        (State::Scheduled, number(0)?),
        (State::Enqueued, number(1)? + number(2)? + number(3)?),
        (State::Processing, number(4)?),
    ]);
    for row in sqlx::query("SELECT name, value FROM counter").fetch_all(&mut *conn).await? {
        let (name, value): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
        let kept = u64::try_from(value).unwrap_or(0);
        match name.as_str() {
            "kept:completed" => drop(states.insert(State::Completed, kept)),
            "kept:failed" => drop(states.insert(State::Failed, kept)),
            "kept:deleted" => drop(states.insert(State::Deleted, kept)),
            _ => drop(overview.counters.insert(name, value)),
        }
    }
    states.retain(|_, count| *count > 0);
    overview.states = states;
    Ok(overview)
}

/// Queues in which something lies, deepest first. What is ready is counted up to a bound for each lane, by the index that claims
/// use; what is scheduled or parked up to a bound in all, the soonest due and the first keys first, since their indexes know no
/// lane. Runs are as many as there are workers.
pub(crate) async fn queues(pool: &SqlitePool, max: u32) -> Result<Vec<QueueSeen>, Fault> {
    const MOST: u32 = 10_000;
    let mut conn = snapshot(pool).await?;
    let rows = sqlx::query(
        "WITH ready AS ( \
           SELECT l.id AS lane, \
                  (SELECT count(*) FROM (SELECT 1 FROM job_state INDEXED BY state_ready WHERE place = 1 AND lane = l.id LIMIT ?1)) + \
                  (SELECT count(*) FROM (SELECT 1 FROM job_state INDEXED BY state_reserved WHERE place = 3 AND lane = l.id LIMIT ?1)) AS jobs, \
                  (SELECT min(due) FROM job_state INDEXED BY state_ready WHERE place = 1 AND lane = l.id) AS first FROM lane l), \
         seen AS ( \
           SELECT lane, jobs AS ready, 0 AS running, 0 AS scheduled, 0 AS parked, first FROM ready WHERE jobs > 0 \
           UNION ALL SELECT lane, 0, count(*), 0, 0, NULL FROM job_state INDEXED BY state_running WHERE place = 4 GROUP BY lane \
           UNION ALL SELECT lane, 0, 0, count(*), 0, NULL FROM ( \
             SELECT lane FROM job_state INDEXED BY state_scheduled WHERE place = 0 ORDER BY due LIMIT ?1) GROUP BY lane \
           UNION ALL SELECT lane, 0, 0, 0, count(*), NULL FROM ( \
             SELECT lane FROM job_state INDEXED BY state_parked WHERE place = 2 ORDER BY parked_on, ticket LIMIT ?1) GROUP BY lane) \
         SELECT l.queue, sum(s.ready), sum(s.running), sum(s.scheduled), sum(s.parked), min(s.first) \
           FROM seen s JOIN lane l ON l.id = s.lane GROUP BY l.queue \
          ORDER BY sum(s.ready) + sum(s.running) + sum(s.scheduled) + sum(s.parked) DESC, l.queue LIMIT ?2",
    )
    .bind(MOST)
    .bind(max)
    .fetch_all(&mut *conn)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(QueueSeen {
                queue: row.try_get(0)?,
                ready: count(row, 1)?,
                running: count(row, 2)?,
                scheduled: count(row, 3)?,
                parked: count(row, 4)?,
                oldest_ready: row.try_get::<Option<i64>, _>(5)?.map(UnixMillis),
            })
        })
        .collect()
}

/// Contracts that a live host runs.
pub(crate) async fn served_contracts(pool: &SqlitePool) -> Result<Vec<String>, Fault> {
    let rows = sqlx::query("SELECT DISTINCT contract FROM host_contract ORDER BY contract").fetch_all(pool).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Shared state.
pub(crate) async fn state_get(pool: &SqlitePool, bucket: &str, key: &str) -> Result<Option<String>, Fault> {
    let mut conn = pool.acquire().await?;
    crate::shared_state::get(&mut conn, bucket, key).await
}
