//! A disk that runs full under a working host, and has room again.
//!
//! A small file system of its own holds the database, so a test needs the right to mount one. Where it has not, it
//! says so and counts as not run.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use warp_domain::ending::State;

use super::{Host, Site, assert_reads, guest, packed};
use crate::Ground;

const SIZE: u64 = 12 << 20;
/// The lease outlasts the time without space, so that the ends of runs wait and nothing is handed back.
const SETTINGS: &str = "lease = \"2m\"\n[grant.hostile]\nstate = [\"balances\"]\n";
const HOSTILE: &str = "format = 1\n[plugin]\nname = \"hostile\"\nversion = \"1.0.0\"\n[handler.hostile]\n[capabilities]\nstate = [{ bucket = \"balances\" }]\n";

/// A mounted file system of a few megabytes.
struct Disk {
    dir: TempDir,
}

impl Disk {
    /// With blocks of so many bytes: 4096 is usual, and 1024 is what `mkfs` chooses for a disk as small as this.
    fn mount(block: &str) -> Option<Self> {
        let disk = Disk { dir: tempfile::tempdir().expect("a directory") };
        let (image, point) = (disk.dir.path().join("disk.img"), disk.point());
        std::fs::create_dir(&point).expect("a directory");
        File::create(&image).and_then(|file| file.set_len(SIZE)).expect("an image");
        // Nothing is set aside for the superuser.
        let made = run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-b", block]).arg(&image));
        let looped = made.and_then(|()| run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point)));
        let in_memory = |looped: String| {
            let options = format!("size={SIZE}");
            let mounted = run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&point));
            mounted.map_err(|error| format!("{looped}; {error}"))
        };
        let kind = looped.map(|()| "ext4 on a loop device").or_else(|error| in_memory(error).map(|()| "tmpfs"));
        match kind {
            Ok(kind) => eprintln!("the disk is {kind}"),
            Err(error) => {
                eprintln!("NOT RUN: this machine does not let the test mount a small file system: {error}");
                return None;
            }
        }
        Some(disk)
    }

    fn point(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// Writes until nothing more fits.
    fn fill(&self) {
        let mut file = File::create(self.point().join("big")).expect("a file");
        loop {
            let room = std::iter::repeat_with(|| file.write_all(&[0; 4096])).take_while(Result::is_ok).count();
            // Space is promised at a write and counted when it is stored, and then there may be more of it.
            if file.sync_all().is_ok() && room == 0 {
                return;
            }
        }
    }

    fn make_room(&self) {
        std::fs::remove_file(self.point().join("big")).expect("removable");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The last file may be closed a moment after its owner is gone; then it is taken out of sight at least.
        for args in [&[][..], &[], &[], &["-l"]] {
            if run(Command::new("umount").args(args).arg(self.point())).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{program}: {}", stderr.trim())) }
}

/// What is said of a file that has no space left.
fn no_space(op: &str, file: &Path) -> String {
    format!("failed to {op}: no space left for {}, … left; free some, and running hosts go on by themselves", file.display())
}

#[test]
fn a_full_disk_loses_nothing_and_work_goes_on_when_there_is_room_again() {
    let Some(disk) = Disk::mount("1024") else { return };
    let database = disk.point().join("warp.db");
    let site = Site::on(Ground::new(), database.to_str().expect("UTF-8"), SETTINGS);
    site.put("hostile.wasm", packed(&guest("hostile"), HOSTILE));
    let host = Host::start(&site);
    let running: Vec<_> = (0..3).map(|_| site.enqueue("hostile", "\"sleep 4000\"")).collect();
    for id in &running {
        site.until(id, "running", |job| job.summary.state == State::Processing);
    }

    let from = host.said();
    disk.fill();
    // What still fits into the log as it is may be taken, and then counts.
    let payload = format!("\"{}\"", "x".repeat(100 << 10));
    let (mut taken, mut refused) = (Vec::new(), None);
    for _ in 0..100 {
        let ended = site.ground.run_with(&["enqueue", "echo", "-"], payload.as_bytes());
        match ended.code {
            0 => taken.push(ended.stdout.trim().to_owned()),
            5 => refused = Some(ended),
            _ => panic!("{ended:?}"),
        }
        if refused.is_some() {
            break;
        }
    }
    let refused = refused.expect("the disk is full");
    eprintln!("{} more were taken; then {}", taken.len(), refused.stderr.trim_end());
    assert_eq!(refused.stdout, "", "nothing is acknowledged");
    assert_reads("enqueue", refused.stderr.trim_end(), &format!("error: {}", no_space("enqueue jobs", &database)));

    // The runs end; their ends wait in the host. It has tried for some seconds since the first.
    let said = host.wait_for(from, "ends that do not fit", |line| {
        let fields = &line["fields"];
        let untaken = fields["message"] == "the store did not take a batch" && fields["retry_in"] == "2s";
        untaken.then(|| fields["error"].as_str().expect("a text").to_owned())
    });
    assert_reads("the host", &said, &no_space("end and claim runs", &database));
    let copy = disk.point().join("copy.db");
    let backup = site.ground.run(&["backup", copy.to_str().expect("UTF-8")]).bad(5);
    assert_reads("backup", backup.trim_end(), &format!("error: {}", no_space("back up the database", &copy)));
    assert!(!copy.exists(), "half a copy would be in the way of the next");
    assert_eq!(site.job(&running[0]).summary.state, State::Processing, "one can look, and its end is not lost: it waits");
    host.assert_alive();

    disk.make_room();
    for id in running.iter().chain(&taken) {
        let job = site.ended(id);
        assert_eq!((job.summary.state, job.summary.runs), (State::Completed, 1), "{job:?}");
    }
    site.works(&host);
    // All that was acknowledged, and nothing that was refused.
    let all = site.ground.run(&["status", "--json"]).json();
    assert_eq!(all["states"]["Completed"], running.len() + taken.len() + 1, "{all}");
    host.stop();
}

/// Nobody has the file open, so the index of its log has to be made.
#[test]
fn a_start_on_a_full_disk_says_so_and_a_later_one_finds_everything() {
    start_on_a_full_disk("4096");
}

#[test]
fn a_start_on_a_full_disk_of_small_blocks_says_so_as_well() {
    start_on_a_full_disk("1024");
}

fn start_on_a_full_disk(block: &str) {
    let Some(disk) = Disk::mount(block) else { return };
    let database = disk.point().join("warp.db");
    let ground = Ground::new();
    ground.write("warp.toml", format!("database.url = \"sqlite:{}\"\n", database.display()));
    ground.run(&["migrate"]).good();
    let id = ground.run(&["enqueue", "echo", "--payload", "{}"]).good().trim().to_owned();
    // As after a crash of the machine; a process that ends in peace may leave it for the next.
    let _ = std::fs::remove_file(disk.point().join("warp.db-shm"));
    disk.fill();
    for args in [&["run", "--log-level", "error"][..], &["enqueue", "echo", "--payload", "{}"], &["jobs", "list"]] {
        let stderr = ground.run(args).bad(5);
        assert_reads(args[0], stderr.trim_end(), &format!("error: {}", no_space("open the database", &database)));
    }
    disk.make_room();
    assert_eq!(ground.run(&["jobs", "list", "--json"]).json()[0]["id"], id);
    let site = Site::on(ground, database.to_str().expect("UTF-8"), "");
    let host = Host::start(&site);
    assert_eq!(site.ended(&id).result.as_deref(), Some("{}"));
    site.works(&host);
    host.stop();
}
