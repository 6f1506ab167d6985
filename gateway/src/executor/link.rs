//! The one task that owns the ZeroMQ connection.
//!
//! It sends what handles queue, reads what the executor answers, and hands every output to the sequence it
//! belongs to. A lost connection ends everything in flight with one event and is then rebuilt with backoff:
//! a DEALER of this library never reconnects by itself, and only its monitor tells that the peer is gone.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::StreamExt as _;
use shmproto::{
    codec::Wire as _,
    message::{
        AdapterLoaded, AdapterUnloaded, Hello, Output, PROTOCOL_VERSION, RequestId, Stats, ToExecutor,
        ToGateway, Welcome,
    },
};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot, watch},
    time::Instant,
};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketEvent, SocketOptions, SocketRecv as _,
    SocketSend as _, ZmqMessage,
};

use super::CallError;

/// First pause before a connection is tried again; doubled up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(20);
/// Longest pause between two tries.
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// How long one try to reach the socket may take.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a loading executor may take to answer the hello.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(300);
/// Silence after which an executor that owes an answer counts as lost.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of the connection.
#[derive(Debug, Clone)]
pub enum Link {
    /// Not connected.
    Down {
        /// Why, for a person.
        reason: String,
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
pub enum Event {
    /// From the executor.
    Output(Output),
    /// The connection numbered `epoch` is gone, and the sequence with it.
    Lost {
        /// Number of the connection that was lost, or 0 before the first.
        epoch: u64,
    },
}

/// Where a sequence's outputs go.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) sink: mpsc::Sender<(usize, Event)>,
    /// Position of the sequence in its batch.
    pub(super) index: usize,
    /// Outputs that may still come; `sink` has room for them and for one [`Event::Lost`].
    pub(super) budget: usize,
    /// Given back when the link forgets the sequence.
    pub(super) slot: OwnedSemaphorePermit,
}

/// A sequence to start.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) id: RequestId,
    pub(super) message: Vec<u8>,
    pub(super) route: Route,
}

/// A call that is answered once.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: RequestId,
    pub(super) message: Vec<u8>,
    pub(super) answer: oneshot::Sender<Result<Answer, CallError>>,
}

/// The answer to a [`Call`].
#[derive(Debug)]
pub(super) enum Answer {
    Loaded(AdapterLoaded),
    Unloaded(AdapterUnloaded),
    Stats(Stats),
}

/// What handles ask of the link.
#[derive(Debug)]
pub(super) enum Command {
    Start(Start),
    Cancel(RequestId),
    Call(Call),
    Close,
}

/// Why [`LinkTask::serve`] returned.
enum End {
    Closed,
    Lost(String),
}

/// An open connection.
struct Wire {
    send: DealerSendHalf,
    receive: DealerRecvHalf,
    monitor: futures::channel::mpsc::Receiver<SocketEvent>,
}

/// The task; see the module's description.
pub(super) struct LinkTask {
    endpoint: String,
    instance: u64,
    commands: mpsc::UnboundedReceiver<Command>,
    link: watch::Sender<Link>,
    epoch: u64,
    routes: HashMap<RequestId, Route>,
    calls: HashMap<RequestId, oneshot::Sender<Result<Answer, CallError>>>,
}

impl LinkTask {
    pub(super) fn new(
        endpoint: String,
        instance: u64,
        commands: mpsc::UnboundedReceiver<Command>,
        link: watch::Sender<Link>,
    ) -> Self {
        Self { endpoint, instance, commands, link, epoch: 0, routes: HashMap::new(), calls: HashMap::new() }
    }

    pub(super) async fn run(mut self) {
        self.keep_connected().await;
        // Nothing may wait for an answer that will not come.
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
                    self.epoch += 1;
                    tracing::info!(epoch = self.epoch, model = %welcome.model_path, "connected to the base-executor");
                    self.link.send_replace(Link::Up { epoch: self.epoch, welcome: Arc::new(welcome) });
                    match self.serve(wire).await {
                        End::Closed => return,
                        End::Lost(reason) => reason,
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

    /// Connects and waits for the welcome, refusing commands meanwhile; `None` when the gateway closes.
    async fn connect(&mut self) -> Option<Result<(Wire, Welcome), String>> {
        let attempt = open(self.endpoint.clone(), self.instance);
        self.refuse_until(attempt).await
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
                    None | Some(Command::Close) => return None,
                    Some(command) => refuse(command, self.epoch),
                },
            }
        }
    }

    /// Moves messages until the connection or the gateway ends.
    async fn serve(&mut self, mut wire: Wire) -> End {
        let mut heard = Instant::now();
        loop {
            let owed = !self.calls.is_empty();
            let done = tokio::select! {
                message = wire.receive.recv() => {
                    heard = Instant::now();
                    match message {
                        Ok(message) => self.dispatch(&message),
                        Err(error) => Err(End::Lost(format!("reading from it failed: {error}"))),
                    }
                }
                command = self.commands.recv() => self.forward(command, &mut wire.send).await,
                event = wire.monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => Err(End::Lost("it closed the connection".to_owned())),
                    Some(_) => Ok(()),
                },
                () = tokio::time::sleep_until(heard + SILENCE_TIMEOUT), if owed => {
                    Err(End::Lost(format!("it owes an answer and was silent for {} s", SILENCE_TIMEOUT.as_secs())))
                }
            };
            if let Err(end) = done {
                return end;
            }
        }
    }

    async fn forward(&mut self, command: Option<Command>, send: &mut DealerSendHalf) -> Result<(), End> {
        let message = match command {
            None | Some(Command::Close) => return Err(End::Closed),
            Some(Command::Start(start)) => {
                self.routes.insert(start.id, start.route);
                start.message
            }
            Some(Command::Cancel(id)) => match self.routes.remove(&id) {
                Some(_) => ToExecutor::Cancel(id).to_bytes(),
                // It ended before its owner knew.
                None => return Ok(()),
            },
            Some(Command::Call(call)) => {
                self.calls.insert(call.id, call.answer);
                call.message
            }
        };
        send.send(ZmqMessage::from(message))
            .await
            .map_err(|error| End::Lost(format!("sending to it failed: {error}")))
    }

    fn dispatch(&mut self, message: &ZmqMessage) -> Result<(), End> {
        match read(message).map_err(End::Lost)? {
            ToGateway::Outputs(outputs) => {
                return outputs.into_iter().try_for_each(|output| self.deliver(output));
            }
            ToGateway::AdapterLoaded(loaded) => self.answer(loaded.request, Ok(Answer::Loaded(loaded))),
            ToGateway::AdapterUnloaded(unloaded) => {
                self.answer(unloaded.request, Ok(Answer::Unloaded(unloaded)))
            }
            ToGateway::Stats(stats) => self.answer(stats.request, Ok(Answer::Stats(stats))),
            ToGateway::Failed(failed) => self.answer(failed.request, Err(CallError::Refused(failed.error))),
            ToGateway::Welcome(_) => return Err(End::Lost("it sent a second welcome".to_owned())),
            ToGateway::Refused(why) => return Err(End::Lost(why)),
        }
        Ok(())
    }

    fn deliver(&mut self, output: Output) -> Result<(), End> {
        let id = output.request;
        let last = output.finish.is_some() || output.error.is_some();
        // Outputs of a cancelled sequence may still be on their way.
        let Some(route) = self.routes.get_mut(&id) else {
            return Ok(());
        };
        let Some(left) = route.budget.checked_sub(1) else {
            return Err(End::Lost(
                "it sent more outputs for a request than tokens were asked for".to_owned(),
            ));
        };
        route.budget = left;
        // Fails only when the reader is gone; its cancellation is on its way.
        let _ = route.sink.try_send((route.index, Event::Output(output)));
        if last {
            self.routes.remove(&id);
        }
        Ok(())
    }

    fn answer(&mut self, id: RequestId, result: Result<Answer, CallError>) {
        if let Some(answer) = self.calls.remove(&id) {
            // The caller may have stopped waiting.
            let _ = answer.send(result);
        }
    }

    fn take_down(&mut self, reason: &str) {
        let was_up = matches!(&*self.link.borrow(), Link::Up { .. });
        if was_up {
            tracing::warn!(reason, "lost the base-executor");
        } else {
            tracing::debug!(reason, "the base-executor is not there yet");
        }
        self.link.send_replace(Link::Down { reason: reason.to_owned() });
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

/// Answers a command as if the connection had broken right after it.
pub(super) fn refuse(command: Command, epoch: u64) {
    match command {
        Command::Start(start) => lose(start.route, epoch),
        Command::Call(call) => {
            let _ = call.answer.send(Err(CallError::Unavailable("not connected".to_owned())));
        }
        Command::Cancel(_) | Command::Close => {}
    }
}

fn lose(route: Route, epoch: u64) {
    // Fails only when the reader is gone.
    let _ = route.sink.try_send((route.index, Event::Lost { epoch }));
    drop(route.slot);
}

/// Connects, says hello, and waits for the welcome.
async fn open(endpoint: String, instance: u64) -> Result<(Wire, Welcome), String> {
    let mut options = SocketOptions::default();
    options.connect_timeout(CONNECT_TIMEOUT);
    let mut socket = DealerSocket::with_options(options);
    let monitor = socket.monitor();
    socket.connect(&endpoint).await.map_err(|error| format!("connecting to {endpoint} failed: {error}"))?;
    let (send, receive) = socket.split();
    let mut wire = Wire { send, receive, monitor };
    let hello = ToExecutor::Hello(Hello { version: PROTOCOL_VERSION, instance });
    let sent = wire.send.send(ZmqMessage::from(hello.to_bytes())).await;
    sent.map_err(|error| format!("saying hello failed: {error}"))?;
    let welcome = tokio::time::timeout(WELCOME_TIMEOUT, welcome(&mut wire)).await;
    let welcome = welcome.map_err(|_| "it did not answer the hello in time".to_owned())??;
    Ok((wire, welcome))
}

async fn welcome(wire: &mut Wire) -> Result<Welcome, String> {
    loop {
        tokio::select! {
            message = wire.receive.recv() => {
                let message = message.map_err(|error| format!("reading from it failed: {error}"))?;
                return accept(read(&message)?);
            }
            event = wire.monitor.next() => {
                if matches!(event, Some(SocketEvent::Disconnected(_)) | None) {
                    return Err("it closed the connection before its welcome".to_owned());
                }
            }
        }
    }
}

fn accept(message: ToGateway) -> Result<Welcome, String> {
    match message {
        ToGateway::Welcome(welcome) if welcome.version == PROTOCOL_VERSION => Ok(welcome),
        ToGateway::Welcome(welcome) => Err(format!(
            "it speaks protocol {}, this gateway speaks {PROTOCOL_VERSION}; install both from one release",
            welcome.version
        )),
        ToGateway::Refused(why) => Err(format!("it refused the hello: {why}")),
        _ => Err("it sent something else than a welcome".to_owned()),
    }
}

fn read(message: &ZmqMessage) -> Result<ToGateway, String> {
    let frame = match (message.get(0), message.len()) {
        (Some(frame), 1) => frame,
        (_, frames) => {
            return Err(format!("it sent a message of {frames} frames where one is expected"));
        }
    };
    ToGateway::from_bytes(frame).map_err(|error| format!("it sent a message that cannot be read: {error}"))
}
