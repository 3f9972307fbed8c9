//! One `warp-host run` process.
//!
//! What must stay true: a scene that fails leaves no host behind.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// Longer than the grace that a host gives its runs.
const STOP: Duration = Duration::from_secs(45);

/// A running host.
pub struct HostProcess {
    child: Child,
    log: PathBuf,
}

impl HostProcess {
    /// Starts one; everything that it prints goes to `log`.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("failed to write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("failed to start a host")?;
        Ok(HostProcess { child, log: log.to_owned() })
    }

    /// Fails if it has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let tail: Vec<&str> = text.lines().rev().take(5).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("a host ended by itself with {status}; its last lines: {}", tail.join(" / "));
    }

    /// `kill -9`: nothing in the host hears of it.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("failed to kill a host")?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, as an operator would.
    pub fn stop(mut self) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).context("failed to stop a host")?;
        let begin = Instant::now();
        while begin.elapsed() < STOP {
            if let Some(status) = self.child.try_wait()? {
                // One that had only just been started may not listen for the signal yet, and then dies of it.
                if !status.success() && status.signal() != Some(Signal::TERM.as_raw()) {
                    bail!("a host that was asked to stop ended with {status}; its log is {}", self.log.display());
                }
                return Ok(());
            }
            sleep(Duration::from_millis(10));
        }
        bail!("a host did not stop within {} s", STOP.as_secs());
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        // An error means that it has ended already, which is all that is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
