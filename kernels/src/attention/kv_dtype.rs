//! Element types of the KV cache.

use half::f16;

use super::{bf16_rounding, layout::KvPrecision};
use crate::{buffer::Pod, element::Element, simd::Simd};

/// Largest magnitude of a quantized byte.
const LARGEST: f32 = 127.0;

pub(super) trait KvElement: Pod {
    /// Whether each key and each value has its own scale, by which its elements are multiplied.
    const SCALED: bool;

    /// Loads sixteen elements.
    ///
    /// # Safety
    /// `from` is valid for 16 elements.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;

    /// Rounds and stores sixteen lanes; for [`KvElement::SCALED`] types their magnitudes are at most 127.
    ///
    /// # Safety
    /// `to` is valid for 16 elements.
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F);
}

impl<E: Element> KvElement for E {
    const SCALED: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { E::load::<S>(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: the caller upholds the same contract.
        unsafe { E::store::<S>(to, v) }
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_i8(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::store_i8(to, S::to_i32(v)) }
    }
}

/// Returns the scale of a head whose largest magnitude is `largest`, and the factor to apply before rounding.
#[inline(always)]
pub(super) fn scale(largest: f32) -> (f32, f32) {
    let inverse = LARGEST / largest;
    // A head of zeros or tiny values would have an infinite inverse; its elements are 0.
    (largest / LARGEST, if inverse.is_finite() { inverse } else { 0.0 })
}

impl KvPrecision {
    pub(crate) fn number_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Rounds a key or a value of a head to the values that attention reads back.
    pub(crate) fn round(self, head: &mut [f32]) {
        match self {
            Self::F32 => (),
            Self::F16 => head.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => head.iter_mut().for_each(|x| *x = bf16_rounding::round(*x)),
            Self::Int8 => {
                let (scale, inverse) = scale(head.iter().fold(0.0, |largest, x| x.abs().max(largest)));
                head.iter_mut().for_each(|x| *x = (*x * inverse).round_ties_even() * scale);
            }
        }
    }
    /// Rounds a query to the values that attention multiplies.
    pub(crate) fn round_query(self, query: &mut [f32]) {
        if self == Self::Bf16 {
            self.round(query);
        }
    }
}
