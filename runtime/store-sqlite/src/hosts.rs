//! Hosts: registration, renewal, the end of one (slots.md C3, B5).

use std::collections::{BTreeSet, HashMap};

use sqlx::Row as _;
use warp_domain::ending::{Ending, FailedReason};
use warp_domain::{ClaimToken, HostId, JobHandle, KeyId, UnixMillis};
use warp_store::{HostInfo, Renewed, Rescued, Served, StoreErrorKind, codec};

use crate::error::Fault;
use crate::rows::{Audit, Event, Place, StateRow, state_columns};
use crate::settle;
use crate::work::Work;

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
    let before = contracts_of(work, host).await?;
    let after: BTreeSet<String> = served.iter().map(|served| served.declarations.contract.clone()).collect();
    if before == after {
        return Ok(());
    }
    sqlx::query("DELETE FROM host_contract WHERE host = ?").bind(host.0).execute(&mut work.conn).await?;
    let rows: Vec<_> = after.iter().collect();
    work.statements
        .contracts
        .run(&mut work.conn, &rows, |contract, row| {
            row.put(host.0)?.put((*contract).clone())?;
            Ok(())
        })
        .await?;
    let changed: BTreeSet<String> = before.symmetric_difference(&after).cloned().collect();
    hand_on_lines_of(work, &changed, UnixMillis(0)).await?;
    // Whatever waited for such a host may run now.
    work.announce();
    Ok(())
}

async fn contracts_of(work: &mut Work, host: HostId) -> Result<BTreeSet<String>, Fault> {
    let rows = sqlx::query("SELECT contract FROM host_contract WHERE host = ?").bind(host.0).fetch_all(&mut work.conn).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Who counts in a line has changed (B7): every key where such a job stands is handed on.
async fn hand_on_lines_of(work: &mut Work, contracts: &BTreeSet<String>, now: UnixMillis) -> Result<(), Fault> {
    if contracts.is_empty() {
        return Ok(());
    }
    let names = serde_json::to_string(contracts).unwrap_or_default();
    let rows = sqlx::query(
        "SELECT DISTINCT s.parked_on FROM job_state s INDEXED BY state_parked JOIN lane l ON l.id = s.lane \
         WHERE s.place = 2 AND l.contract IN (SELECT value FROM json_each(?))",
    )
    .bind(names)
    .fetch_all(&mut work.conn)
    .await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in &rows {
        keys.push(KeyId(row.try_get(0)?));
    }
    hand_on_keys(work, keys, now).await
}

/// Hands keys on that somebody may have freed.
pub(crate) async fn hand_on_keys(work: &mut Work, keys: Vec<KeyId>, now: UnixMillis) -> Result<(), Fault> {
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, keys.iter().copied()).await?;
    for key in keys {
        ledger.hand_on(key);
    }
    work.write_decisions(&mut ledger, now).await
}

pub(crate) async fn renew(work: &mut Work, host: HostId, known: Vec<(JobHandle, ClaimToken)>, now: UnixMillis) -> Result<Renewed, Fault> {
    let renewed = sqlx::query("UPDATE host SET renewals = renewals + 1, renewed_at = ? WHERE id = ?")
        .bind(now.0)
        .bind(host.0)
        .execute(&mut work.conn)
        .await?;
    if renewed.rows_affected() == 0 {
        work.check_host(host).await?;
    }
    let mut unknown: HashMap<(JobHandle, ClaimToken), ()> = known.into_iter().map(|run| (run, ())).collect();
    let mut strangers = Vec::new();
    for (row, cancelled_by) in running_of(work, host).await? {
        let run = (row.job(), ClaimToken(row.token.unwrap_or(0)));
        if unknown.remove(&run).is_none() {
            strangers.push((row, cancelled_by));
        }
    }
    let handed_back = u32::try_from(strangers.len()).unwrap_or(u32::MAX);
    let back = |row: &StateRow, cancelled_by: Option<String>| {
        let _ = row;
        match cancelled_by {
            Some(by) => Ending::Deleted { message: format!("cancelled by {by}") },
            None => Ending::HandBack { message: "its host does not know of this run".to_owned() },
        }
    };
    end_all(work, strangers, back, now).await?;
    let mut lost: Vec<_> = unknown.into_keys().map(|(handle, _)| handle).collect();
    lost.sort_unstable();
    Ok(Renewed { handed_back, lost })
}

pub(crate) async fn deregister(work: &mut Work, host: HostId, now: UnixMillis) -> Result<(), Fault> {
    work.check_host(host).await?;
    let running = running_of(work, host).await?;
    let back = |_: &StateRow, cancelled_by: Option<String>| match cancelled_by {
        Some(by) => Ending::Deleted { message: format!("cancelled by {by}") },
        None => Ending::HandBack { message: "its host stopped".to_owned() },
    };
    remove(work, host, now).await?;
    end_all(work, running, back, now).await
}

/// B5, with the guard that `renewals` still stands: whoever has renewed since is alive.
pub(crate) async fn rescue(work: &mut Work, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued, Fault> {
    let found =
        sqlx::query("SELECT 1 FROM host WHERE id = ? AND renewals = ?").bind(host.0).bind(renewals).fetch_optional(&mut work.conn).await?;
    if found.is_none() {
        return Ok(Rescued::default());
    }
    let running = running_of(work, host).await?;
    remove(work, host, now).await?;
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, running.iter().flat_map(|(row, _)| row.keys.iter().copied())).await?;
    let mut rescued = Rescued::default();
    for (mut row, cancelled_by) in running {
        row.deaths += 1;
        // A late settle of the dead host must find nothing that looks like its own (C1).
        row.token = None;
        if let Some(by) = cancelled_by {
            let ending = Ending::Deleted { message: format!("cancelled by {by}") };
            settle::end(work, &mut ledger, &mut row, &ending, None, now).await?;
        } else if row.deaths > max_deaths {
            rescued.exhausted += 1;
            let message = format!("its hosts died under it {} times", row.deaths);
            let ending = Ending::Failed { message, reason: FailedReason::RecoveryExhausted };
            settle::end(work, &mut ledger, &mut row, &ending, None, now).await?;
        } else {
            rescued.requeued += 1;
            back_to_ready(work, &mut ledger, &mut row, now).await?;
        }
    }
    work.write_decisions(&mut ledger, now).await?;
    work.announce();
    Ok(rescued)
}

async fn back_to_ready(
    work: &mut Work,
    ledger: &mut warp_domain::ledger::Ledger,
    row: &mut StateRow,
    now: UnixMillis,
) -> Result<(), Fault> {
    work.audit(Audit::new(row.handle, now, Event::Requeued).message("its host died").run_of(row));
    work.count_reason("stats:requeued", "recovery");
    let keeps_place = settle::keeps_place_of(work, row).await?;
    settle::leave(ledger, row, keeps_place);
    row.place = Place::Ready;
    row.host = None;
    row.parked_on = None;
    row.refusal = None;
    row.changed_at = now.0;
    settle::finish(work, row);
    Ok(())
}

/// Takes a host's registration away. The lines where only it could run somebody go on to the next.
async fn remove(work: &mut Work, host: HostId, now: UnixMillis) -> Result<(), Fault> {
    let contracts = contracts_of(work, host).await?;
    sqlx::query("DELETE FROM host_contract WHERE host = ?").bind(host.0).execute(&mut work.conn).await?;
    sqlx::query("DELETE FROM host WHERE id = ?").bind(host.0).execute(&mut work.conn).await?;
    hand_on_lines_of(work, &contracts, now).await
}

async fn running_of(work: &mut Work, host: HostId) -> Result<Vec<(StateRow, Option<String>)>, Fault> {
    let rows = sqlx::query(RUNNING_OF).bind(host.0).fetch_all(&mut work.conn).await?;
    rows.iter().map(|row| Ok((StateRow::read(row)?, row.try_get(crate::rows::STATE_COLUMNS)?))).collect()
}

async fn end_all(
    work: &mut Work,
    rows: Vec<(StateRow, Option<String>)>,
    ending: impl Fn(&StateRow, Option<String>) -> Ending,
    now: UnixMillis,
) -> Result<(), Fault> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut ledger = work.ledger();
    work.load_keys(&mut ledger, rows.iter().flat_map(|(row, _)| row.keys.iter().copied())).await?;
    for (mut row, cancelled_by) in rows {
        let ending = ending(&row, cancelled_by);
        settle::end(work, &mut ledger, &mut row, &ending, None, now).await?;
    }
    work.write_decisions(&mut ledger, now).await?;
    work.announce();
    Ok(())
}
