//! Decoder of the block formats of GGUF files.
//!
//! A block format stores small integers ("codes") in groups that share a scale, and in some formats a
//! minimum. In every format a group decodes to unsigned codes and two numbers:
//!
//! ```text
//! value = scale * (code - zero)      symmetric formats: the zero point is one constant of the format
//! value = scale * code + minimum     formats with minima
//! value = scale * E2M1[code]         MXFP4: a table of whole numbers
//! ```
//!
//! Layouts follow ggml's `ggml-common.h`.

use half::{bf16, f16};

use crate::TensorType;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offset {
    /// `scale * (code - zero)`.
    Zero(u8),
    /// `scale * code + minimum`.
    Minimum,
    /// `scale * (E2M1[code] - 128)`.
    E2m1,
}

/// Twice the values of a float with one sign bit, two bits of exponent and one of mantissa, plus 128.
pub(crate) const E2M1: [u8; 16] =
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IntegerLayout {
    pub(crate) bits: usize,
    /// Elements that share a scale: 16 or 32.
    pub(crate) group: usize,
    pub(crate) offset: Offset,
}

/// Returns the integer form of `kind`, or `None` for float types.
pub(crate) fn integer_form(kind: TensorType) -> Option<IntegerLayout> {
    let form = |bits, group, offset| Some(IntegerLayout { bits, group, offset });
    match kind {
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => None,
        TensorType::Q4_0 => form(4, 32, Offset::Zero(8)),
        TensorType::Q4_1 | TensorType::Q4K => form(4, 32, Offset::Minimum),
        TensorType::Q5_0 => form(5, 32, Offset::Zero(16)),
        TensorType::Q5_1 | TensorType::Q5K => form(5, 32, Offset::Minimum),
        TensorType::Q6K => form(6, 16, Offset::Zero(32)),
        // Signed bytes.
        TensorType::Q8_0 => form(8, 32, Offset::Zero(128)),
        TensorType::Mxfp4 => form(4, 32, Offset::E2m1),
    }
}

/// A decoded row: one code per element, one scale and minimum per group.
#[derive(Debug, Default)]
pub(crate) struct DecodedRow {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    /// Empty for symmetric formats.
    pub(crate) minima: Vec<f32>,
}

impl DecodedRow {
    /// Decodes a row of an integer format. The length of `bytes` is a multiple of the block.
    pub(crate) fn decode(&mut self, kind: TensorType, bytes: &[u8]) {
        self.decode_numbers(kind, bytes);
        self.codes.clear();
        for block in bytes.chunks_exact(kind.block_bytes()) {
            match kind {
                TensorType::Mxfp4 => self.codes.extend(nibbles(&block[1..])),
                TensorType::Q4_0 => self.codes.extend(nibbles(&block[2..])),
                TensorType::Q4_1 => self.codes.extend(nibbles(&block[4..])),
                TensorType::Q5_0 => self.codes.extend(fifth_bits(nibbles(&block[6..]), &block[2..6])),
                TensorType::Q5_1 => self.codes.extend(fifth_bits(nibbles(&block[8..]), &block[4..8])),
                TensorType::Q8_0 => self.codes.extend(block[2..34].iter().map(|code| code.wrapping_add(128))),
                TensorType::Q4K => self.k_codes(&block[16..], None),
                TensorType::Q5K => self.k_codes(&block[48..], Some(&block[16..48])),
                TensorType::Q6K => self.q6k_codes(block),
                TensorType::F32 | TensorType::F16 | TensorType::Bf16 => float_rows_have_no_codes(),
            }
        }
    }

    /// Decodes only the scales and minima.
    pub(crate) fn decode_numbers(&mut self, kind: TensorType, bytes: &[u8]) {
        self.scales.clear();
        self.minima.clear();
        for block in bytes.chunks_exact(kind.block_bytes()) {
            match kind {
                TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => self.scales.push(half_at(block, 0)),
                TensorType::Q4_1 | TensorType::Q5_1 => {
                    self.scales.push(half_at(block, 0));
                    self.minima.push(half_at(block, 2));
                }
                TensorType::Mxfp4 => self.scales.push(half_power(block[0])),
                TensorType::Q4K | TensorType::Q5K => self.k_numbers(block),
                TensorType::Q6K => {
                    let scale = half_at(block, 208);
                    self.scales.extend(block[192..208].iter().map(|&s| scale * f32::from(s.cast_signed())));
                }
                TensorType::F32 | TensorType::F16 | TensorType::Bf16 => float_rows_have_no_codes(),
            }
        }
    }

    /// Decodes the scales and minima of Q4_K and Q5_K: eight groups of 32.
    fn k_numbers(&mut self, block: &[u8]) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        for group in 0..8 {
            let (group_scale, group_minimum) = six_bit_pair(&block[4..16], group);
            self.scales.push(scale * f32::from(group_scale));
            self.minima.push(-minimum * f32::from(group_minimum));
        }
    }

    /// Decodes the codes of Q4_K and Q5_K; `high` holds the fifth bits of Q5_K.
    fn k_codes(&mut self, low: &[u8], high: Option<&[u8]>) {
        for group in 0..8 {
            let nibbles = &low[32 * (group / 2)..][..32];
            self.codes.extend((0..32).map(|i| {
                let nibble = if group % 2 == 0 { nibbles[i] & 15 } else { nibbles[i] >> 4 };
                nibble | high.map_or(0, |high| ((high[i] >> group) & 1) << 4)
            }));
        }
    }

    /// Decodes Q6_K: sixteen groups of 16, two halves of 128 elements each.
    fn q6k_codes(&mut self, block: &[u8]) {
        let (low, high) = (&block[..128], &block[128..192]);
        for element in 0..256 {
            let (half, quarter, i) = (element / 128, (element % 128) / 32, element % 32);
            let low = low[64 * half + 32 * (quarter % 2) + i];
            let nibble = if quarter < 2 { low & 15 } else { low >> 4 };
            let top = (high[32 * half + i] >> (2 * quarter)) & 3;
            self.codes.push(nibble | top << 4);
        }
    }
}

fn float_rows_have_no_codes() -> ! {
    unreachable!("float rows have no codes")
}

/// Writes a row's values to `out`. `bytes` must hold `out.len()` elements of `kind`.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn dequantize_row(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), kind.row_bytes(out.len()), "a row of {} elements", out.len());
    match kind {
        TensorType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        TensorType::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        TensorType::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => dequantize_codes(kind, bytes, out),
    }
}

fn dequantize_codes(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    let form = integer_form(kind).expect("float types were handled");
    let mut row = DecodedRow::default();
    row.decode(kind, bytes);
    for (i, (out, &code)) in out.iter_mut().zip(&row.codes).enumerate() {
        let scale = row.scales[i / form.group];
        *out = match form.offset {
            Offset::Zero(zero) => scale * (f32::from(code) - f32::from(zero)),
            Offset::Minimum => scale * f32::from(code) + row.minima[i / form.group],
            Offset::E2m1 => scale * (f32::from(E2M1[usize::from(code)]) - 128.0),
        };
    }
}

/// Returns half of the power of two of an MXFP4 block, since [`E2M1`] holds doubled values; 255 is NaN.
fn half_power(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        // The two smallest powers are denormals.
        0 | 1 => f32::from_bits(0x0020_0000 << exponent),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Splits 16 bytes into 32 codes: low nibbles first, then high ones.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

/// Adds the fifth bits, which the block holds as a 32-bit mask.
fn fifth_bits(codes: [u8; 32], mask: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| codes[i] | ((mask[i / 8] >> (i % 8)) & 1) << 4)
}

/// Returns scale and minimum of one of the eight groups of Q4_K and Q5_K, six bits each in twelve bytes.
fn six_bit_pair(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let both = packed[group + 4];
        ((both & 15) | (packed[group - 4] >> 6) << 4, (both >> 4) | (packed[group] >> 6) << 4)
    }
}
