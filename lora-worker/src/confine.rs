//! What each thread gives up once it has started: all system calls but those it works with.
//!
//! The systemd unit takes away what no part of a worker needs, but not what a program needs to be loaded and to start
//! threads. From here on neither is needed any more. What is refused fails with EPERM, as in the unit.

use std::{collections::BTreeMap, env::consts::ARCH};

use anyhow::Context as _;
use libc::c_long;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// Who gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thread {
    /// The thread that computes.
    Compute,
    /// The thread that talks to the executor.
    Control,
    /// The thread that ends the process.
    Watch,
}

/// What every thread needs: memory, locks, the log, the time where the kernel does not map its clock into the process, and
/// to come back from a signal or a stop to what was interrupted. Debug builds look whether what they close is open, with
/// `fcntl`.
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

/// To grow the heap, to hang up when it is fenced, to end.
const COMPUTE: [c_long; 4] = [libc::SYS_brk, libc::SYS_shutdown, libc::SYS_sigaltstack, libc::SYS_exit_group];

/// To find an executor, see whose it is, and be handed memory whose seals and size are checked.
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

/// To be told to end, to tell systemd how it is, and to end.
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

/// Gives up, for this thread and for good, everything but what it works with. Where the system cannot filter, that is said,
/// and the worker goes on with what the service or container leaves it.
///
/// Not while tests interfere: places that die, stop or wait need more.
pub(crate) fn confine(thread: Thread) {
    if cfg!(debug_assertions) && std::env::var_os(failpoint::DIRECTORY).is_some() {
        return;
    }
    if let Err(error) = filter(thread) {
        tracing::warn!(
            ?thread,
            "{error:#}; every system call stays allowed, unless whoever starts the worker sees to it"
        );
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
            let (tell, told) = mpsc::channel();
            std::thread::spawn(move || {
                filter(thread).unwrap();
                // Time on the CPU is in no page that the kernel maps, so whoever asks for it calls the system.
                let now = || {
                    let time = clock_gettime(ClockId::ProcessCPUTime);
                    (time.tv_sec, time.tv_nsec)
                };
                let first = now();
                tell.send(first < now()).unwrap();
                // To end takes system calls that it has given up.
                loop {
                    std::thread::park();
                }
            });
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true), "{thread:?}");
        }
    }
}
