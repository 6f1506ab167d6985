//! Numbers of nodes, and sets of them.

use super::MAX_NODES;

/// A node's number in its tree: how many came before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u8);

impl NodeId {
    /// The node with so many before it; `None` beyond [`MAX_NODES`].
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|_| index < MAX_NODES).map(Self)
    }

    /// How many came before it.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A set of nodes of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet(u64);

impl NodeSet {
    /// No node.
    pub const EMPTY: Self = Self(0);

    /// The first `count` nodes, at most [`MAX_NODES`].
    #[must_use]
    pub fn first(count: usize) -> Self {
        let above = MAX_NODES.saturating_sub(count);
        // A shift by all bits is none.
        Self(u32::try_from(above).ok().and_then(|above| u64::MAX.checked_shr(above)).unwrap_or(0))
    }

    /// This set and `node`.
    #[must_use]
    pub fn with(self, node: NodeId) -> Self {
        Self(self.0 | 1 << node.0)
    }

    /// True if `node` is in it.
    #[must_use]
    pub fn contains(self, node: NodeId) -> bool {
        self.0 >> node.0 & 1 == 1
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The nodes in the order of their numbers.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = NodeId> {
        (0..MAX_NODES).filter_map(NodeId::new).filter(move |&node| self.contains(node))
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().fold(Self::EMPTY, Self::with)
    }
}
