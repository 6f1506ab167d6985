//! Layout of an adapted layer's two factors in memory of another owner, such as an adapter image.
//!
//! Both factors are cut into *rank blocks* of [`RANK_BLOCK`] ranks, the last of which may be short. A block
//! of a factor is contiguous, so that it is copied as one piece. Within a block the elements are in the order
//! in which kernels read them, along sixteen lanes:
//!
//! ```text
//! A, block of w ranks:  [columns][w ranks]
//! B, block of w ranks:  [panels of 16 rows][w ranks][16 rows]      the last panel may be short
//! ```
//!
//! The only padding is for [`ElementKind::Bf16`], whose elements form pairs: of columns in A, of ranks in B.
//! An odd number of either is padded with zeros. In B the lower rank is the upper half of a pair, because the
//! instruction adds the upper product first and ranks are summed in ascending order.

use half::{bf16, f16, slice::HalfFloatSliceExt as _};
use thiserror::Error;

use crate::simd::LANES;

/// Ranks that are copied together.
pub const RANK_BLOCK: usize = 16;

/// Maximum rank of the kernels.
pub const MAX_RANK: usize = 1024;

/// Alignment of factors, in bytes.
pub const FACTOR_ALIGNMENT: usize = 64;

/// Precision of an adapter's elements in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoraPrecision {
    /// As many bits as the elements need to be exact.
    Exact,
    /// f16, rounded if necessary. Suits quantized bases, whose weights have larger rounding errors.
    Compact,
    /// bf16. Inputs of both products are rounded to bf16 too: `x` before `A`, and `A x` before `B`. Twice as
    /// fast for long prompts, with 8 bits of precision.
    Bf16,
}

/// Element type of a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ElementKind {
    /// An IEEE float of 32 bits.
    F32 = 0,
    /// An IEEE float of 16 bits.
    F16 = 1,
    /// The upper half of an F32.
    Bf16 = 2,
}

impl ElementKind {
    /// Returns the kind with this code, if there is one.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns the bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the number of elements that are stored for `count`, including padding to pairs.
    fn stored(self, count: usize) -> Option<usize> {
        match self {
            Self::F32 | Self::F16 => Some(count),
            Self::Bf16 => count.checked_next_multiple_of(2),
        }
    }
}

/// Element type and offset of one factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FactorLayout {
    /// Element type of the factor.
    pub kind: ElementKind,
    /// Bytes from the start of the memory; a multiple of [`FACTOR_ALIGNMENT`].
    pub offset: usize,
}

/// Shape, scale and offsets of one adapted layer's factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixLayout {
    /// Number of ranks, 1 to [`MAX_RANK`].
    pub rank: usize,
    /// Number of input features.
    pub columns: usize,
    /// Number of output features.
    pub rows: usize,
    /// The adapter's scale times the units of `a` and `b`.
    pub scale: f32,
    /// Factor `A`, `[rank, columns]`.
    pub a: FactorLayout,
    /// Factor `B`, `[rows, rank]`.
    pub b: FactorLayout,
}

/// Reason why a layout does not fit its memory.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum LayoutError {
    /// The rank is outside `1..=MAX_RANK`.
    #[error(
        "an adapter's rank is {0}, but kernels take 1 to {MAX_RANK}; its image is damaged, load it again"
    )]
    Rank(usize),
    /// A layer has no inputs or no outputs.
    #[error("an adapted layer has {columns} inputs and {rows} outputs; its image is damaged, load it again")]
    Shape {
        /// Number of input features.
        columns: usize,
        /// Number of output features.
        rows: usize,
    },
    /// The scale is infinite or NaN.
    #[error(
        "an adapter's scale is {0}, which is no finite number; check lora_alpha and the adapter's values"
    )]
    Scale(f32),
    /// A factor's offset is not aligned to [`FACTOR_ALIGNMENT`].
    #[error(
        "a factor starts at byte {0}, which is no multiple of {FACTOR_ALIGNMENT}; its image is damaged, load it again"
    )]
    Alignment(usize),
    /// A factor exceeds its memory.
    #[error(
        "a factor at byte {offset} reaches beyond its {available} bytes of memory; its image is damaged, load it again"
    )]
    Bounds {
        /// Offset of the factor, in bytes.
        offset: usize,
        /// Size of the memory, in bytes.
        available: usize,
    },
}

impl MatrixLayout {
    /// Appends both factors to `bytes` and returns their layout. `a` is `[rank, columns]` and `b` is `[rows,
    /// rank]`, row-major, as PEFT stores them.
    ///
    /// # Panics
    /// Panics if the shapes do not match or the rank is 0 or above [`MAX_RANK`].
    #[allow(clippy::too_many_arguments, reason = "the parts of one matrix product")]
    #[must_use]
    pub fn append(
        bytes: &mut Vec<u8>,
        rank: usize,
        columns: usize,
        rows: usize,
        scale: f32,
        a: &[f32],
        b: &[f32],
        precision: LoraPrecision,
    ) -> Self {
        assert!((1..=MAX_RANK).contains(&rank), "rank {rank}");
        assert_eq!((a.len(), b.len()), (rank * columns, rows * rank), "A is [rank, in], B is [out, rank]");
        let (a_kind, a_unit) = kind_and_unit(a, precision);
        let (b_kind, b_unit) = kind_and_unit(b, precision);
        let a_offset = aligned_end(bytes);
        for first in (0..rank).step_by(RANK_BLOCK) {
            let ranks = RANK_BLOCK.min(rank - first);
            let number = |column, lane| a[(first + lane) * columns + column] / a_unit;
            append_panel(bytes, a_kind, columns, ranks, Pairs::LowerFirst, number);
        }
        let b_offset = aligned_end(bytes);
        for first in (0..rank).step_by(RANK_BLOCK) {
            let ranks = RANK_BLOCK.min(rank - first);
            for row in (0..rows).step_by(LANES) {
                let number = |depth, lane| b[(row + lane) * rank + first + depth] / b_unit;
                append_panel(bytes, b_kind, ranks, LANES.min(rows - row), Pairs::UpperFirst, number);
            }
        }
        let [a, b] =
            [(a_kind, a_offset), (b_kind, b_offset)].map(|(kind, offset)| FactorLayout { kind, offset });
        Self { rank, columns, rows, scale: scale * a_unit * b_unit, a, b }
    }

    /// Checks all conditions of the kernels, for memory of `available` bytes. No value overflows the check.
    ///
    /// # Errors
    /// Returns the first condition that fails.
    pub fn check(&self, available: usize) -> Result<(), LayoutError> {
        if !(1..=MAX_RANK).contains(&self.rank) {
            return Err(LayoutError::Rank(self.rank));
        }
        if self.columns == 0 || self.rows == 0 {
            return Err(LayoutError::Shape { columns: self.columns, rows: self.rows });
        }
        if !self.scale.is_finite() {
            return Err(LayoutError::Scale(self.scale));
        }
        let a_bytes = factor_bytes(self.a.kind, self.columns, self.rank);
        let b_bytes = factor_bytes(self.b.kind, self.rank, self.rows);
        for (FactorLayout { offset, .. }, bytes) in [(self.a, a_bytes), (self.b, b_bytes)] {
            if !offset.is_multiple_of(FACTOR_ALIGNMENT) {
                return Err(LayoutError::Alignment(offset));
            }
            if bytes.and_then(|bytes| bytes.checked_add(offset)).is_none_or(|end| end > available) {
                return Err(LayoutError::Bounds { offset, available });
            }
        }
        Ok(())
    }

    /// Returns the bytes of A's ranks below `rank`, which begins a block or is the end of a checked layout.
    pub(crate) fn a_bytes_before(&self, rank: usize) -> usize {
        rank * self.a_rank_bytes()
    }

    pub(crate) fn a_bytes(&self) -> usize {
        self.a_bytes_before(self.rank)
    }

    /// Returns the bytes of B's ranks below `rank`, which begins a block or is the end.
    pub(crate) fn b_bytes_before(&self, rank: usize) -> usize {
        let ranks = if self.b.kind == ElementKind::Bf16 { rank.next_multiple_of(2) } else { rank };
        ranks * self.rows * self.b.kind.bytes()
    }

    pub(crate) fn b_bytes(&self) -> usize {
        self.b_bytes_before(self.rank)
    }

    fn a_rank_bytes(&self) -> usize {
        let columns =
            if self.a.kind == ElementKind::Bf16 { self.columns.next_multiple_of(2) } else { self.columns };
        columns * self.a.kind.bytes()
    }
}

/// Returns the bytes of a factor whose elements form pairs along `depth`, if any; `None` on overflow.
fn factor_bytes(kind: ElementKind, depth: usize, others: usize) -> Option<usize> {
    kind.stored(depth)?.checked_mul(others)?.checked_mul(kind.bytes())
}

/// Half of a pair that holds the element of the lower depth.
#[derive(Clone, Copy)]
enum Pairs {
    LowerFirst,
    UpperFirst,
}

/// Pads `bytes` to the next multiple of [`FACTOR_ALIGNMENT`] and returns its length.
fn aligned_end(bytes: &mut Vec<u8>) -> usize {
    bytes.resize(bytes.len().next_multiple_of(FACTOR_ALIGNMENT), 0);
    bytes.len()
}

/// Appends a panel of `[depth][lanes]` elements.
fn append_panel(
    bytes: &mut Vec<u8>,
    kind: ElementKind,
    depth: usize,
    lanes: usize,
    pairs: Pairs,
    number: impl Fn(usize, usize) -> f32,
) {
    if kind == ElementKind::F16 {
        return append_halves(bytes, depth, lanes, number);
    }
    let step = if kind == ElementKind::Bf16 { 2 } else { 1 };
    for at in (0..depth).step_by(step) {
        for lane in 0..lanes {
            match kind {
                ElementKind::F32 => bytes.extend(number(at, lane).to_le_bytes()),
                ElementKind::F16 => unreachable!("halves are appended before"),
                ElementKind::Bf16 => {
                    let second = if at + 1 < depth { number(at + 1, lane) } else { 0.0 };
                    let pair = [number(at, lane), second].map(|x| bf16::from_f32(x).to_le_bytes());
                    match pairs {
                        Pairs::LowerFirst => bytes.extend(pair.as_flattened()),
                        Pairs::UpperFirst => bytes.extend([pair[1], pair[0]].as_flattened()),
                    }
                }
            }
        }
    }
}

/// Appends a panel of halves, converted in groups, because a processor converts eight at once.
fn append_halves(bytes: &mut Vec<u8>, depth: usize, lanes: usize, number: impl Fn(usize, usize) -> f32) {
    const GROUP: usize = 256;
    let (mut numbers, mut halves) = ([0.0; GROUP], [f16::ZERO; GROUP]);
    bytes.reserve(2 * depth * lanes);
    let steps = GROUP / lanes.clamp(1, GROUP);
    for first in (0..depth).step_by(steps) {
        let count = steps.min(depth - first) * lanes;
        for (step, group) in numbers[..count].chunks_mut(lanes).enumerate() {
            group.iter_mut().enumerate().for_each(|(lane, to)| *to = number(first + step, lane));
        }
        halves[..count].convert_from_f32_slice(&numbers[..count]);
        bytes.extend(halves[..count].iter().flat_map(|half| half.to_le_bytes()));
    }
}

/// Returns the largest magnitude of `values`, in lanes that a processor compares at once.
fn largest(values: &[f32]) -> f32 {
    let (groups, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for group in groups {
        for (most, value) in lanes.iter_mut().zip(group) {
            *most = if value.abs() > *most { value.abs() } else { *most };
        }
    }
    lanes.iter().chain(rest).fold(0.0, |most, value| most.max(value.abs()))
}

/// Returns the element kind of `values`, and the power of two that divides them first.
fn kind_and_unit(values: &[f32], precision: LoraPrecision) -> (ElementKind, f32) {
    let largest = largest(values);
    let unit = if largest.is_normal() {
        // An f32 below 2^-126 is subnormal, and its inverse overflows.
        2.0f32.powi((largest.log2().floor() as i32 - 14).max(-126))
    } else {
        1.0
    };
    let fits = || values.iter().all(|&x| f16::from_f32(x / unit).to_f32() * unit == x);
    match precision {
        LoraPrecision::Bf16 => (ElementKind::Bf16, 1.0),
        LoraPrecision::Compact => (ElementKind::F16, unit),
        LoraPrecision::Exact if fits() => (ElementKind::F16, unit),
        LoraPrecision::Exact => (ElementKind::F32, 1.0),
    }
}
