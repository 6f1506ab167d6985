//! Products of many rows (GEMM): in cuBLASLt, or in `gemm.cu` and `gemm_transposed.cu`.

use super::{LinearPart, Operand, TILE_BYTES, Workspace, check_parts, gemv};
use crate::{
    TensorType,
    cuda::{
        CudaError, CudaStream, DeviceVec, Matrix,
        blas::{Blas, BlasProduct, WeightLayout},
        launch::{Arg, LaunchShape, by_kind, count, launch},
        weight::{dequantize, number_kind},
    },
    lora::ElementKind,
};

/// Threads per block of the tiled kernels.
const GEMM_THREADS: u32 = 256;

/// Rows and columns of out per block: `TILE_M` and `TILE_N` of `gemm.cuh`, and `F32_TILE` for f32.
const HALF_TILE: (usize, usize) = (64, 128);
const F32_TILE: (usize, usize) = (64, 64);

/// Threads per block of `bias.cu`, and maximum number of rows of blocks.
const BIAS_THREADS: u32 = 256;
const BIAS_BLOCKS: usize = 4096;

/// Enqueues the product with weights of x's kind.
fn multiply(
    stream: &CudaStream,
    blas: Option<&mut Blas>,
    x: &Matrix,
    part: &Operand<'_>,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    if x.rows() == 0 || part.rows == 0 {
        return Ok(());
    }
    let at = (part.column * out.kind().bytes()) as u64;
    let product = BlasProduct {
        weights: part.address,
        weights_are: WeightLayout::Transposed,
        x: x.address(),
        out: out.address() + at,
        rows: x.rows(),
        columns: part.rows,
        inner: part.columns,
        x_stride: x.width(),
        out_stride: out.width(),
        kind: x.kind(),
        out_kind: out.kind(),
        accumulate: false,
    };
    if let Some(blas) = blas
        && blas.multiply(stream, &product)?
    {
        return add_bias(stream, part, out);
    }
    // SAFETY: `linear` has checked x, the part and out; out is borrowed exclusively.
    unsafe { multiply_tiles(stream, &product, part.bias_address()) }
}

/// Enqueues our own kernel for `product`, whose operands must exist and whose output no other work writes.
unsafe fn multiply_tiles(stream: &CudaStream, product: &BlasProduct, bias: u64) -> Result<(), CudaError> {
    let (tile_rows, tile_columns) = if product.kind == ElementKind::F32 { F32_TILE } else { HALF_TILE };
    let transposed = product.weights_are == WeightLayout::Plain;
    let name =
        if transposed { by_kind!("gemm_transposed", product.kind) } else { by_kind!("gemm", product.kind) };
    let weight_stride = if transposed { product.columns } else { product.inner };
    let arguments = [
        Arg::Ptr(product.x),
        Arg::Ptr(product.weights),
        Arg::Ptr(product.out),
        Arg::Ptr(bias),
        Arg::U32(count(product.rows)),
        Arg::U32(count(product.columns)),
        Arg::U32(count(product.inner)),
        Arg::U32(count(product.x_stride)),
        Arg::U32(count(weight_stride)),
        Arg::U32(count(product.out_stride)),
        Arg::U32(u32::from(product.out_kind == ElementKind::F32)),
        Arg::U32(u32::from(product.accumulate)),
    ];
    let blocks = (product.columns.div_ceil(tile_columns), product.rows.div_ceil(tile_rows));
    // SAFETY: 1. The kernels are declared with these arguments. 2. The caller guarantees operands and output.
    unsafe { launch(stream, name, LaunchShape::plane(blocks.0, blocks.1, GEMM_THREADS), &arguments) }
}

/// Adds a part's bias to its columns of `out` after a cuBLASLt product.
fn add_bias(stream: &CudaStream, part: &Operand<'_>, out: &mut Matrix) -> Result<(), CudaError> {
    if part.bias.is_none() {
        return Ok(());
    }
    let arguments = [
        Arg::Ptr(out.address()),
        Arg::U32(count(out.rows())),
        Arg::U32(count(out.width())),
        Arg::U32(count(part.column)),
        Arg::U32(count(part.rows)),
        Arg::Ptr(part.bias_address()),
    ];
    let blocks = part.rows.div_ceil(BIAS_THREADS as usize);
    let shape = LaunchShape::plane(blocks, out.rows().min(BIAS_BLOCKS), BIAS_THREADS);
    // SAFETY: 1. The kernel is declared with these arguments. 2. The part's columns lie within out's rows. 3. The
    // output is borrowed exclusively.
    unsafe { launch(stream, by_kind!("add_bias", out.kind()), shape, &arguments) }
}

/// Enqueues the product with weights of any type. Weights of another kind are dequantized to x's and
/// multiplied by tiles.
pub(super) fn multiply_part(
    stream: &CudaStream,
    workspace: &mut Workspace,
    x: &Matrix,
    part: &LinearPart<'_>,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    for_each_tile(stream, workspace, part, x.kind(), |blas, tile| {
        if gemv::takes(tile.kind, x) {
            return gemv::multiply(stream, x, &[tile], out);
        }
        multiply(stream, blas, x, &tile, out)
    })
}

/// Calls `each` with the output features of `part` as weights of `kind`: the stored weights, or dequantized
/// tiles. The next tile overwrites a tile after the work that `each` enqueued.
fn for_each_tile<'a>(
    stream: &CudaStream,
    workspace: &mut Workspace,
    part: &LinearPart<'a>,
    kind: ElementKind,
    mut each: impl FnMut(Option<&mut Blas>, Operand<'a>) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let whole = Operand::of(part);
    let blas = &mut workspace.blas;
    if number_kind(whole.kind) == Some(kind) {
        return each(blas.as_mut(), whole);
    }
    let row_bytes = (whole.columns * kind.bytes()).max(1);
    let rows_a_tile = (TILE_BYTES / row_bytes).max(1);
    let room = TILE_BYTES.max(row_bytes);
    let tile = match &mut workspace.tile {
        Some(tile) if tile.len() >= room => tile,
        other => other.insert(DeviceVec::new(&workspace.cuda, room)?),
    };
    for first in (0..whole.rows).step_by(rows_a_tile) {
        let rows = rows_a_tile.min(whole.rows - first);
        dequantize(stream, part.weight, (first, rows), tile, kind)?;
        let (address, bias_at, column) = (tile.address(), first, whole.column + first);
        let kind = tensor_type(kind);
        each(blas.as_mut(), Operand { address, kind, rows, bias_at, column, is_made: true, ..whole })?;
    }
    Ok(())
}

/// Returns the tensor type of unquantized weights of `kind`.
fn tensor_type(kind: ElementKind) -> TensorType {
    match kind {
        ElementKind::F32 => TensorType::F32,
        ElementKind::F16 => TensorType::F16,
        ElementKind::Bf16 => TensorType::Bf16,
    }
}

/// Computes `out[r, i] = sum over parts and their outputs o of g[r, column + o] W[o, i]`: the gradient at the
/// inputs of [`linear`](super::linear()) with these parts. g is `[rows, _]`, out `[rows, inputs]` of 32 bits;
/// biases are ignored.
///
/// The first call of a shape may allocate memory: it must not be recorded in a CUDA graph.
///
/// # Errors
/// Fails if the device is lost or has no memory for a tile of weights.
///
/// # Panics
/// Panics if the shapes or element kinds do not match.
pub fn linear_transposed(
    stream: &CudaStream,
    workspace: &mut Workspace,
    g: &Matrix,
    parts: &[LinearPart<'_>],
    out: &mut Matrix,
) -> Result<(), CudaError> {
    check_parts(parts, g.width());
    assert_eq!(g.rows(), out.rows(), "an output row for each row");
    assert_eq!(out.kind(), ElementKind::F32, "gradients are summed in 32 bits");
    assert!(parts.iter().all(|part| part.weight.columns() == out.width()), "weights have out's width");
    assert!(parts.iter().any(|part| part.weight.rows() > 0), "there is something to sum");
    if g.rows() == 0 {
        return Ok(());
    }
    let mut accumulate = false;
    for part in parts.iter().filter(|part| part.weight.rows() > 0) {
        for_each_tile(stream, workspace, part, g.kind(), |blas, tile| {
            let product = transposed(g, &tile, out, accumulate);
            accumulate = true;
            if let Some(blas) = blas
                && blas.multiply(stream, &product)?
            {
                return Ok(());
            }
            // SAFETY: g, the part and out were checked; out is borrowed exclusively.
            unsafe { multiply_tiles(stream, &product, 0) }
        })?;
    }
    Ok(())
}

/// Describes the product of the tile's columns of `g` with the tile.
fn transposed(g: &Matrix, tile: &Operand<'_>, out: &Matrix, accumulate: bool) -> BlasProduct {
    BlasProduct {
        weights: tile.address,
        weights_are: WeightLayout::Plain,
        x: g.address() + (tile.column * g.kind().bytes()) as u64,
        out: out.address(),
        rows: g.rows(),
        columns: tile.columns,
        inner: tile.rows,
        x_stride: g.width(),
        out_stride: out.width(),
        kind: g.kind(),
        out_kind: out.kind(),
        accumulate,
    }
}
