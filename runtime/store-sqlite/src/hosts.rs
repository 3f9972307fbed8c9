//! Hosts: registration, renewal, the end of one (slots.md C3, B5).

use std::collections::{BTreeSet, HashSet};

use sqlx::Row as _;
use warp_domain::ending::{Ending, FailedReason};
use warp_domain::ledger::Ledger;
use warp_domain::{HostId, KeyId, UnixMillis};
use warp_store::{HostInfo, RenewParams, Renewed, Rescued, Served, StoreErrorKind, codec};

use crate::error::Fault;
use crate::rows::{StateRow, json_numbers, state_columns};
use crate::settle::{self, Exit};
use crate::work::Work;
use crate::{read, upkeep};

/// A host's running rows. Index: `state_running`.
pub(crate) const RUNNING_OF: &str = concat!(
    "SELECT ",
    state_columns!(),
    ", c.asked_by FROM job_state s INDEXED BY state_running LEFT JOIN cancel_request c ON c.job = s.handle AND c.token = s.token \
     WHERE s.place = 4 AND s.host = ? ORDER BY s.handle"
);

pub(crate) async fn register(work: &mut Work, info: HostInfo) -> Result<HostId, Fault> {
    let HostInfo { name, version, now } = info;
    codec::check_name("host name", &name).map_err(|reason| Fault::Said(StoreErrorKind::Invalid, reason))?;
    let id = sqlx::query("INSERT INTO host_name (name) VALUES (?)").bind(name).execute(&mut work.conn).await?.last_insert_rowid();
    sqlx::query("INSERT INTO host (id, version, renewals, started_at, renewed_at) VALUES (?, ?, 0, ?, ?)")
        .bind(id)
        .bind(version)
        .bind(now.0)
        .bind(now.0)
        .execute(&mut work.conn)
        .await?;
    Ok(HostId(id))
}

pub(crate) async fn serve(work: &mut Work, host: HostId, served: Vec<Served>) -> Result<(), Fault> {
    work.check_host(host).await?;
    let before = claimable_lanes(work).await?;
    sqlx::query("DELETE FROM host_contract WHERE host = ?").bind(host.0).execute(&mut work.conn).await?;
    let contracts: BTreeSet<&str> = served.iter().map(|served| served.declarations.contract.as_str()).collect();
    let rows: Vec<_> = contracts.into_iter().collect();
    work.statements
        .contracts
        .run(&mut work.conn, &rows, |contract, row| {
            row.put(host.0)?.put((*contract).to_owned())?;
            Ok(())
        })
        .await?;
    let now = renewed_at(work, host).await?;
    let now = work.latest(now);
    let mut ledger = work.ledger();
    hand_on_changed_lines(work, &mut ledger, &before, now).await?;
    // Whatever waited for such a host may run now.
    work.announce();
    Ok(())
}

async fn renewed_at(work: &mut Work, host: HostId) -> Result<UnixMillis, Fault> {
    let row = sqlx::query("SELECT renewed_at FROM host WHERE id = ?").bind(host.0).fetch_one(&mut work.conn).await?;
    Ok(UnixMillis(row.try_get(0)?))
}

/// Lanes from which some host may claim. One row for each contract and queue that was ever used, and a lookup in
/// `host_contract_contract` for each.
pub(crate) async fn claimable_lanes(work: &mut Work) -> Result<BTreeSet<i64>, Fault> {
    let rows = sqlx::query("SELECT lane FROM claimable_lane").fetch_all(&mut work.conn).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// B7, C5: who counts in a line has changed, so every key where such a job is parked is handed on. Reads the whole
/// index `state_parked`, and only when a lane finds or loses its last host, or is paused or resumed.
pub(crate) async fn hand_on_changed_lines(
    work: &mut Work,
    ledger: &mut Ledger,
    before: &BTreeSet<i64>,
    now: UnixMillis,
) -> Result<(), Fault> {
    let after = claimable_lanes(work).await?;
    let changed: Vec<_> = before.symmetric_difference(&after).copied().collect();
    if changed.is_empty() {
        return work.write_decisions(ledger, now).await;
    }
    work.take_decisions(ledger, now);
    work.flush().await?;
    let rows = sqlx::query(
        "SELECT DISTINCT s.parked_on FROM job_state s INDEXED BY state_parked \
         WHERE s.place = 2 AND s.lane IN (SELECT value FROM json_each(?))",
    )
    .bind(json_numbers(changed))
    .fetch_all(&mut work.conn)
    .await?;
    let keys: BTreeSet<KeyId> = rows.iter().map(|row| Ok(KeyId(row.try_get(0)?))).collect::<Result<_, Fault>>()?;
    work.reload_keys(ledger, keys.clone()).await?;
    for key in keys {
        ledger.hand_on(key);
    }
    work.write_decisions(ledger, now).await
}

pub(crate) async fn renew(work: &mut Work, params: RenewParams) -> Result<Renewed, Fault> {
    let RenewParams { host, known, patience, now } = params;
    let renewed = sqlx::query("UPDATE host SET renewals = renewals + 1, renewed_at = ? WHERE id = ?")
        .bind(now.0)
        .bind(host.0)
        .execute(&mut work.conn)
        .await?;
    if renewed.rows_affected() == 0 {
        work.check_host(host).await?;
    }
    let mut running = running_of(work, host).await?;
    let runs: HashSet<_> = running.iter().map(|(row, _)| (row.job(), row.token)).collect();
    let lost = known.iter().filter(|(job, token)| !runs.contains(&(*job, Some(token.0)))).copied().collect();
    let known: HashSet<_> = known.into_iter().map(|(job, token)| (job, Some(token.0))).collect();
    running.retain(|(row, _)| !known.contains(&(row.job(), row.token)));
    let handed_back = u32::try_from(running.len()).unwrap_or(u32::MAX);
    if !running.is_empty() {
        let mut ledger = give_back(work, running, "its host does not know of this run", now).await?;
        work.write_decisions(&mut ledger, now).await?;
    }
    let expired = expire(work, patience, now).await?;
    let reserved = upkeep::has_reserved(work).await?;
    Ok(Renewed { handed_back, lost, hosts: read::hosts(&mut work.conn).await?, expired, reserved })
}

/// Other hosts' reservations must not cost this host its lease: a row that cannot be read is told and left alone.
async fn expire(work: &mut Work, patience: std::time::Duration, now: UnixMillis) -> Result<u32, Fault> {
    let piece = work.piece().await?;
    work.frame().await?;
    match upkeep::expire_reservations(work, patience, now).await {
        Ok(expired) => {
            work.keep_piece();
            Ok(expired)
        }
        Err(fault) if matches!(fault.kind(), StoreErrorKind::Schema | StoreErrorKind::Internal) => {
            tracing::warn!(reason = fault.text(work.path()), "unclaimed reservations could not be returned");
            work.undo_piece(piece).await?;
            Ok(0)
        }
        Err(fault) => Err(fault),
    }
}

pub(crate) async fn deregister(work: &mut Work, host: HostId, now: UnixMillis) -> Result<(), Fault> {
    work.check_host(host).await?;
    let before = claimable_lanes(work).await?;
    let running = running_of(work, host).await?;
    remove(work, host).await?;
    let mut ledger = give_back(work, running, "its host stopped", now).await?;
    hand_on_changed_lines(work, &mut ledger, &before, now).await
}

/// Runs of this host go back uncharged; those that somebody wanted cancelled end.
async fn give_back(work: &mut Work, rows: Vec<Running>, why: &str, now: UnixMillis) -> Result<Ledger, Fault> {
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, rows.iter().flat_map(|(row, _)| row.keys.iter().copied())).await?;
    let back = Ending::HandBack { message: why.to_owned() };
    for (mut row, cancelled_by) in rows {
        let exit = cancelled_by.as_deref().map_or(Exit::Ended(&back), Exit::Cancelled);
        settle::end(work, &mut ledger, &mut row, exit, None, now).await?;
        if cancelled_by.is_some() {
            settle::forget_cancellation(work, row.handle).await?;
        }
    }
    Ok(ledger)
}

/// B5, with the guard that `renewals` still stands: whoever has renewed since is alive.
pub(crate) async fn rescue(work: &mut Work, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued, Fault> {
    let found =
        sqlx::query("SELECT 1 FROM host WHERE id = ? AND renewals = ?").bind(host.0).bind(renewals).fetch_optional(&mut work.conn).await?;
    if found.is_none() {
        return Ok(Rescued::default());
    }
    let before = claimable_lanes(work).await?;
    let running = running_of(work, host).await?;
    remove(work, host).await?;
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, running.iter().flat_map(|(row, _)| row.keys.iter().copied())).await?;
    let mut rescued = Rescued::default();
    for (mut row, cancelled_by) in running {
        row.deaths += 1;
        let exhausted =
            Ending::Failed { message: format!("its hosts died under it {} times", row.deaths), reason: FailedReason::RecoveryExhausted };
        let exit = match &cancelled_by {
            Some(by) => Exit::Cancelled(by),
            None if row.deaths > max_deaths => {
                rescued.exhausted += 1;
                Exit::Ended(&exhausted)
            }
            None => {
                rescued.requeued += 1;
                Exit::Rescued
            }
        };
        settle::end(work, &mut ledger, &mut row, exit, None, now).await?;
        if cancelled_by.is_some() {
            settle::forget_cancellation(work, row.handle).await?;
        }
    }
    hand_on_changed_lines(work, &mut ledger, &before, now).await?;
    Ok(rescued)
}

/// Takes a host's registration away.
async fn remove(work: &mut Work, host: HostId) -> Result<(), Fault> {
    sqlx::query("DELETE FROM host_contract WHERE host = ?").bind(host.0).execute(&mut work.conn).await?;
    sqlx::query("DELETE FROM host WHERE id = ?").bind(host.0).execute(&mut work.conn).await?;
    Ok(())
}

/// A running row, and who wants it cancelled.
type Running = (StateRow, Option<String>);

async fn running_of(work: &mut Work, host: HostId) -> Result<Vec<Running>, Fault> {
    let rows = sqlx::query(RUNNING_OF).bind(host.0).fetch_all(&mut work.conn).await?;
    rows.iter().map(|row| Ok((StateRow::read(row)?, row.try_get(crate::rows::STATE_COLUMNS)?))).collect()
}
