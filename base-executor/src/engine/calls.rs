//! What is answered once: loads, unloads, figures.

use std::{collections::BTreeMap, sync::Arc};

use model::{forward::ForwardPass, generation::AdapterId};
use shmproto::message::{
    AdapterLoaded, AdapterStats, AdapterUnloaded, Failed, RequestId, Stats, ToGateway, UnloadAdapter,
    WireError,
};

use super::{
    Engine, count,
    event::{Caller, ConnectionId, Loaded},
    sequence::Sequence,
};
use crate::{adapters::Unloaded, placement::Arrival};

impl<P: ForwardPass> Engine<P> {
    pub(super) fn adapter_loaded(&mut self, caller: Caller, loaded: Loaded<P::Adapter>) {
        let id = match loaded {
            Loaded::New(prepared) => {
                let id = prepared.claim.id();
                self.adapters.insert(prepared);
                failpoint::pass("executor.adapter_inserted");
                id
            }
            Loaded::Known(id) => id,
            Loaded::Failed(error) => return self.fail_call(caller, error),
        };
        match self.place(id) {
            Ok(Arrival::Later) => self.arriving.push((id, caller)),
            Ok(Arrival::Now) => self.answer_loaded(id, caller),
            Err(error) => self.fail_call(caller, error),
        }
    }

    /// Brings a new adapter to the device if it must be there. One that must and cannot is given up.
    fn place(&mut self, id: AdapterId) -> Result<Arrival, WireError> {
        if self.arriving.iter().any(|(arriving, _)| *arriving == id) {
            return Ok(Arrival::Later);
        }
        let adapter = Arc::clone(&self.adapters.get(id)?.adapter);
        self.placement.loaded(id, &adapter).map_err(|error| {
            drop(adapter);
            self.adapters.remove_unused(id);
            error.into()
        })
    }

    /// An adapter is on the device, or will not be: who waited for that goes on.
    pub(super) fn adapter_arrived(&mut self, id: AdapterId) {
        self.placement.arrived(id);
        failpoint::pass("executor.adapter_arrived");
        self.answer_arriving(id);
    }

    /// Answers those who wait for an adapter to be on the device.
    fn answer_arriving(&mut self, id: AdapterId) {
        for (_, caller) in self.arriving.extract_if(.., |(arriving, _)| *arriving == id).collect::<Vec<_>>() {
            self.answer_loaded(id, caller);
        }
    }

    fn answer_loaded(&mut self, id: AdapterId, caller: Caller) {
        match self.adapters.get(id) {
            Ok(prepared) => {
                let answer = AdapterLoaded {
                    request: caller.request,
                    generation: prepared.generation.0,
                    adapter: id.0,
                    rank: prepared.rank,
                    bytes: prepared.claim.bytes(),
                    modules: prepared.modules,
                };
                self.outboxes.answer(caller.connection, ToGateway::AdapterLoaded(answer));
            }
            Err(error) => self.fail_call(caller, error.into()),
        }
    }

    pub(super) fn unload_adapter(&mut self, connection: ConnectionId, call: &UnloadAdapter) {
        let caller = Caller { connection, request: call.request };
        failpoint::pass("executor.unload_begun");
        match self.adapters.unload(AdapterId(call.adapter), caller) {
            Ok(None) => {}
            Ok(Some(unloaded)) => self.report_unloaded(&unloaded),
            Err(error) => self.fail_call(caller, error.into()),
        }
    }

    pub(super) fn report_unloaded(&mut self, unloaded: &Unloaded) {
        let blocks = self.kv.remove_adapter(unloaded.id);
        self.placement.unloaded(unloaded.id);
        // It will not arrive any more, and one that is loaded after it is another.
        self.answer_arriving(unloaded.id);
        failpoint::pass("executor.unload_done");
        tracing::info!(adapter = %unloaded.id, blocks, bytes = unloaded.freed_bytes, "adapter unloaded");
        for caller in &unloaded.calls {
            let answer = AdapterUnloaded {
                request: caller.request,
                adapter: unloaded.id.0,
                freed_bytes: unloaded.freed_bytes,
            };
            self.outboxes.answer(caller.connection, ToGateway::AdapterUnloaded(answer));
        }
    }

    fn fail_call(&mut self, caller: Caller, error: WireError) {
        let failed = Failed { request: caller.request, error };
        self.outboxes.answer(caller.connection, ToGateway::Failed(failed));
    }

    pub(super) fn answer_stats(&mut self, caller: Caller) {
        let stats = self.stats(caller.request);
        self.outboxes.answer(caller.connection, ToGateway::Stats(stats));
    }

    /// The figures now, as the answer to call `request`.
    #[must_use]
    pub fn stats(&self, request: RequestId) -> Stats {
        let kv = self.kv.counts();
        let mut stats = Stats {
            request,
            waiting: count(self.waiting.len() + self.cold.len()),
            running: count(self.running.len()),
            kv_blocks_total: count(kv.total),
            kv_blocks_used: count(kv.used),
            kv_blocks_cached: count(kv.cached),
            adapter_bytes: self.adapters.bytes(),
            adapters: self.adapter_stats(),
            ..self.stats.clone()
        };
        self.placement.stats(&mut stats);
        if let Some(tenancy) = &self.tenancy {
            stats.layers = tenancy.hub.figures();
        }
        stats
    }

    fn adapter_stats(&self) -> Vec<AdapterStats> {
        let (running, waiting) = (users(&self.running), users(self.waiting.iter().chain(&self.cold)));
        let mut stats = self.adapters.stats();
        for line in &mut stats {
            let id = AdapterId(line.adapter);
            if let Some(adapter) = self.adapters.peek(id) {
                self.placement.adapter_stats(id, adapter, line);
            }
            line.running = running.get(&id).copied().unwrap_or(0);
            line.waiting = waiting.get(&id).copied().unwrap_or(0);
        }
        stats
    }
}

/// How many of `sequences` use each adapter.
fn users<'a, A: 'a>(sequences: impl IntoIterator<Item = &'a Sequence<A>>) -> BTreeMap<AdapterId, u32> {
    let mut users = BTreeMap::new();
    for id in sequences.into_iter().filter_map(Sequence::adapter_id) {
        *users.entry(id).or_default() += 1;
    }
    users
}
