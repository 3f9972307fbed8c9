//! The faults, one test each.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use warp_domain::JobId;
use warp_test_servers::{Proxy, Stop};

use super::{BACKLOG, Draw, Enqueued, Field, LEASE, Load, Named, duration, watch};
use crate::acceptance::wall;
use crate::faults::witness::Rule;
use crate::stage::now;

/// One test of each fault for each kind of slots.
macro_rules! under {
    ($($kind:ident)*: $faults:tt) => { $(under! { @ $kind $faults })* };
    (@ $kind:ident { $($fault:ident)* }) => {
        mod $kind {
            $(#[test] fn $fault() { super::$fault(stringify!($kind)) })*
        }
    };
}

under! { ledger session: {
    hosts_are_killed_every_few_seconds
    connections_are_ended_at_random
    the_server_is_restarted_at_once
    the_network_falls_silent
    a_host_is_frozen_past_its_lease
} }

/// Three hosts at work under the load.
#[track_caller]
fn begin(field: &mut Field) -> (Vec<Named>, Load) {
    let hosts = field.three_hosts();
    let load = field.load();
    field.until_ended(BACKLOG as u64);
    (hosts, load)
}

fn hosts_are_killed_every_few_seconds(locks: &'static str) {
    let mut field = Field::new(locks);
    let (mut hosts, load) = begin(&mut field);
    let seed = wall();
    let mut draw = Draw(seed);
    eprintln!("seed of the kills: {seed}");
    let mut kills = Vec::new();
    let over = Instant::now() + duration(12);
    while Instant::now() < over {
        let victim = draw.below(3) as usize;
        let at = hosts[victim].host.kill();
        kills.push((hosts[victim].name.clone(), at));
        hosts[victim] = field.host();
        // A few seconds of work, by what was done and not by the clock.
        field.until_ended(field.ended() + 50 + draw.below(150));
    }
    let sum = field.finish(load, hosts, Enqueued::default());
    field.runtime.block_on(async {
        for (host, at) in &kills {
            field.witness.gone(host, *at).await;
        }
    });
    field.assert_promises();
    let cut_short = field.number("SELECT count(*) FROM attempt WHERE ended IS NULL");
    eprintln!("{} kills, {cut_short} attempts cut short", kills.len());
    assert!(cut_short > 0, "no kill met a running job");
    assert!(sum.rescued > 0, "nobody was rescued");
    field.print_recovery("after the first kill", kills[0].1);
}

fn connections_are_ended_at_random(locks: &'static str) {
    let mut field = Field::new(locks);
    let (hosts, load) = begin(&mut field);
    let mut draw = Draw(wall());
    let url = field.cluster.url("postgres");
    let first = wall();
    let (ends, cuts) = field.runtime.block_on(async {
        let mut conn = PgConnection::connect(&url).await.expect("a connection");
        let mut jobs = PgConnection::connect(field.database.url()).await.expect("a connection");
        let (mut ends, mut cuts) = ([0; 3], Vec::new());
        let over = Instant::now() + duration(10);
        while Instant::now() < over {
            // Each kind as often as the others, though there are many more that work.
            let kind = draw.below(3) as usize;
            let name = ["warp-host", "warp-host:warp-listen", "warp-host:warp-locks"][kind];
            let pid = format!("SELECT pid FROM pg_stat_activity WHERE application_name = '{name}' ORDER BY random() LIMIT 1");
            let pid: Option<i32> = sqlx::query_scalar(AssertSqlSafe(pid)).fetch_optional(&mut conn).await.expect("an answer");
            if let Some(pid) = pid {
                ends[kind] += 1;
                if kind == 2 {
                    // A host is called MACHINE:PID.
                    let whose = "SELECT n.name FROM warp.host h JOIN warp.host_name n ON n.id = h.id WHERE h.lock_backend = $1";
                    let whose: Option<String> = sqlx::query_scalar(whose).bind(pid).fetch_optional(&mut jobs).await.expect("an answer");
                    let number = whose.and_then(|name| name.rsplit(':').next().and_then(|number| number.parse().ok()));
                    let named = hosts.iter().find(|named| Some(named.host.pid()) == number);
                    cuts.push((named.map(|named| named.name.clone()).unwrap_or_default(), wall()));
                }
                let end = sqlx::query("SELECT pg_terminate_backend($1)").bind(pid);
                end.execute(&mut conn).await.expect("an answer");
            }
            tokio::time::sleep(Duration::from_millis(50 + draw.below(300))).await;
        }
        (ends, cuts)
    });
    field.finish(load, hosts, Enqueued::default());
    field.runtime.block_on(async {
        for (host, at) in &cuts {
            field.witness.cut(host, *at).await;
        }
    });
    let unknown = cuts.iter().filter(|(host, _)| host.is_empty()).count();
    eprintln!("{} lock sessions ended, {unknown} of which had not told their host yet", cuts.len());
    field.assert_promises();
    if locks == "session" {
        let (excused, longest) =
            (field.number("SELECT count(*) FROM excused"), field.number("SELECT coalesce(max(nanos), 0) FROM lingering"));
        let met = field.number("SELECT count(*) FROM lingering");
        eprintln!(
            "{} lock sessions ended under {met} attempts, which went on for {:.0} ms at most; {excused} overlaps",
            cuts.len(),
            longest as f64 / 1e6
        );
    }
    eprintln!("ended connections: {} of work, {} of listening, {} of locks", ends[0], ends[1], ends[2]);
    assert!(ends[0] > 0 && ends[1] > 0 && (locks == "ledger" || ends[2] > 0), "{ends:?}");
    field.print_recovery("after the first end of a connection", first);
}

fn the_server_is_restarted_at_once(locks: &'static str) {
    let mut field = Field::new(locks);
    let (hosts, load) = begin(&mut field);
    let mut draw = Draw(wall());
    let mut restarts = Vec::new();
    let over = Instant::now() + duration(10);
    while restarts.len() < 2 || Instant::now() < over {
        let at = wall();
        field.cluster.stop(Stop::Immediate).expect("it stops");
        // The second time it stays away for so long that every host must stop what it runs.
        let away = if restarts.len() % 2 == 0 { Duration::ZERO } else { LEASE };
        std::thread::sleep(away);
        field.cluster.start().expect("it starts");
        restarts.push((at, wall(), away));
        field.until_ended(field.ended() + 100 + draw.below(300));
    }
    field.finish(load, hosts, Enqueued::default());
    field.assert_promises();
    for (at, back, away) in restarts {
        eprintln!("restarted: away for {away:?} and the server's own recovery, {:.1} s in all", (back - at) as f64 / 1e9);
        field.print_recovery("from the stop on", at);
    }
}

/// Each host reaches its database through a network of its own, which falls silent without a word: for less than the
/// lease, for more, and for more with the connections cut when it is over.
fn the_network_falls_silent(locks: &'static str) {
    let mut field = Field::new(locks);
    let url = field.database.url().to_owned();
    let proxies: Vec<_> = (0..3).map(|_| Proxy::in_front_of(&url).expect("a proxy")).collect();
    let hosts: Vec<_> = proxies.iter().map(|proxy| field.host_at(&proxy.url(&url))).collect();
    let load = field.load();
    field.until_ended(BACKLOG as u64);
    let mut silences = Vec::new();
    let over = Instant::now() + duration(10);
    while silences.len() < 3 || Instant::now() < over {
        let (proxy, kind) = (&proxies[silences.len() % 3], silences.len() % 3);
        let at = wall();
        proxy.freeze();
        let silence = [LEASE / 3, LEASE * 2, LEASE * 2][kind];
        std::thread::sleep(silence);
        if kind == 2 {
            proxy.close_all();
        }
        proxy.thaw();
        silences.push((at, silence));
        field.until_ended(field.ended() + 100);
    }
    let lost = hosts.iter().map(|named| named.host.count(|line| line.contains("taken for dead"))).sum::<usize>();
    field.finish(load, hosts, Enqueued::default());
    field.assert_promises();
    assert!(lost >= 2, "hosts that were silent for longer than the lease were not taken for dead");
    for (at, silence) in silences {
        field.print_recovery(&format!("from a silence of {silence:?} on"), at);
    }
}

/// The one exception: what was running in a process that stood still may go on for an instant when it wakes. It is
/// stopped, nothing of it is taken, and whoever compares fencing tokens can tell the two apart.
fn a_host_is_frozen_past_its_lease(locks: &'static str) {
    let mut field = Field::new(locks);
    let (hosts, load) = begin(&mut field);
    let frozen = &hosts[0];
    // Long attempts, so that some are in the middle of their work when it freezes, and far from its end when it wakes.
    let long: Vec<_> = (0..12).map(|key| (watch("alone", &format!("long:{key}"), 4_000), format!("long:{key}"))).collect();
    let jobs: Vec<_> = long.iter().map(|(job, _)| job.clone()).collect();
    field.runtime.block_on(field.store.enqueue(jobs, now())).expect("enqueued");
    let more = Enqueued {
        rules: long.iter().map(|(_, key)| Rule { key: key.clone(), slots: 1, since: 0, until: 0, held: Vec::new() }).collect(),
        jobs: long.into_iter().map(|(job, key)| (job.id, key)).collect(),
    };
    let running = until_it_runs(&field, &frozen.name, &more.jobs);
    frozen.host.signal(Signal::STOP);
    let at = wall();
    std::thread::sleep(LEASE * 2);
    frozen.host.signal(Signal::CONT);
    let thawed = wall();
    frozen.host.wait_for("it to notice", |line| line.contains("taken for dead"));
    frozen.host.wait_for("it to go on", |line| line.contains("\"registered anew\""));
    let name = frozen.name.clone();
    field.finish(load, hosts, more);
    field.runtime.block_on(field.witness.gone(&name, at));
    field.assert_promises();
    // Those that were long from their end have none, and soon after the thaw no sign of life either.
    let stopped = format!("FROM attempt WHERE host = '{name}' AND key LIKE 'long:%' AND started < {at} AND run = 1");
    let (cut, ended) = (
        field.number(&format!("SELECT count(*) {stopped} AND ended IS NULL")),
        field.number(&format!("SELECT count(*) {stopped} AND ended > {thawed}")),
    );
    let lived = field.number(&format!("SELECT coalesce(max(alive) - {thawed}, 0) {stopped}"));
    let last = if lived > 0 { format!("{:.0} ms after", lived as f64 / 1e6) } else { "before".to_owned() };
    eprintln!("{cut} long attempts of the frozen host were stopped, their last sign of life {last} the thaw");
    assert!(cut >= running as i64 && cut > 0 && ended == 0, "{cut} stopped, {ended} ended, {running} were running");
    assert!(Duration::from_nanos(lived.max(0).unsigned_abs()) < Duration::from_secs(3), "they went on after the thaw");
    field.print_recovery("from the freeze on", at);
}

/// How many of these jobs run on this host, once some do.
#[track_caller]
fn until_it_runs(field: &Field, host: &str, jobs: &[(JobId, String)]) -> usize {
    let deadline = Instant::now() + crate::acceptance::PATIENCE;
    loop {
        let count = std::fs::read_dir(field.ground.path("out")).expect("a folder").filter(|entry| {
            let path = entry.as_ref().expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
            name.ends_with(".start")
                && jobs.iter().any(|(id, _)| name.starts_with(&id.to_string()))
                && std::fs::read_to_string(&path).is_ok_and(|text| text.ends_with(&format!(" {host}")))
        });
        let count = count.count();
        if count > 0 {
            return count;
        }
        assert!(Instant::now() < deadline, "{host} takes none of the long jobs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Shows that the ledger would see it: with a guard that lets everybody in, it does.
#[test]
fn a_broken_guard_is_seen_in_the_ledger() {
    let mut field = Field::new("ledger");
    let broken = "CREATE OR REPLACE FUNCTION warp.refusal(p_key bigint, p_ticket bigint, p_slots int, p_weight int,
                      OUT why smallint, OUT lim int, OUT holder bigint, OUT by_stamp bool) LANGUAGE sql AS
                  'SELECT 0::smallint, 1, NULL::bigint, false'";
    field.database.execute(broken).expect("a broken guard");
    let (hosts, load) = begin(&mut field);
    field.finish(load, hosts, Enqueued::default());
    let overlaps = field.runtime.block_on(field.witness.rows("(SELECT DISTINCT key FROM overlap ORDER BY key)"));
    eprintln!("overlaps: {}", overlaps.join(" "));
    assert!(overlaps.contains(&"(three:k)".to_owned()) && overlaps.iter().any(|key| key.starts_with("(alone:")), "{overlaps:?}");
}
