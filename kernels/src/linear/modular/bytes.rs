//! Conversion between words and the integers of rows.

pub(super) use crate::simd::digits::to_u64;

/// Returns the low `B` bytes of a word.
#[inline(always)]
pub(super) fn number<const B: usize>(word: u64) -> [u8; B] {
    *word.to_le_bytes().first_chunk().expect("numbers are no longer than words")
}
