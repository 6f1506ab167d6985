//! How many sequences may be under way: what the executor takes, and never more than the gateway was told to.
//!
//! The executor would refuse what is too much as well, but only between two of its steps, which may be long. Counting
//! here refuses at once.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

#[derive(Debug)]
struct Counts {
    /// Never more than this, whatever the executor takes.
    most: usize,
    limit: AtomicUsize,
    held: AtomicUsize,
}

/// The slots of one executor; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Slots(Arc<Counts>);

/// The right to have one sequence under way, given back when dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Counts>);

impl Slots {
    /// `most` slots, until the executor says that it takes fewer.
    pub(super) fn new(most: usize) -> Self {
        let (limit, held) = (AtomicUsize::new(most), AtomicUsize::new(0));
        Self(Arc::new(Counts { most, limit, held }))
    }

    /// The executor takes `count` sequences. Those under way go on even if they are more.
    pub(super) fn set_limit(&self, count: usize) {
        self.0.limit.store(count.clamp(1, self.0.most), Ordering::Relaxed);
    }

    /// How many there are in all.
    pub(super) fn limit(&self) -> usize {
        self.0.limit.load(Ordering::Relaxed)
    }

    /// True if none is free at the moment.
    pub(super) fn is_full(&self) -> bool {
        self.0.held.load(Ordering::Relaxed) >= self.limit()
    }

    /// Takes `count` slots or, if fewer are free, none.
    pub(super) fn take(&self, count: usize) -> Option<Vec<Slot>> {
        let limit = self.limit();
        let more = |held: usize| held.checked_add(count).filter(|&held| held <= limit);
        // The count guards no other memory, so its order towards other memory does not matter.
        self.0.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some((0..count).map(|_| Slot(Arc::clone(&self.0))).collect())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_slots_asked_for_are_given_or_none() {
        let slots = Slots::new(4);
        let three = slots.take(3).unwrap();
        assert!(slots.take(2).is_none());
        assert!(slots.take(usize::MAX).is_none());
        let one = slots.take(1).unwrap();
        drop((three, one));
        assert_eq!(slots.take(4).unwrap().len(), 4);
    }

    #[test]
    fn a_limit_below_what_is_under_way_refuses_until_enough_have_ended() {
        let slots = Slots::new(4);
        let mut held = slots.take(4).unwrap();
        slots.set_limit(2);
        held.truncate(2);
        assert!(slots.take(1).is_none());
        held.pop();
        assert!(slots.take(1).is_some());
        slots.set_limit(100);
        assert_eq!(slots.limit(), 4, "never more than the gateway was told");
    }
}
