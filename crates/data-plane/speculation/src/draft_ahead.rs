//! Drafting during verification: the tree grows while a part of it is verified (EdgeLLM §III-D, L-10, L-13).
//!
//! ```text
//!   verified     root - a - b               the target emits a, b, then its own x
//!   ahead               |   +-- x - y - z   x was drafted after b: the next tree is y - z and exists already
//!                       +-- w               drafted after a token that did not come: discarded
//! ```
//!
//! Nodes added during verification are *provisional*. The node where the target's tokens end is the next
//! root, and only its descendants are kept. If the tokens leave the tree, nothing is kept.

use crate::{
    draft::Draft,
    tree::TokenTree,
    tree_expansion::{BranchSelector, TreeGrowth as _},
};

/// A tree that grows while a part of it is verified.
#[derive(Debug, Clone)]
pub struct DraftAhead {
    tree: TokenTree,
    selector: BranchSelector,
    /// Number of nodes when the verification began; later ones are provisional.
    before: usize,
}

/// The remainder of a tree after its verification.
#[derive(Debug, Clone, Default)]
pub struct RerootedDraft {
    /// Nodes after the last of the target's tokens.
    pub tree: TokenTree,
    /// Selector that continues the tree's growth.
    pub selector: BranchSelector,
    /// Number of provisional nodes that were kept.
    pub kept: usize,
    /// Number of provisional nodes that were discarded.
    pub discarded: usize,
}

impl DraftAhead {
    /// Creates the state for a tree that `selector` grew, before a part of it is verified.
    #[must_use]
    pub fn new(tree: TokenTree, selector: BranchSelector) -> Self {
        let before = tree.len();
        Self { tree, selector, before }
    }

    /// Returns the current tree.
    #[must_use]
    pub fn tree(&self) -> &TokenTree {
        &self.tree
    }

    /// Reopens the closed branches, because the draft may know more by now.
    pub fn reopen(&mut self) {
        self.selector.reopen(&self.tree);
    }

    /// Adds one token to the tree; returns false if there is none or the tree is full.
    ///
    /// # Errors
    /// The draft's own; the tree is unchanged.
    pub fn step<D: Draft + ?Sized>(&mut self, draft: &mut D) -> Result<bool, D::Error> {
        self.selector.step(&mut self.tree, draft)
    }

    /// Returns the remainder of the tree after the target's tokens `said`, accepted ones and its own.
    #[must_use]
    pub fn reroot(self, said: &[u32]) -> RerootedDraft {
        let Self { tree, selector, before } = self;
        let provisional = tree.len() - before;
        let Some(rerooted) = tree.rerooted(said) else {
            return RerootedDraft { discarded: provisional, ..RerootedDraft::default() };
        };
        let kept = rerooted.kept.iter().filter(|node| node.index() >= before).count();
        let selector = selector.follow(&rerooted);
        RerootedDraft { tree: rerooted.tree, selector, kept, discarded: provisional - kept }
    }
}

impl RerootedDraft {
    /// Returns the draft if any token was added during verification, else an empty one to draft anew.
    #[must_use]
    pub fn if_any(self) -> Self {
        if self.kept + self.discarded > 0 { self } else { Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        draft::tests::HashedDraft,
        tree::{NodeId, tests::trees},
    };

    /// Maps the token path of each node to the node's own probability.
    fn paths(tree: &TokenTree) -> BTreeMap<Vec<u32>, u64> {
        let path = |node: NodeId| tree.path(node).iter().map(|node| tree.token(node)).collect();
        tree.nodes().map(|node| (path(node), tree.log_probability(node).exp().to_bits() >> 8)).collect()
    }

    proptest! {
        /// L-13 by brute force: exactly the nodes whose paths begin with the target's tokens are kept.
        #[test]
        fn what_is_kept_is_what_was_guessed_behind_all_that_was_said(
            tree in trees(30),
            before in 0_usize..20,
            said in prop::collection::vec(0_u32..3, 0..5),
        ) {
            let before = before.min(tree.len());
            let ahead = DraftAhead { selector: BranchSelector::new(&tree), before, tree: tree.clone() };
            let settled = ahead.reroot(&said);
            let behind = paths(&tree).into_iter().filter_map(|(path, probability)| {
                let rest = path.strip_prefix(&said[..])?;
                (!rest.is_empty()).then(|| (rest.to_vec(), probability))
            });
            prop_assert_eq!(paths(&settled.tree), behind.collect::<BTreeMap<_, _>>());
            let provisional = |node: &NodeId| node.index() >= before;
            let is_kept = |node: &NodeId| {
                let path: Vec<u32> = tree.path(*node).iter().map(|node| tree.token(node)).collect();
                path.len() > said.len() && path.starts_with(&said)
            };
            let kept = tree.nodes().filter(provisional).filter(is_kept).count();
            prop_assert_eq!((settled.kept, settled.discarded), (kept, tree.len() - before - kept));
        }

        /// A draft that had no token is asked again after `reopen`, and no draft token is lost.
        #[test]
        fn a_tree_goes_on_where_somebody_had_no_more_to_say(first in 1_usize..20, then in 1_usize..20) {
            let mut draft = HashedDraft { width: 3, runs: Vec::new() };
            let mut ahead = DraftAhead::new(TokenTree::new(), BranchSelector::default());
            for _ in 0..first {
                ahead.step(&mut draft).unwrap();
            }
            let mut mute = HashedDraft { width: 0, runs: Vec::new() };
            while ahead.step(&mut mute).unwrap() {}
            prop_assert!(!ahead.step(&mut draft).unwrap(), "all branches are closed");
            ahead.reopen();
            let had = ahead.tree.len();
            for _ in 0..then {
                prop_assert!(ahead.step(&mut draft).unwrap());
            }
            prop_assert_eq!(ahead.tree.len(), had + then, "every step gives a token that was not there");
        }

        /// A kept tree finds its unopened branches again and grows without repetition.
        #[test]
        fn a_tree_that_was_kept_goes_on_growing(first in 1_usize..20, more in 0_usize..20, then in 1_usize..20) {
            let mut draft = HashedDraft { width: 3, runs: Vec::new() };
            let mut ahead = DraftAhead::new(TokenTree::new(), BranchSelector::default());
            for _ in 0..first {
                ahead.step(&mut draft).unwrap();
            }
            let best = ahead.tree.children(None).next().map(|node| ahead.tree.token(node)).unwrap();
            let mut ahead = DraftAhead::new(ahead.tree, ahead.selector);
            for _ in 0..more {
                prop_assert!(ahead.step(&mut draft).unwrap());
            }
            let RerootedDraft { mut tree, mut selector, kept, discarded } = ahead.reroot(&[best]);
            prop_assert_eq!(kept + discarded, more);
            let had = tree.len();
            for _ in 0..then {
                prop_assert!(selector.step(&mut tree, &mut draft).unwrap());
            }
            prop_assert_eq!(tree.len(), had + then, "every step gives a token that was not there");
        }
    }
}
