//! Which executor computed the beginning of a prompt last: an estimate of whose prefix cache holds it.
//!
//! A block's key is a hash over its namespace and all tokens up to its end, so the longest known key is the longest known
//! beginning. It is a guess: the executor may have forgotten it, and a wrong guess costs time alone.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher as _, RandomState},
    sync::Mutex,
};

use crate::lock::lock;

/// Most blocks that are remembered, of all executors together.
const MAX_BLOCKS: usize = 65_536;
/// Most blocks of one prompt that are remembered.
const MAX_PROMPT_BLOCKS: usize = 512;

/// The blocks of a prompt, as they are remembered.
#[derive(Debug, Default)]
pub struct Blocks {
    keys: Vec<u64>,
    block_tokens: usize,
}

#[derive(Debug, Default)]
struct Table {
    /// Who computed a block last.
    of: HashMap<u64, usize>,
    /// The same blocks, oldest first.
    order: VecDeque<u64>,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Prefixes {
    hasher: RandomState,
    table: Mutex<Table>,
}

impl Prefixes {
    /// The whole blocks of `prompt`.
    #[must_use]
    pub fn blocks(&self, namespace: &[u8; 32], prompt: &[u32], block_tokens: u32) -> Blocks {
        let block_tokens = (block_tokens as usize).max(1);
        let mut key = self.hasher.hash_one(namespace);
        let keys = prompt.chunks_exact(block_tokens).take(MAX_PROMPT_BLOCKS).map(|block| {
            key = self.hasher.hash_one((key, block));
            key
        });
        Blocks { keys: keys.collect(), block_tokens }
    }

    /// How many of the first tokens the executor at `index` computed last.
    #[must_use]
    pub fn known_tokens(&self, blocks: &Blocks, index: usize) -> usize {
        let table = lock(&self.table);
        let is_its = |key: &u64| table.of.get(key) == Some(&index);
        let longest = blocks.keys.iter().rposition(is_its).map_or(0, |last| last + 1);
        longest * blocks.block_tokens
    }

    /// The executor at `index` computes them now.
    pub fn note(&self, blocks: &Blocks, index: usize) {
        let mut table = lock(&self.table);
        for key in &blocks.keys {
            if table.of.insert(*key, index).is_some() {
                continue;
            }
            table.order.push_back(*key);
            if table.order.len() > MAX_BLOCKS
                && let Some(oldest) = table.order.pop_front()
            {
                table.of.remove(&oldest);
            }
        }
    }

    /// The executor at `index` is another process now, and holds nothing.
    pub fn forget(&self, index: usize) {
        let mut table = lock(&self.table);
        let Table { of, order } = &mut *table;
        of.retain(|_, by| *by != index);
        order.retain(|key| of.contains_key(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_is_known_of_who_computed_it_last() {
        let prefixes = Prefixes::default();
        let prompt: Vec<u32> = (0..40).collect();
        let blocks = prefixes.blocks(&[1; 32], &prompt, 16);
        prefixes.note(&blocks, 1);
        assert_eq!((prefixes.known_tokens(&blocks, 0), prefixes.known_tokens(&blocks, 1)), (0, 32));
        let shorter = prefixes.blocks(&[1; 32], &[&prompt[..16], &[7; 16]].concat(), 16);
        assert_eq!(prefixes.known_tokens(&shorter, 1), 16);
        let foreign = prefixes.blocks(&[2; 32], &prompt, 16);
        assert_eq!(prefixes.known_tokens(&foreign, 1), 0, "namespaces share nothing");
        prefixes.note(&shorter, 0);
        assert_eq!(prefixes.known_tokens(&shorter, 0), 32);
        prefixes.forget(1);
        assert_eq!(prefixes.known_tokens(&blocks, 1), 0);
    }

    #[test]
    fn no_more_blocks_are_remembered_than_the_limit() {
        let prefixes = Prefixes::default();
        for number in 0..u32::try_from(MAX_BLOCKS / MAX_PROMPT_BLOCKS).unwrap() + 3 {
            let prompt = vec![number; MAX_PROMPT_BLOCKS + 5];
            prefixes.note(&prefixes.blocks(&[0; 32], &prompt, 1), 0);
        }
        let table = lock(&prefixes.table);
        assert_eq!((table.of.len(), table.order.len()), (MAX_BLOCKS, MAX_BLOCKS));
    }
}
