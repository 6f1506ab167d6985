//! The channel of a split client on the executor's host: two rings and a slab in one region.
//!
//! The client writes its rows into the slab and a call of 64 bytes into the first ring; the executor computes, writes
//! the rows of the answer into the slab, and the answer's 64 bytes into the second. Each ring has one writer and one
//! reader, and each counts for itself: what a peer writes can spoil its own calls and nothing else.
//!
//! # Layout
//!
//! - [`ExecutorChannel`] and [`ClientChannel`]: the two ends.
//! - [`wait_any`] and [`Doorbell`]: how the executor waits for many clients, and for its other threads, at once.
//! - `ring`: publishing and taking. `rows`: numbers in and out of the slab. `layout`: what lies where. `memory`: the
//!   region, or the heap, as atomics.
//!
//! # Principles
//!
//! - A peer writes what it likes, whenever it likes. So what is read is copied, then checked, then used.
//! - Everything was allocated when the channel was made, and every operation takes a bounded time.
//! - Nobody waits for room: a ring that is full is an answer.
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

/// Rows begin at a multiple of this many bytes of the slab: a cache line.
pub const PLACE_ALIGN: u64 = 64;

/// Most bytes of a slab: 4 GiB.
pub const MAX_SLAB_BYTES: u64 = 4 << 30;

/// Most descriptors of a ring.
pub const MAX_DEPTH: u32 = 1024;

/// How large a channel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the slab: a multiple of [`PLACE_ALIGN`].
    pub slab_bytes: u64,
    /// Descriptors of each ring: a power of two.
    pub depth: u32,
}

/// Why no channel can have this geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// The slab is none, too large, or not in whole lines.
    #[error("a slab cannot have {0} bytes: ask for 64 to {MAX_SLAB_BYTES}, in multiples of {PLACE_ALIGN}")]
    Slab(u64),
    /// The rings are.
    #[error("a ring cannot have {0} places: ask for a power of two, 1 to {MAX_DEPTH}")]
    Depth(u32),
}

impl Geometry {
    /// A channel of at least this size.
    ///
    /// # Errors
    ///
    /// If there is none so large.
    pub fn rounded(slab_bytes: u64, depth: u32) -> Result<Self, GeometryError> {
        let whole = slab_bytes.max(1).checked_next_multiple_of(PLACE_ALIGN);
        let slab_bytes = whole.ok_or(GeometryError::Slab(slab_bytes))?;
        let depth = depth.checked_next_power_of_two().ok_or(GeometryError::Depth(depth))?;
        let geometry = Self { slab_bytes, depth };
        geometry.check().map(|()| geometry)
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// The first that is wrong.
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

    /// Bytes of the region of a channel whose geometry was checked.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        layout::slab_offset(self.depth) as u64 + self.slab_bytes
    }
}

/// Why there is no channel.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// It cannot be so large.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Memory could not be shared.
    #[error("the channel has no memory to share ({0})")]
    Region(#[from] RegionError),
}

/// Rows that do not lie in the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "{bytes} bytes of rows at byte {offset} are no place in a slab of {slab_bytes}: begin at a multiple of {PLACE_ALIGN}, \
     end within it"
)]
pub struct SlabRangeError {
    /// First byte.
    pub offset: u64,
    /// Bytes from there on.
    pub bytes: u64,
    /// Bytes of the slab.
    pub slab_bytes: u64,
}

/// The ring has no room: answers that were not taken, or calls that were not, fill it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("as many calls are in flight as the channel has room for: take answers first")]
pub struct RingFull;

/// A peer that does not keep to the protocol. Its channel is to be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    /// Two counts are farther apart than the ring has places.
    #[error("the peer counts {count} and this end {ours}, in a ring of {depth} places: close the channel")]
    Jump {
        /// What the peer wrote.
        count: u32,
        /// This end's own count.
        ours: u32,
        /// Places of the ring.
        depth: u32,
    },
    /// What lies in the ring is no call, or no answer.
    #[error("the peer wrote no header ({0}): close the channel")]
    Header(#[from] HeaderError),
    /// Rows do not lie in the slab.
    #[error("the peer named a place that is none ({0}): close the channel")]
    Place(#[from] SlabRangeError),
    /// The ring of answers is full.
    #[error("the peer does not take its answers: close the channel")]
    Full,
}
