//! The adapters: what is loaded, who uses it, and whether the device holds it.

use std::{sync::Arc, time::Duration};

use kv_cache::Cache;
use model::adapter::Invocation;
use shmproto::message::{AdapterLoaded, AdapterStats, AdapterUnloaded, Failed, Stats, ToGateway, WireError};
use types::AdapterId;

use super::event::RequestKey;
use crate::{
    adapters::{AdapterLoadOutcome, AdapterTable, AdapterUseError, Unloaded},
    placement::{AdapterAvailability, HostOnlyPlacement, LoadCompletion, Placement},
};

/// An answer and whose it is.
pub(super) type AddressedReply = (RequestKey, ToGateway);

/// See the module's description.
pub(super) struct Tiers<A> {
    host: AdapterTable<A>,
    device: Box<dyn Placement<A>>,
    /// Load calls that are answered once their adapter is on the device.
    arriving: Vec<(AdapterId, RequestKey)>,
}

impl<A> Tiers<A> {
    /// No adapter, and a device that is the host.
    pub(super) fn new() -> Self {
        Self { host: AdapterTable::default(), device: Box::new(HostOnlyPlacement), arriving: Vec::new() }
    }

    /// Asks `device` where adapters are from now on.
    pub(super) fn set_device(&mut self, device: Box<dyn Placement<A>>) {
        self.device = device;
    }

    pub(super) fn len(&self) -> usize {
        self.host.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.host.ids()
    }

    /// Tokens that the adapter puts before a prompt.
    pub(super) fn virtual_tokens(&self, id: AdapterId) -> usize {
        self.host.virtual_tokens(id)
    }

    /// What invokes it, if it is an activated adapter.
    pub(super) fn invocation(&self, id: AdapterId) -> Option<&Invocation> {
        self.host.invocation(id)
    }

    /// Another sequence uses it until it is released.
    pub(super) fn acquire(&mut self, id: AdapterId) -> Result<Arc<A>, AdapterUseError> {
        self.host.acquire(id)
    }

    /// A sequence has used it; it may have been the last that kept it from being freed.
    pub(super) fn release(&mut self, id: AdapterId) -> Option<Unloaded> {
        self.host.release(id)
    }

    /// Frees it, now or when nobody uses it any more.
    pub(super) fn unload(
        &mut self,
        id: AdapterId,
        caller: RequestKey,
    ) -> Result<Option<Unloaded>, AdapterUseError> {
        self.host.unload(id, caller)
    }

    /// A request of so many pending tokens wants to run.
    pub(super) fn begin_use(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<A>,
        tokens: usize,
    ) -> AdapterAvailability {
        self.device.begin_use(pool, id, adapter, tokens)
    }

    /// A request that entered has ended.
    pub(super) fn end_use(&mut self, pool: &mut Cache, id: AdapterId) {
        self.device.end_use(pool, id);
    }

    /// Takes in who has given up its place on the device.
    pub(super) fn apply_evictions(&mut self, pool: &mut Cache) {
        self.device.apply_evictions(pool);
    }

    /// Starts the ways of adapters to their places, where nothing is needed any more.
    pub(super) fn start_copies(&mut self, pool: &Cache) {
        self.device.start_copies(pool);
    }

    pub(super) fn note_cold_start(&mut self, id: AdapterId, load_wait_us: u64) {
        self.host.note_cold_start(id, load_wait_us);
    }

    pub(super) fn note_verified(&mut self, id: AdapterId, drafted: usize, accepted: usize) {
        self.host.note_verified(id, drafted, accepted);
    }

    pub(super) fn note_least_confidence(&mut self, id: AdapterId, confidence: f64) {
        self.host.note_least_confidence(id, confidence);
    }

    /// A pass over so many rows took so long.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.device.observe(rows, took);
    }

    /// The loader is done with a call; `None` if it is answered later.
    pub(super) fn loaded(
        &mut self,
        pool: &mut Cache,
        caller: RequestKey,
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
            AdapterLoadOutcome::Failed(error) => return Some(failed(caller, error)),
        };
        match self.place(pool, id) {
            Ok(LoadCompletion::Later) => {
                self.arriving.push((id, caller));
                None
            }
            Ok(LoadCompletion::Now) => Some(self.answer_loaded(id, caller)),
            Err(error) => Some(failed(caller, error)),
        }
    }

    /// Brings a new adapter to the device if it must be there. One that must and cannot is given up.
    fn place(&mut self, pool: &mut Cache, id: AdapterId) -> Result<LoadCompletion, WireError> {
        if self.arriving.iter().any(|(arriving, _)| *arriving == id) {
            return Ok(LoadCompletion::Later);
        }
        let prepared = self.host.get(id)?;
        if prepared.draft_layers() > 0 {
            // No pass of the device computes it.
            return Ok(LoadCompletion::Now);
        }
        let adapter = Arc::clone(&prepared.adapter);
        self.device.loaded(pool, id, &adapter).map_err(|error| {
            drop(adapter);
            self.host.remove_unused(id);
            error.into()
        })
    }

    /// Brings an adapter to the device that is likely to be asked for.
    pub(super) fn prefetch(&mut self, pool: &mut Cache) {
        let blocks = |id| self.device.blocks_of(id, &self.host.get(id).ok()?.adapter);
        let wanted = pool.wanted_adapter(blocks);
        let adapter = wanted.and_then(|id| Some((id, Arc::clone(&self.host.get(id).ok()?.adapter))));
        if let Some((id, adapter)) = adapter {
            // Where it must be, it is already.
            let _ = self.device.loaded(pool, id, &adapter);
        }
    }

    /// An adapter is on the device, or will not be: who waited for that is answered.
    pub(super) fn arrived(&mut self, pool: &mut Cache, id: AdapterId) -> Vec<AddressedReply> {
        self.device.arrived(pool, id);
        failpoint::pass("executor.adapter_arrived");
        self.answer_arriving(id)
    }

    /// An adapter is freed: who waited for that, or for its arrival, is answered.
    pub(super) fn unloaded(&mut self, pool: &mut Cache, unloaded: &Unloaded) -> Vec<AddressedReply> {
        let Unloaded { id, freed_bytes, .. } = *unloaded;
        self.device.unloaded(pool, id);
        // It will not arrive any more, and one that is loaded after it is another.
        let mut answers = self.answer_arriving(id);
        answers.extend(unloaded.calls.iter().map(|&caller| {
            let answer = AdapterUnloaded { request: caller.request, adapter: id.0, freed_bytes };
            (caller, ToGateway::AdapterUnloaded(answer))
        }));
        answers
    }

    /// The answers to those who wait for an adapter to be on the device.
    fn answer_arriving(&mut self, id: AdapterId) -> Vec<AddressedReply> {
        let callers: Vec<_> = self.arriving.extract_if(.., |(arriving, _)| *arriving == id).collect();
        callers.into_iter().map(|(_, caller)| self.answer_loaded(id, caller)).collect()
    }

    fn answer_loaded(&self, id: AdapterId, caller: RequestKey) -> AddressedReply {
        match self.host.get(id) {
            Ok(prepared) => {
                let answer = AdapterLoaded {
                    request: caller.request,
                    generation: prepared.generation.0,
                    adapter: id.0,
                    rank: prepared.rank,
                    bytes: prepared.claim.bytes(),
                    modules: prepared.modules,
                    draft_layers: prepared.draft_layers(),
                };
                (caller, ToGateway::AdapterLoaded(answer))
            }
            Err(error) => failed(caller, error.into()),
        }
    }

    /// Fills in what there is to say of all adapters.
    pub(super) fn stats(&self, pool: &Cache, stats: &mut Stats) {
        stats.adapter_bytes = self.host.bytes();
        self.device.stats(pool, stats);
    }

    /// What there is to say of each.
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

/// The answer to a call that came to nothing.
pub(super) fn failed(caller: RequestKey, error: WireError) -> AddressedReply {
    (caller, ToGateway::Failed(Failed { request: caller.request, error }))
}
