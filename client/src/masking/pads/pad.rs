//! A pad, and the shape of a site that pads are of.

use shmproto::layer::draw::{Draw, Key};
use zeroize::Zeroize as _;

use crate::masking::Direction;

/// A pad: numbers that cover one row, once, and what the site makes of them. Overwritten when it is dropped.
pub struct Pad {
    key: Key,
    effect: Vec<u64>,
}

impl std::fmt::Debug for Pad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pad(..)")
    }
}

impl Pad {
    pub(super) fn new(key: Key, effect: Vec<u64>) -> Self {
        Self { key, effect }
    }

    /// Writes its numbers, as words of 32 bits.
    pub(super) fn fill(&self, words: &mut [f32]) {
        Draw { key: self.key.clone(), first: 0 }.fill(0, words.len().max(1), words);
    }

    /// What the site makes of them.
    pub(super) fn effect(&self) -> &[u64] {
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
}

impl Shape {
    /// Numbers of a row, and of the answer to it.
    pub(super) fn widths(self, direction: Direction) -> (usize, usize) {
        let (columns, outputs) = (self.columns as usize, self.outputs as usize);
        match direction {
            Direction::Forward => (columns, outputs),
            Direction::Backward => (outputs, columns),
        }
    }
}
