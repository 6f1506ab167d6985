//! Lets the executor wait for calls on any of its channels and for its own threads at once.

use std::sync::Arc;
use std::task;
use std::time::{Duration, Instant};

use super::ExecutorChannel;
use crate::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::atomic::{AtomicU32, fence, spin_loop};
use crate::futex;

/// Polls of the words between two reads of the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Bell that other threads of the executor ring for the thread that waits in [`wait_any`].
///
/// Any number of threads ring, one waits. As a [`task::Waker`] the bell makes that thread poll a future.
#[derive(Debug, Default)]
pub struct Doorbell {
    /// Number of rings; the futex word.
    rung: AtomicU32,
    /// Value of `rung` when the waiting thread last returned; only that thread writes it.
    heard: AtomicU32,
    /// 1 while the waiting thread sleeps, or is about to.
    parked: AtomicU32,
}

impl Doorbell {
    /// Wakes the waiting thread, now or at its next wait. Makes no system call if the thread does not sleep.
    pub fn ring(&self) {
        // SYNC POINT bell: releases what the ringing thread did before.
        self.rung.fetch_add(1, Release);
        // Pairs with the fence in `park`. One of two fences comes first. If that one does, this thread sees
        // the flag. If this one does, the waiting thread sees the count and does not sleep.
        fence(SeqCst);
        if self.parked.load(Relaxed) != 0 {
            futex::wake(&self.rung, 1);
        }
    }

    /// Whether the bell rang since the last call that returned true; marks the rings as heard.
    fn hear(&self) -> bool {
        // SYNC POINT bell: acquires what ringing threads did before.
        let rung = self.rung.load(Acquire);
        let news = rung != self.heard.load(Relaxed);
        if news {
            self.heard.store(rung, Relaxed);
        }
        news
    }
}

impl task::Wake for Doorbell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// Reason for the return of [`wait_any`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCause {
    /// The bell rang since the last return.
    Rung,
    /// A channel has calls to take.
    Called,
    /// The time `until` has come.
    Late,
}

/// Waits until the bell rings, a channel has calls, or `until` comes: spins for at most `spin`, then sleeps.
///
/// One thread at a time may wait on a bell. A channel whose calls are not taken ends every wait at once, so
/// the caller leaves it out. With more than 127 channels, or before Linux 5.16, the function polls for calls
/// every millisecond instead.
#[allow(clippy::needless_pass_by_value, reason = "iterators are handed over, not lent")]
pub fn wait_any<'a>(
    bell: &Doorbell,
    channels: impl Iterator<Item = &'a ExecutorChannel> + Clone,
    spin: Duration,
    until: Option<Instant>,
) -> WakeCause {
    let look = || match bell.hear() {
        true => Some(WakeCause::Rung),
        false => channels.clone().any(ExecutorChannel::has_calls).then_some(WakeCause::Called),
    };
    let is_late = || until.is_some_and(|until| Instant::now() >= until);
    if let Some(woken) = look() {
        return woken;
    }
    let start = (!spin.is_zero()).then(Instant::now);
    while start.is_some_and(|start| start.elapsed() < spin) && !is_late() {
        for _ in 0..LOOKS_PER_TICK {
            spin_loop();
            if let Some(woken) = look() {
                return woken;
            }
        }
    }
    loop {
        if is_late() {
            return WakeCause::Late;
        }
        park(bell, channels.clone(), until);
        if let Some(woken) = look() {
            return woken;
        }
    }
}

/// Sleeps until something changes, until the limit, or spuriously shorter.
fn park<'a: 'b, 'b>(
    bell: &'b Doorbell,
    channels: impl Iterator<Item = &'a ExecutorChannel> + Clone,
    until: Option<Instant>,
) {
    bell.parked.store(1, Relaxed);
    channels.clone().for_each(|channel| channel.set_parked(1));
    // Pairs with the fences in `Doorbell::ring` and `ClientChannel::submit`. If a fence there comes after
    // this one, its thread sees the flag. Otherwise the kernel, which compares each word before the sleep,
    // sees what was written before it.
    fence(SeqCst);
    let bell_word = (&bell.rung, bell.heard.load(Relaxed));
    let words = std::iter::once(bell_word)
        .chain(channels.clone().map(|channel| -> (&'b AtomicU32, u32) { channel.futex_word() }));
    futex::wait_any(words, until);
    channels.for_each(|channel| channel.set_parked(0));
    bell.parked.store(0, Relaxed);
}
