//! The process that owns the frozen base weights and runs the resident engine.
//!
//! # Layout
//!
//! - [`config`]: the settings.
//! - [`bench`]: `base-executor bench`, which times the forward pass alone.
//! - [`resident`]: the model: forward pass, adapter loader, facts.
//! - [`engine`]: the compute thread: schedule, run, postprocess.
//! - [`adapters`], [`loader`]: resident adapters and their budget; the thread that brings them in.
//! - [`service`]: the socket the gateways talk to.
//! - `process`: cores, signals, log.
//!
//! # Threads
//!
//! ```text
//! service (tokio) --events--> engine (compute) --outputs, a bounded queue for each gateway--> service
//!        `--load calls--> loader --events--> engine
//! ```
//!
//! The engine waits for nobody. The service waits for the engine to take in events, which it does before every
//! step; the loader waits for a disk, and nobody for the loader.

#![forbid(unsafe_code)]

pub mod adapters;
pub mod bench;
pub mod config;
pub mod engine;
pub mod loader;
mod process;
pub mod resident;
pub mod service;

use std::{
    hash::{BuildHasher as _, RandomState},
    io::Write as _,
    path::Path,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use model::forward::{BLOCK_TOKENS, ForwardPass};
use shmproto::message::{PROTOCOL_VERSION, Welcome};
use tokio::sync::{mpsc, oneshot};

use self::{
    adapters::Budget,
    config::Config,
    engine::{Engine, Limits, SystemClock},
    loader::Loader,
    resident::{Facts, Resident},
    service::Doors,
};

/// Events that wait for the engine; whoever sends more waits too.
const EVENT_QUEUE: usize = 1024;

/// Load calls that wait for the loader; more are refused.
const LOAD_QUEUE: usize = 64;

/// Runs the process until a signal ends it.
///
/// # Errors
/// If it cannot start, or its engine stops of itself.
pub fn run(config: &Config) -> anyhow::Result<()> {
    process::start_log(config.log_format);
    if let Some(cores) = &config.cores {
        process::stay_on(cores)?;
    }
    let resident = resident::open(config)?;
    let settings = Settings::of(config, resident.facts.context_length);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the network runtime")?.block_on(async {
        let lifeline = config.exit_with_stdin.then(process::end_of_stdin);
        let shutdown = process::shutdown_on_signals(Duration::from_millis(config.grace_ms), lifeline)?;
        serve(&config.socket, settings, resident, shutdown, say_ready).await
    })
}

/// Tells whoever started the process that gateways can connect.
fn say_ready() {
    // It may not be listening any more; that is no reason to stop.
    let _ = writeln!(std::io::stdout(), "ready");
}

/// What [`serve`] holds itself to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Requests computed together.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Prompt tokens of a step.
    pub chunk_tokens: usize,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Bytes of all adapters.
    pub adapter_bytes: u64,
}

impl Settings {
    fn of(config: &Config, model_context_length: usize) -> Self {
        let Config { max_running, max_waiting, chunk_tokens, .. } = *config;
        let context_length =
            config.context_length.map_or(model_context_length, |cap| cap.min(model_context_length));
        Self { max_running, max_waiting, chunk_tokens, context_length, adapter_bytes: config.adapter_bytes.0 }
    }
}

/// Serves `resident` on `socket` until `shutdown` brings the time left to running requests, and they have ended.
/// Calls `on_ready` once gateways can connect.
///
/// # Errors
/// If the socket cannot be bound or the engine stops of itself.
pub async fn serve<P, L>(
    socket: &Path,
    settings: Settings,
    resident: Resident<P, L>,
    shutdown: mpsc::Receiver<Duration>,
    on_ready: impl FnOnce(),
) -> anyhow::Result<()>
where
    P: ForwardPass<Adapter = L::Adapter> + Send + 'static,
    L: Loader,
{
    let bound = service::bind(socket).await?;
    let Resident { pass, loader, facts } = resident;
    let (engine_sender, events) = mpsc::channel(EVENT_QUEUE);
    let (loader_sender, calls) = mpsc::channel(LOAD_QUEUE);
    let (ended, engine_ended) = oneshot::channel();

    let limits = limits(&settings, &facts);
    let welcome = welcome(facts, &settings, pass.vocab_size());
    let engine = spawn("engine", move || {
        let _ended = ended;
        Engine::new(pass, limits, welcome, Box::new(SystemClock)).run(events);
    })?;
    let (budget, loaded) = (Budget::new(settings.adapter_bytes), engine_sender.clone());
    // Not joined at the end: it may be in the middle of a file that nobody wants any more.
    spawn("loader", move || loader::run(&loader, &budget, calls, &loaded))?;

    on_ready();
    service::serve(bound, Doors { engine: engine_sender, loader: loader_sender, engine_ended, shutdown })
        .await;
    engine
        .join()
        .map_err(|_| anyhow::anyhow!("the engine has stopped by a fault; its log says more, start again"))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> anyhow::Result<thread::JoinHandle<()>> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.with_context(|| format!("cannot start the {name} thread"))
}

fn limits(settings: &Settings, facts: &Facts) -> Limits {
    let Settings { max_running, max_waiting, chunk_tokens, context_length, .. } = *settings;
    Limits { max_running, max_waiting, chunk_tokens, context_length, kv_blocks: facts.kv_blocks }
}

fn welcome(facts: Facts, settings: &Settings, vocab_size: usize) -> Welcome {
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Welcome {
        version: PROTOCOL_VERSION,
        // The standard library keys its hashers at random: a number no other start of the process has.
        instance: RandomState::new().hash_one(std::process::id()),
        model_path: facts.model_path,
        base_hash: facts.base_hash,
        context_length: word(settings.context_length),
        vocab_size: word(vocab_size),
        adapter_budget_bytes: settings.adapter_bytes,
        kv_blocks: facts.kv_blocks,
        block_tokens: word(BLOCK_TOKENS),
        adapters: Vec::new(),
    }
}
