//! Router probabilities, and moves of rows to experts and back.

use kernels::{Activations, LinearPart, elementwise::softmax_in_place, linear_unrounded};

use super::Compute;
use crate::forward::{ExpertRows, ModelContext};

impl Compute {
    /// Returns the probability of each expert of `layer` for each row of `normed`, `[rows, experts]`: the
    /// softmax of the router's outputs. The router computes with unrounded activations for every weight type.
    ///
    /// # Panics
    /// If the layer has no experts.
    pub(crate) fn probabilities(
        &mut self,
        model: &ModelContext,
        layer: usize,
        normed: &Activations,
    ) -> Vec<f32> {
        let (router, experts) = model.router(layer).expect("a block with experts has a router");
        let mut probabilities = vec![0.0; normed.rows() * experts.count];
        let part = LinearPart { matrix: &router.matrix, bias: router.bias.as_deref(), column: 0 };
        let Self { pool, isa } = self;
        linear_unrounded(pool, *isa, normed, &[part], &mut probabilities, experts.count);
        softmax_in_place(pool, *isa, &mut probabilities, experts.count);
        probabilities
    }
}

/// Copies the rows numbered `rows` from `from` to `out`.
pub(crate) fn take_some(from: &[f32], rows: &[u32], width: usize, out: &mut [f32]) {
    for (&row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(&from[row as usize * width..][..width]);
    }
}

/// Adds the rows of `from` to the rows numbered `rows` of `sums`.
pub(crate) fn add_rows(from: &[f32], rows: &[u32], width: usize, sums: &mut [f32]) {
    for (&row, from) in rows.iter().zip(from.chunks_exact(width)) {
        let sums = &mut sums[row as usize * width..][..width];
        sums.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
    }
}

/// Adds an expert's outputs to the sums of its rows, each times its weight.
pub(super) fn add_weighted(from: &[f32], taken: ExpertRows<'_>, width: usize, sums: &mut [f32]) {
    for ((&row, &weight), from) in taken.rows.iter().zip(taken.weights).zip(from.chunks_exact(width)) {
        let sums = &mut sums[row as usize * width..][..width];
        sums.iter_mut().zip(from).for_each(|(sum, value)| *sum += weight * value);
    }
}
