//! Liveness and load of the compute thread, for systemd, and the error of a lost device.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Load of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EngineGauges {
    /// Number of resident adapters.
    pub adapters: u32,
    pub running: u32,
    pub waiting: u32,
}

/// The device is lost, so this process can compute nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device of the base is lost; see the log and restart the process")]
pub struct DeviceLost;

#[derive(Debug, Default)]
struct HeartbeatCounters {
    beats: AtomicU64,
    adapters: AtomicU32,
    running: AtomicU32,
    waiting: AtomicU32,
}

/// Loop count and load, written only by the compute thread. Values are independent, hence relaxed.
#[derive(Debug, Clone, Default)]
pub(crate) struct ComputeHeartbeat(Arc<HeartbeatCounters>);

impl ComputeHeartbeat {
    /// Counts one loop and stores the load.
    pub(crate) fn beat(&self, gauges: EngineGauges) {
        self.0.beats.fetch_add(1, Ordering::Relaxed);
        self.0.adapters.store(gauges.adapters, Ordering::Relaxed);
        self.0.running.store(gauges.running, Ordering::Relaxed);
        self.0.waiting.store(gauges.waiting, Ordering::Relaxed);
    }

    /// Returns the number of loops. A constant number despite pending work means that the thread hangs.
    #[must_use]
    pub(crate) fn beats(&self) -> u64 {
        self.0.beats.load(Ordering::Relaxed)
    }

    /// Returns the load at the start of the latest loop.
    #[must_use]
    pub(crate) fn gauges(&self) -> EngineGauges {
        let read = |gauge: &AtomicU32| gauge.load(Ordering::Relaxed);
        EngineGauges {
            adapters: read(&self.0.adapters),
            running: read(&self.0.running),
            waiting: read(&self.0.waiting),
        }
    }
}
