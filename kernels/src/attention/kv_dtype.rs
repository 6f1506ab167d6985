//! The numbers that keys and values are kept as.

use half::f16;

use super::layout::KvPrecision;
use crate::{buffer::Pod, element::Element, simd::Simd};

/// The largest magnitude of a byte.
const LARGEST: f32 = 127.0;

/// A kept number.
pub(super) trait KvElement: Pod {
    /// Whether a key's or a value's numbers times a scale of its own are its features.
    const SCALED: bool;

    /// Sixteen of them.
    ///
    /// # Safety
    ///
    /// `from` is valid for 16 numbers.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;

    /// Rounds sixteen lanes, which of [`KvElement::SCALED`] numbers are at most 127.
    ///
    /// # Safety
    ///
    /// `to` is valid for 16 numbers.
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F);
}

impl<E: Element> KvElement for E {
    const SCALED: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: passed on.
        unsafe { E::load::<S>(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: passed on.
        unsafe { E::store::<S>(to, v) }
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_i8(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: passed on.
        unsafe { S::store_i8(to, S::to_i32(v)) }
    }
}

/// The scale of a head's features of this largest magnitude, and what they are multiplied with before they are rounded.
#[inline(always)]
pub(super) fn scale(largest: f32) -> (f32, f32) {
    let inverse = LARGEST / largest;
    // Zeroes, or as good as zeroes, have numbers of zero.
    (largest / LARGEST, if inverse.is_finite() { inverse } else { 0.0 })
}

impl KvPrecision {
    /// Bytes of a number.
    pub(crate) fn number_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Makes a key or a value of a head what attention meets.
    pub(crate) fn round(self, head: &mut [f32]) {
        match self {
            Self::F32 => (),
            Self::F16 => head.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Int8 => {
                let (scale, inverse) = scale(head.iter().fold(0.0, |largest, x| x.abs().max(largest)));
                head.iter_mut().for_each(|x| *x = (*x * inverse).round_ties_even() * scale);
            }
        }
    }
}
