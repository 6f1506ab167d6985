//! Signs of life of the compute thread, for whoever has to tell that it hangs; and the sign that it cannot go on.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// What the compute thread has in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineGauges {
    /// Resident adapters.
    pub adapters: u32,
    /// Requests that are computed.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
}

/// Nothing can be computed in this process any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device that holds the base is lost; the log says why, and the process must start anew")]
pub struct DeviceLost;

#[derive(Debug, Default)]
struct HeartbeatCounters {
    beats: AtomicU64,
    adapters: AtomicU32,
    running: AtomicU32,
    waiting: AtomicU32,
}

/// Written by the compute thread alone, read by anyone. Each figure stands for itself, so nothing is ordered.
#[derive(Debug, Clone, Default)]
pub struct ComputeHeartbeat(Arc<HeartbeatCounters>);

impl ComputeHeartbeat {
    /// Another turn of the loop begins.
    pub fn beat(&self, figures: EngineGauges) {
        self.0.beats.fetch_add(1, Ordering::Relaxed);
        self.0.adapters.store(figures.adapters, Ordering::Relaxed);
        self.0.running.store(figures.running, Ordering::Relaxed);
        self.0.waiting.store(figures.waiting, Ordering::Relaxed);
    }

    /// Turns so far. One that stays the same although the loop was given something to do means that it hangs.
    #[must_use]
    pub fn beats(&self) -> u64 {
        self.0.beats.load(Ordering::Relaxed)
    }

    /// What the last turn began with.
    #[must_use]
    pub fn figures(&self) -> EngineGauges {
        let read = |figure: &AtomicU32| figure.load(Ordering::Relaxed);
        EngineGauges {
            adapters: read(&self.0.adapters),
            running: read(&self.0.running),
            waiting: read(&self.0.waiting),
        }
    }
}
