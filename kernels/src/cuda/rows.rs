//! Moving rows about, and changing a few columns of them. See `rows.cu`.

use std::ops::Range;

use super::{
    CudaError, CudaStream, DeviceVec, Matrix,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};
use crate::lora::ElementKind;

/// Threads of a block: `THREADS` of `rows.cu`.
const THREADS: u32 = 256;

/// Blocks that `columns` need with one of them a thread.
fn chunks(columns: usize) -> usize {
    columns.div_ceil(THREADS as usize)
}

/// Makes `to` the rows `rows[..count]` of `from`, in their order. A row that does not exist becomes NaN.
///
/// # Errors
///
/// The device is lost, or has no room.
///
/// # Panics
///
/// If there are fewer than `rows` indices, or the kinds differ.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. Rows are whole units, `to` has one for each index, and
    // the kernel reads no row of `from` that does not exist. 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, kernel, shape, &arguments) }
}

/// Multiplies columns `column..column + factors.len()` of some rows by their factors (IA3).
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the rows or columns do not exist.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. The rows and columns exist, with a factor a column.
    // 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, by_kind!("scale_columns", values.kind()), shape, &arguments) }
}

/// `to[rows[i]] += weights[i] * from[i]` for all rows of `from`, of which each names another row of `to`, of 32 bits (mixtures of
/// experts). A row that does not exist is left out.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If there are fewer indices or weights than rows, or the shapes or kinds do not fit.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. There is an index and a weight for each row of `from`, which is as
    // wide as `to`, and the kernel writes no row of `to` that does not exist. 3. What it writes is borrowed exclusively; if a row is
    // named twice its sum is wrong, and nothing else is.
    unsafe { launch(stream, by_kind!("add_weighted", from.kind()), shape, &arguments) }
}

/// `values = cap * tanh(values / cap)`, of 32 bits (logits).
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If numbers are not of 32 bits.
pub fn cap(stream: &CudaStream, values: &mut Matrix, cap: f32) -> Result<(), CudaError> {
    assert_eq!(values.kind(), ElementKind::F32, "numbers of 32 bits");
    let numbers = values.rows() * values.width();
    let arguments = [Arg::Ptr(values.address()), Arg::F32(cap), Arg::U64(numbers as u64)];
    // SAFETY: 1. The kernel is declared with these arguments. 2. There are so many numbers. 3. What it writes is borrowed
    // exclusively.
    unsafe { launch(stream, "cap_f32", LaunchShape::line(chunks(numbers), THREADS), &arguments) }
}

/// Overwrites columns `column..column + width` of some rows with as many rows of `width` from element `at` of `values`
/// (prefix tuning).
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the rows, columns or numbers do not exist.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. The rows, columns and numbers exist. 3. What it writes is
    // borrowed exclusively.
    unsafe { launch(stream, by_kind!("place", to.kind()), shape, &arguments) }
}

/// Adds rows that the host holds, rounded to the matrix's kind, behind its own: those of split clients in a pass.
///
/// # Errors
///
/// The device is lost, or has no room.
///
/// # Panics
///
/// If these are not whole rows.
pub fn append_rows(stream: &CudaStream, to: &mut Matrix, values: &[f32]) -> Result<(), CudaError> {
    let own = to.rows();
    to.grow(stream, own + values.len() / to.width().max(1))?;
    to.upload(stream, own, values)
}

/// Takes the last rows off a matrix, as many as `values` holds, and copies them to the host once the stream has come so
/// far: what split clients get of a pass.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If these are not whole rows, or there are fewer.
pub fn split_rows(stream: &CudaStream, from: &mut Matrix, values: &mut [f32]) -> Result<(), CudaError> {
    let taken = values.len() / from.width().max(1);
    let kept = from.rows().checked_sub(taken).expect("no more rows are taken than there are");
    from.download(stream, kept, values)?;
    from.truncate(kept);
    Ok(())
}
