//! A pad, and the shape of a site that pads are of.

use kernels::Modulus;
use shmproto::layer::{
    Op,
    control::Site,
    draw::{Draw, Key},
};
use zeroize::Zeroize as _;

use crate::{masking::Direction, session::calls::ring_room};

/// A pad: numbers that cover one row, once, and what the site makes of them. Overwritten when it is dropped.
pub struct Pad {
    key: Key,
    effect: Vec<f32>,
}

impl std::fmt::Debug for Pad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pad(..)")
    }
}

impl Pad {
    pub(super) fn new(key: Key, effect: Vec<f32>) -> Self {
        Self { key, effect }
    }

    /// Writes its numbers, as they travel.
    pub(super) fn fill(&self, words: &mut [f32]) {
        Draw { key: self.key.clone(), first: 0 }.fill(0, words.len().max(1), words);
    }

    /// What the site makes of them, as it travels.
    pub(super) fn effect(&self) -> &[f32] {
        &self.effect
    }

    /// Tells it from all others.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }
}

impl Drop for Pad {
    fn drop(&mut self) {
        self.effect.zeroize();
    }
}

/// The shape of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Input features.
    pub columns: u32,
    /// Output features of all parts.
    pub outputs: u32,
    /// What numbers are taken modulo, forward and backward.
    pub moduli: [Modulus; 2],
}

impl Shape {
    /// That of an executor's site; `None` if it has no ring path.
    pub(super) fn of(site: &Site) -> Option<Self> {
        let modulus = |op| ring_room(site, op).map(|room| room.modulus);
        Some(Self {
            columns: site.columns,
            outputs: site.parts.iter().map(|part| part.rows).sum(),
            moduli: [modulus(Op::Forward)?, modulus(Op::Backward)?],
        })
    }

    /// Words of 32 bits of a row, and of the answer to it.
    pub(super) fn words(self, direction: Direction) -> (usize, usize) {
        let modulus = self.moduli[direction as usize];
        let (columns, outputs) = (modulus.words(self.columns as usize), modulus.words(self.outputs as usize));
        match direction {
            Direction::Forward => (columns, outputs),
            Direction::Backward => (outputs, columns),
        }
    }
}
