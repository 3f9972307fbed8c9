//! `status`: the whole at a glance.

use warp_domain::ending::State;
use warp_store::Store;

use crate::failure::Outcome;
use crate::{json, text};

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
    for (queue, pause) in &overview.paused_queues {
        text::print(format!("\nthe queue `{}` is paused by {}", text::line(queue), text::line(&pause.by)))?;
    }
    let served: Vec<_> = served.iter().map(|name| text::line(name)).collect();
    text::print(if served.is_empty() {
        "\nno live host runs anything".to_owned()
    } else {
        format!("\nlive hosts run {}", served.join(", "))
    })
}
