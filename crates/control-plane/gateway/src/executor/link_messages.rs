//! What goes between the handles and the task that owns the connection: the commands, what sequences and calls hear,
//! and the state of the connection.

use std::sync::Arc;

use shmproto::message::{AdapterLoaded, AdapterUnloaded, Output, RequestId, Stats, TokenOutput, Welcome};
use tokio::sync::{mpsc, oneshot};

use super::{backlog::Backlog, concurrency_limit::SequenceSlot, errors::CallError};
use crate::tenant_memory::MemoryFull;

/// The state of the connection.
#[derive(Debug, Clone)]
pub enum LinkState {
    /// Not connected.
    Down {
        /// Why, for a person.
        reason: String,
    },
    /// Connected, and the executor reads its weights.
    Loading {
        /// What it is doing, for a person.
        stage: String,
        /// How much of it is done, 0 to 100.
        percent: u32,
    },
    /// Connected and welcomed.
    Up {
        /// Counts connections; greater than that of every earlier one.
        epoch: u64,
        /// What the executor serves.
        welcome: Arc<Welcome>,
    },
}

/// What a sequence hears.
#[derive(Debug)]
pub enum SequenceEvent {
    /// From the executor.
    Output(Output),
    /// The connection numbered `epoch` is gone, and the sequence with it.
    Lost {
        /// Number of the connection that was lost, or 0 before the first.
        epoch: u64,
    },
    /// Its outputs are read too slowly: its tenant has no memory left for more of them.
    Full(MemoryFull),
}

/// An event on its way to a batch.
#[derive(Debug)]
pub(super) struct RoutedEvent {
    /// Position of the sequence in its batch.
    pub(super) index: usize,
    pub(super) event: SequenceEvent,
    /// Its slot, if this is an end after which it may be started again.
    pub(super) slot: Option<SequenceSlot>,
    /// Bytes of the backlog that it takes until it is read.
    pub(super) bytes: usize,
}

/// Where a sequence's outputs go.
#[derive(Debug)]
pub(super) struct OutputRoute {
    pub(super) sink: mpsc::Sender<RoutedEvent>,
    /// Position of the sequence in its batch.
    pub(super) index: usize,
    /// Outputs that may still come; `sink` has room for them and for one [`SequenceEvent::Lost`].
    pub(super) budget: usize,
    /// Where outputs are counted that nobody has read.
    pub(super) backlog: Arc<Backlog>,
    /// Given back when the link forgets the sequence.
    pub(super) slot: SequenceSlot,
}

/// A sequence to start.
#[derive(Debug)]
pub(super) struct StartSequence {
    pub(super) id: RequestId,
    /// Number of the connection whose executor it was prepared for; another one might take it for something else.
    pub(super) epoch: u64,
    pub(super) message: Vec<u8>,
    pub(super) route: OutputRoute,
}

/// A call that is answered once.
#[derive(Debug)]
pub(super) struct ExecutorCall {
    pub(super) id: RequestId,
    pub(super) message: Vec<u8>,
    pub(super) answer: oneshot::Sender<Result<CallReply, CallError>>,
}

/// The answer to a [`ExecutorCall`].
#[derive(Debug)]
pub(super) enum CallReply {
    Loaded(AdapterLoaded),
    Unloaded(AdapterUnloaded),
    Stats(Box<Stats>),
}

/// What handles ask of the link.
#[derive(Debug)]
pub(super) enum LinkCommand {
    Start(StartSequence),
    Cancel(RequestId),
    Call(ExecutorCall),
    /// Answered by the link itself, as long as it moves.
    Ping(oneshot::Sender<()>),
    Close,
}

/// Answers a command as if the connection had broken right after it.
pub(super) fn refuse(command: LinkCommand, epoch: u64) {
    match command {
        LinkCommand::Start(start) => lose(start.route, epoch),
        LinkCommand::Call(call) => {
            let _ = call.answer.send(Err(CallError::Unavailable("not connected".to_owned())));
        }
        LinkCommand::Ping(pong) => {
            // Fails only when whoever asked is gone.
            let _ = pong.send(());
        }
        LinkCommand::Cancel(_) | LinkCommand::Close => {}
    }
}

/// Tells a sequence that its connection is gone.
pub(super) fn lose(route: OutputRoute, epoch: u64) {
    let OutputRoute { sink, index, slot, .. } = route;
    // Fails only when the reader is gone.
    let _ = sink.try_send(RoutedEvent {
        index,
        event: SequenceEvent::Lost { epoch },
        slot: Some(slot),
        bytes: 0,
    });
}

/// What an output takes until it is read.
pub(super) fn bytes_of(output: &Output) -> usize {
    let tokens = |tokens: &[TokenOutput]| {
        let top = |token: &TokenOutput| size_of::<TokenOutput>() + size_of_val(&*token.top);
        tokens.iter().map(top).sum::<usize>()
    };
    let numbers = size_of_val(&*output.provisional) + size_of_val(&*output.embedding);
    size_of::<RoutedEvent>() + tokens(&output.tokens) + tokens(&output.prompt) + numbers
}
