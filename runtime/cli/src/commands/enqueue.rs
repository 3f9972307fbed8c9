//! `enqueue`: one job, many of the same, or a file of payloads.
//!
//! What must stay true: an id is drawn once per job and sent with it, so that a repeat after an unknown outcome
//! is recognised and enqueues nothing twice. A bad line of a batch refuses only itself. What has been
//! acknowledged on standard output is in the database.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use warp_domain::JobId;
use warp_domain::UnixMillis;
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order};
use warp_store::codec::{JsonPayload, check_new_job};
use warp_store::{EnqueueVerdict, MAX_PAYLOAD_BYTES, NewJob, Store, StoreErrorKind};

use crate::args::EnqueueArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::progress::Progress;
use crate::{json, text};

/// Jobs per call of the store, and their payload bytes: one transaction each, short enough to share the file.
const CHUNK_JOBS: usize = 1000;
const CHUNK_BYTES: usize = 4 << 20;

/// Enqueues what the arguments say.
///
/// # Errors
/// Bad input (2), a refused job (4), or what the store says.
pub async fn run(args: &EnqueueArgs, store: &dyn Store, as_json: bool, now: UnixMillis) -> Outcome {
    let mut template = NewJob {
        id: JobId(0),
        contract: args.contract.clone(),
        queue: args.queue.clone(),
        payload: String::new(),
        metadata: args.meta.clone(),
        trace_parent: args.trace_parent.clone(),
        due: args.at.or(args.delay.map(|delay| now.after(delay))),
        explicit: declared(args)?,
        unique_key: args.unique.clone(),
    };
    let mut batch = Batch { store, as_json, now, waiting: Vec::new(), bytes: 0, refused: 0, progress: Progress::none() };
    if let Some(path) = &args.batch {
        // Everything but the payload is the same for all lines; what is wrong with it is wrong usage, not 1,000 verdicts.
        check_new_job(&NewJob { payload: "null".to_owned(), explicit: Declared::default(), ..template.clone() }).map_err(Failure::usage)?;
        batch.progress = Progress::counting("enqueued");
        from_lines(path, &template, &mut batch).await?;
    } else {
        template.payload = payload(args)?;
        check_new_job(&template).map_err(Failure::usage)?;
        if args.count > 1 {
            batch.progress = Progress::of(u64::from(args.count), "enqueued");
        }
        for _ in 0..args.count {
            batch.add(template.clone(), None).await?;
        }
    }
    batch.flush().await?;
    batch.progress.finish();
    let refused = batch.refused;
    warn_if_unserved(&args.contract, store).await;
    if refused > 0 {
        return Err(Failure::new(Exit::Refused, format!("{} refused; the others are enqueued", text::count(refused, "job"))));
    }
    Ok(())
}

fn payload(args: &EnqueueArgs) -> Outcome<String> {
    if let Some(text) = &args.payload {
        return Ok(text.clone());
    }
    let (name, read) = match &args.payload_file {
        Some(path) => (path.display().to_string(), File::open(path).and_then(read_payload)),
        None => ("standard input".to_owned(), read_payload(io::stdin().lock())),
    };
    read.map_err(|error| Failure::usage(format!("failed to read the payload from {name}: {error}")))
}

/// One byte more than is allowed is enough to refuse it for its size, however long it goes on.
fn read_payload(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    from.take(MAX_PAYLOAD_BYTES as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

async fn from_lines(path: &Path, template: &NewJob, batch: &mut Batch<'_>) -> Outcome {
    let name = if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() };
    let failed = |error: io::Error| Failure::usage(format!("failed to read {name}: {error}"));
    let mut reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).map_err(failed)?))
    };
    let mut bytes = Vec::new();
    for number in 1u64.. {
        bytes.clear();
        // Of an endless line only as much is kept as shows that it is too long; the rest is skipped.
        let limit = MAX_PAYLOAD_BYTES as u64 + 2;
        if reader.by_ref().take(limit).read_until(b'\n', &mut bytes).map_err(failed)? == 0 {
            return Ok(());
        }
        if bytes.len() as u64 == limit && bytes.last() != Some(&b'\n') {
            skip_line(reader.as_mut()).map_err(failed)?;
        }
        let line = bytes.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let checked = std::str::from_utf8(line)
            .map_err(|error| format!("the payload is not UTF-8: {error}"))
            .map(|payload| NewJob { payload: payload.to_owned(), ..template.clone() })
            .and_then(|job| check_new_job(&job).map(|()| job));
        match checked {
            Ok(job) => batch.add(job, Some(number)).await?,
            Err(why) => batch.refuse(why, number)?,
        }
    }
    Ok(())
}

fn skip_line(reader: &mut dyn BufRead) -> io::Result<()> {
    loop {
        let available = reader.fill_buf()?;
        if available.is_empty() {
            return Ok(());
        }
        let (used, ended) = match available.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (available.len(), false),
        };
        reader.consume(used);
        if ended {
            return Ok(());
        }
    }
}

/// Jobs on their way to the store.
struct Batch<'a> {
    store: &'a dyn Store,
    as_json: bool,
    now: UnixMillis,
    waiting: Vec<(NewJob, Option<u64>)>,
    bytes: usize,
    refused: u64,
    progress: Progress,
}

impl Batch<'_> {
    async fn add(&mut self, mut job: NewJob, line: Option<u64>) -> Outcome {
        job.id = JobId(uuid::Uuid::now_v7().as_u128());
        self.bytes += job.payload.len();
        self.waiting.push((job, line));
        if self.waiting.len() >= CHUNK_JOBS || self.bytes >= CHUNK_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Outcome {
        let waiting = std::mem::take(&mut self.waiting);
        self.bytes = 0;
        if waiting.is_empty() {
            return Ok(());
        }
        let (jobs, lines): (Vec<NewJob>, Vec<Option<u64>>) = waiting.into_iter().unzip();
        let own: HashSet<JobId> = jobs.iter().map(|job| job.id).collect();
        let (verdicts, repeated) = match self.store.enqueue(jobs.clone(), self.now).await {
            // Whether it was written is unknown; the ids tell, so it is safe to send the same jobs once more.
            Err(error) if error.kind() == StoreErrorKind::OutcomeUnknown => (self.store.enqueue(jobs, self.now).await?, true),
            answer => (answer?, false),
        };
        for (verdict, line) in verdicts.into_iter().zip(lines) {
            match verdict {
                EnqueueVerdict::Duplicate(id) if repeated && own.contains(&id) => self.say(&EnqueueVerdict::Enqueued(id), line)?,
                verdict => self.say(&verdict, line)?,
            }
        }
        Ok(())
    }

    fn refuse(&mut self, why: String, line: u64) -> Outcome {
        self.say(&EnqueueVerdict::Refused(why), Some(line))
    }

    fn say(&mut self, verdict: &EnqueueVerdict, line: Option<u64>) -> Outcome {
        self.progress.step();
        if matches!(verdict, EnqueueVerdict::Refused(_)) {
            self.refused += 1;
        }
        self.progress.suspend(|| {
            if self.as_json {
                return text::print_json_line(&json::Enqueued::new(verdict, line));
            }
            match verdict {
                EnqueueVerdict::Enqueued(id) => text::print(id),
                EnqueueVerdict::Duplicate(id) => {
                    text::print(id)?;
                    text::note("note: a job with that unique key has not ended yet; this is its id, and nothing was enqueued");
                    Ok(())
                }
                EnqueueVerdict::Refused(why) => {
                    let place = line.map_or_else(String::new, |line| format!("line {line}: "));
                    text::note(format!("{place}refused: {}", text::line(why)));
                    Ok(())
                }
            }
        })
    }
}

/// A job that nobody can run is not an error (hosts may start later), but it is rarely meant.
async fn warn_if_unserved(contract: &str, store: &dyn Store) {
    // It was enqueued; that the answer to this question is missing must not make it look otherwise.
    if let Ok(served) = store.served_contracts().await
        && !served.iter().any(|name| name == contract)
    {
        text::note(format!(
            "warning: no live host runs `{}`; the job stays Enqueued until one does (`warp-host hosts list`, `warp-host plugins`)",
            text::line(contract)
        ));
    }
}

/// The explicit policy.
fn declared(args: &EnqueueArgs) -> Outcome<Declared> {
    let (kind, keys, limit) = match (args.mutex.as_slice(), args.semaphore.as_slice()) {
        ([], []) => {
            if args.mode.is_some() || args.order.is_some() {
                return Err(Failure::usage("--mode and --order say how a key is shared; give the key with --mutex or --semaphore"));
            }
            return Ok(Declared { concurrency: None, retry: args.retry.clone(), timeout: args.timeout.clone() });
        }
        (keys, []) => (ConcurrencyKind::Mutex, keys, 1),
        (_, keys) => (ConcurrencyKind::Semaphore, keys, args.limit.unwrap_or(1)),
    };
    let concurrency = Concurrency {
        kind,
        keys: keys.to_vec(),
        limit,
        weight: args.weight.unwrap_or(1),
        mode: args.mode.unwrap_or(match kind {
            ConcurrencyKind::Mutex => Mode::Skip,
            ConcurrencyKind::Semaphore => Mode::Wait,
        }),
        order: args.order.unwrap_or(Order::Any),
        on_retry: args.on_retry.unwrap_or(OnRetry::Block),
    };
    if concurrency.weight > concurrency.limit {
        return Err(Failure::usage(format!(
            "--weight {} is above --limit {}, so the job could never run",
            concurrency.weight, concurrency.limit
        )));
    }
    if concurrency.order == Order::Fifo && concurrency.mode == Mode::Skip {
        return Err(Failure::usage("--order fifo keeps a line, and --mode skip has none; add --mode wait"));
    }
    if args.on_retry.is_some() && concurrency.order != Order::Fifo {
        return Err(Failure::usage("--on-retry is about the head of a line; add --order fifo"));
    }
    Ok(Declared { concurrency: Some(concurrency), retry: args.retry.clone(), timeout: args.timeout.clone() })
}

/// For `try`, which checks a payload as every entry path does.
///
/// # Errors
/// What is wrong with it.
pub fn check_payload(payload: &str) -> Outcome {
    JsonPayload::parse(payload).map(|_| ()).map_err(|error| Failure::usage(error.to_string()))
}
