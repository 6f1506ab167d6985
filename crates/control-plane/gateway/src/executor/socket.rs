//! The ZeroMQ socket: opens it, and decodes one protocol message at a time.

use std::time::Duration;

use shmproto::{codec::Wire as _, message::ToGateway};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketEvent, SocketOptions, ZmqMessage,
};

use super::{Endpoint, remote::tunnel::Tunnel};

/// Timeout of one connection attempt to a socket on this host.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) struct ExecutorSocket {
    pub(super) send: DealerSendHalf,
    pub(super) receive: DealerRecvHalf,
    pub(super) monitor: futures::channel::mpsc::Receiver<SocketEvent>,
    /// Tunnel to another host, kept open while the socket lives.
    _tunnel: Option<Tunnel>,
}

#[derive(Debug, Clone)]
pub(super) struct ConnectTarget {
    pub(super) endpoint: Endpoint,
    /// Random id of this gateway.
    pub(super) instance: u64,
    /// Silence after which the executor counts as lost.
    pub(super) silence: Duration,
}

impl ExecutorSocket {
    /// Connects to the executor's ROUTER without sending a message.
    pub(super) async fn open(peer: &ConnectTarget) -> Result<Self, String> {
        // A remote executor gets the longer timeout, because the greetings cross the network.
        let (socket, limit, tunnel) = match &peer.endpoint {
            Endpoint::Socket(socket) => (socket.as_path(), CONNECT_TIMEOUT, None),
            Endpoint::Far(far) => {
                let tunnel = far.tunnel().await.map_err(|error| error.to_string())?;
                (far.socket(), peer.silence, Some(tunnel))
            }
        };
        let mut options = SocketOptions::default();
        options.connect_timeout(limit);
        let mut dealer = DealerSocket::with_options(options);
        let monitor = dealer.monitor();
        let connected = dealer.connect(&format!("ipc://{}", socket.display())).await;
        connected.map_err(|error| format!("connecting to its socket failed: {error}"))?;
        let (send, receive) = dealer.split();
        Ok(Self { send, receive, monitor, _tunnel: tunnel })
    }
}

/// Decodes the one protocol message in a ZeroMQ message.
pub(super) fn read(message: &ZmqMessage) -> Result<ToGateway, String> {
    let frame = match (message.get(0), message.len()) {
        (Some(frame), 1) => frame,
        (_, frames) => {
            return Err(format!("it sent a message of {frames} frames where one is expected"));
        }
    };
    ToGateway::from_bytes(frame).map_err(|error| format!("it sent an unreadable message: {error}"))
}
