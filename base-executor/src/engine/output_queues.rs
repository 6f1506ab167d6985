//! What the engine says to gateways: collected during a step, sent once at its end.

use std::collections::BTreeMap;

use shmproto::message::{Output, ToGateway};
use tokio::sync::mpsc;

use super::event::{ConnectionId, RequestKey};

#[derive(Debug)]
struct Outbox {
    queue: mpsc::Sender<ToGateway>,
    outputs: Vec<Output>,
    /// Answers to calls; sent after the outputs, so that an adapter's last output precedes its unloading.
    answers: Vec<ToGateway>,
}

impl Outbox {
    /// Returns false if the gateway did not take everything. Never waits: a queue that is full has a gateway
    /// behind it that does not read.
    fn flush(&mut self) -> bool {
        let outputs = std::mem::take(&mut self.outputs);
        let outputs = (!outputs.is_empty()).then_some(ToGateway::Outputs(outputs));
        outputs.into_iter().chain(self.answers.drain(..)).all(|message| self.queue.try_send(message).is_ok())
    }
}

/// The queues of all connected gateways.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    open: BTreeMap<ConnectionId, Outbox>,
}

impl Outboxes {
    pub(super) fn open(&mut self, connection: ConnectionId, queue: mpsc::Sender<ToGateway>) {
        self.open.insert(connection, Outbox { queue, outputs: Vec::new(), answers: Vec::new() });
    }

    pub(super) fn close(&mut self, connection: ConnectionId) {
        self.open.remove(&connection);
    }

    pub(super) fn is_open(&self, connection: ConnectionId) -> bool {
        self.open.contains_key(&connection)
    }

    /// Adds to the step's outputs; dropped if the gateway is gone.
    pub(super) fn output(&mut self, to: RequestKey, output: Output) {
        if let Some(outbox) = self.open.get_mut(&to.connection) {
            outbox.outputs.push(output);
        }
    }

    /// Tells at once what may come of the step. Dropped if the gateway is gone, or behind with its messages: guesses are nothing
    /// that outputs should lack room for.
    pub(super) fn send_provisional(&self, to: RequestKey, output: Output) {
        if let Some(Outbox { queue, .. }) = self.open.get(&to.connection)
            && queue.capacity() > queue.max_capacity() / 2
        {
            let _ = queue.try_send(ToGateway::Outputs(vec![output]));
        }
    }

    /// Adds an answer; dropped if the gateway is gone.
    pub(super) fn answer(&mut self, to: ConnectionId, answer: ToGateway) {
        if let Some(outbox) = self.open.get_mut(&to) {
            outbox.answers.push(answer);
        }
    }

    /// Sends what has been collected: one [`ToGateway::Outputs`] for each gateway. Returns the gateways that did
    /// not take it.
    pub(super) fn flush(&mut self) -> Vec<ConnectionId> {
        self.open.iter_mut().filter_map(|(&id, outbox)| (!outbox.flush()).then_some(id)).collect()
    }
}
