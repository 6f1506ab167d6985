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
    slots::{Slot, Slots},
};

/// Where commands are put; clones share it, its numbers and its slots.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    commands: mpsc::UnboundedSender<Command>,
    slots: Slots,
    next_request: Arc<AtomicU64>,
}

impl Queue {
    pub(super) fn new(commands: mpsc::UnboundedSender<Command>, slots: Slots) -> Self {
        Self { commands, slots, next_request: Arc::new(AtomicU64::new(1)) }
    }

    /// Queues a command. Once the task has ended, it is answered as if the connection had broken.
    pub(super) fn send(&self, command: Command) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            refuse(command, u64::MAX);
        }
    }

    /// A number that no other request of this gateway has.
    pub(super) fn request_id(&self) -> RequestId {
        self.next_request.fetch_add(1, Ordering::Relaxed)
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
