//! Conversion of float rows to integers and back.
//!
//! A row becomes integers times a power of two chosen for the row, with as many bits of its largest value as
//! the weights permit. `y = x W` of such rows is exact modulo 2^48 or 2^64. The result stays two bits below
//! the modulus, so that its sign is unambiguous.

use kernels::Modulus;

/// Writes `row` as signed integers below `2^bits` in magnitude, modulo 2^64. Returns the exponent of their
/// power of two; `None` if a value is not finite. The duration does not depend on the values, except for some
/// nanoseconds if all are zero.
pub(super) fn to_whole(row: &[f32], bits: u32, whole: &mut [u64]) -> Option<i32> {
    // Without signs, floats are ordered as their bits are, and values that are not finite come last.
    let largest = row.iter().fold(0, |most, x| most.max(x.abs().to_bits()));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return None;
    }
    let exponent = exponent(largest, i32::try_from(bits).ok()?);
    let unit = power_of_two(-exponent);
    for (whole, &x) in whole.iter_mut().zip(row) {
        *whole = rounded(x, unit).cast_unsigned();
    }
    Some(exponent)
}

/// Returns the exponent with which `largest` has `bits` bits; 0 for zero.
fn exponent(largest: f32, bits: i32) -> i32 {
    let is_zero = largest == 0.0;
    // Zero takes the same steps as other values, with an arbitrary one.
    let largest = if is_zero { 1.0 } else { largest };
    let exponent = magnitude(largest) + 1 - bits;
    // Rounding may reach the next power of two.
    let exceeds = rounded(largest, power_of_two(-exponent)).unsigned_abs() >> bits != 0;
    if is_zero { 0 } else { exponent + i32::from(exceeds) }
}

/// Converts signed integers, in units of `2^exponent`, to the nearest floats. The integers are results modulo
/// `modulus`.
pub(super) fn from_whole(modulus: Modulus, whole: &[u64], exponent: i32, row: &mut [f32]) {
    let unit = power_of_two(exponent);
    // The value is rounded once, to 24 bits; the product is exact within a float's range.
    #[expect(clippy::cast_possible_truncation, reason = "24 bits stay 24 bits")]
    let scaled = |rounded: f32| (f64::from(rounded) * unit) as f32;
    let numbers = row.iter_mut().zip(whole);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "it is meant to be rounded"
    )]
    match modulus {
        Modulus::Bits48 => numbers.for_each(|(x, &whole)| *x = scaled(wide(whole) as f32)),
        Modulus::Bits64 => numbers.for_each(|(x, &whole)| *x = scaled(whole.cast_signed() as f32)),
    }
}

/// Converts an integer below 2^51 in magnitude to a 64-bit float, which holds it exactly. The inverse of
/// [`rounded`]; any processor vectorizes it.
fn wide(whole: u64) -> f64 {
    f64::from_bits(SHIFT.to_bits().wrapping_add(whole)) - SHIFT
}

/// Returns the exponent of the largest power of two that is not above a positive finite number.
fn magnitude(x: f32) -> i32 {
    // Every subnormal f32 is normal as f64.
    let biased = f64::from(x).to_bits() >> 52 & 0x7ff;
    i32::try_from(biased).unwrap_or(0) - 1023
}

/// Added to a number below 2^51 in magnitude, this rounds it to an integer, as floats round, which then
/// stands in the last bits of the sum. On plain x86-64 `round_ties_even` is a function with branches.
const SHIFT: f64 = 6_755_399_441_055_744.0;

/// Returns `x` times `unit`, below 2^31 in magnitude, rounded to the nearest integer, ties to even.
fn rounded(x: f32, unit: f64) -> i64 {
    let shifted = f64::from(x) * unit + SHIFT;
    shifted.to_bits().wrapping_sub(SHIFT.to_bits()).cast_signed()
}

/// Returns a power of two as f64, in range for a float's plus a weight's exponent; else 0 or infinity.
fn power_of_two(exponent: i32) -> f64 {
    match exponent {
        -1022..=1023 => f64::from_bits(u64::from((exponent + 1023).cast_unsigned()) << 52),
        ..-1022 => 0.0,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(row: &[f32], bits: u32) -> Vec<f32> {
        let (mut whole, mut back) = (vec![0; row.len()], vec![0.0; row.len()]);
        let exponent = to_whole(row, bits, &mut whole).expect("all are finite");
        let most = whole.iter().map(|whole| whole.cast_signed().unsigned_abs()).max().unwrap_or(0);
        assert!(most < 1 << bits, "{row:?}: {most}");
        from_whole(Modulus::Bits64, &whole, exponent, &mut back);
        back
    }

    #[test]
    fn answers_of_fewer_bits_are_read_as_those_of_many() {
        let mut state = 1_i64;
        let mut answers =
            vec![0, 1, -1, (1 << 46) - 1, 1 - (1 << 46), (1 << 24) + 1, (1 << 25) + 2, (1 << 25) + 6];
        for at in 0..1000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            answers.push(state >> (18 + at % 40));
        }
        let answers: Vec<u64> = answers.into_iter().map(i64::cast_unsigned).collect();
        for exponent in [0, -30, -180, 100] {
            let [few, many] = Modulus::ALL.map(|modulus| {
                let mut row = vec![0.0; answers.len()];
                from_whole(modulus, &answers, exponent, &mut row);
                row.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert_eq!(few, many, "{exponent}");
        }
    }

    #[test]
    fn numbers_of_one_size_come_back_as_they_were() {
        for size in [1.0, 3.0e38, 1.0e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
            let row = [size, -size, 0.0, size / 2.0];
            assert_eq!(there_and_back(&row, 30), row, "{size}");
        }
    }

    #[test]
    fn small_numbers_beside_large_ones_lose_what_is_below_the_last_bit_and_no_more() {
        let row = [1000.0, 1.0e-4, -3.0e-7, 0.123_456_79];
        for (found, x) in there_and_back(&row, 30).iter().zip(row) {
            assert!((found - x).abs() <= 1000.0 / f32::exp2(29.0), "{x}: {found}");
        }
    }

    #[test]
    fn a_number_that_is_rounded_up_to_a_power_of_two_stays_within_its_bits() {
        for bits in [12, 23, 24, 30] {
            there_and_back(&[f32::from_bits(0x3fff_ffff), -1.0], bits);
        }
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(to_whole(&[1.0, x, 2.0], 30, &mut [0; 3]), None);
        }
    }
}
