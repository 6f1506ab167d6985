//! Requests whose adapter is not on the device: they start without it or wait aside. Requests also wait aside
//! for KV blocks from a lower tier (E-06), and for the compilation of their grammar.

use std::time::Instant;

use model::forward::ForwardPass;

use super::{
    Engine,
    sequence::{AdapterHold, Sequence},
};
use crate::placement::AdapterAvailability;

impl<P: ForwardPass> Engine<P> {
    /// Lets sequences continue whose wait is over, ahead of all that arrived meanwhile.
    pub(super) fn admit_ready(&mut self) {
        let now = self.clock.now();
        let mut warm = Vec::new();
        for mut sequence in self.queues.take_cold() {
            if sequence.knows_its_grammar()
                && self.hold_adapter(&mut sequence, now)
                && self.has_fetched(&mut sequence, now)
            {
                warm.push(sequence);
            } else {
                self.queues.set_aside(sequence);
            }
        }
        let (ready, warm): (Vec<_>, Vec<_>) = warm.into_iter().partition(Sequence::holds_its_blocks);
        ready.into_iter().for_each(|sequence| self.queues.push_ready(sequence));
        warm.into_iter().rev().for_each(|sequence| self.queues.put_back(sequence));
    }

    /// Holds the sequence's adapter on the device until it is retired; false if the sequence must wait.
    pub(super) fn hold_adapter(&mut self, sequence: &mut Sequence<P::Adapter>, now: Instant) -> bool {
        let tokens = sequence.pending();
        let Some(adapted) = sequence.adapted.as_ref().filter(|adapted| adapted.hold != AdapterHold::Held)
        else {
            return true;
        };
        let (id, has_waited) = (adapted.id, adapted.hold != AdapterHold::None);
        let found = self.tiers.device.begin_use(&mut self.kv, id, &adapted.adapter, tokens);
        if found == AdapterAvailability::MustWait {
            sequence.wait_for_adapter(now);
            return false;
        }
        let load_wait_us = sequence.hold_adapter(now);
        if found == AdapterAvailability::Missing || has_waited {
            self.stats.cold_starts += 1;
            self.stats.load_wait_us += load_wait_us;
            self.tiers.host.note_cold_start(id, load_wait_us);
            failpoint::pass("executor.cold_start");
        }
        true
    }
}
