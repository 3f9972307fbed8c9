//! A host's round trip: activation, ends, claims, in one transaction (slots.md C2, B2, B3).

use warp_domain::UnixMillis;
use warp_store::{ExchangeParams, Exchanged};

use sqlx::Row as _;

use crate::claim;
use crate::error::Fault;
use crate::rows::{Audit, Event};
use crate::settle;
use crate::work::Work;

/// Scheduled jobs that one exchange makes runnable; the rest follows in the next, which is asked for at once.
const ACTIVATED: i64 = 1000;

/// Scheduled rows that are due. Index: `state_scheduled`, in its order.
pub(crate) const ACTIVATE: &str = "UPDATE job_state SET place = 1, changed_at = ?1 WHERE handle IN \
     (SELECT handle FROM job_state INDEXED BY state_scheduled WHERE place = 0 AND due <= ?1 ORDER BY due LIMIT ?2) RETURNING handle";

pub(crate) async fn exchange(work: &mut Work, params: ExchangeParams) -> Result<Exchanged, Fault> {
    let ExchangeParams { host, now, settles, claim } = params;
    work.latest(now);
    work.check_host(host).await?;
    // One view of the keys for both halves: what an end freed is what a claim finds.
    let mut ledger = work.ledger();
    let settled = settle::settle_all(work, &mut ledger, host, &settles, now).await?;
    let mut exchanged = Exchanged { settled, ..Exchanged::default() };
    if let Some(claim) = claim {
        let full = activate(work, now).await?;
        claim::claim(work, ledger, host, &claim, now, &mut exchanged).await?;
        exchanged.more |= full;
    }
    exchanged.next_due = work.next_due().await?;
    Ok(exchanged)
}

/// Makes due jobs runnable; whether there may be more of them.
pub(crate) async fn activate(work: &mut Work, now: UnixMillis) -> Result<bool, Fault> {
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
