//! Numbers for names: lanes, policies, digests, keys.
//!
//! What is interned is never changed and never removed, so what has been read once holds for ever. Each kind has its
//! cache; what it does not know costs one statement for all that are missing. The statement commits by itself before
//! anything refers to the numbers: nobody waits for a new name while he holds a key (C4).
//!
//! What must stay true: a cache may be emptied at any moment. One thing takes numbers back: a fail-over to a server that
//! had not heard of them, which then gives them to other names. So a lost connection empties all caches.
//!
//! Beside the names it remembers how far a lane with a long backlog has been claimed. That is a hint, and wrong where a job
//! has come back to the front or was committed late: so it is good for a number of claims, and the next looks at all again.
//!
//! What it deliberately does not do: bound the caches of lanes, policies and digests, which are as many as the
//! operators' deployments. The cache of keys, which come from payloads, is emptied when it is full.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use warp_domain::policy::{Declared, Stamp};
use warp_domain::{Digest, KeyId, UnixMillis};
use warp_store::{StoreErrorKind, codec};

use crate::call::{Db, Sql, get};
use crate::error::Fault;
use crate::lookahead::{self, Candidate, Lookahead};

/// Keys that are remembered.
const KEYS: usize = 100_000;

/// Claims in a row that may begin where the one before them ended.
const CLAIMS_FROM_FRONT: u32 = 64;

/// A contract in a queue.
pub(crate) type LaneName = (String, String);

/// The caches of one store.
#[derive(Default)]
pub(crate) struct Interned {
    lanes: Mutex<HashMap<LaneName, i32>>,
    digests: Mutex<HashMap<Digest, i32>>,
    stamps: Mutex<Stamps>,
    declared: Mutex<HashMap<i32, Result<Arc<Declared>, String>>>,
    declared_ids: Mutex<HashMap<String, i32>>,
    keys: Mutex<HashMap<String, KeyId>>,
    fronts: Mutex<HashMap<i32, Front>>,
    ahead: Mutex<Lookahead>,
}

/// How far a lane has been claimed.
struct Front {
    /// Due time and job.
    at: (i64, i64),
    /// Claims that have begun there since somebody looked at all.
    claims: u32,
}

#[derive(Default)]
struct Stamps {
    ids: HashMap<Arc<Stamp>, i32>,
    /// A stamp that a newer build has written may be unreadable here; then why.
    read: HashMap<i32, Result<Arc<Stamp>, String>>,
}

fn locked<T>(cache: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic between two insertions leaves a cache that knows less, nothing wrong.
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of these, and the others, each once.
fn look<K: Eq + Hash + Clone, V: Clone>(cache: &Mutex<HashMap<K, V>>, wanted: impl IntoIterator<Item = K>) -> (HashMap<K, V>, Vec<K>) {
    let cache = locked(cache);
    let (mut found, mut missing) = (HashMap::new(), HashSet::new());
    for name in wanted {
        match cache.get(&name) {
            Some(value) => drop(found.insert(name, value.clone())),
            None => drop(missing.insert(name)),
        }
    }
    (found, missing.into_iter().collect())
}

/// Remembers what was asked for, in the cache and among what was found.
fn learn<K: Eq + Hash + Clone, V: Clone>(cache: &Mutex<HashMap<K, V>>, found: &mut HashMap<K, V>, names: Vec<K>, values: Vec<V>) {
    found.extend(names.iter().cloned().zip(values.iter().cloned()));
    locked(cache).extend(names.into_iter().zip(values));
}

fn pick<K: Eq + Hash, V: Clone>(found: &HashMap<K, V>, name: &K) -> Result<V, Fault> {
    found.get(name).cloned().ok_or_else(|| Fault::said(StoreErrorKind::Internal, "a name was interned and has no number"))
}

impl Interned {
    /// Another server may answer from now on.
    pub(crate) fn note(&self, fault: &Fault) {
        if matches!(fault.kind(), StoreErrorKind::Unavailable | StoreErrorKind::OutcomeUnknown) {
            let Interned { lanes, digests, stamps, declared, declared_ids, keys, fronts, ahead } = self;
            locked(fronts).clear();
            locked(ahead).clear();
            locked(lanes).clear();
            locked(digests).clear();
            *locked(stamps) = Stamps::default();
            locked(declared).clear();
            locked(declared_ids).clear();
            locked(keys).clear();
        }
    }

    /// Numbers of lanes, in order. Unique index of `lane`; takes no lock for what is there.
    pub(crate) async fn lanes(&self, db: &Db, names: &[LaneName]) -> Result<Vec<i32>, Fault> {
        let (mut found, new) = look(&self.lanes, names.iter().cloned());
        if !new.is_empty() {
            let (contracts, queues): (Vec<_>, Vec<_>) = new.iter().cloned().unzip();
            let row = db.row(Sql::new("SELECT warp.lane_ids($1, $2)").arg(contracts).arg(queues)).await?;
            learn(&self.lanes, &mut found, new, get(&row, 0)?);
        }
        names.iter().map(|name| pick(&found, name)).collect()
    }

    /// Numbers of lanes to claim from, in order: 0 for one that somebody is about to mention for the first time, which
    /// holds nothing yet. It is asked for again the next time. Waits for nobody for longer than a moment.
    pub(crate) async fn lanes_to_claim(&self, db: &Db, names: &[LaneName]) -> Result<Vec<i32>, Fault> {
        let (mut found, new) = look(&self.lanes, names.iter().cloned());
        if !new.is_empty() {
            let (contracts, queues): (Vec<_>, Vec<_>) = new.iter().cloned().unzip();
            let row = db.row(Sql::new("SELECT warp.lane_ids_to_claim($1, $2)").arg(contracts).arg(queues)).await?;
            let ids: Vec<i32> = get(&row, 0)?;
            let (names, ids) = new.into_iter().zip(ids).filter(|(_, id)| *id != 0).unzip();
            learn(&self.lanes, &mut found, names, ids);
        }
        Ok(names.iter().map(|name| found.get(name).copied().unwrap_or(0)).collect())
    }

    /// Where claims of these lanes may begin, in order; nothing where they must look at all.
    pub(crate) fn fronts(&self, lanes: &[i32]) -> Vec<Option<(i64, i64)>> {
        let mut fronts = locked(&self.fronts);
        let mut front = |lane| {
            let front = fronts.get_mut(lane)?;
            front.claims += 1;
            if front.claims <= CLAIMS_FROM_FRONT {
                return Some(front.at);
            }
            fronts.remove(lane);
            None
        };
        lanes.iter().map(&mut front).collect()
    }

    /// Everything in this lane has been claimed up to there, and there is more.
    pub(crate) fn learn_front(&self, lane: i32, at: (i64, i64)) {
        locked(&self.fronts).entry(lane).or_insert(Front { at, claims: 0 }).at = at;
    }

    /// Whoever claims in these lanes looks at all of them.
    pub(crate) fn forget_fronts(&self, lanes: &[i32]) {
        let mut fronts = locked(&self.fronts);
        lanes.iter().for_each(|lane| drop(fronts.remove(lane)));
    }

    /// What earlier claims have looked up for this one.
    pub(crate) fn take_ahead(&self, declared: &lookahead::Declared, most: usize, now: UnixMillis) -> Vec<Candidate> {
        locked(&self.ahead).take(declared, most, now)
    }

    /// What a claim has looked up and not got to.
    pub(crate) fn keep_ahead(&self, declared: lookahead::Declared, left: Vec<Candidate>, now: UnixMillis) {
        locked(&self.ahead).put_back(declared, left, now);
    }

    /// Numbers of digests, in order.
    pub(crate) async fn digests(&self, db: &Db, digests: &[Digest]) -> Result<Vec<i32>, Fault> {
        let (mut found, new) = look(&self.digests, digests.iter().copied());
        if !new.is_empty() {
            let bytes: Vec<_> = new.iter().map(|digest| digest.0.to_vec()).collect();
            let row = db.row(Sql::new("SELECT warp.digest_ids($1)").arg(bytes)).await?;
            learn(&self.digests, &mut found, new, get(&row, 0)?);
        }
        digests.iter().map(|digest| pick(&found, digest)).collect()
    }

    /// Numbers of stamps, in order.
    pub(crate) async fn stamp_ids(&self, db: &Db, stamps: &[Arc<Stamp>]) -> Result<Vec<i32>, Fault> {
        let (mut ids, mut new) = (HashMap::new(), HashMap::new());
        {
            let cache = locked(&self.stamps);
            for stamp in stamps {
                match cache.ids.get(stamp) {
                    Some(id) => drop(ids.insert(Arc::clone(stamp), *id)),
                    None => drop(new.insert(Arc::clone(stamp), codec::encode_stamp(stamp))),
                }
            }
        }
        if !new.is_empty() {
            let bodies: BTreeSet<_> = new.values().cloned().collect();
            let numbers = Self::policies(db, bodies.into_iter().collect()).await?;
            let mut cache = locked(&self.stamps);
            for (stamp, body) in new {
                let id = pick(&numbers, &body)?;
                cache.ids.insert(Arc::clone(&stamp), id);
                cache.read.insert(id, Ok(Arc::clone(&stamp)));
                ids.insert(stamp, id);
            }
        }
        stamps.iter().map(|stamp| pick(&ids, stamp)).collect()
    }

    /// Numbers of what callers declared, in order; nothing for whoever declared nothing.
    pub(crate) async fn declared_ids(&self, db: &Db, declared: &[&Declared]) -> Result<Vec<Option<i32>>, Fault> {
        let texts: Vec<_> = declared.iter().map(|declared| (!declared.is_empty()).then(|| codec::encode_declared(declared))).collect();
        let (mut found, new) = look(&self.declared_ids, texts.iter().flatten().cloned());
        if !new.is_empty() {
            let numbers = Self::policies(db, new).await?;
            locked(&self.declared_ids).extend(numbers.iter().map(|(text, id)| (text.clone(), *id)));
            found.extend(numbers);
        }
        texts.iter().map(|text| text.as_ref().map(|text| pick(&found, text)).transpose()).collect()
    }

    async fn policies(db: &Db, bodies: Vec<String>) -> Result<HashMap<String, i32>, Fault> {
        let row = db.row(Sql::new("SELECT warp.policy_ids($1)").arg(bodies.clone())).await?;
        Ok(bodies.into_iter().zip(get::<Vec<i32>>(&row, 0)?).collect())
    }

    /// Bodies of policies by their numbers. Primary key.
    async fn bodies(db: &Db, ids: Vec<i32>) -> Result<Vec<(i32, String)>, Fault> {
        let rows = db.rows(Sql::new("SELECT p.id, p.body FROM warp.policy p WHERE p.id = ANY ($1)").arg(ids).repeatable()).await?;
        rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
    }

    /// Stamps by their numbers; for one that this build cannot read, why.
    pub(crate) async fn stamps(&self, db: &Db, ids: &BTreeSet<i32>) -> Result<HashMap<i32, Result<Arc<Stamp>, String>>, Fault> {
        let (mut found, mut new) = (HashMap::with_capacity(ids.len()), Vec::new());
        {
            let cache = locked(&self.stamps);
            for id in ids {
                match cache.read.get(id) {
                    Some(stamp) => drop(found.insert(*id, stamp.clone())),
                    None => new.push(*id),
                }
            }
        }
        if !new.is_empty() {
            for (id, body) in Self::bodies(db, new).await? {
                let stamp = codec::decode_stamp(&body).map(Arc::new).map_err(|error| error.to_string());
                locked(&self.stamps).read.insert(id, stamp.clone());
                found.insert(id, stamp);
            }
        }
        Ok(found)
    }

    /// What callers declared, by number; where this build cannot read it, why.
    pub(crate) async fn declared(&self, db: &Db, ids: &BTreeSet<i32>) -> Result<HashMap<i32, Result<Arc<Declared>, String>>, Fault> {
        let (mut found, new) = look(&self.declared, ids.iter().copied());
        if !new.is_empty() {
            for (id, body) in Self::bodies(db, new).await? {
                let declared = codec::decode_declared(&body).map(Arc::new).map_err(|error| error.to_string());
                locked(&self.declared).insert(id, declared.clone());
                found.insert(id, declared);
            }
        }
        Ok(found)
    }

    /// Numbers of keys by their texts.
    pub(crate) async fn keys(&self, db: &Db, texts: &BTreeSet<String>) -> Result<HashMap<String, KeyId>, Fault> {
        let mut ids = HashMap::with_capacity(texts.len());
        let mut new = Vec::new();
        {
            let mut cache = locked(&self.keys);
            if cache.len() > KEYS {
                cache.clear();
            }
            for text in texts {
                match cache.get(text) {
                    Some(id) => drop(ids.insert(text.clone(), *id)),
                    None => new.push(text.clone()),
                }
            }
        }
        if !new.is_empty() {
            let row = db.row(Sql::new("SELECT warp.key_ids($1)").arg(new.clone())).await?;
            let drawn: Vec<_> = new.into_iter().zip(get::<Vec<i64>>(&row, 0)?.into_iter().map(KeyId)).collect();
            locked(&self.keys).extend(drawn.iter().cloned());
            ids.extend(drawn);
        }
        Ok(ids)
    }
}
