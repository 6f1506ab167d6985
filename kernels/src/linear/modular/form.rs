//! Weights of a packed matrix as integers.

use half::f16;

use crate::{
    linear::{
        form::{CodeLines, Packing},
        pack::PackedMatrix,
    },
    quant::{E2M1, IntegerLayout, Offset},
    simd::LANES,
};

/// Fractional bits that float weights keep.
const FLOAT_BITS: i32 = 24;
/// Bound of float weights, below which their integers have 30 bits.
const FLOAT_LIMIT: f32 = 64.0;
/// Exponents of scale units for which every product with a power of two in this module is a normal float.
const UNITS: std::ops::RangeInclusive<i32> = -80..=80;
/// Maximum bits of a magnitude: one less than an `i32` has, because rounding may add one.
const MAX_BITS: i32 = 30;

/// Representation of a matrix's weights as integers times a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModularForm {
    exact: i32,
    bits: u32,
}

impl ModularForm {
    /// Returns the largest exponent `e` for which every weight is an integer times `2^e`; -24 for floats.
    #[must_use]
    pub fn exact(self) -> i32 {
        self.exact
    }

    /// Returns the smallest exponent for which the integers are below 2^30.
    #[must_use]
    pub fn smallest(self) -> i32 {
        self.exact + self.bits.cast_signed() - MAX_BITS
    }

    /// Returns a common exponent of matrices: exact for all of them if their integers are small enough, else
    /// the smallest valid one. `None` without matrices.
    #[must_use]
    pub fn common(forms: &[Self]) -> Option<i32> {
        let exact = forms.iter().map(|form| form.exact).min()?;
        forms.iter().map(|form| form.smallest()).max().map(|smallest| smallest.max(exact))
    }
}

impl PackedMatrix {
    /// Returns the integer form of the weights; `None` for floats of magnitude 64 or more, infinities and
    /// NaN.
    #[must_use]
    pub fn ring_form(&self) -> Option<ModularForm> {
        match self.packing().integer_form() {
            Some(form) => self.integer_ring_form(form),
            None => self.float_ring_form(),
        }
    }

    fn float_ring_form(&self) -> Option<ModularForm> {
        let mut largest = 0.0f32;
        let mut values = vec![0.0; self.columns()];
        for row in 0..self.rows() {
            self.read_row(row, &mut values);
            // `max` and comparisons skip NaN; the sum does not.
            let sum = values.iter().fold(0.0, |sum, value| sum + value * 0.0);
            largest = values.iter().fold(largest, |largest, value| largest.max(value.abs()));
            if sum != 0.0 || largest >= FLOAT_LIMIT {
                return None;
            }
        }
        Some(ModularForm {
            exact: -FLOAT_BITS,
            bits: bits_of(float_whole(largest, 1.0).unsigned_abs().into()),
        })
    }

    fn integer_ring_form(&self, form: IntegerLayout) -> Option<ModularForm> {
        let unit = exponent_of(self.unit())?;
        let (scales, minima) = self.panel_numbers(form)?;
        // No scale and no minimum has a bit below this one.
        let lowest = scales.lowest.min(minima.lowest).min(0);
        let whole = |largest: f32| (f64::from(largest) * 2.0f64.powi(-lowest)) as u64;
        // Codes of five and six bits count as bytes, so that the modulus of a base is that of earlier releases.
        let codes = if form.bits == 4 { 15 } else { 255 };
        Some(ModularForm {
            exact: unit + lowest,
            bits: bits_of(codes * whole(scales.largest) + whole(minima.largest)),
        })
    }

    fn panel_numbers(&self, form: IntegerLayout) -> Option<(NumberRange, NumberRange)> {
        let (mut scales, mut minima) = (NumberRange::default(), NumberRange::default());
        let (codes, groups) = (self.columns() * LANES * form.bits / 8, self.columns() / form.group);
        for panel in 0..self.panels() {
            let numbers = self.panel_slice(panel)[codes..].as_chunks::<{ 2 * LANES }>().0;
            match form.offset {
                Offset::Zero(_) | Offset::E2m1 => {
                    numbers[..groups].iter().for_each(|numbers| scales.add(numbers))
                }
                Offset::Minimum => {
                    for [first, second] in numbers.as_chunks().0.iter().take(groups) {
                        scales.add(first);
                        minima.add(second);
                    }
                }
            }
        }
        let are_finite = scales.largest.is_finite() && minima.largest.is_finite();
        are_finite.then_some((scales, minima))
    }

    /// Writes row `row` as integers times `2^exponent` to `out`.
    ///
    /// # Panics
    /// Panics if there is no such row or `out` is not as long as a row.
    pub fn read_ring_row(&self, row: usize, exponent: i32, out: &mut [i32]) {
        assert!(row < self.rows() && out.len() == self.columns(), "row {row} of {} elements", out.len());
        let Some(form) = self.packing().integer_form() else {
            let mut values = vec![0.0; self.columns()];
            self.read_row(row, &mut values);
            let shift = 2.0f64.powi(-FLOAT_BITS - exponent);
            for (out, value) in out.iter_mut().zip(values) {
                *out = float_whole(value, shift);
            }
            return;
        };
        self.read_integer_row(form, row, exponent, out);
    }

    fn read_integer_row(&self, form: IntegerLayout, row: usize, exponent: i32, out: &mut [i32]) {
        let (panel, lane) = (self.panel_slice(row / LANES), row % LANES);
        let (codes, numbers) = panel.split_at(self.columns() * LANES * form.bits / 8);
        let (factor, lines) = (self.unit() * 2.0f32.powi(-exponent), CodeLines::of(form.bits));
        let number = |at: usize| {
            let at = 2 * (at * LANES + lane);
            (f16::from_le_bytes([numbers[at], numbers[at + 1]]).to_f32() * factor).round_ties_even() as i32
        };
        for (group, out) in out.chunks_exact_mut(form.group).enumerate() {
            let (scale, offset) = match form.offset {
                Offset::Zero(zero) => {
                    let scale = number(group);
                    (scale, scale.wrapping_mul(-i32::from(zero)))
                }
                Offset::Minimum => (number(2 * group), number(2 * group + 1)),
                Offset::E2m1 => (number(group), number(group).wrapping_mul(-128)),
            };
            for (i, out) in out.iter_mut().enumerate() {
                let code = lines.read(codes, lane, group * form.group + i);
                let code = if form.offset == Offset::E2m1 { E2M1[usize::from(code)] } else { code };
                *out = scale.wrapping_mul(code.into()).wrapping_add(offset);
            }
        }
    }

    /// Returns the factors that turn the stored numbers into integers times `2^exponent`.
    pub(super) fn factors(&self, exponent: i32) -> Factors {
        let power = |n: i32| 2.0f32.powi(n.clamp(-126, 127));
        match self.packing() {
            Packing::F32 | Packing::F16 | Packing::Bf16 => {
                Factors { first: power(FLOAT_BITS), then: power(-FLOAT_BITS - exponent) }
            }
            _ => Factors { first: power(-exponent), then: 1.0 },
        }
    }
}

/// Powers of two that weights are multiplied by; floats are rounded between the two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    pub(super) first: f32,
    pub(super) then: f32,
}

/// Largest magnitude and lowest bit of some 16-bit floats.
#[derive(Debug, Clone, Copy)]
struct NumberRange {
    largest: f32,
    lowest: i32,
}

impl Default for NumberRange {
    fn default() -> Self {
        Self { largest: 0.0, lowest: i32::MAX }
    }
}

impl NumberRange {
    fn add(&mut self, numbers: &[u8; 2 * LANES]) {
        for bytes in numbers.as_chunks().0 {
            let bits = u16::from_le_bytes(*bytes);
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), i32::from(bits & 1023));
            let mantissa = if exponent == 0 { fraction } else { fraction | 1024 };
            if mantissa != 0 {
                self.lowest = self.lowest.min(exponent.max(1) - 25 + mantissa.trailing_zeros().cast_signed());
                let magnitude = f16::from_bits(bits & 0x7fff).to_f32();
                // Not `max`, which would skip NaN.
                self.largest = if magnitude <= self.largest { self.largest } else { magnitude };
            }
        }
    }
}

/// Converts a weight to an integer times `2^-24`, times `shift`.
#[inline]
fn float_whole(weight: f32, shift: f64) -> i32 {
    // Sums with this constant have no fractional bits: they are rounded to nearest, ties to even.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    let rounded = |x: f64| (x + ROUND) - ROUND;
    rounded(rounded(f64::from(weight) * f64::from(1 << FLOAT_BITS)) * shift) as i32
}

/// Returns the exponent of a power of two if it lies in [`UNITS`].
fn exponent_of(unit: f32) -> Option<i32> {
    let exponent = (unit.to_bits() >> 23).cast_signed() - 127;
    (unit == 2.0f32.powi(exponent)).then_some(exponent).filter(|exponent| UNITS.contains(exponent))
}

fn bits_of(magnitude: u64) -> u32 {
    u64::BITS - magnitude.leading_zeros()
}
