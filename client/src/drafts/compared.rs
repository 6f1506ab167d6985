//! Other ways to decide how much is verified, for comparison (CHECKLIST L-17). They do not look at what a sweep takes.

use speculation::{
    baseline::{FixedLength, FixedTree},
    growth::Pacer,
    threshold::Threshold,
    tree::TokenTree,
    verdict::Verdict,
};

use super::{Guesser, guess};

/// How much is guessed and verified each time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// A tree of so many guesses.
    Nodes(usize),
    /// A chain of so many (SP).
    Chain(usize),
    /// So many branches of so many guesses each (SI).
    Branches {
        /// Branches.
        width: usize,
        /// Guesses of each.
        depth: usize,
    },
    /// A tree, until it is as unlikely as EdgeLLM's threshold, which verdicts move.
    Learned(Threshold),
}

impl Rule {
    /// What is to be verified, of at most `max_nodes`.
    pub(super) fn tree(&self, guesser: Guesser<'_>, max_nodes: usize) -> TokenTree {
        match *self {
            Self::Nodes(nodes) => guess(guesser, &mut Pacer::default(), nodes.min(max_nodes), |_| false),
            Self::Chain(tokens) => guess(guesser, &mut FixedLength { tokens }, max_nodes, |_| false),
            Self::Branches { width, depth } => {
                guess(guesser, &mut FixedTree { width, depth }, max_nodes, |_| false)
            }
            Self::Learned(threshold) => {
                guess(guesser, &mut Pacer::default(), max_nodes, |tree| threshold.is_due(tree))
            }
        }
    }

    /// The confidence that ends a tree, where that is what does.
    pub(super) fn threshold(&self) -> f64 {
        if let Self::Learned(threshold) = self { threshold.alpha() } else { 0.0 }
    }

    pub(super) fn learn(&mut self, verdict: &Verdict) {
        if let Self::Learned(threshold) = self {
            threshold.learn(verdict);
        }
    }
}
