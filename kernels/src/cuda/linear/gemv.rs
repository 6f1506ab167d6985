//! Products of few rows (GEMV), which read every weight once; kernels in `gemv.cuh` and `gemv_f32.cu`.

use super::Operand;
use crate::{
    TensorType,
    cuda::{
        CudaError, CudaStream, Matrix,
        launch::{Arg, LaunchShape, count, launch},
    },
    lora::ElementKind,
};

pub(super) const MAX_PARTS: usize = 3;

const THREADS: u32 = 256;

/// Maximum number of rows for f32 weights, also per launch.
const F32_ROWS: usize = 8;

/// Maximum number of rows for 16-bit weights, and per launch for all types but f32.
const HALF_ROWS: usize = 32;

/// Maximum number of rows for block formats, whose weights are then read twice.
const QUANTIZED_ROWS: usize = 64;

/// True if this module multiplies weights of `kind` with the rows of `x`.
pub(super) fn takes(kind: TensorType, x: &Matrix) -> bool {
    match (kind, x.kind()) {
        (TensorType::F32, ElementKind::F32) => x.rows() <= F32_ROWS,
        (TensorType::F16, ElementKind::F16) | (TensorType::Bf16, ElementKind::Bf16) => {
            x.rows() <= HALF_ROWS && x.width().is_multiple_of(8)
        }
        (TensorType::F32 | TensorType::F16 | TensorType::Bf16, _) => false,
        (_, x_kind) => x_kind == ElementKind::Bf16 && x.rows() <= QUANTIZED_ROWS,
    }
}

/// Enqueues the products of up to [`MAX_PARTS`] matrices of one kind.
///
/// The kernel reads weights before earlier kernels have ended, except weights marked [`Operand::is_made`].
pub(super) fn multiply(
    stream: &CudaStream,
    x: &Matrix,
    parts: &[Operand<'_>],
    out: &mut Matrix,
) -> Result<(), CudaError> {
    assert!((1..=MAX_PARTS).contains(&parts.len()), "one to three parts");
    let kind = parts[0].kind;
    assert!(parts.iter().all(|part| part.kind == kind && part.columns == x.width()), "parts of one kind");
    let most = if kind == TensorType::F32 { F32_ROWS } else { HALF_ROWS };
    for first in (0..x.rows()).step_by(most) {
        let rows = most.min(x.rows() - first);
        let (name, features) = kernel(kind, rows);
        let blocks: usize = parts.iter().map(|part| part.rows.div_ceil(features)).sum();
        let shape = LaunchShape::line(blocks, THREADS);
        let shape = if parts.iter().any(|part| part.is_made) { shape.in_order() } else { shape };
        let arguments = arguments(x, parts, out, first, rows);
        // SAFETY: 1. The kernels all have this argument list. 2. The parts' shapes and columns were checked; rows
        // `first..first + rows` of x and out exist. 3. The output is borrowed exclusively.
        unsafe { launch(stream, name, shape, &arguments)? };
    }
    Ok(())
}

/// Returns the kernel's arguments: three parts, the rows of x, and the rows of out.
fn arguments(x: &Matrix, parts: &[Operand<'_>], out: &Matrix, first: usize, rows: usize) -> [Arg; 18] {
    let of_part = |read: fn(&Operand<'_>) -> Arg, none: Arg| {
        std::array::from_fn::<_, MAX_PARTS, _>(|at| parts.get(at).map_or(none, read))
    };
    let [w0, w1, w2] = of_part(|part| Arg::Ptr(part.address), Arg::Ptr(0));
    let [bias0, bias1, bias2] = of_part(|part| Arg::Ptr(part.bias_address()), Arg::Ptr(0));
    let [rows0, rows1, rows2] = of_part(|part| Arg::U32(count(part.rows)), Arg::U32(0));
    let [column0, column1, column2] = of_part(|part| Arg::U32(count(part.column)), Arg::U32(0));
    let columns = Arg::U32(count(x.width()));
    let x = Arg::Ptr(x.address_of_row(first));
    let is_f32 = Arg::U32(u32::from(out.kind() == ElementKind::F32));
    let (to, stride) = (Arg::Ptr(out.address_of_row(first)), Arg::U32(count(out.width())));
    let batch = Arg::U32(count(rows));
    [
        w0, w1, w2, bias0, bias1, bias2, rows0, rows1, rows2, column0, column1, column2, columns, x, batch,
        to, stride, is_f32,
    ]
}

/// Returns the kernel for weights of `kind` and `rows` rows, and the output features per block.
fn kernel(kind: TensorType, rows: usize) -> (&'static str, usize) {
    let f32_kernel = || match rows {
        0 | 1 => "gemv_f32_1",
        2 => "gemv_f32_2",
        3 | 4 => "gemv_f32_4",
        _ => "gemv_f32_8",
    };
    match (kind, rows) {
        (TensorType::F32, _) => (f32_kernel(), 8),
        (TensorType::F16, 9..=16) => ("gemv_f16_16", 16),
        (TensorType::Bf16, 9..=16) => ("gemv_bf16_16", 16),
        (_, 0..=8) => (of_eight(kind), 16),
        (TensorType::F16 | TensorType::Bf16, _) => (of_thirty_two(kind), 32),
        _ => (of_thirty_two(kind), 16),
    }
}

/// Defines a function that returns the kernel's name for each type at this number of rows.
macro_rules! by_form_and_rows {
    ($function:ident, $rows:literal) => {
        fn $function(kind: TensorType) -> &'static str {
            match kind {
                TensorType::F32 => unreachable!("f32 weights have kernels of their own"),
                TensorType::F16 => concat!("gemv_f16_", $rows),
                TensorType::Bf16 => concat!("gemv_bf16_", $rows),
                TensorType::Q4_0 => concat!("gemv_q4_0_", $rows),
                TensorType::Q4_1 => concat!("gemv_q4_1_", $rows),
                TensorType::Q5_0 => concat!("gemv_q5_0_", $rows),
                TensorType::Q5_1 => concat!("gemv_q5_1_", $rows),
                TensorType::Q8_0 => concat!("gemv_q8_0_", $rows),
                TensorType::Q4K => concat!("gemv_q4_k_", $rows),
                TensorType::Q5K => concat!("gemv_q5_k_", $rows),
                TensorType::Q6K => concat!("gemv_q6_k_", $rows),
                TensorType::Mxfp4 => unreachable!("MXFP4 is not uploaded to a GPU"),
            }
        }
    };
}
by_form_and_rows!(of_eight, "8");
by_form_and_rows!(of_thirty_two, "32");
