//! Products of a few rows of activations with one panel.

use super::pack::PackedMatrix;
use crate::{activations::Activations, simd::Simd};

pub(super) trait PanelDot {
    /// Computes the dot products of `M` rows of `x`, from `row` on, with the sixteen rows of `panel`.
    ///
    /// # Safety
    /// `panel` and the rows exist, and `x` was prepared in the packing's form.
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M];
}
