//! The one task that owns the ZeroMQ connection.
//!
//! The task sends the commands of handles, reads the executor's answers, and passes each output to its
//! sequence. A lost connection ends everything in flight with one event, and is then rebuilt with backoff: a
//! DEALER of this library never reconnects by itself, and only its monitor reports that the peer is gone. The
//! monitor does not report a stopped peer. So a silent peer is pinged, and counts as lost without an answer.
//! Later messages of that peer go to a socket that is no longer read.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::StreamExt as _;
use shmproto::{
    codec::Wire as _,
    message::{ErrorCode, Output, RequestId, ToExecutor, ToGateway, Welcome},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};
use zeromq::{DealerSendHalf, SocketEvent, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::{
    block_feed::BlockFeed,
    concurrency_limit::{ExecutorCapacity, SequenceSlots},
    errors::CallError,
    handshake::open,
    link_messages::{
        CallReply, EndedSlots, LinkCommand, LinkState, OutputRoute, RoutedEvent, SequenceEvent, bytes_of,
        lose, refuse,
    },
    socket::{ConnectTarget, ExecutorSocket, read},
};
use crate::tenant_memory::MemoryFull;

/// First pause before a reconnection; doubled up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// Number of ticks of silence after which an executor counts as lost; the ping is sent after the first. Ticks
/// are counted because a gateway that was itself stopped sees one tick passed, not all.
const SILENT_PARTS: u32 = 4;
/// Request id of the ping; handles use other ids.
const PROBE: RequestId = 0;

enum ServeEnd {
    Closed,
    Lost(String),
}

pub(super) struct LinkTask {
    peer: ConnectTarget,
    commands: mpsc::UnboundedReceiver<LinkCommand>,
    link: watch::Sender<LinkState>,
    slots: SequenceSlots,
    epoch: u64,
    routes: HashMap<RequestId, OutputRoute>,
    calls: HashMap<RequestId, oneshot::Sender<Result<CallReply, CallError>>>,
    /// Sequences whose cancellation is still to be sent to the executor.
    given_up: Vec<RequestId>,
    blocks: BlockFeed,
}

impl LinkTask {
    pub(super) fn new(
        peer: ConnectTarget,
        commands: mpsc::UnboundedReceiver<LinkCommand>,
        link: watch::Sender<LinkState>,
        slots: SequenceSlots,
        blocks: BlockFeed,
    ) -> Self {
        let (routes, calls) = (HashMap::new(), HashMap::new());
        Self { peer, commands, link, slots, epoch: 0, routes, calls, given_up: Vec::new(), blocks }
    }

    pub(super) async fn run(mut self) {
        self.keep_connected().await;
        // Queued commands must not wait for an answer that cannot come.
        self.commands.close();
        while let Some(command) = self.commands.recv().await {
            refuse(command, self.epoch);
        }
        self.fail_all("the gateway is shutting down");
    }

    async fn keep_connected(&mut self) {
        let mut backoff = MIN_BACKOFF;
        loop {
            let reason = match self.connect().await {
                None => return,
                Some(Err(reason)) => reason,
                Some(Ok((wire, welcome))) => {
                    backoff = MIN_BACKOFF;
                    self.bring_up(welcome);
                    match self.serve(wire).await {
                        ServeEnd::Closed => return,
                        ServeEnd::Lost(reason) => reason,
                    }
                }
            };
            self.take_down(&reason);
            if self.pause(backoff).await.is_none() {
                return;
            }
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    /// Connects and waits for the welcome, and refuses commands meanwhile; `None` when the gateway closes.
    async fn connect(&mut self) -> Option<Result<(ExecutorSocket, Welcome), String>> {
        let attempt = open(self.peer.clone(), self.link.clone());
        self.refuse_until(attempt).await
    }

    fn bring_up(&mut self, welcome: Welcome) {
        self.epoch += 1;
        tracing::info!(epoch = self.epoch, model = %welcome.model_path, "connected to the base-executor");
        self.slots.set_capacity(ExecutorCapacity {
            places: welcome.max_running as usize,
            waiting: welcome.max_waiting as usize,
            chunk_tokens: welcome.chunk_tokens as usize,
        });
        self.link.send_replace(LinkState::Up { epoch: self.epoch, welcome: Arc::new(welcome) });
    }

    async fn pause(&mut self, time: Duration) -> Option<()> {
        self.refuse_until(tokio::time::sleep(time)).await
    }

    async fn refuse_until<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(future);
        loop {
            tokio::select! {
                value = &mut future => return Some(value),
                command = self.commands.recv() => match command {
                    None | Some(LinkCommand::Close) => return None,
                    Some(command) => refuse(command, self.epoch),
                },
            }
        }
    }

    /// Sends and receives messages until the connection or the gateway ends.
    async fn serve(&mut self, mut wire: ExecutorSocket) -> ServeEnd {
        let mut silent_parts = 0;
        let part = (self.peer.silence / SILENT_PARTS).max(Duration::from_millis(1));
        let mut clock = interval_at(Instant::now() + part, part);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if let Err(end) = self.watch_blocks(&mut wire.send).await {
                return end;
            }
            let done = tokio::select! {
                // Arrived messages take precedence over the clock.
                biased;
                message = wire.receive.recv() => {
                    silent_parts = 0;
                    match message {
                        Ok(message) => match self.dispatch(&message) {
                            Ok(()) => self.cancel_given_up(&mut wire.send).await,
                            ended => ended,
                        },
                        Err(error) => Err(ServeEnd::Lost(format!("reading from it failed: {error}"))),
                    }
                }
                event = wire.monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => Err(ServeEnd::Lost("it closed the connection".to_owned())),
                    Some(_) => Ok(()),
                },
                command = self.commands.recv() => self.forward(command, &mut wire.send).await,
                _ = clock.tick() => {
                    silent_parts += 1;
                    self.probe(silent_parts, &mut wire.send).await
                }
            };
            if let Err(end) = done {
                return end;
            }
        }
    }

    /// Handles `silent_parts` ticks of silence: pings the executor after the first, gives up after the last.
    async fn probe(&self, silent_parts: u32, send: &mut DealerSendHalf) -> Result<(), ServeEnd> {
        match silent_parts {
            1 => self.transmit(ToExecutor::GetStats(PROBE).to_bytes(), send).await,
            ..=SILENT_PARTS => Ok(()),
            _ => Err(ServeEnd::Lost(format!("it sent no message for {} ms", self.peer.silence.as_millis()))),
        }
    }

    /// Requests the executor's KV blocks, if the publisher of KV events needs them.
    async fn watch_blocks(&mut self, send: &mut DealerSendHalf) -> Result<(), ServeEnd> {
        if !self.blocks.take_request() {
            return Ok(());
        }
        self.transmit(ToExecutor::WatchBlocks.to_bytes(), send).await
    }

    async fn forward(
        &mut self,
        command: Option<LinkCommand>,
        send: &mut DealerSendHalf,
    ) -> Result<(), ServeEnd> {
        let message = match command {
            None | Some(LinkCommand::Close) => return Err(ServeEnd::Closed),
            // The owner of a sequence for an earlier connection checks the new executor and restarts it.
            Some(LinkCommand::Start(start)) if start.epoch != self.epoch => {
                lose(start.route, start.epoch);
                return Ok(());
            }
            Some(LinkCommand::Start(start)) => {
                self.routes.insert(start.id, start.route);
                start.message
            }
            Some(LinkCommand::Cancel(id)) => match self.routes.remove(&id) {
                Some(_) => ToExecutor::Cancel(id).to_bytes(),
                // The sequence ended before its owner knew.
                None => return Ok(()),
            },
            Some(LinkCommand::Ping(pong)) => {
                let _ = pong.send(());
                return Ok(());
            }
            Some(LinkCommand::Call(call)) => {
                self.calls.insert(call.id, call.answer);
                call.message
            }
        };
        self.transmit(message, send).await
    }

    /// Sends a message with the same timeout as for a silent peer.
    async fn transmit(&self, message: Vec<u8>, send: &mut DealerSendHalf) -> Result<(), ServeEnd> {
        match timeout(self.peer.silence, send.send(ZmqMessage::from(message))).await {
            Ok(sent) => sent.map_err(|error| ServeEnd::Lost(format!("sending to it failed: {error}"))),
            Err(_) => {
                Err(ServeEnd::Lost(format!("it read no message for {} ms", self.peer.silence.as_millis())))
            }
        }
    }

    fn dispatch(&mut self, message: &ZmqMessage) -> Result<(), ServeEnd> {
        match read(message).map_err(ServeEnd::Lost)? {
            ToGateway::Outputs(outputs) => {
                return outputs.into_iter().try_for_each(|output| self.deliver(output));
            }
            ToGateway::AdapterLoaded(loaded) => self.answer(loaded.request, Ok(CallReply::Loaded(loaded))),
            ToGateway::AdapterUnloaded(unloaded) => {
                self.answer(unloaded.request, Ok(CallReply::Unloaded(unloaded)))
            }
            ToGateway::Stats(stats) => self.answer(stats.request, Ok(CallReply::Stats(Box::new(stats)))),
            ToGateway::Failed(failed) => self.answer(failed.request, Err(CallError::Refused(failed.error))),
            ToGateway::Blocks(updates) => self.blocks.forward(updates),
            ToGateway::Loading(_) => {
                return Err(ServeEnd::Lost("it reported loading again after its welcome".to_owned()));
            }
            ToGateway::Welcome(_) => return Err(ServeEnd::Lost("it sent a second welcome".to_owned())),
            ToGateway::Refused(why) => return Err(ServeEnd::Lost(why)),
        }
        Ok(())
    }

    fn deliver(&mut self, output: Output) -> Result<(), ServeEnd> {
        let id = output.request;
        let last = output.finish.is_some() || output.error.is_some();
        // Outputs of a cancelled sequence may still arrive.
        let Some(route) = self.routes.get_mut(&id) else {
            return Ok(());
        };
        let Some(left) = route.budget.checked_sub(1) else {
            return Err(ServeEnd::Lost(
                "it sent more outputs for a request than requested tokens".to_owned(),
            ));
        };
        route.budget = left;
        let bytes = bytes_of(&output);
        if let Err(full) = route.backlog.add(bytes) {
            self.give_up(id, full, last);
            return Ok(());
        }
        if output.error.is_none() {
            let queued_us = output.queued_us.saturating_sub(output.load_wait_us + output.kv_wait_us);
            route.slot.begun(Duration::from_micros(queued_us));
        }
        if last {
            self.end(id, output, bytes);
        } else {
            // The send fails only if the reader was dropped; its cancellation will arrive.
            let _ = route.sink.send(RoutedEvent {
                index: route.index,
                event: SequenceEvent::Output(output),
                slot: None,
                bytes,
            });
        }
        Ok(())
    }

    /// Delivers the last output of a sequence. A sequence that the executor ends because it shuts down keeps
    /// its slot, because it may be restarted on the next executor. A sequence with further stages keeps its
    /// slot as well.
    fn end(&mut self, id: RequestId, output: Output, bytes: usize) {
        let Some(OutputRoute { sink, index, slot, ended, .. }) = self.routes.remove(&id) else { return };
        let returns = match &output.error {
            Some(error) => error.code == ErrorCode::ShuttingDown,
            None => ended == EndedSlots::Keep,
        };
        let slot = returns.then_some(slot);
        let _ = sink.send(RoutedEvent { index, event: SequenceEvent::Output(output), slot, bytes });
    }

    /// Ends a sequence whose outputs exceed the memory limit, here and in the executor.
    fn give_up(&mut self, id: RequestId, full: MemoryFull, has_ended: bool) {
        let Some(OutputRoute { sink, index, .. }) = self.routes.remove(&id) else { return };
        let _ = sink.send(RoutedEvent { index, event: SequenceEvent::Full(full), slot: None, bytes: 0 });
        if !has_ended {
            self.given_up.push(id);
        }
    }

    /// Sends the cancellations of sequences that were given up.
    async fn cancel_given_up(&mut self, send: &mut DealerSendHalf) -> Result<(), ServeEnd> {
        while let Some(id) = self.given_up.pop() {
            self.transmit(ToExecutor::Cancel(id).to_bytes(), send).await?;
        }
        Ok(())
    }

    fn answer(&mut self, id: RequestId, result: Result<CallReply, CallError>) {
        if let Some(answer) = self.calls.remove(&id) {
            // The caller may have stopped waiting.
            let _ = answer.send(result);
        }
    }

    fn take_down(&mut self, reason: &str) {
        let was_up = !matches!(&*self.link.borrow(), LinkState::Down { .. });
        if was_up {
            tracing::warn!(reason, "the connection to the base-executor is lost");
        } else {
            tracing::debug!(reason, "the base-executor is not reachable yet");
        }
        self.link.send_replace(LinkState::Down { reason: reason.to_owned() });
        self.blocks.disconnect();
        self.fail_all(reason);
    }

    fn fail_all(&mut self, reason: &str) {
        for (_, route) in self.routes.drain() {
            lose(route, self.epoch);
        }
        for (_, answer) in self.calls.drain() {
            let _ = answer.send(Err(CallError::Unavailable(reason.to_owned())));
        }
    }
}
