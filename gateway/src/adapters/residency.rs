//! Which adapters are in the executor, and which are on their way there.
//!
//! An adapter is in the executor (tier `host`) or only in the store (`disk`).

use std::collections::HashMap;

use ids::AdapterId;
use tokio::sync::watch;

use super::errors::ResidencyError;

/// Where an adapter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In the executor.
    Host,
    /// In the store alone.
    Disk,
}

/// A load that is under way, and its outcome.
pub(super) type PendingLoad = watch::Receiver<Option<Result<(), ResidencyError>>>;

/// What is known about the executor's memory.
#[derive(Debug, Default)]
pub(super) struct Residency {
    /// Number of the connection that `host` was true of.
    pub(super) epoch: Option<u64>,
    /// Bytes of each resident adapter.
    pub(super) host: HashMap<AdapterId, u64>,
    /// Adapters that requests wait for.
    pub(super) pending_loads: HashMap<AdapterId, PendingLoad>,
    pub(super) waiters: usize,
}
