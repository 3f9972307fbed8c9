//! The model behind the `Store` trait.
//!
//! One mutex, one command at a time: every call is one transaction, and a caller that drops the future has either
//! done all of it or nothing. [`ModelStore::another`] is a second process on the same database.
//!
//! What it deliberately does not do: anything that the model does not; errors of connections and disks do not occur.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use warp_domain::ending::State;
use warp_domain::{ClaimToken, HostId, JobHandle, JobId, KeyId, RunNumber, UnixMillis};
use warp_store::{
    AdminLimit, CommandVerdict, EnqueueVerdict, ExchangeParams, Exchanged, HolderSeen, HostInfo, HostSeen, JobDetails, JobFilter,
    JobSummary, KeySeen, LogLine, MAX_LISTED, NewJob, Overview, Pause, QueueSeen, RenewParams, Renewed, Rescued, Result, Retention,
    RunOutput, Served, SettleVerdict, Signals, StateVerdict, StateWrite, Store, WaiterSeen, Waiting,
};

use crate::model::{Compared, Model, Place, Row};

struct Shared {
    model: Mutex<Inner>,
    /// Grows with every command that may have made something runnable or cancelled.
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    model: Model,
    /// The latest instant that a caller named, for the one command that names none.
    now: Option<UnixMillis>,
}

/// A job store in memory.
pub struct ModelStore {
    shared: Arc<Shared>,
    /// The version that this process has heard of.
    heard: AtomicU64,
}

impl Default for ModelStore {
    fn default() -> Self {
        Self::new()
    }
}

impl ModelStore {
    /// An empty database.
    #[must_use]
    pub fn new() -> Self {
        let shared = Shared { model: Mutex::default(), version: watch::Sender::new(0) };
        ModelStore { shared: Arc::new(shared), heard: AtomicU64::new(0) }
    }

    /// A second process on the same database.
    #[must_use]
    pub fn another(&self) -> Self {
        ModelStore { shared: self.shared.clone(), heard: AtomicU64::new(*self.shared.version.borrow()) }
    }

    /// Looks at the rows.
    pub fn look<T>(&self, at: impl FnOnce(&Model) -> T) -> T {
        at(&self.lock().model)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One command. Nobody follows the journal here.
    fn command<T>(&self, now: Option<UnixMillis>, run: impl FnOnce(&mut Model, UnixMillis) -> T) -> T {
        let mut inner = self.lock();
        inner.now = inner.now.max(now);
        let at = now.or(inner.now).unwrap_or(UnixMillis(0));
        let answer = run(&mut inner.model, at);
        inner.model.journal.clear();
        drop(inner);
        self.shared.version.send_modify(|version| *version += 1);
        answer
    }
}

#[async_trait]
impl Store for ModelStore {
    async fn enqueue(&self, jobs: Vec<NewJob>, now: UnixMillis) -> Result<Vec<EnqueueVerdict>> {
        Ok(self.command(Some(now), |model, now| model.enqueue(jobs, now)))
    }

    async fn register(&self, info: HostInfo) -> Result<HostId> {
        Ok(self.command(Some(info.now), |model, _| model.register(info)))
    }

    async fn serve(&self, host: HostId, served: Vec<Served>) -> Result<()> {
        self.command(None, |model, now| model.serve(host, served, now))
    }

    async fn renew(&self, params: RenewParams) -> Result<Renewed> {
        let RenewParams { host, known, patience, now } = params;
        self.command(Some(now), |model, now| {
            let Compared { handed_back, lost } = model.renew(host, &known, now)?;
            let expired = model.expire_reservations(patience, now);
            Ok(Renewed { handed_back, lost, expired, reserved: model.has_reserved(), hosts: hosts(model) })
        })
    }

    async fn deregister(&self, host: HostId, now: UnixMillis) -> Result<()> {
        self.command(Some(now), |model, now| model.deregister(host, now))
    }

    async fn hosts(&self) -> Result<Vec<HostSeen>> {
        Ok(self.look(hosts))
    }

    async fn rescue(&self, host: HostId, renewals: i64, max_deaths: u32, now: UnixMillis) -> Result<Rescued> {
        Ok(self.command(Some(now), |model, now| model.rescue(host, renewals, max_deaths, now)))
    }

    async fn exchange(&self, params: ExchangeParams) -> Result<Exchanged> {
        self.command(Some(params.now), |model, _| model.exchange(&params))
    }

    async fn append_output(&self, host: HostId, handle: JobHandle, token: ClaimToken, output: RunOutput) -> Result<SettleVerdict> {
        Ok(self.command(None, |model, _| model.append_output(host, handle, token, &output)))
    }

    async fn signals(&self, host: HostId) -> Result<Signals> {
        Ok(self.look(|model| Signals {
            cancelled: model.cancel_signals(host),
            host_paused: model.hosts.get(&host).is_some_and(|row| row.paused.is_some()),
            paused_queues: model.paused_queues.keys().cloned().collect(),
        }))
    }

    async fn expire_reservations(&self, patience: Duration, now: UnixMillis) -> Result<u32> {
        Ok(self.command(Some(now), |model, now| model.expire_reservations(patience, now)))
    }

    async fn prune(&self, retention: Retention, max: u32, now: UnixMillis) -> Result<u32> {
        Ok(self.command(Some(now), |model, now| prune(model, retention, max, now)))
    }

    async fn changed(&self) {
        let heard = self.heard.load(Ordering::Relaxed);
        // The sender lives as long as this store, so waiting cannot fail.
        if let Ok(version) = self.shared.version.subscribe().wait_for(|version| *version != heard).await {
            self.heard.store(*version, Ordering::Relaxed);
        }
    }

    async fn state_get(&self, bucket: &str, key: &str) -> Result<Option<String>> {
        Ok(self.look(|model| model.state.get(&(bucket.to_owned(), key.to_owned())).cloned()))
    }

    async fn state_apply(&self, host: HostId, handle: JobHandle, token: ClaimToken, write: StateWrite) -> Result<StateVerdict> {
        Ok(self.command(None, |model, _| model.state_apply(host, handle, token, &write)))
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Vec<JobSummary>> {
        Ok(self.look(|model| {
            let key = filter.key.as_ref().map(|text| model.key_id(text));
            let mut rows: Vec<_> = model
                .rows
                .values()
                .filter(|row| filter.states.is_empty() || filter.states.contains(&row.place.state()))
                .filter(|row| filter.contract.as_ref().is_none_or(|contract| *contract == row.job.contract))
                .filter(|row| filter.queue.as_ref().is_none_or(|queue| *queue == row.job.queue))
                .filter(|row| filter.before.is_none_or(|before| row.job.id < before))
                .filter(|row| key.is_none_or(|key| key.is_some_and(|key| row.keys.as_ref().is_some_and(|keys| keys.contains(&key)))))
                .collect();
            rows.sort_by_key(|row| std::cmp::Reverse(row.job.id));
            rows.into_iter().take(usize::try_from(filter.limit).unwrap_or(usize::MAX)).map(summary).collect()
        }))
    }

    async fn job(&self, id: JobId, _now: UnixMillis) -> Result<Option<JobDetails>> {
        Ok(self.look(|model| model.handle(id).and_then(|job| details(model, job))))
    }

    async fn job_logs(&self, id: JobId, run: Option<RunNumber>) -> Result<Vec<(RunNumber, LogLine)>> {
        Ok(self.look(|model| {
            let row = model.handle(id).and_then(|job| model.rows.get(&job));
            let lines = row.into_iter().flat_map(|row| &row.logs).filter(|(of, _)| run.is_none_or(|run| run == *of));
            lines.cloned().collect()
        }))
    }

    async fn cancel(&self, id: JobId, _by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        Ok(self.command(Some(now), |model, now| model.cancel(id, now)))
    }

    async fn requeue(&self, id: JobId, _by: &str, now: UnixMillis) -> Result<CommandVerdict> {
        Ok(self.command(Some(now), |model, now| model.requeue(id, now)))
    }

    async fn delete(&self, id: JobId, now: UnixMillis) -> Result<CommandVerdict> {
        Ok(self.command(Some(now), |model, now| model.delete(id, now)))
    }

    async fn limits(&self) -> Result<Vec<AdminLimit>> {
        Ok(self.look(|model| {
            let limits = model.keys.values().filter_map(|row| {
                let (limit, set_by, set_at) = row.admin.clone()?;
                Some(AdminLimit { key: row.text.clone(), limit, set_by, set_at })
            });
            let mut limits: Vec<_> = limits.collect();
            limits.sort_by(|a, b| a.key.cmp(&b.key));
            limits
        }))
    }

    async fn set_limit(&self, key: &str, limit: u32, by: &str, now: UnixMillis) -> Result<KeySeen> {
        Ok(self.command(Some(now), |model, now| {
            let key = model.set_limit(key, Some(limit), by, now);
            key_seen(model, key, MAX_LISTED)
        }))
    }

    async fn remove_limit(&self, key: &str, now: UnixMillis) -> Result<bool> {
        Ok(self.command(Some(now), |model, now| {
            let there = model.key_id(key).and_then(|id| model.keys.get(&id)).is_some_and(|row| row.admin.is_some());
            if there {
                model.set_limit(key, None, "", now);
            }
            there
        }))
    }

    async fn keys(&self, max: u32) -> Result<Vec<KeySeen>> {
        Ok(self.look(|model| {
            let seen = model.keys.keys().map(|&key| key_seen(model, key, 0));
            let mut seen: Vec<_> = seen.filter(|key| !key.holders.is_empty() || key.waiting > 0).collect();
            seen.sort_by_key(|key| (std::cmp::Reverse(key.waiting + narrow(key.holders.len())), key.key.clone()));
            seen.truncate(usize::try_from(max).unwrap_or(usize::MAX));
            seen
        }))
    }

    async fn key(&self, key: &str) -> Result<Option<KeySeen>> {
        Ok(self.look(|model| model.key_id(key).map(|key| key_seen(model, key, MAX_LISTED))))
    }

    async fn pause_queue(&self, queue: &str, by: &str, now: UnixMillis) -> Result<bool> {
        let pause = Pause { by: by.to_owned(), at: now };
        Ok(self.command(Some(now), |model, now| model.pause_queue(queue, Some(pause), now)))
    }

    async fn resume_queue(&self, queue: &str, now: UnixMillis) -> Result<bool> {
        Ok(self.command(Some(now), |model, now| model.pause_queue(queue, None, now)))
    }

    async fn paused_queues(&self) -> Result<BTreeMap<String, Pause>> {
        Ok(self.look(|model| model.paused_queues.clone()))
    }

    async fn pause_host(&self, host: HostId, by: &str, now: UnixMillis) -> Result<bool> {
        let pause = Pause { by: by.to_owned(), at: now };
        self.command(Some(now), |model, now| model.pause_host(host, Some(pause), now))
    }

    async fn resume_host(&self, host: HostId, now: UnixMillis) -> Result<bool> {
        self.command(Some(now), |model, now| model.pause_host(host, None, now))
    }

    async fn overview(&self) -> Result<Overview> {
        Ok(self.look(|model| {
            let mut states: BTreeMap<State, u64> = BTreeMap::new();
            model.rows.values().for_each(|row| *states.entry(row.place.state()).or_default() += 1);
            let parked = model.rows.values().filter(|row| row.place == Place::Parked).count() as u64;
            Overview { states, parked, counters: model.counters.clone(), paused_queues: model.paused_queues.clone() }
        }))
    }

    async fn queues(&self, max: u32) -> Result<Vec<QueueSeen>> {
        Ok(self.look(|model| {
            let mut queues: BTreeMap<String, QueueSeen> = BTreeMap::new();
            for row in model.rows.values() {
                let empty =
                    || QueueSeen { queue: row.job.queue.clone(), ready: 0, running: 0, scheduled: 0, parked: 0, oldest_ready: None };
                let seen = queues.entry(row.job.queue.clone()).or_insert_with(empty);
                match row.place {
                    Place::Ready => {
                        seen.ready += 1;
                        seen.oldest_ready = Some(seen.oldest_ready.map_or(row.due, |oldest| oldest.min(row.due)));
                    }
                    Place::Reserved => seen.ready += 1,
                    Place::Running => seen.running += 1,
                    Place::Scheduled => seen.scheduled += 1,
                    Place::Parked => seen.parked += 1,
                    _ => {}
                }
            }
            let depth = |seen: &QueueSeen| seen.ready + seen.running + seen.scheduled + seen.parked;
            let mut queues: Vec<_> = queues.into_values().filter(|seen| depth(seen) > 0).collect();
            queues.sort_by_key(|seen| std::cmp::Reverse(depth(seen)));
            queues.truncate(max as usize);
            queues
        }))
    }

    async fn served_contracts(&self) -> Result<Vec<String>> {
        Ok(self.look(|model| {
            let served = model.hosts.values().flat_map(|host| &host.served).map(|served| served.declarations.contract.clone());
            served.collect::<BTreeSet<_>>().into_iter().collect()
        }))
    }
}

fn hosts(model: &Model) -> Vec<HostSeen> {
    let running = |host| model.rows.values().filter(|row| row.place == Place::Running && row.host == Some(host)).count();
    let seen = model.hosts.iter().map(|(&host, row)| HostSeen {
        host,
        name: row.info.name.clone(),
        renewals: row.renewals,
        started_at: row.info.now,
        renewed_at: row.renewed_at,
        running: narrow(running(host)),
        gone: false,
        paused: row.paused.clone(),
    });
    seen.collect()
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn prune(model: &mut Model, retention: Retention, max: u32, now: UnixMillis) -> u32 {
    let Retention { completed, deleted, failed } = retention;
    let kept = |place| match place {
        Place::Completed => completed,
        Place::Deleted => deleted,
        Place::Failed => failed,
        _ => None,
    };
    let old = |row: &Row| kept(row.place).is_some_and(|kept| row.changed_at.after(kept) <= now);
    let mut due: Vec<_> = model.rows.values().filter(|row| old(row)).map(|row| (row.changed_at, row.job.id)).collect();
    due.sort_unstable();
    due.truncate(usize::try_from(max).unwrap_or(usize::MAX));
    for (_, id) in &due {
        model.delete(*id, now);
    }
    narrow(due.len())
}

fn summary(row: &Row) -> JobSummary {
    JobSummary {
        id: row.job.id,
        contract: row.job.contract.clone(),
        queue: row.job.queue.clone(),
        state: row.place.state(),
        parked: row.place == Place::Parked,
        runs: row.runs,
        attempts: row.attempts,
        created_at: row.created_at,
        changed_at: row.changed_at,
        due: (row.place == Place::Scheduled).then_some(row.due),
    }
}

fn key_seen(model: &Model, key: KeyId, listed: u32) -> KeySeen {
    let line = model.line(key);
    let named = |job: &JobHandle| model.rows.get(job);
    let holders = model.slots.iter().filter(|((of, _), _)| *of == key).filter_map(|(&(_, slot), held)| {
        let row = named(&held.job)?;
        Some(HolderSeen {
            job: row.job.id,
            contract: row.job.contract.clone(),
            host: row.host.and_then(|host| model.host_names.get(&host).cloned()),
            slot,
            limit: held.limit,
            since: held.since,
        })
    });
    let waiters = line.iter().take(usize::try_from(listed).unwrap_or(usize::MAX)).filter_map(|waiter| {
        let row = named(&waiter.job)?;
        Some(WaiterSeen {
            job: row.job.id,
            contract: row.job.contract.clone(),
            limit: waiter.limit,
            weight: waiter.weight,
            since: row.changed_at,
            claimable: waiter.claimable,
        })
    });
    let row = model.keys.get(&key).cloned().unwrap_or_default();
    KeySeen {
        key: row.text,
        admin_limit: row.admin.map(|(limit, ..)| limit),
        holders: holders.collect(),
        waiters: waiters.collect(),
        waiting: narrow(line.len()),
    }
}

fn details(model: &Model, job: JobHandle) -> Option<JobDetails> {
    let row = model.rows.get(&job)?;
    let served = model.is_served(&row.job.contract);
    let paused = model.paused_queues.get(&row.job.queue);
    let waiting = match row.place {
        Place::Scheduled => Some(Waiting::Due(row.due)),
        Place::Reserved => Some(Waiting::Reserved),
        Place::Ready if paused.is_some() => paused.cloned().map(Waiting::Paused),
        Place::Ready if !served => Some(Waiting::ForHost),
        Place::Ready => {
            let ahead = model.rows.iter().filter(|(other, of)| {
                let same_lane = of.job.queue == row.job.queue && of.job.contract == row.job.contract;
                of.place == Place::Ready && same_lane && (of.due, **other) < (row.due, job)
            });
            Some(Waiting::ForWorker { ahead: narrow(ahead.count()).min(MAX_LISTED) })
        }
        Place::Parked => row.parked_on.map(|key| {
            let admin = model.keys.get(&key).and_then(|row| row.admin.as_ref()).map(|(limit, ..)| *limit);
            let place = model.line(key).iter().position(|waiter| waiter.job == job).unwrap_or(0);
            Waiting::ForKey {
                key: key_seen(model, key, MAX_LISTED),
                place: narrow(place + 1),
                limit: admin.unwrap_or_else(|| row.concurrency().map_or(1, |rules| rules.limit)),
                limit_is_admin: admin.is_some(),
                refusal: row.refusal.clone(),
            }
        }),
        _ => None,
    };
    let running = row.host.and_then(|host| model.host_names.get(&host).cloned()).zip(row.digest);
    let keys = row.keys.iter().flatten().filter_map(|key| model.keys.get(key)).map(|key| key.text.clone());
    Some(JobDetails {
        summary: summary(row),
        payload: row.job.payload.clone(),
        metadata: row.job.metadata.clone(),
        trace_parent: row.job.trace_parent.clone(),
        unique_key: row.job.unique_key.clone(),
        explicit: row.job.explicit.clone(),
        stamp: row.stamp.as_deref().cloned(),
        keys: keys.collect(),
        running: running.filter(|_| row.place == Place::Running),
        waiting,
        result: row.result.clone(),
        error: row.error.clone(),
        audit: row.audit.clone(),
        progress: row.progress.iter().map(|(name, percent)| (name.clone(), *percent)).collect(),
        dropped: row.dropped,
    })
}
