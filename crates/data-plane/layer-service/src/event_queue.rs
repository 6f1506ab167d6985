//! Queues between the connection threads and the dispatcher; neither side ever waits for the other.

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
    session::{SessionCounters, SessionInfo},
    slab_charge::SlabReservation,
};

/// Maximum number of remote calls that wait to be accepted; more are refused.
const MAX_CALLS: usize = 4096;

/// Rows of a message, and the memory they use of the tenant's quota.
#[derive(Debug)]
pub struct Payload {
    /// Rows in wire format.
    pub bytes: Vec<u8>,
    /// Reservation that ends with the payload.
    pub held: MemoryReservation,
}

/// The executor's end of a channel, with its quota share. Fields drop in order: the memory is freed first.
#[derive(Debug)]
pub struct AccountedChannel {
    pub(super) channel: ExecutorChannel,
    pub(super) _held: SlabReservation,
}

/// An answer to a remote call.
#[derive(Debug)]
pub struct Reply {
    /// Status and row count of the answer.
    pub header: ReplyHeader,
    /// Output rows, if the call succeeded.
    pub payload: Option<Payload>,
}

/// Queue of a remote session's answers. A session whose queue is full takes its answers too slowly and is
/// closed. After the dispatcher closes the queue, the remaining answers are still sent.
#[derive(Debug, Clone)]
pub struct Replies(mpsc::Sender<Reply>);

impl Replies {
    /// Makes a queue of at most `most` answers, and returns both ends.
    #[must_use]
    pub fn queue(most: usize) -> (Self, mpsc::Receiver<Reply>) {
        let (sender, receiver) = mpsc::channel(most);
        (Self(sender), receiver)
    }

    /// Adds an answer; false if the queue is full.
    pub(super) fn put(&self, reply: Reply) -> bool {
        self.0.try_send(reply).is_ok()
    }
}

/// A session that begins.
#[derive(Debug)]
pub struct OpenSession {
    /// Connection of the session.
    pub connection: ConnectionId,
    /// Identity of the session.
    pub info: Arc<SessionInfo>,
    /// Counters of the session.
    pub account: Arc<SessionCounters>,
    /// Connection that this one replaces.
    pub takes_over: Option<ConnectionId>,
    /// Queue of answers; a local session has a channel instead.
    pub replies: Option<Replies>,
}

/// An event for the dispatcher.
#[derive(Debug)]
pub enum DispatcherEvent {
    /// A new session begins.
    Open(OpenSession),
    /// A remote session sends a call.
    Call {
        /// Connection of the call.
        connection: ConnectionId,
        /// Header of the call.
        header: CallHeader,
        /// Rows of the call.
        payload: Payload,
    },
    /// A local session has a channel, in place of an older one.
    Channel {
        /// Connection of the client.
        connection: ConnectionId,
        /// The executor's end of the channel.
        channel: AccountedChannel,
    },
    /// A session ends; its waiting calls are dropped.
    Close {
        /// Connection of the closed session.
        connection: ConnectionId,
    },
    /// The process is shutting down: new calls are refused, waiting ones answered.
    Drain,
}

/// Reason why an event was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Too many calls wait to be accepted.
    #[error("the queue of the layer service is full: try again in a moment")]
    Full,
    /// The dispatcher has ended.
    #[error("the layer service has ended: use another executor")]
    Ended,
}

/// Sender of events to the dispatcher. Clones share one queue.
#[derive(Debug, Clone)]
pub struct DispatcherSender(Arc<EventQueue>);

/// The dispatcher's end of the queue. After the dispatcher drops this end, senders get an error.
#[derive(Debug)]
pub struct Inbox(Arc<EventQueue>);

#[derive(Debug)]
struct EventQueue {
    waiting: Mutex<QueuedEvents>,
    doorbell: Arc<Doorbell>,
}

#[derive(Debug, Default)]
struct QueuedEvents {
    events: VecDeque<DispatcherEvent>,
    calls: usize,
    has_ended: bool,
}

/// Makes a queue of events to the dispatcher.
#[must_use]
pub fn inbox() -> (DispatcherSender, Inbox) {
    let queue = Arc::new(EventQueue { waiting: Mutex::default(), doorbell: Arc::default() });
    (DispatcherSender(Arc::clone(&queue)), Inbox(queue))
}

impl EventQueue {
    fn waiting(&self) -> MutexGuard<'_, QueuedEvents> {
        // Every change leaves the queue consistent, so a poisoned lock is usable.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DispatcherSender {
    /// Wakes the compute thread.
    pub fn wake(&self) {
        self.0.doorbell.ring();
    }

    /// Adds an event and wakes the compute thread.
    ///
    /// # Errors
    /// Fails for a call if too many wait, and for any event if the dispatcher has ended. The number of
    /// sessions bounds all other events: a new channel replaces one that the dispatcher has not seen yet.
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
        // Unmapping memory takes a while, and the lock is free here.
        drop(replaced);
        self.0.doorbell.ring();
        Ok(())
    }
}

impl QueuedEvents {
    /// Counts a call; removes the channel event that `event` replaces.
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
    /// Moves the waiting events to `events`, which must be empty.
    pub(super) fn drain_into(&mut self, events: &mut VecDeque<DispatcherEvent>) {
        let mut waiting = self.0.waiting();
        std::mem::swap(&mut waiting.events, events);
        waiting.calls = 0;
    }

    pub(super) fn sender(&self) -> DispatcherSender {
        DispatcherSender(Arc::clone(&self.0))
    }

    pub(super) fn doorbell(&self) -> &Arc<Doorbell> {
        &self.0.doorbell
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let events = {
            let mut waiting = self.0.waiting();
            waiting.has_ended = true;
            std::mem::take(&mut waiting.events)
        };
        // This ends the queues of answers in the events.
        drop(events);
    }
}
