//! What lies where in a board's control region, and what a slice's state word says.
//!
//! Each struct here is one cache line. Sizes and offsets are asserted where they are declared, and are the text that
//! [`LAYOUT_HASH`] is computed from: who was built with another layout is refused at the door. `docs/PROTOCOL.md` draws
//! the same; a test compares.

use crate::atomic::{AtomicU32, AtomicU64};
pub(super) use crate::cache_line::LINE_BYTES;
use crate::cache_line::{fnv1a, line};

/// "HOLOBORD", read as a little-endian number.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"HOLOBORD");

line! {
    /// What the region is. The executor writes it once, before anybody else has the region.
    Identity {
        /// [`MAGIC`].
        0 magic: AtomicU64,
        /// [`LAYOUT_HASH`] of who made the region.
        8 layout_hash: AtomicU64,
        /// Numbers in the x slab.
        16 x_elements: AtomicU64,
        /// Numbers in each seat's region of sums.
        24 sums_elements: AtomicU64,
        /// Entries of the slice table.
        32 slices: AtomicU32,
        /// Entries of the seat table.
        36 seats: AtomicU32,
    }
}

line! {
    /// What there is to do. The executor writes, workers read.
    Signal {
        /// Number of the job in the slice table; 0 before the first.
        0 job: AtomicU32,
        /// Slices of that job: entries `0..posted` of the table.
        4 posted: AtomicU32,
        /// How many workers the executor would like to have awake; 0 while no pass needs any.
        8 announced: AtomicU32,
        /// The futex word. It changes whenever somebody who sleeps has a reason to wake.
        12 bell: AtomicU32,
    }
}

line! {
    /// Who sleeps. Workers write, each its own bit; the executor reads, and clears the bit of a fenced seat.
    Parked {
        /// Bit `s`: the worker of seat `s` sleeps on the bell, or is about to.
        0 seats: AtomicU64,
    }
}

line! {
    /// Who sits on a seat. The executor writes, the seat's worker reads.
    Desk {
        /// Number of the worker that is admitted; 0 for nobody.
        0 admitted: AtomicU32,
    }
}

line! {
    /// A sign of life. The seat's worker writes, the executor reads.
    Pulse {
        /// Moves while the worker lives and is not stopped.
        0 heartbeat: AtomicU32,
    }
}

line! {
    /// How far a slice is. Everybody writes, by compare-and-swap or swap.
    Progress {
        /// A [`SliceWord`].
        0 word: AtomicU64,
    }
}

line! {
    /// What a slice asks for. The executor writes while the slice is neither open nor claimed.
    Descriptor {
        /// Number of the adapter's image.
        0 image: AtomicU64,
        /// First number of the sums in the seat's region.
        8 sums_offset: AtomicU64,
        /// Which matrix of the adapter.
        16 module: AtomicU32,
        /// First row of x.
        20 first_row: AtomicU32,
        /// Rows of x, and of the sums.
        24 rows: AtomicU32,
        /// Numbers in a row of x.
        28 width: AtomicU32,
        /// First rank to sum.
        32 first_rank: AtomicU32,
        /// One past the last rank to sum.
        36 last_rank: AtomicU32,
        /// Where in the slab row 0 of x begins.
        40 x_offset: AtomicU32,
        /// Numbers of the sums, all rows together.
        44 sums_elements: AtomicU32,
    }
}

/// A seat: two lines.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct SlotEntry {
    pub(super) desk: Desk,
    pub(super) pulse: Pulse,
}

/// A slice: two lines, so that who looks for work does not pull descriptors about.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct SliceEntry {
    pub(super) progress: Progress,
    pub(super) descriptor: Descriptor,
}

/// What the region begins with; the seat table follows, and then the slice table.
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

/// Where the seat table begins, in bytes.
pub(super) const SEATS_OFFSET: usize = 192;

/// Changes with the layout of the control region or the meaning of a state word; both sides must have the same.
pub const LAYOUT_HASH: u64 = fnv1a(&[
    // The word's `generation` is the worker's number; to say so here would change the hash, and no layout did.
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
