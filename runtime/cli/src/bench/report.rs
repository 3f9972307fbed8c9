//! What a measurement says: one row for each workload, as a table or as JSON.
//!
//! What must stay true: the names of [`Row`] are fixed, since figures of different days are compared by them. What one
//! workload or one kind of database adds stands under `beside`.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::text;

/// One row of the report.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub store: &'static str,
    pub locks: &'static str,
    pub workload: String,
    pub jobs: u64,
    /// On each host.
    pub workers: u32,
    pub jobs_per_s: Option<f64>,
    /// From the answer to the enqueue to the handler's first instruction; what else is timed, the note says.
    pub p50_ms: Option<f64>,
    pub p95_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    /// What hosts sent: counted by the server, or on SQLite the transactions, which it has instead of round trips.
    pub statements_per_job: Option<f64>,
    /// Without images of whole pages; from the enqueue to the end.
    pub wal_bytes_per_job: Option<f64>,
    /// Refusals after a job's first parking.
    pub refused_per_job: Option<f64>,
    /// Connections of all hosts at once.
    pub peak_backends: Option<u32>,
    pub settings: serde_json::Value,
    pub beside: Beside,
}

/// What not every workload and database has.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Beside {
    pub note: String,
    pub hosts: u32,
    /// Of several repeats the lowest and highest of the figure that the row was chosen by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// Who counted the statements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statements_from: Option<&'static str>,
    /// Everything else with a name and a number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: BTreeMap<&'static str, f64>,
    /// The most connections at once, by name of the application.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub backends: BTreeMap<String, u32>,
    /// Seconds since the start, and jobs a second around then.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub throughput: Vec<[f64; 2]>,
    /// Milliseconds, and the part of all waits that were no longer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<[f64; 2]>,
}

/// How far repeats lie apart.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    pub repeats: usize,
    pub lowest: f64,
    pub highest: f64,
}

impl Row {
    /// Takes percentiles and distribution from waits in milliseconds.
    pub fn timed(mut self, waits: Vec<f64>) -> Self {
        let sorted = sorted(waits);
        [self.p50_ms, self.p95_ms, self.p99_ms] = [0.50, 0.95, 0.99].map(|part| quantile(&sorted, part));
        self.beside.waits = distribution(&sorted);
        self
    }

    /// Adds a figure of its own.
    pub fn figure(mut self, name: &'static str, value: impl Into<Option<f64>>) -> Self {
        if let Some(value) = value.into() {
            self.beside.figures.insert(name, value);
        }
        self
    }

    /// What repeats are compared by.
    fn main_figure(&self) -> f64 {
        self.jobs_per_s.or(self.p50_ms).unwrap_or(0.0)
    }
}

fn sorted(mut samples: Vec<f64>) -> Vec<f64> {
    samples.sort_by(f64::total_cmp);
    samples
}

fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    sorted.get(((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1))).copied()
}

/// The value below which this part of the samples lies.
pub fn percentile(samples: &[f64], part: f64) -> Option<f64> {
    quantile(&sorted(samples.to_vec()), part)
}

/// A curve of at most a hundred points, closer towards the slow end, where it matters.
fn distribution(sorted: &[f64]) -> Vec<[f64; 2]> {
    if sorted.is_empty() {
        return Vec::new();
    }
    let coarse = (0..50).map(|step| f64::from(step) / 50.0);
    // The first step would repeat the last coarse one.
    let fine = (1..=18).map(|step| 1.0 - 0.02 * 0.7_f64.powi(step));
    let parts = coarse.chain(fine).chain(std::iter::once(1.0));
    parts.filter_map(|part| quantile(sorted, part).map(|value| [value, part])).collect()
}

/// Of several runs of one workload, the one whose rate (else whose median) is in the middle, with the spread.
pub fn median_rows(mut repeats: Vec<Vec<Row>>) -> Vec<Row> {
    let figure = |rows: &Vec<Row>| rows.first().map_or(0.0, Row::main_figure);
    repeats.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
    let count = repeats.len();
    let spread = repeats.first().zip(repeats.last()).map(|(lowest, highest)| (figure(lowest), figure(highest)));
    let mut rows = if repeats.is_empty() { Vec::new() } else { repeats.swap_remove(count / 2) };
    if let (Some((lowest, highest)), true) = (spread, count > 1) {
        for row in &mut rows {
            row.beside.spread = Some(Spread { repeats: count, lowest, highest });
        }
    }
    rows
}

/// The rows for people.
pub fn table(rows: &[Row]) -> String {
    let number = |value: Option<f64>, digits: usize| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"));
    let lines = rows.iter().map(|row| {
        [
            row.workload.clone(),
            row.jobs.to_string(),
            if row.beside.hosts > 1 { format!("{}×{}", row.beside.hosts, row.workers) } else { row.workers.to_string() },
            number(row.jobs_per_s, 0),
            number(row.p50_ms, 3),
            number(row.p95_ms, 3),
            number(row.p99_ms, 3),
            number(row.statements_per_job, 3),
            number(row.wal_bytes_per_job, 0),
            number(row.refused_per_job, 3),
            row.peak_backends.map_or_else(|| "–".to_owned(), |peak| peak.to_string()),
            words(&row.beside),
        ]
    });
    let header =
        ["WORKLOAD", "JOBS", "WORKERS", "JOBS/S", "P50 MS", "P95 MS", "P99 MS", "STMT/JOB", "WAL B/JOB", "REFUSED/JOB", "BACKENDS", "NOTE"];
    text::table(header, lines).to_string()
}

/// The note, and every further figure with its name.
pub fn words(beside: &Beside) -> String {
    let mut parts = vec![beside.note.clone()];
    if let Some(Spread { repeats, lowest, highest }) = beside.spread {
        parts.push(format!("{repeats} repeats from {} to {}", short(lowest), short(highest)));
    }
    parts.extend(beside.figures.iter().map(|(name, value)| format!("{} {}", name.replace('_', " "), short(*value))));
    parts.retain(|part| !part.is_empty());
    parts.join("; ")
}

/// A number with as many digits as say something.
pub fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Counts over time as a rate over time, in at most a hundred steps.
pub fn rates(counts: &[(f64, u64)]) -> Vec<[f64; 2]> {
    let step = counts.len().div_ceil(100).max(1);
    let points: Vec<_> = counts.iter().step_by(step).copied().collect();
    let rate = |pair: &[(f64, u64)]| match *pair {
        [(from, before), (to, after)] if to > from => Some([to, after.saturating_sub(before) as f64 / (to - from)]),
        _ => None,
    };
    points.windows(2).filter_map(rate).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_repeats_stands_with_its_spread() {
        let rows = [300.0, 100.0, 200.0].map(|rate| vec![Row { jobs_per_s: Some(rate), ..blank() }]).to_vec();
        let found = median_rows(rows);
        assert_eq!(found[0].jobs_per_s, Some(200.0));
        assert!(matches!(found[0].beside.spread, Some(Spread { repeats: 3, lowest, highest }) if lowest == 100.0 && highest == 300.0));
        assert!(median_rows(vec![vec![blank()]])[0].beside.spread.is_none(), "one run has no spread");
    }

    #[test]
    fn percentiles_are_of_the_samples_and_the_curve_ends_at_the_slowest() {
        let row = blank().timed((1..=100).rev().map(f64::from).collect());
        assert_eq!([row.p50_ms, row.p95_ms, row.p99_ms], [Some(51.0), Some(96.0), Some(100.0)]);
        assert_eq!(row.beside.waits.last(), Some(&[100.0, 1.0]));
        assert!(row.beside.waits.windows(2).all(|pair| pair[0][0] <= pair[1][0] && pair[0][1] < pair[1][1]));
        assert_eq!(blank().timed(Vec::new()).p50_ms, None);
    }

    #[test]
    fn counts_become_rates() {
        assert_eq!(rates(&[(0.0, 0), (0.5, 100), (1.0, 100)]), [[0.5, 200.0], [1.0, 0.0]]);
        let long: Vec<_> = (0..1000).map(|at: i32| (f64::from(at), u64::from(at.unsigned_abs()))).collect();
        assert!(rates(&long).len() <= 100);
    }

    /// The keys are what figures of other days are compared by.
    #[test]
    fn the_keys_of_a_row_are_fixed() {
        let value = serde_json::to_value(blank()).expect("a row is plain data");
        let keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
        let mut expected = vec![
            "store",
            "locks",
            "workload",
            "jobs",
            "workers",
            "jobs_per_s",
            "p50_ms",
            "p95_ms",
            "p99_ms",
            "statements_per_job",
            "wal_bytes_per_job",
            "refused_per_job",
            "peak_backends",
            "settings",
            "beside",
        ];
        expected.sort_unstable();
        let mut keys = keys;
        keys.sort_unstable();
        assert_eq!(keys, expected);
    }

    pub fn blank() -> Row {
        Row {
            store: "sqlite",
            locks: "ledger",
            workload: "noop".to_owned(),
            jobs: 100,
            workers: 16,
            jobs_per_s: None,
            p50_ms: None,
            p95_ms: None,
            p99_ms: None,
            statements_per_job: None,
            wal_bytes_per_job: None,
            refused_per_job: None,
            peak_backends: None,
            settings: serde_json::Value::Null,
            beside: Beside::default(),
        }
    }
}
