//! Record of a block, stored beside its bytes.

use crate::namespace::{Chain, Namespace};

/// Identity of a block, and the time of its last use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRecord {
    /// Namespace in which the block may be shared.
    pub namespace: Namespace,
    /// Chain of the preceding prefix: [`Chain::root`], or [`chain`](Self::chain) of the block before.
    pub parent: Chain,
    /// Tokens of the block; always a full block.
    pub tokens: Box<[u32]>,
    /// Last use before the write, in seconds since 1970.
    pub used_at_s: u64,
}

impl BlockRecord {
    /// Returns the chain of the prefix that ends with this block: the parent of the blocks after it.
    #[must_use]
    pub fn chain(&self) -> Chain {
        self.parent.then(&self.tokens)
    }

    /// True if both records describe the same block, independent of its last use.
    pub(super) fn is_of_same_block(&self, other: &Self) -> bool {
        (self.namespace, self.parent, &self.tokens) == (other.namespace, other.parent, &other.tokens)
    }
}
