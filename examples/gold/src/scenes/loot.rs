//! A loot drop whose bag is full: gold first, then the trap. What is left depends on when writes become visible.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::report::Rows;
use crate::stage::{Stage, Theatre};

use super::Size;

const PLAYER: u32 = 17;
const GOLD: i64 = 100;

pub fn half_done(theatre: &Theatre, _: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("g")?;
    stage.start_hosts(4)?;

    // Each write at once: the gold is paid, the item is not there, and running it again pays a second time.
    let (failed, repeated) = drop_into_full_bag(&mut stage, "now")?;
    rows.add(
        "commit = \"now\": after the failed drop",
        "half-done: its gold, not its item",
        words(&failed),
        failed == inventory(3 * GOLD, ["sword", "shield"]),
    );
    rows.add(
        "commit = \"now\": run again with room",
        "its gold twice",
        words(&repeated),
        repeated == inventory(4 * GOLD, ["shield", "crown"]),
    );

    // With the settle: all or nothing, so running it again is right.
    let (failed, repeated) = drop_into_full_bag(&mut stage, "settle")?;
    rows.add(
        "commit = \"settle\": after the failed drop",
        "nothing of it",
        words(&failed),
        failed == inventory(2 * GOLD, ["sword", "shield"]),
    );
    rows.add(
        "commit = \"settle\": run again with room",
        "right: its gold once, its item",
        words(&repeated),
        repeated == inventory(3 * GOLD, ["shield", "crown"]),
    );
    stage.stop_hosts()
}

/// Two drops fill the bag, a third fails; the inventory then, and after room was made and the job requeued.
fn drop_into_full_bag(stage: &mut Stage<'_>, commit: &str) -> Result<(Value, Value)> {
    let player = json!({ "player_id": PLAYER, "commit": commit });
    let drop = |item: &str| json!({ "player_id": PLAYER, "gold": GOLD, "item": item, "commit": commit });
    for item in ["sword", "shield"] {
        stage.enqueue("loot", &[drop(item)])?;
        stage.wait()?;
    }
    let ids = stage.enqueue("loot", &[drop("crown")])?;
    stage.wait()?;
    let job = stage.job(&ids[0])?;
    ensure!(job["state"] == "Failed", "a drop into a full bag is {}", job["state"]);
    let failed = stage.result_of("inventory", player.clone())?;

    stage.enqueue("make-room", std::slice::from_ref(&player))?;
    stage.wait()?;
    stage.requeue(&ids[0])?;
    stage.wait()?;
    let job = stage.job(&ids[0])?;
    ensure!(job["state"] == "Completed", "the same drop with room is {}: {}", job["state"], job["error"]);
    Ok((failed, stage.result_of("inventory", player)?))
}

fn inventory(gold: i64, bag: [&str; 2]) -> Value {
    json!({ "gold": gold, "bag": bag })
}

fn words(inventory: &Value) -> String {
    let items: Vec<&str> = inventory["bag"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    format!("{} gold, {}", inventory["gold"], items.join(" and "))
}
