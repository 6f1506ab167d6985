//! Low-rank deltas of many adapters on the device: `out[row] += scale * B (A x[row])`. Kernels: `lora.cu`.
//!
//! # Layout
//!
//! - [`StagedAdapter`], [`StagedMatrix`]: an adapter's copy in device blocks, and how much of it has arrived.
//! - [`UploadQueue`], [`RegisteredBytes`]: copies from host to device.
//! - [`LoraPlan`]: the deltas of a pass, made once at its start; [`add_deltas`] computes one group of it.
//!
//! As on the CPU, rank blocks arrive from the last to the first, so only leading ranks can be missing. The
//! kernels compute the ranks from `first_rank` on; CPU workers sum ranks `0..first_rank`.

mod adapter;
mod plan;
mod registered;
mod staged;
mod upload_queue;

use super::{
    CudaError, CudaStream, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};

pub use adapter::StagedAdapter;
pub use plan::{LoraPlan, LoraSegment, PlanShape};
pub use registered::RegisteredBytes;
pub use staged::StagedMatrix;
pub use upload_queue::UploadQueue;

/// Threads per block: `THREADS` of `lora.cu`.
const THREADS: u32 = 256;

/// Adds the deltas of group `group` of `plan`: two launches for all of its segments, or none for an empty
/// group. The launches depend only on the plan's [`shape`](LoraPlan::shape) and the shapes of the matrices,
/// so a CUDA graph serves every later plan of the same shape.
///
/// `stream` must be the stream of the plan's upload: the plan holds the sums between the two launches.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if there is no such group, or if rows, inputs or outputs of its segments do not exist.
pub fn add_deltas(
    stream: &CudaStream,
    plan: &LoraPlan,
    group: usize,
    x: &Matrix,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    let Some(group) = plan.group(group) else { return Ok(()) };
    assert_eq!(x.width(), group.columns, "A has the width of x");
    assert!(x.rows() >= group.rows && out.rows() >= group.rows, "the segments' rows exist");
    assert!(out.width() >= group.outputs, "B's outputs lie within a row of out");
    let shrink = [
        Arg::Ptr(group.shrink_first),
        Arg::Ptr(group.segments),
        Arg::U32(group.shape.segments),
        Arg::Ptr(x.address()),
        Arg::U32(count(x.width())),
        Arg::Ptr(group.sums),
    ];
    let shape = LaunchShape::line(group.shape.shrink_units as usize, THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. The plan made the table for factors whose blocks it
    // keeps lent and whose ranks had arrived; rows and columns were checked above. 3. The plan's sums have room for
    // each group.
    unsafe { launch(stream, by_kind!("lora_shrink", x.kind()), shape, &shrink)? };
    let expand = [
        Arg::Ptr(group.expand_first),
        Arg::Ptr(group.segments),
        Arg::U32(group.shape.segments),
        Arg::Ptr(group.sums),
        Arg::Ptr(out.address()),
        Arg::U32(count(out.width())),
    ];
    let shape = LaunchShape::line(group.shape.expand_units as usize, THREADS);
    // SAFETY: conditions 1 to 3 hold as for the shrink. The output is borrowed exclusively, and segments have disjoint
    // outputs.
    unsafe { launch(stream, by_kind!("lora_expand", out.kind()), shape, &expand) }
}
