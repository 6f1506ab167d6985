//! How many sequences an executor may have: what it takes, and never more than the gateway was told to.
//!
//! The executor would refuse what is too much as well, but only between two of its steps, which may be long. Counting
//! here refuses at once.
//!
//! It takes more than it computes together, but in the order in which they come, whosever they are. So that tenants have
//! their turns ([`crate::admission_queue`]), no more are sent to it than keep it busy: [`SlotUsage::room`].

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::queue_delay::WaitingEntry;

/// Of those that run together, one of so many may end without a new one being there at once. More would keep it no busier,
/// and whoever comes waits behind all of them, however little they have had.
const PLACES_A_SPARE: usize = 32;
/// So many steps have prompts to compute: the one under way, and the next.
const STEPS_AHEAD: usize = 2;

/// What an executor takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExecutorCapacity {
    /// Sequences that are computed together.
    pub(super) places: usize,
    /// Those that may wait beside them.
    pub(super) waiting: usize,
    /// Prompt tokens of a step.
    pub(super) chunk_tokens: usize,
}

/// How much of an executor is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotUsage {
    /// Sequences under way.
    pub held: usize,
    /// Of them those without a first token.
    pub waiting: usize,
    /// What these have to compute first, each a step's tokens at most: no step computes more of one.
    pub waiting_tokens: usize,
    /// Sequences that are computed together.
    pub places: usize,
    /// Prompt tokens of a step.
    pub chunk_tokens: usize,
    /// Sequences there may be in all.
    pub limit: usize,
}

impl SlotUsage {
    /// How many more requests keep it busy: until places are taken and some wait to take those that come free, and until
    /// prompts are enough for the next steps.
    #[must_use]
    pub fn room(&self) -> usize {
        let spare = self.places / PLACES_A_SPARE + 1;
        let places = (self.places + spare).min(self.limit).saturating_sub(self.held);
        let ahead = self.chunk_tokens.saturating_mul(STEPS_AHEAD).saturating_sub(self.waiting_tokens);
        places.min(ahead.div_ceil(self.chunk_tokens))
    }
}

/// More sequences would be under way than there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManySequences {
    /// Sequences there may be in all.
    pub(super) limit: usize,
}

#[derive(Debug)]
struct SlotCounts {
    /// Never more than this, whatever the executor takes.
    max: usize,
    load: SlotUsage,
}

/// The slots of one executor; clones share them.
#[derive(Clone)]
pub(super) struct SequenceSlots {
    counts: Arc<Mutex<SlotCounts>>,
    /// Told whenever there may be room again.
    room: Arc<Notify>,
}

/// The right to have one sequence under way, given back when dropped.
pub(super) struct SequenceSlot {
    slots: SequenceSlots,
    /// Of the sequence, to be computed before its first token; `None` once it has that.
    tokens: Option<usize>,
    standing: Option<WaitingEntry>,
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
    /// `max` slots, until the executor says that it takes fewer.
    pub(super) fn new(max: usize, room: Arc<Notify>) -> Self {
        let load = SlotUsage {
            held: 0,
            waiting: 0,
            waiting_tokens: 0,
            places: max,
            chunk_tokens: usize::MAX,
            limit: max,
        };
        Self { counts: Arc::new(Mutex::new(SlotCounts { max, load })), room }
    }

    /// An executor is there that takes so much. Those under way go on even if they are more.
    pub(super) fn set_capacity(&self, capacity: ExecutorCapacity) {
        let mut counts = self.counts();
        let max = counts.max;
        counts.load.limit = capacity.places.saturating_add(capacity.waiting).clamp(1, max);
        counts.load.places = capacity.places;
        counts.load.chunk_tokens = capacity.chunk_tokens.max(1);
        drop(counts);
        self.room.notify_one();
    }

    /// Takes one for each of `tokens`, which are those of prompts, or none.
    pub(super) fn acquire(&self, tokens: &[usize]) -> Result<Vec<SequenceSlot>, TooManySequences> {
        let mut counts = self.counts();
        let load = &mut counts.load;
        if load.held.checked_add(tokens.len()).is_none_or(|held| held > load.limit) {
            return Err(TooManySequences { limit: load.limit });
        }
        load.held += tokens.len();
        load.waiting += tokens.len();
        let chunk_tokens = load.chunk_tokens;
        let slots = tokens.iter().map(|&tokens| {
            let tokens = tokens.min(chunk_tokens);
            load.waiting_tokens += tokens;
            SequenceSlot { slots: self.clone(), tokens: Some(tokens), standing: None }
        });
        Ok(slots.collect())
    }

    /// How much of it is taken.
    pub(super) fn load(&self) -> SlotUsage {
        self.counts().load
    }

    fn counts(&self) -> MutexGuard<'_, SlotCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SequenceSlot {
    /// Whose turn it was.
    pub(super) fn attach_waiting(&mut self, standing: Option<WaitingEntry>) {
        self.standing = standing;
    }

    /// Its sequence goes on in another slot.
    pub(super) fn take_standing(&mut self) -> Option<WaitingEntry> {
        self.standing.take()
    }

    /// Its sequence is sent to an executor, for the first time or again.
    pub(super) fn launched(&mut self) {
        if let Some(standing) = &mut self.standing {
            standing.launched();
        }
    }

    /// Its sequence has a token, for which it `queued` so long.
    pub(super) fn begun(&mut self, queued: Duration) {
        if let Some(standing) = self.standing.take() {
            standing.begun(queued);
        }
        if let Some(tokens) = self.tokens.take() {
            self.slots.counts().load.leave_queue(tokens);
            self.slots.room.notify_one();
        }
    }
}

impl SlotUsage {
    fn leave_queue(&mut self, tokens: usize) {
        self.waiting -= 1;
        self.waiting_tokens -= tokens;
    }
}

impl Drop for SequenceSlot {
    fn drop(&mut self) {
        let mut counts = self.slots.counts();
        counts.load.held -= 1;
        if let Some(tokens) = self.tokens {
            counts.load.leave_queue(tokens);
        }
        drop(counts);
        self.slots.room.notify_one();
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
        while slots.load().room() > 0 {
            held.extend(slots.acquire(&[1]).unwrap());
        }
        assert_eq!(held.len(), 67, "the places, one more for each 32, and one");
        held.clear();
        while slots.load().room() > 0 {
            held.extend(slots.acquire(&[5000]).unwrap());
        }
        assert_eq!(held.len(), 2, "however long they are, a step computes a chunk");
        held[0].begun(Duration::ZERO);
        assert_eq!(slots.load().room(), 1, "one of them generates");
        drop(held);
        assert_eq!(slots.load().waiting_tokens, 0);
    }
}
