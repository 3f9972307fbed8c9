//! What keeps the tables in order: reservations that nobody claimed, rows that have been kept long enough.
//!
//! Each is one call of a function, bounded; locking and indexes stand with it. Counters are folded by the hosts' ticks.

use std::time::Duration;

use warp_domain::UnixMillis;
use warp_store::Retention;

use crate::call::{Db, Sql, get};
use crate::clock::Clock;
use crate::error::Fault;
use crate::rows::millis;

/// B7: back into the line with them, and the slot on to the next.
pub(crate) async fn expire_reservations(db: &Db, clock: Clock, patience: Duration, now: UnixMillis) -> Result<u32, Fault> {
    let sql = Sql::new("SELECT warp.expire_reservations($1, $2)").arg(millis(patience)).arg(clock.tell(now));
    Ok(get::<i32>(&db.row(sql).await?, 0)?.unsigned_abs())
}

/// Deletes what has ended long enough ago, oldest first.
pub(crate) async fn prune(db: &Db, clock: Clock, retention: Retention, max: u32, now: UnixMillis) -> Result<u32, Fault> {
    let Retention { completed, deleted, failed } = retention;
    let sql = Sql::new("SELECT warp.prune($1, $2, $3, $4, $5)")
        .arg(completed.map(millis))
        .arg(deleted.map(millis))
        .arg(failed.map(millis))
        .arg(i32::try_from(max).unwrap_or(i32::MAX))
        .arg(clock.tell(now));
    Ok(get::<i32>(&db.row(sql).await?, 0)?.unsigned_abs())
}
