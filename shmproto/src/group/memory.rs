//! Memory of a device group: header, members and the area of inputs as atomics, and each member's outputs.

#[cfg(not(loom))]
pub(super) use self::mapped::GroupMemory;
#[cfg(not(loom))]
pub use self::mapped::MemberOutputs;
#[cfg(loom)]
pub(super) use self::modelled::GroupMemory;
#[cfg(loom)]
pub use self::modelled::MemberOutputs;

use super::layout::{CallSlot, DEPTH, GroupHeader, MemberHead};
use crate::atomic::AtomicU64;

#[cfg(not(loom))]
mod mapped {
    use std::os::fd::{BorrowedFd, OwnedFd};

    use super::{AtomicU64, CallSlot, DEPTH, GroupHeader, MemberHead};
    use crate::group::GroupGeometry;
    use crate::group::layout::{MEMBER_BYTES, MEMBERS_OFFSET, inputs_offset};
    use crate::memory::{AtomicMemory, OwnValues};
    use crate::region::{Access, Region, RegionError};

    /// The common region, with this end's own copy of the geometry.
    #[derive(Debug)]
    pub(in crate::group) struct GroupMemory {
        common: AtomicMemory,
        /// Outputs of the members, at the leader's end.
        outputs: Vec<AtomicMemory>,
        geometry: GroupGeometry,
    }

    impl GroupMemory {
        /// Creates the common region.
        pub(in crate::group) fn create(geometry: GroupGeometry) -> Result<Self, RegionError> {
            let region = Region::create(
                "holobiont-group",
                bytes(geometry.region_bytes()),
                crate::region::PeerAccess::ReadWrite,
            )?;
            Ok(Self { common: AtomicMemory::mapped(region), outputs: Vec::new(), geometry })
        }

        /// Maps a common region of this geometry.
        pub(in crate::group) fn map(fd: OwnedFd, geometry: GroupGeometry) -> Result<Self, RegionError> {
            let bytes = bytes(geometry.region_bytes());
            let region = Region::map(fd, bytes..=bytes, Access::ReadWrite)?;
            Ok(Self { common: AtomicMemory::mapped(region), outputs: Vec::new(), geometry })
        }

        /// Maps the outputs of the next member for reading.
        pub(in crate::group) fn add_outputs(&mut self, fd: OwnedFd) -> Result<(), RegionError> {
            let bytes = bytes(self.geometry.output_bytes());
            let region = Region::map(fd, bytes..=bytes, Access::ReadOnly)?;
            self.outputs.push(AtomicMemory::mapped(region));
            Ok(())
        }

        pub(in crate::group) fn geometry(&self) -> GroupGeometry {
            self.geometry
        }

        pub(in crate::group) fn header(&self) -> &GroupHeader {
            // SAFETY: a GroupHeader consists of atomics and padding.
            unsafe { &self.common.at(0, 1)[0] }
        }

        pub(in crate::group) fn member(&self, member: usize) -> &MemberHead {
            // SAFETY: a MemberHead consists of atomics and padding.
            unsafe { &self.common.at(MEMBERS_OFFSET + member * MEMBER_BYTES, 1)[0] }
        }

        pub(in crate::group) fn slot(&self, member: usize, call: u32) -> &CallSlot {
            let calls = MEMBERS_OFFSET + member * MEMBER_BYTES + size_of::<MemberHead>();
            // SAFETY: a CallSlot consists of atomics and padding.
            unsafe { &self.common.at(calls, DEPTH as usize)[(call % DEPTH) as usize] }
        }

        pub(in crate::group) fn inputs(&self) -> &[AtomicU64] {
            let GroupGeometry { members, input_values, .. } = self.geometry;
            // SAFETY: these are atomics.
            unsafe { self.common.at(inputs_offset(members), input_values / 2) }
        }

        pub(in crate::group) fn outputs(&self, member: usize) -> &[AtomicU64] {
            // SAFETY: these are atomics.
            unsafe { self.outputs[member].at(0, self.geometry.output_values / 2) }
        }

        pub(in crate::group) fn fd(&self) -> Option<BorrowedFd<'_>> {
            self.common.region().map(Region::fd)
        }
    }

    /// Outputs of a member: memory that the member alone writes and the leader reads.
    #[derive(Debug)]
    pub struct MemberOutputs {
        values: OwnValues,
    }

    impl MemberOutputs {
        /// Creates the memory in the member's process, on the NUMA node of the calling thread.
        ///
        /// # Errors
        /// Returns an error if there is no memory.
        pub fn create(geometry: &GroupGeometry) -> Result<Self, RegionError> {
            let values = OwnValues::create("holobiont-group-outputs", geometry.output_values)?;
            Ok(Self { values })
        }

        /// Returns the descriptor, to be sent to the leader.
        #[must_use]
        pub fn fd(&self) -> BorrowedFd<'_> {
            self.values.fd()
        }

        pub(in crate::group) fn values_mut(&mut self) -> &mut [f32] {
            self.values.get_mut()
        }

        /// Does nothing: readers see the values themselves.
        pub(in crate::group) fn publish(&self, _: &GroupMemory, _: usize) {}
    }

    fn bytes(of: u64) -> usize {
        usize::try_from(of).unwrap_or(usize::MAX)
    }
}

/// Variant for loom, whose atomics are objects of its model and cannot be cast from bytes.
#[cfg(loom)]
mod modelled {
    use super::{AtomicU64, CallSlot, DEPTH, GroupHeader, MemberHead};
    use crate::group::GroupGeometry;
    use crate::memory::copy;

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

    /// Outputs of a member, which readers see as atomics once they are published.
    #[derive(Debug)]
    pub struct MemberOutputs {
        values: Vec<f32>,
    }

    impl MemberOutputs {
        pub(in crate::group) fn on_heap(geometry: &GroupGeometry) -> Self {
            Self { values: vec![0.0; geometry.output_values] }
        }

        pub(in crate::group) fn values_mut(&mut self) -> &mut [f32] {
            &mut self.values
        }

        pub(in crate::group) fn publish(&self, shared: &GroupMemory, member: usize) {
            copy::write(shared.outputs(member), 0, &self.values);
        }
    }
}
