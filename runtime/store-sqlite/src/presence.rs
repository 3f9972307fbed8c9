//! Whether a host's process is certainly gone.
//!
//! All processes that share a database file run on one machine, so the operating system knows what a lease can only
//! guess: each registration holds a lock on a file of its own beside the database, and the system drops the lock
//! when the process ends, however it ends. Whoever gets that lock knows that the host is gone and need not wait for
//! its lease.
//!
//! What must stay true: a file under its final name is locked from the first moment until its process ends, so a
//! lock that can be had is proof. Everything else (no file, no right to open it, a frozen process that keeps its
//! lock) proves nothing, and the lease decides.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use warp_domain::HostId;

/// The locks that this process holds.
pub(crate) struct Presence {
    database: PathBuf,
    held: Mutex<HashMap<HostId, File>>,
}

impl Presence {
    pub(crate) fn new(database: &Path) -> Self {
        Presence { database: database.to_owned(), held: Mutex::default() }
    }

    fn file(&self, host: HostId) -> PathBuf {
        let mut name = self.database.as_os_str().to_owned();
        name.push(format!("-host-{}", host.0));
        name.into()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<HostId, File>> {
        // Whole values go in and out.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This process is that host. Where no file can be made or locked the host is found dead by its lease, later.
    pub(crate) fn announce(&self, host: HostId) {
        let file = self.file(host);
        let mut early = file.clone().into_os_string();
        early.push(".new");
        // Locked before it has its name: nobody ever sees it unlocked while this process lives.
        let locked = OpenOptions::new().create(true).truncate(true).write(true).open(&early).ok().filter(|lock| lock.try_lock().is_ok());
        if let Some(lock) = locked
            && fs::rename(&early, &file).is_ok()
        {
            self.held().insert(host, lock);
        }
    }

    /// The registration is over, by whomever; its file is of no use any more.
    pub(crate) fn forget(&self, host: HostId) {
        // Absent where it could not be made.
        let _ = fs::remove_file(self.file(host));
        self.held().remove(&host);
    }

    /// Whether that host's process has certainly ended.
    pub(crate) fn is_gone(&self, host: HostId) -> bool {
        if self.held().contains_key(&host) {
            return false;
        }
        // Given back at once by closing the file; another process that asks in this instant hears "not certain".
        File::open(self.file(host)).is_ok_and(|file| file.try_lock().is_ok())
    }
}

/// Whether a host certainly runs on this database, in whatever process.
pub(crate) fn somebody_runs(database: &Path) -> bool {
    let Some(name) = database.file_name().and_then(|name| name.to_str()) else { return false };
    let prefix = format!("{name}-host-");
    let Ok(entries) = fs::read_dir(crate::error::directory(database)) else { return false };
    let is_held = |file: &Path| File::open(file).is_ok_and(|file| matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)));
    let ours = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)));
    ours.into_iter().any(|entry| is_held(&entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lock_that_can_be_had_is_proof() {
        let dir = tempfile::tempdir().expect("a directory");
        let database = dir.path().join("a.db");
        let (mine, other) = (Presence::new(&database), Presence::new(&database));
        assert!(!other.is_gone(HostId(1)), "never announced: nothing is known");
        assert!(!somebody_runs(&database));
        mine.announce(HostId(1));
        assert!(somebody_runs(&database));
        assert!(!other.is_gone(HostId(1)) && !mine.is_gone(HostId(1)));
        drop(mine);
        assert!(!somebody_runs(&database));
        assert!(other.is_gone(HostId(1)), "its process (here: its holder) has ended");
        other.forget(HostId(1));
        assert!(!other.is_gone(HostId(1)));
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0, "nothing is left behind");
    }
}
