//! Ending runs: token, children, shared state, slots (slots.md C1, B3).

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use sqlx::Row as _;
use warp_domain::ending::{Ending, FailedReason};
use warp_domain::ledger::{Ledger, Waiter, keeps_ticket_on_retry};
use warp_domain::{ClaimToken, HostId, JobHandle, UnixMillis};
use warp_store::{NewJob, Pass, RunOutput, Settle, SettleVerdict, StateVerdict, StoreErrorKind, codec};

use crate::enqueue;
use crate::error::Fault;
use crate::rows::{Audit, Event, OutcomeRow, Place, StateRow, json_numbers, state_columns};
use crate::shared_state;
use crate::work::Work;

/// The rows of the runs that end. Primary key lookups; the writer's lock holds them still.
pub(crate) const SETTLED_ROWS: &str = concat!(
    "SELECT ",
    state_columns!(),
    ", c.asked_by FROM json_each(?) h CROSS JOIN job_state s ON s.handle = h.value \
     LEFT JOIN cancel_request c ON c.job = s.handle AND c.token = s.token"
);

/// A row with what somebody asked of its run.
struct Loaded {
    row: StateRow,
    cancelled_by: Option<String>,
}

/// Ends runs; one verdict each, in order. A settle whose data the database refuses is isolated by halving the
/// batch, and its job Failed; the others are written.
pub(crate) async fn settle_all(
    work: &mut Work,
    ledger: &mut Ledger,
    host: HostId,
    settles: &[Settle],
    now: UnixMillis,
) -> Result<Vec<SettleVerdict>, Fault> {
    let mut verdicts = Vec::with_capacity(settles.len());
    // A stack of pieces still to do, the next one last.
    let mut pieces = vec![settles];
    while let Some(piece) = pieces.pop() {
        if piece.is_empty() {
            continue;
        }
        let before = work.piece().await?;
        match settle_and_write(work, ledger, host, piece, now).await {
            Ok(done) => {
                work.keep_piece();
                verdicts.extend(done);
            }
            // What this process remembered of a run is not true any more: from the file, then.
            Err(Fault::Outdated) => {
                work.undo_piece(before).await?;
                *ledger = work.ledger();
                pieces.push(piece);
            }
            Err(fault) if matches!(fault.kind(), StoreErrorKind::Invalid | StoreErrorKind::Internal) => {
                let reason = fault.text(work.path());
                work.undo_piece(before).await?;
                *ledger = work.ledger();
                match piece {
                    [one] => verdicts.push(poison(work, ledger, host, one, &reason, now).await?),
                    _ => {
                        let (first, second) = piece.split_at(piece.len() / 2);
                        pieces.push(second);
                        pieces.push(first);
                    }
                }
            }
            Err(fault) => return Err(fault),
        }
    }
    Ok(verdicts)
}

/// Fails a job whose end cannot be stored, writing nothing else of it.
async fn poison(
    work: &mut Work,
    ledger: &mut Ledger,
    host: HostId,
    settle: &Settle,
    reason: &str,
    now: UnixMillis,
) -> Result<SettleVerdict, Fault> {
    let bare = Settle {
        handle: settle.handle,
        token: settle.token,
        ending: failed_as_poison(reason),
        on_conflict: failed_as_poison(reason),
        output: RunOutput::default(),
        children: Vec::new(),
        state: Vec::new(),
        took: settle.took,
    };
    let verdict = settle_and_write(work, ledger, host, std::slice::from_ref(&bare), now).await?;
    Ok(match verdict.first() {
        Some(SettleVerdict::Settled) => SettleVerdict::Poison,
        Some(other) => *other,
        None => SettleVerdict::Late,
    })
}

fn failed_as_poison(reason: &str) -> Ending {
    Ending::Failed { message: format!("the end of the run cannot be stored: {reason}"), reason: FailedReason::Unacceptable }
}

async fn settle_and_write(
    work: &mut Work,
    ledger: &mut Ledger,
    host: HostId,
    settles: &[Settle],
    now: UnixMillis,
) -> Result<Vec<SettleVerdict>, Fault> {
    let cancellations = sqlx::query("SELECT 1 FROM cancel_request LIMIT 1").fetch_optional(&mut work.conn).await?.is_some();
    let verdicts = settle(work, ledger, host, settles, cancellations, now).await?;
    work.write_decisions(ledger, now).await?;
    Ok(verdicts)
}

/// Decides about ends, all or none. What it decided waits to be written, except where a later decision has to read it.
pub(crate) async fn settle(
    work: &mut Work,
    ledger: &mut Ledger,
    host: HostId,
    settles: &[Settle],
    cancellations: bool,
    now: UnixMillis,
) -> Result<Vec<SettleVerdict>, Fault> {
    let mut rows = load(work, settles.iter().map(|settle| (settle.handle, settle.token)), cancellations).await?;
    let is_mine = |settle: &Settle, row: &StateRow| is_run_of(host, settle.token, row);
    let keys: Vec<_> = settles
        .iter()
        .filter_map(|settle| rows.get(&settle.handle.0).filter(|loaded| is_mine(settle, &loaded.row)))
        .flat_map(|loaded| loaded.row.keys.iter().copied())
        .collect();
    work.load_keys(ledger, keys).await?;
    let mut children = Vec::new();
    let mut verdicts = Vec::with_capacity(settles.len());
    for settle in settles {
        let verdict = match rows.get_mut(&settle.handle.0) {
            Some(Loaded { row, cancelled_by }) if is_mine(settle, row) => {
                settle_one(work, ledger, row, cancelled_by.as_deref(), settle, &mut children, now).await?
            }
            Some(Loaded { row, .. }) if row.settled == Some(settle.token.0) => SettleVerdict::Repeated,
            _ => SettleVerdict::Late,
        };
        verdicts.push(verdict);
    }
    work.decide_further(ledger, now).await?;
    if !children.is_empty() {
        work.frame().await?;
        enqueue::enqueue(work, children, now).await?;
    }
    Ok(verdicts)
}

/// Whether the row is that of a run that goes on here.
fn is_run_of(host: HostId, token: ClaimToken, row: &StateRow) -> bool {
    row.place == Place::Running && row.token == Some(token.0) && row.host == Some(host.0)
}

/// B8: slots that have passed on inside the host, in the order in which they did; whose next holders have none after
/// that. Before the ends, so that the end of a run whose slot has passed on finds none to free. Nothing comes free here:
/// how many slots there are does not change, so nobody in line has to be looked at.
///
/// After an unknown outcome the same comes again: then the slot is with the next holder already, or that one has ended.
pub(crate) async fn pass(
    work: &mut Work,
    ledger: &mut Ledger,
    host: HostId,
    passes: &[Pass],
    now: UnixMillis,
) -> Result<Vec<ClaimToken>, Fault> {
    let mut not_passed = Vec::new();
    if passes.is_empty() {
        return Ok(not_passed);
    }
    let rows = load(work, passes.iter().flat_map(|pass| [pass.from, pass.to]), false).await?;
    let runs_here = |(job, token): (JobHandle, ClaimToken)| rows.get(&job.0).is_some_and(|loaded| is_run_of(host, token, &loaded.row));
    work.load_keys(ledger, passes.iter().map(|pass| pass.key)).await?;
    for &Pass { key, from, to } in passes {
        let has_come = ledger.key(key).is_some_and(|state| state.slots.iter().any(|slot| slot.job == to.0));
        if !runs_here(to) || has_come {
            continue;
        }
        if runs_here(from) && ledger.pass(key, from.0, to.0) {
            work.holders.insert(to.0, host.0);
        } else {
            not_passed.push(to.1);
        }
    }
    work.take_decisions(ledger, now);
    Ok(not_passed)
}

async fn load(
    work: &mut Work,
    runs: impl Iterator<Item = (JobHandle, ClaimToken)> + Clone,
    cancellations: bool,
) -> Result<HashMap<i64, Loaded>, Fault> {
    let mut loaded = HashMap::new();
    // Nobody but its host ends a run, so what this process wrote when it claimed is what stands there, unless
    // somebody wants a run cancelled. The guard of the write tells when that is wrong.
    if !cancellations {
        for (job, token) in runs.clone() {
            if let Some(row) = work.running.get(&job.0).filter(|row| row.token == Some(token.0)) {
                loaded.insert(row.handle, Loaded { row: row.clone(), cancelled_by: None });
            }
        }
    }
    let handles: Vec<_> = runs.map(|(job, _)| job.0).filter(|handle| !loaded.contains_key(handle)).collect();
    if handles.is_empty() {
        return Ok(loaded);
    }
    let rows = sqlx::query(SETTLED_ROWS).bind(json_numbers(handles)).fetch_all(&mut work.conn).await?;
    for row in &rows {
        let read = Loaded { row: StateRow::read(row)?, cancelled_by: row.try_get(crate::rows::STATE_COLUMNS)? };
        loaded.insert(read.row.handle, read);
    }
    Ok(loaded)
}

/// One run that is this host's: where it goes, and what is written with it.
async fn settle_one(
    work: &mut Work,
    ledger: &mut Ledger,
    row: &mut StateRow,
    cancelled_by: Option<&str>,
    settle: &Settle,
    children: &mut Vec<NewJob>,
    now: UnixMillis,
) -> Result<SettleVerdict, Fault> {
    row.settled = Some(settle.token.0);
    if let Err(reason) = codec::check_settle(settle) {
        end(work, ledger, row, Exit::Ended(&failed_as_poison(&reason)), Some(settle.took), now).await?;
        return Ok(SettleVerdict::Poison);
    }
    let mut verdict = SettleVerdict::Settled;
    let mut ending = &settle.ending;
    if let Ending::Completed { .. } = ending {
        match plan_state(work, settle).await? {
            Some(values) => {
                if !values.is_empty() {
                    work.frame().await?;
                }
                for ((bucket, key), value) in values {
                    shared_state::put(work, &bucket, &key, value.as_deref()).await?;
                }
                children.extend(settle.children.iter().cloned());
            }
            None => {
                verdict = SettleVerdict::Conflicted;
                ending = &settle.on_conflict;
            }
        }
    }
    write_output(work, row.handle, row.run, &settle.output);
    if let Ending::NotBegun = ending {
        unclaim(work, row).await?;
    }
    let exit = match (cancelled_by, ending) {
        // Somebody asked for its end: it does not run again.
        (Some(by), Ending::Retry { .. } | Ending::Snooze { .. } | Ending::HandBack { .. } | Ending::NotBegun | Ending::Deleted { .. }) => {
            Exit::Cancelled(by)
        }
        _ => Exit::Ended(ending),
    };
    end(work, ledger, row, exit, Some(settle.took), now).await?;
    if cancelled_by.is_some() {
        forget_cancellation(work, row.handle).await?;
    }
    Ok(verdict)
}

/// The run that somebody wanted cancelled is over.
pub(crate) async fn forget_cancellation(work: &mut Work, job: i64) -> Result<(), Fault> {
    work.frame().await?;
    sqlx::query("DELETE FROM cancel_request WHERE job = ?").bind(job).execute(&mut work.conn).await?;
    Ok(())
}

/// The values that the settle's state writes come to, or `None` if one conflicts.
async fn plan_state(work: &mut Work, settle: &Settle) -> Result<Option<BTreeMap<(String, String), Option<String>>>, Fault> {
    let mut values = BTreeMap::new();
    for write in &settle.state {
        let name = (write.bucket.clone(), write.key.clone());
        let current = match values.get(&name) {
            Some(value) => Clone::clone(value),
            None => shared_state::get(&mut work.conn, &write.bucket, &write.key).await?,
        };
        match shared_state::apply(current, &write.change) {
            StateVerdict::Written(value) => values.insert(name, value),
            StateVerdict::Conflict(_) | StateVerdict::NotANumber(_) | StateVerdict::Late => return Ok(None),
        };
    }
    Ok(Some(values))
}

/// Queues what a run left to read.
pub(crate) fn write_output(work: &mut Work, job: i64, run: u32, output: &RunOutput) {
    let RunOutput { lines, dropped_lines, dropped_bytes, progress } = output;
    for line in lines {
        let entry = work.draw_entry();
        let mut line = line.clone();
        if line.text.contains('\0') {
            line.text = line.text.replace('\0', "\u{fffd}");
        }
        work.writes.log(job, entry, run, line);
    }
    // A number that is none says nothing about progress, and SQLite would store it as NULL.
    for (name, percent) in progress.iter().filter(|(_, percent)| percent.is_finite()) {
        let entry = work.draw_entry();
        work.writes.progress(job, name.replace('\0', "\u{fffd}"), *percent, entry);
    }
    if *dropped_lines > 0 || *dropped_bytes > 0 {
        let saturated = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        work.writes.outcome(OutcomeRow {
            job,
            result: None,
            error: None,
            dropped_lines: saturated(*dropped_lines),
            dropped_bytes: saturated(*dropped_bytes),
        });
    }
}

/// How a job leaves a run or the line.
#[derive(Clone, Copy)]
pub(crate) enum Exit<'a> {
    /// Its host says so.
    Ended(&'a Ending),
    /// Its host died; it runs again, uncharged.
    Rescued,
    /// Somebody wanted it cancelled.
    Cancelled(&'a str),
}

/// Moves a running, ready, reserved or parked row to where `exit` says, with history, counters, unique key and
/// slots. Every way out of a run and out of the line comes through here (C5).
pub(crate) async fn end(
    work: &mut Work,
    ledger: &mut Ledger,
    row: &mut StateRow,
    exit: Exit<'_>,
    took: Option<Duration>,
    now: UnixMillis,
) -> Result<(), Fault> {
    if let Exit::Ended(Ending::NotBegun) = exit {
        stand_again(work, ledger, row).await?;
        row.changed_at = now.0;
        finish(work, row);
        return Ok(());
    }
    let was_running = row.place == Place::Running;
    let mut about = Audit::new(row.handle, now, Event::Completed);
    if was_running {
        about = about.run_of(row);
        about.took_us = took.map(|took| i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
    }
    let text = |message: &str| message.replace('\0', "\u{fffd}");
    let (mut result, mut error) = (None, None);
    // Whether it is charged, and whether its place in line is free for others.
    let (mut charged, mut new_turn) = (true, true);
    match exit {
        // Above.
        Exit::Ended(Ending::NotBegun) => {}
        Exit::Ended(Ending::Completed { result: value }) => {
            row.place = Place::Completed;
            result.clone_from(value);
            work.count("stats:succeeded", 1);
        }
        Exit::Ended(Ending::Failed { message, reason }) => {
            row.place = Place::Failed;
            charged = *reason != FailedReason::RecoveryExhausted;
            error = Some(text(message));
            about.event = Event::Failed;
            about.message.clone_from(&error);
            work.count_reason("stats:failed", reason.name());
        }
        Exit::Ended(Ending::Deleted { message }) => {
            row.place = Place::Deleted;
            about.event = Event::Deleted;
            about.message = Some(text(message));
            work.count("stats:deleted", 1);
        }
        Exit::Cancelled(by) => {
            row.place = Place::Deleted;
            about.event = Event::Deleted;
            about.message = Some(format!("cancelled by {by}"));
            work.count_reason("stats:deleted", "cancelled");
        }
        Exit::Ended(Ending::Retry { message, at }) => {
            go_on(row, *at, now);
            error = Some(text(message));
            about.event = Event::Failed;
            about.message.clone_from(&error);
            work.count_reason("stats:requeued", "retry");
        }
        Exit::Ended(Ending::Snooze { at }) => {
            go_on(row, *at, now);
            charged = false;
            about.event = waiting_event(row);
            about.message = Some("snoozed".to_owned());
            work.count_reason("stats:requeued", "snooze");
        }
        Exit::Ended(Ending::HandBack { message }) => {
            row.place = Place::Ready;
            (charged, new_turn) = (false, false);
            about.event = Event::Requeued;
            about.message = Some(text(message));
            work.count_reason("stats:requeued", "hand-back");
        }
        Exit::Rescued => {
            row.place = Place::Ready;
            (charged, new_turn) = (false, false);
            about.event = Event::Requeued;
            about.message = Some("its host died".to_owned());
            work.count_reason("stats:requeued", "recovery");
        }
    }
    work.audit(about);
    if let Exit::Ended(Ending::Retry { .. }) = exit {
        let mut audit = Audit::new(row.handle, now, waiting_event(row)).message(format!("retry after attempt {}", row.attempt));
        audit.run = row.run;
        work.audit(audit);
    }
    if was_running && !charged {
        row.attempt = row.attempt.saturating_sub(1);
    }
    if result.is_some() || error.is_some() {
        work.writes.outcome(OutcomeRow { job: row.handle, result, error, dropped_lines: 0, dropped_bytes: 0 });
    }
    leave(work, ledger, row, was_running, new_turn).await?;
    row.host = None;
    row.changed_at = now.0;
    finish(work, row);
    Ok(())
}

/// B8: a run that has not begun, as it stood before its claim: in its line, or ready. Nothing says that it was claimed.
async fn unclaim(work: &mut Work, row: &mut StateRow) -> Result<(), Fault> {
    work.frame().await?;
    sqlx::query("DELETE FROM audit WHERE job = ? AND run = ? AND event = ?")
        .bind(row.handle)
        .bind(row.run)
        .bind(Event::Processing as i64)
        .execute(&mut work.conn)
        .await?;
    // That somebody wants it cancelled is said of the job.
    sqlx::query("UPDATE audit SET run = 0 WHERE job = ? AND run = ?").bind(row.handle).bind(row.run).execute(&mut work.conn).await?;
    row.place = if row.parked_on.is_some() { Place::Parked } else { Place::Ready };
    row.run = row.run.saturating_sub(1);
    row.attempt = row.attempt.saturating_sub(1);
    row.host = None;
    Ok(())
}

/// The place in line of a row that [`unclaim`] has put back, and what it holds handed on.
async fn stand_again(work: &mut Work, ledger: &mut Ledger, row: &StateRow) -> Result<(), Fault> {
    let (Some(key), Some(ticket)) = (row.parked_on, row.ticket) else {
        ledger.release(row.job(), &row.keys);
        return Ok(());
    };
    let rules = work.concurrency_of(row.job(), row.stamp).await?;
    let claimable = sqlx::query("SELECT 1 FROM claimable_lane WHERE lane = ?").bind(row.lane).fetch_optional(&mut work.conn).await?;
    let (limit, weight) = (rules.limit, rules.weight);
    let waiter = Waiter { job: row.job(), ticket, limit, weight, several_keys: row.keys.len() > 1, claimable: claimable.is_some() };
    ledger.stand_again(key, waiter);
    Ok(())
}

/// Where a retry or snooze waits.
fn go_on(row: &mut StateRow, at: UnixMillis, now: UnixMillis) {
    row.place = if at > now { Place::Scheduled } else { Place::Ready };
    row.due = at.0;
}

fn waiting_event(row: &StateRow) -> Event {
    if row.place == Place::Scheduled { Event::Scheduled } else { Event::Enqueued }
}

/// Gives back what a keyed row holds, its place in line included unless that is kept, and hands its keys on. The
/// row stands where it goes already. A job without a key costs nothing here.
async fn leave(work: &mut Work, ledger: &mut Ledger, row: &mut StateRow, was_running: bool, new_turn: bool) -> Result<(), Fault> {
    row.parked_on = None;
    row.refusal = None;
    if row.keys.is_empty() {
        return Ok(());
    }
    let concurrency = work.concurrency_of(row.job(), row.stamp).await?;
    let keeps_place = keeps_ticket_on_retry(concurrency.order, concurrency.on_retry);
    match row.ticket {
        Some(ticket) if keeps_place && !row.place.has_ended() => ledger.block(row.job(), ticket, &row.keys),
        // A start has ended the block already.
        _ if keeps_place && !was_running => ledger.unblock(row.job(), &row.keys),
        _ => {}
    }
    if row.place.has_ended() || new_turn && !keeps_place {
        row.ticket = None;
    }
    ledger.release(row.job(), &row.keys);
    Ok(())
}

/// Takes a job that is about to be removed out of the ledger.
pub(crate) async fn forget(work: &mut Work, ledger: &mut Ledger, row: &mut StateRow) -> Result<(), Fault> {
    if row.place.has_ended() {
        return Ok(());
    }
    row.place = Place::Deleted;
    leave(work, ledger, row, false, true).await
}

/// Queues a changed row, with what an ended one gives up.
pub(crate) fn finish(work: &mut Work, row: &mut StateRow) {
    if let Some(kept) = row.place.kept_counter() {
        work.count(kept, 1);
        if std::mem::take(&mut row.is_unique) {
            work.writes.free_unique(row.handle);
        }
    }
    if row.settled.is_some() && row.settled == row.token {
        row.token = None;
        work.writes.end(row.clone());
    } else {
        row.token = None;
        work.writes.state(row.clone());
    }
}
