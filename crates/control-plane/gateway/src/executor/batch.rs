//! The sequences of one HTTP request, and their outputs.

use std::sync::Arc;

use shmproto::{
    codec::Wire as _,
    message::{Generate, ProvisionalMode, RequestId, ToExecutor},
};
use tokio::sync::mpsc;

use super::{
    backlog::Backlog,
    concurrency_limit::SequenceSlot,
    errors::CallError,
    link_messages::{EndedSlots, LinkCommand, OutputRoute, RoutedEvent, SequenceEvent, StartSequence},
    queue::CommandQueue,
};
use crate::queue_delay::WaitingEntry;

/// Maximum number of outputs without a token per sequence: its end, and the scores of its prompt.
const EMPTY_OUTPUTS: usize = 16;

/// Maximum number of outputs of a sequence. All but [`EMPTY_OUTPUTS`] carry a token, and each may follow a
/// provisional output.
fn outputs_of(sequence: &Generate) -> usize {
    let outputs = sequence.max_tokens as usize + EMPTY_OUTPUTS;
    match sequence.provisional {
        ProvisionalMode::Unwanted => outputs,
        ProvisionalMode::Wanted => outputs.saturating_mul(2),
    }
}

/// Sequences that were started together. Dropping the batch cancels them, so a disconnected client frees
/// slots.
#[derive(Debug)]
pub struct SequenceBatch {
    /// Queue of each sequence's executor.
    queues: Vec<CommandQueue>,
    /// Kept so that a lost sequence can be restarted on the same channel.
    sink: mpsc::UnboundedSender<RoutedEvent>,
    events: mpsc::UnboundedReceiver<RoutedEvent>,
    backlog: Arc<Backlog>,
    /// Request id of each running sequence.
    live: Vec<Option<RequestId>>,
    /// Whether a sequence that ended keeps its slot.
    ended: EndedSlots,
    /// Slot of each lost or ended sequence, reserved until the sequence is restarted, cancelled or released.
    kept: Vec<Option<SequenceSlot>>,
}

impl SequenceBatch {
    /// Starts `sequences` over connection `epoch`, each in its own slot, with the queue entries `waiting`.
    pub(super) fn start(
        queue: &CommandQueue,
        epoch: u64,
        sequences: Vec<Generate>,
        ended: EndedSlots,
        waiting: &mut Vec<WaitingEntry>,
        backlog: Arc<Backlog>,
    ) -> Result<Self, CallError> {
        let tokens: Vec<usize> = sequences.iter().map(|sequence| sequence.prompt.len()).collect();
        let mut slots = queue.take_slots(&tokens)?;
        slots.iter_mut().for_each(|slot| slot.attach_waiting(waiting.pop()));
        // The budget of each sequence bounds the number of events, and the backlog their bytes in memory.
        let (sink, events) = mpsc::unbounded_channel();
        let (queues, live, kept) = (Vec::new(), Vec::new(), Vec::new());
        let mut batch = Self { queues, sink, events, backlog, live, ended, kept };
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

    /// Restarts the lost or ended sequence `index` as `sequence`, over connection `epoch` of the executor of
    /// `queue`.
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
                slot.attach_waiting(self.kept[index].as_mut().and_then(SequenceSlot::take_waiting));
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
        let route = OutputRoute { sink, index, budget, backlog, slot, ended: self.ended };
        self.live[index] = Some(id);
        queue.send(LinkCommand::Start(StartSequence { id, epoch, message, route }));
    }

    /// Waits for the next event of a running sequence, with its index; `None` when none is running.
    pub async fn next(&mut self) -> Option<(usize, SequenceEvent)> {
        while self.live.iter().any(Option::is_some) {
            let delivery = self.events.recv().await?;
            if let Some(event) = self.accept(delivery) {
                return Some(event);
            }
        }
        None
    }

    /// Returns an event that has already arrived, if there is one.
    pub fn ready(&mut self) -> Option<(usize, SequenceEvent)> {
        while let Ok(delivery) = self.events.try_recv() {
            if let Some(event) = self.accept(delivery) {
                return Some(event);
            }
        }
        None
    }

    pub(crate) fn cancel(&mut self, index: usize) {
        self.kept[index] = None;
        if let Some(id) = self.live[index].take() {
            self.queues[index].send(LinkCommand::Cancel(id));
        }
    }

    /// Releases the slot of the sequence `index`, which ended for good.
    pub(crate) fn release(&mut self, index: usize) {
        self.kept[index] = None;
    }

    /// Filters an event; `None` for outputs of a cancelled sequence that were still in transit.
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
