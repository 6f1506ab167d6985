//! What the target says of a tree (L-07).
//!
//! The target has one token for each prefix, so what comes true is one path: there is nothing to merge, whatever the paper's
//! "verified sequence merging" suggests. The walk goes down it, and asks the target for its token only where it stands:
//! a draw changes what penalties count, so none may be made that plain decoding would not have made, and in no other order.

use crate::tree::{NodeId, TokenTree};

/// A walk from the root down to where the target says something that nobody guessed.
#[derive(Debug, Clone)]
pub struct TreeVerifier<'a> {
    tree: &'a TokenTree,
    accepted: Vec<NodeId>,
    bonus: Option<u32>,
}

impl<'a> TreeVerifier<'a> {
    /// Before the root's token was drawn. Where the tree went on growing meanwhile, `tree` is as it was verified.
    #[must_use]
    pub fn new(tree: &'a TokenTree) -> Self {
        Self { tree, accepted: Vec::new(), bonus: None }
    }

    /// Where it stands: the target's token behind this node, or behind the root, is wanted next.
    #[must_use]
    pub fn at(&self) -> Option<NodeId> {
        self.accepted.last().copied()
    }

    /// The target has drawn `token` where the walk stands. True if that was guessed: the walk stands there now, and goes on
    /// unless the answer ends with it. False: it is the target's own, and the walk is at its end.
    pub fn advance(&mut self, token: u32) -> bool {
        match self.tree.child(self.at(), token) {
            Some(node) => self.accepted.push(node),
            None => self.bonus = Some(token),
        }
        self.bonus.is_none()
    }

    /// What came of it.
    #[must_use]
    pub fn verdict(self) -> VerificationResult {
        let leaf = self.most_matching();
        let (all, correct) = match self.bonus {
            Some(_) => (self.tree.depth(leaf), self.accepted.len()),
            // The answer ended here: what was guessed behind it was never judged.
            None => (self.accepted.len(), self.accepted.len()),
        };
        let confidence = self.tree.confidence(if self.bonus.is_some() { leaf } else { self.at() });
        let suffix = confidence / self.tree.confidence(self.at()).max(f64::MIN_POSITIVE);
        VerificationResult { accepted: self.accepted, bonus: self.bonus, all, correct, confidence, suffix }
    }

    /// The end of the most matching branch: of those that are right for longest, the one with most confidence.
    fn most_matching(&self) -> Option<NodeId> {
        let at = self.at();
        let through = |&leaf: &NodeId| at.is_none_or(|at| self.tree.path(leaf).contains(at));
        let confidence = |leaf: NodeId| self.tree.confidence(Some(leaf));
        self.tree
            .leaves()
            .filter(through)
            .reduce(|best, leaf| if confidence(leaf) > confidence(best) { leaf } else { best })
    }
}

/// What came of a tree.
#[derive(Debug, Clone, PartialEq)]
pub struct VerificationResult {
    /// The guesses that came true, from the root down.
    pub accepted: Vec<NodeId>,
    /// The target's own token behind them; `None` if the answer ended with the last of them.
    pub bonus: Option<u32>,
    /// N_all: tokens of the most matching branch.
    pub all: usize,
    /// N_correct: how many of them came true.
    pub correct: usize,
    /// The confidence that the most matching branch had at its end.
    pub confidence: f64,
    /// The product of the probabilities of that branch's tokens that did not come true; 1 if all did.
    pub suffix: f64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::{Segments, tests::trees};

    /// What a target that says `truth` makes of `tree`, one draw for each of the rows it is asked for.
    fn judged(tree: &TokenTree, segments: &Segments, truth: &[u32]) -> (VerificationResult, Vec<usize>) {
        // As a pass gives it: a token for each row, out of the row's own prefix.
        let drawn: Vec<u32> = segments
            .nodes()
            .iter()
            .map(|node| {
                let prefix: Vec<u32> = node
                    .iter()
                    .flat_map(|&node| tree.path(node).iter())
                    .map(|node| tree.token(node))
                    .collect();
                if truth.starts_with(&prefix) { truth.get(prefix.len()).copied().unwrap_or(0) } else { 99 }
            })
            .collect();
        let (mut walk, mut asked) = (TreeVerifier::new(tree), Vec::new());
        loop {
            asked.push(segments.row(walk.at()).unwrap());
            if !walk.advance(drawn[asked[asked.len() - 1]]) {
                return (walk.verdict(), asked);
            }
        }
    }

    proptest! {
        /// L-06 and L-07: both layouts, and a search through all branches, agree.
        #[test]
        fn both_layouts_give_the_verdict_that_a_search_through_all_branches_gives(
            tree in trees(20),
            truth in prop::collection::vec(0_u32..3, 24),
        ) {
            let (verdict, asked) = judged(&tree, &Segments::of(&tree), &truth);
            let (of_branches, _) = judged(&tree, &Segments::of_branches(&tree), &truth);
            prop_assert_eq!(&verdict, &of_branches);

            let right = |leaf: NodeId| {
                tree.path(leaf).iter().zip(&truth).take_while(|&(node, &token)| tree.token(node) == token).count()
            };
            let longest = tree.leaves().map(right).max().unwrap_or(0);
            prop_assert_eq!(verdict.accepted.len(), longest);
            prop_assert_eq!(verdict.correct, longest);
            prop_assert_eq!(verdict.bonus, Some(truth[longest]));
            prop_assert_eq!(asked.len(), longest + 1, "nothing is drawn off the path");
            let matching = tree.leaves().filter(|&leaf| right(leaf) == longest);
            let best = matching.map(|leaf| tree.confidence(Some(leaf))).reduce(f64::max).unwrap_or(1.0);
            prop_assert_eq!(verdict.confidence, best);
            prop_assert!(verdict.all >= verdict.correct && verdict.all <= tree.len());
        }
    }

    #[test]
    fn an_answer_that_ends_in_the_tree_has_no_token_behind_it_and_no_error() {
        let mut tree = TokenTree::new();
        let a = tree.push(None, 1, 0.5);
        tree.push(a, 2, 0.5);
        let mut walk = TreeVerifier::new(&tree);
        assert!(walk.advance(1));
        let verdict = walk.verdict();
        assert_eq!((verdict.bonus, verdict.all, verdict.correct), (None, 1, 1));
        assert_eq!((verdict.confidence, verdict.suffix), (0.5, 1.0));
    }
}
