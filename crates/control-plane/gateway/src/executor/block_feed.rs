//! Passes an executor's block updates to the publisher of KV events, and never waits for it.

use shmproto::message::BlockUpdate;
use tokio::sync::mpsc;

/// Maximum number of messages that wait for the publisher.
const FEED_MESSAGES: usize = 1024;

/// Random number of the link to an executor.
pub(crate) type FeedSource = u64;

/// Block updates of one executor.
#[derive(Debug)]
pub(crate) struct FeedMessage {
    pub(crate) source: FeedSource,
    pub(crate) updates: Vec<BlockUpdate>,
}

pub(crate) fn channel() -> (mpsc::Sender<FeedMessage>, mpsc::Receiver<FeedMessage>) {
    mpsc::channel(FEED_MESSAGES)
}

/// Sender of one executor's block updates; without a channel the updates are not requested.
#[derive(Debug)]
pub(crate) struct BlockFeed {
    source: FeedSource,
    channel: Option<mpsc::Sender<FeedMessage>>,
    state: FeedState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FeedState {
    /// The executor must be asked for all its blocks.
    Unwatched,
    /// All updates since the request have been passed on.
    Following,
}

impl BlockFeed {
    pub(crate) fn new(source: FeedSource, channel: Option<mpsc::Sender<FeedMessage>>) -> Self {
        Self { source, channel, state: FeedState::Unwatched }
    }

    /// Returns true if the executor must be asked for all its blocks now: after a connection, and when the
    /// publisher has caught up after it missed updates.
    pub(crate) fn take_request(&mut self) -> bool {
        let has_room = self.channel.as_ref().is_some_and(|channel| channel.capacity() > FEED_MESSAGES / 2);
        let is_due = has_room && self.state == FeedState::Unwatched;
        if is_due {
            self.state = FeedState::Following;
        }
        is_due
    }

    /// Passes updates on. If the publisher is too slow for them, all further ones are dropped until the next
    /// request.
    pub(crate) fn forward(&mut self, updates: Vec<BlockUpdate>) {
        let Some(channel) = &self.channel else { return };
        if self.state == FeedState::Following
            && channel.try_send(FeedMessage { source: self.source, updates }).is_err()
        {
            self.state = FeedState::Unwatched;
        }
    }

    /// Reports that the executor is gone, with all its blocks.
    pub(crate) fn disconnect(&mut self) {
        self.forward(vec![BlockUpdate::Cleared]);
        self.state = FeedState::Unwatched;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_missed_updates_the_executor_is_asked_again_once_there_is_room() {
        let (sender, mut receiver) = channel();
        let mut feed = BlockFeed::new(7, Some(sender));
        assert!(feed.take_request() && !feed.take_request(), "once for a connection");
        for _ in 0..FEED_MESSAGES + 5 {
            feed.forward(Vec::new());
        }
        assert!(!feed.take_request(), "the publisher has not caught up");
        let mut received = 0;
        while let Ok(message) = receiver.try_recv() {
            assert_eq!(message.source, 7);
            received += 1;
        }
        assert_eq!(received, FEED_MESSAGES);
        feed.forward(Vec::new());
        assert!(receiver.try_recv().is_err(), "updates after a gap are of no use");
        assert!(feed.take_request());
        feed.forward(Vec::new());
        assert!(receiver.try_recv().is_ok());
    }

    #[test]
    fn nobody_is_asked_for_blocks_without_a_publisher() {
        let mut feed = BlockFeed::new(7, None);
        assert!(!feed.take_request());
        feed.forward(Vec::new());
        feed.disconnect();
    }
}
