//! Every sequence of the engine, by how far it is.
//!
//! A sequence is cold, waits or runs. Those that wait and run are in order of arrival (for one that was cold: of what it
//! waited for), and everything running is older than everything waiting. Ahead of those that wait are those that hold their
//! blocks already: nobody who needs blocks may keep them from running, and so from giving theirs back.

use std::collections::VecDeque;

use super::sequence::Sequence;

/// See the module's description.
#[derive(Debug)]
pub(super) struct Queues<A> {
    waiting: VecDeque<Sequence<A>>,
    /// Those that hold all blocks that they need, and wait for nothing but their turn.
    ready: VecDeque<Sequence<A>>,
    running: Vec<Sequence<A>>,
    /// Those that wait for their adapter, or for keys and values, to reach the device, in order of arrival.
    cold: Vec<Sequence<A>>,
}

impl<A> Default for Queues<A> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), ready: VecDeque::new(), running: Vec::new(), cold: Vec::new() }
    }
}

impl<A> Queues<A> {
    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.running.iter().chain(self.idle())
    }

    /// The same, to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence<A>> {
        self.running.iter_mut().chain(&mut self.ready).chain(&mut self.waiting).chain(&mut self.cold)
    }

    /// Those that run, oldest first.
    pub(super) fn running(&self) -> &[Sequence<A>] {
        &self.running
    }

    pub(super) fn running_mut(&mut self, index: usize) -> &mut Sequence<A> {
        &mut self.running[index]
    }

    /// Does `what` to each that runs.
    pub(super) fn each_running(&mut self, what: impl FnMut(&mut Sequence<A>)) {
        self.running.iter_mut().for_each(what);
    }

    /// Those that do not run, whatever they wait for.
    pub(super) fn idle(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.ready.iter().chain(&self.waiting).chain(&self.cold)
    }

    /// There is something to compute, or to let in.
    pub(super) fn has_work(&self) -> bool {
        !(self.ready.is_empty() && self.waiting.is_empty() && self.running.is_empty())
    }

    /// A new one comes last.
    pub(super) fn push(&mut self, sequence: Sequence<A>) {
        self.waiting.push_back(sequence);
    }

    /// The next to run.
    pub(super) fn take_next(&mut self) -> Option<Sequence<A>> {
        self.ready.pop_front().or_else(|| self.waiting.pop_front())
    }

    /// It holds all blocks that it needs.
    pub(super) fn push_ready(&mut self, sequence: Sequence<A>) {
        self.ready.push_back(sequence);
    }

    /// It is the next to run, ahead of all that wait.
    pub(super) fn put_back(&mut self, sequence: Sequence<A>) {
        self.waiting.push_front(sequence);
    }

    /// It waits for something to reach the device and keeps nobody waiting meanwhile.
    pub(super) fn set_aside(&mut self, sequence: Sequence<A>) {
        self.cold.push(sequence);
    }

    /// All that wait so, oldest first; who still does is to be set aside again.
    pub(super) fn take_cold(&mut self) -> Vec<Sequence<A>> {
        std::mem::take(&mut self.cold)
    }

    /// It runs, as the youngest.
    pub(super) fn begin(&mut self, sequence: Sequence<A>) {
        self.running.push(sequence);
    }

    /// The last that came of those that run.
    pub(super) fn take_youngest(&mut self) -> Option<Sequence<A>> {
        self.running.pop()
    }

    /// One that runs has ended; those behind it move up.
    pub(super) fn end(&mut self, index: usize) -> Sequence<A> {
        self.running.remove(index)
    }

    /// Takes those out that `is_meant` names.
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
