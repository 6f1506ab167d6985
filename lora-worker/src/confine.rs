//! Seccomp filters: after its start each thread allows only the system calls that it needs.
//!
//! The systemd unit denies what no part of a worker needs, but must allow loading the program and starting
//! threads. The filters deny these too. A denied call fails with EPERM, as in the unit.

use std::{collections::BTreeMap, env::consts::ARCH};

use anyhow::Context as _;
use libc::c_long;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thread {
    Compute,
    Control,
    /// The thread that ends the process.
    Watch,
}

/// System calls of every thread: memory, locks, the log, the clock if it is not mapped, and the return from a
/// signal or stop. Debug builds check with `fcntl` that a closed descriptor was open.
const ANY: [c_long; 10] = [
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_write,
    libc::SYS_clock_gettime,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
];

/// Growing the heap, closing the connection when fenced, and exiting.
const COMPUTE: [c_long; 4] = [libc::SYS_brk, libc::SYS_shutdown, libc::SYS_sigaltstack, libc::SYS_exit_group];

/// Finding an executor, checking its user, and receiving sealed memory whose size is checked.
const CONTROL: [c_long; 8] = [
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_geteuid,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_ppoll,
    libc::SYS_fstat,
];

/// Receiving signals, notifying systemd, and exiting.
const WATCH: [c_long; 7] = [
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_sendto,
    libc::SYS_sigaltstack,
    libc::SYS_exit_group,
];

impl Thread {
    fn kept(self) -> impl Iterator<Item = c_long> {
        let own: &[c_long] = match self {
            Self::Compute => &COMPUTE,
            Self::Control => &CONTROL,
            Self::Watch => &WATCH,
        };
        ANY.into_iter().chain(own.iter().copied())
    }
}

/// Restricts this thread permanently to its system calls. If the system cannot filter, logs a warning and
/// continues with the limits of the service or container.
///
/// Tests with failpoints skip the filter, because failpoints need other calls.
pub(crate) fn confine(thread: Thread) {
    if cfg!(debug_assertions) && std::env::var_os(failpoint::DIRECTORY).is_some() {
        return;
    }
    if let Err(error) = filter(thread) {
        tracing::warn!(?thread, "{error:#}; the worker runs without its own system call filter");
    }
}

fn filter(thread: Thread) -> anyhow::Result<()> {
    let rules: BTreeMap<_, _> = thread.kept().map(|call| (call, Vec::new())).collect();
    let arch = ARCH.try_into().context("system calls of this architecture cannot be filtered")?;
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, refuse, SeccompAction::Allow, arch)?;
    let program: BpfProgram = filter.try_into()?;
    apply_filter(&program).context("system calls cannot be filtered")
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    #[test]
    fn every_thread_can_read_the_time_by_a_system_call() {
        for thread in [Thread::Compute, Thread::Control, Thread::Watch] {
            let (sender, result) = mpsc::channel();
            std::thread::spawn(move || {
                filter(thread).unwrap();
                // The CPU time clock is in no mapped page, so reading it is a system call.
                let now = || {
                    let time = clock_gettime(ClockId::ProcessCPUTime);
                    (time.tv_sec, time.tv_nsec)
                };
                let first = now();
                sender.send(first < now()).unwrap();
                // The thread cannot exit, because the filter denies the needed system calls.
                loop {
                    std::thread::park();
                }
            });
            assert_eq!(result.recv_timeout(Duration::from_secs(60)), Ok(true), "{thread:?}");
        }
    }
}
