//! A pool that says how many threads it has, and has one: what each of them would have to do is done in turn, and timed.
//!
//! So a machine with few cores tells how work would be cut for many, and how long each piece takes; what comes of that is for
//! a simulation (`scripts/bench many-cores`).

use std::time::{Duration, Instant};

/// A parallel region as it was rehearsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelRegion {
    /// What the caller did alone since the region before.
    pub before: Duration,
    /// What each chunk took, in their order.
    pub chunks: Vec<Duration>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SimulatedPool {
    pub(super) threads: usize,
    regions: Vec<ParallelRegion>,
    /// End of the last region.
    since: Instant,
}

impl SimulatedPool {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), regions: Vec::new(), since: Instant::now() }
    }

    pub(super) fn run(&mut self, chunks: usize, work: impl Fn(usize)) {
        let mut now = Instant::now();
        let before = now - self.since;
        let timed = |chunk| {
            work(chunk);
            let began = std::mem::replace(&mut now, Instant::now());
            now - began
        };
        let chunks = (0..chunks).map(timed).collect();
        self.regions.push(ParallelRegion { before, chunks });
        self.since = Instant::now();
    }

    pub(super) fn take(&mut self) -> Vec<ParallelRegion> {
        self.since = Instant::now();
        std::mem::take(&mut self.regions)
    }
}
