//! Listening for connections, and their tasks from handshake to session.

use std::{io, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    RemoteShared,
    connection::{AdmittedClient, Connection},
    gateways::{self, AdmittedGateway},
    handshake::{ArrivedClient, HandshakeError, greet},
    handshakes::Handshake,
    link::ZmtpLink,
};
use crate::{SessionTransport, tls};
use ::security::socket;

/// Pause after an error that does not belong to one connection, such as too many open files.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Accepts TLS connections forever.
pub(super) async fn tls(listener: TcpListener, acceptor: TlsAcceptor, shared: Arc<RemoteShared>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let acceptor = acceptor.clone();
                admit(&shared, move |handshake, shared| async move {
                    over_tls(stream, &acceptor, handshake, shared).await;
                });
            }
            Err(error) => wait_after(&error).await,
        }
    }
}

/// Accepts connections of this user's own processes forever.
pub(super) async fn unix(listener: UnixListener, shared: Arc<RemoteShared>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if is_own_process(&stream) => {
                let arrival = ArrivedClient { transport: SessionTransport::Ipc, certified: None };
                admit(&shared, move |handshake, shared| async move {
                    match within(&shared, greet(stream, &arrival, &shared)).await {
                        Ok(client) => serve(client, handshake, shared).await,
                        Err(error) => not_let_in(&error),
                    }
                });
            }
            Ok(_) => tracing::warn!("refused a process of another user at the private layer socket"),
            Err(error) => wait_after(&error).await,
        }
    }
}

/// Registers a connection as a handshake and starts its task.
fn admit<F: Future<Output = ()> + Send + 'static>(
    shared: &Arc<RemoteShared>,
    serve: impl FnOnce(Handshake, Arc<RemoteShared>) -> F,
) {
    let handshake = shared.handshakes.begin();
    let number = handshake.number();
    let task = tokio::spawn(serve(handshake, Arc::clone(shared)));
    shared.handshakes.register(number, task.abort_handle(), shared.settings.handshakes);
}

enum AdmittedConnection<C> {
    Client(C),
    Gateway(Box<AdmittedGateway>),
}

async fn over_tls(
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    handshake: Handshake,
    shared: Arc<RemoteShared>,
) {
    let greeted = within(&shared, async {
        socket::prepare(&stream)?;
        let stream = acceptor.accept(stream).await?;
        if gateways::is_gateway(&stream) {
            return Ok(AdmittedConnection::Gateway(Box::new(gateways::greet(stream, &shared).await?)));
        }
        let arrival = arrival(&stream, &shared)?;
        greet(stream, &arrival, &shared).await.map(AdmittedConnection::Client)
    });
    match greeted.await {
        Ok(AdmittedConnection::Gateway(guest)) => {
            drop(handshake);
            guest.serve(&shared).await;
        }
        Ok(AdmittedConnection::Client(client)) => serve(client, handshake, shared).await,
        Err(error) => not_let_in(&error),
    }
}

fn arrival(
    stream: &tokio_rustls::server::TlsStream<TcpStream>,
    shared: &RemoteShared,
) -> Result<ArrivedClient, HandshakeError> {
    let chain = stream.get_ref().1.peer_certificates();
    let certified = chain.and_then(<[_]>::first).map(|certificate| {
        let name = tls::common_name(certificate);
        name.and_then(|name| shared.authenticator.by_certificate(name)).ok_or(HandshakeError::Certificate)
    });
    Ok(ArrivedClient { transport: SessionTransport::Tls, certified: certified.transpose()? })
}

/// Runs `greeting` under the deadline of the handshake.
async fn within<T>(
    shared: &RemoteShared,
    greeting: impl Future<Output = Result<T, HandshakeError>>,
) -> Result<T, HandshakeError> {
    let limit = shared.settings.handshake;
    timeout(limit, greeting).await.unwrap_or(Err(HandshakeError::Late(limit)))
}

fn not_let_in(error: &HandshakeError) {
    tracing::debug!(%error, "refused a remote split client");
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    (link, client): (ZmtpLink<S>, AdmittedClient),
    handshake: Handshake,
    shared: Arc<RemoteShared>,
) {
    drop(handshake);
    let (session, tenant) = (client.session.opened().session, client.principal.tenant.clone());
    tracing::info!(session, %tenant, "a remote split client opened a session");
    let ending = Connection::new(link, client, shared).serve().await;
    if ending.is_violation() {
        tracing::warn!(session, %tenant, %ending, "ended the session of a remote split client");
    } else {
        tracing::info!(session, %tenant, %ending, "a remote split client closed its session");
    }
}

fn is_own_process(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own)
}

async fn wait_after(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a remote split client");
    sleep(AFTER_ERROR).await;
}
