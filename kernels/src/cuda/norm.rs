//! The residual stream takes a sublayer's output and is normed for the next one. See `norm.cu`.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};
use crate::lora::ElementKind;

/// Threads of a block: `THREADS` of `norm.cu`.
const THREADS: u32 = 256;
/// The widest row that a block keeps in registers: `THREADS * KEPT` of `norm.cu`.
const MAX_KEPT: usize = 8192;

/// The constants of an RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Multiplies each feature.
    pub weight: &'a DeviceVec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `residual += update` (if there is one), then `out = residual / rms(residual) * weight`.
///
/// All are `[rows, width]` with `width = weight.len()`; `rms(x) = sqrt(mean(x^2) + eps)`. `residual` is of 32 bits, `update`
/// and `out` are of one kind. A row's bits depend on the row alone.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the shapes or kinds do not fit together.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrices have `rows` rows of `width`, one a block;
    // the weight has `width` numbers. 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, kernel, LaunchShape::line(rows, THREADS), &arguments) }
}

/// `residual += update` (if there is one), then `out = residual`: what [`add_norm`] does, without a norm.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the shapes or kinds do not fit together.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrices have the same rows, one a block. 3. What it
    // writes is borrowed exclusively.
    unsafe {
        launch(stream, by_kind!("add_copy", out.kind()), LaunchShape::line(out.rows(), THREADS), &arguments)
    }
}

/// Checks that all have the same rows, the residual stream's of 32 bits.
fn check(residual: &Matrix, update: Option<&Matrix>, out: &Matrix) {
    assert_eq!(residual.kind(), ElementKind::F32, "the residual stream is of 32 bits");
    let (rows, width) = (out.rows(), out.width());
    assert!(residual.rows() == rows && residual.width() == width, "the residual has out's rows");
    let fits =
        |update: &Matrix| update.rows() == rows && update.width() == width && update.kind() == out.kind();
    assert!(update.is_none_or(fits), "the update has out's rows and kind");
}

/// `x = x / rms(x) * weight` for columns `column..column + weight.len()` of all rows.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the columns do not exist.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. The matrix has the columns, a row a block; the weight has
    // `width` numbers. 3. What it writes is borrowed exclusively.
    unsafe {
        launch(stream, by_kind!("norm_in_place", x.kind()), LaunchShape::line(x.rows(), THREADS), &arguments)
    }
}

/// True if rows of `width` numbers of `kind` are whole packs of 16 bytes, as wide loads need them.
pub(super) fn is_packs(width: usize, kind: ElementKind) -> bool {
    (width * kind.bytes()).is_multiple_of(16)
}
