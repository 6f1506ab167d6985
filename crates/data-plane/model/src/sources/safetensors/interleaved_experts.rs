//! Experts of gpt-oss in the layout of transformers: two tensors for a block, of gate and up and of down.
//!
//! ```text
//! gate_up_proj         [experts, hidden, 2 width]           outputs: gate 0, up 0, gate 1, up 1, ...
//! down_proj            [experts, width, hidden]
//! gate_up_proj_bias    [experts, 2 width]
//! down_proj_bias       [experts, hidden]
//! X_blocks, X_scales   [experts, outputs, inputs / 32, 16], [experts, outputs, inputs / 32]    in place of X
//! ```
//!
//! A byte of the blocks has two neighbouring inputs, the first in the low nibble. GGUF's MXFP4 pairs inputs
//! that are 16 apart, and stores the exponent before them. The conversion only moves nibbles.

use kernels::TensorType;

use super::shards::Shards;
use crate::{
    shape::{
        config::ModelConfig,
        experts::ExpertPart,
        layout::{LayoutError, tensor_shape},
        source::{Tensor, TensorId},
    },
    sources::hf_names::experts_name,
};

/// Inputs of an MXFP4 block.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;

/// Where an expert's matrix or bias lies in the tensors of its block.
#[derive(Debug)]
pub(super) struct InterleavedExperts<'a> {
    shards: &'a Shards,
    /// Name of the tensor, without the suffix of blocks and scales.
    name: String,
    layout: StackLayout,
    experts: usize,
    expert: usize,
    /// Outputs and inputs of the tensor's matrices; a bias has one input.
    outputs: usize,
    inputs: usize,
    /// First output of the matrix, and the distance to the next.
    first: usize,
    step: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StackLayout {
    Bias,
    Transposed,
    Mxfp4,
}

impl<'a> InterleavedExperts<'a> {
    /// Returns the location of the expert's tensor `id`, or `None` for other tensors.
    pub(super) fn of(
        shards: &'a Shards,
        config: &ModelConfig,
        are_mxfp4: bool,
        id: TensorId,
    ) -> Option<Self> {
        let (layer, expert, part, layout) = match id {
            TensorId::Expert(layer, expert, part) if are_mxfp4 => (layer, expert, part, StackLayout::Mxfp4),
            TensorId::Expert(layer, expert, part) => (layer, expert, part, StackLayout::Transposed),
            TensorId::ExpertBias(layer, expert, part) => (layer, expert, part, StackLayout::Bias),
            _ => return None,
        };
        let [outputs, inputs] = tensor_shape(config, TensorId::Expert(layer, expert, part));
        let (name, first, step) = match part {
            ExpertPart::Gate => ("gate_up_proj", 0, 2),
            ExpertPart::Up => ("gate_up_proj", 1, 2),
            ExpertPart::Down => ("down_proj", 0, 1),
        };
        let suffix = if layout == StackLayout::Bias { "_bias" } else { "" };
        Some(Self {
            shards,
            name: format!("{}.{name}{suffix}", experts_name(layer)),
            layout,
            experts: config.experts.as_ref().map_or(0, |experts| experts.count),
            expert: usize::from(expert.0),
            outputs: outputs * step,
            inputs: if layout == StackLayout::Bias { 1 } else { inputs },
            first,
            step,
        })
    }

    /// Returns the names of the tensors.
    pub(super) fn names(&self) -> Vec<String> {
        match self.layout {
            StackLayout::Mxfp4 => ["blocks", "scales"].map(|part| format!("{}_{part}", self.name)).into(),
            StackLayout::Bias | StackLayout::Transposed => vec![self.name.clone()],
        }
    }

    /// Checks the tensors and returns their names.
    ///
    /// # Errors
    /// A tensor is missing or has another shape.
    pub(super) fn check(&self) -> Result<Vec<String>, LayoutError> {
        let Self { experts, outputs, inputs, .. } = *self;
        let names = self.names();
        let expected = match self.layout {
            StackLayout::Bias => vec![vec![experts, outputs]],
            StackLayout::Transposed => vec![vec![experts, inputs, outputs]],
            StackLayout::Mxfp4 => {
                let blocks = inputs / BLOCK;
                vec![vec![experts, outputs, blocks, BLOCK_BYTES], vec![experts, outputs, blocks]]
            }
        };
        for (name, expected) in names.iter().zip(&expected) {
            let found = match self.layout {
                StackLayout::Mxfp4 => self.shards.octets(name).map(|(shape, _)| shape),
                StackLayout::Bias | StackLayout::Transposed => {
                    self.shards.tensor(name).map(|stored| &*stored.shape)
                }
            };
            let found = found.ok_or_else(|| LayoutError::Missing { tensor: name.clone() })?;
            let is_whole = self.layout != StackLayout::Mxfp4 || inputs.is_multiple_of(BLOCK);
            if found != expected || !is_whole {
                let (expected, found) = (as_matrix(expected), as_matrix(found));
                return Err(LayoutError::Shape { tensor: name.clone(), expected, found });
            }
        }
        Ok(names)
    }

    pub(super) fn kind(&self) -> Option<TensorType> {
        match self.layout {
            StackLayout::Mxfp4 => Some(TensorType::Mxfp4),
            StackLayout::Bias | StackLayout::Transposed => Some(self.shards.tensor(&self.name)?.kind),
        }
    }

    /// Returns the matrix or the bias, one row for each output of this part; a bias is one row.
    pub(super) fn tensor(&self) -> Option<Tensor<'static>> {
        let (kind, rows, cols) = (self.kind()?, self.outputs / self.step, self.inputs);
        let data = match self.layout {
            StackLayout::Mxfp4 => self.blocks()?,
            StackLayout::Bias | StackLayout::Transposed => self.numbers(kind)?,
        };
        let (rows, cols) = if self.layout == StackLayout::Bias { (1, rows) } else { (rows, cols) };
        Some(Tensor { kind, rows, cols, data: data.into() })
    }

    fn rows(&self) -> impl Iterator<Item = usize> + use<> {
        (self.first..self.outputs).step_by(self.step)
    }

    /// Returns the part of this expert of a tensor of all experts.
    fn of_expert<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        let size = bytes.len() / self.experts;
        &bytes[self.expert * size..][..size]
    }

    /// Reads columns of a matrix `[inputs, outputs]` as rows.
    fn numbers(&self, kind: TensorType) -> Option<Vec<u8>> {
        let stored = self.of_expert(self.shards.bytes(&self.name)?);
        let size = kind.row_bytes(1)?;
        let mut data = Vec::with_capacity(stored.len() / self.step);
        for output in self.rows() {
            let column = stored.chunks_exact(self.outputs * size).map(|row| &row[output * size..][..size]);
            column.for_each(|number| data.extend_from_slice(number));
        }
        Some(data)
    }

    /// Reads rows of MXFP4 blocks in GGUF's order.
    fn blocks(&self) -> Option<Vec<u8>> {
        let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{}_{part}", self.name));
        let blocks = self.of_expert(self.shards.octets(&blocks)?.1).as_chunks::<BLOCK_BYTES>().0;
        let scales = self.of_expert(self.shards.octets(&scales)?.1);
        let per_row = self.inputs / BLOCK;
        let mut data = Vec::with_capacity(scales.len() / self.step * (1 + BLOCK_BYTES));
        for row in self.rows() {
            for at in row * per_row..(row + 1) * per_row {
                data.push(scales[at]);
                data.extend(half_apart(&blocks[at]));
            }
        }
        Some(data)
    }
}

/// Turns pairs of neighbouring codes into pairs of codes that are half a block apart.
fn half_apart(neighbours: &[u8; BLOCK_BYTES]) -> [u8; BLOCK_BYTES] {
    let code = |at: usize| neighbours[at / 2] >> (4 * (at % 2)) & 15;
    std::array::from_fn(|at| code(at) | code(at + BLOCK / 2) << 4)
}

/// Returns a shape as a matrix, with the last dimension as columns.
fn as_matrix(shape: &[usize]) -> [usize; 2] {
    let (last, outer) = shape.split_last().map_or((0, &[][..]), |(last, outer)| (*last, outer));
    [outer.iter().fold(1, |rows, size| rows.saturating_mul(*size)), last]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_a_block_keep_their_inputs() {
        let neighbours = std::array::from_fn(|at| (2 * at % 16) as u8 | (((2 * at + 1) % 16) as u8 * 16));
        let moved = half_apart(&neighbours);
        for (at, byte) in moved.into_iter().enumerate() {
            assert_eq!(usize::from(byte & 15), at % 16);
            assert_eq!(usize::from(byte >> 4), (at + 16) % 16);
        }
    }
}
