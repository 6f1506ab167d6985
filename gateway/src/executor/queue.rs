//! The way from the handles to the task that owns the connection.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use shmproto::message::RequestId;
use tokio::sync::mpsc;

use super::{
    errors::CallError,
    link::{Command, refuse},
    slots::{Load, Slot, Slots},
};

/// Counts requests; clones share the count.
#[derive(Debug, Clone)]
pub struct RequestIds(Arc<AtomicU64>);

impl Default for RequestIds {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(1)))
    }
}

/// Where commands are put; clones share it, its numbers and its slots.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    commands: mpsc::UnboundedSender<Command>,
    slots: Slots,
    ids: RequestIds,
}

impl Queue {
    pub(super) fn new(commands: mpsc::UnboundedSender<Command>, slots: Slots, ids: RequestIds) -> Self {
        Self { commands, slots, ids }
    }

    /// Queues a command. Once the task has ended, it is answered as if the connection had broken.
    pub(super) fn send(&self, command: Command) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            refuse(command, u64::MAX);
        }
    }

    /// A number that no other request of this gateway has.
    pub(super) fn request_id(&self) -> RequestId {
        self.ids.0.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether it leads to the same executor.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.commands.same_channel(&other.commands)
    }

    /// How many sequences are under way, and how many there may be.
    pub(super) fn load(&self) -> Load {
        self.slots.load()
    }

    /// A place for a sequence that another executor has lost: it was let in before, so only a full limit refuses it.
    pub(super) fn take_over(&self) -> Result<Slot, CallError> {
        self.slots.take_over().map_err(CallError::from)
    }

    /// How many sequences there may be at once.
    pub(super) fn limit(&self) -> usize {
        self.slots.limit()
    }

    /// Fails if there is no room for a single sequence now.
    pub(super) fn check_room(&self) -> Result<(), CallError> {
        self.slots.check().map_err(CallError::from)
    }

    /// Room for `asked` sequences together.
    pub(super) fn take_slots(&self, asked: usize) -> Result<Vec<Slot>, CallError> {
        let limit = self.slots.limit();
        if asked > limit {
            return Err(CallError::TooMany { asked, limit });
        }
        self.slots.take(asked).map_err(CallError::from)
    }
}
