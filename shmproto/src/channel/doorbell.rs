//! How the executor waits: for calls on any of its channels, and for its other threads, at once.

use std::sync::Arc;
use std::task;
use std::time::{Duration, Instant};

use super::ExecutorChannel;
use crate::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::atomic::{AtomicU32, fence, spin_loop};
use crate::futex;

/// Looks at the words between two looks at the clock.
const LOOKS_PER_TICK: u32 = 64;

/// What other threads of the executor ring when there is something for the thread that waits in [`wait_any`].
///
/// Any number of threads ring, one waits. As a [`task::Waker`] it makes the waiting thread poll a future.
#[derive(Debug, Default)]
pub struct Doorbell {
    /// How often it rang. The futex word.
    rung: AtomicU32,
    /// How often it had rung when the waiting thread last came back. That thread writes it.
    heard: AtomicU32,
    /// 1 while that thread sleeps, or is about to.
    parked: AtomicU32,
}

impl Doorbell {
    /// Wakes who waits, now or the next time. Costs no call of the system if nobody sleeps.
    pub fn ring(&self) {
        // SYNC POINT bell: releases what the ringer has done before.
        self.rung.fetch_add(1, Release);
        // Pairs with the fence in `park`. Of two fences one is first. If it is that one, the flag is seen here. If
        // it is this one, the other side sees the count and does not sleep.
        fence(SeqCst);
        if self.parked.load(Relaxed) != 0 {
            futex::wake(&self.rung, 1);
        }
    }

    /// Whether it rang since somebody came back from waiting; if so, that is now.
    fn hear(&self) -> bool {
        // SYNC POINT bell: acquires what ringers have done before.
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

/// Why [`wait_any`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCause {
    /// The bell rang since it last came back.
    Rung,
    /// A channel has calls.
    Called,
    /// It is `until`.
    Late,
}

/// Waits until the bell rings, one of the channels has calls, or it is `until`: spins for `spin` at most, then sleeps.
///
/// One thread at a time waits on a bell. A channel whose calls are not taken ends every wait at once: leave it out.
/// Above 127 channels, and before Linux 5.16, calls are looked for every millisecond instead.
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

/// Sleeps until something changes, or for no reason, or until the limit.
fn park<'a: 'b, 'b>(
    bell: &'b Doorbell,
    channels: impl Iterator<Item = &'a ExecutorChannel> + Clone,
    until: Option<Instant>,
) {
    bell.parked.store(1, Relaxed);
    channels.clone().for_each(|channel| channel.set_parked(1));
    // Pairs with the fences in `Doorbell::ring` and `ClientChannel::submit`: whoever comes after this one sees the flag, and
    // what was done before is seen by the kernel, which compares each word before it lets anybody sleep.
    fence(SeqCst);
    let bell_word = (&bell.rung, bell.heard.load(Relaxed));
    let words = std::iter::once(bell_word)
        .chain(channels.clone().map(|channel| -> (&'b AtomicU32, u32) { channel.futex_word() }));
    futex::wait_any(words, until);
    channels.for_each(|channel| channel.set_parked(0));
    bell.parked.store(0, Relaxed);
}
