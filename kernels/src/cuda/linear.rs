//! Linear layers on the device: `out = x · Wᵀ (+ bias)`, and the transposed product.
//!
//! The method depends on the number of rows that share the weights, and on whether the weights have x's kind:
//!
//! | weights | rows | method |
//! | --- | --- | --- |
//! | 16 bits, as x | to 32 | `gemv.cu`: every weight is read once, for any number of rows |
//! | 32 bits, as x | to 8 | `gemv_f32.cu`: every weight is read once |
//! | block formats, x in bf16 | to 64 | `gemv_quantized.cu`: packed weights read once for every 32 rows |
//! | of x's kind | more | cuBLASLt, or `gemm.cu` without it |
//! | any other | any | tiles of W are dequantized to x's kind (`dequantize.cu`), then multiplied as above |
//!
//! Writing a 4-bit weight in 16 bits and reading it back costs 4.6 bytes, reading it packed 0.6. Two packed
//! reads are therefore cheaper, which gives the limit of 64 rows. In the first three methods an output has
//! the same bits for any other rows in the batch, so a decoded token does not depend on its batch.
//!
//! With x in f32 every method is linear in x up to the rounding of sums, for all weights, as training and
//! masked clients need. TF32 is never used.

mod gemm;
mod gemv;

use std::sync::Arc;

use super::{Cuda, CudaError, CudaStream, DeviceVec, Matrix, Weight, blas::Blas};
use crate::{TensorType, lora::ElementKind};

pub use gemm::linear_transposed;

const TILE_BYTES: usize = 64 << 20;

/// A matrix, and the columns of `out` for its outputs.
#[derive(Debug, Clone, Copy)]
pub struct LinearPart<'a> {
    /// Weights as rows, `[outputs, inputs]`.
    pub weight: &'a Weight,
    /// Bias per output feature, added to the outputs.
    pub bias: Option<&'a DeviceVec<f32>>,
    /// Column of `out` of the first output feature.
    pub column: usize,
}

/// Buffers and libraries that products need beside their operands. Belongs to one stream.
#[derive(Debug)]
pub struct Workspace {
    cuda: Arc<Cuda>,
    blas: Option<Blas>,
    /// Dequantized weights. The first product that needs the tile allocates it, and must not be recorded.
    tile: Option<DeviceVec<u8>>,
}

impl Workspace {
    /// Creates a workspace that multiplies many rows with `blas`, or with our own kernel.
    #[must_use]
    pub fn new(cuda: &Arc<Cuda>, blas: Option<Blas>) -> Self {
        Self { cuda: Arc::clone(cuda), blas, tile: None }
    }

    /// Returns the library that multiplies many rows, or `None` for our own kernel.
    #[must_use]
    pub fn blas(&self) -> Option<&Blas> {
        self.blas.as_ref()
    }
}

/// Weights as a product reads them, and the columns of their outputs.
#[derive(Debug, Clone, Copy)]
struct Operand<'a> {
    /// Device address of a whole [`Weight`], or of rows of a float kind.
    address: u64,
    kind: TensorType,
    rows: usize,
    columns: usize,
    bias: Option<&'a DeviceVec<f32>>,
    /// Index of the bias of the first of these rows.
    bias_at: usize,
    /// Column of `out`, or of the input of the transposed product.
    column: usize,
    /// Whether an earlier kernel of the stream produces the weights.
    is_made: bool,
}

impl<'a> Operand<'a> {
    fn of(part: &LinearPart<'a>) -> Self {
        let weight = part.weight;
        let (kind, rows, columns) = (weight.kind(), weight.rows(), weight.columns());
        let (bias, column) = (part.bias, part.column);
        Self { address: weight.address(), kind, rows, columns, bias, bias_at: 0, column, is_made: false }
    }

    /// Returns the address of the first bias, 0 without a bias.
    fn bias_address(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.address_of(self.bias_at))
    }
}

/// Computes `out[r, column + o] = sum_k W[o, k] x[r, k] (+ bias[o])` for every part. x is `[rows, inputs]`, a
/// weight `[outputs, inputs]`, out `[rows, _]` of x's kind or of 32 bits. Columns of no part are unchanged.
/// Sums have 32 bits.
///
/// The first call of a shape may allocate memory: it must not be recorded in a CUDA graph.
///
/// # Errors
/// Fails if the device is lost or has no memory for a tile of weights.
///
/// # Panics
/// Panics if the shapes or element kinds do not match.
pub fn linear(
    stream: &CudaStream,
    workspace: &mut Workspace,
    x: &Matrix,
    parts: &[LinearPart<'_>],
    out: &mut Matrix,
) -> Result<(), CudaError> {
    check_parts(parts, out.width());
    assert_eq!(x.rows(), out.rows(), "an output row for each row");
    assert!(
        out.kind() == x.kind() || out.kind() == ElementKind::F32,
        "outputs are of x's kind or of 32 bits"
    );
    assert!(parts.iter().all(|part| part.weight.columns() == x.width()), "weights have x's width");
    let mut rest = parts;
    while let [first, ..] = rest {
        let kind = first.weight.kind();
        let few = gemv::takes(kind, x);
        let alike = rest.iter().take_while(|part| part.weight.kind() == kind).count();
        let (group, after) = rest.split_at(if few { alike.min(gemv::MAX_PARTS) } else { 1 });
        rest = after;
        if few {
            let group: Vec<Operand<'_>> = group.iter().map(Operand::of).collect();
            gemv::multiply(stream, x, &group, out)?;
        } else {
            gemm::multiply_part(stream, workspace, x, first, out)?;
        }
    }
    Ok(())
}

/// Panics unless `parts` take disjoint, ascending columns within rows of `stride` elements.
fn check_parts(parts: &[LinearPart<'_>], stride: usize) {
    for part in parts {
        assert!(part.column + part.weight.rows() <= stride, "the part lies within a row");
        assert!(part.bias.is_none_or(|bias| bias.len() == part.weight.rows()), "one bias an output feature");
    }
    let in_order = |pair: &[LinearPart<'_>]| pair[0].column + pair[0].weight.rows() <= pair[1].column;
    assert!(parts.windows(2).all(in_order), "parts take disjoint columns, in ascending order");
}
