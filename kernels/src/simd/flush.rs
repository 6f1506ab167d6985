//! Multiply-add that takes and gives denormals as zero, for sets without such an instruction.

/// Computes `a * b + c`, rounded once, of bf16 values `a` and `b`; denormals are taken and given as zero.
pub(super) fn fma_flushed(a: f32, b: f32, c: f32) -> f32 {
    // The product of two bf16 is exact in 64 bits, so only the sum is rounded.
    let product = f64::from(flushed(a)) * f64::from(flushed(b));
    let sum = to_odd(product, f64::from(flushed(c)));
    // Values that round to the smallest normal number with 24 bits are given as that number.
    let tiny = f64::from(f32::MIN_POSITIVE) * (1.0 - 2.0f64.powi(-25));
    if sum.abs() < tiny { 0.0f32.copysign(sum as f32) } else { sum as f32 }
}

/// Replaces a denormal by zero.
pub(super) fn flushed(v: f32) -> f32 {
    if v.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(v) } else { v }
}

/// Computes `a + b`; an inexact sum becomes the neighbour with an odd last bit, which rounds to 32 bits as
/// the exact sum does.
fn to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let of_b = sum - a;
    let error = (a - (sum - of_b)) + (b - of_b);
    if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let is_larger = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if is_larger { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}
