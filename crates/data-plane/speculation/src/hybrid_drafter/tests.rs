use scheduling::perf::linear_fit::LinearFit;

use super::*;
use crate::{
    ngram::AcceptanceTable,
    tree_expansion::{BranchSelector, grow},
};

/// A model that predicts the previous token plus 50 in one second.
#[derive(Debug)]
struct Fifty {
    last: u32,
    usual: f64,
    guess_s: Option<f64>,
    asked: usize,
}

impl Fifty {
    fn new(usual: f64, guess_s: Option<f64>) -> Self {
        Self { last: 0, usual, guess_s, asked: 0 }
    }
}

impl Draft for Fifty {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.last = tokens.last().copied().unwrap_or(self.last);
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        self.asked += 1;
        let token = at.map_or(self.last, |at| tree.token(at)) + 50;
        Ok(vec![DraftToken { token, probability: self.usual }])
    }
}

impl CostedDraft for Fifty {
    fn guess_s(&self, _: &TokenTree, _: Option<NodeId>) -> Option<f64> {
        self.guess_s
    }

    fn usual(&self) -> f64 {
        self.usual
    }
}

fn price(slope: f64, left_s: f64, probe: ProbePolicy) -> DraftCost {
    let cost = LinearFit { alpha: slope, beta: 10.0 };
    DraftCost::Worth { step: StepEstimate { cost, rows: 1, sequences: 1, drafting_s: 0.0 }, left_s, probe }
}

fn drafted(mut model: Fifty, price: Option<DraftCost>) -> (Vec<u32>, HybridDrafter<Fifty>) {
    let mut table = Ngram::new(&[1, 2, 3, 9, 1], AcceptanceTable::default());
    let Ok(()) = table.accept(&[2]);
    model.last = 2;
    let mut combined = HybridDrafter::new(table, model);
    price.into_iter().for_each(|price| combined.set_price(price));
    let mut tree = TokenTree::new();
    let Ok(()) = grow(&mut tree, (&mut BranchSelector::default(), &mut combined), 4, |_| false);
    assert!(
        tree.nodes().all(|node| combined.is_of_model(&tree, node) == (tree.token(node) >= 50)),
        "{tree:?}: {:?}",
        combined.of_model
    );
    (tree.nodes().map(|node| tree.token(node)).collect(), combined)
}

#[test]
fn without_a_price_the_model_is_not_asked() {
    let (tokens, combined) = drafted(Fifty::new(0.9, Some(0.1)), None);
    assert_eq!((tokens[0], combined.model.asked), (3, 0));
}

#[test]
fn a_model_that_knows_better_is_asked_and_one_that_does_not_is_spared() {
    let (tokens, combined) = drafted(Fifty::new(0.9, Some(0.1)), Some(price(0.1, 100.0, ProbePolicy::No)));
    assert_eq!(tokens[0], 52);
    assert!(combined.model.asked >= 2, "also behind what it guessed");
    // The token after 1 2 has an acceptance probability of 0.3.
    let (tokens, combined) = drafted(Fifty::new(0.2, Some(0.1)), Some(price(0.1, 100.0, ProbePolicy::No)));
    assert_eq!((tokens[0], combined.model.asked), (3, 0));
}

#[test]
fn a_guess_that_takes_longer_than_it_promises_to_save_is_not_asked_for_but_to_see() {
    // A step takes 10.1 seconds, six of them for a token that is accepted in six of ten more cases.
    let dear = |probe| drafted(Fifty::new(0.9, Some(8.0)), Some(price(0.1, 100.0, probe))).1.model.asked;
    assert_eq!((dear(ProbePolicy::No), dear(ProbePolicy::Due)), (0, 1));
    let cheap = drafted(Fifty::new(0.9, Some(1.0)), Some(price(0.1, 100.0, ProbePolicy::No))).1;
    assert!(cheap.model.asked > 0);
}

#[test]
fn while_nobody_waits_a_guess_is_asked_for_that_is_done_in_time() {
    let asked =
        |guess_s, left_s| drafted(Fifty::new(0.9, guess_s), Some(DraftCost::Free { left_s })).1.model.asked;
    assert_eq!((asked(Some(8.0), 7.0), asked(Some(8.0), 17.0), asked(None, 100.0)), (0, 2, 0));
}

#[test]
fn no_more_time_is_spent_than_there_is() {
    let asked = |left_s| {
        drafted(Fifty::new(0.99, Some(1.0)), Some(price(0.01, left_s, ProbePolicy::Due))).1.model.asked
    };
    assert_eq!((asked(0.9), asked(2.5)), (0, 2));
}

#[test]
fn what_the_model_guessed_further_on_is_remembered_where_the_target_came_by() {
    let (tokens, mut combined) =
        drafted(Fifty::new(0.9, Some(0.1)), Some(price(0.1, 100.0, ProbePolicy::No)));
    assert_eq!(tokens[..2], [52, 102]);
    let Ok(()) = combined.accept(&[52]);
    let mut tree = TokenTree::new();
    let node = tree.push(None, 102, 0.9).expect("there is room");
    assert!(combined.is_of_model(&tree, node) && combined.was_asked());
    let Ok(()) = combined.accept(&[7]);
    assert!(!combined.is_of_model(&tree, node) && !combined.was_asked());
}

#[test]
fn what_is_foreseen_is_paid_once_and_asked_as_was_decided_then() {
    let mut combined =
        HybridDrafter::new(Ngram::new(&[7], AcceptanceTable::default()), Fifty::new(0.9, Some(1.0)));
    let tree = TokenTree::new();
    combined.set_price(price(0.1, 1.5, ProbePolicy::No));
    combined.prefetch_logits(&tree, None);
    combined.set_price(price(0.1, 0.0, ProbePolicy::No));
    assert!(!combined.guesses(&tree, None).unwrap().is_empty(), "it was paid for");
    assert!(combined.guesses(&tree, None).unwrap().is_empty(), "there is no time for another");
    combined.prefetch_logits(&tree, None);
    combined.set_price(price(0.1, 1.5, ProbePolicy::No));
    assert!(combined.guesses(&tree, None).unwrap().is_empty(), "nobody was told to answer along");
    assert_eq!(combined.model().asked, 1);
}
