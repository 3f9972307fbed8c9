//! The report as one page: a table and plots, complete in one file.
//!
//! What must stay true: the page fetches nothing, runs no script, reads in light and dark, and every text in it is
//! escaped. The plots are drawn here, as SVG, from the same rows that `--json` prints.

use std::fmt::Write as _;

use super::report::{Row, short, words};

/// The size of a plot in its own units; the page scales it.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
/// What the axes take.
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 12.0;
/// Lines of one plot; the style sheet has as many colours.
const COLOURS: usize = 8;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6678;--line:#d8dde6;--page:#fff;--card:#f6f7f9;\
--c0:#2f6fdb;--c1:#c2542d;--c2:#2d8a57;--c3:#8a4fc0;--c4:#b08a00;--c5:#0f8f9c;--c6:#c03d72;--c7:#6a7383}\
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#98a3b5;--line:#343c4a;--page:#12161d;--card:#1a2029;\
--c0:#6ea3ff;--c1:#ff9468;--c2:#62cf93;--c3:#c294f5;--c4:#e5c14b;--c5:#4fd0dc;--c6:#ff83b1;--c7:#a7b1c2}}\
body{margin:0 auto;max-width:72rem;padding:1.5rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page)}\
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}p{color:var(--soft);margin:.3rem 0 1rem;max-width:60rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{padding:.35rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}\
th{color:var(--soft);font-weight:600;font-size:.85rem}th:first-child,td:first-child{text-align:left}tr:has(+tr>.note) td{border-bottom:0;padding-bottom:0}td.note{white-space:normal;color:var(--soft);font-size:.85rem;padding-top:0}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}\
figure{margin:0;padding:.8rem 1rem;background:var(--card);border-radius:.5rem;overflow-x:auto}figcaption{font-weight:600;margin-bottom:.2rem}\
svg{width:100%;height:auto;display:block}text{fill:var(--soft);font:12px system-ui,sans-serif}.grid{stroke:var(--line);stroke-width:1}\
.curve{fill:none;stroke-width:2;stroke-linejoin:round}.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;color:var(--soft)}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;margin-right:.35rem;vertical-align:-.05rem}\
details{margin:.4rem 0}summary{cursor:pointer}pre{background:var(--card);padding:.8rem;border-radius:.5rem;overflow-x:auto;font-size:.82rem}";

/// One curve with its name.
struct Curve<'a> {
    name: &'a str,
    points: &'a [[f64; 2]],
}

/// The whole page.
pub fn page(rows: &[Row]) -> String {
    let mut out = String::new();
    let first = rows.first();
    let store = first.map_or("", |row| row.store);
    let locks = first.map_or("", |row| row.locks);
    let version = first.and_then(|row| row.settings["server_version"].as_str()).unwrap_or_default();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>warp-host bench</title><style>{STYLE}</style></head><body><h1>warp-host bench</h1>\
         <p>{} {}, slots: {}. Every workload ran on an empty database of its own, with durable commits. Hosts are threads of one process, each with connections of its own.</p>",
        escaped(store),
        escaped(version),
        escaped(locks)
    );
    table(&mut out, rows);
    out.push_str("<h2>Plots</h2><div class=\"plots\">");
    for rate in curves(rows, |row| &row.beside.throughput) {
        lines(&mut out, rate.name, "jobs a second, by seconds since the start", std::slice::from_ref(&rate), Scale::Linear);
    }
    let waits = curves(rows, |row| &row.beside.waits);
    lines(&mut out, "Waits", "part of all waits that were no longer, by milliseconds", &waits, Scale::Log);
    bars(&mut out, "Statements per job", rows, |row| row.statements_per_job);
    bars(&mut out, "WAL bytes per job, without page images", rows, |row| row.wal_bytes_per_job);
    out.push_str("</div>");
    details(&mut out, rows);
    out.push_str("</body></html>\n");
    out
}

fn table(out: &mut String, rows: &[Row]) {
    out.push_str("<div class=\"scroll\"><table><thead><tr>");
    let header = [
        "workload",
        "jobs",
        "hosts × workers",
        "jobs/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "statements/job",
        "WAL B/job",
        "refused/job",
        "backends",
        "",
    ];
    header.iter().for_each(|name| out.extend(["<th>", name, "</th>"]));
    out.push_str("</tr></thead><tbody>");
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), short);
    for row in rows {
        let cells = [
            row.workload.clone(),
            row.jobs.to_string(),
            format!("{} × {}", row.beside.hosts, row.workers),
            row.jobs_per_s.map_or_else(|| "–".to_owned(), |rate| format!("{rate:.0}")),
            number(row.p50_ms),
            number(row.p95_ms),
            number(row.p99_ms),
            number(row.statements_per_job),
            number(row.wal_bytes_per_job),
            number(row.refused_per_job),
            row.peak_backends.map_or_else(|| "–".to_owned(), |peak| peak.to_string()),
        ];
        out.push_str("<tr>");
        cells.iter().for_each(|cell| out.extend(["<td>", &escaped(cell), "</td>"]));
        let _ = write!(out, "</tr><tr><td class=\"note\" colspan=\"{}\">{}</td></tr>", cells.len(), escaped(&words(&row.beside)));
    }
    out.push_str("</tbody></table></div>");
}

fn details(out: &mut String, rows: &[Row]) {
    out.push_str("<h2>Settings and connections</h2>");
    for row in rows {
        let shown =
            serde_json::json!({ "settings": row.settings, "statements_from": row.beside.statements_from, "backends": row.beside.backends });
        // A value that was made here always has a text.
        let shown = serde_json::to_string_pretty(&shown).unwrap_or_default();
        out.extend(["<details><summary>", &escaped(&row.workload), "</summary><pre>", &escaped(&shown), "</pre></details>"]);
    }
}

fn curves<'a>(rows: &'a [Row], points: impl Fn(&'a Row) -> &'a Vec<[f64; 2]>) -> Vec<Curve<'a>> {
    let curve = |row: &'a Row| Curve { name: &row.workload, points: points(row) };
    rows.iter().map(curve).filter(|curve| curve.points.len() > 1).collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Scale {
    Linear,
    Log,
}

/// From values to places on one axis.
struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    start: f64,
    length: f64,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.from) / (self.to - self.from),
            Scale::Log => (value.max(self.from).ln() - self.from.ln()) / (self.to.ln() - self.from.ln()),
        };
        self.start + part.clamp(0.0, 1.0) * self.length
    }

    /// Round values for a grid.
    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = round_step((self.to - self.from) / 4.0);
                (0..=8).map(|at| self.from + step * f64::from(at)).filter(|tick| *tick <= self.to * 1.0001).collect()
            }
            Scale::Log => {
                let first = self.from.log10().ceil() as i32;
                let last = self.to.log10().floor() as i32;
                (first..=last).map(|power| 10_f64.powi(power)).collect()
            }
        }
    }
}

/// The next 1, 2 or 5 with zeros.
fn round_step(step: f64) -> f64 {
    let base = 10_f64.powf(step.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|factor| factor * base).into_iter().find(|candidate| *candidate >= step * 0.999).unwrap_or(step)
}

fn lines(out: &mut String, title: &str, what: &str, curves: &[Curve<'_>], scale: Scale) {
    let all = || curves.iter().flat_map(|curve| curve.points);
    let most = |at: usize| all().map(|point| point[at]).fold(0.0, f64::max);
    if curves.is_empty() || most(0) <= 0.0 || most(1) <= 0.0 {
        return;
    }
    let least = all().map(|point| point[0]).filter(|x| *x > 0.0).fold(f64::INFINITY, f64::min);
    let from = if scale == Scale::Log { least.max(most(0) / 1e5) } else { 0.0 };
    let across = Axis { scale, from, to: most(0).max(from * 1.01), start: LEFT, length: WIDTH - LEFT - RIGHT };
    let up = Axis { scale: Scale::Linear, from: 0.0, to: most(1) * 1.05, start: HEIGHT - BOTTOM, length: -(HEIGHT - BOTTOM - TOP) };
    open_figure(out, title, what);
    for tick in up.ticks() {
        let y = up.place(tick);
        let _ = write!(out, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>", WIDTH - RIGHT);
        let _ = write!(out, "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", LEFT - 6.0, y + 4.0, plain(tick));
    }
    for tick in across.ticks() {
        let x = across.place(tick);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>", HEIGHT - BOTTOM + 18.0, plain(tick));
    }
    for (number, curve) in curves.iter().enumerate() {
        let place = |point: &[f64; 2]| format!("{:.1},{:.1}", across.place(point[0]), up.place(point[1]));
        let points: Vec<_> = curve.points.iter().map(place).collect();
        let _ = write!(out, "<polyline class=\"curve\" style=\"stroke:var(--c{})\" points=\"{}\"/>", number % COLOURS, points.join(" "));
    }
    out.push_str("</svg>");
    if curves.len() == 1 {
        out.push_str("</figure>");
        return;
    }
    out.push_str("<div class=\"key\">");
    for (number, curve) in curves.iter().enumerate() {
        let _ = write!(out, "<span><i style=\"background:var(--c{})\"></i>{}</span>", number % COLOURS, escaped(curve.name));
    }
    out.push_str("</div></figure>");
}

fn bars(out: &mut String, title: &str, rows: &[Row], value: impl Fn(&Row) -> Option<f64>) {
    let shown: Vec<_> = rows.iter().filter_map(|row| Some((row.workload.as_str(), value(row)?))).collect();
    let most = shown.iter().map(|(_, value)| *value).fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    let (label, step) = (170.0, 22.0);
    let height = TOP + step * shown.len() as f64;
    let across = Axis { scale: Scale::Linear, from: 0.0, to: most, start: label, length: WIDTH - label - 70.0 };
    let _ = write!(out, "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\">", escaped(title));
    for (number, (name, value)) in shown.iter().enumerate() {
        let y = TOP + step * number as f64;
        let end = across.place(*value);
        let _ = write!(out, "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", label - 8.0, y + 11.0, escaped(name));
        let _ = write!(
            out,
            "<rect x=\"{label}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"14\" rx=\"2\" style=\"fill:var(--c0)\"/>",
            (end - label).max(1.0)
        );
        let _ = write!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", end + 6.0, y + 11.0, short(*value));
    }
    out.push_str("</svg></figure>");
}

fn open_figure(out: &mut String, title: &str, what: &str) {
    let _ = write!(
        out,
        "<figure><figcaption>{}</figcaption><p>{}</p><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">",
        escaped(title),
        escaped(what)
    );
}

/// A tick's value: no more digits than it needs.
fn plain(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        value if value >= 1.0 || value == 0.0 => format!("{}", (value * 100.0).round() / 100.0),
        value => format!("{}", (value * 10_000.0).round() / 10_000.0),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::blank;
    use super::*;

    #[test]
    fn the_page_is_complete_and_fetches_nothing() {
        let mut row = Row { statements_per_job: Some(0.1), jobs_per_s: Some(1234.0), ..blank().timed((1..500).map(f64::from).collect()) };
        row.beside.throughput = vec![[0.1, 100.0], [0.2, 300.0]];
        row.beside.note = "<script>alert(1)</script>".to_owned();
        let page = page(&[row]);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert_eq!(page.matches("<svg").count(), 3, "rates, waits, statements; nothing was said about WAL");
        assert!(!page.contains("<script") && !page.contains("http"), "nothing is run or fetched");
        for tag in ["figure", "svg", "table", "details", "div", "span"] {
            assert_eq!(page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count(), "{tag} is closed");
        }
        assert!(!page.contains("NaN") && !page.contains("inf"), "every point has a place");
    }

    #[test]
    fn axes_place_their_ends_at_their_ends() {
        let linear = Axis { scale: Scale::Linear, from: 0.0, to: 10.0, start: 5.0, length: 100.0 };
        assert_eq!((linear.place(0.0), linear.place(10.0), linear.place(20.0)), (5.0, 105.0, 105.0));
        assert_eq!(linear.ticks(), [0.0, 5.0, 10.0]);
        let log = Axis { scale: Scale::Log, from: 0.1, to: 1000.0, start: 0.0, length: 4.0 };
        assert!((log.place(10.0) - 2.0).abs() < 1e-9);
        assert_eq!(log.ticks().len(), 5);
    }

    #[test]
    fn a_page_without_figures_is_still_a_page() {
        assert!(page(&[]).ends_with("</html>\n"));
    }
}
