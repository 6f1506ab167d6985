//! Dot products with integer panels.
//!
//! The sums of a group of 32 (or 16) elements are exact integers:
//!
//! ```text
//! sum_i code_i x_i - zero sum_i x_i     the second term is the initial sum, known from the activations
//! ```
//!
//! The `x_i` of a wide group are two bytes each, `128 high_i + low_i`, and so are the sums: 2^27 at most. A
//! group's sum is added to the float sum once, times the weights' and the activations' scale. Minima are
//! added as `minimum * (scale of x * sum of x)`. All scales of a matrix are stored in 16 bits relative to one
//! power of two, `w.unit()`, which multiplies the final sum without rounding.

use super::{pack::PackedMatrix, packings::IntegerPacking, rows::QuantizedRows, tile::PanelDot};
use crate::{
    activations::Activations,
    simd::{Simd, prefetch},
};

/// Prefetch distance of the weights. The hardware prefetcher stops at 4 KB; at 20 GB/s this is 400 ns.
const AHEAD_BYTES: usize = 8192;

/// Prefetches `bytes` of the panels that are `AHEAD_BYTES` after `at`.
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
        // SAFETY: the caller guarantees that panel and rows exist, and that the byte form was prepared.
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
        // A loop, because closures of iterator adapters are not always compiled for the instruction set.
        for sum in &mut sums {
            *sum = S::mul(*sum, unit);
        }
        sums
    }
}
