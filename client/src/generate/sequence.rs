//! A sequence on its way, and where its keys and values are kept.

use std::sync::Arc;

use cache::{Cursor, Namespace, Trail};
use ids::{BlockId, TenantId};
use model::{deltas::prepared::PreparedAdapter, forward::BLOCK_TOKENS};

use crate::split_model::OwnAdapter;

/// A sequence on its way.
pub(super) struct Sequence<'a> {
    pub(super) own: Option<&'a OwnAdapter>,
    pub(super) trail: Trail,
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

impl Sequence<'_> {
    /// The adapter, if it applies to the next token to be computed.
    pub(super) fn adapter(&self) -> Option<&Arc<PreparedAdapter>> {
        let applies = self.trail.applies(self.computed);
        self.own.filter(|_| applies).map(|adapter| &adapter.prepared)
    }
}

/// Where keys and values of a prompt are: an activated adapter begins where it is invoked.
pub(super) fn trail(adapter: Option<&OwnAdapter>, prompt: &[u32]) -> Trail {
    let of = |adapter| Namespace { adapter, sharing: [0; 32], owner: TenantId::EVERYBODY };
    let own = of(adapter.map(|adapter| adapter.id));
    match adapter.and_then(|adapter| adapter.prepared.invocation()) {
        None => Trail::whole(own),
        Some(invocation) => Trail::activated(of(None), own, invocation.begin(prompt), BLOCK_TOKENS),
    }
}
