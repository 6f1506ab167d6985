//! Puts the process together, serves, and ends.

use std::{
    io::{self, IsTerminal as _, Write as _},
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
use settings::LogFormat;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing_subscriber::EnvFilter;

use crate::{
    config::PickerConfig,
    listener,
    picker::Picker,
    scrape,
    tls::{Certificate, TlsError},
};

/// Connections at once; an Envoy has one for each of its threads.
const MAX_CONNECTIONS: usize = 1_024;
/// Requests at once of a connection, from their heads to the ends of their answers.
const MAX_STREAMS: u32 = 4_096;
/// A peer that is silent for so long is asked whether it is there, and has as long to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// How long the head of a request over HTTP/1.1 may take.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// What runs gets so long to end: another picker takes what comes.
const GRACE: Duration = Duration::from_secs(5);
/// How long accepting rests when the system has no room for a connection.
const REST: Duration = Duration::from_millis(100);
/// Threads: reading a large body must hold nobody up.
const THREADS: usize = 2;

/// Why the process ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The address cannot be had.
    #[error("listening on {address} failed: {reason}; choose another --picker-listen")]
    Listen {
        /// As asked.
        address: SocketAddr,
        /// What the system said.
        reason: io::Error,
    },
    /// There is no certificate to show.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The system refused something basic.
    #[error("{attempt} failed: {reason}")]
    System {
        /// What was tried.
        attempt: &'static str,
        /// What the system said.
        reason: io::Error,
    },
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot.
pub fn run(config: PickerConfig) -> Result<(), RunError> {
    start_log(config.log_format);
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
    // Ready to be asked; whether it can name a host /ready says.
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
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                // Answers are small and waited for.
                let _ = stream.set_nodelay(true);
                let shown = certificate.as_ref().map(Certificate::config);
                let (router, watcher) = (router.clone(), graceful.watcher());
                tokio::spawn(async move {
                    match shown {
                        None => serve_connection(stream, router, watcher).await,
                        Some(shown) => match handshake(stream, shown).await {
                            Ok(stream) => serve_connection(stream, router, watcher).await,
                            Err(error) => tracing::debug!(%error, "no TLS came about"),
                        },
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

async fn handshake(stream: TcpStream, shown: Arc<ServerConfig>) -> io::Result<TlsStream<TcpStream>> {
    let limited = tokio::time::timeout(HEAD_LIMIT, TlsAcceptor::from(shown).accept(stream));
    limited.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// HTTP/1.1 or, with its preface, HTTP/2.
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

/// Resolves when the process is asked to stop.
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

/// The log goes to stderr; `RUST_LOG` says how much of it.
fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let is_json = match format {
        LogFormat::Human => false,
        LogFormat::Json => true,
        LogFormat::Auto => !io::stderr().is_terminal(),
    };
    // A log that somebody started before is as good.
    let _ = if is_json { log.json().try_init() } else { log.try_init() };
}
