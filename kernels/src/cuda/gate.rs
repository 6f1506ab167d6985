//! The gate of a feed-forward block. See `gate.cu`.

use super::{
    CudaError, Matrix, Stream,
    launch::{Arg, Shape, by_kind, count, launch},
    norm::is_packs,
};

/// Threads of a block: `THREADS` of `gate.cu`.
const THREADS: u32 = 256;

/// `out = silu(gate) * up` for rows `[gate | up]` of twice `out`'s width.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the shapes or kinds do not fit together.
pub fn silu_mul(stream: &Stream, gate_up: &Matrix, out: &mut Matrix) -> Result<(), CudaError> {
    let (rows, width, kind) = (out.rows(), out.width(), out.kind());
    assert!(gate_up.rows() == rows && gate_up.width() == 2 * width, "two inputs an output");
    assert_eq!(gate_up.kind(), kind, "inputs and outputs of one kind");
    let (kernel, each) = if is_packs(width, kind) {
        (by_kind!("silu_mul", kind), 16 / kind.bytes())
    } else {
        (by_kind!("silu_mul_plain", kind), 1)
    };
    let arguments = [
        Arg::Ptr(gate_up.address()),
        Arg::Ptr(out.address()),
        Arg::U32(count(width)),
        Arg::U64((rows * width) as u64),
    ];
    let shape = Shape::line((rows * width).div_ceil(each * THREADS as usize), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sizes were checked; it computes the first `rows * width`
    // numbers of `out`. 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, kernel, shape, &arguments) }
}
