//! Drafting ahead: what was drafted goes on growing while a part of it is verified (EdgeLLM §III-D, L-10, L-13).
//!
//! ```text
//!   verified     root - a - b               the target says: a, b, then x of its own
//!   ahead               |   +-- x - y - z   behind b somebody had guessed x: the next tree is y - z, and is there already
//!                       +-- w               behind another token than the one that came: of no use
//! ```
//!
//! Each further token is guessed behind tokens that may not come, so it is *provisional*. The target's word leads down the
//! tree, token by token. Where it ends the next root stands, and what was guessed behind it is kept; every other guess was made
//! behind a token that did not come. If the word leads out of the tree, nothing is kept.

use crate::{
    draft::Draft,
    tree::TokenTree,
    tree_expansion::{BranchSelector, TreeGrowth as _},
};

/// A tree that goes on growing while a part of it is verified.
#[derive(Debug, Clone)]
pub struct DraftAhead {
    tree: TokenTree,
    pacer: BranchSelector,
    /// Nodes it had when the verification began; those that came since are provisional.
    before: usize,
}

/// What is left of a tree once the target has said what it says of it.
#[derive(Debug, Clone, Default)]
pub struct RerootedDraft {
    /// What was guessed behind the last of its tokens.
    pub tree: TokenTree,
    /// Whoever lets it grow.
    pub pacer: BranchSelector,
    /// Provisional nodes among it.
    pub kept: usize,
    /// Provisional nodes that are gone.
    pub discarded: usize,
}

impl DraftAhead {
    /// A tree that `pacer` has let grow, of which something is about to be verified.
    #[must_use]
    pub fn new(tree: TokenTree, pacer: BranchSelector) -> Self {
        let before = tree.len();
        Self { tree, pacer, before }
    }

    /// The tree as it is.
    #[must_use]
    pub fn tree(&self) -> &TokenTree {
        &self.tree
    }

    /// Whoever had no more to say may by now.
    pub fn reopen(&mut self) {
        self.pacer.reopen(&self.tree);
    }

    /// Gives it one more token; false: there is none, or no room.
    ///
    /// # Errors
    /// The draft's own; the tree is as it was.
    pub fn step<D: Draft + ?Sized>(&mut self, draft: &mut D) -> Result<bool, D::Error> {
        self.pacer.step(&mut self.tree, draft)
    }

    /// What is left behind the tokens that the target has `said` since, those it accepted and its own.
    #[must_use]
    pub fn reroot(self, said: &[u32]) -> RerootedDraft {
        let Self { tree, pacer, before } = self;
        let provisional = tree.len() - before;
        let Some(rerooted) = tree.rerooted(said) else {
            return RerootedDraft { discarded: provisional, ..RerootedDraft::default() };
        };
        let kept = rerooted.kept.iter().filter(|node| node.index() >= before).count();
        let pacer = pacer.follow(&rerooted);
        RerootedDraft { tree: rerooted.tree, pacer, kept, discarded: provisional - kept }
    }
}

impl RerootedDraft {
    /// Itself if anything was guessed meanwhile. Else nothing, so that all is guessed anew: more is known by now.
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

    /// The tokens from the root to each node, and the node's own probability.
    fn paths(tree: &TokenTree) -> BTreeMap<Vec<u32>, u64> {
        let path = |node: NodeId| tree.path(node).iter().map(|node| tree.token(node)).collect();
        tree.nodes().map(|node| (path(node), tree.log_probability(node).exp().to_bits() >> 8)).collect()
    }

    proptest! {
        /// L-13 by brute force: kept is every guess whose tokens begin with what was said, and nothing else.
        #[test]
        fn what_is_kept_is_what_was_guessed_behind_all_that_was_said(
            tree in trees(30),
            before in 0_usize..20,
            said in prop::collection::vec(0_u32..3, 0..5),
        ) {
            let before = before.min(tree.len());
            let ahead = DraftAhead { pacer: BranchSelector::new(&tree), before, tree: tree.clone() };
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

        /// Whoever says nothing for want of time is asked again, and nothing that was guessed is forgotten.
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

        /// Whoever goes on behind what was kept finds the guesses that nobody had opened, and no other tree than there would be.
        #[test]
        fn a_tree_that_was_kept_goes_on_growing(first in 1_usize..20, more in 0_usize..20, then in 1_usize..20) {
            let mut draft = HashedDraft { width: 3, runs: Vec::new() };
            let mut ahead = DraftAhead::new(TokenTree::new(), BranchSelector::default());
            for _ in 0..first {
                ahead.step(&mut draft).unwrap();
            }
            let best = ahead.tree.children(None).next().map(|node| ahead.tree.token(node)).unwrap();
            let mut ahead = DraftAhead::new(ahead.tree, ahead.pacer);
            for _ in 0..more {
                prop_assert!(ahead.step(&mut draft).unwrap());
            }
            let RerootedDraft { mut tree, mut pacer, kept, discarded } = ahead.reroot(&[best]);
            prop_assert_eq!(kept + discarded, more);
            let had = tree.len();
            for _ in 0..then {
                prop_assert!(pacer.step(&mut tree, &mut draft).unwrap());
            }
            prop_assert_eq!(tree.len(), had + then, "every step gives a token that was not there");
        }
    }
}
