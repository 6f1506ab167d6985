//! What the doors tell the hub, and how the hub answers a remote door. Neither ever waits for the other.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kv_cache::ledger::MemoryReservation;
use shmproto::{
    channel::{Doorbell, ExecutorChannel},
    layer::{CallHeader, ReplyHeader},
};
use tokio::sync::mpsc;

use super::{
    ConnectionId,
    session::{SessionCounters, SessionFacts},
    slab_charge::SlabReservation,
};

/// Calls of all remote sessions that wait to be taken in; more are refused.
const MAX_CALLS: usize = 4096;

/// The rows of a message, and the bytes they take of the tenant's quota.
#[derive(Debug)]
pub struct Payload {
    /// Numbers as they travel.
    pub bytes: Vec<u8>,
    /// Given back with the payload.
    pub held: MemoryReservation,
}

/// This process's end of a channel, and what its memory takes of the tenant's quota. The memory is given back first.
#[derive(Debug)]
pub struct AccountedChannel {
    pub(super) channel: ExecutorChannel,
    pub(super) _held: SlabReservation,
}

/// An answer to a remote call.
#[derive(Debug)]
pub struct Reply {
    /// What became of it.
    pub header: ReplyHeader,
    /// The rows, where there are any.
    pub payload: Option<Payload>,
}

/// Where the answers of a remote session go. A session whose queue is full takes its answers too slowly and is closed;
/// closed by the hub, the queue ends after what is in it.
#[derive(Debug, Clone)]
pub struct Replies(mpsc::Sender<Reply>);

impl Replies {
    /// A queue of `most` answers, and the end to send them from.
    #[must_use]
    pub fn queue(most: usize) -> (Self, mpsc::Receiver<Reply>) {
        let (sender, receiver) = mpsc::channel(most);
        (Self(sender), receiver)
    }

    /// Puts an answer in; says whether it was taken.
    pub(super) fn put(&self, reply: Reply) -> bool {
        self.0.try_send(reply).is_ok()
    }
}

/// A session that begins.
#[derive(Debug)]
pub struct OpenSession {
    /// Its connection.
    pub connection: ConnectionId,
    /// Who it is.
    pub facts: Arc<SessionFacts>,
    /// What it uses.
    pub account: Arc<SessionCounters>,
    /// The connection whose place it takes.
    pub takes_over: Option<ConnectionId>,
    /// Where answers go; a local session has a channel instead.
    pub replies: Option<Replies>,
}

/// Something the hub reacts to.
#[derive(Debug)]
pub enum DispatcherEvent {
    /// A session begins.
    Open(OpenSession),
    /// A remote session calls.
    Call {
        /// The connection it came over.
        connection: ConnectionId,
        /// What it asks for.
        header: CallHeader,
        /// The rows.
        payload: Payload,
    },
    /// A local session has a channel, instead of the one it had before.
    Channel {
        /// The connection of the client.
        connection: ConnectionId,
        /// Its end of this process.
        channel: AccountedChannel,
    },
    /// A session is over; what it waits for is forgotten.
    Close {
        /// The connection that is closed.
        connection: ConnectionId,
    },
    /// The process is to end: new calls are refused, those that wait are answered.
    Drain,
}

/// Why an event was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Too many calls wait to be taken in.
    #[error("the layer service has not taken in the calls before: try again in a moment")]
    Full,
    /// There is no hub any more.
    #[error("the layer service has ended: look for another executor")]
    Ended,
}

/// The doors' end of the hub's queue. Clones are the same queue.
#[derive(Debug, Clone)]
pub struct DispatcherSender(Arc<EventQueue>);

/// The hub's end. When it is dropped, senders are told so.
#[derive(Debug)]
pub struct Inbox(Arc<EventQueue>);

#[derive(Debug)]
struct EventQueue {
    waiting: Mutex<QueuedEvents>,
    bell: Arc<Doorbell>,
}

#[derive(Debug, Default)]
struct QueuedEvents {
    events: VecDeque<DispatcherEvent>,
    calls: usize,
    has_ended: bool,
}

/// A queue to the hub.
#[must_use]
pub fn inbox() -> (DispatcherSender, Inbox) {
    let queue = Arc::new(EventQueue { waiting: Mutex::default(), bell: Arc::default() });
    (DispatcherSender(Arc::clone(&queue)), Inbox(queue))
}

impl EventQueue {
    fn waiting(&self) -> MutexGuard<'_, QueuedEvents> {
        // Every change leaves the queue whole, so it is usable even if a holder of the lock panicked.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DispatcherSender {
    /// Makes the compute thread turn.
    pub fn wake(&self) {
        self.0.bell.ring();
    }

    /// Puts an event in and wakes the compute thread.
    ///
    /// # Errors
    /// A call if too many wait, anything if the hub has ended. Other events are bounded by the number of sessions: one that
    /// replaces its channel before the hub has seen the last leaves one in the queue.
    pub fn send(&self, event: DispatcherEvent) -> Result<(), SendError> {
        let replaced;
        {
            let mut waiting = self.0.waiting();
            if waiting.has_ended {
                return Err(SendError::Ended);
            }
            replaced = waiting.admit_event(&event)?;
            waiting.events.push_back(event);
        }
        // Unmaps memory, which the hub need not wait for.
        drop(replaced);
        self.0.bell.ring();
        Ok(())
    }
}

impl QueuedEvents {
    /// Counts a call; takes out the channel that `event` replaces.
    fn admit_event(&mut self, event: &DispatcherEvent) -> Result<Option<DispatcherEvent>, SendError> {
        match event {
            DispatcherEvent::Call { .. } if self.calls == MAX_CALLS => Err(SendError::Full),
            DispatcherEvent::Call { .. } => {
                self.calls += 1;
                Ok(None)
            }
            DispatcherEvent::Channel { connection: of, .. } => {
                let same = |event: &DispatcherEvent| matches!(event, DispatcherEvent::Channel { connection, .. } if connection == of);
                Ok(self.events.iter().position(same).and_then(|at| self.events.remove(at)))
            }
            _ => Ok(None),
        }
    }
}

impl Inbox {
    /// Moves what has come to `events`, which must be empty.
    pub(super) fn drain_into(&mut self, events: &mut VecDeque<DispatcherEvent>) {
        let mut waiting = self.0.waiting();
        std::mem::swap(&mut waiting.events, events);
        waiting.calls = 0;
    }

    /// The other end.
    pub(super) fn sender(&self) -> DispatcherSender {
        DispatcherSender(Arc::clone(&self.0))
    }

    /// Rung by every event.
    pub(super) fn bell(&self) -> &Arc<Doorbell> {
        &self.0.bell
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let events = {
            let mut waiting = self.0.waiting();
            waiting.has_ended = true;
            std::mem::take(&mut waiting.events)
        };
        // Ends the queues of answers in it.
        drop(events);
    }
}
