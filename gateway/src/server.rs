//! Puts the process together, serves, and shuts down in order.

use std::{
    future::IntoFuture as _,
    io::{IsTerminal as _, Write as _},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::serve::ListenerExt as _;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{oneshot, watch},
    task::JoinHandle,
};

use tracing_subscriber::EnvFilter;

use crate::{
    adapters::{Registry, journal::JournalError},
    app::App,
    config::{Config, Lifeline, LogFormat},
    executor::Executor,
    lifecycle::{Lifecycle, LoadText, StartError, Status},
    metrics, routes, text,
};

/// Threads for text work, file system and the registry.
const BLOCKING_THREADS: usize = 8;
/// How long streams get to send their error once the grace is over.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The address cannot be had.
    #[error("listening on {address} failed: {reason}; choose another --listen")]
    Listen {
        /// As asked.
        address: SocketAddr,
        /// What the system said.
        reason: std::io::Error,
    },
    /// The registry cannot be had.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// What is to be served cannot be.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The system refused something basic.
    #[error("{attempt} failed: {reason}")]
    System {
        /// What was tried.
        attempt: &'static str,
        /// What the system said.
        reason: std::io::Error,
    },
}

/// Runs the gateway until SIGTERM or SIGINT.
pub fn run(config: Config) -> Result<(), RunError> {
    start_log(config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(|reason| RunError::System { attempt: "starting threads", reason })?;
    let served = runtime.block_on(async {
        let stop = stop_signal(config.lifeline)?;
        Gateway::start(config, Arc::new(text::load)).await?.until(stop).await
    });
    // Nothing that still computes may keep the process.
    runtime.shutdown_background();
    served
}

/// Starts the log on stderr; `RUST_LOG` chooses what is in it.
fn start_log(format: LogFormat) {
    let json = match format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json { log.json().init() } else { log.init() }
}

/// Resolves when the process is asked to stop.
fn stop_signal(lifeline: Lifeline) -> Result<impl Future<Output = ()>, RunError> {
    let watch =
        |kind| signal(kind).map_err(|reason| RunError::System { attempt: "watching for signals", reason });
    let (mut term, mut int) = (watch(SignalKind::terminate())?, watch(SignalKind::interrupt())?);
    Ok(async move {
        let lifeline = async {
            match lifeline {
                Lifeline::Stdin => stdin_ended().await,
                Lifeline::Signals => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = lifeline => {}
        }
    })
}

async fn stdin_ended() {
    let (ended, end) = oneshot::channel();
    // A thread of its own: a read of standard input cannot be called back, and must not keep the runtime.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = ended.send(());
    });
    let _ = end.await;
}

/// A gateway that is listening, whether or not it is ready.
#[derive(Debug)]
pub struct Gateway {
    /// Where.
    pub address: SocketAddr,
    /// Whether it is ready.
    pub status: watch::Receiver<Status>,
    executor: Executor,
    grace: Duration,
    /// Told to stop accepting.
    stop: watch::Sender<bool>,
    server: JoinHandle<std::io::Result<()>>,
    lifecycle: JoinHandle<Result<(), StartError>>,
    poll: JoinHandle<()>,
}

impl Gateway {
    /// Opens the registry, listens, and begins to connect to the executor.
    pub async fn start(config: Config, load_text: LoadText) -> Result<Self, RunError> {
        let executor = Executor::connect(&config.socket, config.max_sequences);
        let registry = Registry::open(executor.clone(), &config.state, config.adapter_root.clone())?;
        let registry = Arc::new(registry);
        let (lifecycle, status) = Lifecycle::new(&config, executor.clone(), Arc::clone(&registry), load_text);
        let app = App::new(executor.clone(), status.clone(), registry, config.keys, config.max_body_bytes);
        let app = Arc::new(app);
        let refused = |reason| RunError::Listen { address: config.listen, reason };
        let listener = TcpListener::bind(config.listen).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let (stop, stopped) = watch::channel(false);
        Ok(Self {
            address,
            status,
            grace: config.grace,
            stop,
            server: tokio::spawn(serve(listener, Arc::clone(&app), stopped)),
            lifecycle: tokio::spawn(lifecycle.run()),
            poll: tokio::spawn(metrics::poll(Arc::clone(&app.metrics), executor.clone())),
            executor,
        })
    }

    /// Serves until `stop` resolves or starting fails, then shuts down.
    pub async fn until(mut self, stop: impl Future<Output = ()>) -> Result<(), RunError> {
        let (mut ready, address) = (self.status.clone(), self.address);
        let announce = async move {
            // What `wait_for` returns locks the status; it must not live on while this waits.
            let is_ready = ready.wait_for(|status| matches!(status, Status::Ready(_))).await.is_ok();
            if is_ready {
                // Whoever closed our standard output does not want to know.
                let _ = writeln!(std::io::stdout(), "ready http://{address}");
            }
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            () = stop => Ok(()),
            () = announce => Ok(()),
            ended = &mut self.lifecycle => ended.unwrap_or(Err(StartError::Closed)),
        };
        self.shut_down().await;
        Ok(ended?)
    }

    /// Stops accepting, lets what runs end within the grace, ends the rest with an error, and returns.
    pub async fn shut_down(self) {
        tracing::info!(grace_s = self.grace.as_secs(), "stopping");
        self.stop.send_replace(true);
        let mut server = self.server;
        if tokio::time::timeout(self.grace, &mut server).await.is_err() {
            tracing::warn!("requests are still running after the grace; they end with an error");
            self.executor.close();
            // Whoever does not read cannot be told.
            let _ = tokio::time::timeout(LAST_WORDS, &mut server).await;
            server.abort();
        }
        self.executor.close();
        self.poll.abort();
        // Both hold the registry, whose directory the next gateway may want at once.
        let _ = self.poll.await;
        // It ends by itself now, unless it is what ended first.
        if !self.lifecycle.is_finished() {
            let _ = self.lifecycle.await;
        }
    }
}

async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    mut stopped: watch::Receiver<bool>,
) -> std::io::Result<()> {
    // A token is a small packet that nobody wants to wait for.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection stays without TCP_NODELAY");
        }
    });
    let stopped = async move {
        // An error means that whoever could stop it is gone.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    axum::serve(listener, routes::router(&app)).with_graceful_shutdown(stopped).into_future().await
}
