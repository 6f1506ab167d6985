//! Element types in memory, each as a step of a sum: sixteen lanes of weights times one broadcast input.

use std::{marker::PhantomData, ops::Range};

use crate::{
    element::Element,
    simd::{LANES, Simd},
};

pub(super) const SPAN: usize = 256;

pub(super) trait StoredElement {
    /// Element of a row's prepared inputs.
    type Input: Copy;
    /// Factor of sixteen lanes of weights.
    type Factor<S: Simd>: Copy;
    type Weights<S: Simd>: Copy;

    /// This element type for narrow blocks, whose steps take several columns.
    type Narrow: StoredElement<Input = Self::Input>;

    const STEP: usize;
    /// Bytes of one lane of a step.
    const LANE_BYTES: usize;

    /// # Safety
    /// `from` is valid for 16 lanes.
    unsafe fn load<S: Simd>(from: *const u8) -> Self::Weights<S>;

    /// Loads the first `lanes` lanes, with zeros in the others.
    ///
    /// # Safety
    /// `from` is valid for `lanes` lanes.
    unsafe fn load_head<S: Simd>(from: *const u8, lanes: usize) -> Self::Weights<S>;

    /// Returns the factor of a step with one column per `width` of its first `lanes` lanes.
    ///
    /// # Safety
    /// `inputs` is valid for the inputs of these columns.
    unsafe fn factor<S: Simd>(inputs: *const Self::Input, width: usize, lanes: usize) -> Self::Factor<S>;

    /// Computes `sum + weights * factor`, a pair's upper product first.
    fn dot<S: Simd>(sum: S::F, weights: Self::Weights<S>, factor: Self::Factor<S>) -> S::F;

    /// Returns the columns per step of a block of `width` ranks.
    #[inline(always)]
    fn columns_a_step(_width: usize) -> usize {
        Self::STEP
    }

    /// True if a block of `width` ranks is read as [`Self::Narrow`].
    #[inline(always)]
    fn is_narrow(_width: usize) -> bool {
        false
    }

    /// Prepares `rows` rows of `count` inputs of A, converted in `scratch` if necessary. Also returns the row
    /// distance.
    ///
    /// # Safety
    /// `x` is valid for rows `stride` apart; `scratch` for `rows * SPAN / 2` elements; `count <= SPAN`.
    unsafe fn inputs<S: Simd>(
        x: *const f32,
        stride: usize,
        rows: usize,
        count: usize,
        scratch: *mut u32,
    ) -> (*const Self::Input, usize);

    /// Converts `rows` rows of sums over A, `stride` apart, to inputs of B in place, ignoring sums outside
    /// `ranks`.
    ///
    /// # Safety
    /// `sums` is valid for the rows, and `stride` is a multiple of 16 that is at least `ranks.end`.
    unsafe fn shrunk<S: Simd>(
        sums: *mut f32,
        stride: usize,
        rows: usize,
        ranks: Range<usize>,
    ) -> *const Self::Input;
}

/// Elements that are widened exactly and multiplied by inputs of 32 bits.
impl<E: Element> StoredElement for E {
    type Input = f32;
    type Factor<S: Simd> = S::F;
    type Weights<S: Simd> = S::F;
    type Narrow = Narrow<E>;

    const STEP: usize = 1;
    const LANE_BYTES: usize = size_of::<E>();

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { <E as Element>::load::<S>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_head<S: Simd>(from: *const u8, lanes: usize) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { <E as Element>::load_head::<S>(from.cast(), lanes) }
    }
    #[inline(always)]
    unsafe fn factor<S: Simd>(inputs: *const f32, _width: usize, _lanes: usize) -> S::F {
        // SAFETY: the caller upholds this function's contract.
        S::splat(unsafe { *inputs })
    }
    #[inline(always)]
    fn dot<S: Simd>(sum: S::F, weights: S::F, factor: S::F) -> S::F {
        S::fma(weights, factor, sum)
    }
    #[inline(always)]
    fn is_narrow(width: usize) -> bool {
        width < LANES && width.is_power_of_two()
    }
    #[inline(always)]
    unsafe fn inputs<S: Simd>(
        x: *const f32,
        stride: usize,
        _rows: usize,
        _count: usize,
        _scratch: *mut u32,
    ) -> (*const f32, usize) {
        (x, stride)
    }
    #[inline(always)]
    unsafe fn shrunk<S: Simd>(
        sums: *mut f32,
        _stride: usize,
        _rows: usize,
        _ranks: Range<usize>,
    ) -> *const f32 {
        sums
    }
}

/// Elements of a block of 1, 2, 4 or 8 ranks: sixteen lanes hold several columns of the block, whose products
/// are summed separately and joined at the end.
pub(super) struct Narrow<E>(PhantomData<E>);

impl<E: Element> StoredElement for Narrow<E> {
    type Input = f32;
    type Factor<S: Simd> = S::F;
    type Weights<S: Simd> = S::F;
    type Narrow = Self;

    const STEP: usize = 1;
    const LANE_BYTES: usize = size_of::<E>();

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { <E as StoredElement>::load::<S>(from) }
    }
    #[inline(always)]
    unsafe fn load_head<S: Simd>(from: *const u8, lanes: usize) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { <E as StoredElement>::load_head::<S>(from, lanes) }
    }
    #[inline(always)]
    unsafe fn factor<S: Simd>(inputs: *const f32, width: usize, lanes: usize) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_repeated(inputs, width, lanes / width) }
    }
    #[inline(always)]
    fn dot<S: Simd>(sum: S::F, weights: S::F, factor: S::F) -> S::F {
        S::fma(weights, factor, sum)
    }
    #[inline(always)]
    fn columns_a_step(width: usize) -> usize {
        LANES / width
    }
    #[inline(always)]
    unsafe fn inputs<S: Simd>(
        x: *const f32,
        stride: usize,
        _rows: usize,
        _count: usize,
        _scratch: *mut u32,
    ) -> (*const f32, usize) {
        (x, stride)
    }
    #[inline(always)]
    unsafe fn shrunk<S: Simd>(
        sums: *mut f32,
        _stride: usize,
        _rows: usize,
        _ranks: Range<usize>,
    ) -> *const f32 {
        sums
    }
}

/// Pairs of bf16, multiplied by pairs of bf16 and summed in 32 bits.
pub(super) struct Bf16Pairs;

impl StoredElement for Bf16Pairs {
    type Input = u32;
    type Factor<S: Simd> = u32;
    type Weights<S: Simd> = S::B;
    type Narrow = Self;

    const STEP: usize = 2;
    const LANE_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::B {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_bytes(from) }
    }
    #[inline(always)]
    unsafe fn load_head<S: Simd>(from: *const u8, lanes: usize) -> S::B {
        let mut bytes = [0u8; LANES * Self::LANE_BYTES];
        // SAFETY: the caller guarantees `lanes` valid lanes, at most 16.
        unsafe {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), lanes * Self::LANE_BYTES);
            S::load_bytes(bytes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn factor<S: Simd>(inputs: *const u32, _width: usize, _lanes: usize) -> u32 {
        // SAFETY: the caller upholds this function's contract.
        unsafe { *inputs }
    }
    #[inline(always)]
    fn dot<S: Simd>(sum: S::F, weights: S::B, factor: u32) -> S::F {
        S::dot_bf16(sum, weights, factor)
    }
    #[inline(always)]
    unsafe fn inputs<S: Simd>(
        x: *const f32,
        stride: usize,
        rows: usize,
        count: usize,
        scratch: *mut u32,
    ) -> (*const u32, usize) {
        const STRIDE: usize = SPAN / 2;
        for row in 0..rows {
            for first in (0..count).step_by(LANES) {
                // SAFETY: the caller upholds this function's contract. The last vector of an odd row ends in zeros,
                // which complete its last pair.
                unsafe {
                    let v = S::load_head(x.add(row * stride + first), LANES.min(count - first));
                    S::store_bf16(scratch.add(row * STRIDE + first / 2).cast(), v);
                }
            }
        }
        (scratch, STRIDE)
    }
    #[inline(always)]
    unsafe fn shrunk<S: Simd>(sums: *mut f32, stride: usize, rows: usize, ranks: Range<usize>) -> *const u32 {
        for row in 0..rows {
            // SAFETY: the caller upholds this function's contract. Pairs are half as long, so sums are read before they
            // are overwritten.
            unsafe {
                let sums = sums.add(row * stride);
                if !ranks.start.is_multiple_of(2) {
                    *sums.add(ranks.start - 1) = 0.0;
                }
                if !ranks.end.is_multiple_of(2) {
                    *sums.add(ranks.end) = 0.0;
                }
                for first in (0..stride).step_by(LANES) {
                    let mut pairs = [0u32; LANES / 2];
                    S::store_bf16(pairs.as_mut_ptr().cast(), S::load(sums.add(first)));
                    // The lower rank goes to the upper half, as it does in B.
                    let to = sums.cast::<u32>().add(first / 2);
                    to.cast::<[u32; LANES / 2]>().write_unaligned(pairs.map(|pair| pair.rotate_left(16)));
                }
            }
        }
        sums.cast()
    }
}
