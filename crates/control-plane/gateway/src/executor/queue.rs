//! The queue of commands from the handles to the task that owns the connection.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use shmproto::message::RequestId;
use tokio::sync::{Notify, mpsc};

use super::{
    block_feed::FeedMessage,
    concurrency_limit::{SequenceSlot, SequenceSlots, SlotUsage},
    errors::CallError,
    link_messages::{LinkCommand, refuse},
};

/// State that all executors of a gateway share; clones share it too.
#[derive(Debug, Clone, Default)]
pub struct SharedConnections {
    /// Number of requests so far. The number is shared because a sequence may move to another executor.
    requests: Arc<AtomicU64>,
    /// Notified when one of the executors may have capacity again.
    pub capacity_changed: Arc<Notify>,
    /// Channel of the publisher of KV events, if there is one.
    pub(super) block_updates: Option<mpsc::Sender<FeedMessage>>,
}

impl SharedConnections {
    /// Creates the state; block updates of all executors go to `block_updates`.
    pub(crate) fn new(block_updates: Option<mpsc::Sender<FeedMessage>>) -> Self {
        Self { block_updates, ..Self::default() }
    }
}

/// Sender of commands; clones share the channel, the request ids and the slots.
#[derive(Debug, Clone)]
pub(super) struct CommandQueue {
    commands: mpsc::UnboundedSender<LinkCommand>,
    slots: SequenceSlots,
    common: SharedConnections,
}

impl CommandQueue {
    pub(super) fn new(
        commands: mpsc::UnboundedSender<LinkCommand>,
        slots: SequenceSlots,
        common: SharedConnections,
    ) -> Self {
        Self { commands, slots, common }
    }

    /// Queues a command. Once the task has ended, the command is answered as if the connection had broken.
    pub(super) fn send(&self, command: LinkCommand) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            refuse(command, u64::MAX);
        }
    }

    /// Returns an id that no other request of this gateway has.
    pub(super) fn request_id(&self) -> RequestId {
        self.common.requests.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        self.commands.same_channel(&other.commands)
    }

    pub(super) fn load(&self) -> SlotUsage {
        self.slots.load()
    }

    pub(super) fn capacity_changed(&self) {
        self.common.capacity_changed.notify_one();
    }

    /// Takes slots for sequences with prompts of `tokens` tokens each.
    pub(super) fn take_slots(&self, tokens: &[usize]) -> Result<Vec<SequenceSlot>, CallError> {
        self.slots.acquire(tokens).map_err(CallError::from)
    }
}
