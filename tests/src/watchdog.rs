//! Nothing waits for ever: a test that hangs fails, and takes what it started with it.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::process::{Pid, Signal, kill_process};
pub use testkit::{WATCHDOG, eventually, eventually_some};

/// Every `holobiont up` that runs now.
static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Runs a test's body; once nothing of it comes to an end any more, everything that was started is stopped, and the test
/// fails.
pub fn watched(body: impl FnOnce() + Send + 'static) {
    testkit::watched_or(|| running().iter().for_each(|id| signal(*id, Signal::TERM)), body);
}

/// Sends a signal to a process that may have gone already.
pub fn signal(id: u32, signal: Signal) {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id");
    let _ = kill_process(pid, signal);
}

pub(crate) fn running() -> MutexGuard<'static, BTreeSet<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
