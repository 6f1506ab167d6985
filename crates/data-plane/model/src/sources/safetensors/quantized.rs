//! Converts linear layers in GPTQ or AWQ format to the kernels' block formats.
//!
//! Both formats store a weight as `scale * (code - zero)`. Each output and group of inputs has a scale and a
//! zero point, and a 32-bit word has several codes. A group is a multiple of a block's inputs, so the
//! conversion only reorders codes:
//!
//! | Stored | Becomes | Exact |
//! |---|---|---|
//! | 4 bits, all zero points 8 | `Q4_0` | yes |
//! | 4 bits | `Q4_1` | but for the minimum, `-scale * zero`, which is rounded to 16 bits |
//! | 8 bits, all zero points 128 | `Q8_0` | yes |
//! | groups that are no runs of inputs (`desc_act`), or anything else | `F16` | but for that rounding |
//!
//! `qweight`, in words: GPTQ's is `[in / codes, out]`, along inputs; AWQ's `[in, out / codes]`, along
//! outputs. `qzeros` is `[groups, out / codes]` along outputs in both; `scales` is `[groups, out]`; GPTQ's
//! `g_idx` is the group of each input.

use std::ops::Range;

use half::f16;
use kernels::{TensorType, quant::dequantize_row};

use super::{file::StoredTensor, shards::Shards};
use crate::{
    shape::{layout::LayoutError, source::Tensor},
    sources::quantization::{QuantMethod, Quantization},
};

/// Inputs of a block of `Q4_0`, `Q4_1` and `Q8_0`.
const BLOCK: usize = 32;

/// Suffixes of a quantized module's tensors.
pub(super) const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// Position of the codes of eight outputs in an AWQ word, by output.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Stored parts of a linear layer, checked against each other.
#[derive(Debug)]
pub(super) struct QuantizedParts<'a> {
    quantization: Quantization,
    outputs: usize,
    inputs: usize,
    codes: &'a [u8],
    zeros: &'a [u8],
    scales: (TensorType, &'a [u8]),
    /// Group of each input, if groups are no runs of inputs.
    groups: Option<&'a [u8]>,
}

impl<'a> QuantizedParts<'a> {
    /// Returns the parts of `module`, `[outputs, inputs]`, or `None` if the module is stored as a matrix.
    ///
    /// # Errors
    /// A part is missing or has another shape.
    pub(super) fn of(
        shards: &'a Shards,
        quantization: Quantization,
        module: &str,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Option<Self>, LayoutError> {
        let [codes, zeros, scales, places] = PARTS.map(|part| format!("{module}.{part}"));
        if shards.integers(&codes).is_none() {
            return Ok(None);
        }
        let per_word = quantization.per_word();
        let stored = match quantization.method {
            QuantMethod::Gptq(_) => [inputs / per_word, outputs],
            QuantMethod::Awq => [inputs, outputs / per_word],
        };
        let size = quantization.group.unwrap_or(inputs);
        let groups = inputs.div_ceil(size);
        let runs = |bytes: &[u8]| (0..inputs).all(|input| read_u32(bytes, input) as usize == input / size);
        let listed = match quantization.method {
            QuantMethod::Gptq(_) if shards.integers(&places).is_some() => {
                let listed = integers(shards, &places, [1, inputs])?;
                check_groups(&places, listed, groups)?;
                Some(listed).filter(|listed| !runs(listed))
            }
            _ => None,
        };
        Ok(Some(Self {
            quantization,
            outputs,
            inputs,
            codes: integers(shards, &codes, stored)?,
            zeros: integers(shards, &zeros, [groups, outputs / per_word])?,
            scales: numbers(shards, &scales, [groups, outputs])?,
            groups: listed,
        }))
    }

    /// Returns the block format after conversion.
    pub(super) fn kind(&self) -> TensorType {
        let Quantization { bits, group, .. } = self.quantization;
        let are_blocks = self.groups.is_none()
            && self.inputs.is_multiple_of(BLOCK)
            && group.is_none_or(|group| group.is_multiple_of(BLOCK));
        match bits {
            4 if are_blocks && self.is_symmetric() => TensorType::Q4_0,
            4 if are_blocks => TensorType::Q4_1,
            8 if are_blocks && self.is_symmetric() => TensorType::Q8_0,
            _ => TensorType::F16,
        }
    }

    pub(super) fn tensor(&self, outputs: Range<usize>) -> Tensor<'static> {
        let (kind, rows, cols) = (self.kind(), outputs.len(), self.inputs);
        let scales = self.scales();
        let mut data = Vec::with_capacity(rows * kind.row_bytes(cols).unwrap_or(0));
        for output in outputs {
            if kind == TensorType::F16 {
                let weight = |input| self.weight(&scales, output, input);
                data.extend((0..cols).flat_map(|input| f16::from_f32(weight(input)).to_le_bytes()));
                continue;
            }
            for first in (0..cols).step_by(BLOCK) {
                self.write_block(kind, &scales, (output, first), &mut data);
            }
        }
        Tensor { kind, rows, cols, data: data.into() }
    }

    fn write_block(
        &self,
        kind: TensorType,
        scales: &[f32],
        (output, first): (usize, usize),
        out: &mut Vec<u8>,
    ) {
        let group = self.group(first);
        let scale = scales[group * self.outputs + output];
        out.extend(f16::from_f32(scale).to_le_bytes());
        if kind == TensorType::Q4_1 {
            let minimum = -scale * self.zero(group, output) as f32;
            out.extend(f16::from_f32(minimum).to_le_bytes());
        }
        let code = |input: usize| self.code(output, first + input);
        if kind == TensorType::Q8_0 {
            // Codes of `Q8_0` are signed.
            out.extend((0..BLOCK).map(|input| code(input).wrapping_sub(128)));
        } else {
            out.extend((0..BLOCK / 2).map(|input| code(input) | code(input + BLOCK / 2) << 4));
        }
    }

    fn weight(&self, scales: &[f32], output: usize, input: usize) -> f32 {
        let group = self.group(input);
        let above = i32::from(self.code(output, input)) - self.zero(group, output).cast_signed();
        scales[group * self.outputs + output] * above as f32
    }

    fn group(&self, input: usize) -> usize {
        match (self.groups, self.quantization.group) {
            (Some(listed), _) => read_u32(listed, input) as usize,
            (None, Some(size)) => input / size,
            (None, None) => 0,
        }
    }

    fn code(&self, output: usize, input: usize) -> u8 {
        let (per_word, mask) = (self.quantization.per_word(), self.quantization.mask());
        let (at, place) = match self.quantization.method {
            QuantMethod::Gptq(_) => (input / per_word * self.outputs + output, input % per_word),
            QuantMethod::Awq => {
                (input * (self.outputs / per_word) + output / per_word, AWQ_PLACES[output % per_word])
            }
        };
        // The mask has at most 8 bits.
        (read_u32(self.codes, at) >> (place * self.quantization.bits) & mask) as u8
    }

    fn zero(&self, group: usize, output: usize) -> u32 {
        let (per_word, mask) = (self.quantization.per_word(), self.quantization.mask());
        let stored = read_u32(self.zeros, group * (self.outputs / per_word) + output / per_word);
        let place = output % per_word;
        match self.quantization.method {
            // A zero point of 0 wrapped around when it was stored.
            QuantMethod::Gptq(less) => ((stored >> (place * self.quantization.bits) & mask) + less) & mask,
            QuantMethod::Awq => stored >> (AWQ_PLACES[place] * self.quantization.bits) & mask,
        }
    }

    fn is_symmetric(&self) -> bool {
        let middle = self.quantization.middle();
        let groups = self.zeros.len() / 4 / (self.outputs / self.quantization.per_word()).max(1);
        (0..groups).all(|group| (0..self.outputs).all(|output| self.zero(group, output) == middle))
    }

    /// Returns the scales, `[groups, outputs]`.
    fn scales(&self) -> Vec<f32> {
        let (kind, bytes) = self.scales;
        let mut scales = vec![0.0; bytes.len() / kind.block_bytes()];
        dequantize_row(kind, bytes, &mut scales);
        scales
    }
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes.as_chunks().0[at])
}

fn integers<'a>(shards: &'a Shards, name: &str, expected: [usize; 2]) -> Result<&'a [u8], LayoutError> {
    let (shape, bytes) =
        shards.integers(name).ok_or_else(|| LayoutError::Missing { tensor: name.to_owned() })?;
    match *shape {
        [cols] if [1, cols] == expected => Ok(bytes),
        [rows, cols] if [rows, cols] == expected => Ok(bytes),
        _ => {
            let found = [shape.first().copied().unwrap_or(0), shape.get(1).copied().unwrap_or(1)];
            Err(LayoutError::Shape { tensor: name.to_owned(), expected, found })
        }
    }
}

fn numbers<'a>(
    shards: &'a Shards,
    name: &str,
    expected: [usize; 2],
) -> Result<(TensorType, &'a [u8]), LayoutError> {
    let missing = || LayoutError::Missing { tensor: name.to_owned() };
    let stored: &StoredTensor = shards.tensor(name).ok_or_else(missing)?;
    let found = stored.matrix_shape().ok_or_else(missing)?;
    if found != expected {
        return Err(LayoutError::Shape { tensor: name.to_owned(), expected, found });
    }
    Ok((stored.kind, shards.bytes(name).ok_or_else(missing)?))
}

/// Checks that every input's group exists.
fn check_groups(name: &str, listed: &[u8], groups: usize) -> Result<(), LayoutError> {
    let largest = listed.as_chunks().0.iter().map(|group| u32::from_le_bytes(*group)).max();
    match largest.map(|largest| largest as usize).filter(|largest| *largest >= groups) {
        None => Ok(()),
        Some(group) => Err(LayoutError::Group { tensor: name.to_owned(), group, groups }),
    }
}
