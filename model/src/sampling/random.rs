//! The counter-based generator: a hash of (seed, position), no state.

/// The odd constant of SplitMix64: 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer (Steele, Lea, Flood 2014, with Stafford's variant 13 of the mixing constants): a
/// bijection in which every input bit flips every output bit with a probability near one half.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in [0, 1), the same for the same seed and position, on every machine.
///
/// The seed is hashed before the position is added, so that neighbouring seeds do not give shifted copies of one
/// sequence; for one seed the sequence over positions is SplitMix64's own.
#[must_use]
pub fn uniform(seed: u64, position: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(GAMMA)).wrapping_add(position.wrapping_add(1).wrapping_mul(GAMMA)));
    // The upper 53 bits: every value is a multiple of 2^-53 and exactly representable.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit the mantissa")]
    let fraction = (bits >> 11) as f64 / (1u64 << 53) as f64;
    fraction
}
