//! Linear layers that files keep in one tensor: those of a group, one behind the other in the order of a pass (Phi-3), and those of all
//! experts of a block.

use std::ops::Range;

use super::family::Family;
use crate::shape::{
    config::ModelConfig,
    layout::{LinearGroup, group_targets, linear_shape, tensor_shape},
    source::{Target, TensorId},
};

/// Where a linear layer lies in the tensor of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fused {
    /// The group that it is of.
    pub(crate) group: LinearGroup,
    /// Its rows there.
    pub(crate) rows: Range<usize>,
    /// Rows of all of them.
    pub(crate) all_rows: usize,
}

impl Fused {
    /// Where files of such a model keep `target`; `None` where it has a tensor of its own.
    pub(crate) fn of(config: &ModelConfig, target: Target) -> Option<Self> {
        let group = match target {
            Target::Q | Target::K | Target::V => LinearGroup::Qkv,
            Target::Gate | Target::Up => LinearGroup::GateUp,
            Target::O | Target::Down | Target::LmHead => return None,
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

    /// Its bytes of those of the whole tensor.
    pub(crate) fn part_of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.range_in(bytes.len())]
    }

    /// The same as a range of a tensor of so many bytes.
    pub(crate) fn range_in(&self, bytes: usize) -> Range<usize> {
        let row = bytes / self.all_rows;
        self.rows.start * row..self.rows.end * row
    }
}

/// The tensor of a file that a tensor of a model lies in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorLocation {
    /// What the file calls it.
    pub(crate) tensor: String,
    /// `[rows, cols]` of it.
    pub(super) shape: [usize; 2],
    /// Which part of it, if not the whole.
    pub(super) fused: Option<Fused>,
}

impl TensorLocation {
    /// The place of a tensor of its own that is called `name`, or in that of a group, which `fused_name` says.
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

    /// The place of a matrix `id` in the tensor `tensor`, as the `nth` of so many of its shape.
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

    /// What the file calls the linear layer whose weight it is in.
    pub(super) fn module(&self) -> Option<&str> {
        self.tensor.strip_suffix(".weight")
    }

    /// Its rows of those of the file's tensor.
    pub(super) fn rows(&self) -> Range<usize> {
        self.fused.as_ref().map_or(0..self.shape[0], |fused| fused.rows.clone())
    }

    /// Its bytes of those of the file's tensor, which has been checked.
    pub(super) fn part_of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        self.fused.as_ref().map_or(bytes, |fused| fused.part_of(bytes))
    }
}
