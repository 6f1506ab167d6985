//! What the compute thread reacts to: one closed set.

use std::time::Instant;

use shmproto::message::{Generate, ToGateway, UnloadAdapter};
use tokio::sync::mpsc;
use types::AdapterId;

pub use crate::request_key::{ConnectionId, RequestKey};

use crate::{adapters::AdapterLoadOutcome, kv_offload::FileCopy};

/// Something the engine reacts to.
#[derive(Debug)]
pub enum EngineEvent<A> {
    /// A gateway has said hello; what it is sent goes to `outbox`.
    Connected {
        /// Its name from now on.
        connection: ConnectionId,
        /// Its bounded queue. Full or closed, the gateway counts as gone.
        outbox: mpsc::Sender<ToGateway>,
    },
    /// A connected gateway has said hello again and is owed a welcome.
    Greeted(ConnectionId),
    /// A gateway is gone.
    Disconnected(ConnectionId),
    /// A request.
    Generate {
        /// Who asks.
        connection: ConnectionId,
        /// The prompt, and how its answer is to be made.
        request: Generate,
        /// When its deadline began to run.
        received_at: Instant,
    },
    /// The caller went away.
    Cancel(RequestKey),
    /// The loader thread is done with a call.
    AdapterLoaded {
        /// Who called.
        caller: RequestKey,
        /// What became of it.
        loaded: AdapterLoadOutcome<A>,
    },
    /// All of an adapter is on the device, or its way there has ended early.
    AdapterArrived(AdapterId),
    /// A block of keys and values was read from the file of the disk tier, or written there.
    FileCopied(FileCopy),
    /// An adapter is to be freed.
    UnloadAdapter {
        /// Who asks.
        connection: ConnectionId,
        /// For which.
        call: UnloadAdapter,
    },
    /// The figures are asked for.
    GetStats(RequestKey),
    /// Somebody looks whether the loop turns, or has found something out that a request waits for.
    Pulse,
    /// The process is to end: refuse what is new, finish what runs, give up what still runs at `until`.
    Drain {
        /// When to give up.
        until: Instant,
    },
}
