//! The process that owns the frozen base weights, runs the resident engine, and lends the base to split clients.
//!
//! # Layout
//!
//! - [`config`]: the settings.
//! - [`bench`]: `base-executor bench`, which times the forward pass alone.
//! - [`check`]: `base-executor check`, which says whether an adapter can be used, and why not.
//! - [`device_check`]: `base-executor device`, which says whether a device can be used, and why not.
//! - [`model_loader`]: the model: forward pass, adapter loader, facts.
//! - [`engine`]: the compute thread: schedule, run, postprocess.
//! - [`budget`]: what of the host's memory may be held, and by what.
//! - [`device_memory_split`]: how keys and values and adapters divide the device.
//! - [`memory`], [`kv_offload`]: the tiers of keys and values as they are set; the bytes that are not on the device.
//! - `request_key`: whose request or call something is.
//! - [`drafter`]: who drafts for a sequence. [`constrained_decoding`]: what may come next in one that has to look like something.
//! - [`adapters`], [`loader`]: adapters of the host tier and their budget; the thread that brings them in.
//! - [`placement`], [`device`]: which adapters the device holds, as the engine sees it; the device tier.
//! - [`cold_start_model`]: what a cold start costs here, and which way is the shorter.
//! - `layer_server`: the layer service without an engine, over a base of any architecture.
//! - [`adapter_images`], [`workers`]: adapters as sealed images; the processes that compute them through shared memory.
//! - `streaming`: a base whose weights come from a disk.
//! - [`gateway_server`]: the socket the gateways talk to.
//! - [`progress`], [`heartbeat`], `systemd`: how far it is, that it lives, and who is told.
//! - `failpoints`: where tests may interfere.
//! - `process`: cores, signals, log.
//!
//! # Threads
//!
//! ```text
//! service (tokio) --events--> engine (compute) --outputs, a bounded queue for each gateway--> service
//!        `--load calls--> loader --events--> engine
//! layers' doors --calls, and rings in shared memory--> engine --answers, a bounded queue for each client--> doors
//! ```
//!
//! The engine waits for nobody. The service waits for the engine to take in events, which it does before every
//! step; the loader waits for a disk, and nobody for the loader. Helpers find out what grammars allow while the engine computes logits. So does the thread that keeps keys and values in a file.

#![forbid(unsafe_code)]

pub mod adapter_images;
pub mod adapters;
pub mod bench;
pub mod budget;
pub mod check;
pub mod cold_start_model;
pub mod config;
pub mod constrained_decoding;
pub mod device;
pub mod device_check;
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
mod process;
pub mod progress;
mod request_key;
mod streaming;
mod systemd;
pub mod workers;

pub use self::failpoints::{
    BRIDGE_FAILPOINTS, FAILPOINTS, GRAMMAR_FAILPOINTS, LAYER_FAILPOINTS, WEIGHT_FAILPOINTS,
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
use settings::{DeviceChoice, DraftChoice};
use shmproto::message::{ColdStart, PROTOCOL_VERSION, Welcome};
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
    loader::Loader,
    memory::MemorySettings,
    model_loader::{ModelFacts, OpenedModel, cpu, cuda},
    progress::LoadingProgress,
};

/// Events that wait for the engine; whoever sends more waits too.
const EVENT_QUEUE: usize = 1024;

/// Load calls that wait for the loader; more are refused.
const LOAD_QUEUE: usize = 64;

/// Runs the process until a signal ends it.
///
/// # Errors
/// If it cannot start, or its engine stops of itself.
pub fn run(config: &ExecutorConfig) -> anyhow::Result<()> {
    process::start_log(config.log_format);
    process::raise_limit_of_files();
    if let Some(cores) = &config.cores {
        process::stay_on(cores)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the network runtime")?.block_on(async {
        let lifeline = config.exit_with_stdin.then(process::end_of_stdin);
        process::survive_limits_of_files()?;
        let shutdown = process::shutdown_on_signals(Duration::from_millis(config.grace_ms), lifeline)?;
        let Some(socket) = config.socket.as_deref().filter(|_| config.engine == EngineKind::Resident) else {
            return layer_server::run(config, shutdown, say_ready).await;
        };
        let opened = config.clone();
        let settings = ServeSettings::of(config);
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

/// Tells whoever started the process that gateways can connect.
fn say_ready() {
    // It may not be listening any more; that is no reason to stop.
    let _ = writeln!(std::io::stdout(), "ready");
}

/// What [`serve`] holds itself to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeSettings {
    /// Requests computed together.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Prompt tokens of those that wait.
    pub max_waiting_tokens: usize,
    /// Prompt tokens of a step.
    pub chunk_tokens: usize,
    /// Longest sequence in tokens, if shorter than the model's own.
    pub context_length: Option<usize>,
    /// Who drafts tokens.
    pub draft: DraftChoice,
    /// Most drafted tokens of a sequence that a step verifies.
    pub draft_tokens: usize,
    /// What a request does whose adapter is not on the device.
    pub cold_start: ColdStart,
    /// The tiers of keys and values.
    pub memory: MemorySettings,
}

impl ServeSettings {
    fn of(config: &ExecutorConfig) -> Self {
        let ExecutorConfig { max_running, max_waiting, max_waiting_tokens, chunk_tokens, .. } = *config;
        Self {
            max_running,
            max_waiting,
            max_waiting_tokens,
            chunk_tokens,
            context_length: config.context_length,
            draft: config.draft.clone(),
            draft_tokens: config.draft_tokens,
            cold_start: config.cold_start(),
            memory: MemorySettings::of(config),
        }
    }

    /// Who drafts, where there may be a `model` for it.
    fn drafts(&self, model: Option<DrafterFactory>) -> Drafts {
        let by = |agency| Drafts::by(self.draft_tokens, agency);
        match &self.draft {
            DraftChoice::Off => Drafts::default(),
            DraftChoice::Auto => by(Some(DrafterFactory::ngram())).or_itself(),
            DraftChoice::Ngram => by(Some(DrafterFactory::ngram())),
            DraftChoice::EarlyExit => by(None).or_itself(),
            DraftChoice::Model(_) => by(model),
        }
    }

    fn context_length(&self, facts: &ModelFacts) -> usize {
        self.context_length.map_or(facts.context_length, |cap| cap.min(facts.context_length))
    }
}

/// Serves the model that `open` opens on `socket` until `shutdown` brings the time left to running requests, and they
/// have ended. Gateways may connect while the model is being opened; `on_ready` is called when it is.
///
/// # Errors
/// If the socket cannot be bound, the model cannot be opened, or the engine stops of itself.
pub async fn serve<P, L>(
    socket: &Path,
    settings: ServeSettings,
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
    let pulse = ComputeHeartbeat::default();
    let signs = pulse.clone();
    let tell = teller(&engine_sender);
    let arrivals = ArrivalNotifier::new(move |id| tell(EngineEvent::AdapterArrived(id)));
    let tell = teller(&engine_sender);
    let copied = CopyNotifier::new(move |copy| tell(EngineEvent::FileCopied(copy)));
    let ring = bell(&engine_sender);
    let wanted = settings.clone();
    // The thread that opens the model is the one that computes: it owns what it opens from the beginning.
    let engine = spawn("engine", move || {
        let _ended = ended;
        let opened =
            open(&progress, arrivals).and_then(|resident| prepare(resident, &wanted, signs, copied, ring));
        hand_over(opened, opened_sender).map_or(Ok(()), |engine| engine.run(events))
    })?;
    let opened = bound.wait_for(watched, systemd::loading, async {
        tokio::select! {
            opened = opened => opened.map(Some),
            // Nothing is served yet, so there is nothing to finish.
            _ = shutdown.recv() => Ok(None),
        }
    });
    let (loader, budget) = match opened.await {
        Ok(Some(opened)) => opened?,
        Ok(None) => {
            systemd::stopping();
            return Ok(());
        }
        Err(_) => anyhow::bail!("the model could not be opened by a fault; the log says more, start again"),
    };

    let (loader_sender, calls) = mpsc::channel(LOAD_QUEUE);
    let loaded = engine_sender.clone();
    // Not joined at the end: it may be in the middle of a file that nobody wants any more.
    spawn("loader", move || loader::run(&loader, &budget, calls, &loaded))?;
    systemd::ready();
    let posted = tokio::spawn(systemd::keep_posted(pulse, bell(&engine_sender)));
    on_ready();
    gateway_server::serve(
        bound,
        ServerHandles { engine: engine_sender, loader: loader_sender, engine_ended, shutdown },
    )
    .await;
    posted.abort();
    let ended = engine.join();
    ended
        .map_err(|_| anyhow::anyhow!("the engine has stopped by a fault; its log says more, start again"))?
        .map_err(Into::into)
}

/// Tells the engine something, from a thread that may wait while the engine's queue is full. If the engine has ended, nobody
/// needs to know.
fn teller<A>(engine: &mpsc::Sender<EngineEvent<A>>) -> impl Fn(EngineEvent<A>) + use<A> {
    let engine = engine.downgrade();
    move |event| {
        if let Some(engine) = engine.upgrade() {
            let _ = engine.blocking_send(event);
        }
    }
}

/// Has the engine turn, whatever else it does: a full queue makes it turn, too.
fn bell<A: Send + Sync + 'static>(engine: &mpsc::Sender<EngineEvent<A>>) -> impl Fn() + Send + Sync + use<A> {
    let engine = engine.downgrade();
    move || {
        if let Some(engine) = engine.upgrade() {
            let _ = engine.try_send(EngineEvent::Pulse);
        }
    }
}

/// An engine over an opened model, and the loader beside it.
fn prepare<P, L>(
    resident: OpenedModel<P, L>,
    settings: &ServeSettings,
    pulse: ComputeHeartbeat,
    copied: CopyNotifier,
    bell: impl Fn() + Send + Sync + 'static,
) -> anyhow::Result<(Engine<P>, (L, Budget))>
where
    P: ForwardPass,
{
    let OpenedModel { pass, loader, placement, layers, budget, draft_model, facts } = resident;
    let limits = limits(settings, &facts);
    let (cache, below) =
        memory::open(&settings.memory, &pass, &facts, limits.context_length, &budget.history, copied)?;
    let grammars = GrammarWorkers::of_model(facts.model_path.clone().into(), OWN_PROGRAM.into(), bell)?;
    let welcome = welcome(facts, settings, pass.vocab_size(), budget.adapters.limit_bytes());
    let engine = Engine::new(pass, limits, welcome, Box::new(SystemClock));
    let engine = engine.with_pulse(pulse).with_placement(placement).with_memory(cache, below);
    let engine = engine.with_drafts(settings.drafts(draft_model)).with_grammars(grammars);
    let adapters = Budget::new(budget.adapters.clone());
    let engine = engine.with_budget(budget);
    Ok((layers.into_iter().fold(engine, Engine::with_layers), (loader, adapters)))
}

/// Keeps the engine and sends the rest on. `None` if there is no engine, or nobody waits for it any more.
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

fn limits(settings: &ServeSettings, facts: &ModelFacts) -> EngineLimits {
    let ServeSettings { max_running, max_waiting, max_waiting_tokens, chunk_tokens, .. } = *settings;
    let context_length = settings.context_length(facts);
    let kv_blocks = facts.kv_blocks;
    EngineLimits { max_running, max_waiting, max_waiting_tokens, chunk_tokens, context_length, kv_blocks }
}

fn welcome(
    facts: ModelFacts,
    settings: &ServeSettings,
    vocab_size: usize,
    adapter_budget_bytes: u64,
) -> Welcome {
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Welcome {
        version: PROTOCOL_VERSION,
        // The standard library keys its hashers at random: a number no other start of the process has.
        instance: RandomState::new().hash_one(std::process::id()),
        context_length: word(settings.context_length(&facts)),
        model_path: facts.model_path,
        base_hash: facts.base_hash,
        text_hash: facts.text_hash,
        device: facts.device,
        numbers: facts.numbers,
        vocab_size: word(vocab_size),
        adapter_budget_bytes,
        // Said by whoever has the pool.
        device_budget_bytes: 0,
        cold_start: settings.cold_start,
        kv_blocks: facts.kv_blocks,
        block_tokens: word(BLOCK_TOKENS),
        max_running: word(settings.max_running),
        max_waiting: word(settings.max_waiting),
        chunk_tokens: word(settings.chunk_tokens),
        adapters: Vec::new(),
    }
}
