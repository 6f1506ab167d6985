//! Where an adapter is when a request wants it: the engine asks, whoever manages the device answers.

use std::{sync::Arc, time::Duration};

use kv_cache::Cache;
use shmproto::message::{AdapterStats, ErrorCode, Stats, WireError};
use types::AdapterId;

/// What a request finds that wants its adapter. Unless it must wait, the adapter stays where it is, or on its way,
/// until [`Placement::end_use`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterAvailability {
    /// All of it is on the device.
    OnDevice,
    /// Some of it is not. The request starts: what is missing is computed from the host tier.
    Missing,
    /// The request waits, and asks again after [`Placement::arrived`] or when others have left.
    MustWait,
}

/// When the load of an adapter may be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadCompletion {
    /// At once.
    Now,
    /// After [`Placement::arrived`].
    Later,
}

/// Why an adapter cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The tier has no room.
    #[error(
        "the adapter takes {asked_bytes} bytes on the device, of whose {limit_bytes} bytes others hold {held_bytes}; unload an \
         adapter or start the executor with a larger --device-bytes (or --device-adapter-bytes, where that is set)"
    )]
    TierFull {
        /// Bytes it takes.
        asked_bytes: u64,
        /// Bytes others hold and cannot give up.
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

/// Decides which adapters the device holds, in the pool that they share with keys and values. Called by the compute thread alone;
/// nothing in it waits.
pub trait Placement<A>: Send {
    /// Takes in who has given up its place, before anything is written to blocks that were given to others.
    fn apply_evictions(&mut self, pool: &mut Cache);

    /// Starts the ways of adapters to their places, when what was there before has been copied away.
    fn start_copies(&mut self, pool: &Cache);

    /// Blocks of the pool that an adapter would have a place in; `None` if it needs none, or cannot have one.
    fn blocks_of(&self, id: AdapterId, adapter: &A) -> Option<u32>;

    /// An adapter has joined the host tier, or is likely to be asked for while there is time.
    ///
    /// # Errors
    /// If it must be on the device and cannot be.
    fn loaded(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<A>,
    ) -> Result<LoadCompletion, PlacementError>;

    /// It has left the host tier; nobody uses it.
    fn unloaded(&mut self, pool: &mut Cache, id: AdapterId);

    /// Everything of it is on the device, or never will be.
    fn arrived(&mut self, pool: &mut Cache, id: AdapterId);

    /// A request of so many pending tokens wants to run.
    fn begin_use(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<A>,
        tokens: usize,
    ) -> AdapterAvailability;

    /// A request that entered has ended.
    fn end_use(&mut self, pool: &mut Cache, id: AdapterId);

    /// A pass over so many rows took so long.
    fn observe(&mut self, rows: usize, took: Duration);

    /// Fills in what the device and its workers have done.
    fn stats(&self, pool: &Cache, stats: &mut Stats);

    /// Fills in what was done for one adapter.
    fn adapter_stats(&self, id: AdapterId, adapter: &A, line: &mut AdapterStats);
}

/// A device that is the host: every adapter is there as soon as it is loaded.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOnlyPlacement;

impl<A> Placement<A> for HostOnlyPlacement {
    fn apply_evictions(&mut self, _: &mut Cache) {}

    fn start_copies(&mut self, _: &Cache) {}

    fn blocks_of(&self, _: AdapterId, _: &A) -> Option<u32> {
        None
    }

    fn loaded(&mut self, _: &mut Cache, _: AdapterId, _: &Arc<A>) -> Result<LoadCompletion, PlacementError> {
        Ok(LoadCompletion::Now)
    }

    fn unloaded(&mut self, _: &mut Cache, _: AdapterId) {}

    fn arrived(&mut self, _: &mut Cache, _: AdapterId) {}

    fn begin_use(&mut self, _: &mut Cache, _: AdapterId, _: &Arc<A>, _: usize) -> AdapterAvailability {
        AdapterAvailability::OnDevice
    }

    fn end_use(&mut self, _: &mut Cache, _: AdapterId) {}

    fn observe(&mut self, _: usize, _: Duration) {}

    fn stats(&self, _: &Cache, _: &mut Stats) {}

    fn adapter_stats(&self, _: AdapterId, _: &A, _: &mut AdapterStats) {}
}
