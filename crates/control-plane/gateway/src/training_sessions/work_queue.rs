//! What one model is to do: pieces of work, each with its number and its promise, which may come in any order.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
};

use control_protocol::training::session::{Adam, CommandRefusal, Lora};
use serde_json::Value;
use tokio::sync::Notify;

use super::{batch::TrainingBatch, future_result::FutureResult, request_futures::RequestFuture};
use crate::{errors::ApiError, lock::lock};

/// Pieces of work that a model may have waiting. Their bytes count to their tenant's memory, in their promises.
const MAX_WAITING: usize = 4096;

/// A piece of work.
#[derive(Debug)]
pub enum ModelCommand {
    /// Begin with a new adapter.
    Create {
        /// How large it is.
        lora: Lora,
        /// Decides its first numbers.
        seed: u64,
    },
    /// Begin, or go on, with the state `tinker://RUN/weights/NAME`.
    Load {
        /// The run that kept the state.
        run: String,
        /// The state's name.
        name: String,
        /// The optimizer's numbers too.
        optimizer: bool,
    },
    /// Evaluate.
    ForwardBackward(Box<TrainingBatch>),
    /// Make a step.
    Step(Adam),
    /// Keep a state.
    SaveState {
        /// Under this name.
        name: String,
        /// In the place of one that has it.
        overwrite: bool,
        /// For so many seconds; `None` is until it is deleted.
        ttl_s: Option<u64>,
    },
    /// Serve the adapter.
    Publish {
        /// What it is called in the registry.
        adapter: String,
        /// What the client is told.
        answer: Value,
        /// For so many seconds; `None` is until it is deleted.
        ttl_s: Option<u64>,
    },
    /// Nothing: it was refused, but has its number.
    Refused(CommandRefusal),
}

impl ModelCommand {
    /// Whether it can be done by a trainer that has no adapter yet.
    pub(super) fn begins(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Load { .. })
    }

    /// Bytes that the piece keeps besides those that every promise is counted with, which cover names and small numbers.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::ForwardBackward(batch) => batch.bytes(),
            Self::Refused(refusal) => refusal.message.len(),
            _ => 0,
        }
    }
}

/// What a model is to do, and what is known of it.
#[derive(Debug, Default)]
pub struct WorkQueue {
    queue: Mutex<PendingCommands>,
    arrived: Notify,
    /// Of its adapter, once it has one.
    pub lora: OnceLock<Lora>,
    progress: Mutex<ModelProgress>,
}

/// How far a model is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ModelProgress {
    /// Whether somebody trains it.
    pub has_trainer: bool,
    /// Steps that were made.
    pub steps: u64,
    /// Of the last batch that was evaluated, summed.
    pub loss: Option<f64>,
}

/// When a piece of work can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandTiming {
    /// As soon as the piece that is under way is done.
    Next,
    /// After pieces that have not come yet.
    Later,
}

#[derive(Debug, Default)]
struct PendingCommands {
    /// The number whose turn it is.
    next: u64,
    waiting: BTreeMap<u64, (ModelCommand, Arc<RequestFuture>)>,
    /// Whether the session has ended: what still comes is refused.
    is_closed: bool,
}

impl WorkQueue {
    /// Checks that a piece of this number can be taken, and says when its turn is.
    ///
    /// # Errors
    /// Too much is waiting, or the number has had its turn.
    pub fn check(&self, seq: u64) -> Result<CommandTiming, ApiError> {
        let queue = lock(&self.queue);
        if seq < queue.next {
            let message = format!("seq_id {seq} was done before, and its result is not kept any more");
            return Err(ApiError::invalid("seq_id", message));
        }
        // Whatever else waits, the piece whose turn it is must get in.
        if seq == queue.next {
            return Ok(CommandTiming::Next);
        }
        if queue.waiting.len() >= MAX_WAITING {
            let message = "too many requests of this model wait for their turn; fetch some results first";
            return Err(ApiError::busy("model_queue_full", message));
        }
        Ok(CommandTiming::Later)
    }

    /// Takes a piece in; refuses it if the session has ended meanwhile.
    pub fn put(&self, seq: u64, work: ModelCommand, promise: Arc<RequestFuture>) {
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            return promise.keep(session_ended());
        }
        queue.waiting.insert(seq, (work, promise));
        self.arrived.notify_one();
    }

    /// How far the model is.
    #[must_use]
    pub fn progress(&self) -> ModelProgress {
        *lock(&self.progress)
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut ModelProgress)) {
        change(&mut lock(&self.progress));
    }

    /// The next piece, once it is there.
    pub(super) async fn next(&self) -> (ModelCommand, Arc<RequestFuture>) {
        loop {
            if let Some(piece) = self.next_command() {
                return piece;
            }
            self.arrived.notified().await;
        }
    }

    /// Refuses all that waits, and all that still comes: the session has ended.
    pub(super) fn close(&self) {
        let waiting = {
            let mut queue = lock(&self.queue);
            queue.is_closed = true;
            std::mem::take(&mut queue.waiting)
        };
        for (_, promise) in waiting.into_values() {
            promise.keep(session_ended());
        }
    }

    fn next_command(&self) -> Option<(ModelCommand, Arc<RequestFuture>)> {
        let mut queue = lock(&self.queue);
        let next = queue.next;
        let piece = queue.waiting.remove(&next)?;
        queue.next += 1;
        Some(piece)
    }
}

/// What becomes of work whose session has ended.
pub(super) fn session_ended() -> FutureResult {
    FutureResult::Failed(CommandRefusal::server("the session of this model has ended"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        tenant_memory::{MemoryLimits, TenantMemory},
        training_sessions::request_futures::{InsertedFuture, RequestFutures},
    };

    fn promise(id: &str) -> Arc<RequestFuture> {
        let memory = TenantMemory::new(MemoryLimits::default()).reserve(&"alice".into(), 0).unwrap();
        match RequestFutures::default().make(id, memory).unwrap() {
            InsertedFuture::Now(promise) => promise,
            InsertedFuture::Before => panic!("it is new"),
        }
    }

    fn refused(word: &str) -> ModelCommand {
        ModelCommand::Refused(CommandRefusal::user(word))
    }

    #[tokio::test]
    async fn a_piece_of_work_is_done_in_its_turn_and_once() {
        let desk = WorkQueue::default();
        for seq in [2, 1] {
            desk.check(seq).unwrap();
            desk.put(seq, refused(&seq.to_string()), promise("p"));
        }
        assert!(desk.next_command().is_none(), "the first has not come");
        desk.put(0, refused("0"), promise("p"));
        for seq in ["0", "1", "2"] {
            let (ModelCommand::Refused(refusal), _) = desk.next().await else { panic!("another piece") };
            assert_eq!(refusal.message, seq);
        }
        desk.check(2).unwrap_err();
        desk.check(3).unwrap();
    }

    #[test]
    fn a_desk_that_is_full_takes_the_one_whose_turn_it_is() {
        let desk = WorkQueue::default();
        for seq in 1..=MAX_WAITING as u64 {
            desk.put(seq, refused("later"), promise("p"));
        }
        assert_eq!(desk.check(MAX_WAITING as u64 + 1).unwrap_err().status().as_u16(), 429);
        assert_eq!(desk.check(0).unwrap(), CommandTiming::Next);
    }

    #[tokio::test]
    async fn a_piece_that_comes_when_the_session_has_ended_is_refused_as_those_that_wait_are() {
        let (desk, waits, comes) = (WorkQueue::default(), promise("waits"), promise("comes"));
        desk.put(1, refused("1"), Arc::clone(&waits));
        desk.close();
        desk.put(2, refused("2"), Arc::clone(&comes));
        for promise in [waits, comes] {
            let outcome = promise.wait(Duration::ZERO).await.expect("an answer");
            assert_eq!(*outcome, session_ended());
        }
    }
}
