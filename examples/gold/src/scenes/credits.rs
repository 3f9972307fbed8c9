//! Read, add, write: without a mutex, with one, and with one while hosts die.

use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::Size;
use crate::report::{Rows, grouped};
use crate::stage::{Stage, Theatre};

const GOLD: i64 = 1_000;
const WORKERS: usize = 16;
/// Few enough that their credits overlap, enough that workers find work while one player's key is held.
const PLAYERS: std::ops::RangeInclusive<u32> = 11..=20;
/// A race, and a kill, may miss. Before that is a finding the scene is played again, each time with more credits, so
/// that on any machine some kill meets running jobs.
const ROUNDS: u32 = 5;
const GROWTH: i64 = 4;

pub fn without_mutex(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("a")?;
    stage.start_hosts(WORKERS)?;
    let mut paid = 0;
    let mut owned = 0;
    for round in 0..ROUNDS {
        paid += credit_all(&stage, "credit", size.credits * GROWTH.pow(round))?;
        stage.wait()?;
        owned = sum(&mut stage, "purses")?;
        if owned != paid {
            break;
        }
    }
    all_completed(&mut stage)?;
    stage.stop_hosts()?;
    rows.add(
        format!("{} credits, no mutex", grouped(paid / GOLD)),
        format!("less than {}", grouped(paid)),
        format!("{}, short by {} ({} lost updates)", grouped(owned), grouped(paid - owned), grouped((paid - owned) / GOLD)),
        owned < paid,
    );
    Ok(())
}

pub fn under_mutex(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("b")?;
    stage.start_hosts(WORKERS)?;
    let paid = credit_all(&stage, "credit-locked", size.credits)?;
    stage.wait()?;
    all_completed(&mut stage)?;
    let owned = sum(&mut stage, "balances")?;
    rows.add(format!("{} credits, mutex", grouped(paid / GOLD)), grouped(paid), grouped(owned), owned == paid);

    // A mutex is a convention, and a path that forgets it races as before: unless the bucket asks for it.
    let ids = stage.enqueue("credit-bypass", &[json!({ "player_id": 17, "gold": GOLD })])?;
    stage.wait()?;
    let job = stage.job(&ids[0])?;
    let refused = job["state"] == "Failed" && job["error"].as_str().is_some_and(|why| why.contains("balances"));
    let still = sum(&mut stage, "balances")?;
    stage.stop_hosts()?;
    rows.add(
        "a write that forgets the mutex",
        "refused, nothing changed",
        format!("{}, {}", job["state"].as_str().unwrap_or("no state"), grouped(still)),
        refused && still == owned,
    );
    Ok(())
}

pub fn under_fire(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("c")?;
    stage.start_hosts(WORKERS)?;
    let (mut paid, mut kills, mut cut_short) = (0, 0_u32, 0);
    for round in 0..ROUNDS {
        paid += credit_all(&stage, "credit-locked", size.credits * GROWTH.pow(round))?;
        let before = stage.status()?.jobs("Completed");
        // The clock starts when jobs run: a host that is killed while it loads its plugin proves nothing.
        let mut last: Option<Instant> = None;
        let most = kills + size.kills;
        let status = stage.wait_while(|stage, status| {
            match last {
                None if status.jobs("Completed") > before => last = Some(Instant::now()),
                Some(kill) if kill.elapsed() >= size.kill_every && kills < most => {
                    stage.kill_and_restart(kills as usize % stage.cast(), WORKERS)?;
                    kills += 1;
                    last = Some(Instant::now());
                }
                _ => {}
            }
            Ok(())
        })?;
        cut_short = status.counter("stats:requeued:recovery");
        if cut_short > 0 {
            break;
        }
    }
    all_completed(&mut stage)?;
    let owned = sum(&mut stage, "balances")?;
    stage.stop_hosts()?;
    rows.add(
        format!("{} credits, mutex, kill -9", grouped(paid / GOLD)),
        grouped(paid),
        format!("{} after {kills} kills that cut {cut_short} runs short", grouped(owned)),
        owned == paid && cut_short > 0,
    );
    Ok(())
}

/// Enqueues the credits, player after player in turn, and answers how much gold that is.
fn credit_all(stage: &Stage<'_>, contract: &str, credits: i64) -> Result<i64> {
    let players = PLAYERS.cycle().zip(0..credits).map(|(player, _)| player);
    let payloads: Vec<Value> = players.map(|player| json!({ "player_id": player, "gold": GOLD })).collect();
    stage.enqueue(contract, &payloads)?;
    Ok(credits * GOLD)
}

/// What all players own together.
fn sum(stage: &mut Stage<'_>, bucket: &str) -> Result<i64> {
    let players: Vec<u32> = PLAYERS.collect();
    let gold = stage.result_of("balance", json!({ "bucket": bucket, "players": players }))?;
    Ok(gold.as_object().into_iter().flatten().filter_map(|(_, gold)| gold.as_i64()).sum())
}

/// A credit that failed would make a balance short for a reason that is not the story's.
fn all_completed(stage: &mut Stage<'_>) -> Result<()> {
    let status = stage.status()?;
    let other = status.jobs("Failed") + status.jobs("Deleted");
    if other > 0 {
        bail!("{other} jobs did not complete");
    }
    Ok(())
}
