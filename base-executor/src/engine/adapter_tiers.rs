//! The adapters of the engine: loading, users, and residency on the device.

use std::{sync::Arc, time::Duration};

use kv_cache::Cache;
use model::adapter::{ClassificationHead, Invocation};
use shmproto::message::{AdapterStats, AdapterUnloaded, Failed, Stats, ToGateway, WireError};
use types::AdapterId;

use super::event::RequestKey;
use crate::{
    adapters::{AdapterLoadOutcome, AdapterTable, AdapterUseError, Unloaded},
    placement::{AdapterAvailability, HostOnlyPlacement, LoadCompletion, Placement},
};

pub(super) type AddressedReply = (RequestKey, ToGateway);

/// Adapters of the host tier and the device tier.
pub(super) struct Tiers<A> {
    host: AdapterTable<A>,
    device: Box<dyn Placement<A>>,
    /// Load calls that are answered once their adapter is on the device.
    arriving: Vec<(AdapterId, RequestKey)>,
}

impl<A> Tiers<A> {
    /// Creates empty tiers, with the host tier as the device.
    pub(super) fn new() -> Self {
        Self { host: AdapterTable::default(), device: Box::new(HostOnlyPlacement), arriving: Vec::new() }
    }

    pub(super) fn set_device(&mut self, device: Box<dyn Placement<A>>) {
        self.device = device;
    }

    pub(super) fn len(&self) -> usize {
        self.host.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.host.ids()
    }

    pub(super) fn virtual_tokens(&self, id: AdapterId) -> usize {
        self.host.virtual_tokens(id)
    }

    /// Returns the invocation sequence of an activated adapter.
    pub(super) fn invocation(&self, id: AdapterId) -> Option<&Invocation> {
        self.host.invocation(id)
    }

    /// Whether the prompt's tokens alone determine the adapter's KV blocks. An activated adapter begins
    /// within a prompt, and a prefix begins with virtual tokens.
    pub(super) fn has_plain_blocks(&self, id: AdapterId) -> bool {
        self.host.get(id).is_ok_and(|adapter| adapter.invocation.is_none() && adapter.virtual_tokens == 0)
    }

    /// Returns the head of an adapter that classifies.
    pub(super) fn classification_head(&self, id: AdapterId) -> Option<&Arc<ClassificationHead>> {
        self.host.classification_head(id)
    }

    /// Counts a sequence as a user until `release`.
    pub(super) fn acquire(&mut self, id: AdapterId) -> Result<Arc<A>, AdapterUseError> {
        self.host.acquire(id)
    }

    /// Ends a sequence's use, which may complete an unloading.
    pub(super) fn release(&mut self, id: AdapterId) -> Option<Unloaded> {
        self.host.release(id)
    }

    /// Unloads an adapter, at once or after its last user.
    pub(super) fn unload(
        &mut self,
        id: AdapterId,
        caller: RequestKey,
    ) -> Result<Option<Unloaded>, AdapterUseError> {
        self.host.unload(id, caller)
    }

    /// Requests the adapter for a sequence of `tokens` pending tokens.
    pub(super) fn begin_use(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<A>,
        tokens: usize,
    ) -> AdapterAvailability {
        self.device.begin_use(pool, id, adapter, tokens)
    }

    pub(super) fn end_use(&mut self, pool: &mut Cache, id: AdapterId) {
        self.device.end_use(pool, id);
    }

    /// Applies evictions of adapters from the pool.
    pub(super) fn apply_evictions(&mut self, pool: &mut Cache) {
        self.device.apply_evictions(pool);
    }

    /// Starts pending copies of adapters to blocks that are free by now.
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

    /// Records a pass over `rows` rows that took `took`.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.device.observe(rows, took);
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
