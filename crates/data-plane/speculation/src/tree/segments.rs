//! How a tree lies in the rows of a pass.
//!
//! Attention over a tree usually takes a mask. Here it takes none: the tree is cut into *segments*, runs of nodes each behind
//! the one before, and each is a sequence of its own to the pass, with a block table of its own. The keys and values of its
//! ancestors, its *trunk*, are written into its blocks too, at the positions they would have in plain decoding. So a row
//! reads what it would read there, in the order in which it would, and has the same bits.
//!
//! ```text
//!       tree               rows                                segments
//!
//!           +-b-c          0: root                             rows 0..4, depth 0: root a b c
//!   root--a-+-d            1: a   2: b   3: c   4: d   5: e    rows 4..5, depth 2: d       trunk: rows 0..2, depth 0
//!         +-e                                                  rows 5..6, depth 1: e       trunk: rows 0..1, depth 0
//! ```
//!
//! Each node is computed once (L-06's `tree-mask`). [`Segments::of_branches`] is the paper's own way (§III-B): each branch
//! is a sequence from root to leaf, and nodes that branches share are computed once for each.

use std::{collections::VecDeque, ops::Range};

use super::{NodeId, TokenTree};

/// Rows that follow each other in the pass, and in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSpan {
    /// The rows, among those of the tree.
    pub rows: Range<usize>,
    /// Tokens between the root and the first of them: its position is the root's and so many.
    pub depth: usize,
}

/// A run of nodes: each stands behind the one before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Its own rows.
    pub own: RowSpan,
    /// Its ancestors, which are in other segments, the root first. Depths follow each other without a gap, up to that of
    /// its own rows.
    pub trunk: Vec<RowSpan>,
}

/// A tree in rows. Row 0 is the root's: what the target draws there is to be known too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// The node of each row; `None`: the root.
    nodes: Vec<Option<NodeId>>,
    segments: Vec<Segment>,
}

impl Segments {
    /// Every node once: a first child goes on in its parent's segment, another one opens a segment of its own.
    #[must_use]
    pub fn of(tree: &TokenTree) -> Self {
        let mut laid = Self { nodes: Vec::with_capacity(tree.len() + 1), segments: Vec::new() };
        let mut heads = VecDeque::from([(None, Vec::new())]);
        while let Some((head, trunk)) = heads.pop_front() {
            laid.lay_run(tree, head, trunk, &mut heads);
        }
        laid
    }

    /// Every branch by itself, from the root on: the paper's mini-batch. Nodes that branches share have several rows.
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

    /// Lays `head` and what its first children make, and notes whoever opens a segment on the way, with its trunk.
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

    /// Rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.nodes.len()
    }

    /// The segments; whose trunk a segment is in stands before it.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Segment> {
        self.segments.iter()
    }

    /// The node of each row; `None`: the root.
    #[must_use]
    pub fn nodes(&self) -> &[Option<NodeId>] {
        &self.nodes
    }

    /// The row of a node, or of the root; where there are several, the first. `None` if the node is of another tree.
    #[must_use]
    pub fn row(&self, node: Option<NodeId>) -> Option<usize> {
        self.nodes.iter().position(|&one| one == node)
    }

    /// The token of each row, where the last verified one is `root`.
    #[must_use]
    pub fn tokens(&self, tree: &TokenTree, root: u32) -> Vec<u32> {
        self.nodes.iter().map(|node| node.map_or(root, |node| tree.token(node))).collect()
    }
}
