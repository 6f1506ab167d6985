//! Unit of work of a thread in a linear layer.

use super::part::LinearPart;
use crate::{
    activations::Activations,
    isa::MatrixUnit,
    simd::{LANES, Simd},
};

/// Panels `first..last` of one part, for all rows.
#[derive(Clone, Copy)]
pub(super) struct PanelChunk<'a> {
    pub(super) x: &'a Activations,
    pub(super) part: LinearPart<'a>,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) matrix_unit: MatrixUnit,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
}

impl PanelChunk<'_> {
    #[inline(always)]
    pub(super) fn put<S: Simd>(&self, panel: usize, row: usize, sums: S::F) {
        let feature = panel * LANES;
        let lanes = LANES.min(self.part.matrix.rows() - feature);
        // SAFETY: `linear` has checked that columns lie within `out`; no other chunk writes these.
        unsafe {
            let bias = self.part.bias.map(|bias| S::load_head(bias.as_ptr().add(feature), lanes));
            let sums = bias.map_or(sums, |bias| S::add(sums, bias));
            let to = self.out.add(row * self.stride + self.part.column + feature);
            // A store without a mask takes a tenth less of a long prompt's time.
            if lanes == LANES { S::store(to, sums) } else { S::store_head(to, sums, lanes) }
        }
    }

    /// Keeps sums that are not complete in the output.
    #[inline(always)]
    pub(super) fn keep<S: Simd>(&self, panel: usize, row: usize, sums: S::F) {
        let (at, lanes) = self.place(panel, row);
        // SAFETY: the caller has checked that columns lie within `out`; no other chunk writes these.
        unsafe { S::store_head(at, sums, lanes) };
    }

    /// Returns the sums that [`PanelChunk::keep`] has kept.
    #[inline(always)]
    pub(super) fn kept<S: Simd>(&self, panel: usize, row: usize) -> S::F {
        let (at, lanes) = self.place(panel, row);
        // SAFETY: the caller has checked that columns lie within `out`; no other chunk writes these.
        unsafe { S::load_head(at, lanes) }
    }

    #[inline(always)]
    fn place(&self, panel: usize, row: usize) -> (*mut f32, usize) {
        let feature = panel * LANES;
        let to = self.out.wrapping_add(row * self.stride + self.part.column + feature);
        (to, LANES.min(self.part.matrix.rows() - feature))
    }
}
