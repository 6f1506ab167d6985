//! Node numbers and node sets.

use super::MAX_NODES;

/// Number of a node in its tree, in insertion order from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u8);

impl NodeId {
    /// Returns the node with number `index`; `None` from [`MAX_NODES`] on.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|_| index < MAX_NODES).map(Self)
    }

    /// Returns the node's number, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A set of nodes of one tree, one bit per node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet(u64);

impl NodeSet {
    /// The empty set of nodes.
    pub const EMPTY: Self = Self(0);

    /// Returns the first `count` nodes, at most [`MAX_NODES`].
    #[must_use]
    pub fn first(count: usize) -> Self {
        let above = MAX_NODES.saturating_sub(count);
        // `checked_shr` refuses a shift by all 64 bits.
        Self(u32::try_from(above).ok().and_then(|above| u64::MAX.checked_shr(above)).unwrap_or(0))
    }

    /// Returns this set with `node` added.
    #[must_use]
    pub fn with(self, node: NodeId) -> Self {
        Self(self.0 | 1 << node.0)
    }

    /// True if the set contains `node`.
    #[must_use]
    pub fn contains(self, node: NodeId) -> bool {
        self.0 >> node.0 & 1 == 1
    }

    /// Returns the number of nodes in the set.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// True if the set has no nodes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over the nodes in the order of their numbers.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = NodeId> {
        (0..MAX_NODES).filter_map(NodeId::new).filter(move |&node| self.contains(node))
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().fold(Self::EMPTY, Self::with)
    }
}
