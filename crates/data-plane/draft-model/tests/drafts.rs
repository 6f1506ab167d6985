//! A draft model for several texts: its draft tokens do not depend on other texts or on its memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use testkit::paths::golden_model as golden;

use draft_model::{
    draft::ModelDraft,
    drafter::Drafter,
    load::{DraftError, DraftOptions, by_itself, by_model},
};
use model::weights::first::FirstLayers;
use model::{
    adapter::{Adapter, DraftAdapter, DraftShape, LoraModule, MethodWeights},
    resident::{KvPrecision, LoadedWeights, SharedBase},
    shape::{layout::linear_shape, source::Target},
    sources::open::open,
};
use model_files::{model_files::ModelFiles, token_list::TokenList};
use speculation::{
    calibration::Calibration,
    draft::{CostedDraft as _, Draft as _},
    tree::{NodeId, TokenTree},
};
use types::AdapterVersion;

fn base() -> SharedBase {
    LoadedWeights::open(&*open(&golden("llama-tied")).unwrap(), None, 2, &|_| {}).unwrap().shared()
}

fn options(bytes: u64) -> DraftOptions {
    DraftOptions { cores: Vec::new(), bytes, kv_dtype: Some(KvPrecision::F16) }
}

/// Draft adapter of the base's own layers, one of them slightly changed, with `shortlist`.
fn draft(base: &SharedBase, shortlist: Option<&[u32]>) -> DraftAdapter {
    let [rows, columns] = linear_shape(base.config(), Target::Q);
    let values = |count: usize| (0..count).map(|at| (at % 7) as f32 / 100.0).collect();
    let module =
        LoraModule { layer: 0, target: Target::Q, rank: 1, scale: 1.0, a: values(columns), b: values(rows) };
    let adapter = Adapter {
        generation: AdapterVersion([1; 32]),
        method: MethodWeights::Lora(vec![module]),
        base_model: None,
        stored_in_16_bits: false,
    };
    let shape = DraftShape { layers: base.config().layers, shortlist: shortlist.map(Into::into) };
    DraftAdapter { shape, adapter }
}

fn opened(bytes: u64, shortlist: Option<&[u32]>) -> Drafter<FirstLayers> {
    let base = base();
    by_itself(&base, &draft(&base, shortlist), &options(bytes)).unwrap().drafter
}

fn prompt(salt: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| (at * 31 + salt * 17 + at * at) % 200).collect()
}

/// Chain of the most likely tokens after position `at`.
fn chain(draft: &mut ModelDraft<FirstLayers>, tokens: usize) -> Vec<(u32, u64)> {
    let (mut tree, mut at): (_, Option<NodeId>) = (TokenTree::new(), None);
    let mut guessed = Vec::new();
    for _ in 0..tokens {
        let guesses = draft.guesses(&tree, at).unwrap();
        assert!(guesses.windows(2).all(|pair| pair[0].probability >= 0.0 && pair[1].probability >= 0.0));
        guessed.push((guesses[0].token, guesses[0].probability.to_bits()));
        at = tree.push(at, guesses[0].token, guesses[0].probability);
    }
    guessed
}

#[test]
fn a_text_has_its_guesses_whatever_else_is_read_and_however_little_is_kept() {
    let (alone, scarce) = (opened(16 << 20, None), opened(96 << 10, None));
    let wanted: Vec<_> =
        (0..4).map(|salt| chain(&mut alone.text(&prompt(salt, 40), Calibration::default()), 6)).collect();
    let mut texts: Vec<_> =
        (0..4).map(|salt| scarce.text(&prompt(salt, 40), Calibration::default())).collect();
    for _ in 0..3 {
        for (text, wanted) in texts.iter_mut().zip(&wanted) {
            assert_eq!(&chain(text, 6), wanted);
            text.begin(&prompt(wanted.len() as u32, 3));
            chain(text, 1);
        }
        for (salt, text) in (0..).zip(&mut texts) {
            text.begin(&prompt(salt, 40));
        }
    }
}

#[test]
fn what_several_texts_are_about_to_be_asked_is_said_in_one_pass_and_as_alone() {
    let alone = opened(16 << 20, None);
    let prompts = [prompt(0, 40), prompt(1, 33), prompt(2, 48), prompt(3, 17)];
    let wanted = prompts.each_ref().map(|prompt| chain(&mut alone.text(prompt, Calibration::default()), 6));
    for bytes in [16 << 20, 96 << 10] {
        let together = opened(bytes, None);
        let texts = prompts.each_ref().map(|prompt| together.text(prompt, Calibration::default()));
        let mut texts = texts.map(|text| (text, TokenTree::new(), None::<NodeId>));
        let mut said = prompts.each_ref().map(|_| Vec::new());
        for level in 0..6 {
            for (text, tree, at) in &mut texts {
                text.read_ahead(10.0);
                text.prefetch_logits(tree, *at);
            }
            texts.iter_mut().for_each(|(text, ..)| _ = text.take_spent());
            for (index, (text, tree, at)) in texts.iter_mut().enumerate() {
                let guesses = text.guesses(tree, *at).unwrap();
                let was_read = !text.take_spent().is_zero();
                let is_first = index == 0;
                assert!(was_read == is_first || bytes < 1 << 20, "text {index}, level {level}");
                said[index].push((guesses[0].token, guesses[0].probability.to_bits()));
                *at = tree.push(*at, guesses[0].token, guesses[0].probability);
            }
        }
        assert_eq!(said, wanted, "{bytes} bytes");
    }
}

#[test]
fn what_was_foreseen_and_is_not_asked_for_is_not_read() {
    let drafter = opened(16 << 20, None);
    let mut texts = [1, 2].map(|salt| drafter.text(&prompt(salt, 10), Calibration::default()));
    let expected = texts.each_mut().map(|text| chain(text, 1));
    for text in &mut texts {
        text.prefetch_logits(&TokenTree::new(), None);
    }
    let owed_s = texts[0].owed_s();
    assert!(owed_s > 0.0);
    texts[1].begin(&prompt(3, 10));
    assert!(texts[0].owed_s() < owed_s, "another text begins");
    assert_eq!(chain(&mut texts[0], 1), expected[0]);
    assert_eq!(texts[0].owed_s(), 0.0);
}

#[test]
fn a_guess_goes_on_from_what_the_target_said_and_is_trusted_as_it_was_right() {
    let drafter = opened(16 << 20, None);
    let mut text = drafter.text(&prompt(1, 30), Calibration::default());
    let usual = text.usual();
    for _ in 0..10 {
        let next = chain(&mut text, 1)[0].0;
        text.accept(&[next]).unwrap();
    }
    assert!(text.usual() > usual && text.calibration() != &Calibration::default());
    let again = chain(&mut text, 3);
    let mut whole = prompt(1, 30);
    let mut fresh = drafter.text(&whole, Calibration::default());
    for _ in 0..10 {
        let next = chain(&mut fresh, 1)[0].0;
        fresh.begin(&[]);
        whole.push(next);
        fresh.begin(&whole);
    }
    let tokens = |chain: &[(u32, u64)]| chain.iter().map(|guess| guess.0).collect::<Vec<_>>();
    assert_eq!(tokens(&chain(&mut fresh, 3)), tokens(&again));
    let before = text.usual();
    (0..10).for_each(|_| {
        let wrong = (chain(&mut text, 1)[0].0 + 1) % 200;
        text.accept(&[wrong]).unwrap();
    });
    assert!(text.usual() < before);
}

#[test]
fn a_shortlist_is_all_that_is_guessed() {
    let ids: Vec<u32> = (0..200).step_by(9).collect();
    let drafter = opened(16 << 20, Some(&ids));
    let mut text = drafter.text(&prompt(2, 20), Calibration::default());
    assert!(chain(&mut text, 8).iter().all(|(token, _)| ids.contains(token)));
}

#[test]
fn reading_ahead_makes_a_guess_cheap_and_what_cannot_be_read_is_never_guessed_at() {
    let drafter = opened(1 << 20, None);
    let mut text = drafter.text(&prompt(3, 200), Calibration::default());
    assert_eq!(text.guess_s(&TokenTree::new(), None), None, "nobody has timed it");
    text.read_ahead(0.0);
    assert!(text.take_spent().is_zero(), "there was no time");
    text.read_ahead(10.0);
    assert!(!text.take_spent().is_zero() && text.take_spent().is_zero());
    let cheap = text.guess_s(&TokenTree::new(), None).unwrap();
    let dear = drafter.text(&prompt(4, 200), Calibration::default()).guess_s(&TokenTree::new(), None);
    assert!(cheap < dear.unwrap(), "{cheap} s, and {dear:?} s with all of it to be read");
    let mut strange = drafter.text(&[1, 2, u32::MAX], Calibration::default());
    assert!(strange.guesses(&TokenTree::new(), None).unwrap().is_empty());
    assert_eq!(strange.guess_s(&TokenTree::new(), None), Some(f64::INFINITY));
    strange.read_ahead(10.0);
    assert!(strange.take_spent().is_zero());
}

#[test]
fn what_cannot_draft_is_refused_with_what_to_do() {
    let base = base();
    let refused = by_itself(&base, &draft(&base, None), &options(100)).unwrap_err();
    assert!(matches!(refused, DraftError::TooFewBytes { bytes: 100, .. }), "{refused}");
    let path = golden("llama-tied");
    let Ok(tokens) = TokenList::of(&ModelFiles::at(&path).unwrap()) else { return };
    let twin = by_model(&path, (&tokens, base.config().vocab_size), &options(1 << 20)).unwrap();
    assert!(twin.bytes > 1 << 10);
    let nowhere = by_model(&path.join("nowhere"), (&tokens, 1), &options(1 << 20)).unwrap_err();
    assert!(matches!(nowhere, DraftError::Find(_)), "{nowhere}");
}
