//! Verified draft tokens equal those of plain decoding, with any drafter, and so does the KV cache
//! afterwards.

use std::{convert::Infallible, ops::ControlFlow, path::Path, thread, time::Duration};

use crate::support::{
    OFF, example_adapter, executor, generate, golden,
    oracle_draft::{AlternatingOracle, drafted, samplings},
    real_model,
    remote_loopback::RemoteLoopback,
    split, split_of, split_over, tiny, tokens,
};
use client::{
    generate::{GenerateFinish, GenerateRequest},
    speculative::{DraftPolicy, DraftingStats},
    split_model::{ClientAdapter, SplitModel, SplitOptions},
    text::Text,
};
use draft_model::load::{DraftError, DraftOptions, by_model};
use model_files::{model_files::ModelFiles, token_list::TokenList};
use speculation::{
    baselines::BaselineRule,
    calibration::Calibration,
    draft::{Draft, DraftToken},
    ngram::{AcceptanceTable, Ngram},
    threshold::Threshold,
    tree::{MAX_NODES, NodeId, TokenTree},
};

/// Model that drafts as many tokens as there are rows, at any cost; another test checks the cost rule.
fn eager(path: &Path) -> SplitModel {
    split_of(
        Box::new(executor(path)),
        path,
        &SplitOptions {
            effort: DraftPolicy::Compared(BaselineRule::Nodes(12)),
            kv_bytes: 32 << 20,
            ..SplitOptions::default()
        },
    )
}

struct SlowDraft(AlternatingOracle);

impl Draft for SlowDraft {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.0.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        thread::sleep(Duration::from_millis(1));
        self.0.guesses(tree, at)
    }

    fn takes_time(&self) -> bool {
        true
    }
}

fn far(path: &Path, round_trip: Duration) -> Box<RemoteLoopback> {
    Box::new(RemoteLoopback { executor: executor(path), round_trip })
}

fn adapter(model: &SplitModel) -> ClientAdapter {
    let paths = std::fs::read_dir(golden("adapters").join("llama-tied")).unwrap();
    let mut paths: Vec<_> = paths.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().find_map(|path| model.load_adapter(path).ok()).unwrap()
}

#[test]
fn drafted_answers_are_those_of_plain_decoding_token_for_token() {
    for name in ["llama-tied", "llama-bf16", "mistral-window"].iter().filter(|name| tiny(name).is_dir()) {
        let (mut plain, mut model) = (split(&tiny(name), OFF), eager(&tiny(name)));
        let vocab_size = plain.config().vocab_size;
        let own = (*name == "llama-tied").then(|| [adapter(&plain), adapter(&model)]);
        let (mut nodes, mut accepted) = (0, 0);
        for sampling in samplings(vocab_size) {
            for [of_plain, of_model] in
                [[None, None], [own.as_ref().map(|own| &own[0]), own.as_ref().map(|own| &own[1])]]
            {
                let task = GenerateRequest {
                    prompt: tokens(13, vocab_size),
                    sampling: sampling.clone(),
                    max_tokens: 40,
                    stop_tokens: Vec::new(),
                };
                let expected = generate(&mut plain, &task, of_plain);
                let mut planted = AlternatingOracle::new(&expected.tokens, vocab_size);
                let found = drafted(&mut model, &task, of_model, &mut planted);
                assert_eq!(
                    (&found.tokens, found.finish),
                    (&expected.tokens, expected.finish),
                    "{name}, planted"
                );
                nodes += found.drafted.nodes;
                accepted += found.drafted.accepted;
                let found = drafted(
                    &mut model,
                    &task,
                    of_model,
                    &mut Ngram::new(&task.prompt, AcceptanceTable::default()),
                );
                assert_eq!(found.tokens, expected.tokens, "{name}, its own past");
            }
        }
        assert!(accepted > 20 && nodes > accepted, "{name}: {accepted} of {nodes} came true");
    }
}

/// The KV cache of a verified branch equals that of plain decoding.
#[test]
fn what_is_kept_of_a_drafted_answer_serves_the_next_prompt() {
    let (mut plain, mut model) = (split(&tiny("llama-tied"), OFF), eager(&tiny("llama-tied")));
    let vocab_size = plain.config().vocab_size;
    let sampling = samplings(vocab_size).remove(1);
    let mut prompt = tokens(21, vocab_size);
    for _ in 0..3 {
        let task = GenerateRequest {
            prompt: prompt.clone(),
            sampling: sampling.clone(),
            max_tokens: 30,
            stop_tokens: Vec::new(),
        };
        let expected = generate(&mut plain, &task, None);
        let mut planted = AlternatingOracle::new(&expected.tokens, vocab_size);
        let found = drafted(&mut model, &task, None, &mut planted);
        assert_eq!(found.tokens, expected.tokens);
        assert_eq!(found.cached_tokens, expected.cached_tokens, "as much is kept");
        assert!(found.drafted.accepted > 0, "{:?}", found.drafted);
        prompt.extend(expected.tokens);
    }
}

#[test]
fn branches_that_find_no_blocks_are_not_verified_and_nothing_else_changes() {
    let plain = &mut split(&tiny("llama-tied"), OFF);
    let vocab_size = plain.config().vocab_size;
    let sampling = samplings(vocab_size).remove(0);
    let task =
        GenerateRequest { prompt: tokens(13, vocab_size), sampling, max_tokens: 36, stop_tokens: Vec::new() };
    let expected = generate(plain, &task, None);
    // Three blocks: only what the sequence itself needs at its end.
    let block_bytes =
        model::resident::kv_shape(plain.config(), kernels::attention::KvPrecision::F32).block_bytes();
    let options = SplitOptions {
        kv_bytes: 3 * block_bytes,
        effort: DraftPolicy::Compared(BaselineRule::Nodes(12)),
        ..SplitOptions::default()
    };
    let mut model = split_of(Box::new(executor(&tiny("llama-tied"))), &tiny("llama-tied"), &options);
    for _ in 0..3 {
        let mut planted = AlternatingOracle::new(&expected.tokens, vocab_size);
        assert_eq!(drafted(&mut model, &task, None, &mut planted).tokens, expected.tokens);
    }
}

#[test]
fn an_answer_that_ends_among_accepted_tokens_ends_there() {
    let mut plain = eager(&tiny("llama-tied"));
    let vocab_size = plain.config().vocab_size;
    let sampling = samplings(vocab_size).remove(1);
    let free =
        GenerateRequest { prompt: tokens(13, vocab_size), sampling, max_tokens: 40, stop_tokens: Vec::new() };
    let answer = generate(&mut plain, &free, None).tokens;
    for stop in [5, 11, 12, 23] {
        let task = GenerateRequest { stop_tokens: vec![answer[stop]], ..free.clone() };
        let expected = generate(&mut plain, &task, None);
        let mut planted = AlternatingOracle::new(&answer, vocab_size);
        let found = drafted(&mut eager(&tiny("llama-tied")), &task, None, &mut planted);
        assert_eq!((found.tokens, found.finish), (expected.tokens, GenerateFinish::Stop));
    }
    for length in 1..12 {
        let task = GenerateRequest { max_tokens: length, ..free.clone() };
        let mut planted = AlternatingOracle::new(&answer, vocab_size);
        let found = drafted(&mut plain, &task, None, &mut planted);
        assert_eq!((&found.tokens[..], found.finish), (&answer[..length], GenerateFinish::Length));
    }
    let mut planted = AlternatingOracle::new(&answer, vocab_size);
    let mut heard = 0;
    let found = plain.generate_drafted(&free, None, &mut planted, &mut |_| {
        heard += 1;
        if heard == 9 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(found.unwrap().tokens, &answer[..9], "whoever has enough is told no more");
}

#[test]
fn whatever_decides_how_much_is_verified_the_answer_is_the_same() {
    let mut plain = split(&tiny("llama-tied"), OFF);
    let vocab_size = plain.config().vocab_size;
    let sampling = samplings(vocab_size).remove(1);
    let task =
        GenerateRequest { prompt: tokens(13, vocab_size), sampling, max_tokens: 40, stop_tokens: Vec::new() };
    let expected = generate(&mut plain, &task, None).tokens;
    let rules = [
        (BaselineRule::Nodes(9), 9),
        (BaselineRule::Chain(5), 5),
        (BaselineRule::Branches { width: 2, depth: 3 }, 6),
        (BaselineRule::Learned(Threshold::default()), MAX_NODES as u64),
    ];
    for (rule, most) in rules {
        let options = SplitOptions {
            effort: DraftPolicy::Compared(rule),
            kv_bytes: 32 << 20,
            ..SplitOptions::default()
        };
        let mut model = split_of(Box::new(executor(&tiny("llama-tied"))), &tiny("llama-tied"), &options);
        let mut planted = AlternatingOracle::new(&expected, vocab_size);
        let found = drafted(&mut model, &task, None, &mut planted);
        assert_eq!(found.tokens, expected, "{rule:?}");
        let DraftingStats { trees, nodes, accepted, threshold, .. } = found.drafted;
        assert!(accepted > 0 && nodes <= trees * most, "{rule:?}: {:?}", found.drafted);
        assert_eq!(threshold > 0.0, matches!(rule, BaselineRule::Learned(_)));
    }
}

/// L-10, L-13 over a network: tokens drafted during a call are kept if the target accepts their path, and
/// change no token.
#[test]
fn a_draft_that_takes_time_goes_on_while_the_network_is_waited_for() {
    let path = tiny("llama-tied");
    let mut plain = split(&path, OFF);
    let vocab_size = plain.config().vocab_size;
    for sampling in samplings(vocab_size).into_iter().step_by(3) {
        let task = GenerateRequest {
            prompt: tokens(13, vocab_size),
            sampling,
            max_tokens: 24,
            stop_tokens: Vec::new(),
        };
        let expected = generate(&mut plain, &task, None).tokens;
        let slow = || SlowDraft(AlternatingOracle::new(&expected, vocab_size));
        for effort in [DraftPolicy::Worth, DraftPolicy::Compared(BaselineRule::Nodes(4))] {
            let options = SplitOptions { effort, kv_bytes: 32 << 20, ..SplitOptions::default() };
            let mut model = split_of(far(&path, Duration::from_millis(3)), &path, &options);
            let found = drafted(&mut model, &task, None, &mut slow());
            assert_eq!(found.tokens, expected, "{effort:?}");
            let DraftingStats { accepted, ahead, kept, hidden, .. } = found.drafted;
            assert!(accepted > 0 && ahead >= kept && kept > 0, "{:?}", found.drafted);
            assert!(hidden >= Duration::from_millis(1), "{:?}", found.drafted);
            let table = &mut Ngram::new(&task.prompt, AcceptanceTable::default());
            let found = drafted(&mut model, &task, None, table);
            assert_eq!((found.tokens, found.drafted.ahead), (expected.clone(), 0), "a table takes no time");
            let mut near = split_of(Box::new(executor(&path)), &path, &options);
            let found = drafted(&mut near, &task, None, &mut slow());
            assert_eq!((found.tokens, found.drafted.ahead), (expected.clone(), 0), "the cores are taken");
        }
    }
}

#[test]
fn nothing_is_guessed_behind_the_last_token() {
    let path = tiny("llama-tied");
    let mut model = split_over(far(&path, Duration::ZERO), &path, OFF);
    let vocab_size = model.config().vocab_size;
    let sampling = samplings(vocab_size).remove(0);
    let task =
        GenerateRequest { prompt: tokens(13, vocab_size), sampling, max_tokens: 1, stop_tokens: Vec::new() };
    let answer = generate(&mut model, &task, None).tokens;
    let mut slow = SlowDraft(AlternatingOracle::new(&answer, vocab_size));
    let found = drafted(&mut model, &task, None, &mut slow);
    assert_eq!((found.tokens, found.drafted), (answer, DraftingStats::default()));
}

/// The real model drafts for itself with an adapter that the drafter lacks.
#[test]
fn a_model_drafts_and_the_answer_is_the_adapters() {
    let mut model = split(&real_model(), OFF);
    let mut remote = split_over(far(&real_model(), Duration::ZERO), &real_model(), OFF);
    let text = Text::load(&ModelFiles::at(&real_model()).unwrap()).unwrap();
    let vocab_size = model.config().vocab_size;
    let own = model.load_adapter(&example_adapter("pirate")).unwrap();
    let tokens = TokenList::of(&ModelFiles::at(&real_model()).unwrap()).unwrap();
    let options = DraftOptions { cores: Vec::new(), bytes: 32 << 20, kv_dtype: None };
    let opened = by_model(&real_model(), (&tokens, vocab_size), &options).unwrap();
    let mut draft = opened.drafter.text(&[], Calibration::default());
    let prompt = text.encode_raw("The lighthouse keeper had lived on the island for").unwrap();
    for (adapter, sampling) in [None, Some(&own)].into_iter().zip(samplings(vocab_size)) {
        let task =
            GenerateRequest { prompt: prompt.clone(), sampling, max_tokens: 12, stop_tokens: Vec::new() };
        let expected = generate(&mut model, &task, adapter);
        draft.begin(&task.prompt);
        let found = drafted(&mut model, &task, adapter, &mut draft);
        assert_eq!(found.tokens, expected.tokens);
        draft.begin(&task.prompt);
        let found = drafted(&mut remote, &task, adapter, &mut draft);
        assert_eq!(found.tokens, expected.tokens);
        assert!(
            found.drafted.ahead > 0,
            "the prompt is read meanwhile, if nothing else: {:?}",
            found.drafted
        );
        if adapter.is_none() {
            let guessed = draft.guesses(&TokenTree::new(), None).unwrap();
            assert!(!guessed.is_empty() && guessed[0].probability >= guessed[1].probability);
        }
    }
    let refused = by_model(&tiny("llama-tied"), (&tokens, vocab_size), &options);
    assert!(matches!(refused, Err(DraftError::Tokenizer(_) | DraftError::Tokens(_))), "{refused:?}");
}
