//! A device group: one base over several processes of a host, in shared memory.
//!
//! The leader is the executor that runs the forward pass. Each member holds a part of the weights. For a call
//! the leader writes rows into the area of inputs and posts the call; each member computes its outputs in
//! memory of its own, which others only read. A gradient is a sum over outputs, so it is passed on: the sums
//! so far lie in the area of inputs, and each member waits for the one before it, adds its own and hands the
//! sums on.
//!
//! Leader and members are one program of one user, and the leader starts the members. A group lives and dies
//! as one: the end of any process ends all of them.
//!
//! # Layout
//!
//! - [`GroupLeader`] and [`GroupMember`]: the two kinds of ends.
//! - [`startup`]: the messages that start a member, over a socket.
//! - `signal`: counts that the other side waits for. `layout`: offsets in the region. `memory`: the region,
//!   or the heap, as atomics.
//!
//! # Principles
//!
//! - All memory is allocated when the group is made.
//! - A member checks each call against its own geometry before it touches an area.
//! - A release and the acquire that pairs with it carry the same `SYNC POINT` name.
//!
//! `docs/PROTOCOL.md` draws the region byte by byte.

use thiserror::Error;

use crate::layer::{HeaderError, SiteOp, SitePath};
use crate::region::RegionError;

mod layout;
mod leader;
mod member;
mod memory;
mod signal;
pub mod startup;

pub use layout::{DEPTH, LAYOUT_HASH};
pub use leader::GroupLeader;
pub use member::{GroupMember, JoinGroupError};
pub use memory::MemberOutputs;

/// Number of rows from which a call is long: the member sleeps after it at once, so that the leader's threads
/// may use the member's cores until the next call.
pub const LONG_CALL_ROWS: u32 = 64;

/// Maximum number of members of a group besides the leader.
pub const MAX_MEMBERS: u32 = 15;

/// Unit of an area's size and of a call's places in an area, in values: a cache line.
pub const PLACE_VALUES: usize = 16;

/// Division of the weights among the devices of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightSplit {
    /// Each device holds some outputs of every linear group (tensor parallelism).
    Outputs,
    /// Each device holds some blocks, in order.
    Layers,
}

impl WeightSplit {
    /// Returns the code of the split in messages.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Outputs => 0,
            Self::Layers => 1,
        }
    }

    /// Returns the split with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::Outputs, Self::Layers].into_iter().find(|split| split.code() == code)
    }
}

/// Sizes of a group, agreed by all ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupGeometry {
    /// Number of members besides the leader.
    pub members: u32,
    /// Number of values in the area of inputs: a multiple of [`PLACE_VALUES`].
    pub input_values: usize,
    /// Number of values of each member's outputs: a multiple of [`PLACE_VALUES`].
    pub output_values: usize,
}

impl GroupGeometry {
    /// Returns the size of the common region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        let inputs = (self.input_values as u64).saturating_mul(4);
        inputs.saturating_add(layout::inputs_offset(self.members) as u64)
    }

    /// Returns the bytes of each member's outputs.
    #[must_use]
    pub fn output_bytes(&self) -> u64 {
        (self.output_values as u64).saturating_mul(4)
    }

    /// Returns the bytes of all shared memory.
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        let outputs = self.output_bytes().saturating_mul(u64::from(self.members));
        self.region_bytes().saturating_add(outputs)
    }

    /// Checks every size against its limit.
    ///
    /// # Errors
    /// Returns an error if a size is zero, too large or no multiple of a cache line.
    pub fn check(&self) -> Result<(), GroupGeometryError> {
        let Self { members, input_values, output_values } = *self;
        let fits = |values: usize| values > 0 && values.is_multiple_of(PLACE_VALUES);
        let is_known = (1..=MAX_MEMBERS).contains(&members) && fits(input_values) && fits(output_values);
        if is_known { Ok(()) } else { Err(GroupGeometryError { members, input_values, output_values }) }
    }
}

/// Error of a geometry that no group can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "a group of {members} members with areas of {input_values} and {output_values} values cannot be made: \
     ask for 1 to {MAX_MEMBERS} members and whole cache lines"
)]
pub struct GroupGeometryError {
    members: u32,
    input_values: usize,
    output_values: usize,
}

/// Error of creating a group's region.
#[derive(Debug, Error)]
pub enum GroupError {
    /// A size of the geometry is out of range.
    #[error(transparent)]
    Geometry(#[from] GroupGeometryError),
    /// The system gave no shared memory, or a member's memory cannot be mapped.
    #[error("the device group has no memory to share ({0})")]
    Region(#[from] RegionError),
    /// Another number of members sent their memory.
    #[error("{found} of {members} members sent the memory of their outputs")]
    Outputs {
        /// Number of members with outputs.
        found: usize,
        /// Number of members of the group.
        members: u32,
    },
}

/// Work that the leader asks of a member, with the places of its values in the areas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupCall {
    /// Site whose weights are needed; one past the last site stands for the token embedding.
    pub site: u32,
    /// Work of the member with the weights.
    pub work: GroupWork,
    /// Number of rows that the call computes.
    pub rows: u32,
    /// Form of the call's rows.
    pub form: InputForm,
    /// First value of the rows in the area of inputs: a multiple of [`PLACE_VALUES`].
    pub input: usize,
    /// First value of the results: a multiple of [`PLACE_VALUES`]. Forward in the member's outputs, backward
    /// in the area of inputs.
    pub output: usize,
    /// Calls of another member that must be done first.
    pub after: Option<CallsOfMember>,
}

/// Form of a call's rows in the area of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputForm {
    /// Rows of 32-bit floats, one after the other.
    F32,
    /// Tiles of bf16 as the kernels read them, each of so many rows: [`MAX_TILE_ROWS`], or all if there are
    /// fewer.
    Bf16Tiles(u8),
}

/// Maximum number of rows of a tile.
pub const MAX_TILE_ROWS: u8 = 16;

impl InputForm {
    /// Returns the code of the form in a call: the rows of a tile, or 0.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16Tiles(rows) => u32::from(rows),
        }
    }

    /// Returns the form of `rows` rows with this code. Fewer rows than a whole tile are a tile of their own.
    fn from_code(code: u32, rows: u32) -> Option<Self> {
        let tile_rows = u8::try_from(code).ok()?;
        match tile_rows {
            0 => Some(Self::F32),
            MAX_TILE_ROWS => Some(Self::Bf16Tiles(MAX_TILE_ROWS)),
            1..MAX_TILE_ROWS if code == rows => Some(Self::Bf16Tiles(tile_rows)),
            _ => None,
        }
    }
}

/// A number of calls of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallsOfMember {
    /// Index of the member, from 0; the leader has none.
    pub member: u32,
    /// Number of its calls.
    pub count: u32,
}

/// Work of a member with the weights of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupWork {
    /// Evaluates the member's outputs of a site. Forward: inputs to outputs. Backward: the inputs are
    /// gradients at all outputs of the call, and the call continues the sums so far.
    Evaluate {
        /// Index of one of the site's linear layers, or `None` for all.
        part: Option<u8>,
        /// Operation of the call.
        op: SiteOp,
        /// Arithmetic of the call.
        path: SitePath,
    },
    /// Decodes rows of the weights. The area of inputs has the numbers of the rows among the site's outputs,
    /// as bits; rows of this member are written to its outputs, one after the other.
    ReadRows,
}

/// Violation of the protocol by the leader; the member ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GroupViolation {
    /// The leader posted more calls than a ring holds.
    #[error("the leader posted {posted} calls while {done} were done, in a ring of {DEPTH}")]
    Jump {
        /// Count that the leader wrote.
        posted: u32,
        /// Number of calls that this member has done.
        done: u32,
    },
    /// A call names an unknown operation.
    #[error("the leader posted no call ({0})")]
    Call(#[from] HeaderError),
    /// A call names an unknown kind of work.
    #[error("the leader posted the unknown work {0}")]
    Work(u32),
    /// A call names an unknown form of its rows.
    #[error("the leader posted rows in the unknown form {0}")]
    Form(u32),
    /// A call's values do not lie within the areas.
    #[error("{values} values from {first} on exceed an area of {area} values, or begin within a cache line")]
    Place {
        /// First value of the call.
        first: usize,
        /// Number of values of the call.
        values: usize,
        /// Number of values of the area.
        area: usize,
    },
    /// A call waits for a member that does not exist.
    #[error("the leader named member {0}, which does not exist")]
    Member(u32),
    /// A call names a site that does not exist, or more rows than memory has.
    #[error("the leader asked for {rows} rows of site {site}, which does not exist")]
    Site {
        /// Number of the site.
        site: u32,
        /// Number of rows that the call names.
        rows: u32,
    },
}

/// Checks that `values` values from `first` on lie within an area and begin at a cache line.
fn check_place(first: usize, values: usize, area: usize) -> Result<(), GroupViolation> {
    let is_within =
        first.is_multiple_of(PLACE_VALUES) && first.checked_add(values).is_some_and(|end| end <= area);
    if is_within { Ok(()) } else { Err(GroupViolation::Place { first, values, area }) }
}
