//! The sequences of one HTTP request.

use std::sync::Arc;

use shmproto::{
    codec::Wire as _,
    message::{Generate, ProvisionalMode, RequestId, ToExecutor},
};
use tokio::sync::{Semaphore, mpsc};

use super::{
    backlog::Backlog,
    concurrency_limit::SequenceSlot,
    errors::CallError,
    link_messages::{LinkCommand, OutputRoute, RoutedEvent, SequenceEvent, StartSequence},
    queue::CommandQueue,
};
use crate::queue_delay::WaitingEntry;

/// Outputs without a token that a sequence may have: its end, the scores of its prompt.
const EMPTY_OUTPUTS: usize = 16;

/// Most outputs a sequence may have: all others carry a token, and each may come after one that says what may be in it.
fn outputs_of(sequence: &Generate) -> usize {
    let outputs = sequence.max_tokens as usize + EMPTY_OUTPUTS;
    match sequence.provisional {
        ProvisionalMode::Unwanted => outputs,
        ProvisionalMode::Wanted => outputs.saturating_mul(2),
    }
}

/// Sequences that were started together, and what they produce. Dropping it cancels those still running: this
/// is how a caller who went away frees what was being computed for them.
#[derive(Debug)]
pub struct SequenceBatch {
    /// Where each sequence runs.
    queues: Vec<CommandQueue>,
    /// Kept so that a lost sequence can be started again on the same channel.
    sink: mpsc::Sender<RoutedEvent>,
    events: mpsc::Receiver<RoutedEvent>,
    backlog: Arc<Backlog>,
    /// The running request of each sequence.
    live: Vec<Option<RequestId>>,
    /// The slot of each sequence that was lost: nobody else gets it before it is started again or given up.
    kept: Vec<Option<SequenceSlot>>,
}

impl SequenceBatch {
    /// Starts `sequences` over connection `epoch`, each in a slot of its own, for those who are `standing` in line.
    pub(super) fn start(
        queue: &CommandQueue,
        epoch: u64,
        sequences: Vec<Generate>,
        standing: &mut Vec<WaitingEntry>,
        backlog: Arc<Backlog>,
    ) -> Result<Self, CallError> {
        let tokens: Vec<usize> = sequences.iter().map(|sequence| sequence.prompt.len()).collect();
        let mut slots = queue.take_slots(&tokens)?;
        slots.iter_mut().for_each(|slot| slot.attach_waiting(standing.pop()));
        // Room for all a sequence may produce and the loss of the connection: the link never waits for a reader. The backlog
        // bounds what of it is in memory.
        let messages: usize = sequences.iter().map(|sequence| outputs_of(sequence) + 1).sum();
        let (sink, events) = mpsc::channel(messages.min(Semaphore::MAX_PERMITS));
        let (queues, live, kept) = (Vec::new(), Vec::new(), Vec::new());
        let mut batch = Self { queues, sink, events, backlog, live, kept };
        for (sequence, slot) in sequences.into_iter().zip(slots) {
            batch.add(queue, epoch, sequence, slot);
        }
        Ok(batch)
    }

    fn add(&mut self, queue: &CommandQueue, epoch: u64, sequence: Generate, slot: SequenceSlot) {
        let index = self.live.len();
        self.queues.push(queue.clone());
        self.live.push(None);
        self.kept.push(None);
        self.launch(index, epoch, sequence, slot);
    }

    /// Starts the lost sequence `index` again as `sequence`, over connection `epoch` of the executor behind `queue`, which
    /// may be another than before.
    pub(super) fn restart(
        &mut self,
        index: usize,
        queue: &CommandQueue,
        epoch: u64,
        sequence: Generate,
    ) -> Result<(), CallError> {
        let slot = match self.kept[index].take_if(|_| queue.is(&self.queues[index])) {
            Some(slot) => slot,
            None => {
                let taken = queue.take_slots(&[sequence.prompt.len()])?.pop();
                let mut slot = taken.ok_or_else(|| CallError::Unavailable("it has no slot".to_owned()))?;
                slot.attach_waiting(self.kept[index].as_mut().and_then(SequenceSlot::take_standing));
                slot
            }
        };
        self.kept[index] = None;
        self.queues[index] = queue.clone();
        self.launch(index, epoch, sequence, slot);
        Ok(())
    }

    fn launch(&mut self, index: usize, epoch: u64, mut sequence: Generate, mut slot: SequenceSlot) {
        slot.launched();
        let queue = &self.queues[index];
        let id = queue.request_id();
        sequence.request = id;
        let budget = outputs_of(&sequence);
        let message = ToExecutor::Generate(sequence).to_bytes();
        let (sink, backlog) = (self.sink.clone(), Arc::clone(&self.backlog));
        let route = OutputRoute { sink, index, budget, backlog, slot };
        self.live[index] = Some(id);
        queue.send(LinkCommand::Start(StartSequence { id, epoch, message, route }));
    }

    /// The next event of any sequence that is still running, with its index; `None` when none is.
    pub async fn next(&mut self) -> Option<(usize, SequenceEvent)> {
        while self.live.iter().any(Option::is_some) {
            let delivery = self.events.recv().await?;
            if let Some(event) = self.accept(delivery) {
                return Some(event);
            }
        }
        None
    }

    /// An event that has already arrived, if there is one.
    pub fn ready(&mut self) -> Option<(usize, SequenceEvent)> {
        while let Ok(delivery) = self.events.try_recv() {
            if let Some(event) = self.accept(delivery) {
                return Some(event);
            }
        }
        None
    }

    /// Ends sequence `index` early.
    pub fn cancel(&mut self, index: usize) {
        self.kept[index] = None;
        if let Some(id) = self.live[index].take() {
            self.queues[index].send(LinkCommand::Cancel(id));
        }
    }

    /// `None` for what a cancelled sequence still had under way.
    fn accept(
        &mut self,
        RoutedEvent { index, event, slot, bytes }: RoutedEvent,
    ) -> Option<(usize, SequenceEvent)> {
        self.backlog.remove(bytes);
        let is_current = match &event {
            SequenceEvent::Output(output) => {
                let current = self.live[index] == Some(output.request);
                if current && (output.finish.is_some() || output.error.is_some()) {
                    self.live[index] = None;
                }
                current
            }
            SequenceEvent::Lost { .. } | SequenceEvent::Full(_) => self.live[index].take().is_some(),
        };
        if is_current {
            self.kept[index] = slot;
        }
        is_current.then_some((index, event))
    }
}

impl Drop for SequenceBatch {
    fn drop(&mut self) {
        for index in 0..self.live.len() {
            self.cancel(index);
        }
    }
}
