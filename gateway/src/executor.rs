//! The base-executor as the gateway sees it: start sequences, load adapters, ask for figures.
//!
//! - [`link`]: the one task that owns the ZeroMQ connection and fans its messages out.
//! - `greeting`: how a connection begins.
//! - [`batch`]: the sequences of one HTTP request and their outputs; dropping it cancels them.
//! - `slots`: how many sequences may be under way.
//!
//! A handle never touches the socket. It queues a command for the link and waits for what comes back. The
//! command queue is bounded by what may be in it: a sequence holds a slot from its start until the link has
//! forgotten it and causes at most two commands; calls hold a slot too.

pub mod batch;
mod greeting;
pub mod link;
mod slots;
#[cfg(test)]
mod tests;

use std::{
    hash::{BuildHasher as _, RandomState},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use shmproto::{
    codec::Wire as _,
    message::{
        AdapterIdBytes, AdapterLoaded, AdapterUnloaded, ErrorCode, Generate, LoadAdapter, OwnerBytes,
        RequestId, Stats, ToExecutor, UnloadAdapter, WireError,
    },
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use self::{
    batch::{Batch, outputs_of},
    link::{Answer, Call, Command, Link, LinkTask, Peer, Route, Start},
    slots::{Slot, Slots},
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
    /// As many sequences or calls are under way as the executor takes. Said at once, without asking it.
    #[error(
        "{limit} {what} are under way, which is all the base-executor takes; try again when some have ended"
    )]
    Busy {
        /// The limit that was met.
        limit: usize,
        /// What is limited.
        what: &'static str,
    },
    /// One request has more sequences than are ever computed or wait at a time: it would be refused for ever.
    #[error(
        "{asked} sequences are asked for at once, but the base-executor takes {limit} in all; ask for fewer"
    )]
    TooMany {
        /// Sequences of the request.
        asked: usize,
        /// Sequences there may be.
        limit: usize,
    },
}

/// A handle to the executor; clones share one connection.
#[derive(Debug, Clone)]
pub struct Executor {
    commands: mpsc::UnboundedSender<Command>,
    link: watch::Receiver<Link>,
    slots: Slots,
    calls: Arc<Semaphore>,
    next_request: Arc<AtomicU64>,
}

impl Executor {
    /// Starts the task that connects to the ROUTER at `socket` and keeps connecting until [`Executor::close`]. At most
    /// `max_sequences` are under way, or as many as the executor takes if that is fewer. An executor that says nothing
    /// for about `silence`, though it is asked, counts as lost.
    #[must_use]
    pub fn connect(socket: &Path, max_sequences: usize, silence: Duration) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        let (link_sender, link) = watch::channel(Link::Down { reason: "not connected yet".to_owned() });
        let slots = Slots::new(max_sequences);
        let endpoint = format!("ipc://{}", socket.display());
        let peer = Peer { endpoint, instance: random_u64(), silence };
        tokio::spawn(LinkTask::new(peer, received, link_sender, slots.clone()).run());
        Self {
            commands,
            link,
            slots,
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            next_request: Arc::new(AtomicU64::new(1)),
        }
    }

    /// How many sequences there may be at once, running and waiting together.
    #[must_use]
    pub fn max_sequences(&self) -> usize {
        self.slots.limit()
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
    ///
    /// # Errors
    /// If so many are under way that there is no room for them, now or ever. Neither is asked of the executor.
    pub fn generate(&self, sequences: Vec<Generate>) -> Result<Batch, CallError> {
        let slots = self.take_slots(sequences.len())?;
        // Room for all a sequence may produce and the loss of the connection: the link never waits for a reader.
        let messages: usize = sequences.iter().map(|sequence| outputs_of(sequence) + 1).sum();
        let (sink, events) = mpsc::channel(messages.min(Semaphore::MAX_PERMITS));
        let mut batch = Batch::new(self.clone(), sink, events);
        for (sequence, slot) in sequences.into_iter().zip(slots) {
            batch.start(sequence, slot);
        }
        Ok(batch)
    }

    /// Fails if there is no room for a single sequence now: asked before a request is read, so that a flood of them
    /// costs next to nothing.
    ///
    /// # Errors
    /// If all slots are taken.
    pub fn check_room(&self) -> Result<(), CallError> {
        let limit = self.slots.limit();
        if self.slots.is_full() { Err(CallError::Busy { limit, what: "sequences" }) } else { Ok(()) }
    }

    fn take_slots(&self, asked: usize) -> Result<Vec<Slot>, CallError> {
        let limit = self.slots.limit();
        if asked > limit {
            return Err(CallError::TooMany { asked, limit });
        }
        self.slots.take(asked).ok_or(CallError::Busy { limit, what: "sequences" })
    }

    /// Loads an adapter from its files, for `owner`.
    pub async fn load_adapter(&self, path: &Path, owner: OwnerBytes) -> Result<AdapterLoaded, CallError> {
        let path = path.display().to_string();
        let call = |request| ToExecutor::LoadAdapter(LoadAdapter { request, path, owner });
        match self.call(call).await? {
            Answer::Loaded(loaded) => Ok(loaded),
            other => Err(unexpected(&other)),
        }
    }

    /// Drains and frees an adapter; returns when its bytes are free.
    pub async fn unload_adapter(&self, adapter: AdapterIdBytes) -> Result<AdapterUnloaded, CallError> {
        match self.call(|request| ToExecutor::UnloadAdapter(UnloadAdapter { request, adapter })).await? {
            Answer::Unloaded(unloaded) => Ok(unloaded),
            other => Err(unexpected(&other)),
        }
    }

    /// The executor's figures.
    pub async fn stats(&self) -> Result<Stats, CallError> {
        match self.call(ToExecutor::GetStats).await? {
            Answer::Stats(stats) => Ok(*stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns when the task that owns the connection has answered, connected or not: it is alive. False if it ended.
    pub async fn link_answers(&self) -> bool {
        let (ping, pong) = oneshot::channel();
        self.send(Command::Ping(ping));
        pong.await.is_ok()
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
