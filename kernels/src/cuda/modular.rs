//! Exact linear layers modulo 2^64 or 2^48: the integers of [`linear_ring`](crate::linear_ring()), bit for
//! bit. The kernels are in `ring.cu` and `ring_transposed.cu`.
//!
//! Integers of a row are contiguous in a [`Matrix`] of 32-bit elements, which no kernel treats as floats.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix, Weight,
    launch::{Arg, LaunchShape, count, launch},
    weight::{by_form, number_kind},
};
use crate::{Modulus, lora::ElementKind};

const THREADS: u32 = 256;

/// Elements of a row whose byte planes are stored together, and bytes of all planes of one element.
const GROUP: usize = 32;
const PLANES: usize = 8;

/// Rows and outputs per block: `TILE_ROWS` and `BAND` of `ring.cu`.
const TILE: (usize, usize) = (8, 16);

/// Rows and inputs per block of the transposed product, and maximum number of outputs that a block sums over.
const TRANSPOSED_TILE: (usize, usize) = (4, 256);
const SLICE: usize = 512;

/// A matrix, and the columns of `out` for its outputs.
#[derive(Debug, Clone, Copy)]
pub struct ModularPart<'a> {
    /// Weights as rows, `[outputs, inputs]`.
    pub weight: &'a Weight,
    /// Power of two that the scales of a block format are relative to:
    /// [`PackedLayout::unit`](crate::PackedLayout::unit) of the stored tensor.
    pub unit: f32,
    /// Column of `out`, in integers, of the first output feature.
    pub column: usize,
}

impl ModularPart<'_> {
    /// Returns the factors that turn weights into integers times `2^exponent`: `Factors` of `ring.cuh`.
    fn factors(&self, exponent: i32) -> [Arg; 2] {
        let power = |n: i32| 2.0f32.powi(n.clamp(-126, 127));
        let [first, then] = match number_kind(self.weight.kind()) {
            Some(_) => [power(24), power(-24 - exponent)],
            None => [1.0 / self.unit, self.unit * power(-exponent)],
        };
        [Arg::F32(first), Arg::F32(then)]
    }
}

/// Buffers of modular products, kept between calls. Belongs to one stream.
#[derive(Debug)]
pub struct ModularScratch {
    /// Byte planes of rows, as the tensor cores read them.
    planes: DeviceVec<u8>,
    /// Gradients as 64-bit words, before they are narrowed.
    wide: Matrix,
}

impl ModularScratch {
    /// Creates empty buffers.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(stream: &CudaStream) -> Result<Self, CudaError> {
        let (cuda, kind) = (stream.cuda(), ElementKind::F32);
        Ok(Self { planes: DeviceVec::new(cuda, 0)?, wide: Matrix::new(cuda, kind)? })
    }

    fn write_planes(&mut self, stream: &CudaStream, modulus: Modulus, x: &Matrix) -> Result<(), CudaError> {
        let length = length(modulus, x);
        let groups = length.div_ceil(GROUP);
        let needed = x.rows() * groups * GROUP * PLANES;
        if needed > self.planes.len() {
            self.planes = DeviceVec::new(stream.cuda(), needed)?;
        }
        let arguments = [
            Arg::Ptr(x.address()),
            Arg::U32(count(modulus.bytes())),
            Arg::U32(count(x.rows())),
            Arg::U32(count(length)),
            Arg::U32(count(groups)),
            Arg::Ptr(self.planes.address()),
        ];
        let blocks = needed.div_ceil(PLANES * THREADS as usize);
        // SAFETY: 1. The kernel is declared with these arguments. 2. x has `x.rows()` rows of `length` integers; there
        // is room for the planes. 3. The output is borrowed exclusively.
        unsafe { launch(stream, "ring_planes", LaunchShape::line(blocks, THREADS), &arguments) }
    }
}

/// Computes `out[r, column + o] = sum_k W[o, k] x[r, k]` for every part, in units of `2^exponent`. x is
/// `[rows, inputs]`, a weight `[outputs, inputs]`, out `[rows, _]`; x and out hold integers of this modulus.
/// Columns of no part keep their values. The exponent is at least the
/// [smallest](crate::ModularForm::smallest) of each part.
///
/// The first call of a shape may allocate memory: it must not be recorded in a CUDA graph.
///
/// # Errors
/// Fails if the device is lost or has no memory for the planes of x.
///
/// # Panics
/// Panics if the shapes do not match, or if rows do not hold integers of this modulus.
pub fn linear_ring(
    stream: &CudaStream,
    scratch: &mut ModularScratch,
    modulus: Modulus,
    x: &Matrix,
    parts: &[ModularPart<'_>],
    exponent: i32,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    let stride = length(modulus, out);
    check_parts(parts, (length(modulus, x), stride));
    assert_eq!(x.rows(), out.rows(), "an output row for each row");
    scratch.write_planes(stream, modulus, x)?;
    for part in parts {
        let (outputs, [first, then]) = (part.weight.rows(), part.factors(exponent));
        let arguments = [
            Arg::Ptr(part.weight.address()),
            Arg::U32(count(outputs)),
            Arg::U32(count(part.weight.columns())),
            first,
            then,
            Arg::Ptr(scratch.planes.address()),
            Arg::U32(count(x.rows())),
            Arg::Ptr(out.address() + (modulus.bytes() * part.column) as u64),
            Arg::U32(count(modulus.bytes())),
            Arg::U32(count(stride)),
        ];
        let shape = LaunchShape::plane(x.rows().div_ceil(TILE.0), outputs.div_ceil(TILE.1), THREADS);
        // SAFETY: 1. The kernels are declared with these arguments. 2. The planes are those of x, whose rows are as
        // long as the weight's; the part's integers lie within out's rows, as was checked. 3. The output is borrowed
        // exclusively.
        unsafe { launch(stream, by_form!("ring", part.weight.kind()), shape, &arguments)? };
    }
    Ok(())
}

/// Computes `out[r, i] = sum over parts and their outputs o of g[r, column + o] W[o, i]` in units of
/// `2^exponent`. g is `[rows, _]`, out `[rows, inputs]`, of integers of this modulus. Without parts it is
/// zero.
///
/// The first call of a shape may allocate memory: it must not be recorded in a CUDA graph.
///
/// # Errors
/// Fails if the device is lost or has no memory for sums.
///
/// # Panics
/// Panics if the shapes do not match, or if rows do not hold integers of this modulus.
pub fn linear_ring_transposed(
    stream: &CudaStream,
    scratch: &mut ModularScratch,
    modulus: Modulus,
    g: &Matrix,
    parts: &[ModularPart<'_>],
    exponent: i32,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    check_parts(parts, (length(modulus, out), length(modulus, g)));
    assert_eq!(g.rows(), out.rows(), "an output row for each row");
    if modulus == Modulus::Bits64 {
        return add_gradients(stream, modulus, g, parts, exponent, out);
    }
    let wide = &mut scratch.wide;
    wide.reshape(g.rows(), 2 * length(modulus, out))?;
    add_gradients(stream, modulus, g, parts, exponent, wide)?;
    let numbers = g.rows() * length(modulus, out);
    let arguments = [Arg::Ptr(wide.address()), Arg::U64(numbers as u64), Arg::Ptr(out.address())];
    let shape = LaunchShape::line(numbers.div_ceil(THREADS as usize), THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. There are as many words as out has integers. 3. The
    // output is borrowed exclusively.
    unsafe { launch(stream, "ring_narrow", shape, &arguments) }
}

/// Computes the sums of gradients, as words of `out`.
fn add_gradients(
    stream: &CudaStream,
    modulus: Modulus,
    g: &Matrix,
    parts: &[ModularPart<'_>],
    exponent: i32,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    out.clear(stream)?;
    for part in parts {
        let (weight, [first, then]) = (part.weight, part.factors(exponent));
        let arguments = [
            Arg::Ptr(weight.address()),
            Arg::U32(count(weight.rows())),
            Arg::U32(count(weight.columns())),
            first,
            then,
            Arg::Ptr(g.address() + (modulus.bytes() * part.column) as u64),
            Arg::U32(count(modulus.bytes())),
            Arg::U32(count(g.rows())),
            Arg::U32(count(length(modulus, g))),
            Arg::U32(count(SLICE)),
            Arg::Ptr(out.address()),
        ];
        let blocks =
            [weight.columns().div_ceil(TRANSPOSED_TILE.1), g.rows().div_ceil(TRANSPOSED_TILE.0)].map(count);
        let grid = [blocks[0], blocks[1], count(weight.rows().div_ceil(SLICE))];
        let shape = LaunchShape { grid, ..LaunchShape::line(1, THREADS) };
        // SAFETY: 1. The kernels are declared with these arguments. 2. The part's integers lie within g's rows, as was
        // checked, and out's rows are as long as the weight's. 3. The output is borrowed exclusively.
        unsafe { launch(stream, by_form!("ring_transposed", weight.kind()), shape, &arguments)? };
    }
    Ok(())
}

fn length(modulus: Modulus, rows: &Matrix) -> usize {
    let bytes = size_of::<f32>() * rows.width();
    let is_whole = rows.kind() == ElementKind::F32 && bytes.is_multiple_of(modulus.bytes());
    assert!(is_whole, "rows of whole numbers");
    bytes / modulus.bytes()
}

/// Panics unless `parts` take rows of `inputs` integers and disjoint, ascending columns of rows of `stride`.
fn check_parts(parts: &[ModularPart<'_>], (inputs, stride): (usize, usize)) {
    let end = |part: &ModularPart<'_>| part.column + part.weight.rows();
    for part in parts {
        assert_eq!(part.weight.columns(), inputs, "weights have the width of rows");
        assert!(end(part) <= stride, "the part lies within a row");
    }
    assert!(
        parts.windows(2).all(|pair| end(&pair[0]) <= pair[1].column),
        "parts take disjoint columns, in ascending order"
    );
}
