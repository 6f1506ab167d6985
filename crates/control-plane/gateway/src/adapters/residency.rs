//! Adapters that an executor holds, and adapters that are being loaded.
//!
//! An adapter is in an executor (tier `host`) or only in the store (`disk`; `memory` for an ephemeral
//! adapter). Each executor has its own [`ExecutorAdapters`], because adapters are loaded where requests use
//! them.

use std::{collections::HashMap, sync::Mutex};

use tokio::sync::watch;
use types::AdapterId;

use super::errors::ResidencyError;
use crate::{
    executor::{Executor, link_messages::LinkState},
    lock::lock,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Host,
    /// Only in the store.
    Disk,
    /// An ephemeral adapter, only in the store.
    Memory,
}

impl Tier {
    pub(crate) const EACH: [Self; 3] = [Self::Host, Self::Disk, Self::Memory];

    /// Name of the tier in answers and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Memory => "memory",
        }
    }
}

pub(super) type PendingLoad = watch::Receiver<Option<Result<(), ResidencyError>>>;

#[derive(Debug, Default)]
pub(super) struct Residency {
    /// Number of the connection for which `host` is valid.
    pub(super) epoch: Option<u64>,
    /// Bytes of each resident adapter.
    pub(super) host: HashMap<AdapterId, u64>,
    /// Loads that requests wait for.
    pub(super) pending_loads: HashMap<AdapterId, PendingLoad>,
    pub(super) waiters: usize,
}

#[derive(Debug)]
pub(super) struct ExecutorAdapters {
    pub(super) index: usize,
    pub(super) executor: Executor,
    pub(super) residency: Mutex<Residency>,
    /// Held while adapters are loaded or evicted; an executor loads one adapter at a time.
    pub(super) moving: tokio::sync::Mutex<()>,
}

impl ExecutorAdapters {
    pub(super) fn new(index: usize, executor: Executor) -> Self {
        Self { index, executor, residency: Mutex::default(), moving: tokio::sync::Mutex::default() }
    }

    /// Number of the current connection, if there is one.
    pub(super) fn epoch(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            LinkState::Up { epoch, .. } => Some(*epoch),
            _ => None,
        }
    }

    /// Bytes of adapters that the executor can hold; `None` while it is not connected.
    pub(super) fn budget_bytes(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            LinkState::Up { welcome, .. } => Some(welcome.adapter_budget_bytes),
            _ => None,
        }
    }

    pub(super) fn holds(&self, id: AdapterId) -> bool {
        self.is_host(&lock(&self.residency), id)
    }

    pub(super) fn held(&self) -> Vec<AdapterId> {
        let residency = lock(&self.residency);
        if self.is_of_another(&residency) { Vec::new() } else { residency.host.keys().copied().collect() }
    }

    pub(super) fn is_host(&self, residency: &Residency, id: AdapterId) -> bool {
        !self.is_of_another(residency) && residency.host.contains_key(&id)
    }

    /// True if the executor has a new connection that [`reset`](Self::reset) has not seen, so `host` is
    /// invalid. Without a connection the last state counts, because its requests wait to be repeated.
    fn is_of_another(&self, residency: &Residency) -> bool {
        self.epoch().is_some_and(|epoch| residency.epoch != Some(epoch))
    }

    pub(super) fn is_loading(&self, id: AdapterId) -> bool {
        lock(&self.residency).pending_loads.contains_key(&id)
    }

    pub(super) fn resident(&self) -> (usize, u64) {
        let residency = lock(&self.residency);
        (residency.host.len(), residency.host.values().sum())
    }

    /// Replaces the resident adapters by those that a newly connected executor reports.
    pub(super) fn reset(&self, resident: impl Iterator<Item = (AdapterId, u64)>) {
        let mut residency = lock(&self.residency);
        residency.epoch = self.epoch();
        residency.host = resident.collect();
    }
}
