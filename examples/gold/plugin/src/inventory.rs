//! A loot drop: gold and an item, which have to come together.

use serde::Deserialize;

use crate::warp::job::state;
use crate::{Answer, Failure, number, purse};

/// What fits into a bag.
const BAG: usize = 2;

/// When writes become visible: the bucket that has been declared so.
#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum Commit {
    Now,
    Settle,
}

impl Commit {
    fn bucket(self) -> &'static str {
        match self {
            Commit::Now => "inventory-now",
            Commit::Settle => "inventory",
        }
    }
}

#[derive(Deserialize)]
pub struct Loot {
    player_id: u32,
    gold: i64,
    item: String,
    commit: Commit,
}

/// Adds the gold, then the item, and finds out between the two that the bag is full.
///
/// It would be better to look first. It does not, because the story is about what becomes of the gold.
pub fn loot(loot: &Loot) -> Answer {
    let bucket = loot.commit.bucket();
    let gold = purse::key(loot.player_id);
    let after = number(bucket, &gold)? + purse::reward(loot.gold);
    state::set(bucket, &gold, &after.to_string())?;

    let mut bag = bag(bucket, loot.player_id)?;
    assert!(bag.len() < BAG, "the bag is full");
    bag.push(loot.item.clone());
    put(bucket, loot.player_id, &bag)?;
    Ok(None)
}

#[derive(Deserialize)]
pub struct Player {
    player_id: u32,
    commit: Commit,
}

/// Drops the oldest item of the bag.
pub fn make_room(player: &Player) -> Answer {
    let bucket = player.commit.bucket();
    let mut bag = bag(bucket, player.player_id)?;
    if !bag.is_empty() {
        bag.remove(0);
    }
    put(bucket, player.player_id, &bag)?;
    Ok(None)
}

/// Gold and bag of a player.
pub fn show(player: &Player) -> Answer {
    let bucket = player.commit.bucket();
    let gold = number(bucket, &purse::key(player.player_id))?;
    Ok(Some(serde_json::json!({ "gold": gold, "bag": bag(bucket, player.player_id)? }).to_string()))
}

fn bag(bucket: &str, player_id: u32) -> Result<Vec<String>, Failure> {
    let Some(text) = state::get(bucket, &bag_key(player_id))? else { return Ok(Vec::new()) };
    serde_json::from_str(&text).map_err(|error| Failure::Permanent(format!("player {player_id}'s bag is damaged: {error}")))
}

fn put(bucket: &str, player_id: u32, bag: &[String]) -> Result<(), Failure> {
    Ok(state::set(bucket, &bag_key(player_id), &serde_json::json!(bag).to_string())?)
}

fn bag_key(player_id: u32) -> String {
    format!("bag:{player_id}")
}
