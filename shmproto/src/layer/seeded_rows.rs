//! Rows that do not travel: both sides generate them from a key.
//!
//! Row `n` of a key is the keystream of ChaCha20 (20 rounds, 64-bit block counter from 0, 64-bit nonce `n`;
//! Bernstein's original parameters), cut into words of 32 bits. Two words are one integer of the modular
//! path, as in rows that travel.

use std::fmt;

use chacha20::{
    ChaCha20Legacy,
    cipher::{KeyIvInit as _, StreamCipher as _},
};
use zeroize::{Zeroize as _, Zeroizing};

/// Size of a key in bytes.
pub const KEY_BYTES: usize = 32;

/// Size of the encoded key and first row number, in 32-bit words; they take the place of rows.
pub const DRAW_WORDS: usize = KEY_BYTES / 4 + 2;

/// Size of the encoded key and first row number, in bytes.
pub const DRAW_BYTES: usize = 4 * DRAW_WORDS;

/// Bytes of the stack in which a cipher or a hash may leave a key.
const CIPHER_STACK: usize = 8 << 10;

/// Key from which rows are generated. Dropping it overwrites the bytes, and `Debug` hides them. The key stays
/// in one heap allocation, because a move would leave an unerased copy on the stack.
#[derive(PartialEq, Eq)]
pub struct Key(Box<Zeroizing<[u8; KEY_BYTES]>>);

impl Key {
    /// Copies the key; the caller must overwrite its own `bytes`.
    #[must_use]
    pub fn new(bytes: &[u8; KEY_BYTES]) -> Self {
        let mut key = Box::new(Zeroizing::new([0; KEY_BYTES]));
        key.copy_from_slice(bytes);
        Self(key)
    }

    /// Returns the bytes of the key.
    #[must_use]
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        Self::new(self.bytes())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Rows of a key, from row `first` on.
///
/// ```text
/// 0 key [u8; 32] | 32 first u64
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeededRows {
    /// Key of all rows.
    pub key: Key,
    /// Number of the first row.
    pub first: u64,
}

impl SeededRows {
    /// Encodes into words that travel instead of f32 rows, bit for bit, never interpreted as floats.
    #[must_use]
    pub fn to_words(&self) -> Zeroizing<[f32; DRAW_WORDS]> {
        let mut words = Zeroizing::new([0.0; DRAW_WORDS]);
        let (key, first) = words.split_at_mut(KEY_BYTES / 4);
        for (word, bytes) in key.iter_mut().zip(self.key.bytes().as_chunks::<4>().0) {
            *word = f32::from_bits(u32::from_le_bytes(*bytes));
        }
        first.copy_from_slice(&halves(self.first));
        words
    }

    /// Decodes a peer's words; every content is valid.
    #[must_use]
    pub fn from_words(words: &[f32; DRAW_WORDS]) -> Self {
        let (key, first) = words.split_at(KEY_BYTES / 4);
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(key) {
            *bytes = word.to_bits().to_le_bytes();
        }
        let [low, high] = [first[0], first[1]].map(|word| u64::from(word.to_bits()));
        Self { key: Key::new(&bytes), first: high << 32 | low }
    }

    /// Fills `out` with rows of `width` 32-bit words, from row `first + skipped` on, modulo 2^64.
    ///
    /// # Panics
    /// Panics if `width` is 0.
    pub fn fill(&self, skipped: u64, width: usize, out: &mut [f32]) {
        let first = self.first.wrapping_add(skipped);
        for (row, behind) in out.chunks_mut(width).zip(0..) {
            keystream(&self.key, first.wrapping_add(behind), row);
        }
        overwrite_stack();
    }
}

/// Generates row 0 of each key; the rows share `out` evenly.
///
/// # Panics
/// Panics if `keys` or `out` is empty.
pub fn fill_first(keys: &[Key], out: &mut [f32]) {
    for (key, row) in keys.iter().zip(out.chunks_mut(out.len() / keys.len())) {
        keystream(key, 0, row);
    }
    overwrite_stack();
}

/// Generates row `number` of a key. Not inlined, so that [`overwrite_stack`] covers its variables.
#[inline(never)]
fn keystream(key: &Key, number: u64, row: &mut [f32]) {
    let mut stream = ChaCha20Legacy::new(key.bytes().into(), &number.to_le_bytes().into());
    // The lowest byte of a word comes first in memory, as on the wire.
    row.fill(0.0);
    stream.apply_keystream(bytemuck::cast_slice_mut(row));
}

/// Overwrites the stack where a returned function kept its variables. A cipher or a hash may overwrite
/// itself, but not the copies from which it was moved.
#[inline(never)]
pub fn overwrite_stack() {
    let mut stack = [0_u8; CIPHER_STACK];
    stack.zeroize();
    std::hint::black_box(&stack);
}

/// Returns both halves of `number`, the lower first.
fn halves(number: u64) -> [f32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [[a, b, c, d], [e, f, g, h]].map(|half| f32::from_bits(u32::from_le_bytes(half)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(first: u64) -> SeededRows {
        let bytes = std::array::from_fn(|at| u8::try_from(7 * at).expect("small"));
        SeededRows { key: Key::new(&bytes), first }
    }

    fn bits(words: &[f32]) -> Vec<u32> {
        words.iter().map(|word| word.to_bits()).collect()
    }

    #[test]
    fn a_draw_arrives_as_it_was_sent() {
        for first in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
            assert_eq!(SeededRows::from_words(&draw(first).to_words()), draw(first));
        }
    }

    /// RFC 8439, A.1, test vector 1: a key and a nonce of zeros.
    #[test]
    fn the_rows_of_a_key_of_zeros_begin_with_the_published_keystream() {
        let mut words = [0.0; 4];
        SeededRows { key: Key::new(&[0; KEY_BYTES]), first: 0 }.fill(0, 4, &mut words);
        let published = [0xade0_b876, 0x903d_f1a0, 0xe56a_5d40, 0x28bd_8653_u32];
        assert_eq!(bits(&words), published);
    }

    #[test]
    fn a_row_depends_on_its_number_alone() {
        let width = 2 * 256 + 6;
        let mut whole = vec![0.0; 5 * width];
        draw(100).fill(0, width, &mut whole);
        for row in 0..5 {
            let mut own = vec![0.0; width];
            draw(100).fill(row, width, &mut own);
            let at = usize::try_from(row).expect("small") * width;
            assert_eq!(bits(&own), bits(&whole[at..at + width]));
            draw(100 + row).fill(0, width, &mut own);
            assert_eq!(bits(&own), bits(&whole[at..at + width]));
        }
        let mut short = vec![0.0; width / 2];
        draw(100).fill(0, width / 2, &mut short);
        assert_eq!(bits(&short), bits(&whole[..width / 2]), "a wider row goes on where a narrower one ends");
        assert!(bits(&whole[..width]) != bits(&whole[width..2 * width]));
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", draw(3)), "SeededRows { key: Key(..), first: 3 }");
    }
}
