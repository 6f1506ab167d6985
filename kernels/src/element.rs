//! Element types of 16 or 32 bits that kernels load as 32.

use crate::{buffer::Pod, simd::Simd};

pub(crate) trait Element: Pod {
    /// Loads sixteen elements.
    ///
    /// # Safety
    /// `from` is valid for 16 elements.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;

    /// Loads the first `count` elements, with zeros in the other lanes.
    ///
    /// # Safety
    /// `from` is valid for `count` elements.
    unsafe fn load_head<S: Simd>(from: *const Self, count: usize) -> S::F;

    /// Rounds and stores sixteen lanes.
    ///
    /// # Safety
    /// `to` is valid for 16 elements.
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn load_head<S: Simd>(from: *const Self, count: usize) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_head(from, count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::store(to, v) }
    }
}

/// Bits of a 16-bit IEEE float.
impl Element for u16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn load_head<S: Simd>(from: *const Self, count: usize) -> S::F {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::load_f16_head(from, count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::F) {
        // SAFETY: the caller upholds the same contract.
        unsafe { S::store_f16(to, v) }
    }
}
