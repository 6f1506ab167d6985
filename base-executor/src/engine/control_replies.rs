//! Replies to calls: loads, unloads and stats.

use std::collections::BTreeMap;

use model::forward::ForwardPass;
use shmproto::message::{AdapterStats, RequestId, Stats, ToGateway, UnloadAdapter};
use types::AdapterId;

use super::{
    Engine,
    adapter_tiers::{AddressedReply, failed},
    count,
    event::{ConnectionId, RequestKey},
    sequence::Sequence,
};
use crate::adapters::{AdapterLoadOutcome, AdapterRole, Unloaded};

impl<P: ForwardPass> Engine<P> {
    pub(super) fn adapter_loaded(
        &mut self,
        caller: Option<RequestKey>,
        mut loaded: AdapterLoadOutcome<P::Adapter>,
    ) {
        if let AdapterLoadOutcome::New(prepared) = &mut loaded
            && let AdapterRole::Drafts { factory, .. } = &mut prepared.role
            && let Some(factory) = factory.take()
        {
            self.use_draft_adapter(prepared.claim.id(), factory);
        }
        let answer = self.tiers.loaded(&mut self.kv, caller, loaded);
        self.answer(answer);
    }

    /// Handles the end of an adapter's copy to the device, and replies to the waiting load calls.
    pub(super) fn adapter_arrived(&mut self, id: AdapterId) {
        let answers = self.tiers.arrived(&mut self.kv, id);
        self.answer(answers);
    }

    pub(super) fn unload_adapter(&mut self, connection: ConnectionId, call: &UnloadAdapter) {
        let caller = RequestKey { connection, request: call.request };
        failpoint::pass("executor.unload_begun");
        match self.tiers.host.unload(AdapterId(call.adapter), caller) {
            Ok(None) => {}
            Ok(Some(unloaded)) => self.report_unloaded(&unloaded),
            Err(error) => self.answer([failed(caller, error.into())]),
        }
    }

    pub(super) fn report_unloaded(&mut self, unloaded: &Unloaded) {
        self.stop_draft_adapter(unloaded.id);
        let blocks = self.kv.remove_adapter(unloaded.id);
        let answers = self.tiers.unloaded(&mut self.kv, unloaded);
        failpoint::pass("executor.unload_done");
        tracing::info!(adapter = %unloaded.id, blocks, bytes = unloaded.freed_bytes, "adapter unloaded");
        self.answer(answers);
    }

    fn answer(&mut self, answers: impl IntoIterator<Item = AddressedReply>) {
        for (caller, answer) in answers {
            self.outboxes.answer(caller.connection, answer);
        }
    }

    pub(super) fn answer_stats(&mut self, caller: RequestKey) {
        let stats = self.stats(caller.request);
        self.outboxes.answer(caller.connection, ToGateway::Stats(stats));
    }

    /// Returns the current stats, as the reply to call `request`.
    #[must_use]
    pub fn stats(&self, request: RequestId) -> Stats {
        let kv = self.kv.counts();
        let mut stats = Stats {
            request,
            waiting: count(self.queues.idle().count()),
            running: count(self.queues.running().len()),
            kv_blocks_total: count(kv.total),
            kv_blocks_used: count(kv.used),
            kv_blocks_cached: count(kv.cached),
            memory: self.memory_stats(),
            adapters: self.adapter_stats(),
            ..self.stats.clone()
        };
        self.tiers.stats(&self.kv, &mut stats);
        self.drafts.fill_stats(&mut stats.speculation);
        if let Some(layers) = &self.computing.layers {
            stats.layers = layers.dispatcher.stats();
        }
        stats
    }

    fn adapter_stats(&self) -> Vec<AdapterStats> {
        let (running, waiting) = (users(self.queues.running()), users(self.queues.idle()));
        let mut stats = self.tiers.lines();
        for line in &mut stats {
            let id = AdapterId(line.adapter);
            line.running = running.get(&id).copied().unwrap_or(0);
            line.waiting = waiting.get(&id).copied().unwrap_or(0);
        }
        stats
    }
}

/// Counts the users of each adapter among `sequences`.
fn users<'a, A: 'a>(sequences: impl IntoIterator<Item = &'a Sequence<A>>) -> BTreeMap<AdapterId, u32> {
    let mut users = BTreeMap::new();
    for id in sequences.into_iter().filter_map(Sequence::adapter_id) {
        *users.entry(id).or_default() += 1;
    }
    users
}
