//! A model's weights as exact 32-bit floats, as a reference for the quantized paths.

use std::borrow::Cow;

use kernels::{TensorType, quant::dequantize_row};

use crate::shape::{
    config::ModelConfig,
    source::{Tensor, TensorId, WeightSource},
};

/// The dequantized tensors of another source. A pass over dequantized tensors also leaves activations
/// unrounded.
#[derive(Debug)]
pub struct Dequantized<S>(pub S);

impl<S: WeightSource> WeightSource for Dequantized<S> {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let Tensor { kind, rows, cols, data } = self.0.tensor(id)?;
        let mut row = vec![0.0; cols];
        let mut floats = Vec::with_capacity(rows * cols * 4);
        for bytes in data.chunks_exact(kind.row_bytes(cols)?) {
            dequantize_row(kind, bytes, &mut row);
            floats.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        Some(Tensor { kind: TensorType::F32, rows, cols, data: Cow::Owned(floats) })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.0.kind(id).map(|_| TensorType::F32)
    }

    fn release(&self, id: TensorId) {
        self.0.release(id);
    }
}
