//! Random numbers without state: each is a hash of a key and a counter. Work that is repeated after a crash
//! draws the same numbers, in any order and on any thread.

/// The odd constant of SplitMix64: 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finalizer of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's variant 13 of the mixing constants): a
/// bijection in which every input bit flips every output bit with a probability near one half.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Keyed generator: SplitMix64's sequence from a start that the key determines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rng {
    /// State before the first number.
    start: u64,
}

impl Rng {
    /// Creates a generator from a seed that a user chose. The seed is hashed, so that neighbouring seeds give
    /// unrelated numbers.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { start: mix(seed.wrapping_add(GAMMA)) }
    }

    /// Creates the generator of a hashed key; consecutive keys would give shifted copies of one sequence.
    #[must_use]
    pub fn keyed(key: u64) -> Self {
        Self { start: key.wrapping_sub(1).wrapping_mul(GAMMA) }
    }

    /// Returns 64 random bits, equal for equal key and counter on every machine.
    #[must_use]
    pub fn bits(self, counter: u64) -> u64 {
        mix(self.start.wrapping_add(counter.wrapping_add(1).wrapping_mul(GAMMA)))
    }

    /// Returns a number in [0, 1).
    #[must_use]
    pub fn uniform(self, counter: u64) -> f64 {
        // With the upper 53 bits, every value is a multiple of 2^-53 and exactly representable.
        (self.bits(counter) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generates SplitMix64 as its authors print it.
    fn splitmix64(mut state: u64) -> impl FnMut() -> u64 {
        move || {
            state = state.wrapping_add(GAMMA);
            mix(state)
        }
    }

    #[test]
    fn the_numbers_of_a_key_are_those_of_splitmix64_from_its_place() {
        for key in [0, 1, 7, u64::MAX] {
            let mut seeded = splitmix64(mix(key.wrapping_add(GAMMA)));
            let mut keyed = splitmix64(key.wrapping_mul(GAMMA).wrapping_sub(GAMMA));
            for counter in 0..100 {
                assert_eq!(Rng::seeded(key).bits(counter), seeded());
                assert_eq!(Rng::keyed(key).bits(counter), keyed());
            }
        }
        // The first number of the published generator from the state 0.
        assert_eq!(Rng::keyed(1).bits(0), 0xe220_a839_7b1d_cdaf);
    }
}
