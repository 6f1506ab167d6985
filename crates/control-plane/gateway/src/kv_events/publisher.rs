//! The sockets of KV events: PUB for batches, and ROUTER to repeat missed ones.
//!
//! A slow reader never delays others: ZeroMQ drops messages of a reader whose queue is full, and each batch
//! has a number, so that the reader can ask for the dropped ones.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::body::Bytes;
use tokio::{sync::mpsc, time::timeout};
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqError, ZmqMessage};

use super::{
    batch::encode,
    prefix_index::{NamesById, PrefixEvent, PrefixIndex},
};
use crate::{
    adapters::Registry,
    config::KvEventsConfig,
    executor::block_feed::{self, FeedMessage},
    lock::lock,
};

/// Limits of the batches that can be repeated; the oldest are dropped.
const MAX_REPEATED_BATCHES: usize = 10_000;
const MAX_REPEATED_BYTES: usize = 64 << 20;
/// Time in which a reader must take one repeated batch.
const REPEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of the message that ends a repetition.
const END_OF_REPETITION: [u8; 8] = [0xff; 8];

/// Reason why KV events cannot be published.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events at {address}: {source}; choose another address")]
pub struct KvEventsError {
    address: String,
    source: ZmqError,
}

/// Published batches, by number.
#[derive(Debug, Default)]
struct BatchHistory {
    batches: VecDeque<(u64, Bytes)>,
    bytes: usize,
}

impl BatchHistory {
    fn push(&mut self, number: u64, batch: Bytes) {
        self.bytes += batch.len();
        self.batches.push_back((number, batch));
        while self.batches.len() > MAX_REPEATED_BATCHES || self.bytes > MAX_REPEATED_BYTES {
            let Some((_, oldest)) = self.batches.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }

    fn since(&self, number: u64) -> Vec<(u64, Bytes)> {
        self.batches.iter().filter(|(known, _)| *known >= number).cloned().collect()
    }
}

/// Publisher of the host's KV events.
pub(crate) struct KvEventPublisher {
    updates: mpsc::Receiver<FeedMessage>,
    socket: PubSocket,
    topic: Bytes,
    repeater: Option<RouterSocket>,
    history: Arc<Mutex<BatchHistory>>,
    index: PrefixIndex,
    next_number: u64,
}

impl KvEventPublisher {
    /// Binds the sockets, if there are any; returns the publisher and the channel of its block updates.
    ///
    /// # Errors
    /// If an address is in use or invalid.
    pub(crate) async fn bind(
        config: Option<&KvEventsConfig>,
    ) -> Result<Option<(mpsc::Sender<FeedMessage>, Self)>, KvEventsError> {
        let Some(config) = config else { return Ok(None) };
        let mut socket = PubSocket::new();
        bind(&mut socket, &config.endpoint).await?;
        let repeater = match &config.replay_endpoint {
            None => None,
            Some(address) => {
                let mut repeater = RouterSocket::new();
                bind(&mut repeater, address).await?;
                Some(repeater)
            }
        };
        let (sender, updates) = block_feed::channel();
        let publisher = Self {
            updates,
            socket,
            topic: Bytes::from(config.topic.clone()),
            repeater,
            history: Arc::default(),
            index: PrefixIndex::default(),
            next_number: 0,
        };
        Ok(Some((sender, publisher)))
    }

    /// Publishes events until the task is aborted, with the adapter names of `registry`.
    pub(crate) async fn run(mut self, registry: Arc<Registry>) {
        let repeating = self.repeater.take().map(|socket| repeat(socket, Arc::clone(&self.history)));
        let publishing = async {
            // A reader may know blocks of an earlier process.
            self.publish(&[PrefixEvent::Cleared]).await;
            while let Some(FeedMessage { source, updates }) = self.updates.recv().await {
                let events = self.index.apply(source, updates, &names_of(&registry));
                if !events.is_empty() {
                    self.publish(&events).await;
                }
            }
        };
        match repeating {
            None => publishing.await,
            Some(repeating) => _ = tokio::join!(publishing, repeating),
        }
    }

    async fn publish(&mut self, events: &[PrefixEvent]) {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let batch = Bytes::from(encode(seconds, events));
        let number = self.next_number;
        self.next_number += 1;
        lock(&self.history).push(number, batch.clone());
        let mut message = ZmqMessage::from(self.topic.clone());
        message.push_back(Bytes::copy_from_slice(&number.to_be_bytes()));
        message.push_back(batch);
        if let Err(error) = self.socket.send(message).await {
            tracing::warn!(%error, number, "cannot publish a batch of KV events");
        }
    }
}

fn names_of(registry: &Registry) -> NamesById {
    let mut names = NamesById::new();
    for (name, entry) in registry.entries().iter() {
        names.entry(entry.id().0).or_default().push(name.as_str().into());
    }
    names
}

async fn bind(socket: &mut impl zeromq::Socket, address: &str) -> Result<(), KvEventsError> {
    let bound = socket.bind(address).await;
    bound.map(drop).map_err(|source| KvEventsError { address: address.to_owned(), source })
}

/// Answers requests of `[identity, "", number]` with all known batches from that number on.
async fn repeat(mut socket: RouterSocket, history: Arc<Mutex<BatchHistory>>) {
    loop {
        let Ok(request) = socket.recv().await else { continue };
        let frames = request.into_vec();
        let [reader, _, number] = &frames[..] else { continue };
        let Ok(number) = <[u8; 8]>::try_from(&number[..]) else { continue };
        let known = lock(&history).since(u64::from_be_bytes(number));
        let end = (END_OF_REPETITION, Bytes::new());
        for (number, batch) in
            known.into_iter().map(|(number, batch)| (number.to_be_bytes(), batch)).chain([end])
        {
            let mut message = ZmqMessage::from(reader.clone());
            message.push_back(Bytes::new());
            message.push_back(Bytes::copy_from_slice(&number));
            message.push_back(batch);
            if !matches!(timeout(REPEAT_TIMEOUT, socket.send(message)).await, Ok(Ok(()))) {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_batches_are_dropped_beyond_the_limits() {
        let mut history = BatchHistory::default();
        for number in 0..MAX_REPEATED_BATCHES as u64 + 3 {
            history.push(number, Bytes::from_static(b"batch"));
        }
        assert_eq!(history.since(0).len(), MAX_REPEATED_BATCHES);
        assert_eq!(history.since(0)[0].0, 3);
        history.push(20_000, Bytes::from(vec![0; MAX_REPEATED_BYTES - 7]));
        assert_eq!(history.since(0).len(), 2, "large batches leave no room for more");
        history.push(20_001, Bytes::from(vec![0; MAX_REPEATED_BYTES + 1]));
        assert!(history.since(0).is_empty() && history.bytes == 0);
    }
}
