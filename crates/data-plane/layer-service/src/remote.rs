//! Server for ZeroMQ clients: over TLS from other hosts, or over a private Unix socket from this one.
//!
//! ZMTP is implemented in this process, so no other socket library sees a tenant's bytes. A message is copied
//! once, from the TLS record into the buffer from which the dispatcher computes. Plain TCP is never offered.
//!
//! # Layout
//!
//! - `accept`: listening, and the tasks of connections; `handshakes`: connections without a session
//! - `handshake`: from the first byte to an open session, under one deadline
//! - `connection`: a session: calls in, answers out
//! - `gateways`: connections of remote gateways, which use the executor
//! - `link`, `send_queue`: bytes to events and messages to bytes, in both directions at once
//!
//! # Principles
//!
//! - A key or certificate identifies a client; ZMTP identities are ignored. An answer goes to its connection.
//! - One thread serves all connections and waits for none. Each has bounded queues in both directions. A
//!   client that takes no answers is not read from, and is disconnected after a while.
//! - All resources of a connection are freed when its task ends, for any reason.

mod accept;
mod connection;
mod gateways;
mod handshake;
mod handshakes;
mod link;
mod send_queue;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::unix::net::UnixListener,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use shmproto::{
    private_socket::{BindError, PrivateSocket},
    remote_executor,
};
use tokio::{
    sync::{oneshot, watch},
    time::sleep,
};
use tokio_rustls::TlsAcceptor;

pub use self::gateways::GatewayAccess;
use self::{connection::ConnectionUpdate, gateways::Gateways, handshakes::Handshakes};
use super::{
    auth::Authenticator,
    base_files::Blobs,
    registry::Registry,
    tls::{ClientCertificates, TlsError, TlsFiles, server_config},
};

const READERS: usize = 2;

/// Addresses and timeouts of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSettings {
    /// Address and certificates for clients of other hosts.
    pub tls: Option<(SocketAddr, TlsFiles)>,
    /// Remote gateways that may use the executor; `None` admits none.
    pub gateways: Option<GatewayAccess>,
    /// Path of the private socket for processes of this user.
    pub private_socket: Option<PathBuf>,
    /// Time limit from the first byte to an open session.
    pub handshake: Duration,
    /// Maximum number of connections without a session; a new one evicts the oldest.
    pub handshakes: usize,
    /// Silence after which a client gets a heartbeat, repeated at this interval.
    pub ping_every: Duration,
    /// Silence after which a client is disconnected.
    pub silence: Duration,
    /// Maximum time that a client may take no answers.
    pub stuck: Duration,
}

impl Default for RemoteSettings {
    fn default() -> Self {
        Self {
            tls: None,
            gateways: None,
            private_socket: None,
            handshake: Duration::from_secs(10),
            handshakes: 256,
            ping_every: Duration::from_secs(15),
            silence: Duration::from_secs(60),
            stuck: Duration::from_secs(10),
        }
    }
}

/// Services that the server uses.
#[derive(Debug, Clone)]
pub struct RemoteParts {
    /// Registry of all sessions.
    pub registry: Registry,
    /// Source of the catalog and the client weights.
    pub blobs: Arc<dyn Blobs>,
    /// Authenticator of the clients.
    pub authenticator: Arc<Authenticator>,
    /// Maximum bytes of a call's rows.
    pub max_frame_bytes: usize,
}

/// Reason why the server cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum RemoteListenError {
    /// The address is open to other hosts, but neither keys nor certificates are required.
    #[error(
        "--layer-listen {0} is reachable from other hosts without keys or certificates; set \
         --layer-key-file or --layer-client-ca, or listen on 127.0.0.1"
    )]
    Unguarded(SocketAddr),
    /// The TLS files cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The system refuses to listen at the address.
    #[error("cannot listen for split clients on {address}: {cause}; set another --layer-listen")]
    Listen {
        /// Address from the settings.
        address: SocketAddr,
        /// Reason why the system refused the address.
        cause: io::Error,
    },
    /// The private socket cannot be created.
    #[error("the layers' private socket: {0}")]
    Private(#[from] BindError),
    /// The directory for gateways' adapter files cannot be created.
    #[error("cannot make {} for adapters of gateways of other hosts: {cause}; make its parent writable", path.display())]
    Lent {
        /// Path of the directory.
        path: PathBuf,
        /// Reason why the system refused the address.
        cause: io::Error,
    },
    /// The thread or its event loop cannot be started.
    #[error("cannot start the thread for split clients: {0}; the system may be out of threads or files")]
    Thread(io::Error),
}

#[derive(Debug)]
struct RemoteShared {
    settings: RemoteSettings,
    registry: Registry,
    blobs: Arc<dyn Blobs>,
    authenticator: Arc<Authenticator>,
    max_frame_bytes: usize,
    handshakes: Handshakes,
    gateways: Option<Gateways>,
    news: watch::Sender<ConnectionUpdate>,
}

/// The running server and its thread; dropping it closes the server and all its sessions.
#[derive(Debug)]
pub struct RemoteServer {
    address: Option<SocketAddr>,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Listeners {
    tls: Option<(TcpListener, TlsAcceptor)>,
    unix: Option<(PrivateSocket, UnixListener)>,
}

impl RemoteServer {
    /// Starts listening, and serves on a thread of its own.
    ///
    /// # Errors
    /// Fails if the address is unguarded, or the system or the certificates prevent it.
    pub fn open(settings: RemoteSettings, parts: RemoteParts) -> Result<Self, RemoteListenError> {
        let listeners = Listeners::bind(&settings, &parts.authenticator)?;
        let bound = listeners.tls.as_ref().map(|(listener, _)| listener.local_addr());
        let address = bound.transpose().map_err(RemoteListenError::Thread)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(READERS)
            .thread_name("layer-reader")
            .build()
            .map_err(RemoteListenError::Thread)?;
        let RemoteParts { registry, blobs, authenticator, max_frame_bytes } = parts;
        let (handshakes, news) = (Handshakes::default(), watch::Sender::default());
        let gateways = settings.gateways.clone().map(|access| {
            let path = access.lent.clone();
            Gateways::open(access).map_err(|cause| RemoteListenError::Lent { path, cause })
        });
        let gateways = gateways.transpose()?;
        let shared = RemoteShared {
            settings,
            registry,
            blobs,
            authenticator,
            max_frame_bytes,
            handshakes,
            gateways,
            news,
        };
        let (close, closed) = oneshot::channel();
        let serve = move || runtime.block_on(listeners.serve(Arc::new(shared), closed));
        let thread = thread::Builder::new().name("layer-door".into()).spawn(move || {
            if let Err(error) = serve() {
                tracing::error!(%error, "the listener for split clients failed; no client can connect");
            }
        });
        let thread = Some(thread.map_err(RemoteListenError::Thread)?);
        Ok(Self { address, close: Some(close), thread })
    }

    /// Returns the address of the TLS listener, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for RemoteServer {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            // The thread has logged its error.
            let _ = thread.join();
        }
    }
}

impl Listeners {
    fn bind(settings: &RemoteSettings, authenticator: &Authenticator) -> Result<Self, RemoteListenError> {
        let tls = settings.tls.as_ref().map(|(address, files)| {
            let is_guarded = authenticator.asks_for_keys() || files.client_ca.is_some();
            if !is_guarded && !address.ip().is_loopback() {
                return Err(RemoteListenError::Unguarded(*address));
            }
            let asked = match authenticator.asks_for_keys() {
                true => ClientCertificates::Optional,
                false => ClientCertificates::Required,
            };
            let protocols = settings.gateways.iter().map(|_| remote_executor::ALPN.to_vec()).collect();
            let acceptor = TlsAcceptor::from(server_config(files, asked, protocols)?);
            let failed = |cause| RemoteListenError::Listen { address: *address, cause };
            Ok((TcpListener::bind(address).map_err(failed)?, acceptor))
        });
        let unix = settings.private_socket.as_ref().map(|path| PrivateSocket::bind(path));
        Ok(Self { tls: tls.transpose()?, unix: unix.transpose()? })
    }

    /// Serves until the server is dropped; the tasks of connections end with the runtime.
    async fn serve(self, shared: Arc<RemoteShared>, closed: oneshot::Receiver<()>) -> io::Result<()> {
        if let Some((listener, acceptor)) = self.tls {
            listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(listener)?;
            tokio::spawn(accept::tls(listener, acceptor, Arc::clone(&shared)));
        }
        // The file of the socket is removed when this function returns.
        let _socket = match self.unix {
            None => None,
            Some((socket, listener)) => {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                tokio::spawn(accept::unix(listener, Arc::clone(&shared)));
                Some(socket)
            }
        };
        tokio::select! {
            _ = closed => {}
            () = shared.follow() => {}
        }
        Ok(())
    }
}

impl RemoteShared {
    /// Reports changes to the connections, forever.
    async fn follow(&self) {
        loop {
            sleep(security::keys::LOOK_EVERY).await;
            let have_keys_changed = self.authenticator.refresh_keys();
            let is_draining = self.registry.is_draining();
            self.news.send_if_modified(|news| {
                let before = *news;
                news.keys += u64::from(have_keys_changed);
                news.is_draining = is_draining;
                *news != before
            });
        }
    }
}
