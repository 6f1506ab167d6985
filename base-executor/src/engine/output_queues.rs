//! Messages to gateways, collected from events and during a step, and sent before and after it.

use std::collections::BTreeMap;

use shmproto::message::{Output, ToGateway};
use tokio::sync::mpsc;

use super::event::{ConnectionId, RequestKey};

#[derive(Debug)]
struct OutputQueue {
    queue: mpsc::Sender<ToGateway>,
    outputs: Vec<Output>,
    /// Replies to calls, sent after the outputs, so that an adapter's last output precedes its unloading.
    answers: Vec<ToGateway>,
}

impl OutputQueue {
    /// Sends all messages without waiting; returns false if the queue is full or closed.
    fn flush(&mut self) -> bool {
        let outputs = std::mem::take(&mut self.outputs);
        let outputs = (!outputs.is_empty()).then_some(ToGateway::Outputs(outputs));
        outputs.into_iter().chain(self.answers.drain(..)).all(|message| self.queue.try_send(message).is_ok())
    }
}

#[derive(Debug, Default)]
pub(super) struct OutputQueues {
    open: BTreeMap<ConnectionId, OutputQueue>,
}

impl OutputQueues {
    pub(super) fn open(&mut self, connection: ConnectionId, queue: mpsc::Sender<ToGateway>) {
        self.open.insert(connection, OutputQueue { queue, outputs: Vec::new(), answers: Vec::new() });
    }

    pub(super) fn close(&mut self, connection: ConnectionId) {
        self.open.remove(&connection);
    }

    pub(super) fn is_open(&self, connection: ConnectionId) -> bool {
        self.open.contains_key(&connection)
    }

    /// Adds an output to the step; drops it if the gateway is gone.
    pub(super) fn output(&mut self, to: RequestKey, output: Output) {
        if let Some(outbox) = self.open.get_mut(&to.connection) {
            outbox.outputs.push(output);
        }
    }

    /// Sends provisional tokens at once. Drops them if the gateway is gone, or if its queue is half full, to
    /// leave capacity for outputs.
    pub(super) fn send_provisional(&self, to: RequestKey, output: Output) {
        if let Some(OutputQueue { queue, .. }) = self.open.get(&to.connection)
            && queue.capacity() > queue.max_capacity() / 2
        {
            let _ = queue.try_send(ToGateway::Outputs(vec![output]));
        }
    }

    /// Adds a reply; drops it if the gateway is gone.
    pub(super) fn answer(&mut self, to: ConnectionId, answer: ToGateway) {
        if let Some(outbox) = self.open.get_mut(&to) {
            outbox.answers.push(answer);
        }
    }

    /// Sends the collected messages, with one [`ToGateway::Outputs`] per gateway. Returns the gateways that
    /// did not take them.
    pub(super) fn flush(&mut self) -> Vec<ConnectionId> {
        self.open.iter_mut().filter_map(|(&id, outbox)| (!outbox.flush()).then_some(id)).collect()
    }
}
