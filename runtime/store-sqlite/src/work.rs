//! A transaction in progress: the connection, the numbers it hands out, the interned rows it knows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};
use warp_domain::policy::{Declared, Stamp};
use warp_domain::{Digest, HostId, JobHandle, KeyId, UnixMillis};
use warp_store::{StoreErrorKind, codec};

use crate::bulk::Script;
use crate::error::Fault;
use crate::keys::KnownKeys;
use crate::rows::{Audit, Place, StateRow, Statements, Writes};

/// More names than this are forgotten at once; they are a cache, and a lane or policy costs a few hundred bytes.
const MOST_NAMES: usize = 10_000;

/// The numbers that are handed out next. An undone savepoint does not give its numbers back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence {
    pub(crate) handle: i64,
    pub(crate) token: i64,
    pub(crate) ticket: i64,
    pub(crate) entry: i64,
    /// Raised by a transaction after which somebody should look for work.
    pub(crate) wakes: i64,
}

/// Interned rows by content and by number. Rows are never changed or removed, so what was committed stays true.
#[derive(Default)]
struct Names {
    lanes: HashMap<(String, String), i64>,
    policies: HashMap<String, i64>,
    stamps: HashMap<i64, Arc<Stamp>>,
    declared: HashMap<i64, Arc<Declared>>,
    digests: HashMap<Digest, i64>,
    keys: KnownKeys,
    /// Whether something is in here that is not committed yet.
    uncommitted: bool,
}

/// What nearly every exchange asks, read together with the sequence.
#[derive(Debug)]
pub(crate) struct Facts {
    /// Whether somebody wants a run cancelled.
    pub(crate) cancellations: bool,
    /// When the next scheduled job falls due.
    pub(crate) next_due: Option<UnixMillis>,
    /// Queues from which nothing is claimed.
    pub(crate) paused_queues: Vec<String>,
    /// Hosts, and whether each is paused.
    hosts: Vec<(i64, u8)>,
}

impl Facts {
    /// Whether a host is still registered; a rescued one is not, and hears it here (C1).
    pub(crate) fn check_host(&self, host: HostId) -> Result<(), Fault> {
        if self.hosts.iter().any(|(id, _)| *id == host.0) { Ok(()) } else { Err(host_lost(host)) }
    }

    /// Whether a host claims nothing.
    pub(crate) fn is_paused(&self, host: HostId) -> bool {
        self.hosts.contains(&(host.0, 1))
    }
}

/// Columns that [`read_facts`] expects. Index: `state_scheduled`; the other tables are small by nature.
macro_rules! facts {
    () => {
        "EXISTS (SELECT 1 FROM cancel_request), (SELECT min(due) FROM job_state INDEXED BY state_scheduled WHERE place = 0), \
         (SELECT json_group_array(json_array(id, paused_at IS NOT NULL)) FROM host), \
         (SELECT json_group_array(queue) FROM queue_pause)"
    };
}

/// The part of a command that can be undone alone.
pub(crate) struct Piece {
    counters: HashMap<String, i64>,
    writes: Writes,
}

/// Whether the file knows of the piece yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framed {
    /// No piece is open.
    No,
    /// The next writes begin with the savepoint.
    Asked,
    /// The savepoint is there.
    Yes,
    /// Nobody will go back to it; the next writes begin with its end.
    Kept,
}

/// The writer's transaction. All commands of one group share it.
pub(crate) struct Work {
    pub(crate) conn: SqliteConnection,
    pub(crate) statements: Statements,
    pub(crate) writes: Writes,
    pub(crate) sequence: Sequence,
    pub(crate) counters: HashMap<String, i64>,
    stored_sequence: Sequence,
    names: Names,
    /// As of the beginning of the transaction, until its first command is over.
    facts: Option<Facts>,
    framed: Framed,
    /// How often rows have been written that a claim may find.
    pub(crate) runnable_written: u64,
    /// Rows of runs that this process has claimed, as they were written. Every write that ends one is guarded by its
    /// token, so an entry that somebody else has made untrue is noticed and read again.
    pub(crate) running: HashMap<i64, StateRow>,
    /// Who runs the holders of the keys that this command has loaded. (Whether they still hold them the ledger knows.)
    pub(crate) holders: HashMap<JobHandle, i64>,
    others_wrote: bool,
    is_prepared: bool,
    path: Arc<PathBuf>,
    latest: UnixMillis,
    announce: bool,
}

impl Work {
    pub(crate) fn new(conn: SqliteConnection, path: Arc<PathBuf>) -> Self {
        let nothing = Sequence { handle: 0, token: 0, ticket: 0, entry: 0, wakes: 0 };
        Work {
            conn,
            statements: Statements::new(),
            writes: Writes::default(),
            sequence: nothing,
            counters: HashMap::new(),
            stored_sequence: nothing,
            names: Names::default(),
            facts: None,
            framed: Framed::No,
            runnable_written: 0,
            running: HashMap::new(),
            holders: HashMap::new(),
            others_wrote: false,
            is_prepared: false,
            path,
            latest: UnixMillis(0),
            announce: false,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn into_connection(self) -> SqliteConnection {
        self.conn
    }

    /// Takes the write lock of the file and reads the sequence, which another process may have moved.
    pub(crate) async fn begin(&mut self) -> Result<(), Fault> {
        self.announce = false;
        if !self.is_prepared {
            // Waiting is the writer's own affair.
            sqlx::query("PRAGMA busy_timeout = 0").execute(&mut self.conn).await?;
            self.is_prepared = true;
        }
        let begin = concat!("BEGIN IMMEDIATE; SELECT handle, token, ticket, entry, wakes, ", facts!(), " FROM sequence");
        let row = sqlx::query(begin).fetch_one(&mut self.conn).await?;
        self.sequence = Sequence {
            handle: row.try_get(0)?,
            token: row.try_get(1)?,
            ticket: row.try_get(2)?,
            entry: row.try_get(3)?,
            wakes: row.try_get(4)?,
        };
        self.facts = Some(read_facts(&row, 5)?);
        self.framed = Framed::No;
        self.others_wrote = self.stored_sequence.handle > 0 && self.stored_sequence != self.sequence;
        self.stored_sequence = self.sequence;
        Ok(())
    }

    /// Whether another process has drawn numbers since this one did.
    pub(crate) fn others_wrote(&self) -> bool {
        self.others_wrote
    }

    pub(crate) async fn commit(&mut self) -> Result<(), Fault> {
        self.sequence.wakes += i64::from(self.announce);
        let mut script = Script::default();
        self.say_counters(&mut script)?;
        if self.sequence != self.stored_sequence {
            let Sequence { handle, token, ticket, entry, wakes } = self.sequence;
            script.say("UPDATE sequence SET handle = ?, token = ?, ticket = ?, entry = ?, wakes = ?");
            for number in [handle, token, ticket, entry, wakes] {
                script.put(number)?;
            }
        }
        script.say("COMMIT");
        script.run(&mut self.conn).await?;
        self.stored_sequence = self.sequence;
        self.names.uncommitted = false;
        Ok(())
    }

    /// Ends the transaction without its work, also when SQLite has already ended it (a full disk does).
    pub(crate) async fn roll_back(&mut self) -> Result<(), Fault> {
        self.forget_uncommitted();
        self.counters.clear();
        self.writes.clear();
        match sqlx::query("ROLLBACK").execute(&mut self.conn).await {
            Ok(_) => Ok(()),
            // "cannot rollback - no transaction is active": there is nothing to end.
            Err(sqlx::Error::Database(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What an exchange wants to know, as it is now.
    pub(crate) async fn facts(&mut self) -> Result<Facts, Fault> {
        match self.facts.take() {
            Some(facts) => Ok(facts),
            None => read_facts(&sqlx::query(concat!("SELECT ", facts!())).fetch_one(&mut self.conn).await?, 0),
        }
    }

    /// One command of several begins. Its counters are written apart, so that an undo takes them along.
    pub(crate) async fn savepoint(&mut self) -> Result<(), Fault> {
        let mut script = Script::default();
        self.say_counters(&mut script)?;
        script.say("SAVEPOINT command");
        script.run(&mut self.conn).await.map(drop)
    }

    pub(crate) async fn release_savepoint(&mut self) -> Result<(), Fault> {
        // Takes an inner savepoint along.
        self.framed = Framed::No;
        sqlx::query("RELEASE command").execute(&mut self.conn).await?;
        Ok(())
    }

    pub(crate) async fn undo_savepoint(&mut self) -> Result<(), Fault> {
        self.forget_uncommitted();
        self.framed = Framed::No;
        self.facts = None;
        self.counters.clear();
        self.writes.clear();
        sqlx::query("ROLLBACK TO command; RELEASE command").execute(&mut self.conn).await?;
        Ok(())
    }

    /// Part of a command begins that can be undone alone, after everything before it has been written. The savepoint
    /// is made with the first [`Work::flush`]; whoever writes otherwise calls [`Work::frame`] before.
    pub(crate) async fn piece(&mut self) -> Result<Piece, Fault> {
        if self.framed == Framed::Kept || !self.writes.is_written() {
            self.flush().await?;
        }
        self.framed = Framed::Asked;
        Ok(Piece { counters: self.counters.clone(), writes: self.writes.memory() })
    }

    /// Makes the savepoint of a piece now.
    pub(crate) async fn frame(&mut self) -> Result<(), Fault> {
        if self.framed == Framed::Asked { self.flush().await } else { Ok(()) }
    }

    pub(crate) fn keep_piece(&mut self) {
        self.framed = if self.framed == Framed::Yes { Framed::Kept } else { Framed::No };
    }

    /// Undoes it.
    pub(crate) async fn undo_piece(&mut self, piece: Piece) -> Result<(), Fault> {
        self.forget_uncommitted();
        self.writes = piece.writes;
        self.counters = piece.counters;
        if std::mem::replace(&mut self.framed, Framed::No) == Framed::Yes {
            sqlx::query("ROLLBACK TO piece; RELEASE piece").execute(&mut self.conn).await?;
        }
        Ok(())
    }

    fn forget_uncommitted(&mut self) {
        self.running.clear();
        if self.names.uncommitted {
            self.names = Names::default();
        }
    }

    /// A command has written everything. What it made runnable and nobody claimed is announced.
    pub(crate) fn end_command(&mut self) {
        self.announce |= self.writes.made_runnable();
        self.facts = None;
        self.holders.clear();
        self.writes.clear();
    }

    /// After the commit, whoever waits for work is told.
    pub(crate) fn announce(&mut self) {
        self.announce = true;
    }

    pub(crate) fn draw_entry(&mut self) -> i64 {
        let entry = self.sequence.entry;
        self.sequence.entry += 1;
        entry
    }

    /// Adds a row to a job's history.
    pub(crate) fn audit(&mut self, audit: Audit) {
        let entry = self.draw_entry();
        self.writes.audit(entry, audit);
    }

    /// Writes what has been decided, so that the next query sees it.
    pub(crate) async fn flush(&mut self) -> Result<(), Fault> {
        for row in self.writes.states() {
            if row.place == Place::Running {
                self.running.insert(row.handle, row.clone());
            } else {
                self.running.remove(&row.handle);
            }
        }
        if self.writes.is_written() && self.framed != Framed::Asked {
            return Ok(());
        }
        let mut script = Script::default();
        match self.framed {
            Framed::Asked => {
                script.say("SAVEPOINT piece");
                self.framed = Framed::Yes;
            }
            Framed::Kept => {
                script.say("RELEASE piece");
                self.framed = Framed::No;
            }
            Framed::No | Framed::Yes => {}
        }
        self.runnable_written += u64::from(self.writes.has_unwritten_runnable());
        self.writes.flush(&self.statements, script, &mut self.conn).await
    }

    /// Adds to a counter; written once per transaction.
    pub(crate) fn count(&mut self, name: &str, by: i64) {
        match self.counters.get_mut(name) {
            Some(value) => *value += by,
            None => {
                self.counters.insert(name.to_owned(), by);
            }
        }
    }

    /// `total` and `total:reason`.
    pub(crate) fn count_reason(&mut self, total: &str, reason: &str) {
        self.count(total, 1);
        self.count(&format!("{total}:{reason}"), 1);
    }

    fn say_counters(&mut self, script: &mut Script) -> Result<(), Fault> {
        let changed: Vec<_> = self.counters.drain().filter(|(_, by)| *by != 0).collect();
        script.rows(&self.statements.counters, &changed, |(name, by), row| {
            row.put(name.as_str())?.put(*by)?;
            Ok(())
        })?;
        Ok(())
    }

    /// The number of a contract in a queue.
    pub(crate) async fn lane(&mut self, contract: &str, queue: &str) -> Result<i64, Fault> {
        let name = (contract.to_owned(), queue.to_owned());
        if let Some(id) = self.names.lanes.get(&name) {
            return Ok(*id);
        }
        let found = sqlx::query("SELECT id FROM lane WHERE contract = ? AND queue = ?").bind(contract).bind(queue);
        let id = match found.fetch_optional(&mut self.conn).await? {
            Some(row) => row.try_get(0)?,
            None => {
                self.names.uncommitted = true;
                let insert = sqlx::query("INSERT INTO lane (contract, queue) VALUES (?, ?)").bind(contract).bind(queue);
                insert.execute(&mut self.conn).await?.last_insert_rowid()
            }
        };
        if self.names.lanes.len() >= MOST_NAMES {
            self.names.lanes.clear();
        }
        self.names.lanes.insert(name, id);
        Ok(id)
    }

    /// The number of a plugin version.
    pub(crate) async fn digest(&mut self, digest: Digest) -> Result<i64, Fault> {
        if let Some(id) = self.names.digests.get(&digest) {
            return Ok(*id);
        }
        let found = sqlx::query("SELECT id FROM digest WHERE sha256 = ?").bind(digest.0.to_vec()).fetch_optional(&mut self.conn).await?;
        let id = match found {
            Some(row) => row.try_get(0)?,
            None => {
                self.names.uncommitted = true;
                let insert = sqlx::query("INSERT INTO digest (sha256) VALUES (?)").bind(digest.0.to_vec());
                insert.execute(&mut self.conn).await?.last_insert_rowid()
            }
        };
        if self.names.digests.len() >= MOST_NAMES {
            self.names.digests.clear();
        }
        self.names.digests.insert(digest, id);
        Ok(id)
    }

    /// The number of a policy by its canonical text.
    pub(crate) async fn policy(&mut self, body: String) -> Result<i64, Fault> {
        if let Some(id) = self.names.policies.get(&body) {
            return Ok(*id);
        }
        let id = match sqlx::query("SELECT id FROM policy WHERE body = ?").bind(&body).fetch_optional(&mut self.conn).await? {
            Some(row) => row.try_get(0)?,
            None => {
                self.names.uncommitted = true;
                sqlx::query("INSERT INTO policy (body) VALUES (?)").bind(&body).execute(&mut self.conn).await?.last_insert_rowid()
            }
        };
        if self.names.policies.len() >= MOST_NAMES {
            self.names.policies.clear();
        }
        self.names.policies.insert(body, id);
        Ok(id)
    }

    async fn policy_body(&mut self, id: i64) -> Result<String, Fault> {
        let row = sqlx::query("SELECT body FROM policy WHERE id = ?").bind(id).fetch_optional(&mut self.conn).await?;
        let row = row.ok_or_else(|| Fault::Said(StoreErrorKind::Internal, format!("policy {id} is named by a job and does not exist")))?;
        Ok(row.try_get(0)?)
    }

    /// A stamped policy by its number.
    pub(crate) async fn stamp(&mut self, id: i64) -> Result<Arc<Stamp>, Fault> {
        if let Some(stamp) = self.names.stamps.get(&id) {
            return Ok(stamp.clone());
        }
        let body = self.policy_body(id).await?;
        let stamp = codec::decode_stamp(&body).map_err(|error| Fault::Said(StoreErrorKind::Schema, error.to_string()))?;
        let stamp = Arc::new(stamp);
        if self.names.stamps.len() >= MOST_NAMES {
            self.names.stamps.clear();
        }
        self.names.stamps.insert(id, stamp.clone());
        Ok(stamp)
    }

    /// A policy that was declared at enqueue, by its number.
    pub(crate) async fn declared(&mut self, id: i64) -> Result<Arc<Declared>, Fault> {
        if let Some(declared) = self.names.declared.get(&id) {
            return Ok(declared.clone());
        }
        let body = self.policy_body(id).await?;
        let declared = codec::decode_declared(&body).map_err(|error| Fault::Said(StoreErrorKind::Schema, error.to_string()))?;
        let declared = Arc::new(declared);
        if self.names.declared.len() >= MOST_NAMES {
            self.names.declared.clear();
        }
        self.names.declared.insert(id, declared.clone());
        Ok(declared)
    }

    /// Writes a stamp and remembers its number.
    pub(crate) async fn intern_stamp(&mut self, stamp: &Arc<Stamp>) -> Result<i64, Fault> {
        let id = self.policy(codec::encode_stamp(stamp)).await?;
        self.names.stamps.entry(id).or_insert_with(|| stamp.clone());
        Ok(id)
    }

    pub(crate) fn known_keys(&self) -> &KnownKeys {
        &self.names.keys
    }

    /// `may_be_new`: its row may have been inserted in this transaction.
    pub(crate) fn remember_key(&mut self, text: &str, id: KeyId, may_be_new: bool) {
        self.names.uncommitted |= may_be_new;
        if self.names.keys.len() >= MOST_NAMES {
            self.names.keys = KnownKeys::default();
        }
        self.names.keys.insert(text, id);
    }

    /// The latest instant that any command of this process has named, for the few that name none.
    pub(crate) fn latest(&mut self, now: UnixMillis) -> UnixMillis {
        self.latest = self.latest.max(now);
        self.latest
    }

    /// Whether a host is still registered; a rescued one is not, and hears it here (C1).
    pub(crate) async fn check_host(&mut self, host: HostId) -> Result<(), Fault> {
        let found = sqlx::query("SELECT 1 FROM host WHERE id = ?").bind(host.0).fetch_optional(&mut self.conn).await?;
        found.map(drop).ok_or_else(|| host_lost(host))
    }

    /// When the next scheduled job falls due.
    pub(crate) async fn next_due(&mut self) -> Result<Option<UnixMillis>, Fault> {
        let row =
            sqlx::query("SELECT min(due) FROM job_state INDEXED BY state_scheduled WHERE place = 0").fetch_one(&mut self.conn).await?;
        Ok(row.try_get::<Option<i64>, _>(0)?.map(UnixMillis))
    }
}

fn host_lost(host: HostId) -> Fault {
    Fault::Said(StoreErrorKind::HostLost, format!("host {} is not registered any more; its runs have been given back", host.0))
}

/// Reads [`Facts`] from a column on.
fn read_facts(row: &SqliteRow, from: usize) -> Result<Facts, Fault> {
    let damaged = |what: &str, error: serde_json::Error| Fault::Said(StoreErrorKind::Internal, format!("the {what}: {error}"));
    let (hosts, queues): (&str, &str) = (row.try_get(from + 2)?, row.try_get(from + 3)?);
    Ok(Facts {
        cancellations: row.try_get(from)?,
        next_due: row.try_get::<Option<i64>, _>(from + 1)?.map(UnixMillis),
        hosts: serde_json::from_str(hosts).map_err(|error| damaged("hosts", error))?,
        paused_queues: serde_json::from_str(queues).map_err(|error| damaged("paused queues", error))?,
    })
}
