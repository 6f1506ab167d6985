//! An executor on another host, behind its TLS listener.
//!
//! - this module: a connection to the listener, opened for one purpose.
//! - [`tunnel`]: carries the traffic of the executor's socket through TLS.
//! - [`adapter_files`]: uploads an adapter's files, which the other host lacks.
//!
//! The link works as for an executor on this host: it sends the same messages with the same socket library to
//! a private local socket, whose other end is the tunnel. So one place handles silence, losses and
//! reconnections.

pub(super) mod adapter_files;
pub(super) mod tunnel;

use std::{fmt, io, path::PathBuf, sync::Arc};

use rustls::{ClientConfig, pki_types::ServerName};
use security::{address::HostPort, socket};
use shmproto::{
    codec::Wire as _,
    private_socket::BindError,
    remote_executor::{self, RemoteReply, RemoteRequest},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

type TlsTunnel = TlsStream<TcpStream>;

#[derive(Debug, thiserror::Error)]
pub(super) enum RemoteError {
    #[error("cannot reach {address}: {cause}")]
    Unreachable { address: HostPort, cause: io::Error },
    #[error(
        "TLS with {address} failed ({cause}): --executor-ca must sign the executor's certificate, and \
         the executor's --layer-client-ca must sign --executor-cert"
    )]
    Tls { address: HostPort, cause: io::Error },
    #[error(
        "{0} accepts no gateways; add the name in this gateway's certificate to [layers] gateways \
         (--layer-gateways) there"
    )]
    NoGateways(HostPort),
    #[error("{address} refuses: {why}")]
    Refused { address: HostPort, why: String },
    #[error("{0} sent an unexpected answer; install both programs from one release")]
    Protocol(HostPort),
    #[error("{0} read or sent nothing for too long")]
    Silent(HostPort),
    #[error("the tunnel's own socket: {0}")]
    Socket(#[from] BindError),
    #[error("cannot read a file of the adapter: {0}")]
    File(#[source] io::Error),
}

/// Endpoint of an executor on another host; clones share it.
#[derive(Clone)]
pub struct RemoteEndpoint(Arc<RemoteAddress>);

struct RemoteAddress {
    to: HostPort,
    host: ServerName<'static>,
    tls: TlsConnector,
    /// Path of the local end of the tunnel, between the socket library and TLS.
    socket: PathBuf,
}

impl fmt::Debug for RemoteEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Far").field(&self.0.to).finish()
    }
}

impl RemoteEndpoint {
    /// Creates an endpoint for the listener at `to`. Returns `None` if no certificate can name that host.
    #[must_use]
    pub fn new(to: HostPort, mut tls: ClientConfig, socket: PathBuf) -> Option<Self> {
        tls.alpn_protocols = vec![remote_executor::ALPN.to_vec()];
        let host = ServerName::try_from(to.host.clone()).ok()?;
        Some(Self(Arc::new(RemoteAddress { to, host, tls: TlsConnector::from(Arc::new(tls)), socket })))
    }

    /// Address of the executor's host.
    #[must_use]
    pub fn address(&self) -> &HostPort {
        &self.0.to
    }

    #[must_use]
    pub fn socket(&self) -> &std::path::Path {
        &self.0.socket
    }

    /// Opens a connection for the request `ask`, and waits until it is admitted.
    async fn open(&self, ask: &RemoteRequest) -> Result<TlsTunnel, RemoteError> {
        let unreachable = |cause| RemoteError::Unreachable { address: self.0.to.clone(), cause };
        let tcp = TcpStream::connect((self.0.to.host.as_str(), self.0.to.port)).await.map_err(unreachable)?;
        socket::prepare(&tcp).map_err(unreachable)?;
        let connected = self.0.tls.connect(self.0.host.clone(), tcp).await;
        let mut stream = connected.map_err(|cause| self.failed(cause))?;
        if stream.get_ref().1.alpn_protocol() != Some(remote_executor::ALPN) {
            return Err(RemoteError::NoGateways(self.0.to.clone()));
        }
        self.write_bytes(&mut stream, &remote_executor::frame(ask)).await?;
        match self.answer(&mut stream).await? {
            RemoteReply::Admitted => Ok(stream),
            RemoteReply::Lent(_) => Err(RemoteError::Protocol(self.0.to.clone())),
            RemoteReply::Refused(why) => Err(RemoteError::Refused { address: self.0.to.clone(), why }),
        }
    }

    async fn write_bytes(&self, stream: &mut TlsTunnel, bytes: &[u8]) -> Result<(), RemoteError> {
        stream.write_all(bytes).await.map_err(|cause| self.failed(cause))?;
        stream.flush().await.map_err(|cause| self.failed(cause))
    }

    async fn answer(&self, stream: &mut TlsTunnel) -> Result<RemoteReply, RemoteError> {
        let protocol = || RemoteError::Protocol(self.0.to.clone());
        let mut first = [0; 4];
        stream.read_exact(&mut first).await.map_err(|cause| self.failed(cause))?;
        let mut body = vec![0; remote_executor::body_bytes(first).ok_or_else(protocol)?];
        stream.read_exact(&mut body).await.map_err(|cause| self.failed(cause))?;
        RemoteReply::from_bytes(&body).map_err(|_| protocol())
    }

    /// Distinguishes errors of TLS from a lost connection.
    fn failed(&self, cause: io::Error) -> RemoteError {
        let address = self.0.to.clone();
        match cause.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) {
            true => RemoteError::Tls { address, cause },
            false => RemoteError::Unreachable { address, cause },
        }
    }
}
