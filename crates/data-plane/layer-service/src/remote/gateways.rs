//! Remote gateways, which use this executor over TLS as a local gateway uses its socket.
//!
//! A connection whose handshake selects [`remote_executor::ALPN`](shmproto::remote_executor::ALPN) is a
//! gateway's. Only a certificate with a name from the settings is accepted: a gateway has full control of an
//! executor, so neither a key nor a tenant's certificate suffices. An accepted gateway gets a *tunnel* to the
//! executor's own socket (one protocol, one implementation of both ends), or sends adapter files
//! (`adapter_files`).

mod adapter_files;

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use shmproto::{
    codec::Wire,
    remote_executor::{self, RemoteReply, RemoteRequest},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes},
    net::{TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::server::TlsStream;

use super::{RemoteShared, handshake::HandshakeError};
use crate::tls;

/// Maximum number of gateway connections: each gateway has a tunnel, and another during a load.
const MAX_CONNECTIONS: usize = 64;
const TUNNEL_BYTES: usize = 64 << 10;
/// Time limit for sending a refusal.
const FAREWELL: Duration = Duration::from_secs(1);

/// Accepted gateways, and the resources that they may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayAccess {
    /// Names in the certificates of accepted gateways.
    pub names: Vec<String>,
    /// Path of the executor's own socket.
    pub socket: PathBuf,
    /// Directory for adapter files that gateways lend; emptied at start.
    pub lent: PathBuf,
    /// Maximum size of an adapter file.
    pub max_file_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Gateways {
    access: GatewayAccess,
    connections: Arc<Semaphore>,
}

impl Gateways {
    /// Empties the directory of lent files, and admits gateways from now on.
    pub(super) fn open(access: GatewayAccess) -> io::Result<Self> {
        adapter_files::clear(&access.lent)?;
        Ok(Self { access, connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)) })
    }
}

#[derive(Debug)]
pub(super) struct AdmittedGateway {
    stream: TlsStream<TcpStream>,
    ask: RemoteRequest,
    name: String,
    _connection: OwnedSemaphorePermit,
}

pub(super) fn is_gateway(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(remote_executor::ALPN)
}

/// Reads the gateway's request and checks its certificate. Touches no other state before that.
pub(super) async fn greet(
    mut stream: TlsStream<TcpStream>,
    shared: &RemoteShared,
) -> Result<AdmittedGateway, HandshakeError> {
    let ask = read::<RemoteRequest>(&mut stream).await?;
    let Some(gateways) = &shared.gateways else { return Err(HandshakeError::NotOpen) };
    let chain = stream.get_ref().1.peer_certificates();
    let name = chain.and_then(<[_]>::first).and_then(tls::common_name).unwrap_or_default().to_owned();
    match gateways.admit(&name) {
        Ok(connection) => Ok(AdmittedGateway { stream, ask, name, _connection: connection }),
        Err(why) => {
            shared.registry.count_refusal();
            tracing::warn!(certificate = name, why, "refused a gateway of another host");
            refuse(stream, why.clone()).await;
            Err(HandshakeError::Refused(why))
        }
    }
}

impl Gateways {
    fn admit(&self, name: &str) -> Result<OwnedSemaphorePermit, String> {
        if name.is_empty() {
            return Err(
                "a gateway needs a certificate ('holobiont cert --client NAME'); an API key is not enough"
                    .to_owned(),
            );
        }
        if !self.access.names.iter().any(|listed| listed == name) {
            return Err(format!(
                "the certificate of '{name}' may not use this executor: add it to [layers] gateways \
                 (--layer-gateways) there, or use another"
            ));
        }
        let connection = Arc::clone(&self.connections).try_acquire_owned();
        connection.map_err(|_| {
            format!("{MAX_CONNECTIONS} gateway connections are open, which is the limit; close some")
        })
    }
}

impl AdmittedGateway {
    /// Serves the request until the connection ends.
    pub(super) async fn serve(self, shared: &RemoteShared) {
        let Some(Gateways { access, .. }) = &shared.gateways else { return };
        let Self { stream, ask, name, _connection } = self;
        let ended = match ask {
            RemoteRequest::Tunnel => tunnel(stream, access, &name).await,
            RemoteRequest::Lend(files) => {
                adapter_files::serve(stream, &files, access, shared.settings.stuck).await
            }
        };
        if let Err(error) = ended {
            tracing::info!(gateway = name, %error, "a gateway connection failed");
        }
    }
}

/// Copies bytes in both directions. Each side may end its half.
async fn tunnel(mut stream: TlsStream<TcpStream>, access: &GatewayAccess, name: &str) -> io::Result<()> {
    let mut own = match UnixStream::connect(&access.socket).await {
        Ok(own) => own,
        Err(error) => {
            refuse(stream, format!("cannot reach the executor's own socket ({error}); see its log")).await;
            return Err(error);
        }
    };
    tracing::info!(gateway = name, "a gateway of another host connected");
    reply(&mut stream, &RemoteReply::Admitted).await?;
    let carried = copy_bidirectional_with_sizes(&mut stream, &mut own, TUNNEL_BYTES, TUNNEL_BYTES).await;
    tracing::info!(gateway = name, "a gateway of another host disconnected");
    carried.map(drop)
}

async fn read<M: Wire>(stream: &mut TlsStream<TcpStream>) -> io::Result<M> {
    let mut first = [0; 4];
    stream.read_exact(&mut first).await?;
    let bytes = remote_executor::body_bytes(first).ok_or(io::ErrorKind::InvalidData)?;
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).await?;
    M::from_bytes(&body).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

async fn reply(stream: &mut TlsStream<TcpStream>, answer: &RemoteReply) -> io::Result<()> {
    stream.write_all(&remote_executor::frame(answer)).await?;
    stream.flush().await
}

/// Sends a refusal. Then reads what the peer still sends: closing a connection with unread bytes would reset
/// it and lose the refusal.
async fn refuse(mut stream: TlsStream<TcpStream>, why: String) {
    let last_word = async {
        reply(&mut stream, &RemoteReply::Refused(why)).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    };
    // A peer that is gone does not get the refusal.
    let _ = timeout(FAREWELL, last_word).await;
}
