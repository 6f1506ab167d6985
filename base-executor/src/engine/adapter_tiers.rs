//! The adapters of the engine: loading, users, and residency on the device.

use std::sync::Arc;

use kv_cache::Cache;
use shmproto::message::{AdapterStats, AdapterUnloaded, Failed, Stats, ToGateway, WireError};
use types::AdapterId;

use super::event::RequestKey;
use crate::{
    adapters::{AdapterLoadOutcome, AdapterTable, Unloaded},
    placement::{HostOnlyPlacement, LoadCompletion, Placement},
};

pub(super) type AddressedReply = (RequestKey, ToGateway);

/// Adapters of the host tier and the device tier. The methods change both.
pub(super) struct AdapterTiers<A> {
    pub(super) host: AdapterTable<A>,
    pub(super) device: Box<dyn Placement<A>>,
    /// Load calls that are answered once their adapter is on the device.
    arriving: Vec<(AdapterId, RequestKey)>,
}

impl<A> AdapterTiers<A> {
    /// Creates empty tiers, with the host tier as the device.
    pub(super) fn new() -> Self {
        Self { host: AdapterTable::default(), device: Box::new(HostOnlyPlacement), arriving: Vec::new() }
    }

    /// Handles the loader's result for a `caller` that has no reply yet. Returns `None` if there is no such
    /// caller, or if the call is answered later.
    pub(super) fn loaded(
        &mut self,
        pool: &mut Cache,
        caller: Option<RequestKey>,
        loaded: AdapterLoadOutcome<A>,
    ) -> Option<AddressedReply> {
        let id = match loaded {
            AdapterLoadOutcome::New(prepared) => {
                let id = prepared.claim.id();
                self.host.insert(prepared);
                failpoint::pass("executor.adapter_inserted");
                id
            }
            AdapterLoadOutcome::Known(id) => id,
            AdapterLoadOutcome::Failed(error) => return caller.map(|caller| failed(caller, error)),
        };
        match self.place(pool, id) {
            Ok(LoadCompletion::Later) => {
                self.arriving.extend(caller.map(|caller| (id, caller)));
                None
            }
            Ok(LoadCompletion::Now) => caller.map(|caller| self.answer_loaded(id, caller)),
            Err(error) => caller.map(|caller| failed(caller, error)),
        }
    }

    /// Loads a new adapter to the device if the mode requires it. On failure the adapter is removed.
    fn place(&mut self, pool: &mut Cache, id: AdapterId) -> Result<LoadCompletion, WireError> {
        if self.arriving.iter().any(|(arriving, _)| *arriving == id) {
            return Ok(LoadCompletion::Later);
        }
        let prepared = self.host.get(id)?;
        if prepared.draft_layers() > 0 {
            // No pass of the device uses a draft adapter.
            return Ok(LoadCompletion::Now);
        }
        let adapter = Arc::clone(&prepared.adapter);
        self.device.loaded(pool, id, &adapter).map_err(|error| {
            drop(adapter);
            self.host.remove_unused(id);
            error.into()
        })
    }

    /// Loads an adapter to the device that is likely to be requested.
    pub(super) fn prefetch(&mut self, pool: &mut Cache) {
        let blocks = |id| self.device.blocks_of(id, &self.host.get(id).ok()?.adapter);
        let wanted = pool.wanted_adapter(blocks);
        let adapter = wanted.and_then(|id| Some((id, Arc::clone(&self.host.get(id).ok()?.adapter))));
        if let Some((id, adapter)) = adapter {
            // Adapters that must be on the device are there already.
            let _ = self.device.loaded(pool, id, &adapter);
        }
    }

    /// Handles the end of an adapter's copy, and returns replies to the waiting load calls.
    pub(super) fn arrived(&mut self, pool: &mut Cache, id: AdapterId) -> Vec<AddressedReply> {
        self.device.arrived(pool, id);
        failpoint::pass("executor.adapter_arrived");
        self.answer_arriving(id)
    }

    /// Handles an unloaded adapter, and returns replies to the waiting calls.
    pub(super) fn unloaded(&mut self, pool: &mut Cache, unloaded: &Unloaded) -> Vec<AddressedReply> {
        let Unloaded { id, freed_bytes, .. } = *unloaded;
        self.device.unloaded(pool, id);
        // The adapter will not arrive, and a later adapter with its id is another one.
        let mut answers = self.answer_arriving(id);
        answers.extend(unloaded.calls.iter().map(|&caller| {
            let answer = AdapterUnloaded { request: caller.request, adapter: id.0, freed_bytes };
            (caller, ToGateway::AdapterUnloaded(answer))
        }));
        answers
    }

    fn answer_arriving(&mut self, id: AdapterId) -> Vec<AddressedReply> {
        let callers: Vec<_> = self.arriving.extract_if(.., |(arriving, _)| *arriving == id).collect();
        callers.into_iter().map(|(_, caller)| self.answer_loaded(id, caller)).collect()
    }

    fn answer_loaded(&self, id: AdapterId, caller: RequestKey) -> AddressedReply {
        match self.host.get(id) {
            Ok(prepared) => (caller, ToGateway::AdapterLoaded(prepared.reply(caller.request))),
            Err(error) => failed(caller, error.into()),
        }
    }

    /// Fills in the stats of all adapters together.
    pub(super) fn stats(&self, pool: &Cache, stats: &mut Stats) {
        stats.adapter_bytes = self.host.bytes();
        self.device.stats(pool, stats);
    }

    /// Returns the stats of each adapter.
    pub(super) fn lines(&self) -> Vec<AdapterStats> {
        let mut lines = self.host.stats();
        for line in &mut lines {
            let id = AdapterId(line.adapter);
            if let Some(adapter) = self.host.peek(id) {
                self.device.adapter_stats(id, adapter, line);
            }
        }
        lines
    }
}

pub(super) fn failed(caller: RequestKey, error: WireError) -> AddressedReply {
    (caller, ToGateway::Failed(Failed { request: caller.request, error }))
}
