//! Limits the sequences that an executor has: by its capacity, and by the gateway's own limit.
//!
//! The executor would also refuse excess sequences, but only between two steps, which may be long. Counting
//! here refuses at once.
//!
//! An executor accepts more sequences than it runs at once, and serves them in the order of arrival,
//! regardless of tenant. To leave the order to the admission queue ([`crate::admission_queue`]), the gateway
//! sends only enough to keep the executor busy: [`SlotUsage::free`].

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::queue_delay::WaitingEntry;

/// One spare sequence waits in the executor for this many batch slots, to fill slots that come free. More
/// spares would keep it no busier, and each new request would wait behind all of them.
const PLACES_A_SPARE: usize = 32;
/// Number of steps with enough prompt tokens in the executor: the running one, and the next.
const STEPS_AHEAD: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExecutorCapacity {
    /// Maximum number of sequences that run at once.
    pub(super) places: usize,
    /// Maximum number of sequences that wait in the executor.
    pub(super) waiting: usize,
    /// Maximum number of prompt tokens per step.
    pub(super) chunk_tokens: usize,
}

/// Occupied part of an executor's capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotUsage {
    /// Number of sequences in the executor.
    pub held: usize,
    /// Prompt tokens of the sequences without a first token, each counted up to `chunk_tokens`, since a step
    /// computes no more of one sequence.
    pub waiting_tokens: usize,
    pub places: usize,
    pub chunk_tokens: usize,
    /// Maximum number of sequences, running and waiting.
    pub limit: usize,
}

impl SlotUsage {
    /// Number of further requests that keep the executor busy: until its batch slots and spares are filled,
    /// and until the next steps have enough prompt tokens.
    #[must_use]
    pub(crate) fn free(&self) -> usize {
        let spare = self.places / PLACES_A_SPARE + 1;
        let places = (self.places + spare).min(self.limit).saturating_sub(self.held);
        let ahead = self.chunk_tokens.saturating_mul(STEPS_AHEAD).saturating_sub(self.waiting_tokens);
        places.min(ahead.div_ceil(self.chunk_tokens))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManySequences {
    pub(super) limit: usize,
}

#[derive(Debug)]
struct SlotCounts {
    /// The gateway's own limit, regardless of the executor's capacity.
    max: usize,
    load: SlotUsage,
}

/// Slots of one executor; clones share them.
#[derive(Clone)]
pub(super) struct SequenceSlots {
    counts: Arc<Mutex<SlotCounts>>,
    /// Notified when there may be capacity again.
    capacity_changed: Arc<Notify>,
}

/// The right to run one sequence, released on drop.
pub(super) struct SequenceSlot {
    slots: SequenceSlots,
    /// Counted prompt tokens of the sequence; `None` once it has its first token.
    tokens: Option<usize>,
    waiting: Option<WaitingEntry>,
}

impl fmt::Debug for SequenceSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("counts", &*self.counts()).finish_non_exhaustive()
    }
}

impl fmt::Debug for SequenceSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl SequenceSlots {
    /// Creates `max` slots, until the executor reports a lower capacity.
    pub(super) fn new(max: usize, capacity_changed: Arc<Notify>) -> Self {
        let load =
            SlotUsage { held: 0, waiting_tokens: 0, places: max, chunk_tokens: usize::MAX, limit: max };
        Self { counts: Arc::new(Mutex::new(SlotCounts { max, load })), capacity_changed }
    }

    /// Sets the capacity of a connected executor. Running sequences continue even if they exceed it.
    pub(super) fn set_capacity(&self, capacity: ExecutorCapacity) {
        let mut counts = self.counts();
        let max = counts.max;
        counts.load.limit = capacity.places.saturating_add(capacity.waiting).clamp(1, max);
        counts.load.places = capacity.places;
        counts.load.chunk_tokens = capacity.chunk_tokens.max(1);
        drop(counts);
        self.capacity_changed.notify_one();
    }

    /// Takes a slot for each prompt length in `tokens`, or none.
    pub(super) fn acquire(&self, tokens: &[usize]) -> Result<Vec<SequenceSlot>, TooManySequences> {
        let mut counts = self.counts();
        let load = &mut counts.load;
        if load.held.checked_add(tokens.len()).is_none_or(|held| held > load.limit) {
            return Err(TooManySequences { limit: load.limit });
        }
        load.held += tokens.len();
        let chunk_tokens = load.chunk_tokens;
        let slots = tokens.iter().map(|&tokens| {
            let tokens = tokens.min(chunk_tokens);
            load.waiting_tokens += tokens;
            SequenceSlot { slots: self.clone(), tokens: Some(tokens), waiting: None }
        });
        Ok(slots.collect())
    }

    pub(super) fn load(&self) -> SlotUsage {
        self.counts().load
    }

    fn counts(&self) -> MutexGuard<'_, SlotCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SequenceSlot {
    pub(super) fn attach_waiting(&mut self, waiting: Option<WaitingEntry>) {
        self.waiting = waiting;
    }

    /// Returns the queue entry of the sequence, which continues in another slot.
    pub(super) fn take_waiting(&mut self) -> Option<WaitingEntry> {
        self.waiting.take()
    }

    pub(super) fn launched(&mut self) {
        if let Some(waiting) = &mut self.waiting {
            waiting.launched();
        }
    }

    /// Notes that the sequence has its first token, after waiting `queued` in the executor.
    pub(super) fn begun(&mut self, queued: Duration) {
        if let Some(waiting) = self.waiting.take() {
            waiting.begun(queued);
        }
        if let Some(tokens) = self.tokens.take() {
            self.slots.counts().load.waiting_tokens -= tokens;
            self.slots.capacity_changed.notify_one();
        }
    }
}

impl Drop for SequenceSlot {
    fn drop(&mut self) {
        let mut counts = self.slots.counts();
        counts.load.held -= 1;
        counts.load.waiting_tokens -= self.tokens.unwrap_or(0);
        drop(counts);
        self.slots.capacity_changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(max: usize) -> SequenceSlots {
        SequenceSlots::new(max, Arc::default())
    }

    fn capacity(places: usize, waiting: usize) -> ExecutorCapacity {
        ExecutorCapacity { places, waiting, chunk_tokens: 100 }
    }

    #[test]
    fn all_slots_asked_for_are_given_or_none() {
        let slots = slots(4);
        let three = slots.acquire(&[1; 3]).unwrap();
        assert_eq!(slots.acquire(&[1; 2]).unwrap_err(), TooManySequences { limit: 4 });
        let one = slots.acquire(&[1]).unwrap();
        drop((three, one));
        assert_eq!(slots.acquire(&[1; 4]).unwrap().len(), 4);
    }

    #[test]
    fn a_limit_below_what_is_under_way_refuses_until_enough_have_ended() {
        let slots = slots(4);
        let mut held = slots.acquire(&[1; 4]).unwrap();
        slots.set_capacity(capacity(1, 1));
        held.truncate(2);
        assert!(slots.acquire(&[1]).is_err());
        held.pop();
        assert!(slots.acquire(&[1]).is_ok());
        slots.set_capacity(capacity(50, 50));
        assert_eq!(slots.load().limit, 4, "never more than the gateway was told");
    }

    #[test]
    fn there_is_room_for_what_keeps_an_executor_busy_and_no_more() {
        let slots = slots(1000);
        slots.set_capacity(capacity(64, 500));
        let mut held = Vec::new();
        while slots.load().free() > 0 {
            held.extend(slots.acquire(&[1]).unwrap());
        }
        assert_eq!(held.len(), 67, "the places, one more for each 32, and one");
        held.clear();
        while slots.load().free() > 0 {
            held.extend(slots.acquire(&[5000]).unwrap());
        }
        assert_eq!(held.len(), 2, "however long they are, a step computes a chunk");
        held[0].begun(Duration::ZERO);
        assert_eq!(slots.load().free(), 1, "one of them generates");
        drop(held);
        assert_eq!(slots.load().waiting_tokens, 0);
    }
}
