//! Detects hangs: a hanging test fails and stops everything that it started.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::process::{Pid, Signal, kill_process};
pub use testkit::{WATCHDOG, eventually, eventually_some};

/// Process ids of all running `holobiont up`.
static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Runs a test's body; if its steps stop finishing, all started processes are stopped and the test fails.
pub fn watched(body: impl FnOnce() + Send + 'static) {
    testkit::watched_or(|| running().iter().for_each(|id| signal(*id, Signal::TERM)), body);
}

/// Sends a signal to a process that may have ended.
pub fn signal(id: u32, signal: Signal) {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id");
    let _ = kill_process(pid, signal);
}

pub(crate) fn running() -> MutexGuard<'static, BTreeSet<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
