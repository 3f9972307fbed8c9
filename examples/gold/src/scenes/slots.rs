//! Releases that go wrong. A counting semaphore would end with an eleventh permit, or with none.
//!
//! A real host settles each run once, with its own token. To do it otherwise this scene plays a host itself, through
//! the trait that hosts use; what became of the key it asks the command line.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use warp_domain::ending::Ending;
use warp_domain::policy::Declared;
use warp_domain::resolve::Declarations;
use warp_domain::{ClaimToken, Digest, HostId, UnixMillis};
use warp_store::{ClaimParams, Claimed, ExchangeParams, HandOff, HostInfo, Lane, RunOutput, Served, Settle, SettleVerdict, Store};
use warp_store_postgres::{ConnectSettings, PostgresStore};
use warp_store_sqlite::SqliteStore;

use super::Size;
use super::saves::{CONNECTIONS, KEY, save_all};
use crate::report::Rows;
use crate::stage::{Stage, Theatre};

/// A contract that no plugin has, so that nobody but this scene claims it.
const CONTRACT: &str = "connection";
const HELD: usize = 3;

pub fn released_wrongly(theatre: &Theatre, size: Size, rows: &mut Rows) -> Result<()> {
    let mut stage = theatre.stage("h")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(by_hand(&stage, rows))?;

    let leaks = vec![json!({}); size.leaks];
    stage.enqueue("leak", &leaks)?;
    stage.start_hosts(32)?;
    let failed = stage.wait()?.jobs("Failed") as usize;
    let begin = Instant::now();
    let mut held = stage.holders(KEY)?;
    while held > 0 && begin.elapsed() < Duration::from_secs(30) {
        held = stage.holders(KEY)?;
    }
    rows.add(
        format!("{failed} of {} connections leaked by a trap", leaks.len()),
        "all free again",
        format!("{} after {:.1} s", free(held), begin.elapsed().as_secs_f64()),
        failed == leaks.len() && held == 0,
    );

    // An eleventh permit or a lost one would show here.
    let before = stage.status()?.jobs("Completed") as usize;
    let (done, most) = save_all(&mut stage, size.saves.min(100))?;
    stage.stop_hosts()?;
    rows.add(
        "saves after all of that",
        "exactly 10 inside",
        format!("{} saves, at most {most} inside", done - before),
        done - before == size.saves.min(100) && most == CONNECTIONS as u64,
    );
    Ok(())
}

/// A host that releases slots as it must not.
struct Hand {
    store: Arc<dyn Store>,
    host: HostId,
    lane: Lane,
}

async fn by_hand(stage: &Stage<'_>, rows: &mut Rows) -> Result<()> {
    let policy = ["--semaphore", KEY, "--limit", &CONNECTIONS.to_string()];
    stage.enqueue_with(CONTRACT, &vec![json!({}); HELD], &policy)?;
    let hand = Hand::register(stage).await?;
    let held = hand.claim().await?;
    let [first, second, third] = held.as_slice() else { anyhow::bail!("{} of {HELD} jobs claimed", held.len()) };
    ensure!(stage.holders(KEY)? == HELD, "{} slots are held by {HELD} runs", stage.holders(KEY)?);

    let once = hand.settle(first, first.token).await?;
    let twice = hand.settle(first, first.token).await?;
    let holders = stage.holders(KEY)?;
    rows.add(
        "a slot released twice",
        format!("{}, the second refused", free(2)),
        format!("{}, {once:?} then {twice:?}", free(holders)),
        (once, twice, holders) == (SettleVerdict::Settled, SettleVerdict::Repeated, 2),
    );

    let foreign = hand.settle(second, third.token).await?;
    let holders = stage.holders(KEY)?;
    rows.add(
        "a slot released with another run's token",
        format!("{}, refused", free(2)),
        format!("{}, {foreign:?}", free(holders)),
        (foreign, holders) == (SettleVerdict::Late, 2),
    );

    for run in [second, third] {
        ensure!(hand.settle(run, run.token).await? == SettleVerdict::Settled, "a release with the right token was refused");
    }
    hand.store.deregister(hand.host, now()).await?;
    Ok(())
}

impl Hand {
    async fn register(stage: &Stage<'_>) -> Result<Self> {
        let store: Arc<dyn Store> = match stage.url() {
            Some(url) => Arc::new(PostgresStore::open(warp_store_postgres::OpenOptions::new(ConnectSettings::new(url))).await?),
            None => {
                let options = warp_store_sqlite::OpenOptions::new(stage.file());
                let options = warp_store_sqlite::OpenOptions { create: false, migrate: false, ..options };
                Arc::new(SqliteStore::open(options).await?)
            }
        };
        let info = HostInfo { name: "by-hand".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned(), now: now() };
        let host = store.register(info).await?;
        let declarations = Arc::new(Declarations {
            contract: CONTRACT.to_owned(),
            handler: CONTRACT.to_owned(),
            digest: Digest([0; 32]),
            on_contract: Declared::default(),
            on_handler: Declared::default(),
        });
        store.serve(host, vec![Served { declarations: Arc::clone(&declarations) }]).await?;
        Ok(Hand { store, host, lane: Lane { queue: "default".to_owned(), declarations } })
    }

    async fn claim(&self) -> Result<Vec<Claimed>> {
        let claim = ClaimParams { lanes: [self.lane.clone()].into(), max: HELD as u32 };
        let params = ExchangeParams { host: self.host, now: now(), settles: [].into(), claim: Some(claim), hand_off: HandOff::default() };
        Ok(self.store.exchange(params).await?.claimed)
    }

    /// Ends a run with a token that may be its own.
    async fn settle(&self, run: &Claimed, token: ClaimToken) -> Result<SettleVerdict> {
        let settle = Settle {
            handle: run.handle,
            token,
            ending: Ending::Completed { result: None },
            on_conflict: Ending::HandBack { message: "conflict".to_owned() },
            output: RunOutput::default(),
            children: Vec::new(),
            state: Vec::new(),
            took: Duration::ZERO,
        };
        let params = ExchangeParams { host: self.host, now: now(), settles: [settle].into(), claim: None, hand_off: HandOff::default() };
        self.store.exchange(params).await?.settled.first().copied().context("a settle without a verdict")
    }
}

fn free(holders: usize) -> String {
    format!("{} of {CONNECTIONS} free", CONNECTIONS.saturating_sub(holders))
}

fn now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMillis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
