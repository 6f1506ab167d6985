//! Which executor computed the beginning of a prompt last ([`scheduling::routing::prefixes`]).

use std::{hash::RandomState, sync::Mutex};

use scheduling::routing::prefixes::Prefixes as Table;
pub use scheduling::routing::prefixes::{Blocks, KnownPrefix};

use crate::lock::lock;

/// Most blocks that are remembered, of all executors together.
const MAX_BLOCKS: usize = 65_536;
/// Most blocks of one prompt that are remembered.
const MAX_PROMPT_BLOCKS: usize = 512;

/// What is remembered of all executors. Keys are hashed in a way that nobody outside can foresee.
#[derive(Debug)]
pub struct Prefixes {
    hasher: RandomState,
    table: Mutex<Table>,
}

impl Default for Prefixes {
    fn default() -> Self {
        Self { hasher: RandomState::default(), table: Mutex::new(Table::new(MAX_BLOCKS)) }
    }
}

impl Prefixes {
    /// The whole blocks of `prompt`.
    #[must_use]
    pub fn blocks(&self, namespace: &[u8; 32], prompt: &[u32], block_tokens: u32) -> Blocks {
        let tokens = (block_tokens as usize).max(1);
        Blocks::of(&self.hasher, namespace, prompt, (tokens, tokens, MAX_PROMPT_BLOCKS))
    }

    /// How many of the first tokens each executor computed last.
    #[must_use]
    pub fn known(&self, blocks: &Blocks) -> KnownPrefix {
        lock(&self.table).known(blocks)
    }

    /// The executor at `index` computes them now.
    pub fn note(&self, blocks: &Blocks, index: usize) {
        lock(&self.table).note(blocks, index);
    }

    /// The executor at `index` is another process now, and holds nothing.
    pub fn forget(&self, index: usize) {
        lock(&self.table).forget(index);
    }
}
