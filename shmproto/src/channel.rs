//! The channel of a split client on the executor's host: two rings and a slab in one region.
//!
//! The client writes its rows into the slab and a call of 64 bytes into the first ring. The executor
//! computes, writes the rows of the answer into the slab, and a reply of 64 bytes into the second ring. Each
//! ring has one writer and one reader, and each end trusts only its own count: a peer can spoil only its own
//! calls.
//!
//! # Layout
//!
//! - [`ExecutorChannel`] and [`ClientChannel`]: the two ends.
//! - [`wait_any`] and [`Doorbell`]: let the executor wait for many clients and for its own threads at once.
//! - `ring`: publishes and takes headers. `rows`: copies values to and from the slab. `layout`: offsets in
//!   the region. `memory`: the region, or the heap, as atomics.
//!
//! # Principles
//!
//! - A peer may write any value at any time. So each value is copied, then checked, then used.
//! - All memory is allocated when the channel is made, and every operation takes a bounded time.
//! - Neither end waits for capacity: a full ring is an error.
//! - A release and the acquire that pairs with it carry the same `SYNC POINT` name.
//!
//! `docs/PROTOCOL.md` draws the region byte by byte.

use thiserror::Error;

use crate::layer::HeaderError;
use crate::region::RegionError;

mod client;
mod doorbell;
mod executor;
mod layout;
mod memory;
mod ring;
mod rows;

pub use client::{ClientChannel, JoinError};
pub use doorbell::{Doorbell, WakeCause, wait_any};
pub use executor::ExecutorChannel;
pub use layout::LAYOUT_HASH;

/// Alignment of rows in the slab, in bytes: a cache line.
pub const PLACE_ALIGN: u64 = 64;

/// Maximum size of a slab in bytes: 4 GiB.
pub const MAX_SLAB_BYTES: u64 = 4 << 30;

/// Maximum number of headers in a ring.
pub const MAX_DEPTH: u32 = 1024;

/// Sizes of a channel, agreed by both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the slab in bytes: a multiple of [`PLACE_ALIGN`].
    pub slab_bytes: u64,
    /// Number of headers in each ring: a power of two.
    pub depth: u32,
}

/// Error of a geometry that no channel can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// The slab is empty, too large, or not a multiple of a cache line.
    #[error("a slab cannot have {0} bytes: ask for 64 to {MAX_SLAB_BYTES}, in multiples of {PLACE_ALIGN}")]
    Slab(u64),
    /// The ring depth is no power of two or too large.
    #[error("a ring cannot have {0} places: ask for a power of two, 1 to {MAX_DEPTH}")]
    Depth(u32),
}

impl Geometry {
    /// Returns the smallest geometry that has at least these sizes.
    ///
    /// # Errors
    /// Returns an error if a size exceeds its limit.
    pub fn rounded(slab_bytes: u64, depth: u32) -> Result<Self, GeometryError> {
        let whole = slab_bytes.max(1).checked_next_multiple_of(PLACE_ALIGN);
        let slab_bytes = whole.ok_or(GeometryError::Slab(slab_bytes))?;
        let depth = depth.checked_next_power_of_two().ok_or(GeometryError::Depth(depth))?;
        let geometry = Self { slab_bytes, depth };
        geometry.check().map(|()| geometry)
    }

    /// Checks every size against its limit.
    ///
    /// # Errors
    /// Returns the first size that is wrong.
    pub fn check(&self) -> Result<(), GeometryError> {
        let Self { slab_bytes, depth } = *self;
        if slab_bytes == 0 || slab_bytes > MAX_SLAB_BYTES || !slab_bytes.is_multiple_of(PLACE_ALIGN) {
            return Err(GeometryError::Slab(slab_bytes));
        }
        if !depth.is_power_of_two() || depth > MAX_DEPTH {
            return Err(GeometryError::Depth(depth));
        }
        Ok(())
    }

    /// Returns the size of the region in bytes; the geometry must have been checked.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        layout::slab_offset(self.depth) as u64 + self.slab_bytes
    }
}

/// Error of creating a channel.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// A size of the geometry is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The system gave no shared memory.
    #[error("the channel has no memory to share ({0})")]
    Region(#[from] RegionError),
}

/// Error of rows that do not lie within the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "{bytes} bytes of rows at byte {offset} are no place in a slab of {slab_bytes}: begin at a multiple of {PLACE_ALIGN}, \
     end within it"
)]
pub struct SlabRangeError {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes of the rows.
    pub bytes: u64,
    /// Size of the slab in bytes.
    pub slab_bytes: u64,
}

/// Error of a full ring: calls that were not taken, or replies that were not collected, fill it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("as many calls are in flight as the channel has room for: take answers first")]
pub struct RingFull;

/// Violation of the protocol by a peer; its channel is to be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    /// The counts of both ends differ by more than the ring's depth.
    #[error("the peer counts {count} and this end {ours}, in a ring of {depth} places: close the channel")]
    Jump {
        /// Count that the peer wrote.
        count: u32,
        /// Count of this end.
        ours: u32,
        /// Number of headers in the ring.
        depth: u32,
    },
    /// A header in the ring is no call, or no reply.
    #[error("the peer wrote no header ({0}): close the channel")]
    Header(#[from] HeaderError),
    /// The rows do not lie within the slab.
    #[error("the peer named a place that is none ({0}): close the channel")]
    Place(#[from] SlabRangeError),
    /// The ring of replies is full.
    #[error("the peer does not take its answers: close the channel")]
    Full,
}
