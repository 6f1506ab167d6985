//! Words as numbers of rows, and back.

pub(super) use crate::simd::digits::to_u64;

/// A word as a number of a row, which has the lower bytes of it.
#[inline(always)]
pub(super) fn number<const B: usize>(word: u64) -> [u8; B] {
    *word.to_le_bytes().first_chunk().expect("numbers are no longer than words")
}
