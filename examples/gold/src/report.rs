//! The table: what was expected, what was found, and whether the two agree.

use std::time::{Duration, Instant};

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

/// One line of the table.
struct Row {
    scene: String,
    expected: String,
    found: String,
    right: bool,
    /// How long its scene took; on the scene's last row.
    took: Option<Duration>,
}

/// The rows of one scene.
#[derive(Default)]
pub struct Rows(Vec<Row>);

impl Rows {
    /// Adds a row. `right` is the verdict; the two texts are for people.
    pub fn add(&mut self, scene: impl Into<String>, expected: impl Into<String>, found: impl Into<String>, right: bool) {
        self.0.push(Row { scene: scene.into(), expected: expected.into(), found: found.into(), right, took: None });
    }
}

/// Every scene so far.
#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Plays a scene. One that cannot be played to its end is a wrong row, and the others are played all the same.
    pub fn scene(&mut self, letter: char, title: &str, play: impl FnOnce(&mut Rows) -> Result<()>) {
        eprintln!("{letter}  {title}");
        let begin = Instant::now();
        let mut rows = Rows::default();
        if let Err(error) = play(&mut rows) {
            rows.add(title, "played to its end", format!("{error:#}"), false);
        }
        if let Some(last) = rows.0.last_mut() {
            last.took = Some(begin.elapsed());
        }
        for row in &mut rows.0 {
            row.scene = format!("{letter}  {}", row.scene);
        }
        self.rows.append(&mut rows.0);
    }

    /// Whether there are rows and none is wrong.
    pub fn all_right(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.right)
    }

    /// For people, and for a page: the borders are those of Markdown.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(["scene", "expected", "found", "verdict", "took"]);
        for row in &self.rows {
            let verdict = if row.right { "right" } else { "WRONG" };
            let took = row.took.map_or_else(String::new, |took| format!("{:.1} s", took.as_secs_f64()));
            table.add_row([row.scene.as_str(), &row.expected, &row.found, verdict, &took]);
        }
        table
    }
}

/// A whole number as people write it: `2,999,700`.
pub fn grouped(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}
