//! What a guest prints: split into lines, bounded, and never an error for the guest.
//!
//! What must stay true: a guest that prints more than anybody wants to keep goes on unharmed (a full pipe makes
//! `println!` panic), the host keeps at most one line per stream and what the caps allow, and what was not kept
//! is counted.
//!
//! What it deliberately does not do: interpret what is printed. Terminal escapes are kept as they are; whoever
//! shows a line on a terminal takes them out.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use warp_pipeline::{HostCalls, Level};
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamResult};

/// How much of an attempt's output is kept: both streams and the `log` calls together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputCaps {
    /// Bytes of one line; the rest of it is dropped.
    pub line_bytes: usize,
    /// Bytes in all.
    pub total_bytes: usize,
    /// Lines in all.
    pub lines: usize,
}

impl Default for OutputCaps {
    fn default() -> Self {
        OutputCaps { line_bytes: 8 << 10, total_bytes: 256 << 10, lines: 2_000 }
    }
}

#[derive(Debug, Default)]
struct Kept {
    lines: usize,
    bytes: usize,
    dropped_lines: u64,
    dropped_bytes: u64,
}

/// One attempt's output. Written by the guest's calls, closed by the runner when the guest is gone.
pub(crate) struct Output {
    calls: Arc<dyn HostCalls>,
    caps: OutputCaps,
    kept: Mutex<Kept>,
    stdout: Mutex<Vec<u8>>,
    stderr: Mutex<Vec<u8>>,
}

/// A poisoned lock only says that a host call panicked; the counts behind it are still good.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Output {
    pub(crate) fn new(calls: Arc<dyn HostCalls>, caps: OutputCaps) -> Arc<Self> {
        let empty = || Mutex::new(Vec::new());
        Arc::new(Output { calls, caps, kept: Mutex::default(), stdout: empty(), stderr: empty() })
    }

    /// One finished line, from a stream or a `log` call.
    pub(crate) fn line(&self, level: Level, bytes: &[u8]) {
        let kept_bytes = cut(bytes, self.caps.line_bytes);
        let fits = {
            let mut kept = lock(&self.kept);
            let fits = kept.lines < self.caps.lines && kept.bytes + kept_bytes.len() <= self.caps.total_bytes;
            if fits {
                kept.lines += 1;
                kept.bytes += kept_bytes.len();
                kept.dropped_bytes += (bytes.len() - kept_bytes.len()) as u64;
            } else {
                kept.dropped_lines += 1;
                kept.dropped_bytes += bytes.len() as u64;
            }
            fits
        };
        if fits {
            let mut text = String::from_utf8_lossy(kept_bytes).into_owned();
            if text.contains('\0') {
                text = text.replace('\0', "\u{FFFD}");
            }
            if kept_bytes.len() < bytes.len() {
                text.push('…');
            }
            self.calls.line(level, text);
        }
    }

    fn feed(&self, level: Level, mut bytes: &[u8]) {
        let mut open = lock(if level == Level::Stderr { &self.stderr } else { &self.stdout });
        while !bytes.is_empty() {
            let newline = memchr::memchr(b'\n', bytes);
            let part = &bytes[..newline.unwrap_or(bytes.len())];
            // One byte beyond the cap is kept, so that `line` sees that the line was longer.
            let room = (self.caps.line_bytes + 1).saturating_sub(open.len());
            open.extend_from_slice(&part[..part.len().min(room)]);
            lock(&self.kept).dropped_bytes += part.len().saturating_sub(room) as u64;
            match newline {
                Some(at) => {
                    self.line(level, open.strip_suffix(b"\r").unwrap_or(&open));
                    open.clear();
                    bytes = &bytes[at + 1..];
                }
                None => break,
            }
        }
    }

    /// Hands over what was printed without a line end, and the counts. Called once, after the guest is gone.
    pub(crate) fn close(&self) {
        for (level, open) in [(Level::Stdout, &self.stdout), (Level::Stderr, &self.stderr)] {
            let rest = std::mem::take(&mut *lock(open));
            if !rest.is_empty() {
                self.line(level, &rest);
            }
        }
        let kept = std::mem::take(&mut *lock(&self.kept));
        if kept.dropped_lines > 0 || kept.dropped_bytes > 0 {
            self.calls.dropped(kept.dropped_lines, kept.dropped_bytes);
        }
    }
}

/// The longest part of `bytes` within `cap` that does not end inside a UTF-8 character.
fn cut(bytes: &[u8], cap: usize) -> &[u8] {
    if bytes.len() <= cap {
        return bytes;
    }
    let part = &bytes[..cap];
    match std::str::from_utf8(part) {
        Err(e) if e.error_len().is_none() => &part[..e.valid_up_to()],
        _ => part,
    }
}

/// What a guest gets as its standard output or standard error.
#[derive(Clone)]
pub(crate) struct GuestStream {
    pub(crate) output: Arc<Output>,
    pub(crate) level: Level,
}

impl IsTerminal for GuestStream {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for GuestStream {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[wasmtime_wasi::async_trait]
impl Pollable for GuestStream {
    async fn ready(&mut self) {}
}

impl OutputStream for GuestStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.output.feed(self.level, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    /// Bounds what one call may carry, not what may be printed.
    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(64 << 10)
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.output.feed(self.level, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
