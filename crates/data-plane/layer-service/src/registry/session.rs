//! A session, as its connection holds it.

use std::sync::Arc;

use kv_cache::ledger::{self, MemoryReservation, OutOfBudget};
use shmproto::{
    channel::{ExecutorChannel, Geometry},
    layer::{
        CallHeader, CallStatus, ReplyHeader,
        control::{RefusalCode, SessionOpened, SessionRefused, SessionStats},
    },
};

use super::{MAX_CALLS, REOPEN_MS, RETRY_MS, Registry, refused};
use crate::{
    ConnectionId,
    event_queue::{AccountedChannel, DispatcherEvent, OpenSession, Payload, Replies, SendError},
    session::{SessionCounters, SessionInfo},
    slab_charge::SlabReservation,
};

/// A session, as its connection holds it. Dropping it ends the session.
#[derive(Debug)]
pub struct RegisteredSession {
    pub(super) registry: Registry,
    pub(super) connection: ConnectionId,
    pub(super) info: Arc<SessionInfo>,
    pub(super) account: Arc<SessionCounters>,
    pub(super) memory: ledger::MemoryAccount,
    /// Memory of the channel, until it is freed.
    pub(super) slab: Option<SlabReservation>,
    pub(super) opened: SessionOpened,
}

impl RegisteredSession {
    pub(super) fn begin(
        &self,
        takes_over: Option<ConnectionId>,
        replies: Option<Replies>,
    ) -> Result<(), SessionRefused> {
        let (info, account) = (Arc::clone(&self.info), Arc::clone(&self.account));
        let opening = OpenSession { connection: self.connection, info, account, takes_over, replies };
        self.send(DispatcherEvent::Open(opening))
    }

    fn send(&self, event: DispatcherEvent) -> Result<(), SessionRefused> {
        let refuse = |error: SendError| refused(RefusalCode::Draining, error.to_string());
        self.registry.0.dispatcher.send(event).map_err(refuse)
    }

    /// Returns the limits that the client gets at opening.
    #[must_use]
    pub fn opened(&self) -> &SessionOpened {
        &self.opened
    }

    /// Returns the identity of the session.
    #[must_use]
    pub fn info(&self) -> &SessionInfo {
        &self.info
    }

    /// Returns the usage of the session.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        self.account.stats()
    }

    /// Whether the dispatcher closed the session or another connection resumed it; this one must then close.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.account.is_closed()
    }

    /// Reserves `bytes` of the tenant's quota for a message, preferably before its payload is read.
    ///
    /// # Errors
    /// Returns the refusal for the client if the quota is used up.
    pub fn reserve(&self, call: &CallHeader, bytes: u64) -> Result<MemoryReservation, ReplyHeader> {
        self.memory.charge(bytes).map_err(|_| self.refuse(call, CallStatus::Quota))
    }

    /// Sends a remote call to the dispatcher.
    ///
    /// # Errors
    /// Returns the refusal for the client if the call is not accepted.
    pub fn call(&self, header: CallHeader, payload: Payload) -> Result<(), ReplyHeader> {
        if !self.account.begin_call(MAX_CALLS) {
            return Err(self.refuse(&header, CallStatus::Busy));
        }
        let sent = self.registry.0.dispatcher.send(DispatcherEvent::Call {
            connection: self.connection,
            header,
            payload,
        });
        sent.map_err(|error| {
            self.account.end_call();
            let status = if error == SendError::Full { CallStatus::Busy } else { CallStatus::Draining };
            self.refuse(&header, status)
        })
    }

    fn refuse(&self, call: &CallHeader, status: CallStatus) -> ReplyHeader {
        self.account.refused();
        ReplyHeader::refusal(call, status, RETRY_MS)
    }

    /// Creates a channel with a slab of at least `slab_bytes`, in place of an older one. Sends the executor's
    /// end to the dispatcher after `give` has given the other end to the client.
    ///
    /// For a moment both slabs exist, but only the new one counts towards the quota. The slab of a closed
    /// session counts until its memory is freed.
    ///
    /// # Errors
    /// Returns the refusal for the client.
    pub fn channel(
        &mut self,
        slab_bytes: u64,
        give: impl FnOnce(&ExecutorChannel) -> Result<(), SessionRefused>,
    ) -> Result<(), SessionRefused> {
        let geometry = Geometry::rounded(slab_bytes, MAX_CALLS)
            .map_err(|error| refused(RefusalCode::Malformed, error.to_string()))?;
        let before = self.slab.as_ref().map_or(0, SlabReservation::bytes);
        let bytes = geometry.region_bytes();
        let held = self.hold_slab(bytes)?;
        let made = ExecutorChannel::create(geometry)
            .map_err(|error| SessionRefused {
                retry_after_ms: REOPEN_MS,
                ..refused(RefusalCode::Busy, error.to_string())
            })
            .and_then(|channel| give(&channel).map(|()| channel));
        let channel = made.inspect_err(|_| {
            // The old size is smaller, so this cannot fail.
            let _ = held.resize(before);
        })?;
        self.account.set_slab_bytes(geometry.slab_bytes);
        self.send(DispatcherEvent::Channel {
            connection: self.connection,
            channel: AccountedChannel { channel, _held: held },
        })
    }

    fn hold_slab(&mut self, bytes: u64) -> Result<SlabReservation, SessionRefused> {
        let held = self.try_hold_slab(bytes).or_else(|_| {
            // Discarded channels may hold the missing memory.
            self.registry.empty_discarded();
            self.try_hold_slab(bytes)
        });
        held.map_err(|full| {
            let message = format!(
                "a channel of {bytes} bytes exceeds what remains of the {} bytes of {}: request less, or \
                 close other sessions",
                full.limit_bytes, full.account
            );
            refused(RefusalCode::Quota, message)
        })
    }

    fn try_hold_slab(&mut self, bytes: u64) -> Result<SlabReservation, OutOfBudget> {
        match &self.slab {
            Some(held) => held.resize(bytes).map(|()| held.clone()),
            None => Ok(self.slab.insert(SlabReservation::new(self.memory.charge(bytes)?)).clone()),
        }
    }
}

impl Drop for RegisteredSession {
    fn drop(&mut self) {
        self.registry.remove_session(self.connection);
    }
}
