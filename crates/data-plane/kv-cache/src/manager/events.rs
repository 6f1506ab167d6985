//! Records events of blocks while an observer of the cache exists.

use super::Cache;
use crate::{
    block_events::{BlockEvent, StoredBlock},
    namespace::Chain,
    tier::Tier,
};

impl Cache {
    /// Starts to record events, and returns one [`BlockEvent::Stored`] for each tier of each block that is
    /// in the cache, parents before their children.
    pub fn start_events(&mut self) -> Vec<BlockEvent> {
        self.events.start();
        let blocks: Vec<u32> =
            self.tree.iter().filter(|&index| self.tree.node(index).adapter().is_none()).collect();
        let mut stored = Vec::new();
        for index in blocks {
            self.name_block(index);
            for tier in Tier::ALL.into_iter().filter(|&tier| self.tree.node(index).place(tier).is_here()) {
                stored.extend(self.stored(index, tier).map(BlockEvent::Stored));
            }
        }
        stored
    }

    /// Stops to record events and drops those that were not taken.
    pub fn stop_events(&mut self) {
        self.events.stop();
    }

    /// Takes the events since the last call, in order; none unless recording was started.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        self.events.take()
    }

    /// Records that a block has come to a tier, or has left it.
    pub(super) fn record_event(&mut self, index: u32, tier: Tier, is_stored: bool) {
        if !self.events.is_recording() {
            return;
        }
        self.name_block(index);
        let event = match is_stored {
            true => self.stored(index, tier).map(BlockEvent::Stored),
            false => self.chain_of(index).map(|chain| BlockEvent::Removed { chain, tier }),
        };
        if let Some(event) = event {
            self.events.record(event);
        }
    }

    /// Keeps the chain of a block in its node.
    fn name_block(&mut self, index: u32) {
        if self.tree.node(index).chain.is_none() {
            let chain = self.chain_before(index).then(self.tree.node(index).tokens());
            self.tree.node_mut(index).chain = Some(Box::new(chain));
        }
    }

    fn chain_of(&self, index: u32) -> Option<Chain> {
        self.tree.node(index).chain.as_deref().copied()
    }

    fn stored(&self, index: u32, tier: Tier) -> Option<StoredBlock> {
        let parent = self.tree.parent(index).filter(|&parent| self.tree.node(parent).adapter().is_none());
        Some(StoredBlock {
            chain: self.chain_of(index)?,
            parent: parent.and_then(|parent| self.chain_of(parent)),
            namespace: self.tree.namespace(index),
            tokens: self.tree.node(index).tokens().into(),
            tier,
        })
    }
}
