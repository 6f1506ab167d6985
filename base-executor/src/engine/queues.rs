//! All sequences of the engine, by state.
//!
//! A sequence is cold, ready, waits or runs. Waiting and running sequences are in order of arrival (a cold
//! one: of the end of its wait), and all running ones are older than all waiting ones. Ready sequences hold
//! all their blocks and come first, since sequences that need blocks must not keep them from ending.

use std::collections::VecDeque;

use super::sequence::Sequence;

/// Queues of all sequences, by state.
#[derive(Debug)]
pub(super) struct Queues<A> {
    waiting: VecDeque<Sequence<A>>,
    /// Sequences that hold all the blocks they need, and wait only for their turn.
    ready: VecDeque<Sequence<A>>,
    running: Vec<Sequence<A>>,
    /// Sequences that wait for their adapter or KV blocks to reach the device, in order of arrival.
    cold: Vec<Sequence<A>>,
}

impl<A> Default for Queues<A> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), ready: VecDeque::new(), running: Vec::new(), cold: Vec::new() }
    }
}

impl<A> Queues<A> {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.running.iter().chain(self.idle())
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence<A>> {
        self.running.iter_mut().chain(&mut self.ready).chain(&mut self.waiting).chain(&mut self.cold)
    }

    /// Returns the running sequences, oldest first.
    pub(super) fn running(&self) -> &[Sequence<A>] {
        &self.running
    }

    pub(super) fn running_mut(&mut self, index: usize) -> &mut Sequence<A> {
        &mut self.running[index]
    }

    pub(super) fn each_running(&mut self, what: impl FnMut(&mut Sequence<A>)) {
        self.running.iter_mut().for_each(what);
    }

    pub(super) fn idle(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.ready.iter().chain(&self.waiting).chain(&self.cold)
    }

    /// Whether any sequence runs or may be admitted.
    pub(super) fn has_work(&self) -> bool {
        !(self.ready.is_empty() && self.waiting.is_empty() && self.running.is_empty())
    }

    pub(super) fn push(&mut self, sequence: Sequence<A>) {
        self.waiting.push_back(sequence);
    }

    /// Removes the next sequence to run.
    pub(super) fn take_next(&mut self) -> Option<Sequence<A>> {
        self.ready.pop_front().or_else(|| self.waiting.pop_front())
    }

    /// Adds a sequence that holds all its blocks.
    pub(super) fn push_ready(&mut self, sequence: Sequence<A>) {
        self.ready.push_back(sequence);
    }

    /// Adds a sequence ahead of all waiting ones.
    pub(super) fn put_back(&mut self, sequence: Sequence<A>) {
        self.waiting.push_front(sequence);
    }

    /// Adds a sequence that waits for the device, and blocks no other.
    pub(super) fn set_aside(&mut self, sequence: Sequence<A>) {
        self.cold.push(sequence);
    }

    /// Removes all cold sequences, oldest first; those that still wait must be set aside again.
    pub(super) fn take_cold(&mut self) -> Vec<Sequence<A>> {
        std::mem::take(&mut self.cold)
    }

    /// Adds a sequence to the running ones, as the youngest.
    pub(super) fn begin(&mut self, sequence: Sequence<A>) {
        self.running.push(sequence);
    }

    pub(super) fn take_youngest(&mut self) -> Option<Sequence<A>> {
        self.running.pop()
    }

    /// Removes an ended sequence; later ones move up.
    pub(super) fn end(&mut self, index: usize) -> Sequence<A> {
        self.running.remove(index)
    }

    /// Removes the matching sequences from all queues.
    pub(super) fn take_where(&mut self, is_meant: impl Fn(&Sequence<A>) -> bool) -> Vec<Sequence<A>> {
        if !self.iter().any(&is_meant) {
            return Vec::new();
        }
        let mut taken: Vec<_> = self.running.extract_if(.., |sequence| is_meant(sequence)).collect();
        taken.extend(self.cold.extract_if(.., |sequence| is_meant(sequence)));
        for queue in [&mut self.ready, &mut self.waiting] {
            for sequence in std::mem::take(queue) {
                if is_meant(&sequence) {
                    taken.push(sequence);
                } else {
                    queue.push_back(sequence);
                }
            }
        }
        taken
    }
}
