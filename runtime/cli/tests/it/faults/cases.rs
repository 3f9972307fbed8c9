//! The faults, one test each.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use warp_domain::JobId;
use warp_test_servers::{Proxy, Stop};

use super::{BACKLOG, Draw, Enqueued, Field, LEASE, Load, Named, duration};
use crate::acceptance::wall;
use crate::faults::witness::Cut;

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
    // The first one certainly meets runs.
    let more = field.long_jobs();
    let (mut victim, _) = until_somebody_runs(&field, &hosts, &more.jobs);
    let mut kills = Vec::new();
    let over = Instant::now() + duration(12);
    while kills.len() < 3 || Instant::now() < over {
        let at = hosts[victim].host.kill();
        hosts[victim].print_troubles();
        kills.push((hosts[victim].name.clone(), at));
        hosts[victim] = field.host();
        // A few seconds of work, by what was done and not by the clock.
        field.until_ended(field.ended() + 50 + draw.below(150));
        victim = draw.below(3) as usize;
    }
    let sum = field.finish(load, hosts, more);
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
    let (mut conn, mut jobs) = field.runtime.block_on(async {
        let conn = PgConnection::connect(&url).await.expect("a connection");
        (conn, PgConnection::connect(field.database.url()).await.expect("a connection"))
    });
    let (mut ends, mut cuts, mut more) = ([0; 3], Vec::new(), Enqueued::default());
    let first = wall();
    if locks == "session" {
        // The first one certainly meets runs, which nobody could take for such that ended by themselves.
        more = field.long_jobs();
        let (victim, _) = until_somebody_runs(&field, &hosts, &more.jobs);
        cuts.push(field.runtime.block_on(cut_locks_of(&hosts[victim], &mut jobs)));
        ends[2] += 1;
    }
    let over = Instant::now() + duration(10);
    while Instant::now() < over {
        // Each kind as often as the others, though there are many more that work.
        let kind = draw.below(3) as usize;
        let name = ["warp-host", "warp-host:warp-listen", "warp-host:warp-locks"][kind];
        field.runtime.block_on(async {
            let pid = format!("SELECT pid FROM pg_stat_activity WHERE application_name = '{name}' ORDER BY random() LIMIT 1");
            let pid: Option<i32> = sqlx::query_scalar(AssertSqlSafe(pid)).fetch_optional(&mut conn).await.expect("an answer");
            if let Some(pid) = pid {
                ends[kind] += 1;
                if kind == 2 {
                    let told = sqlx::query_scalar("SELECT EXISTS (SELECT FROM warp.host h WHERE h.lock_backend = $1)").bind(pid);
                    let told = told.fetch_one(&mut jobs).await.expect("an answer");
                    cuts.push(Cut { backend: pid, at: wall(), told });
                }
                sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&mut conn).await.expect("an answer");
            }
        });
        std::thread::sleep(Duration::from_millis(50 + draw.below(300)));
    }
    field.finish(load, hosts, more);
    field.runtime.block_on(async {
        for cut in &cuts {
            field.witness.cut(cut).await;
        }
    });
    field.assert_promises();
    eprintln!("ended connections: {} of work, {} of listening, {} of locks", ends[0], ends[1], ends[2]);
    if locks == "session" {
        let (noticed, latest) =
            (field.number("SELECT count(*) FROM loss"), field.number("SELECT coalesce(max(noticed - at), 0) FROM loss"));
        let (met, longest) = (field.number("SELECT count(*) FROM lingering"), field.number("SELECT max(nanos) FROM lingering"));
        let (stopped, excused) =
            (field.number("SELECT count(*) FROM lingering WHERE ended IS NULL"), field.number("SELECT count(*) FROM excused"));
        eprintln!(
            "{noticed} losses of a lock session were noticed after {:.0} ms at most; {met} attempts met with one, {stopped} were stopped, \
             the last of them {:.0} ms after that; {excused} overlaps",
            latest as f64 / 1e6,
            longest as f64 / 1e6
        );
        assert!(stopped > 0, "the first met runs that were far from their end");
    }
    assert!(ends[0] > 0 && ends[1] > 0, "{ends:?}");
    field.print_recovery("after the first end of a connection", first);
}

/// Ends the lock session of a host, which has told its number as it holds slots.
async fn cut_locks_of(named: &Named, jobs: &mut PgConnection) -> Cut {
    // A host is called MACHINE:PID.
    let whose = "SELECT h.lock_backend FROM warp.host h JOIN warp.host_name n ON n.id = h.id WHERE n.name LIKE '%:' || $1";
    let backend: Option<i32> = sqlx::query_scalar(whose).bind(named.host.pid().to_string()).fetch_one(&mut *jobs).await.expect("a host");
    let cut = Cut { backend: backend.expect("a lock session"), at: wall(), told: true };
    sqlx::query("SELECT pg_terminate_backend($1)").bind(cut.backend).execute(jobs).await.expect("an answer");
    cut
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
    let lost = hosts.iter().map(|named| named.host.lines(|line| line.contains("taken for dead")).len()).sum::<usize>();
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
    let more = field.long_jobs();
    let (victim, running) = until_somebody_runs(&field, &hosts, &more.jobs);
    let frozen = &hosts[victim];
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

/// Which host runs most of these jobs, and how many, once somebody does. Any host may take all of them.
#[track_caller]
fn until_somebody_runs(field: &Field, hosts: &[Named], jobs: &[(JobId, String)]) -> (usize, usize) {
    let deadline = Instant::now() + crate::acceptance::PATIENCE;
    loop {
        let mut counts = vec![0; hosts.len()];
        for host in field.starts_of(jobs) {
            counts[hosts.iter().position(|named| named.name == host).expect("one of them")] += 1;
        }
        let most = counts.into_iter().enumerate().max_by_key(|(_, count)| *count).expect("hosts");
        if most.1 > 0 {
            return most;
        }
        assert!(Instant::now() < deadline, "nobody takes any of the long jobs");
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
