//! Outputs of a linear layer, panel by panel.

use super::part::{LinearPart, OutPtr};
use crate::simd::{LANES, Simd};

/// Columns of `out` that one thread or several write, each its own panels of sixteen columns.
#[derive(Clone, Copy)]
pub(super) struct OutPanels<'a> {
    out: *mut f32,
    stride: usize,
    /// Number of outputs; the last panel may be incomplete.
    outputs: usize,
    bias: Option<&'a [f32]>,
}

impl<'a> OutPanels<'a> {
    /// Takes the columns of `part` in rows of `stride`.
    pub(super) fn of_part(part: &LinearPart<'a>, out: &OutPtr, stride: usize) -> Self {
        let out = out.0.wrapping_add(part.column);
        Self { out, stride, outputs: part.matrix.rows(), bias: part.bias }
    }

    /// Takes the first `outputs` columns of rows of `stride`.
    pub(super) fn of_rows(out: &OutPtr, stride: usize, outputs: usize) -> Self {
        Self { out: out.0, stride, outputs, bias: None }
    }

    /// Writes complete sums, with the bias.
    #[inline(always)]
    pub(super) fn put<S: Simd>(&self, panel: usize, row: usize, sums: S::F) {
        let (to, lanes) = self.place(panel, row);
        // SAFETY: the product has checked that the columns lie within `out`; no other thread writes these.
        unsafe {
            let bias = self.bias.map(|bias| S::load_head(bias.as_ptr().add(panel * LANES), lanes));
            let sums = bias.map_or(sums, |bias| S::add(sums, bias));
            // A store without a mask takes a tenth less of a long prompt's time.
            if lanes == LANES { S::store(to, sums) } else { S::store_head(to, sums, lanes) }
        }
    }

    /// Keeps sums that are not complete in the output.
    #[inline(always)]
    pub(super) fn keep<S: Simd>(&self, panel: usize, row: usize, sums: S::F) {
        let (to, lanes) = self.place(panel, row);
        // SAFETY: the product has checked that the columns lie within `out`; no other thread writes these.
        unsafe { if lanes == LANES { S::store(to, sums) } else { S::store_head(to, sums, lanes) } }
    }

    /// Returns the sums that [`OutPanels::keep`] has kept.
    #[inline(always)]
    pub(super) fn kept<S: Simd>(&self, panel: usize, row: usize) -> S::F {
        let (from, lanes) = self.place(panel, row);
        // SAFETY: the product has checked that the columns lie within `out`; no other thread writes these.
        unsafe { if lanes == LANES { S::load(from) } else { S::load_head(from, lanes) } }
    }

    /// Returns the address and the number of the outputs of `panel` for `row`.
    #[inline(always)]
    pub(super) fn place(&self, panel: usize, row: usize) -> (*mut f32, usize) {
        let output = panel * LANES;
        (self.out.wrapping_add(row * self.stride + output), LANES.min(self.outputs - output))
    }
}
