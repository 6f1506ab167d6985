//! The gate of a feed-forward block.

use super::for_row_ranges;
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Gate function: `gate * sigmoid(z(gate))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gate {
    /// SiLU, with `z(x) = x`.
    #[default]
    Silu,
    /// GELU in its tanh approximation, with `z(x) = 2 √(2/π) (x + 0.044715 x³)`.
    GeluTanh,
}

/// `2 √(2/π)`, and the coefficient of the cubic term.
pub(crate) const GELU_LINEAR: f32 = 1.595_769;
pub(crate) const GELU_CUBIC: f32 = GELU_LINEAR * 0.044_715;

impl Gate {
    /// Computes the sigmoid's argument `z(x)`.
    #[inline(always)]
    pub(crate) fn argument<S: Simd>(self, x: S::F) -> S::F {
        match self {
            Self::Silu => x,
            Self::GeluTanh => {
                let square = S::mul(x, x);
                S::mul(x, S::fma(square, S::splat(GELU_CUBIC), S::splat(GELU_LINEAR)))
            }
        }
    }

    /// Computes the derivative `z'(x)`.
    #[inline(always)]
    pub(crate) fn slope<S: Simd>(self, x: S::F) -> S::F {
        match self {
            Self::Silu => S::splat(1.0),
            Self::GeluTanh => {
                let square = S::mul(x, x);
                S::fma(square, S::splat(3.0 * GELU_CUBIC), S::splat(GELU_LINEAR))
            }
        }
    }
}

/// Computes `out = gate * sigmoid(z(gate)) * up` for rows `[gate | up]` of `2 * width`.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn gate_mul(pool: &mut ThreadPool, isa: Isa, gate: Gate, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "two inputs an output");
    assert!(out.len().is_multiple_of(width), "whole rows");
    let job = GateMul { gate, gate_up: gate_up.as_ptr(), out: out.as_mut_ptr(), width, rows: (0, 0) };
    for_row_ranges(pool, out.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct GateMul {
    gate: Gate,
    gate_up: *const f32,
    out: *mut f32,
    width: usize,
    rows: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
unsafe impl Sync for GateMul {}

impl GateMul {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for GateMul {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for row in self.rows.0..self.rows.1 {
            let mut c = 0;
            while c < self.width {
                let n = LANES.min(self.width - c);
                // SAFETY: `gate_mul` has checked the sizes; no other thread has the row.
                unsafe {
                    let gate = S::load_head(self.gate_up.add(2 * row * self.width + c), n);
                    let up = S::load_head(self.gate_up.add((2 * row + 1) * self.width + c), n);
                    let one = S::splat(1.0);
                    let denominator =
                        S::add(one, S::exp(S::sub(S::splat(0.0), self.gate.argument::<S>(gate))));
                    S::store_head(
                        self.out.add(row * self.width + c),
                        S::mul(S::div(gate, denominator), up),
                        n,
                    );
                }
                c += LANES;
            }
        }
    }
}
