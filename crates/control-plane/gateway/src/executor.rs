//! The base-executor as the gateway sees it: start sequences, load adapters, ask for figures.
//!
//! - [`batch`]: the sequences of one HTTP request and their outputs; dropping it cancels them. [`backlog`]: what
//!   is kept for it meanwhile.
//! - `queue`: where handles and batches put their commands; `concurrency_limit`: which sequences may be under way.
//! - [`link_messages`]: what commands ask, what is heard in return, and the state of the connection.
//! - `connection`: the one task that owns the ZeroMQ connection and fans its messages out.
//! - `handshake`: how a connection begins; `socket`: the socket itself.
//! - [`remote`]: an executor on another host: the same socket through a tunnel, and adapters' files brought there.
//! - [`errors`]: why something was not done.
//!
//! A handle never touches the socket. It queues a command for the link and waits for what comes back. The
//! command queue is bounded by what may be in it: a sequence holds a slot from its start until the link has
//! forgotten it and causes at most two commands; calls hold a slot too.

pub mod backlog;
pub mod batch;
mod concurrency_limit;
mod connection;
pub mod errors;
mod handshake;
pub mod link_messages;
mod queue;
pub mod remote;
mod socket;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use shmproto::{
    codec::Wire as _,
    message::{
        AdapterIdBytes, AdapterLoaded, AdapterPart, AdapterUnloaded, ErrorCode, Generate, LoadAdapter,
        RequestId, Stats, ToExecutor, UnloadAdapter, WireError,
    },
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use types::TenantId;

use self::{
    backlog::Backlog,
    batch::SequenceBatch,
    concurrency_limit::SequenceSlots,
    connection::LinkTask,
    link_messages::{CallReply, ExecutorCall, LinkCommand, LinkState},
    queue::CommandQueue,
    socket::ConnectTarget,
};
pub use self::{
    concurrency_limit::SlotUsage,
    errors::CallError,
    queue::SharedConnections,
    remote::{RemoteEndpoint, adapter_files::StagedFiles},
};
use crate::{queue_delay::WaitingEntry, random::random_u64};

/// Calls (load, unload, stats) that may be under way at once.
const MAX_CALLS: usize = 256;

/// Where an executor is reached.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// At its ipc socket, on this host.
    Socket(PathBuf),
    /// Through TLS, on another.
    Far(RemoteEndpoint),
}

/// What the gateway holds an executor, and what is asked of it, to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorLimits {
    /// Most sequences under way, or as many as the executor takes if that is fewer.
    pub max_sequences: usize,
    /// An executor that says nothing for about so long, though it is asked, counts as lost.
    pub silence: Duration,
}

/// A handle to the executor; clones share one connection.
#[derive(Debug, Clone)]
pub struct Executor {
    queue: CommandQueue,
    link: watch::Receiver<LinkState>,
    calls: Arc<Semaphore>,
    door: Endpoint,
    silence: Duration,
}

impl Executor {
    /// Starts the task that connects to the executor behind `door` and keeps connecting until [`Executor::close`]; with other
    /// executors it has something in `common`.
    #[must_use]
    pub fn connect(door: Endpoint, limits: ExecutorLimits, common: SharedConnections) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        let (link_sender, link) = watch::channel(LinkState::Down { reason: "not connected yet".to_owned() });
        let slots = SequenceSlots::new(limits.max_sequences, Arc::clone(&common.room));
        let silence = limits.silence;
        let peer = ConnectTarget { door: door.clone(), instance: random_u64(), silence };
        tokio::spawn(LinkTask::new(peer, received, link_sender, slots.clone()).run());
        let (queue, calls) =
            (CommandQueue::new(commands, slots, common), Arc::new(Semaphore::new(MAX_CALLS)));
        Self { queue, link, calls, door, silence }
    }

    /// Where it is, if that is another host.
    #[must_use]
    pub fn far(&self) -> Option<&RemoteEndpoint> {
        match &self.door {
            Endpoint::Socket(_) => None,
            Endpoint::Far(far) => Some(far),
        }
    }

    /// How many sequences are under way, and how many there may be.
    #[must_use]
    pub fn load(&self) -> SlotUsage {
        self.queue.load()
    }

    /// Tells those who wait for room that there may be some.
    pub(crate) fn room_changed(&self) {
        self.queue.room_changed();
    }

    /// The connection's state, to be watched.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<LinkState> {
        self.link.clone()
    }

    /// Ends the connection; whatever is in flight ends as lost.
    pub fn close(&self) {
        self.queue.send(LinkCommand::Close);
    }

    /// Starts sequences together, prepared for the executor of connection `epoch`: over any other they end as lost. The
    /// `request` field of each is chosen here. They are those who are `standing` in line: these are taken if there is room.
    /// What is not read of their outputs is counted in `backlog`.
    ///
    /// # Errors
    /// If so many are under way that there is no room for them, now or ever. Neither is asked of the executor.
    pub fn generate(
        &self,
        epoch: u64,
        sequences: Vec<Generate>,
        standing: &mut Vec<WaitingEntry>,
        backlog: Arc<Backlog>,
    ) -> Result<SequenceBatch, CallError> {
        SequenceBatch::start(&self.queue, epoch, sequences, standing, backlog)
    }

    /// Starts the lost sequence `index` of `batch` again as `sequence`, over connection `epoch` of this executor, whichever
    /// had it before.
    ///
    /// # Errors
    /// If there is no room for it.
    pub fn restart(
        &self,
        batch: &mut SequenceBatch,
        index: usize,
        epoch: u64,
        sequence: Generate,
    ) -> Result<(), CallError> {
        batch.restart(index, &self.queue, epoch, sequence)
    }

    /// Lets the executor read the files at `path`: of another host it is brought a copy, which lies there as long as what is
    /// returned lives.
    ///
    /// # Errors
    /// If it cannot be brought there, or the connection is lost meanwhile.
    pub async fn stage_files(&self, path: &Path) -> Result<StagedFiles, CallError> {
        let Some(far) = self.far() else { return Ok(StagedFiles::here(path)) };
        let mut link = self.link();
        tokio::select! {
            lent = far.upload_files(path, self.silence) => lent.map_err(|error| CallError::NotLent(error.to_string())),
            _ = link.wait_for(|link| !matches!(link, LinkState::Up { .. })) => {
                Err(CallError::Unavailable("the connection was lost while an adapter was brought there".to_owned()))
            }
        }
    }

    /// Loads an adapter from files that are lent, or several added up, each times its weight, for `owner`.
    pub async fn load_adapter(
        &self,
        lent: &[(StagedFiles, f32)],
        owner: TenantId,
    ) -> Result<AdapterLoaded, CallError> {
        let part =
            |(lent, weight): &(StagedFiles, f32)| AdapterPart { path: lent.path.clone(), weight: *weight };
        let parts = lent.iter().map(part).collect();
        let call = |request| ToExecutor::LoadAdapter(LoadAdapter { request, parts, owner: owner.0 });
        let answered = self.call(call).await.map_err(|error| match error {
            CallError::Refused(WireError { code, message }) => {
                let message = lent.iter().fold(message, |message, (lent, _)| lent.retold(&message));
                CallError::Refused(WireError { code, message })
            }
            other => other,
        });
        match answered? {
            CallReply::Loaded(loaded) => Ok(loaded),
            other => Err(unexpected(&other)),
        }
    }

    /// Drains and frees an adapter; returns when its bytes are free.
    pub async fn unload_adapter(&self, adapter: AdapterIdBytes) -> Result<AdapterUnloaded, CallError> {
        match self.call(|request| ToExecutor::UnloadAdapter(UnloadAdapter { request, adapter })).await? {
            CallReply::Unloaded(unloaded) => Ok(unloaded),
            other => Err(unexpected(&other)),
        }
    }

    /// The executor's figures.
    pub async fn stats(&self) -> Result<Stats, CallError> {
        match self.call(ToExecutor::GetStats).await? {
            CallReply::Stats(stats) => Ok(*stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns when the task that owns the connection has answered, connected or not: it is alive. False if it ended.
    pub async fn link_answers(&self) -> bool {
        let (ping, pong) = oneshot::channel();
        self.queue.send(LinkCommand::Ping(ping));
        pong.await.is_ok()
    }

    async fn call(&self, message: impl FnOnce(RequestId) -> ToExecutor) -> Result<CallReply, CallError> {
        let _slot = self.calls.try_acquire().map_err(|_| CallError::Busy {
            limit: MAX_CALLS,
            what: "calls",
            wait_s: 1,
        })?;
        let id = self.queue.request_id();
        let (answer, answered) = oneshot::channel();
        self.queue.send(LinkCommand::Call(ExecutorCall { id, message: message(id).to_bytes(), answer }));
        answered
            .await
            .unwrap_or_else(|_| Err(CallError::Unavailable("the gateway is shutting down".to_owned())))
    }
}

fn unexpected(answer: &CallReply) -> CallError {
    let message =
        format!("the base-executor answered a call with something else ({answer:?}); update both processes");
    CallError::Refused(WireError { code: ErrorCode::Internal, message })
}
