//! When a file of the directory is worth reading.
//!
//! What must stay true: a file counts only when it looked the same for the settle time, and a path that is missing
//! counts as removed only after it was missing for as long. What it looks like includes the change time of its
//! inode, so that content which changes without its time of modification is noticed. Events of the system are hints
//! to look; without a single one the periodic look finds every change (a mounted volume of a container has none, and
//! the swap of a whole directory by a symbolic link names other paths).
//!
//! What it deliberately does not do: read content. Whether a change is one is decided by digest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use notify::event::ModifyKind;
use notify::{EventKind, RecursiveMode, Watcher};
use rustix::fs::{AtFlags, Stat};
use tokio::sync::Notify;

/// How a file looks from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    device: u64,
    inode: u64,
    bytes: i64,
    modified: (i64, u64),
    changed: (i64, u64),
}

impl Look {
    fn of(stat: &Stat) -> Self {
        #[expect(clippy::unnecessary_cast, reason = "the types of these fields differ between platforms")]
        Look {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            bytes: stat.st_size as i64,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            changed: (stat.st_ctime as i64, stat.st_ctime_nsec as u64),
        }
    }

    fn changed_before(&self, instant: SystemTime) -> bool {
        let since = instant.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(self.changed.0).is_ok_and(|seconds| seconds < since.as_secs())
    }
}

/// A component and its sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    component: Look,
    sidecar: Option<Look>,
}

/// The directory as it was at one instant.
pub(crate) struct Listing {
    pub(crate) dir: Dir,
    pub(crate) identity: (u64, u64),
    pub(crate) files: BTreeMap<String, Seen>,
}

/// Lists the components of a directory. It is opened anew each time, since it may be another one by now.
pub(crate) fn list(path: &Path) -> std::io::Result<Listing> {
    let dir = Dir::open_ambient_dir(path, ambient_authority())?;
    let about = rustix::fs::fstat(&dir)?;
    let look = |name: &str| rustix::fs::statat(&dir, name, AtFlags::empty()).ok().map(|stat| Look::of(&stat));
    let mut files = BTreeMap::new();
    for entry in dir.entries()? {
        // Names that are not text cannot be shown, granted or removed by anybody.
        let Ok(name) = entry?.file_name().into_string() else { continue };
        // A dot hides a file that is being written aside.
        let Some(stem) = name.strip_suffix(".wasm").filter(|stem| !stem.is_empty() && !stem.starts_with('.')) else { continue };
        // A link that leads nowhere is no file.
        let Some(component) = look(&name) else { continue };
        let sidecar = look(&format!("{stem}.toml"));
        files.insert(name, Seen { component, sidecar });
    }
    let Look { device, inode, .. } = Look::of(&about);
    Ok(Listing { dir, identity: (device, inode), files })
}

/// What to do about a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Decision {
    /// It has been missing long enough.
    Remove(String),
    /// It has looked the same long enough.
    Read(String),
}

struct Watched {
    now: Option<Seen>,
    since: Instant,
    /// What the last decision was about; another look makes it stale.
    decided: Option<Option<Seen>>,
}

/// What the directory has looked like, file by file.
pub(crate) struct Looks {
    settle: Duration,
    files: BTreeMap<String, Watched>,
}

impl Looks {
    pub(crate) fn new(settle: Duration) -> Self {
        Looks { settle, files: BTreeMap::new() }
    }

    /// Takes in a listing. Removals come first, so that a plugin can move to another file in one step.
    pub(crate) fn look(&mut self, now: Instant, wall: SystemTime, listing: &BTreeMap<String, Seen>) -> Vec<Decision> {
        for (name, seen) in listing {
            // A file that has not changed for seconds when it is first seen was not just being written.
            let old = seen.component.changed_before(wall.checked_sub(Duration::from_secs(2)).unwrap_or(wall));
            let since = if old { now.checked_sub(self.settle).unwrap_or(now) } else { now };
            self.files.entry(name.clone()).or_insert(Watched { now: Some(*seen), since, decided: None });
        }
        let mut decisions = Vec::new();
        for (name, file) in &mut self.files {
            let seen = listing.get(name).copied();
            if file.now != seen {
                file.now = seen;
                file.since = now;
            }
            if now.saturating_duration_since(file.since) >= self.settle && file.decided != Some(file.now) {
                file.decided = Some(file.now);
                decisions.push(match file.now {
                    Some(_) => Decision::Read(name.clone()),
                    None => Decision::Remove(name.clone()),
                });
            }
        }
        self.files.retain(|_, file| file.now.is_some() || file.decided != Some(None));
        decisions.sort();
        decisions
    }

    /// Makes the next look decide about a file again, though it has not changed.
    pub(crate) fn reconsider(&mut self, name: &str) {
        if let Some(file) = self.files.get_mut(name) {
            file.decided = None;
        }
    }

    /// Files that have changed and are not yet decided about.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = &str> {
        self.files.iter().filter(|(_, file)| file.decided != Some(file.now)).map(|(name, _)| name.as_str())
    }
}

/// The system's events for one directory, reduced to "look soon".
pub(crate) struct Hints {
    path: PathBuf,
    hint: Arc<Notify>,
    /// Of the directory that is watched; another one under the same path is not.
    watched: Option<(u64, u64)>,
    /// Set when the watched directory itself was moved or removed: the next one may have the same inode number.
    lost: Arc<AtomicBool>,
    watcher: Option<notify::RecommendedWatcher>,
}

impl Hints {
    pub(crate) fn new(path: PathBuf) -> Self {
        Hints { path, hint: Arc::default(), watched: None, lost: Arc::default(), watcher: None }
    }

    /// Completes after an event, at once if one came since the last call.
    pub(crate) async fn hinted(&self) {
        self.hint.notified().await;
    }

    /// Watches the directory that is there now. Called at every look, before it is listed: what happens after the
    /// listing then gives a hint. Without a watch the periodic look remains.
    pub(crate) fn follow(&mut self, identity: (u64, u64)) {
        if !self.lost.swap(false, Ordering::AcqRel) && self.watched == Some(identity) {
            return;
        }
        let (hint, lost, path) = (Arc::clone(&self.hint), Arc::clone(&self.lost), self.path.clone());
        let on_event = move |event: notify::Result<notify::Event>| match event {
            // Reading is no change, and our own reads are among these.
            Ok(event) if matches!(event.kind, EventKind::Access(_)) => {}
            Ok(event) => {
                let moves = matches!(event.kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
                if moves && event.paths.contains(&path) {
                    lost.store(true, Ordering::Release);
                }
                hint.notify_one();
            }
            // It may stand for lost events.
            Err(_) => hint.notify_one(),
        };
        let watcher = notify::recommended_watcher(on_event)
            .and_then(|mut watcher| watcher.watch(&self.path, RecursiveMode::NonRecursive).map(|()| watcher));
        match watcher {
            Ok(watcher) => self.watcher = Some(watcher),
            Err(e) => {
                tracing::warn!(directory = %self.path.display(), error = %e, "the plugins directory cannot be watched; changes are found by looking every few seconds");
                self.watcher = None;
            }
        }
        // Remembered even if it failed: one warning for each directory is enough.
        self.watched = Some(identity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLE: Duration = Duration::from_millis(150);

    fn seen(inode: u64, bytes: i64) -> Seen {
        let component = Look { device: 1, inode, bytes, modified: (0, 0), changed: (i64::MAX, 0) };
        Seen { component, sidecar: None }
    }

    /// Plays `(milliseconds, what is there)` and returns every decision with its time.
    fn play(looks: &[(u64, Option<Seen>)]) -> Vec<(u64, Decision)> {
        let start = Instant::now();
        let mut state = Looks::new(SETTLE);
        let mut decisions = Vec::new();
        for (at, there) in looks {
            let listing = there.iter().map(|seen| ("a.wasm".to_owned(), *seen)).collect();
            let made = state.look(start + Duration::from_millis(*at), SystemTime::UNIX_EPOCH, &listing);
            decisions.extend(made.into_iter().map(|decision| (*at, decision)));
        }
        decisions
    }

    fn read() -> Decision {
        Decision::Read("a.wasm".to_owned())
    }

    fn remove() -> Decision {
        Decision::Remove("a.wasm".to_owned())
    }

    #[test]
    fn a_file_is_read_once_when_it_has_stopped_changing() {
        let slow_copy = [(0, Some(seen(1, 10))), (100, Some(seen(1, 20))), (200, Some(seen(1, 30))), (340, Some(seen(1, 30)))];
        assert_eq!(play(&slow_copy), []);
        let then = [&slow_copy[..], &[(350, Some(seen(1, 30))), (5000, Some(seen(1, 30)))]].concat();
        assert_eq!(play(&then), [(350, read())]);
    }

    #[test]
    fn a_path_that_is_missing_between_two_steps_of_a_save_is_not_removed() {
        let save = [(0, Some(seen(1, 10))), (150, Some(seen(1, 10))), (200, None), (300, Some(seen(2, 10))), (450, Some(seen(2, 10)))];
        assert_eq!(play(&save), [(150, read()), (450, read())]);
        let removed = [(0, Some(seen(1, 10))), (150, Some(seen(1, 10))), (200, None), (349, None), (350, None), (5000, None)];
        assert_eq!(play(&removed), [(150, read()), (350, remove())]);
    }

    #[test]
    fn a_file_that_was_there_long_before_is_read_at_the_first_look() {
        let old = Seen { component: Look { changed: (100, 0), ..seen(1, 1).component }, sidecar: None };
        let mut looks = Looks::new(SETTLE);
        let listing = BTreeMap::from([("a.wasm".to_owned(), old)]);
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(103);
        assert_eq!(looks.look(Instant::now(), wall, &listing), [read()]);
        looks.reconsider("a.wasm");
        assert_eq!(looks.unsettled().collect::<Vec<_>>(), ["a.wasm"]);
        assert_eq!(looks.look(Instant::now(), wall, &listing), [read()]);
        assert_eq!(looks.unsettled().count(), 0);
    }
}
