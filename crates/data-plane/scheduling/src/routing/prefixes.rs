//! Who computed the beginning of a prompt last: an estimate of whose prefix cache holds it.
//!
//! A block's key is a hash over its namespace and everything up to its end, so the longest known key is the longest known
//! beginning. It is a guess: whoever computed it may have forgotten it, and a wrong guess costs time alone.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, Hash},
};

/// The blocks of a prompt, as they are remembered.
#[derive(Debug, Default)]
pub struct Blocks {
    keys: Vec<u64>,
    tokens_each: usize,
}

impl Blocks {
    /// The first whole pieces of `length` items of a prompt, `most` at most, of `tokens_each` tokens each. Namespaces share
    /// nothing.
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

/// How many of a prompt's first tokens each computed last.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct KnownPrefix(Vec<(usize, u64)>);

impl KnownPrefix {
    /// Tokens that `who` computed.
    #[must_use]
    pub fn tokens(&self, who: usize) -> u64 {
        self.0.iter().find(|(one, _)| *one == who).map_or(0, |(_, tokens)| *tokens)
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct Prefixes {
    /// Most blocks, of everybody together.
    max_blocks: usize,
    /// Who computed a block last.
    of: HashMap<u64, usize>,
    /// The same blocks, oldest first.
    order: VecDeque<u64>,
}

impl Prefixes {
    /// Nothing yet, and never more than `max_blocks`.
    #[must_use]
    pub fn new(max_blocks: usize) -> Self {
        Self { max_blocks, of: HashMap::new(), order: VecDeque::new() }
    }

    /// How many of the first tokens everybody computed last.
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

    /// `who` computes them now.
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

    /// `who` is another process now, and holds nothing.
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
