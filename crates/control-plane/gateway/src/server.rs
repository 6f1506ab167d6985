//! Builds the gateway process, serves, and shuts down in order. `open_bases` opens the bases.

mod open_bases;

use std::{io::Write as _, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use process::notify::{flush, send_status};
use receipts::{SigningKey, SigningKeyError};
use sd_notify::NotifyState;
use text::sandbox::TemplateSandbox;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{Notify, oneshot, watch},
    task::{JoinHandle, JoinSet},
};

use self::open_bases::{metrics_of, open_bases};
use crate::{
    adapters::{OpenError, Registry},
    app::{AllowedOrigins, App, GatewayLifetime, SharedState},
    bases::Bases,
    batch_lines::BatchLines,
    batches::{BatchError, Batches},
    body_workers::BodyWorkers,
    config::{GatewayConfig, ShutdownTrigger},
    connections::{self, ShutdownPhase},
    executor::SharedConnections,
    grammars::GrammarChecks,
    kv_events::publisher::{KvEventPublisher, KvEventsError},
    lifecycle::{GatewayReadiness, Lifecycle, LoadText, StartError},
    limits::AdapterLimits,
    metrics::poll::poll,
    response_store::ResponseStore,
    service_classes::ServiceClasses,
    systemd,
    telemetry::{self, Sinks},
    tenant_memory::TenantMemory,
    trainer_client::TrainerClient,
    training::{Training, TrainingError},
    training_sessions::Runs,
};

/// Threads for blocking system calls, such as the lookup of a host name.
const BLOCKING_THREADS: usize = 2;
/// Time for streams to send their error after the grace period.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Reason why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot listen on {address}: {reason}; choose another --listen")]
    Listen {
        address: SocketAddr,
        /// Error of the operating system.
        reason: std::io::Error,
    },
    #[error(transparent)]
    Registry(#[from] OpenError),
    #[error(transparent)]
    Training(#[from] TrainingError),
    #[error(transparent)]
    Batches(#[from] BatchError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(
        "{connections} requests still ran after --grace-ms {grace_ms} and were cut off; raise --grace-ms"
    )]
    Cut {
        /// Connections that were still busy after the grace period.
        connections: usize,
        /// Grace period in milliseconds.
        grace_ms: u128,
    },
    /// A second stop signal ended the drain.
    #[error("stopped without waiting, after a second signal")]
    Hurried,
    #[error(transparent)]
    Traces(#[from] telemetry::EndpointError),
    #[error(transparent)]
    KvEvents(#[from] KvEventsError),
    #[error(transparent)]
    ReceiptKey(#[from] SigningKeyError),
    #[error("{attempt} failed: {reason}")]
    System {
        attempt: &'static str,
        /// Error of the operating system.
        reason: std::io::Error,
    },
}

impl RunError {
    fn no_threads(reason: std::io::Error) -> Self {
        Self::System { attempt: "starting threads", reason }
    }
}

pub fn run(config: GatewayConfig) -> Result<(), RunError> {
    process::start_log(config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(RunError::no_threads)?;
    let served = runtime.block_on(async {
        let (stop, hurry) = stop_signals(config.lifeline)?;
        let sandbox = Arc::new(TemplateSandbox::new(config.helper_program.clone()));
        let load = Arc::new(move |path: &Path| crate::text::load(path, &sandbox));
        Gateway::start(config, load).await?.until(stop, hurry).await
    });
    // Blocking work that still runs must not delay the exit.
    runtime.shutdown_background();
    served
}

/// Returns two futures: the first resolves at the first stop signal, the second at another one.
fn stop_signals(
    lifeline: ShutdownTrigger,
) -> Result<(impl Future<Output = ()>, impl Future<Output = ()>), RunError> {
    let watch =
        |kind| signal(kind).map_err(|reason| RunError::System { attempt: "watching for signals", reason });
    let (mut term, mut int) = (watch(SignalKind::terminate())?, watch(SignalKind::interrupt())?);
    let (first, second) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (stop, hurry) = (Arc::clone(&first), Arc::clone(&second));
    tokio::spawn(async move {
        let lifeline = async {
            match lifeline {
                ShutdownTrigger::Stdin => stdin_ended().await,
                ShutdownTrigger::Signals => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = lifeline => {}
        }
        stop.notify_one();
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        hurry.notify_one();
    });
    Ok((async move { first.notified().await }, async move { second.notified().await }))
}

async fn stdin_ended() {
    let (ended, end) = oneshot::channel();
    // A blocked read of standard input cannot be cancelled, so it gets a thread that the runtime does not
    // wait for.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = ended.send(());
    });
    let _ = end.await;
}

/// A gateway that listens, whether or not it is ready.
#[derive(Debug)]
pub struct Gateway {
    /// Address of the listener, with the port that the system chose if none was set.
    pub address: SocketAddr,
    /// Status of the base that is the readiest.
    pub status: watch::Receiver<GatewayReadiness>,
    bases: Arc<Bases>,
    grace: Duration,
    phase: watch::Sender<ShutdownPhase>,
    server: JoinHandle<usize>,
    lifecycle: JoinHandle<Result<(), StartError>>,
    /// Tasks that run until they are aborted.
    background_tasks: Vec<JoinHandle<()>>,
}

/// Starts a task for each executor of a base that polls the executor's statistics.
fn pollers(app: &App) -> Vec<JoinHandle<()>> {
    let members = app.executors.all().iter();
    let polled = members.map(|member| {
        let (metrics, executor) = (Arc::clone(&app.metrics), member.executor().clone());
        let (registry, status) = (Arc::clone(&app.registry), app.status.clone());
        tokio::spawn(poll(metrics, member.index(), executor, registry, status))
    });
    polled.collect()
}

/// Runs until all executors' handles are closed. Fails if the start of a base cannot succeed.
async fn run_all(lifecycles: Vec<Lifecycle>) -> Result<(), StartError> {
    let mut running = JoinSet::new();
    for lifecycle in lifecycles {
        running.spawn(lifecycle.run());
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap_or(Err(StartError::Closed))?;
    }
    Ok(())
}

/// Binds the listener; returns its address, with the port that the system chose if none was set.
async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), RunError> {
    let refused = |reason| RunError::Listen { address, reason };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    Ok((listener, bound))
}

/// Opens the models of Tinker's API, and the training files and fine-tuning jobs.
async fn training(
    config: &GatewayConfig,
    registry: &Arc<Registry>,
    status: &watch::Receiver<GatewayReadiness>,
) -> Result<(Arc<Runs>, Arc<Training>), RunError> {
    let trainers = TrainerClient::at(config.training.trainer_socket.clone());
    let tenant_bytes = config.training.tenant_state_bytes;
    let runs = Runs::new(trainers.clone(), Arc::clone(registry), status.clone(), &config.state, tenant_bytes);
    let limits = config.training.clone();
    let training =
        Training::open(Arc::clone(registry), status.clone(), trainers, limits, &config.state).await?;
    Ok((runs, training))
}

/// Starts the tasks that run until they are aborted.
fn background(bases: &Arc<Bases>, status: &watch::Receiver<GatewayReadiness>) -> Vec<JoinHandle<()>> {
    let app = bases.first();
    let (followed, registry) = (Arc::clone(app), Arc::clone(&app.registry));
    let executors = bases.all().iter().map(|app| app.executors.clone()).collect();
    let mut tasks: Vec<_> = bases.all().iter().flat_map(|app| pollers(app)).collect();
    tasks.extend([
        tokio::spawn(async move { followed.keys.follow().await }),
        tokio::spawn(systemd::follow(status.clone(), move || registry.len(), send_status)),
        tokio::spawn(systemd::feed(executors)),
        tokio::spawn(Runs::sweep(Arc::downgrade(&app.runs))),
        tokio::spawn(Arc::clone(&app.training).run()),
        tokio::spawn(Arc::clone(&app.batches).run(Arc::new(BatchLines::new(Arc::clone(bases))))),
    ]);
    if bases.all().iter().any(|app| app.base.can_sleep()) {
        tasks.push(tokio::spawn(Arc::clone(bases).follow_idle_times()));
    }
    tasks
}

impl Gateway {
    pub async fn start(config: GatewayConfig, load_text: LoadText) -> Result<Self, RunError> {
        let metrics = metrics_of(&config);
        let sinks = Sinks::open(Arc::clone(&metrics[0]), config.telemetry.otlp_endpoint.as_deref())?;
        let (block_updates, publisher) = KvEventPublisher::bind(config.kv_events.as_ref()).await?.unzip();
        let common = SharedConnections::new(block_updates);
        let classes = Arc::new(ServiceClasses::new(config.classes.clone()));
        let opened = open_bases(&config, metrics, common, &classes, &load_text).await?;
        let first = &opened[0];
        let (runs, training) = training(&config, &first.registry, &first.status).await?;
        let (listener, address) = listen(config.listen).await?;
        let memory = TenantMemory::new(config.connections.memory);
        let batches = Batches::open(
            (Arc::clone(first.registry.database()), Arc::clone(&training)),
            Arc::clone(&memory),
            first.admission.background_slots(),
            (config.batches, config.connections.max_body_bytes),
            &config.state,
        )
        .await?;
        let shared = Arc::new(SharedState {
            classes,
            training,
            batches,
            sinks,
            keys: config.keys,
            adapter_limits: AdapterLimits::new(config.rates.per_adapter),
            origins: AllowedOrigins { hosts: config.hosts, allowed: config.cors_origins },
            connections: config.connections,
            grammars: GrammarChecks::new(config.helper_program, Arc::clone(&memory)),
            kept: Arc::new(ResponseStore::new(Arc::clone(&memory))),
            memory,
            bodies: BodyWorkers::start().map_err(RunError::no_threads)?,
            receipt_key: Arc::new(SigningKey::open(&config.state)?),
            runs,
            lifetime: GatewayLifetime::begin(),
        });
        let served = opened.into_iter().map(|open| open.into_app(config.routing, &shared));
        let (apps, lifecycles): (Vec<_>, Vec<_>) = served.unzip();
        let bases = Bases::new(apps, config.bases.host_bytes, config.bases.wake_timeout);
        let status = bases.follow_status();
        let (phase, phases) = watch::channel(ShutdownPhase::Serving);
        let mut background_tasks = background(&bases, &status);
        background_tasks.extend(
            publisher.map(|publisher| tokio::spawn(publisher.run(Arc::clone(&bases.first().registry)))),
        );
        Ok(Self {
            address,
            status,
            grace: config.grace,
            phase,
            server: tokio::spawn(connections::serve(listener, Arc::clone(&bases), phases)),
            lifecycle: tokio::spawn(run_all(lifecycles)),
            background_tasks,
            bases,
        })
    }

    #[must_use]
    pub fn memory(&self) -> &TenantMemory {
        &self.bases.first().memory
    }

    /// Serves until `stop` resolves or the start fails, then drains. If `hurry` resolves, the drain ends at
    /// once.
    pub async fn until(
        mut self,
        stop: impl Future<Output = ()>,
        hurry: impl Future<Output = ()>,
    ) -> Result<(), RunError> {
        let (mut ready, address) = (self.status.clone(), self.address);
        let announce = async move {
            // The result of `wait_for` locks the status and must not live across the following wait.
            let is_ready = ready.wait_for(GatewayReadiness::answers).await.is_ok();
            if is_ready {
                // A supervisor that closed standard output does not need the line.
                let _ = writeln!(std::io::stdout(), "ready http://{address}");
            }
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            () = stop => Ok(()),
            () = announce => Ok(()),
            ended = &mut self.lifecycle => ended.unwrap_or(Err(StartError::Closed)),
        };
        let drained = tokio::select! {
            drained = self.shut_down() => drained,
            () = hurry => Err(RunError::Hurried),
        };
        Ok(ended?).and(drained)
    }

    /// Stops accepting, lets running requests end within the grace period, ends the rest with an error, and
    /// returns.
    ///
    /// # Errors
    /// If a connection was cut off.
    pub async fn shut_down(self) -> Result<(), RunError> {
        let grace_ms = self.grace.as_millis();
        tracing::info!(grace_ms, "stopping");
        send_status(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
        self.bases.first().drain();
        self.phase.send_replace(ShutdownPhase::Draining);
        let mut server = self.server;
        let drained = tokio::time::timeout(self.grace, &mut server).await.is_ok();
        if !drained {
            tracing::warn!("requests still run after --grace-ms; they end with an error");
            failpoint::pass("gateway.drain_cut");
        }
        self.bases.all().iter().for_each(|app| app.executors.close());
        let mut result = Ok(());
        if !drained {
            // A client that does not read cannot receive the error.
            let finished = tokio::time::timeout(LAST_WORDS, &mut server).await.is_ok();
            self.phase.send_replace(ShutdownPhase::Cut);
            let connections = if finished { 0 } else { server.await.unwrap_or(0) };
            result = Err(RunError::Cut { connections, grace_ms });
        }
        for task in self.background_tasks {
            task.abort();
            // Background tasks hold the registry, whose directory the next gateway may open at once.
            let _ = task.await;
        }
        self.bases.first().training.let_all_go().await;
        self.bases.first().registry.remove_presence().await;
        // The lifecycle ends by itself now, unless its end caused this shutdown.
        if !self.lifecycle.is_finished() {
            let _ = self.lifecycle.await;
        }
        self.bases.first().sinks.close().await;
        // Flushing may block, but no work is left that it could delay.
        flush();
        result
    }
}
