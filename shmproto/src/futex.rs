//! Sleeps on a word of shared memory, and wakes threads that sleep there.
//!
//! The futexes are not private, because the word lies in memory of several processes. Under loom a lock and a
//! condition variable replace the kernel, without the time limit, so loom reports a lost wake-up as a
//! deadlock.

use std::time::{Duration, Instant};

#[cfg(not(loom))]
use rustix::io::Errno;

use crate::atomic::AtomicU32;

/// Sleeps until another thread wakes the word, for at most `limit`; returns at once if the word is not
/// `expected`, and sometimes spuriously. The caller checks its condition again.
#[cfg(not(loom))]
pub(crate) fn wait(word: &AtomicU32, expected: u32, limit: Duration) {
    use rustix::thread::futex;
    let limit = futex::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // After interruption, timeout, a changed word or an invalid word the caller checks its condition again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&limit));
}

/// Wakes at most `count` threads that sleep on the word.
#[cfg(not(loom))]
pub(crate) fn wake(word: &AtomicU32, count: u32) {
    use rustix::thread::futex;
    // The call fails only for a word that cannot be waited on, where no thread sleeps.
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

/// Maximum number of words on which the kernel can wait together.
#[cfg(not(loom))]
const WAITERS: usize = 128;

/// Longest sleep where the kernel cannot wait on the words together.
#[cfg(not(loom))]
const SLICE: Duration = Duration::from_millis(1);

/// Sleeps until another thread wakes one of the words, or until `until`; returns at once if a word does not
/// have its expected value. The function may also return spuriously. The first word is waited on in any case.
///
/// If the kernel cannot wait on all (before Linux 5.16; more than 128), it sleeps at most a millisecond.
#[cfg(not(loom))]
pub(crate) fn wait_any<'a>(mut words: impl Iterator<Item = (&'a AtomicU32, u32)>, until: Option<Instant>) {
    use rustix::{
        thread::futex::{Wait, WaitFlags, WaitPtr, WaitvFlags, waitv},
        time::ClockId,
    };
    let mut waits = [Wait::new(); WAITERS];
    let (mut count, mut first) = (0, None);
    for (wait, (word, expected)) in waits.iter_mut().zip(&mut words) {
        wait.val = expected.into();
        wait.uaddr = WaitPtr::new(word.as_ptr().cast());
        wait.flags = WaitFlags::SIZE_U32;
        first.get_or_insert((word, expected));
        count += 1;
    }
    let Some((word, expected)) = first else { return };
    let answer = match words.next() {
        None => waitv(&waits[..count], WaitvFlags::empty(), until.map(deadline).as_ref(), ClockId::Monotonic),
        Some(_) => Err(Errno::NOSYS),
    };
    match answer {
        // Woken, already changed, interrupted or late: the caller checks its condition again.
        Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
        // The system call does not exist, or is forbidden.
        Err(_) => {
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            wait(word, expected, left.min(SLICE));
        }
    }
}

/// Converts a time to the kernel's monotonic clock.
#[cfg(not(loom))]
fn deadline(until: Instant) -> rustix::time::Timespec {
    use rustix::time::{ClockId, Timespec, clock_gettime};
    let left = until.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::from(u32::MAX), tv_nsec: 0 });
    let now = clock_gettime(ClockId::Monotonic);
    now.checked_add(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
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

#[cfg(loom)]
pub(crate) fn wait_any<'a>(words: impl Iterator<Item = (&'a AtomicU32, u32)>, _until: Option<Instant>) {
    let held = KERNEL.0.lock().unwrap();
    let mut words = words;
    if words.all(|(word, expected)| word.load(crate::atomic::Ordering::SeqCst) == expected) {
        drop(KERNEL.1.wait(held).unwrap());
    }
}
