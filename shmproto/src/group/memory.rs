//! Memory of a device group as atomics: header, members, areas of values.

#[cfg(not(loom))]
pub(super) use self::mapped::GroupMemory;
#[cfg(loom)]
pub(super) use self::modelled::GroupMemory;

use super::layout::{CallSlot, DEPTH, GroupHeader, MemberHead};
use crate::atomic::AtomicU64;

#[cfg(not(loom))]
mod mapped {
    use super::{AtomicU64, CallSlot, DEPTH, GroupHeader, MemberHead};
    use crate::group::GroupGeometry;
    use crate::group::layout::{MEMBER_BYTES, MEMBERS_OFFSET, areas_offset};
    use crate::memory::AtomicMemory;
    use crate::region::Region;

    /// Region of a group, with this end's own copy of the geometry.
    #[derive(Debug)]
    pub(in crate::group) struct GroupMemory {
        memory: AtomicMemory,
        geometry: GroupGeometry,
    }

    impl GroupMemory {
        pub(in crate::group) fn on_heap(geometry: GroupGeometry) -> Self {
            let bytes = usize::try_from(geometry.region_bytes()).unwrap_or(usize::MAX);
            Self { memory: AtomicMemory::on_heap(bytes), geometry }
        }

        /// Uses a region if its size is that of the geometry.
        pub(in crate::group) fn mapped(region: Region, geometry: GroupGeometry) -> Option<Self> {
            let fits = region.bytes() as u64 == geometry.region_bytes();
            fits.then(|| Self { memory: AtomicMemory::mapped(region), geometry })
        }

        pub(in crate::group) fn geometry(&self) -> GroupGeometry {
            self.geometry
        }

        pub(in crate::group) fn header(&self) -> &GroupHeader {
            // SAFETY: a GroupHeader consists of atomics and padding.
            unsafe { &self.memory.at(0, 1)[0] }
        }

        pub(in crate::group) fn member(&self, member: usize) -> &MemberHead {
            // SAFETY: a MemberHead consists of atomics and padding.
            unsafe { &self.memory.at(MEMBERS_OFFSET + member * MEMBER_BYTES, 1)[0] }
        }

        pub(in crate::group) fn slot(&self, member: usize, call: u32) -> &CallSlot {
            let calls = MEMBERS_OFFSET + member * MEMBER_BYTES + size_of::<MemberHead>();
            // SAFETY: a CallSlot consists of atomics and padding.
            unsafe { &self.memory.at(calls, DEPTH as usize)[(call % DEPTH) as usize] }
        }

        pub(in crate::group) fn inputs(&self) -> &[AtomicU64] {
            let GroupGeometry { members, input_values, .. } = self.geometry;
            // SAFETY: these are atomics.
            unsafe { self.memory.at(areas_offset(members), input_values / 2) }
        }

        pub(in crate::group) fn outputs(&self, member: usize) -> &[AtomicU64] {
            let GroupGeometry { members, input_values, output_values } = self.geometry;
            let first = areas_offset(members) + 4 * (input_values + member * output_values);
            // SAFETY: these are atomics.
            unsafe { self.memory.at(first, output_values / 2) }
        }

        pub(in crate::group) fn region(&self) -> Option<&Region> {
            self.memory.region()
        }
    }
}

/// Variant for loom, whose atomics are objects of its model and cannot be cast from bytes.
#[cfg(loom)]
mod modelled {
    use super::{AtomicU64, CallSlot, DEPTH, GroupHeader, MemberHead};
    use crate::group::GroupGeometry;

    #[derive(Debug)]
    pub(in crate::group) struct GroupMemory {
        header: GroupHeader,
        members: Vec<(MemberHead, Vec<CallSlot>, Vec<AtomicU64>)>,
        inputs: Vec<AtomicU64>,
        geometry: GroupGeometry,
    }

    impl GroupMemory {
        pub(in crate::group) fn on_heap(geometry: GroupGeometry) -> Self {
            let area = |values: usize| (0..values / 2).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
            let ring = || (0..DEPTH).map(|_| CallSlot::default()).collect();
            let member = |_| (MemberHead::default(), ring(), area(geometry.output_values));
            let (members, inputs) =
                ((0..geometry.members).map(member).collect(), area(geometry.input_values));
            Self { header: GroupHeader::default(), members, inputs, geometry }
        }

        pub(in crate::group) fn geometry(&self) -> GroupGeometry {
            self.geometry
        }

        pub(in crate::group) fn header(&self) -> &GroupHeader {
            &self.header
        }

        pub(in crate::group) fn member(&self, member: usize) -> &MemberHead {
            &self.members[member].0
        }

        pub(in crate::group) fn slot(&self, member: usize, call: u32) -> &CallSlot {
            &self.members[member].1[(call % DEPTH) as usize]
        }

        pub(in crate::group) fn inputs(&self) -> &[AtomicU64] {
            &self.inputs
        }

        pub(in crate::group) fn outputs(&self, member: usize) -> &[AtomicU64] {
            &self.members[member].2
        }
    }
}
