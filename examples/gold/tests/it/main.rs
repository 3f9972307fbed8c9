//! The whole story, small: builds the plugin, plays every scene on real hosts, and reads the table that people read.

use std::collections::BTreeSet;
use std::process::Command;

/// Which scenes have to be in the table; one that is left out must not pass.
const SCENES: &str = "abcdefgh";

#[test]
fn every_scene_finds_what_it_expects() {
    plays(&[]);
}

#[test]
fn every_scene_finds_what_it_expects_on_a_server() {
    plays(&["--postgres", "ledger"]);
}

#[test]
fn every_scene_finds_what_it_expects_under_session_locks() {
    plays(&["--postgres", "session"]);
}

#[track_caller]
fn plays(args: &[&str]) {
    let played = Command::new(env!("CARGO_BIN_EXE_gold")).arg("--quick").args(args).output().expect("the story starts");
    let table = String::from_utf8(played.stdout).expect("the table is UTF-8");
    let messages = String::from_utf8_lossy(&played.stderr);

    let mut seen = BTreeSet::new();
    for row in table.lines().skip(2) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [scene, _, _, verdict, _] = cells.as_slice() else { panic!("not a row of the table: {row}\n{table}\n{messages}") };
        assert_eq!(*verdict, "right", "{scene}\n{table}\n{messages}");
        seen.extend(scene.chars().next());
    }
    assert_eq!(seen, SCENES.chars().collect(), "{table}\n{messages}");
    assert!(played.status.success(), "{table}\n{messages}");
}
