//! A host's round trip: activation, ends, claims, in one transaction (slots.md C2, B2, B3).

use std::sync::Arc;

use warp_domain::UnixMillis;
use warp_store::{ClaimParams, ExchangeParams, Exchanged, Lane, StoreErrorKind};

use sqlx::Row as _;

use crate::claim;
use crate::error::Fault;
use crate::rows::{Audit, Event};
use crate::settle;
use crate::work::{Facts, Work};

/// Scheduled jobs that one exchange makes runnable; the rest follows in the next, which is asked for at once.
const ACTIVATED: i64 = 1000;

/// Scheduled rows that are due. Index: `state_scheduled`, in its order.
pub(crate) const ACTIVATE: &str = "UPDATE job_state SET place = 1, changed_at = ?1 WHERE handle IN \
     (SELECT handle FROM job_state INDEXED BY state_scheduled WHERE place = 0 AND due <= ?1 ORDER BY due LIMIT +?2) RETURNING handle";

pub(crate) async fn exchange(work: &mut Work, params: ExchangeParams) -> Result<Exchanged, Fault> {
    let host = params.host;
    work.latest(params.now);
    let facts = work.facts().await?;
    facts.check_host(host)?;
    // Nearly always everything can be stored: ends and claims are decided together and written together. Where an
    // end cannot, nothing has happened, and the ends are written first, apart from each other where they must be.
    let piece = work.piece().await?;
    match at_once(work, &params, &facts).await {
        Ok(mut exchanged) => {
            work.keep_piece();
            exchanged.reserved = reserved(work);
            Ok(exchanged)
        }
        Err(fault) if !params.settles.is_empty() && matches!(fault.kind(), StoreErrorKind::Invalid | StoreErrorKind::Internal) => {
            work.undo_piece(piece).await?;
            let mut exchanged = in_turn(work, &params, &facts).await?;
            exchanged.reserved = reserved(work);
            Ok(exchanged)
        }
        Err(fault) => Err(fault),
    }
}

fn reserved(work: &Work) -> u32 {
    u32::try_from(work.writes.reserved()).unwrap_or(u32::MAX)
}

/// The lanes that may be claimed from: none is paused. Read in this transaction, so a pause holds for every claim
/// after its commit.
fn open_lanes(params: &ExchangeParams, facts: &Facts) -> Option<ClaimParams> {
    let ClaimParams { lanes, max } = params.claim.as_ref()?;
    let is_open = |lane: &&Lane| !facts.paused_queues.contains(&lane.queue);
    let lanes = match (facts.is_paused(params.host), facts.paused_queues.is_empty()) {
        (true, _) => Vec::new().into(),
        (false, true) => Arc::clone(lanes),
        (false, false) => lanes.iter().filter(is_open).cloned().collect(),
    };
    Some(ClaimParams { lanes, max: *max })
}

async fn at_once(work: &mut Work, params: &ExchangeParams, facts: &Facts) -> Result<Exchanged, Fault> {
    let ExchangeParams { host, now, settles, hand_off, .. } = params;
    let claim = open_lanes(params, facts);
    // One view of the keys for both halves: what an end freed is what a claim finds.
    let mut ledger = work.ledger();
    let not_passed = settle::pass(work, &mut ledger, *host, &hand_off.passes, *now).await?;
    let settled = match settles.is_empty() {
        true => Vec::new(),
        false => settle::settle(work, &mut ledger, *host, settles, facts.cancellations, *now).await?,
    };
    let mut exchanged = Exchanged { settled, not_passed, ..Exchanged::default() };
    let next_due = [facts.next_due, work.writes.scheduled()].into_iter().flatten().min();
    let due = claim.is_some() && next_due.is_some_and(|due| due <= *now);
    if let Some(claim) = claim {
        let full = if due { activate(work, *now).await? } else { false };
        claim::claim(work, ledger, *host, &claim, hand_off, *now, &mut exchanged).await?;
        exchanged.more |= full;
    }
    work.flush().await?;
    exchanged.next_due = if due { work.next_due().await? } else { next_due };
    Ok(exchanged)
}

async fn in_turn(work: &mut Work, params: &ExchangeParams, facts: &Facts) -> Result<Exchanged, Fault> {
    let ExchangeParams { host, now, settles, hand_off, .. } = params;
    let claim = open_lanes(params, facts);
    let mut ledger = work.ledger();
    // Whatever the ends are cut into, what has passed on has done so before all of them.
    let not_passed = settle::pass(work, &mut ledger, *host, &hand_off.passes, *now).await?;
    work.flush().await?;
    let settled = settle::settle_all(work, &mut ledger, *host, settles, *now).await?;
    let mut exchanged = Exchanged { settled, not_passed, ..Exchanged::default() };
    if let Some(claim) = claim {
        let full = activate(work, *now).await?;
        claim::claim(work, ledger, *host, &claim, hand_off, *now, &mut exchanged).await?;
        exchanged.more |= full;
    }
    exchanged.next_due = work.next_due().await?;
    Ok(exchanged)
}

/// Makes due jobs runnable; whether there may be more of them.
pub(crate) async fn activate(work: &mut Work, now: UnixMillis) -> Result<bool, Fault> {
    work.flush().await?;
    if work.next_due().await?.is_none_or(|due| due > now) {
        return Ok(false);
    }
    let rows = sqlx::query(ACTIVATE).bind(now.0).bind(ACTIVATED).fetch_all(&mut work.conn).await?;
    for row in &rows {
        work.audit(Audit::new(row.try_get(0)?, now, Event::Enqueued));
    }
    work.flush().await?;
    Ok(rows.len() as i64 >= ACTIVATED)
}
