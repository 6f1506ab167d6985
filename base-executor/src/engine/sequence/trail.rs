//! Whose what a sequence computes is: the base's up to where its adapter begins, the adapter's from there on.
//!
//! An activated LoRA changes nothing before its invocation, so what is before has the base's own keys and values, which whoever asks the base
//! may have left, and finds. The block in which it begins, and all behind it, are the adapter's; they are known by the tokens before them and
//! by the place where it begins, since the same tokens go on differently where it begins elsewhere.

use std::ops::Range;

use cache::{Cache, Cursor, Namespace, NodeId, Prefix};
use model::forward::BLOCK_TOKENS;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct Trail {
    /// Of what the adapter does not change.
    base: Namespace,
    /// Of what it does.
    own: Namespace,
    /// The token from which on it applies: 0 in all adapters but activated ones, the largest number if never.
    begin: usize,
}

impl Trail {
    /// Of an adapter that applies everywhere, or of none.
    pub(in crate::engine) fn whole(own: Namespace) -> Self {
        Self { base: own, own, begin: 0 }
    }

    /// Of an adapter that applies from `begin` on.
    pub(in crate::engine) fn activated(base: Namespace, own: Namespace, begin: usize) -> Self {
        Self { base, own, begin }
    }

    /// Whose it is.
    pub(super) fn own(&self) -> &Namespace {
        &self.own
    }

    /// Whether the adapter applies to the token at `position`.
    pub(super) fn applies(&self, position: usize) -> bool {
        position >= self.begin
    }

    /// How many of `count` tokens from `computed` on are computed alike.
    pub(super) fn alike(&self, computed: usize, count: usize) -> usize {
        if computed < self.begin { count.min(self.begin - computed) } else { count }
    }

    /// Where blocks of its own begin.
    fn fork(&self) -> usize {
        self.begin / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// Where the block that begins at `position` is offered, where that is not simply behind the one before.
    pub(super) fn root_at(&self, position: usize, tokens: &[u32]) -> Option<Cursor> {
        (position == self.fork() && self.begin > 0).then(|| self.tail(tokens))
    }

    /// The empty prefix of all.
    pub(super) fn root(&self) -> Cursor {
        Cursor::root(if self.begin == 0 { self.own } else { self.base })
    }

    /// Finds what the device has of the beginning of `tokens`.
    pub(super) fn lookup(&self, kv: &mut Cache, tokens: &[u32]) -> Prefix {
        if self.begin == 0 {
            return kv.lookup(self.own, tokens);
        }
        let head = &tokens[..self.fork().min(tokens.len())];
        let mut found = kv.lookup(self.base, head);
        if found.blocks.len() * BLOCK_TOKENS == self.fork() {
            let rest = kv.lookup_behind(self.tail(tokens), &tokens[head.len()..]);
            found.blocks.extend(rest.blocks);
            found.cursor = rest.cursor;
        }
        found
    }

    /// Goes on with what lower tiers have, as [`Cache::fetch`].
    pub(super) fn fetch(&self, kv: &mut Cache, found: &mut Prefix, tokens: &[u32]) -> Vec<NodeId> {
        if self.begin == 0 {
            return kv.fetch(found, tokens);
        }
        let fork = self.fork().min(tokens.len());
        let mut nodes = Vec::new();
        if found.blocks.len() * BLOCK_TOKENS < fork {
            nodes = kv.fetch(found, &tokens[..fork]);
        }
        if found.blocks.len() * BLOCK_TOKENS >= self.fork() {
            let cursor = if nodes.is_empty() { found.cursor } else { self.tail(tokens) };
            nodes.extend(kv.fetch_behind(cursor, found, tokens));
        }
        nodes
    }

    fn tail(&self, tokens: &[u32]) -> Cursor {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 activated kv namespace v1");
        hasher.update(&self.own.sharing).update(&(self.begin as u64).to_le_bytes());
        for token in &tokens[..self.fork()] {
            hasher.update(&token.to_le_bytes());
        }
        Cursor::root(Namespace { sharing: *hasher.finalize().as_bytes(), ..self.own })
    }
}
