//! A tree of draft tokens.
//!
//! The root is the last verified token and is not a node, because no drafter predicted it. Node numbers
//! follow insertion order, so parents come before their children and a growing tree keeps its numbers. A tree
//! is a set of prefixes: equal siblings are one node.
//!
//! # Layout
//!
//! - `nodes`: node numbers and node sets. `segments`: the layout of a tree in the rows of a pass.

mod nodes;
mod segments;
#[cfg(test)]
pub(crate) mod tests;

pub use self::{
    nodes::{NodeId, NodeSet},
    segments::{RowSpan, Segment, Segments},
};

/// Maximum number of nodes of a tree. A node set is one 64-bit word.
pub const MAX_NODES: usize = 64;

/// A token tree as a structure of arrays: entry `i` of each array belongs to node `i`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenTree {
    tokens: Vec<u32>,
    /// `None` for children of the root.
    parents: Vec<Option<NodeId>>,
    /// Number of tokens after the root: 1 for children of the root.
    depths: Vec<usize>,
    /// Natural logarithms of the token probabilities.
    logprobs: Vec<f64>,
    /// Products of the probabilities on the path from the root (EdgeLLM's C).
    confidences: Vec<f64>,
    /// Nodes on the path from the root, including the node itself.
    paths: Vec<NodeSet>,
}

impl TokenTree {
    /// Creates a tree of only the root.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of nodes, without the root.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True if the tree has only its root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// True if the tree has [`MAX_NODES`] nodes.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= MAX_NODES
    }

    /// Adds draft token `token` after `parent` (`None`: the root) with a probability, which is clamped to 0
    /// to 1. An equal child remains unchanged and is returned. Returns `None` if the tree is full.
    ///
    /// # Panics
    /// If `parent` belongs to another tree, which is a programmer's error.
    pub fn push(&mut self, parent: Option<NodeId>, token: u32, probability: f64) -> Option<NodeId> {
        if let Some(known) = self.child(parent, token) {
            return Some(known);
        }
        let node = NodeId::new(self.len())?;
        let probability = if probability > 0.0 { probability.min(1.0) } else { 0.0 };
        let path = parent.map_or(NodeSet::EMPTY, |parent| self.path(parent));
        self.depths.push(self.depth(parent) + 1);
        self.confidences.push(self.confidence(parent) * probability);
        self.tokens.push(token);
        self.parents.push(parent);
        self.logprobs.push(probability.ln());
        self.paths.push(path.with(node));
        Some(node)
    }

    /// Iterates over all nodes, parents before their children.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        NodeSet::first(self.len()).iter()
    }

    /// Iterates over the children of `parent` in insertion order.
    pub fn children(&self, parent: Option<NodeId>) -> impl Iterator<Item = NodeId> {
        self.nodes().filter(move |&node| self.parent(node) == parent)
    }

    /// Returns the child of `parent` with draft token `token`.
    #[must_use]
    pub fn child(&self, parent: Option<NodeId>, token: u32) -> Option<NodeId> {
        self.children(parent).find(|&node| self.token(node) == token)
    }

    /// Iterates over the nodes without children; each is the end of a branch.
    pub fn leaves(&self) -> impl Iterator<Item = NodeId> {
        let inner: NodeSet = self.nodes().filter_map(|node| self.parent(node)).collect();
        self.nodes().filter(move |&node| !inner.contains(node))
    }

    /// Returns the draft token of `node`.
    #[must_use]
    pub fn token(&self, node: NodeId) -> u32 {
        self.tokens[node.index()]
    }

    /// Returns the parent of `node`; `None` for the root.
    #[must_use]
    pub fn parent(&self, node: NodeId) -> Option<NodeId> {
        self.parents[node.index()]
    }

    /// Returns the number of tokens after the root; 0 for the root.
    #[must_use]
    pub fn depth(&self, node: Option<NodeId>) -> usize {
        node.map_or(0, |node| self.depths[node.index()])
    }

    /// Returns the natural logarithm of the token's probability, given its parent.
    #[must_use]
    pub fn log_probability(&self, node: NodeId) -> f64 {
        self.logprobs[node.index()]
    }

    /// Returns the product of the probabilities after the last verified token; 1 for the root.
    #[must_use]
    pub fn confidence(&self, node: Option<NodeId>) -> f64 {
        node.map_or(1.0, |node| self.confidences[node.index()])
    }

    /// Returns EdgeLLM's T_c (§III-C, L-08): the highest confidence of any branch; 1 for a root alone.
    #[must_use]
    pub fn tree_confidence(&self) -> f64 {
        self.leaves().map(|leaf| self.confidence(Some(leaf))).reduce(f64::max).unwrap_or(1.0)
    }

    /// Returns the confidence of the best branch after one more token of its mean probability; 1 if empty.
    #[must_use]
    pub fn next_confidence(&self) -> f64 {
        let best =
            self.leaves().max_by(|&a, &b| self.confidence(Some(a)).total_cmp(&self.confidence(Some(b))));
        best.map_or(1.0, |leaf| {
            let confidence = self.confidence(Some(leaf));
            confidence * confidence.powf(1.0 / self.depth(Some(leaf)) as f64)
        })
    }

    /// Iterates from the root over the likeliest child of each node; the first of equal children wins.
    pub fn likeliest_branch(&self) -> impl Iterator<Item = NodeId> {
        let likelier = |a, b| if self.confidence(Some(b)) > self.confidence(Some(a)) { b } else { a };
        let behind = move |parent| self.children(parent).reduce(likelier);
        std::iter::successors(behind(None), move |&node| behind(Some(node)))
    }

    /// Returns the nodes from the root to `node`, including `node`, in the order of numbers and depths.
    #[must_use]
    pub fn path(&self, node: NodeId) -> NodeSet {
        self.paths[node.index()]
    }

    /// Returns the `count` nodes with the highest confidence, which include the ancestors of each.
    #[must_use]
    pub fn likeliest(&self, count: usize) -> NodeSet {
        let mut order: Vec<NodeId> = self.nodes().collect();
        // The sort is stable, so parents stay before children of equal confidence.
        order.sort_by(|&a, &b| self.confidence(Some(b)).total_cmp(&self.confidence(Some(a))));
        order.into_iter().take(count).collect()
    }

    /// Returns the tree of the `kept` nodes, renumbered in order. Nodes without kept parents are dropped.
    #[must_use]
    pub fn pruned(&self, kept: NodeSet) -> Self {
        self.grafted(None, kept).tree
    }

    /// Returns the tree after the target's tokens `said`, accepted ones and its own (L-13). The node at the
    /// end of `said` becomes the root; only its descendants survive. `None` if `said` leaves the tree.
    #[must_use]
    pub fn rerooted(&self, said: &[u32]) -> Option<RerootedTree> {
        let root = said.iter().try_fold(None, |at, &token| self.child(at, token).map(Some))?;
        let behind = |&node: &NodeId| root.is_none_or(|root| node != root && self.path(node).contains(root));
        Some(self.grafted(root, self.nodes().filter(behind).collect()))
    }

    /// Returns the `kept` nodes that reach `root` through kept nodes only, as a tree after `root`.
    fn grafted(&self, root: Option<NodeId>, kept: NodeSet) -> RerootedTree {
        let mut grafted = RerootedTree { root, ..RerootedTree::default() };
        for node in kept.iter().filter(|node| node.index() < self.len()) {
            let parent = self.parent(node);
            let to = if parent == root {
                Some(None)
            } else {
                parent.and_then(|parent| grafted.new_id(parent)).map(Some)
            };
            if let Some(to) = to {
                grafted.tree.push(to, self.token(node), self.log_probability(node).exp());
                grafted.kept.push(node);
            }
        }
        grafted
    }
}

/// A tree after its root moved to one of its nodes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RerootedTree {
    /// The surviving nodes, renumbered.
    pub tree: TokenTree,
    /// Former number of each surviving node, by which data kept per node can be moved.
    pub kept: Vec<NodeId>,
    /// Former number of the new root; `None` if the root is unchanged.
    pub root: Option<NodeId>,
}

impl RerootedTree {
    /// Returns the new number of a former node; `None` if the node was dropped.
    #[must_use]
    pub fn new_id(&self, former: NodeId) -> Option<NodeId> {
        self.kept.iter().position(|&node| node == former).and_then(NodeId::new)
    }

    /// Returns the new place of a former node or root (`Some(None)`: the root); `None` if it was dropped.
    pub(crate) fn place(&self, former: Option<NodeId>) -> Option<Option<NodeId>> {
        if former == self.root { Some(None) } else { self.new_id(former?).map(Some) }
    }
}
