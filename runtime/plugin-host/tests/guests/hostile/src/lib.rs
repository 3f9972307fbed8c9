//! One component with every behaviour that the host must survive, chosen by the first word of the payload.

use std::io::Write;
use std::time::Duration;

use warp::job::{cancellation, jobs, log, progress, state};

wit_bindgen::generate!({ path: "../../../../../wit/warp-job@1.0.0", world: "stateful-handler" });

struct Hostile;
export!(Hostile);

impl Guest for Hostile {
    fn handle(attempt: Attempt) -> Result<Option<String>, Failure> {
        // Where a host runs it the payload is JSON, so the same words come as a string without escapes.
        let payload = attempt.payload.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(&attempt.payload);
        let (word, rest) = payload.split_once(' ').unwrap_or((payload, ""));
        let done = |text: String| Ok(Some(text));
        match word {
            "ok" => Ok(None),
            "echo" => done(rest.to_owned()),
            "describe" => done(format!("{attempt:?}")),
            "retryable" => Err(Failure::Retryable(rest.to_owned())),
            "permanent" => Err(Failure::Permanent(rest.to_owned())),
            "snooze" => Err(Failure::Snooze(number(rest))),
            "long-failure" => Err(Failure::Permanent("ä".repeat(number(rest) as usize))),

            "spin" => spin(),
            "print-then-spin" => {
                println!("{rest}");
                spin()
            }
            "sleep" => {
                std::thread::sleep(Duration::from_millis(u64::from(number(rest))));
                Ok(None)
            }
            "busy-calls" => loop {
                progress::report("busy", 1.0);
            },
            "until-cancelled" => {
                while !cancellation::cancelled() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                done("stopped on request".to_owned())
            }

            "alloc" => {
                let mut held: Vec<Vec<u8>> = Vec::new();
                for _ in 0..number(rest) {
                    held.push(vec![1; 1 << 20]);
                }
                done(format!("{} MiB", held.len()))
            }
            "recurse" => done(recurse(number(rest)).to_string()),
            "trap" => outer_of_the_trap(),
            "exit" => std::process::exit(number(rest) as i32),
            "exhaust-handles" => loop {
                std::mem::forget(std::fs::File::open(rest));
            },

            "print-bytes" => {
                let line = [b'x'; 4095];
                let mut out = std::io::stdout();
                for _ in 0..number(rest) / 4096 {
                    out.write_all(&line).expect("a full sink must not fail the guest");
                    out.write_all(b"\n").expect("a full sink must not fail the guest");
                }
                Ok(None)
            }
            "print-raw" => {
                for (at, byte) in rest.split(' ').enumerate() {
                    let byte = u8::from_str_radix(byte, 16).expect("hexadecimal bytes");
                    std::io::stdout().write_all(&[byte]).expect("writable");
                    if at % 2 == 0 {
                        std::io::stdout().flush().expect("writable");
                    }
                }
                std::io::stdout().flush().expect("writable");
                Ok(None)
            }
            "print-long-line" => {
                print!("{}", "y".repeat(number(rest) as usize));
                std::io::stdout().flush().expect("writable");
                Ok(None)
            }
            "print-both" => {
                println!("to stdout");
                eprintln!("to stderr");
                log::write(log::Level::Warn, "to log", &[("key".to_owned(), "two words".to_owned())]);
                print!("without an end");
                // A handler that returns ends no process, so nothing else writes out what its language buffers.
                std::io::stdout().flush().expect("writable");
                Ok(None)
            }

            "big-result" => done("r".repeat(number(rest) as usize)),
            "nul-result" => done("a\0b".to_owned()),
            "bad-utf8" => {
                // The host must refuse it, so it has to be possible to say it.
                done(unsafe { String::from_utf8_unchecked(vec![b'a', 0xff, 0xfe]) })
            }
            "big-log" => {
                log::write(log::Level::Info, &"l".repeat(number(rest) as usize), &[]);
                Ok(None)
            }

            "enqueue" => {
                let options = jobs::Options {
                    queue: Some("other".to_owned()),
                    unique_key: Some("once".to_owned()),
                    metadata: vec![("a".to_owned(), "b".to_owned())],
                };
                let first = jobs::enqueue("child", rest, &options).map_err(|e| Failure::Permanent(format!("{e:?}")))?;
                let plain = jobs::Options { queue: None, unique_key: None, metadata: Vec::new() };
                let second = jobs::schedule("later", rest, 1500, &plain).map_err(|e| Failure::Permanent(format!("{e:?}")))?;
                done(format!("{first} {second} {:?}", jobs::enqueue("", rest, &plain)))
            }
            "progress" => {
                progress::report("half", 50.0);
                progress::report("beyond", 1e9);
                progress::report("nothing", f32::NAN);
                Ok(None)
            }
            "state" => {
                let (bucket, key) = (rest, "k");
                let mut seen = vec![format!("{:?}", state::get(bucket, key))];
                seen.push(format!("{:?}", state::set(bucket, key, "7")));
                seen.push(format!("{:?}", state::add(bucket, key, "-3")));
                seen.push(format!("{:?}", state::compare_and_set(bucket, key, Some("4"), Some("5"))));
                seen.push(format!("{:?}", state::compare_and_set(bucket, key, Some("4"), Some("6"))));
                seen.push(format!("{:?}", state::add(bucket, key, "many")));
                seen.push(format!("{:?}", state::remove(bucket, key)));
                seen.push(format!("{:?}", state::get(bucket, key)));
                seen.push(format!("{:?}", state::set(bucket, &"k".repeat(10_000), "v")));
                done(seen.join("; "))
            }

            "env" => done(format!("{:?} args={:?}", std::env::vars().collect::<Vec<_>>(), std::env::args().collect::<Vec<_>>())),
            "stdin" => done(format!("{:?}", std::io::read_to_string(std::io::stdin()))),
            "print-then-read" => {
                println!("ready");
                done(told(std::fs::read_to_string(rest)))
            }
            "read" => done(told(std::fs::read_to_string(rest))),
            "write" => done(told(std::fs::write(rest, b"written").map(|()| "written".to_owned()))),
            "list" => done(told(std::fs::read_dir(rest).map(|entries| {
                let mut names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
                names.sort();
                names.join(",")
            }))),
            "connect" => done(told(std::net::TcpStream::connect(rest).map(|_| "connected".to_owned()))),
            "clock" => done(format!("{}", std::time::SystemTime::now() > std::time::UNIX_EPOCH)),
            other => Err(Failure::Permanent(format!("this guest cannot `{other}`"))),
        }
    }
}

fn told(result: std::io::Result<String>) -> String {
    match result {
        Ok(text) => format!("ok: {text}"),
        Err(e) => format!("error: {:?}", e.kind()),
    }
}

fn number(text: &str) -> u32 {
    text.trim().parse().expect("a number")
}

fn spin() -> ! {
    let mut turns = 0u64;
    loop {
        turns = std::hint::black_box(turns.wrapping_add(1));
    }
}

#[inline(never)]
fn recurse(depth: u32) -> u64 {
    let frame = std::hint::black_box([u64::from(depth); 8]);
    if depth == 0 { frame[0] } else { recurse(depth - 1) + std::hint::black_box(frame)[7] }
}

#[inline(never)]
fn outer_of_the_trap() -> Result<Option<String>, Failure> {
    inner_of_the_trap();
    Ok(None)
}

#[inline(never)]
fn inner_of_the_trap() {
    panic!("this guest panics on purpose");
}
