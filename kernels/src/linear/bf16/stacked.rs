//! Weights of a gradient: the matrices of all parts below each other, transposed.
//!
//! ```text
//! panel   sixteen inputs, half of a group of 32 columns of the packed matrices
//! group   32 outputs of a part, two of its packed panels; outputs beyond the last are zeros
//! ```

use std::{marker::PhantomData, ops::Range};

use super::vectors::DecodedWeights;
use crate::{
    activations::{Activations, GROUP},
    linear::{
        pack::PackedMatrix,
        part::LinearPart,
        values::{Values, decode_outputs, with_values},
    },
    simd::{Kernel, LANES, Simd},
};

/// Packed panels of a group.
pub(super) const GROUP_PANELS: usize = GROUP / LANES;

#[derive(Clone, Copy)]
pub(super) struct StackedParts<'a>(pub(super) &'a [LinearPart<'a>]);

fn groups(part: &LinearPart<'_>) -> usize {
    part.matrix.rows().div_ceil(GROUP)
}

impl<'a> StackedParts<'a> {
    pub(super) fn groups(self) -> usize {
        self.0.iter().map(groups).sum()
    }

    /// Returns the first of these groups in rows of `width` gradients, or `None` if the groups of the parts
    /// are not whole groups of the rows, one after the other.
    pub(super) fn first_group(self, width: usize) -> Option<usize> {
        let first = self.0.first().map_or(0, |part| part.column);
        let mut end = first;
        for part in self.0 {
            if part.column != end || !end.is_multiple_of(GROUP) {
                return None;
            }
            end = part.column + part.matrix.rows();
        }
        (end.is_multiple_of(GROUP) || end == width).then_some(first / GROUP)
    }

    /// Copies gradients to rows of whole groups.
    pub(super) fn align(self, g: &Activations, aligned: &mut Activations) {
        let width = self.groups() * GROUP;
        aligned.reshape(g.rows(), width);
        aligned.values_mut().fill(0.0);
        for (from, to) in g.values().chunks_exact(g.width()).zip(aligned.values_mut().chunks_exact_mut(width))
        {
            let mut column = 0;
            for part in self.0 {
                let outputs = part.matrix.rows();
                to[column..][..outputs].copy_from_slice(&from[part.column..][..outputs]);
                column += groups(part) * GROUP;
            }
        }
    }

    /// Returns the matrix of `group`, and the first of its two panels.
    #[inline(always)]
    pub(super) fn locate(self, mut group: usize) -> (&'a PackedMatrix, usize) {
        for part in self.0 {
            if group < groups(part) {
                return (part.matrix, group * GROUP_PANELS);
            }
            group -= groups(part);
        }
        unreachable!("the parts have the group")
    }
}

impl DecodedWeights for StackedParts<'_> {
    #[inline(always)]
    unsafe fn decode<S: Simd>(self, panel: usize, columns: Range<usize>, to: *mut f32) {
        for group in columns.start / GROUP..columns.end / GROUP {
            let (w, first) = self.locate(group);
            let to = to.wrapping_add((group * GROUP - columns.start) * LANES);
            for side in 0..GROUP_PANELS {
                let to = to.wrapping_add(side * LANES * LANES);
                if first + side < w.panels() {
                    let (outputs, inputs) = (first + side, panel * LANES);
                    with_values!(w.packing(), V => {
                        S::call(DecodeOutputs::<V> { w, outputs, inputs, to, values: PhantomData });
                    });
                } else {
                    // SAFETY: the caller guarantees the room; zero bytes are 0.0.
                    unsafe { to.write_bytes(0, LANES * LANES) };
                }
            }
        }
    }
}

struct DecodeOutputs<'a, V> {
    w: &'a PackedMatrix,
    /// The panel of the outputs.
    outputs: usize,
    /// Index of the first input.
    inputs: usize,
    to: *mut f32,
    values: PhantomData<V>,
}

impl<V: Values> Kernel for DecodeOutputs<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: the caller of `decode` guarantees the inputs and the room.
        unsafe {
            for (o, inputs) in
                decode_outputs::<V, S>(self.w, self.outputs, self.inputs).into_iter().enumerate()
            {
                S::store(self.to.add(o * LANES), inputs);
            }
        }
    }
}
