//! Norms whose weights are not stored as the pass multiplies with them.

use kernels::{TensorType, quant::dequantize_row};

use crate::shape::source::Tensor;

/// The weights of a norm that are stored less 1 (Gemma), as floats of 32 bits: transformers adds it in these, too.
pub(super) fn norm_and_one(kind: TensorType, stored: &[u8], count: usize) -> Tensor<'static> {
    changed(kind, stored, count, |weight| 1.0 + weight)
}

/// The weights of the norm before a head whose logits are divided by `divisor` (Granite): the head is linear, so this divides them,
/// with any adapter.
pub(super) fn divided_norm(kind: TensorType, stored: &[u8], count: usize, divisor: f32) -> Tensor<'static> {
    changed(kind, stored, count, |weight| weight / divisor)
}

fn changed(kind: TensorType, stored: &[u8], count: usize, change: impl Fn(f32) -> f32) -> Tensor<'static> {
    let mut weights = vec![0.0; count];
    dequantize_row(kind, stored, &mut weights);
    let data = weights.into_iter().flat_map(|weight| change(weight).to_le_bytes()).collect::<Vec<u8>>();
    Tensor { kind: TensorType::F32, rows: 1, cols: count, data: data.into() }
}
