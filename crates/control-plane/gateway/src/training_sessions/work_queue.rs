//! Queue of one model's commands. Each command has a number and a future; commands may arrive in any order.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
};

use control_protocol::training::session::{Adam, CommandRefusal, Lora};
use serde_json::Value;
use tokio::sync::Notify;

use super::{batch::TrainingBatch, future_result::FutureResult, request_futures::RequestFuture};
use crate::{errors::ApiError, lock::lock};

/// Maximum number of waiting commands per model. The future of a command counts the command's bytes to the
/// tenant's memory.
const MAX_WAITING: usize = 4096;

#[derive(Debug)]
pub enum ModelCommand {
    /// Begin with a new adapter.
    Create {
        /// Size of the adapter.
        lora: Lora,
        /// Seed of the initial weights.
        seed: u64,
    },
    /// Begin or continue with the state `tinker://RUN/weights/NAME`.
    Load {
        /// Run that saved the state.
        run: String,
        name: String,
        /// Whether the optimizer state is loaded too.
        optimizer: bool,
    },
    /// Evaluate a batch of sequences.
    ForwardBackward(Box<TrainingBatch>),
    /// Run an optimizer step.
    Step(Adam),
    /// Save adapter and optimizer state.
    SaveState {
        name: String,
        /// Whether an existing state of this name is replaced.
        overwrite: bool,
        /// Time to live in seconds; `None` keeps the state until it is deleted.
        ttl_s: Option<u64>,
    },
    /// Serve the current adapter.
    Publish {
        /// Name of the adapter in the registry.
        adapter: String,
        /// Answer for the client.
        answer: Value,
        /// Time to live in seconds; `None` keeps the adapter until it is deleted.
        ttl_s: Option<u64>,
    },
    /// A refused command that still uses its number.
    Refused(CommandRefusal),
}

impl ModelCommand {
    /// Whether the command can run on a trainer that has no adapter yet.
    pub(super) fn begins(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Load { .. })
    }

    /// Bytes of the command besides those that every future counts, which cover names and small numbers.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::ForwardBackward(batch) => batch.bytes(),
            Self::Refused(refusal) => refusal.message.len(),
            _ => 0,
        }
    }
}

#[derive(Debug, Default)]
pub struct WorkQueue {
    queue: Mutex<PendingCommands>,
    arrived: Notify,
    /// Size of the model's adapter, once it has one.
    pub lora: OnceLock<Lora>,
    progress: Mutex<ModelProgress>,
}

/// Training progress of a model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct ModelProgress {
    pub has_trainer: bool,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Loss of the last evaluated batch, summed.
    pub loss: Option<f64>,
}

/// Time when a command can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandTiming {
    /// The command runs after the current one.
    Next,
    /// The command waits for earlier commands that have not arrived.
    Later,
}

#[derive(Debug, Default)]
struct PendingCommands {
    /// Number of the next command.
    next: u64,
    waiting: BTreeMap<u64, (ModelCommand, Arc<RequestFuture>)>,
    /// Whether the session has ended; later commands are refused.
    is_closed: bool,
}

impl WorkQueue {
    /// Checks that a command with this number can be queued, and returns when it can run.
    ///
    /// # Errors
    /// If too many commands wait, or the number was used before.
    pub fn check(&self, seq: u64) -> Result<CommandTiming, ApiError> {
        let queue = lock(&self.queue);
        if seq < queue.next {
            let message = format!("seq_id {seq} was done before, and its result was dropped");
            return Err(ApiError::invalid("seq_id", message));
        }
        // The next command must be accepted even if the queue is full.
        if seq == queue.next {
            return Ok(CommandTiming::Next);
        }
        if queue.waiting.len() >= MAX_WAITING {
            let message = "too many requests of this model wait; fetch some results first";
            return Err(ApiError::busy("model_queue_full", message));
        }
        Ok(CommandTiming::Later)
    }

    /// Queues a command, or refuses it if the session has ended meanwhile.
    pub fn put(&self, seq: u64, work: ModelCommand, promise: Arc<RequestFuture>) {
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            return promise.keep(session_ended());
        }
        queue.waiting.insert(seq, (work, promise));
        self.arrived.notify_one();
    }

    #[must_use]
    pub(crate) fn progress(&self) -> ModelProgress {
        *lock(&self.progress)
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut ModelProgress)) {
        change(&mut lock(&self.progress));
    }

    /// Waits for the next command and returns it.
    pub(super) async fn next(&self) -> (ModelCommand, Arc<RequestFuture>) {
        loop {
            if let Some(piece) = self.next_command() {
                return piece;
            }
            self.arrived.notified().await;
        }
    }

    /// Refuses all waiting and later commands, because the session has ended.
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

/// Returns the outcome of commands whose session has ended.
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
        let work_queue = WorkQueue::default();
        for seq in [2, 1] {
            work_queue.check(seq).unwrap();
            work_queue.put(seq, refused(&seq.to_string()), promise("p"));
        }
        assert!(work_queue.next_command().is_none(), "the first has not come");
        work_queue.put(0, refused("0"), promise("p"));
        for seq in ["0", "1", "2"] {
            let (ModelCommand::Refused(refusal), _) = work_queue.next().await else {
                panic!("another piece")
            };
            assert_eq!(refusal.message, seq);
        }
        work_queue.check(2).unwrap_err();
        work_queue.check(3).unwrap();
    }

    #[test]
    fn a_desk_that_is_full_takes_the_one_whose_turn_it_is() {
        let work_queue = WorkQueue::default();
        for seq in 1..=MAX_WAITING as u64 {
            work_queue.put(seq, refused("later"), promise("p"));
        }
        assert_eq!(work_queue.check(MAX_WAITING as u64 + 1).unwrap_err().status().as_u16(), 429);
        assert_eq!(work_queue.check(0).unwrap(), CommandTiming::Next);
    }

    #[tokio::test]
    async fn a_piece_that_comes_when_the_session_has_ended_is_refused_as_those_that_wait_are() {
        let (work_queue, waits, comes) = (WorkQueue::default(), promise("waits"), promise("comes"));
        work_queue.put(1, refused("1"), Arc::clone(&waits));
        work_queue.close();
        work_queue.put(2, refused("2"), Arc::clone(&comes));
        for promise in [waits, comes] {
            let outcome = promise.wait(Duration::ZERO).await.expect("an answer");
            assert_eq!(*outcome, session_ended());
        }
    }
}
