//! Writing new jobs.
//!
//! Many rows go in one statement, as arrays. What is refused by its own data never reaches the server.

use std::collections::{BTreeMap, BTreeSet};

use warp_domain::UnixMillis;
use warp_store::{EnqueueVerdict, NewJob, StoreErrorKind, codec};

use crate::Core;
use crate::call::{Sql, get};
use crate::error::Fault;
use crate::rows::write_metadata;

/// Rows of one statement, which bounds the memory of both sides. More rows make no statement faster.
const ROWS: usize = 5_000;
/// Bytes of payload of one statement, unless the first alone is larger.
const BYTES: usize = 8 << 20;

/// What became of new jobs.
pub(crate) struct Enqueued {
    /// One each, in order.
    pub(crate) verdicts: Vec<EnqueueVerdict>,
    /// Whether some of it is announced later than its commit.
    pub(crate) unsaid: bool,
}

/// Writes jobs. More than [`ROWS`] of them are several statements in a row: a fault among those leaves the first ones
/// written, and the same call again finds them by their ids.
///
/// Locking and indexes stand with `warp.enqueue_rows` and `warp.enqueue_one`. Its caller runs it to its end, so that what it leaves unsaid is
/// announced.
pub(crate) async fn enqueue(core: &Core, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Enqueued, Fault> {
    let mut enqueued = Enqueued { verdicts: Vec::with_capacity(jobs.len()), unsaid: false };
    let verdicts = &mut enqueued.verdicts;
    let mut chunk = Chunk::default();
    for job in jobs {
        if let Err(reason) = codec::check_new_job(&job) {
            verdicts.push(EnqueueVerdict::Refused(reason));
            continue;
        }
        if chunk.is_full(&job) {
            enqueued.unsaid |= std::mem::take(&mut chunk).write(core, core.clock.tell(now), verdicts).await?;
        }
        chunk.places.push(verdicts.len());
        verdicts.push(EnqueueVerdict::Enqueued(job.id));
        chunk.bytes += job.payload.len();
        chunk.jobs.push(job);
    }
    enqueued.unsaid |= chunk.write(core, core.clock.tell(now), verdicts).await?;
    Ok(enqueued)
}

/// Jobs that go in one statement, and the places of their verdicts.
#[derive(Default)]
struct Chunk {
    jobs: Vec<NewJob>,
    places: Vec<usize>,
    bytes: usize,
}

impl Chunk {
    fn is_full(&self, next: &NewJob) -> bool {
        !self.jobs.is_empty() && (self.jobs.len() >= ROWS || self.bytes + next.payload.len() > BYTES)
    }

    /// Whether something of it is announced later.
    async fn write(self, core: &Core, now: Option<i64>, verdicts: &mut [EnqueueVerdict]) -> Result<bool, Fault> {
        let Core { db, interned, clock: _, announcer } = core;
        if self.jobs.is_empty() {
            return Ok(false);
        }
        let names: Vec<_> = self.jobs.iter().map(|job| (job.contract.clone(), job.queue.clone())).collect();
        let lanes = interned.lanes(db, &names).await?;
        let declared: Vec<_> = self.jobs.iter().map(|job| &job.explicit).collect();
        let explicits = interned.declared_ids(db, &declared).await?;
        if let ([job], [lane], [explicit]) = (&*self.jobs, &*lanes, &*explicits)
            && job.due.is_none()
            && job.unique_key.is_none()
        {
            let (is_written, is_unsaid) = write_one(core, job, *lane, *explicit, now).await?;
            if !is_written && let Some(place) = self.places.first() {
                verdicts[*place] = EnqueueVerdict::Duplicate(job.id);
            }
            return Ok(is_unsaid);
        }
        let mut columns = Columns::with_capacity(self.jobs.len());
        self.jobs.into_iter().for_each(|job| columns.push(job));
        let Columns { ids, payloads, metadata, trace_parents, dues, unique_keys } = columns;
        let queues = names.iter().map(|(_, queue)| queue.as_str()).collect();
        let quiet = announcer.begin(&queues);
        let quiet_lanes: BTreeMap<i32, &str> = lanes
            .iter()
            .zip(&names)
            .filter(|(_, (_, queue))| quiet.contains(queue.as_str()))
            .map(|(lane, (_, queue))| (*lane, queue.as_str()))
            .collect();
        let sql = Sql::new("SELECT e.taken, e.unsaid FROM warp.enqueue_rows($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) e")
            .arg(ids)
            .arg(lanes)
            .arg(explicits)
            .arg(payloads)
            .arg(metadata)
            .arg(trace_parents)
            .arg(dues)
            .arg(unique_keys)
            .arg(now)
            .arg(quiet_lanes.keys().copied().collect::<Vec<_>>());
        let row = match db.row(sql).await {
            Ok(row) => row,
            Err(fault) => {
                // It may have been written after all.
                announcer.owe(quiet);
                return Err(fault);
            }
        };
        let unsaid: Vec<i32> = get::<Option<_>>(&row, 1)?.unwrap_or_default();
        let is_unsaid = !unsaid.is_empty();
        if is_unsaid {
            announcer.owe(unsaid.iter().filter_map(|lane| quiet_lanes.get(lane).copied()));
        }
        // Nothing at all: every one was written.
        let Some(taken) = get::<Option<Vec<Option<uuid::Uuid>>>>(&row, 0)? else { return Ok(is_unsaid) };
        if taken.len() != self.places.len() {
            return Err(Fault::said(StoreErrorKind::Internal, format!("{} verdicts for {} jobs", taken.len(), self.places.len())));
        }
        for (place, taken) in self.places.into_iter().zip(taken) {
            if let Some(other) = taken {
                verdicts[place] = EnqueueVerdict::Duplicate(warp_domain::JobId(other.as_u128()));
            }
        }
        Ok(is_unsaid)
    }
}

/// Writes a job that may run at once and has no unique key, what most calls bring, with less work for the server: whether
/// it was written, else one with its id is there already, and whether it is announced later.
async fn write_one(core: &Core, job: &NewJob, lane: i32, explicit: Option<i32>, now: Option<i64>) -> Result<(bool, bool), Fault> {
    let Core { db, announcer, .. } = core;
    let queue = job.queue.as_str();
    let quiet = announcer.begin(&BTreeSet::from([queue]));
    let is_loud = quiet.is_empty();
    let sql = Sql::new("SELECT warp.enqueue_one($1, $2, $3, $4, $5, $6, $7, $8)")
        .arg(job.id.0)
        .arg(lane)
        .arg(explicit)
        .arg(job.payload.as_str())
        .arg(write_metadata(&job.metadata))
        .arg(job.trace_parent.clone())
        .arg(now)
        .arg(is_loud.then(|| queue.to_owned()));
    let is_written = match db.row(sql).await {
        Ok(row) => get::<bool>(&row, 0)?,
        Err(fault) => {
            // It may have been written after all.
            announcer.owe(quiet);
            return Err(fault);
        }
    };
    let is_unsaid = is_written && !is_loud;
    if is_unsaid {
        announcer.owe(quiet);
    }
    Ok((is_written, is_unsaid))
}

/// The rows, column by column.
struct Columns {
    ids: Vec<u128>,
    payloads: Vec<String>,
    metadata: Vec<Option<String>>,
    trace_parents: Vec<Option<String>>,
    dues: Vec<Option<i64>>,
    unique_keys: Vec<Option<String>>,
}

impl Columns {
    fn with_capacity(rows: usize) -> Self {
        Columns {
            ids: Vec::with_capacity(rows),
            payloads: Vec::with_capacity(rows),
            metadata: Vec::with_capacity(rows),
            trace_parents: Vec::with_capacity(rows),
            dues: Vec::with_capacity(rows),
            unique_keys: Vec::with_capacity(rows),
        }
    }

    fn push(&mut self, job: NewJob) {
        let NewJob { id, contract: _, queue: _, payload, metadata, trace_parent, due, explicit: _, unique_key } = job;
        self.ids.push(id.0);
        self.payloads.push(payload);
        self.metadata.push(write_metadata(&metadata));
        self.trace_parents.push(trace_parent);
        self.dues.push(due.map(|due| due.0));
        self.unique_keys.push(unique_key);
    }
}
