//! A few rows of activations times one panel.

use super::pack::PackedMatrix;
use crate::{activations::Activations, simd::Simd};

/// How sums over a panel are taken for one packing.
pub(super) trait PanelDot {
    /// The dot products of `M` rows of `x`, from `row` on, with the sixteen rows of `panel`.
    ///
    /// # Safety
    ///
    /// `panel` and the rows exist, and `x` was prepared in the packing's form.
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M];
}
