//! Verification of a token tree against the target (L-07).
//!
//! The target emits one token per prefix, so the accepted tokens form one path and need no merging, despite
//! the paper's "verified sequence merging". The walk samples only at its current node: a sample changes the
//! counts of penalties, so samples must be those of plain decoding, in its order.

use crate::tree::{NodeId, TokenTree};

/// A walk from the root to the first target token that is not in the tree.
#[derive(Debug, Clone)]
pub struct TreeVerifier<'a> {
    tree: &'a TokenTree,
    accepted: Vec<NodeId>,
    bonus: Option<u32>,
}

impl<'a> TreeVerifier<'a> {
    /// Creates a verifier before the first sample. `tree` is the verified tree, even if it has grown since.
    #[must_use]
    pub fn new(tree: &'a TokenTree) -> Self {
        Self { tree, accepted: Vec::new(), bonus: None }
    }

    /// Returns the node (`None`: the root) after which the target's token is needed next.
    #[must_use]
    pub fn at(&self) -> Option<NodeId> {
        self.accepted.last().copied()
    }

    /// Takes the target's `token` at the current node. True if the tree has it: the walk moves there and
    /// continues, unless the answer ends. False if the token is the target's own, which ends the walk.
    pub fn advance(&mut self, token: u32) -> bool {
        match self.tree.child(self.at(), token) {
            Some(node) => self.accepted.push(node),
            None => self.bonus = Some(token),
        }
        self.bonus.is_none()
    }

    /// Returns the result of the verification.
    #[must_use]
    pub fn verdict(self) -> VerificationResult {
        let leaf = self.most_matching();
        let (all, correct) = match self.bonus {
            Some(_) => (self.tree.depth(leaf), self.accepted.len()),
            // The answer ended here, so the draft tokens below this node were not judged.
            None => (self.accepted.len(), self.accepted.len()),
        };
        let confidence = self.tree.confidence(if self.bonus.is_some() { leaf } else { self.at() });
        let suffix = confidence / self.tree.confidence(self.at()).max(f64::MIN_POSITIVE);
        VerificationResult { accepted: self.accepted, bonus: self.bonus, all, correct, confidence, suffix }
    }

    /// Returns the end of the most confident branch through the last accepted node.
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

/// Result of the verification of one tree.
#[derive(Debug, Clone, PartialEq)]
pub struct VerificationResult {
    /// Accepted nodes, from the root down.
    pub accepted: Vec<NodeId>,
    /// The target's own token after the accepted ones; `None` if the answer ended with an accepted token.
    pub bonus: Option<u32>,
    /// N_all: number of tokens of the most matching branch.
    pub all: usize,
    /// N_correct: number of accepted tokens of that branch.
    pub correct: usize,
    /// Confidence at the end of the most matching branch.
    pub confidence: f64,
    /// Product of the probabilities of that branch's rejected tokens; 1 if all were accepted.
    pub suffix: f64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::{Segments, tests::trees};

    /// Verifies `tree` against a target that emits `truth`, and returns the rows that were sampled.
    fn judged(tree: &TokenTree, segments: &Segments, truth: &[u32]) -> (VerificationResult, Vec<usize>) {
        // A pass gives one token per row, computed from the row's own prefix.
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
        /// L-06 and L-07: both layouts agree with a search through all branches.
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
