//! Dot products with integer panels.
//!
//! For a group of 32 (or 16) elements, sums are exact integers:
//!
//! ```text
//! sum_i code_i x_i - zero sum_i x_i     the second term is the accumulator's start, known from the activations
//! ```
//!
//! where the `x_i` of a wide group are two bytes each, `128 high_i + low_i`, and so are the sums: 2^27 at most. They
//! enter the float sum once a group, times the weights' and the activations' scale. Minima enter as
//! `minimum * (scale of x * sum of x)`. All scales of a matrix are stored in 16 bits relative to one power of two,
//! `w.unit()`, which multiplies the final sum and costs no bit.

use super::{pack::PackedMatrix, packings::IntegerPacking, rows::QuantizedRows, tile::PanelDot};
use crate::{
    activations::Activations,
    simd::{Simd, prefetch},
};

/// How far ahead of the sums weights are asked for. The hardware stops at each 4 KB; at 20 GB/s this is 400 ns.
const AHEAD_BYTES: usize = 8192;

/// Asks for `bytes` of the panels, those that are due when `AHEAD_BYTES` have been summed.
#[inline(always)]
fn prefetch_ahead(at: *const u8, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        prefetch(at.wrapping_add(AHEAD_BYTES + line));
        line += 64;
    }
}

impl<P: IntegerPacking> PanelDot for P {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let x = QuantizedRows::of::<P>(x, row);
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist, and the byte form was prepared.
        unsafe {
            let share = w.panel_bytes() / x.groups;
            for group in 0..x.groups {
                prefetch_ahead(w.panel(panel).add(group * share), share);
                let codes = P::codes::<S>(w, panel, group);
                let numbers = P::numbers::<S>(w, panel, group);
                let wide = x.wide(group);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let parts = match wide >> m & 1 {
                        0 => x.narrow::<S, P>(group, m, &codes),
                        _ => x.two_bytes::<S, P>(group, m, &codes),
                    };
                    *sum = x.add::<S, P>(parts, numbers, (group, m), *sum);
                }
            }
        }
        let unit = S::splat(w.unit());
        // A loop: what an adapter is given is not always compiled for the set.
        for sum in &mut sums {
            *sum = S::mul(*sum, unit);
        }
        sums
    }
}
