//! Numbers for names: lanes, policies, digests, keys.
//!
//! What is interned is never changed and never removed, so what has been read once holds for ever. Each kind has its
//! cache; what it does not know costs one statement for all that are missing. The statement commits by itself before
//! anything refers to the numbers: nobody waits for a new name while he holds a key (C4).
//!
//! What it deliberately does not do: bound the caches of lanes, policies and digests, which are as many as the
//! operators' deployments. The cache of keys, which come from payloads, is emptied when it is full.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use warp_domain::policy::{Declared, Stamp};
use warp_domain::{Digest, KeyId};
use warp_store::{StoreErrorKind, codec};

use crate::call::{Db, Sql, get};
use crate::error::Fault;

/// Keys that are remembered.
const KEYS: usize = 100_000;

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

fn missing<K: Eq + Hash + Clone, V>(cache: &Mutex<HashMap<K, V>>, wanted: impl IntoIterator<Item = K>) -> Vec<K> {
    let cache = locked(cache);
    let mut missing: Vec<K> = Vec::new();
    for name in wanted {
        if !cache.contains_key(&name) && !missing.contains(&name) {
            missing.push(name);
        }
    }
    missing
}

fn known<K: Eq + Hash, V: Clone>(cache: &Mutex<HashMap<K, V>>, name: &K) -> Result<V, Fault> {
    locked(cache).get(name).cloned().ok_or_else(|| Fault::said(StoreErrorKind::Internal, "a name that was just interned is not known"))
}

impl Interned {
    /// Numbers of lanes, in order. Unique index of `lane`; takes no lock for what is there.
    pub(crate) async fn lanes(&self, db: &Db, names: &[LaneName]) -> Result<Vec<i32>, Fault> {
        let new = missing(&self.lanes, names.iter().cloned());
        if !new.is_empty() {
            let (contracts, queues): (Vec<_>, Vec<_>) = new.iter().cloned().unzip();
            let row = db.row(Sql::new("SELECT warp.lane_ids($1, $2)").arg(contracts).arg(queues)).await?;
            locked(&self.lanes).extend(new.into_iter().zip(get::<Vec<i32>>(&row, 0)?));
        }
        names.iter().map(|name| known(&self.lanes, name)).collect()
    }

    /// Numbers of digests, in order.
    pub(crate) async fn digests(&self, db: &Db, digests: &[Digest]) -> Result<Vec<i32>, Fault> {
        let new = missing(&self.digests, digests.iter().copied());
        if !new.is_empty() {
            let bytes: Vec<_> = new.iter().map(|digest| digest.0.to_vec()).collect();
            let row = db.row(Sql::new("SELECT warp.digest_ids($1)").arg(bytes)).await?;
            locked(&self.digests).extend(new.into_iter().zip(get::<Vec<i32>>(&row, 0)?));
        }
        digests.iter().map(|digest| known(&self.digests, digest)).collect()
    }

    /// Numbers of stamps, in order.
    pub(crate) async fn stamp_ids(&self, db: &Db, stamps: &[Arc<Stamp>]) -> Result<Vec<i32>, Fault> {
        let new: BTreeSet<String> = {
            let cache = locked(&self.stamps);
            stamps.iter().filter(|stamp| !cache.ids.contains_key(*stamp)).map(|stamp| codec::encode_stamp(stamp)).collect()
        };
        if !new.is_empty() {
            let ids = self.policies(db, new.into_iter().collect()).await?;
            let mut cache = locked(&self.stamps);
            for stamp in stamps {
                if let Some(id) = ids.get(&codec::encode_stamp(stamp)) {
                    cache.ids.insert(Arc::clone(stamp), *id);
                    cache.read.insert(*id, Ok(Arc::clone(stamp)));
                }
            }
        }
        let cache = locked(&self.stamps);
        let unknown = || Fault::said(StoreErrorKind::Internal, "a stamp that was just interned is not known");
        stamps.iter().map(|stamp| cache.ids.get(stamp).copied().ok_or_else(unknown)).collect()
    }

    /// Numbers of what callers declared, in order; nothing for whoever declared nothing.
    pub(crate) async fn declared_ids(&self, db: &Db, declared: &[&Declared]) -> Result<Vec<Option<i32>>, Fault> {
        let texts: Vec<_> = declared.iter().map(|declared| (!declared.is_empty()).then(|| codec::encode_declared(declared))).collect();
        let new = missing(&self.declared_ids, texts.iter().flatten().cloned());
        if !new.is_empty() {
            let ids = self.policies(db, new).await?;
            locked(&self.declared_ids).extend(ids);
        }
        texts.iter().map(|text| text.as_ref().map(|text| known(&self.declared_ids, text)).transpose()).collect()
    }

    async fn policies(&self, db: &Db, bodies: Vec<String>) -> Result<HashMap<String, i32>, Fault> {
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
        let new: Vec<i32> = {
            let cache = locked(&self.stamps);
            ids.iter().copied().filter(|id| !cache.read.contains_key(id)).collect()
        };
        if !new.is_empty() {
            let bodies = Self::bodies(db, new).await?;
            let mut cache = locked(&self.stamps);
            for (id, body) in bodies {
                cache.read.insert(id, codec::decode_stamp(&body).map(Arc::new).map_err(|error| error.to_string()));
            }
        }
        let cache = locked(&self.stamps);
        let gone = || Err("its stored policy is gone".to_owned());
        Ok(ids.iter().map(|id| (*id, cache.read.get(id).cloned().unwrap_or_else(gone))).collect())
    }

    /// What callers declared, by number; where this build cannot read it, why.
    pub(crate) async fn declared(&self, db: &Db, ids: &BTreeSet<i32>) -> Result<HashMap<i32, Result<Arc<Declared>, String>>, Fault> {
        let new = missing(&self.declared, ids.iter().copied());
        if !new.is_empty() {
            let bodies = Self::bodies(db, new).await?;
            let read = |body: &str| codec::decode_declared(body).map(Arc::new).map_err(|error| error.to_string());
            locked(&self.declared).extend(bodies.into_iter().map(|(id, body)| (id, read(&body))));
        }
        let cache = locked(&self.declared);
        let gone = || Err("its stored policy is gone".to_owned());
        Ok(ids.iter().map(|id| (*id, cache.get(id).cloned().unwrap_or_else(gone))).collect())
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
