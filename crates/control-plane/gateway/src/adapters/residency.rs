//! Which adapters are in an executor, and which are on their way there.
//!
//! An adapter is in an executor (tier `host`) or only in the store (`disk`). Each executor has a [`ExecutorAdapters`]: adapters live
//! where requests ask for them.

use std::{collections::HashMap, sync::Mutex};

use tokio::sync::watch;
use types::AdapterId;

use super::errors::ResidencyError;
use crate::{
    executor::{Executor, link_messages::LinkState},
    lock::lock,
};

/// Where an adapter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In an executor.
    Host,
    /// In the store alone.
    Disk,
}

/// A load that is under way, and its outcome.
pub(super) type PendingLoad = watch::Receiver<Option<Result<(), ResidencyError>>>;

/// What is known about an executor's memory.
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

/// An executor as a place for adapters.
#[derive(Debug)]
pub(super) struct ExecutorAdapters {
    /// Its place among the executors.
    pub(super) index: usize,
    pub(super) executor: Executor,
    pub(super) residency: Mutex<Residency>,
    /// Held by whoever moves adapters in or out; an executor loads one at a time anyhow.
    pub(super) moving: tokio::sync::Mutex<()>,
}

impl ExecutorAdapters {
    pub(super) fn new(index: usize, executor: Executor) -> Self {
        Self { index, executor, residency: Mutex::default(), moving: tokio::sync::Mutex::default() }
    }

    /// Number of the connection, if there is one.
    pub(super) fn epoch(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            LinkState::Up { epoch, .. } => Some(*epoch),
            _ => None,
        }
    }

    /// Bytes of adapters it can hold; `None` as long as it is not connected.
    pub(super) fn budget_bytes(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            LinkState::Up { welcome, .. } => Some(welcome.adapter_budget_bytes),
            _ => None,
        }
    }

    /// Whether an adapter is there.
    pub(super) fn holds(&self, id: AdapterId) -> bool {
        self.is_host(&lock(&self.residency), id)
    }

    /// All that is there.
    pub(super) fn held(&self) -> Vec<AdapterId> {
        let residency = lock(&self.residency);
        if self.is_of_another(&residency) { Vec::new() } else { residency.host.keys().copied().collect() }
    }

    pub(super) fn is_host(&self, residency: &Residency, id: AdapterId) -> bool {
        !self.is_of_another(residency) && residency.host.contains_key(&id)
    }

    /// An executor that has just connected holds what the registry finds there, not what another one held. While there is
    /// none, what was true of the last one counts: its requests wait to be redone.
    fn is_of_another(&self, residency: &Residency) -> bool {
        self.epoch().is_some_and(|epoch| residency.epoch != Some(epoch))
    }

    /// Whether requests wait for an adapter to arrive.
    pub(super) fn is_loading(&self, id: AdapterId) -> bool {
        lock(&self.residency).pending_loads.contains_key(&id)
    }

    /// Adapters there, and the bytes they take.
    pub(super) fn resident(&self) -> (usize, u64) {
        let residency = lock(&self.residency);
        (residency.host.len(), residency.host.values().sum())
    }

    /// Forgets what was resident and takes over what a newly connected executor says it holds.
    pub(super) fn reset(&self, resident: impl Iterator<Item = (AdapterId, u64)>) {
        let mut residency = lock(&self.residency);
        residency.epoch = self.epoch();
        residency.host = resident.collect();
    }
}
