//! Where a sequence's keys and values are found: the base's up to where its adapter begins, the adapter's from there on.
//!
//! An activated LoRA changes nothing before its invocation, so what is before has the base's own keys and values, which whoever asks the base
//! may have left there. The block in which it begins, and all behind it, are the adapter's. They are known by the tokens before them and by
//! the place where it begins, for the same tokens go on differently where it begins elsewhere.

use crate::{Cache, Cursor, Namespace, NodeId, Prefix};

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct PrefixPath {
    /// Of what the adapter does not change.
    base: Namespace,
    /// Of what it does.
    own: Namespace,
    /// The token from which on it applies: 0 but for activated adapters, the largest number if never.
    begin: usize,
    /// Where the adapter's blocks begin.
    fork: usize,
}

impl PrefixPath {
    /// Of an adapter that applies everywhere, or of none.
    #[must_use]
    pub fn whole(own: Namespace) -> Self {
        Self { base: own, own, begin: 0, fork: 0 }
    }

    /// Of an adapter that applies from `begin` on, in blocks of `block_tokens`.
    #[must_use]
    pub fn activated(base: Namespace, own: Namespace, begin: usize, block_tokens: usize) -> Self {
        Self { base, own, begin, fork: begin - begin % block_tokens }
    }

    /// By which adapter it is, and for whom.
    #[must_use]
    pub fn own(&self) -> &Namespace {
        &self.own
    }

    /// Whether the adapter applies to the token at `position`.
    #[must_use]
    pub fn applies(&self, position: usize) -> bool {
        position >= self.begin
    }

    /// How many of `count` tokens from `position` on are computed alike.
    #[must_use]
    pub fn alike(&self, position: usize, count: usize) -> usize {
        if self.applies(position) { count } else { count.min(self.begin - position) }
    }

    /// The empty prefix.
    #[must_use]
    pub fn root(&self) -> Cursor {
        Cursor::root(if self.begin == 0 { self.own } else { self.base })
    }

    /// The cursor of the block at `position`, if it is the first of the adapter's and behind others.
    #[must_use]
    pub fn fork_at(&self, position: usize, tokens: &[u32]) -> Option<Cursor> {
        (self.begin > 0 && position == self.fork).then(|| self.forked(tokens))
    }

    /// Finds what the device has of the beginning of `tokens`; the caller holds it then.
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

    /// Goes on with what lower tiers have, as [`Cache::fetch`]; not from the base's on to the adapter's.
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
