//! Low-rank deltas of many adapters in one call: `out[row] += scale * B (A x[row])`.
//!
//! Rows that use the same adapter are a *segment*; rows without one are in no segment and cost nothing. Every adapter
//! keeps its own rank: nothing is padded. `A` is kept `[rank, in]`, `B` transposed `[rank, out]`, so both are read
//! along their rows.
//!
//! The order of sums is part of the contract (DESIGN section 8: the delta is a sum over rank blocks, whoever computes
//! them): `A x` is summed in lanes over `in`; `B` over the ranks of a block of [`RANK_BLOCK`], from first to last; the
//! blocks are added to `out` from first to last.

use std::io;

use half::f16;

use crate::{
    activations::Activations,
    buffer::{Arena, Buffer},
    element::Element,
    isa::{Isa, Kernel},
    pool::Pool,
    simd::{LANES, Simd},
};

/// Ranks that are summed before they are added to the output.
pub const RANK_BLOCK: usize = 16;

/// The largest rank kernels take.
pub const MAX_RANK: usize = 1024;

/// Rows of a segment that one thread takes.
const ROWS_A_UNIT: usize = 16;

/// How an adapter's numbers are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoraPrecision {
    /// As many bits as it takes to hold them exactly.
    Exact,
    /// 16 bits, rounded if need be: for bases whose own weights are rounded far more.
    Compact,
}

/// One adapted linear layer, ready for the kernels.
#[derive(Debug)]
pub struct LoraMatrix {
    rank: usize,
    columns: usize,
    rows: usize,
    /// The adapter's scale times the units of `a` and `b`.
    scale: f32,
    a: Numbers,
    b: Numbers,
}

#[derive(Debug)]
enum Numbers {
    F32(Buffer<f32>),
    F16(Buffer<u16>),
}

impl Numbers {
    fn bytes(&self) -> usize {
        match self {
            Self::F32(buffer) => buffer.bytes(),
            Self::F16(buffer) => buffer.bytes(),
        }
    }
}

impl LoraMatrix {
    /// `a` is `[rank, columns]` and `b` is `[rows, rank]`, row after row, as PEFT stores them. All matrices of an
    /// adapter share one `arena`.
    ///
    /// # Errors
    ///
    /// There is no memory.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together or the rank is 0 or above [`MAX_RANK`].
    #[allow(clippy::too_many_arguments, reason = "the parts of one matrix product")]
    pub fn new(
        arena: &Arena,
        rank: usize,
        columns: usize,
        rows: usize,
        scale: f32,
        a: &[f32],
        b: &[f32],
        precision: LoraPrecision,
    ) -> io::Result<Self> {
        assert!((1..=MAX_RANK).contains(&rank), "rank {rank}");
        assert_eq!((a.len(), b.len()), (rank * columns, rows * rank), "A is [rank, in], B is [out, rank]");
        let transposed: Vec<f32> = (0..rank * rows).map(|i| b[i % rows * rank + i / rows]).collect();
        let (a, a_unit) = numbers(arena, a, precision)?;
        let (b, b_unit) = numbers(arena, &transposed, precision)?;
        Ok(Self { rank, columns, rows, scale: scale * a_unit * b_unit, a, b })
    }

    /// The true rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.a.bytes() + self.b.bytes()
    }
}

/// Stores `values` divided by a power of two in 16 bits if that is exact or `precision` allows to round.
fn numbers(arena: &Arena, values: &[f32], precision: LoraPrecision) -> io::Result<(Numbers, f32)> {
    let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let unit = if largest.is_normal() {
        // Below -126 a single is no power of two with an inverse.
        2.0f32.powi((largest.log2().floor() as i32 - 14).max(-126))
    } else {
        1.0
    };
    let half = |x: f32| f16::from_f32(x / unit);
    if precision == LoraPrecision::Compact || values.iter().all(|&x| half(x).to_f32() * unit == x) {
        let mut buffer: Buffer<_> = arena.zeroed(values.len())?;
        for (to, &x) in buffer.as_mut_slice().iter_mut().zip(values) {
            *to = half(x).to_bits();
        }
        return Ok((Numbers::F16(buffer), unit));
    }
    let mut buffer: Buffer<_> = arena.zeroed(values.len())?;
    buffer.as_mut_slice().copy_from_slice(values);
    Ok((Numbers::F32(buffer), 1.0))
}

/// A delta to add: consecutive rows of one adapter, one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct LoraSegment<'a> {
    /// First row.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// The adapter's matrices for this layer.
    pub matrix: &'a LoraMatrix,
    /// Column of `out` of the layer's first output feature.
    pub column: usize,
}

/// Adds the deltas of all `segments` to `out`, rows of `stride` elements, on all threads of `pool`.
///
/// # Panics
///
/// If the shapes do not fit together, or segments are not in ascending order of rows and then columns.
pub fn add_deltas(
    pool: &mut Pool,
    isa: Isa,
    x: &Activations,
    segments: &[LoraSegment<'_>],
    out: &mut [f32],
    stride: usize,
) {
    let mut units = Vec::with_capacity(segments.len());
    for segment in segments {
        assert_eq!(segment.matrix.columns, x.width(), "A has the width of the activations");
        assert!(segment.first_row + segment.rows <= x.rows(), "the segment's rows exist");
        assert!(segment.column + segment.matrix.rows <= stride, "B's outputs lie within a row of out");
        for first in (0..segment.rows).step_by(ROWS_A_UNIT) {
            let rows = ROWS_A_UNIT.min(segment.rows - first);
            units.push(LoraSegment { first_row: segment.first_row + first, rows, ..*segment });
        }
    }
    assert!(out.len() >= x.rows() * stride, "out has as many rows as x");
    assert!(
        segments.windows(2).all(|pair| in_order(&pair[0], &pair[1])),
        "segments are disjoint and in order"
    );
    let out = OutPtr(out.as_mut_ptr());
    pool.run(units.len(), |i| {
        let out = &out;
        isa.dispatch(Unit { x, segment: units[i], out: out.0, stride });
    });
}

/// Segments ascend by rows, those of the same rows by columns: so no two of them meet.
fn in_order(a: &LoraSegment<'_>, b: &LoraSegment<'_>) -> bool {
    let same_rows = (a.first_row, a.rows) == (b.first_row, b.rows);
    a.first_row + a.rows <= b.first_row || same_rows && a.column + a.matrix.rows <= b.column
}

struct OutPtr(*mut f32);
// SAFETY: units write disjoint elements of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}

struct Unit<'a> {
    x: &'a Activations,
    segment: LoraSegment<'a>,
    out: *mut f32,
    stride: usize,
}

impl Kernel for Unit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let m = self.segment.matrix;
        // A and B may be kept differently: a B of zeroes is exact in 16 bits whatever its A is.
        // SAFETY: `add_deltas` has checked the shapes, and no other unit writes these elements.
        unsafe {
            match (&m.a, &m.b) {
                (Numbers::F32(a), Numbers::F32(b)) => self.add::<S, _, _>(a.as_ptr(), b.as_ptr()),
                (Numbers::F32(a), Numbers::F16(b)) => self.add::<S, _, _>(a.as_ptr(), b.as_ptr()),
                (Numbers::F16(a), Numbers::F32(b)) => self.add::<S, _, _>(a.as_ptr(), b.as_ptr()),
                (Numbers::F16(a), Numbers::F16(b)) => self.add::<S, _, _>(a.as_ptr(), b.as_ptr()),
            }
        }
    }
}

impl Unit<'_> {
    #[inline(always)]
    unsafe fn add<S: Simd, A: Element, B: Element>(&self, a: *const A, b: *const B) {
        let LoraSegment { first_row, rows, matrix, column } = self.segment;
        let mut shrunk = [0.0f32; 4 * MAX_RANK];
        let mut row = 0;
        while row < rows {
            // SAFETY: the caller's.
            unsafe {
                let x = self.x.values().as_ptr().add((first_row + row) * matrix.columns);
                let out = self.out.add((first_row + row) * self.stride + column);
                row += match S::TILE.min(rows - row) {
                    4.. => self.tile::<S, A, B, 4>(a, b, x, out, &mut shrunk),
                    2.. => self.tile::<S, A, B, 2>(a, b, x, out, &mut shrunk),
                    _ => self.tile::<S, A, B, 1>(a, b, x, out, &mut shrunk),
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, A: Element, B: Element, const M: usize>(
        &self,
        a: *const A,
        b: *const B,
        x: *const f32,
        out: *mut f32,
        shrunk: &mut [f32; 4 * MAX_RANK],
    ) -> usize {
        let m = self.segment.matrix;
        let mut rank = 0;
        // SAFETY: the caller's: A has `rank` rows of `columns`, B `rank` rows of `rows`, x and out have M rows.
        unsafe {
            while rank + 4 <= m.rank {
                shrink::<S, A, M, 4>(a.add(rank * m.columns), x, m.columns, m.scale, &mut shrunk[rank * M..]);
                rank += 4;
            }
            while rank < m.rank {
                shrink::<S, A, M, 1>(a.add(rank * m.columns), x, m.columns, m.scale, &mut shrunk[rank * M..]);
                rank += 1;
            }
            let mut column = 0;
            while column < m.rows {
                let left = m.rows - column;
                let to = out.add(column);
                if left >= 4 * LANES {
                    expand::<S, B, M, 4>(b.add(column), m, shrunk, to, self.stride, LANES);
                    column += 4 * LANES;
                } else {
                    expand::<S, B, M, 1>(b.add(column), m, shrunk, to, self.stride, LANES.min(left));
                    column += LANES;
                }
            }
        }
        M
    }
}

/// `shrunk[r * M + m] = scale * A[r] · x[m]` for `R` ranks and `M` rows.
#[inline(always)]
unsafe fn shrink<S: Simd, A: Element, const M: usize, const R: usize>(
    a: *const A,
    x: *const f32,
    columns: usize,
    scale: f32,
    shrunk: &mut [f32],
) {
    let mut sums = [[S::splat(0.0); R]; M];
    let mut c = 0;
    while c < columns {
        let n = LANES.min(columns - c);
        // SAFETY: the caller's.
        unsafe {
            let mut weights = [S::splat(0.0); R];
            for (r, weight) in weights.iter_mut().enumerate() {
                *weight = A::load_head::<S>(a.add(r * columns + c), n);
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let x = S::load_head(x.add(m * columns + c), n);
                for (sum, &weight) in sums.iter_mut().zip(&weights) {
                    *sum = S::fma(weight, x, *sum);
                }
            }
        }
        c += LANES;
    }
    for (m, sums) in sums.iter().enumerate() {
        for (r, &sum) in sums.iter().enumerate() {
            shrunk[r * M + m] = scale * S::sum(sum);
        }
    }
}

/// Adds `B[.., V vectors] shrunk` to `M` rows of `out`; only `lanes` lanes of the last vector exist.
#[inline(always)]
unsafe fn expand<S: Simd, B: Element, const M: usize, const V: usize>(
    b: *const B,
    m: &LoraMatrix,
    shrunk: &[f32; 4 * MAX_RANK],
    out: *mut f32,
    stride: usize,
    lanes: usize,
) {
    let mut block = 0;
    while block < m.rank {
        let end = m.rank.min(block + RANK_BLOCK);
        let mut sums = [[S::splat(0.0); V]; M];
        for rank in block..end {
            let mut weights = [S::splat(0.0); V];
            for (v, weight) in weights.iter_mut().enumerate() {
                // SAFETY: the caller's: B's row has V vectors, the last with `lanes` lanes.
                *weight = unsafe { B::load_head::<S>(b.add(rank * m.rows + v * LANES), lanes) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let y = S::splat(shrunk[rank * M + i]);
                for (sum, &weight) in sums.iter_mut().zip(&weights) {
                    *sum = S::fma(weight, y, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller's: out has M rows with these columns.
                unsafe {
                    let to = out.add(i * stride + v * LANES);
                    S::store_head(to, S::add(S::load_head(to, lanes), sum), lanes);
                }
            }
        }
        block = end;
    }
}
