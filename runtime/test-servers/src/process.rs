//! Processes that end with their owner, ports, and the account that servers run under.
//!
//! What must stay true: when the process that started a server is gone, `kill -9` included, the server ends and its
//! directory disappears. A `sh` of its own process group, the *guard*, waits for the end of a pipe whose other end only
//! the owner holds. The kernel closes that end whatever the owner dies of. Dropping a server goes the same way, so the
//! way of the emergency is the one that every test takes. (The parent-death signal of Linux would not do: it comes when
//! the *thread* that started the child ends, and is lost when the child changes its user.)

use std::{
    env, fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::Error;

/// How long a server may take to start or to stop. Generous: a loaded machine is no failure.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a server that is starting or stopping; neither has an event to wait for.
const LOOK: Duration = Duration::from_millis(5);

/// The user that servers run under where the tests run as root.
#[derive(Clone, Copy, Debug)]
struct Account {
    user: u32,
    group: u32,
}

impl Account {
    fn find() -> Result<Option<Self>, Error> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let number = |flag, name| {
            let output = Command::new("id").args([flag, name]).stderr(Stdio::null()).output().ok()?;
            String::from_utf8_lossy(&output.stdout).trim().parse::<u32>().ok()
        };
        ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| Some(Self { user: number("-u", name)?, group: number("-g", name)? }))
            .map(Some)
            .ok_or_else(|| Error::new("choose a user for the server", "running as root, and there is neither a user postgres nor nobody"))
    }
}

/// A temporary directory that belongs to the servers' account, and the guard that removes it.
#[derive(Debug)]
pub(crate) struct Home {
    path: PathBuf,
    account: Option<Account>,
    guard: Child,
    /// The end of the guard's pipe. Closing it is the order to clear away.
    lifeline: Option<ChildStdin>,
}

impl Home {
    /// Makes the directory. When the owner is gone, the guard runs `stop`, a line of `sh` that finds the directory in
    /// `$home`, and removes the directory. `stop` must be harmless where no server runs.
    pub(crate) fn new(stop: &str) -> Result<Self, Error> {
        let failed = |error| Error::new("make a directory for a server", error);
        let account = Account::find()?;
        let directory = tempfile::Builder::new().prefix("warp-test-").tempdir().map_err(failed)?;
        if let Some(account) = account {
            chown(directory.path(), Some(account.user), Some(account.group)).map_err(failed)?;
        }
        let mut guard = Command::new("sh");
        guard
            .args(["-c", &format!("cat >/dev/null; {{ {stop}; }} >/dev/null 2>&1; cd /; rm -rf -- \"$home\"")])
            .env("home", directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        run_as(&mut guard, account, directory.path());
        let mut guard = guard.spawn().map_err(|error| Error::new("start `sh`, which watches over a server", error))?;
        let lifeline = guard.stdin.take();
        Ok(Self { path: directory.keep(), account, guard, lifeline })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file that only the account can read.
    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> Result<PathBuf, Error> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path.join(name);
        let write = || {
            fs::write(&path, text)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            self.account.map_or(Ok(()), |account| chown(&path, Some(account.user), Some(account.group)))
        };
        write().map_err(|error| Error::new(format_args!("write {}", path.display()), error))?;
        Ok(path)
    }

    /// A command that runs here, under the account, out of reach of the terminal's Ctrl-C.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.stdin(Stdio::null());
        run_as(&mut command, self.account, &self.path);
        command
    }

    /// Closes the lifeline and waits until all is gone. `server` is reaped in between: the stop may wait for that.
    fn clear_away(&mut self, server: Option<Child>) {
        drop(self.lifeline.take());
        // Neither can fail in a way that a test could do something about.
        if let Some(mut server) = server {
            let _ = server.wait();
        }
        let _ = self.guard.wait();
    }
}

fn run_as(command: &mut Command, account: Option<Account>, directory: &Path) {
    // The language of the messages decides what `Error` can recognise in them.
    command.current_dir(directory).process_group(0).env("LC_ALL", "C");
    // Settings for clients would change what a server's own tools do.
    for (name, _) in env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PG")) {
        command.env_remove(name);
    }
    if let Some(account) = account {
        // Also empties the list of supplementary groups.
        command.uid(account.user).gid(account.group);
    }
}

/// One server that can be stopped and started again, in a home of its own.
///
/// Dropping it stops it at once and removes the home.
#[derive(Debug)]
pub(crate) struct Server {
    home: Home,
    /// Written by start and stop only. None while stopped.
    child: Mutex<Option<Child>>,
}

impl Server {
    pub(crate) fn new(home: Home) -> Self {
        Self { home, child: Mutex::new(None) }
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts it and waits until `ready` says so of its process id. Does nothing if it runs.
    pub(crate) fn start(&self, mut command: Command, ready: impl Fn(u32) -> bool) -> Result<(), Error> {
        let mut slot = self.child();
        if slot.is_some() {
            return Ok(());
        }
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |why: &dyn std::fmt::Display| Error::new(format_args!("start {name}"), why);
        let log = fs::File::options().create(true).append(true).open(self.log_path()).map_err(|error| failed(&error))?;
        command.stdout(log.try_clone().map_err(|error| failed(&error))?).stderr(log);
        let mut child = command.spawn().map_err(|error| failed(&error))?;
        let begun = Instant::now();
        while !ready(child.id()) {
            if let Some(status) = child.try_wait().map_err(|error| failed(&error))? {
                return Err(failed(&format_args!("{status}; its log:\n{}", self.log())));
            }
            if begun.elapsed() > PATIENCE {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(&format_args!("not ready after {PATIENCE:?}; its log:\n{}", self.log())));
            }
            thread::sleep(LOOK);
        }
        *slot = Some(child);
        Ok(())
    }

    /// Stops it with this signal and waits until its process has ended. Does nothing if it does not run.
    pub(crate) fn stop(&self, signal: Signal) -> Result<(), Error> {
        let mut slot = self.child();
        let Some(child) = slot.as_mut() else {
            return Ok(());
        };
        let failed = |why: &dyn std::fmt::Display| Error::new("stop a server", why);
        kill_process(Pid::from_child(child), signal).map_err(|error| failed(&error))?;
        let begun = Instant::now();
        while child.try_wait().map_err(|error| failed(&error))?.is_none() {
            if begun.elapsed() > PATIENCE {
                return Err(failed(&format_args!("still there after {PATIENCE:?}; its log:\n{}", self.log())));
            }
            thread::sleep(LOOK);
        }
        *slot = None;
        Ok(())
    }

    /// The process id while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    fn log_path(&self) -> PathBuf {
        self.home.path.join("log")
    }

    /// What it has written so far.
    pub(crate) fn log(&self) -> String {
        fs::read(self.log_path()).map_or_else(|error| error.to_string(), |text| String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let child = self.child().take();
        self.home.clear_away(child);
    }
}

/// A port of 127.0.0.1 that nobody listens on.
///
/// Outside the range that systems take for outgoing connections, since a server that is down for a moment must find its
/// port free when it comes back. Somebody else can still take it; starting reports that.
pub(crate) fn free_port() -> Result<u16, Error> {
    const FIRST: u32 = 15_000;
    const COUNT: u32 = 15_000;
    static CALLS: AtomicU32 = AtomicU32::new(0);
    // Processes and threads that start servers at the same time must not try the same ports in the same order.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_micros());
    let own = std::process::id().wrapping_mul(7_919).wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(101));
    let start = now.wrapping_add(own) % COUNT;
    (0..COUNT)
        .filter_map(|step| u16::try_from(FIRST + (start + step) % COUNT).ok())
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .ok_or_else(|| Error::new("find a free port", format_args!("all from {FIRST} on are taken")))
}
