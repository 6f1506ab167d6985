//! The leader's end of a group: posts calls to members and collects their results.

use std::sync::Arc;
use std::time::Duration;

use super::layout::{self, CallSlot, DEPTH};
use super::memory::GroupMemory;
use super::signal::SharedCount;
use super::{CallsOfMember, GroupCall, GroupError, GroupGeometry, GroupMember, GroupWork, PLACE_VALUES};
use crate::atomic::Ordering::Relaxed;
use crate::memory::copy;

/// The end of the process that runs the forward pass. The methods do not allocate, and make system calls only
/// to sleep and to wake members.
#[derive(Debug)]
pub struct GroupLeader {
    shared: Arc<GroupMemory>,
    /// Number of calls posted for each member.
    posted: Vec<u32>,
    spin: Duration,
}

impl GroupLeader {
    /// Creates the region of a group whose members sent the memory of their `outputs`; the leader spins for
    /// `spin` before it sleeps in a wait.
    ///
    /// # Errors
    /// Returns an error if a size is out of range, a member's memory is not of that size, or there is no
    /// memory.
    #[cfg(not(loom))]
    pub fn create(
        geometry: GroupGeometry,
        outputs: Vec<std::os::fd::OwnedFd>,
        spin: Duration,
    ) -> Result<Self, GroupError> {
        geometry.check()?;
        let (found, members) = (outputs.len(), geometry.members);
        if found != members as usize {
            return Err(GroupError::Outputs { found, members });
        }
        let mut shared = GroupMemory::create(geometry)?;
        outputs.into_iter().try_for_each(|fd| shared.add_outputs(fd))?;
        Ok(Self::over(Arc::new(shared), spin))
    }

    /// Creates a group in this process, and the ends of all members, for tests.
    ///
    /// # Errors
    /// Returns an error if a size is out of range or there is no memory.
    #[cfg(not(loom))]
    pub fn in_process(
        geometry: GroupGeometry,
        spin: Duration,
    ) -> Result<(Self, Vec<GroupMember>), GroupError> {
        geometry.check()?;
        let mut shared = GroupMemory::create(geometry)?;
        let mut outputs = Vec::new();
        for _ in 0..geometry.members {
            let own = super::MemberOutputs::create(&geometry)?;
            shared.add_outputs(own.fd().try_clone_to_owned().map_err(crate::region::RegionError::Map)?)?;
            outputs.push(own);
        }
        Ok(Self::with_members(shared, outputs, spin))
    }

    /// Creates a group of loom's atomics, and the ends of all members.
    ///
    /// # Errors
    /// Returns an error if a size is out of range.
    #[cfg(loom)]
    pub fn in_process(
        geometry: GroupGeometry,
        spin: Duration,
    ) -> Result<(Self, Vec<GroupMember>), GroupError> {
        geometry.check()?;
        let outputs = (0..geometry.members).map(|_| super::MemberOutputs::on_heap(&geometry)).collect();
        Ok(Self::with_members(GroupMemory::on_heap(geometry), outputs, spin))
    }

    fn with_members(
        shared: GroupMemory,
        outputs: Vec<super::MemberOutputs>,
        spin: Duration,
    ) -> (Self, Vec<GroupMember>) {
        let shared = Arc::new(shared);
        let member = |(index, own)| GroupMember::over(Arc::clone(&shared), index, own, spin);
        let members = (0..).zip(outputs).map(member).collect();
        (Self::over(shared, spin), members)
    }

    fn over(shared: Arc<GroupMemory>, spin: Duration) -> Self {
        let GroupGeometry { members, input_values, output_values } = shared.geometry();
        let header = shared.header();
        header.magic.store(layout::MAGIC, Relaxed);
        header.layout_hash.store(layout::LAYOUT_HASH, Relaxed);
        header.input_values.store(input_values as u64, Relaxed);
        header.output_values.store(output_values as u64, Relaxed);
        header.members.store(members, Relaxed);
        Self { shared, posted: vec![0; members as usize], spin }
    }

    /// Returns the sizes of the group.
    #[must_use]
    pub fn geometry(&self) -> GroupGeometry {
        self.shared.geometry()
    }

    /// Returns the region's descriptor, to be sent to members; `None` for a group in one process.
    #[cfg(not(loom))]
    #[must_use]
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.shared.fd()
    }

    /// Copies values into the area of inputs, from value `first` on, which must be even.
    ///
    /// # Panics
    /// Panics if the values do not lie within the area.
    pub fn write_inputs(&self, first: usize, values: &[f32]) {
        copy::write(self.shared.inputs(), first, values);
    }

    /// Copies values out of the area of inputs, from value `first` on.
    ///
    /// # Panics
    /// Panics if the values do not lie within the area.
    pub fn read_inputs(&self, first: usize, values: &mut [f32]) {
        copy::read(self.shared.inputs(), first, values);
    }

    /// Copies values out of a member's outputs, from value `first` on.
    ///
    /// # Panics
    /// Panics if the outputs do not have the values.
    pub fn read_outputs(&self, member: usize, first: usize, values: &mut [f32]) {
        copy::read(self.shared.outputs(member), first, values);
    }

    /// Posts a call whose values are written, and wakes the member if it sleeps. Returns the calls to wait
    /// for.
    ///
    /// # Panics
    /// Panics if the member has [`DEPTH`] calls that it has not done, or a place begins within a cache line:
    /// mistakes of the caller.
    pub fn post(&mut self, member: usize, call: &GroupCall) -> CallsOfMember {
        let posted = self.posted[member];
        let waiting = posted.wrapping_sub(self.done(member).get());
        assert!(waiting < DEPTH, "a member has at most {DEPTH} calls at once");
        assert!(
            call.input.is_multiple_of(PLACE_VALUES) && call.output.is_multiple_of(PLACE_VALUES),
            "places begin at cache lines"
        );
        write(self.shared.slot(member, posted), call);
        let count = posted.wrapping_add(1);
        self.posted[member] = count;
        self.publish(member, count);
        CallsOfMember { member: u32::try_from(member).unwrap_or(u32::MAX), count }
    }

    /// Waits until the member has done these calls. The wait has no limit: the leader's process ends when a
    /// member's does, and its supervisor ends a group that makes no progress.
    pub fn wait(&self, calls: CallsOfMember) {
        self.done(calls.member as usize).wait(self.spin, |count| is_reached(count, calls.count));
    }

    fn publish(&self, member: usize, count: u32) {
        let head = &self.shared.member(member).posted;
        SharedCount { count: &head.count, sleepers: &head.sleepers }.publish(count);
    }

    fn done(&self, member: usize) -> SharedCount<'_> {
        let head = &self.shared.member(member).done;
        SharedCount { count: &head.count, sleepers: &head.sleepers }
    }
}

/// Whether `count` has reached `wanted`; both are modulo 2^32 and differ by less than half of that.
pub(super) fn is_reached(count: u32, wanted: u32) -> bool {
    count.wrapping_sub(wanted) <= u32::MAX / 2
}

impl Drop for GroupLeader {
    /// Ends the members that have done all their calls.
    fn drop(&mut self) {
        for member in 0..self.posted.len() {
            let posted = self.posted[member];
            if self.done(member).get() == posted {
                self.shared.slot(member, posted).work.store(layout::END, Relaxed);
                self.publish(member, posted.wrapping_add(1));
            }
        }
    }
}

fn write(slot: &CallSlot, call: &GroupCall) {
    let &GroupCall { site, work, rows, form, input, output, after } = call;
    let (kind, part, op, path) = match work {
        GroupWork::Evaluate { part, op, path } => {
            (layout::EVALUATE, part.map_or(layout::NONE, u32::from), op as u32, path as u32)
        }
        GroupWork::ReadRows => (layout::READ_ROWS, layout::NONE, 0, 0),
    };
    let CallsOfMember { member, count } = after.unwrap_or(CallsOfMember { member: layout::NONE, count: 0 });
    slot.site.store(site, Relaxed);
    slot.part.store(part, Relaxed);
    slot.work.store(kind, Relaxed);
    slot.op.store(op, Relaxed);
    slot.path.store(path, Relaxed);
    slot.rows.store(rows, Relaxed);
    slot.form.store(form.code(), Relaxed);
    slot.input.store(input as u64, Relaxed);
    slot.output.store(output as u64, Relaxed);
    slot.after_member.store(member, Relaxed);
    slot.after_count.store(count, Relaxed);
}
