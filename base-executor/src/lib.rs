//! The process that owns the base weights, runs the resident engine, and serves the base to split clients.
//!
//! # Layout
//!
//! - [`config`]: the settings.
//! - [`bench`]: `base-executor bench`, which times the forward pass alone.
//! - [`capacity`]: `base-executor capacity`, which computes how many tokens and adapters fit into memory.
//! - [`check`]: `base-executor check`, which reports whether an adapter is usable, and why not.
//! - [`device_check`]: `base-executor device`, which reports whether a device is usable, and why not.
//! - [`model_loader`]: the forward pass, the adapter loader, and facts about the model.
//! - [`engine`]: the compute thread: schedule, run, postprocess.
//! - [`budget`]: budgets of the host's memory. [`device_memory_split`]: the device's memory for KV cache and
//!   adapters.
//! - [`memory`], [`kv_offload`]: the tiers of the KV cache; copies of KV blocks outside the device.
//! - `request_key`: the owner of a request or call.
//! - [`device_group`]: the other processes of a base that several devices hold together.
//! - [`drafter`]: drafters of sequences. [`constrained_decoding`]: masks for structured output.
//! - [`adapters`], [`loader`]: adapters of the host tier and their budget; the thread that loads them.
//! - [`placement`], [`device`]: the engine's view of adapters on the device; the device tier.
//! - [`cold_start_model`]: the cost of cold starts on this machine, and the choice between their modes.
//! - `layer_server`: the layer service without an engine, over a base of any architecture.
//! - [`adapter_images`], [`workers`]: adapters as sealed images; the worker processes that compute them.
//! - `streaming`: a base with streamed weights. [`gateway_server`]: the socket for gateways.
//! - [`progress`], [`heartbeat`], `systemd`: loading progress, liveness, and reports of both.
//! - `failpoints`: names for tests with failures. `startup`: cores and signals.
//!
//! # Threads
//!
//! ```text
//! service (tokio) --events--> engine (compute) --outputs, a bounded queue for each gateway--> service
//!        `--load calls--> loader --events--> engine
//! layer sockets --calls, and rings in shared memory--> engine --answers, bounded queues--> layer sockets
//! ```
//!
//! The engine waits for no other thread. The service waits until the engine takes in events, before every
//! step. The loader waits for the disk. Helper threads compute grammar masks and write KV blocks to the disk
//! tier.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod adapter_images;
pub mod adapters;
pub mod bench;
pub mod budget;
pub mod capacity;
pub mod check;
pub mod cold_start_model;
pub mod config;
pub mod constrained_decoding;
pub mod device;
pub mod device_check;
pub mod device_group;
pub mod device_memory_split;
pub mod drafter;
pub mod engine;
mod failpoints;
#[cfg(test)]
mod fixtures;
pub mod gateway_server;
pub mod heartbeat;
pub mod kv_offload;
mod layer_server;
pub mod loader;
pub mod memory;
pub mod model_loader;
pub mod placement;
pub mod progress;
mod request_key;
mod startup;
mod streaming;
mod systemd;
pub mod workers;

pub use self::failpoints::{
    BRIDGE_FAILPOINTS, FAILPOINTS, GRAMMAR_FAILPOINTS, GROUP_FAILPOINTS, LAYER_FAILPOINTS, WEIGHT_FAILPOINTS,
};

use std::{
    hash::{BuildHasher as _, RandomState},
    io::Write as _,
    path::Path,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use model::forward::{BLOCK_TOKENS, ForwardPass};
use scheduling::clock::SystemClock;
use settings::{DeviceChoice, DeviceGroup, DraftChoice};
use shmproto::message::{PROTOCOL_VERSION, Welcome};
use text::sandbox::OWN_PROGRAM;
use tokio::sync::{mpsc, oneshot};

use self::{
    adapters::Budget,
    config::{EngineKind, ExecutorConfig},
    constrained_decoding::GrammarWorkers,
    device::ArrivalNotifier,
    drafter::DrafterFactory,
    engine::{Engine, EngineLimits, drafts::Drafts, event::EngineEvent},
    gateway_server::ServerHandles,
    heartbeat::ComputeHeartbeat,
    kv_offload::CopyNotifier,
    loader::{LoadReply, Loader},
    model_loader::{ModelInfo, OpenedModel, cpu, cuda},
    progress::LoadingProgress,
};

/// Capacity of the engine's event queue; further senders wait.
const EVENT_QUEUE: usize = 1024;

/// Capacity of the loader's queue; further load calls are refused.
const LOAD_QUEUE: usize = 64;

/// Runs the process until a signal ends it.
///
/// # Errors
/// If the process cannot start, or its engine stops by itself.
pub fn run(config: &ExecutorConfig) -> anyhow::Result<()> {
    process::start_log(config.log_format);
    process::raise_file_limit();
    if let Some(cores) = config.own_cores() {
        // The members of a device group inherit the leader's cores, so all are checked here.
        startup::check_cores(
            &config.group.devices.as_ref().map_or_else(|| cores.clone(), DeviceGroup::cores),
        )?;
        startup::stay_on(cores)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the network runtime")?.block_on(async {
        let lifeline = config.exit_with_stdin.then(startup::end_of_stdin);
        startup::survive_limits_of_files()?;
        let shutdown = startup::shutdown_on_signals(Duration::from_millis(config.grace_ms), lifeline)?;
        let Some(socket) = config.socket.as_deref().filter(|_| config.engine == EngineKind::Resident) else {
            return layer_server::run(config, shutdown, say_ready).await;
        };
        let opened = config.clone();
        let settings = config.clone();
        match config.device {
            DeviceChoice::Cpu => {
                let open = move |progress: &LoadingProgress, arrivals| cpu::open(&opened, progress, arrivals);
                serve(socket, settings, open, shutdown, say_ready).await
            }
            DeviceChoice::Cuda { ordinal } => {
                let open = move |progress: &LoadingProgress, arrivals| {
                    cuda::open(&opened, ordinal, progress, arrivals)
                };
                serve(socket, settings, open, shutdown, say_ready).await
            }
        }
    })
}

/// Prints "ready" for the parent process: gateways can connect.
fn say_ready() {
    // The parent may have closed the pipe; the executor continues.
    let _ = writeln!(std::io::stdout(), "ready");
}

/// Returns the draft settings; `model` is the drafter model, if there is one.
fn drafts(config: &ExecutorConfig, model: Option<DrafterFactory>) -> Drafts {
    let by = |factory| Drafts::by(config.draft_tokens, factory);
    match &config.draft {
        DraftChoice::Off => Drafts::default(),
        DraftChoice::Auto => by(Some(DrafterFactory::ngram())).or_itself(),
        DraftChoice::Ngram => by(Some(DrafterFactory::ngram())),
        DraftChoice::EarlyExit => by(None).or_itself(),
        DraftChoice::Model(_) => by(model),
    }
}

/// Serves the model that `open` opens on `socket`. Gateways may connect before; `on_ready` is called after
/// the opening. A time from `shutdown` limits the running requests, whose end ends `serve`.
///
/// # Errors
/// If the socket cannot be bound, the model cannot be opened, or the engine stops by itself.
pub async fn serve<P, L>(
    socket: &Path,
    config: ExecutorConfig,
    open: impl FnOnce(&LoadingProgress, ArrivalNotifier) -> anyhow::Result<OpenedModel<P, L>> + Send + 'static,
    mut shutdown: mpsc::Receiver<Duration>,
    on_ready: impl FnOnce(),
) -> anyhow::Result<()>
where
    P: ForwardPass<Adapter = L::Adapter> + Send + 'static,
    L: Loader,
{
    let mut bound = gateway_server::bind(socket).await?;
    failpoint::pass("executor.after_bind");
    let (progress, watched) = LoadingProgress::new();
    let (engine_sender, events) = mpsc::channel(EVENT_QUEUE);
    let (opened_sender, opened) = oneshot::channel();
    let (ended, engine_ended) = oneshot::channel();
    let heartbeat = ComputeHeartbeat::default();
    let compute_heartbeat = heartbeat.clone();
    let send = event_sender(&engine_sender);
    let arrivals = ArrivalNotifier::new(move |id| send(EngineEvent::AdapterArrived(id)));
    let send = event_sender(&engine_sender);
    let on_copied = CopyNotifier::new(move |copy| send(EngineEvent::FileCopied(copy)));
    let waker = engine_waker(&engine_sender);
    let reply = LoadReply::from(config.cold_start());
    // The compute thread opens the model, so it owns the model from the beginning.
    let engine = spawn("engine", move || {
        let _ended = ended;
        let opened = open(&progress, arrivals)
            .and_then(|resident| prepare(resident, &config, compute_heartbeat, on_copied, waker));
        hand_over(opened, opened_sender).map_or(Ok(()), |engine| engine.run(events))
    })?;
    let opened = bound.wait_for(watched, systemd::loading, async {
        tokio::select! {
            opened = opened => opened.map(Some),
            // No request runs yet, so there is nothing to finish.
            _ = shutdown.recv() => Ok(None),
        }
    });
    let (loader, budget) = match opened.await {
        Ok(Some(opened)) => opened?,
        Ok(None) => {
            systemd::stopping();
            return Ok(());
        }
        Err(_) => anyhow::bail!("a thread panicked while it opened the model; see the log and restart"),
    };

    let (loader_sender, calls) = mpsc::channel(LOAD_QUEUE);
    let loaded = engine_sender.clone();
    // Never joined, because it may be in the middle of an unneeded file.
    spawn("loader", move || loader::run(&loader, &budget, calls, &loaded, reply))?;
    systemd::ready();
    let watchdog = tokio::spawn(systemd::report_status(heartbeat, engine_waker(&engine_sender)));
    on_ready();
    gateway_server::serve(
        bound,
        ServerHandles { engine: engine_sender, loader: loader_sender, engine_ended, shutdown },
    )
    .await;
    watchdog.abort();
    let ended = engine.join();
    ended
        .map_err(|_| anyhow::anyhow!("the engine's thread panicked; see the log and restart"))?
        .map_err(Into::into)
}

/// Returns a function that sends the engine an event, and waits while its queue is full. Events to an ended
/// engine are dropped.
fn event_sender<A>(engine: &mpsc::Sender<EngineEvent<A>>) -> impl Fn(EngineEvent<A>) + use<A> {
    let engine = engine.downgrade();
    move |event| {
        if let Some(engine) = engine.upgrade() {
            let _ = engine.blocking_send(event);
        }
    }
}

/// Returns a function that makes the engine loop once. A full queue has the same effect.
fn engine_waker<A: Send + Sync + 'static>(
    engine: &mpsc::Sender<EngineEvent<A>>,
) -> impl Fn() + Send + Sync + use<A> {
    let engine = engine.downgrade();
    move || {
        if let Some(engine) = engine.upgrade() {
            let _ = engine.try_send(EngineEvent::Wake);
        }
    }
}

fn prepare<P, L>(
    resident: OpenedModel<P, L>,
    config: &ExecutorConfig,
    heartbeat: ComputeHeartbeat,
    on_copied: CopyNotifier,
    waker: impl Fn() + Send + Sync + 'static,
) -> anyhow::Result<(Engine<P>, (L, Budget))>
where
    P: ForwardPass,
{
    let OpenedModel { pass, loader, placement, layers, budget, draft_model, info } = resident;
    let limits = limits(config, &info);
    let (cache, offload) =
        memory::open(config, &pass, &info, limits.context_length, &budget.history, on_copied)?;
    let grammars = GrammarWorkers::of_model(info.model_path.clone().into(), OWN_PROGRAM.into(), waker)?;
    let welcome = welcome(info, config, &limits, pass.vocab_size(), budget.adapters.limit_bytes());
    let engine = Engine::new(pass, limits, welcome, Box::new(SystemClock));
    let engine = engine.with_heartbeat(heartbeat).with_placement(placement).with_memory(cache, offload);
    let engine = engine.with_drafts(drafts(config, draft_model)).with_grammars(grammars);
    let adapters = Budget::new(budget.adapters.clone());
    let engine = engine.with_budget(budget);
    Ok((layers.into_iter().fold(engine, Engine::with_layers), (loader, adapters)))
}

/// Returns the engine and sends the rest. `None` if opening failed or the receiver is gone.
fn hand_over<E, L>(opened: anyhow::Result<(E, L)>, to: oneshot::Sender<anyhow::Result<L>>) -> Option<E> {
    match opened {
        Ok((engine, loader)) => to.send(Ok(loader)).is_ok().then_some(engine),
        Err(error) => {
            let _ = to.send(Err(error));
            None
        }
    }
}

pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<thread::JoinHandle<T>> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.with_context(|| format!("cannot start the {name} thread"))
}

fn limits(config: &ExecutorConfig, info: &ModelInfo) -> EngineLimits {
    let ExecutorConfig { max_running, max_waiting, max_waiting_tokens, chunk_tokens, .. } = *config;
    let context_length =
        config.context_length.map_or(info.context_length, |cap| cap.min(info.context_length));
    let kv_blocks = info.kv_blocks;
    EngineLimits { max_running, max_waiting, max_waiting_tokens, chunk_tokens, context_length, kv_blocks }
}

fn welcome(
    info: ModelInfo,
    config: &ExecutorConfig,
    limits: &EngineLimits,
    vocab_size: usize,
    adapter_budget_bytes: u64,
) -> Welcome {
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Welcome {
        version: PROTOCOL_VERSION,
        // The standard library seeds its hashers at random, so each process start gets another number.
        instance: RandomState::new().hash_one(std::process::id()),
        context_length: word(limits.context_length),
        model_path: info.model_path,
        base_hash: info.base_hash,
        text_hash: info.text_hash,
        device: info.device,
        numbers: info.numbers,
        vocab_size: word(vocab_size),
        adapter_budget_bytes,
        // The engine sets it from the block pool.
        device_budget_bytes: 0,
        cold_start: config.cold_start(),
        kv_blocks: limits.kv_blocks,
        block_tokens: word(BLOCK_TOKENS),
        max_running: word(limits.max_running),
        max_waiting: word(limits.max_waiting),
        chunk_tokens: word(limits.chunk_tokens),
        adapters: Vec::new(),
    }
}
