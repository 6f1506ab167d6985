//! The server for gateways: a ZeroMQ ROUTER on an `ipc://` socket in a private directory.
//!
//! # Layout
//!
//! - `loading`: service while the model loads.
//! - `forward`: sending, with a bounded queue and a bounded window per gateway.
//! - here: receiving: hello first, then calls, each passed to its thread.
//!
//! # Principles
//!
//! - No message of a gateway, and no failure to read, stops the engine or another gateway.
//! - The transport has no identity beyond access to the directory. Numbers of connections are never reused.

mod forward;
mod loading;

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{StreamExt as _, channel::mpsc as monitor};
use shmproto::{
    codec::Wire as _,
    message::{
        AnswerKind, ErrorCode, Failed, Hello, LoadAdapter, PROTOCOL_VERSION, RequestId, ToExecutor,
        ToGateway, WireError,
    },
    private_socket::{BindError, PrivateSocket},
};
use std::sync::Arc;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::timeout,
};
use zeromq::{
    MultiPeerBackend, RouterRecvHalf, RouterSendHalf, RouterSocket, Socket as _, SocketEvent,
    SocketRecv as _, SocketSend as _, ZmqMessage, util::PeerIdentity,
};

use self::{
    forward::{address, forward},
    loading::WaitingGateways,
};
use crate::{
    engine::{
        event::{ConnectionId, EngineEvent, RequestKey},
        failure,
    },
    loader::LoadCall,
    systemd,
};

/// Queue capacity per gateway; a gateway whose queue overflows is disconnected.
const OUTBOX_MESSAGES: usize = 1024;

/// Time limit for writing the last messages at exit.
const FLUSH: Duration = Duration::from_secs(2);

/// Request id of errors about unreadable messages.
pub const NO_REQUEST: RequestId = RequestId::MAX;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ServiceError {
    /// The socket's path is unusable.
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("ZeroMQ cannot serve the socket: {0}; see the log and start again")]
    Socket(#[from] zeromq::ZmqError),
}

/// Channels from and to the other threads.
#[derive(Debug)]
pub struct ServerHandles<A> {
    pub engine: mpsc::Sender<EngineEvent<A>>,
    pub loader: mpsc::Sender<LoadCall>,
    /// Resolves when the compute thread has ended.
    pub engine_ended: oneshot::Receiver<()>,
    /// Starts the shutdown, with the time for running requests; a second value replaces the first.
    pub shutdown: mpsc::Receiver<Duration>,
}

/// A socket that is bound and not served yet.
pub struct BoundSocket {
    place: PrivateSocket,
    sender: RouterSendHalf,
    receiver: RouterRecvHalf,
    backend: Arc<dyn MultiPeerBackend>,
    departures: monitor::Receiver<SocketEvent>,
    waiting: WaitingGateways,
}

impl std::fmt::Debug for BoundSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Binds the socket at `path`.
///
/// # Errors
/// If the directory is not private, or the path is in use or unusable.
pub(crate) async fn bind(path: &Path) -> Result<BoundSocket, ServiceError> {
    let (place, listener) = PrivateSocket::bind(path)?;
    let mut socket = RouterSocket::new();
    socket.bind_listener(listener).await?;
    let departures = socket.monitor();
    let backend = socket.backend();
    let (sender, receiver) = socket.split();
    Ok(BoundSocket { place, sender, receiver, backend, departures, waiting: WaitingGateways::new() })
}

/// Serves gateways until the compute thread has ended.
pub async fn serve<A: Send + 'static>(bound: BoundSocket, servers: ServerHandles<A>) {
    let BoundSocket { place, sender, receiver, backend, departures, waiting } = bound;
    let mut service = Service {
        sender,
        backend,
        engine: servers.engine,
        loader: servers.loader,
        peers: HashMap::new(),
        connections: 0,
        forwarders: JoinSet::new(),
    };
    for (peer, instance) in waiting {
        service.connect(peer, instance).await;
    }
    service.run(receiver, departures, servers.shutdown, servers.engine_ended).await;
    drop(place);
}

/// A gateway that has sent its hello.
struct GatewayPeer {
    connection: ConnectionId,
    instance: u64,
    /// Weak, so that the queue ends when the engine drops its sender.
    outbox: mpsc::WeakSender<ToGateway>,
}

struct Service<A> {
    sender: RouterSendHalf,
    backend: Arc<dyn MultiPeerBackend>,
    engine: mpsc::Sender<EngineEvent<A>>,
    loader: mpsc::Sender<LoadCall>,
    peers: HashMap<PeerIdentity, GatewayPeer>,
    /// Number of connections so far, which gives each its number.
    connections: u64,
    forwarders: JoinSet<(ConnectionId, PeerIdentity)>,
}

impl<A: Send + 'static> Service<A> {
    async fn run(
        mut self,
        mut receiver: RouterRecvHalf,
        mut departures: monitor::Receiver<SocketEvent>,
        mut shutdown: mpsc::Receiver<Duration>,
        mut engine_ended: oneshot::Receiver<()>,
    ) {
        loop {
            tokio::select! {
                message = receiver.recv() => match message {
                    Ok(message) => self.receive(message).await,
                    Err(error) => tracing::warn!(%error, "cannot receive a message"),
                },
                Some(event) = departures.next() => if let SocketEvent::Disconnected(peer) = event {
                    self.departed(&peer).await;
                },
                Some(Ok((connection, peer))) = self.forwarders.join_next() => self.cut(connection, &peer).await,
                Some(grace) = shutdown.recv() => {
                    systemd::stopping();
                    self.tell_engine(EngineEvent::Drain { until: Instant::now() + grace }).await;
                }
                _ = &mut engine_ended => break,
            }
        }
        // The engine has closed all queues; their remaining messages are still sent.
        let _ = timeout(FLUSH, async { while self.forwarders.join_next().await.is_some() {} }).await;
    }

    async fn receive(&mut self, message: ZmqMessage) {
        let Some((peer, frames)) = frames_of(message) else { return };
        let decoded = match frames.as_slice() {
            [frame] => ToExecutor::from_bytes(frame).map_err(|error| error.to_string()),
            frames => Err(format!("the message has {} frames; send one frame", frames.len())),
        };
        match decoded {
            Ok(ToExecutor::Hello(hello)) => self.hello(peer, &hello).await,
            Ok(message) => match self.peers.get(&peer) {
                Some(known) => self.dispatch(known.connection, message).await,
                None => {
                    self.refuse(&peer, "the first message must be Hello; reconnect and send it".to_owned())
                        .await
                }
            },
            Err(reason) => self.unreadable(&peer, frames.first(), &reason).await,
        }
    }

    async fn hello(&mut self, peer: PeerIdentity, hello: &Hello) {
        failpoint::pass("executor.hello");
        if let Some(reason) = version_refusal(hello) {
            self.refuse(&peer, reason).await;
            return;
        }
        match self.peers.get(&peer) {
            Some(known) if known.instance == hello.instance => {
                let greeted = EngineEvent::Greeted(known.connection);
                self.tell_engine(greeted).await;
            }
            _ => self.connect(peer, hello.instance).await,
        }
    }

    /// Begins a connection, which replaces the peer's previous one and any other of the same gateway
    /// instance. A gateway reconnects only after it gave up the earlier connection.
    async fn connect(&mut self, peer: PeerIdentity, instance: u64) {
        self.departed(&peer).await;
        let earlier = self.peers.iter().find(|(_, known)| known.instance == instance);
        if let Some((earlier, connection)) = earlier.map(|(peer, known)| (peer.clone(), known.connection)) {
            self.cut(connection, &earlier).await;
        }
        self.connections += 1;
        let connection = ConnectionId(self.connections);
        let (outbox, queue) = mpsc::channel(OUTBOX_MESSAGES);
        let forwarded = forward(peer.clone(), queue, self.sender.clone());
        self.forwarders.spawn(async move { (connection, forwarded.await) });
        self.peers.insert(peer, GatewayPeer { connection, instance, outbox: outbox.downgrade() });
        tracing::info!(?connection, "a gateway connected");
        self.tell_engine(EngineEvent::Connected { connection, outbox }).await;
    }

    async fn dispatch(&mut self, connection: ConnectionId, message: ToExecutor) {
        let event = match message {
            ToExecutor::Generate(request) => {
                EngineEvent::Generate { connection, request, received_at: Instant::now() }
            }
            ToExecutor::Cancel(request) => EngineEvent::Cancel(RequestKey { connection, request }),
            ToExecutor::UnloadAdapter(call) => EngineEvent::UnloadAdapter { connection, call },
            ToExecutor::GetStats(request) => EngineEvent::GetStats(RequestKey { connection, request }),
            ToExecutor::WatchBlocks => EngineEvent::WatchBlocks(connection),
            ToExecutor::LoadAdapter(call) => return self.load(connection, call).await,
            ToExecutor::Hello(_) => return,
        };
        self.tell_engine(event).await;
    }

    async fn load(&mut self, connection: ConnectionId, call: LoadAdapter) {
        let request = call.request;
        let Some(known) = self.peers.values().find(|known| known.connection == connection) else { return };
        let outbox = known.outbox.clone();
        let full = match self.loader.try_send(LoadCall { connection, call, outbox }) {
            Ok(()) => return,
            Err(_) => "too many adapters wait to be loaded; try again later".to_owned(),
        };
        let error = WireError { code: ErrorCode::QueueFull, message: full };
        self.reply(connection, ToGateway::Failed(Failed { request, error })).await;
    }

    /// Reports an unreadable message, with the request id if that is readable.
    async fn unreadable(&mut self, peer: &PeerIdentity, frame: Option<&Bytes>, reason: &str) {
        let message =
            format!("cannot read the message: {reason}; use gateway and base-executor of the same release");
        let Some(connection) = self.peers.get(peer).map(|known| known.connection) else {
            self.refuse(peer, message).await;
            return;
        };
        let error = WireError { code: ErrorCode::InvalidRequest, message };
        self.reply(connection, report(frame.map_or(&[], |frame| frame), error)).await;
    }

    /// Queues an answer that does not come from the engine.
    async fn reply(&mut self, connection: ConnectionId, answer: ToGateway) {
        let Some((peer, known)) = self.peers.iter().find(|(_, known)| known.connection == connection) else {
            return;
        };
        let sent = known.outbox.upgrade().is_some_and(|outbox| outbox.try_send(answer).is_ok());
        if !sent {
            let peer = peer.clone();
            self.cut(connection, &peer).await;
        }
    }

    async fn refuse(&mut self, peer: &PeerIdentity, reason: String) {
        refuse(&mut self.sender, &*self.backend, peer, reason).await;
        self.departed(peer).await;
    }

    /// Ends a connection whose forwarder has ended, unless its peer has begun another.
    async fn cut(&mut self, connection: ConnectionId, peer: &PeerIdentity) {
        if self.peers.get(peer).is_some_and(|known| known.connection == connection) {
            self.backend.peer_disconnected(peer);
            self.departed(peer).await;
        }
    }

    async fn departed(&mut self, peer: &PeerIdentity) {
        if let Some(GatewayPeer { connection, .. }) = self.peers.remove(peer) {
            tracing::info!(?connection, "a gateway disconnected");
            self.tell_engine(EngineEvent::Disconnected(connection)).await;
        }
    }

    /// Sends the engine an event, and waits while its queue is full. The engine empties the queue before
    /// every step; meanwhile messages wait in the sockets. If the engine has ended, this loop ends too.
    async fn tell_engine(&self, event: EngineEvent<A>) {
        let _ = self.engine.send(event).await;
    }
}

/// Splits a message into its sender and its frames.
fn frames_of(message: ZmqMessage) -> Option<(PeerIdentity, Vec<Bytes>)> {
    let mut frames = message.into_vec();
    if frames.is_empty() {
        return None;
    }
    let peer = frames.remove(0).try_into().ok()?;
    Some((peer, frames))
}

/// Returns the reason to refuse a hello, if there is one.
fn version_refusal(hello: &Hello) -> Option<String> {
    (hello.version != PROTOCOL_VERSION).then(|| {
        format!(
            "the gateway uses protocol version {} and the base-executor version {PROTOCOL_VERSION}; \
             install both from one release",
            hello.version
        )
    })
}

/// Sends a refusal and ends the connection, because a peer without a hello has no bounded queue.
async fn refuse(
    sender: &mut RouterSendHalf,
    backend: &dyn MultiPeerBackend,
    peer: &PeerIdentity,
    reason: String,
) {
    tracing::warn!(reason, "refused a peer");
    let refusal = Bytes::from(ToGateway::Refused(reason).to_bytes());
    let _ = sender.send(address(peer, refusal)).await;
    backend.peer_disconnected(peer);
}

/// Returns the answer to an undecodable message.
fn report(bytes: &[u8], error: WireError) -> ToGateway {
    match ToExecutor::request_in(bytes) {
        Some((request, AnswerKind::Outputs)) => ToGateway::Outputs(vec![failure(request, error)]),
        Some((request, AnswerKind::Reply)) => ToGateway::Failed(Failed { request, error }),
        None => ToGateway::Failed(Failed { request: NO_REQUEST, error }),
    }
}
