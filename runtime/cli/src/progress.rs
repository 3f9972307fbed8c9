//! Progress of long work, on standard error and only when that is a terminal.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar, a counter, or nothing at all.
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows nothing.
    pub fn none() -> Self {
        Progress(ProgressBar::hidden())
    }

    /// So many steps.
    pub fn of(total: u64, what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), target());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        Progress(bar)
    }

    /// Steps without a known end.
    pub fn counting(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, target());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        Progress(bar)
    }

    /// Work whose steps are not known.
    pub fn spinner(what: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, target());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// One step further.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// Runs something that prints, with the bar out of the way.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.suspend(print)
    }

    /// Removes it.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

fn target() -> ProgressDrawTarget {
    if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}
