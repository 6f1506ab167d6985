//! Service while the model loads: gateways that send a hello receive the progress.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use shmproto::{
    codec::Wire as _,
    message::{Loading, ToExecutor, ToGateway},
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use zeromq::{SocketEvent, SocketRecv as _, SocketSend as _, ZmqMessage, util::PeerIdentity};

use super::{BoundSocket, address, frames_of, refuse, version_refusal};

/// Minimum interval between two progress messages.
const PACE: Duration = Duration::from_millis(100);

/// Maximum interval between two progress messages; a gateway takes longer silence for a hang.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Maximum number of waiting gateways, which have no bounded queue yet.
const MAX_WAITING: usize = 64;

/// Gateways that have sent a hello, with their instance numbers.
pub(super) type WaitingGateways = HashMap<PeerIdentity, u64>;

impl BoundSocket {
    /// Answers hellos with `progress` until `loaded` resolves; the same gateways are served afterwards.
    pub(crate) async fn wait_for<T>(
        &mut self,
        progress: watch::Receiver<Loading>,
        on_progress: impl Fn(&Loading),
        loaded: impl Future<Output = T>,
    ) -> T {
        tokio::pin!(loaded);
        let mut clock = interval(PACE);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut said, mut said_at) = (None, Instant::now());
        loop {
            tokio::select! {
                loaded = &mut loaded => return loaded,
                message = self.receiver.recv() => match message {
                    Ok(message) => self.receive_early(message, &progress).await,
                    Err(error) => tracing::warn!(%error, "cannot receive a message"),
                },
                Some(event) = self.departures.next() => if let SocketEvent::Disconnected(peer) = event {
                    self.waiting.remove(&peer);
                },
                _ = clock.tick() => {
                    let now = progress.borrow().clone();
                    let is_new = said.as_ref() != Some(&now);
                    if is_new {
                        on_progress(&now);
                    }
                    if is_new || said_at.elapsed() >= HEARTBEAT {
                        self.tell_all(&now).await;
                        (said, said_at) = (Some(now), Instant::now());
                    }
                }
            }
        }
    }

    async fn receive_early(&mut self, message: ZmqMessage, progress: &watch::Receiver<Loading>) {
        let Some((peer, frames)) = frames_of(message) else { return };
        let refusal = match frames.as_slice() {
            [frame] => match ToExecutor::from_bytes(frame) {
                Ok(ToExecutor::Hello(hello)) => match version_refusal(&hello) {
                    None if self.waiting.len() < MAX_WAITING || self.waiting.contains_key(&peer) => {
                        self.waiting.insert(peer.clone(), hello.instance);
                        let now = progress.borrow().clone();
                        return self.send_loading(&peer, now).await;
                    }
                    None => "too many gateways wait for the model; try again later".to_owned(),
                    Some(reason) => reason,
                },
                _ => "the first message must be Hello, before its answer no other; reconnect and send it"
                    .to_owned(),
            },
            frames => format!("the message has {} frames; send one frame", frames.len()),
        };
        self.waiting.remove(&peer);
        refuse(&mut self.sender, &*self.backend, &peer, refusal).await;
    }

    async fn tell_all(&mut self, now: &Loading) {
        let peers: Vec<PeerIdentity> = self.waiting.keys().cloned().collect();
        for peer in peers {
            self.send_loading(&peer, now.clone()).await;
        }
    }

    async fn send_loading(&mut self, peer: &PeerIdentity, now: Loading) {
        let message = Bytes::from(ToGateway::Loading(now).to_bytes());
        if self.sender.send(address(peer, message)).await.is_err() {
            self.waiting.remove(peer);
        }
    }
}
