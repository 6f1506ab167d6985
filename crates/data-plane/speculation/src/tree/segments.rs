//! The layout of a token tree in the rows of a pass.
//!
//! Attention over a tree usually takes a mask. Here the tree is instead cut into *segments*, chains of nodes.
//! The pass treats each segment as a sequence with its own block table. The KV entries of a segment's
//! ancestors, its *trunk*, are also written into its blocks, at the positions of plain decoding. A row
//! therefore reads the same values in the same order as in plain decoding, and its result has the same bits.
//!
//! ```text
//!       tree            rows                             segments
//!
//!           +-b-c       0: root                          rows 0..4, depth 0: root a b c
//!   root--a-+-d         1: a  2: b  3: c  4: d  5: e     rows 4..5, depth 2: d    trunk: rows 0..2, depth 0
//!         +-e                                            rows 5..6, depth 1: e    trunk: rows 0..1, depth 0
//! ```
//!
//! Each node is computed once (L-06's `tree-mask`). [`Segments::of_branches`] is the paper's layout (§III-B):
//! each branch is a sequence from root to leaf, and shared nodes are computed once per branch.

use std::{collections::VecDeque, ops::Range};

use super::{NodeId, TokenTree};

/// Consecutive rows of the pass that are also a chain in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSpan {
    /// Row numbers, counted within the rows of the tree.
    pub rows: Range<usize>,
    /// Depth of the first row: its position is the root's position plus `depth`.
    pub depth: usize,
}

/// A chain of nodes in consecutive rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the segment's own nodes.
    pub own: RowSpan,
    /// Ancestors in other segments, root first, with contiguous depths up to the segment's own rows.
    pub trunk: Vec<RowSpan>,
}

/// A tree laid out in rows. Row 0 is the root's row, because the target's token after the root is needed too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// Node of each row; `None` for the root.
    nodes: Vec<Option<NodeId>>,
    segments: Vec<Segment>,
}

impl Segments {
    /// Lays out every node once. A first child continues its parent's segment; others begin new ones.
    #[must_use]
    pub fn of(tree: &TokenTree) -> Self {
        let mut laid = Self { nodes: Vec::with_capacity(tree.len() + 1), segments: Vec::new() };
        let mut heads = VecDeque::from([(None, Vec::new())]);
        while let Some((head, trunk)) = heads.pop_front() {
            laid.lay_run(tree, head, trunk, &mut heads);
        }
        laid
    }

    /// Lays out every branch separately from the root (the paper's mini-batch), repeating shared nodes.
    #[must_use]
    pub fn of_branches(tree: &TokenTree) -> Self {
        let mut laid = Self { nodes: Vec::new(), segments: Vec::new() };
        let mut ends: Vec<Option<NodeId>> = tree.leaves().map(Some).collect();
        if ends.is_empty() {
            ends.push(None);
        }
        for end in ends {
            let first = laid.nodes.len();
            laid.nodes.push(None);
            laid.nodes.extend(end.into_iter().flat_map(|leaf| tree.path(leaf).iter()).map(Some));
            let own = RowSpan { rows: first..laid.nodes.len(), depth: 0 };
            laid.segments.push(Segment { own, trunk: Vec::new() });
        }
        laid
    }

    /// Lays out `head` and its first-child descendants. Other children go to `heads`, with their trunks.
    fn lay_run(
        &mut self,
        tree: &TokenTree,
        head: Option<NodeId>,
        trunk: Vec<RowSpan>,
        heads: &mut VecDeque<(Option<NodeId>, Vec<RowSpan>)>,
    ) {
        let (first, depth) = (self.nodes.len(), tree.depth(head));
        let mut at = head;
        loop {
            self.nodes.push(at);
            let mut children = tree.children(at);
            let next = children.next();
            for other in children {
                let above = RowSpan { rows: first..self.nodes.len(), depth };
                heads.push_back((Some(other), trunk.iter().cloned().chain([above]).collect()));
            }
            match next {
                Some(child) => at = Some(child),
                None => break,
            }
        }
        let own = RowSpan { rows: first..self.nodes.len(), depth };
        self.segments.push(Segment { own, trunk });
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.nodes.len()
    }

    /// Iterates over the segments. Segments that are in a trunk come before the segments of that trunk.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Segment> {
        self.segments.iter()
    }

    /// Returns the node of each row; `None` for the root.
    #[must_use]
    pub fn nodes(&self) -> &[Option<NodeId>] {
        &self.nodes
    }

    /// Returns the first row of a node, or of the root; `None` if the node belongs to another tree.
    #[must_use]
    pub fn row(&self, node: Option<NodeId>) -> Option<usize> {
        self.nodes.iter().position(|&one| one == node)
    }

    /// Returns the token of each row; `root` is the last verified token.
    #[must_use]
    pub fn tokens(&self, tree: &TokenTree, root: u32) -> Vec<u32> {
        self.nodes.iter().map(|node| node.map_or(root, |node| tree.token(node))).collect()
    }
}
