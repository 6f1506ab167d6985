//! Messages between handles and the task that owns the connection: commands, events of sequences, replies to
//! calls, and the state of the connection.

use std::sync::Arc;

use shmproto::message::{AdapterLoaded, AdapterUnloaded, Output, RequestId, Stats, TokenOutput, Welcome};
use tokio::sync::{mpsc, oneshot};

use super::{backlog::Backlog, concurrency_limit::SequenceSlot, errors::CallError};
use crate::tenant_memory::MemoryFull;

#[derive(Debug, Clone)]
pub enum LinkState {
    Down {
        reason: String,
    },
    /// Connected while the executor reads its weights.
    Loading {
        /// Current activity, in readable form.
        stage: String,
        /// Progress in percent, 0 to 100.
        percent: u32,
    },
    /// Connected, and welcomed by the executor.
    Up {
        /// Number of the connection; greater than all earlier ones.
        epoch: u64,
        welcome: Arc<Welcome>,
    },
}

#[derive(Debug)]
pub enum SequenceEvent {
    Output(Output),
    Lost {
        /// Number of the lost connection; 0 before the first.
        epoch: u64,
    },
    /// The outputs are read too slowly, and the tenant has no memory for more.
    Full(MemoryFull),
}

#[derive(Debug)]
pub(super) struct RoutedEvent {
    pub(super) index: usize,
    pub(super) event: SequenceEvent,
    /// Slot of the sequence, if the sequence ended but may be restarted.
    pub(super) slot: Option<SequenceSlot>,
    /// Bytes that the event takes in the backlog until it is read.
    pub(super) bytes: usize,
}

/// Use of the slots of sequences that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedSlots {
    Release,
    /// The sequence may be restarted in its slot, for the next stage of an answer.
    Keep,
}

/// Destination of a sequence's outputs.
#[derive(Debug)]
pub(super) struct OutputRoute {
    pub(super) sink: mpsc::UnboundedSender<RoutedEvent>,
    pub(super) index: usize,
    /// Maximum number of further outputs.
    pub(super) budget: usize,
    /// Counter of unread outputs.
    pub(super) backlog: Arc<Backlog>,
    /// Released when the link removes the sequence, unless `ended` keeps the slot.
    pub(super) slot: SequenceSlot,
    pub(super) ended: EndedSlots,
}

#[derive(Debug)]
pub(super) struct StartSequence {
    pub(super) id: RequestId,
    /// Number of the connection for which the sequence was prepared; another executor may read it
    /// differently.
    pub(super) epoch: u64,
    pub(super) message: Vec<u8>,
    pub(super) route: OutputRoute,
}

#[derive(Debug)]
pub(super) struct ExecutorCall {
    pub(super) id: RequestId,
    pub(super) message: Vec<u8>,
    pub(super) answer: oneshot::Sender<Result<CallReply, CallError>>,
}

#[derive(Debug)]
pub(super) enum CallReply {
    Loaded(AdapterLoaded),
    Unloaded(AdapterUnloaded),
    Stats(Box<Stats>),
}

#[derive(Debug)]
pub(super) enum LinkCommand {
    Start(StartSequence),
    Cancel(RequestId),
    Call(ExecutorCall),
    /// Answered by the link itself while its task runs.
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
            // The send fails only if the sender of the ping was dropped.
            let _ = pong.send(());
        }
        LinkCommand::Cancel(_) | LinkCommand::Close => {}
    }
}

/// Reports to a sequence that its connection is lost.
pub(super) fn lose(route: OutputRoute, epoch: u64) {
    let OutputRoute { sink, index, slot, .. } = route;
    // The send fails only if the reader was dropped.
    let _ =
        sink.send(RoutedEvent { index, event: SequenceEvent::Lost { epoch }, slot: Some(slot), bytes: 0 });
}

/// Returns the bytes that an output takes until it is read.
pub(super) fn bytes_of(output: &Output) -> usize {
    let tokens = |tokens: &[TokenOutput]| {
        let top = |token: &TokenOutput| size_of::<TokenOutput>() + size_of_val(&*token.top);
        tokens.iter().map(top).sum::<usize>()
    };
    let numbers = size_of_val(&*output.provisional) + size_of_val(&*output.pooled);
    size_of::<RoutedEvent>() + tokens(&output.tokens) + tokens(&output.prompt) + numbers
}
