//! Questions: what people and pages ask.
//!
//! Each is one statement and so one snapshot. None locks anything. Parts of an answer that are lists come as JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use sqlx::postgres::PgRow;
use warp_domain::ending::State;
use warp_domain::policy::{Declared, Stamp};
use warp_domain::{ClaimToken, Digest, HostId, JobHandle, JobId, RunNumber, UnixMillis};
use warp_store::{
    AdminLimit, AuditRow, CancelSignal, HolderSeen, JobDetails, JobFilter, JobSummary, KeySeen, LogLine, MAX_LISTED, Overview, Pause,
    QueueSeen, Signals, StoreErrorKind, WaiterSeen, Waiting, codec,
};

use crate::call::{Db, Sql, get, get_id};
use crate::error::Fault;
use crate::hosts::read_pause;
use crate::rows::{Place, event_name, host_number, read_metadata};

fn damaged(what: &str, why: impl std::fmt::Display) -> Fault {
    Fault::said(StoreErrorKind::Internal, format!("{what}: {why}"))
}

/// A column of JSON; null is the empty list.
fn get_json<T: DeserializeOwned + Default>(row: &PgRow, at: usize, what: &str) -> Result<T, Fault> {
    let text: Option<&str> = get(row, at)?;
    text.map_or_else(|| Ok(T::default()), |text| serde_json::from_str(text).map_err(|error| damaged(what, error)))
}

fn read_id(text: &str) -> Result<JobId, Fault> {
    text.parse().map_err(|error| damaged("the id of a job", error))
}

fn count(row: &PgRow, at: usize) -> Result<u64, Fault> {
    Ok(u64::try_from(get::<Option<i64>>(row, at)?.unwrap_or(0)).unwrap_or(0))
}

// ------------------------------------------------------------------------------------------------ jobs

/// Newest first by id. The plan is made by the function.
pub(crate) async fn jobs(db: &Db, filter: JobFilter) -> Result<Vec<JobSummary>, Fault> {
    let JobFilter { states, contract, queue, key, before, limit } = filter;
    if [&contract, &queue, &key].into_iter().flatten().any(|text| text.contains('\0')) {
        return Ok(Vec::new());
    }
    let places: Vec<i16> = states.iter().flat_map(|state| Place::numbers_of(*state)).copied().collect();
    // Typed as an array, so that it can be none at all.
    let sql = if places.is_empty() {
        Sql::new("SELECT * FROM warp.list_jobs(NULL, $1, $2, $3, $4, $5)")
    } else {
        Sql::new("SELECT * FROM warp.list_jobs($6, $1, $2, $3, $4, $5)")
    };
    let sql = sql.arg(contract).arg(queue).arg(key).arg(before.map(|before| before.0)).arg(i64::from(limit.max(1)));
    let sql = if places.is_empty() { sql } else { sql.arg(places) };
    let rows = db.rows(sql.repeatable()).await?;
    rows.iter().map(|row| read_summary(row, JobId(get_id(row, 0)?), 1)).collect()
}

/// Contract, queue, place, run, attempt, created, changed, due.
fn read_summary(row: &PgRow, id: JobId, from: usize) -> Result<JobSummary, Fault> {
    let place = Place::read(get(row, from + 2)?)?;
    Ok(JobSummary {
        id,
        contract: get(row, from)?,
        queue: get(row, from + 1)?,
        state: place.state(),
        parked: place == Place::Parked,
        runs: get::<i32>(row, from + 3)?.unsigned_abs(),
        attempts: get::<i32>(row, from + 4)?.unsigned_abs(),
        created_at: UnixMillis(get(row, from + 5)?),
        changed_at: UnixMillis(get(row, from + 6)?),
        due: if place == Place::Scheduled { Some(UnixMillis(get(row, from + 7)?)) } else { None },
    })
}

/// Everything about one job. Its state row is looked for in each table by its primary key, and in `running` host by host.
///
/// The history is what `audit` holds and what the rows tell by themselves: that it was Created, the run that goes on or,
/// of a Completed job, ran last, and its end. In one run's history its Processing comes first, whenever it was written down.
const JOB: &str = "SELECT l.contract, l.queue, s.place, s.run, s.attempt, j.created_at, s.changed_at, s.due, \
     j.payload, j.metadata, j.trace_parent, j.unique_key, e.body, p.body, n.name, d.sha256, \
     o.result, o.error, o.dropped_lines, o.dropped_bytes, \
     (SELECT json_agg(c.key ORDER BY c.id) FROM warp.conc_key c WHERE c.id = ANY (s.keys))::text, \
     (SELECT json_agg(json_build_array(g.name, g.percent) ORDER BY g.entry) FROM warp.progress g WHERE g.job = j.handle)::text, \
     (SELECT json_agg(json_build_array(a.at, a.event, a.run, a.message, an.name, 'sha256:' || encode(ad.sha256, 'hex'), a.took_us) \
                      ORDER BY a.runs, a.event <> 2, a.entry) \
        FROM (SELECT h.at, h.event, h.run, h.runs, h.message, h.host, h.digest, h.took_us, h.entry FROM warp.audit h WHERE h.job = j.handle \
              UNION ALL SELECT j.created_at, 1::smallint, 0, -1, NULL, NULL, NULL, NULL, 0 \
              UNION ALL SELECT s.claimed_at, 2::smallint, s.run, s.run, NULL, s.host, s.digest, NULL, 0 WHERE s.place IN (4, 10) \
              UNION ALL SELECT s.changed_at, 3::smallint, s.run, s.run, NULL, s.host, s.digest, s.took_us, 9223372036854775807 WHERE s.place = 10) a \
        LEFT JOIN warp.host_name an ON an.id = a.host LEFT JOIN warp.digest ad ON ad.id = a.digest)::text, \
     q.paused_by, q.paused_at, EXISTS (SELECT FROM warp.claimable_lane c WHERE c.lane = s.lane), \
     CASE WHEN s.place = 1 THEN (SELECT count(*) FROM (SELECT FROM warp.ready r WHERE r.place = 1 AND r.lane = s.lane \
                                 AND (r.due, r.handle) < (s.due, s.handle) LIMIT $2) r) END, \
     s.refusal, \
     CASE WHEN s.place = 2 THEN (SELECT count(*) FROM warp.waiting w WHERE w.place = 2 AND w.parked_on = s.parked_on AND w.ticket <= s.ticket) END, \
     CASE WHEN s.place = 2 THEN warp.key_seen(s.parked_on, $2) END \
     FROM warp.job j \
     CROSS JOIN LATERAL (SELECT r.* FROM warp.ready r WHERE r.handle = j.handle \
           UNION ALL SELECT w.* FROM warp.waiting w WHERE w.handle = j.handle \
           UNION ALL SELECT r.* FROM warp.host h JOIN warp.running r ON r.host = h.id AND r.handle = j.handle \
           UNION ALL SELECT x.* FROM warp.ended x WHERE x.handle = j.handle) s \
     JOIN warp.lane l ON l.id = j.lane \
     LEFT JOIN warp.policy e ON e.id = j.explicit LEFT JOIN warp.policy p ON p.id = s.stamp LEFT JOIN warp.host_name n ON n.id = s.host \
     LEFT JOIN warp.digest d ON d.id = s.digest LEFT JOIN warp.outcome o ON o.job = j.handle LEFT JOIN warp.queue_pause q ON q.queue = l.queue \
     WHERE j.id = $1";

/// Everything about one job.
pub(crate) async fn job(db: &Db, id: JobId) -> Result<Option<JobDetails>, Fault> {
    let most = i32::try_from(MAX_LISTED).unwrap_or(i32::MAX);
    let Some(row) = db.optional(Sql::new(JOB).arg(id.0).arg(most).repeatable()).await? else { return Ok(None) };
    let row = &row;
    let summary = read_summary(row, id, 0)?;
    let place = Place::read(get(row, 2)?)?;
    let unreadable = |error: codec::PolicyTextError| Fault::said(StoreErrorKind::Schema, error.to_string());
    let declared = get::<Option<&str>>(row, 12)?.map(codec::decode_declared).transpose().map_err(unreadable)?;
    let stamp = get::<Option<&str>>(row, 13)?.map(codec::decode_stamp).transpose().map_err(unreadable)?;
    let running = if place == Place::Running { get::<Option<String>>(row, 14)?.zip(read_digest(row, 15)?) } else { None };
    Ok(Some(JobDetails {
        payload: get(row, 8)?,
        metadata: read_metadata(get(row, 9)?)?,
        trace_parent: get(row, 10)?,
        unique_key: get(row, 11)?,
        explicit: declared.unwrap_or_else(Declared::default),
        keys: get_json(row, 20, "the keys of a job")?,
        running,
        waiting: waiting(row, place, stamp.as_ref())?,
        stamp,
        result: if place == Place::Completed { get(row, 16)? } else { None },
        error: get(row, 17)?,
        audit: audit(row, 22)?,
        progress: get_json(row, 21, "the progress of a job")?,
        dropped: (count(row, 18)?, count(row, 19)?),
        summary,
    }))
}

fn read_digest(row: &PgRow, at: usize) -> Result<Option<Digest>, Fault> {
    let Some(bytes) = get::<Option<Vec<u8>>>(row, at)? else { return Ok(None) };
    let bytes = <[u8; 32]>::try_from(bytes).map_err(|bytes| damaged("a digest", format!("{} bytes", bytes.len())))?;
    Ok(Some(Digest(bytes)))
}

/// At, event, run, message, host, digest, µs.
type Entry = (i64, i16, RunNumber, Option<String>, Option<String>, Option<String>, Option<u64>);

fn audit(row: &PgRow, at: usize) -> Result<Vec<AuditRow>, Fault> {
    let entries: Vec<Entry> = get_json(row, at, "the history of a job")?;
    entries
        .into_iter()
        .map(|(at, event, run, message, host, digest, took)| {
            Ok(AuditRow {
                at: UnixMillis(at),
                event: event_name(event).to_owned(),
                run,
                message: message.unwrap_or_default(),
                host,
                digest: digest.map(|digest| digest.parse()).transpose().map_err(|error| damaged("a digest", error))?,
                took: took.map(Duration::from_micros),
            })
        })
        .collect()
}

/// Why it is not running.
fn waiting(row: &PgRow, place: Place, stamp: Option<&Stamp>) -> Result<Option<Waiting>, Fault> {
    Ok(Some(match place {
        Place::Scheduled => Waiting::Due(UnixMillis(get(row, 7)?)),
        Place::Reserved => Waiting::Reserved,
        Place::Ready => match read_pause(row, 23)? {
            Some(pause) => Waiting::Paused(pause),
            None if !get::<bool>(row, 25)? => Waiting::ForHost,
            None => Waiting::ForWorker { ahead: narrow(count(row, 26)?) },
        },
        Place::Parked => {
            let Some(key) = get::<Option<&str>>(row, 29)? else { return Ok(None) };
            let key = parse_key(key)?;
            let stamped = stamp.and_then(|stamp| stamp.concurrency.as_ref()).map_or(1, |concurrency| concurrency.value.limit);
            Waiting::ForKey {
                place: narrow(count(row, 28)?),
                limit: key.admin_limit.unwrap_or(stamped),
                limit_is_admin: key.admin_limit.is_some(),
                refusal: get::<Option<String>>(row, 27)?.unwrap_or_default(),
                key,
            }
        }
        Place::Running | Place::Awaiting | Place::Completed | Place::Failed | Place::Deleted => return Ok(None),
    }))
}

fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Lines of a job's runs in order. Unique index of `job (id)`, then the primary key of `log`.
pub(crate) async fn job_logs(db: &Db, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>, Fault> {
    const LOGS: &str = "SELECT g.run, g.at, g.stream, g.body FROM warp.job j JOIN warp.log g ON g.job = j.handle \
         WHERE j.id = $1 AND ($2 IS NULL OR g.run = $2) ORDER BY g.entry";
    // More runs than the column counts there are none.
    let run = run.map(|run| i32::try_from(run).unwrap_or(i32::MAX));
    let rows = db.rows(Sql::new(LOGS).arg(id.0).arg(run).repeatable()).await?;
    rows.iter()
        .map(|row| {
            let line = LogLine { at: UnixMillis(get(row, 1)?), stream: stream_name(get(row, 2)?), text: get(row, 3)? };
            Ok((get::<i32>(row, 0)?.unsigned_abs(), line))
        })
        .collect()
}

fn stream_name(name: &str) -> &'static str {
    ["stdout", "stderr", "trace", "debug", "info", "warn", "error"].into_iter().find(|known| *known == name).unwrap_or("stdout")
}

/// What a host must hear. Tables that are small by nature, and the primary key of `running`.
pub(crate) async fn signals(db: &Db, host: HostId) -> Result<Signals, Fault> {
    const SIGNALS: &str = "SELECT EXISTS (SELECT FROM warp.host h WHERE h.id = $1 AND h.paused_at IS NOT NULL), \
         (SELECT json_agg(json_build_array(r.handle, r.token)) \
            FROM warp.cancel_request c JOIN warp.running r ON r.host = $1 AND r.handle = c.job AND r.token = c.token)::text, \
         (SELECT json_agg(q.queue ORDER BY q.queue) FROM warp.queue_pause q)::text";
    let row = db.row(Sql::new(SIGNALS).arg(host_number(host)?).repeatable()).await?;
    let cancelled: Vec<(i64, i64)> = get_json(&row, 1, "cancellations")?;
    Ok(Signals {
        cancelled: cancelled.into_iter().map(|(job, token)| CancelSignal { handle: JobHandle(job), token: ClaimToken(token) }).collect(),
        host_paused: get(&row, 0)?,
        paused_queues: get_json(&row, 2, "paused queues")?,
    })
}

// ------------------------------------------------------------------------------------------------ keys

/// Every admin limit. Index: `conc_key_limited`.
pub(crate) async fn limits(db: &Db) -> Result<Vec<AdminLimit>, Fault> {
    const LIMITS: &str = "SELECT c.key, c.admin_limit, coalesce(c.set_by, ''), coalesce(c.set_at, 0) FROM warp.conc_key c \
         WHERE c.admin_limit IS NOT NULL ORDER BY c.key COLLATE \"C\"";
    let rows = db.rows(Sql::new(LIMITS).repeatable()).await?;
    rows.iter()
        .map(|row| {
            let limit = get::<i32>(row, 1)?.unsigned_abs();
            Ok(AdminLimit { key: get(row, 0)?, limit, set_by: get(row, 2)?, set_at: UnixMillis(get(row, 3)?) })
        })
        .collect()
}

/// A key as `warp.key_seen` tells it.
type Seen = (String, Option<u32>, u32, Vec<Holder>, Vec<Waiter>);
/// Job, contract, host, slot, stamped limit, since.
type Holder = (String, String, Option<String>, u32, u32, i64);
/// Job, contract, limit, weight, since, claimable.
type Waiter = (String, String, u32, u32, i64, bool);

fn parse_key(text: &str) -> Result<KeySeen, Fault> {
    let (key, admin_limit, waiting, holders, waiters): Seen = serde_json::from_str(text).map_err(|error| damaged("a key", error))?;
    let holder = |(job, contract, host, slot, limit, since): Holder| {
        Ok(HolderSeen { job: read_id(&job)?, contract, host, slot, limit, since: UnixMillis(since) })
    };
    let waiter = |(job, contract, limit, weight, since, claimable): Waiter| {
        Ok(WaiterSeen { job: read_id(&job)?, contract, limit, weight, since: UnixMillis(since), claimable })
    };
    Ok(KeySeen {
        key,
        admin_limit,
        holders: holders.into_iter().map(holder).collect::<Result<_, Fault>>()?,
        waiters: waiters.into_iter().map(waiter).collect::<Result<_, Fault>>()?,
        waiting,
    })
}

/// One key by its text. Unique index of `conc_key (key)`.
pub(crate) async fn key(db: &Db, key: &str) -> Result<Option<KeySeen>, Fault> {
    if key.contains('\0') {
        return Ok(None);
    }
    let most = i32::try_from(MAX_LISTED).unwrap_or(i32::MAX);
    let sql = Sql::new("SELECT warp.key_seen(c.id, $2) FROM warp.conc_key c WHERE c.key = $1").arg(key).arg(most).repeatable();
    db.optional(sql).await?.map(|row| parse_key(get(&row, 0)?)).transpose()
}

/// One key by its number.
pub(crate) async fn read_key(db: &Db, key: i64) -> Result<Option<KeySeen>, Fault> {
    let most = i32::try_from(MAX_LISTED).unwrap_or(i32::MAX);
    let row = db.row(Sql::new("SELECT warp.key_seen($1, $2)").arg(key).arg(most).repeatable()).await?;
    get::<Option<&str>>(&row, 0)?.map(parse_key).transpose()
}

/// Keys that somebody holds or waits for, busiest first. Reads the index `waiting_parked`, the primary key of `slot` and, where
/// slots are session locks and stand in no row, the running rows, each as a whole.
pub(crate) async fn keys(db: &Db, max: u32) -> Result<Vec<KeySeen>, Fault> {
    const KEYS: &str = "SELECT warp.key_seen(k.key, 0) FROM ( \
           SELECT b.key, sum(b.waits) AS waits, sum(b.holds) AS holds FROM ( \
             SELECT w.parked_on AS key, count(*) AS waits, 0 AS holds FROM warp.waiting w WHERE w.place = 2 GROUP BY w.parked_on \
             UNION ALL SELECT s.key, 0, count(*) FROM warp.slot s GROUP BY s.key \
             UNION ALL SELECT k.key, 0, count(*) FROM warp.running r, unnest(r.keys) k (key) WHERE warp.by_session() GROUP BY k.key) b \
           GROUP BY b.key ORDER BY waits DESC, holds DESC, b.key LIMIT $1) k \
         ORDER BY k.waits DESC, k.holds DESC, k.key";
    let rows = db.rows(Sql::new(KEYS).arg(i64::from(max)).repeatable()).await?;
    rows.iter().filter_map(|row| get::<Option<&str>>(row, 0).transpose()).map(|text| parse_key(text?)).collect()
}

// ------------------------------------------------------------------------------------------------ the database as a whole

/// States and counters. What has ended is counted by counters, the rest by its small tables.
pub(crate) async fn overview(db: &Db) -> Result<Overview, Fault> {
    const OVERVIEW: &str = "SELECT (SELECT count(*) FROM warp.waiting w WHERE w.place = 0), \
         (SELECT count(*) FROM warp.ready), \
         (SELECT count(*) FROM warp.waiting w WHERE w.place = 2), \
         (SELECT count(*) FROM warp.running), \
         (SELECT json_agg(json_build_array(c.name, c.value)) FROM ( \
            SELECT f.name, sum(f.value) AS value FROM warp.counter f GROUP BY f.name) c)::text, \
         (SELECT json_agg(json_build_array(q.queue, q.paused_by, q.paused_at)) FROM warp.queue_pause q)::text";
    let row = db.row(Sql::new(OVERVIEW).repeatable()).await?;
    let parked = count(&row, 2)?;
    let mut overview = Overview { parked, paused_queues: read_pauses(&row, 5)?, ..Overview::default() };
    let mut states = BTreeMap::from([
        (State::Scheduled, count(&row, 0)?),
        (State::Enqueued, count(&row, 1)? + parked),
        (State::Processing, count(&row, 3)?),
    ]);
    let counters: Vec<(String, i64)> = get_json(&row, 4, "the counters")?;
    for (name, value) in counters {
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

fn read_pauses(row: &PgRow, at: usize) -> Result<BTreeMap<String, Pause>, Fault> {
    let pauses: Vec<(String, String, i64)> = get_json(row, at, "paused queues")?;
    Ok(pauses.into_iter().map(|(queue, by, at)| (queue, Pause { by, at: UnixMillis(at) })).collect())
}

/// Every paused queue. A table that is small by nature.
pub(crate) async fn paused_queues(db: &Db) -> Result<BTreeMap<String, Pause>, Fault> {
    const PAUSES: &str = "SELECT json_agg(json_build_array(q.queue, q.paused_by, q.paused_at))::text FROM warp.queue_pause q";
    read_pauses(&db.row(Sql::new(PAUSES).repeatable()).await?, 0)
}

/// Queues in which something lies. Indexes and cost stand with the function.
pub(crate) async fn queues(db: &Db, max: u32) -> Result<Vec<QueueSeen>, Fault> {
    const QUEUES: &str = "SELECT q.queue, q.ready, q.running, q.scheduled, q.parked, q.oldest FROM warp.queues_seen($1) q";
    let rows = db.rows(Sql::new(QUEUES).arg(i32::try_from(max).unwrap_or(i32::MAX)).repeatable()).await?;
    rows.iter()
        .map(|row| {
            Ok(QueueSeen {
                queue: get(row, 0)?,
                ready: count(row, 1)?,
                running: count(row, 2)?,
                scheduled: count(row, 3)?,
                parked: count(row, 4)?,
                oldest_ready: get::<Option<i64>>(row, 5)?.map(UnixMillis),
            })
        })
        .collect()
}

/// Contracts that a live host runs. A table of hosts × contracts, small by nature.
pub(crate) async fn served_contracts(db: &Db) -> Result<Vec<String>, Fault> {
    const SERVED: &str = "SELECT DISTINCT c.contract COLLATE \"C\" FROM warp.host_contract c ORDER BY 1";
    let rows = db.rows(Sql::new(SERVED).repeatable()).await?;
    rows.iter().map(|row| get(row, 0)).collect()
}
