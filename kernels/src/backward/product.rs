//! Products of small matrices of 32-bit floats.
//!
//! ```text
//! c[i, j] = (c[i, j] +) sum over l, ascending: a[i, l] * b[l, j]
//! ```
//!
//! `a` may be strided in both directions, so a transposed factor needs no copy; rows of `b` and `c` are
//! contiguous. Each element is one chain of fused multiply-adds from zero, stored in `c` or added to it.

use crate::simd::{LANES, Simd};

/// A strided factor: element `(i, l)` is at `i * row + l * column`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strided {
    pub(super) data: *const f32,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl Strided {
    /// Returns a factor of rows `stride` elements apart.
    pub(super) fn rows(data: *const f32, stride: usize) -> Self {
        Self { data, row: stride, column: 1 }
    }

    /// Returns the transpose of rows `stride` elements apart.
    pub(super) fn transposed(data: *const f32, stride: usize) -> Self {
        Self { data, row: 1, column: stride }
    }

    #[inline(always)]
    unsafe fn at(self, i: usize, l: usize) -> *const f32 {
        // SAFETY: the caller guarantees that the element exists.
        unsafe { self.data.add(i * self.row + l * self.column) }
    }
}

/// Whether a product replaces the elements of `c` or is added to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteMode {
    Place,
    Sum,
}

/// `c = a b`: `m` by `n` elements, each a sum over `k`.
#[derive(Debug, Clone, Copy)]
pub(super) struct SmallProduct {
    pub(super) a: Strided,
    /// Rows of `n` elements, `b_stride` apart.
    pub(super) b: *const f32,
    pub(super) b_stride: usize,
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) into: WriteMode,
}

impl SmallProduct {
    /// # Safety
    /// All elements that the shapes name exist, and no other thread uses those of `c`.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(self) {
        let mut j = 0;
        while j < self.n {
            let vectors = (self.n - j).div_ceil(LANES);
            // SAFETY: the caller upholds the same contract.
            j += LANES
                * unsafe {
                    match vectors {
                        // Eight rows of three vectors of sums fill the registers of the widest instruction set.
                        3.. if S::TILE == 8 => self.columns::<S, 3>(j),
                        2.. => self.columns::<S, 2>(j),
                        _ => self.columns::<S, 1>(j),
                    }
                };
        }
    }

    /// # Safety
    /// The conditions of [`Self::run`] hold.
    #[inline(always)]
    unsafe fn columns<S: Simd, const V: usize>(&self, j: usize) -> usize {
        let mut i = 0;
        while i < self.m {
            // SAFETY: the caller upholds the same contract.
            i += unsafe {
                match (self.m - i).min(S::TILE) {
                    8.. => self.tile::<S, 8, V>(i, j),
                    4.. => self.tile::<S, 4, V>(i, j),
                    2.. => self.tile::<S, 2, V>(i, j),
                    _ => self.tile::<S, 1, V>(i, j),
                }
            };
        }
        V
    }

    /// # Safety
    /// The conditions of [`Self::run`] hold.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const V: usize>(&self, i: usize, j: usize) -> usize {
        let lanes: [usize; V] = std::array::from_fn(|v| LANES.min(self.n - j - v * LANES));
        let mut sums = [[S::splat(0.0); V]; M];
        // SAFETY: rows and columns exist by the caller's contract; lanes after the last column are not accessed.
        unsafe {
            for l in 0..self.k {
                let b = self.b.add(l * self.b_stride + j);
                let b: [S::F; V] = std::array::from_fn(|v| S::load_head(b.add(v * LANES), lanes[v]));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let a = S::splat(*self.a.at(i + m, l));
                    for (sum, &b) in sums.iter_mut().zip(&b) {
                        *sum = S::fma(a, b, *sum);
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    let to = self.c.add((i + m) * self.c_stride + j + v * LANES);
                    let sum = match self.into {
                        WriteMode::Place => sum,
                        WriteMode::Sum => S::add(S::load_head(to, lanes[v]), sum),
                    };
                    S::store_head(to, sum, lanes[v]);
                }
            }
        }
        M
    }
}
