//! Requests whose adapter is not on the device: they start with what there is, or step aside until it has arrived.

use std::time::Instant;

use model::forward::ForwardPass;

use super::{
    Engine,
    sequence::{Hold, Sequence},
};
use crate::placement::Found;

impl<P: ForwardPass> Engine<P> {
    /// Sees to it that the first of `waiting` has its adapter. If that must arrive first, the request steps aside, so
    /// that it keeps nobody waiting; returns false then.
    pub(super) fn adapter_is_there(&mut self, now: Instant) -> bool {
        let Some(mut sequence) = self.waiting.pop_front() else { return true };
        let is_there = self.hold_adapter(&mut sequence, now);
        if is_there {
            self.waiting.push_front(sequence);
        } else {
            self.cold.push(sequence);
            failpoint::pass("executor.cold_waits");
        }
        is_there
    }

    /// Lets those go on whose adapter has arrived: ahead of all that came while they waited.
    pub(super) fn warm_up(&mut self) {
        let now = self.clock.now();
        let mut warm = Vec::new();
        for mut sequence in std::mem::take(&mut self.cold) {
            if self.hold_adapter(&mut sequence, now) {
                warm.push(sequence);
            } else {
                self.cold.push(sequence);
            }
        }
        warm.into_iter().rev().for_each(|sequence| self.waiting.push_front(sequence));
    }

    /// Holds the sequence's adapter on the device until it is retired; returns false if it must wait for that.
    fn hold_adapter(&mut self, sequence: &mut Sequence<P::Adapter>, now: Instant) -> bool {
        let tokens = sequence.pending();
        let Some(adapted) = sequence.adapted.as_ref().filter(|adapted| adapted.hold != Hold::Held) else {
            return true;
        };
        let (id, has_waited) = (adapted.id, adapted.hold != Hold::None);
        let found = self.placement.enter(id, &adapted.adapter, tokens);
        if found == Found::MustWait {
            sequence.wait_for_adapter(now);
            return false;
        }
        let load_wait_us = sequence.hold_adapter(now);
        if found == Found::Missing || has_waited {
            self.stats.cold_starts += 1;
            self.stats.load_wait_us += load_wait_us;
            self.adapters.note_cold_start(id, load_wait_us);
            failpoint::pass("executor.cold_start");
        }
        true
    }
}
