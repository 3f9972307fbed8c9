//! `try`: the component of the Rust template under the real engine.

use crate::plugin_files::packed;

#[test]
fn an_attempt_shows_what_the_component_did() {
    let ground = packed();
    let ended = ground.run(&["try", "plugins/send-mail.wasm", "--payload", "{\"name\": \"world\"}"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(ended.stdout, "info    greeting name=world\ncompleted hello, world\n");
    assert!(ended.stderr.contains("of memory at most"), "{}", ended.stderr);

    let failed = ground.run(&["try", "plugins/send-mail.wasm", "--payload", "{}", "--json"]);
    assert_eq!(failed.code, 1);
    let report: serde_json::Value = serde_json::from_str(&failed.stdout).expect("JSON");
    assert_eq!(report["outcome"], "permanent");
    assert!(report["text"].as_str().expect("text").contains("missing field `name`"), "{report}");
    assert!(report["peak_memory_bytes"].as_u64().expect("a number") > 0);
}

#[test]
fn what_cannot_be_tried_is_refused() {
    let ground = packed();
    ground.run(&["try", "plugins/send-mail.wasm", "--payload", "{"]).bad(2);
    ground.run(&["try", "absent.wasm", "--payload", "{}"]).bad(3);
    ground.run(&["try", "plugins/send-mail.wasm", "--contract", "other"]).bad(3);
    let stderr = ground.run(&["try", "plugins/send-mail.wasm", "--payload", "{\"name\": \"w\"}", "--memory", "64KiB"]).bad(2);
    assert!(stderr.contains("it starts with") && stderr.contains("64KiB") && stderr.contains("with --memory"), "{stderr}");
    assert!(!stderr.contains("build it again"), "{stderr}");
}
