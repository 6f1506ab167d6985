//! Tests of the index against a linear search, and of the acceptance table.

use proptest::prelude::*;

use super::*;
use crate::tree_expansion::{BranchSelector, grow};

fn guesses(draft: &mut Ngram, tree: &TokenTree, at: Option<NodeId>) -> Vec<DraftToken> {
    draft.guesses(tree, at).unwrap()
}

proptest! {
    /// The first draft token follows the longest match, if the drafter compares all matches.
    #[test]
    fn the_first_guess_stood_behind_the_longest_match(text in prop::collection::vec(0_u32..12, 1..60)) {
        let draft = Ngram::new(&text, AcceptanceTable::default());
        let found = draft.lookup(&text);
        let longest = (1..text.len()).map(|place| matched(&text[..place], &text)).max().unwrap_or(0);
        prop_assert_eq!(found.first().map_or(0, |found| found.matched), longest);
        for found in &found {
            let stood = (1..text.len())
                .any(|place| text[place] == found.token && matched(&text[..place], &text) == found.matched);
            prop_assert!(stood, "{found:?}");
        }
    }

    #[test]
    fn token_by_token_and_all_at_once_make_one_index(text in prop::collection::vec(0_u32..6, 0..80), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(text.len() + 1);
        let whole = Ngram::new(&text, AcceptanceTable::default());
        let mut grown = Ngram::new(&text[..cut], AcceptanceTable::default());
        grown.accept(&text[cut..]).unwrap();
        prop_assert_eq!(whole.before, grown.before);
        prop_assert_eq!(whole.latest, grown.latest);
    }

    #[test]
    fn guesses_for_a_place_exclude_each_other(text in prop::collection::vec(0_u32..5, 0..80)) {
        let mut draft = Ngram::new(&[], AcceptanceTable::default());
        draft.accept(&text).unwrap();
        let guesses = guesses(&mut draft, &TokenTree::new(), None);
        prop_assert!(guesses.iter().map(|guess| guess.probability).sum::<f64>() <= 1.0 + 1e-9);
        prop_assert!(guesses.len() <= MAX_GUESSES);
        for (index, guess) in guesses.iter().enumerate() {
            prop_assert!(guesses[..index].iter().all(|other| other.token != guess.token));
        }
    }
}

#[test]
fn a_text_that_repeats_is_drafted_on_and_two_continuations_make_a_tree() {
    let text = [1, 2, 3, 4, 5, 9, 9, 1, 2, 3, 7, 8, 9, 9, 1, 2, 3];
    let mut draft = Ngram::new(&text, AcceptanceTable::default());
    let mut tree = TokenTree::new();
    grow(&mut tree, (&mut BranchSelector::default(), &mut draft), 8, |_| false).unwrap();
    // The longer match, 9 9 1 2 3, was followed by 7. The match 1 2 3 was also followed by 4.
    let behind_root: Vec<u32> = tree.children(None).map(|node| tree.token(node)).collect();
    assert_eq!(behind_root, [7, 4]);
    let seven = tree.child(None, 7);
    assert!(tree.child(seven, 8).is_some());
}

#[test]
fn trust_follows_what_the_text_does() {
    let repeating: Vec<u32> = (0..400).map(|place| place % 20).collect();
    let mut draft = Ngram::new(&repeating[..40], AcceptanceTable::default());
    draft.accept(&repeating[40..]).unwrap();
    let sure = guesses(&mut draft, &TokenTree::new(), None)[0];
    assert_eq!(sure.token, 0);
    assert!(sure.probability > 0.97, "{sure:?}");

    // A pair that another token follows at each occurrence predicts nothing.
    let mut draft = Ngram::new(&[1, 2], AcceptanceTable::default());
    for other in 100..200 {
        draft.accept(&[other, 1, 2]).unwrap();
    }
    let unsure = guesses(&mut draft, &TokenTree::new(), None)[0];
    assert!(unsure.probability < 0.05, "{unsure:?}");
}
