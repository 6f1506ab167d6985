//! The executor without an engine: serves only calls of split clients, over a base of any architecture.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use layer_service::{
    dispatcher::Dispatcher,
    event_queue::{DispatcherEvent, DispatcherSender},
    start::{CatalogInfo, RunningServers, name_of, start},
};
use model::{
    client_weights::ClientWeightsPlan,
    cuda::CudaModel,
    forward::ForwardPass as _,
    linear_sites::EvaluateSites,
    site_model::{LoadProgress, SiteModel},
};
use model_files::location::{hub_cache, resolve};
use settings::DeviceChoice;
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    budget::{self, MemoryBudget},
    config::ExecutorConfig,
    heartbeat::{ComputeHeartbeat, DeviceLost, EngineGauges},
    model_loader::{LinearLayersInfo, PrecisionChoice, adapter_precision, cuda, kv_precision},
    progress::LoadingProgress,
    spawn, streaming, systemd,
};

/// Maximum interval between two loops.
const LOOK: Duration = Duration::from_secs(1);

/// Serves the model of `config` until a message on `shutdown`. `on_ready` is called when clients are served.
///
/// # Errors
/// If the model or a socket cannot be opened, or the compute thread stops by itself.
pub(crate) async fn run(
    config: &ExecutorConfig,
    mut shutdown: mpsc::Receiver<Duration>,
    on_ready: impl FnOnce(),
) -> anyhow::Result<()> {
    let (progress, watched) = LoadingProgress::new();
    let (opened_sender, opened) = oneshot::channel();
    let (ended, compute_ended) = oneshot::channel::<()>();
    let heartbeat = ComputeHeartbeat::default();
    let (compute_heartbeat, config) = (heartbeat.clone(), config.clone());
    // The compute thread opens the model, so it owns the model from the beginning.
    let compute = spawn("layers-compute", move || {
        let _ended = ended;
        match open(&config, &progress) {
            Ok((mut base, mut dispatcher, servers)) => {
                let is_awaited = opened_sender.send(Ok(dispatcher.sender())).is_ok();
                let served =
                    if is_awaited { base.serve(&mut dispatcher, &compute_heartbeat) } else { Ok(()) };
                drop(servers);
                served
            }
            Err(error) => {
                drop(opened_sender.send(Err(error)));
                Ok(())
            }
        }
    })?;
    let progress_task = tokio::spawn(report_progress(watched));
    let opened = tokio::select! {
        opened = opened => opened,
        _ = shutdown.recv() => return Ok(()),
    };
    progress_task.abort();
    let fault = "a thread panicked while it opened the model; see the log and restart";
    let dispatcher: DispatcherSender = opened.context(fault)??;
    systemd::ready();
    let waker = dispatcher.clone();
    let watchdog = tokio::spawn(systemd::report_status(heartbeat, move || waker.wake()));
    on_ready();
    wait_for_end(&dispatcher, shutdown, compute_ended).await;
    watchdog.abort();
    let ended = compute
        .join()
        .map_err(|_| anyhow::anyhow!("the compute thread panicked; see the log and restart"))?;
    ended.map_err(Into::into)
}

/// Waits until the compute thread has ended.
async fn wait_for_end(
    dispatcher: &DispatcherSender,
    mut shutdown: mpsc::Receiver<Duration>,
    mut ended: oneshot::Receiver<()>,
) {
    loop {
        tokio::select! {
            _ = &mut ended => return,
            Some(_) = shutdown.recv() => {
                systemd::stopping();
                // Waiting calls are due soon, so there is no time limit. Without a dispatcher the service has
                // ended.
                let _ = dispatcher.send(DispatcherEvent::Drain);
            }
        }
    }
}

async fn report_progress(mut watched: watch::Receiver<shmproto::message::Loading>) {
    while watched.changed().await.is_ok() {
        systemd::loading(&watched.borrow_and_update());
    }
}

enum LayerModel {
    /// Linear layers of any architecture, on the host's cores.
    Cpu(Box<SiteModel>),
    /// Linear layers of a known architecture, on a GPU.
    Cuda(Box<CudaModel>),
}

impl LayerModel {
    /// Loads the model at `path` with `cores` to the device of `config`.
    fn load(
        config: &ExecutorConfig,
        path: &Path,
        cores: &[usize],
        progress: &LoadingProgress,
    ) -> anyhow::Result<(Self, LinearLayersInfo)> {
        match config.device {
            DeviceChoice::Cpu => {
                let on_progress = |at: LoadProgress| progress.done(at.done, at.total);
                let base = match streaming::options(config)? {
                    None => SiteModel::open_with_progress(path, cores, &on_progress)?,
                    Some(options) => SiteModel::open_streamed(path, &options, cores, &on_progress)
                        .context(streaming::REMEDY)?,
                };
                let identity = || base.info().identity;
                let precision =
                    PrecisionChoice::of(config).resolve(identity, || base.suitable_precision())?;
                let mut base = base.with_precision(precision);
                if config.offers_exact() {
                    base.commit();
                }
                let info = base.info();
                let (architecture, identity) = (info.architecture.clone(), info.identity);
                let (numerics, bytes) = (base.numerics(), base.bytes());
                let info = LinearLayersInfo { architecture, identity, numerics, bytes };
                Ok((Self::Cpu(Box::new(base)), info))
            }
            DeviceChoice::Cuda { ordinal } => {
                let (model, info) =
                    cuda::open_alone(path, ordinal, cores.len(), config.offers_exact(), progress)?;
                Ok((Self::Cuda(Box::new(model)), info))
            }
        }
    }

    fn evaluate_sites(&self) -> &dyn EvaluateSites {
        match self {
            Self::Cpu(base) => &**base,
            Self::Cuda(base) => &**base,
        }
    }

    /// Serves until the dispatcher has drained.
    ///
    /// # Errors
    /// If the device is lost.
    fn serve(&mut self, dispatcher: &mut Dispatcher, heartbeat: &ComputeHeartbeat) -> Result<(), DeviceLost> {
        match self {
            Self::Cpu(base) => serve(&mut **base, dispatcher, heartbeat, |_| false),
            Self::Cuda(base) => serve(&mut **base, dispatcher, heartbeat, |base| base.is_lost()),
        }
    }
}

fn open(
    config: &ExecutorConfig,
    progress: &LoadingProgress,
) -> anyhow::Result<(LayerModel, Dispatcher, RunningServers)> {
    let places = config
        .layer_places()
        .context("--engine none with --layers off serves nothing; remove one of them")?;
    let path = resolve(&config.model, &hub_cache())?;
    let cores = match &config.cores {
        Some(cores) => cores.0.iter().map(|&core| core as usize).collect(),
        None => process::allowed_cores()?,
    };
    // The plan precedes the weights, so that a model replaced meanwhile is detected.
    let plan = ClientWeightsPlan::of(&path)?;
    progress.stage("reading weights");
    let (base, loaded) = LayerModel::load(config, &path, &cores, progress)?;
    anyhow::ensure!(
        plan.is_current(),
        "{} was written while it was loaded, so its weights may be wrong; start again when the file is \
         complete",
        path.display()
    );
    let info = CatalogInfo {
        model: name_of(&config.model),
        architecture: loaded.architecture.clone(),
        base_hash: loaded.identity,
        context_length: 0,
        kv: kv_precision(config, loaded.numerics),
        adapters: adapter_precision(config, loaded.numerics),
        plan,
    };
    tracing::info!(
        model = %path.display(),
        architecture = loaded.architecture,
        weight_bytes = loaded.bytes,
        device = %config.device,
        threads = cores.len(),
        "linear layers loaded"
    );
    let settings = config.layers.settings();
    let budget = MemoryBudget::of_this_machine(config.process_memory, 0);
    if matches!(base, LayerModel::Cpu(_)) {
        let account = budget.bounded_weights(config.weights.bytes);
        budget::reserve(
            &account,
            loaded.bytes as u64,
            "use a smaller base, or one with fewer bits per weight",
        )?;
    }
    let (dispatcher, servers) = start(settings, places, base.evaluate_sites(), info, budget.clients)?;
    Ok((base, dispatcher, servers))
}

/// Serves until the dispatcher has drained, or `base` is lost.
fn serve<B: EvaluateSites>(
    base: &mut B,
    dispatcher: &mut Dispatcher,
    heartbeat: &ComputeHeartbeat,
    is_lost: impl Fn(&B) -> bool,
) -> Result<(), DeviceLost> {
    loop {
        dispatcher.poll();
        let waiting = u32::try_from(dispatcher.waiting_calls()).unwrap_or(u32::MAX);
        heartbeat.beat(EngineGauges { adapters: 0, running: 0, waiting });
        let served = dispatcher.run_due(base);
        if is_lost(base) {
            return Err(DeviceLost);
        }
        if served.rows > 0 {
            continue;
        }
        if dispatcher.is_draining() && dispatcher.is_idle() {
            return Ok(());
        }
        dispatcher.wait(Some(Instant::now() + LOOK));
    }
}
