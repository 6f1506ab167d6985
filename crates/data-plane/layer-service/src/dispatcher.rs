//! The part of the layer service that runs on the compute thread.
//!
//! ```text
//! poll: events, rings -> check -> batcher
//! run_due: batcher -> rows together -> base -> rows apart -> answers
//! ```
//!
//! # Layout
//!
//! - this file: accepting sessions and calls, ending sessions
//! - `call`: checks of a call, and its state while it waits
//! - `client`: a session, and how its rows are read and answered
//! - `run`: batches, and calls that join a resident pass
//!
//! # Numbers of calls
//!
//! Within one connection (for a local session: one channel) a call's number must be above those of all calls
//! answered with rows; others are refused with
//! [`CallStatus::Sequence`](shmproto::layer::CallStatus::Sequence). A number that still waits is not computed
//! twice: the newer call replaces the older one, which gets no answer.
//!
//! After a connection was lost or a channel was replaced, waiting calls are dropped and numbers start anew:
//! the client repeats its unanswered calls. The repeated call gets the same bits, because the service keeps
//! no state between calls.

mod call;
mod client;
mod run;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::Activations;
use model::linear_sites::{EvaluateSites, Site, SiteCall};
use shmproto::{
    channel::{Doorbell, Violation, wait_any},
    layer::{CallHeader, CallStatus, ReplyHeader},
    message::LayerStats,
};

pub use self::run::ComputedRows;
use self::{
    call::{AcceptedCall, CallRefusal, ResolvedCall},
    client::{ClientSession, SessionPeer},
};
use super::{
    ConnectionId,
    batcher::{Batcher, NewCall},
    batching_policy::BackgroundBudget,
    call_queue::{CallChunk, CallId},
    event_queue::{AccountedChannel, DispatcherEvent, DispatcherSender, Inbox, OpenSession, Payload, Reply},
    quota::RowQuotas,
    registry::{MAX_CALLS, Registry},
    settings::LayerSettings,
};
use ::scheduling::clock::Clock;

/// Retry delay of a call that was refused because too many wait, in milliseconds.
const RETRY_MS: u32 = 1;

/// Sessions and their waiting calls, on the compute thread.
pub struct Dispatcher {
    sites: Vec<Site>,
    settings: LayerSettings,
    clock: Box<dyn Clock>,
    registry: Registry,
    inbox: Inbox,
    clients: BTreeMap<ConnectionId, ClientSession>,
    batcher: Batcher,
    /// Budget of background calls beside requests.
    allowance: BackgroundBudget,
    rows: RowQuotas,
    calls: BTreeMap<CallId, AcceptedCall>,
    /// Calls that joined the running pass.
    joined: Option<CoBatchedCalls>,
    gone: Vec<(ConnectionId, SessionFault)>,
    /// Whether a call was accepted since the last wait, so that the next may be near.
    is_warm: bool,
    scratch: Scratch,
}

#[derive(Debug)]
struct CoBatchedCalls {
    call: SiteCall,
    rows: usize,
    since: Instant,
}

/// Buffers that are reused between batches.
#[derive(Debug, Default)]
struct Scratch {
    events: VecDeque<DispatcherEvent>,
    taken: Vec<(ConnectionId, CallHeader)>,
    pieces: Vec<CallChunk>,
    /// Chunks of the [`CoBatchedCalls`].
    joined: Vec<CallChunk>,
    x: Activations,
    rows: Vec<f32>,
    out: Vec<f32>,
}

/// Reason why the dispatcher closes a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionFault {
    Violation(Violation),
    Slow,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (clients, calls) = (self.clients.len(), self.calls.len());
        f.debug_struct("Dispatcher").field("clients", &clients).field("calls", &calls).finish_non_exhaustive()
    }
}

impl Dispatcher {
    /// Serves the sites of `base` to the sessions of `registry`, whose events arrive in `inbox`.
    #[must_use]
    pub fn new(
        base: &dyn EvaluateSites,
        settings: LayerSettings,
        registry: Registry,
        inbox: Inbox,
        clock: Box<dyn Clock>,
    ) -> Self {
        let sites = base.sites().to_vec();
        Self {
            settings,
            clock,
            registry,
            inbox,
            clients: BTreeMap::new(),
            batcher: Batcher::new(settings.batching, sites.len()).over(base.floors()),
            sites,
            allowance: BackgroundBudget::new(settings.training_share),
            rows: RowQuotas::new(&settings.quotas),
            calls: BTreeMap::new(),
            joined: None,
            gone: Vec::new(),
            is_warm: false,
            scratch: Scratch::default(),
        }
    }

    /// Returns the doorbell of all events; other sources of the compute thread may ring it too.
    #[must_use]
    pub fn doorbell(&self) -> Arc<Doorbell> {
        Arc::clone(self.inbox.doorbell())
    }

    /// Returns a sender of events to this dispatcher.
    #[must_use]
    pub fn sender(&self) -> DispatcherSender {
        self.inbox.sender()
    }

    /// Whether no call waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Returns the number of unanswered calls.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.calls.len()
    }

    /// Whether new calls are refused because the process is shutting down.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.registry.is_draining()
    }

    /// Returns the stats of all sessions.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        self.registry.stats()
    }

    /// Refuses new calls and sessions from now on; waiting calls are still answered.
    pub fn drain(&self) {
        self.registry.drain();
    }

    /// Accepts the events and calls that have arrived.
    pub fn poll(&mut self) {
        self.give_up_joined();
        let mut events = std::mem::take(&mut self.scratch.events);
        self.inbox.drain_into(&mut events);
        for event in events.drain(..) {
            self.handle(event);
        }
        self.scratch.events = events;
        self.poll_rings();
        self.disconnect_faulty();
    }

    fn poll_rings(&mut self) {
        let mut taken = std::mem::take(&mut self.scratch.taken);
        for (&connection, client) in &mut self.clients {
            // Takes at most as many calls as the ring holds, so that a client cannot delay the others.
            for _ in 0..MAX_CALLS {
                match client.peer.next_call() {
                    Ok(Some(header)) => taken.push((connection, header)),
                    Ok(None) => break,
                    Err(violation) => {
                        self.gone.push((connection, SessionFault::Violation(violation)));
                        break;
                    }
                }
            }
        }
        for (connection, header) in taken.drain(..) {
            self.accept_call(connection, header, None);
        }
        self.scratch.taken = taken;
    }

    /// Waits for an event, a due call or `until`. After a call was accepted, the thread first spins briefly.
    pub fn wait(&mut self, until: Option<Instant>) {
        let due = self.batcher.next_deadline(self.clock.now());
        self.wait_for_calls([due, until].into_iter().flatten().min());
    }

    fn wait_for_calls(&mut self, until: Option<Instant>) {
        let spin = if std::mem::take(&mut self.is_warm) { self.settings.spin } else { Duration::ZERO };
        let channels = self.clients.values().filter_map(|client| client.peer.channel());
        wait_any(self.inbox.doorbell(), channels, spin, until);
    }

    fn handle(&mut self, event: DispatcherEvent) {
        match event {
            DispatcherEvent::Open(opening) => self.open(opening),
            DispatcherEvent::Call { connection, header, payload } => {
                self.accept_call(connection, header, Some(payload))
            }
            DispatcherEvent::Channel { connection, channel } => self.connect(connection, channel),
            DispatcherEvent::Close { connection } => self.forget(connection),
            DispatcherEvent::Drain => self.drain(),
        }
    }

    fn open(&mut self, opening: OpenSession) {
        let OpenSession { connection, info, account, takes_over, replies } = opening;
        if let Some(old) = takes_over {
            self.forget(old);
        }
        self.rows.sweep(self.clock.now());
        let peer = replies.map_or(SessionPeer::Local(None), SessionPeer::Remote);
        self.clients.insert(connection, ClientSession::new(info, account, peer));
    }

    /// Replaces the channel of a session, and drops the calls of the old one.
    fn connect(&mut self, connection: ConnectionId, channel: AccountedChannel) {
        self.forget_calls(connection);
        let replaced = match self.clients.get_mut(&connection) {
            Some(client) => client.begin(channel),
            // The session was closed in the meantime.
            None => Some(channel),
        };
        replaced.into_iter().for_each(|channel| self.registry.discard(channel));
    }

    fn forget(&mut self, connection: ConnectionId) {
        self.forget_calls(connection);
        let channel = self.clients.remove(&connection).and_then(|client| client.peer.into_channel());
        channel.into_iter().for_each(|channel| self.registry.discard(channel));
    }

    fn forget_calls(&mut self, connection: ConnectionId) {
        self.batcher.close(connection);
        let Some(client) = self.clients.get_mut(&connection) else { return };
        for id in client.take_waiting() {
            if let Some(call) = self.calls.remove(&id) {
                self.rows.release(&client.info.tenant, call.header.rows);
            }
        }
    }

    /// Closes sessions whose clients broke the protocol or do not take answers.
    fn disconnect_faulty(&mut self) {
        while let Some((connection, fault)) = self.gone.pop() {
            let Some(client) = self.clients.get(&connection) else { continue };
            let (number, tenant) = (client.info.number.0, client.info.tenant.clone());
            client.account.close();
            self.registry.counts().broken.add(1);
            match fault {
                SessionFault::Violation(violation) => {
                    tracing::warn!(session = number, %tenant, %violation, "a client broke the layer \
                        protocol and is disconnected");
                }
                SessionFault::Slow => {
                    tracing::warn!(session = number, %tenant, "a client does not read its answers and is \
                        disconnected");
                }
            }
            self.forget(connection);
        }
    }

    fn accept_call(&mut self, connection: ConnectionId, header: CallHeader, payload: Option<Payload>) {
        let Some(client) = self.clients.get(&connection) else { return };
        self.is_warm = true;
        // A remote call was counted when its message arrived.
        let has_place = payload.is_some() || client.account.begin_call(MAX_CALLS);
        let admitted = if has_place {
            self.admit(connection, &header, payload)
        } else {
            Err(CallRefusal { status: CallStatus::Busy, retry_after_ms: RETRY_MS })
        };
        let Err(CallRefusal { status, retry_after_ms }) = admitted else { return };
        let Some(client) = self.clients.get_mut(&connection) else { return };
        client.account.refused();
        if has_place {
            client.account.end_call();
        }
        let reply = Reply { header: ReplyHeader::refusal(&header, status, retry_after_ms), payload: None };
        if let Err(fault) = client.peer.reply(reply) {
            self.gone.push((connection, fault));
        }
    }

    fn admit(
        &mut self,
        connection: ConnectionId,
        header: &CallHeader,
        payload: Option<Payload>,
    ) -> Result<(), CallRefusal> {
        let now = self.clock.now();
        if self.is_draining() {
            return Err(CallStatus::Draining.into());
        }
        let asked = ResolvedCall::by(header, &self.sites, self.settings.quotas.tenant_rows)?;
        let Some(client) = self.clients.get_mut(&connection) else { return Err(CallStatus::Failed.into()) };
        let draw = client.check_payload(header, &asked, payload.as_ref())?;
        if let Some(older) = client.check_sequence(header.sequence)? {
            self.forget_call(connection, older);
        }
        let Some(client) = self.clients.get_mut(&connection) else { return Err(CallStatus::Failed.into()) };
        let payload = payload.map(|payload| payload.with_answer(&asked)).transpose()?;
        self.rows.admit(&client.info.tenant, header.rows, now)?;
        let rows = header.rows as usize;
        let row_elements = asked.input + asked.output;
        let new = NewCall { call: asked.call, connection, class: header.class, rows, row_elements };
        let id = self.batcher.add(new, now);
        client.await_answer(header, id);
        self.calls.insert(id, AcceptedCall::new(connection, *header, asked, now, draw, payload));
        failpoint::pass("layer.call_taken");
        Ok(())
    }

    /// Drops a call that a newer call with the same number replaces.
    fn forget_call(&mut self, connection: ConnectionId, id: CallId) {
        let (Some(call), Some(client)) = (self.calls.remove(&id), self.clients.get_mut(&connection)) else {
            return;
        };
        self.batcher.remove(call.asked.call, id);
        self.rows.release(&client.info.tenant, call.header.rows);
        client.forget(&call.header);
    }
}
