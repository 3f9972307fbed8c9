//! State that handlers share: values by bucket and key.

use sqlx::{Row as _, SqliteConnection};
use warp_domain::{ClaimToken, HostId, JobHandle};
use warp_store::{StateChange, StateVerdict, StateWrite, StoreErrorKind, codec};

use crate::error::Fault;
use crate::work::Work;

/// What a change makes of the value that is there. `Written` carries the value to be stored.
pub(crate) fn apply(current: Option<String>, change: &StateChange) -> StateVerdict {
    match change {
        StateChange::Put(value) => StateVerdict::Written(value.clone()),
        StateChange::CompareAndSet { expected, value } if *expected == current => StateVerdict::Written(value.clone()),
        StateChange::CompareAndSet { .. } => StateVerdict::Conflict(current),
        StateChange::Add(by) => {
            let text = current.unwrap_or_else(|| "0".to_owned());
            match text.parse::<i128>().ok().and_then(|value| value.checked_add(*by)) {
                Some(sum) => StateVerdict::Written(Some(sum.to_string())),
                None => StateVerdict::NotANumber(text),
            }
        }
    }
}

/// Primary key lookup; takes no lock of its own.
pub(crate) async fn get(conn: &mut SqliteConnection, bucket: &str, key: &str) -> Result<Option<String>, Fault> {
    let row = sqlx::query("SELECT value FROM state WHERE bucket = ? AND key = ?").bind(bucket).bind(key).fetch_optional(conn).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// Writes or removes a value.
pub(crate) async fn put(work: &mut Work, bucket: &str, key: &str, value: Option<&str>) -> Result<(), Fault> {
    match value {
        Some(value) => {
            sqlx::query("INSERT INTO state (bucket, key, value) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value")
                .bind(bucket)
                .bind(key)
                .bind(value)
                .execute(&mut work.conn)
                .await?;
        }
        None => {
            sqlx::query("DELETE FROM state WHERE bucket = ? AND key = ?").bind(bucket).bind(key).execute(&mut work.conn).await?;
        }
    }
    Ok(())
}

/// Whether a run is still this host's (C1). Primary key lookup.
pub(crate) async fn run_of(work: &mut Work, host: HostId, handle: JobHandle, token: ClaimToken) -> Result<Option<u32>, Fault> {
    let row = sqlx::query("SELECT run FROM job_state WHERE handle = ? AND place = 4 AND token = ? AND host = ?")
        .bind(handle.0)
        .bind(token.0)
        .bind(host.0)
        .fetch_optional(&mut work.conn)
        .await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// A write that applies at once.
pub(crate) async fn write_now(
    work: &mut Work,
    host: HostId,
    handle: JobHandle,
    token: ClaimToken,
    write: StateWrite,
) -> Result<StateVerdict, Fault> {
    codec::check_state_write(&write).map_err(|reason| Fault::Said(StoreErrorKind::Invalid, reason))?;
    if run_of(work, host, handle, token).await?.is_none() {
        return Ok(StateVerdict::Late);
    }
    let verdict = apply(get(&mut work.conn, &write.bucket, &write.key).await?, &write.change);
    if let StateVerdict::Written(value) = &verdict {
        put(work, &write.bucket, &write.key, value.as_deref()).await?;
    }
    Ok(verdict)
}
