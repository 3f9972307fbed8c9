//! `keys` and `limits`: who holds, who waits, and the operator's word.

use warp_domain::UnixMillis;
use warp_store::{HolderSeen, KeySeen, Store, WaiterSeen};

use crate::args::{KeysCommand, LimitsCommand};
use crate::clock::rfc3339;
use crate::failure::{Failure, Outcome};
use crate::{json, text};

/// Runs one of `keys`.
///
/// # Errors
/// A key that nobody has used (3), or what the store says.
pub async fn keys(command: &KeysCommand, store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    match command {
        KeysCommand::List { limit } => {
            let keys = store.keys(*limit).await?;
            if as_json {
                return text::print_json(&keys.iter().map(json::Key::from).collect::<Vec<_>>());
            }
            if keys.is_empty() {
                text::note("nobody holds or waits for a key");
                return Ok(());
            }
            let row = |key: &KeySeen| {
                [
                    key.key.clone(),
                    key.holders.len().to_string(),
                    limit_in_force(key),
                    key.waiting.to_string(),
                    key.holders.iter().map(|holder| holder.since).min().map_or_else(String::new, |since| text::age(since, now)),
                ]
            };
            text::print(text::table(["KEY", "HELD", "LIMIT", "WAITING", "HELD FOR"], keys.iter().map(row)))
        }
        KeysCommand::Show { key } => {
            let seen = store.key(key).await?.ok_or_else(|| Failure::not_found(format!("no job has used the key {key:?}")))?;
            if as_json {
                return text::print_json(&json::Key::from(&seen));
            }
            show(&seen, now)
        }
    }
}

/// The limit that an operator set, or the ones that the jobs carry: they may differ after a plugin was replaced.
fn limit_in_force(key: &KeySeen) -> String {
    if let Some(limit) = key.admin_limit {
        return format!("{limit} (admin)");
    }
    let mut limits: Vec<u32> = key.holders.iter().map(|holder| holder.limit).chain(key.waiters.iter().map(|waiter| waiter.limit)).collect();
    limits.sort_unstable();
    limits.dedup();
    limits.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn show(key: &KeySeen, now: UnixMillis) -> Outcome {
    text::print(format!("key      {}", text::line(&key.key)))?;
    text::print(match key.admin_limit {
        Some(0) => "limit    0, set by an operator: the key is paused".to_owned(),
        Some(limit) => format!("limit    {limit}, set by an operator; it outranks what is stamped on the jobs"),
        None if key.holders.is_empty() && key.waiters.is_empty() => "limit    none set by an operator; each job carries its own".to_owned(),
        None => format!("limit    {}, as stamped on each job; an admin limit would outrank them", limit_in_force(key)),
    })?;
    let holder = |holder: &HolderSeen| {
        [
            holder.slot.to_string(),
            holder.job.to_string(),
            holder.contract.clone(),
            holder.host.clone().unwrap_or_else(|| "(reserved)".to_owned()),
            holder.limit.to_string(),
            text::age(holder.since, now),
        ]
    };
    text::print(format!("\nheld by {}", text::count(key.holders.len() as u64, "job")))?;
    if !key.holders.is_empty() {
        text::print(text::table(["SLOT", "JOB", "CONTRACT", "HOST", "LIMIT", "FOR"], key.holders.iter().map(holder)))?;
    }
    let waiter = |(at, waiter): (usize, &WaiterSeen)| {
        [
            (at + 1).to_string(),
            waiter.job.to_string(),
            waiter.contract.clone(),
            waiter.limit.to_string(),
            waiter.weight.to_string(),
            text::age(waiter.since, now),
            if waiter.claimable { "" } else { "no live host runs it" }.to_owned(),
        ]
    };
    text::print(format!("\n{} in line", text::count(u64::from(key.waiting), "job")))?;
    if !key.waiters.is_empty() {
        let rows = key.waiters.iter().enumerate().map(waiter);
        text::print(text::table(["PLACE", "JOB", "CONTRACT", "LIMIT", "WEIGHT", "FOR", ""], rows))?;
    }
    Ok(())
}

/// Runs one of `limits`. `user` is who set it unless the arguments name somebody.
///
/// # Errors
/// A limit that is not there (3), or what the store says.
pub async fn limits(command: &LimitsCommand, store: &dyn Store, as_json: bool, user: &str, now: UnixMillis) -> Outcome {
    match command {
        LimitsCommand::List => {
            let limits = store.limits().await?;
            if as_json {
                return text::print_json(&limits.iter().map(json::Limit::from).collect::<Vec<_>>());
            }
            if limits.is_empty() {
                text::note("no limits are set; what jobs declare counts");
                return Ok(());
            }
            let rows = limits.iter().map(|limit| [limit.key.clone(), limit.limit.to_string(), limit.set_by.clone(), rfc3339(limit.set_at)]);
            text::print(text::table(["KEY", "LIMIT", "SET BY", "SET AT"], rows))
        }
        LimitsCommand::Set { key, limit, by } => {
            let seen = store.set_limit(key, *limit, by.as_deref().unwrap_or(user), now).await?;
            if as_json {
                return text::print_json(&json::Key::from(&seen));
            }
            text::print(match limit {
                0 => format!("`{}` is paused: nothing new starts, nobody is skipped", text::line(key)),
                limit => format!("at most {limit} at a time run for `{}`", text::line(key)),
            })?;
            if seen.holders.len() > *limit as usize {
                text::note(format!(
                    "{} slots are taken, more than that; nobody is stopped, and nothing new starts until they are fewer",
                    seen.holders.len()
                ));
            }
            Ok(())
        }
        LimitsCommand::Remove { key } => {
            let removed = store.remove_limit(key, now).await?;
            if as_json {
                text::print_json(&json::LimitRemoved { key: key.clone(), removed })?;
            }
            if !removed {
                return Err(Failure::not_found(format!("no limit is set for {key:?}")));
            }
            if !as_json {
                text::print(format!("what jobs declare counts again for `{}`", text::line(key)))?;
            }
            Ok(())
        }
    }
}
