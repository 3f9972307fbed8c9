//! Help is part of the interface: every page is held, so that a change of one is seen in review.

use crate::Ground;

const PAGES: &[&[&str]] = &[
    &[],
    &["run"],
    &["enqueue"],
    &["jobs"],
    &["jobs", "list"],
    &["jobs", "show"],
    &["jobs", "logs"],
    &["jobs", "cancel"],
    &["jobs", "requeue"],
    &["jobs", "delete"],
    &["keys"],
    &["keys", "list"],
    &["keys", "show"],
    &["limits"],
    &["limits", "set"],
    &["limits", "remove"],
    &["hosts"],
    &["hosts", "pause"],
    &["hosts", "resume"],
    &["queues"],
    &["queues", "list"],
    &["queues", "pause"],
    &["queues", "resume"],
    &["status"],
    &["plugins"],
    &["grant"],
    &["new"],
    &["wit"],
    &["try"],
    &["check"],
    &["inspect"],
    &["pack"],
    &["diff"],
    &["migrate"],
    &["locks"],
    &["locks", "show"],
    &["locks", "set"],
    &["doctor"],
    &["backup"],
    &["bench"],
    &["completions"],
];

#[test]
fn every_page() {
    let ground = Ground::new();
    for page in PAGES {
        let help = ground.run(&[page, &["--help"][..]].concat()).good();
        let name = if page.is_empty() { "warp-host".to_owned() } else { page.join("-") };
        insta::assert_snapshot!(name, help);
    }
}

/// A command that is missing above would have no held page.
#[test]
fn no_command_is_without_a_page() {
    let ground = Ground::new();
    let help = ground.run(&["--help"]).good();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names: Vec<_> =
        commands.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split_whitespace().next()).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names.iter().filter(|name| **name != "help") {
        assert!(PAGES.iter().any(|page| page.first() == Some(name)), "{name}");
    }
}

#[test]
fn completions_know_the_commands_and_nothing_else_is_needed_for_them() {
    let ground = Ground::new();
    ground.write("warp.toml", "broken = [");
    for shell in ["bash", "zsh", "fish"] {
        let script = ground.run(&["completions", shell]).good();
        assert!(script.contains("enqueue") && script.contains("requeue"), "{shell}");
    }
    ground.run(&["completions", "tcsh"]).bad(2);
}

#[test]
fn wrong_usage_is_2() {
    let ground = Ground::new();
    for args in [&["fly"][..], &[], &["jobs", "show", "42"], &["limits", "set", "k", "-1"], &["enqueue", "c"], &["enqueue", "c", "x"]] {
        ground.run(args).bad(2);
    }
}
