//! The gate of a feed-forward block; the kernel is in `gate.cu`.

use super::{
    CudaError, CudaStream, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
    norm::is_packs,
};
use crate::elementwise::Gate;

/// Threads per block: `THREADS` of `gate.cu`.
const THREADS: u32 = 256;

/// Computes `out = gate * sigmoid(z(gate)) * up` for rows `[gate | up]` of twice `out`'s width.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the shapes or element kinds do not match.
pub fn gate_mul(
    stream: &CudaStream,
    gate: Gate,
    gate_up: &Matrix,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    let (rows, width, kind) = (out.rows(), out.width(), out.kind());
    assert!(gate_up.rows() == rows && gate_up.width() == 2 * width, "two inputs an output");
    assert_eq!(gate_up.kind(), kind, "inputs and outputs of one kind");
    let is_packs = is_packs(width, kind);
    let kernel = match (gate, is_packs) {
        (Gate::Silu, true) => by_kind!("silu_mul", kind),
        (Gate::Silu, false) => by_kind!("silu_mul_plain", kind),
        (Gate::GeluTanh, true) => by_kind!("gelu_mul", kind),
        (Gate::GeluTanh, false) => by_kind!("gelu_mul_plain", kind),
        (Gate::SwigluOai { .. }, _) => unreachable!("models with this gate are not loaded to a GPU"),
    };
    let each = if is_packs { 16 / kind.bytes() } else { 1 };
    let arguments = [
        Arg::Ptr(gate_up.address()),
        Arg::Ptr(out.address()),
        Arg::U32(count(width)),
        Arg::U64((rows * width) as u64),
    ];
    let shape = LaunchShape::line((rows * width).div_ceil(each * THREADS as usize), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sizes were checked; it computes the first `rows *
    // width` elements of `out`. 3. The output is borrowed exclusively.
    unsafe { launch(stream, kernel, shape, &arguments) }
}
