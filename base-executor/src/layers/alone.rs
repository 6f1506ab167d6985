//! An executor without an engine: split clients' calls, and nothing else, over a base of any architecture.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use model::{
    location::{HubSettings, resolve},
    site_model::SiteModel,
    sites::EvaluateSites,
    skeleton::SkeletonPlan,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    hub::Hub,
    inbox::{HubEvent, HubSender},
    start::{BaseFacts, Doors, Places, Rounding, name_of, start},
};
use crate::{
    config::Config,
    process,
    progress::Progress,
    pulse::{Figures, Pulse},
    spawn, systemd,
};

/// How often the loop turns, at least.
const LOOK: Duration = Duration::from_secs(1);

/// Serves the model of `config` until `shutdown` asks for the end. `on_ready` is called when clients are served.
///
/// # Errors
/// If the model cannot be opened, a door cannot be, or the compute thread stops of itself.
pub async fn run(
    config: &Config,
    mut shutdown: mpsc::Receiver<Duration>,
    on_ready: impl FnOnce(),
) -> anyhow::Result<()> {
    let (progress, watched) = Progress::new();
    let (opened_sender, opened) = oneshot::channel();
    let (ended, compute_ended) = oneshot::channel::<()>();
    let pulse = Pulse::default();
    let (signs, config) = (pulse.clone(), config.clone());
    // The thread that opens the model is the one that computes: it owns what it opens from the beginning.
    let compute = spawn("layers-compute", move || {
        let _ended = ended;
        match open(&config, &progress) {
            Ok((mut base, mut hub, doors)) => {
                if opened_sender.send(Ok(hub.sender())).is_ok() {
                    serve(&mut base, &mut hub, &signs);
                }
                drop(doors);
            }
            Err(error) => drop(opened_sender.send(Err(error))),
        }
    })?;
    let telling = tokio::spawn(tell_progress(watched));
    let opened = tokio::select! {
        opened = opened => opened,
        _ = shutdown.recv() => return Ok(()),
    };
    telling.abort();
    let fault = "the model could not be opened by a fault; the log says more, start again";
    let hub: HubSender = opened.context(fault)??;
    systemd::ready();
    let bell = hub.clone();
    let posted = tokio::spawn(systemd::keep_posted(pulse, move || bell.ring()));
    on_ready();
    wait_for_end(&hub, shutdown, compute_ended).await;
    posted.abort();
    compute.join().map_err(|_| {
        anyhow::anyhow!("the compute thread has stopped by a fault; its log says more, start again")
    })
}

/// Returns when the compute thread has ended.
async fn wait_for_end(
    hub: &HubSender,
    mut shutdown: mpsc::Receiver<Duration>,
    mut ended: oneshot::Receiver<()>,
) {
    loop {
        tokio::select! {
            _ = &mut ended => return,
            Some(_) = shutdown.recv() => {
                systemd::stopping();
                // What waits is due within a moment, so there is nothing to be impatient about. Without a hub it is over.
                let _ = hub.send(HubEvent::Drain);
            }
        }
    }
}

async fn tell_progress(mut watched: watch::Receiver<shmproto::message::Loading>) {
    while watched.changed().await.is_ok() {
        systemd::loading(&watched.borrow_and_update());
    }
}

fn open(config: &Config, progress: &Progress) -> anyhow::Result<(SiteModel, Hub, Doors)> {
    let socket = config
        .layer_socket()
        .context("--engine none with --layers off serves nothing: leave one of them out")?;
    let path = resolve(&config.model, &HubSettings::from_env())?;
    let cores = match &config.cores {
        Some(cores) => cores.0.clone(),
        None => process::allowed_cores()?,
    };
    // Before the weights, so that a model put in its place meanwhile is noticed.
    let plan = SkeletonPlan::of(&path)?;
    progress.stage("reading weights");
    let base = SiteModel::open_telling(&path, &cores, &|at| progress.done(at.done, at.total))?;
    anyhow::ensure!(
        plan.is_current(),
        "{} was written to while it was loaded, so its weights cannot be trusted; start again once it is whole",
        path.display()
    );
    let known = base.facts();
    let facts = BaseFacts {
        model: name_of(&config.model),
        architecture: known.architecture.clone(),
        base_hash: known.identity,
        context_length: 0,
        rounding: if base.is_exact() { Rounding::Exact } else { Rounding::Rounded },
        plan,
    };
    tracing::info!(
        model = %path.display(),
        architecture = known.architecture,
        weight_bytes = base.bytes(),
        threads = cores.len(),
        "linear layers loaded"
    );
    let places = Places::of(&config.layers, socket);
    let (hub, doors) = start(config.layers.settings(), places, base.sites(), facts)?;
    Ok((base, hub, doors))
}

/// Serves until the hub has drained.
pub fn serve(base: &mut dyn EvaluateSites, hub: &mut Hub, pulse: &Pulse) {
    loop {
        hub.poll();
        let waiting = u32::try_from(hub.waiting_calls()).unwrap_or(u32::MAX);
        pulse.beat(Figures { adapters: 0, running: 0, waiting });
        if hub.run_due(base).rows > 0 {
            continue;
        }
        if hub.is_draining() && hub.is_idle() {
            return;
        }
        hub.wait(Some(Instant::now() + LOOK));
    }
}
