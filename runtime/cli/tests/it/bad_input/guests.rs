//! Guests that do what a host must survive: each ends as it should, and its neighbours never notice.

use std::time::Instant;

use warp_domain::ending::State;

use super::{Host, Site, assert_reads, guest, packed};

/// Plugins of the same code with another name, another memory and a time limit.
fn manifest(name: &str, memory: &str, policy: &str) -> String {
    format!(
        "format = 1\n[plugin]\nname = \"{name}\"\nversion = \"1.0.0\"\n[handler.{name}]\n{policy}\n[capabilities]\nstate = [{{ bucket = \"balances\" }}]\nmemory = \"{memory}\"\n"
    )
}

fn site() -> Site {
    let grant = |name: &str, memory: &str| format!("[grant.{name}]\nstate = [\"balances\"]\nmemory = \"{memory}\"\n");
    let settings = grant("hostile", "64MiB") + &grant("roomy", "512MiB") + &grant("hasty", "64MiB");
    let site = Site::on(crate::Ground::new(), "warp.db", &settings);
    let hostile = guest("hostile");
    site.put("hostile.wasm", packed(&hostile, &manifest("hostile", "64MiB", "")));
    site.put("roomy.wasm", packed(&hostile, &manifest("roomy", "512MiB", "")));
    let limited = "timeout = { per_attempt = \"300ms\" }";
    site.put("hasty.wasm", packed(&hostile, &manifest("hasty", "64MiB", limited)));
    let spinning = format!("format = 1\n[plugin]\nname = \"spinning\"\nversion = \"1.0.0\"\n[handler.spinning]\n{limited}\n");
    site.put("spinning.wasm", packed(&guest("spinning_start"), &spinning));
    site
}

#[test]
fn every_misdeed_has_its_outcome_and_the_host_goes_on() {
    let site = site();
    let host = Host::start(&site);
    let failing = [
        ("hostile", "alloc 4096", "memory cap of 64MiB exceeded: the guest asked for 6…KiB; raise `memory` in the manifest and its grant"),
        ("hostile", "recurse 100000000", "stack exhausted"),
        ("hostile", "trap", "unreachable code reached: the guest panicked or aborted; its output says why"),
        ("hostile", "exit 1", "the guest called exit(1) instead of returning"),
        ("hostile", "bad-utf8", "the result or a text of a host call is not UTF-8: invalid utf-8 sequence of 1 bytes from index 1"),
        ("hostile", "nul-result", "the result contains a NUL character, which not every database can keep"),
        ("roomy", "big-result 200000000", "a host call or the result carried more than 8MiB"),
        ("roomy", "big-result 1048577", "the result has 1048577B; 1MiB are kept"),
        ("hasty", "spin", "timed out after 300ms"),
        ("hasty", "sleep 60000", "timed out after 300ms"),
        ("spinning", "anything", "timed out after 300ms"),
    ];
    let ids: Vec<_> = failing.iter().map(|(contract, words, _)| site.enqueue(contract, &format!("\"{words}\""))).collect();
    for ((contract, words, expected), id) in failing.iter().zip(&ids) {
        let job = site.ended(id);
        assert_eq!((job.summary.state, job.summary.runs), (State::Failed, 1), "{contract} {words}: {job:?}");
        let error = job.error.expect("a failure has a text");
        // What follows is where the guest stood.
        assert_reads(words, error.lines().next().expect("a line"), expected);
        site.works(&host);
    }
    let lines = site.ground.run(&["jobs", "logs", &ids[2]]).good();
    assert!(lines.contains("this guest panics on purpose"), "the output says why: {lines}");
    host.stop();
}

#[test]
fn a_gigabyte_of_output_is_cut_and_delays_nobody() {
    let site = site();
    let host = Host::start(&site);
    let begun = Instant::now();
    let id = site.enqueue("hostile", "\"print-bytes 1073741824\"");
    site.works(&host);
    let job = site.ended(&id);
    eprintln!("1 GiB of output: {:.1?}", begun.elapsed());
    assert_eq!(job.summary.state, State::Completed, "{job:?}");
    // 262,144 lines of 4,095 bytes, of which 256 KiB are kept.
    assert_eq!(job.dropped, (262_080, 1_073_217_600));
    let logs = site.ground.run(&["jobs", "logs", &id, "--raw"]).good();
    assert_eq!((logs.lines().count(), logs.len()), (64, 64 * 4096));
    site.works(&host);
    host.stop();
}

#[test]
fn terminal_escapes_are_kept_and_shown_harmless() {
    let site = site();
    let host = Host::start(&site);
    // Clears the screen, sets the title, turns text red, moves back over the line, and is no UTF-8 in the end.
    let id = site.enqueue("hostile", "\"print-raw 1b 5b 32 4a 1b 5d 30 3b 61 07 1b 5b 33 31 6d 62 0d 63 ff 0a\"");
    assert_eq!(site.ended(&id).summary.state, State::Completed);
    let text = site.ground.run(&["jobs", "logs", &id]).good();
    assert!(text.ends_with("stdout  ␛[2J␛]0;a␇␛[31mb␍c\u{fffd}\n"), "{text:?}");
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert_eq!(site.ground.run(&["jobs", "logs", &id, "--raw"]).good(), "\u{1b}[2J\u{1b}]0;a\u{7}\u{1b}[31mb\rc\u{fffd}\n");
    // In the host's own log and on the job's page a guest's words are as harmless.
    let id = site.enqueue("hostile", "\"permanent \\u001b[2Jgone\"");
    site.ended(&id);
    let page = site.ground.run(&["jobs", "show", &id]).good();
    assert!(!page.chars().any(|c| c.is_control() && c != '\n'), "{page:?}");
    site.works(&host);
    host.stop();
}
