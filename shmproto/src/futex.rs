//! Sleeping on a word of shared memory, and waking who sleeps there.
//!
//! Not private: the word lies in memory of several processes. Under loom a lock and a condition take the kernel's
//! place, without the time limit, so that a lost wake-up is a deadlock that loom reports.

use std::time::Duration;

use crate::atomic::AtomicU32;

/// Sleeps until somebody wakes the word, at most for `limit`; returns at once if the word is not `expected`.
/// It may also return for no reason, and says nothing about why: the caller looks at what it waits for.
#[cfg(not(loom))]
pub(crate) fn wait(word: &AtomicU32, expected: u32, limit: Duration) {
    use rustix::thread::futex;
    let limit = futex::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // Interrupted, timed out, not `expected` any more, even a word that cannot be waited on: the caller looks again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&limit));
}

/// Wakes at most `count` of those who sleep on the word.
#[cfg(not(loom))]
pub(crate) fn wake(word: &AtomicU32, count: u32) {
    use rustix::thread::futex;
    // Fails only for a word that cannot be waited on, where nobody sleeps.
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

#[cfg(loom)]
loom::lazy_static! {
    static ref KERNEL: (loom::sync::Mutex<()>, loom::sync::Condvar) = Default::default();
}

#[cfg(loom)]
pub(crate) fn wait(word: &AtomicU32, expected: u32, _limit: Duration) {
    let held = KERNEL.0.lock().unwrap();
    if word.load(crate::atomic::Ordering::SeqCst) == expected {
        drop(KERNEL.1.wait(held).unwrap());
    }
}

#[cfg(loom)]
pub(crate) fn wake(_word: &AtomicU32, _count: u32) {
    let _held = KERNEL.0.lock().unwrap();
    KERNEL.1.notify_all();
}
