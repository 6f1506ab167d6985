//! What a block holds, as kept beside its bytes.

use crate::namespace::{Chain, Namespace};

/// What a block holds, and when somebody last had use for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRecord {
    /// Who may share it.
    pub namespace: Namespace,
    /// The prefix before it: [`Chain::root`] at the beginning, else [`chain`](Self::chain) of the block before.
    pub parent: Chain,
    /// Its own tokens, a whole block of them.
    pub tokens: Box<[u32]>,
    /// Last use as known when it was written, in seconds since 1970.
    pub used_at_s: u64,
}

impl BlockRecord {
    /// The prefix that ends with this block: the parent of those after it.
    #[must_use]
    pub fn chain(&self) -> Chain {
        self.parent.then(&self.tokens)
    }

    /// True if both are of one block, whenever it was used.
    pub(super) fn is_of_same_block(&self, other: &Self) -> bool {
        (self.namespace, self.parent, &self.tokens) == (other.namespace, other.parent, &other.tokens)
    }
}
