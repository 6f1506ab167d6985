//! The ZeroMQ socket: opened, and read one protocol message at a time.

use std::time::Duration;

use shmproto::{codec::Wire as _, message::ToGateway};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketEvent, SocketOptions, ZmqMessage,
};

use super::{Endpoint, remote::tunnel::Tunnel};

/// How long one try to reach a socket of this host may take.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// An open connection.
pub(super) struct ExecutorSocket {
    pub(super) send: DealerSendHalf,
    pub(super) receive: DealerRecvHalf,
    pub(super) monitor: futures::channel::mpsc::Receiver<SocketEvent>,
    /// What carries the bytes to another host.
    _tunnel: Option<Tunnel>,
}

/// Whom the task connects to, and as whom.
#[derive(Debug, Clone)]
pub(super) struct ConnectTarget {
    pub(super) door: Endpoint,
    /// Of this gateway.
    pub(super) instance: u64,
    /// Who says nothing for so long is lost.
    pub(super) silence: Duration,
}

impl ExecutorSocket {
    /// Connects to the executor's ROUTER, and says nothing yet.
    pub(super) async fn open(peer: &ConnectTarget) -> Result<Self, String> {
        // Who is far away is given as long as silence is borne: greetings travel there and back.
        let (socket, limit, tunnel) = match &peer.door {
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

/// The one protocol message that a ZeroMQ message holds.
pub(super) fn read(message: &ZmqMessage) -> Result<ToGateway, String> {
    let frame = match (message.get(0), message.len()) {
        (Some(frame), 1) => frame,
        (_, frames) => {
            return Err(format!("it sent a message of {frames} frames where one is expected"));
        }
    };
    ToGateway::from_bytes(frame).map_err(|error| format!("it sent a message that cannot be read: {error}"))
}
