//! The plugins directory: whatever is put there, the version before it goes on serving.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::{GOOD, Host, Site, guest, packed, refusal_in, says};
use crate::Ground;

/// The version of the good plugin that comes second.
fn second() -> Vec<u8> {
    packed(&guest("small"), &GOOD.replace("1.0.0", "2.0.0"))
}

/// A section of a component, for files that no tool writes.
fn section(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    let mut length = content.len();
    while length > 0x7f {
        bytes.push(u8::try_from(length & 0x7f).expect("seven bits") | 0x80);
        length >>= 7;
    }
    bytes.push(u8::try_from(length).expect("seven bits"));
    bytes.extend_from_slice(content);
    bytes
}

/// A manifest section with this content.
fn manifest_section(text: &[u8]) -> Vec<u8> {
    section(0, &[b"\x0dwarp:manifest", text].concat())
}

/// The guest with every mention of an interface replaced by another of the same length.
fn renamed(guest: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "lengths stand in the file");
    let (from, to) = (from.as_bytes(), to.as_bytes());
    let mut bytes = guest.to_vec();
    let places: Vec<_> = (0..=bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!places.is_empty(), "the guest does not mention it");
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

/// Files that take the place of a good one, and what is said of them.
fn bad_files() -> Vec<(&'static str, Vec<u8>, String)> {
    let small = guest("small");
    let good = packed(&small, GOOD);
    let half = good.len() / 2;
    let core_module = b"\0asm\x01\0\0\0".to_vec();
    let nested = section(1, &[&core_module[..], &manifest_section(GOOD.as_bytes())].concat());
    let asking = |capabilities: &str| format!("{GOOD}[capabilities]\n{capabilities}\n");
    let no_bucket = packed(&guest("hostile"), GOOD);
    vec![
        ("zero length", Vec::new(), "good.wasm: the file is empty; build it again, or wait until it has been copied".to_owned()),
        (
            "truncated",
            good[..half].to_vec(),
            format!(
                "good.wasm: the file ends in the middle of a section, after {half} bytes; copy it again, and rename it into place when it is whole"
            ),
        ),
        (
            "a text",
            b"<!doctype html>".to_vec(),
            "good.wasm: the file is not WebAssembly; drop the `.wasm` that the build of a component writes".to_owned(),
        ),
        (
            "a core module",
            core_module,
            "good.wasm: the file is a core module, not a component; build for `wasm32-wasip2`, or run `wasm-tools component new`".to_owned(),
        ),
        (
            "garbage behind the end",
            [&good[..], b"<html>"].concat(),
            format!(
                "good.wasm: byte {} is not the start or part of a valid section (there is no section of kind 60); build or copy the file again",
                good.len()
            ),
        ),
        (
            "no manifest",
            small.clone(),
            "good.wasm: the component carries no manifest, and there is no `good.toml` beside it; run `warp-host pack` on it as the last step \
             of the build: `wasm-tools strip` removes what was packed before"
                .to_owned(),
        ),
        (
            "two manifests",
            [&good[..], &manifest_section(GOOD.as_bytes())].concat(),
            "good.wasm: the file holds two `warp:manifest` sections; take the file that the build wrote and run `warp-host pack` once"
                .to_owned(),
        ),
        (
            "a manifest inside",
            [&small[..], &nested].concat(),
            "good.wasm: the file holds a `warp:manifest` section inside a nested module or component, where nobody reviews it; remove it \
             there, and run `warp-host pack` on the finished component"
                .to_owned(),
        ),
        (
            "a manifest that is no text",
            [&small[..], &manifest_section(b"format = \xff")].concat(),
            "good.wasm: the `warp:manifest` section is not UTF-8 from its byte 9 on; save the manifest as UTF-8 and run `warp-host pack` again"
                .to_owned(),
        ),
        (
            "a manifest that is too long",
            [&small[..], &manifest_section(&vec![b'#'; 65537])].concat(),
            "good.wasm: the manifest has 65537 bytes; keep it within 65536".to_owned(),
        ),
        (
            "an unknown format",
            packed(&small, "format = 9\n"),
            "good.wasm (warp:manifest):1:10: format: format 9 is not known to this version (warp-host 0.1.0), which reads format 1; load it into a newer \
             host, or write format 1"
                .to_owned(),
        ),
        (
            "another major version of the interface",
            renamed(&good, "warp:job/cancellation@1.0.0", "warp:job/cancellation@2.0.0"),
            "good.wasm: the plugin imports `warp:job/cancellation@2.0.0`, this host offers `warp:job@1.0.0`; build it against that version, or load it \
             into a host of the other"
                .to_owned(),
        ),
        (
            "an import that nobody has",
            renamed(&good, "warp:job/cancellation@1.0.0", "warp:jab/cancellation@1.0.0"),
            "good.wasm: the plugin imports `warp:jab/cancellation@1.0.0`, and this host offers nothing of `warp:jab`; build it without that import; \
             `warp-host wit` prints what a handler may import"
                .to_owned(),
        ),
        (
            "an import that the manifest does not ask for",
            no_bucket,
            "good.wasm: the plugin imports `warp:job/state@1.0.0`, and its manifest asks for no bucket; add `state = [{ bucket = \"…\" }]` to \
             `[capabilities]`, or build against the world `handler`"
                .to_owned(),
        ),
        (
            "what nobody granted",
            packed(&small, &asking("env = [\"TOKEN\"]")),
            "good.wasm (warp:manifest): capabilities: plugin `good` asks for variable `TOKEN` and is not granted that; run `warp-host grant \
             good` or write this into warp.toml, and restart the host:\n\n[grant.good]\nenv = [\"TOKEN\"]\n"
                .to_owned(),
        ),
    ]
}

#[test]
fn a_bad_file_leaves_the_version_before_it_serving() {
    let site = Site::new();
    let host = Host::start(&site);
    for (what, bytes, expected) in bad_files() {
        let from = host.said();
        site.put("good.wasm", bytes);
        assert_eq!(host.refusal(from, "good.wasm"), expected, "{what}");
        site.works(&host);
    }

    // A link takes the file's place, and then another link that one's, as volumes of containers do it.
    let from = host.said();
    site.ground.write("elsewhere/bad.wasm", "no component");
    site.ground.write("elsewhere/second.wasm", second());
    let swap = |to: &str| {
        symlink(to, site.plugin(".link")).expect("linkable");
        fs::rename(site.plugin(".link"), site.plugin("good.wasm")).expect("renamable");
    };
    swap("../elsewhere/bad.wasm");
    assert_eq!(
        host.refusal(from, "good.wasm"),
        "good.wasm: the file is not WebAssembly; drop the `.wasm` that the build of a component writes"
    );
    site.works(&host);
    let from = host.said();
    swap("../elsewhere/second.wasm");
    host.wait_for(from, "the second version", |line| says(line, "plugin replaced", "good.wasm").then_some(()));
    site.works(&host);
    host.stop();
}

#[test]
fn what_is_no_file_at_all_holds_nobody_up() {
    let site = Site::new();
    fs::create_dir(site.plugin("directory.wasm")).expect("writable");
    symlink("nowhere.wasm", site.plugin("dangling.wasm")).expect("linkable");
    symlink("circle.wasm", site.plugin("circle.wasm")).expect("linkable");
    let pipe = rustix::fs::mknodat(
        rustix::fs::CWD,
        site.plugin("pipe.wasm"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    );
    pipe.expect("a pipe");
    // Somebody else's sidecar beside the good plugin's own manifest.
    let other = "format = 1\n[plugin]\nname = \"other\"\nversion = \"1.0.0\"\n[handler.other]\n";
    site.put("two.toml", other);
    site.put("two.wasm", packed(&guest("small"), &other.replace("1.0.0", "1.0.1")));
    // Its contract is taken.
    site.put("late.wasm", packed(&guest("small"), &GOOD.replace("\"good\"", "\"late\"")));
    let host = Host::start(&site);
    for (file, expected) in [
        ("directory.wasm", "directory.wasm: it is not a file; check the file and its permissions"),
        ("pipe.wasm", "pipe.wasm: it is not a file; check the file and its permissions"),
        (
            "two.wasm",
            "two.toml:4:16: differs from the manifest packed into `two.wasm`, so one of the two was not reviewed with this code; remove it, or pack it into the component that the build wrote",
        ),
        (
            "late.wasm",
            "late.wasm (warp:manifest):5:10: handler.echo: contract `echo` is run by plugin `good` already; a job has one handler: remove one of the two",
        ),
    ] {
        assert_eq!(host.refusal(0, file), expected);
    }
    site.works(&host);
    host.stop();
}

/// What is granted and cannot be given stops the load, before a job could miss it.
#[test]
fn a_grant_of_what_is_not_there_is_refused() {
    let not_granted = |name: &str, what: &str, table: &str| {
        format!(
            "{name}.wasm (warp:manifest): capabilities: plugin `{name}` asks for {what} and is not granted that; run `warp-host grant {name}` \
             or write this into warp.toml, and restart the host:\n\n[grant.{name}]\n{table}\n"
        )
    };
    let cases = [
        (
            "absent-dir",
            "files = [{ path = \"in\", mode = \"read\" }]",
            "files = { in = \"nowhere\" }",
            "absent-dir.wasm (warp:manifest): directory `in` is granted as ./nowhere, which cannot be opened: No such file or directory \
             (os error 2); create it, or correct the grant"
                .to_owned(),
        ),
        (
            "read-only-dir",
            "files = [{ path = \"in\", mode = \"write\" }]",
            "files = { in = { host = \"plugins\", mode = \"read\" } }",
            not_granted("read-only-dir", "directory `in` to write", "files = { in = \"plugins\" }"),
        ),
        (
            "unset-variable",
            "env = [\"TOKEN\"]",
            "env = [\"TOKEN\"]",
            "unset-variable.wasm (warp:manifest): variable `TOKEN` is granted and not set in the environment of this host; set it where the \
             host is started"
                .to_owned(),
        ),
        (
            "more-memory",
            "memory = \"1GiB\"",
            "memory = \"64MiB\"",
            not_granted("more-memory", "1GiB of memory", "memory = \"1GiB\""),
        ),
        (
            "no-bucket",
            "state = [{ bucket = \"balances\" }]",
            "state = [\"others\"]",
            not_granted("no-bucket", "bucket `balances`", "state = [\"others\", \"balances\"]"),
        ),
    ];
    let settings: String = cases.iter().map(|(name, _, grant, _)| format!("[grant.{name}]\n{grant}\n")).collect();
    let site = Site::on(Ground::new(), "warp.db", &settings);
    for (name, asks, _, _) in &cases {
        let manifest = format!("format = 1\n[plugin]\nname = \"{name}\"\nversion = \"1.0.0\"\n[handler.{name}]\n[capabilities]\n{asks}\n");
        site.put(&format!("{name}.wasm"), packed(&guest("small"), &manifest));
    }
    let host = Host::start(&site);
    for (name, _, _, expected) in cases {
        assert_eq!(host.refusal(0, &format!("{name}.wasm")), expected);
    }
    site.works(&host);
    host.stop();
}

/// The texts of the manifest's own tests: each refusal of the format, with file, line and remedy.
fn bad_manifests() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifest/tests/it/ui");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the texts") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|suffix| suffix == "err") {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("UTF-8").to_owned();
            let refusals = fs::read_to_string(&path).expect("a text").lines().map(str::to_owned).collect();
            let text = fs::read_to_string(path.with_extension("toml")).expect("a text");
            found.insert(stem, (text, refusals));
        }
    }
    assert!(found.len() > 60, "only {} texts were found", found.len());
    found
}

#[test]
fn every_refusal_of_a_manifest_is_made_by_check_and_by_a_host_in_the_same_words() {
    let manifests = bad_manifests();
    let ground = Ground::new();
    let files: Vec<_> = manifests.keys().map(|stem| format!("{stem}.toml")).collect();
    for (file, (text, _)) in files.iter().zip(manifests.values()) {
        ground.write(file, text);
    }
    let checked = ground.run(&[&["check"], &files.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat());
    assert_eq!(checked.code, 2, "{}", checked.stderr);
    let printed: BTreeSet<_> = checked.stdout.lines().collect();
    for (stem, (_, refusals)) in &manifests {
        for refusal in refusals {
            assert!(printed.contains(refusal.as_str()), "`check` does not say of {stem}: {refusal}");
        }
        let sum = format!("{stem}.toml: refused: {}", if refusals.len() == 1 { "1 mistake" } else { "" });
        assert!(printed.iter().any(|line| line.starts_with(&sum)), "`check` does not refuse {stem}: {}", checked.stdout);
    }

    let site = Site::new();
    let small = guest("small");
    for (stem, (text, _)) in &manifests {
        site.put(&format!("{stem}.toml"), text);
        site.put(&format!("{stem}.wasm"), &small);
    }
    let host = Host::start(&site);
    for (stem, (_, refusals)) in &manifests {
        let file = format!("{stem}.wasm");
        let mut said = BTreeSet::new();
        host.wait_for(0, &format!("{} refusals of {file}", refusals.len()), |line| {
            said.extend(refusal_in(line, &file));
            (said.len() >= refusals.len()).then_some(())
        });
        assert_eq!(said, *refusals, "{file}");
    }
    site.works(&host);
    host.stop();
}
