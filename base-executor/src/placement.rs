//! The interface between the engine and the device tier of adapters.

use std::{sync::Arc, time::Duration};

use kv_cache::Cache;
use shmproto::message::{AdapterStats, ErrorCode, Stats, WireError};
use types::AdapterId;

/// Availability of a request's adapter. Unless the request must wait, the adapter stays on the device or in
/// transit until [`Placement::end_use`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterAvailability {
    /// The whole adapter is on the device.
    OnDevice,
    /// Some ranks are missing. The request starts, and they are computed from the host tier.
    Missing,
    /// The request waits, and asks again after [`Placement::arrived`] or when other requests have ended.
    MustWait,
}

/// Time at which the load of an adapter is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadCompletion {
    Now,
    /// The load is answered after [`Placement::arrived`].
    Later,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    #[error(
        "the adapter needs {asked_bytes} bytes on the device, but {held_bytes} of {limit_bytes} bytes \
         are in use; unload an adapter, or raise --device-bytes (or --device-adapter-bytes, if set)"
    )]
    TierFull {
        /// Bytes of the adapter on the device.
        asked_bytes: u64,
        /// Bytes of other adapters that cannot be evicted.
        held_bytes: u64,
        /// Bytes of the device tier.
        limit_bytes: u64,
    },
}

impl From<PlacementError> for WireError {
    fn from(error: PlacementError) -> Self {
        Self { code: ErrorCode::AdapterBudgetExceeded, message: error.to_string() }
    }
}

/// Decides which adapters the device holds, in the pool shared with the KV cache. Only the compute thread
/// calls it; no method waits. By default the device tier is the host tier: an adapter is on the device as
/// soon as it is loaded.
pub trait Placement<A>: Send {
    /// Applies evictions from the pool, before others write to the freed blocks.
    fn apply_evictions(&mut self, _pool: &mut Cache) {}

    /// Starts the copies of adapters to their blocks, after the former contents are copied out.
    fn start_copies(&mut self, _pool: &Cache) {}

    /// Returns the blocks that an adapter needs in the pool; `None` if it needs none or cannot get any.
    fn blocks_of(&self, _id: AdapterId, _adapter: &A) -> Option<u32> {
        None
    }

    /// Handles an adapter that joined the host tier, or that is likely to be requested.
    ///
    /// # Errors
    /// If the adapter must be on the device and does not fit.
    fn loaded(
        &mut self,
        _pool: &mut Cache,
        _id: AdapterId,
        _adapter: &Arc<A>,
    ) -> Result<LoadCompletion, PlacementError> {
        Ok(LoadCompletion::Now)
    }

    /// Handles an unused adapter that left the host tier.
    fn unloaded(&mut self, _pool: &mut Cache, _id: AdapterId) {}

    /// Handles the end of an adapter's copy, complete or not.
    fn arrived(&mut self, _pool: &mut Cache, _id: AdapterId) {}

    /// Begins the use of an adapter by a request of `tokens` pending tokens.
    fn begin_use(
        &mut self,
        _pool: &mut Cache,
        _id: AdapterId,
        _adapter: &Arc<A>,
        _tokens: usize,
    ) -> AdapterAvailability {
        AdapterAvailability::OnDevice
    }

    /// Ends a request's use.
    fn end_use(&mut self, _pool: &mut Cache, _id: AdapterId) {}

    /// Records a pass over `rows` rows that took `took`.
    fn observe(&mut self, _rows: usize, _took: Duration) {}

    /// Fills in the stats of the device and its workers.
    fn stats(&self, _pool: &Cache, _stats: &mut Stats) {}

    /// Fills in the stats of one adapter.
    fn adapter_stats(&self, _id: AdapterId, _adapter: &A, _line: &mut AdapterStats) {}
}

/// A device tier that is the host tier.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOnlyPlacement;

impl<A> Placement<A> for HostOnlyPlacement {}
