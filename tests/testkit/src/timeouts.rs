//! Waits of tests: as long as needed on a busy machine, but not forever.
//!
//! A deadline in a test detects hangs and says nothing about speed. All tests share this deadline; a test
//! with another one states the reason. An awaited condition must stay true once it holds, since polling can
//! miss a moment.

use std::{
    panic::resume_unwind,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// Time after which a wait counts as a hang: twenty times the slowest wait on two idle cores.
pub const WATCHDOG: Duration = Duration::from_secs(300);

static STEPS: AtomicU64 = AtomicU64::new(0);

/// Initial polling interval, which doubles after each poll.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const MAX_PAUSE: Duration = Duration::from_millis(25);

/// Waits until `holds` returns true.
///
/// # Panics
/// With `what`, if that does not happen before the deadline.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    eventually_some(what, || holds().then_some(()));
}

/// Waits until `look` returns a value.
///
/// # Panics
/// With `what`, if that does not happen before the deadline.
pub fn eventually_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
    loop {
        if let Some(found) = look() {
            step();
            return found;
        }
        assert!(begun.elapsed() < WATCHDOG, "waited in vain: {what}");
        thread::sleep(pause);
        pause = MAX_PAUSE.min(2 * pause);
    }
}

/// Reports that a step of a test has finished, which shows progress.
pub fn step() {
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// Runs a test's body without a time limit while its steps finish.
///
/// # Panics
/// If no step finishes for longer than [`WATCHDOG`], or if the body panics.
pub fn watched(body: impl FnOnce() + Send + 'static) {
    watched_or(|| {}, body);
}

/// Runs a test's body like [`watched`] and calls `give_up` before it reports a hang.
///
/// # Panics
/// Like [`watched`].
pub fn watched_or(give_up: impl FnOnce(), body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let worker = thread::spawn(move || {
        let _done = done;
        body();
    });
    let mut steps = STEPS.load(Ordering::Relaxed);
    // The double time lets a failing wait report its reason first. The channel closes when the body ends in
    // any way.
    while ended.recv_timeout(2 * WATCHDOG) == Err(RecvTimeoutError::Timeout) {
        let now = STEPS.load(Ordering::Relaxed);
        if now == steps {
            give_up();
            panic!("the test hangs: no step of it was over for {:?}", 2 * WATCHDOG);
        }
        steps = now;
    }
    if let Err(panic) = worker.join() {
        resume_unwind(panic);
    }
}
