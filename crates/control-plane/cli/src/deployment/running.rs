//! A running process as other commands find it: above all the one that holds a state directory.
//!
//! A process id alone may belong to somebody else by the time it is used. Beside it stands when the process started,
//! which the kernel tells for every process: both together are never used twice, and a signal goes through a pidfd that
//! was opened before they were compared.

use std::{fs, io, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

use super::paths::lock_path;

/// A process that is meant wherever this is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// Its number, which may be somebody else's later.
    pub(crate) pid: u32,
    /// When it started, in the kernel's ticks since boot.
    started_ticks: u64,
}

/// What `up` writes into the lock file of its state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockHolder {
    /// The process `up`.
    #[serde(flatten)]
    pub(crate) process: ProcessId,
    /// How long running requests get at its stop.
    pub(crate) grace_ms: u64,
}

impl LockHolder {
    /// This process.
    pub(crate) fn this(grace: Duration) -> Self {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Self { process: ProcessId::this(), grace_ms }
    }

    /// Who holds, or held last, the state directory; `None` if nobody ever did or the file is not ours.
    pub(crate) fn of(state: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(lock_path(state)) {
            Ok(text) => Ok(serde_json::from_str(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl ProcessId {
    /// This process.
    pub(crate) fn this() -> Self {
        Self::of(std::process::id())
    }

    /// The process that has the number `pid` now.
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, started_ticks: started_ticks(pid).unwrap_or_default() }
    }

    /// A handle on the process, if it still runs.
    pub(crate) fn open(self) -> io::Result<Option<RunningProcess>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // The pidfd holds whoever has the id now; only then is it known to be the one meant.
        let is_meant = started_ticks(self.pid) == Some(self.started_ticks);
        Ok(is_meant.then_some(RunningProcess { pidfd }))
    }
}

/// A process that cannot be mistaken for another.
#[derive(Debug)]
pub(crate) struct RunningProcess {
    pidfd: OwnedFd,
}

impl RunningProcess {
    /// Asks it to stop. One that has ended just now is no error.
    pub(crate) fn terminate(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::TERM) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until it has ended; false if it has not within `timeout`.
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

/// When a process started. A process that has ended and is not yet reaped counts as ended.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, also spaces and parentheses; what follows its last parenthesis does not.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // Field 22 of proc(5); the state was field 3.
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
