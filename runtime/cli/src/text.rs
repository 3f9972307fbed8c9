//! Text for people: tables, and guest text made harmless.
//!
//! What must stay true: nothing that a guest, a payload or another process wrote reaches a terminal except
//! through [`harmless`]. Tables are plain text when standard output is no terminal.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use warp_domain::UnixMillis;

use crate::failure::Outcome;

/// A text with every control character and every character that reorders its line made visible. Tabs stay, and
/// so do line ends if `lines` says so.
pub fn harmless(text: &str, lines: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => out.push(c),
            '\n' if lines => out.push(c),
            '\u{0}'..='\u{1f}' => out.push(char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}')),
            '\u{7f}' => out.push('\u{2421}'),
            // C1 controls (some terminals obey U+009B as ESC [), bidirectional overrides and isolates, and the
            // separators that some viewers break lines at.
            '\u{80}'..='\u{9f}' | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
    out
}

/// One line, harmless.
pub fn line(text: &str) -> String {
    harmless(text, false)
}

/// One line of at most `max` characters, harmless.
pub fn short(text: &str, max: usize) -> String {
    let mut out = line(text);
    if let Some((at, _)) = out.char_indices().nth(max) {
        out.truncate(at);
        out.push('…');
    }
    out
}

/// A table without borders: it reads well, and cuts well with other tools.
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| line(&cell)));
    }
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 2));
    });
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// How long ago or how long, in its two largest units: `3m 20s`.
pub fn rough(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0 => format!("{}ms", span.as_millis()),
        1..=59 => format!("{seconds}s"),
        60..=3599 => pair(seconds / 60, "m", seconds % 60, "s"),
        3600..=86_399 => pair(seconds / 3600, "h", seconds / 60 % 60, "m"),
        _ => pair(seconds / 86_400, "d", seconds / 3600 % 24, "h"),
    }
}

fn pair(large: u64, unit: &str, small: u64, small_unit: &str) -> String {
    if small == 0 { format!("{large}{unit}") } else { format!("{large}{unit} {small}{small_unit}") }
}

/// `1 job`, `2 jobs`.
pub fn count(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// How old something is.
pub fn age(since: UnixMillis, now: UnixMillis) -> String {
    rough(now.since(since))
}

/// Prints to standard output. A reader that has gone away (`| head`) ends the output and is no error.
///
/// # Errors
/// When standard output cannot be written for another reason.
pub fn print(text: impl std::fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints a value as JSON: indented for a terminal, one line for a pipe.
///
/// # Errors
/// When standard output cannot be written.
pub fn print_json(value: &impl serde::Serialize) -> Outcome {
    let text = if io::stdout().is_terminal() { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    print(text.map_err(anyhow::Error::from)?)
}

/// Prints a value as one line of JSON, for output that streams.
///
/// # Errors
/// When standard output cannot be written.
pub fn print_json_line(value: &impl serde::Serialize) -> Outcome {
    print(serde_json::to_string(value).map_err(anyhow::Error::from)?)
}

/// Prints a note to standard error. That it cannot be written is nobody's business.
pub fn note(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_writes_cannot_steer_a_terminal() {
        assert_eq!(line("\u{1b}[31mred\u{1b}]0;title\u{7}"), "␛[31mred␛]0;title␇");
        assert_eq!(line("a\rb\nc\u{8}\u{7f}"), "a␍b␊c␈␡");
        assert_eq!(line("\u{9b}2J \u{202e}txt.exe\u{2066} \u{2028}"), "\\u{9b}2J \\u{202e}txt.exe\\u{2066} \\u{2028}");
        assert_eq!(line("tab\tä 漢 🎉"), "tab\tä 漢 🎉");
        assert_eq!(harmless("a\nb\r", true), "a\nb␍");
        assert_eq!(short("漢字漢字", 2), "漢字…");
        assert_eq!(short("ab", 2), "ab");
    }

    #[test]
    fn spans_have_at_most_two_units() {
        let texts = [0, 999, 59_000, 60_000, 3_599_000, 7_260_000, 90_000_000].map(|ms| rough(Duration::from_millis(ms)));
        assert_eq!(texts, ["0ms", "999ms", "59s", "1m", "59m 59s", "2h 1m", "1d 1h"]);
    }
}
