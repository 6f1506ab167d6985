//! The gateway's client of a base-executor: runs sequences, loads adapters and requests stats.
//!
//! - [`batch`]: the sequences of one HTTP request and their outputs; dropping the batch cancels them.
//! - [`backlog`]: the memory that a running request holds, charged to its tenant.
//! - [`block_feed`]: changes of the executor's KV blocks, for KV events.
//! - `queue`: the queue of commands from handles and batches; `concurrency_limit`: slots of running
//!   sequences.
//! - [`link_messages`]: commands, replies, and the state of the connection.
//! - `connection`: the one task that owns the ZeroMQ connection and distributes its messages.
//! - `handshake`: the start of a connection; `socket`: the socket itself.
//! - [`remote`]: an executor on another host, with a tunnel to its socket and uploads of adapter files.
//! - [`errors`]: why a call failed.
//!
//! A handle never touches the socket: it queues a command for the link and waits for the reply. The number of
//! queued commands is bounded. A sequence holds a slot from its start until the link has removed it, or its
//! last stage has ended, and causes at most two commands at once; calls hold slots too.

pub mod backlog;
pub mod batch;
pub(crate) mod block_feed;
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
    block_feed::BlockFeed,
    concurrency_limit::SequenceSlots,
    connection::LinkTask,
    link_messages::{CallReply, EndedSlots, ExecutorCall, LinkCommand, LinkState},
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

/// Maximum number of concurrent calls (load, unload, stats).
const MAX_CALLS: usize = 256;

#[derive(Debug, Clone)]
pub enum Endpoint {
    /// The path of an ipc socket on this host.
    Socket(PathBuf),
    /// An executor on another host, reached over TLS.
    Far(RemoteEndpoint),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSettings {
    /// Maximum number of running sequences; the executor's own limit applies if it is lower.
    pub max_sequences: usize,
    /// Silence after which an executor that was pinged counts as lost.
    pub silence: Duration,
}

/// A handle of the executor; clones share one connection.
#[derive(Debug, Clone)]
pub struct Executor {
    queue: CommandQueue,
    link: watch::Receiver<LinkState>,
    calls: Arc<Semaphore>,
    endpoint: Endpoint,
    silence: Duration,
}

impl Executor {
    /// Starts the task that connects to the executor at `endpoint`, and reconnects until [`Executor::close`].
    /// `common` is shared by all executors of the gateway.
    #[must_use]
    pub fn connect(endpoint: Endpoint, limits: LinkSettings, common: SharedConnections) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        let (link_sender, link) = watch::channel(LinkState::Down { reason: "not connected yet".to_owned() });
        let slots = SequenceSlots::new(limits.max_sequences, Arc::clone(&common.capacity_changed));
        let silence = limits.silence;
        let peer = ConnectTarget { endpoint: endpoint.clone(), instance: random_u64(), silence };
        let blocks = BlockFeed::new(peer.instance, common.block_updates.clone());
        tokio::spawn(LinkTask::new(peer, received, link_sender, slots.clone(), blocks).run());
        let (queue, calls) =
            (CommandQueue::new(commands, slots, common), Arc::new(Semaphore::new(MAX_CALLS)));
        Self { queue, link, calls, endpoint, silence }
    }

    /// Returns the endpoint of an executor on another host.
    #[must_use]
    pub(crate) fn far(&self) -> Option<&RemoteEndpoint> {
        match &self.endpoint {
            Endpoint::Socket(_) => None,
            Endpoint::Far(far) => Some(far),
        }
    }

    #[must_use]
    pub fn load(&self) -> SlotUsage {
        self.queue.load()
    }

    /// Wakes the requests that wait for capacity.
    pub(crate) fn capacity_changed(&self) {
        self.queue.capacity_changed();
    }

    #[must_use]
    pub fn link(&self) -> watch::Receiver<LinkState> {
        self.link.clone()
    }

    /// Ends the connection; running sequences and calls end as lost.
    pub fn close(&self) {
        self.queue.send(LinkCommand::Close);
    }

    /// Starts sequences together, prepared for the executor of connection `epoch`; over another connection
    /// they end as lost. The `request` field of each is assigned here. `waiting` has their queue entries,
    /// which are taken if there are slots. `ended` says whether ended sequences keep their slots. Unread
    /// outputs are counted in `backlog`.
    ///
    /// # Errors
    /// If there are not enough free slots, or never can be. Nothing is sent to the executor then.
    pub fn generate(
        &self,
        epoch: u64,
        sequences: Vec<Generate>,
        ended: EndedSlots,
        waiting: &mut Vec<WaitingEntry>,
        backlog: Arc<Backlog>,
    ) -> Result<SequenceBatch, CallError> {
        SequenceBatch::start(&self.queue, epoch, sequences, ended, waiting, backlog)
    }

    /// Starts the lost or ended sequence `index` of `batch` again as `sequence`, over connection `epoch` of
    /// this executor, which may differ from the previous executor.
    ///
    /// # Errors
    /// If there is no free slot.
    pub fn restart(
        &self,
        batch: &mut SequenceBatch,
        index: usize,
        epoch: u64,
        sequence: Generate,
    ) -> Result<(), CallError> {
        batch.restart(index, &self.queue, epoch, sequence)
    }

    /// Makes the files at `path` readable for the executor. An executor on another host gets a copy, which
    /// stays there until the returned value is dropped.
    ///
    /// # Errors
    /// If the upload fails, or the connection is lost meanwhile.
    pub(crate) async fn stage_files(&self, path: &Path) -> Result<StagedFiles, CallError> {
        let Some(far) = self.far() else { return Ok(StagedFiles::here(path)) };
        let mut link = self.link();
        tokio::select! {
            lent = far.upload_files(path, self.silence) => lent.map_err(|error| CallError::NotLent(error.to_string())),
            _ = link.wait_for(|link| !matches!(link, LinkState::Up { .. })) => {
                Err(CallError::Unavailable("the connection was lost while an adapter was sent".to_owned()))
            }
        }
    }

    /// Loads an adapter from staged files for `owner`, or the weighted sum of several.
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
                let message =
                    lent.iter().fold(message, |message, (lent, _)| lent.with_display_path(&message));
                CallError::Refused(WireError { code, message })
            }
            other => other,
        });
        match answered? {
            CallReply::Loaded(loaded) => Ok(loaded),
            other => Err(unexpected(&other)),
        }
    }

    /// Drains and frees an adapter. Returns when its memory is free.
    pub async fn unload_adapter(&self, adapter: AdapterIdBytes) -> Result<AdapterUnloaded, CallError> {
        match self.call(|request| ToExecutor::UnloadAdapter(UnloadAdapter { request, adapter })).await? {
            CallReply::Unloaded(unloaded) => Ok(unloaded),
            other => Err(unexpected(&other)),
        }
    }

    pub async fn stats(&self) -> Result<Stats, CallError> {
        match self.call(ToExecutor::GetStats).await? {
            CallReply::Stats(stats) => Ok(*stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits until the connection's task answers, connected or not. Returns false if the task has ended.
    pub(crate) async fn link_answers(&self) -> bool {
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
    let message = format!(
        "the base-executor sent an unexpected answer ({answer:?}); install both programs from one release"
    );
    CallError::Refused(WireError { code: ErrorCode::Internal, message })
}
