//! Path of a sequence's KV blocks: the base's namespace before the adapter begins, its own from there on.
//!
//! An activated LoRA changes nothing before its invocation. The blocks before it are the base's, and requests
//! of the base may have cached them. The block that contains the invocation, and all later ones, belong to
//! the adapter. The namespace of these blocks covers the earlier tokens and the invocation's position,
//! because equal tokens give other values if the adapter begins elsewhere.

use crate::{Cache, Cursor, Namespace, NodeId, Prefix};

/// Path of one sequence through the namespaces of base and adapter.
#[derive(Debug, Clone, Copy)]
pub struct PrefixPath {
    /// Namespace of blocks that the adapter does not change.
    base: Namespace,
    /// Namespace of blocks that the adapter changes.
    own: Namespace,
    /// First token to which the adapter applies: 0 unless activated, the maximum if it never applies.
    begin: usize,
    /// Number of tokens before the adapter's first block.
    fork: usize,
}

impl PrefixPath {
    /// Creates the path for an adapter that applies to all tokens, or for no adapter.
    #[must_use]
    pub fn whole(own: Namespace) -> Self {
        Self { base: own, own, begin: 0, fork: 0 }
    }

    /// Creates the path for an adapter that applies from token `begin` on, in blocks of `block_tokens`.
    #[must_use]
    pub fn activated(base: Namespace, own: Namespace, begin: usize, block_tokens: usize) -> Self {
        Self { base, own, begin, fork: begin - begin % block_tokens }
    }

    /// Returns the namespace of the adapter's own blocks.
    #[must_use]
    pub fn own(&self) -> &Namespace {
        &self.own
    }

    /// Whether the adapter applies to the token at `position`.
    #[must_use]
    pub fn applies(&self, position: usize) -> bool {
        position >= self.begin
    }

    /// Returns how many of `count` tokens from `position` on are alike: all with the adapter or all without.
    #[must_use]
    pub fn alike(&self, position: usize, count: usize) -> usize {
        if self.applies(position) { count } else { count.min(self.begin - position) }
    }

    /// Returns the cursor of the empty prefix.
    #[must_use]
    pub fn root(&self) -> Cursor {
        Cursor::root(if self.begin == 0 { self.own } else { self.base })
    }

    /// Returns the cursor for the block at `position`, if it is the adapter's first block after base blocks.
    #[must_use]
    pub fn fork_at(&self, position: usize, tokens: &[u32]) -> Option<Cursor> {
        (self.begin > 0 && position == self.fork).then(|| self.forked(tokens))
    }

    /// Finds the longest run of device blocks for the beginning of `tokens`, which the caller then holds.
    pub fn lookup(&self, kv: &mut Cache, tokens: &[u32]) -> Prefix {
        if self.begin == 0 {
            return kv.lookup(self.own, tokens);
        }
        let end = self.fork.min(tokens.len());
        let mut found = kv.lookup(self.base, &tokens[..end]);
        if kv.tokens_in(found.blocks.len()) == self.fork {
            let rest = kv.lookup(self.forked(tokens), &tokens[end..]);
            found.blocks.extend(rest.blocks);
            found.cursor = rest.cursor;
        }
        found
    }

    /// Extends `found` by lower tiers, as [`Cache::fetch`], but never from base blocks on to the adapter's.
    pub fn fetch(&self, kv: &mut Cache, found: &mut Prefix, tokens: &[u32]) -> Vec<NodeId> {
        let at = kv.tokens_in(found.blocks.len());
        let end = if at < self.fork { self.fork.min(tokens.len()) } else { tokens.len() };
        let mut rest = Prefix { blocks: Vec::new(), cursor: found.cursor };
        let nodes = kv.fetch(&mut rest, &tokens[at..end]);
        found.blocks.extend(rest.blocks);
        nodes
    }

    fn forked(&self, tokens: &[u32]) -> Cursor {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 activated kv namespace v1");
        hasher.update(&self.own.sharing).update(&(self.begin as u64).to_le_bytes());
        for token in &tokens[..self.fork] {
            hasher.update(&token.to_le_bytes());
        }
        Cursor::root(Namespace { sharing: *hasher.finalize().as_bytes(), ..self.own })
    }
}
