//! Rows in the wire format of messages.

use shmproto::layer::Dtype;

/// Reads rows in wire format.
pub(super) fn read(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
    }
}

/// Appends rows in wire format.
pub(super) fn put(dtype: Dtype, rows: &[f32], bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => bytes.extend(rows.iter().flat_map(|value| value.to_le_bytes())),
        Dtype::Bf16 => bytes.extend(rows.iter().flat_map(|&value| bf16_bits(value).to_le_bytes())),
    }
}

/// Returns the upper half of `value`, rounded to nearest, ties to even. A NaN stays a NaN.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = if value.is_nan() { bits | 0x0040_0000 } else { bits + 0x7fff + (bits >> 16 & 1) };
    // The upper half of 32 bits always fits.
    (rounded >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_32_bits_come_back_and_rows_of_16_are_the_nearest() {
        let rows = [1.0, -2.5, f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000), f32::INFINITY];
        let mut back = [0.0; 5];
        let mut bytes = Vec::new();
        put(Dtype::F32, &rows, &mut bytes);
        read(Dtype::F32, &bytes, &mut back);
        assert_eq!(back, rows);
        bytes.clear();
        put(Dtype::Bf16, &rows, &mut bytes);
        read(Dtype::Bf16, &bytes, &mut back);
        assert_eq!(back, [1.0, -2.5, 1.0, f32::from_bits(0x3f82_0000), f32::INFINITY]);
        bytes.clear();
        put(Dtype::Bf16, &[f32::NAN, f32::from_bits(0x7f80_0001)], &mut bytes);
        read(Dtype::Bf16, &bytes, &mut back[..2]);
        assert!(back[..2].iter().all(|value| value.is_nan()));
    }
}
