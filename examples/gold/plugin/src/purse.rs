//! Gold alone: credits, trades between two players, and what everybody owns.

use std::collections::BTreeMap;
use std::hint::black_box;

use serde::Deserialize;

use crate::warp::job::state;
use crate::{Answer, Failure, number};

#[derive(Deserialize)]
pub struct Credit {
    player_id: u32,
    gold: i64,
}

/// `player.gold = player.gold + amount`, as the three steps that it is.
pub fn credit(bucket: &str, credit: &Credit) -> Answer {
    let key = key(credit.player_id);
    let before = number(bucket, &key)?;
    let after = before + reward(credit.gold);
    state::set(bucket, &key, &after.to_string())?;
    Ok(None)
}

#[derive(Deserialize)]
pub struct Trade {
    from: u32,
    to: u32,
    /// What `from` pays.
    pays: i64,
    /// What `to` gives back.
    change: i64,
}

/// Gold goes both ways; the sum of the two purses is the same afterwards.
pub fn trade(trade: &Trade) -> Answer {
    if trade.from == trade.to {
        return Err(Failure::Permanent("a player cannot trade with himself".to_owned()));
    }
    let (payer, payee) = (key(trade.from), key(trade.to));
    let (from, to) = (number("balances", &payer)?, number("balances", &payee)?);
    let moved = reward(trade.pays - trade.change);
    // Checked before the first write: after it there would be something to put back.
    if from < moved || to < -moved {
        return Err(Failure::Permanent(format!("{from} and {to} gold are not enough to move {moved}")));
    }
    state::set("balances", &payer, &(from - moved).to_string())?;
    state::set("balances", &payee, &(to + moved).to_string())?;
    Ok(None)
}

#[derive(Deserialize)]
pub struct Balance {
    bucket: String,
    players: Vec<u32>,
}

/// What each of some players owns, as a JSON object.
pub fn balance(balance: &Balance) -> Answer {
    let owned = |player: &u32| Ok((player.to_string(), number(&balance.bucket, &key(*player))?));
    let gold: BTreeMap<String, i64> = balance.players.iter().map(owned).collect::<Result<_, Failure>>()?;
    Ok(Some(serde_json::json!(gold).to_string()))
}

/// The name of a player's gold in every bucket.
pub fn key(player_id: u32) -> String {
    format!("gold:{player_id}")
}

/// Stands for the rules of the game between reading and writing: some hundred microseconds that come to `amount`.
pub fn reward(amount: i64) -> i64 {
    let mut luck = black_box(0x9e37_79b9_7f4a_7c15_u64);
    for _ in 0..100_000 {
        luck ^= luck << 13;
        luck ^= luck >> 7;
        luck ^= luck << 17;
    }
    black_box(luck);
    amount
}
