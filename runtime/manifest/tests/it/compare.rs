//! Two versions of one plugin, several plugins of one host, and what is asked beside what is granted.

use std::fs;

use warp_manifest::{
    DEFAULT_MEMORY, FileMode, Grant, Granted, GrantedFile, HostWorld, Manifest, RefusalKind, check, check_grant, diff, pack, suggest_grant,
    warnings_across,
};

use crate::component::{TEXT, component, plain};

fn manifest(name: &str, body: &str) -> Manifest {
    let text = format!("format = 1\n[plugin]\nname = \"{name}\"\nversion = \"1\"\n{body}");
    Manifest::parse(&text, &format!("{name}.toml")).unwrap_or_else(|refusals| panic!("{refusals:?}"))
}

/// What `diff` prints between two handlers `h`.
fn changes(old: &str, new: &str) -> Vec<String> {
    diff(&manifest("p", old), &manifest("p", new)).iter().map(ToString::to_string).collect()
}

#[test]
fn every_change_of_policy_says_what_it_means_for_jobs_in_flight() {
    let handler = |body: &str| format!("[handler.h]\n{body}\n");
    for (old, new, expected) in [
        (
            "semaphore = { key = \"k\", limit = 1 }",
            "semaphore = { key = \"k\", limit = 10 }",
            "handler.h.semaphore.limit: 1 → 10; jobs that have started or are parked keep limit 1; an admin limit would change them",
        ),
        (
            "mutex = { key = \"a:{x}\" }",
            "mutex = { key = \"b:{x}\" }",
            "handler.h.mutex.key: `a:{x}` → `b:{x}`; jobs that have started or are parked keep `a:{x}`, and do not exclude jobs of `b:{x}`",
        ),
        (
            "mutex = { key = \"a\", mode = \"wait\" }",
            "mutex = { key = \"a\" }",
            "handler.h.mutex.mode: wait → skip; jobs that have started or are parked keep wait",
        ),
        (
            "mutex = { key = \"a\", mode = \"wait\" }",
            "mutex = { key = \"a\", mode = \"wait\", order = \"fifo\" }",
            "handler.h.mutex.order: any → fifo; jobs that have started or are parked keep any",
        ),
        (
            "mutex = { key = \"a\", mode = \"wait\" }",
            "semaphore = { key = \"a\", limit = 1 }",
            "handler.h.semaphore: mutex → semaphore; jobs that have started or are parked keep the mutex",
        ),
        (
            "semaphore = { key = \"a\", limit = 3 }",
            "semaphore = { key = \"a\", limit = 3, weight = 2 }",
            "handler.h.semaphore.weight: 1 → 2; jobs that have started or are parked keep weight 1",
        ),
        ("", "mutex = { key = \"a\" }", "handler.h.mutex: added: mutex `a` (skip); jobs that have started keep running without a key"),
        (
            "semaphore = { keys = [\"a\", \"b\"], limit = 3 }",
            "",
            "handler.h.semaphore: removed; jobs that have started or are parked keep semaphore `a` and `b` limit 3 (wait); those to come run \
             beside them",
        ),
        (
            "retry = { max = 3, jitter = 0.1 }",
            "retry = { max = 5, delays = [\"1s\"] }",
            "handler.h.retry: max 3 after 15s, 1m, 5m with jitter 0.1 → max 5 after 1s with jitter 0; jobs that have started keep max 3 after \
             15s, 1m, 5m with jitter 0.1",
        ),
        (
            "timeout = { per_attempt = \"30s\" }",
            "",
            "handler.h.timeout: removed; jobs that have started keep 30s (fail); those to come take the host's default",
        ),
        (
            "",
            "timeout = { per_attempt = \"30s\", mode = \"delete\" }",
            "handler.h.timeout: added: 30s (delete); jobs that have started stay with the host's default",
        ),
    ] {
        assert_eq!(changes(&handler(old), &handler(new)), [expected], "{old} → {new}");
        assert_eq!(changes(&handler(old), &handler(old)), [""; 0]);
    }
}

#[test]
fn what_wins_is_compared_and_not_what_is_written() {
    let shadowed = |max| format!("[contract.h]\nretry = {{ max = {max} }}\n[handler.h]\nretry = {{ max = 9 }}\n");
    assert_eq!(changes(&shadowed(1), &shadowed(2)), [""; 0]);
    let winning = |max| format!("[contract.h]\nretry = {{ max = {max}, delays = [\"1s\"] }}\n[handler.h]\n");
    assert_eq!(
        changes(&winning(1), &winning(2)),
        [
            "contract.h.retry: max 1 after 1s with jitter 0 → max 2 after 1s with jitter 0; jobs that have started keep max 1 after 1s with jitter 0"
        ]
    );
}

#[test]
fn contracts_that_come_move_and_go() {
    assert_eq!(
        changes("[handler.a]\n[handler.old]\nhandles = [\"moved\"]\n", "[handler.b]\n[handler.new]\nhandles = [\"moved\"]\n"),
        [
            "contract.a: no longer run by handler `a`; runs in progress end; other jobs of it, retries included, wait until some plugin runs it",
            "contract.b: now run by handler `b`; jobs of it that are waiting for a handler start",
            "contract.moved: handler `old` → `new`; the next attempt of every job, retries included, runs the new handler",
        ]
    );
}

#[test]
fn capabilities_that_change() {
    let asking = |asked: &str| format!("[handler.h]\n[capabilities]\n{asked}\n");
    let old = asking("files = [{ path = \"in\", mode = \"read\" }]\nenv = [\"A\"]\nstate = [{ bucket = \"b\" }]");
    let new = asking(
        "files = [{ path = \"in\", mode = \"write\" }]\nenv = [\"B\"]\nstate = [{ bucket = \"b\", commit = \"now\" }]\nmemory = \"1GiB\"",
    );
    assert_eq!(
        changes(&old, &new),
        [
            "capabilities.env: now asks for `B`; it does not load until `[grant.p]` holds that",
            "capabilities.files: `in`: read → write; a grant that names a mode has to allow it; runs in progress keep the old one",
            "capabilities.state: `b`: commit settle, write any → commit now, write any; runs in progress keep the old rule",
            "capabilities.env: no longer asks for `A`; runs in progress keep it",
            "capabilities.memory: the default → 1GiB; runs in progress keep the old cap; above the default it needs a grant",
        ]
    );
}

#[test]
fn of_two_plugins_that_claim_the_same_the_later_is_refused() {
    let first = manifest("first", "[handler.a]\nsemaphore = { key = \"cpu\", limit = 2 }\n");
    let second = manifest(
        "second",
        "[handler.b]\nsemaphore = { key = \"cpu\", limit = 3 }\n[handler.c]\nmutex = { key = \"own\" }\n\
                              [handler.d]\nsemaphore = { key = \"own\", limit = 7 }\n",
    );
    let thief = manifest("thief", "[handler.x]\nhandles = [\"z\", \"a\"]\nsemaphore = { key = \"cpu\", limit = 9 }\n[handler.q]\n");
    let mut twin = manifest("first", "[handler.other]\n");
    twin.file = "copy.toml".into();
    let after_the_thief = manifest("late", "[handler.q]\n");

    let report = warnings_across(&[&first, &second, &thief, &twin, &after_the_thief]);
    let refusals: Vec<_> = report.refusals.iter().map(|(at, refusal)| (*at, refusal.kind, refusal.to_string())).collect();
    assert_eq!(
        refusals,
        [
            (
                2,
                RefusalKind::Taken,
                "thief.toml:5:10: handler.x: contract `a` is run by plugin `first` already; a job has one handler: remove one of the two".into()
            ),
            (
                3,
                RefusalKind::Taken,
                "copy.toml: plugin.name: plugin `first` is loaded from first.toml already; remove one of the two files, or give the plugin \
                 another name"
                    .into()
            ),
        ],
        "a refused plugin takes nothing from those behind it"
    );
    let warnings: Vec<_> = report.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "second.toml:6:13: handler.b.semaphore: warning: key `cpu` is a semaphore of 3 here and a semaphore of 2 in plugin `first`; a key \
          has one pool of slots: declare it alike everywhere, or use two keys"
        ]
    );
}

const ASKING: &str = "[handler.h]\n[capabilities]\nfiles = [{ path = \"in\", mode = \"read\" }, { path = \"data/out\", mode = \"write\" }]\n\
                      env = [\"BANK_TOKEN\"]\nstate = [{ bucket = \"balances\" }]\nmemory = \"128MiB\"\n";

#[derive(serde::Deserialize)]
struct WarpToml {
    grant: std::collections::BTreeMap<String, Grant>,
}

fn grant(text: &str) -> Grant {
    let mut file: WarpToml = toml::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    file.grant.remove("payments").expect("the plugin's grant")
}

#[test]
fn the_refusal_prints_the_grant_that_lets_it_load() {
    let manifest = manifest("payments", ASKING);
    let refusal = check_grant(&manifest, None).expect_err("nothing is granted");
    assert_eq!(refusal.kind, RefusalKind::Grant);
    assert_eq!(
        refusal.to_string(),
        "payments.toml: capabilities: plugin `payments` asks for directory `in` to read, directory `data/out` to write, variable \
         `BANK_TOKEN`, bucket `balances`, 128MiB of memory and is not granted that; run `warp-host grant payments` or write this into warp.toml, and restart the host:\n\n\
         [grant.payments]\n\
         files = { \"data/out\" = \"./data/out\", in = { host = \"./in\", mode = \"read\" } }\n\
         env = [\"BANK_TOKEN\"]\n\
         state = [\"balances\"]\n\
         memory = \"128MiB\"\n"
    );
    let pasted = refusal.remedy.split_once("\n\n").expect("a block").1;
    assert_eq!(pasted, suggest_grant(&manifest));
    let granted = check_grant(&manifest, Some(&grant(pasted))).expect("what was printed suffices");
    let file = |path: &str, mode| GrantedFile { path: path.into(), host: format!("./{path}"), mode };
    assert_eq!(
        granted,
        Granted {
            files: vec![file("in", FileMode::Read), file("data/out", FileMode::Write)],
            env: vec!["BANK_TOKEN".into()],
            state: manifest.capabilities.state.clone(),
            memory: 128 << 20,
        }
    );
}

#[test]
fn what_an_operator_wrote_is_kept_in_the_block_to_paste() {
    let manifest = manifest("payments", ASKING);
    let existing = "[grant.payments]\nfiles = { in = \"/srv/a \\\"b\\\"\", spare = \"/x\" }\nenv = [\"OTHER\"]\nmemory = \"2GiB\"\n";
    let refusal = check_grant(&manifest, Some(&grant(existing))).expect_err("not all of it");
    assert_eq!(
        refusal.problem,
        "plugin `payments` asks for directory `data/out` to write, variable `BANK_TOKEN`, bucket `balances` and is not granted that"
    );
    assert!(
        refusal.remedy.ends_with(
            "[grant.payments]\nfiles = { \"data/out\" = \"./data/out\", in = \"/srv/a \\\"b\\\"\", spare = \"/x\" }\n\
             env = [\"OTHER\", \"BANK_TOKEN\"]\nstate = [\"balances\"]\nmemory = \"2GiB\"\n"
        ),
        "{}",
        refusal.remedy
    );
    let pasted = refusal.remedy.split_once("\n\n").expect("a block").1;
    let granted = check_grant(&manifest, Some(&grant(pasted))).expect("what was printed suffices");
    assert_eq!(granted.memory, 128 << 20, "a plugin gets what it asks for, not all that is granted");
    assert_eq!(granted.files.len(), 2, "what nobody asked for is not given");
    assert_eq!(granted.files[0].host, "/srv/a \"b\"");
}

#[test]
fn a_grant_to_read_is_no_grant_to_write() {
    let asking =
        |mode: &str| manifest("payments", &format!("[handler.h]\n[capabilities]\nfiles = [{{ path = \"d\", mode = \"{mode}\" }}]\n"));
    let read_only = grant("[grant.payments]\nfiles = { d = { host = \"/d\", mode = \"read\" } }\n");
    let both = grant("[grant.payments]\nfiles = { d = { host = \"/d\", mode = \"write\" } }\n");
    assert!(check_grant(&asking("read"), Some(&read_only)).is_ok());
    assert!(check_grant(&asking("read"), Some(&both)).is_ok());
    assert!(check_grant(&asking("write"), Some(&both)).is_ok());
    let refusal = check_grant(&asking("write"), Some(&read_only)).expect_err("it now asks to write");
    assert!(refusal.remedy.ends_with("files = { d = \"/d\" }\n"), "{}", refusal.remedy);
}

#[test]
fn memory_up_to_the_default_needs_no_grant() {
    let asking = |memory: u64| manifest("payments", &format!("[handler.h]\n[capabilities]\nmemory = \"{memory}B\"\n"));
    assert_eq!(check_grant(&asking(DEFAULT_MEMORY), None).map(|granted| granted.memory), Ok(DEFAULT_MEMORY));
    assert!(check_grant(&asking(DEFAULT_MEMORY + 1), None).is_err());
    assert_eq!(check_grant(&manifest("payments", "[handler.h]\n"), None).map(|granted| granted.memory), Ok(DEFAULT_MEMORY));
    let small = grant("[grant.payments]\nmemory = \"1MiB\"\n");
    assert!(check_grant(&asking(DEFAULT_MEMORY), Some(&small)).is_ok(), "a grant adds to the default and takes nothing away");
}

#[test]
fn a_grant_that_cannot_be_meant_is_refused_with_its_reason() {
    for (text, expected) in [
        ("memory = \"64\"", "`64` is not a size"),
        ("memory = 64", "invalid type: integer `64`, expected a string"),
        ("files = { in = \"\" }", "a granted directory must not be empty"),
        ("files = { in = 7 }", "expected a directory such as `\"/srv/in\"`"),
        ("files = { in = { host = \"/x\", mode = \"rw\" } }", "unknown variant `rw`, expected `read` or `write`"),
        ("network = true", "unknown field `network`"),
    ] {
        let error = toml::from_str::<Grant>(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn check_judges_files_as_a_host_would() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let world = HostWorld::of(&["warp:job/log@1.0.0"]);
    let printed = |name: &str| check(&at(name), &world).to_string().replace(&format!("{}/", directory.path().display()), "");
    fs::write(at("good.wasm"), pack(&plain(), TEXT).expect("packs")).expect("written");
    fs::write(at("beside.wasm"), plain()).expect("written");
    fs::write(at("beside.toml"), TEXT.replace("[handler.h]", "[handler.h]\n[contract.lonely]")).expect("written");
    fs::write(at("wrong.wasm"), pack(&component(&["warp:job/log@2.0.0"], &[]).finish(), TEXT).expect("packs")).expect("written");
    fs::write(at("latin.toml"), b"format = 1 # \xe9").expect("written");
    fs::write(at("notes.txt"), "x").expect("written");

    assert!(check(&at("good.wasm"), &world).is_good());
    assert_eq!(printed("good.wasm"), "good.wasm: good: plugin p 1 with 1 handler");
    assert_eq!(
        printed("beside.wasm"),
        "beside.toml:8:11: contract.lonely: warning: no handler of this plugin runs this contract; write `[handler.lonely]`, or name it in \
         some handler's `handles`\nbeside.wasm: good: plugin p 1 with 1 handler"
    );
    assert!(!check(&at("wrong.wasm"), &world).is_good());
    assert_eq!(
        printed("wrong.wasm"),
        "wrong.wasm: the plugin imports `warp:job/log@2.0.0`, this host offers `warp:job@1.0.0`; build it against that version, or load it \
         into a host of the other\nwrong.wasm: the component exports no function `handle`; build it against the world `handler` of \
         `warp:job@1.0.0`, which `warp-host wit` prints\nwrong.wasm: refused: 2 mistakes"
    );
    assert_eq!(printed("latin.toml"), "latin.toml: not UTF-8 from byte 13 on; save it as UTF-8\nlatin.toml: refused: 1 mistake");
    assert_eq!(
        printed("notes.txt"),
        "notes.txt: is neither `.toml` nor `.wasm`; name a manifest or a component\nnotes.txt: refused: 1 mistake"
    );
    assert_eq!(
        check(&at("absent.wasm"), &world).refusals[0].kind,
        RefusalKind::Io,
        "a file that is not there is no mistake of the manifest"
    );
}
