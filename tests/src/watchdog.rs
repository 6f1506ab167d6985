//! Nothing waits for ever: a test that hangs fails, and takes what it started with it.

use std::{
    collections::BTreeSet,
    panic::resume_unwind,
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// How long [`eventually`] waits.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// Every `holobiont up` that runs now.
static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Runs a test's body; after `limit_s` seconds everything that was started is stopped, and the test fails.
pub fn within_seconds(limit_s: u64, body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let worker = thread::spawn(move || {
        let _done = done;
        body();
    });
    // The channel closes when the body is over, however it ended.
    if ended.recv_timeout(Duration::from_secs(limit_s)) == Err(mpsc::RecvTimeoutError::Timeout) {
        running().iter().for_each(|id| signal(*id, Signal::TERM));
        panic!("the test hung: it was not over after {limit_s} s");
    }
    if let Err(panic) = worker.join() {
        resume_unwind(panic);
    }
}

/// Waits until `holds` does; fails with `what` if it never does.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(POLL);
    }
}

/// Sends a signal to a process that may have gone already.
pub fn signal(id: u32, signal: Signal) {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id");
    let _ = kill_process(pid, signal);
}

pub(crate) fn running() -> MutexGuard<'static, BTreeSet<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
