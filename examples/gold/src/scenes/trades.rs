//! Two players who trade with each other, each the first to act: the classic deadlock, were the keys taken one by one.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Size;
use crate::report::{Rows, grouped};
use crate::stage::Theatre;

const START: i64 = 100_000;

pub fn opposite(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("d")?;
    let start = |player: u32| json!({ "player_id": player, "gold": START });
    stage.enqueue("credit-locked", &[start(17), start(42)])?;
    stage.start_hosts(16)?;
    stage.wait()?;

    // Amounts differ from trade to trade, so that two lost ones cannot make up for each other.
    let (mut payloads, mut to_42): (Vec<Value>, i64) = (Vec::new(), 0);
    for at in 1..=size.trades {
        payloads.push(json!({ "from": 17, "to": 42, "pays": 20 + at, "change": 7 }));
        payloads.push(json!({ "from": 42, "to": 17, "pays": 5 + at, "change": 3 }));
        to_42 += (20 + at - 7) - (5 + at - 3);
    }
    stage.enqueue("trade", &payloads)?;
    let status = stage.wait()?;
    let trades = status.jobs("Completed") as i64 - 2;
    let gold = stage.result_of("balance", json!({ "bucket": "balances", "players": [17, 42] }))?;
    stage.stop_hosts()?;

    let of = |player: &str| gold[player].as_i64().with_context(|| format!("no balance of player {player} in {gold}"));
    let (a, b) = (of("17")?, of("42")?);
    rows.add(
        "trades between 17 and 42, both ways at once",
        format!("{} trades, {} + {}", 2 * size.trades, grouped(START - to_42), grouped(START + to_42)),
        format!("{trades} trades, {} + {} = {}", grouped(a), grouped(b), grouped(a + b)),
        trades == 2 * size.trades && (a, b) == (START - to_42, START + to_42),
    );
    Ok(())
}
