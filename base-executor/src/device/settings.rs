//! Settings of the device tier, and its callbacks.

use std::sync::Arc;

use kv_cache::copy::BytesPerSecond;
use shmproto::message::ColdStart;
use types::AdapterId;

/// Notifies the engine that an adapter's copy has ended, complete or not.
#[derive(Clone)]
pub struct ArrivalNotifier(pub(super) Arc<dyn Fn(AdapterId) + Send + Sync>);

impl ArrivalNotifier {
    /// Calls `on_arrival` on a thread that may wait.
    pub fn new(on_arrival: impl Fn(AdapterId) + Send + Sync + 'static) -> Self {
        Self(Arc::new(on_arrival))
    }
}

impl std::fmt::Debug for ArrivalNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Arrivals")
    }
}

/// Returns the free memory of the device.
pub struct FreeBytes(pub(super) Box<dyn Fn() -> u64 + Send>);

impl FreeBytes {
    /// Wraps `say`, which returns bytes, or 0 if unknown.
    pub(crate) fn new(say: impl Fn() -> u64 + Send + 'static) -> Self {
        Self(Box::new(say))
    }
}

impl std::fmt::Debug for FreeBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FreeBytes")
    }
}

#[derive(Debug, Clone, Copy)]
pub struct DeviceSettings {
    /// Size of a block of the pool, in bytes.
    pub block_bytes: u64,
    /// Whether a cold request waits for its adapter or starts with CPU-assist.
    pub cold_start: ColdStart,
    /// Bandwidth of an emulated link.
    pub link: Option<BytesPerSecond>,
}
