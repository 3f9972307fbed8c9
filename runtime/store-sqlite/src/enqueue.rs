//! Writing new jobs, for callers and for the children of a run.

use std::collections::{HashMap, HashSet};

use sqlx::Row as _;
use warp_domain::{JobId, UnixMillis};
use warp_store::{EnqueueVerdict, NewJob, codec};

use crate::error::Fault;
use crate::rows::{Audit, Event, StateRow};
use crate::work::Work;

/// One row of `job`, ready to be written.
struct JobRow {
    handle: i64,
    id: JobId,
    lane: i64,
    payload: String,
    metadata: Option<String>,
    trace_parent: Option<String>,
    explicit: Option<i64>,
    unique_key: Option<String>,
}

/// Writes jobs; one verdict each, in order. What is refused or there already changes nothing.
///
/// Locking: inside the writer's transaction. Reads `job (id)` and `unique_key` by their unique indexes.
pub(crate) async fn enqueue(work: &mut Work, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>, Fault> {
    let mut verdicts = Vec::with_capacity(jobs.len());
    let mut ids_here = ids_taken(work, &jobs).await?;
    let mut keys_here = unique_keys_taken(work, &jobs).await?;
    let mut rows = Vec::with_capacity(jobs.len());
    for job in jobs {
        if let Err(reason) = codec::check_new_job(&job) {
            verdicts.push(EnqueueVerdict::Refused(reason));
            continue;
        }
        let id = job.id;
        // The id first: a repeat of the very same call finds its own unique key taken by itself.
        if !ids_here.insert(id) {
            verdicts.push(EnqueueVerdict::Duplicate(id));
            continue;
        }
        if let Some(unique) = &job.unique_key {
            if let Some(other) = keys_here.get(unique) {
                verdicts.push(EnqueueVerdict::Duplicate(*other));
                ids_here.remove(&id);
                continue;
            }
            keys_here.insert(unique.clone(), id);
        }
        let row = prepare(work, job, now).await?;
        rows.push(row);
        verdicts.push(EnqueueVerdict::Enqueued(id));
    }
    if !rows.is_empty() {
        write(work, &rows, now).await?;
        work.announce();
    }
    Ok(verdicts)
}

/// Interns what a job names, and queues its state and its first audit row.
async fn prepare(work: &mut Work, job: NewJob, now: UnixMillis) -> Result<JobRow, Fault> {
    let NewJob { id, contract, queue, payload, metadata, trace_parent, due, explicit, unique_key } = job;
    let lane = work.lane(&contract, &queue).await?;
    let explicit = if explicit.is_empty() { None } else { Some(work.policy(codec::encode_declared(&explicit)).await?) };
    let handle = work.sequence.handle;
    work.sequence.handle += 1;
    work.writes.state(StateRow::new(handle, lane, due, now, unique_key.is_some()));
    work.audit(Audit::new(handle, now, Event::Created));
    let metadata = (!metadata.is_empty()).then(|| write_metadata(&metadata));
    Ok(JobRow { handle, id, lane, payload, metadata, trace_parent, explicit, unique_key })
}

async fn write(work: &mut Work, rows: &[JobRow], now: UnixMillis) -> Result<(), Fault> {
    work.statements
        .jobs
        .run(&mut work.conn, rows, |job, row| {
            let JobRow { handle, id, lane, payload, metadata, trace_parent, explicit, unique_key } = job;
            row.put(*handle)?.put(id.0.to_be_bytes().to_vec())?.put(*lane)?.put(payload.clone())?.put(metadata.clone())?;
            row.put(trace_parent.clone())?.put(*explicit)?.put(unique_key.clone())?.put(now.0)?;
            Ok(())
        })
        .await?;
    let unique: Vec<_> = rows.iter().filter_map(|job| job.unique_key.as_ref().map(|key| (key.clone(), job.handle))).collect();
    work.statements
        .unique_keys
        .run(&mut work.conn, &unique, |(key, job), row| {
            row.put(key.clone())?.put(*job)?;
            Ok(())
        })
        .await?;
    work.flush().await
}

/// Which of these ids exist.
async fn ids_taken(work: &mut Work, jobs: &[NewJob]) -> Result<HashSet<JobId>, Fault> {
    let wanted: Vec<_> = jobs.iter().map(|job| format!("{:032x}", job.id.0)).collect();
    let wanted = serde_json::to_string(&wanted).unwrap_or_default();
    let rows = sqlx::query("SELECT id FROM job WHERE id IN (SELECT unhex(value) FROM json_each(?))")
        .bind(wanted)
        .fetch_all(&mut work.conn)
        .await?;
    rows.iter().map(|row| read_id(row.try_get(0)?)).collect()
}

/// Which of these unique keys belong to a job that has not ended, and to which.
async fn unique_keys_taken(work: &mut Work, jobs: &[NewJob]) -> Result<HashMap<String, JobId>, Fault> {
    let wanted: Vec<_> = jobs.iter().filter_map(|job| job.unique_key.as_deref()).collect();
    if wanted.is_empty() {
        return Ok(HashMap::new());
    }
    let wanted = serde_json::to_string(&wanted).unwrap_or_default();
    let rows =
        sqlx::query("SELECT u.key, j.id FROM unique_key u JOIN job j ON j.handle = u.job WHERE u.key IN (SELECT value FROM json_each(?))")
            .bind(wanted)
            .fetch_all(&mut work.conn)
            .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, read_id(row.try_get(1)?)?))).collect()
}

/// An id as it is stored: sixteen bytes, most significant first, so that they sort like the id.
pub(crate) fn read_id(bytes: &[u8]) -> Result<JobId, Fault> {
    let bytes: [u8; 16] =
        bytes.try_into().map_err(|_| Fault::Said(warp_store::StoreErrorKind::Internal, format!("a job id of {} bytes", bytes.len())))?;
    Ok(JobId(u128::from_be_bytes(bytes)))
}

fn write_metadata(metadata: &[(String, String)]) -> String {
    serde_json::to_string(metadata).unwrap_or_default()
}

/// Reads what [`write_metadata`] wrote.
pub(crate) fn read_metadata(text: Option<&str>) -> Result<Vec<(String, String)>, Fault> {
    let Some(text) = text else { return Ok(Vec::new()) };
    serde_json::from_str(text).map_err(|error| Fault::Said(warp_store::StoreErrorKind::Internal, format!("metadata of a job: {error}")))
}
