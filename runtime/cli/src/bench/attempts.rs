//! What an attempt costs, plugin by plugin, without a database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warp_pipeline::{Handler, StopSignal};

use super::Bench;
use super::report::Row;
use super::subject::{Deaf, Recorder, attempt};
use crate::failure::{Failure, Outcome};
use crate::hosting;

/// The first attempts pay for pages that the operating system has not mapped yet.
const WARM_UP: u64 = 100;

impl Bench<'_> {
    /// Every plugin of the directory beside the native function, in the same loop.
    pub(super) fn attempts(&self) -> Outcome<Vec<Row>> {
        let (control, guests) = (hosting::control_runtime()?, hosting::guest_runtime()?);
        let native: Arc<dyn Handler> = Recorder::new(None, Duration::ZERO, false);
        let mut subjects = vec![("native".to_owned(), native)];
        let loader = hosting::loader(self.workers(), &self.config.cache.value)?;
        let folder = &self.config.plugins.value;
        let entries = std::fs::read_dir(folder).map_err(|error| Failure::usage(format!("failed to read {}: {error}", folder.display())))?;
        let mut files: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
        files.retain(|file| file.extension().is_some_and(|ending| ending == "wasm"));
        files.sort();
        for file in files {
            let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            subjects.push((name, hosting::load_one(&control, &loader, &file, &hosting::grants(self.config))?));
        }
        let mut rows = Vec::new();
        for (name, handler) in subjects {
            let runs = self.args.jobs.unwrap_or(if name == "csv-report" { 2_000 } else { 10_000 });
            let times = guests.block_on(guests.spawn(async move {
                let calls = Arc::new(Deaf::default());
                let mut times = Vec::new();
                for number in 0..runs + WARM_UP {
                    let (info, calls, stop) = (attempt(number), Arc::<Deaf>::clone(&calls), Arc::new(StopSignal::default()));
                    let begin = Instant::now();
                    handler.run(info, calls, stop).await;
                    if number >= WARM_UP {
                        times.push(begin.elapsed().as_secs_f64() * 1e3);
                    }
                }
                times
            }));
            let times = times.map_err(|error| Failure::from(anyhow::Error::from(error)))?;
            let note = "one attempt that ends at once: store, instance, call, drop";
            let row = self.row(&format!("attempt-{name}"), runs, note, serde_json::Map::new());
            rows.push(Row { workers: 1, store: "none", ..row.timed(times) });
        }
        Ok(rows)
    }
}
