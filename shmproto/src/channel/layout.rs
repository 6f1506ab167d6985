//! Layout of a channel's region.
//!
//! Sizes and offsets are asserted at the declaration and form the text of [`LAYOUT_HASH`], so a process with
//! another layout is refused. `docs/PROTOCOL.md` draws the same layout; a test compares them.

use crate::atomic::{AtomicU32, AtomicU64};
use crate::cache_line::{LINE_BYTES, fnv1a, line};
use crate::layer::HEADER_BYTES;

/// Bytes "HOLOCHAN" as a little-endian integer.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"HOLOCHAN");

line! {
    /// Identity and sizes of the region. The executor writes it once, before the client reads the region.
    Nameplate {
        /// Always [`MAGIC`], which identifies the region.
        0 magic: AtomicU64,
        /// [`LAYOUT_HASH`] of the executor that made the region.
        8 layout_hash: AtomicU64,
        /// Size of the slab in bytes.
        16 slab_bytes: AtomicU64,
        /// Number of headers in each ring.
        24 depth: AtomicU32,
    }
}

line! {
    /// Count of submitted calls. The client writes, the executor reads; the futex word of the executor.
    Submitted {
        /// Number of submitted calls, from 0, modulo 2^32.
        0 calls: AtomicU32,
    }
}

line! {
    /// Count of taken calls. The executor writes, the client reads.
    Taken {
        /// Number of taken calls, from 0, modulo 2^32.
        0 calls: AtomicU32,
    }
}

line! {
    /// Count of given replies. The executor writes, the client reads; the futex word of the client.
    Replied {
        /// Number of given replies, from 0, modulo 2^32.
        0 replies: AtomicU32,
    }
}

line! {
    /// Count of collected replies. The client writes, the executor reads.
    Collected {
        /// Number of collected replies, from 0, modulo 2^32.
        0 replies: AtomicU32,
    }
}

line! {
    /// Sleep flag of the executor, which alone writes it; the client reads.
    ExecutorParked {
        /// 1 while the executor sleeps on `Submitted`, or is about to.
        0 executor: AtomicU32,
    }
}

line! {
    /// Sleep flag of the client, which alone writes it; the executor reads.
    ClientParked {
        /// 1 while the client sleeps on `Replied`, or is about to.
        0 client: AtomicU32,
    }
}

/// First lines of the region; the ring of calls, the ring of replies, and the slab follow.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct ChannelHead {
    pub(super) nameplate: Nameplate,
    pub(super) submitted: Submitted,
    pub(super) taken: Taken,
    pub(super) replied: Replied,
    pub(super) collected: Collected,
    pub(super) executor_parked: ExecutorParked,
    pub(super) client_parked: ClientParked,
}

/// Ring entry: a header, as eight little-endian words.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct RingSlot(pub(super) [AtomicU64; HEADER_BYTES / 8]);

/// Offset of the rings, in bytes.
pub(super) const RINGS_OFFSET: usize = 7 * LINE_BYTES;

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<ChannelHead>() == RINGS_OFFSET && size_of::<RingSlot>() == LINE_BYTES);
    assert!(offset_of!(ChannelHead, submitted) == 64 && offset_of!(ChannelHead, taken) == 128);
    assert!(offset_of!(ChannelHead, replied) == 192 && offset_of!(ChannelHead, collected) == 256);
    assert!(offset_of!(ChannelHead, executor_parked) == 320 && offset_of!(ChannelHead, client_parked) == 384);
};

/// Returns the offset of the slab, in bytes.
pub(super) const fn slab_offset(depth: u32) -> usize {
    RINGS_OFFSET + 2 * depth as usize * LINE_BYTES
}

/// Hash of the region's layout; both sides must have the same.
pub const LAYOUT_HASH: u64 = fnv1a(&[
    "channel 1: head, calls, replies, slab; places of 64 bytes; counts u32\n",
    Nameplate::TEXT,
    Submitted::TEXT,
    Taken::TEXT,
    Replied::TEXT,
    Collected::TEXT,
    ExecutorParked::TEXT,
    ClientParked::TEXT,
]);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache_line::tests::{DOCUMENT, drawn};

    #[test]
    fn the_protocol_document_draws_the_channel_as_it_is() {
        let structs = [
            ("Nameplate", Nameplate::FIELDS),
            ("Submitted", Submitted::FIELDS),
            ("Taken", Taken::FIELDS),
            ("Replied", Replied::FIELDS),
            ("Collected", Collected::FIELDS),
            ("ExecutorParked", ExecutorParked::FIELDS),
            ("ClientParked", ClientParked::FIELDS),
        ];
        for (name, fields) in structs {
            let fields: Vec<_> =
                fields.iter().map(|&(offset, bytes, field)| (offset, bytes, field.to_owned())).collect();
            assert_eq!(drawn(name), fields, "{name} is drawn otherwise than it is");
        }
    }

    #[test]
    fn the_protocol_document_places_rings_and_slab_where_they_are() {
        let ruler = DOCUMENT.lines().find(|line| line.starts_with("channel   0 ")).expect("the ruler");
        let places: Vec<&str> = ruler.split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
        let (calls, line) = (RINGS_OFFSET, LINE_BYTES);
        let replies = format!("{calls} + {line} depth");
        let slab = format!("{calls} + {} depth", slab_offset(1) - calls);
        let lines: Vec<String> = (0..7).map(|index| (index * line).to_string()).collect();
        let mut wanted = vec!["channel"];
        wanted.extend(lines.iter().map(String::as_str));
        let calls = calls.to_string();
        wanted.extend([calls.as_str(), &replies, &slab]);
        assert_eq!(places, wanted);
    }
}
