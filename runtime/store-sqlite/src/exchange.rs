//! A host's round trip: activation, ends, claims, in one transaction (slots.md C2, B2, B3).

use warp_domain::UnixMillis;
use warp_store::{ExchangeParams, Exchanged, StoreErrorKind};

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
    match at_once(work, &params, facts).await {
        Ok(exchanged) => {
            work.keep_piece();
            Ok(exchanged)
        }
        Err(fault) if !params.settles.is_empty() && matches!(fault.kind(), StoreErrorKind::Invalid | StoreErrorKind::Internal) => {
            work.undo_piece(piece).await?;
            in_turn(work, &params).await
        }
        Err(fault) => Err(fault),
    }
}

async fn at_once(work: &mut Work, params: &ExchangeParams, facts: Facts) -> Result<Exchanged, Fault> {
    let ExchangeParams { host, now, settles, claim } = params;
    // One view of the keys for both halves: what an end freed is what a claim finds.
    let mut ledger = work.ledger();
    let settled = match settles.is_empty() {
        true => Vec::new(),
        false => settle::settle(work, &mut ledger, *host, settles, facts.cancellations, *now).await?,
    };
    let mut exchanged = Exchanged { settled, ..Exchanged::default() };
    let next_due = [facts.next_due, work.writes.scheduled()].into_iter().flatten().min();
    let due = claim.is_some() && next_due.is_some_and(|due| due <= *now);
    if let Some(claim) = claim {
        let full = if due { activate(work, *now).await? } else { false };
        claim::claim(work, ledger, *host, claim, *now, &mut exchanged).await?;
        exchanged.more |= full;
    }
    work.flush().await?;
    exchanged.next_due = if due { work.next_due().await? } else { next_due };
    Ok(exchanged)
}

async fn in_turn(work: &mut Work, params: &ExchangeParams) -> Result<Exchanged, Fault> {
    let ExchangeParams { host, now, settles, claim } = params;
    let mut ledger = work.ledger();
    let settled = settle::settle_all(work, &mut ledger, *host, settles, *now).await?;
    let mut exchanged = Exchanged { settled, ..Exchanged::default() };
    if let Some(claim) = claim {
        let full = activate(work, *now).await?;
        claim::claim(work, ledger, *host, claim, *now, &mut exchanged).await?;
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
