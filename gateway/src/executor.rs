//! The base-executor as the gateway sees it: start sequences, load adapters, ask for figures.
//!
//! - [`link`]: the one task that owns the ZeroMQ connection and fans its messages out.
//! - [`batch`]: the sequences of one HTTP request and their outputs; dropping it cancels them.
//!
//! A handle never touches the socket. It queues a command for the link and waits for what comes back. The
//! command queue is bounded by what may be in it: a sequence holds a slot of `--max-sequences` from its
//! start until the link has forgotten it and causes at most two commands; calls hold a slot too.

pub mod batch;
pub mod link;

use std::{
    hash::{BuildHasher as _, RandomState},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use shmproto::{
    codec::Wire as _,
    message::{
        AdapterLoaded, AdapterUnloaded, ErrorCode, Generate, GenerationBytes, LoadAdapter, RequestId, Stats,
        ToExecutor, UnloadAdapter, WireError,
    },
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use self::{
    batch::{Batch, outputs_of},
    link::{Answer, Call, Command, Link, LinkTask, Route, Start},
};

/// Calls (load, unload, stats) that may be under way at once.
const MAX_CALLS: usize = 256;

/// Why the executor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No executor is connected, or the connection broke before the answer came.
    #[error(
        "the base-executor is not reachable ({0}); it is reconnected to automatically, try again shortly"
    )]
    Unavailable(String),
    /// It answered with a typed error.
    #[error("{}", .0.message)]
    Refused(WireError),
    /// More sequences or calls are under way than the gateway lets through.
    #[error("the gateway has {limit} {what} under way, which is its limit; try again when some have ended")]
    Busy {
        /// The limit that was met.
        limit: usize,
        /// What is limited.
        what: &'static str,
    },
}

/// A handle to the executor; clones share one connection.
#[derive(Debug, Clone)]
pub struct Executor {
    commands: mpsc::UnboundedSender<Command>,
    link: watch::Receiver<Link>,
    slots: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    max_sequences: usize,
    next_request: Arc<AtomicU64>,
}

impl Executor {
    /// Starts the task that connects to the ROUTER at `socket` and keeps connecting until [`Executor::close`].
    #[must_use]
    pub fn connect(socket: &Path, max_sequences: usize) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        let (link_sender, link) = watch::channel(Link::Down { reason: "not connected yet".to_owned() });
        let endpoint = format!("ipc://{}", socket.display());
        tokio::spawn(LinkTask::new(endpoint, random_u64(), received, link_sender).run());
        Self {
            commands,
            link,
            slots: Arc::new(Semaphore::new(max_sequences)),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            max_sequences,
            next_request: Arc::new(AtomicU64::new(1)),
        }
    }

    /// The connection's state, to be watched.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<Link> {
        self.link.clone()
    }

    /// Ends the connection; whatever is in flight ends as lost.
    pub fn close(&self) {
        // The link task is gone only when it was closed before.
        let _ = self.commands.send(Command::Close);
    }

    /// Starts sequences together. The `request` field of each is chosen here.
    pub fn generate(&self, sequences: Vec<Generate>) -> Result<Batch, CallError> {
        let count = u32::try_from(sequences.len()).unwrap_or(u32::MAX);
        let mut permits = Arc::clone(&self.slots)
            .try_acquire_many_owned(count)
            .map_err(|_| CallError::Busy { limit: self.max_sequences, what: "sequences" })?;
        // Room for all a sequence may produce and the loss of the connection: the link never waits for a reader.
        let messages: usize = sequences.iter().map(|sequence| outputs_of(sequence) + 1).sum();
        let (sink, events) = mpsc::channel(messages.min(Semaphore::MAX_PERMITS));
        let mut batch = Batch::new(self.clone(), sink, events);
        for sequence in sequences {
            // There is a permit for each.
            if let Some(slot) = permits.split(1) {
                batch.start(sequence, slot);
            }
        }
        Ok(batch)
    }

    /// Loads an adapter from its files.
    pub async fn load_adapter(&self, path: &Path) -> Result<AdapterLoaded, CallError> {
        let path = path.display().to_string();
        match self.call(|request| ToExecutor::LoadAdapter(LoadAdapter { request, path })).await? {
            Answer::Loaded(loaded) => Ok(loaded),
            other => Err(unexpected(&other)),
        }
    }

    /// Drains and frees a generation; returns when its bytes are free.
    pub async fn unload_adapter(&self, generation: GenerationBytes) -> Result<AdapterUnloaded, CallError> {
        match self.call(|request| ToExecutor::UnloadAdapter(UnloadAdapter { request, generation })).await? {
            Answer::Unloaded(unloaded) => Ok(unloaded),
            other => Err(unexpected(&other)),
        }
    }

    /// The executor's figures.
    pub async fn stats(&self) -> Result<Stats, CallError> {
        match self.call(ToExecutor::GetStats).await? {
            Answer::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        }
    }

    async fn call(&self, message: impl FnOnce(RequestId) -> ToExecutor) -> Result<Answer, CallError> {
        let _slot =
            self.calls.try_acquire().map_err(|_| CallError::Busy { limit: MAX_CALLS, what: "calls" })?;
        let id = self.request_id();
        let (answer, answered) = oneshot::channel();
        self.send(Command::Call(Call { id, message: message(id).to_bytes(), answer }));
        answered
            .await
            .unwrap_or_else(|_| Err(CallError::Unavailable("the gateway is shutting down".to_owned())))
    }

    fn request_id(&self) -> RequestId {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    fn send(&self, command: Command) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            link::refuse(command, u64::MAX);
        }
    }
}

fn unexpected(answer: &Answer) -> CallError {
    let message =
        format!("the base-executor answered a call with something else ({answer:?}); update both processes");
    CallError::Refused(WireError { code: ErrorCode::Internal, message })
}

/// A number nobody can foresee without watching this process: for seeds and instance numbers, not for secrets.
#[must_use]
pub fn random_u64() -> u64 {
    // The standard library keys every `RandomState` from the operating system's generator.
    RandomState::new().hash_one(0u8)
}
