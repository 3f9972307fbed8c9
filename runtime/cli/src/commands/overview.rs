//! `hosts` and `status`: the whole at a glance.

use warp_domain::UnixMillis;
use warp_domain::ending::State;
use warp_store::{HostSeen, Store};

use crate::failure::Outcome;
use crate::{json, text};

/// `hosts list`.
///
/// # Errors
/// What the store says.
pub async fn hosts(store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    let hosts = store.hosts().await?;
    if as_json {
        return text::print_json(&hosts.iter().map(json::Host::from).collect::<Vec<_>>());
    }
    if hosts.is_empty() {
        text::note("no host is registered; `warp-host run` starts one");
        return Ok(());
    }
    let row = |host: &HostSeen| {
        [host.name.clone(), host.running.to_string(), text::age(host.started_at, now), format!("{} ago", text::age(host.renewed_at, now))]
    };
    text::print(text::table(["HOST", "RUNNING", "UP FOR", "LAST HEARD"], hosts.iter().map(row)))
}

/// `status`.
///
/// # Errors
/// What the store says.
pub async fn status(store: &dyn Store, as_json: bool) -> Outcome {
    let overview = store.overview().await?;
    let served = store.served_contracts().await?;
    if as_json {
        return text::print_json(&json::Status::new(&overview, served));
    }
    let row = |state: State| {
        let jobs = overview.states.get(&state).copied().unwrap_or(0);
        let note = match state {
            State::Enqueued if overview.parked > 0 => format!("{} of them wait for a key", overview.parked),
            _ => String::new(),
        };
        [state.name().to_owned(), jobs.to_string(), note]
    };
    text::print(text::table(["STATE", "JOBS", ""], State::ALL.into_iter().map(row)))?;
    if !overview.counters.is_empty() {
        let rows = overview.counters.iter().map(|(name, value)| [name.clone(), value.to_string()]);
        text::print(format!("\n{}", text::table(["COUNTER", "VALUE"], rows)))?;
    }
    let served: Vec<_> = served.iter().map(|name| text::line(name)).collect();
    text::print(if served.is_empty() {
        "\nno live host runs anything".to_owned()
    } else {
        format!("\nlive hosts run {}", served.join(", "))
    })
}
