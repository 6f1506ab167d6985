//! A sequence on its way, and where its keys and values are kept.

use std::sync::Arc;

use kv_cache::{Cursor, Namespace, PrefixPath};
use model::{deltas::prepared::PreparedAdapter, forward::BLOCK_TOKENS};
use types::{BlockId, TenantId};

use crate::split_model::ClientAdapter;

/// A sequence on its way.
pub(super) struct SplitSequence<'a> {
    pub(super) own: Option<&'a ClientAdapter>,
    pub(super) trail: PrefixPath,
    /// Virtual tokens, prompt, completion.
    pub(super) tokens: Vec<u32>,
    /// How many of them have keys and values.
    pub(super) computed: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Blocks of a tree's segments but the first, from the block on that the sequence ends in.
    pub(super) forks: Vec<Vec<BlockId>>,
    /// Behind the last full block that was offered to later sequences.
    pub(super) cursor: Cursor,
}

impl SplitSequence<'_> {
    /// The adapter, if it applies to the next token to be computed.
    pub(super) fn adapter(&self) -> Option<&Arc<PreparedAdapter>> {
        let applies = self.trail.applies(self.computed);
        self.own.filter(|_| applies).map(|adapter| &adapter.prepared)
    }
}

/// Where keys and values of a prompt are: an activated adapter begins where it is invoked.
pub(super) fn trail(adapter: Option<&ClientAdapter>, prompt: &[u32]) -> PrefixPath {
    let of = |adapter| Namespace { adapter, sharing: [0; 32], owner: TenantId::EVERYBODY };
    let own = of(adapter.map(|adapter| adapter.id));
    match adapter.and_then(|adapter| adapter.prepared.invocation()) {
        None => PrefixPath::whole(own),
        Some(invocation) => PrefixPath::activated(of(None), own, invocation.begin(prompt), BLOCK_TOKENS),
    }
}
