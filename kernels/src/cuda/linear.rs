//! Linear layers: `out = x · Wᵀ (+ bias)`, and their transposed product.
//!
//! How a product is taken depends on how many rows share the weights, and on whether the weights are of x's kind:
//!
//! | weights | rows | way |
//! | --- | --- | --- |
//! | 16 bits, as x | to 32 | `gemv.cu`: every weight read once, no matter how many rows |
//! | 32 bits, as x | to 8 | `gemv_f32.cu`, likewise |
//! | block formats, x in bf16 | to 64 | `gemv_quantized.cu`: packed weights read once for every 32 rows |
//! | of x's kind | more | cuBLASLt, or `gemm.cu` without it |
//! | anything else | any | tiles of W are written out in x's kind (`dequantize.cu`), each then multiplied as above |
//!
//! Writing a 4-bit weight out and reading it back costs 4.6 bytes, reading it packed 0.6: hence 64 rows and not 32. In the
//! first three ways an output has the same bits whatever rows are beside it: a decoded token does not depend on its company.
//!
//! With x in f32 every way is linear in x up to the rounding of sums, whatever the weights: what training and masked clients
//! need. TF32 is never used.

mod gemm;
mod gemv;

use std::sync::Arc;

use super::{Cuda, CudaError, CudaStream, DeviceVec, Matrix, Weight, blas::Blas};
use crate::{TensorType, lora::ElementKind};

pub use gemm::linear_transposed;

/// Bytes of the tile in which weights are written out.
const TILE_BYTES: usize = 64 << 20;

/// A matrix and where its outputs go in a row of `out`.
#[derive(Debug, Clone, Copy)]
pub struct LinearPart<'a> {
    /// The weights.
    pub weight: &'a Weight,
    /// Added to the outputs, one an output feature.
    pub bias: Option<&'a DeviceVec<f32>>,
    /// Column of `out` of the first output feature.
    pub column: usize,
}

/// What products need beside their operands. Belongs to one stream.
#[derive(Debug)]
pub struct Workspace {
    cuda: Arc<Cuda>,
    blas: Option<Blas>,
    /// Weights written out. Taken by the first product that needs it: that one must not be recorded.
    tile: Option<DeviceVec<u8>>,
}

impl Workspace {
    /// A workspace that multiplies many rows with `blas`, or with our own kernel.
    #[must_use]
    pub fn new(cuda: &Arc<Cuda>, blas: Option<Blas>) -> Self {
        Self { cuda: Arc::clone(cuda), blas, tile: None }
    }

    /// What multiplies many rows, if it is not our own kernel.
    #[must_use]
    pub fn blas(&self) -> Option<&Blas> {
        self.blas.as_ref()
    }
}

/// Weights as a product reads them, and where their outputs go.
#[derive(Debug, Clone, Copy)]
struct Operand<'a> {
    /// Where they begin on the device: a whole [`Weight`], or rows of a float kind.
    address: u64,
    kind: TensorType,
    rows: usize,
    columns: usize,
    bias: Option<&'a DeviceVec<f32>>,
    /// The bias of the first of these rows.
    bias_at: usize,
    /// The column of `out`; of the transposed product, of its input.
    column: usize,
    /// Whether a kernel in front makes the weights.
    is_made: bool,
}

impl<'a> Operand<'a> {
    fn of(part: &LinearPart<'a>) -> Self {
        let weight = part.weight;
        let (kind, rows, columns) = (weight.kind(), weight.rows(), weight.columns());
        let (bias, column) = (part.bias, part.column);
        Self { address: weight.address(), kind, rows, columns, bias, bias_at: 0, column, is_made: false }
    }

    /// Where its bias begins, 0 without one.
    fn bias_address(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.address_of(self.bias_at))
    }
}

/// `out[r, column + o] = sum_k W[o, k] x[r, k] (+ bias[o])` for every part: x is `[rows, inputs]`, a weight `[outputs,
/// inputs]`, out `[rows, _]` of x's kind or of 32 bits. Columns of no part are left as they are. Sums are in 32 bits.
///
/// The first call of a shape may take memory: it must not be recorded in a graph.
///
/// # Errors
///
/// The device is lost, or has no room for a tile of weights.
///
/// # Panics
///
/// If the shapes or kinds do not fit together.
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

/// Panics unless `parts` lie side by side in rows of `stride`.
fn check_parts(parts: &[LinearPart<'_>], stride: usize) {
    for part in parts {
        assert!(part.column + part.weight.rows() <= stride, "the part lies within a row");
        assert!(part.bias.is_none_or(|bias| bias.len() == part.weight.rows()), "one bias an output feature");
    }
    let in_order = |pair: &[LinearPart<'_>]| pair[0].column + pair[0].weight.rows() <= pair[1].column;
    assert!(parts.windows(2).all(in_order), "parts take disjoint columns, in ascending order");
}
