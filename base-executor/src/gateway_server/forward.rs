//! Sends the messages of a gateway's bounded queue to its socket.
//!
//! The ZeroMQ library buffers up to 100,000 messages per peer and does not report their number. Each frame
//! therefore holds a permit for its bytes, released when the library drops the written frame. At most
//! [`WINDOW_BYTES`] are unwritten.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use shmproto::{codec::Wire as _, message::ToGateway};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use zeromq::{RouterSendHalf, SocketSend as _, ZmqMessage, util::PeerIdentity};

/// Maximum unwritten bytes per gateway in the ZeroMQ library.
const WINDOW_BYTES: u32 = 4 << 20;

/// Time after which a gateway that reads nothing is disconnected.
const STALL: Duration = Duration::from_secs(10);

/// A frame that holds a permit until it is written.
struct OutgoingFrame {
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for OutgoingFrame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Sends messages of `queue` to `peer` until the queue is closed and written, or the peer is gone or does not
/// read. Returns the peer, whose connection is then over.
pub(super) async fn forward(
    peer: PeerIdentity,
    mut queue: mpsc::Receiver<ToGateway>,
    mut socket: RouterSendHalf,
) -> PeerIdentity {
    let window = Arc::new(Semaphore::new(WINDOW_BYTES as usize));
    while let Some(message) = queue.recv().await {
        let Some(frame) = frame(&message, &window).await else {
            tracing::warn!("a gateway has read nothing for {} s and is disconnected", STALL.as_secs());
            return peer;
        };
        if socket.send(address(&peer, frame)).await.is_err() {
            return peer;
        }
    }
    let _ = timeout(STALL, window.acquire_many(WINDOW_BYTES)).await;
    peer
}

/// Encodes the message with a permit for its bytes; `None` after [`STALL`] without one.
async fn frame(message: &ToGateway, window: &Arc<Semaphore>) -> Option<Bytes> {
    let bytes = message.to_bytes();
    let permits = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(WINDOW_BYTES);
    let permit = timeout(STALL, Arc::clone(window).acquire_many_owned(permits)).await.ok()?.ok()?;
    Some(Bytes::from_owner(OutgoingFrame { bytes, _permit: permit }))
}

pub(super) fn address(peer: &PeerIdentity, frame: Bytes) -> ZmqMessage {
    let mut message = ZmqMessage::from(frame);
    message.push_front(peer.clone().into());
    message
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_frame_waits_until_the_bytes_before_it_have_been_written() {
        let window = Arc::new(Semaphore::new(WINDOW_BYTES as usize));
        let large = ToGateway::Refused("x".repeat(2 * WINDOW_BYTES as usize));
        let small = ToGateway::Refused("small".to_owned());
        let first = frame(&large, &window).await.unwrap();
        assert!(frame(&small, &window).now_or_never().is_none(), "one frame may be larger than the window");
        drop(first);
        assert_eq!(frame(&small, &window).await.unwrap(), small.to_bytes());
        assert_eq!(window.available_permits(), WINDOW_BYTES as usize);
    }
}
