//! Payloads that are none, and keys that a payload does not have.

use warp_domain::ending::State;

use super::{Host, Site, guest, packed};

/// Nested by so much.
fn deep(levels: usize) -> String {
    "[".repeat(levels) + &"]".repeat(levels)
}

#[test]
fn a_bad_payload_is_refused_in_these_words_and_stores_nothing() {
    let site = Site::new();
    let host = Host::start(&site);
    let large = "1".repeat((10 << 20) + 1);
    let too_deep = deep(128);
    for (payload, expected) in [
        (&b"{"[..], "the payload is not JSON: EOF while parsing an object at line 1 column 1"),
        (b"", "the payload is not JSON: EOF while parsing a value at line 1 column 0"),
        (b"hello", "the payload is not JSON: expected value at line 1 column 1"),
        (b"{} {}", "the payload is not JSON: trailing characters at line 1 column 4"),
        (too_deep.as_bytes(), "the payload is nested deeper than 127 levels"),
        (large.as_bytes(), "the payload has 10485761 bytes; 10485760 are allowed"),
        (b"\"a\0b\"", "the payload contains a NUL character, which not every database can store"),
        (b"{\"a\": \"\\u0000\"}", "the payload contains a NUL character, which not every database can store"),
        (b"\"\xff\"", "failed to read the payload from standard input: stream did not contain valid UTF-8"),
    ] {
        let stderr = site.ground.run_with(&["enqueue", "echo", "-"], payload).bad(2);
        assert_eq!(stderr, format!("error: {expected}\n"));
    }
    assert_eq!(site.ground.run(&["jobs", "list", "--json"]).good(), "[]\n");
    // The last that is allowed goes through a guest and back.
    let id = site.enqueue("echo", &deep(127));
    assert_eq!(site.ended(&id).result, Some(deep(127)));
    site.works(&host);
    host.stop();
}

#[test]
fn a_bad_line_of_a_batch_refuses_only_itself() {
    let site = Site::new();
    let host = Host::start(&site);
    let large = "1".repeat((10 << 20) + 1);
    let too_deep = deep(128);
    let lines: [&[u8]; 8] = [b"1", b"{", too_deep.as_bytes(), large.as_bytes(), b"\"\\u0000\"", b"\"\xff\"", b"\"a\0b\"", b"2"];
    let ended = site.ground.run_with(&["enqueue", "echo", "--batch", "-"], &lines.join(&b'\n'));
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    assert_eq!(
        ended.stderr.lines().collect::<Vec<_>>(),
        [
            "line 2: refused: the payload is not JSON: EOF while parsing an object at line 1 column 1",
            "line 3: refused: the payload is nested deeper than 127 levels",
            "line 4: refused: the payload has 10485761 bytes; 10485760 are allowed",
            "line 5: refused: the payload contains a NUL character, which not every database can store",
            "line 6: refused: the payload is not UTF-8: invalid utf-8 sequence of 1 bytes from index 1",
            "line 7: refused: the payload contains a NUL character, which not every database can store",
            "error: 6 jobs refused; the others are enqueued",
        ]
    );
    let ids: Vec<_> = ended.stdout.lines().collect();
    let results: Vec<_> = ids.iter().map(|id| site.ended(id).result.expect("it completes")).collect();
    assert_eq!(results, ["1", "2"]);
    assert_eq!(site.ground.run(&["jobs", "list", "--json"]).json().as_array().map(Vec::len), Some(2));
    site.works(&host);
    host.stop();
}

#[test]
fn a_payload_without_its_key_fails_that_job_and_says_what_it_has() {
    let site = Site::new();
    let handlers = r#"
[handler.pay]
mutex = { key = "payment:{customer.id}", mode = "wait" }
retry = { max = 3, delays = ["1s"] }
[handler.trade]
semaphore = { keys = ["player:{from}", "player:{to}"], limit = 2 }
"#;
    let manifest = format!("format = 1\n[plugin]\nname = \"keyed\"\nversion = \"1.0.0\"\n{handlers}");
    site.put("keyed.wasm", packed(&guest("small"), &manifest));
    let host = Host::start(&site);
    let lacks = |fields: &str| format!("key `payment:{{customer.id}}` needs `customer.id`, which the payload lacks; it has {fields}");
    for (contract, payload, expected) in [
        ("pay", r#"{"customer": {"name": "Ada"}, "amount": 3}"#, lacks("`amount`, `customer`")),
        ("pay", r#"{"customer": {"id": null}}"#, lacks("`customer`")),
        ("pay", "7", lacks("no fields")),
        ("pay", "{}", lacks("no fields")),
        (
            "pay",
            r#"{"customer": {"id": [1]}}"#,
            "key `payment:{customer.id}` needs `customer.id` to be text, a number or a boolean, and it is an object or array; the payload \
             has `customer`"
                .to_owned(),
        ),
        ("trade", r#"{"from": "a"}"#, "key `player:{to}` needs `to`, which the payload lacks; it has `from`".to_owned()),
    ] {
        let job = site.ended(&site.enqueue(contract, payload));
        // It is no matter of a retry: another attempt would find the same payload.
        assert_eq!((job.summary.state, job.summary.runs), (State::Failed, 0), "{job:?}");
        assert_eq!(job.error, Some(expected), "{payload}");
    }
    let good = site.ended(&site.enqueue("pay", r#"{"customer": {"id": 7}}"#));
    assert_eq!(good.keys, ["payment:7"]);
    site.works(&host);
    host.stop();
}
