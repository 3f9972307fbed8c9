//! A host's round trip: ends of runs and new work, in one statement (slots.md C2, B2, B3).
//!
//! `warp.exchange` does it all in one transaction. Where candidates have no stamp yet and need a key (or declared
//! something themselves), it stops at them and returns their payloads; the policy is resolved and the keys are rendered
//! here, and a second call brings them. Between the two nothing is locked and nothing has changed: what somebody else
//! has claimed meanwhile is simply not there any more.
//!
//! What must stay true:
//! - ends are written by the first call, so that a freed slot is claimed in the transaction that freed it;
//! - an end that can never be stored fails its own job and no other ([`SettleVerdict::Poison`]);
//! - dropped anywhere, this leaves whole statements: what an unheard answer claimed is found by the next renewal.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::PgRow;
use warp_domain::ending::{Ending, FailedReason};
use warp_domain::policy::{Declared, Order, Stamp};
use warp_domain::resolve::resolve;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::codec::{self, JsonPayload};
use warp_store::{
    ClaimParams, Claimed, ExchangeParams, Exchanged, HandOff, Lane, Local, Pass, RunOutput, Settle, SettleVerdict, StateChange, StateWrite,
    StoreErrorKind, WaitersWanted,
};

use crate::call::{Db, Sql, get, get_id};
use crate::clock::Clock;
use crate::error::Fault;
use crate::intern::Interned;
use crate::lookahead::{self, Candidate};
use crate::rows::{read_metadata, without_nul, write_metadata};

/// Calls that one exchange makes for candidates that need keys; then it answers `more` and is called again.
const MOST_CALLS: usize = 8;

/// A claim that got so many as it asked for has found a lane that holds much more.
const DEEP: usize = 64;

/// Fences of one token. The ledger uses the first; session locks count up where a slot passes on inside a host, and draw anew
/// before they run out. So fences grow across a change of the kind too.
const FENCES: u64 = 256;

/// What an exchange runs with.
#[derive(Clone, Copy)]
pub(crate) struct Exchange<'a> {
    pub(crate) db: &'a Db,
    pub(crate) interned: &'a Interned,
    pub(crate) clock: Clock,
    /// What rides along under session locks; without it the slots are the ledger's.
    pub(crate) ride: Option<&'a Ride>,
}

/// What a host with session locks sends with its exchange, and hears beside the exchange's own answer.
#[derive(Debug, Default)]
pub(crate) struct Ride {
    /// Parks, wakes and looks as the function takes them, until a call with them has been answered.
    pub(crate) owed: Mutex<Option<Value>>,
    /// `[[key, room]]`.
    pub(crate) room: Value,
    /// Keys whose limits are to be read.
    pub(crate) held: Value,
    pub(crate) heard: Mutex<Heard>,
}

/// What an exchange says to a host with session locks.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// What each keyed run that was claimed wants of the lock session.
    pub(crate) wants: Vec<Wanted>,
    /// Key, the operator's limit, version.
    pub(crate) readings: Vec<(i64, Option<i32>, i64)>,
    /// Keys on which jobs were parked.
    pub(crate) parked: Vec<i64>,
}

/// A keyed run that has been claimed and has no lock yet.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) job: JobHandle,
    pub(crate) keys: Vec<i64>,
    pub(crate) woken_for: Option<i64>,
    pub(crate) has_started: bool,
}

impl Ride {
    fn to_send(&self) -> String {
        let owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sent = owed.clone().unwrap_or_else(|| json!({"parks": [], "wakes": [], "looks": []}));
        sent["room"] = self.room.clone();
        sent["held"] = self.held.clone();
        sent.to_string()
    }

    fn hear(&self, heard: Heard) {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Heard { wants, readings, parked } = heard;
        let mut all = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        all.wants.extend(wants);
        all.readings.extend(readings);
        all.parked.extend(parked);
    }
}

impl Exchange<'_> {
    /// Ends runs and claims.
    pub(crate) async fn run(self, params: ExchangeParams) -> Result<Exchanged, Fault> {
        match self.at_once(&params).await {
            // Nearly always everything can be stored. Where an end cannot, nothing has happened, and the ends are
            // written apart from the claim, and from each other where they must be.
            Err(fault) if !params.settles.is_empty() && cannot_be_stored(&fault) => {
                tracing::warn!(error = fault.text(), ends = params.settles.len(), "a batch of ends was refused; writing it in parts");
                let settled = self.in_parts(&params).await?;
                let hand_off = HandOff { passes: Arc::default(), ..params.hand_off.clone() };
                let claim = ExchangeParams { settles: Arc::new([]), hand_off, ..params };
                Ok(Exchanged { settled, ..self.at_once(&claim).await? })
            }
            answer => answer,
        }
    }

    async fn at_once(self, params: &ExchangeParams) -> Result<Exchanged, Fault> {
        let ExchangeParams { host, now, settles, claim, hand_off } = params;
        let lanes = match claim {
            Some(claim) => Lanes::of(self, claim).await?,
            None => Lanes::default(),
        };
        let mut ends = Ends::of(self, settles, &hand_off.passes).await?;
        let mut wanted = Wanting::of(claim.is_some(), hand_off);
        let mut repeats = std::mem::take(&mut ends.repeats);
        let mut exchanged = Exchanged { settled: ends.verdicts.clone(), ..Exchanged::default() };
        let mut prepared = Prepared::default();
        // What the call that takes it loses, dropped or failed, is looked up again.
        if lanes.has_keys() {
            // More than may start is brought, since others may have claimed the first of them.
            let most = 2 * lanes.max.saturating_add(hand_off.extra as usize).clamp(32, 1024);
            prepared = Prepared::with(self.interned.take_ahead(&lanes.declared(), most, *now));
        }
        let mut unusable = Vec::new();
        let (mut counted, mut last) = (0, None);
        for calls in 1.. {
            let left = lanes.max.saturating_sub(counted);
            let rows = self.call(*host, *now, &ends, &lanes, left, &prepared, &wanted).await?;
            ends = Ends::default();
            let mut answer = Answer::read(&rows)?;
            if let Some(ride) = self.ride {
                ride.hear(std::mem::take(&mut answer.heard));
            }
            exchanged.count(&answer.summary);
            exchanged.not_passed.append(&mut answer.not_passed);
            exchanged.next_due = answer.next_due.map(|due| self.clock.to_caller(due, answer.now, *now));
            for (ord, verdict) in answer.verdicts {
                if let Some(settled) = exchanged.settled.get_mut(ord) {
                    *settled = verdict;
                }
            }
            for (ord, first) in std::mem::take(&mut repeats) {
                if exchanged.settled[first] == SettleVerdict::Late {
                    exchanged.settled[ord] = SettleVerdict::Late;
                }
            }
            self.note_fronts(&lanes, left, &answer.claimed);
            let stamps = answer.claimed.iter().map(|run| run.stamp).collect();
            let stamps = self.interned.stamps(self.db, &stamps).await?;
            for run in answer.claimed {
                let (_, due, job) = run.order;
                last = last.max(Some((due, job)));
                counted += usize::from(wanted.got(&run));
                let stamp = stamps.get(&run.stamp).cloned().unwrap_or_else(|| Err("its stamp is missing".to_owned()));
                match stamp {
                    Ok(stamp) => exchanged.claimed.push(run.claimed(&lanes, &mut prepared, stamp, UnixMillis(answer.now))?),
                    Err(reason) => unusable.push(unacceptable(run.handle, run.token, &reason)),
                }
            }
            // Whoever got all he asked for may ask again.
            if lanes.max > 0 && counted >= lanes.max {
                // Candidates are decided in their order, so whoever stands behind the last one that was claimed has not been. Where
                // fewer were claimed than could be, all have.
                if lanes.has_keys() {
                    self.interned.keep_ahead(lanes.declared(), prepared.left_behind(last), *now);
                }
                exchanged.more = true;
                break;
            }
            if !answer.peeked.is_empty() && calls >= MOST_CALLS {
                exchanged.more = true;
                break;
            }
            if answer.peeked.is_empty() {
                break;
            }
            let Summary { reserved, page, .. } = answer.summary;
            prepared = Prepared { reserved, page, ..Prepared::of(self, &lanes, answer.peeked).await? };
        }
        if !unusable.is_empty() {
            exchanged.unacceptable += u32::try_from(unusable.len()).unwrap_or(u32::MAX);
            let ends = Ends::of(self, &unusable, &[]).await?;
            self.call(*host, *now, &ends, &Lanes::default(), 0, &Prepared::default(), &Wanting::default()).await?;
        }
        Ok(exchanged)
    }

    /// Remembers how far a lane that holds much has been claimed, for the next claim to begin there.
    fn note_fronts(self, lanes: &Lanes, left: usize, claimed: &[Started]) {
        if left < DEEP || claimed.len() < left {
            // Nobody knows of more: the next claim looks from the front.
            if left > 0 {
                self.interned.forget_fronts(&lanes.ids);
            }
        } else if let Some(last) = claimed.last()
            && claimed.iter().all(|run| run.lane == last.lane && !run.keyed)
        {
            let (_, due, job) = last.order;
            self.interned.learn_front(last.lane, (due, job));
        }
    }

    /// Writes ends in ever smaller batches until those that cannot be stored stand alone.
    async fn in_parts(self, params: &ExchangeParams) -> Result<Vec<SettleVerdict>, Fault> {
        // Whose slot has passed on is said with every part: whichever is written first, none frees it.
        let mut verdicts = Vec::with_capacity(params.settles.len());
        // A stack of parts still to do, the next one last.
        let mut parts: Vec<&[Settle]> = vec![&params.settles];
        while let Some(part) = parts.pop() {
            match (self.ends_only(params, part).await, part) {
                (Ok(written), _) => verdicts.extend(written),
                (Err(fault), [one]) if cannot_be_stored(&fault) => {
                    let bare = Settle { took: one.took, ..unacceptable(one.handle, one.token, &poison(fault.text())) };
                    let verdict = self.ends_only(params, std::slice::from_ref(&bare)).await?;
                    verdicts.push(match verdict.first() {
                        Some(SettleVerdict::Settled) => SettleVerdict::Poison,
                        Some(other) => *other,
                        None => SettleVerdict::Late,
                    });
                }
                (Err(fault), _) if cannot_be_stored(&fault) => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.push(second);
                    parts.push(first);
                }
                (Err(fault), _) => return Err(fault),
            }
        }
        Ok(verdicts)
    }

    async fn ends_only(self, params: &ExchangeParams, settles: &[Settle]) -> Result<Vec<SettleVerdict>, Fault> {
        let hand_off = HandOff { passes: Arc::clone(&params.hand_off.passes), ..HandOff::default() };
        let params = ExchangeParams { host: params.host, now: params.now, settles: settles.into(), claim: None, hand_off };
        Ok(Box::pin(self.at_once(&params)).await?.settled)
    }

    /// The one statement. What it locks and which indexes it relies on stands with the function; a host that does nothing but
    /// ask calls the one that is quick where there is one job or none.
    async fn call(
        self,
        host: HostId,
        now: UnixMillis,
        ends: &Ends,
        lanes: &Lanes,
        left: usize,
        prepared: &Prepared,
        wanted: &Wanting,
    ) -> Result<Vec<PgRow>, Fault> {
        let host = i32::try_from(host.0).map_err(|_| Fault::said(StoreErrorKind::HostLost, format!("{} is no host", host.0)))?;
        let tells_nothing = ends.are_none() && prepared.is_nothing() && wanted.keys.is_empty() && self.ride.is_none();
        if tells_nothing && left > 0 && lanes.are_plain() {
            let sql = Sql::new("SELECT * FROM warp.claim_one($1, $2, $3, $4, $5, $6)")
                .arg(host)
                .arg(self.clock.tell(now))
                .arg(lanes.ids.clone())
                .arg(lanes.stamps.clone())
                .arg(lanes.digests.clone())
                .arg(i32::try_from(left).unwrap_or(i32::MAX));
            return self.db.rows(sql).await;
        }
        let Ends { ords, jobs, tokens, took, results, passed, passes, others, lines, children, verdicts: _, repeats: _ } = ends;
        let sql = Sql::new(
            "SELECT * FROM warp.exchange($1, $2, $3, $4, $5, $6, $7, $8::jsonb, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, \
             $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36::jsonb, $37, $38, $39, $40, $41, $42, $43, $44, $45)",
        )
        .arg(host)
        .arg(self.clock.tell(now))
        .arg(ords.clone())
        .arg(jobs.clone())
        .arg(tokens.clone())
        .arg(took.clone())
        .arg(results.clone())
        .arg((!others.is_empty()).then(|| Value::Array(others.clone()).to_string()))
        .arg(lines.ords.clone())
        .arg(lines.jobs.clone())
        .arg(lines.at.clone())
        .arg(lines.streams.clone())
        .arg(lines.texts.clone())
        .arg(children.ords.clone())
        .arg(children.ids.clone())
        .arg(children.lanes.clone())
        .arg(children.payloads.clone())
        .arg(children.metadata.clone())
        .arg(children.trace_parents.clone())
        .arg(children.dues.clone())
        .arg(children.explicits.clone())
        .arg(children.unique_keys.clone())
        .arg(lanes.ids.clone())
        .arg(lanes.stamps.clone())
        .arg(lanes.keyed.clone())
        .arg(lanes.digests.clone())
        .arg(i32::try_from(left).unwrap_or(i32::MAX))
        .arg(lanes.fronts.iter().map(|front| front.map(|(due, _)| due)).collect::<Vec<_>>())
        .arg(lanes.fronts.iter().map(|front| front.map(|(_, job)| job)).collect::<Vec<_>>())
        .arg(prepared.candidates.iter().map(|candidate| candidate.order.1).collect::<Vec<_>>())
        .arg(prepared.candidates.iter().map(|candidate| candidate.stamp).collect::<Vec<_>>())
        .arg(prepared.candidates.iter().map(|candidate| candidate.keys.clone()).collect::<Vec<_>>())
        .arg(prepared.candidates.iter().map(|candidate| candidate.error.clone()).collect::<Vec<_>>())
        .arg(prepared.reserved.clone())
        .arg(prepared.page)
        .arg(self.ride.map(Ride::to_send))
        .arg(passes.keys.clone())
        .arg(passes.from.clone())
        .arg(passes.from_tokens.clone())
        .arg(passes.to.clone())
        .arg(passes.to_tokens.clone())
        .arg(passed.clone())
        .arg(wanted.keys.clone())
        .arg(wanted.most.clone())
        .arg(wanted.extra);
        self.db.rows(sql).await
    }
}

/// What session locks cannot enforce is refused, never ignored.
fn needs_the_ledger(stamp: &Stamp) -> Option<&'static str> {
    let concurrency = &stamp.concurrency.as_ref()?.value;
    if concurrency.order == Order::Fifo {
        return Some(
            "`order = \"fifo\"` needs the ledger, and this database's slots are session locks; leave it out, or `warp-host locks set ledger`",
        );
    }
    (concurrency.weight > 1).then_some(
        "a `weight` above 1 needs the ledger, and this database's slots are session locks; leave it out, or `warp-host locks set ledger`",
    )
}

fn cannot_be_stored(fault: &Fault) -> bool {
    matches!(fault.kind(), StoreErrorKind::Invalid | StoreErrorKind::Internal)
}

fn poison(reason: &str) -> String {
    format!("the end of the run cannot be stored: {reason}")
}

/// The end of a run that cannot be honoured.
fn unacceptable(handle: JobHandle, token: ClaimToken, reason: &str) -> Settle {
    let ending = || Ending::Failed { message: reason.to_owned(), reason: FailedReason::Unacceptable };
    Settle {
        handle,
        token,
        ending: ending(),
        on_conflict: ending(),
        output: RunOutput::default(),
        children: Vec::new(),
        state: Vec::new(),
        took: std::time::Duration::ZERO,
    }
}

// ------------------------------------------------------------------------------------------------ ends

/// Ends as the function takes them.
#[derive(Default)]
struct Ends {
    /// Completed, with nothing but a result and lines.
    ords: Vec<i32>,
    jobs: Vec<i64>,
    tokens: Vec<i64>,
    took: Vec<i64>,
    results: Vec<Option<String>>,
    /// Whether its slot has passed on to a local waiter.
    passed: Vec<bool>,
    passes: Passes,
    /// All others.
    others: Vec<Value>,
    lines: Lines,
    children: Children,
    /// What each comes to unless the function says otherwise.
    verdicts: Vec<SettleVerdict>,
    /// Ends that stand in the batch a second time, and where the first one stands: they are not sent.
    repeats: Vec<(usize, usize)>,
}

/// Slots that passed on inside the host: of each the run that the store knows as its holder, and its last one (B8).
#[derive(Default)]
struct Passes {
    keys: Vec<i64>,
    from: Vec<i64>,
    from_tokens: Vec<i64>,
    to: Vec<i64>,
    to_tokens: Vec<i64>,
}

impl Passes {
    /// Hops of one slot stand in their order.
    fn of(hops: &[Pass]) -> Self {
        let mut passes = Passes::default();
        let mut last: HashMap<i64, usize> = HashMap::with_capacity(hops.len());
        for Pass { key, from, to } in hops {
            let place = match last.remove(&from.1.0) {
                Some(place) => place,
                None => {
                    passes.keys.push(key.0);
                    passes.from.push(from.0.0);
                    passes.from_tokens.push(from.1.0);
                    passes.to.push(0);
                    passes.to_tokens.push(0);
                    passes.keys.len() - 1
                }
            };
            passes.to[place] = to.0.0;
            passes.to_tokens[place] = to.1.0;
            last.insert(to.1.0, place);
        }
        passes
    }
}

#[derive(Default)]
struct Lines {
    ords: Vec<i32>,
    jobs: Vec<i64>,
    at: Vec<i64>,
    streams: Vec<String>,
    texts: Vec<String>,
}

#[derive(Default)]
struct Children {
    ords: Vec<i32>,
    ids: Vec<u128>,
    lanes: Vec<i32>,
    payloads: Vec<String>,
    metadata: Vec<Option<String>>,
    trace_parents: Vec<Option<String>>,
    dues: Vec<Option<i64>>,
    explicits: Vec<Option<i32>>,
    unique_keys: Vec<Option<String>>,
}

impl Ends {
    fn are_none(&self) -> bool {
        self.jobs.is_empty() && self.others.is_empty() && self.passes.keys.is_empty()
    }

    async fn of(exchange: Exchange<'_>, settles: &[Settle], passes: &[Pass]) -> Result<Self, Fault> {
        let mut ends = Ends { passes: Passes::of(passes), ..Ends::default() };
        let from: HashSet<ClaimToken> = passes.iter().map(|pass| pass.from.1).collect();
        let mut first = HashMap::with_capacity(settles.len());
        let mut of_job: HashMap<JobHandle, u32> = HashMap::with_capacity(settles.len());
        settles.iter().for_each(|settle| *of_job.entry(settle.handle).or_default() += 1);
        for (at, settle) in settles.iter().enumerate() {
            match first.entry((settle.handle, settle.token)) {
                Entry::Occupied(first) => {
                    ends.repeats.push((at, *first.get()));
                    ends.verdicts.push(SettleVerdict::Repeated);
                    continue;
                }
                Entry::Vacant(place) => drop(place.insert(at)),
            }
            let ord = i32::try_from(at).unwrap_or(i32::MAX);
            // Of two ends of one job the earlier, a repeat, is recognised only before the later has been written.
            let in_turn = of_job.get(&settle.handle).is_some_and(|ends| *ends > 1);
            match codec::check_settle(settle) {
                Ok(()) => {
                    ends.push(ord, settle, in_turn, from.contains(&settle.token));
                    ends.push_children(exchange, ord, settle).await?;
                    ends.verdicts.push(SettleVerdict::Settled);
                }
                Err(reason) => {
                    let bare = Settle { took: settle.took, ..unacceptable(settle.handle, settle.token, &poison(&reason)) };
                    ends.push(ord, &bare, in_turn, false);
                    ends.verdicts.push(SettleVerdict::Poison);
                }
            }
        }
        Ok(ends)
    }

    /// `in_turn`: it must be looked at in the order of the batch; `passed`: it has no slot any more.
    fn push(&mut self, ord: i32, settle: &Settle, in_turn: bool, passed: bool) {
        let Settle { handle, token, ending, on_conflict, output, children, state, took } = settle;
        let took = micros(*took);
        for line in &output.lines {
            self.lines.ords.push(ord);
            self.lines.jobs.push(handle.0);
            self.lines.at.push(line.at.0);
            self.lines.streams.push(line.stream.to_owned());
            self.lines.texts.push(without_nul(&line.text));
        }
        let says_more = !output.progress.is_empty() || output.dropped_lines > 0 || output.dropped_bytes > 0;
        if let Ending::Completed { result } = ending
            && children.is_empty()
            && state.is_empty()
            && !says_more
            && !in_turn
        {
            self.ords.push(ord);
            self.jobs.push(handle.0);
            self.tokens.push(token.0);
            self.took.push(took);
            self.results.push(result.clone());
            self.passed.push(passed);
            return;
        }
        let mut other = json!({"ord": ord, "job": handle.0, "token": token.0, "took": took, "exit": exit(ending)});
        if !state.is_empty() {
            other["state"] = state.iter().map(write).collect();
            other["on_conflict"] = exit(on_conflict);
        }
        if says_more {
            other["progress"] = progress(output);
            other["dropped"] = json!([output.dropped_lines, output.dropped_bytes]);
        }
        self.others.push(other);
    }

    async fn push_children(&mut self, exchange: Exchange<'_>, ord: i32, settle: &Settle) -> Result<(), Fault> {
        if settle.children.is_empty() || !matches!(settle.ending, Ending::Completed { .. }) {
            return Ok(());
        }
        let names: Vec<_> = settle.children.iter().map(|child| (child.contract.clone(), child.queue.clone())).collect();
        let explicits: Vec<_> = settle.children.iter().map(|child| &child.explicit).collect();
        self.children.lanes.extend(exchange.interned.lanes(exchange.db, &names).await?);
        self.children.explicits.extend(exchange.interned.declared_ids(exchange.db, &explicits).await?);
        for child in &settle.children {
            self.children.ords.push(ord);
            self.children.ids.push(child.id.0);
            self.children.payloads.push(child.payload.clone());
            self.children.metadata.push(write_metadata(&child.metadata));
            self.children.trace_parents.push(child.trace_parent.clone());
            self.children.dues.push(child.due.map(|due| due.0));
            self.children.unique_keys.push(child.unique_key.clone());
        }
        Ok(())
    }
}

fn micros(span: std::time::Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// What `warp.leave` takes.
pub(crate) fn exit(ending: &Ending) -> Value {
    match ending {
        Ending::Completed { result } => json!({"to": "completed", "result": result}),
        Ending::Failed { message, reason } => json!({"to": "failed", "message": without_nul(message), "reason": reason.name()}),
        Ending::Retry { message, at } => json!({"to": "retry", "message": without_nul(message), "at": at.0}),
        Ending::Snooze { at } => json!({"to": "snooze", "at": at.0}),
        Ending::HandBack { message } => json!({"to": "hand-back", "message": without_nul(message)}),
        Ending::NotBegun => json!({"to": "not-begun"}),
        Ending::Deleted { message } => json!({"to": "deleted", "message": without_nul(message)}),
    }
}

/// What `warp.apply_state` takes.
fn write(write: &StateWrite) -> Value {
    json!({"bucket": write.bucket, "key": write.key, "change": change(&write.change)})
}

/// What `warp.write_state` takes.
pub(crate) fn change(change: &StateChange) -> Value {
    match change {
        StateChange::Put(value) => json!({"put": value}),
        StateChange::CompareAndSet { expected, value } => json!({"expected": expected, "value": value}),
        StateChange::Add(by) => json!({"add": by.to_string()}),
    }
}

/// What `warp.keep_output` takes as `progress`. A number that is none says nothing about progress.
pub(crate) fn progress(output: &RunOutput) -> Value {
    let finite = output.progress.iter().filter(|(_, percent)| percent.is_finite());
    finite.map(|(name, percent)| json!([without_nul(name), percent])).collect()
}

// ------------------------------------------------------------------------------------------------ lanes

/// What a host can run, as the function takes it.
#[derive(Default)]
struct Lanes {
    max: usize,
    lanes: Arc<[Lane]>,
    ids: Vec<i32>,
    /// The stamp of jobs that declared nothing themselves, and whether it has a key.
    stamps: Vec<i32>,
    keyed: Vec<bool>,
    digests: Vec<i32>,
    /// Due time and job up to which claims of this host have taken everything.
    fronts: Vec<Option<(i64, i64)>>,
    places: HashMap<i32, usize>,
}

impl Lanes {
    async fn of(exchange: Exchange<'_>, claim: &ClaimParams) -> Result<Self, Fault> {
        let Exchange { db, interned, clock: _, ride: _ } = exchange;
        let names: Vec<_> = claim.lanes.iter().map(|lane| (lane.declarations.contract.clone(), lane.queue.clone())).collect();
        let digests: Vec<_> = claim.lanes.iter().map(|lane| lane.declarations.digest).collect();
        let plain: Vec<_> = claim.lanes.iter().map(|lane| Arc::new(resolve(&Declared::default(), &lane.declarations))).collect();
        let ids = interned.lanes_to_claim(db, &names).await?;
        Ok(Lanes {
            max: claim.max as usize,
            lanes: Arc::clone(&claim.lanes),
            places: ids.iter().enumerate().map(|(place, id)| (*id, place)).collect(),
            keyed: plain.iter().map(|stamp| stamp.concurrency.is_some()).collect(),
            stamps: interned.stamp_ids(db, &plain).await?,
            digests: interned.digests(db, &digests).await?,
            fronts: interned.fronts(&ids),
            ids,
        })
    }

    fn has_keys(&self) -> bool {
        self.keyed.iter().any(|keyed| *keyed)
    }

    /// Nothing is known of them but that their jobs need no keys, unless they declared some themselves.
    fn are_plain(&self) -> bool {
        !self.has_keys() && self.fronts.iter().all(Option::is_none)
    }

    /// What a look at their jobs depends on.
    fn declared(&self) -> lookahead::Declared {
        self.ids.iter().zip(&self.stamps).zip(&self.digests).map(|((lane, stamp), digest)| (*lane, *stamp, *digest)).collect()
    }

    fn lane(&self, id: i32) -> Result<&Lane, Fault> {
        let unknown = || Fault::said(StoreErrorKind::Internal, format!("a claim answered with lane {id}, which was not asked for"));
        self.places.get(&id).and_then(|place| self.lanes.get(*place)).ok_or_else(unknown)
    }
}

/// Local waiters that the host would take, as the function takes them.
#[derive(Default)]
struct Wanting {
    keys: Vec<i64>,
    most: Vec<i32>,
    /// How many of them do not count among what is claimed in all.
    extra: i32,
}

impl Wanting {
    fn of(claims: bool, hand_off: &HandOff) -> Self {
        let wanted = hand_off.wanted.iter().filter(|_| claims);
        let number = |most: u32| i32::try_from(most).unwrap_or(i32::MAX);
        let (keys, most) = wanted.map(|WaitersWanted { key, most }| (key.0, number(*most))).unzip();
        Wanting { keys, most, extra: if claims { number(hand_off.extra) } else { 0 } }
    }

    /// One of them has come: later calls of the exchange ask for the rest. Whether it counts among what is claimed in all.
    fn got(&mut self, run: &Started) -> bool {
        let Some(key) = run.slot_key.filter(|_| run.waits) else { return true };
        if let Some(place) = self.keys.iter().position(|wanted| *wanted == key) {
            self.most[place] -= 1;
        }
        let counts = self.extra == 0;
        self.extra = (self.extra - 1).max(0);
        counts
    }
}

// ------------------------------------------------------------------------------------------------ candidates that need keys

/// Stamps and keys for candidates, as the function takes them, and their payloads, which it does not send again.
#[derive(Default)]
struct Prepared {
    candidates: Vec<Candidate>,
    /// Where the candidate of a job stands.
    places: HashMap<i64, usize>,
    /// What earlier calls of this exchange reserved or woke.
    reserved: Vec<i64>,
    /// How long the page was that they stopped at.
    page: Option<i32>,
}

impl Prepared {
    fn with(candidates: Vec<Candidate>) -> Self {
        let places = candidates.iter().enumerate().map(|(place, candidate)| (candidate.order.1, place)).collect();
        Prepared { candidates, places, ..Prepared::default() }
    }

    fn is_nothing(&self) -> bool {
        self.candidates.is_empty() && self.reserved.is_empty() && self.page.is_none()
    }

    /// The payload of a job that the function has not sent again.
    fn payload(&mut self, job: JobHandle) -> String {
        let candidate = self.places.get(&job.0).and_then(|place| self.candidates.get_mut(*place));
        candidate.map(|candidate| std::mem::take(&mut candidate.payload)).unwrap_or_default()
    }

    /// Those behind this one.
    fn left_behind(&mut self, last: Option<(i64, i64)>) -> Vec<Candidate> {
        let mut left = std::mem::take(self).candidates;
        left.retain(|candidate| Some(candidate.order) > last);
        left
    }

    /// Resolves and renders. A policy that cannot be applied fails its own job.
    async fn of(exchange: Exchange<'_>, lanes: &Lanes, peeked: Vec<Peeked>) -> Result<Self, Fault> {
        let Exchange { db, interned, clock: _, ride: _ } = exchange;
        let declared = interned.declared(db, &peeked.iter().filter_map(|job| job.explicit).collect()).await?;
        let stamped = interned.stamps(db, &peeked.iter().filter_map(|job| job.stamp).collect()).await?;
        let mut resolved: Vec<Result<(Arc<Stamp>, Option<Vec<String>>), (Option<Arc<Stamp>>, String)>> = Vec::with_capacity(peeked.len());
        let mut plain: HashMap<i32, Arc<Stamp>> = HashMap::new();
        for job in &peeked {
            let declarations = &lanes.lane(job.lane)?.declarations;
            let on_row = job.stamp.map(|id| stamped.get(&id).cloned().unwrap_or_else(|| Err("its stamp is missing".to_owned())));
            let stamp = match job.explicit.map(|id| declared.get(&id).cloned().unwrap_or_else(|| Err("its policy is missing".to_owned()))) {
                None => Ok(Arc::clone(plain.entry(job.lane).or_insert_with(|| Arc::new(resolve(&Declared::default(), declarations))))),
                Some(Ok(declared)) => Ok(Arc::new(resolve(&declared, declarations))),
                Some(Err(reason)) => Err((None, reason)),
            };
            let stamp = on_row.map_or(stamp, |on_row| on_row.map_err(|reason| (None, reason)));
            resolved.push(stamp.and_then(|stamp| match render(&stamp, &job.payload) {
                Ok(keys) => Ok((stamp, keys)),
                Err(reason) => Err((Some(stamp), reason)),
            }));
            if exchange.ride.is_some()
                && let Some(Ok((stamp, _))) = resolved.last()
                && let Some(reason) = needs_the_ledger(stamp)
            {
                let stamp = Arc::clone(stamp);
                resolved.pop();
                resolved.push(Err((Some(stamp), reason.to_owned())));
            }
        }
        let texts: BTreeSet<String> = resolved.iter().flatten().filter_map(|(_, keys)| keys.as_ref()).flatten().cloned().collect();
        let key_ids = interned.keys(db, &texts).await?;
        let stamps: Vec<_> = resolved
            .iter()
            .map(|outcome| match outcome {
                Ok((stamp, _)) => Some(Arc::clone(stamp)),
                Err((stamp, _)) => stamp.clone(),
            })
            .collect();
        let known: Vec<_> = stamps.iter().flatten().cloned().collect();
        let mut ids = interned.stamp_ids(db, &known).await?.into_iter();
        let mut candidates = Vec::with_capacity(peeked.len());
        for ((job, outcome), stamp) in peeked.into_iter().zip(resolved).zip(stamps) {
            let (keys, error) = match outcome {
                Ok((_, keys)) => (keys, None),
                Err((_, reason)) => (None, Some(without_nul(&reason))),
            };
            // In the one global order of keys, each once (C4).
            let keys = keys.map(|keys| {
                let ids: BTreeSet<i64> = keys.iter().filter_map(|key| key_ids.get(key)).map(|id| id.0).collect();
                let ids: Vec<_> = ids.iter().map(ToString::to_string).collect();
                format!("{{{}}}", ids.join(","))
            });
            let stamp = stamp.and_then(|_| ids.next());
            candidates.push(Candidate { order: (job.due, job.handle), stamp, keys, error, payload: job.payload });
        }
        Ok(Prepared::with(candidates))
    }
}

/// The keys of a job under this stamp; nothing where it has none.
fn render(stamp: &Stamp, payload: &str) -> Result<Option<Vec<String>>, String> {
    let Some(concurrency) = &stamp.concurrency else { return Ok(None) };
    let payload = JsonPayload::parse(payload).map_err(|error| error.to_string())?;
    let keys = concurrency.value.keys.iter().map(|key| key.render(&payload).map_err(|error| error.to_string()));
    keys.collect::<Result<_, _>>().map(Some)
}

// ------------------------------------------------------------------------------------------------ answers

/// The summary of a call.
#[derive(Default, Deserialize)]
struct Summary {
    parked: u32,
    again: u32,
    skipped: u32,
    unacceptable: u32,
    more: bool,
    /// What this exchange has reserved or woken, in this call or before, and nobody has claimed yet.
    reserved: Vec<i64>,
    page: Option<i32>,
}

/// A candidate that needs stamp and keys.
struct Peeked {
    handle: i64,
    due: i64,
    lane: i32,
    explicit: Option<i32>,
    /// It has a stamp already, under which its keys could not be rendered the last time.
    stamp: Option<i32>,
    payload: String,
}

/// A run that this call started.
struct Started {
    order: (i32, i64, i64),
    handle: JobHandle,
    id: JobId,
    token: ClaimToken,
    run: i32,
    attempt: i32,
    lane: i32,
    stamp: i32,
    keyed: bool,
    created_at: i64,
    payload: Option<String>,
    metadata: Option<String>,
    trace_parent: Option<String>,
    /// The key whose slot may pass on inside the host.
    slot_key: Option<i64>,
    /// It waits for that slot.
    waits: bool,
}

struct Answer {
    summary: Summary,
    next_due: Option<i64>,
    now: i64,
    verdicts: BTreeMap<usize, SettleVerdict>,
    claimed: Vec<Started>,
    peeked: Vec<Peeked>,
    not_passed: Vec<ClaimToken>,
    heard: Heard,
}

impl Answer {
    fn read(rows: &[PgRow]) -> Result<Self, Fault> {
        let mut answer = Answer {
            summary: Summary::default(),
            next_due: None,
            now: 0,
            verdicts: BTreeMap::new(),
            claimed: Vec::with_capacity(rows.len()),
            peeked: Vec::new(),
            not_passed: Vec::new(),
            heard: Heard::default(),
        };
        for row in rows {
            match get::<i16>(row, 0)? {
                0 => {
                    answer.next_due = get(row, 2)?;
                    answer.now = get(row, 4)?;
                    answer.summary = serde_json::from_str(get(row, 12)?)
                        .map_err(|error| Fault::said(StoreErrorKind::Internal, format!("the summary of an exchange: {error}")))?;
                }
                1 => {
                    let verdict = match get::<i32>(row, 5)? {
                        1 => SettleVerdict::Repeated,
                        2 => SettleVerdict::Late,
                        _ => SettleVerdict::Conflicted,
                    };
                    answer.verdicts.insert(usize::try_from(get::<i32>(row, 1)?).unwrap_or(usize::MAX), verdict);
                }
                2 => answer.claimed.push(Started::read(row)?),
                4 => answer.heard.wants.push(Wanted {
                    job: JobHandle(get(row, 2)?),
                    keys: serde_json::from_str(get(row, 12)?)
                        .map_err(|error| Fault::said(StoreErrorKind::Internal, format!("the keys of a claimed run: {error}")))?,
                    woken_for: get(row, 4)?,
                    has_started: get::<i32>(row, 1)? > 0,
                }),
                5 => answer.heard.readings.push((get(row, 2)?, get(row, 1)?, get(row, 4)?)),
                6 => answer.heard.parked.push(get(row, 2)?),
                7 => answer.not_passed.push(ClaimToken(get(row, 4)?)),
                _ => answer.peeked.push(Peeked {
                    handle: get(row, 2)?,
                    due: get(row, 11)?,
                    lane: get(row, 7)?,
                    explicit: get(row, 15)?,
                    stamp: get(row, 8)?,
                    payload: get(row, 12)?,
                }),
            }
        }
        answer.claimed.sort_unstable_by_key(|run| run.order);
        Ok(answer)
    }
}

impl Started {
    fn read(row: &PgRow) -> Result<Self, Fault> {
        let handle = get(row, 2)?;
        Ok(Started {
            order: (get(row, 1)?, get(row, 11)?, handle),
            handle: JobHandle(handle),
            id: JobId(get_id(row, 3)?),
            token: ClaimToken(get(row, 4)?),
            run: get(row, 5)?,
            attempt: get(row, 6)?,
            lane: get(row, 7)?,
            stamp: get(row, 8)?,
            keyed: get(row, 9)?,
            created_at: get(row, 10)?,
            payload: get(row, 12)?,
            metadata: get(row, 13)?,
            trace_parent: get(row, 14)?,
            slot_key: get(row, 16)?,
            waits: get::<Option<i32>>(row, 15)?.is_some(),
        })
    }

    fn claimed(self, lanes: &Lanes, prepared: &mut Prepared, stamp: Arc<Stamp>, now: UnixMillis) -> Result<Claimed, Fault> {
        let payload = match self.payload {
            Some(payload) => payload,
            None => prepared.payload(self.handle),
        };
        Ok(Claimed {
            handle: self.handle,
            id: self.id,
            token: self.token,
            run: self.run.unsigned_abs(),
            attempt: self.attempt.unsigned_abs(),
            lane: lanes.lane(self.lane)?.clone(),
            payload: payload.into(),
            metadata: read_metadata(self.metadata.as_deref())?,
            trace_parent: self.trace_parent,
            stamp,
            keyed: self.keyed,
            fence: self.keyed.then(|| self.token.0.unsigned_abs().saturating_mul(FENCES)),
            local: self.slot_key.map(|key| if self.waits { Local::Waits(KeyId(key)) } else { Local::Holds(KeyId(key)) }),
            created_at: UnixMillis(self.created_at),
            claimed_at: now,
        })
    }
}

/// Adds up what several calls of one exchange said.
trait Count {
    fn count(&mut self, summary: &Summary);
}

impl Count for Exchanged {
    fn count(&mut self, summary: &Summary) {
        let Summary { parked, again, skipped, unacceptable, more, ref reserved, page: _ } = *summary;
        self.parked += parked;
        self.parked_again += again;
        self.skipped += skipped;
        self.unacceptable += unacceptable;
        self.more |= more;
        self.reserved = u32::try_from(reserved.len()).unwrap_or(u32::MAX);
    }
}
