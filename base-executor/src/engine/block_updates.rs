//! Tells gateways which KV blocks the cache has, for KV events.

use std::collections::BTreeSet;

use kv_cache::{
    Tier,
    block_events::{BlockEvent, StoredBlock},
};
use model::forward::ForwardPass;
use shmproto::message::{AddedBlock, BlockTier, BlockUpdate, RemovedBlock, ToGateway};

use super::{Engine, event::ConnectionId};
use crate::adapters::AdapterTable;

/// Maximum number of updates in a message, so that none exceeds a megabyte.
const UPDATES_PER_MESSAGE: usize = 4096;

/// Gateways that watch the cached blocks.
#[derive(Debug, Default)]
pub(super) struct BlockWatchers {
    connections: BTreeSet<ConnectionId>,
}

impl<P: ForwardPass> Engine<P> {
    /// Sends all cached blocks to a gateway, and their changes from now on.
    pub(super) fn watch_blocks(&mut self, connection: ConnectionId) {
        self.publish_blocks();
        let mut updates = vec![BlockUpdate::Cleared];
        let stored = self.kv.start_events();
        updates.extend(stored.into_iter().filter_map(|event| update_of(event, &self.tiers.host)));
        self.send_blocks(connection, &updates);
        self.watchers.connections.insert(connection);
    }

    pub(super) fn unwatch_blocks(&mut self, connection: ConnectionId) {
        if self.watchers.connections.remove(&connection) && self.watchers.connections.is_empty() {
            self.kv.stop_events();
        }
    }

    /// Sends the changes since the last call to all gateways that watch.
    pub(super) fn publish_blocks(&mut self) {
        let events = self.kv.take_events();
        let updates: Vec<BlockUpdate> =
            events.into_iter().filter_map(|event| update_of(event, &self.tiers.host)).collect();
        for connection in self.watchers.connections.clone() {
            self.send_blocks(connection, &updates);
        }
    }

    fn send_blocks(&mut self, connection: ConnectionId, updates: &[BlockUpdate]) {
        for updates in updates.chunks(UPDATES_PER_MESSAGE) {
            self.outboxes.answer(connection, ToGateway::Blocks(updates.to_vec()));
        }
    }
}

/// Returns the update for an event; `None` for a block that tokens and adapter alone do not name.
fn update_of<A>(event: BlockEvent, adapters: &AdapterTable<A>) -> Option<BlockUpdate> {
    match event {
        BlockEvent::Stored(block) => {
            let StoredBlock { chain, parent, namespace, tokens, tier } = block;
            namespace.adapter.is_none_or(|id| adapters.has_plain_blocks(id)).then(|| {
                BlockUpdate::Added(AddedBlock {
                    chain: chain.0,
                    parent: parent.map(|parent| parent.0),
                    adapter: namespace.adapter.map(|id| id.0),
                    tokens: tokens.into_vec(),
                    tier: wire_tier(tier),
                })
            })
        }
        BlockEvent::Removed { chain, tier } => {
            Some(BlockUpdate::Removed(RemovedBlock { chain: chain.0, tier: wire_tier(tier) }))
        }
    }
}

fn wire_tier(tier: Tier) -> BlockTier {
    match tier {
        Tier::Device => BlockTier::Device,
        Tier::Host => BlockTier::Host,
        Tier::Disk => BlockTier::Disk,
    }
}
