//! Bytes between a private socket of our own and an executor's door.
//!
//! ```text
//! DEALER --ipc--> our socket --carrier--> TLS ... door --ipc--> the executor's ROUTER
//! ```
//!
//! The socket listens for a moment: once the DEALER has come, it is gone. The tunnel lasts as long as what holds it: dropped, it ends
//! at once and both sides notice, also where the network is stuck.

use std::io;

use shmproto::{
    private_socket::{BindError, PrivateSocket},
    remote_executor::RemoteRequest,
};
use tokio::{io::copy_bidirectional_with_sizes, net::UnixListener, task::JoinSet};

use super::{RemoteEndpoint, RemoteError, TlsTunnel};

/// Bytes that are on their way through this process, each way.
const TUNNEL_BYTES: usize = 64 << 10;

/// A tunnel; dropped, it ends.
#[derive(Debug)]
pub(in crate::executor) struct Tunnel(#[expect(dead_code, reason = "held, not used")] JoinSet<()>);

impl RemoteEndpoint {
    /// Opens a tunnel, and listens for the one who connects to [`RemoteEndpoint::socket`] next.
    pub(in crate::executor) async fn tunnel(&self) -> Result<Tunnel, RemoteError> {
        let stream = self.open(&RemoteRequest::Tunnel).await?;
        let (place, listener) = PrivateSocket::bind(&self.0.socket)?;
        let listener = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
        let bind = |cause| BindError::Io { action: "listen at", path: self.0.socket.clone(), cause };
        let listener = listener.map_err(bind)?;
        let mut carrier = JoinSet::new();
        carrier.spawn(async move {
            if let Err(error) = relay(place, listener, stream).await {
                tracing::debug!(%error, "a tunnel to an executor has ended");
            }
        });
        Ok(Tunnel(carrier))
    }
}

async fn relay(place: PrivateSocket, listener: UnixListener, mut stream: TlsTunnel) -> io::Result<()> {
    let (mut own, _) = listener.accept().await?;
    drop((listener, place));
    copy_bidirectional_with_sizes(&mut own, &mut stream, TUNNEL_BYTES, TUNNEL_BYTES).await.map(drop)
}
