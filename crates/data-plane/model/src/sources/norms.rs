//! Norms whose weights are stored in another form than the pass multiplies with.

use kernels::{TensorType, quant::dequantize_row};

use crate::shape::source::Tensor;

/// Returns a norm stored minus 1 (Gemma), as 32-bit floats; transformers adds the 1 in 32 bits, too.
pub(super) fn norm_and_one(kind: TensorType, stored: &[u8], count: usize) -> Tensor<'static> {
    changed(kind, stored, count, |weight| 1.0 + weight)
}

/// Returns the output norm divided by `divisor` (Granite), which divides the logits of the linear head.
pub(super) fn divided_norm(kind: TensorType, stored: &[u8], count: usize, divisor: f32) -> Tensor<'static> {
    changed(kind, stored, count, |weight| weight / divisor)
}

fn changed(kind: TensorType, stored: &[u8], count: usize, change: impl Fn(f32) -> f32) -> Tensor<'static> {
    let mut weights = vec![0.0; count];
    dequantize_row(kind, stored, &mut weights);
    let data = weights.into_iter().flat_map(|weight| change(weight).to_le_bytes()).collect::<Vec<u8>>();
    Tensor { kind: TensorType::F32, rows: 1, cols: count, data: data.into() }
}
