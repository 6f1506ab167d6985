//! Rows on the wire: little-endian, 32 bits or the upper 16 of them.

use half::bf16;
use shmproto::layer::Dtype;

pub(crate) fn encode(dtype: Dtype, values: &[f32], bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 if cfg!(target_endian = "little") => bytes.extend_from_slice(bytemuck::cast_slice(values)),
        Dtype::F32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
        Dtype::Bf16 => values.iter().for_each(|&value| bytes.extend(bf16::from_f32(value).to_le_bytes())),
    }
}

/// Reads as many values as `out` has; returns false, and reads nothing, if `bytes` have another length.
#[must_use]
pub(crate) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> bool {
    if out.len().checked_mul(dtype.bytes()) != Some(bytes.len()) {
        return false;
    }
    match dtype {
        Dtype::F32 => {
            let words = bytes.as_chunks::<4>().0;
            out.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(*word));
        }
        Dtype::Bf16 => {
            let words = bytes.as_chunks::<2>().0;
            out.iter_mut().zip(words).for_each(|(value, word)| *value = bf16::from_le_bytes(*word).to_f32());
        }
    }
    true
}

/// Rounds `values` as the wire format does.
pub(crate) fn round(dtype: Dtype, values: &mut [f32]) {
    if dtype == Dtype::Bf16 {
        values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_32_bits_arrive_bit_for_bit_and_of_16_rounded_to_even() {
        let values = [0.0, -0.0, 1.0, f32::MIN_POSITIVE, -3.3e38, 1.003_906_2, f32::INFINITY];
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let (mut bytes, mut back, mut rounded) = (Vec::new(), [9.0; 7], values);
            encode(dtype, &values, &mut bytes);
            assert_eq!(bytes.len(), values.len() * dtype.bytes());
            assert!(decode(dtype, &bytes, &mut back));
            round(dtype, &mut rounded);
            assert_eq!(back.map(f32::to_bits), rounded.map(f32::to_bits));
        }
        let mut tie = [1.0 + 1.0 / 256.0];
        round(Dtype::Bf16, &mut tie);
        assert_eq!(tie, [1.0], "halfway between 1 and 1.0078125, to the even one");
    }

    #[test]
    fn bytes_of_another_length_are_not_read() {
        let mut out = [5.0; 2];
        for length in [0, 4, 7, 9, 16] {
            assert!(!decode(Dtype::F32, &vec![0; length], &mut out));
        }
        assert_eq!(out, [5.0; 2]);
    }
}
