//! Remembers which executor computed a prompt's beginning last, to estimate whose prefix cache holds it.
//!
//! A block's key is a hash over its namespace and all items up to its end, so the longest known key is the
//! longest known prefix. The executor may have evicted the blocks since; a wrong estimate only costs time.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, Hash},
};

/// Keys of a prompt's blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    keys: Vec<u64>,
    tokens_each: usize,
}

impl Blocks {
    /// Hashes the first complete blocks of a prompt: `length` items each, at most `most` blocks, which stand
    /// for `tokens_each` tokens each. Equal prompts in different namespaces share no key.
    #[must_use]
    pub fn of<T: Hash>(
        hasher: &impl BuildHasher,
        namespace: impl Hash,
        prompt: &[T],
        (length, tokens_each, most): (usize, usize, usize),
    ) -> Self {
        let mut key = hasher.hash_one(namespace);
        let keys = prompt.chunks_exact(length.max(1)).take(most).map(|block| {
            key = hasher.hash_one((key, block));
            key
        });
        Self { keys: keys.collect(), tokens_each }
    }
}

/// Tokens at a prompt's beginning that each executor computed last.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct KnownPrefix(Vec<(usize, u64)>);

impl KnownPrefix {
    /// Returns the tokens that executor `who` computed.
    #[must_use]
    pub fn tokens(&self, who: usize) -> u64 {
        self.0.iter().find(|(one, _)| *one == who).map_or(0, |(_, tokens)| *tokens)
    }
}

/// Map from blocks to the executors that computed them last.
#[derive(Debug)]
pub struct Prefixes {
    max_blocks: usize,
    /// Executor that computed each block last.
    of: HashMap<u64, usize>,
    /// Keys of all blocks, oldest first.
    order: VecDeque<u64>,
}

impl Prefixes {
    /// Creates an empty map of at most `max_blocks` blocks.
    #[must_use]
    pub fn new(max_blocks: usize) -> Self {
        Self { max_blocks, of: HashMap::new(), order: VecDeque::new() }
    }

    /// Returns how many tokens of the prompt's beginning each executor computed last.
    #[must_use]
    pub fn known(&self, blocks: &Blocks) -> KnownPrefix {
        let mut known: Vec<(usize, u64)> = Vec::new();
        for (index, key) in blocks.keys.iter().enumerate() {
            let Some(who) = self.of.get(key) else { continue };
            let tokens = ((index + 1) * blocks.tokens_each) as u64;
            match known.iter_mut().find(|(one, _)| one == who) {
                Some((_, longest)) => *longest = tokens,
                None => known.push((*who, tokens)),
            }
        }
        KnownPrefix(known)
    }

    /// Records that executor `who` computes the blocks now.
    pub fn note(&mut self, blocks: &Blocks, who: usize) {
        for key in &blocks.keys {
            if self.of.insert(*key, who).is_some() {
                continue;
            }
            self.order.push_back(*key);
            if self.order.len() > self.max_blocks
                && let Some(oldest) = self.order.pop_front()
            {
                self.of.remove(&oldest);
            }
        }
    }

    /// Forgets executor `who`, whose process was replaced and holds no blocks.
    pub fn forget(&mut self, who: usize) {
        let Self { of, order, .. } = self;
        of.retain(|_, by| *by != who);
        order.retain(|key| of.contains_key(key));
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;

    fn blocks(namespace: u8, prompt: &[u32]) -> Blocks {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        Blocks::of(&hasher, namespace, prompt, (16, 16, 512))
    }

    #[test]
    fn the_longest_beginning_is_known_of_who_computed_it_last() {
        let mut prefixes = Prefixes::new(1 << 10);
        let prompt: Vec<u32> = (0..40).collect();
        prefixes.note(&blocks(1, &prompt), 1);
        let known = |prefixes: &Prefixes, blocks: &Blocks, who| prefixes.known(blocks).tokens(who);
        let whole = blocks(1, &prompt);
        assert_eq!((known(&prefixes, &whole, 0), known(&prefixes, &whole, 1)), (0, 32));
        let shorter = blocks(1, &[&prompt[..16], &[7; 16]].concat());
        assert_eq!(known(&prefixes, &shorter, 1), 16);
        assert_eq!(known(&prefixes, &blocks(2, &prompt), 1), 0, "namespaces share nothing");
        prefixes.note(&shorter, 0);
        assert_eq!(known(&prefixes, &shorter, 0), 32);
        prefixes.forget(1);
        assert_eq!(known(&prefixes, &whole, 1), 0);
    }

    #[test]
    fn no_more_blocks_are_remembered_than_the_limit() {
        let mut prefixes = Prefixes::new(1_000);
        for number in 0..100 {
            prefixes.note(&blocks(0, &vec![number; 16 * 20]), 0);
        }
        assert_eq!((prefixes.of.len(), prefixes.order.len()), (1_000, 1_000));
    }
}
