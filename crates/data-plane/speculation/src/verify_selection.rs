//! The choice of draft tokens that are worth a row of the pass.
//!
//! A pass of `r` rows takes `t(r) = base + slope · r`. If the base is memory, disk or network traffic of
//! weights, one more row is cheap; if it is arithmetic, the row is expensive. A draft token is worth its row
//! if it increases the tokens per second. With `E` tokens expected already and confidence `C`:
//!
//! ```text
//! (E + C) / t(r + 1) > E / t(r)    that is    C > E · slope / t(r)
//! ```
//!
//! A node's confidence is its parent's times its own probability. Order by confidence thus puts parents
//! first, the best set of each size is a prefix of that order, and the first node that is not worth its row
//! ends the search. The right side serves as the paper's threshold, derived from costs.

use scheduling::perf::linear_fit::LinearFit;

use crate::tree::{NodeId, NodeSet, TokenTree};

/// Maximum relative slowdown of a step by verification of drafts, for the other sequences in the step.
pub const MAX_SLOWDOWN: f64 = 0.05;

/// Estimate of a step without drafts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepEstimate {
    /// Duration of a step in seconds, by its number of rows.
    pub cost: LinearFit,
    /// Number of rows without drafts.
    pub rows: usize,
    /// Number of sequences that get their next token from the step.
    pub sequences: usize,
    /// Seconds that drafting for this step took; every sequence in the step waits for it.
    pub drafting_s: f64,
}

impl StepEstimate {
    /// Returns the seconds that drafting may still add; infinite for a single sequence.
    #[must_use]
    pub fn spare_s(&self) -> f64 {
        if self.sequences <= 1 {
            return f64::INFINITY;
        }
        (self.plain_s() * MAX_SLOWDOWN - self.drafting_s).max(0.0)
    }

    /// Returns the step's duration without drafts, in seconds.
    #[must_use]
    pub fn plain_s(&self) -> f64 {
        self.cost.at(self.rows as f64)
    }

    /// Returns the seconds from the beginning of drafting to the end of a step with `drafted` draft tokens.
    fn drafted_s(&self, drafted: usize) -> f64 {
        self.cost.at((self.rows + drafted) as f64) + self.drafting_s
    }
}

/// Whether one more draft prediction of `guess_s` seconds increases the tokens per second. `confidence` is
/// the expected gain in accepted tokens. The comparison includes all drafting time of the step so far.
#[must_use]
pub fn is_worth_asking(step: &StepEstimate, guess_s: f64, tree: &TokenTree, confidence: f64) -> bool {
    // Other sequences in the step gain nothing from the prediction.
    let with_it_s = step.drafted_s(tree.len() + 1) + guess_s;
    let is_in_time = step.sequences <= 1 || with_it_s <= step.plain_s() * (1.0 + MAX_SLOWDOWN);
    let kept = worth(step, &[tree]).kept[0];
    let expected = step.sequences as f64 + kept.iter().map(|node| tree.confidence(Some(node))).sum::<f64>();
    is_in_time && confidence * step.drafted_s(kept.len()) > expected * (step.cost.alpha + guess_s)
}

/// The draft tokens that are to be verified.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifySelection {
    /// Nodes of each tree, with all their ancestors.
    pub kept: Vec<NodeSet>,
    /// Confidence above which one more token would be worth its row.
    pub least_confidence: f64,
}

/// Selects the nodes of `trees`, drafted for sequences of one step, that are worth their rows.
///
/// The selection maximizes tokens per second if no sequence in the step then waits more than [`MAX_SLOWDOWN`]
/// longer per token. Otherwise the step's duration is limited to that slowdown.
#[must_use]
pub fn worth(step: &StepEstimate, trees: &[&TokenTree]) -> VerifySelection {
    let nodes =
        |(index, tree): (usize, &&TokenTree)| tree.nodes().map(|node| (index, node)).collect::<Vec<_>>();
    let mut order: Vec<(usize, NodeId)> = trees.iter().enumerate().flat_map(nodes).collect();
    let confidence = |&(tree, node): &(usize, NodeId)| trees[tree].confidence(Some(node));
    // The sort is stable, so parents stay before children of equal confidence.
    order.sort_by(|a, b| confidence(b).total_cmp(&confidence(a)));
    let order: Vec<_> = order.into_iter().map(|node| (node, confidence(&node))).collect();
    let best = select_nodes(step, trees.len(), &order, f64::INFINITY);
    if is_fair(step, trees, &best.kept) {
        best
    } else {
        select_nodes(step, trees.len(), &order, 1.0 + MAX_SLOWDOWN)
    }
}

/// Takes nodes in `order`, each with its confidence, while they are worth their rows and the step takes at
/// most `times` as long as without drafts.
fn select_nodes(
    step: &StepEstimate,
    trees: usize,
    order: &[((usize, NodeId), f64)],
    times: f64,
) -> VerifySelection {
    let mut worth = VerifySelection { kept: vec![NodeSet::EMPTY; trees], least_confidence: 0.0 };
    let mut expected = step.sequences as f64;
    for (taken, next) in order.iter().map(Some).chain([None]).enumerate() {
        worth.least_confidence = least_confidence(step, expected, taken, times);
        let Some(&((tree, node), confidence)) = next.filter(|next| next.1 > worth.least_confidence) else {
            break;
        };
        worth.kept[tree] = worth.kept[tree].with(node);
        expected += confidence;
    }
    worth
}

/// Returns the confidence that one more row needs after `taken` draft rows, with `expected` tokens so far; 1,
/// which no confidence exceeds, if the step would take more than `times` as long.
fn least_confidence(step: &StepEstimate, expected: f64, taken: usize, times: f64) -> f64 {
    if step.drafted_s(taken + 1) > step.plain_s() * times {
        return 1.0;
    }
    let taken_s = step.drafted_s(taken);
    // Without a positive duration, no row is worth its cost.
    if taken_s > 0.0 { (expected * step.cost.alpha / taken_s).min(1.0) } else { 1.0 }
}

/// Whether no sequence waits more than [`MAX_SLOWDOWN`] longer per token because of the verified drafts.
fn is_fair(step: &StepEstimate, trees: &[&TokenTree], kept: &[NodeSet]) -> bool {
    let expected = |(tree, kept): (&&TokenTree, &NodeSet)| {
        1.0 + kept.iter().map(|node| tree.confidence(Some(node))).sum::<f64>()
    };
    let with_drafts = trees.iter().zip(kept).map(expected).fold(f64::INFINITY, f64::min);
    let least = if trees.len() < step.sequences { 1.0 } else { with_drafts };
    let drafted = kept.iter().map(|kept| kept.len()).sum();
    step.drafted_s(drafted) <= step.plain_s() * least * (1.0 + MAX_SLOWDOWN)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::tests::trees;

    /// Tokens per second if `kept` of each tree are verified.
    fn pace(step: &StepEstimate, trees: &[&TokenTree], kept: &[NodeSet]) -> f64 {
        let confidences = trees
            .iter()
            .zip(kept)
            .flat_map(|(tree, kept)| kept.iter().map(|node| tree.confidence(Some(node))));
        let rows = step.rows + kept.iter().map(|kept| kept.len()).sum::<usize>();
        (step.sequences as f64 + confidences.sum::<f64>()) / step.cost.at(rows as f64)
    }

    fn closed_sets(tree: &TokenTree) -> Vec<NodeSet> {
        let sets = (0_u32..1 << tree.len())
            .map(|bits| tree.nodes().filter(|node| bits >> node.index() & 1 == 1).collect());
        sets.filter(|set: &NodeSet| {
            set.iter().all(|node| tree.parent(node).is_none_or(|parent| set.contains(parent)))
        })
        .collect()
    }

    fn steps() -> impl Strategy<Value = StepEstimate> {
        (0.0..1.0_f64, 0.01..10.0_f64, 1_usize..20, 0_usize..3).prop_map(|(alpha, beta, rows, others)| {
            StepEstimate {
                cost: LinearFit { alpha, beta },
                rows,
                sequences: (2 + others).min(rows.max(2)),
                drafting_s: 0.0,
            }
        })
    }

    proptest! {
        #[test]
        fn no_other_choice_gives_more_tokens_in_a_second(step in steps(), a in trees(8), b in trees(5)) {
            let drafted = [&a, &b];
            let found = worth(&step, &drafted);
            let times = |kept: &[NodeSet]| {
                step.cost.at((step.rows + kept[0].len() + kept[1].len()) as f64) / step.cost.at(step.rows as f64)
            };
            let tokens = |tree: &TokenTree, kept: NodeSet| 1.0 + kept.iter().map(|node| tree.confidence(Some(node))).sum::<f64>();
            let slowest = tokens(&a, found.kept[0]).min(tokens(&b, found.kept[1]));
            let slowest = if step.sequences > 2 { 1.0 } else { slowest };
            prop_assert!(times(&found.kept) <= slowest * (1.0 + MAX_SLOWDOWN) * (1.0 + 1e-12), "nobody waits longer");
            // Any selection with more tokens makes another sequence wait too long.
            let within = |kept: &[NodeSet]| times(kept) <= 1.0 + MAX_SLOWDOWN;
            let best = closed_sets(&a)
                .iter()
                .flat_map(|&first| closed_sets(&b).into_iter().map(move |second| [first, second]))
                .filter(|kept| within(kept))
                .map(|kept| pace(&step, &drafted, &kept))
                .fold(0.0, f64::max);
            prop_assert!(pace(&step, &drafted, &found.kept) >= best * (1.0 - 1e-12));
            for (tree, kept) in drafted.iter().zip(&found.kept) {
                prop_assert_eq!(tree.pruned(*kept).len(), kept.len(), "parents are kept with their children");
            }
        }

        #[test]
        fn the_dearer_a_sweep_the_less_a_token_must_promise(tree in trees(20), alpha in 0.001..1.0_f64, beta in 0.1..10.0_f64) {
            let at = |base: f64| worth(&StepEstimate { cost: LinearFit { alpha, beta: base }, rows: 1, sequences: 1, drafting_s: 0.0 }, &[&tree]);
            let (cheap, dear) = (at(beta), at(beta * 2.0));
            prop_assert!(dear.kept[0].len() >= cheap.kept[0].len());
        }
    }

    #[test]
    fn where_everybody_gains_a_step_may_take_longer() {
        let chain = |length| {
            let mut tree = TokenTree::new();
            (0..length).fold(None, |tip, _| tree.push(tip, 1, 0.999));
            tree
        };
        let (long, other) = (chain(8), chain(8));
        let step = StepEstimate {
            cost: LinearFit { alpha: 0.1, beta: 1.0 },
            rows: 2,
            sequences: 2,
            drafting_s: 0.0,
        };
        let kept = |step: &StepEstimate| {
            worth(step, &[&long, &other]).kept.iter().map(|kept| kept.len()).sum::<usize>()
        };
        assert_eq!(kept(&step), 16);
        assert_eq!(kept(&StepEstimate { rows: 3, sequences: 3, ..step }), 0, "a third has nothing from it");
    }

    #[test]
    fn others_wait_no_longer_than_promised() {
        let mut tree = TokenTree::new();
        let mut chain = None;
        for _ in 0..20 {
            chain = tree.push(chain, 1, 0.999);
        }
        let cost = LinearFit { alpha: 0.01, beta: 1.0 };
        let kept = |sequences| {
            worth(&StepEstimate { cost, rows: 4, sequences, drafting_s: 0.0 }, &[&tree]).kept[0].len()
        };
        assert_eq!((kept(1), kept(4)), (20, 5), "5 % of 1.04 s are 5 rows");
    }

    #[test]
    fn the_time_that_drafting_took_counts_as_waiting() {
        let mut tree = TokenTree::new();
        tree.push(None, 1, 0.9);
        let cost = LinearFit { alpha: 0.001, beta: 1.0 };
        let kept = |sequences, drafting_s| {
            worth(&StepEstimate { cost, rows: sequences, sequences, drafting_s }, &[&tree]).kept[0].len()
        };
        assert_eq!((kept(2, 0.0), kept(2, 0.04)), (1, 1), "within 5 % of a second");
        assert_eq!((kept(2, 0.06), kept(1, 0.06)), (0, 1), "whoever is alone waits for nobody else");
    }

    #[test]
    fn a_guess_is_worth_its_time_where_it_is_shorter_than_what_it_saves() {
        let cost = LinearFit { alpha: 0.1, beta: 0.9 };
        let asks = |guess_s, sequences| {
            let step = StepEstimate { cost, rows: sequences, sequences, drafting_s: 0.0 };
            is_worth_asking(&step, guess_s, &TokenTree::new(), 0.8)
        };
        // Without the draft, one token per second; with it, 1.8 in 1.1 seconds plus the prediction.
        assert!(asks(0.2, 1) && asks(0.6, 1) && !asks(0.75, 1));
        assert!(!asks(0.2, 2), "another would wait a fifth longer");
    }

    #[test]
    fn guesses_that_took_no_time_do_not_make_the_next_one_dearer() {
        let cost = LinearFit { alpha: 0.0, beta: 1.0 };
        let asks = |second: bool| {
            let (mut tree, mut tip, mut drafting_s) = (TokenTree::new(), None, 0.0);
            loop {
                let step = StepEstimate { cost, rows: 1, sequences: 1, drafting_s };
                if !is_worth_asking(&step, 0.1, &tree, tree.confidence(tip) * 0.8) {
                    return tree.len() / if second { 2 } else { 1 };
                }
                drafting_s += 0.1;
                let next = tree.push(tip, 1, 0.8);
                if second {
                    tree.push(tip, 2, 0.1);
                }
                tip = next;
            }
        };
        // By hand: four promise 3.36 tokens in 1.4 s, and the fifth 0.328, above 3.36 x 0.1 / 1.4. Five: 3.69
        // in 1.5 s, and the sixth 0.262, above 0.246. Six: 3.95 in 1.6 s, and the seventh 0.210, below 0.247.
        assert_eq!(asks(false), 6);
        assert!(asks(true) >= 5, "a second guess of each place beside");
    }
}
