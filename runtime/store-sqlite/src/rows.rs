//! Rows as values, and the statements that write many of them.
//!
//! A command loads rows, changes values and hands them to [`Writes`]; [`Writes::flush`] writes everything in a
//! fixed order with a handful of statements. Between two flushes nothing here has been seen by the database.

use std::collections::HashSet;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};
use warp_domain::ending::State;
use warp_domain::ledger::Effect;
use warp_domain::{HostId, JobHandle, KeyId, RunNumber, UnixMillis};
use warp_store::{LogLine, StoreErrorKind};

use crate::bulk::{Bulk, Script};
use crate::error::Fault;

/// Where a job stands. The numbers are in the file and in the conditions of its partial indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i64)]
pub(crate) enum Place {
    Scheduled = 0,
    Ready = 1,
    Parked = 2,
    Reserved = 3,
    Running = 4,
    Awaiting = 5,
    Completed = 10,
    Failed = 11,
    Deleted = 12,
}

impl Place {
    pub(crate) fn read(number: i64) -> Result<Self, Fault> {
        Ok(match number {
            0 => Place::Scheduled,
            1 => Place::Ready,
            2 => Place::Parked,
            3 => Place::Reserved,
            4 => Place::Running,
            5 => Place::Awaiting,
            10 => Place::Completed,
            11 => Place::Failed,
            12 => Place::Deleted,
            _ => return Err(Fault::Said(StoreErrorKind::Internal, format!("{number} is no place of a job"))),
        })
    }

    pub(crate) fn state(self) -> State {
        match self {
            Place::Scheduled => State::Scheduled,
            Place::Ready | Place::Parked | Place::Reserved => State::Enqueued,
            Place::Running => State::Processing,
            Place::Awaiting => State::Awaiting,
            Place::Completed => State::Completed,
            Place::Failed => State::Failed,
            Place::Deleted => State::Deleted,
        }
    }

    pub(crate) fn has_ended(self) -> bool {
        matches!(self, Place::Completed | Place::Failed | Place::Deleted)
    }

    /// The counter of ended rows that are still there.
    pub(crate) fn kept_counter(self) -> Option<&'static str> {
        match self {
            Place::Completed => Some("kept:completed"),
            Place::Failed => Some("kept:failed"),
            Place::Deleted => Some("kept:deleted"),
            _ => None,
        }
    }
}

/// A row of `job_state`.
#[derive(Debug, Clone)]
pub(crate) struct StateRow {
    pub(crate) handle: i64,
    pub(crate) lane: i64,
    pub(crate) place: Place,
    pub(crate) due: i64,
    pub(crate) run: RunNumber,
    /// Charged attempts; one that is running counts.
    pub(crate) attempt: u32,
    /// Uncharged ends by the death of a host.
    pub(crate) deaths: u32,
    pub(crate) is_unique: bool,
    /// `None` until the job has first been claimed or parked.
    pub(crate) stamp: Option<i64>,
    pub(crate) digest: Option<i64>,
    /// Ascending, each once (C4); empty is a job without a key.
    pub(crate) keys: Vec<KeyId>,
    /// The place in line.
    pub(crate) ticket: Option<u64>,
    /// The key it is parked on, or was woken or reserved for.
    pub(crate) parked_on: Option<KeyId>,
    /// What refused it, in words, from its first parking to its next start.
    pub(crate) refusal: Option<String>,
    /// The token of the run that goes on.
    pub(crate) token: Option<i64>,
    /// The token of the last run that was settled, so that a repeat is recognised as done (C1).
    pub(crate) settled: Option<i64>,
    pub(crate) host: Option<i64>,
    pub(crate) changed_at: i64,
}

/// The columns that [`StateRow::read`] expects, in order.
macro_rules! state_columns {
    () => {
        "s.handle, s.lane, s.place, s.due, s.run, s.attempt, s.deaths, s.is_unique, s.stamp, s.digest, s.keys, s.ticket, s.parked_on, s.refusal, s.token, s.settled, s.host, s.changed_at"
    };
}
pub(crate) use state_columns;

/// How many columns that is.
pub(crate) const STATE_COLUMNS: usize = 18;

impl StateRow {
    /// A job that has just been enqueued.
    pub(crate) fn new(handle: i64, lane: i64, due: Option<UnixMillis>, now: UnixMillis, is_unique: bool) -> Self {
        let later = due.filter(|due| *due > now);
        StateRow {
            handle,
            lane,
            place: if later.is_some() { Place::Scheduled } else { Place::Ready },
            due: due.unwrap_or(now).0,
            run: 0,
            attempt: 0,
            deaths: 0,
            is_unique,
            stamp: None,
            digest: None,
            keys: Vec::new(),
            ticket: None,
            parked_on: None,
            refusal: None,
            token: None,
            settled: None,
            host: None,
            changed_at: now.0,
        }
    }

    pub(crate) fn read(row: &SqliteRow) -> Result<Self, Fault> {
        Ok(StateRow {
            handle: row.try_get(0)?,
            lane: row.try_get(1)?,
            place: Place::read(row.try_get(2)?)?,
            due: row.try_get(3)?,
            run: row.try_get(4)?,
            attempt: row.try_get(5)?,
            deaths: row.try_get(6)?,
            is_unique: row.try_get(7)?,
            stamp: row.try_get(8)?,
            digest: row.try_get(9)?,
            keys: read_keys(row.try_get(10)?)?,
            ticket: row.try_get::<Option<i64>, _>(11)?.map(i64::cast_unsigned),
            parked_on: row.try_get::<Option<i64>, _>(12)?.map(KeyId),
            refusal: row.try_get(13)?,
            token: row.try_get(14)?,
            settled: row.try_get(15)?,
            host: row.try_get(16)?,
            changed_at: row.try_get(17)?,
        })
    }

    pub(crate) fn job(&self) -> JobHandle {
        JobHandle(self.handle)
    }

    /// Every column, in order.
    fn put(&self, row: &mut crate::bulk::Row<'_>) -> Result<(), Fault> {
        let StateRow {
            handle,
            lane,
            place,
            due,
            run,
            attempt,
            deaths,
            is_unique,
            stamp,
            digest,
            keys,
            ticket,
            parked_on,
            refusal,
            token,
            settled,
            host,
            changed_at,
        } = self;
        row.put(*handle)?.put(*lane)?.put(*place as i64)?.put(*due)?.put(*run)?.put(*attempt)?.put(*deaths)?.put(*is_unique)?;
        row.put(*stamp)?.put(*digest)?.put(write_keys(keys))?.put(ticket.map(u64::cast_signed))?;
        row.put(parked_on.map(|key| key.0))?.put(refusal.clone())?.put(*token)?.put(*settled)?.put(*host)?.put(*changed_at)?;
        Ok(())
    }

    /// Whether Skip has been decided: once, before its first start or parking.
    pub(crate) fn has_started(&self) -> bool {
        self.stamp.is_some()
    }
}

/// Reads `[3,7]`.
pub(crate) fn read_keys(text: Option<&str>) -> Result<Vec<KeyId>, Fault> {
    let Some(text) = text else { return Ok(Vec::new()) };
    let keys: Vec<i64> =
        serde_json::from_str(text).map_err(|error| Fault::Said(StoreErrorKind::Internal, format!("keys of a job: {error}")))?;
    Ok(keys.into_iter().map(KeyId).collect())
}

/// `[1,2,3]` for `json_each`.
pub(crate) fn json_numbers(numbers: impl IntoIterator<Item = i64>) -> String {
    let mut text = String::from("[");
    for (at, number) in numbers.into_iter().enumerate() {
        if at > 0 {
            text.push(',');
        }
        text.push_str(itoa(number).as_str());
    }
    text.push(']');
    text
}

fn itoa(number: i64) -> String {
    number.to_string()
}

fn write_keys(keys: &[KeyId]) -> Option<String> {
    (!keys.is_empty()).then(|| json_numbers(keys.iter().map(|key| key.0)))
}

/// What an audit row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i64)]
pub(crate) enum Event {
    Created = 1,
    Processing = 2,
    Completed = 3,
    Failed = 4,
    Scheduled = 5,
    Enqueued = 6,
    Requeued = 7,
    Deleted = 8,
    CancellationRequested = 9,
}

impl Event {
    pub(crate) fn name(number: i64) -> &'static str {
        match number {
            1 => "Created",
            2 => "Processing",
            3 => "Completed",
            4 => "Failed",
            5 => "Scheduled",
            6 => "Enqueued",
            7 => "Requeued",
            8 => "Deleted",
            9 => "CancellationRequested",
            _ => "Unknown",
        }
    }
}

/// A row of `audit`, without its number.
#[derive(Debug)]
pub(crate) struct Audit {
    pub(crate) job: i64,
    pub(crate) at: UnixMillis,
    pub(crate) event: Event,
    pub(crate) run: RunNumber,
    pub(crate) message: Option<String>,
    pub(crate) host: Option<HostId>,
    pub(crate) digest: Option<i64>,
    pub(crate) took_us: Option<i64>,
}

impl Audit {
    pub(crate) fn new(job: i64, at: UnixMillis, event: Event) -> Self {
        Audit { job, at, event, run: 0, message: None, host: None, digest: None, took_us: None }
    }

    pub(crate) fn message(mut self, message: impl Into<String>) -> Self {
        self.message = Some(message.into());
        self
    }

    /// About the run that the row stands for.
    pub(crate) fn run_of(mut self, row: &StateRow) -> Self {
        self.run = row.run;
        self.host = row.host.map(HostId);
        self.digest = row.digest;
        self
    }
}

/// A row of `outcome`: what a run left besides its state.
#[derive(Debug)]
pub(crate) struct OutcomeRow {
    pub(crate) job: i64,
    pub(crate) result: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) dropped_lines: i64,
    pub(crate) dropped_bytes: i64,
}

const ALL_STATE_COLUMNS: &str = "INSERT INTO job_state (handle, lane, place, due, run, attempt, deaths, is_unique, stamp, digest, keys, ticket, parked_on, refusal, token, settled, host, changed_at)";
const SET_ALL_STATE_COLUMNS: &str = "ON CONFLICT (handle) DO UPDATE SET place = excluded.place, due = excluded.due, run = excluded.run, attempt = excluded.attempt, deaths = excluded.deaths, is_unique = excluded.is_unique, stamp = excluded.stamp, digest = excluded.digest, keys = excluded.keys, ticket = excluded.ticket, parked_on = excluded.parked_on, refusal = excluded.refusal, token = excluded.token, settled = excluded.settled, host = excluded.host, changed_at = excluded.changed_at";

/// Every statement that writes many rows, built once.
pub(crate) struct Statements {
    pub(crate) jobs: Bulk,
    pub(crate) counters: Bulk,
    pub(crate) unique_keys: Bulk,
    pub(crate) keys: Bulk,
    pub(crate) contracts: Bulk,
    completed: Bulk,
    started: Bulk,
    states: Bulk,
    ends: Bulk,
    free_unique: Bulk,
    free_slots: Bulk,
    take_slots: Bulk,
    pass_slots: Bulk,
    moves: Bulk,
    unblock: Bulk,
    block: Bulk,
    audit: Bulk,
    outcomes: Bulk,
    logs: Bulk,
    progress: Bulk,
}

impl Statements {
    pub(crate) fn new() -> Self {
        Statements {
            jobs: Bulk::new("INSERT INTO job (handle, id, lane, payload, metadata, trace_parent, explicit, unique_key, created_at)", 9, ""),
            counters: Bulk::new("INSERT INTO counter (name, value)", 2, "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"),
            unique_keys: Bulk::new("INSERT INTO unique_key (key, job)", 2, ""),
            keys: Bulk::new("INSERT INTO conc_key (key)", 1, "ON CONFLICT (key) DO NOTHING"),
            contracts: Bulk::new("INSERT INTO host_contract (host, contract)", 2, "ON CONFLICT DO NOTHING"),
            // The place is that of a run in both: where the row is missing after all, nothing looks as if it had ended.
            completed: Bulk::selecting(
                "*, 4",
                "INSERT INTO job_state (handle, lane, due, settled, changed_at, place)",
                5,
                "ON CONFLICT (handle) DO UPDATE SET place = 10, settled = excluded.settled, token = NULL, host = NULL, is_unique = 0, ticket = NULL, parked_on = NULL, refusal = NULL, changed_at = excluded.changed_at \
                 WHERE job_state.place = 4 AND job_state.token = excluded.settled",
            ),
            started: Bulk::selecting(
                "*, 4",
                "INSERT INTO job_state (handle, lane, due, run, attempt, stamp, digest, keys, ticket, token, host, changed_at, place)",
                12,
                "ON CONFLICT (handle) DO UPDATE SET place = 4, run = excluded.run, attempt = excluded.attempt, stamp = excluded.stamp, digest = excluded.digest, \
                 keys = excluded.keys, ticket = excluded.ticket, parked_on = NULL, refusal = NULL, token = excluded.token, host = excluded.host, changed_at = excluded.changed_at",
            ),
            // An upsert finds its row by the primary key and changes it in one pass; `UPDATE … FROM` collects
            // all rows in a temporary table first.
            states: Bulk::new(ALL_STATE_COLUMNS, STATE_COLUMNS, SET_ALL_STATE_COLUMNS),
            ends: Bulk::new(
                ALL_STATE_COLUMNS,
                STATE_COLUMNS,
                &format!("{SET_ALL_STATE_COLUMNS} WHERE job_state.place = 4 AND job_state.token = excluded.settled"),
            ),
            free_unique: Bulk::new("DELETE FROM unique_key WHERE job IN (", 1, ")"),
            free_slots: Bulk::new("DELETE FROM slot WHERE job IN (", 1, ")"),
            take_slots: Bulk::new("INSERT INTO slot (key, number, job, stamped, since)", 5, ""),
            pass_slots: Bulk::new(
                "UPDATE slot INDEXED BY slot_job SET job = v.column3, since = v.column4 FROM (",
                4,
                ") AS v WHERE slot.key = v.column1 AND slot.job = v.column2",
            ),
            moves: Bulk::new(
                "UPDATE job_state SET place = v.column2, changed_at = v.column3 FROM (",
                3,
                ") AS v WHERE job_state.handle = v.column1 AND job_state.place = 2",
            ),
            unblock: Bulk::new("DELETE FROM blocker WHERE job IN (", 1, ")"),
            block: Bulk::new("INSERT INTO blocker (key, job, ticket)", 3, "ON CONFLICT DO NOTHING"),
            audit: Bulk::new("INSERT INTO audit (job, entry, at, event, run, message, host, digest, took_us)", 9, ""),
            outcomes: Bulk::new(
                "INSERT INTO outcome (job, result, error, dropped_lines, dropped_bytes)",
                5,
                "ON CONFLICT (job) DO UPDATE SET result = coalesce(excluded.result, result), error = coalesce(excluded.error, error), dropped_lines = dropped_lines + excluded.dropped_lines, dropped_bytes = dropped_bytes + excluded.dropped_bytes",
            ),
            logs: Bulk::new("INSERT INTO log (job, entry, at, run, stream, body)", 6, ""),
            progress: Bulk::new(
                "INSERT INTO progress (job, name, percent, entry)",
                4,
                "ON CONFLICT (job, name) DO UPDATE SET percent = excluded.percent",
            ),
        }
    }
}

/// What the command has decided and not written yet.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    states: Vec<StateRow>,
    ends: Vec<StateRow>,
    audits: Vec<(i64, Audit)>,
    outcomes: Vec<OutcomeRow>,
    logs: Vec<(i64, i64, RunNumber, LogLine)>,
    progress: Vec<(i64, String, f32, i64)>,
    free_unique: Vec<i64>,
    free_slots: Vec<i64>,
    take_slots: Vec<(i64, i64, i64, i64, i64)>,
    /// Slots that have passed on: key, from whom, to whom, when. Each once, with the last it has come to.
    pass_slots: Vec<(i64, i64, i64, i64)>,
    moves: Vec<(i64, Place, i64)>,
    unblocks: Vec<i64>,
    blocks: Vec<(i64, i64, i64)>,
    /// Jobs that this transaction has made runnable and nobody has claimed in it.
    runnable: HashSet<i64>,
    /// Those of them that were reserved or woken for a key.
    reserved: HashSet<i64>,
    /// The earliest due time of what this command has scheduled.
    scheduled: Option<i64>,
}

impl Writes {
    pub(crate) fn state(&mut self, row: StateRow) {
        self.reserved.remove(&row.handle);
        match row.place {
            Place::Ready => self.runnable.insert(row.handle),
            _ => self.runnable.remove(&row.handle),
        };
        self.note_scheduled(&row);
        self.states.push(row);
    }

    /// The end of a run. It is written only where the run still goes on under the token that the row now has in
    /// `settled` (C1); else the flush fails with [`Fault::Outdated`].
    pub(crate) fn end(&mut self, row: StateRow) {
        if row.place == Place::Ready {
            self.runnable.insert(row.handle);
        }
        self.note_scheduled(&row);
        self.ends.push(row);
    }

    fn note_scheduled(&mut self, row: &StateRow) {
        if row.place == Place::Scheduled {
            self.scheduled = Some(self.scheduled.map_or(row.due, |due| due.min(row.due)));
        }
    }

    /// The earliest due time of what this command has scheduled.
    pub(crate) fn scheduled(&self) -> Option<UnixMillis> {
        self.scheduled.map(UnixMillis)
    }

    /// What outlasts a flush.
    pub(crate) fn memory(&self) -> Writes {
        Writes { runnable: self.runnable.clone(), reserved: self.reserved.clone(), scheduled: self.scheduled, ..Writes::default() }
    }

    /// Whether nothing waits to be written.
    pub(crate) fn is_written(&self) -> bool {
        let Writes {
            states,
            ends,
            audits,
            outcomes,
            logs,
            progress,
            free_unique,
            free_slots,
            take_slots,
            pass_slots,
            moves,
            unblocks,
            blocks,
            ..
        } = self;
        states.is_empty()
            && ends.is_empty()
            && audits.is_empty()
            && outcomes.is_empty()
            && logs.is_empty()
            && progress.is_empty()
            && free_unique.is_empty()
            && free_slots.is_empty()
            && take_slots.is_empty()
            && pass_slots.is_empty()
            && moves.is_empty()
            && unblocks.is_empty()
            && blocks.is_empty()
    }

    /// Whether rows wait to be written that a claim would find.
    pub(crate) fn has_unwritten_runnable(&self) -> bool {
        self.has_unwritten_ready() || !self.moves.is_empty()
    }

    /// Whether some of them are ready.
    pub(crate) fn has_unwritten_ready(&self) -> bool {
        self.states().any(|row| row.place == Place::Ready) || self.moves.iter().any(|(_, place, _)| *place == Place::Ready)
    }

    /// Whether some of them are parked, other than by a claim: back in their line (B8).
    pub(crate) fn has_unwritten_parked(&self) -> bool {
        self.states().any(|row| row.place == Place::Parked)
    }

    /// Reserved jobs whose rows still say that they are parked.
    pub(crate) fn unwritten_reservations(&self) -> impl Iterator<Item = i64> {
        self.moves.iter().filter(|(_, place, _)| *place == Place::Reserved).map(|(job, ..)| *job)
    }

    /// These jobs have been decided about after they were reserved: whatever became of them is written instead.
    pub(crate) fn forget_reservations(&mut self, jobs: &HashSet<i64>) {
        self.moves.retain(|(job, place, _)| *place != Place::Reserved || !jobs.contains(job));
    }

    /// Rows to be written.
    pub(crate) fn states(&self) -> impl Iterator<Item = &StateRow> {
        self.states.iter().chain(&self.ends)
    }

    /// Whether somebody should look for work.
    pub(crate) fn made_runnable(&self) -> bool {
        !self.runnable.is_empty()
    }

    /// How many jobs this command has reserved or woken and not claimed.
    pub(crate) fn reserved(&self) -> usize {
        self.reserved.len()
    }

    /// `entry` is the next number of the history.
    pub(crate) fn audit(&mut self, entry: i64, audit: Audit) {
        self.audits.push((entry, audit));
    }

    pub(crate) fn outcome(&mut self, row: OutcomeRow) {
        self.outcomes.push(row);
    }

    pub(crate) fn log(&mut self, job: i64, entry: i64, run: RunNumber, line: LogLine) {
        self.logs.push((job, entry, run, line));
    }

    pub(crate) fn progress(&mut self, job: i64, name: String, percent: f32, entry: i64) {
        self.progress.push((job, name, percent, entry));
    }

    pub(crate) fn free_unique(&mut self, job: i64) {
        self.free_unique.push(job);
    }

    /// Takes over what the ledger decided about other rows.
    pub(crate) fn effects(&mut self, effects: Vec<Effect>, now: UnixMillis) {
        for effect in effects {
            match effect {
                Effect::Take { key, number, job, limit, reserved: _ } => {
                    self.take_slots.push((key.0, i64::from(number), job.0, i64::from(limit), now.0));
                }
                Effect::Reserve { job } => {
                    self.moves.push((job.0, Place::Reserved, now.0));
                    self.runnable.insert(job.0);
                    self.reserved.insert(job.0);
                }
                Effect::Wake { job } => {
                    self.moves.push((job.0, Place::Ready, now.0));
                    self.runnable.insert(job.0);
                    self.reserved.insert(job.0);
                }
                Effect::Free { job } => {
                    // Deletions are written before insertions: a slot taken and freed again is neither.
                    self.take_slots.retain(|(_, _, holder, _, _)| *holder != job.0);
                    self.free_slots.push(job.0);
                }
                // One statement re-points all of them, so a slot that has gone through several runs goes at once to the last.
                Effect::Pass { key, from, to } => match self.pass_slots.iter_mut().find(|(of, _, at, _)| (*of, *at) == (key.0, from.0)) {
                    Some((.., at, _)) => *at = to.0,
                    None => self.pass_slots.push((key.0, from.0, to.0, now.0)),
                },
                Effect::KeepTicket { job, ticket } => {
                    // It is about a start of this batch, whose row has not been written yet.
                    if let Some(row) = self.states.iter_mut().rev().find(|row| row.handle == job.0) {
                        row.ticket = Some(ticket);
                    }
                }
                Effect::Block { key, ticket, job } => self.blocks.push((key.0, job.0, ticket.cast_signed())),
                Effect::Unblock { job } => {
                    self.blocks.retain(|(_, blocker, _)| *blocker != job.0);
                    self.unblocks.push(job.0);
                }
            }
        }
    }

    /// Writes everything behind what `script` says already. Rows come before moves: what was parked in this batch may have been woken in it.
    pub(crate) async fn flush(&mut self, with: &Statements, mut script: Script, conn: &mut SqliteConnection) -> Result<(), Fault> {
        let Writes {
            states,
            ends,
            audits,
            outcomes,
            logs,
            progress,
            free_unique,
            free_slots,
            take_slots,
            pass_slots,
            moves,
            unblocks,
            blocks,
            runnable,
            reserved,
            scheduled,
        } = std::mem::take(self);
        (self.runnable, self.reserved, self.scheduled) = (runnable, reserved, scheduled);
        let one = |job: &i64, row: &mut crate::bulk::Row<'_>| row.put(*job).map(drop);
        script.rows(&with.free_unique, &free_unique, one)?;
        // A run that starts or completes changes few columns. (One that came out of a line keeps its place there, B8.)
        let (completed, ended): (Vec<_>, Vec<_>) = ends.into_iter().partition(|row| row.place == Place::Completed);
        let (started, states): (Vec<_>, Vec<_>) =
            states.into_iter().partition(|row| row.place == Place::Running && row.parked_on.is_none());
        let mut guarded = script.rows(&with.completed, &completed, |state, row| {
            row.put(state.handle)?.put(state.lane)?.put(state.due)?.put(state.settled)?.put(state.changed_at)?;
            Ok(())
        })?;
        guarded.end = script.rows(&with.ends, &ended, StateRow::put)?.end;
        script.rows(&with.started, &started, |state, row| {
            row.put(state.handle)?.put(state.lane)?.put(state.due)?.put(state.run)?.put(state.attempt)?;
            row.put(state.stamp)?.put(state.digest)?.put(write_keys(&state.keys))?.put(state.ticket.map(u64::cast_signed))?;
            row.put(state.token)?.put(state.host)?.put(state.changed_at)?;
            Ok(())
        })?;
        script.rows(&with.states, &states, StateRow::put)?;
        // Before the deletions: what has passed on is not its old holder's to leave behind, and its new one may have ended.
        script.rows(&with.pass_slots, &pass_slots, |(key, from, to, since), row| {
            row.put(*key)?.put(*from)?.put(*to)?.put(*since)?;
            Ok(())
        })?;
        script.rows(&with.free_slots, &free_slots, one)?;
        script.rows(&with.take_slots, &take_slots, |(key, number, job, limit, since), row| {
            row.put(*key)?.put(*number)?.put(*job)?.put(*limit)?.put(*since)?;
            Ok(())
        })?;
        script.rows(&with.moves, &moves, |(job, place, at), row| {
            row.put(*job)?.put(*place as i64)?.put(*at)?;
            Ok(())
        })?;
        script.rows(&with.unblock, &unblocks, one)?;
        script.rows(&with.block, &blocks, |(key, job, ticket), row| {
            row.put(*key)?.put(*job)?.put(*ticket)?;
            Ok(())
        })?;
        script.rows(&with.audit, &audits, |(entry, audit), row| {
            let Audit { job, at, event, run, message, host, digest, took_us } = audit;
            row.put(*job)?.put(*entry)?.put(at.0)?.put(*event as i64)?.put(*run)?.put(message.clone())?;
            row.put(host.map(|host| host.0))?.put(*digest)?.put(*took_us)?;
            Ok(())
        })?;
        script.rows(&with.outcomes, &outcomes, |outcome, row| {
            let OutcomeRow { job, result, error, dropped_lines, dropped_bytes } = outcome;
            row.put(*job)?.put(result.clone())?.put(error.clone())?.put(*dropped_lines)?.put(*dropped_bytes)?;
            Ok(())
        })?;
        script.rows(&with.logs, &logs, |(job, entry, run, LogLine { at, stream, text }), row| {
            row.put(*job)?.put(*entry)?.put(at.0)?.put(*run)?.put(*stream)?.put(text.clone())?;
            Ok(())
        })?;
        script.rows(&with.progress, &progress, |(job, name, percent, entry), row| {
            row.put(*job)?.put(name.clone())?.put(f64::from(*percent))?.put(*entry)?;
            Ok(())
        })?;
        let changed = script.run(conn).await?;
        // The ends stand one behind the other.
        if changed[guarded].iter().sum::<u64>() != (completed.len() + ended.len()) as u64 {
            return Err(Fault::Outdated);
        }
        Ok(())
    }

    /// Forgets everything: its savepoint is being undone.
    pub(crate) fn clear(&mut self) {
        *self = Writes::default();
    }
}
