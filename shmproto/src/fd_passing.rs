//! How a worker, or a split client on the same host, is given regions over a Unix socket.
//!
//! The executor listens on a `SOCK_SEQPACKET` socket in a private directory; a worker connects and says hello. One
//! datagram is one message, and with it come exactly the descriptors that the message calls for. Both sides check that
//! the other runs under the same user, that it speaks the same version, and that it has the same idea of the regions.
//!
//! The messages here are those of workers; those of split clients are [`crate::layer::control`]'s, over the same
//! listener and connection.
//!
//! # Layout
//!
//! - this file: the messages
//! - `connection`: sending and receiving them
//! - `listener`: how the two sides find each other

mod connection;
mod listener;

pub use self::{
    connection::{Connection, ReceiveError, SendError},
    listener::{
        AcceptError, Accepted, BoardListener, ConnectError, ConnectedPeer, ListenError, Listening, connect,
    },
};
use crate::{codec::Wire, wire_enum, wire_struct};

/// Changes whenever a message of the handover changes.
pub const HANDOVER_VERSION: u32 = 1;

/// Most bytes of a message.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Most bytes of a text in a message; longer ones are cut by who sends them and refused by who receives them.
pub const MAX_TEXT_BYTES: usize = 4096;

/// Most descriptors that come with one message.
pub const MAX_DESCRIPTORS: usize = 3;

/// What both sides must agree on in the memory they share: images and the board.
pub const LAYOUT_HASH: u64 = layout_hash(&[&crate::image::LAYOUT, &halves(crate::board::LAYOUT_HASH)]);

/// The executor's end of a connection.
pub type ExecutorEnd = Connection<ToWorker, FromWorker>;

/// The worker's end of a connection.
pub type WorkerEnd = Connection<FromWorker, ToWorker>;

/// A message that goes over a [`Connection`].
pub trait FdMessage: Wire {
    /// Descriptors that come with it, no more and no fewer; at most [`MAX_DESCRIPTORS`].
    fn descriptors(&self) -> usize;

    /// Bytes of the longest text in it; 0 if there is none.
    fn text_bytes(&self) -> usize;
}

wire_enum! {
    /// From the executor to a worker.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToWorker {
        /// The worker has a seat; with the descriptors of the control region, the x slab and the seat's sums.
        Seated(SlotGranted) = 0,
        /// It has none; the text says why and what to do. The connection ends.
        Refused(String) = 1,
        /// An adapter to map; with the descriptor of its image.
        AdapterOffered(AdapterOffered) = 2,
        /// The image of this number is not used any more: unmap it. Not answered.
        AdapterWithdrawn(u64) = 3,
        /// The executor ends; what was computed does not matter any more.
        Closing = 4,
    }
}

wire_enum! {
    /// From a worker to the executor.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromWorker {
        /// First message of a connection; answered by [`ToWorker::Seated`] or [`ToWorker::Refused`].
        Hello(WorkerHello) = 0,
        /// The image of this number is mapped: slices of it may be posted for this worker.
        AdapterMapped(u64) = 1,
        /// An image cannot be mapped; the worker leaves its slices alone.
        AdapterRejected(AdapterRejected) = 2,
    }
}

wire_struct! {
    /// Who wants a seat.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WorkerHello {
        /// [`HANDOVER_VERSION`] of the worker.
        pub version: u32,
        /// [`LAYOUT_HASH`] of the worker.
        pub layout_hash: u64,
        /// Chosen at random when the worker process starts; a restarted worker is another peer.
        pub instance: u64,
        /// The core it is pinned to.
        pub core: u32,
    }
}

wire_struct! {
    /// A seat at the board.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SlotGranted {
        /// The place at the board, from 0.
        pub seat: u16,
        /// The number of the worker that is seated; no other worker ever has it.
        pub worker: u32,
        /// Bytes of the control region, whose descriptor comes first.
        pub control_bytes: u64,
        /// Bytes of the x slab, whose descriptor comes second.
        pub x_bytes: u64,
        /// Bytes of the seat's sums, whose descriptor comes third.
        pub sums_bytes: u64,
    }
}

wire_struct! {
    /// An adapter to map.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterOffered {
        /// What slices call it; never used again for another image.
        pub image: u64,
        /// Bytes of the image.
        pub bytes: u64,
    }
}

wire_struct! {
    /// An adapter that cannot be mapped.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterRejected {
        /// The image.
        pub image: u64,
        /// Why, for a person.
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

/// Why a hello is not acceptable; the message is what the worker is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// Another version.
    #[error(
        "the worker speaks version {worker} of the handover, the executor {HANDOVER_VERSION}: run one release"
    )]
    Version {
        /// The worker's.
        worker: u32,
    },
    /// Another layout.
    #[error(
        "worker and executor disagree about the layout of shared memory: run executor and workers of one release"
    )]
    Layout,
}

impl WorkerHello {
    /// The hello of this program.
    #[must_use]
    pub fn new(instance: u64, core: u32) -> Self {
        Self { version: HANDOVER_VERSION, layout_hash: LAYOUT_HASH, instance, core }
    }

    /// Succeeds if the worker speaks as this program does.
    ///
    /// # Errors
    /// If it does not; the error's text is to be sent as [`ToWorker::Refused`].
    pub fn check(&self) -> Result<(), HelloError> {
        match (self.version, self.layout_hash) {
            (HANDOVER_VERSION, LAYOUT_HASH) => Ok(()),
            (HANDOVER_VERSION, _) => Err(HelloError::Layout),
            (worker, _) => Err(HelloError::Version { worker }),
        }
    }
}

/// `text`, cut at the end of a character to what a message may hold.
#[must_use]
pub fn bounded_text(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

const fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// FNV-1a over numbers that describe layouts.
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
