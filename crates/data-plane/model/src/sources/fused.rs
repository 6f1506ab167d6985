//! Linear layers that files store in one tensor: those of a group (Phi-3), or of all experts of a block.

use std::ops::Range;

use super::family::Family;
use crate::shape::{
    config::ModelConfig,
    layout::{LinearGroup, group_targets, linear_shape, tensor_shape},
    source::{Target, TensorId},
};

/// Place of a linear layer in the fused tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fused {
    pub(crate) group: LinearGroup,
    /// Rows of the layer in the fused tensor.
    pub(crate) rows: Range<usize>,
    /// Number of rows of the fused tensor.
    pub(crate) all_rows: usize,
}

impl Fused {
    /// Returns the place of `target` in fused files, or `None` if it has its own tensor.
    pub(crate) fn of(config: &ModelConfig, target: Target) -> Option<Self> {
        let group = match target {
            Target::Q | Target::K | Target::V => LinearGroup::Qkv,
            Target::Gate | Target::Up => LinearGroup::GateUp,
            Target::O | Target::Down | Target::LmHead | Target::Expert(..) => return None,
        };
        if !Family::named(&config.architecture).is_some_and(Family::is_fused) {
            return None;
        }
        let targets = group_targets(config, group);
        let rows_of = |target| linear_shape(config, target)[0];
        let (_, first) = targets.iter().find(|(of, _)| *of == target)?;
        let all_rows = targets.iter().map(|(target, _)| rows_of(*target)).sum();
        Some(Self { group, rows: *first..first + rows_of(target), all_rows })
    }

    pub(crate) fn part_of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.range_in(bytes.len())]
    }

    /// Returns the layer's byte range in a fused tensor of `bytes` bytes.
    pub(crate) fn range_in(&self, bytes: usize) -> Range<usize> {
        let row = bytes / self.all_rows;
        self.rows.start * row..self.rows.end * row
    }
}

/// The file's tensor that contains a tensor of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorLocation {
    pub(crate) tensor: String,
    /// Shape of the file's tensor, `[rows, cols]`.
    pub(super) shape: [usize; 2],
    /// Place within the file's tensor, if only a part.
    pub(super) fused: Option<Fused>,
}

impl TensorLocation {
    /// Returns the location of a tensor: its own tensor with the name `name()`, or a part of the group's
    /// tensor with the name `fused_name(..)`.
    pub(super) fn of(
        config: &ModelConfig,
        id: TensorId,
        name: impl Fn() -> String,
        fused_name: impl Fn(usize, LinearGroup) -> String,
    ) -> Self {
        let [rows, cols] = tensor_shape(config, id);
        let fused = match id {
            TensorId::Weight(layer, target) => Fused::of(config, target).map(|fused| (layer, fused)),
            _ => None,
        };
        match fused {
            None => Self { tensor: name(), shape: [rows, cols], fused: None },
            Some((layer, fused)) => Self {
                tensor: format!("{}.weight", fused_name(layer, fused.group)),
                shape: [fused.all_rows, cols],
                fused: Some(fused),
            },
        }
    }

    /// Returns the location of the matrix `id` in `tensor`, as number `nth` of `of` stacked equal shapes.
    pub(super) fn stacked(
        config: &ModelConfig,
        (id, group): (TensorId, LinearGroup),
        tensor: String,
        (nth, of): (usize, usize),
    ) -> Self {
        let [rows, cols] = tensor_shape(config, id);
        let all_rows = of * rows;
        let fused = Fused { group, rows: nth * rows..(nth + 1) * rows, all_rows };
        Self { tensor, shape: [all_rows, cols], fused: Some(fused) }
    }

    pub(super) fn module(&self) -> Option<&str> {
        self.tensor.strip_suffix(".weight")
    }

    pub(super) fn rows(&self) -> Range<usize> {
        self.fused.as_ref().map_or(0..self.shape[0], |fused| fused.rows.clone())
    }

    /// Returns the bytes within those of the file's tensor, which must have the expected size.
    pub(super) fn part_of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        self.fused.as_ref().map_or(bytes, |fused| fused.part_of(bytes))
    }
}
