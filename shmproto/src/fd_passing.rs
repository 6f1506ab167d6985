//! Passes regions over a Unix socket to workers, and to split clients on the same host.
//!
//! The executor listens on a `SOCK_SEQPACKET` socket in a private directory; a worker connects and sends a
//! hello. One datagram is one message and carries exactly the descriptors that the message requires. Both
//! sides check that the other runs under the same user and has the same protocol version and the same layout
//! of the regions.
//!
//! This module defines the messages of workers. The messages of split clients are in
//! [`crate::layer::control`] and use the same listener and connection.
//!
//! # Layout
//!
//! - this file: the messages
//! - `connection`: sends and receives messages with descriptors
//! - `listener`: listens, accepts and connects

mod connection;
mod listener;

pub use self::{
    connection::{Connection, ReceiveError, SendError},
    listener::{
        AcceptError, Accepted, BoardListener, ConnectError, ConnectedPeer, ListenError, Listening, connect,
    },
};
use crate::{codec::Wire, wire_enum, wire_struct};

/// Version of the handover; it changes whenever a message of the handover changes.
pub const HANDOVER_VERSION: u32 = 1;

/// Maximum size of a message in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Maximum size of a text in bytes; the sender cuts longer texts, the receiver refuses them.
pub const MAX_TEXT_BYTES: usize = 4096;

/// Maximum number of descriptors with one message.
pub const MAX_DESCRIPTORS: usize = 3;

/// Hash of the shared memory layouts, images and the board, on which both sides must agree.
pub const LAYOUT_HASH: u64 = layout_hash(&[&crate::image::LAYOUT, &halves(crate::board::LAYOUT_HASH)]);

/// Executor's end of a connection to a worker.
pub type ExecutorEnd = Connection<ToWorker, FromWorker>;

/// Worker's end of a connection to the executor.
pub type WorkerEnd = Connection<FromWorker, ToWorker>;

/// Message that a [`Connection`] can carry.
pub trait FdMessage: Wire {
    /// Returns the exact number of descriptors with this message; at most [`MAX_DESCRIPTORS`].
    fn descriptors(&self) -> usize;

    /// Returns the size of the message's longest text in bytes; 0 if there is none.
    fn text_bytes(&self) -> usize;
}

wire_enum! {
    /// Message from the executor to a worker.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToWorker {
        /// Admission with the descriptors of the control region, the x slab and the slot's sums.
        Seated(SlotGranted) = 0,
        /// Refusal of the hello; the text says why and what to do. The connection ends.
        Refused(String) = 1,
        /// Offer of an adapter to map, with the descriptor of its image.
        AdapterOffered(AdapterOffered) = 2,
        /// Withdrawal of the image with this number: the worker unmaps it. Not answered.
        AdapterWithdrawn(u64) = 3,
        /// End of the executor; computed sums do not matter any more.
        Closing = 4,
    }
}

wire_enum! {
    /// Message from a worker to the executor.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromWorker {
        /// First message of a connection; answered by [`ToWorker::Seated`] or [`ToWorker::Refused`].
        Hello(WorkerHello) = 0,
        /// The image with this number is mapped: its slices may be posted for this worker.
        AdapterMapped(u64) = 1,
        /// The worker cannot map an image and does not claim its slices.
        AdapterRejected(AdapterRejected) = 2,
    }
}

wire_struct! {
    /// Identity of a worker that requests a worker slot.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WorkerHello {
        /// [`HANDOVER_VERSION`] of the worker.
        pub version: u32,
        /// [`LAYOUT_HASH`] of the worker.
        pub layout_hash: u64,
        /// Random number of the worker process; a restarted worker is another peer.
        pub instance: u64,
        /// Core to which the worker is pinned.
        pub core: u32,
    }
}

wire_struct! {
    /// Admission to a worker slot of the board.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SlotGranted {
        /// Index of the worker slot, from 0.
        pub seat: u16,
        /// Number of the worker, never given to another one.
        pub worker: u32,
        /// Size of the control region in bytes; its descriptor comes first.
        pub control_bytes: u64,
        /// Size of the x slab in bytes; its descriptor comes second.
        pub x_bytes: u64,
        /// Size of the slot's sums region in bytes; its descriptor comes third.
        pub sums_bytes: u64,
    }
}

wire_struct! {
    /// Adapter that the worker should map.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterOffered {
        /// Number that slices use for the image; never used again for another image.
        pub image: u64,
        /// Size of the image in bytes.
        pub bytes: u64,
    }
}

wire_struct! {
    /// Adapter that the worker cannot map.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterRejected {
        /// Number of the refused image.
        pub image: u64,
        /// Reason in words for a person.
        pub reason: String,
    }
}

impl FdMessage for ToWorker {
    fn descriptors(&self) -> usize {
        match self {
            Self::Seated(_) => MAX_DESCRIPTORS,
            Self::AdapterOffered(_) => 1,
            Self::Refused(_) | Self::AdapterWithdrawn(_) | Self::Closing => 0,
        }
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::Refused(text) => text.len(),
            _ => 0,
        }
    }
}

impl FdMessage for FromWorker {
    fn descriptors(&self) -> usize {
        0
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::AdapterRejected(rejected) => rejected.reason.len(),
            _ => 0,
        }
    }
}

/// Error of an unacceptable hello; its text is sent to the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The worker speaks another version of the handover.
    #[error(
        "the worker speaks version {worker} of the handover, the executor {HANDOVER_VERSION}: run one release"
    )]
    Version {
        /// Version of the worker.
        worker: u32,
    },
    /// The worker has another layout of shared memory.
    #[error(
        "worker and executor disagree about the layout of shared memory: run executor and workers of one release"
    )]
    Layout,
}

impl WorkerHello {
    /// Creates the hello of this program.
    #[must_use]
    pub fn new(instance: u64, core: u32) -> Self {
        Self { version: HANDOVER_VERSION, layout_hash: LAYOUT_HASH, instance, core }
    }

    /// Checks that the worker's version and layout are this program's.
    ///
    /// # Errors
    /// Returns the difference as an error, whose text is to be sent as [`ToWorker::Refused`].
    pub fn check(&self) -> Result<(), HelloError> {
        match (self.version, self.layout_hash) {
            (HANDOVER_VERSION, LAYOUT_HASH) => Ok(()),
            (HANDOVER_VERSION, _) => Err(HelloError::Layout),
            (worker, _) => Err(HelloError::Version { worker }),
        }
    }
}

/// Cuts `text` to [`MAX_TEXT_BYTES`] at a character boundary.
#[must_use]
pub fn bounded_text(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

const fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Returns FNV-1a over the numbers that describe layouts.
#[must_use]
pub const fn layout_hash(layouts: &[&[u32]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut layout = 0;
    while layout < layouts.len() {
        let mut at = 0;
        while at < layouts[layout].len() {
            hash = (hash ^ layouts[layout][at] as u64).wrapping_mul(0x0100_0000_01b3);
            at += 1;
        }
        layout += 1;
    }
    hash
}
