//! Where settings come from, through the real environment.

use crate::Ground;

#[test]
fn print_config_says_where_each_value_came_from() {
    let ground = Ground::new();
    ground.write("warp.toml", "# ours\nworkers = 3\ngrace = \"1m\"\n\n[retention]\nfailed = \"30d\"\n");
    let mut command = ground.command();
    command.args(["run", "--print-config", "--json", "--lease", "20s"]).env("WARP_QUEUES", "a,b").env("WARP_GRACE", "2m");
    let output = command.output().expect("it starts");
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    let row = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name}"));
        (row["value"].as_str().expect("text").to_owned(), row["origin"].as_str().expect("text").to_owned())
    };
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    assert_eq!(row("workers"), pair("3", "warp.toml:2"));
    assert_eq!(row("grace"), pair("2m", "WARP_GRACE"));
    assert_eq!(row("queues"), pair("a,b", "WARP_QUEUES"));
    assert_eq!(row("lease"), pair("20s", "--lease"));
    assert_eq!(row("retention.failed"), pair("30d", "warp.toml:6"));
    assert_eq!(row("retention.completed"), pair("1d", "default"));
}

#[test]
fn a_mistake_in_the_file_stops_with_its_line() {
    let ground = Ground::new();
    ground.write("warp.toml", "workers = 3\nworker = 4\n");
    let stderr = ground.run(&["run", "--print-config"]).bad(2);
    assert_eq!(stderr, "error: warp.toml:2: unknown key `worker`; the nearest that exists is `workers`\n");
    ground.write("other.toml", "workers = 9\n");
    let table = ground.run(&["run", "--print-config", "--config", "other.toml"]).good();
    assert!(table.lines().any(|line| line.starts_with("workers") && line.trim_end().ends_with("other.toml:1")), "{table}");
    let stderr = ground.run(&["status", "--config", "none.toml"]).bad(2);
    assert!(stderr.starts_with("error: failed to read the configuration none.toml: "), "{stderr}");
}

/// A handler project has a manifest of the same name.
#[test]
fn a_manifest_is_no_configuration() {
    let ground = Ground::new();
    ground.write("warp.toml", "format = 1\n[plugin]\nname = \"a\"\nversion = \"1\"\n");
    let table = ground.run(&["run", "--print-config"]).good();
    assert!(!table.contains("warp.toml:"), "{table}");
    let stderr = ground.run(&["run", "--print-config", "--config", "warp.toml"]).bad(2);
    assert_eq!(stderr, "error: warp.toml is a plugin's manifest, and no configuration of a host\n");
    let stderr = ground.run(&["grant", "a"]).bad(4);
    assert!(stderr.contains("is a plugin's manifest; name the host's own with --config"), "{stderr}");
}

#[test]
fn a_host_that_ends_when_idle_does_not_wait_for_plugins_that_are_not_there() {
    let ground = Ground::new();
    let stderr = ground.run(&["run", "--until-idle", "--plugins", "plugin"]).bad(2);
    assert_eq!(stderr, "error: there is no directory plugin (from --plugins)\n");
    assert!(!ground.path("warp.db").exists());
}

#[test]
fn a_database_of_another_kind_is_refused_by_name() {
    let ground = Ground::new();
    // Settings can be looked up all the same, with a word about it.
    let looked = ground.run(&["run", "--print-config", "--database-url", "sqlserver://ada:secret@db/jobs"]);
    assert!(looked.stderr.contains("sqlserver is not supported by this version"), "{}", looked.stderr);
    assert!(looked.good().contains("sqlserver://ada:***@db/jobs"));
    let stderr = ground.run(&["status", "--database-url", "sqlserver://ada:secret@db/jobs"]).bad(2);
    assert_eq!(
        stderr,
        "error: sqlserver://ada:***@db/jobs (from --database-url): sqlserver is not supported by this version; write `sqlite:PATH` or \
         `postgres://USER@HOST/NAME`\n"
    );
    for (url, why) in [
        ("mssql://db", "mssql is not supported by this version"),
        ("warp.db", "is not a database URL; write `sqlite:warp.db` for a file"),
        ("sqlite:", "has no path"),
        ("sqlite::memory:", "a database in memory would be gone with each command"),
        ("mysql://db", "`mysql` is no kind of database that is known"),
    ] {
        let stderr = ground.run(&["status", "--database-url", url]).bad(2);
        assert!(stderr.contains(why), "{stderr}");
    }
}
