//! The choice of the branch that gets the next token: the width-adaptive tree (EdgeLLM §III-B, L-02 to L-04).
//!
//! A likely branch should be long and an unlikely one short: `L_i = C_i · M` (Eq. 1). M is the number of
//! tokens in the tree and C_i the normalized confidence of branch i. D, the largest deficit of any branch, is
//! the distance from that (Eq. 2):
//!
//! ```text
//! D = max_i (M · C_i - T_i)
//! ```
//!
//! T_i is the number of tokens in branch i after its fork. The next token goes where it makes D least. If `M`
//! counts the coming token, this branch is the one with the largest deficit.
//!
//! *Unopened* branches compete too: each draft token besides the first at a position is a branch of no tokens
//! yet. The tree is thus as wide as its draft is unsure. One step adds one token to one branch, because small
//! machines gain nothing from drafting several branches at once.

use std::fmt;

use crate::{
    draft::Draft,
    tree::{MAX_NODES, NodeId, RerootedTree, Segments, TokenTree},
};

/// Maximum number of competing branches; the paper verifies fewer than ten at once.
pub const MAX_BRANCHES: usize = 10;

/// A policy for the growth of a token tree.
pub trait TreeGrowth: fmt::Debug {
    /// Adds one token to `tree`; returns false if the tree cannot grow further.
    ///
    /// # Errors
    /// The draft's own; the tree is unchanged.
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error>;
}

/// Grows `tree` until it has `max_nodes` nodes, or until `is_due`, asked before every token, returns true.
///
/// # Errors
/// The draft's own; the tree keeps the nodes added before.
pub fn grow<D: Draft + ?Sized>(
    tree: &mut TokenTree,
    (growth, draft): (&mut impl TreeGrowth, &mut D),
    max_nodes: usize,
    mut is_due: impl FnMut(&TokenTree) -> bool,
) -> Result<(), D::Error> {
    while tree.len() < max_nodes.min(MAX_NODES) && !is_due(tree) && growth.step(tree, draft)? {}
    Ok(())
}

/// State of one branch, as the selector compares it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BranchState {
    /// Confidence C up to the branch's last token.
    pub confidence: f64,
    /// Number of tokens T after the branch's fork; 0 for an unopened branch.
    pub tokens: usize,
    /// Depth of the token before the branch's next one; 0 for the root.
    pub depth: usize,
}

/// Computes each branch's deficit once the tree has one more token: `M · C_i / ΣC - T_i`.
fn deficits(branches: &[BranchState]) -> impl Iterator<Item = f64> {
    let after = 1 + branches.iter().map(|branch| branch.tokens).sum::<usize>();
    let sum: f64 = branches.iter().map(|branch| branch.confidence).sum();
    let per_confidence = if sum > 0.0 { after as f64 / sum } else { 0.0 };
    branches.iter().map(move |branch| per_confidence * branch.confidence - branch.tokens as f64)
}

/// Returns the branch that gets the next token, the one with the largest deficit; `None` if there is none.
/// Ties go to the more confident branch, then the shallower, then the first.
#[must_use]
pub fn next_branch(branches: &[BranchState]) -> Option<usize> {
    let rank = |index: usize, deficit: f64| (deficit, branches[index].confidence, branches[index].depth);
    let before = |a: (f64, f64, usize), b: (f64, f64, usize)| {
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(&b.2))
    };
    deficits(branches)
        .enumerate()
        .map(|(index, lacks)| (index, rank(index, lacks)))
        .min_by(|a, b| before(a.1, b.1))
        .map(|(index, _)| index)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum OpenBranch {
    /// A branch that ends at this node, or at the root.
    At { tip: Option<NodeId>, tokens: usize },
    /// A draft token that was not the first after its parent.
    Unopened { parent: Option<NodeId>, token: u32, probability: f64 },
}

/// The next action of a [`BranchSelector`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpandAction {
    /// Asks the draft for tokens after this node (`None`: the root).
    Ask(Option<NodeId>),
    /// Opens a branch whose first token is already drafted.
    Open,
    /// Stops: there is no branch, or the tree is full.
    End,
}

/// Selects the branch that grows next, and keeps draft tokens that are not in the tree yet.
#[derive(Debug, Clone, PartialEq)]
pub struct BranchSelector {
    branches: Vec<OpenBranch>,
}

impl Default for BranchSelector {
    fn default() -> Self {
        Self::new(&TokenTree::new())
    }
}

impl BranchSelector {
    /// Creates a selector for a tree that continues to grow, without unopened branches.
    pub(crate) fn new(tree: &TokenTree) -> Self {
        let segments = Segments::of(tree);
        let branches = segments.iter().map(|segment| {
            let own = &segments.nodes()[segment.own.rows.clone()];
            OpenBranch::At { tip: own.last().copied().flatten(), tokens: own.iter().flatten().count() }
        });
        Self { branches: branches.collect() }
    }

    /// Reopens the closed branches of `tree`, because the draft may know more by now.
    pub(crate) fn reopen(&mut self, tree: &TokenTree) {
        let before = std::mem::replace(self, Self::new(tree));
        let unopened =
            before.branches.into_iter().filter(|branch| matches!(branch, OpenBranch::Unopened { .. }));
        self.branches.extend(unopened);
    }

    /// Returns a selector for a rerooted tree, with the unopened branches that survive.
    #[must_use]
    pub fn follow(&self, rerooted: &RerootedTree) -> Self {
        let unopened = self.branches.iter().filter_map(|branch| match *branch {
            OpenBranch::Unopened { parent, token, probability } => {
                let parent = rerooted.place(parent)?;
                Some(OpenBranch::Unopened { parent, token, probability })
            }
            OpenBranch::At { .. } => None,
        });
        let Self { mut branches } = Self::new(&rerooted.tree);
        branches.extend(unopened);
        Self { branches }
    }

    /// Returns the action that [`step`](TreeGrowth::step) takes next on `tree`.
    #[must_use]
    pub fn next_action(&self, tree: &TokenTree) -> ExpandAction {
        match next_branch(&self.competing(tree)).filter(|_| !tree.is_full()).map(|index| self.branches[index])
        {
            Some(OpenBranch::At { tip, .. }) => ExpandAction::Ask(tip),
            Some(OpenBranch::Unopened { .. }) => ExpandAction::Open,
            None => ExpandAction::End,
        }
    }

    /// Returns the competing branches in the order of `self.branches`.
    fn competing(&self, tree: &TokenTree) -> Vec<BranchState> {
        let see = |branch: &OpenBranch| match *branch {
            OpenBranch::At { tip, tokens } => {
                BranchState { confidence: tree.confidence(tip), tokens, depth: tree.depth(tip) }
            }
            OpenBranch::Unopened { parent, probability, .. } => BranchState {
                confidence: tree.confidence(parent) * probability,
                tokens: 0,
                depth: tree.depth(parent),
            },
        };
        self.branches.iter().map(see).collect()
    }

    /// Drops the least confident unopened branches until at most [`MAX_BRANCHES`] compete.
    fn narrow(&mut self, tree: &TokenTree) {
        while self.branches.len() > MAX_BRANCHES {
            let seen = self.competing(tree);
            let unopened = seen.iter().enumerate().filter(|(_, branch)| branch.tokens == 0);
            let least = unopened.min_by(|a, b| a.1.confidence.total_cmp(&b.1.confidence));
            match least {
                Some((index, _)) => drop(self.branches.remove(index)),
                None => return,
            }
        }
    }
}

impl TreeGrowth for BranchSelector {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        while let Some(index) = next_branch(&self.competing(tree)).filter(|_| !tree.is_full()) {
            match self.branches[index] {
                OpenBranch::Unopened { parent, token, probability } => {
                    let tip = tree.push(parent, token, probability);
                    self.branches[index] = OpenBranch::At { tip, tokens: 1 };
                    return Ok(true);
                }
                OpenBranch::At { tip, tokens } => {
                    let guesses = draft.guesses(tree, tip)?;
                    let Some((first, others)) = guesses.split_first() else {
                        self.branches.remove(index);
                        continue;
                    };
                    let next = tree.push(tip, first.token, first.probability);
                    self.branches[index] = OpenBranch::At { tip: next, tokens: tokens + 1 };
                    let unopened = others.iter().map(|guess| OpenBranch::Unopened {
                        parent: tip,
                        token: guess.token,
                        probability: guess.probability,
                    });
                    self.branches.extend(unopened);
                    self.narrow(tree);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests;
