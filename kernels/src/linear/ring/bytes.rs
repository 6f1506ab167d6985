//! Words as bytes, with signs where they are multiplied.

/// The bytes of a word with signs: those without, where each has lent 128 to the one before.
#[inline(always)]
pub(super) fn with_signs(word: u64) -> u64 {
    const HALF: u64 = 0x8080_8080_8080_8080;
    word.wrapping_add(HALF) ^ HALF
}

/// Byte `j` of word `i` becomes byte `i` of word `j`.
#[inline(always)]
pub(super) fn transposed(words: [u64; 8]) -> [u64; 8] {
    let words = swapped::<4>(words, 0x0000_0000_ffff_ffff);
    let words = swapped::<2>(words, 0x0000_ffff_0000_ffff);
    swapped::<1>(words, 0x00ff_00ff_00ff_00ff)
}

/// Swaps the upper bytes of words with the lower ones of those `DISTANCE` behind them.
#[inline(always)]
fn swapped<const DISTANCE: usize>(mut words: [u64; 8], lower: u64) -> [u64; 8] {
    let mut i = 0;
    while i < 8 {
        if i & DISTANCE == 0 {
            let (first, second) = (words[i], words[i + DISTANCE]);
            words[i] = first & lower | (second & lower) << (8 * DISTANCE);
            words[i + DISTANCE] = first >> (8 * DISTANCE) & lower | second & !lower;
        }
        i += 1;
    }
    words
}

/// A number as it travels and lies in rows, as a word: the bytes that it lacks are zeros.
#[inline(always)]
pub(super) fn word<const B: usize>(number: &[u8; B]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..B].copy_from_slice(number);
    u64::from_le_bytes(bytes)
}

/// A word as a number of a row, which has the lower bytes of it.
#[inline(always)]
pub(super) fn number<const B: usize>(word: u64) -> [u8; B] {
    *word.to_le_bytes().first_chunk().expect("numbers are no longer than words")
}
