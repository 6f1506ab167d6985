//! The ZeroMQ socket: opened, and read one protocol message at a time.

use std::time::Duration;

use shmproto::{codec::Wire as _, message::ToGateway};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketEvent, SocketOptions, ZmqMessage,
};

/// How long one try to reach the socket may take.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// An open connection.
pub(super) struct Wire {
    pub(super) send: DealerSendHalf,
    pub(super) receive: DealerRecvHalf,
    pub(super) monitor: futures::channel::mpsc::Receiver<SocketEvent>,
}

/// Whom the task connects to, and as whom.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) endpoint: String,
    /// Of this gateway.
    pub(super) instance: u64,
    /// Who says nothing for so long is lost.
    pub(super) silence: Duration,
}

impl Wire {
    /// Connects to a ROUTER, and says nothing yet.
    pub(super) async fn open(endpoint: &str) -> Result<Self, String> {
        let mut options = SocketOptions::default();
        options.connect_timeout(CONNECT_TIMEOUT);
        let mut socket = DealerSocket::with_options(options);
        let monitor = socket.monitor();
        let connected = socket.connect(endpoint).await;
        connected.map_err(|error| format!("connecting to its socket failed: {error}"))?;
        let (send, receive) = socket.split();
        Ok(Self { send, receive, monitor })
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
