//! A tunnel between a private local socket and an executor's TLS listener.
//!
//! ```text
//! DEALER --ipc--> local socket --relay--> TLS ... listener --ipc--> the executor's ROUTER
//! ```
//!
//! The local socket is removed as soon as the DEALER has connected. Dropping the tunnel ends it at once, and
//! both sides notice that, even if the network is stuck.

use std::io;

use shmproto::{
    private_socket::{BindError, PrivateSocket},
    remote_executor::RemoteRequest,
};
use tokio::{io::copy_bidirectional_with_sizes, net::UnixListener, task::JoinSet};

use super::{RemoteEndpoint, RemoteError, TlsTunnel};

/// Size of the relay's buffer in each direction, in bytes.
const TUNNEL_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(in crate::executor) struct Tunnel(#[expect(dead_code, reason = "held, not used")] JoinSet<()>);

impl RemoteEndpoint {
    /// Opens a tunnel, and listens for the next connection to [`RemoteEndpoint::socket`].
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
