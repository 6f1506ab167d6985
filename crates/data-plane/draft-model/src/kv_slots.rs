//! KV cache of several sequences in a bounded pool of blocks. A full pool evicts the least recently read
//! sequence, which is computed again when it is needed.

use std::collections::BTreeMap;

use model::forward::BLOCK_TOKENS;
use types::BlockId;

/// Identifier of a sequence, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SequenceId(u64);

#[derive(Debug, Default)]
pub(crate) struct CachedSequence {
    /// Tokens with KV entries.
    pub(crate) tokens: Vec<u32>,
    pub(crate) blocks: Vec<BlockId>,
    /// Value of the read counter at the last read.
    read_at: u64,
}

impl CachedSequence {
    /// Returns the length of the common prefix with `text`, without its last token, whose logits are needed.
    pub(crate) fn known(&self, text: &[u32]) -> usize {
        let same = self.tokens.iter().zip(text).take_while(|(a, b)| a == b).count();
        same.min(text.len().saturating_sub(1))
    }
}

#[derive(Debug)]
pub(crate) struct DraftSequences {
    texts: BTreeMap<SequenceId, CachedSequence>,
    free: Vec<BlockId>,
    blocks: usize,
    names: u64,
    readings: u64,
}

impl DraftSequences {
    pub(crate) fn new(blocks: usize) -> Self {
        let free = (0..u32::try_from(blocks).unwrap_or(u32::MAX)).map(BlockId).collect();
        Self { texts: BTreeMap::new(), free, blocks, names: 0, readings: 0 }
    }

    pub(crate) fn open(&mut self) -> SequenceId {
        self.names += 1;
        let id = SequenceId(self.names);
        self.texts.insert(id, CachedSequence::default());
        id
    }

    pub(crate) fn close(&mut self, id: SequenceId) {
        self.free.extend(self.texts.remove(&id).into_iter().flat_map(|read| read.blocks));
    }

    pub(crate) fn most_tokens(&self) -> usize {
        self.blocks * BLOCK_TOKENS
    }

    /// Returns the cached prefix of a sequence, or `None` if the sequence is closed.
    pub(crate) fn get(&self, id: SequenceId) -> Option<&CachedSequence> {
        self.texts.get(&id)
    }

    /// Records that all of `text` is in the cache.
    pub(crate) fn note(&mut self, id: SequenceId, text: &[u32]) {
        if let Some(read) = self.texts.get_mut(&id) {
            read.tokens.clear();
            read.tokens.extend_from_slice(text);
        }
    }

    /// Returns the sequence with blocks for `tokens` tokens, after evicting others if necessary. Returns
    /// `None` if the pool is too small or the sequence is closed.
    pub(crate) fn with_room(&mut self, id: SequenceId, tokens: usize) -> Option<&mut CachedSequence> {
        let needed = tokens.div_ceil(BLOCK_TOKENS);
        if needed > self.blocks || !self.texts.contains_key(&id) {
            return None;
        }
        let missing = |all: &Self| {
            needed.saturating_sub(all.texts.get(&id).map_or(0, |read| read.blocks.len())) > all.free.len()
        };
        while missing(self) {
            let others = self.texts.iter().filter(|(other, read)| **other != id && !read.blocks.is_empty());
            let oldest = others.min_by_key(|(_, read)| read.read_at).map(|(other, _)| *other);
            let gives = oldest.and_then(|other| self.texts.get_mut(&other))?;
            gives.tokens.clear();
            self.free.append(&mut gives.blocks);
        }
        self.readings += 1;
        let read = self.texts.get_mut(&id)?;
        read.read_at = self.readings;
        let from = self.free.len() - needed.saturating_sub(read.blocks.len());
        read.blocks.extend(self.free.drain(from..));
        Some(read)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests")]

    use super::*;

    fn read(texts: &mut DraftSequences, id: SequenceId, tokens: usize) -> usize {
        let read = texts.with_room(id, tokens).unwrap();
        read.tokens.resize(tokens, 1);
        read.blocks.len()
    }

    #[test]
    fn the_text_that_was_read_longest_ago_gives_way_and_comes_back() {
        let mut texts = DraftSequences::new(4);
        let [a, b, c] = std::array::from_fn(|_| texts.open());
        assert_eq!((read(&mut texts, a, 20), read(&mut texts, b, 17)), (2, 2));
        assert_eq!(read(&mut texts, a, 32), 2, "a is the younger now");
        assert_eq!(read(&mut texts, c, 5), 1);
        assert!(texts.get(b).unwrap().tokens.is_empty() && texts.get(a).unwrap().tokens.len() == 32);
        assert_eq!(read(&mut texts, b, 17), 2);
        assert!(texts.get(a).unwrap().blocks.is_empty(), "c is younger than a");
        texts.close(b);
        texts.close(c);
        assert_eq!((texts.free.len(), texts.most_tokens()), (4, 64));
        assert!(texts.with_room(a, 65).is_none() && texts.with_room(b, 1).is_none());
    }

    #[test]
    fn the_last_token_of_a_text_is_always_read_anew() {
        let read = CachedSequence { tokens: vec![1, 2, 3, 4], ..CachedSequence::default() };
        assert_eq!(
            [&[1, 2, 3, 4, 5][..], &[1, 2, 3, 4], &[1, 2, 9], &[]].map(|text| read.known(text)),
            [4, 3, 2, 0]
        );
    }
}
