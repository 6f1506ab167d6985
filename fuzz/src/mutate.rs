//! Deterministic mutations: a seed gives the same inputs on every machine, so failures are reproducible.

/// A small generator (SplitMix64), whose quality suffices for mutations.
#[derive(Debug, Clone)]
pub struct Random(u64);

/// Numbers at which arithmetic often fails.
const EDGES: [u64; 12] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// Pieces of text at which text parsers often fail.
const PIECES: [&str; 16] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "null",
    "1e999",
    "-1",
    "NaN",
    "\\ud800",
    "(?=",
    "{{",
    "{% for a in ",
    "~",
];

impl Random {
    /// Creates a generator from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = end.max(1) as u64;
        usize::try_from(self.next() % end).unwrap_or(0)
    }
}

/// Changes `input` at one to eight positions.
#[must_use]
pub fn mutated(input: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(8) {
        change(&mut bytes, random);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let until = (at + 1 + random.below(16)).min(bytes.len());
    match random.below(7) {
        0 => bytes.truncate(at),
        1 => {
            bytes.splice(at..until, []);
        }
        2 => {
            let again = bytes[at..until].to_vec();
            bytes.splice(at..at, again);
        }
        3 => {
            let piece = PIECES[random.below(PIECES.len())];
            bytes.splice(at..at, piece.bytes());
        }
        4 => {
            let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
            let width = [1, 2, 4, 8][random.below(4)];
            let room = width.min(bytes.len() - at);
            bytes[at..at + room].copy_from_slice(&edge[..room]);
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_inputs_and_another_makes_others() {
        let inputs = |seed| {
            let mut random = Random::new(seed);
            [0; 8].map(|_| mutated(b"an input", &mut random))
        };
        assert_eq!(inputs(1), inputs(1));
        assert_ne!(inputs(1), inputs(2));
    }
}
