//! The start of a connection, from connecting the socket to the executor's welcome.

use futures::StreamExt as _;
use shmproto::{
    codec::Wire as _,
    message::{Hello, Loading, PROTOCOL_VERSION, ToExecutor, ToGateway, Welcome},
};
use tokio::{sync::watch, time::timeout};
use zeromq::{SocketEvent, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::{
    link_messages::LinkState,
    socket::{ConnectTarget, ExecutorSocket, read},
};

/// Connects, sends hello, and waits for the welcome. Publishes the executor's loading progress meanwhile.
pub(super) async fn open(
    peer: ConnectTarget,
    link: watch::Sender<LinkState>,
) -> Result<(ExecutorSocket, Welcome), String> {
    let silence = peer.silence;
    // A stopped process has a socket that can be connected to, but never answers.
    let connected = timeout(silence, connect(peer)).await;
    let mut wire = connected.map_err(|_| "it does not accept the connection".to_owned())??;
    loop {
        let message = timeout(silence, answer_of(&mut wire)).await;
        let message = message
            .map_err(|_| format!("it sent nothing for {} ms before its welcome", silence.as_millis()))??;
        match accept(message)? {
            HelloReply::Welcome(welcome) => return Ok((wire, *welcome)),
            HelloReply::Loading(Loading { stage, percent }) => {
                link.send_replace(LinkState::Loading { stage, percent: percent.min(100) });
            }
        }
    }
}

async fn connect(peer: ConnectTarget) -> Result<ExecutorSocket, String> {
    let mut wire = ExecutorSocket::open(&peer).await?;
    let hello = ToExecutor::Hello(Hello { version: PROTOCOL_VERSION, instance: peer.instance });
    let sent = wire.send.send(ZmqMessage::from(hello.to_bytes())).await;
    sent.map_err(|error| format!("sending Hello failed: {error}"))?;
    Ok(wire)
}

/// Returns the next message of an executor that has not sent its welcome.
async fn answer_of(wire: &mut ExecutorSocket) -> Result<ToGateway, String> {
    loop {
        tokio::select! {
            message = wire.receive.recv() => {
                let message = message.map_err(|error| format!("reading from it failed: {error}"))?;
                return read(&message);
            }
            event = wire.monitor.next() => {
                if matches!(event, Some(SocketEvent::Disconnected(_)) | None) {
                    return Err("it closed the connection before its welcome".to_owned());
                }
            }
        }
    }
}

enum HelloReply {
    Loading(Loading),
    Welcome(Box<Welcome>),
}

fn accept(message: ToGateway) -> Result<HelloReply, String> {
    match message {
        ToGateway::Welcome(welcome) if welcome.version == PROTOCOL_VERSION => {
            Ok(HelloReply::Welcome(Box::new(welcome)))
        }
        ToGateway::Welcome(welcome) => Err(format!(
            "it uses protocol version {} and this gateway {PROTOCOL_VERSION}; install both from one release",
            welcome.version
        )),
        ToGateway::Loading(loading) => Ok(HelloReply::Loading(loading)),
        ToGateway::Refused(why) => Err(format!("it refused the gateway: {why}")),
        _ => Err("it sent another message than a welcome".to_owned()),
    }
}
