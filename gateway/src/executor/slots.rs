//! How many sequences may be under way: what the executor takes, never more than the gateway was told to, and only as
//! many as do not wait for too long.
//!
//! The executor would refuse what is too much as well, but only between two of its steps, which may be long. Counting
//! here refuses at once.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use policy::{
    admission::{ControlledDelay, DelayLimits, FirstToken, Overload, Places},
    clock::Clock,
};

/// How much of an executor is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Sequences under way.
    pub held: usize,
    /// Of them those without a first token.
    pub waiting: usize,
    /// Sequences that are computed together.
    pub places: usize,
    /// Sequences there may be in all.
    pub limit: usize,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// All that were asked for would not be under way together with the others.
    Full {
        /// Sequences there may be in all.
        limit: usize,
        /// How long the next one will wait.
        forecast: Duration,
    },
    /// Those that wait do so for too long.
    Overload(Overload),
}

#[derive(Debug)]
struct Counts {
    /// Never more than this, whatever the executor takes.
    max: usize,
    /// Slots in all, of them `places` for sequences that run.
    limit: usize,
    places: usize,
    held: usize,
    /// Slots of sequences without a first token.
    waiting: usize,
    delay: ControlledDelay,
}

impl Counts {
    fn check(&mut self, count: usize, now: Instant) -> Result<(), NoSlot> {
        if self.held.checked_add(count).is_none_or(|held| held > self.limit) {
            let forecast = self.delay.forecast(self.waiting, now);
            return Err(NoSlot::Full { limit: self.limit, forecast });
        }
        let places = if self.held < self.places { Places::Free } else { Places::Taken };
        self.delay.admit(self.waiting, places, now).map_err(NoSlot::Overload)
    }

    /// One waits no longer.
    fn leave_queue(&mut self) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.delay.emptied();
        }
    }
}

/// The slots of one executor; clones share them.
#[derive(Clone)]
pub(super) struct Slots {
    counts: Arc<Mutex<Counts>>,
    clock: Arc<dyn Clock>,
    delays: DelayLimits,
}

/// The right to have one sequence under way, given back when dropped.
pub(super) struct Slot {
    slots: Slots,
    stage: Stage,
}

/// How far a slot's sequence is.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// It has no token since it was launched then.
    Waiting { since: Instant },
    /// It has had its first token.
    Begun,
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("counts", &*self.counts()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("stage", &self.stage).finish_non_exhaustive()
    }
}

impl Slots {
    /// `max` slots, until the executor says that it takes fewer.
    pub(super) fn new(max: usize, delays: DelayLimits, clock: Arc<dyn Clock>) -> Self {
        let delay = ControlledDelay::new(delays);
        let counts = Counts { max, limit: max, places: max, held: 0, waiting: 0, delay };
        Self { counts: Arc::new(Mutex::new(counts)), clock, delays }
    }

    /// An executor is there that computes `running` sequences together and lets `waiting` others wait. Those under way
    /// go on even if they are more.
    pub(super) fn set_limit(&self, running: u32, waiting: u32) {
        let mut counts = self.counts();
        counts.limit = (running.saturating_add(waiting) as usize).clamp(1, counts.max);
        counts.places = running as usize;
        counts.delay = ControlledDelay::new(self.delays);
    }

    /// How many there are in all.
    pub(super) fn limit(&self) -> usize {
        self.counts().limit
    }

    /// Fails if a single sequence would not get a slot now.
    pub(super) fn check(&self) -> Result<(), NoSlot> {
        self.counts().check(1, self.clock.now())
    }

    /// Takes `count` slots or none.
    pub(super) fn take(&self, count: usize) -> Result<Vec<Slot>, NoSlot> {
        let since = self.clock.now();
        let mut counts = self.counts();
        counts.check(count, since)?;
        counts.held += count;
        counts.waiting += count;
        Ok((0..count).map(|_| Slot { slots: self.clone(), stage: Stage::Waiting { since } }).collect())
    }

    /// Takes one whatever the others wait for.
    pub(super) fn take_over(&self) -> Result<Slot, NoSlot> {
        let since = self.clock.now();
        let mut counts = self.counts();
        if counts.held >= counts.limit {
            let forecast = counts.delay.forecast(counts.waiting, since);
            return Err(NoSlot::Full { limit: counts.limit, forecast });
        }
        counts.held += 1;
        counts.waiting += 1;
        Ok(Slot { slots: self.clone(), stage: Stage::Waiting { since } })
    }

    /// How much of it is taken.
    pub(super) fn load(&self) -> Load {
        let counts = self.counts();
        Load { held: counts.held, waiting: counts.waiting, places: counts.places, limit: counts.limit }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Its sequence is sent to an executor, for the first time or again.
    pub(super) fn launched(&mut self) {
        if let Stage::Waiting { since } = &mut self.stage {
            *since = self.slots.clock.now();
        }
    }

    /// Its sequence has a token, for which it `queued` so long.
    pub(super) fn begun(&mut self, queued: Duration) {
        let Stage::Waiting { since } = std::mem::replace(&mut self.stage, Stage::Begun) else { return };
        let now = self.slots.clock.now();
        let mut counts = self.slots.counts();
        counts.delay.begun(FirstToken { queued, computed: (now - since).saturating_sub(queued) }, now);
        counts.leave_queue();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut counts = self.slots.counts();
        counts.held -= 1;
        if let Stage::Waiting { .. } = self.stage {
            counts.leave_queue();
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
            *self.0.lock().unwrap()
        }
    }

    impl TestClock {
        fn advance(&self, by: Duration) {
            *self.0.lock().unwrap() += by;
        }
    }

    fn slots(max: usize) -> (Slots, Arc<TestClock>) {
        let clock = Arc::new(TestClock(Mutex::new(Instant::now())));
        (Slots::new(max, DelayLimits::default(), Arc::clone(&clock) as _), clock)
    }

    #[test]
    fn all_slots_asked_for_are_given_or_none() {
        let (slots, _) = slots(4);
        let three = slots.take(3).unwrap();
        assert_eq!(slots.take(2).unwrap_err(), NoSlot::Full { limit: 4, forecast: Duration::ZERO });
        assert!(slots.take(usize::MAX).is_err());
        let one = slots.take(1).unwrap();
        drop((three, one));
        assert_eq!(slots.take(4).unwrap().len(), 4);
    }

    #[test]
    fn a_limit_below_what_is_under_way_refuses_until_enough_have_ended() {
        let (slots, _) = slots(4);
        let mut held = slots.take(4).unwrap();
        slots.set_limit(1, 1);
        held.truncate(2);
        assert!(slots.take(1).is_err());
        held.pop();
        assert!(slots.take(1).is_ok());
        slots.set_limit(50, 50);
        assert_eq!(slots.limit(), 4, "never more than the gateway was told");
    }

    #[test]
    fn slots_are_given_until_those_who_wait_have_done_so_for_too_long() {
        let (slots, clock) = slots(100);
        slots.set_limit(2, 98);
        let mut held = slots.take(50).unwrap();
        let DelayLimits { target, interval } = DelayLimits::default();
        for slot in &mut held[..10] {
            clock.advance(Duration::from_secs(1));
            slot.begun(target * 2);
        }
        assert!(interval < Duration::from_secs(9), "they were late for so long");
        let Err(NoSlot::Overload(overload)) = slots.take(1) else { panic!("the queue stands") };
        assert!(overload.forecast > Duration::from_secs(30), "40 wait, and one a second has its turn");
        assert!(slots.check().is_err(), "nor is a body read for it");
        held.drain(10..);
        assert!(slots.take(1).is_ok(), "nobody waits any more");
    }
}
