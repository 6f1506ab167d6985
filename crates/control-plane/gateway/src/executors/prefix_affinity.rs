//! Records which executor last computed the beginning of a prompt ([`scheduling::routing::prefixes`]).

use std::{hash::RandomState, sync::Mutex};

use scheduling::routing::prefixes::Prefixes as Table;
pub(crate) use scheduling::routing::prefixes::{Blocks, KnownPrefix};

use crate::lock::lock;

const MAX_BLOCKS: usize = 65_536;
const MAX_PROMPT_BLOCKS: usize = 512;

/// Remembered prefixes of all executors. A random seed keeps clients from predicting hash collisions.
#[derive(Debug)]
pub(crate) struct Prefixes {
    hasher: RandomState,
    table: Mutex<Table>,
}

impl Default for Prefixes {
    fn default() -> Self {
        Self { hasher: RandomState::default(), table: Mutex::new(Table::new(MAX_BLOCKS)) }
    }
}

impl Prefixes {
    /// Returns the complete blocks of `prompt`.
    #[must_use]
    pub(crate) fn blocks(&self, namespace: &[u8; 32], prompt: &[u32], block_tokens: u32) -> Blocks {
        let tokens = (block_tokens as usize).max(1);
        Blocks::of(&self.hasher, namespace, prompt, (tokens, tokens, MAX_PROMPT_BLOCKS))
    }

    /// Returns, per executor, the length in tokens of the prompt prefix that this executor was the most
    /// recent to compute.
    #[must_use]
    pub(crate) fn known(&self, blocks: &Blocks) -> KnownPrefix {
        lock(&self.table).known(blocks)
    }

    /// Records that the executor at `index` computes these blocks.
    pub(crate) fn note(&self, blocks: &Blocks, index: usize) {
        lock(&self.table).note(blocks, index);
    }

    /// Forgets the executor at `index`, which is now another process with an empty cache.
    pub(crate) fn forget(&self, index: usize) {
        lock(&self.table).forget(index);
    }
}
