//! Baseline rules for the amount of verification, for comparison. The rules ignore the cost
//! of a pass; verification is the same.

use crate::{
    draft::Draft,
    threshold::Threshold,
    tree::{NodeId, TokenTree},
    tree_expansion::{BranchSelector, TreeGrowth, grow},
    verification::VerificationResult,
};

/// A rule for the shape and size of each token tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BaselineRule {
    /// A tree of at most this number of nodes.
    Nodes(usize),
    /// A chain of this number of draft tokens, regardless of confidence (SP).
    Chain(usize),
    /// Branches of equal length from the root (SI, SpecInfer).
    Branches {
        /// Number of branches from the root.
        width: usize,
        /// Draft tokens per branch.
        depth: usize,
    },
    /// A tree that grows until its confidence falls below EdgeLLM's threshold, which verification adjusts.
    Learned(Threshold),
}

impl BaselineRule {
    /// Grows `tree`, whose branches `selector` knows, to the size that is to be verified, at most
    /// `max_nodes`.
    ///
    /// # Errors
    /// The draft's own; the tree keeps the nodes added before.
    pub fn grow<D: Draft + ?Sized>(
        &self,
        tree: &mut TokenTree,
        (selector, draft): (&mut BranchSelector, &mut D),
        max_nodes: usize,
    ) -> Result<(), D::Error> {
        match *self {
            Self::Nodes(nodes) => grow(tree, (selector, draft), nodes.min(max_nodes), |_| false),
            Self::Chain(tokens) => grow(tree, (&mut FixedLength { tokens }, draft), max_nodes, |_| false),
            Self::Branches { width, depth } => {
                grow(tree, (&mut FixedTree { width, depth }, draft), max_nodes, |_| false)
            }
            Self::Learned(threshold) => {
                grow(tree, (selector, draft), max_nodes, |tree| threshold.is_due(tree))
            }
        }
    }

    /// Whether the rule's trees grow by a [`BranchSelector`], so that they can grow further later.
    #[must_use]
    pub fn is_paced(&self) -> bool {
        matches!(self, Self::Nodes(_) | Self::Learned(_))
    }

    /// Returns the confidence at which growth stops; 0 for rules without a threshold.
    #[must_use]
    pub fn threshold(&self) -> f64 {
        if let Self::Learned(threshold) = self { threshold.alpha() } else { 0.0 }
    }

    /// Adjusts the threshold, if the rule has one, to the result of a verification.
    pub fn learn(&mut self, verdict: &VerificationResult) {
        if let Self::Learned(threshold) = self {
            threshold.learn(verdict);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct FixedLength {
    tokens: usize,
}

impl TreeGrowth for FixedLength {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        let tip = tree.nodes().next_back();
        Ok(tree.len() < self.tokens && lengthen(tree, tip, draft)?)
    }
}

#[derive(Debug, Clone, Copy)]
struct FixedTree {
    /// Number of branches; one draft gives at most [`MAX_GUESSES`](crate::draft::MAX_GUESSES).
    width: usize,
    /// Draft tokens per branch.
    depth: usize,
}

impl TreeGrowth for FixedTree {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        if self.depth == 0 || tree.is_full() {
            return Ok(false);
        }
        if tree.is_empty() {
            for guess in draft.guesses(tree, None)?.iter().take(self.width) {
                tree.push(None, guess.token, guess.probability);
            }
            return Ok(!tree.is_empty());
        }
        // Growth is breadth first: the first leaf above `depth` is one of the shallowest.
        let short: Vec<NodeId> = tree.leaves().filter(|&leaf| tree.depth(Some(leaf)) < self.depth).collect();
        for tip in short {
            if lengthen(tree, Some(tip), draft)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Appends the likeliest token after `tip`; returns false if there is none or the tree is full.
fn lengthen<D: Draft + ?Sized>(
    tree: &mut TokenTree,
    tip: Option<NodeId>,
    draft: &mut D,
) -> Result<bool, D::Error> {
    let guesses = draft.guesses(tree, tip)?;
    Ok(guesses.first().and_then(|guess| tree.push(tip, guess.token, guess.probability)).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::tests::HashedDraft;

    #[test]
    fn fixed_trees_have_their_shape() {
        let mut draft = HashedDraft { width: 4, runs: Vec::new() };
        let mut grown = |rule: BaselineRule| {
            let mut tree = TokenTree::new();
            rule.grow(&mut tree, (&mut BranchSelector::default(), &mut draft), 64).unwrap();
            tree
        };
        let chain = grown(BaselineRule::Chain(5));
        assert_eq!((chain.len(), chain.leaves().count()), (5, 1));
        assert_eq!(grown(BaselineRule::Nodes(9)).len(), 9);
        let tree = grown(BaselineRule::Branches { width: 3, depth: 4 });
        assert_eq!((tree.len(), tree.leaves().count()), (12, 3));
        assert!(tree.leaves().all(|leaf| tree.depth(Some(leaf)) == 4));
    }
}
