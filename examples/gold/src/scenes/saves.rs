//! The game's own database: ten connections, and copies that arrive in the wrong order.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Size;
use crate::outside::{Copy, SavedPlayers};
use crate::report::{Rows, grouped};
use crate::stage::{Stage, Theatre, text};

pub const KEY: &str = "database";
pub const CONNECTIONS: usize = 10;
const WORKERS: usize = 64;
const MILLIS: u64 = 20;

pub fn ten_connections(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    // First without the limit: if no eleventh came in then, a limit of ten would prove nothing.
    let mut stage = theatre.stage("e-unlimited")?;
    stage.start_hosts(WORKERS)?;
    let payloads = payloads(size.saves / 4, CONNECTIONS + 1);
    stage.enqueue_with("save", &payloads, &["--semaphore", "unlimited", "--limit", &WORKERS.to_string()])?;
    let (done, most) = run(&mut stage)?;
    stage.stop_hosts()?;
    let enough = done == payloads.len();
    rows.add(format!("{} saves, {WORKERS} workers, limit {WORKERS}", payloads.len()), "more than 10 inside", inside(done, most), {
        enough && most > CONNECTIONS as u64
    });

    let mut stage = theatre.stage("e")?;
    stage.start_hosts(WORKERS)?;
    let (done, most) = save_all(&mut stage, size.saves)?;
    let hosts = stage.cast();
    stage.stop_hosts()?;
    rows.add(
        format!("{} saves, {WORKERS} workers in {hosts} hosts, limit 10", size.saves),
        "never more than 10 inside, and 10 reached",
        inside(done, most),
        done == size.saves && most == CONNECTIONS as u64,
    );
    Ok(())
}

/// Saves under the limit, and answers how many completed and how many were inside at most.
pub fn save_all(stage: &mut Stage<'_>, saves: usize) -> Result<(usize, u64)> {
    stage.enqueue("save", &payloads(saves, CONNECTIONS))?;
    run(stage)
}

fn payloads(saves: usize, crowd: usize) -> Vec<Value> {
    vec![json!({ "crowd": crowd, "millis": MILLIS }); saves]
}

fn run(stage: &mut Stage<'_>) -> Result<(usize, u64)> {
    let done = stage.wait()?.jobs("Completed") as usize;
    let gauge = stage.result_of("gauge", json!({}))?;
    Ok((done, gauge["most"].as_u64().context("a gauge without `most`")?))
}

fn inside(done: usize, most: u64) -> String {
    format!("{done} saves, at most {most} inside")
}

pub fn wrong_order(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("f")?;
    let ids = {
        // Credits and copies of one player in turn; the key's holders decide what each copy has seen.
        let mut ids = Vec::new();
        for _ in 0..size.copies {
            stage.enqueue("credit-locked", &[json!({ "player_id": 17, "gold": 100 })])?;
            ids.extend(stage.enqueue("save-copy", &[json!({ "player_id": 17 })])?);
        }
        ids
    };
    stage.start_hosts(16)?;
    stage.wait()?;
    stage.stop_hosts()?;
    let mut copies = ids.iter().map(|id| copy(&stage.result(id)?)).collect::<Result<Vec<Copy>>>()?;

    // A larger token is a later holder, so it cannot have seen less gold.
    copies.sort_by_key(|copy| copy.token);
    let in_step = copies.windows(2).all(|pair| pair[0].token < pair[1].token && pair[0].gold <= pair[1].gold);
    rows.add(
        format!("{} copies by fencing token", copies.len()),
        "tokens grow, gold with them",
        if in_step { "they do" } else { "they do not" },
        in_step,
    );

    // The worst way round: every copy after the first to arrive is stale.
    let newest = *copies.last().context("no copies")?;
    let mut saved = SavedPlayers::default();
    let refused = copies.iter().rev().filter(|copy| !saved.save(**copy)).count();
    let careless = copies[0].gold;
    let kept = saved.gold(newest.player).context("nothing was saved")?;
    rows.add(
        "the copies saved in the wrong order",
        format!("{} refused, {} gold saved", copies.len() - 1, grouped(newest.gold)),
        format!("{refused} refused, {} saved (a table that does not look: {})", grouped(kept), grouped(careless)),
        refused == copies.len() - 1 && kept == newest.gold && careless < newest.gold,
    );
    Ok(())
}

fn copy(result: &Value) -> Result<Copy> {
    let player = result["player_id"].as_u64().context("a copy without a player")?;
    let gold = result["gold"].as_i64().context("a copy without gold")?;
    let token = text(&result["token"])?.parse().context("a token is a decimal number")?;
    Ok(Copy { player, token, gold })
}
