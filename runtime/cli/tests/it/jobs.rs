//! Enqueueing jobs, and everything that an operator asks and does about them.

use std::time::Duration;

use warp_domain::ending::{Ending, FailedReason};

use crate::stage::{DIGEST, Stage, now, shape};
use crate::{Ground, settled};

const NOBODY: &str = "0192d4e0-1b2c-7def-8123-456789abcdef";

on_each_database! {
    a_payload_is_stored_exactly_however_it_is_given
    a_contract_that_nobody_runs_is_warned_about
    bad_input_is_refused_before_anything_is_stored
    a_batch_answers_line_by_line_and_a_bad_line_refuses_only_itself
    many_of_the_same_are_as_many_as_asked_for
    a_unique_job_is_enqueued_once
    what_is_declared_at_enqueue_is_shown_with_its_source
    lists_are_filtered_and_paged
    a_job_says_why_it_waits_and_what_would_change_that
    a_key_that_nobody_uses_any_more_has_no_limit_of_its_own
    what_a_guest_wrote_cannot_steer_a_terminal
    ended_jobs_show_result_error_history_and_digest
    commands_on_jobs_say_what_they_did_and_codes_say_whether
    instants_are_in_utc_with_milliseconds
}

fn enqueue(ground: &Ground, args: &[&str]) -> String {
    ground.run(&[&["enqueue", "c"], args].concat()).good().trim().to_owned()
}

fn show(ground: &Ground, id: &str) -> serde_json::Value {
    ground.run(&["jobs", "show", id, "--json"]).json()
}

fn a_payload_is_stored_exactly_however_it_is_given(ground: &Ground) {
    let payload = "{ \"b\":1e2,\"a\" : \"\\u00e4 漢\" }";
    ground.write("payload.json", payload);
    let by_flag = enqueue(ground, &["--payload", payload]);
    let by_file = enqueue(ground, &["--payload-file", "payload.json"]);
    let by_pipe = ground.run_with(&["enqueue", "c", "-"], payload.as_bytes()).good().trim().to_owned();
    for id in [&by_flag, &by_file, &by_pipe] {
        assert_eq!(show(ground, id)["payload"], payload);
    }
    let listed = ground.run(&["jobs", "list", "--json"]).json();
    let ids: Vec<_> = listed.as_array().expect("a list").iter().map(|job| job["id"].as_str().expect("text")).collect();
    assert_eq!(ids, [by_pipe.as_str(), by_file.as_str(), by_flag.as_str()], "newest first");
}

fn a_contract_that_nobody_runs_is_warned_about(ground: &Ground) {
    let stderr = ground.run(&["enqueue", "c", "--payload", "{}"]).stderr;
    assert!(stderr.starts_with("warning: no live host runs `c`; the job stays Enqueued until one does"), "{stderr}");
    let _stage = Stage::new(ground, "c");
    assert_eq!(ground.run(&["enqueue", "c", "--payload", "{}"]).stderr, "");
}

fn bad_input_is_refused_before_anything_is_stored(ground: &Ground) {
    let deep = "[".repeat(200) + &"]".repeat(200);
    for (args, why) in [
        (&["--payload", "{"][..], "the payload is not JSON: "),
        (&["--payload", "{\"a\": \"\\u0000\"}"], "the payload contains a NUL character"),
        (&["--payload", &deep], "the payload is nested deeper than 127 levels"),
        (&["--payload", "{}", "--mutex", "k:{id}"], "key `k:{id}` needs `id`, which the payload lacks"),
        (&["--payload", "{}", "--mutex", "k:{"], "opens a brace at byte 2 that is never closed"),
        (&["--payload", "{}", "--semaphore", "k", "--limit", "1", "--weight", "2"], "--weight 2 is above --limit 1"),
        (&["--payload", "{}", "--mutex", "k", "--order", "fifo"], "add --mode wait"),
        (&["--payload", "{}", "--mode", "wait"], "give the key with --mutex or --semaphore"),
        (&["--payload", "{}", "--queue", ""], "the queue is empty"),
        (&["--payload-file", "absent.json"], "failed to read the payload from absent.json: "),
    ] {
        let stderr = ground.run(&[&["enqueue", "c"], args].concat()).bad(2);
        assert!(stderr.contains(why), "{args:?}: {stderr}");
    }
    let stderr = ground.run_with(&["enqueue", "c", "-"], &vec![b'1'; (10 << 20) + 1]).bad(2);
    assert!(stderr.contains("the payload has 10485761 bytes; 10485760 are allowed"), "{stderr}");
    for args in [&["--semaphore", "k"][..], &["--mutex", "k", "--semaphore", "k", "--limit", "2"], &["--limit", "2"], &["--retry", "x"]] {
        ground.run(&[&["enqueue", "c", "--payload", "{}"], args].concat()).bad(2);
    }
    assert_eq!(ground.run(&["jobs", "list", "--json"]).good(), "[]\n");
}

fn a_batch_answers_line_by_line_and_a_bad_line_refuses_only_itself(ground: &Ground) {
    ground.write("rows.jsonl", b"{\"n\": 1}\n\n{\"n\": \n\xff\xfe\n{\"n\": 2}".as_slice());
    let ended = ground.run(&["enqueue", "c", "--batch", "rows.jsonl", "--json"]);
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    let rows: Vec<serde_json::Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of: Vec<_> = rows.iter().map(|row| (row["verdict"].as_str().expect("text"), row["line"].as_u64().expect("a number"))).collect();
    let mut sorted = of.clone();
    sorted.sort_by_key(|(_, line)| *line);
    assert_eq!(sorted, [("enqueued", 1), ("refused", 3), ("refused", 4), ("enqueued", 5)]);
    assert!(ended.stderr.contains("2 jobs refused; the others are enqueued"), "{}", ended.stderr);
    assert_eq!(ground.run(&["jobs", "list", "--json"]).json().as_array().map(Vec::len), Some(2));
}

fn many_of_the_same_are_as_many_as_asked_for(ground: &Ground) {
    let ids = ground.run(&["enqueue", "c", "--payload", "{}", "--count", "2500"]).good();
    let ids: std::collections::HashSet<_> = ids.lines().collect();
    assert_eq!(ids.len(), 2500);
    assert_eq!(ground.run(&["status", "--json"]).json()["states"]["Enqueued"], 2500);
}

fn a_unique_job_is_enqueued_once(ground: &Ground) {
    let first = enqueue(ground, &["--payload", "{}", "--unique", "u"]);
    let again = ground.run(&["enqueue", "c", "--payload", "{}", "--unique", "u"]);
    assert!(again.stderr.contains("a job with that unique key has not ended yet"), "{}", again.stderr);
    assert_eq!(again.good().trim(), first);
    let json = ground.run(&["enqueue", "c", "--payload", "{}", "--unique", "u", "--json"]).json();
    assert_eq!(json, serde_json::json!({"verdict": "duplicate", "id": first, "reason": null, "line": null}));
    ground.run(&["enqueue", "c", "--payload", "{}", "--unique", "u", "--count", "2"]).bad(2);
}

fn what_is_declared_at_enqueue_is_shown_with_its_source(ground: &Ground) {
    let id = enqueue(
        ground,
        &[
            "--payload",
            "{\"id\": 7}",
            "--semaphore",
            "bank:{id}",
            "--limit",
            "5",
            "--weight",
            "2",
            "--order",
            "fifo",
            "--retry",
            "3:15s,1m~0.1",
            "--timeout",
            "30s:delete",
            "--meta",
            "tenant=a=b",
            "--delay",
            "1h",
            "--queue",
            "slow",
        ],
    );
    insta::assert_snapshot!("scheduled-json", shape(&show(ground, &id)));
    let at = enqueue(ground, &["--payload", "{}", "--at", "2100-01-01T00:00:00+01:00"]);
    assert_eq!(show(ground, &at)["due"], "2099-12-31T23:00:00.000Z");
    ground.run(&["enqueue", "c", "--payload", "{}", "--at", "tomorrow"]).bad(2);
}

fn lists_are_filtered_and_paged(ground: &Ground) {
    let ids: Vec<_> = (0..5).map(|n| enqueue(ground, &["--payload", &n.to_string()])).collect();
    enqueue(ground, &["--payload", "{}", "--queue", "other", "--delay", "1h"]);
    let list = |args: &[&str]| {
        let jobs = ground.run(&[&["jobs", "list", "--json"], args].concat()).json();
        jobs.as_array().expect("a list").iter().map(|job| job["id"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(list(&["--queue", "default", "--limit", "2"]), [ids[4].clone(), ids[3].clone()]);
    assert_eq!(list(&["--queue", "default", "--limit", "2", "--before", &ids[3]]), [ids[2].clone(), ids[1].clone()]);
    assert_eq!(list(&["--state", "scheduled"]).len(), 1);
    assert_eq!(list(&["--state", "Scheduled,Enqueued"]).len(), 6);
    assert_eq!(list(&["--contract", "d"]), Vec::<String>::new());
    let ended = ground.run(&["jobs", "list", "--limit", "1"]);
    assert!(ended.stderr.starts_with("there may be more: --before "), "{}", ended.stderr);
    assert!(!ended.stdout.contains('\u{1b}'), "no colours in a pipe");
    let stderr = ground.run(&["jobs", "list", "--state", "asleep"]).bad(2);
    assert!(stderr.contains("the states are Scheduled, Enqueued"), "{stderr}");
}

fn a_job_says_why_it_waits_and_what_would_change_that(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    let ids: Vec<_> = (0..3).map(|n| enqueue(ground, &["--payload", &n.to_string(), "--mutex", "k", "--mode", "wait"])).collect();
    let ready = show(ground, &ids[0]);
    assert_eq!(ready["waiting"]["for"], "worker", "{ready}");
    let text = ground.run(&["jobs", "show", &ids[0]]).good();
    assert!(text.contains("none of their hosts takes the queue `default` (`warp-host run --queues default`)"), "{text}");
    let claimed = stage.claim(10);
    assert_eq!(claimed.len(), 1);
    let holder = claimed[0].id.to_string();
    let waiters: Vec<_> = ids.iter().filter(|id| **id != holder).collect();

    let waiting = show(ground, waiters[0]);
    insta::assert_snapshot!("waiting-json", shape(&waiting));
    let text = ground.run(&["jobs", "show", waiters[0]]).good();
    assert!(text.contains("it waits for the key `k`"), "{text}");
    assert!(text.contains("place        1 of 2 in line"), "{text}");
    assert!(text.contains("limit        1, stamped on the job from enqueue; a new plugin version does not change it"), "{text}");
    assert!(text.contains(&format!("held by      {holder} (c) on stage:1, for ")), "{text}");

    insta::assert_snapshot!("key-json", shape(&ground.run(&["keys", "show", "k", "--json"]).json()));
    insta::assert_snapshot!("keys-json", shape(&ground.run(&["keys", "list", "--json"]).json()));
    let text = ground.run(&["keys", "show", "k"]).good();
    assert!(text.contains("held by 1 job\n") && text.contains("2 jobs in line\n"), "{text}");
    assert_eq!(ground.run(&["jobs", "list", "--key", "k", "--json"]).json().as_array().map(Vec::len), Some(3));

    // A running job is shown as such, with the policy on its row and where it came from.
    insta::assert_snapshot!("running-json", shape(&show(ground, &holder)));

    let set = ground.run(&["limits", "set", "k", "0"]);
    assert!(set.stderr.contains("nobody is stopped"), "{}", set.stderr);
    assert_eq!(set.good(), "`k` is paused: nothing new starts, nobody is skipped\n");
    let waiting = show(ground, waiters[0]);
    assert_eq!((&waiting["waiting"]["limit"], &waiting["waiting"]["limit_from"]), (&0.into(), &"admin".into()), "{waiting}");
    insta::assert_snapshot!("limits-json", shape(&ground.run(&["limits", "list", "--json"]).json()));
    ground.run(&["limits", "remove", "k"]).good();
    ground.run(&["limits", "remove", "k"]).bad(3);
    ground.run(&["keys", "show", "other"]).bad(3);
}

fn a_key_that_nobody_uses_any_more_has_no_limit_of_its_own(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    enqueue(ground, &["--payload", "{}", "--mutex", "k"]);
    let run = stage.claim(1).remove(0);
    stage.settle(&run, Ending::Completed { result: None }, &[]);
    let text = ground.run(&["keys", "show", "k"]).good();
    assert!(text.contains("limit    none set by an operator; each job carries its own\n"), "{text}");
    let stderr = ground.run(&["limits", "set", "k", "many"]).bad(2);
    assert!(stderr.contains("\"many\" is not a number from 0 to 4294967295"), "{stderr}");
}

fn what_a_guest_wrote_cannot_steer_a_terminal(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    let id = enqueue(ground, &["--payload", "{}"]);
    let run = stage.claim(1).remove(0);
    let hostile = "\u{1b}[2J\u{1b}]0;owned\u{7} \u{202e}gnp.exe\r";
    stage.settle(&run, Ending::Completed { result: Some(hostile.to_owned()) }, &[("stdout", hostile), ("info", "plain")]);
    let text = ground.run(&["jobs", "logs", &id]).good();
    assert!(text.contains("stdout  ␛[2J␛]0;owned␇ \\u{202e}gnp.exe␍\n") && text.contains("info    plain\n"), "{text}");
    let page = ground.run(&["jobs", "show", &id]).good();
    assert!(page.contains("result       ␛[2J"), "{page}");
    for text in [&text, &page] {
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
    assert_eq!(ground.run(&["jobs", "logs", &id, "--raw"]).good(), format!("{hostile}\nplain\n"));
    let lines = ground.run(&["jobs", "logs", &id, "--json", "--run", "1"]).good();
    let first: serde_json::Value = serde_json::from_str(lines.lines().next().expect("a line")).expect("JSON");
    assert_eq!(first["text"], hostile);
    insta::assert_snapshot!("log-json", shape(&serde_json::json!({ "run": first["run"], "at": first["at"], "stream": first["stream"] })));
    assert_eq!(ground.run(&["jobs", "logs", &id, "--run", "7"]).good(), "");
    ground.run(&["jobs", "logs", NOBODY]).bad(3);
}

fn ended_jobs_show_result_error_history_and_digest(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    let id = enqueue(ground, &["--payload", "{}"]);
    let run = stage.claim(1).remove(0);
    stage.settle(&run, Ending::Failed { message: "no such file".to_owned(), reason: FailedReason::Permanent }, &[]);
    let failed = show(ground, &id);
    insta::assert_snapshot!("failed-json", shape(&failed));
    let text = ground.run(&["jobs", "show", &id]).good();
    assert!(
        text.contains("error        no such file") && text.contains(&DIGEST.short()) && text.contains("progress     rows 40 %"),
        "{text}"
    );
    insta::assert_snapshot!("status-json", shape(&ground.run(&["status", "--json"]).json()));
    insta::assert_snapshot!("hosts-json", settled(&shape(&ground.run(&["hosts", "list", "--json"]).json()), &[]));
    let hosts = ground.run(&["hosts", "list"]).good();
    assert!(hosts.contains("stage:1"), "{hosts}");
    assert!(ground.run(&["status"]).good().contains("live hosts run c"));
}

fn commands_on_jobs_say_what_they_did_and_codes_say_whether(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    let waiting = enqueue(ground, &["--payload", "{}"]);
    assert_eq!(ground.run(&["jobs", "cancel", &waiting]).good(), format!("{waiting}  deleted before it ran\n"));
    assert_eq!(show(ground, &waiting)["state"], "Deleted");
    let ended = ground.run(&["jobs", "cancel", &waiting, NOBODY, "--json"]);
    assert_eq!(ended.code, 4);
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&ended.stdout).expect("JSON"),
        serde_json::json!([
            { "id": waiting, "verdict": "not-now", "state": "Deleted" },
            { "id": NOBODY, "verdict": "unknown", "state": null },
        ])
    );
    assert_eq!(ground.run(&["jobs", "requeue", &waiting]).good(), format!("{waiting}  enqueued again\n"));
    assert_eq!(show(ground, &waiting)["state"], "Enqueued");
    // The history names the person.
    let audit = show(ground, &waiting)["audit"].to_string();
    assert!(audit.contains("ada"), "{audit}");

    assert_eq!(stage.claim(1).len(), 1);
    ground.run(&["jobs", "delete", &waiting]).bad(4);
    let cancelled = ground.run(&["jobs", "cancel", &waiting]).good();
    assert!(cancelled.contains("its host has been told to stop it"), "{cancelled}");
    ground.run(&["jobs", "delete", NOBODY]).bad(3);
    let other = enqueue(ground, &["--payload", "{}"]);
    assert_eq!(ground.run(&["jobs", "delete", &other]).good(), format!("{other}  removed\n"));
    ground.run(&["jobs", "show", &other]).bad(3);
}

fn instants_are_in_utc_with_milliseconds(ground: &Ground) {
    let before = now();
    let id = enqueue(ground, &["--payload", "{}"]);
    let created = show(ground, &id)["created_at"].as_str().expect("text").to_owned();
    assert!(created.len() == 24 && created.ends_with('Z'), "{created}");
    // The id carries the same time.
    let millis = i64::from_str_radix(&id.replace('-', "")[..12], 16).expect("hexadecimal");
    assert!((millis - before.0).unsigned_abs() < Duration::from_secs(60).as_millis() as u64);
}
