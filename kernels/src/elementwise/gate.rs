//! The gate of a feed-forward block.

use super::for_row_ranges;
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Gate function: `gate * sigmoid(z(gate))`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Gate {
    /// SiLU, with `z(x) = x`.
    #[default]
    Silu,
    /// GELU in its tanh approximation, with `z(x) = 2 √(2/π) (x + 0.044715 x³)`.
    GeluTanh,
    /// SwiGLU of gpt-oss, with `z(x) = 1.702 x`. The gate is at most `limit`; `up` is between `-limit` and
    /// `limit`, plus 1.
    SwigluOai {
        /// Limit of the magnitude of `up`, and of positive gates.
        limit: f32,
    },
}

/// Slope of `z` in [`Gate::SwigluOai`].
const OAI_LINEAR: f32 = 1.702;

/// `2 √(2/π)`, and the coefficient of the cubic term.
pub(crate) const GELU_LINEAR: f32 = 1.595_769;
pub(crate) const GELU_CUBIC: f32 = GELU_LINEAR * 0.044_715;

impl Gate {
    /// Returns gate and factor of a gate and an `up` within the limits of the function.
    #[inline(always)]
    pub(crate) fn limited<S: Simd>(self, gate: S::F, up: S::F) -> [S::F; 2] {
        match self {
            Self::Silu | Self::GeluTanh => [gate, up],
            Self::SwigluOai { limit } => {
                let (most, least) = (S::splat(limit), S::splat(-limit));
                [S::min(gate, most), S::add(S::max(S::min(up, most), least), S::splat(1.0))]
            }
        }
    }

    /// Turns gradients at the results of [`Gate::limited`] into those at `gate` and `up`: 0 beyond a limit.
    #[inline(always)]
    pub(crate) fn within_limits<S: Simd>(
        self,
        [gate, up]: [S::F; 2],
        [of_gate, of_up]: [S::F; 2],
    ) -> [S::F; 2] {
        match self {
            Self::Silu | Self::GeluTanh => [of_gate, of_up],
            Self::SwigluOai { limit } => {
                let (least, zero) = (S::splat(-limit), S::splat(0.0));
                let within = |g, x| S::where_at_least(g, S::sub(zero, x), least);
                [within(of_gate, gate), within(of_up, S::abs(up))]
            }
        }
    }

    /// Computes the sigmoid's argument `z(x)`.
    #[inline(always)]
    pub(crate) fn argument<S: Simd>(self, x: S::F) -> S::F {
        match self {
            Self::Silu => x,
            Self::SwigluOai { .. } => S::mul(x, S::splat(OAI_LINEAR)),
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
            Self::SwigluOai { .. } => S::splat(OAI_LINEAR),
            Self::GeluTanh => {
                let square = S::mul(x, x);
                S::fma(square, S::splat(3.0 * GELU_CUBIC), S::splat(GELU_LINEAR))
            }
        }
    }
}

/// Computes `out = gate * sigmoid(z(gate)) * up` for rows `[gate | up]` of `2 * width`, within the function's
/// limits.
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
                    let [gate, up] = self.gate.limited::<S>(gate, up);
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
