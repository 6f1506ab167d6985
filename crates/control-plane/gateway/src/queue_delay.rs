//! Waiting time to the first token, measured per tenant and service class.
//!
//! Each sequence counts as waiting from its arrival to its first token, in the gateway or in an executor, or
//! until it is dropped. A tracker decides whether its queue stands (`scheduling::admission`), so that only
//! the tenant that sends too much is refused.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use scheduling::{
    admission::{ControlledDelay, DelayLimits, FirstToken, Overload, SlotAvailability},
    clock::Clock,
};

use crate::lock::lock;

#[derive(Debug)]
struct DelayState {
    /// Sequences without a first token.
    waiting: usize,
    delay: ControlledDelay,
}

struct DelayShared {
    state: Mutex<DelayState>,
    clock: Arc<dyn Clock>,
}

/// Tracker of one queue; clones share its state.
#[derive(Clone)]
pub(crate) struct DelayTracker(Arc<DelayShared>);

impl fmt::Debug for DelayTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Line").field(&*lock(&self.0.state)).finish()
    }
}

impl DelayTracker {
    #[must_use]
    pub(crate) fn new(limits: DelayLimits, clock: Arc<dyn Clock>) -> Self {
        let state = DelayState { waiting: 0, delay: ControlledDelay::new(limits) };
        Self(Arc::new(DelayShared { state: Mutex::new(state), clock }))
    }

    /// Admits one more sequence unless the queue stands and the sequence would wait too long.
    ///
    /// # Errors
    /// Fails if the sequence is refused; the error has the forecast wait.
    pub(crate) fn check(&self, places: SlotAvailability) -> Result<(), Overload> {
        let mut state = lock(&self.0.state);
        let waiting = state.waiting;
        state.delay.admit(waiting, places, self.0.clock.now())
    }

    /// Forecasts how long one more sequence would wait.
    #[must_use]
    pub(crate) fn forecast(&self) -> Duration {
        let state = lock(&self.0.state);
        state.delay.forecast(state.waiting, self.0.clock.now())
    }

    /// Adds `sequences` waiting sequences.
    #[must_use]
    pub(crate) fn join(&self, sequences: usize) -> Vec<WaitingEntry> {
        lock(&self.0.state).waiting += sequences;
        let arrived = self.0.clock.now();
        (0..sequences).map(|_| WaitingEntry { line: Some(self.clone()), arrived, launched: None }).collect()
    }

    /// Number of waiting sequences.
    #[must_use]
    pub(crate) fn waiting(&self) -> usize {
        lock(&self.0.state).waiting
    }

    /// Whether no clone and no waiting sequence refers to this tracker.
    #[must_use]
    pub(crate) fn is_left(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn finish_waiting(&self, first: Option<FirstToken>) {
        let mut state = lock(&self.0.state);
        if let Some(first) = first {
            state.delay.begun(first, self.0.clock.now());
        }
        state.waiting -= 1;
        if state.waiting == 0 {
            state.delay.emptied();
        }
    }
}

/// Sequence that waits until it has a token or is dropped.
#[derive(Debug)]
pub struct WaitingEntry {
    /// `None` after the sequence has left the queue.
    line: Option<DelayTracker>,
    arrived: Instant,
    /// Time when the sequence was last sent to an executor.
    launched: Option<Instant>,
}

impl WaitingEntry {
    /// Records that the sequence is sent to an executor, for the first time or again.
    pub(crate) fn launched(&mut self) {
        self.launched = self.line.as_ref().map(|line| line.0.clock.now());
    }

    /// Records the first token; `queued` is the time that the sequence waited in the executor.
    pub fn begun(mut self, queued: Duration) {
        let Some(line) = self.line.take() else { return };
        let now = line.0.clock.now();
        let launched = self.launched.unwrap_or(now);
        line.finish_waiting(Some(FirstToken {
            queued: launched - self.arrived + queued,
            computed: (now - launched).saturating_sub(queued),
        }));
    }
}

impl Drop for WaitingEntry {
    fn drop(&mut self) {
        if let Some(line) = self.line.take() {
            line.finish_waiting(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct TestClock(Mutex<Instant>);

    impl Clock for TestClock {
        fn now(&self) -> Instant {
            *lock(&self.0)
        }
    }

    #[test]
    fn a_line_takes_more_until_those_in_it_have_waited_for_too_long() {
        let clock = Arc::new(TestClock(Mutex::new(Instant::now())));
        let limits = DelayLimits::default();
        let line = DelayTracker::new(limits, Arc::clone(&clock) as _);
        let mut waiting = line.join(50);
        for mut one in waiting.drain(..10) {
            *lock(&clock.0) += Duration::from_secs(1);
            one.launched();
            one.begun(Duration::ZERO);
        }
        assert!(limits.interval < Duration::from_secs(9), "they were late for so long");
        let overload = line.check(SlotAvailability::Taken).unwrap_err();
        assert!(overload.forecast > Duration::from_secs(30), "40 wait, and one a second has its turn");
        assert_eq!((line.waiting(), line.is_left()), (40, false));
        drop(waiting);
        line.check(SlotAvailability::Taken).unwrap();
        assert!(line.is_left(), "nobody waits any more");
    }
}
