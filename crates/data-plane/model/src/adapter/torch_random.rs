//! PyTorch's random numbers and permutations on a CPU, bit by bit from the same seed.
//!
//! The generator is mt19937; a float takes the lower 24 bits of a word (`at::transformation::uniform_real`).
//! The scaling follows PyTorch's kernels for AVX2 and newer, with one rounding. Kernels for older processors
//! round twice and can differ in the last bit.

use std::collections::HashMap;

use rand_mt::Mt;

/// Number of entries from which PyTorch draws a permutation with 64 bits for each entry.
const LONG_PERMUTATION: usize = u32::MAX as usize / 20;

const DRAWN_BITS: u32 = f32::MANTISSA_DIGITS;

/// Reproduction of PyTorch's `torch.Generator(device="cpu")`.
pub(super) struct TorchGenerator(Mt);

impl TorchGenerator {
    /// Seeds the generator like `manual_seed`, which takes the lower half of a seed.
    #[expect(clippy::cast_possible_truncation, reason = "so does PyTorch")]
    pub(super) fn new(seed: u64) -> Self {
        Self(Mt::new(seed as u32))
    }

    /// Draws a matrix `[rows, cols]` like PEFT's `_kaiming_init`: uniform, with a variance of `2 / cols`.
    pub(super) fn kaiming_uniform(&mut self, [rows, cols]: [usize; 2]) -> Vec<f32> {
        // PyTorch's order of operations gives the bound the same bits.
        let deviation = 2f64.sqrt() / (cols as f64).sqrt();
        self.uniform(rows * cols, 3f64.sqrt() * deviation)
    }

    /// Draws numbers from 0 to 1, without 1.
    pub(super) fn chances(&mut self, count: usize) -> Vec<f32> {
        let step = 1.0 / (1u32 << DRAWN_BITS) as f32;
        (0..count).map(|_| (self.0.next_u32() & ((1 << DRAWN_BITS) - 1)) as f32 * step).collect()
    }

    /// Returns the first `count` entries of a permutation of `size` numbers, like `torch.randperm`, or `None`
    /// for a size from which PyTorch draws in another way.
    pub(super) fn permutation(&mut self, size: usize, count: usize) -> Option<Vec<usize>> {
        if size >= LONG_PERMUTATION {
            return None;
        }
        // Entries that an exchange has moved; all others are in their places.
        let mut moved: HashMap<usize, usize> = HashMap::new();
        let mut found = Vec::with_capacity(count);
        for at in 0..count.min(size) {
            let from = if at + 1 < size { at + self.0.next_u32() as usize % (size - at) } else { at };
            let [own, chosen] = [at, from].map(|place| moved.get(&place).copied().unwrap_or(place));
            moved.insert(from, own);
            found.push(chosen);
        }
        Some(found)
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounded, as PyTorch does")]
    fn uniform(&mut self, count: usize, bound: f64) -> Vec<f32> {
        let (from, to) = (-bound as f32, bound as f32);
        let step = 1.0 / (1u32 << DRAWN_BITS) as f32;
        let mut draw = || {
            let word = self.0.next_u32() & ((1 << DRAWN_BITS) - 1);
            (word as f32 * step).mul_add(to - from, from)
        };
        (0..count).map(|_| draw()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns bits of PEFT's `_kaiming_init` of `[3, 300]` and then of `[7, 3]` with this key. The list has
    /// the first and last three values of the first matrix, then the first and last two of the second.
    fn drawn(key: u64) -> Vec<u32> {
        let mut generator = TorchGenerator::new(key);
        let (a, b) = (generator.kaiming_uniform([3, 300]), generator.kaiming_uniform([7, 3]));
        assert_eq!((a.len(), b.len()), (900, 21));
        let shown = [&a[..3], &a[897..], &b[..2], &b[19..]].concat();
        shown.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn permutations_are_those_that_pytorch_draws_from_the_same_seed() {
        let drawn = |size, count| TorchGenerator::new(777).permutation(size, count);
        assert_eq!(drawn(6144, 8), Some(vec![4199, 4278, 2571, 2255, 5219, 1478, 5631, 416]));
        assert_eq!(drawn(10, 20).map(|all| all[..8].to_vec()), Some(vec![5, 9, 0, 3, 1, 7, 4, 8]));
        assert_eq!(drawn(LONG_PERMUTATION, 1), None);
    }

    #[test]
    fn numbers_have_the_bits_that_pytorch_draws_from_the_same_key() {
        let of_5 = [
            0x3dbf_4d65,
            0xbdd8_9468,
            0x3dec_081b,
            0xbb30_bb86,
            0x3cfc_b174,
            0x3d9b_b82c,
            0xbea5_4375,
            0xbf84_6d0a,
            0xbf7d_4589,
            0xbf49_48a3,
        ];
        assert_eq!(drawn(5), of_5);
        assert_eq!(drawn((1 << 40) + 5), of_5, "the lower half of a key counts");
        let of_minus_3 = [
            0x3d10_a8a7,
            0x3b0c_2804,
            0xbe0c_4654,
            0xbd4b_1c8d,
            0xbddb_90f4,
            0xbd84_d8cc,
            0x3f21_4a76,
            0x3e8f_8599,
            0xbf97_5eff,
            0x3e20_2344,
        ];
        assert_eq!(drawn((-3i64).cast_unsigned()), of_minus_3);
    }
}
