//! How long tests wait for what must happen: as long as it takes on a machine that many others use, and not for ever.
//!
//! A deadline in a test is for hangs and says nothing about speed. There is this one, for all tests; those that need
//! another say why. A condition that is waited for must stay true once it is: a moment may pass unseen.

use std::{
    panic::resume_unwind,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// What is not over by then hangs. Twenty times what the slowest wait takes on two cores that nobody else uses.
pub const WATCHDOG: Duration = Duration::from_secs(300);

/// Steps that are over in this process.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Between two looks at first, and twice as long after each.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// Between two looks at most.
const MAX_PAUSE: Duration = Duration::from_millis(25);

/// Waits until `holds` does.
///
/// # Panics
/// With `what`, if it never does.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    eventually_some(what, || holds().then_some(()));
}

/// Waits until `look` finds something.
///
/// # Panics
/// With `what`, if it never does.
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

/// Says that a step of a test is over, so that it is seen to go on.
pub fn step() {
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// Runs a test's body, however long it takes while its steps come to their ends.
///
/// # Panics
/// If none does for longer than [`WATCHDOG`]; and as the body does.
pub fn watched(body: impl FnOnce() + Send + 'static) {
    watched_or(|| {}, body);
}

/// The same; `give_up` is called before a hang is reported.
///
/// # Panics
/// As [`watched`].
pub fn watched_or(give_up: impl FnOnce(), body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let worker = thread::spawn(move || {
        let _done = done;
        body();
    });
    let mut steps = STEPS.load(Ordering::Relaxed);
    // Twice: a wait that is in vain says what for. The channel closes when the body is over, however it ended.
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
