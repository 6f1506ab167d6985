//! Adds a sublayer's output to the residual stream and normalizes it for the next one. Kernels: `norm.cu`.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};
use crate::lora::ElementKind;

/// Threads per block: `THREADS` of `norm.cu`.
const THREADS: u32 = 256;
/// Widest row that a block keeps in registers: `THREADS * KEPT` of `norm.cu`.
const MAX_KEPT: usize = 8192;

/// Parameters of an RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Factor of each feature.
    pub weight: &'a DeviceVec<f32>,
    /// Constant added to the mean square.
    pub eps: f32,
}

/// Computes `residual += update` (if there is an update), then `out = residual / rms(residual) * weight`.
///
/// All are `[rows, width]` with `width = weight.len()`; `rms(x) = sqrt(mean(x^2) + eps)`. `residual` has 32
/// bits, `update` and `out` have one kind. A row's bits depend on the row alone.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the shapes or element kinds do not match.
pub fn add_norm(
    stream: &CudaStream,
    residual: &mut Matrix,
    update: Option<&Matrix>,
    norm: Norm<'_>,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    let (rows, width) = (out.rows(), norm.weight.len());
    check(residual, update, out);
    assert_eq!(out.width(), width, "a weight a feature");
    let in_registers = width <= MAX_KEPT && is_packs(width, out.kind());
    let kernel =
        if in_registers { by_kind!("add_norm", out.kind()) } else { by_kind!("add_norm_plain", out.kind()) };
    let arguments = [
        Arg::Ptr(residual.address()),
        Arg::Ptr(update.map_or(0, Matrix::address)),
        Arg::Ptr(norm.weight.address()),
        Arg::F32(norm.eps),
        Arg::Ptr(out.address()),
        Arg::U32(count(width)),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrices have `rows` rows of `width`, one per
    // block; the weight has `width` elements. 3. The outputs are borrowed exclusively.
    unsafe { launch(stream, kernel, LaunchShape::line(rows, THREADS), &arguments) }
}

/// Computes `residual += update` (if there is an update), then `out = residual`, without a norm.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the shapes or element kinds do not match.
pub fn add_copy(
    stream: &CudaStream,
    residual: &mut Matrix,
    update: Option<&Matrix>,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    check(residual, update, out);
    let arguments = [
        Arg::Ptr(residual.address()),
        Arg::Ptr(update.map_or(0, Matrix::address)),
        Arg::Ptr(out.address()),
        Arg::U32(count(out.width())),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrices have the same rows, one per block. 3. The
    // outputs are borrowed exclusively.
    unsafe {
        launch(stream, by_kind!("add_copy", out.kind()), LaunchShape::line(out.rows(), THREADS), &arguments)
    }
}

/// Checks that all have the same rows, and that the residual stream has 32 bits.
fn check(residual: &Matrix, update: Option<&Matrix>, out: &Matrix) {
    assert_eq!(residual.kind(), ElementKind::F32, "the residual stream is of 32 bits");
    let (rows, width) = (out.rows(), out.width());
    assert!(residual.rows() == rows && residual.width() == width, "the residual has out's rows");
    let fits =
        |update: &Matrix| update.rows() == rows && update.width() == width && update.kind() == out.kind();
    assert!(update.is_none_or(fits), "the update has out's rows and kind");
}

/// Computes `x = x / rms(x) * weight` for columns `column..column + weight.len()` of all rows.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the columns do not exist.
pub fn norm_in_place(
    stream: &CudaStream,
    x: &mut Matrix,
    column: usize,
    norm: Norm<'_>,
) -> Result<(), CudaError> {
    let width = norm.weight.len();
    assert!(column + width <= x.width(), "the columns exist");
    let first = x.address() + (column * x.kind().bytes()) as u64;
    let arguments = [
        Arg::Ptr(first),
        Arg::U32(count(x.width())),
        Arg::Ptr(norm.weight.address()),
        Arg::F32(norm.eps),
        Arg::U32(count(width)),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrix has the columns, with one row per block;
    // the weight has `width` elements. 3. The output is borrowed exclusively.
    unsafe {
        launch(stream, by_kind!("norm_in_place", x.kind()), LaunchShape::line(x.rows(), THREADS), &arguments)
    }
}

/// True if rows of `width` elements of `kind` are multiples of 16 bytes, as wide loads require.
pub(super) fn is_packs(width: usize, kind: ElementKind) -> bool {
    (width * kind.bytes()).is_multiple_of(16)
}
