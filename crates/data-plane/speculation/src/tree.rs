//! A tree of drafted tokens.
//!
//! The root is the last verified token. It is no node: nobody guessed it. Nodes are numbered as they came, so that parents
//! stand before their children and a tree that grew keeps its numbers. A tree is a set of prefixes: siblings that are equal
//! are one node.
//!
//! # Layout
//!
//! - `nodes`: numbers of nodes, and sets of them. `segments`: how a tree lies in the rows of a pass.

mod nodes;
mod segments;
#[cfg(test)]
pub(crate) mod tests;

pub use self::{
    nodes::{NodeId, NodeSet},
    segments::{RowSpan, Segment, Segments},
};

/// Most nodes of a tree: a set of them is one word.
pub const MAX_NODES: usize = 64;

/// See the module. A structure of arrays: entry `i` of each is node `i`'s.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenTree {
    tokens: Vec<u32>,
    /// `None` for children of the root.
    parents: Vec<Option<NodeId>>,
    /// Tokens behind the root: 1 for its children.
    depths: Vec<usize>,
    /// Natural logarithms of the tokens' probabilities.
    logprobs: Vec<f64>,
    /// Products of the probabilities from the root to here (EdgeLLM's C).
    confidences: Vec<f64>,
    /// The nodes on the way from the root to here, this one among them.
    paths: Vec<NodeSet>,
}

impl TokenTree {
    /// A root alone.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Nodes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True of a root alone.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// True if it takes no more nodes.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= MAX_NODES
    }

    /// Guesses `token` behind `parent` (`None`: behind the root) with a probability, which is brought into 0 to 1. If it
    /// was guessed there before, that node remains as it is. `None` if the tree is full.
    ///
    /// # Panics
    /// If `parent` is of another tree: a programmer's error.
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

    /// All nodes, parents before their children.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        NodeSet::first(self.len()).iter()
    }

    /// The nodes behind `parent`, the first guess first.
    pub fn children(&self, parent: Option<NodeId>) -> impl Iterator<Item = NodeId> {
        self.nodes().filter(move |&node| self.parent(node) == parent)
    }

    /// The node that guesses `token` behind `parent`.
    #[must_use]
    pub fn child(&self, parent: Option<NodeId>, token: u32) -> Option<NodeId> {
        self.children(parent).find(|&node| self.token(node) == token)
    }

    /// Nodes with nothing behind them: each is the end of a branch.
    pub fn leaves(&self) -> impl Iterator<Item = NodeId> {
        let inner: NodeSet = self.nodes().filter_map(|node| self.parent(node)).collect();
        self.nodes().filter(move |&node| !inner.contains(node))
    }

    /// The token guessed.
    #[must_use]
    pub fn token(&self, node: NodeId) -> u32 {
        self.tokens[node.index()]
    }

    /// What it stands behind; `None`: the root.
    #[must_use]
    pub fn parent(&self, node: NodeId) -> Option<NodeId> {
        self.parents[node.index()]
    }

    /// Tokens behind the root; 0 for the root.
    #[must_use]
    pub fn depth(&self, node: Option<NodeId>) -> usize {
        node.map_or(0, |node| self.depths[node.index()])
    }

    /// The natural logarithm of the token's probability behind its parent.
    #[must_use]
    pub fn log_probability(&self, node: NodeId) -> f64 {
        self.logprobs[node.index()]
    }

    /// The product of the probabilities since the last verified token; 1 for that.
    #[must_use]
    pub fn confidence(&self, node: Option<NodeId>) -> f64 {
        node.map_or(1.0, |node| self.confidences[node.index()])
    }

    /// EdgeLLM's T_c (§III-C, L-08): the confidence of the branch that has most; 1 for a root alone.
    #[must_use]
    pub fn tree_confidence(&self) -> f64 {
        self.leaves().map(|leaf| self.confidence(Some(leaf))).reduce(f64::max).unwrap_or(1.0)
    }

    /// What a token behind the best branch will have, if it is as likely as those before it in the mean; 1 for a root alone.
    #[must_use]
    pub fn next_confidence(&self) -> f64 {
        let best =
            self.leaves().max_by(|&a, &b| self.confidence(Some(a)).total_cmp(&self.confidence(Some(b))));
        best.map_or(1.0, |leaf| {
            let confidence = self.confidence(Some(leaf));
            confidence * confidence.powf(1.0 / self.depth(Some(leaf)) as f64)
        })
    }

    /// The branch that somebody would bet on: from the root always the likeliest child, the first guess of equals.
    pub fn likeliest_branch(&self) -> impl Iterator<Item = NodeId> {
        let likelier = |a, b| if self.confidence(Some(b)) > self.confidence(Some(a)) { b } else { a };
        let behind = move |parent| self.children(parent).reduce(likelier);
        std::iter::successors(behind(None), move |&node| behind(Some(node)))
    }

    /// The nodes on the way from the root to `node`, itself among them, in the order of their numbers, which is that of
    /// their depths.
    #[must_use]
    pub fn path(&self, node: NodeId) -> NodeSet {
        self.paths[node.index()]
    }

    /// The nodes with most confidence, so many of them: with a node, all those before it.
    #[must_use]
    pub fn likeliest(&self, count: usize) -> NodeSet {
        let mut order: Vec<NodeId> = self.nodes().collect();
        // Stable: of equal confidence, parents stay before their children.
        order.sort_by(|&a, &b| self.confidence(Some(b)).total_cmp(&self.confidence(Some(a))));
        order.into_iter().take(count).collect()
    }

    /// The tree of the `kept` nodes alone, renumbered in their order. Nodes whose parents are not kept are not either.
    #[must_use]
    pub fn pruned(&self, kept: NodeSet) -> Self {
        self.grafted(None, kept).tree
    }

    /// The tree behind what the target has `said` (L-13): tokens that it accepted, and its own. Where they lead to the new root stands,
    /// and what was guessed behind it survives. Every other guess was made behind a token that did not come. `None` if they lead
    /// out of the tree.
    #[must_use]
    pub fn rerooted(&self, said: &[u32]) -> Option<RerootedTree> {
        let root = said.iter().try_fold(None, |at, &token| self.child(at, token).map(Some))?;
        let behind = |&node: &NodeId| root.is_none_or(|root| node != root && self.path(node).contains(root));
        Some(self.grafted(root, self.nodes().filter(behind).collect()))
    }

    /// The `kept` nodes that lead back to `root` by nothing but kept nodes, behind it.
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

/// What is left of a tree behind another root.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RerootedTree {
    /// The nodes, renumbered.
    pub tree: TokenTree,
    /// What each of them was called before: whoever keeps something for a node moves it accordingly.
    pub kept: Vec<NodeId>,
    /// What the root was called; `None` if it is the same.
    pub root: Option<NodeId>,
}

impl RerootedTree {
    /// The number that a former node has now; `None` if it is gone.
    #[must_use]
    pub fn new_id(&self, former: NodeId) -> Option<NodeId> {
        self.kept.iter().position(|&node| node == former).and_then(NodeId::new)
    }

    /// Where a former place is now, `Some(None)` being the root; `None` if it is gone.
    pub(crate) fn place(&self, former: Option<NodeId>) -> Option<Option<NodeId>> {
        if former == self.root { Some(None) } else { self.new_id(former?).map(Some) }
    }
}
