//! Layout of a board's control region, and the encoding of state words.
//!
//! Each struct here is one cache line. Sizes and offsets are asserted at the declaration and form the text of
//! [`LAYOUT_HASH`], so a process with another layout is refused. `docs/PROTOCOL.md` draws the same layout; a
//! test compares them.

use crate::atomic::{AtomicU32, AtomicU64};
pub(super) use crate::cache_line::LINE_BYTES;
use crate::cache_line::{fnv1a, line};

/// Bytes "HOLOBORD" as a little-endian integer.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"HOLOBORD");

line! {
    /// Identity and sizes of the region. The executor writes it once, before another process has the region.
    Identity {
        /// Always [`MAGIC`], which identifies the region.
        0 magic: AtomicU64,
        /// [`LAYOUT_HASH`] of the executor that made the region.
        8 layout_hash: AtomicU64,
        /// Number of f32 elements in the x slab.
        16 x_elements: AtomicU64,
        /// Number of f32 elements in each worker slot's sums region.
        24 sums_elements: AtomicU64,
        /// Number of entries of the slice table.
        32 slices: AtomicU32,
        /// Number of entries of the table of worker slots.
        36 seats: AtomicU32,
    }
}

line! {
    /// Announcement of the current job. The executor writes, workers read.
    Signal {
        /// Number of the job in the slice table; 0 before the first.
        0 job: AtomicU32,
        /// Number of slices of that job: entries `0..posted` of the table.
        4 posted: AtomicU32,
        /// Number of workers that the executor wants awake; 0 while no pass needs any.
        8 announced: AtomicU32,
        /// Futex word. The executor changes it whenever a sleeping worker has a reason to wake.
        12 bell: AtomicU32,
    }
}

line! {
    /// Sleeping workers. Each worker writes its own bit; the executor reads, and clears fenced workers' bits.
    Parked {
        /// Bit `s`: the worker in slot `s` sleeps on the bell, or is about to.
        0 seats: AtomicU64,
    }
}

line! {
    /// Admission of a worker slot. The executor writes, the slot's worker reads.
    Desk {
        /// Number of the admitted worker; 0 for a free slot.
        0 admitted: AtomicU32,
    }
}

line! {
    /// Heartbeat of a worker slot. The slot's worker writes, the executor reads.
    Pulse {
        /// Counter that changes while the worker runs.
        0 heartbeat: AtomicU32,
    }
}

line! {
    /// State of a slice. Executor and workers write by compare-and-swap or swap.
    Progress {
        /// Encoded [`SliceWord`] of the slice.
        0 word: AtomicU64,
    }
}

line! {
    /// Request of a slice. The executor writes while the slice is neither open nor claimed; workers read.
    Descriptor {
        /// Number of the adapter's image.
        0 image: AtomicU64,
        /// Index of the first sum in the worker slot's region, in elements.
        8 sums_offset: AtomicU64,
        /// Number of the adapter's matrix.
        16 module: AtomicU32,
        /// Index of the first row of x.
        20 first_row: AtomicU32,
        /// Number of rows of x, and of the sums.
        24 rows: AtomicU32,
        /// Number of elements in a row of x.
        28 width: AtomicU32,
        /// First rank to sum.
        32 first_rank: AtomicU32,
        /// One past the last rank to sum.
        36 last_rank: AtomicU32,
        /// Index of row 0 of x in the slab, in elements.
        40 x_offset: AtomicU32,
        /// Number of sums in all rows together.
        44 sums_elements: AtomicU32,
    }
}

/// Entry of the table of worker slots: two lines.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct SlotEntry {
    pub(super) desk: Desk,
    pub(super) pulse: Pulse,
}

/// Entry of the slice table: two lines, so that a search for open slices leaves descriptors in their caches.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct SliceEntry {
    pub(super) progress: Progress,
    pub(super) descriptor: Descriptor,
}

/// First three lines of the region; the table of worker slots follows, then the slice table.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) identity: Identity,
    pub(super) signal: Signal,
    pub(super) parked: Parked,
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Header>() == 192 && size_of::<SlotEntry>() == 128 && size_of::<SliceEntry>() == 128);
    assert!(offset_of!(Header, signal) == 64 && offset_of!(Header, parked) == 128);
    assert!(offset_of!(SlotEntry, pulse) == 64 && offset_of!(SliceEntry, descriptor) == 64);
};

/// Offset of the table of worker slots, in bytes.
pub(super) const SEATS_OFFSET: usize = 192;

/// Hash of the control region's layout and the encoding of state words; both sides must have the same.
pub const LAYOUT_HASH: u64 = fnv1a(&[
    // The text calls the worker number `generation`; another word would change the hash without a reason.
    "board 1: header, seats, slices; word = state u8, generation u24, job u32; x and sums f32\n",
    Identity::TEXT,
    Signal::TEXT,
    Parked::TEXT,
    Desk::TEXT,
    Pulse::TEXT,
    Progress::TEXT,
    Descriptor::TEXT,
]);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache_line::tests::{DOCUMENT, drawn};

    #[test]
    fn the_protocol_document_draws_the_board_as_it_is() {
        let structs = [
            ("Identity", Identity::FIELDS),
            ("Signal", Signal::FIELDS),
            ("Parked", Parked::FIELDS),
            ("Desk", Desk::FIELDS),
            ("Pulse", Pulse::FIELDS),
            ("Progress", Progress::FIELDS),
            ("Descriptor", Descriptor::FIELDS),
        ];
        for (name, fields) in structs {
            let fields: Vec<_> =
                fields.iter().map(|&(offset, bytes, field)| (offset, bytes, field.to_owned())).collect();
            assert_eq!(drawn(name), fields, "{name} is drawn otherwise than it is");
        }
    }

    #[test]
    fn the_protocol_document_places_the_tables_where_they_are() {
        let ruler = DOCUMENT.lines().find(|line| line.starts_with("control   0 "));
        let places: Vec<&str> =
            ruler.unwrap().split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
        let seats = SEATS_OFFSET.to_string();
        let slices = format!("{SEATS_OFFSET} + {} seats", size_of::<SlotEntry>());
        let end = format!("{SEATS_OFFSET} + {} (seats + slices)", size_of::<SliceEntry>());
        assert_eq!(places, ["control", "0", "64", "128", &seats, &slices, &end]);
    }
}
