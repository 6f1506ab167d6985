//! Cuts integers into digits: signed bytes, where each negative digit is balanced by a carry into the next.

use super::GROUP;

/// Cuts a group of integers of `B` bytes into digits, without vector instructions.
#[inline(always)]
pub(super) fn digits<const B: usize>(numbers: &[[u8; B]; GROUP]) -> [[u8; GROUP]; B] {
    let mut digits = [[0; GROUP]; B];
    for (eight, numbers) in numbers.as_chunks::<8>().0.iter().enumerate() {
        let words = transposed(numbers.map(|number| with_signs(to_u64(&number))));
        for (digits, word) in digits.iter_mut().zip(words) {
            digits[8 * eight..][..8].copy_from_slice(&word.to_le_bytes());
        }
    }
    digits
}

/// Returns an integer as a word, padded with zero bytes.
#[inline(always)]
pub(crate) fn to_u64<const B: usize>(number: &[u8; B]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..B].copy_from_slice(number);
    u64::from_le_bytes(bytes)
}

/// Converts the bytes of a word to signed digits.
#[inline(always)]
fn with_signs(word: u64) -> u64 {
    const HALF: u64 = 0x8080_8080_8080_8080;
    word.wrapping_add(HALF) ^ HALF
}

/// Byte `j` of word `i` becomes byte `i` of word `j`.
#[inline(always)]
fn transposed(words: [u64; 8]) -> [u64; 8] {
    let words = swapped::<4>(words, 0x0000_0000_ffff_ffff);
    let words = swapped::<2>(words, 0x0000_ffff_0000_ffff);
    swapped::<1>(words, 0x00ff_00ff_00ff_00ff)
}

/// Swaps the upper bytes of words with the lower bytes of the words `DISTANCE` after them.
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
