//! Handlers that never end are stopped at their deadline, and whoever runs beside them notices nothing.

use std::time::{Duration, Instant};

use warp_domain::ending::State;

use super::{Scene, ended, spinning_start_guest};

on_each_scene! {
    spinning_sleeping_and_spinning_start_code_are_stopped_beside_neighbours_that_notice_nothing
}

on_session_locks! {
    spinning_sleeping_and_spinning_start_code_are_stopped_beside_neighbours_that_notice_nothing
}

const DEADLINE: Duration = Duration::from_secs(2);
/// How late a stop may be on a machine that is busy with other tests. The figure itself is printed.
const LATE: Duration = Duration::from_secs(1);
const NEIGHBOURS: usize = 300;

fn spinning_sleeping_and_spinning_start_code_are_stopped_beside_neighbours_that_notice_nothing(scene: &Scene) {
    let timeout = r#"timeout = { per_attempt = "2s" }"#;
    scene.publish(&format!("[contract.work]\n[handler.work]\n[contract.stuck]\n[handler.stuck]\n{timeout}"));
    scene.ground.write(
        "spinning.toml",
        format!("format = 1\n[plugin]\nname = \"spinning\"\nversion = \"1.0.0\"\n[contract.start]\n[handler.start]\n{timeout}\n"),
    );
    let guest = spinning_start_guest();
    scene.ground.run(&["pack", guest.to_str().expect("UTF-8"), "spinning.toml", "-o", "plugins/spinning.wasm"]).good();
    let hosts = scene.start_hosts(&["--workers", "12"]);
    for host in &hosts {
        host.wait_for("the other plugin", |line| line.contains("\"plugin loaded\"") && line.contains("\"spinning.wasm\""));
    }

    // As many spinners as cores, one of them in its start code, and as many that sleep.
    let cores = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4);
    let mut stuck = scene.enqueue("start", ["{}".to_owned()]);
    stuck.extend(scene.enqueue("stuck", (1..cores).map(|_| r#"{"does":"spin"}"#.to_owned())));
    stuck.extend(scene.enqueue("stuck", (0..cores).map(|_| r#"{"does":"sleep"}"#.to_owned())));
    scene.until("the start of all that never end", |overview| overview.states.get(&State::Processing) == Some(&(stuck.len() as u64)));

    let payload = |job: usize| format!(r#"{{"ms":"1","job":"{job}"}}"#);
    let begun = Instant::now();
    let neighbours = scene.enqueue("work", (0..NEIGHBOURS).map(payload));
    scene.until("the end of every job", |overview| ended(overview) == (stuck.len() + NEIGHBOURS) as u64);
    eprintln!("{NEIGHBOURS} neighbours and {} stuck attempts ended within {:.1?}", stuck.len(), begun.elapsed());

    let mut late = Vec::new();
    let mut first_stop = i64::MAX;
    for id in &stuck {
        let job = scene.job(id);
        assert_eq!((job.summary.state, job.error.as_deref()), (State::Failed, Some("timed out after 2s")), "{job:?}");
        let last = job.audit.last().expect("a history");
        first_stop = first_stop.min(last.at.0);
        let after = last.took.expect("it ran").checked_sub(DEADLINE);
        late.push(after.unwrap_or_else(|| panic!("it was stopped before its deadline: {job:?}")));
    }
    late.sort_unstable();
    eprintln!("stopped after the deadline, with {cores} spinners on as many cores: {late:.1?}");
    assert!(late.iter().all(|late| *late < LATE), "stopped too late: {late:?}");

    let mut beside = 0;
    for (at, id) in neighbours.iter().enumerate() {
        let job = scene.job(id);
        let expected = format!("{:016x}", fingerprint(payload(at).as_bytes()));
        assert_eq!((job.summary.state, job.summary.runs, job.result), (State::Completed, 1, Some(expected)));
        beside += usize::from(job.summary.changed_at.0 < first_stop);
    }
    eprintln!("{beside} of the neighbours ended while the others were stuck");
    assert!(beside > 0, "nobody could run beside them");
    // The hosts are well, too.
    let again = scene.enqueue("work", [payload(0)]);
    scene.until_job(&again[0], "another job", |job| job.summary.state == State::Completed);
    for host in hosts {
        assert_eq!(host.stop()["late"], 0);
    }
}

/// What the guest computes: FNV-1a, a thousand times over.
fn fingerprint(bytes: &[u8]) -> u64 {
    let turn = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    (0..1000).fold(0xcbf2_9ce4_8422_2325, |hash, _| bytes.iter().fold(hash, turn))
}
