//! What an operator changes: single jobs, and limits of keys (slots.md C5, B6).

use sqlx::Row as _;
use warp_domain::key::MAX_KEY_BYTES;
use warp_domain::{JobId, KeyId, UnixMillis};
use warp_store::{CommandVerdict, KeySeen, StoreErrorKind};

use crate::error::Fault;
use crate::read;
use crate::rows::{Audit, Event, Place, StateRow, state_columns};
use crate::settle::{self, Exit};
use crate::upkeep;
use crate::work::Work;

/// The state row of a job by its public name. Unique index of `job (id)`, then the primary key.
async fn find(work: &mut Work, id: JobId) -> Result<Option<StateRow>, Fault> {
    let row = sqlx::query(concat!("SELECT ", state_columns!(), " FROM job j JOIN job_state s ON s.handle = j.handle WHERE j.id = ?"))
        .bind(id.0.to_be_bytes().to_vec())
        .fetch_optional(&mut work.conn)
        .await?;
    row.as_ref().map(StateRow::read).transpose()
}

pub(crate) async fn cancel(work: &mut Work, id: JobId, by: String, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    let Some(mut row) = find(work, id).await? else { return Ok(CommandVerdict::Unknown) };
    if row.place.has_ended() {
        return Ok(CommandVerdict::NotNow(row.place.state()));
    }
    if row.place == Place::Running {
        let asked = sqlx::query(
            "INSERT INTO cancel_request (job, token, asked_by) VALUES (?, ?, ?) \
             ON CONFLICT (job) DO UPDATE SET token = excluded.token, asked_by = excluded.asked_by WHERE token <> excluded.token",
        )
        .bind(row.handle)
        .bind(row.token)
        .bind(by.clone())
        .execute(&mut work.conn)
        .await?;
        if asked.rows_affected() > 0 {
            work.audit(Audit::new(row.handle, now, Event::CancellationRequested).run_of(&row).message(format!("by {by}")));
            work.flush().await?;
            work.announce();
        }
        return Ok(CommandVerdict::Requested);
    }
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, row.keys.iter().copied()).await?;
    settle::end(work, &mut ledger, &mut row, Exit::Cancelled(&by), None, now).await?;
    work.write_decisions(&mut ledger, now).await?;
    Ok(CommandVerdict::Done)
}

pub(crate) async fn requeue(work: &mut Work, id: JobId, by: String, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    let Some(mut row) = find(work, id).await? else { return Ok(CommandVerdict::Unknown) };
    if !row.place.has_ended() && row.place != Place::Scheduled {
        return Ok(CommandVerdict::NotNow(row.place.state()));
    }
    if row.place.has_ended() {
        if !take_unique_key_again(work, row.handle).await? {
            // Another job has its unique key now.
            return Ok(CommandVerdict::NotNow(row.place.state()));
        }
        row.is_unique = has_unique_key(work, row.handle).await?;
        if let Some(kept) = row.place.kept_counter() {
            work.count(kept, -1);
        }
        sqlx::query("UPDATE outcome SET result = NULL, error = NULL WHERE job = ?").bind(row.handle).execute(&mut work.conn).await?;
    }
    row.place = Place::Ready;
    row.due = now.0;
    row.attempt = 0;
    row.deaths = 0;
    row.changed_at = now.0;
    work.audit(Audit::new(row.handle, now, Event::Requeued).message(format!("by {by}")));
    work.count_reason("stats:requeued", "manual");
    work.writes.state(row);
    work.flush().await?;
    Ok(CommandVerdict::Done)
}

async fn has_unique_key(work: &mut Work, handle: i64) -> Result<bool, Fault> {
    let row = sqlx::query("SELECT unique_key IS NOT NULL FROM job WHERE handle = ?").bind(handle).fetch_one(&mut work.conn).await?;
    Ok(row.try_get(0)?)
}

/// A job that had a unique key needs it again before it may run again.
async fn take_unique_key_again(work: &mut Work, handle: i64) -> Result<bool, Fault> {
    let taken = sqlx::query("SELECT 1 FROM job j JOIN unique_key u ON u.key = j.unique_key WHERE j.handle = ?")
        .bind(handle)
        .fetch_optional(&mut work.conn)
        .await?;
    if taken.is_some() {
        return Ok(false);
    }
    sqlx::query("INSERT INTO unique_key (key, job) SELECT unique_key, handle FROM job WHERE handle = ? AND unique_key IS NOT NULL")
        .bind(handle)
        .execute(&mut work.conn)
        .await?;
    Ok(true)
}

pub(crate) async fn delete(work: &mut Work, id: JobId, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    let Some(mut row) = find(work, id).await? else { return Ok(CommandVerdict::Unknown) };
    if row.place == Place::Running {
        return Ok(CommandVerdict::NotNow(row.place.state()));
    }
    let kept = row.place.kept_counter();
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, row.keys.iter().copied()).await?;
    settle::forget(work, &mut ledger, &mut row).await?;
    work.write_decisions(&mut ledger, now).await?;
    if let Some(kept) = kept {
        work.count(kept, -1);
    }
    upkeep::remove(work, &[row.handle]).await?;
    Ok(CommandVerdict::Done)
}

pub(crate) async fn set_limit(work: &mut Work, key: String, limit: u32, by: String, now: UnixMillis) -> Result<KeySeen, Fault> {
    let refuse = |text: &str| Err(Fault::Said(StoreErrorKind::Invalid, text.to_owned()));
    if key.is_empty() || key.contains('\0') {
        return refuse("a key is neither empty nor does it contain a NUL character");
    }
    if key.len() > MAX_KEY_BYTES {
        return refuse(&format!("the key has {} bytes; {MAX_KEY_BYTES} are allowed", key.len()));
    }
    let row = sqlx::query(
        "INSERT INTO conc_key (key, admin_limit, set_by, set_at) VALUES (?, ?, ?, ?) \
         ON CONFLICT (key) DO UPDATE SET admin_limit = excluded.admin_limit, set_by = excluded.set_by, set_at = excluded.set_at RETURNING id",
    )
    .bind(key)
    .bind(limit)
    .bind(by)
    .bind(now.0)
    .fetch_one(&mut work.conn)
    .await?;
    let id = KeyId(row.try_get(0)?);
    change_limit(work, id, Some(limit), now).await?;
    read::key_by_id(&mut work.conn, id)
        .await?
        .ok_or_else(|| Fault::Said(StoreErrorKind::Internal, format!("key {} was written and is not there", id.0)))
}

pub(crate) async fn remove_limit(work: &mut Work, key: String, now: UnixMillis) -> Result<bool, Fault> {
    let row = sqlx::query(
        "UPDATE conc_key SET admin_limit = NULL, set_by = NULL, set_at = NULL WHERE key = ? AND admin_limit IS NOT NULL RETURNING id",
    )
    .bind(key)
    .fetch_optional(&mut work.conn)
    .await?;
    let Some(row) = row else { return Ok(false) };
    change_limit(work, KeyId(row.try_get(0)?), None, now).await?;
    Ok(true)
}

/// B6: the key's row is written already; what the new limit lets in is handed on in the same transaction.
async fn change_limit(work: &mut Work, key: KeyId, limit: Option<u32>, now: UnixMillis) -> Result<(), Fault> {
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, [key]).await?;
    ledger.set_admin_limit(key, limit);
    work.write_decisions(&mut ledger, now).await
}
