//! `locks`: what slots are made of, which is the database's word and not a host's.

use warp_domain::UnixMillis;
use warp_store_postgres::{ConnectSettings, LocksInUse, LocksSeen};

use crate::args::{Locks, LocksCommand};
use crate::clock::{self, rfc3339};
use crate::config::Config;
use crate::failure::{Exit, Failure, Outcome};
use crate::stores::{self, Place};
use crate::{json, text};

/// Runs one of them. `user` is who set it unless the arguments name somebody.
///
/// # Errors
/// A SQLite file, which has no choice (4), slots that are held or hosts that run (4), or what the store says.
pub async fn run(command: &LocksCommand, config: &Config, user: &str) -> Outcome {
    match (stores::place(config)?, command) {
        (Place::Postgres(settings), LocksCommand::Show) => show(&settings, config.json).await,
        (Place::Postgres(settings), LocksCommand::Set { kind, by }) => {
            set(&settings, *kind, by.as_deref().unwrap_or(user), clock::now(), config.json).await
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

async fn set(settings: &ConnectSettings, kind: Locks, by: &str, now: UnixMillis, as_json: bool) -> Outcome {
    match warp_store_postgres::set_locks(settings, stores::kind_of(kind), by, now).await? {
        Ok(()) if as_json => show(settings, true).await,
        Ok(()) => text::print(format!("slots are made of {} locks from now on", kind.name())),
        Err(LocksInUse { hosts, slots }) => {
            let mut first = Vec::new();
            if !hosts.is_empty() {
                first.push(format!("stop {} ({})", text::count(hosts.len() as u64, "host"), text::short(&hosts.join(", "), 200)));
            }
            if slots > 0 {
                first.push(format!("let {} be given back", text::count(slots, "slot")));
            }
            // A host that was killed is registered until another one has given its jobs back.
            Err(Failure::new(Exit::Refused, format!("two kinds of slots on one key would exclude nobody; first {}", first.join(", and "))))
        }
    }
}
