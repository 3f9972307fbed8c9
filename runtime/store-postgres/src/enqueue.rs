//! Writing new jobs.
//!
//! Many rows go in one statement, as arrays. What is refused by its own data never reaches the server.

use warp_domain::UnixMillis;
use warp_store::{EnqueueVerdict, NewJob, StoreErrorKind, codec};

use crate::call::{Db, Sql, get};
use crate::clock::Clock;
use crate::error::Fault;
use crate::intern::Interned;
use crate::rows::write_metadata;

/// Rows of one statement, which bounds the memory of both sides. More rows make no statement faster.
const ROWS: usize = 5_000;
/// Bytes of payload of one statement, unless the first alone is larger.
const BYTES: usize = 8 << 20;

/// Writes jobs; one verdict each, in order. More than [`ROWS`] of them are several statements in a row: a fault among
/// those leaves the first ones written, and the same call again finds them by their ids.
///
/// Locking and indexes stand with `warp.enqueue_rows`.
pub(crate) async fn enqueue(
    db: &Db,
    interned: &Interned,
    clock: Clock,
    jobs: Vec<NewJob>,
    now: UnixMillis,
) -> Result<Vec<EnqueueVerdict>, Fault> {
    let mut verdicts = Vec::with_capacity(jobs.len());
    let mut chunk = Chunk::default();
    for job in jobs {
        if let Err(reason) = codec::check_new_job(&job) {
            verdicts.push(EnqueueVerdict::Refused(reason));
            continue;
        }
        if chunk.is_full(&job) {
            std::mem::take(&mut chunk).write(db, interned, clock.tell(now), &mut verdicts).await?;
        }
        chunk.places.push(verdicts.len());
        verdicts.push(EnqueueVerdict::Enqueued(job.id));
        chunk.bytes += job.payload.len();
        chunk.jobs.push(job);
    }
    chunk.write(db, interned, clock.tell(now), &mut verdicts).await?;
    Ok(verdicts)
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

    async fn write(self, db: &Db, interned: &Interned, now: Option<i64>, verdicts: &mut [EnqueueVerdict]) -> Result<(), Fault> {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = self.jobs.iter().map(|job| (job.contract.clone(), job.queue.clone())).collect();
        let lanes = interned.lanes(db, &names).await?;
        let declared: Vec<_> = self.jobs.iter().map(|job| &job.explicit).collect();
        let explicits = interned.declared_ids(db, &declared).await?;
        let mut columns = Columns::with_capacity(self.jobs.len());
        self.jobs.into_iter().for_each(|job| columns.push(job));
        let Columns { ids, payloads, metadata, trace_parents, dues, unique_keys } = columns;
        let sql = Sql::new("SELECT warp.enqueue_rows($1, $2, $3, $4, $5, $6, $7, $8, $9)")
            .arg(ids)
            .arg(lanes)
            .arg(explicits)
            .arg(payloads)
            .arg(metadata)
            .arg(trace_parents)
            .arg(dues)
            .arg(unique_keys)
            .arg(now);
        let row = db.row(sql).await?;
        // Nothing at all: every one was written.
        let Some(taken) = get::<Option<Vec<Option<uuid::Uuid>>>>(&row, 0)? else { return Ok(()) };
        if taken.len() != self.places.len() {
            return Err(Fault::said(StoreErrorKind::Internal, format!("{} verdicts for {} jobs", taken.len(), self.places.len())));
        }
        for (place, taken) in self.places.into_iter().zip(taken) {
            if let Some(other) = taken {
                verdicts[place] = EnqueueVerdict::Duplicate(warp_domain::JobId(other.as_u128()));
            }
        }
        Ok(())
    }
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
