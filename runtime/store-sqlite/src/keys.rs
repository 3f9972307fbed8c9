//! The ledger's rows: loading keys, and writing what was decided.
//!
//! What must stay true (slots.md B1): this runs inside the one write transaction of the file, so the "lock of a
//! key row" is the write lock itself, and nothing that was counted here can change before the commit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use warp_domain::ledger::{KeyState, Ledger, Slot, Waiter};
use warp_domain::policy::Concurrency;
use warp_domain::{JobHandle, KeyId, UnixMillis};
use warp_store::StoreErrorKind;

use crate::error::Fault;
use crate::rows::{Place, json_numbers, read_keys};
use crate::work::Work;

/// Waiters of a key that are loaded again.
const LINE: u32 = 4;
/// Waiters that are loaded when the first ones are used up.
const LONG_LINE: u32 = 256;

/// Admin limits, slots, blockers and the oldest waiters of many keys, each as one JSON text: a row of the driver costs
/// more than SQLite's work on it. `json_array_length` tells one key from several.
///
/// Indexes: `conc_key_limited`, the primary keys of `slot` and `blocker`, `state_parked` in its own order.
pub(crate) const KEYS: &str = "SELECT \
     (SELECT json_group_array(json_array(c.id, c.admin_limit)) FROM conc_key c INDEXED BY conc_key_limited \
      WHERE c.admin_limit IS NOT NULL AND c.id IN (SELECT value FROM json_each(?1))), \
     (SELECT json_group_array(json_array(t.key, t.number, t.job, t.stamped, s.place, s.host)) \
      FROM json_each(?1) k CROSS JOIN slot t ON t.key = k.value CROSS JOIN job_state s ON s.handle = t.job), \
     (SELECT json_group_array(json_array(b.key, b.ticket, b.job)) FROM json_each(?1) k CROSS JOIN blocker b ON b.key = k.value), \
     (SELECT json_group_array(json_array(s.parked_on, s.ticket, s.handle, s.stamp, json_array_length(s.keys) > 1)) \
      FROM json_each(?1) k CROSS JOIN job_state s WHERE s.handle IN ( \
        SELECT w.handle FROM job_state w INDEXED BY state_parked \
        WHERE w.place = 2 AND w.parked_on = k.value \
          AND EXISTS (SELECT 1 FROM claimable_lane c WHERE c.lane = w.lane) \
        ORDER BY w.ticket LIMIT +?2))";

/// Further waiters of one key, behind a ticket. Index: `state_parked`.
pub(crate) const REST_OF_LINE: &str = "SELECT w.parked_on, w.handle, w.ticket, w.stamp, w.keys \
     FROM job_state w INDEXED BY state_parked \
     WHERE w.place = 2 AND w.parked_on = ? AND w.ticket > ? \
       AND EXISTS (SELECT 1 FROM claimable_lane c WHERE c.lane = w.lane) \
     ORDER BY w.ticket LIMIT +?";

impl Work {
    /// An empty ledger that draws from the file's tickets.
    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::new(BTreeMap::new(), self.sequence.ticket.cast_unsigned())
    }

    /// Loads the keys that the ledger does not know yet. A key that is named more often gets a longer part of its
    /// line: each release may hand on one waiter.
    pub(crate) async fn load_keys(&mut self, ledger: &mut Ledger, keys: impl IntoIterator<Item = KeyId>) -> Result<(), Fault> {
        let mut missing: BTreeMap<KeyId, u32> = BTreeMap::new();
        for key in keys.into_iter().filter(|key| ledger.key(*key).is_none()) {
            *missing.entry(key).or_insert(1) += 1;
        }
        let depth = missing.values().copied().max().unwrap_or(0).min(LONG_LINE);
        self.load(ledger, missing.into_keys().collect(), depth).await
    }

    /// Loads keys as they stand now, whatever the ledger knew of them. All its decisions must be written.
    pub(crate) async fn reload_keys(&mut self, ledger: &mut Ledger, keys: BTreeSet<KeyId>) -> Result<(), Fault> {
        self.load(ledger, keys, LINE).await
    }

    /// Queues what the ledger decided, and keeps its tickets.
    pub(crate) fn take_decisions(&mut self, ledger: &mut Ledger, now: UnixMillis) {
        self.writes.effects(ledger.take_effects(), now);
        self.sequence.ticket = self.sequence.ticket.max(ledger.next_ticket().cast_signed());
    }

    /// Loads more of every line whose loaded part was used up, until nobody further could start. Everything
    /// decided so far is written first, because the rest of the line is read from the rows.
    pub(crate) async fn hand_on_further(&mut self, ledger: &mut Ledger, now: UnixMillis) -> Result<(), Fault> {
        loop {
            let short = ledger.keys_to_reload();
            if short.is_empty() {
                return Ok(());
            }
            self.take_decisions(ledger, now);
            self.flush().await?;
            for key in short {
                self.extend_line(ledger, key).await?;
            }
        }
    }

    /// Takes over everything that was decided about keys, the waiters further down the lines included.
    pub(crate) async fn decide_further(&mut self, ledger: &mut Ledger, now: UnixMillis) -> Result<(), Fault> {
        self.take_decisions(ledger, now);
        self.hand_on_further(ledger, now).await?;
        self.take_decisions(ledger, now);
        Ok(())
    }

    /// Writes everything that a command decided about keys.
    pub(crate) async fn write_decisions(&mut self, ledger: &mut Ledger, now: UnixMillis) -> Result<(), Fault> {
        self.decide_further(ledger, now).await?;
        self.flush().await
    }

    /// Reads keys with admin limit, slots, blockers and the head of the line, in one statement for all.
    ///
    /// Indexes: `conc_key_limited`, the primary keys of `slot` and `blocker`, `state_parked` for the line.
    /// Waiters that no live host can run are left out, which is what passing them over means (B7).
    async fn load(&mut self, ledger: &mut Ledger, keys: BTreeSet<KeyId>, depth: u32) -> Result<(), Fault> {
        if keys.is_empty() {
            return Ok(());
        }
        let wanted = json_numbers(keys.iter().map(|key| key.0));
        let mut states: BTreeMap<KeyId, KeyState> = keys.into_iter().map(|key| (key, KeyState::default())).collect();
        // One more than the ledger gets: whether there is one more.
        let row = sqlx::query(KEYS).bind(wanted).bind(depth + 1).fetch_one(&mut self.conn).await?;
        let damaged = |error: serde_json::Error| Fault::Said(StoreErrorKind::Internal, format!("the rows of a key: {error}"));
        let limits: Vec<(i64, u32)> = serde_json::from_str(row.try_get(0)?).map_err(damaged)?;
        let slots: Vec<(i64, u32, i64, u32, i64, Option<i64>)> = serde_json::from_str(row.try_get(1)?).map_err(damaged)?;
        let blockers: Vec<(i64, i64, i64)> = serde_json::from_str(row.try_get(2)?).map_err(damaged)?;
        let mut line: Vec<(i64, i64, i64, Option<i64>, i64)> = serde_json::from_str(row.try_get(3)?).map_err(damaged)?;
        for (key, limit) in limits {
            states.entry(KeyId(key)).or_default().admin_limit = Some(limit);
        }
        for (key, number, job, limit, place, host) in slots {
            let reserved = place == Place::Reserved as i64;
            if let Some(host) = host {
                self.holders.insert(JobHandle(job), host);
            }
            states.entry(KeyId(key)).or_default().slots.push(Slot { number, job: JobHandle(job), limit, reserved });
        }
        for (key, ticket, job) in blockers {
            states.entry(KeyId(key)).or_default().blockers.push((ticket.cast_unsigned(), JobHandle(job)));
        }
        line.sort_unstable();
        for (key, ticket, job, stamp, several_keys) in line {
            let job = JobHandle(job);
            let concurrency = self.concurrency_of(job, stamp).await?;
            let state = states.entry(KeyId(key)).or_default();
            if state.line.len() >= depth as usize {
                state.more_waiters = true;
                continue;
            }
            state.line.push(Waiter {
                job,
                ticket: ticket.cast_unsigned(),
                limit: concurrency.limit,
                weight: concurrency.weight,
                several_keys: several_keys != 0,
                claimable: true,
            });
        }
        for state in states.values_mut() {
            state.slots.sort_unstable_by_key(|slot| slot.number);
        }
        let loaded: BTreeSet<KeyId> = states.keys().copied().collect();
        for (key, state) in states {
            ledger.load(key, state);
        }
        // Where nobody of the first counts (too heavy for the limit in force), somebody behind them may: without him a
        // newcomer would be parked for no reason. The rows still stand as they were loaded.
        loop {
            let mut short = ledger.keys_to_reload();
            short.retain(|key| loaded.contains(key));
            if short.is_empty() {
                return Ok(());
            }
            for key in short {
                self.extend_line(ledger, key).await?;
            }
        }
    }

    /// Loads the next part of a line.
    async fn extend_line(&mut self, ledger: &mut Ledger, key: KeyId) -> Result<(), Fault> {
        let after = ledger.key(key).and_then(|state| state.line.last()).map_or(0, |last| last.ticket);
        let mut further = self.load_line(key, after, LONG_LINE + 1).await?;
        let more = further.len() > LONG_LINE as usize;
        further.truncate(LONG_LINE as usize);
        ledger.extend_line(key, further, more);
        Ok(())
    }

    /// Waiters of one key behind a ticket, in order.
    async fn load_line(&mut self, key: KeyId, after: u64, most: u32) -> Result<Vec<Waiter>, Fault> {
        let rows = sqlx::query(REST_OF_LINE).bind(key.0).bind(after.cast_signed()).bind(most).fetch_all(&mut self.conn).await?;
        let mut waiters = Vec::with_capacity(rows.len());
        for row in rows {
            waiters.push(self.read_waiter(&row).await?);
        }
        Ok(waiters)
    }

    /// A row of [`REST_OF_LINE`].
    async fn read_waiter(&mut self, row: &SqliteRow) -> Result<Waiter, Fault> {
        let job = JobHandle(row.try_get(1)?);
        let concurrency = self.concurrency_of(job, row.try_get(3)?).await?;
        Ok(Waiter {
            job,
            ticket: row.try_get::<i64, _>(2)?.cast_unsigned(),
            limit: concurrency.limit,
            weight: concurrency.weight,
            several_keys: read_keys(row.try_get(4)?)?.len() > 1,
            claimable: true,
        })
    }

    /// The concurrency rules on a keyed row; such a row always has them.
    pub(crate) async fn concurrency_of(&mut self, job: JobHandle, stamp: Option<i64>) -> Result<Concurrency, Fault> {
        let missing = || Fault::Said(StoreErrorKind::Internal, format!("job {} has keys and no concurrency stamp", job.0));
        let stamp = self.stamp(stamp.ok_or_else(missing)?).await?;
        stamp.concurrency.as_ref().map(|stamped| stamped.value.clone()).ok_or_else(missing)
    }

    /// The numbers of rendered keys, drawn for new ones.
    pub(crate) async fn key_ids(&mut self, texts: &BTreeSet<String>) -> Result<HashMap<String, KeyId>, Fault> {
        let mut ids = HashMap::with_capacity(texts.len());
        let mut unknown = Vec::new();
        for text in texts {
            match self.known_keys().id(text) {
                Some(id) => drop(ids.insert(text.clone(), id)),
                None => unknown.push(text),
            }
        }
        if unknown.is_empty() {
            return Ok(ids);
        }
        self.statements.keys.run(&mut self.conn, &unknown, |key, row| row.put((*key).clone()).map(drop)).await?;
        let wanted = serde_json::to_string(&unknown).unwrap_or_default();
        let found = sqlx::query("SELECT key, id FROM conc_key WHERE key IN (SELECT value FROM json_each(?))")
            .bind(wanted)
            .fetch_all(&mut self.conn)
            .await?;
        for row in &found {
            let (text, id): (String, _) = (row.try_get(0)?, KeyId(row.try_get(1)?));
            self.remember_key(&text, id, true);
            ids.insert(text, id);
        }
        Ok(ids)
    }

    /// Adds the texts of these keys.
    pub(crate) async fn key_texts(&mut self, mut keys: BTreeSet<KeyId>, texts: &mut HashMap<KeyId, String>) -> Result<(), Fault> {
        keys.retain(|key| match self.known_keys().text(*key) {
            Some(text) => {
                texts.insert(*key, text.to_owned());
                false
            }
            None => true,
        });
        if keys.is_empty() {
            return Ok(());
        }
        let rows = sqlx::query("SELECT id, key FROM conc_key WHERE id IN (SELECT value FROM json_each(?))")
            .bind(json_numbers(keys.iter().map(|key| key.0)))
            .fetch_all(&mut self.conn)
            .await?;
        for row in &rows {
            let (id, text): (_, String) = (KeyId(row.try_get(0)?), row.try_get(1)?);
            self.remember_key(&text, id, false);
            texts.insert(id, text);
        }
        Ok(())
    }
}

/// Rendered keys and their numbers, in both directions. A key's row is never changed and its number never given again.
#[derive(Default)]
pub(crate) struct KnownKeys {
    ids: HashMap<Arc<str>, KeyId>,
    texts: HashMap<KeyId, Arc<str>>,
}

impl KnownKeys {
    fn id(&self, text: &str) -> Option<KeyId> {
        self.ids.get(text).copied()
    }

    fn text(&self, id: KeyId) -> Option<&str> {
        self.texts.get(&id).map(AsRef::as_ref)
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(crate) fn insert(&mut self, text: &str, id: KeyId) {
        let text: Arc<str> = text.into();
        self.ids.insert(text.clone(), id);
        self.texts.insert(id, text);
    }
}
