//! What the device tier holds itself to, asks, and tells.

use std::sync::Arc;

use kv_cache::copy::BytesPerSecond;
use shmproto::message::ColdStart;
use types::AdapterId;

/// Tells the engine that an adapter has arrived, or never will.
#[derive(Clone)]
pub struct ArrivalNotifier(pub(super) Arc<dyn Fn(AdapterId) + Send + Sync>);

impl ArrivalNotifier {
    /// Tells it by calling `told`, on a thread that may wait.
    pub fn new(told: impl Fn(AdapterId) + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }
}

impl std::fmt::Debug for ArrivalNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Arrivals")
    }
}

/// Says how much of the device's memory nobody uses.
pub struct FreeBytes(pub(super) Box<dyn Fn() -> u64 + Send>);

impl FreeBytes {
    /// As `say` says, in bytes; 0 if it does not know.
    pub fn new(say: impl Fn() -> u64 + Send + 'static) -> Self {
        Self(Box::new(say))
    }
}

impl std::fmt::Debug for FreeBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FreeBytes")
    }
}

/// What the device tier holds itself to.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSettings {
    /// Bytes of a block of the pool that adapters have their places in.
    pub block_bytes: u64,
    /// What a request does whose adapter is not there.
    pub cold_start: ColdStart,
    /// An emulated link.
    pub link: Option<BytesPerSecond>,
}
