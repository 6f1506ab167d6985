//! Moves rows and changes some of their columns; the kernels are in `rows.cu`.

use std::ops::Range;

use super::{
    CudaError, CudaStream, DeviceVec, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};
use crate::lora::ElementKind;

/// Threads per block: `THREADS` of `rows.cu`.
const THREADS: u32 = 256;

fn chunks(columns: usize) -> usize {
    columns.div_ceil(THREADS as usize)
}

/// Copies the rows `rows[..gathered]` of `from` to `to`, in order. A row that does not exist becomes NaN.
///
/// # Errors
/// Fails if the device is lost or has no free memory.
///
/// # Panics
/// Panics if `rows` has fewer than `gathered` indices, or the kinds differ.
pub fn gather(
    stream: &CudaStream,
    from: &Matrix,
    rows: &DeviceVec<u32>,
    gathered: usize,
    to: &mut Matrix,
) -> Result<(), CudaError> {
    assert!(gathered <= rows.len(), "an index for each row");
    assert_eq!(from.kind(), to.kind(), "rows of one kind");
    to.reshape(gathered, from.width())?;
    let bytes = from.width() * from.kind().bytes();
    let (kernel, unit) =
        if bytes.is_multiple_of(16) { ("gather_rows_wide", 16) } else { ("gather_rows_narrow", 2) };
    let arguments = [
        Arg::Ptr(from.address()),
        Arg::U32(count(from.rows())),
        Arg::Ptr(rows.address()),
        Arg::Ptr(to.address()),
        Arg::U32(count(bytes / unit)),
    ];
    let shape = LaunchShape::plane(gathered, chunks(bytes / unit), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. Rows are multiples of the unit, `to` has one for each
    // index, and the kernel reads no row of `from` that does not exist. 3. The output is borrowed exclusively.
    unsafe { launch(stream, kernel, shape, &arguments) }
}

/// Multiplies columns `column..column + factors.len()` of some rows by their factors (IA3).
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the rows or columns do not exist.
pub fn scale_columns(
    stream: &CudaStream,
    values: &mut Matrix,
    rows: Range<usize>,
    column: usize,
    factors: &DeviceVec<f32>,
) -> Result<(), CudaError> {
    assert!(rows.start <= rows.end && rows.end <= values.rows(), "the rows exist");
    assert!(column + factors.len() <= values.width(), "the columns exist");
    let arguments = [
        Arg::Ptr(values.address_of_row(rows.start)),
        Arg::U32(count(values.width())),
        Arg::U32(count(column)),
        Arg::Ptr(factors.address()),
        Arg::U32(count(factors.len())),
    ];
    let shape = LaunchShape::plane(rows.len(), chunks(factors.len()), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. The rows and columns exist, with a factor for each
    // column. 3. The output is borrowed exclusively.
    unsafe { launch(stream, by_kind!("scale_columns", values.kind()), shape, &arguments) }
}

/// Computes `to[rows[i]] += weights[i] * from[i]` for all rows of `from` (mixture of experts). The indices
/// are distinct, and `to` has 32 bits. Rows that do not exist are skipped.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if there are fewer indices or weights than rows, or the shapes or kinds do not match.
pub fn add_weighted(
    stream: &CudaStream,
    from: &Matrix,
    rows: &DeviceVec<u32>,
    weights: &DeviceVec<f32>,
    to: &mut Matrix,
) -> Result<(), CudaError> {
    assert!(from.rows() <= rows.len() && from.rows() <= weights.len(), "an index and a weight for each row");
    assert!(to.kind() == ElementKind::F32 && to.width() == from.width(), "rows of 32 bits, as wide");
    let arguments = [
        Arg::Ptr(from.address()),
        Arg::Ptr(rows.address()),
        Arg::Ptr(weights.address()),
        Arg::Ptr(to.address()),
        Arg::U32(count(to.rows())),
        Arg::U32(count(to.width())),
    ];
    let shape = LaunchShape::plane(from.rows(), chunks(from.width()), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. There is an index and a weight for each row of `from`,
    // which is as wide as `to`, and the kernel writes no row of `to` that does not exist. 3. The output is borrowed
    // exclusively; a duplicate index makes only that row's sum wrong.
    unsafe { launch(stream, by_kind!("add_weighted", from.kind()), shape, &arguments) }
}

/// Computes `values = cap * tanh(values / cap)` in 32 bits (logits).
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the elements do not have 32 bits.
pub fn cap(stream: &CudaStream, values: &mut Matrix, cap: f32) -> Result<(), CudaError> {
    assert_eq!(values.kind(), ElementKind::F32, "numbers of 32 bits");
    let numbers = values.rows() * values.width();
    let arguments = [Arg::Ptr(values.address()), Arg::F32(cap), Arg::U64(numbers as u64)];
    // SAFETY: 1. The kernel is declared with these arguments. 2. `values` has `numbers` elements. 3. The output is
    // borrowed exclusively.
    unsafe { launch(stream, "cap_f32", LaunchShape::line(chunks(numbers), THREADS), &arguments) }
}

/// Overwrites columns `column..column + width` of some rows with rows from element `at` of `values` (prefix).
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the rows, columns or values do not exist.
pub fn place(
    stream: &CudaStream,
    to: &mut Matrix,
    rows: Range<usize>,
    column: usize,
    values: &DeviceVec<f32>,
    at: usize,
    width: usize,
) -> Result<(), CudaError> {
    assert!(rows.start <= rows.end && rows.end <= to.rows(), "the rows exist");
    assert!(column + width <= to.width(), "the columns exist");
    assert!(at + rows.len() * width <= values.len(), "the numbers exist");
    let arguments = [
        Arg::Ptr(to.address_of_row(rows.start)),
        Arg::U32(count(to.width())),
        Arg::U32(count(column)),
        Arg::Ptr(values.address_of(at)),
        Arg::U32(count(width)),
    ];
    let shape = LaunchShape::plane(rows.len(), chunks(width), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. The rows, columns and values exist. 3. The output is
    // borrowed exclusively.
    unsafe { launch(stream, by_kind!("place", to.kind()), shape, &arguments) }
}

/// Appends rows from the host, rounded to the matrix's kind: the rows of split clients in a pass.
///
/// # Errors
/// Fails if the device is lost or has no free memory.
///
/// # Panics
/// Panics if `values` is not a multiple of the row width.
pub fn append_rows(stream: &CudaStream, to: &mut Matrix, values: &[f32]) -> Result<(), CudaError> {
    let own = to.rows();
    to.grow(stream, own + values.len() / to.width().max(1))?;
    to.upload(stream, own, values)
}

/// Removes as many trailing rows as `values` holds and copies them to the host after the stream's earlier
/// work: the results of split clients in a pass.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if `values` is not a multiple of the row width or exceeds the rows.
pub fn split_rows(stream: &CudaStream, from: &mut Matrix, values: &mut [f32]) -> Result<(), CudaError> {
    let taken = values.len() / from.width().max(1);
    let kept = from.rows().checked_sub(taken).expect("no more rows are taken than there are");
    from.download(stream, kept, values)?;
    from.truncate(kept);
    Ok(())
}
