//! `bench`: that it measures what it says, not how fast anything is.

use serde_json::Value;
use sqlx::Connection as _;

use crate::Ground;

/// The rows that `bench --json` prints, one a line.
fn rows(ground: &Ground, args: &[&str]) -> Vec<Value> {
    let text = ground.run(&[&["bench", "--json"], args].concat()).good();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn figure(row: &Value, name: &str) -> f64 {
    row["beside"]["figures"][name].as_f64().unwrap_or_else(|| panic!("no {name} in {row:#}"))
}

on_each_database! {
    every_job_is_worked_off_and_counted
    jobs_keep_coming
    waiters_are_parked_before_anything_is_timed
    history_is_there_when_claims_are_timed
    waits_are_timed_one_by_one
}

fn every_job_is_worked_off_and_counted(ground: &Ground) {
    let found = rows(ground, &["--workload", "native-noop,one-key", "--jobs", "60", "--repeat", "2", "--html", "page.html"]);
    assert_eq!(found.iter().map(|row| row["workload"].as_str()).collect::<Vec<_>>(), [Some("native-noop"), Some("one-key")]);
    for row in &found {
        assert_eq!((row["jobs"].as_u64(), row["workers"].as_u64()), (Some(60), Some(16)));
        assert!(row["jobs_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row:#}");
        assert!(row["statements_per_job"].as_f64().is_some_and(|count| count > 0.0), "{row:#}");
        assert_eq!(row["beside"]["spread"]["repeats"], 2);
        assert!(row["beside"]["figures"].get("not_settled").is_none(), "{row:#}");
        assert_eq!(row["store"], if ground.on_server() { "postgres" } else { "sqlite" });
    }
    assert_eq!(found[1]["beside"]["note"], "at most 1 at once", "the key has one slot");
    let page = ground.read("page.html");
    assert!(page.contains("native-noop") && page.contains("one-key") && page.ends_with("</html>\n"));
    if ground.on_server() {
        for row in &found {
            // The log is the whole server's, where others are at work. What of it is images of pages may not be known there:
            // then there is no figure, and the settings say so.
            assert!(figure(row, "wal_bytes_per_job_with_page_images") > 0.0, "{row:#}");
            let is_unknown = row["settings"]["page_images_from"].as_str().expect("a source").starts_with("unknown");
            assert_eq!(row["wal_bytes_per_job"].is_null(), is_unknown, "{row:#}");
            assert!(row["peak_backends"].as_u64().is_some_and(|peak| peak > 0), "{row:#}");
            let names: Vec<_> = row["beside"]["backends"].as_object().expect("names").keys().collect();
            assert!(names.iter().all(|name| name.starts_with("warp-bench-1")), "only the host works: {names:?}");
            assert!(row["settings"]["synchronous_commit"].is_string() && row["settings"]["pool"].is_number());
        }
    }
}

fn jobs_keep_coming(ground: &Ground) {
    let args = ["--workload", "native-noop", "--continuous", "--for", "1s", "--hosts", "2"];
    let found = rows(ground, &[&args[..], &["--rate", "200"]].concat());
    let row = &found[0];
    assert_eq!((row["workload"].as_str(), row["beside"]["hosts"].as_u64()), (Some("native-noop-continuous"), Some(2)));
    // At a fixed rate the number is known; a machine that stops for a while may be late with the last ones.
    assert!(row["jobs"].as_u64().is_some_and(|jobs| (1..=200).contains(&jobs)), "{row:#}");
    assert!(
        row["p50_ms"].as_f64().is_some_and(|wait| wait > 0.0) && row["beside"]["waits"].as_array().is_some_and(|waits| !waits.is_empty())
    );
    let closed = rows(ground, &[&args[..], &["--outstanding", "5"]].concat());
    assert!(closed[0]["beside"]["note"].as_str().is_some_and(|note| note.starts_with("5 jobs under way at any time")), "{}", closed[0]);
}

fn waiters_are_parked_before_anything_is_timed(ground: &Ground) {
    let found = rows(ground, &["--workload", "waiters", "--jobs", "50", "--waiters", "40", "--for", "1s"]);
    assert!(figure(&found[0], "share_percent") > 0.0 && figure(&found[0], "without_waiters_jobs_per_s") > 0.0);
    assert!(figure(&found[0], "parked_per_s") > 0.0);
    if ground.on_server() {
        assert!(figure(&found[0], "statements_per_s_while_still") >= 0.0);
    }
}

fn history_is_there_when_claims_are_timed(ground: &Ground) {
    let found = rows(ground, &["--workload", "history", "--finished", "300", "--scheduled", "20", "--parked", "10"]);
    let names: Vec<_> = found.iter().map(|row| row["workload"].as_str().expect("a name")).collect();
    assert_eq!(names, if ground.on_server() { &["history", "history-analyzed"][..] } else { &["history"] });
    for row in &found {
        assert!(row["p99_ms"].as_f64().is_some_and(|wait| wait > 0.0), "{row:#}");
        assert_eq!([figure(row, "finished"), figure(row, "scheduled"), figure(row, "parked")], [300.0, 20.0, 10.0]);
    }
}

fn waits_are_timed_one_by_one(ground: &Ground) {
    for row in rows(ground, &["--workload", "latency,latency-other,handover", "--jobs", "20"]) {
        let part = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row:#}"));
        assert!(part("p50_ms") <= part("p95_ms") && part("p95_ms") <= part("p99_ms"), "{row:#}");
    }
}

/// On a server of its own, since others may be measuring on the one that tests share.
#[test]
fn the_server_counts_and_nothing_is_left_on_it() {
    let cluster = warp_test_servers::Cluster::functional().count_statements().start().expect("a server");
    let ground = Ground::new();
    let url = cluster.url("postgres");
    let found = rows(&ground, &["--database-url", &url, "--workload", "native-noop", "--jobs", "100"]);
    let counted = if cluster.counts_statements() { "pg_stat_statements" } else { "transactions of pg_stat_database" };
    assert_eq!(found[0]["beside"]["statements_from"], counted);
    assert!(found[0]["statements_per_job"].as_f64().is_some_and(|count| count > 0.0 && count < 1.0), "{}", found[0]);
    // Three audit rows and what goes with them; pg_walinspect is part of what a server of tests has, or the estimate is low.
    assert!(found[0]["wal_bytes_per_job"].as_f64().is_some_and(|bytes| bytes > 100.0), "{}", found[0]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let left: Vec<String> = runtime.block_on(async {
        let mut connection = sqlx::PgConnection::connect(&url).await.expect("connects");
        let names = sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE datname LIKE 'warp%'");
        names.fetch_all(&mut connection).await.expect("answers")
    });
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let ground = Ground::new();
    let stderr = ground.run(&["bench", "--workload", "speed"]).bad(2);
    assert!(stderr.contains("there is no workload \"speed\"") && stderr.contains("native-noop"), "{stderr}");
    let stderr = ground.run(&["bench", "--workload", "idle", "--continuous"]).bad(2);
    assert!(stderr.contains("the workload idle is not one of jobs that are worked off"), "{stderr}");
    let stderr = ground.run(&["bench", "--workload", "noop", "--plugins", "nowhere", "--jobs", "1"]).bad(2);
    assert!(stderr.contains("cargo xtask plugins noop"), "{stderr}");
    ground.run(&["bench", "--rate", "5"]).bad(2);
}
