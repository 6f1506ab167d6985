//! Identifies running processes, above all the one that holds a state directory.
//!
//! The kernel may reuse a process id. The id and the start time together are unique, and the kernel reports
//! the start time of every process. A signal goes through a pidfd that is opened before both are compared, so
//! it cannot reach another process.

use std::{fs, io, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

use super::paths::lock_path;

/// Unique identity of a process, also after its id is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// Process id, which the kernel may reuse later.
    pub(crate) pid: u32,
    /// Start time in the kernel's ticks since boot.
    started_ticks: u64,
}

/// Content of the lock file of a state directory, written by `up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockHolder {
    /// Process `holobiont up` of the deployment.
    #[serde(flatten)]
    pub(crate) process: ProcessId,
    /// Time that running requests get at a stop, in milliseconds.
    pub(crate) grace_ms: u64,
}

impl LockHolder {
    /// Returns the lock content for this process.
    pub(crate) fn this(grace: Duration) -> Self {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Self { process: ProcessId::this(), grace_ms }
    }

    /// Returns the current or last holder of the state directory; `None` if there was none or the file has
    /// another format.
    pub(crate) fn of(state: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(lock_path(state)) {
            Ok(text) => Ok(serde_json::from_str(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl ProcessId {
    pub(crate) fn this() -> Self {
        Self::of(std::process::id())
    }

    /// Returns the identity of the process that currently has the id `pid`.
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, started_ticks: started_ticks(pid).unwrap_or_default() }
    }

    /// Returns a handle of the process, if it still runs.
    pub(crate) fn open(self) -> io::Result<Option<RunningProcess>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // The pidfd may belong to a later process with this id, so the start time is compared afterwards.
        let is_meant = started_ticks(self.pid) == Some(self.started_ticks);
        Ok(is_meant.then_some(RunningProcess { pidfd }))
    }
}

/// Handle of a process that stays valid when the id is reused.
#[derive(Debug)]
pub(crate) struct RunningProcess {
    pidfd: OwnedFd,
}

impl RunningProcess {
    /// Sends `SIGTERM`. A process that has just ended is not an error.
    pub(crate) fn terminate(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::TERM) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until the process ends; returns false after `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(ended) => Ok(ended > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Returns the start time of a process; `None` for a process that has ended, including a zombie.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name may contain spaces and parentheses, so the fields begin after the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // Start time is field 22 of proc(5), and the state is field 3.
    let started = fields.nth(18)?.parse().ok()?;
    (state != "Z").then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_is_found_and_the_same_id_with_another_start_is_not() {
        let process = ProcessId::this();
        assert!(process.started_ticks > 0);
        assert!(process.open().unwrap().is_some());
        let recycled = ProcessId { started_ticks: process.started_ticks - 1, ..process };
        assert!(recycled.open().unwrap().is_none(), "a recycled id is somebody else");
    }

    #[test]
    fn a_process_that_ended_is_not_found() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = ProcessId::of(child.id());
        child.wait().unwrap();
        assert!(process.open().unwrap().is_none());
    }

    #[test]
    fn a_lock_file_that_is_not_ours_names_nobody() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(LockHolder::of(directory.path()).unwrap(), None);
        fs::write(lock_path(directory.path()), "1234").unwrap();
        assert_eq!(LockHolder::of(directory.path()).unwrap(), None);
    }
}
