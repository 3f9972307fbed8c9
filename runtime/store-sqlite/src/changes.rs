//! Who must look again, and when.
//!
//! Every transaction after which somebody should look for work raises `sequence.wakes` in the file. Inside this
//! process its commit announces it. Commits of other processes are noticed in two ways: the writer reads the number
//! whenever it begins a transaction, and a watcher reads it after the log file has changed. A change of the log is a
//! hint only: it is seen when the frames are written, a sync before they count, so the watcher looks several times.
//! Where the file system reports no changes, looking once a second remains.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use notify::Watcher as _;
use sqlx::{Connection as _, Row as _, SqliteConnection};
use tokio::sync::{Notify, watch};

use crate::schema;

/// The safety net.
const POLL: Duration = Duration::from_secs(1);
/// After a hint: how often to look, and the longest pause between two looks. Pauses grow from one millisecond, which
/// also gathers the hints of one commit; together they outlast the sync of a slow disk.
const LOOKS: u32 = 32;
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// A counter of changes with people who wait for the next one.
pub(crate) struct Changes {
    count: watch::Sender<u64>,
    /// What the last call of [`Changes::wait`] has seen.
    seen: Mutex<u64>,
    /// The largest `sequence.wakes` that this process knows of. The writer and the watcher write it.
    wakes: AtomicI64,
    /// How often the writer has read it; the watcher spares a look that the writer has just had.
    looked: AtomicU64,
}

impl Changes {
    /// `wakes` is what the file says now.
    pub(crate) fn new(wakes: i64) -> Self {
        Changes { count: watch::Sender::new(0), seen: Mutex::new(0), wakes: AtomicI64::new(wakes), looked: AtomicU64::new(0) }
    }

    /// The number in the file as somebody has read or written it. Announces what is new, and says whether it was.
    pub(crate) fn learn(&self, wakes: i64) -> bool {
        let is_new = self.wakes.fetch_max(wakes, Ordering::AcqRel) < wakes;
        if is_new {
            self.count.send_modify(|count| *count = count.wrapping_add(1));
        }
        is_new
    }

    /// The writer has read the number.
    pub(crate) fn writer_looked(&self, wakes: i64) {
        self.looked.fetch_add(1, Ordering::AcqRel);
        self.learn(wakes);
    }

    /// Completes when something was announced since the last call returned.
    pub(crate) async fn wait(&self) {
        let mut changes = self.count.subscribe();
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *changes.borrow_and_update() == seen {
            // The sender lives in `self`, so this ends with a change and never with an error.
            let _ = changes.changed().await;
        }
        let now = *changes.borrow_and_update();
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }
}

/// Watches the file for other processes until it is dropped.
pub(crate) async fn watch(path: PathBuf, changes: Arc<Changes>) {
    let hints = Arc::new(Notify::new());
    // Held for its lifetime: dropping it ends the watch.
    let watcher = watch_log(&path, hints.clone());
    if let Err(error) = &watcher {
        tracing::warn!(file = %path.display(), %error, "changes of the database file are not reported; looking once a second");
    }
    let mut conn = None;
    loop {
        let hinted = tokio::time::timeout(POLL, hints.notified()).await.is_ok();
        let before = changes.looked.load(Ordering::Acquire);
        for at in 0..LOOKS {
            tokio::time::sleep(Duration::from_millis(1 << at.min(10)).min(LONGEST_PAUSE)).await;
            // The writer reads under the file's write lock. Whoever wrote the log at the hint had that lock, so a
            // later look of the writer has seen its commit.
            let writer_looked = changes.looked.load(Ordering::Acquire) > before;
            let is_new = match look(&mut conn, &path, writer_looked).await {
                Some(wakes) => changes.learn(wakes),
                None => false,
            };
            if !hinted || is_new || writer_looked {
                break;
            }
        }
    }
}

/// Reads the number on a connection of its own; opens it again after a fault. Nothing is read when the
/// look is spared.
async fn look(conn: &mut Option<SqliteConnection>, path: &Path, spared: bool) -> Option<i64> {
    if spared {
        return None;
    }
    if conn.is_none() {
        *conn = SqliteConnection::connect_with(&schema::reader_options(path)).await.ok();
    }
    let read = sqlx::query("SELECT wakes FROM sequence").fetch_one(conn.as_mut()?).await;
    match read.and_then(|row| row.try_get(0)) {
        Ok(wakes) => Some(wakes),
        Err(_) => {
            *conn = None;
            None
        }
    }
}

/// Watches the directory, because the log file comes and goes.
fn watch_log(path: &Path, hints: Arc<Notify>) -> notify::Result<notify::RecommendedWatcher> {
    let mut log = path.file_name().unwrap_or_default().to_owned();
    log.push("-wal");
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let is_log = |event: &notify::Event| event.paths.iter().any(|path| path.file_name() == Some(&log));
        match event {
            Ok(event) if (event.kind.is_modify() || event.kind.is_create()) && is_log(&event) => hints.notify_one(),
            Ok(_) => {}
            // Events were lost: look.
            Err(_) => hints.notify_one(),
        }
    })?;
    watcher.watch(directory, notify::RecursiveMode::NonRecursive)?;
    Ok(watcher)
}
