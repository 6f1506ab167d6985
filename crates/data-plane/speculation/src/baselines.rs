//! Other ways to decide how much is verified, for comparison (CHECKLIST L-17). They do not look at what a pass takes; what they grow
//! is verified the same way.

use crate::{
    draft::Draft,
    threshold::Threshold,
    tree::{NodeId, TokenTree},
    tree_expansion::{BranchSelector, TreeGrowth, grow},
    verification::VerificationResult,
};

/// How much is guessed and verified each time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BaselineRule {
    /// A tree of so many guesses.
    Nodes(usize),
    /// A chain of so many, whatever their confidence (SP).
    Chain(usize),
    /// So many branches from the root, of so many guesses each (SI, SpecInfer).
    Branches {
        /// Branches.
        width: usize,
        /// Guesses of each.
        depth: usize,
    },
    /// A tree, until it is as unlikely as EdgeLLM's threshold, which verdicts move.
    Learned(Threshold),
}

impl BaselineRule {
    /// Lets `tree`, whose branches `pacer` knows, grow to what is to be verified, of at most `max_nodes`.
    ///
    /// # Errors
    /// The draft's own; the tree has what it got before.
    pub fn grow<D: Draft + ?Sized>(
        &self,
        tree: &mut TokenTree,
        (pacer, draft): (&mut BranchSelector, &mut D),
        max_nodes: usize,
    ) -> Result<(), D::Error> {
        match *self {
            Self::Nodes(nodes) => grow(tree, (pacer, draft), nodes.min(max_nodes), |_| false),
            Self::Chain(tokens) => grow(tree, (&mut FixedLength { tokens }, draft), max_nodes, |_| false),
            Self::Branches { width, depth } => {
                grow(tree, (&mut FixedTree { width, depth }, draft), max_nodes, |_| false)
            }
            Self::Learned(threshold) => grow(tree, (pacer, draft), max_nodes, |tree| threshold.is_due(tree)),
        }
    }

    /// Whether its trees grow as a pacer says, so that they can go on growing.
    #[must_use]
    pub fn is_paced(&self) -> bool {
        matches!(self, Self::Nodes(_) | Self::Learned(_))
    }

    /// The confidence that ends a tree, where that is what does; else 0.
    #[must_use]
    pub fn threshold(&self) -> f64 {
        if let Self::Learned(threshold) = self { threshold.alpha() } else { 0.0 }
    }

    /// Takes in what came of a tree.
    pub fn learn(&mut self, verdict: &VerificationResult) {
        if let Self::Learned(threshold) = self {
            threshold.learn(verdict);
        }
    }
}

/// A chain of so many tokens.
#[derive(Debug, Clone, Copy)]
struct FixedLength {
    /// Tokens of each draft.
    tokens: usize,
}

impl TreeGrowth for FixedLength {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        let tip = tree.nodes().next_back();
        Ok(tree.len() < self.tokens && lengthen(tree, tip, draft)?)
    }
}

/// So many branches from the root, each of the same length.
#[derive(Debug, Clone, Copy)]
struct FixedTree {
    /// Branches; at most [`MAX_GUESSES`](crate::draft::MAX_GUESSES) come of one draft.
    width: usize,
    /// Tokens of each.
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
        // Breadth first: the first leaf that is not at its depth is of the shallowest.
        let short: Vec<NodeId> = tree.leaves().filter(|&leaf| tree.depth(Some(leaf)) < self.depth).collect();
        for tip in short {
            if lengthen(tree, Some(tip), draft)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Puts the likeliest token behind `tip`; false if there is none, or no room.
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
