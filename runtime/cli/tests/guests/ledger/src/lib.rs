//! A handler that keeps a ledger outside of the host: each attempt writes a file when it starts and another when
//! it ends, so that a test can say who ran beside whom without asking the host.
//!
//! `out/<job>-<run>-<token>.start` and `.end` hold the wall clock in nanoseconds and the payload's key. The clock
//! is read first thing and last thing, so an interval is never longer than the attempt was. The payload is a flat
//! object of texts: `does` (`work`, `watch`, `hold`, `spin`, `sleep`, `fail`), `ms`, `key`, and for `hold` the `gate`.
//!
//! An attempt that does `watch` also adds a line with the clock to `.alive` every few milliseconds, so that one which was
//! stopped or killed tells until when it ran, and its result is the number of its run. The name of its host, if it is
//! granted the variable `LEDGER_HOST`, stands behind the key.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

wit_bindgen::generate!({ path: "../../../../../wit/warp-job@1.0.0", world: "handler" });

/// How often an attempt that watches says that it is alive.
const STEP: Duration = Duration::from_millis(10);

struct Ledger;
export!(Ledger);

impl Guest for Ledger {
    fn handle(attempt: Attempt) -> Result<Option<String>, Failure> {
        let entry = Entry::of(&attempt);
        entry.write("start")?;
        let result = act(&attempt, &entry);
        entry.write("end")?;
        result.map(Some)
    }
}

/// An attempt's two files.
struct Entry {
    stem: String,
    key: String,
}

impl Entry {
    fn of(attempt: &Attempt) -> Self {
        let token = attempt.fencing_token.as_deref().unwrap_or("none");
        let key = field(&attempt.payload, "key").unwrap_or("none").to_owned();
        Entry { stem: format!("{}-{}-{token}", attempt.job_id, attempt.run), key }
    }

    fn write(&self, suffix: &str) -> Result<(), Failure> {
        let now = clock();
        let path = PathBuf::from(format!("out/{}.{suffix}", self.stem));
        // A run that wrote the same file before would be two runs under one number.
        if path.exists() {
            return Err(Failure::Permanent(format!("{} is there already", path.display())));
        }
        let host = std::env::var("LEDGER_HOST").map_or_else(|_| String::new(), |host| format!(" {host}"));
        std::fs::write(&path, format!("{now} {}{host}", self.key)).map_err(|e| Failure::Permanent(format!("{}: {e}", path.display())))
    }
}

/// Nanoseconds of the wall clock.
fn clock() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}

/// What the payload asks for. But for `watch` the result depends on nothing but the payload.
fn act(attempt: &Attempt, entry: &Entry) -> Result<String, Failure> {
    let payload = &attempt.payload;
    let pause = Duration::from_millis(field(payload, "ms").and_then(|ms| ms.parse().ok()).unwrap_or(0));
    match field(payload, "does").unwrap_or("work") {
        "work" => {
            std::thread::sleep(pause);
            Ok(format!("{:016x}", fingerprint(payload.as_bytes())))
        }
        "watch" => {
            let alive = PathBuf::from(format!("out/{}.alive", entry.stem));
            let fault = |error: std::io::Error| Failure::Permanent(format!("{}: {error}", alive.display()));
            let mut file = std::fs::File::create(&alive).map_err(fault)?;
            // Counted in steps: time that passes while the whole process stands still is not work.
            for _ in 0..pause.as_millis().div_ceil(STEP.as_millis()) {
                std::thread::sleep(STEP);
                writeln!(file, "{}", clock()).map_err(fault)?;
            }
            Ok(attempt.run.to_string())
        }
        // Until the test opens the gate.
        "hold" => {
            let gate = PathBuf::from(format!("out/{}", field(payload, "gate").unwrap_or("gate")));
            while !gate.exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok("held".to_owned())
        }
        "spin" => {
            let mut turns = 0u64;
            loop {
                turns = std::hint::black_box(turns.wrapping_add(1));
            }
        }
        "sleep" => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        "fail" => Err(Failure::Permanent("asked to fail".to_owned())),
        other => Err(Failure::Permanent(format!("this guest cannot `{other}`"))),
    }
}

/// FNV-1a, long enough that the neighbours of a spinning guest have something to compute.
fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for _ in 0..1000 {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}

/// The text of a field in a flat object of texts without escapes.
fn field<'a>(payload: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = payload.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(value, _)| value)
}
