//! Queues and hosts that start nothing new.

use crate::Ground;
use crate::stage::Stage;

on_each_database! {
    a_paused_queue_starts_nothing_and_says_so
    a_paused_host_starts_nothing_and_is_found_by_its_name
}

fn enqueue(ground: &Ground) -> String {
    ground.run(&["enqueue", "c", "--payload", "{}"]).good().trim().to_owned()
}

fn a_paused_queue_starts_nothing_and_says_so(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    let job = enqueue(ground);
    assert_eq!(ground.run(&["queues", "list", "--json"]).good(), "[]\n");
    let said = ground.run(&["queues", "pause", "default"]).good();
    assert_eq!(said, "the queue `default` starts nothing new; what runs goes on\n");
    assert_eq!(ground.run(&["queues", "pause", "default", "--by", "eve"]).good(), "the queue `default` was paused already\n");
    let listed = ground.run(&["queues", "list", "--json"]).json();
    assert_eq!((&listed[0]["queue"], &listed[0]["paused"]["by"]), (&"default".into(), &"ada".into()), "the first word stands");
    assert!(ground.run(&["status"]).good().contains("the queue `default` is paused by ada\n"));
    assert_eq!(stage.claim(1).len(), 0);
    assert_eq!(ground.run(&["jobs", "show", &job, "--json"]).json()["waiting"]["for"], "queue");
    let page = ground.run(&["jobs", "show", &job]).good();
    assert!(page.contains("its queue `default` is paused by ada for "), "{page}");

    assert_eq!(ground.run(&["queues", "resume", "default"]).good(), "the queue `default` goes on\n");
    let json = ground.run(&["queues", "resume", "default", "--json"]).json();
    assert_eq!(json, serde_json::json!({ "what": "queue", "name": "default", "paused": false, "changed": false }));
    assert_eq!(stage.claim(1).len(), 1);
    ground.run(&["queues", "pause", ""]).bad(2);
}

fn a_paused_host_starts_nothing_and_is_found_by_its_name(ground: &Ground) {
    let stage = Stage::new(ground, "c");
    enqueue(ground);
    assert_eq!(ground.run(&["hosts", "pause", "stage:1"]).good(), "the host `stage:1` starts nothing new; what runs goes on\n");
    assert_eq!(stage.claim(1).len(), 0);
    assert_eq!(ground.run(&["hosts", "list", "--json"]).json()[0]["paused"]["by"], "ada");
    assert!(ground.run(&["hosts", "list"]).good().contains("paused by ada"));
    assert_eq!(ground.run(&["hosts", "resume", "stage:1"]).good(), "the host `stage:1` goes on\n");
    assert_eq!(stage.claim(1).len(), 1);
    let stderr = ground.run(&["hosts", "pause", "nobody:1"]).bad(3);
    assert_eq!(stderr, "error: no host \"nobody:1\" is registered; `warp-host hosts list` names them\n");
}
