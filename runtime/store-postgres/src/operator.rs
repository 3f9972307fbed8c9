//! What an operator changes: single jobs, limits of keys, pauses (slots.md C5, B6).
//!
//! Each is one call of a function; locking and indexes stand with it.

use warp_domain::key::MAX_KEY_BYTES;
use warp_domain::{HostId, JobId, UnixMillis};
use warp_store::{CommandVerdict, KeySeen, StoreErrorKind, codec};

use crate::call::{Arg, Db, Sql, get};
use crate::clock::Clock;
use crate::error::Fault;
use crate::read::read_key;
use crate::rows::{Place, host_number, without_nul};

/// What a function answers about one job.
async fn command(db: &Db, sql: Sql) -> Result<CommandVerdict, Fault> {
    Ok(match get::<i32>(&db.row(sql).await?, 0)? {
        -1 => CommandVerdict::Unknown,
        -2 => CommandVerdict::Done,
        -3 => CommandVerdict::Requested,
        place => CommandVerdict::NotNow(Place::read(i16::try_from(place).unwrap_or(i16::MAX))?.state()),
    })
}

pub(crate) async fn cancel(db: &Db, clock: Clock, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    command(db, Sql::new("SELECT warp.cancel_job($1, $2, $3)").arg(id.0).arg(without_nul(by)).arg(clock.tell(now))).await
}

pub(crate) async fn requeue(db: &Db, clock: Clock, id: JobId, by: &str, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    command(db, Sql::new("SELECT warp.requeue_job($1, $2, $3)").arg(id.0).arg(without_nul(by)).arg(clock.tell(now))).await
}

pub(crate) async fn delete(db: &Db, clock: Clock, id: JobId, now: UnixMillis) -> Result<CommandVerdict, Fault> {
    command(db, Sql::new("SELECT warp.delete_job($1, $2)").arg(id.0).arg(clock.tell(now))).await
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::said(StoreErrorKind::Invalid, text))
}

pub(crate) async fn set_limit(db: &Db, clock: Clock, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen, Fault> {
    if key.is_empty() || key.contains('\0') {
        return invalid("a key is neither empty nor does it contain a NUL character");
    }
    if key.len() > MAX_KEY_BYTES {
        return invalid(format!("the key has {} bytes; {MAX_KEY_BYTES} are allowed", key.len()));
    }
    let Ok(number) = i32::try_from(limit) else {
        return invalid(format!("the limit {limit} is too large; {} is the largest", i32::MAX));
    };
    // The key is read in a statement of its own: whoever starts in between is seen as well.
    let sql = Sql::new("SELECT warp.set_limit($1, $2, $3, $4)").arg(key).arg(number).arg(without_nul(by)).arg(clock.tell(now));
    let id: i64 = get(&db.row(sql).await?, 0)?;
    let gone = || Fault::said(StoreErrorKind::Internal, format!("key {id} was written and is not there"));
    read_key(db, id).await?.ok_or_else(gone)
}

/// A10: wakes what a changed limit lets in, in a statement that begins after the change is committed.
pub(crate) async fn limit_changed(db: &Db, clock: Clock, key: &str, now: UnixMillis) -> Result<(), Fault> {
    db.row(Sql::new("SELECT warp.session_limit_changed($1, $2)").arg(key).arg(clock.tell(now)).repeatable()).await.map(drop)
}

pub(crate) async fn remove_limit(db: &Db, clock: Clock, key: &str, now: UnixMillis) -> Result<bool, Fault> {
    if key.contains('\0') {
        return Ok(false);
    }
    get(&db.row(Sql::new("SELECT warp.remove_limit($1, $2)").arg(key).arg(clock.tell(now))).await?, 0)
}

pub(crate) async fn pause_queue(db: &Db, clock: Clock, queue: &str, by: &str, now: UnixMillis) -> Result<bool, Fault> {
    codec::check_name("queue", queue).or_else(invalid)?;
    get(&db.row(Sql::new("SELECT warp.pause_queue($1, $2, $3)").arg(queue).arg(without_nul(by)).arg(clock.tell(now))).await?, 0)
}

pub(crate) async fn resume_queue(db: &Db, clock: Clock, queue: &str, now: UnixMillis) -> Result<bool, Fault> {
    if queue.contains('\0') {
        return Ok(false);
    }
    get(&db.row(Sql::new("SELECT warp.resume_queue($1, $2)").arg(queue).arg(clock.tell(now))).await?, 0)
}

/// Pauses a host or, with nobody's name, ends that.
pub(crate) async fn pause_host(db: &Db, clock: Clock, host: HostId, by: Option<&str>, now: UnixMillis) -> Result<bool, Fault> {
    let unknown = || Fault::said(StoreErrorKind::NotFound, format!("host {} is not registered", host.0));
    let number = host_number(host).map_err(|_| unknown())?;
    let by: Arg = by.map(without_nul).into();
    let row = db.row(Sql::new("SELECT warp.pause_host($1, $2, $3)").arg(number).arg(by).arg(clock.tell(now))).await?;
    get::<Option<bool>>(&row, 0)?.ok_or_else(unknown)
}
