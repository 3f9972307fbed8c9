//! `locks`: what slots are made of, which is the database's word and not a host's.
//!
//! What must stay true: the kind changes only in a transaction that has seen no host and no slot. Whoever waits for that
//! takes a host for dead as hosts do, and for no other reason: its renewals stood still for a lease while they were
//! watched, on this machine's clock.

use std::collections::HashMap;
use std::time::Duration;

use warp_domain::{HostId, UnixMillis};
use warp_store::{HostSeen, Rescued, Store as _};
use warp_store_postgres::{ConnectSettings, LockKind, LocksInUse, LocksSeen, OpenOptions, PostgresStore};
use warp_worker::{HostConfig, Surroundings as _, Watch};

use crate::args::{Locks, LocksCommand};
use crate::clock::{self, rfc3339};
use crate::config::Config;
use crate::failure::{Exit, Failure, Outcome};
use crate::stores::{self, Place};
use crate::system::System;
use crate::{json, text};

/// How often a database is looked at while somebody waits.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs one of them. `user` is who set it unless the arguments name somebody.
///
/// # Errors
/// A SQLite file, which has no choice (4), slots that are held or hosts that run (4), or what the store says.
pub async fn run(command: &LocksCommand, config: &Config, user: &str) -> Outcome {
    match (stores::place(config)?, command) {
        (Place::Postgres(settings), LocksCommand::Show) => show(&settings, config.json).await,
        (Place::Postgres(settings), LocksCommand::Set { kind, by, wait }) => {
            let change = Change { settings: &settings, kind: *kind, by: by.as_deref().unwrap_or(user), lease: config.lease.value };
            match change.make().await? {
                Ok(()) => {}
                Err(in_use) => match wait {
                    Some(patience) => change.wait(in_use, *patience).await?,
                    None => return Err(change.refused(&in_use)),
                },
            }
            if config.json {
                show(&settings, true).await
            } else {
                text::print(format!("slots are made of {} locks from now on", kind.name()))
            }
        }
        (Place::Sqlite(_), LocksCommand::Show) if config.json => {
            text::print_json(&json::LocksSeen { locks: "ledger", set_by: None, set_at: None })
        }
        (Place::Sqlite(_), LocksCommand::Show) => text::print("ledger, as in every SQLite file"),
        (Place::Sqlite(_), LocksCommand::Set { .. }) => Err(Failure::new(Exit::Refused, stores::ONLY_LEDGER)),
    }
}

async fn show(settings: &ConnectSettings, as_json: bool) -> Outcome {
    let LocksSeen { kind, set_by, set_at } = warp_store_postgres::locks(settings).await?;
    if as_json {
        return text::print_json(&json::LocksSeen { locks: kind.name(), set_by: Some(set_by), set_at: set_at.map(rfc3339) });
    }
    let when = set_at.map_or_else(|| "when the schema was made".to_owned(), |at| format!("at {}", rfc3339(at)));
    text::print(format!("{kind}, set by {} {when}", text::line(&set_by)))
}

/// What is wanted.
struct Change<'a> {
    settings: &'a ConnectSettings,
    kind: Locks,
    by: &'a str,
    /// For how long a host must be seen standing still to be taken for dead.
    lease: Duration,
}

impl Change<'_> {
    /// Makes it, or says what is in the way.
    async fn make(&self) -> Outcome<Result<(), LocksInUse>> {
        let kind: LockKind = stores::kind_of(self.kind);
        Ok(warp_store_postgres::set_locks(self.settings, kind, self.by, clock::now()).await?)
    }

    fn refused(&self, in_use: &LocksInUse) -> Failure {
        let LocksInUse { hosts, slots: _ } = in_use;
        let what = obstacles(in_use);
        let todo = if hosts.is_empty() {
            "try again in a moment".to_owned()
        } else {
            format!(
                "stop what runs; a host that was killed is taken for dead when it has been watched for {} without renewing, by a host that runs \
                 or by `warp-host locks set {} --wait`",
                text::rough(self.lease),
                self.kind.name()
            )
        };
        Failure::new(Exit::Refused, format!("two kinds of slots on one key would exclude nobody, and there is {what}; {todo}"))
    }

    /// Until it is made, or for so long. Dropped between two looks, it leaves the hosts that it has rescued so far rescued.
    async fn wait(&self, mut in_use: LocksInUse, patience: Duration) -> Outcome {
        text::note(format!(
            "waiting for {} at most: there is {}; a host that does not renew for {} from now on is taken for dead",
            text::rough(patience),
            obstacles(&in_use),
            text::rough(self.lease)
        ));
        let store = PostgresStore::open(OpenOptions { hosting: false, ..OpenOptions::new(self.settings.clone()) }).await?;
        let (system, mut watch, mut first) = (System::new(), Watch::default(), HashMap::new());
        let over = system.boot().saturating_add(patience);
        loop {
            let hosts = store.hosts().await?;
            note_the_living(&hosts, &mut first);
            for (host, renewals) in watch.observe(&hosts, None, system.boot(), self.lease) {
                self.rescue(&store, &hosts, host, renewals, clock::now()).await?;
            }
            match self.make().await? {
                Ok(()) => return Ok(()),
                Err(still) => in_use = still,
            }
            if system.boot() >= over {
                return Err(self.refused(&in_use));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// B5, by hand: no host may be left to do it.
    async fn rescue(&self, store: &PostgresStore, hosts: &[HostSeen], host: HostId, renewals: i64, now: UnixMillis) -> Outcome {
        let max_deaths = HostConfig::new("", 1).max_host_deaths;
        let Rescued { requeued, exhausted } = store.rescue(host, renewals, max_deaths, now).await?;
        let name = hosts.iter().find(|seen| seen.host == host).map_or("", |seen| &seen.name);
        let jobs = text::count(u64::from(requeued), "job");
        let failed = if exhausted > 0 { format!(", {} Failed", text::count(u64::from(exhausted), "job")) } else { String::new() };
        text::note(format!(
            "{} did not renew for {} and was taken for dead: {jobs} given back{failed}",
            text::short(name, 200),
            text::rough(self.lease)
        ));
        Ok(())
    }
}

/// Says once of each host that it lives: nobody but its operator ends it. `first` holds the counter that a host was first
/// seen with, or nothing when it was told of.
fn note_the_living(hosts: &[HostSeen], first: &mut HashMap<HostId, Option<i64>>) {
    for seen in hosts {
        let first = first.entry(seen.host).or_insert(Some(seen.renewals));
        if first.is_some_and(|renewals| renewals != seen.renewals) {
            *first = None;
            text::note(format!("the host {} is running: stop it", text::short(&seen.name, 200)));
        }
    }
}

/// `the host a:1, silent for 7s, and 2 slots that are held`.
fn obstacles(LocksInUse { hosts, slots }: &LocksInUse) -> String {
    let mut what: Vec<String> =
        hosts.iter().map(|(name, silent)| format!("the host {}, silent for {}", text::short(name, 200), text::rough(*silent))).collect();
    if *slots > 0 {
        what.push(format!("{} that {} held", text::count(*slots, "slot"), if *slots == 1 { "is" } else { "are" }));
    }
    match what.pop() {
        Some(last) if what.is_empty() => last,
        Some(last) => format!("{} and {last}", what.join(", ")),
        None => "something in the way".to_owned(),
    }
}
