//! `hosts` and `queues`: who runs, and who may start nothing new.

use warp_domain::UnixMillis;
use warp_store::{HostSeen, Store};

use crate::args::{HostsCommand, QueuesCommand};
use crate::clock::rfc3339;
use crate::failure::{Failure, Outcome};
use crate::{json, text};

/// Runs one of `hosts`. `user` is who paused it unless the arguments name somebody.
///
/// # Errors
/// A host that is not registered (3), or what the store says.
pub async fn hosts(command: &HostsCommand, store: &dyn Store, as_json: bool, user: &str, now: UnixMillis) -> Outcome {
    match command {
        HostsCommand::List => list_hosts(store, as_json, now).await,
        HostsCommand::Pause { name, by } => {
            let changed = store.pause_host(named(store, name).await?.host, by.as_deref().unwrap_or(user), now).await?;
            say(as_json, "host", name, true, changed)
        }
        HostsCommand::Resume { name } => {
            let changed = store.resume_host(named(store, name).await?.host, now).await?;
            say(as_json, "host", name, false, changed)
        }
    }
}

/// Runs one of `queues`. `user` is who paused it unless the arguments name somebody.
///
/// # Errors
/// A name that no queue can have (2), or what the store says.
pub async fn queues(command: &QueuesCommand, store: &dyn Store, as_json: bool, user: &str, now: UnixMillis) -> Outcome {
    match command {
        QueuesCommand::List => {
            let paused = store.paused_queues().await?;
            if as_json {
                return text::print_json(&paused.iter().map(json::PausedQueue::from).collect::<Vec<_>>());
            }
            if paused.is_empty() {
                text::note("no queue is paused");
                return Ok(());
            }
            let rows = paused.iter().map(|(queue, pause)| [queue.clone(), pause.by.clone(), rfc3339(pause.at)]);
            text::print(text::table(["QUEUE", "PAUSED BY", "PAUSED AT"], rows))
        }
        QueuesCommand::Pause { queue, by } => {
            check(queue)?;
            let changed = store.pause_queue(queue, by.as_deref().unwrap_or(user), now).await?;
            say(as_json, "queue", queue, true, changed)
        }
        QueuesCommand::Resume { queue } => {
            check(queue)?;
            let changed = store.resume_queue(queue, now).await?;
            say(as_json, "queue", queue, false, changed)
        }
    }
}

fn check(queue: &str) -> Outcome {
    warp_store::codec::check_name("queue", queue).map_err(Failure::usage)
}

/// That it was so already is no failure: what was asked for is true.
fn say(as_json: bool, what: &'static str, name: &str, paused: bool, changed: bool) -> Outcome {
    if as_json {
        return text::print_json(&json::PauseChanged { what, name: name.to_owned(), paused, changed });
    }
    let name = text::line(name);
    text::print(match (paused, changed) {
        (true, true) => format!("the {what} `{name}` starts nothing new; what runs goes on"),
        (true, false) => format!("the {what} `{name}` was paused already"),
        (false, true) => format!("the {what} `{name}` goes on"),
        (false, false) => format!("the {what} `{name}` was not paused"),
    })
}

async fn named(store: &dyn Store, name: &str) -> Outcome<HostSeen> {
    let hosts = store.hosts().await?;
    let found = hosts.into_iter().find(|host| host.name == name);
    found.ok_or_else(|| Failure::not_found(format!("no host {name:?} is registered; `warp-host hosts list` names them")))
}

async fn list_hosts(store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    let hosts = store.hosts().await?;
    if as_json {
        return text::print_json(&hosts.iter().map(json::Host::from).collect::<Vec<_>>());
    }
    if hosts.is_empty() {
        text::note("no host is registered; `warp-host run` starts one");
        return Ok(());
    }
    let row = |host: &HostSeen| {
        [
            host.name.clone(),
            host.running.to_string(),
            text::age(host.started_at, now),
            format!("{} ago", text::age(host.renewed_at, now)),
            host.paused.as_ref().map_or_else(String::new, |pause| format!("paused by {}", pause.by)),
        ]
    };
    text::print(text::table(["HOST", "RUNNING", "UP FOR", "LAST HEARD", ""], hosts.iter().map(row)))
}
