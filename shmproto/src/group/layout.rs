//! Layout of a device group's region.
//!
//! Sizes and offsets are asserted at the declaration and form the text of [`LAYOUT_HASH`], so a member with
//! another layout is refused. `docs/PROTOCOL.md` draws the same layout; a test compares them.

use crate::atomic::{AtomicU32, AtomicU64};
use crate::cache_line::{LINE_BYTES, fnv1a, line};

/// Bytes "HOLOGRUP" as a little-endian integer.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"HOLOGRUP");

/// Number of calls that a member can have at once.
pub const DEPTH: u32 = 16;

/// Value of [`CallSlot::part`] and [`CallSlot::after_member`] that stands for none.
pub(super) const NONE: u32 = u32::MAX;

/// Values of [`CallSlot::work`], one for each kind of work.
pub(super) const EVALUATE: u32 = 0;
pub(super) const READ_ROWS: u32 = 1;
pub(super) const END: u32 = 2;

line! {
    /// Identity and sizes of the region. The leader writes it once, before a member reads the region.
    GroupHeader {
        /// Always [`MAGIC`], which identifies the region.
        0 magic: AtomicU64,
        /// [`LAYOUT_HASH`] of the leader that made the region.
        8 layout_hash: AtomicU64,
        /// Number of values in the area of inputs.
        16 input_values: AtomicU64,
        /// Number of values of each member's outputs.
        24 output_values: AtomicU64,
        /// Number of members besides the leader.
        32 members: AtomicU32,
    }
}

line! {
    /// Count of calls posted for a member. The leader writes, the member reads.
    CallsPosted {
        /// Number of posted calls, from 0, modulo 2^32; the futex word of the member.
        0 count: AtomicU32,
        /// Number of threads that sleep on `count`, or are about to. Sleepers write it.
        4 sleepers: AtomicU32,
    }
}

line! {
    /// Count of calls that a member has done. The member writes; the leader and the next member read.
    CallsDone {
        /// Number of done calls, from 0, modulo 2^32; the futex word of those who wait for the member.
        0 count: AtomicU32,
        /// Number of threads that sleep on `count`, or are about to. Sleepers write it.
        4 sleepers: AtomicU32,
    }
}

line! {
    /// One call. The leader writes it before it counts the call in `CallsPosted`.
    CallSlot {
        /// Site whose weights the call needs; one past the last site stands for the token embedding.
        0 site: AtomicU32,
        /// Index of one of the site's linear layers; 2^32 - 1 stands for all.
        4 part: AtomicU32,
        /// Work: 0 evaluates the site, 1 reads rows of its weights, 2 ends the member.
        8 work: AtomicU32,
        /// Operation of the site (`SiteOp`).
        12 op: AtomicU32,
        /// Arithmetic of the site (`SitePath`).
        16 path: AtomicU32,
        /// Number of rows that the call computes.
        20 rows: AtomicU32,
        /// First value of the call's rows in the area of inputs.
        24 input: AtomicU64,
        /// First value of the results: forward in the member's outputs, backward in the area of inputs.
        32 output: AtomicU64,
        /// Member whose calls this call continues; 2^32 - 1 stands for none.
        40 after_member: AtomicU32,
        /// Number of calls that this member must have done first.
        44 after_count: AtomicU32,
        /// Form of the call's rows: 0 is 32-bit floats, 1 to 16 are tiles of bf16 with so many rows.
        48 form: AtomicU32,
    }
}

/// First lines of a member; its ring of [`DEPTH`] calls follows.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct MemberHead {
    pub(super) posted: CallsPosted,
    pub(super) done: CallsDone,
}

/// Offset of the first member, in bytes.
pub(super) const MEMBERS_OFFSET: usize = LINE_BYTES;

/// Bytes of a member's head and ring.
pub(super) const MEMBER_BYTES: usize = (2 + DEPTH as usize) * LINE_BYTES;

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<MemberHead>() == 2 * LINE_BYTES);
    assert!(core::mem::offset_of!(MemberHead, done) == LINE_BYTES);
};

/// Returns the offset of the area of inputs, in bytes.
pub(super) const fn inputs_offset(members: u32) -> usize {
    MEMBERS_OFFSET + members as usize * MEMBER_BYTES
}

/// Hash of the region's layout; leader and members must have the same.
pub const LAYOUT_HASH: u64 = fnv1a(&[
    "group 2: header, members, inputs; outputs of a member by themselves; 16 calls a member; counts u32\n",
    GroupHeader::TEXT,
    CallsPosted::TEXT,
    CallsDone::TEXT,
    CallSlot::TEXT,
]);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache_line::tests::{DOCUMENT, drawn};

    #[test]
    fn the_protocol_document_draws_the_group_as_it_is() {
        let structs = [
            ("GroupHeader", GroupHeader::FIELDS),
            ("CallsPosted", CallsPosted::FIELDS),
            ("CallsDone", CallsDone::FIELDS),
            ("CallSlot", CallSlot::FIELDS),
        ];
        for (name, fields) in structs {
            let fields: Vec<_> =
                fields.iter().map(|&(offset, bytes, field)| (offset, bytes, field.to_owned())).collect();
            assert_eq!(drawn(name), fields, "{name} is drawn otherwise than it is");
        }
    }

    #[test]
    fn the_protocol_document_places_members_and_areas_where_they_are() {
        let ruler = DOCUMENT.lines().find(|line| line.starts_with("group   0 ")).expect("the ruler");
        let places: Vec<&str> = ruler.split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
        let inputs = format!("{MEMBERS_OFFSET} + {MEMBER_BYTES} members");
        assert_eq!(places, ["group", "0", &MEMBERS_OFFSET.to_string(), &inputs]);
        assert_eq!(inputs_offset(2), MEMBERS_OFFSET + 2 * MEMBER_BYTES);
    }
}
