//! A database on a server: made, brought up to date, and everything that can be wrong on the way to it.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use warp_domain::ending::Ending;
use warp_test_servers::{Cluster, Database, PgBouncer, PoolMode, Stop, Tls};

use crate::{Ended, Ground};

/// Runs a command on a database at this URL.
fn at(ground: &Ground, url: &str, args: &[&str]) -> Ended {
    ground.run(&[args, &["--database-url", url]].concat())
}

/// The address as texts show it: without a password, and without parameters.
fn shown(url: &str) -> String {
    let url = url.split('?').next().unwrap_or(url);
    match (url.find("://"), url.find('@')) {
        (Some(scheme), Some(host)) => {
            let user = url[scheme + 3..host].split(':').next().unwrap_or_default();
            format!("{}{user}{}", &url[..scheme + 3], &url[host..])
        }
        _ => url.to_owned(),
    }
}

#[test]
fn migrate_makes_the_schema_once_and_a_dry_run_changes_nothing() {
    let ground = Ground::on_empty_server();
    let sql = ground.run(&["migrate", "--dry-run"]).good();
    assert!(sql.starts_with("-- 0001_jobs\n") && sql.contains("CREATE TABLE"), "{sql}");
    ground.run(&["status"]).bad(5);
    let name = shown(ground.server().url());
    assert_eq!(ground.run(&["migrate"]).good(), format!("created the schema warp in {name}\n"));
    assert_eq!(ground.run(&["migrate"]).good(), format!("{name} is up to date\n"));
    let ended = ground.run(&["migrate", "--dry-run"]);
    assert_eq!((ended.stdout.as_str(), ended.stderr), ("", format!("{name} is up to date\n")));
    let json = ground.run(&["migrate", "--json"]).json();
    assert_eq!(json, serde_json::json!({"database": name, "created": false, "dry_run": false, "migrations": []}));
    ground.run(&["status"]).good();
}

#[test]
fn the_script_of_the_schema_makes_what_migrate_makes() {
    let ground = Ground::on_empty_server();
    let script = ground.run(&["migrate", "--sql", "--database-schema", "jobs"]).good();
    ground.server().execute(&script).expect("good SQL");
    let name = shown(ground.server().url());
    let said = ground.run(&["migrate", "--database-schema", "jobs"]).good();
    assert_eq!(said, format!("{name}, schema jobs is up to date\n"));
    let id = ground.run(&["enqueue", "c", "--payload", "{}", "--database-schema", "jobs"]).good();
    assert_eq!(ground.run(&["jobs", "list", "--json", "--database-schema", "jobs"]).json()[0]["id"], id.trim());
    // The usual schema of the same database is another matter.
    ground.run(&["status"]).bad(5);
}

#[test]
fn a_host_does_not_touch_the_schema_unless_it_is_told_to() {
    let ground = Ground::on_empty_server();
    std::fs::create_dir(ground.path("plugins")).expect("a directory");
    let name = shown(ground.server().url());
    let missing = format!("error: failed to open the database: {name} has no schema warp yet; run `warp-host migrate`\n");
    assert_eq!(ground.run(&["run", "--until-idle"]).bad(5), missing);
    assert_eq!(ground.run(&["jobs", "list"]).bad(5), missing);
    ground.run(&["run", "--until-idle", "--migrate"]).good();
    ground.server().execute("INSERT INTO warp.migration (number, name, checksum) VALUES (99, '0099_future', '')").expect("good SQL");
    for (args, op) in [(&["run"][..], "open"), (&["run", "--migrate"], "migrate"), (&["status"], "open"), (&["migrate"], "migrate")] {
        let stderr = ground.run(args).bad(5);
        let expected = format!("error: failed to {op} the database: {name}: the schema warp has version 99 and this build knows ");
        assert!(stderr.starts_with(&expected), "{args:?}: {stderr}");
        assert!(stderr.ends_with("; run the newer warp-host that migrated it, or restore a backup from before\n"), "{stderr}");
    }
}

/// Everything that the way to a database can be, but good.
#[test]
fn what_is_wrong_with_a_connection_is_said_with_what_to_do() {
    let ground = Ground::new();
    let cluster = Cluster::functional().password("s3cret").start().expect("a cluster");
    let port = cluster.port();
    let at_port = |user: &str, database: &str| format!("postgres://{user}@127.0.0.1:{port}/{database}");
    let told = |user: &str| format!("postgres://{user}@127.0.0.1:{port}/postgres");
    let cases = [
        (
            at_port("postgres:wr0ng", "postgres"),
            format!(
                "{} refuses this login (password authentication failed for user \"postgres\"); check user, password and the server's pg_hba.conf",
                told("postgres")
            ),
        ),
        (
            at_port("nobody:s3cret", "postgres"),
            format!(
                "{} refuses this login (password authentication failed for user \"nobody\"); check user, password and the server's pg_hba.conf",
                told("nobody")
            ),
        ),
        (
            at_port("postgres:s3cret", "absent"),
            format!("postgres://postgres@127.0.0.1:{port}/absent: database \"absent\" does not exist; create it, or name another database"),
        ),
    ];
    for (url, expected) in cases {
        let stderr = at(&ground, &url, &["status"]).bad(5);
        assert_eq!(stderr, format!("error: failed to open the database: {expected}\n"));
        assert!(!stderr.contains("wr0ng") && !stderr.contains("s3cret"), "{stderr}");
    }
    for (url, expected) in [
        ("postgres://ada@no-such-host.invalid/jobs", "postgres://ada@no-such-host.invalid:5432/jobs cannot be reached ("),
        ("postgres://ada@127.0.0.1:1/jobs", "postgres://ada@127.0.0.1:1/jobs cannot be reached ("),
    ] {
        let stderr = at(&ground, url, &["status"]).bad(5);
        assert!(stderr.starts_with(&format!("error: failed to open the database: {expected}")), "{stderr}");
        assert!(stderr.ends_with("); check address, port and network\n"), "{stderr}");
    }
}

/// The password is asked for at each connection, from wherever it is, and shown nowhere.
#[test]
fn a_password_comes_from_a_file_or_a_command() {
    let ground = Ground::new();
    let cluster = Cluster::functional().password("s3cret").start().expect("a cluster");
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", cluster.port());
    ground.write("password", "s3cret\n");
    at(&ground, &url, &["migrate", "--database-password-file", "password"]).good();
    ground.write("warp.toml", format!("[database]\nurl = \"{url}\"\npassword_command = \"cat password\"\n"));
    ground.run(&["status"]).good();
    ground.write("warp.toml", format!("[database]\nurl = \"{url}\"\npassword_command = \"echo no vault >&2; exit 3\"\n"));
    let stderr = ground.run(&["status"]).bad(5);
    assert_eq!(stderr, "error: failed to open the database: the password command failed (exit status: 3): no vault\n");
    let config = ground.run(&["run", "--print-config", "--database-url", &url.replace("postgres@", "postgres:s3cret@")]).good();
    assert!(!config.contains("s3cret") && !config.contains("vault"), "{config}");
}

#[test]
fn a_read_only_database_is_refused_before_anything_is_tried() {
    let ground = Ground::on_postgres();
    let name = shown(ground.server().url());
    let database = ground.server().name();
    ground.server().execute(&format!("ALTER DATABASE {database} SET default_transaction_read_only = on")).expect("good SQL");
    for (args, op) in [(&["run"][..], "open"), (&["enqueue", "c", "--payload", "{}"], "open"), (&["migrate"], "migrate")] {
        let expected = format!(
            "error: failed to {op} the database: {name} makes every transaction read-only (default_transaction_read_only); change that for \
             this role or database\n"
        );
        assert_eq!(ground.run(args).bad(5), expected, "{args:?}");
    }
}

#[test]
fn a_standby_is_named_as_one() {
    let ground = Ground::new();
    let cluster = Cluster::functional().start().expect("a cluster");
    let url = cluster.url("postgres");
    at(&ground, &url, &["migrate"]).good();
    std::fs::write(cluster.data().join("standby.signal"), "").expect("a file");
    cluster.restart(Stop::Fast).expect("a standby");
    for (args, op) in [(&["run"][..], "open"), (&["jobs", "list"], "open"), (&["migrate"], "migrate")] {
        let expected = format!(
            "error: failed to {op} the database: {} is a read-only standby; name the primary, or the address that follows it\n",
            shown(&url)
        );
        assert_eq!(at(&ground, &url, args).bad(5), expected, "{args:?}");
    }
}

/// Encrypted, with both sides known by their certificates.
#[test]
fn certificates_are_settings_like_any_other() {
    let ground = Ground::new();
    let (tls, stranger) = (Tls::new("postgres").expect("certificates"), Tls::new("postgres").expect("other certificates"));
    let cluster = Cluster::functional().tls_with_client_certificate(&tls).start().expect("a cluster");
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", cluster.port());
    let settings = |root: &Tls| {
        format!(
            "[database]\nurl = {url:?}\nsslmode = \"verify-full\"\nroot_cert = {:?}\nclient_cert = {:?}\nclient_key = {:?}\n",
            root.root(),
            tls.client_certificate(),
            tls.client_key()
        )
    };
    ground.write("warp.toml", settings(&tls));
    ground.run(&["migrate"]).good();
    ground.write("warp.toml", settings(&stranger));
    let stderr = ground.run(&["status"]).bad(5);
    assert!(stderr.contains(&format!("the certificate of {url} is signed by no authority that is trusted here")), "{stderr}");
    ground.write("warp.toml", format!("[database]\nurl = {url:?}\nsslmode = \"require\"\n"));
    let stderr = ground.run(&["status"]).bad(5);
    assert!(stderr.contains("asks for a client certificate (connection requires a valid client certificate)"), "{stderr}");
}

fn behind(database: &Database, mode: PoolMode) -> (PgBouncer, String) {
    let pooler = PgBouncer::in_front_of(database.url()).mode(mode).pool_size(20).start().expect("a pooler");
    let url = pooler.url(database.name());
    (pooler, url)
}

#[test]
fn a_transaction_pooler_carries_the_ledger_and_is_refused_under_session_locks() {
    let ground = Ground::on_postgres();
    std::fs::create_dir(ground.path("plugins")).expect("a directory");
    let (_pooler, url) = behind(ground.server(), PoolMode::Transaction);
    let id = at(&ground, &url, &["enqueue", "c", "--payload", "{}"]).good();
    assert_eq!(at(&ground, &url, &["jobs", "list", "--json"]).json()[0]["id"], id.trim());
    at(&ground, &url, &["run", "--until-idle"]).good();

    assert_eq!(ground.run(&["locks", "set", "session"]).good(), "slots are made of session locks from now on\n");
    let id = at(&ground, &url, &["enqueue", "c", "--payload", "{}", "--mutex", "k"]).good();
    assert_eq!(at(&ground, &url, &["jobs", "list", "--json"]).json()[0]["id"], id.trim(), "whoever takes no slot needs no session");
    let stderr = at(&ground, &url, &["run", "--until-idle"]).bad(2);
    let last = stderr.lines().last().expect("a line");
    let expected = format!("error: failed to open the database: {} is behind a pooler in transaction mode (", shown(&url));
    assert!(last.starts_with(&expected), "{last}");
    for remedy in ["direct address", "a pooler in session mode", "`warp-host locks set ledger`", "Neon", "Supabase", "Azure"] {
        assert!(last.contains(remedy), "{remedy}: {last}");
    }
    ground.run(&["run", "--until-idle"]).good();
}

#[test]
fn what_slots_are_made_of_is_the_databases_word() {
    let ground = Ground::on_empty_server();
    let name = shown(ground.server().url());
    ground.run(&["migrate", "--locks", "session"]).good();
    let shown = ground.run(&["locks", "show", "--json"]).json();
    assert_eq!((&shown["locks"], &shown["set_by"]), (&"session".into(), &"migrate".into()), "{shown}");
    let stderr = ground.run(&["run", "--database-locks", "ledger"]).bad(2);
    assert_eq!(
        stderr,
        format!(
            "error: failed to open the database: {name}: slots are made of session locks (set by migrate), not of ledger locks; change the \
             settings, or the database with `warp-host locks set ledger` while nothing holds a slot\n"
        )
    );
    ground.run(&["migrate", "--locks", "ledger"]).bad(2);
    assert_eq!(ground.run(&["locks", "set", "ledger", "--by", "eve"]).good(), "slots are made of ledger locks from now on\n");
    let text = ground.run(&["locks", "show"]).good();
    assert!(text.starts_with("ledger, set by eve at "), "{text}");
    let stderr = ground.run(&["locks", "set", "rows"]).bad(2);
    assert!(stderr.contains("write `ledger` or `session`"), "{stderr}");

    let on_file = Ground::migrated();
    assert_eq!(on_file.run(&["locks", "show"]).good(), "ledger, as in every SQLite file\n");
    let why = "a SQLite file keeps its slots in a ledger; session locks need PostgreSQL\n";
    assert_eq!(on_file.run(&["locks", "set", "session"]).bad(4), format!("error: {why}"));
    assert_eq!(on_file.run(&["migrate", "--locks", "session"]).bad(4), format!("error: {why}"));
    assert_eq!(on_file.run(&["run", "--database-locks", "session"]).bad(2), format!("error: --database-locks: {why}"));
}

#[test]
fn a_slot_that_is_held_keeps_its_kind() {
    let ground = Ground::on_postgres();
    let stage = crate::stage::Stage::new(&ground, "c");
    // By how much it is silent depends on the machine.
    let refused = || {
        let stderr = ground.run(&["locks", "set", "session"]).bad(4);
        let (before, after) = stderr.split_once("silent for ").unwrap_or_else(|| panic!("{stderr}"));
        format!(
            "{before}silent for {}",
            after.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches('m').trim_start_matches('s')
        )
    };
    let (why, todo) = (
        "error: two kinds of slots on one key would exclude nobody, and there is the host stage:1, silent for ",
        "; stop what runs; a host that was killed is taken for dead when it has been watched for 15s without renewing, by a host that runs or by \
         `warp-host locks set session --wait`\n",
    );
    assert_eq!(refused(), format!("{why}{todo}"));
    ground.run(&["enqueue", "c", "--payload", "{}", "--mutex", "k"]).good();
    assert_eq!(stage.claim(1).len(), 1);
    assert_eq!(refused(), format!("{why} and 1 slot that is held{todo}"));
    assert!(ground.run(&["locks", "show"]).good().starts_with("ledger"));
}

/// A host that says nothing any more, with a run, a slot, and somebody in line for it; another slot is reserved for a job that
/// it will not claim; and nobody is left to rescue it.
#[test]
fn the_kind_changes_though_the_last_host_was_killed() {
    let ground = Ground::on_postgres();
    let stage = crate::stage::Stage::new(&ground, "c");
    let enqueue = |key: &str| ground.run(&["enqueue", "c", "--payload", "{}", "--mutex", key, "--mode", "wait"]).good().trim().to_owned();
    let (first, jobs) = (enqueue("r"), [enqueue("k"), enqueue("k"), enqueue("r")]);
    let claimed = stage.claim(9);
    assert_eq!(claimed.len(), 2, "one for each key");
    let first = claimed.iter().find(|run| run.id.to_string() == first).expect("it came first");
    stage.settle(first, Ending::Completed { result: None }, &[]);
    let shown = ground.run(&["jobs", "show", &jobs[2]]).good();
    assert!(shown.contains("reserved"), "{shown}");
    let lease = [("WARP_LEASE", "8s")];
    let ended = ground.run_in(&["locks", "set", "session", "--wait", "100ms"], &lease);
    let stderr = ended.bad(4);
    assert!(stderr.starts_with("waiting for 100ms at most: there is the host stage:1, silent for "), "{stderr}");
    assert!(stderr.contains("; a host that does not renew for 8s from now on is taken for dead\n"), "{stderr}");
    assert!(ground.run(&["locks", "show"]).good().starts_with("ledger"), "nobody has watched it for long enough");
    let ended = ground.run_in(&["locks", "set", "session", "--wait"], &lease);
    let said = format!("stage:1 did not renew for 8s and was taken for dead: 1 job given back\n");
    assert!(ended.stderr.ends_with(&said), "{}", ended.stderr);
    assert_eq!(ended.good(), "slots are made of session locks from now on\n");
    for job in jobs {
        let shown = ground.run(&["jobs", "show", &job, "--json"]).json();
        assert_eq!(shown["state"], "Enqueued", "{shown}");
    }
    // Whoever comes back from the dead is a stranger.
    assert!(ground.run(&["hosts", "list"]).good().lines().count() <= 1, "its registration is gone");
}

/// A host that lives is never taken for dead, however long somebody waits.
#[test]
fn a_host_that_lives_is_waited_for() {
    let ground = Ground::on_postgres();
    std::fs::create_dir(ground.path("plugins")).expect("a directory");
    let mut host = ground.command().args(["run", "--lease", "8s"]).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut command = ground.command();
    command.args(["locks", "set", "session", "--wait", "2m"]).env("WARP_LEASE", "8s").stdout(Stdio::piped()).stderr(Stdio::piped());
    while ground.run(&["hosts", "list", "--json"]).json().as_array().is_none_or(Vec::is_empty) {
        assert!(host.try_wait().expect("looked at").is_none(), "the host has ended");
    }
    let mut waiting = command.spawn().expect("the program starts");
    let mut lines = BufReader::new(waiting.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    assert!(lines.next().expect("a line").starts_with("waiting for 2m at most"));
    let told = lines.next().expect("another line");
    assert!(told.starts_with("the host ") && told.ends_with(" is running: stop it"), "{told}");
    assert!(ground.run(&["locks", "show"]).good().starts_with("ledger"));
    let pid = rustix::process::Pid::from_child(&host);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("told to stop");
    host.wait().expect("it ends");
    assert!(waiting.wait().expect("it ends").success());
    assert!(ground.run(&["locks", "show"]).good().starts_with("session"));
}

#[test]
fn the_doctor_says_what_he_sees_and_his_code_how_bad_it_is() {
    let ground = Ground::on_empty_server();
    let finding = |report: &serde_json::Value, what: &str| {
        let found = report["findings"].as_array().expect("a list").iter().find(|finding| finding["what"] == what);
        found.unwrap_or_else(|| panic!("nothing about {what}: {report}")).clone()
    };
    let ended = ground.run(&["doctor", "--json"]);
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(finding(&report, "schema")["level"], "fail");
    assert_eq!(finding(&report, "connection")["level"], "ok");

    ground.run(&["migrate"]).good();
    let report = ground.run(&["doctor", "--json"]).json();
    assert_eq!(finding(&report, "pooling")["level"], "ok");
    let budget = finding(&report, "budget")["text"].to_string();
    assert!(budget.contains("a host takes at most 8 connections (pool 5 + 3)"), "{budget}");
    let text = ground.run(&["doctor"]).good();
    assert!(text.starts_with(&shown(ground.server().url())) && text.contains("PostgreSQL "), "{text}");

    let (_pooler, url) = behind(ground.server(), PoolMode::Transaction);
    let pooled = ground.run(&["doctor", &url, "--json"]);
    let report: serde_json::Value = serde_json::from_str(&pooled.stdout).expect("JSON");
    assert_eq!(pooled.code, 0, "the ledger works there: {report}");
    assert_eq!(finding(&report, "listen")["level"], "warn");

    let ended = ground.run(&["doctor", "postgres://ada@127.0.0.1:1/jobs", "--json"]);
    assert_eq!(ended.code, 5, "{}", ended.stdout);
    let on_file = Ground::new();
    assert_eq!(on_file.run(&["doctor"]).code, 5);
    on_file.run(&["migrate"]).good();
    on_file.run(&["doctor"]).good();
}

#[test]
fn a_backup_says_what_to_use_instead() {
    let ground = Ground::on_postgres();
    let stderr = ground.run(&["backup", "copy.db"]).bad(4);
    assert_eq!(
        stderr,
        "error: a database on a server is copied by its own tools: `pg_dump --format=custom --schema=warp`, and `pg_restore`\n"
    );
}

/// The host says how many connections it takes before it takes them.
#[test]
fn the_budget_is_printed_at_the_start() {
    let ground = Ground::on_postgres();
    std::fs::create_dir(ground.path("plugins")).expect("a directory");
    let output =
        ground.command().args(["run", "--until-idle", "--database-pool", "2"]).stderr(Stdio::piped()).output().expect("the program starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(stderr.contains("it opens at most 5 connections (a pool of 2 and 3), and takes slots by ledger locks\n"), "{stderr}");
}
