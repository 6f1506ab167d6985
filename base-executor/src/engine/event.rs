//! The events of the compute thread, as one closed set.

use std::time::Instant;

use shmproto::message::{Generate, ToGateway, UnloadAdapter};
use tokio::sync::mpsc;
use types::AdapterId;

pub use crate::request_key::{ConnectionId, RequestKey};

use crate::{adapters::AdapterLoadOutcome, kv_offload::FileCopy};

#[derive(Debug)]
pub enum EngineEvent<A> {
    /// A gateway has sent its hello; `outbox` takes its messages.
    Connected {
        connection: ConnectionId,
        /// Bounded queue of the gateway. A gateway with a full or closed queue counts as gone.
        outbox: mpsc::Sender<ToGateway>,
    },
    /// A connected gateway has sent another hello and expects a welcome.
    Greeted(ConnectionId),
    Disconnected(ConnectionId),
    Generate {
        connection: ConnectionId,
        request: Generate,
        /// Time from which the deadline counts.
        received_at: Instant,
    },
    /// The caller is gone.
    Cancel(RequestKey),
    /// The loader thread has finished a call.
    AdapterLoaded {
        /// Caller that waits for the reply; `None` if the loader has sent it.
        caller: Option<RequestKey>,
        loaded: AdapterLoadOutcome<A>,
    },
    /// The copy of an adapter to the device has ended, complete or not.
    AdapterArrived(AdapterId),
    /// A KV block was read from or written to the disk tier, or failed to be.
    FileCopied(FileCopy),
    UnloadAdapter {
        connection: ConnectionId,
        call: UnloadAdapter,
    },
    GetStats(RequestKey),
    /// A gateway wants to know all cached KV blocks and their changes.
    WatchBlocks(ConnectionId),
    /// Wakes the loop, to show that it is alive or because a waiting sequence can continue.
    Wake,
    /// Shuts down: refuses new requests, and fails those that still run at `until`.
    Drain {
        until: Instant,
    },
}
