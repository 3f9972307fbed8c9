//! The game server's handlers, one component for all of them.
//!
//! What must stay true: [`purse::credit`] is one function for the credit with the mutex, for the one without and for
//! the one that goes round it; they differ in the manifest and in the bucket that they write, and in nothing else.
//! That is what makes the story an experiment.
//!
//! It deliberately uses no `add` and no `compare-and-set` for gold. Both would hide the bug on one number, and
//! neither would help a loot drop, which has to change two.

mod database;
mod inventory;
mod purse;

use serde::de::DeserializeOwned;
use warp::job::state;

wit_bindgen::generate!({ path: "../../../wit/warp-job@1.0.0", world: "stateful-handler" });

/// What every handler answers.
type Answer = Result<Option<String>, Failure>;

struct Gold;
export!(Gold);

impl Guest for Gold {
    fn handle(attempt: Attempt) -> Answer {
        match attempt.handler.as_str() {
            "credit" => purse::credit("purses", &read(&attempt)?),
            "credit-locked" | "credit-bypass" => purse::credit("balances", &read(&attempt)?),
            "trade" => purse::trade(&read(&attempt)?),
            "balance" => purse::balance(&read(&attempt)?),
            "save" => database::save(&read(&attempt)?),
            "save-copy" => database::copy(&read(&attempt)?, attempt.fencing_token),
            "gauge" => database::gauge(),
            "leak" => database::leak(),
            "loot" => inventory::loot(&read(&attempt)?),
            "make-room" => inventory::make_room(&read(&attempt)?),
            "inventory" => inventory::show(&read(&attempt)?),
            other => Err(Failure::Permanent(format!("this plugin has no handler `{other}`"))),
        }
    }
}

/// The payload as a handler wants it.
fn read<T: DeserializeOwned>(attempt: &Attempt) -> Result<T, Failure> {
    serde_json::from_str(&attempt.payload)
        .map_err(|error| Failure::Permanent(format!("the payload is not what this handler takes: {error}")))
}

/// A number of shared state; what is not there counts as 0.
fn number(bucket: &str, key: &str) -> Result<i64, Failure> {
    let Some(text) = state::get(bucket, key)? else { return Ok(0) };
    text.parse().map_err(|_| Failure::Permanent(format!("`{key}` in bucket `{bucket}` holds {text:?}, which is no number")))
}

impl From<state::Error> for Failure {
    /// A database that did not answer may answer next time; nothing else changes by waiting.
    fn from(error: state::Error) -> Self {
        match error {
            state::Error::Unavailable(why) => Failure::Retryable(why),
            state::Error::Denied(why) | state::Error::NotANumber(why) | state::Error::TooLarge(why) => Failure::Permanent(why),
        }
    }
}
