//! Rounding to the bf16 values that attention multiplies.

/// Smallest magnitude other than zero, 2^-54, as the bits of a float.
const SMALLEST: u32 = (127 - 54) << 23;

/// Rounds to the nearest bf16, ties to even; a NaN stays a NaN, and tiny numbers become 0.
// Integers, which the compiler turns into vectors.
#[inline(always)]
pub(super) fn to_bf16(x: f32) -> u16 {
    let (sign, magnitude) = (x.to_bits() & 0x8000_0000, x.to_bits() & 0x7fff_ffff);
    let nearest = magnitude + 0x7fff + (magnitude >> 16 & 1);
    let rounded = if nearest < SMALLEST { 0 } else { nearest };
    let kept = if magnitude > 0x7f80_0000 { 0x7fc0_0000 } else { rounded };
    ((sign | kept) >> 16) as u16
}

/// Rounds to a value that attention multiplies.
pub(super) fn round(x: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(x)) << 16)
}
