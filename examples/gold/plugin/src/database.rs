//! Saving to the game's own database, which accepts ten connections: inside at once, and copies that may be late.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::warp::job::state;
use crate::{Answer, Failure, number, purse};

const GAUGE: &str = "gauge";
const INSIDE: &str = "inside";
const MOST: &str = "most";

/// A save that waits for company in vain goes on alone after this long.
const PATIENCE: Duration = Duration::from_secs(10);
const GLANCE: Duration = Duration::from_millis(5);

#[derive(Deserialize)]
pub struct Save {
    /// The connection is kept until so many saves have been inside at once, then for `millis` more. Without it a slow
    /// disk could keep saves so far apart that the limit is never reached, and nothing would be learned.
    crowd: i64,
    millis: u64,
}

/// Uses a connection for a while and leaves behind how many were in use at most.
///
/// The gauge is written at once (`commit = "now"`), up after the slot was granted and down before it is given back,
/// so it never shows more than hold a slot.
pub fn save(save: &Save) -> Answer {
    let inside = state::add(GAUGE, INSIDE, "1")?;
    raise(&inside)?;
    let begin = Instant::now();
    while number(GAUGE, MOST)? < save.crowd && begin.elapsed() < PATIENCE {
        sleep(GLANCE);
    }
    sleep(Duration::from_millis(save.millis));
    state::add(GAUGE, INSIDE, "-1")?;
    Ok(None)
}

/// What the gauge has shown, as a JSON object.
pub fn gauge() -> Answer {
    Ok(Some(serde_json::json!({ "inside": number(GAUGE, INSIDE)?, "most": number(GAUGE, MOST)? }).to_string()))
}

/// Remembers the largest number seen, whoever else does the same meanwhile.
fn raise(inside: &str) -> Result<(), Failure> {
    let number = |text: &str| text.parse::<i64>().map_err(|_| Failure::Permanent(format!("the gauge shows {text:?}")));
    loop {
        let most = state::get(GAUGE, MOST)?;
        if most.as_deref().map_or(Ok(0), number)? >= number(inside)? {
            return Ok(());
        }
        if state::compare_and_set(GAUGE, MOST, most.as_deref(), Some(inside))? {
            return Ok(());
        }
    }
}

#[derive(Deserialize)]
pub struct Copy {
    player_id: u32,
}

/// A copy to be saved later, outside the lock. The token tells the database which of two copies is the newer.
pub fn copy(copy: &Copy, token: Option<String>) -> Answer {
    let token = token.ok_or_else(|| Failure::Permanent("a copy is made under the player's mutex, and this run has no slot".to_owned()))?;
    let gold = number("balances", &purse::key(copy.player_id))?;
    Ok(Some(serde_json::json!({ "player_id": copy.player_id, "token": token, "gold": gold }).to_string()))
}

/// The release that never runs.
pub fn leak() -> Answer {
    panic!("the connection was dropped between acquire and release");
}
