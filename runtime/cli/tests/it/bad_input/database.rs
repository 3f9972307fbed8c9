//! Database files that cannot be used, now or at all.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use warp_domain::ending::State;

use super::{Host, Site, assert_reads, guest, packed};
use crate::Ground;
use crate::database::sql;

const GRANT: &str = "[grant.hostile]\nstate = [\"balances\"]\n";
const HOSTILE: &str = "format = 1\n[plugin]\nname = \"hostile\"\nversion = \"1.0.0\"\n[handler.hostile]\n[capabilities]\nstate = [{ bucket = \"balances\" }]\n";

/// Puts a file there.
type Make = fn(&Ground);

#[test]
fn a_file_that_is_not_ours_to_use_is_refused_by_everybody_and_left_as_it_is() {
    let newer = |ground: &Ground| {
        ground.run(&["migrate"]).good();
        drop(sql(ground, "INSERT INTO migration (number, name) VALUES (99, '0099_future'); PRAGMA wal_checkpoint(TRUNCATE)"));
    };
    let text =
        |ground: &Ground| ground.write("warp.db", "these are notes, and long enough to have a header of a hundred bytes. ".repeat(3));
    let foreign = |ground: &Ground| drop(sql(ground, "CREATE TABLE recipe (name TEXT)"));
    let too_new = format!(
        "the database has schema version 99 and this build knows {}; run the newer warp-host that migrated it, or restore a backup from before",
        warp_store_sqlite::SCHEMA_VERSION
    );
    let cases: [(&str, Make, i32, &str); 3] = [
        ("newer", newer, 5, &too_new),
        ("a text", text, 2, "warp.db is not a SQLite database; name another file, or move this one away to start afresh"),
        ("another program's", foreign, 5, "the file holds a database of another program (it has `recipe`); name another file"),
    ];
    for (what, make, code, expected) in cases {
        let ground = Ground::new();
        make(&ground);
        let before = std::fs::read(ground.path("warp.db")).expect("a file");
        for (args, op) in [
            (&["run"][..], "open the database"),
            (&["enqueue", "echo", "--payload", "{}"], "open the database"),
            (&["jobs", "list"], "open the database"),
            (&["migrate"], "migrate the database"),
        ] {
            assert_eq!(ground.run(args).bad(code), format!("error: failed to {op}: {expected}\n"), "{what}: {args:?}");
        }
        assert!(std::fs::read(ground.path("warp.db")).expect("a file") == before, "{what}: the file was changed");
    }
}

/// Another process holds a write transaction for a while: everybody waits, nobody fails, nothing is lost.
#[test]
fn a_locked_file_is_waited_for() {
    let site = Site::on(Ground::new(), "warp.db", GRANT);
    site.put("hostile.wasm", packed(&guest("hostile"), HOSTILE));
    let host = Host::start(&site);
    let running = site.enqueue("hostile", "\"sleep 2000\"");
    site.until(&running, "running", |job| job.summary.state == State::Processing);
    let held = sql(&site.ground, "BEGIN IMMEDIATE");
    let args = ["enqueue", "echo", "--payload", "\"waited\""];
    let mut enqueue = site.ground.command().args(args).stdout(Stdio::piped()).spawn().expect("the program starts");
    // Nothing tells that somebody waits for a lock. The run ends meanwhile, and its end waits as well.
    std::thread::sleep(Duration::from_secs(3));
    assert!(enqueue.try_wait().expect("it is ours").is_none(), "it does not wait");
    assert_eq!(site.job(&running).summary.state, State::Processing);
    drop(held);
    let enqueued = enqueue.wait_with_output().expect("it ends");
    assert!(enqueued.status.success());
    let waited = site.ended(String::from_utf8(enqueued.stdout).expect("an id").trim());
    assert_eq!((waited.summary.state, waited.result.as_deref()), (State::Completed, Some("\"waited\"")));
    let job = site.ended(&running);
    assert_eq!((job.summary.state, job.summary.runs), (State::Completed, 1), "{job:?}");
    site.works(&host);
    host.stop();
}

/// A file that nobody may write until it is dropped.
struct ReadOnly(PathBuf);

impl ReadOnly {
    /// `None` where this process may write everything whatever it does.
    fn make(path: &Path) -> Option<Self> {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o444)).expect("rights");
        let made = ReadOnly(path.to_owned());
        // The rights of a file stop nobody who is a superuser; the attribute does.
        let told = Command::new("chattr")
            .arg("+i")
            .arg(path)
            .output()
            .map_or_else(|error| error.to_string(), |said| String::from_utf8_lossy(&said.stderr).into_owned());
        if std::fs::OpenOptions::new().write(true).open(path).is_err() {
            return Some(made);
        }
        eprintln!("NOT RUN: this user may write every file, and `chattr +i` does not work here: {told}");
        None
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        // Where the attribute was never set there is nothing to take away.
        let _ = Command::new("chattr").arg("-i").arg(&self.0).output();
    }
}

#[test]
fn a_read_only_file_can_be_looked_at_and_says_what_it_is() {
    let ground = Ground::new();
    ground.run(&["migrate"]).good();
    let id = ground.run(&["enqueue", "echo", "--payload", "{}"]).good().trim().to_owned();
    let Some(read_only) = ReadOnly::make(&ground.path("warp.db")) else { return };
    for (args, op) in [(&["enqueue", "echo", "--payload", "{}"][..], "enqueue jobs"), (&["jobs", "cancel", &id], "cancel a job")] {
        let expected = format!(
            "error: failed to {op}: warp.db is read-only for this process (error returned from database: (code: 8) attempt to write a \
             readonly database); allow it to write the file and its directory, or name another file\n"
        );
        assert_eq!(ground.run(args).bad(5), expected);
    }
    let refused = ground.run(&["run", "--log-level", "error"]).bad(5);
    assert_reads(
        "run",
        refused.lines().last().expect("a line"),
        "error: failed to register a host: warp.db is read-only for this process (…",
    );
    assert_eq!(ground.run(&["jobs", "list", "--json"]).json()[0]["id"], id);
    drop(read_only);
    std::fs::set_permissions(ground.path("warp.db"), PermissionsExt::from_mode(0o644)).expect("rights");
    ground.run(&["jobs", "cancel", &id]).good();
}
