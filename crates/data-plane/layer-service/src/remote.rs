//! The door for clients that speak ZeroMQ: over TLS from other hosts, or over a private Unix socket from this one.
//!
//! ZMTP is spoken here, inside the process: nothing of a tenant's bytes goes through another socket library, and a
//! message is copied once, from the TLS record into the buffer that the hub computes from. Plain TCP is never offered.
//!
//! # Layout
//!
//! - `accept`: listening, and what becomes of a connection; `handshakes`: those without a session, so many and no more
//! - `handshake`: from the first byte to an open session, under one deadline
//! - `connection`: a session: calls in, answers out
//! - `gateways`: connections of gateways of other hosts, which drive the executor
//! - `link`, `send_queue`: bytes to events and messages to bytes, both ways at once
//!
//! # Principles
//!
//! - Who a client is comes from its key or certificate. ZMTP's identities are not looked at: an answer goes down the
//!   connection that its call came up.
//! - One thread serves all connections and waits for none of them: each has bounded queues both ways, and a client that
//!   takes no answers is not read from, and after a while let go.
//! - Whatever is held for a connection is free when its task ends, however it ends.

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

/// Threads that read blobs from a disk.
const READERS: usize = 2;

/// Where the door is, and its patience.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSettings {
    /// For clients of other hosts.
    pub tls: Option<(SocketAddr, TlsFiles)>,
    /// Which gateways of other hosts may drive the executor; none without.
    pub gateways: Option<GatewayAccess>,
    /// For processes of this user on this host.
    pub private_socket: Option<PathBuf>,
    /// Time for everything before a session is open.
    pub handshake: Duration,
    /// Connections that are in it; the oldest makes room for a new one.
    pub handshakes: usize,
    /// Silence after which a client is asked whether it is there, and then again.
    pub ping_every: Duration,
    /// Silence after which it is given up.
    pub silence: Duration,
    /// How long a client may take no answers.
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

/// What the door opens to.
#[derive(Debug, Clone)]
pub struct RemoteParts {
    /// Opens sessions.
    pub registry: Registry,
    /// What clients fetch.
    pub blobs: Arc<dyn Blobs>,
    /// Who may come in.
    pub authenticator: Arc<Authenticator>,
    /// Most bytes of a call's rows.
    pub max_frame_bytes: usize,
}

/// Why the door cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RemoteListenError {
    /// Anybody could come in.
    #[error(
        "--layer-listen {0} can be reached from other hosts, and anybody there could rent layers; \
         give --layer-key-file or --layer-client-ca, or listen on 127.0.0.1"
    )]
    Unguarded(SocketAddr),
    /// TLS cannot be spoken.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address cannot be listened on.
    #[error("cannot listen for layer clients on {address}: {cause}; give --layer-listen another address")]
    Listen {
        /// The address that was asked for.
        address: SocketAddr,
        /// What the system says.
        cause: io::Error,
    },
    /// The private socket cannot be made.
    #[error("the layers' private socket: {0}")]
    Private(#[from] BindError),
    /// No place for adapters' files.
    #[error("cannot make {} for adapters of gateways of other hosts: {cause}; make its parent writable", path.display())]
    Lent {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// No thread, or no way to wait for sockets.
    #[error("cannot start the layer clients' thread: {0}; the system may be out of threads or files")]
    Thread(io::Error),
}

/// What all connections share.
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

/// The open door, and its thread. Dropped, it is closed and all its sessions are over.
#[derive(Debug)]
pub struct RemoteServer {
    address: Option<SocketAddr>,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What is listened on.
struct Listeners {
    tls: Option<(TcpListener, TlsAcceptor)>,
    unix: Option<(PrivateSocket, UnixListener)>,
}

impl RemoteServer {
    /// Listens, and serves on a thread of its own.
    ///
    /// # Errors
    /// If it would let anybody in from anywhere, or the system or the certificates do not let it.
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
        let gateways = settings.gateways.clone().map(|door| {
            let path = door.lent.clone();
            Gateways::open(door).map_err(|cause| RemoteListenError::Lent { path, cause })
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
                tracing::error!(%error, "no layer client can connect any more");
            }
        });
        let thread = Some(thread.map_err(RemoteListenError::Thread)?);
        Ok(Self { address, close: Some(close), thread })
    }

    /// Where TLS is listened for.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for RemoteServer {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            // It has logged what it died of.
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

    /// Serves until the door's other half is gone; the tasks of connections end with the runtime.
    async fn serve(self, shared: Arc<RemoteShared>, closed: oneshot::Receiver<()>) -> io::Result<()> {
        if let Some((listener, acceptor)) = self.tls {
            listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(listener)?;
            tokio::spawn(accept::tls(listener, acceptor, Arc::clone(&shared)));
        }
        // The socket's file is removed when this returns.
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
    /// Tells connections what is new, for ever.
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
