//! `new`, `wit`, `pack`, `check`, `inspect`, `diff`, `plugins` and `grant` on a real component: the project that
//! `new rust` writes is built as its README says, in a directory that knows nothing of this repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::{Ground, settled, shared_target};

/// The component that the Rust template builds, made once for all tests.
fn component() -> &'static Path {
    static COMPONENT: OnceLock<PathBuf> = OnceLock::new();
    COMPONENT.get_or_init(|| {
        let ground = Ground::new();
        ground.run(&["new", "rust", "send-mail"]).good();
        let target = shared_target();
        let mut cargo = Command::new(env!("CARGO"));
        for flags in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_TARGET_DIR"] {
            cargo.env_remove(flags);
        }
        let built = cargo
            .args(["build", "--release", "--target", "wasm32-wasip2", "--target-dir"])
            .arg(&target)
            .current_dir(ground.path("send-mail"))
            .output()
            .expect("cargo starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        target.join("wasm32-wasip2/release/handler.wasm")
    })
}

/// A directory with the project, and its packed component in `plugins/`.
pub(crate) fn packed() -> Ground {
    let ground = Ground::new();
    ground.run(&["new", "rust", "send-mail"]).good();
    let component = component().to_str().expect("UTF-8");
    // It makes the directory.
    ground.run(&["pack", component, "send-mail/warp.toml", "-o", "plugins/send-mail.wasm"]).good();
    ground
}

#[test]
fn the_rust_template_builds_and_what_it_packs_is_good() {
    let ground = packed();
    // The packed file and its own manifest are one plugin; two packed files would be two that claim the same name.
    let said = ground.run(&["check", "plugins/send-mail.wasm", "send-mail/warp.toml"]).good();
    assert_eq!(said.matches("good: plugin send-mail 0.1.0 with 1 handler").count(), 2, "{said}");
    ground.write("copy.wasm", std::fs::read(ground.path("plugins/send-mail.wasm")).expect("a file"));
    ground.run(&["check", "plugins/send-mail.wasm", "copy.wasm"]).bad(2);
    let row = &ground.run(&["plugins", "--json"]).json()[0];
    assert_eq!(row["state"], "would load", "{row}");
    let inspected = ground.run(&["inspect", "plugins/send-mail.wasm", "--json"]).json();
    assert_eq!(inspected["digest"], row["digest"]);
    assert_eq!(inspected["contracts"][0]["policy"]["concurrency"]["keys"][0], "send-mail:{name}");
    assert!(inspected["imports"].as_array().expect("a list").iter().any(|name| name == "warp:job/log@1.0.0"), "{inspected}");
}

#[test]
fn inspect_and_plugins_for_people() {
    let ground = packed();
    let inspected = ground.run(&["inspect", "plugins/send-mail.wasm", "--json"]).json();
    let digest = inspected["digest"].as_str().expect("text");
    let bytes = inspected["bytes"].to_string();
    let short = digest.trim_start_matches("sha256:").get(..12).expect("a digest");
    let hide = [(digest, "sha256:…"), (bytes.as_str(), "…"), (short, "…")];
    let text = ground.run(&["inspect", "plugins/send-mail.wasm"]).good();
    // Which interfaces of WASI a build imports is the toolchain's affair.
    let ours: Vec<_> = settled(&text, &hide).lines().filter(|line| !line.contains("wasi:")).map(str::to_owned).collect();
    insta::assert_snapshot!("inspect-text", ours.join("\n"));
    insta::assert_snapshot!("plugins-text", settled(&ground.run(&["plugins"]).good(), &hide));
}

#[test]
fn packing_is_whole_repeatable_and_overwrites_nothing_by_itself() {
    let ground = packed();
    let component = component().to_str().expect("UTF-8");
    let before = std::fs::read(ground.path("plugins/send-mail.wasm")).expect("a file");
    // The same again is the same file, and packing what is packed changes nothing.
    ground.run(&["pack", component, "send-mail/warp.toml", "-o", "plugins/send-mail.wasm"]).good();
    ground.run(&["pack", "plugins/send-mail.wasm", "send-mail/warp.toml", "--in-place"]).good();
    assert_eq!(std::fs::read(ground.path("plugins/send-mail.wasm")).expect("a file"), before);

    let changed = ground.read("send-mail/warp.toml").replace("max = 3", "max = 4");
    ground.write("send-mail/warp.toml", changed);
    let args = ["pack", component, "send-mail/warp.toml", "-o", "plugins/send-mail.wasm"];
    let stderr = ground.run(&args).bad(4);
    assert_eq!(stderr, "error: plugins/send-mail.wasm exists already; name another with -o, or add --force\n");
    assert_eq!(std::fs::read(ground.path("plugins/send-mail.wasm")).expect("a file"), before);
    std::fs::copy(ground.path("plugins/send-mail.wasm"), ground.path("old.wasm")).expect("a copy");
    ground.run(&[&args[..], &["--force"]].concat()).good();

    let diff = ground.run(&["diff", "old.wasm", "send-mail/warp.toml"]).good();
    assert!(diff.starts_with("handler.send-mail.retry: ") && diff.contains("jobs that have started keep"), "{diff}");
    let diff = ground.run(&["diff", "plugins/send-mail.wasm", "send-mail/warp.toml"]).good();
    assert_eq!(diff, "nothing that jobs would notice\n");
    let left: Vec<_> = std::fs::read_dir(ground.path("plugins")).expect("a directory").collect();
    assert_eq!(left.len(), 1, "nothing is left beside the result: {left:?}");
}

#[test]
fn a_bad_manifest_is_refused_with_its_place_before_anything_is_written() {
    let ground = packed();
    let bad = ground.read("send-mail/warp.toml").replace("mode = \"wait\"", "mode = \"queue\"");
    ground.write("bad.toml", bad);
    let stderr = ground.run(&["pack", component().to_str().expect("UTF-8"), "bad.toml", "-o", "out.wasm"]).bad(2);
    assert!(stderr.contains("bad.toml:") && stderr.contains("handler.send-mail.mutex.mode"), "{stderr}");
    assert!(!ground.path("out.wasm").exists());
    let said = ground.run(&["check", "bad.toml", "--json"]);
    assert_eq!(said.code, 2);
    let report: serde_json::Value = serde_json::from_str(&said.stdout).expect("JSON");
    let finding = &report["files"][0]["refusals"][0];
    assert_eq!(report["good"], false);
    assert_eq!(finding["key"], "handler.send-mail.mutex.mode");
    assert!(finding["line"].is_u64() && finding["column"].is_u64(), "{finding}");

    ground.write("text.wasm", "not a component");
    ground.run(&["check", "text.wasm"]).bad(2);
    ground.run(&["check", "absent.wasm"]).bad(2);
    ground.run(&["inspect", "absent.wasm"]).bad(3);
    ground.run(&["pack", "absent.wasm", "bad.toml"]).bad(3);
    ground.run(&["diff", "absent.wasm", "bad.toml"]).bad(3);
}

#[test]
fn what_is_asked_and_not_granted_is_refused_until_it_is_granted() {
    let ground = packed();
    let asking = ground.read("send-mail/warp.toml") + "\n[capabilities]\nfiles = [{ path = \"in\", mode = \"read\" }]\nenv = [\"TOKEN\"]\n";
    ground.write("send-mail/warp.toml", asking);
    let component = component().to_str().expect("UTF-8");
    ground.run(&["pack", component, "send-mail/warp.toml", "-o", "plugins/send-mail.wasm", "--force"]).good();
    let row = &ground.run(&["plugins", "--json"]).json()[0];
    assert_eq!(row["state"], "refused");
    assert!(row["refusals"][0].as_str().expect("text").contains("warp-host grant send-mail"), "{row}");

    ground.write("warp.toml", "# ours\nworkers = 2 # few\n");
    let dry = ground.run(&["grant", "send-mail", "--dir", "in=./mail", "--dry-run"]);
    assert!(!dry.stderr.contains("restart"), "{}", dry.stderr);
    assert_eq!(ground.read("warp.toml"), "# ours\nworkers = 2 # few\n");
    let granted = ground.run(&["grant", "send-mail", "--dir", "in=./mail"]);
    assert!(
        granted.stderr.ends_with(
            "./mail does not exist yet; the plugin is refused until it does\na running host reads it when it starts; restart it\n"
        ),
        "{}",
        granted.stderr
    );
    assert_eq!(granted.good(), dry.good());
    assert_eq!(
        ground.read("warp.toml"),
        "# ours\nworkers = 2 # few\n\n[grant.send-mail]\nfiles = { in = { host = \"./mail\", mode = \"read\" } }\nenv = [\"TOKEN\"]\n"
    );
    let row = &ground.run(&["plugins", "--json"]).json()[0];
    assert_eq!(row["state"], "refused");
    assert!(row["refusals"][0].as_str().expect("text").contains("`in` is granted as ./mail, which cannot be opened"), "{row}");
    std::fs::create_dir(ground.path("mail")).expect("a directory");
    assert_eq!(ground.run(&["plugins", "--json"]).json()[0]["state"], "would load");
    assert!(ground.run(&["grant", "send-mail"]).good().contains("has everything that it asks for"));
    let stderr = ground.run(&["grant", "send-male"]).bad(3);
    assert_eq!(stderr, "error: there is no plugin `send-male` in plugins, which has send-mail\n");
}

#[test]
fn new_leaves_what_is_there_alone() {
    let ground = Ground::new();
    ground.write("mine/notes.txt", "keep me");
    let stderr = ground.run(&["new", "c", "mine"]).bad(4);
    assert_eq!(stderr, "error: mine exists and is not empty; name another with --dir\n");
    assert!(!ground.path("mine/warp.toml").exists());
    for name in ["Mine", "../mine", "a b", "-", "9a"] {
        ground.run(&["new", "c", "--", name]).bad(2);
    }
    ground.run(&["new", "cobol", "mine"]).bad(2);
}

#[test]
fn every_template_has_a_good_manifest_and_no_mark_left() {
    for lang in ["rust", "js", "python", "c"] {
        let ground = Ground::new();
        let created = ground.run(&["new", lang, "send-mail", "--dir", "here", "--json"]).json();
        for file in created["files"].as_array().expect("a list") {
            let bytes = std::fs::read(ground.path("here").join(file.as_str().expect("text"))).expect("the file is there");
            for mark in ["@name@", "@build@", "@source@", "@component@", "@language@"] {
                assert!(!bytes.windows(mark.len()).any(|window| window == mark.as_bytes()), "{lang}: {mark} in {file}");
            }
        }
        ground.run(&["check", "here/warp.toml"]).good();
        assert_eq!(ground.read("here/wit/job.wit"), ground.run(&["wit"]).good());
    }
}

#[test]
fn wit_is_written_once_and_another_one_is_kept() {
    let ground = Ground::new();
    ground.run(&["wit", "--out", "wit"]).good();
    ground.run(&["wit", "--out", "wit"]).good();
    ground.write("wit/job.wit", "package other:one;");
    ground.run(&["wit", "--out", "wit"]).bad(4);
    assert_eq!(ground.read("wit/job.wit"), "package other:one;");
}
