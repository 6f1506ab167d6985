//! Tests of the selector against its definition.

use proptest::prelude::*;

use super::*;
use crate::{draft::tests::HashedDraft, tree::MAX_NODES};

/// Computes D of Eq. 2 after branch `given` gets one more token.
fn distance(branches: &[BranchState], given: usize) -> f64 {
    let m = 1 + branches.iter().map(|branch| branch.tokens).sum::<usize>();
    let sum: f64 = branches.iter().map(|branch| branch.confidence).sum();
    let lacks = branches.iter().enumerate().map(|(index, branch)| {
        let tokens = branch.tokens + usize::from(index == given);
        m as f64 * branch.confidence / sum - tokens as f64
    });
    lacks.fold(f64::NEG_INFINITY, f64::max)
}

fn any_branch() -> impl Strategy<Value = BranchState> {
    (1_u32..=20, 0_usize..12, 0_usize..12).prop_map(|(confidence, tokens, depth)| BranchState {
        confidence: f64::from(confidence) / 20.0,
        tokens,
        depth,
    })
}

proptest! {
    #[test]
    fn the_next_token_goes_where_it_makes_the_distance_least(
        branches in prop::collection::vec(any_branch(), 1..=MAX_BRANCHES),
    ) {
        let chosen = next_branch(&branches).unwrap();
        let distances: Vec<f64> = (0..branches.len()).map(|given| distance(&branches, given)).collect();
        let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
        prop_assert!(distances[chosen] <= least + 1e-9);
        let lacks: Vec<f64> = deficits(&branches).collect();
        for (index, branch) in branches.iter().enumerate().filter(|&(index, _)| lacks[index] == lacks[chosen]) {
            let (a, b) = (branches[chosen], branch);
            prop_assert!(
                a.confidence > b.confidence || a.confidence == b.confidence && a.depth <= b.depth,
                "{chosen} before {index}"
            );
        }
    }

    /// L-02: a step adds one token, with one draft run at most. Branches have the segments' lengths.
    #[test]
    fn a_step_gives_one_token_to_one_branch(steps in 1_usize..=MAX_NODES, width in 1_usize..=4) {
        let mut draft = HashedDraft { width, runs: Vec::new() };
        let (mut selector, mut tree) = (BranchSelector::default(), TokenTree::new());
        for step in 1..=steps {
            let runs = draft.runs.len();
            prop_assert!(selector.step(&mut tree, &mut draft).unwrap());
            prop_assert_eq!(tree.len(), step);
            prop_assert!(draft.runs.len() <= runs + 1);
            prop_assert!(selector.branches.len() <= MAX_BRANCHES);
        }
        let opened = |selector: &BranchSelector| -> Vec<(Option<NodeId>, usize)> {
            let mut opened: Vec<_> = selector.branches.iter().filter_map(|branch| match *branch {
                OpenBranch::At { tip, tokens } => Some((tip, tokens)),
                OpenBranch::Unopened { .. } => None,
            }).collect();
            opened.sort_unstable();
            opened
        };
        prop_assert_eq!(opened(&selector), opened(&BranchSelector::new(&tree)));
    }
}

#[test]
fn with_one_guess_for_each_place_the_tree_is_a_chain() {
    let mut draft = HashedDraft { width: 1, runs: Vec::new() };
    let mut tree = TokenTree::new();
    grow(&mut tree, (&mut BranchSelector::default(), &mut draft), 12, |_| false).unwrap();
    assert_eq!(tree.depth(tree.nodes().next_back()), 12);
    assert_eq!(draft.runs.len(), 12);
}

#[test]
fn a_likely_branch_is_long_and_unlikely_ones_are_short() {
    let mut draft = HashedDraft { width: 3, runs: Vec::new() };
    let mut tree = TokenTree::new();
    grow(&mut tree, (&mut BranchSelector::default(), &mut draft), 40, |_| false).unwrap();
    let branches = BranchSelector::new(&tree).competing(&tree);
    let sum: f64 = branches.iter().map(|branch| branch.confidence).sum();
    for branch in &branches {
        let due = tree.len() as f64 * branch.confidence / sum;
        assert!((branch.tokens as f64) <= due.max(1.0) + 6.0, "{branch:?} of {due}");
    }
    assert!(branches.len() > 2, "it is wide where the draft is unsure");
}
