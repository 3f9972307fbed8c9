//! Queues and hosts that an operator has paused.
//!
//! What must stay true: a pause and what it changes in the lines of keys is one transaction (C5, B7), and a claim
//! reads the pauses in its own. What was reserved for a paused lane is left to the expiry of reservations.

use sqlx::Row as _;
use warp_domain::{HostId, UnixMillis};
use warp_store::{StoreErrorKind, codec};

use crate::error::Fault;
use crate::hosts::{claimable_lanes, hand_on_changed_lines};
use crate::work::Work;

pub(crate) async fn pause_queue(work: &mut Work, queue: String, by: String, now: UnixMillis) -> Result<bool, Fault> {
    codec::check_name("queue", &queue).map_err(|reason| Fault::Said(StoreErrorKind::Invalid, reason))?;
    change(work, now, async |work: &mut Work| {
        let written = sqlx::query("INSERT INTO queue_pause (queue, paused_by, paused_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING")
            .bind(queue)
            .bind(by)
            .bind(now.0)
            .execute(&mut work.conn)
            .await?;
        Ok(written.rows_affected() > 0)
    })
    .await
}

pub(crate) async fn resume_queue(work: &mut Work, queue: String, now: UnixMillis) -> Result<bool, Fault> {
    change(work, now, async |work: &mut Work| {
        let removed = sqlx::query("DELETE FROM queue_pause WHERE queue = ?").bind(queue).execute(&mut work.conn).await?;
        Ok(removed.rows_affected() > 0)
    })
    .await
}

pub(crate) async fn pause_host(work: &mut Work, host: HostId, by: String, now: UnixMillis) -> Result<bool, Fault> {
    if is_paused(work, host).await? {
        return Ok(false);
    }
    change(work, now, async |work: &mut Work| {
        let update = sqlx::query("UPDATE host SET paused_by = ?, paused_at = ? WHERE id = ?").bind(by).bind(now.0).bind(host.0);
        Ok(update.execute(&mut work.conn).await?.rows_affected() > 0)
    })
    .await
}

pub(crate) async fn resume_host(work: &mut Work, host: HostId, now: UnixMillis) -> Result<bool, Fault> {
    if !is_paused(work, host).await? {
        return Ok(false);
    }
    change(work, now, async |work: &mut Work| {
        let update = sqlx::query("UPDATE host SET paused_by = NULL, paused_at = NULL WHERE id = ?").bind(host.0);
        Ok(update.execute(&mut work.conn).await?.rows_affected() > 0)
    })
    .await
}

/// Writes the word and hands on the lines in which somebody counts, or counts no more, because of it.
async fn change(work: &mut Work, now: UnixMillis, write: impl AsyncFnOnce(&mut Work) -> Result<bool, Fault>) -> Result<bool, Fault> {
    let before = claimable_lanes(work).await?;
    if !write(work).await? {
        return Ok(false);
    }
    let mut ledger = work.ledger();
    hand_on_changed_lines(work, &mut ledger, &before, now).await?;
    // Hosts have jobs to hand back, or to claim.
    work.announce();
    Ok(true)
}

async fn is_paused(work: &mut Work, host: HostId) -> Result<bool, Fault> {
    let row = sqlx::query("SELECT paused_at IS NOT NULL FROM host WHERE id = ?").bind(host.0).fetch_optional(&mut work.conn).await?;
    let row = row.ok_or_else(|| Fault::Said(StoreErrorKind::NotFound, format!("host {} is not registered", host.0)))?;
    Ok(row.try_get(0)?)
}
