//! The compute thread's side of the layer service.
//!
//! ```text
//! poll: events, rings -> check -> batcher        run_due: batcher -> rows together -> base -> rows apart -> answers
//! ```
//!
//! # Layout
//!
//! - this file: sessions and calls come in, sessions go.
//! - `call`: what a call must be, and what is known of it while it waits.
//! - `client`: a session, and how its rows are read and answered.
//! - `run`: batches, and calls that join a resident pass.
//!
//! # Numbers of calls
//!
//! Within one connection (for a local session: one channel) a call's number is above those of all calls answered with rows;
//! others are refused with [`CallStatus::Sequence`](shmproto::layer::CallStatus::Sequence). A number that still waits is not computed twice: the newer call takes the
//! place of the older, which is not answered. After a connection was lost, and after a channel was replaced, what waited is
//! forgotten and the rule begins anew: the client repeats what it has no answer to. It gets the same bits, because nothing
//! is kept between calls.

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

/// When a call that was refused because too many wait is worth repeating.
const RETRY_MS: u32 = 1;

/// Sessions, the calls that wait, and what they wait for.
pub struct Dispatcher {
    sites: Vec<Site>,
    settings: LayerSettings,
    clock: Box<dyn Clock>,
    registry: Registry,
    inbox: Inbox,
    clients: BTreeMap<ConnectionId, ClientSession>,
    batcher: Batcher,
    /// Of background calls, beside requests.
    allowance: BackgroundBudget,
    rows: RowQuotas,
    calls: BTreeMap<CallId, AcceptedCall>,
    /// What joined the pass that is under way.
    joined: Option<CoBatchedCalls>,
    /// Sessions that are to go.
    gone: Vec<(ConnectionId, SessionFault)>,
    /// A call was taken in since the last wait: the next may be near.
    is_warm: bool,
    scratch: Scratch,
}

/// Calls in the course of a resident pass.
#[derive(Debug)]
struct CoBatchedCalls {
    call: SiteCall,
    rows: usize,
    since: Instant,
}

/// Memory kept between batches.
#[derive(Debug, Default)]
struct Scratch {
    events: VecDeque<DispatcherEvent>,
    taken: Vec<(ConnectionId, CallHeader)>,
    pieces: Vec<CallChunk>,
    /// Those of [`CoBatchedCalls`].
    joined: Vec<CallChunk>,
    x: Activations,
    rows: Vec<f32>,
    out: Vec<f32>,
}

/// Why the hub lets a session go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionFault {
    /// It broke the protocol.
    Violation(Violation),
    /// It does not take its answers.
    Slow,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (clients, calls) = (self.clients.len(), self.calls.len());
        f.debug_struct("Hub").field("clients", &clients).field("calls", &calls).finish_non_exhaustive()
    }
}

impl Dispatcher {
    /// Serves the sites of `base` to the sessions of `registry`, whose doors send to `inbox`.
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

    /// Rung by whatever the doors send; the compute thread's other sources may ring it too.
    #[must_use]
    pub fn bell(&self) -> Arc<Doorbell> {
        Arc::clone(self.inbox.bell())
    }

    /// Where doors send to.
    #[must_use]
    pub fn sender(&self) -> DispatcherSender {
        self.inbox.sender()
    }

    /// No call waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Calls that are not answered.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.calls.len()
    }

    /// Whether new calls are refused because the process is to end.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.registry.is_draining()
    }

    /// Sessions, and what they use.
    #[must_use]
    pub fn figures(&self) -> LayerStats {
        self.registry.figures()
    }

    /// From now on new calls and sessions are refused; calls that wait are answered.
    pub fn drain(&self) {
        self.registry.drain();
    }

    /// Takes in what doors and channels have brought.
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
            // As many as the ring has places: a client that refills it meanwhile has its next turn with the others.
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

    /// Waits until something has come, something is due, or it is `until`. After calls it looks for more for a moment before
    /// it sleeps.
    pub fn wait(&mut self, until: Option<Instant>) {
        let due = self.batcher.next_deadline(self.clock.now());
        self.wait_for_calls([due, until].into_iter().flatten().min());
    }

    fn wait_for_calls(&mut self, until: Option<Instant>) {
        let spin = if std::mem::take(&mut self.is_warm) { self.settings.spin } else { Duration::ZERO };
        let channels = self.clients.values().filter_map(|client| client.peer.channel());
        wait_any(self.inbox.bell(), channels, spin, until);
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
        let OpenSession { connection, facts, account, takes_over, replies } = opening;
        if let Some(old) = takes_over {
            self.forget(old);
        }
        self.rows.sweep(self.clock.now());
        let peer = replies.map_or(SessionPeer::Local(None), SessionPeer::Remote);
        self.clients.insert(connection, ClientSession::new(facts, account, peer));
    }

    /// A session has a new channel; what came through the old one is forgotten.
    fn connect(&mut self, connection: ConnectionId, channel: AccountedChannel) {
        self.forget_calls(connection);
        let replaced = match self.clients.get_mut(&connection) {
            Some(client) => client.begin(channel),
            // It was let go in the meantime.
            None => Some(channel),
        };
        replaced.into_iter().for_each(|channel| self.registry.discard(channel));
    }

    /// A session is over.
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
                self.rows.release(&client.facts.tenant, call.header.rows);
            }
        }
    }

    /// Closes those that broke the protocol or take nothing.
    fn disconnect_faulty(&mut self) {
        while let Some((connection, fault)) = self.gone.pop() {
            let Some(client) = self.clients.get(&connection) else { continue };
            let (number, tenant) = (client.facts.number.0, client.facts.tenant.clone());
            client.account.close();
            self.registry.counts().broken.add(1);
            match fault {
                SessionFault::Violation(violation) => {
                    tracing::warn!(session = number, %tenant, %violation, "a client broke the layer protocol and is let go");
                }
                SessionFault::Slow => {
                    tracing::warn!(session = number, %tenant, "a client does not take its answers and is let go");
                }
            }
            self.forget(connection);
        }
    }

    /// Takes a call in, or refuses it.
    fn accept_call(&mut self, connection: ConnectionId, header: CallHeader, payload: Option<Payload>) {
        let Some(client) = self.clients.get(&connection) else { return };
        self.is_warm = true;
        // A remote one was counted when its message came.
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
        self.rows.admit(&client.facts.tenant, header.rows, now)?;
        let rows = header.rows as usize;
        let row_elements = asked.input + asked.output;
        let new = NewCall { call: asked.call, connection, class: header.class, rows, row_elements };
        let id = self.batcher.add(new, now);
        client.await_answer(header, id);
        self.calls.insert(id, AcceptedCall::new(connection, *header, asked, now, draw, payload));
        failpoint::pass("layer.call_taken");
        Ok(())
    }

    /// Another call takes its place.
    fn forget_call(&mut self, connection: ConnectionId, id: CallId) {
        let (Some(call), Some(client)) = (self.calls.remove(&id), self.clients.get_mut(&connection)) else {
            return;
        };
        self.batcher.remove(call.asked.call, id);
        self.rows.release(&client.facts.tenant, call.header.rows);
        client.forget(&call.header);
    }
}
