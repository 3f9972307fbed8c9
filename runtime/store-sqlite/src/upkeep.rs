//! What keeps the file in order: reservations that nobody claimed, rows that have been kept long enough.

use std::time::Duration;

use sqlx::Row as _;
use warp_domain::ledger::Waiter;
use warp_domain::{ClaimToken, HostId, JobHandle, UnixMillis};
use warp_store::{Retention, RunOutput, SettleVerdict};

use crate::error::Fault;
use crate::rows::{Place, StateRow, json_numbers, state_columns};
use crate::settle;
use crate::shared_state;
use crate::work::Work;

/// Reservations that one call gives back.
const EXPIRED: i64 = 1000;

/// What has been reserved or woken for too long. Indexes: `state_reserved` (few rows at any moment), `state_woken`.
pub(crate) const STALE: &str = concat!(
    "SELECT ",
    state_columns!(),
    ", EXISTS (SELECT 1 FROM claimable_lane c WHERE c.lane = s.lane) FROM job_state s WHERE s.handle IN (",
    "SELECT handle FROM job_state INDEXED BY state_reserved WHERE place = 3 AND changed_at <= ?1 ",
    "UNION ALL SELECT handle FROM job_state INDEXED BY state_woken WHERE place = 1 AND parked_on IS NOT NULL AND changed_at <= ?1) ",
    "ORDER BY s.changed_at, s.handle LIMIT +?2"
);

/// B7: back into the line with them, and the slot on to the next.
pub(crate) async fn expire_reservations(work: &mut Work, patience: Duration, now: UnixMillis) -> Result<u32, Fault> {
    let before = now.0.saturating_sub(i64::try_from(patience.as_millis()).unwrap_or(i64::MAX));
    let rows = sqlx::query(STALE).bind(before).bind(EXPIRED).fetch_all(&mut work.conn).await?;
    let mut stale = Vec::with_capacity(rows.len());
    for row in &rows {
        stale.push((StateRow::read(row)?, row.try_get::<bool, _>(crate::rows::STATE_COLUMNS)?));
    }
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, stale.iter().filter_map(|(row, _)| row.parked_on)).await?;
    let mut expired = 0;
    for (mut row, claimable) in stale {
        let (Some(key), Some(ticket)) = (row.parked_on, row.ticket) else { continue };
        let rules = work.concurrency_of(row.job(), row.stamp).await?;
        let several_keys = row.keys.len() > 1;
        let waiter = Waiter { job: row.job(), ticket, limit: rules.limit, weight: rules.weight, several_keys, claimable };
        row.ticket = Some(ledger.unreserve(key, waiter, rules.order));
        row.place = Place::Parked;
        row.changed_at = now.0;
        work.writes.state(row);
        expired += 1;
    }
    work.write_decisions(&mut ledger, now).await?;
    Ok(expired)
}

/// Whether something is reserved or woken that nobody has claimed yet. Indexes: `state_reserved`, `state_woken`.
pub(crate) async fn has_reserved(work: &mut Work) -> Result<bool, Fault> {
    let row = sqlx::query(
        "SELECT EXISTS (SELECT 1 FROM job_state INDEXED BY state_reserved WHERE place = 3) \
         OR EXISTS (SELECT 1 FROM job_state INDEXED BY state_woken WHERE place = 1 AND parked_on IS NOT NULL)",
    )
    .fetch_one(&mut work.conn)
    .await?;
    Ok(row.try_get(0)?)
}

/// Deletes what has ended long enough ago. Index: `state_ended`, one range per state, oldest first.
pub(crate) async fn prune(work: &mut Work, retention: Retention, max: u32, now: UnixMillis) -> Result<u32, Fault> {
    let Retention { completed, deleted, failed } = retention;
    let mut pruned = 0;
    for (place, keep) in [(Place::Completed, completed), (Place::Deleted, deleted), (Place::Failed, failed)] {
        let Some(keep) = keep else { continue };
        let before = now.0.saturating_sub(i64::try_from(keep.as_millis()).unwrap_or(i64::MAX));
        let rows = sqlx::query(
            "SELECT handle FROM job_state INDEXED BY state_ended WHERE place >= 10 AND place = ? AND changed_at <= ? ORDER BY changed_at LIMIT +?",
        )
        .bind(place as i64)
        .bind(before)
        .bind(i64::from(max - pruned))
        .fetch_all(&mut work.conn)
        .await?;
        let mut handles = Vec::with_capacity(rows.len());
        for row in &rows {
            handles.push(row.try_get(0)?);
        }
        remove(work, &handles).await?;
        if let Some(kept) = place.kept_counter() {
            work.count(kept, -i64::try_from(handles.len()).unwrap_or(0));
        }
        pruned += u32::try_from(handles.len()).unwrap_or(u32::MAX);
    }
    Ok(pruned)
}

/// Removes jobs and everything about them. Primary keys everywhere; the caller has taken them out of the ledger.
pub(crate) async fn remove(work: &mut Work, handles: &[i64]) -> Result<(), Fault> {
    if handles.is_empty() {
        return Ok(());
    }
    let handles = json_numbers(handles.iter().copied());
    for statement in [
        "DELETE FROM unique_key WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM audit WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM log WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM progress WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM outcome WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM cancel_request WHERE job IN (SELECT value FROM json_each(?))",
        "DELETE FROM job_state WHERE handle IN (SELECT value FROM json_each(?))",
        "DELETE FROM job WHERE handle IN (SELECT value FROM json_each(?))",
    ] {
        sqlx::query(statement).bind(handles.clone()).execute(&mut work.conn).await?;
    }
    Ok(())
}

/// Stores output of a run that goes on.
pub(crate) async fn append_output(
    work: &mut Work,
    host: HostId,
    handle: JobHandle,
    token: ClaimToken,
    output: RunOutput,
) -> Result<SettleVerdict, Fault> {
    let Some(run) = shared_state::run_of(work, host, handle, token).await? else { return Ok(SettleVerdict::Late) };
    settle::write_output(work, handle.0, run, &output);
    work.flush().await?;
    Ok(SettleVerdict::Settled)
}
