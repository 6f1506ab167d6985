//! Events of cached blocks, for routers that track which prefixes a host has.
//!
//! A block is named by its [`Chain`], which covers its namespace and all tokens up to its end. While events
//! are recorded, the tree keeps the chain of every block, so that the removal of a block can name it.

use crate::{namespace::Chain, namespace::Namespace, tier::Tier};

/// Change of one block in one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockEvent {
    /// The bytes of a block have become available in a tier.
    Stored(StoredBlock),
    /// A tier no longer holds the block.
    Removed {
        /// Name of the block.
        chain: Chain,
        /// Tier that the block has left.
        tier: Tier,
    },
}

/// Block that a tier holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlock {
    /// Name of the block.
    pub chain: Chain,
    /// Name of the block before it; `None` for the first block of a prompt.
    pub parent: Option<Chain>,
    /// Namespace in which sequences share the block.
    pub namespace: Namespace,
    /// Token ids of the block.
    pub tokens: Box<[u32]>,
    /// Tier that holds the block.
    pub tier: Tier,
}

/// Recorder of the events since they were last taken; records nothing until it is started.
#[derive(Debug, Default)]
pub(crate) struct EventRecorder {
    events: Option<Vec<BlockEvent>>,
}

impl EventRecorder {
    pub(crate) fn start(&mut self) {
        self.events.get_or_insert_default();
    }

    pub(crate) fn stop(&mut self) {
        self.events = None;
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.events.is_some()
    }

    pub(crate) fn record(&mut self, event: BlockEvent) {
        if let Some(events) = &mut self.events {
            events.push(event);
        }
    }

    pub(crate) fn take(&mut self) -> Vec<BlockEvent> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
