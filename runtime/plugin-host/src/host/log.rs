//! `warp:job/log`: lines for people, counted against the same caps as what the guest prints.

use std::fmt::Write;

use warp_pipeline::Level;

use super::HostState;
use super::bindings::warp::job::log::{Host, Level as GuestLevel};

impl Host for HostState {
    fn write(&mut self, level: GuestLevel, message: String, fields: Vec<(String, String)>) -> wasmtime::Result<()> {
        let level = match level {
            GuestLevel::Trace => Level::Trace,
            GuestLevel::Debug => Level::Debug,
            GuestLevel::Info => Level::Info,
            GuestLevel::Warn => Level::Warn,
            GuestLevel::Error => Level::Error,
        };
        self.output.line(level, render(message, &fields).as_bytes());
        Ok(())
    }
}

/// `message key=value`, values quoted where they would be read as something else. A message of several lines
/// stays one entry.
fn render(message: String, fields: &[(String, String)]) -> String {
    let mut line = message;
    for (key, value) in fields {
        let plain = !value.is_empty() && value.chars().all(|c| !c.is_whitespace() && !c.is_control() && c != '"' && c != '=');
        // Writing to a String cannot fail.
        let _ = if plain { write!(line, " {key}={value}") } else { write!(line, " {key}={value:?}") };
    }
    line
}

#[cfg(test)]
mod tests {
    use super::render;

    #[test]
    fn a_field_reads_back_whatever_its_value() {
        let fields = [("a", "1"), ("b", "two words"), ("c", ""), ("d", "x=\"y\"")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(render("done".to_owned(), &fields), r#"done a=1 b="two words" c="" d="x=\"y\"""#);
    }
}
