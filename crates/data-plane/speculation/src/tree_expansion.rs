//! Which branch gets the next token: the width-adaptive tree and its pacer (EdgeLLM §III-B, L-02 to L-04).
//!
//! A likely branch should be long and an unlikely one short: `L_i = C_i · M` (Eq. 1), with M tokens in the tree, and C_i
//! branch i's confidence as a part of all branches' (else the lengths would not add up to M). D, the tokens that the
//! shortest-fallen branch lacks, is how far a tree is from that (Eq. 2):
//!
//! ```text
//! D = max_i (M · C_i - T_i)
//! ```
//!
//! with T_i tokens in branch i, those before its fork being its parent's. The next token goes where it makes D least. That is
//! the branch that lacks most, `M` counting the token that is about to come.
//!
//! Branches that nobody has *opened* compete too: each guess besides the first, at any place, is one of no tokens so far. So
//! the tree is as wide as its draft is unsure. One step is one token of one branch: small machines gain nothing from drafting
//! several branches at once.

use std::fmt;

use crate::{
    draft::Draft,
    tree::{MAX_NODES, NodeId, RerootedTree, Segments, TokenTree},
};

/// Most branches that compete; the paper keeps what it verifies at once below ten.
pub const MAX_BRANCHES: usize = 10;

/// How a tree grows.
pub trait TreeGrowth: fmt::Debug {
    /// Gives `tree` one more token. False: it has all it is to have.
    ///
    /// # Errors
    /// The draft's own; the tree is as it was.
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error>;
}

/// Lets `tree` grow to `max_nodes` at most, or until the tree is to be verified, which is asked after every token.
///
/// # Errors
/// The draft's own; the tree has what it got before.
pub fn grow<D: Draft + ?Sized>(
    tree: &mut TokenTree,
    (growth, draft): (&mut impl TreeGrowth, &mut D),
    max_nodes: usize,
    mut is_due: impl FnMut(&TokenTree) -> bool,
) -> Result<(), D::Error> {
    while tree.len() < max_nodes.min(MAX_NODES) && !is_due(tree) && growth.step(tree, draft)? {}
    Ok(())
}

/// A branch as the pacer sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BranchState {
    /// Its confidence C, up to its last token.
    pub confidence: f64,
    /// Tokens T behind its fork; 0 before it is opened.
    pub tokens: usize,
    /// Tokens between the root and where its next one will be.
    pub depth: usize,
}

/// What each branch lacks of its length once the tree has a token more: `M · C_i / ΣC - T_i`.
fn deficits(branches: &[BranchState]) -> impl Iterator<Item = f64> {
    let after = 1 + branches.iter().map(|branch| branch.tokens).sum::<usize>();
    let sum: f64 = branches.iter().map(|branch| branch.confidence).sum();
    let per_confidence = if sum > 0.0 { after as f64 / sum } else { 0.0 };
    branches.iter().map(move |branch| per_confidence * branch.confidence - branch.tokens as f64)
}

/// The branch that gets the next token: the one that lacks most; of equal ones the more confident, then the shallower, then
/// the first. `None` if there is none.
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

/// A branch of the tree that grows.
#[derive(Debug, Clone, Copy, PartialEq)]
enum OpenBranch {
    /// It ends at this node, or at the root.
    At { tip: Option<NodeId>, tokens: usize },
    /// A guess that was not the first behind its parent.
    Unopened { parent: Option<NodeId>, token: u32, probability: f64 },
}

/// What a pacer does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpandAction {
    /// It asks what comes behind this node, or the root.
    Ask(Option<NodeId>),
    /// It opens a branch that was guessed already.
    Open,
    /// Nothing: there is no branch, or no room.
    End,
}

/// See the module.
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
    /// For a tree that goes on growing: its segments are the branches, and nobody knows of guesses that were not opened.
    pub(crate) fn new(tree: &TokenTree) -> Self {
        let segments = Segments::of(tree);
        let branches = segments.iter().map(|segment| {
            let own = &segments.nodes()[segment.own.rows.clone()];
            OpenBranch::At { tip: own.last().copied().flatten(), tokens: own.iter().flatten().count() }
        });
        Self { branches: branches.collect() }
    }

    /// Whoever had no more to say behind a branch of `tree` may by now.
    pub(crate) fn reopen(&mut self, tree: &TokenTree) {
        let before = std::mem::replace(self, Self::new(tree));
        let unopened =
            before.branches.into_iter().filter(|branch| matches!(branch, OpenBranch::Unopened { .. }));
        self.branches.extend(unopened);
    }

    /// The same behind another root: of what is left of the tree, and of guesses that nobody opened in it.
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

    /// What it does with `tree` next.
    #[must_use]
    pub fn next_action(&self, tree: &TokenTree) -> ExpandAction {
        match next_branch(&self.competing(tree)).filter(|_| !tree.is_full()).map(|index| self.branches[index])
        {
            Some(OpenBranch::At { tip, .. }) => ExpandAction::Ask(tip),
            Some(OpenBranch::Unopened { .. }) => ExpandAction::Open,
            None => ExpandAction::End,
        }
    }

    /// The branches that compete, in the order of `self.branches`.
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

    /// Lets the least confident of the unopened branches go until no more than [`MAX_BRANCHES`] compete.
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
