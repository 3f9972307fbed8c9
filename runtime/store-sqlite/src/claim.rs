//! Claiming: which rows, under which policy, with which slots (slots.md B2).
//!
//! Rows are taken page by page, what is reserved for this host's lanes first, then what is ready, oldest due
//! first. Each page is decided as a whole: policy, keys, ledger, writes. What is parked has left the ready index
//! when the next page is read, so gated jobs in front hide nobody behind them.
//!
//! Of keys whose slots the host holds it may ask for *local waiters* (B8): candidates that would be parked become runs of
//! it without a slot, and others come out of the lines, oldest first: before the pages those that are older than every
//! candidate (else a claim would park thousands behind a line that waits for its turn), after them what is left.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use sqlx::Row as _;
use warp_domain::ending::{Ending, FailedReason};
use warp_domain::ledger::{Candidate, Ledger, Refusal, Verdict, Want};
use warp_domain::policy::{Concurrency, Declared, Order, Stamp};
use warp_domain::resolve::resolve;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, KeyId, UnixMillis};
use warp_store::codec::JsonPayload;
use warp_store::{ClaimParams, Claimed, Exchanged, HandOff, Lane, Local, StoreErrorKind};

use crate::enqueue::{read_id, read_metadata};
use crate::error::Fault;
use crate::rows::{Audit, Event, Place, StateRow, json_numbers, read_keys};
use crate::settle::{self, Exit};
use crate::work::Work;

/// The first page is what is wanted; later ones are larger, because candidates that park cost little.
const PAGE: i64 = 64;
const LARGEST_PAGE: i64 = 1024;
/// Of one line so many are loaded at first, however many waiters are asked for.
const LARGEST_LINE: usize = 64;
/// Candidates that one exchange looks at. With more of them it answers `more` and is called again.
const MOST_CANDIDATES: usize = 8_192;
/// Bytes of large payloads that one exchange loads, unless the first alone is larger; then it answers `more` too.
const MOST_LOADED: usize = 16 << 20;

/// A page of one place over many lanes: each lane's oldest by its own limit, merged, cut, then joined to the job.
/// A lane that was cut by its limit hides nobody, since that limit alone fills the page.
///
/// The page comes as one JSON text. A row of the driver costs a hand-over between threads and an allocation for each
/// column, which together is more than SQLite's own work on it. (`LIMIT +?` everywhere in this crate: of a bare `?` the
/// planner looks at the value, so SQLite compiles the statement again for each one.) What a fresh job does not have is one NULL. A large
/// payload stays behind and is given by its length only: how many of these are taken is decided first.
macro_rules! candidates {
    () => {
        "SELECT json_group_array(json_array(s.handle, s.lane, s.due, s.is_unique, \
         CASE WHEN s.stamp IS NOT NULL OR s.run > 0 THEN json_array(s.run, s.attempt, s.deaths, s.stamp, s.digest, \
         s.keys, s.ticket, s.parked_on, s.refusal, s.settled) END, \
         hex(j.id), j.created_at, iif(octet_length(j.payload) <= 16384, j.payload, octet_length(j.payload)), \
         CASE WHEN coalesce(j.metadata, j.trace_parent, j.explicit) IS NOT NULL \
         THEN json_array(j.metadata, j.trace_parent, j.explicit) END))"
    };
    ($index:literal, $place:literal, $besides:literal, $also:literal) => {
        concat!(
            candidates!(),
            ", ",
            $also,
            " FROM (",
            "SELECT r.handle, r.due FROM json_each(?1) l CROSS JOIN job_state r WHERE r.handle IN (",
            "SELECT i.handle FROM job_state i INDEXED BY ",
            $index,
            " WHERE i.place = ",
            $place,
            " AND i.lane = l.value ORDER BY i.due, i.handle LIMIT +?2) ",
            $besides,
            " ORDER BY 2, 1 LIMIT +?2",
            ") c CROSS JOIN job_state s ON s.handle = c.handle CROSS JOIN job j ON j.handle = c.handle"
        )
    };
}
/// Index: `state_ready`, one range per lane.
pub(crate) const READY: &str = candidates!("state_ready", "1", "", "NULL");
/// What is reserved, and rows by their numbers whose reservation is not written yet; and whether some row is ready.
/// Indexes: `state_reserved` and `state_ready`, one range per lane.
pub(crate) const RESERVED: &str = candidates!(
    "state_reserved",
    "3",
    "UNION ALL SELECT r.handle, r.due FROM json_each(?3) p CROSS JOIN job_state r ON r.handle = p.value \
     WHERE r.lane IN (SELECT value FROM json_each(?1))",
    "EXISTS (SELECT 1 FROM json_each(?1) l CROSS JOIN job_state i INDEXED BY state_ready ON i.lane = l.value WHERE i.place = 1)"
);
/// Rows of a line by their numbers. Primary key lookups.
pub(crate) const PARKED: &str = concat!(
    candidates!(),
    " FROM json_each(?) h CROSS JOIN job_state s ON s.handle = h.value CROSS JOIN job j ON j.handle = s.handle WHERE s.place = 2"
);
/// The due time of the oldest candidate. Indexes: `state_ready` and `state_reserved`, one entry per lane.
pub(crate) const OLDEST: &str = "SELECT min(due) FROM ( \
     SELECT (SELECT i.due FROM job_state i INDEXED BY state_ready WHERE i.place = 1 AND i.lane = l.value ORDER BY i.due LIMIT 1) AS due \
       FROM json_each(?1) l \
     UNION ALL \
     SELECT (SELECT i.due FROM job_state i INDEXED BY state_reserved WHERE i.place = 3 AND i.lane = l.value ORDER BY i.due LIMIT 1) \
       FROM json_each(?1) l)";
/// Payloads that a page left behind. Primary key lookups.
const PAYLOADS: &str = "SELECT j.payload FROM json_each(?) h CROSS JOIN job j ON j.handle = h.value ORDER BY h.key";

/// One element of a page.
#[derive(Deserialize)]
struct Candidates(i64, i64, i64, i64, Option<Past>, String, i64, Payload, Option<Extra>);

/// A payload, or how many bytes it has.
#[derive(Deserialize)]
#[serde(untagged)]
enum Payload {
    Here(String),
    Large(usize),
}

/// What a row has once it has been started or parked: run, attempt, deaths, stamp, digest, keys, ticket, the key it
/// was woken for, refusal, settled token.
#[derive(Deserialize)]
struct Past(u32, u32, u32, Option<i64>, Option<i64>, Option<String>, Option<i64>, Option<i64>, Option<String>, Option<i64>);

/// Metadata, trace parent, explicit policy.
#[derive(Default, Deserialize)]
struct Extra(Option<String>, Option<String>, Option<i64>);

/// A row that may be claimed, with what a run needs.
struct Found {
    row: StateRow,
    id: JobId,
    payload: String,
    metadata: Option<String>,
    trace_parent: Option<String>,
    created_at: UnixMillis,
    /// Its lane's place in the list of lanes.
    lane: usize,
    policy: Policy,
}

/// What a candidate is held to.
enum Policy {
    /// The stamp and its number; the keys are on the row or will be.
    Stamp(i64, Arc<Stamp>),
    /// It cannot be applied to this job; why, and the stamp if there is one.
    Unusable(Option<i64>, String),
}

/// What is known of the rows in one place. Nobody else writes, so what has been read to its end stays so until this
/// transaction adds to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// There may be rows.
    Open,
    /// None are left, as of this [`Work::runnable_written`].
    Exhausted(u64),
}

/// A page of candidates.
struct Page {
    found: Vec<Found>,
    /// Some were left out because of their size.
    is_cut: bool,
}

/// A claim in progress.
struct Claim<'a> {
    host: HostId,
    now: UnixMillis,
    lanes: &'a [Lane],
    lane_ids: Vec<i64>,
    digests: Vec<i64>,
    /// The stamp of each lane for jobs that declared nothing themselves.
    plain: Vec<Option<(i64, Arc<Stamp>)>>,
    ledger: Ledger,
    /// Local waiters that the host would still take, by key, in its order.
    wanted: Vec<(KeyId, usize)>,
    /// Bytes of large payloads that have been loaded.
    loaded: usize,
    reserved: Source,
    ready: Source,
    /// Where the rows came from that were decided last, until they are written.
    decided: Option<Place>,
    skips: Vec<(Audit, String, u32, JobHandle)>,
}

/// Claims up to `params.max` rows for `host`.
pub(crate) async fn claim(
    work: &mut Work,
    ledger: Ledger,
    host: HostId,
    params: &ClaimParams,
    hand_off: &HandOff,
    now: UnixMillis,
    exchanged: &mut Exchanged,
) -> Result<(), Fault> {
    let HandOff { passes: _, wanted, extra } = hand_off;
    let (most, extra) = (params.max as usize, *extra);
    // Local waiters may come beside those.
    let in_all = most.saturating_add(extra as usize);
    if in_all == 0 || params.lanes.is_empty() {
        return Ok(());
    }
    let mut claim = Claim {
        host,
        now,
        lanes: &params.lanes,
        lane_ids: Vec::with_capacity(params.lanes.len()),
        digests: Vec::with_capacity(params.lanes.len()),
        plain: vec![None; params.lanes.len()],
        ledger,
        wanted: wanted.iter().map(|wanted| (wanted.key, wanted.most as usize)).collect(),
        loaded: 0,
        reserved: Source::Open,
        ready: Source::Open,
        decided: None,
        skips: Vec::new(),
    };
    for lane in params.lanes.iter() {
        claim.lane_ids.push(work.lane(&lane.declarations.contract, &lane.queue).await?);
        claim.digests.push(work.digest(lane.declarations.digest).await?);
    }
    let lanes = json_numbers(claim.lane_ids.iter().copied());
    if claim.may_take(work).await? {
        work.flush().await?;
        let row = sqlx::query(OLDEST).bind(lanes.clone()).fetch_one(&mut work.conn).await?;
        let bound = row.try_get::<Option<i64>, _>(0)?.unwrap_or(i64::MAX);
        claim.take_waiters(work, in_all, bound, exchanged).await?;
    }
    let mut page = i64::from(params.max).min(LARGEST_PAGE);
    let mut seen = 0;
    exchanged.more = exchanged.counted(extra) >= most;
    while !exchanged.more {
        let Page { found, is_cut } = claim.next_page(work, &lanes, page).await?;
        exchanged.more |= is_cut;
        if found.is_empty() {
            break;
        }
        seen += found.len();
        claim.decide(work, found, most, extra, exchanged).await?;
        exchanged.more |= exchanged.counted(extra) >= most || seen >= MOST_CANDIDATES;
        page = (page * 2).clamp(PAGE, LARGEST_PAGE);
    }
    if exchanged.claimed.len() < in_all && claim.may_take(work).await? {
        claim.take_waiters(work, in_all, i64::MAX, exchanged).await?;
    }
    claim.name_holders(work).await?;
    work.flush().await
}

impl Claim<'_> {
    /// Reserved rows, or ready ones where none is reserved. What was decided before is written first if the page
    /// could show it otherwise.
    async fn next_page(&mut self, work: &mut Work, lanes: &str, limit: i64) -> Result<Page, Fault> {
        let is_exhausted = |source, work: &Work| source == Source::Exhausted(work.runnable_written);
        if !is_exhausted(self.reserved, work) || work.writes.unwritten_reservations().next().is_some() {
            // A row that was parked in this batch and is reserved already cannot be read before it is written.
            if self.decided.take().is_some() | work.writes.has_unwritten_parked() {
                work.flush().await?;
            }
            let page = self.page(work, Place::Reserved, lanes, limit).await?;
            if !page.found.is_empty() || page.is_cut {
                return Ok(page);
            }
        }
        if work.writes.has_unwritten_ready() {
            work.flush().await?;
        }
        if is_exhausted(self.ready, work) {
            return Ok(Page { found: Vec::new(), is_cut: false });
        }
        if self.decided.take() == Some(Place::Ready) {
            work.flush().await?;
        }
        self.page(work, Place::Ready, lanes, limit).await
    }

    async fn page(&mut self, work: &mut Work, place: Place, lanes: &str, limit: i64) -> Result<Page, Fault> {
        let row = if place == Place::Reserved {
            let unwritten = json_numbers(work.writes.unwritten_reservations());
            let row = sqlx::query(RESERVED).bind(lanes.to_owned()).bind(limit).bind(unwritten).fetch_one(&mut work.conn).await?;
            if !row.try_get::<bool, _>(1)? {
                self.ready = Source::Exhausted(work.runnable_written);
            }
            row
        } else {
            sqlx::query(READY).bind(lanes.to_owned()).bind(limit).fetch_one(&mut work.conn).await?
        };
        let mut page = read_candidates(row.try_get(0)?)?;
        if (page.len() as i64) < limit {
            let source = if place == Place::Reserved { &mut self.reserved } else { &mut self.ready };
            *source = Source::Exhausted(work.runnable_written);
        }
        page.sort_unstable_by_key(|Candidates(handle, _, due, ..)| (*due, *handle));
        self.find(work, place, page).await
    }

    /// Those of a page that can be loaded, with their policies.
    async fn find(&mut self, work: &mut Work, place: Place, mut page: Vec<Candidates>) -> Result<Page, Fault> {
        let is_cut = self.load_payloads(work, &mut page).await?;
        let mut found = Vec::with_capacity(page.len());
        for Candidates(handle, lane_id, due, is_unique, past, id, created_at, payload, extra) in page {
            let Payload::Here(payload) = payload else { continue };
            let Some(lane) = self.lane_ids.iter().position(|lane| *lane == lane_id) else { continue };
            let mut row = StateRow::new(handle, lane_id, None, UnixMillis(due), is_unique != 0);
            row.place = place;
            if let Some(Past(run, attempt, deaths, stamp, digest, keys, ticket, parked_on, refusal, settled)) = past {
                (row.run, row.attempt, row.deaths, row.stamp, row.digest) = (run, attempt, deaths, stamp, digest);
                row.keys = read_keys(keys.as_deref())?;
                row.ticket = ticket.map(i64::cast_unsigned);
                row.parked_on = parked_on.map(KeyId);
                (row.refusal, row.settled) = (refusal, settled);
            }
            let Extra(metadata, trace_parent, explicit) = extra.unwrap_or_default();
            let policy = self.policy(work, &row, lane, explicit).await?;
            let id = u128::from_str_radix(&id, 16).map(JobId);
            let id = id.map_err(|error| Fault::Said(StoreErrorKind::Internal, format!("the id of job {handle}: {error}")))?;
            found.push(Found { row, id, payload, metadata, trace_parent, created_at: UnixMillis(created_at), lane, policy });
        }
        Ok(Page { found, is_cut })
    }

    /// Fetches what the page left behind, as much as one exchange may hold, and cuts the page there; whether it did.
    async fn load_payloads(&mut self, work: &mut Work, page: &mut Vec<Candidates>) -> Result<bool, Fault> {
        let mut is_cut = false;
        let mut large = Vec::new();
        for (at, Candidates(handle, .., payload, _)) in page.iter().enumerate() {
            let Payload::Large(bytes) = payload else { continue };
            // One is taken in any case, else a job with the largest payload would never run.
            if self.loaded > 0 && self.loaded + bytes > MOST_LOADED {
                page.truncate(at);
                is_cut = true;
                break;
            }
            self.loaded += bytes;
            large.push(*handle);
        }
        if large.is_empty() {
            return Ok(is_cut);
        }
        let rows = sqlx::query(PAYLOADS).bind(json_numbers(large)).fetch_all(&mut work.conn).await?;
        let behind = page.iter_mut().map(|Candidates(.., payload, _)| payload).filter(|payload| matches!(payload, Payload::Large(_)));
        for (payload, row) in behind.zip(&rows) {
            *payload = Payload::Here(row.try_get(0)?);
        }
        Ok(is_cut)
    }

    /// The policy on the row, or the one that is resolved now and will be written on it.
    async fn policy(&mut self, work: &mut Work, row: &StateRow, lane: usize, explicit: Option<i64>) -> Result<Policy, Fault> {
        if let Some(id) = row.stamp {
            return Ok(match work.stamp(id).await {
                Ok(stamp) => Policy::Stamp(id, stamp),
                Err(Fault::Said(_, reason)) => Policy::Unusable(Some(id), reason),
                Err(fault) => return Err(fault),
            });
        }
        let declarations = &self.lanes[lane].declarations;
        let Some(explicit) = explicit else {
            if self.plain[lane].is_none() {
                let stamp = Arc::new(resolve(&Declared::default(), declarations));
                self.plain[lane] = Some((work.intern_stamp(&stamp).await?, stamp));
            }
            let (id, stamp) = self.plain[lane].clone().unwrap_or_default();
            return Ok(Policy::Stamp(id, stamp));
        };
        match work.declared(explicit).await {
            Ok(declared) => {
                let stamp = Arc::new(resolve(&declared, declarations));
                Ok(Policy::Stamp(work.intern_stamp(&stamp).await?, stamp))
            }
            Err(Fault::Said(_, reason)) => Ok(Policy::Unusable(None, reason)),
            Err(fault) => Err(fault),
        }
    }

    /// Decides a page in order, until enough have started.
    async fn decide(
        &mut self,
        work: &mut Work,
        mut found: Vec<Found>,
        most: usize,
        extra: u32,
        exchanged: &mut Exchanged,
    ) -> Result<(), Fault> {
        let texts = render_keys(work, &mut found).await?;
        let keys: Vec<_> = found.iter().flat_map(|found| found.row.keys.iter().copied()).collect();
        if !keys.is_empty() {
            work.load_keys(&mut self.ledger, keys).await?;
        }
        let mut decided = HashSet::with_capacity(found.len());
        for found in found {
            if exchanged.counted(extra) >= most {
                break;
            }
            if self.ledger.needs_reload(&found.row.keys) {
                // All of it is written: what is reserved from here on must not be taken for what was decided before.
                work.writes.forget_reservations(&decided);
                work.decide_further(&mut self.ledger, self.now).await?;
                work.flush().await?;
            }
            decided.insert(found.row.handle);
            self.decided = Some(found.row.place);
            self.decide_one(work, found, &texts, exchanged).await?;
        }
        // Whatever has become of them is written instead of their reservation.
        work.writes.forget_reservations(&decided);
        work.decide_further(&mut self.ledger, self.now).await
    }

    async fn decide_one(
        &mut self,
        work: &mut Work,
        mut found: Found,
        texts: &HashMap<KeyId, String>,
        exchanged: &mut Exchanged,
    ) -> Result<(), Fault> {
        let (stamp_id, stamp) = match &found.policy {
            Policy::Stamp(id, stamp) => (*id, stamp.clone()),
            Policy::Unusable(stamp, message) => {
                found.row.stamp = *stamp;
                let ending = Ending::Failed { message: message.clone(), reason: FailedReason::Unacceptable };
                exchanged.unacceptable += 1;
                return settle::end(work, &mut self.ledger, &mut found.row, Exit::Ended(&ending), None, self.now).await;
            }
        };
        let wanted = match found.row.keys[..] {
            [key] if self.host_holds(work, key) => self.wanted.iter().position(|(of, left)| *of == key && *left > 0),
            _ => None,
        };
        let verdict = match &stamp.concurrency {
            None => Verdict::Start,
            Some(concurrency) => {
                let rules = &concurrency.value;
                self.ledger.claim(&Candidate {
                    job: found.row.job(),
                    wants: found.row.keys.iter().map(|key| Want { key: *key, limit: rules.limit, weight: rules.weight }).collect(),
                    mode: rules.mode,
                    order: rules.order,
                    ticket: found.row.ticket,
                    reserved: found.row.place == Place::Reserved,
                    has_started: found.row.has_started(),
                    local: wanted.is_some(),
                })
            }
        };
        found.row.stamp = Some(stamp_id);
        let text = |key: KeyId| texts.get(&key).map_or("?", String::as_str);
        match verdict {
            Verdict::Start => exchanged.claimed.push(self.start(work, found, stamp, None)?),
            Verdict::Park { key, ticket, refusal } => {
                exchanged.parked += 1;
                if found.row.refusal.is_some() {
                    exchanged.parked_again += 1;
                }
                let limit =
                    self.ledger.key(key).zip(stamp.concurrency.as_ref()).map_or(1, |(state, c)| state.effective_limit(c.value.limit));
                self.park(work, found.row, key, text(key), ticket, &describe(&refusal, limit));
            }
            Verdict::WaitLocally => {
                let key = wanted.map(|at| &mut self.wanted[at]).map(|(key, left)| {
                    *left -= 1;
                    *key
                });
                exchanged.claimed.push(self.start(work, found, stamp, key)?);
            }
            Verdict::Skip { key, limit, holder } => {
                exchanged.skipped += 1;
                let mut row = found.row;
                row.place = Place::Deleted;
                row.changed_at = self.now.0;
                settle::finish(work, &mut row);
                work.count_reason("stats:deleted", "skip");
                self.skips.push((Audit::new(row.handle, self.now, Event::Deleted), text(key).to_owned(), limit, holder));
            }
        }
        Ok(())
    }

    /// Whether a run of this host holds a slot of the key, as decided so far.
    fn host_holds(&self, work: &Work, key: KeyId) -> bool {
        let is_own = |job| work.holders.get(&job) == Some(&self.host.0);
        !self.wanted.is_empty()
            && self.ledger.key(key).is_some_and(|state| state.slots.iter().any(|slot| !slot.reserved && is_own(slot.job)))
    }

    /// Whether somebody stands in a line out of which the host might take him. Loads the keys that it wants.
    async fn may_take(&mut self, work: &mut Work) -> Result<bool, Fault> {
        // Named so often, so many of its line are loaded.
        let named = self.wanted.iter().flat_map(|(key, left)| std::iter::repeat_n(*key, *left.min(&LARGEST_LINE)));
        work.load_keys(&mut self.ledger, named).await?;
        let stands = |key| self.ledger.key(key).is_some_and(|state| !state.line.is_empty());
        Ok(self.wanted.iter().any(|(key, left)| *left > 0 && stands(*key) && self.host_holds(work, *key)))
    }

    /// B8: waiters that the host would take come out of the lines of keys whose slots it holds, as far as the oldest there
    /// are of these lanes, may wait inside a host and are not due after the bound.
    async fn take_waiters(&mut self, work: &mut Work, most: usize, bound: i64, exchanged: &mut Exchanged) -> Result<(), Fault> {
        for at in 0..self.wanted.len() {
            let (key, wanted) = self.wanted[at];
            let room = most.saturating_sub(exchanged.claimed.len());
            let mut left = wanted.min(room);
            while left > 0 && self.host_holds(work, key) {
                let Some(state) = self.ledger.key(key) else { break };
                let heads = state.line.iter().filter(|waiter| !state.passed_over(waiter)).take(left);
                let heads: Vec<_> = heads.map(|waiter| waiter.job.0).collect();
                if heads.is_empty() {
                    break;
                }
                // Who was parked by this claim is not written yet.
                work.flush().await?;
                let row = sqlx::query(PARKED).bind(json_numbers(heads)).fetch_one(&mut work.conn).await?;
                let page = read_candidates(row.try_get(0)?)?;
                let mut found: HashMap<JobHandle, (Found, Arc<Stamp>)> = HashMap::with_capacity(page.len());
                for candidate in self.find(work, Place::Parked, page).await?.found {
                    if let Policy::Stamp(_, stamp) = &candidate.policy
                        && candidate.row.due <= bound
                        && stamp.concurrency.as_ref().is_some_and(|rules| rules.value.order == Order::Any)
                    {
                        let stamp = stamp.clone();
                        found.insert(candidate.row.job(), (candidate, stamp));
                    }
                }
                let taken = self.ledger.take_waiters(key, left, |waiter| found.contains_key(&waiter.job));
                if taken.is_empty() {
                    break;
                }
                left -= taken.len();
                self.wanted[at].1 -= taken.len();
                for waiter in taken {
                    if let Some((candidate, stamp)) = found.remove(&waiter.job) {
                        exchanged.claimed.push(self.start(work, candidate, stamp, Some(key))?);
                    }
                }
                work.decide_further(&mut self.ledger, self.now).await?;
            }
        }
        Ok(())
    }

    /// A run of this host begins; with a key: without a slot of it, to wait inside the host.
    fn start(&mut self, work: &mut Work, found: Found, stamp: Arc<Stamp>, waits: Option<KeyId>) -> Result<Claimed, Fault> {
        let Found { mut row, id, payload, metadata, trace_parent, created_at, lane, policy: _ } = found;
        // Drawn after the grant, inside its transaction: of two holders of a key the later has the larger.
        let token = work.sequence.token;
        work.sequence.token += 1;
        row.place = Place::Running;
        row.run += 1;
        row.attempt += 1;
        row.token = Some(token);
        row.host = Some(self.host.0);
        row.digest = Some(self.digests[lane]);
        // What a waiter stood on, and how it was refused, stays with it: that is where it goes if it does not begin.
        if waits.is_none() {
            row.parked_on = None;
            row.refusal = None;
        }
        row.changed_at = self.now.0;
        work.audit(Audit::new(row.handle, self.now, Event::Processing).run_of(&row));
        let passes = |rules: &Concurrency| rules.weight == 1 && rules.order == Order::Any;
        let local = match (waits, &row.keys[..]) {
            (Some(key), _) => Some(Local::Waits(key)),
            (None, [key]) => stamp.concurrency.as_ref().filter(|stamped| passes(&stamped.value)).map(|_| Local::Holds(*key)),
            (None, _) => None,
        };
        if waits.is_none() && !row.keys.is_empty() {
            work.holders.insert(row.job(), self.host.0);
        }
        let claimed = Claimed {
            handle: row.job(),
            id,
            token: ClaimToken(token),
            run: row.run,
            attempt: row.attempt,
            lane: self.lanes[lane].clone(),
            payload: payload.into(),
            metadata: read_metadata(metadata.as_deref())?,
            trace_parent,
            stamp,
            keyed: !row.keys.is_empty(),
            fence: (!row.keys.is_empty()).then_some(token.unsigned_abs()),
            local,
            created_at,
            claimed_at: self.now,
        };
        work.writes.state(row);
        Ok(claimed)
    }

    /// Parks a row. The history hears of the first time only: the rest is one wait.
    fn park(&self, work: &mut Work, mut row: StateRow, key: KeyId, text: &str, ticket: u64, why: &str) {
        row.place = Place::Parked;
        row.parked_on = Some(key);
        row.ticket = Some(ticket);
        let refusal = format!("'{text}' {why}");
        row.changed_at = self.now.0;
        if row.refusal.is_none() {
            work.audit(Audit::new(row.handle, self.now, Event::Requeued).message(format!("Requeued — {refusal}")));
            work.count_reason("stats:requeued", "concurrency");
        }
        row.refusal = Some(refusal);
        work.writes.state(row);
    }

    /// Writes the history of what was skipped, with the holder by its public name.
    async fn name_holders(&mut self, work: &mut Work) -> Result<(), Fault> {
        if self.skips.is_empty() {
            return Ok(());
        }
        let holders = json_numbers(self.skips.iter().map(|(.., holder)| holder.0));
        let rows = sqlx::query("SELECT handle, id FROM job WHERE handle IN (SELECT value FROM json_each(?))")
            .bind(holders)
            .fetch_all(&mut work.conn)
            .await?;
        let mut ids = HashMap::with_capacity(rows.len());
        for row in &rows {
            ids.insert(row.try_get::<i64, _>(0)?, read_id(row.try_get(1)?)?);
        }
        for (audit, key, limit, holder) in std::mem::take(&mut self.skips) {
            let holder = ids.get(&holder.0).map_or_else(|| "a job that is gone".to_owned(), JobId::to_string);
            work.audit(audit.message(format!("Cancelled — '{key}' full ({limit} slots), held by {holder}")));
        }
        Ok(())
    }
}

fn read_candidates(text: &str) -> Result<Vec<Candidates>, Fault> {
    serde_json::from_str(text).map_err(|error| Fault::Said(StoreErrorKind::Internal, format!("a page of candidates: {error}")))
}

/// What a refusal is called behind the key's name.
fn describe(refusal: &Refusal, limit: u32) -> String {
    match refusal {
        Refusal::Full { limit, .. } => format!("full ({limit} slots)"),
        // Whoever is ahead waits for the same reason, and that is what the reader wants to know.
        Refusal::Behind { .. } if limit == 0 => "paused (0 slots)".to_owned(),
        Refusal::Behind { .. } => format!("full ({limit} slots)"),
        Refusal::Paused => "paused (0 slots)".to_owned(),
        Refusal::TooHeavy { limit } => format!("cannot run at limit {limit}"),
        Refusal::Blocked => "kept for a retry".to_owned(),
    }
}

/// Renders the keys of candidates that have none yet, and returns the texts of every key of the page.
async fn render_keys(work: &mut Work, found: &mut [Found]) -> Result<HashMap<KeyId, String>, Fault> {
    let mut rendered: Vec<(usize, Vec<String>)> = Vec::new();
    for (at, candidate) in found.iter_mut().enumerate() {
        let Policy::Stamp(id, stamp) = &candidate.policy else { continue };
        let Some(concurrency) = &stamp.concurrency else { continue };
        if !candidate.row.keys.is_empty() {
            continue;
        }
        let keys = JsonPayload::parse(&candidate.payload)
            .map_err(|error| error.to_string())
            .and_then(|payload| concurrency.value.keys.iter().map(|key| key.render(&payload).map_err(|error| error.to_string())).collect());
        match keys {
            Ok(keys) => rendered.push((at, keys)),
            Err(reason) => candidate.policy = Policy::Unusable(Some(*id), reason),
        }
    }
    let texts: BTreeSet<String> = rendered.iter().flat_map(|(_, keys)| keys.iter().cloned()).collect();
    let ids = work.key_ids(&texts).await?;
    for (at, keys) in rendered {
        let keys: BTreeSet<KeyId> = keys.iter().filter_map(|key| ids.get(key).copied()).collect();
        found[at].row.keys = keys.into_iter().collect();
    }
    let mut names: HashMap<KeyId, String> = ids.into_iter().map(|(text, id)| (id, text)).collect();
    let unnamed: BTreeSet<KeyId> =
        found.iter().flat_map(|found| found.row.keys.iter()).filter(|key| !names.contains_key(key)).copied().collect();
    work.key_texts(unnamed, &mut names).await?;
    Ok(names)
}
