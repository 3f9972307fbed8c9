//! State that handlers share: values by bucket and key.

use warp_domain::{ClaimToken, HostId, JobHandle};
use warp_store::{StateVerdict, StateWrite, StoreErrorKind, codec};

use crate::call::{Db, Sql, get};
use crate::error::Fault;
use crate::exchange::change;
use crate::rows::host_number;

/// Primary key lookup; locks nothing.
pub(crate) async fn get_value(db: &Db, bucket: &str, key: &str) -> Result<Option<String>, Fault> {
    if bucket.contains('\0') || key.contains('\0') {
        return Ok(None);
    }
    let sql = Sql::new("SELECT s.value FROM warp.state s WHERE s.bucket = $1 AND s.key = $2").arg(bucket).arg(key).repeatable();
    db.optional(sql).await?.map(|row| get(&row, 0)).transpose()
}

/// A write that applies at once. Locking stands with the function.
pub(crate) async fn write_now(
    db: &Db,
    host: HostId,
    handle: JobHandle,
    token: ClaimToken,
    write: &StateWrite,
) -> Result<StateVerdict, Fault> {
    codec::check_state_write(write).map_err(|reason| Fault::said(StoreErrorKind::Invalid, reason))?;
    let sql = Sql::new("SELECT w.verdict, w.value FROM warp.apply_state_now($1, $2, $3, $4, $5, $6::jsonb) w")
        .arg(host_number(host)?)
        .arg(handle.0)
        .arg(token.0)
        .arg(write.bucket.as_str())
        .arg(write.key.as_str())
        .arg(change(&write.change).to_string());
    let row = db.row(sql).await?;
    let value: Option<String> = get(&row, 1)?;
    Ok(match get::<i32>(&row, 0)? {
        0 => StateVerdict::Written(value),
        1 => StateVerdict::Conflict(value),
        2 => StateVerdict::NotANumber(value.unwrap_or_default()),
        _ => StateVerdict::Late,
    })
}
