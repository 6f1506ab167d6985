//! Properties of all tree shapes.

use proptest::prelude::*;

use super::*;

/// Trees of up to `most` nodes with few different tokens, so that equal siblings occur.
pub(crate) fn trees(most: usize) -> impl Strategy<Value = TokenTree> {
    prop::collection::vec((any::<u8>(), 0_u32..3, 1_u32..=100), 0..most).prop_map(|guesses| {
        let mut tree = TokenTree::new();
        for (parent, token, percent) in guesses {
            let parent = usize::from(parent) % (tree.len() + 1);
            tree.push(parent.checked_sub(1).and_then(NodeId::new), token, f64::from(percent) / 100.0);
        }
        tree
    })
}

/// The tree of the paper's Figure 7. Token 8 follows 5, which is the second draft token after 3.
fn figure_7() -> TokenTree {
    let mut tree = TokenTree::new();
    let mut chain = None;
    for token in [1, 2, 3] {
        chain = tree.push(chain, token, 0.9);
    }
    let four = tree.push(chain, 4, 0.6);
    let five = tree.push(chain, 5, 0.3);
    let six = tree.push(four, 6, 0.9);
    tree.push(six, 7, 0.9);
    tree.push(five, 8, 0.9);
    tree
}

fn tokens(tree: &TokenTree, path: NodeSet) -> Vec<u32> {
    path.iter().map(|node| tree.token(node)).collect()
}

#[test]
fn a_token_of_the_papers_example_sees_its_own_branch() {
    let tree = figure_7();
    let eight = tree.nodes().find(|&node| tree.token(node) == 8).unwrap();
    assert_eq!(tokens(&tree, tree.path(eight)), [1, 2, 3, 5, 8]);
    let segments = Segments::of(&tree);
    assert_eq!(segments.tokens(&tree, 0), [0, 1, 2, 3, 4, 6, 7, 5, 8]);
    let own: Vec<RowSpan> = segments.iter().map(|segment| segment.own.clone()).collect();
    assert_eq!(own, [RowSpan { rows: 0..7, depth: 0 }, RowSpan { rows: 7..9, depth: 4 }]);
    assert_eq!(segments.iter().nth(1).unwrap().trunk, [RowSpan { rows: 0..4, depth: 0 }]);
    let branches = Segments::of_branches(&tree);
    assert_eq!(branches.tokens(&tree, 0), [0, 1, 2, 3, 4, 6, 7, 0, 1, 2, 3, 5, 8]);
}

#[test]
fn the_likeliest_branch_takes_the_likeliest_child_everywhere_and_the_first_of_equals() {
    let bet = |tree: &TokenTree| tree.likeliest_branch().map(|node| tree.token(node)).collect::<Vec<_>>();
    let mut tree = figure_7();
    assert_eq!(bet(&tree), [1, 2, 3, 4, 6, 7]);
    // A leaf likelier than the end of a long branch is less likely than that branch's first token.
    tree.push(None, 9, 0.5);
    assert_eq!(bet(&tree)[0], 1);
    tree.push(None, 10, 0.9);
    assert_eq!(bet(&tree)[0], 1);
    tree.push(None, 11, 0.95);
    assert_eq!(bet(&tree), [11]);
    assert_eq!(bet(&TokenTree::new()), []);
}

#[test]
fn the_confidence_of_a_tree_is_that_of_its_best_branch() {
    let tree = figure_7();
    let best = 0.9_f64.powi(5) * 0.6;
    assert!((tree.tree_confidence() - best).abs() < 1e-12);
    assert_eq!(TokenTree::new().tree_confidence(), 1.0);
}

#[test]
fn what_was_drafted_behind_the_targets_own_token_is_kept_and_nothing_else() {
    let mut tree = figure_7();
    let five = tree.child(tree.nodes().nth(2), 5);
    // The target accepted 1 2 3 and then emitted 5.
    let rerooted = tree.rerooted(&[1, 2, 3, 5]).unwrap();
    assert_eq!(rerooted.kept, tree.children(five).collect::<Vec<_>>());
    assert_eq!((rerooted.tree.len(), rerooted.tree.token(rerooted.tree.nodes().next().unwrap())), (1, 8));
    assert!((rerooted.tree.tree_confidence() - 0.9).abs() < 1e-12, "counted from the new root");
    assert_eq!(tree.rerooted(&[1, 2, 3, 5, 9]), None);
    assert_eq!(tree.rerooted(&[4]), None, "4 was guessed elsewhere");
    assert_eq!(tree.rerooted(&[]).unwrap().tree, tree);
    while !tree.is_full() {
        tree.push(five, 1_000 + tree.len() as u32, 0.1);
    }
    assert_eq!(tree.push(None, 77, 0.5), None);
    assert!(tree.push(None, 1, 0.5).is_some(), "equal siblings are one");
}

proptest! {
    #[test]
    fn parents_stand_before_children_and_confidences_are_products(tree in trees(MAX_NODES)) {
        for node in tree.nodes() {
            let parent = tree.parent(node);
            prop_assert!(parent.is_none_or(|parent| parent < node));
            prop_assert_eq!(tree.depth(Some(node)), tree.path(node).len());
            let product: f64 = tree.path(node).iter().map(|node| tree.log_probability(node)).sum();
            prop_assert!((product.exp() - tree.confidence(Some(node))).abs() < 1e-9);
            let twins = tree.children(parent).filter(|&other| tree.token(other) == tree.token(node));
            prop_assert_eq!(twins.count(), 1);
        }
    }

    /// L-05 without a mask: the trunk and the segment are, position by position, the path from the root.
    #[test]
    fn a_segment_and_its_trunk_are_the_way_from_the_root(tree in trees(MAX_NODES)) {
        let segments = Segments::of(&tree);
        prop_assert_eq!(segments.rows(), tree.len() + 1);
        let mut next_row = 0;
        for segment in segments.iter() {
            prop_assert_eq!(segment.own.rows.start, next_row);
            prop_assert!(!segment.own.rows.is_empty());
            next_row = segment.own.rows.end;
            let mut read = Vec::new();
            for stretch in segment.trunk.iter().chain([&segment.own]) {
                prop_assert_eq!(stretch.depth, read.len(), "no gap");
                prop_assert!(stretch.rows.end <= segment.own.rows.start || *stretch == segment.own);
                read.extend(stretch.rows.clone().map(|row| segments.nodes()[row]));
            }
            let leaf = segments.nodes()[segment.own.rows.end - 1];
            let mut way = vec![None];
            way.extend(leaf.into_iter().flat_map(|leaf| tree.path(leaf).iter()).map(Some));
            prop_assert_eq!(read, way);
        }
        prop_assert_eq!(next_row, segments.rows());
    }

    #[test]
    fn a_pruned_tree_has_what_is_kept_and_leads_back_to_the_root(tree in trees(30), kept in any::<u64>()) {
        let kept: NodeSet = tree.nodes().filter(|node| kept >> node.index() & 1 == 1).collect();
        let pruned = tree.pruned(kept);
        let whole = |node: &NodeId| tree.path(*node).iter().all(|node| kept.contains(node));
        let expected: Vec<Vec<u32>> =
            tree.nodes().filter(whole).map(|node| tokens(&tree, tree.path(node))).collect();
        let found: Vec<Vec<u32>> =
            pruned.nodes().map(|node| tokens(&pruned, pruned.path(node))).collect();
        prop_assert_eq!(found, expected);
    }
}
