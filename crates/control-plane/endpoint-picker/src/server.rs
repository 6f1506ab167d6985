//! Start, service and end of the process.

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
    service::TowerToHyperService,
};
use rustls::ServerConfig;
use sd_notify::NotifyState;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    config::PickerConfig,
    listener,
    picker::Picker,
    scrape,
    tls::{Certificate, TlsError},
};

/// Maximum number of connections; an Envoy opens one per thread.
const MAX_CONNECTIONS: usize = 1_024;
/// Maximum number of concurrent requests per connection, including their responses.
const MAX_STREAMS: u32 = 4_096;
/// Idle time after which a peer is probed, and the time limit of its reply.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Time limit for the TLS handshake, and for the head of an HTTP/1.1 request.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for running requests at shutdown; another picker takes new ones.
const GRACE: Duration = Duration::from_secs(5);
/// Pause of accepting when the system has no capacity for a connection.
const REST: Duration = Duration::from_millis(100);
/// Number of threads: parsing a large body must not delay other requests.
const THREADS: usize = 2;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot listen on {address}: {reason}; choose another --picker-listen")]
    Listen { address: SocketAddr, reason: io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{attempt} failed: {reason}")]
    System { attempt: &'static str, reason: io::Error },
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the port, the certificate or a system resource is unavailable.
pub fn run(config: PickerConfig) -> Result<(), RunError> {
    process::start_log(config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|reason| RunError::System { attempt: "starting threads", reason })?;
    let served = runtime.block_on(serve(config));
    runtime.shutdown_background();
    served
}

async fn serve(config: PickerConfig) -> Result<(), RunError> {
    let stop = stopped()?;
    let certificate = config.certificate.map(Certificate::read).transpose()?;
    let scheme = if certificate.is_some() { "https" } else { "http" };
    let refused = |reason| RunError::Listen { address: config.listen, reason };
    let listener = TcpListener::bind(config.listen).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let picker = Arc::new(Picker::new(config.rules, config.max_body_bytes));
    tokio::spawn(scrape::run(Arc::clone(&picker), config.scrape));
    // The picker is ready for requests; `/ready` reports whether a host is.
    let _ = writeln!(io::stdout(), "ready {scheme}://{address}");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = accept(listener, certificate, listener::router(picker), &graceful) => {}
        () = stop => {}
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    _ = tokio::time::timeout(GRACE, graceful.shutdown()).await;
    Ok(())
}

async fn accept(
    listener: TcpListener,
    certificate: Option<Certificate>,
    router: Router,
    graceful: &GracefulShutdown,
) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&permits).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                // Answers are small, and their latency matters.
                let _ = stream.set_nodelay(true);
                let shown = certificate.as_ref().map(Certificate::config);
                let (router, watcher) = (router.clone(), graceful.watcher());
                tokio::spawn(async move {
                    match shown {
                        None => serve_connection(stream, router, watcher).await,
                        Some(shown) => match handshake(stream, shown).await {
                            Ok(stream) => serve_connection(stream, router, watcher).await,
                            Err(error) => tracing::debug!(%error, "the TLS handshake of a connection failed"),
                        },
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

async fn handshake(stream: TcpStream, shown: Arc<ServerConfig>) -> io::Result<TlsStream<TcpStream>> {
    let limited = tokio::time::timeout(HEAD_LIMIT, TlsAcceptor::from(shown).accept(stream));
    limited.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Serves HTTP/1.1, or HTTP/2 if the client sends its preface.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    watcher: Watcher,
) {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let served = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(served).await {
        tracing::debug!(%error, "a connection ended");
    }
}

/// Returns a future that resolves on SIGTERM or SIGINT.
fn stopped() -> Result<impl Future<Output = ()>, RunError> {
    let watch =
        |kind| signal(kind).map_err(|reason| RunError::System { attempt: "watching for signals", reason });
    let (mut term, mut int) = (watch(SignalKind::terminate())?, watch(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}
