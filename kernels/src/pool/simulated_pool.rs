//! A pool that reports many threads and has one: it runs the chunks in sequence and times them.
//!
//! A machine with few cores can thus measure how work would be divided among many, and how long each chunk
//! takes. The simulation `scripts/bench many-cores` computes the rest.

use std::time::{Duration, Instant};

/// Timings of one parallel region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelRegion {
    /// Time that the caller worked alone since the previous region.
    pub before: Duration,
    /// Duration of each chunk, in order.
    pub chunks: Vec<Duration>,
}

#[derive(Debug)]
pub(super) struct SimulatedPool {
    pub(super) threads: usize,
    regions: Vec<ParallelRegion>,
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
