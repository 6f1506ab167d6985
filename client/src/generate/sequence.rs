//! The state of a running sequence, and the namespaces of its KV blocks.

use std::sync::Arc;

use kv_cache::{Cursor, Namespace, PrefixPath};
use model::{deltas::prepared::PreparedAdapter, forward::BLOCK_TOKENS};
use types::{BlockId, TenantId};

use crate::split_model::ClientAdapter;

pub(super) struct SplitSequence<'a> {
    pub(super) own: Option<&'a ClientAdapter>,
    pub(super) trail: PrefixPath,
    pub(super) tokens: Vec<u32>,
    /// Number of tokens with computed keys and values.
    pub(super) computed: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Blocks of all tree segments but the first, starting with the block in which the sequence ends.
    pub(super) forks: Vec<Vec<BlockId>>,
    /// Position in the prefix tree after the last inserted full block.
    pub(super) cursor: Cursor,
}

impl SplitSequence<'_> {
    /// Returns the adapter, if it applies to the next token to be computed.
    pub(super) fn adapter(&self) -> Option<&Arc<PreparedAdapter>> {
        let applies = self.trail.applies(self.computed);
        self.own.filter(|_| applies).map(|adapter| &adapter.prepared)
    }
}

/// Returns the namespaces of a prompt's KV blocks; an activated adapter begins where it is invoked.
pub(super) fn trail(adapter: Option<&ClientAdapter>, prompt: &[u32]) -> PrefixPath {
    let of = |adapter| Namespace { adapter, sharing: [0; 32], owner: TenantId::EVERYBODY };
    let own = of(adapter.map(|adapter| adapter.id));
    match adapter.and_then(|adapter| adapter.prepared.invocation()) {
        None => PrefixPath::whole(own),
        Some(invocation) => PrefixPath::activated(of(None), own, invocation.begin(prompt), BLOCK_TOKENS),
    }
}
