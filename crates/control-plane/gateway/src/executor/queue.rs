//! The way from the handles to the task that owns the connection.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use shmproto::message::RequestId;
use tokio::sync::{Notify, mpsc};

use super::{
    concurrency_limit::{SequenceSlot, SequenceSlots, SlotUsage},
    errors::CallError,
    link_messages::{LinkCommand, refuse},
};

/// What the executors of a gateway have in common; clones are the same.
#[derive(Debug, Clone, Default)]
pub struct SharedConnections {
    /// Requests so far: a sequence may move from one executor to another.
    requests: Arc<AtomicU64>,
    /// Told whenever one of them may have room again.
    pub room: Arc<Notify>,
}

/// Where commands are put; clones share it, its numbers and its slots.
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

    /// Queues a command. Once the task has ended, it is answered as if the connection had broken.
    pub(super) fn send(&self, command: LinkCommand) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            refuse(command, u64::MAX);
        }
    }

    /// A number that no other request of this gateway has.
    pub(super) fn request_id(&self) -> RequestId {
        self.common.requests.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether it leads to the same executor.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.commands.same_channel(&other.commands)
    }

    /// How many sequences are under way, and how many there may be.
    pub(super) fn load(&self) -> SlotUsage {
        self.slots.load()
    }

    /// There may be room.
    pub(super) fn room_changed(&self) {
        self.common.room.notify_one();
    }

    /// Room for sequences together whose prompts have so many `tokens`.
    pub(super) fn take_slots(&self, tokens: &[usize]) -> Result<Vec<SequenceSlot>, CallError> {
        self.slots.acquire(tokens).map_err(CallError::from)
    }
}
