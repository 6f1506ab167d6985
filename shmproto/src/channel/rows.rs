//! Copies f32 values to and from the slab, as f32 or bf16. A bf16 is the upper half of an f32; two of them
//! are packed into one 32-bit word, through a buffer on the stack.

use super::{Geometry, PLACE_ALIGN, SlabRangeError};
use crate::atomic::AtomicU64;
use crate::layer::Dtype;
use crate::memory::copy;

/// Number of 32-bit words that are converted at a time.
const CHUNK: usize = 256;

/// Returns the index of the 32-bit word at which rows begin, if they lie within the slab.
pub(super) fn place(
    geometry: &Geometry,
    offset: u64,
    dtype: Dtype,
    numbers: usize,
) -> Result<usize, SlabRangeError> {
    let Geometry { slab_bytes, .. } = *geometry;
    let bytes = (numbers as u64).saturating_mul(dtype.bytes() as u64);
    let within = offset.checked_add(bytes).is_some_and(|end| end <= slab_bytes);
    match usize::try_from(offset / 4) {
        Ok(start) if within && offset.is_multiple_of(PLACE_ALIGN) => Ok(start),
        _ => Err(SlabRangeError { offset, bytes, slab_bytes }),
    }
}

/// Copies values out, from 32-bit word `start` on; panics if the slab ends before `rows` is full.
pub(super) fn read(slab: &[AtomicU64], start: usize, dtype: Dtype, rows: &mut [f32]) {
    match dtype {
        Dtype::F32 => copy::read(slab, start, rows),
        Dtype::Bf16 => {
            let mut buffer = [0.0; CHUNK];
            for (chunk, rows) in rows.chunks_mut(2 * CHUNK).enumerate() {
                let words = &mut buffer[..rows.len().div_ceil(2)];
                copy::read(slab, start + chunk * CHUNK, words);
                widen(words, rows);
            }
        }
    }
}

/// Copies values in; panics if they do not fit. An incomplete last word of 64 bits is filled with zeros.
pub(super) fn write(slab: &[AtomicU64], start: usize, dtype: Dtype, rows: &[f32]) {
    match dtype {
        Dtype::F32 => copy::write(slab, start, rows),
        Dtype::Bf16 => {
            let mut buffer = [0.0; CHUNK];
            for (chunk, rows) in rows.chunks(2 * CHUNK).enumerate() {
                let words = &mut buffer[..rows.len().div_ceil(2)];
                narrow(rows, words);
                copy::write(slab, start + chunk * CHUNK, words);
            }
        }
    }
}

fn widen(words: &[f32], rows: &mut [f32]) {
    for (pair, word) in rows.chunks_mut(2).zip(words) {
        let [low, high] = [word.to_bits() << 16, word.to_bits() & 0xffff_0000].map(f32::from_bits);
        match pair {
            [first, second] => [*first, *second] = [low, high],
            [only] => *only = low,
            _ => {}
        }
    }
}

fn narrow(rows: &[f32], words: &mut [f32]) {
    for (word, pair) in words.iter_mut().zip(rows.chunks(2)) {
        let high = pair.get(1).map_or(0, |&value| u32::from(bf16_bits(value)));
        *word = f32::from_bits(u32::from(bf16_bits(pair[0])) | high << 16);
    }
}

/// Rounds to the nearest bf16, ties to even. NaN stays NaN.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let upper = |bits: u32| u16::try_from(bits >> 16).unwrap_or(u16::MAX);
    if value.is_nan() {
        // The bits that make the value NaN may all be in the lower half.
        return upper(bits) | 0x0040;
    }
    upper(bits + 0x7fff + (bits >> 16 & 1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn slab() -> Vec<AtomicU64> {
        (0..1024).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_number_of_16_bits_is_the_nearest_one_and_of_two_the_even_one() {
        let cases = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_7fff, 0x3f80),
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
            (0x7f7f_ffff, 0x7f80),
            (0x7f80_0000, 0x7f80),
            (0xff80_0000, 0xff80),
            (0x8000_0000, 0x8000),
            (0x0000_8001, 0x0001),
        ];
        for (bits, wanted) in cases {
            assert_eq!(bf16_bits(f32::from_bits(bits)), wanted, "{bits:#010x}");
        }
        for nan in [0x7f80_0001, 0xffff_ffff, 0x7fc0_0000] {
            assert!(f32::from_bits(u32::from(bf16_bits(f32::from_bits(nan))) << 16).is_nan(), "{nan:#010x}");
        }
    }

    #[test]
    fn rows_of_any_length_come_out_as_they_went_in() {
        for count in [1, 2, 3, 7, 8, 511, 512, 513, 1023, 1025] {
            let rows: Vec<f32> = (0..count).map(|number| (number % 200) as f32 - 100.0).collect();
            for dtype in Dtype::ALL {
                let slab = slab();
                write(&slab, 16, *dtype, &rows);
                let mut found = vec![0.0; count];
                read(&slab, 16, *dtype, &mut found);
                assert_eq!(found, rows, "{count} of {dtype:?}");
                assert_eq!(slab[7].load(crate::atomic::Ordering::Relaxed), 0, "nothing before them");
            }
        }
    }

    #[test]
    fn a_place_is_on_a_line_and_ends_within_the_slab() {
        let geometry = Geometry { slab_bytes: 256, depth: 1 };
        assert_eq!(place(&geometry, 64, Dtype::F32, 48), Ok(16));
        assert_eq!(place(&geometry, 256, Dtype::F32, 0), Ok(64));
        assert_eq!(place(&geometry, 192, Dtype::Bf16, 32), Ok(48));
        for (offset, numbers) in
            [(4, 1), (64, 49), (256, 1), (u64::MAX - 63, 1), (1 << 62, 1), (0, usize::MAX), (320, 0)]
        {
            assert!(place(&geometry, offset, Dtype::F32, numbers).is_err(), "{numbers} at {offset}");
        }
    }
}
