//! What lies where in a channel's region.
//!
//! Sizes and offsets are asserted where they are declared, and are the text that [`LAYOUT_HASH`] is computed from: who
//! was built with another layout is refused at the door. `docs/PROTOCOL.md` draws the same; a test compares.

use crate::atomic::{AtomicU32, AtomicU64};
use crate::cache_line::{LINE_BYTES, fnv1a, line};
use crate::layer::HEADER_BYTES;

/// "HOLOCHAN", read as a little-endian number.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"HOLOCHAN");

line! {
    /// What the region is. The executor writes it once, before the client has the region.
    Nameplate {
        /// [`MAGIC`].
        0 magic: AtomicU64,
        /// [`LAYOUT_HASH`] of who made the region.
        8 layout_hash: AtomicU64,
        /// Bytes of the slab.
        16 slab_bytes: AtomicU64,
        /// Places of each ring.
        24 depth: AtomicU32,
    }
}

line! {
    /// How many calls were submitted. The client writes. The futex word of the executor.
    Submitted {
        /// From 0, and round again.
        0 calls: AtomicU32,
    }
}

line! {
    /// How many of them were taken. The executor writes.
    Taken {
        /// From 0, and round again.
        0 calls: AtomicU32,
    }
}

line! {
    /// How many replies were given. The executor writes. The futex word of the client.
    Replied {
        /// From 0, and round again.
        0 replies: AtomicU32,
    }
}

line! {
    /// How many of them were collected. The client writes.
    Collected {
        /// From 0, and round again.
        0 replies: AtomicU32,
    }
}

line! {
    /// Whether the executor sleeps. It alone writes.
    ExecutorParked {
        /// 1 while it sleeps on `Submitted`, or is about to.
        0 executor: AtomicU32,
    }
}

line! {
    /// Whether the client sleeps. It alone writes.
    ClientParked {
        /// 1 while it sleeps on `Replied`, or is about to.
        0 client: AtomicU32,
    }
}

/// What the region begins with; the ring of calls, the ring of replies, and the slab follow.
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

/// A place in a ring: a header, as eight little-endian words.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct RingSlot(pub(super) [AtomicU64; HEADER_BYTES / 8]);

/// Where the rings begin, in bytes.
pub(super) const RINGS_OFFSET: usize = 7 * LINE_BYTES;

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<ChannelHead>() == RINGS_OFFSET && size_of::<RingSlot>() == LINE_BYTES);
    assert!(offset_of!(ChannelHead, submitted) == 64 && offset_of!(ChannelHead, taken) == 128);
    assert!(offset_of!(ChannelHead, replied) == 192 && offset_of!(ChannelHead, collected) == 256);
    assert!(offset_of!(ChannelHead, executor_parked) == 320 && offset_of!(ChannelHead, client_parked) == 384);
};

/// Where the slab begins, in bytes.
pub(super) const fn slab_offset(depth: u32) -> usize {
    RINGS_OFFSET + 2 * depth as usize * LINE_BYTES
}

/// Changes with the layout of the region; both sides must have the same.
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
