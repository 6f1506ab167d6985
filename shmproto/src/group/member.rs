//! A member's end of a group: takes calls and gives results.

use std::sync::Arc;
use std::time::Duration;

use super::layout::{self, CallSlot, DEPTH};
use super::leader::is_reached;
use super::memory::{GroupMemory, MemberOutputs};
use super::signal::SharedCount;
use super::{
    CallsOfMember, GroupCall, GroupGeometry, GroupViolation, GroupWork, InputForm, LONG_CALL_ROWS,
    check_place,
};
use crate::atomic::Ordering::Relaxed;
use crate::layer::{SiteOp, SitePath};
use crate::memory::copy;

/// Error of a member that cannot use the region that it received.
#[derive(Debug, thiserror::Error)]
pub enum JoinGroupError {
    /// The geometry is out of range.
    #[error(transparent)]
    Geometry(#[from] super::GroupGeometryError),
    /// The region does not have the agreed size or seals.
    #[error("the group's region cannot be mapped ({0})")]
    Region(#[from] crate::region::RegionError),
    /// The region is not that of a group, or has another layout or size.
    #[error("the region is no device group of this release: run all processes of one release")]
    Layout,
    /// The group has no such member.
    #[error("the group has no member {0}")]
    Member(u32),
}

/// The end of a process that holds a part of the weights, for one thread. The methods do not allocate, and
/// make system calls only to sleep and to wake others.
#[derive(Debug)]
pub struct GroupMember {
    shared: Arc<GroupMemory>,
    outputs: MemberOutputs,
    index: u32,
    done: u32,
    spin: Duration,
    /// Whether the last call was long.
    was_long: bool,
}

impl GroupMember {
    /// Maps and checks the region that the leader handed over, as member `index`, whose `outputs` the leader
    /// has.
    ///
    /// # Errors
    /// Returns a [`JoinGroupError`] if the region is no group of this geometry.
    #[cfg(not(loom))]
    pub fn join(
        fd: std::os::fd::OwnedFd,
        geometry: GroupGeometry,
        (index, outputs): (u32, MemberOutputs),
        spin: Duration,
    ) -> Result<Self, JoinGroupError> {
        geometry.check()?;
        if index >= geometry.members {
            return Err(JoinGroupError::Member(index));
        }
        let shared = GroupMemory::map(fd, geometry)?;
        let header = shared.header();
        let found = (header.magic.load(Relaxed), header.layout_hash.load(Relaxed));
        if found != (layout::MAGIC, layout::LAYOUT_HASH) {
            return Err(JoinGroupError::Layout);
        }
        Ok(Self::over(Arc::new(shared), index, outputs, spin))
    }

    pub(super) fn over(shared: Arc<GroupMemory>, index: u32, outputs: MemberOutputs, spin: Duration) -> Self {
        Self { shared, outputs, index, done: 0, spin, was_long: false }
    }

    /// Returns the sizes of the group.
    #[must_use]
    pub fn geometry(&self) -> GroupGeometry {
        self.shared.geometry()
    }

    /// Waits for the next call and for the calls that it continues. The member then reads its values, writes
    /// its results and calls [`finish`](Self::finish). Returns `None` when the group ends.
    ///
    /// # Errors
    /// Returns a [`GroupViolation`] if the leader wrote no valid call.
    pub fn next_call(&mut self) -> Result<Option<GroupCall>, GroupViolation> {
        let head = &self.shared.member(self.index as usize).posted;
        let posted = SharedCount { count: &head.count, sleepers: &head.sleepers };
        let spin = if self.was_long { Duration::ZERO } else { self.spin };
        let posted = posted.wait(spin, |count| count != self.done);
        if posted.wrapping_sub(self.done) > DEPTH {
            return Err(GroupViolation::Jump { posted, done: self.done });
        }
        let Some(call) = read(self.shared.slot(self.index as usize, self.done))? else { return Ok(None) };
        if let Some(CallsOfMember { member, count }) = call.after {
            if member >= self.geometry().members || member == self.index {
                return Err(GroupViolation::Member(member));
            }
            let head = &self.shared.member(member as usize).done;
            let done = SharedCount { count: &head.count, sleepers: &head.sleepers };
            done.wait(self.spin, |done| is_reached(done, count));
        }
        self.was_long = call.rows >= LONG_CALL_ROWS;
        Ok(Some(call))
    }

    /// Tells the leader and the next member that the current call is done.
    pub fn finish(&mut self) {
        self.outputs.publish(&self.shared, self.index as usize);
        self.done = self.done.wrapping_add(1);
        let head = &self.shared.member(self.index as usize).done;
        SharedCount { count: &head.count, sleepers: &head.sleepers }.publish(self.done);
    }

    /// Copies values out of the area of inputs, from the place of a call on.
    ///
    /// # Errors
    /// Returns an error if they do not lie within the area; nothing was read then.
    pub fn read_inputs(&self, first: usize, values: &mut [f32]) -> Result<(), GroupViolation> {
        self.read_inputs_after(first, 0, values)
    }

    /// Copies values into the area of inputs, from the place of a call on.
    ///
    /// # Errors
    /// Returns an error if they do not lie within the area; nothing was written then.
    pub fn write_inputs(&self, first: usize, values: &[f32]) -> Result<(), GroupViolation> {
        check_place(first, values.len(), self.geometry().input_values)?;
        copy::write(self.shared.inputs(), first, values);
        Ok(())
    }

    /// Copies values out of the area of inputs, from `skipped` values after the place of a call on.
    ///
    /// # Errors
    /// Returns an error if they do not lie within the area; nothing was read then.
    pub fn read_inputs_after(
        &self,
        first: usize,
        skipped: usize,
        values: &mut [f32],
    ) -> Result<(), GroupViolation> {
        check_place(first, skipped.saturating_add(values.len()), self.geometry().input_values)?;
        copy::read(self.shared.inputs(), first + skipped, values);
        Ok(())
    }

    /// Returns `count` of this member's outputs, from the place of a call on. The leader reads them after
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    /// Returns an error if the member does not have so many.
    pub fn outputs_mut(&mut self, first: usize, count: usize) -> Result<&mut [f32], GroupViolation> {
        check_place(first, count, self.geometry().output_values)?;
        Ok(&mut self.outputs.values_mut()[first..first + count])
    }
}

/// Copies a call, then checks the copy. Returns `None` for the end.
fn read(slot: &CallSlot) -> Result<Option<GroupCall>, GroupViolation> {
    let code = |word: u32| u8::try_from(word).unwrap_or(u8::MAX);
    let place = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let (op, path) = (slot.op.load(Relaxed), slot.path.load(Relaxed));
    let work = match slot.work.load(Relaxed) {
        layout::EVALUATE => GroupWork::Evaluate {
            part: Some(slot.part.load(Relaxed)).filter(|&part| part != layout::NONE).map(code),
            op: SiteOp::from_code(code(op))?,
            path: SitePath::from_code(code(path))?,
        },
        layout::READ_ROWS => GroupWork::ReadRows,
        layout::END => return Ok(None),
        work => return Err(GroupViolation::Work(work)),
    };
    let (form, rows) = (slot.form.load(Relaxed), slot.rows.load(Relaxed));
    let form = InputForm::from_code(form, rows).ok_or(GroupViolation::Form(form))?;
    let after =
        CallsOfMember { member: slot.after_member.load(Relaxed), count: slot.after_count.load(Relaxed) };
    Ok(Some(GroupCall {
        site: slot.site.load(Relaxed),
        work,
        rows,
        form,
        input: place(slot.input.load(Relaxed)),
        output: place(slot.output.load(Relaxed)),
        after: Some(after).filter(|after| after.member != layout::NONE),
    }))
}
