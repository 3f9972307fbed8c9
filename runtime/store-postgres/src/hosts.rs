//! Hosts: registration, the regular tick, the end of one (slots.md C3, B5, B7).
//!
//! Each is one call of a function; locking and indexes stand with it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::PgRow;
use warp_domain::{ClaimToken, HostId, JobHandle, UnixMillis};
use warp_store::{HostInfo, HostSeen, Pause, RenewParams, Renewed, Rescued, RunOutput, Served, SettleVerdict, StoreErrorKind, codec};

use crate::call::{Db, Sql, get};
use crate::clock::Clock;
use crate::error::Fault;
use crate::exchange::progress;
use crate::rows::{host_number, millis, without_nul};
use crate::schema::LockKind;

pub(crate) async fn register(db: &Db, clock: Clock, locks: LockKind, info: HostInfo) -> Result<HostId, Fault> {
    let HostInfo { name, version, now } = info;
    codec::check_name("host name", &name).map_err(|reason| Fault::said(StoreErrorKind::Invalid, reason))?;
    let sql = Sql::new("SELECT warp.register_host($1, $2, $3, $4)").arg(name).arg(version).arg(locks.name()).arg(clock.tell(now));
    Ok(HostId(i64::from(get::<i32>(&db.row(sql).await?, 0)?)))
}

/// The numbers of each host's last renewal and last publication, counted as they are sent: one that the network has held
/// back must not be taken for a new one. Only of hosts that were registered here; of others the server counts.
#[derive(Default)]
pub(crate) struct Sent(Mutex<HashMap<HostId, Numbers>>);

#[derive(Default)]
struct Numbers {
    renewal: i64,
    publication: i64,
}

impl Sent {
    /// It has registered.
    pub(crate) fn begin(&self, host: HostId) {
        self.locked().insert(host, Numbers::default());
    }

    /// It has left, or is going to.
    pub(crate) fn end(&self, host: HostId) {
        self.locked().remove(&host);
    }

    /// The number of the renewal that is sent now.
    fn renewal(&self, host: HostId) -> Option<i64> {
        self.next(host, |numbers| &mut numbers.renewal)
    }

    /// The number of the publication that is sent now.
    fn publication(&self, host: HostId) -> Option<i64> {
        self.next(host, |numbers| &mut numbers.publication)
    }

    fn next(&self, host: HostId, which: impl FnOnce(&mut Numbers) -> &mut i64) -> Option<i64> {
        let mut hosts = self.locked();
        let number = which(hosts.get_mut(&host)?);
        *number += 1;
        Some(*number)
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<HostId, Numbers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `now` is nothing where the server's clock counts.
pub(crate) async fn serve(db: &Db, sent: &Sent, host: HostId, served: Vec<Served>, now: Option<i64>) -> Result<(), Fault> {
    let contracts: BTreeSet<String> = served.iter().map(|served| served.declarations.contract.clone()).collect();
    let contracts: Vec<_> = contracts.into_iter().collect();
    let sql =
        Sql::new("SELECT warp.serve_host($1, $2, $3, $4)").arg(host_number(host)?).arg(contracts).arg(now).arg(sent.publication(host));
    db.row(sql).await.map(drop)
}

/// Whatever else a tick cannot do, it renews: a fault of the rest is told, and the lease renewed without it.
pub(crate) async fn renew(db: &Db, clock: Clock, sent: &Sent, params: &RenewParams) -> Result<Renewed, Fault> {
    let number = sent.renewal(params.host);
    match tick(db, clock, number, params, Some(params.patience)).await {
        Err(fault) if matches!(fault.kind(), StoreErrorKind::Internal | StoreErrorKind::Invalid | StoreErrorKind::Busy) => {
            tracing::warn!(error = fault.text(), "unclaimed reservations could not be returned");
            // Nothing of the first has happened, so this is still the same renewal.
            tick(db, clock, number, params, None).await
        }
        answer => answer,
    }
}

async fn tick(db: &Db, clock: Clock, number: Option<i64>, params: &RenewParams, patience: Option<Duration>) -> Result<Renewed, Fault> {
    let RenewParams { host, known, patience: _, now } = params;
    let (jobs, tokens): (Vec<i64>, Vec<i64>) = known.iter().map(|(job, token)| (job.0, token.0)).unzip();
    let sql = Sql::new("SELECT r.handed_back, r.lost, r.expired, r.reserved, r.hosts FROM warp.renew_host($1, $2, $3, $4, $5, $6) r")
        .arg(host_number(*host)?)
        .arg(number)
        .arg(jobs)
        .arg(tokens)
        .arg(patience.map(millis))
        .arg(clock.tell(*now))
        .urgent();
    let row = db.row(sql).await?;
    let lost: Vec<i32> = get(&row, 1)?;
    let lost = lost.into_iter().filter_map(|at| known.get(usize::try_from(at).ok()?.checked_sub(1)?).copied()).collect();
    Ok(Renewed {
        handed_back: get::<i32>(&row, 0)?.unsigned_abs(),
        lost,
        hosts: read_hosts(get::<Option<&str>>(&row, 4)?.unwrap_or("[]"))?,
        expired: get::<i32>(&row, 2)?.unsigned_abs(),
        reserved: get(&row, 3)?,
    })
}

pub(crate) async fn deregister(db: &Db, clock: Clock, host: HostId, now: UnixMillis) -> Result<(), Fault> {
    let sql = Sql::new("SELECT warp.deregister_host($1, $2)").arg(host_number(host)?).arg(clock.tell(now));
    db.row(sql).await.map(drop)
}

pub(crate) async fn rescue(db: &Db, clock: Clock, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued, Fault> {
    let sql = Sql::new("SELECT r.requeued, r.exhausted FROM warp.rescue_host($1, $2, $3, $4) r")
        .arg(host_number(host)?)
        .arg(renewals)
        .arg(i32::try_from(max_deaths).unwrap_or(i32::MAX))
        .arg(clock.tell(now));
    let row = db.row(sql).await?;
    let count = |at: usize| get::<i32>(&row, at).map(i32::unsigned_abs);
    Ok(Rescued { requeued: count(0)?, exhausted: count(1)? })
}

/// Every registered host. Locks nothing.
pub(crate) async fn hosts(db: &Db) -> Result<Vec<HostSeen>, Fault> {
    const HOSTS: &str = "SELECT json_agg(json_build_array(s.id, s.name, s.renewals, s.started_at, s.renewed_at, s.running, s.paused_by, \
                         s.paused_at))::text FROM warp.hosts_seen() s";
    let row = db.row(Sql::new(HOSTS).repeatable()).await?;
    read_hosts(get::<Option<&str>>(&row, 0)?.unwrap_or("[]"))
}

/// One host: number, name, renewals, started, renewed, running, and who paused it when.
type Seen = (i64, String, i64, i64, i64, u32, Option<String>, Option<i64>);

fn read_hosts(text: &str) -> Result<Vec<HostSeen>, Fault> {
    let seen: Vec<Seen> =
        serde_json::from_str(text).map_err(|error| Fault::said(StoreErrorKind::Internal, format!("the registered hosts: {error}")))?;
    let host = |(id, name, renewals, started_at, renewed_at, running, by, at): Seen| HostSeen {
        host: HostId(id),
        name,
        renewals,
        started_at: UnixMillis(started_at),
        renewed_at: UnixMillis(renewed_at),
        running,
        // A server knows connections, not processes.
        gone: false,
        paused: by.zip(at).map(|(by, at)| Pause { by, at: UnixMillis(at) }),
    };
    Ok(seen.into_iter().map(host).collect())
}

/// Stores output of a run that goes on.
pub(crate) async fn append_output(
    db: &Db,
    host: HostId,
    handle: JobHandle,
    token: ClaimToken,
    output: RunOutput,
) -> Result<SettleVerdict, Fault> {
    let mut rest = serde_json::json!({"progress": progress(&output)});
    let RunOutput { lines, dropped_lines, dropped_bytes, progress: _ } = output;
    if dropped_lines > 0 || dropped_bytes > 0 {
        rest["dropped"] = serde_json::json!([saturated(dropped_lines), saturated(dropped_bytes)]);
    }
    let sql = Sql::new("SELECT warp.append_output($1, $2, $3, $4, $5, $6, $7::jsonb)")
        .arg(host_number(host)?)
        .arg(handle.0)
        .arg(token.0)
        .arg(lines.iter().map(|line| line.at.0).collect::<Vec<_>>())
        .arg(lines.iter().map(|line| line.stream.to_owned()).collect::<Vec<_>>())
        .arg(lines.iter().map(|line| without_nul(&line.text)).collect::<Vec<_>>())
        .arg(rest.to_string());
    let is_written: bool = get(&db.row(sql).await?, 0)?;
    Ok(if is_written { SettleVerdict::Settled } else { SettleVerdict::Late })
}

fn saturated(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A column pair that is both null or neither.
pub(crate) fn read_pause(row: &PgRow, from: usize) -> Result<Option<Pause>, Fault> {
    let (by, at): (Option<String>, Option<i64>) = (get(row, from)?, get(row, from + 1)?);
    Ok(by.zip(at).map(|(by, at)| Pause { by, at: UnixMillis(at) }))
}
