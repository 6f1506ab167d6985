//! A split model equals the resident one: same bits, same tokens, with any adapter.

use crate::support::{
    OFF, bits, example_adapter, generate, golden, real_model, resident, resident_logits, resident_tokens,
    sampling, split, split_logits, tiny, tokens,
};
use client::{
    generate::{GenerateError, GenerateFinish, GenerateRequest},
    masking::{Masking, NoiseSettings},
    text::Text,
};
use model_files::model_files::ModelFiles;
use shmproto::layer::SitePath;

const MODELS: [&str; 10] = [
    "llama-tied",
    "llama-bf16",
    "qwen2-f16",
    "qwen3-qknorm",
    "mistral-window",
    "gemma3",
    "granite",
    "olmo2",
    "phi3",
    "gemma2",
];

fn task(prompt: Vec<u32>, max_tokens: usize, vocab_size: usize, temperature: f32) -> GenerateRequest {
    GenerateRequest {
        prompt,
        sampling: sampling(vocab_size, temperature, 11),
        max_tokens,
        stop_tokens: Vec::new(),
    }
}

#[test]
fn a_split_model_has_the_resident_bits_for_every_architecture_and_golden_adapter() {
    let mut adapted = 0;
    for name in MODELS.iter().filter(|name| tiny(name).is_dir()) {
        let (mut resident, _) = resident(&tiny(name));
        let mut split = split(&tiny(name), OFF);
        let vocab_size = split.config().vocab_size;
        let prompt = tokens(23, vocab_size);
        let (expected, found) =
            (resident_logits(&mut resident, &prompt, None), split_logits(&mut split, &prompt, None));
        assert_eq!(bits(&found), bits(&expected), "{name}");
        let folders = ["", "embedding", "saved"].map(|kind| golden("adapters").join(kind).join(name));
        let adapters = folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten());
        for path in adapters.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
            let Ok(adapter) = split.load_adapter(&path) else { continue };
            let task = task(prompt.clone(), 9, vocab_size, 0.8);
            // The prompt contains no invocation of the activated adapters.
            let applied = Some(adapter.prepared()).filter(|adapter| adapter.invocation().is_none());
            let expected = resident_tokens(&mut resident, &task, applied);
            assert_eq!(generate(&mut split, &task, Some(&adapter)).tokens, expected, "{}", path.display());
            adapted += 1;
        }
    }
    assert!(adapted > 0, "there are golden adapters");
}

#[test]
fn the_real_model_with_an_example_adapter_answers_token_for_token_as_the_resident_one() {
    let (mut resident, is_exact) = resident(&real_model());
    assert!(!is_exact, "its weights are quantized: keys and values are kept in 16 bits");
    let mut split = split(&real_model(), OFF);
    let vocab_size = split.config().vocab_size;
    for (name, temperature) in [(None, 0.0), (Some("pirate"), 0.0), (Some("haiku"), 1.0)] {
        let adapter = name.map(|name| split.load_adapter(&example_adapter(name)).unwrap());
        let task = task(tokens(12, vocab_size), 6, vocab_size, temperature);
        let expected = resident_tokens(&mut resident, &task, adapter.as_ref().map(|own| own.prepared()));
        assert_eq!(generate(&mut split, &task, adapter.as_ref()).tokens, expected, "{name:?}");
    }
}

#[test]
fn no_token_is_generated_and_nothing_computed_where_none_was_asked_for() {
    let mut split = split(&tiny("llama-tied"), OFF);
    let vocab_size = split.config().vocab_size;
    let generated = generate(&mut split, &task(tokens(12, vocab_size), 0, vocab_size, 0.0), None);
    assert_eq!((generated.tokens.as_slice(), generated.finish), (&[][..], GenerateFinish::Length));
    assert_eq!(split.session().usage().rows, 0);
}

#[test]
fn a_second_prompt_that_begins_alike_reuses_keys_and_values_and_changes_nothing() {
    let mut split = split(&tiny("llama-tied"), OFF);
    let vocab_size = split.config().vocab_size;
    let task = task(tokens(40, vocab_size), 5, vocab_size, 0.7);
    let first = generate(&mut split, &task, None);
    let rows = split.session().usage().rows;
    let second = generate(&mut split, &task, None);
    assert_eq!((first.cached_tokens, second.tokens), (0, first.tokens));
    assert!(second.cached_tokens >= 32, "{} tokens were kept", second.cached_tokens);
    assert!(split.session().usage().rows - rows < rows, "what was kept is not computed again");
}

#[test]
fn keys_and_values_of_one_adapter_never_answer_for_another() {
    let mut split = split(&tiny("llama-tied"), OFF);
    let vocab_size = split.config().vocab_size;
    let task = task(tokens(40, vocab_size), 1, vocab_size, 0.0);
    let adapters = std::fs::read_dir(golden("adapters").join("llama-tied")).unwrap();
    let mut paths: Vec<_> = adapters.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let loaded = paths.iter().filter_map(|path| split.load_adapter(path).ok());
    // Requests before an invocation use the base's blocks, which are cached.
    let own: Vec<_> = loaded.filter(|own| own.prepared().invocation().is_none()).take(2).collect();
    assert_eq!(own.len(), 2);
    assert_eq!(generate(&mut split, &task, None).cached_tokens, 0);
    for adapter in &own {
        assert_eq!(generate(&mut split, &task, Some(adapter)).cached_tokens, 0);
    }
    assert!(generate(&mut split, &task, Some(&own[0])).cached_tokens > 0);
}

#[test]
fn an_activated_adapter_says_what_peft_does_and_goes_on_from_what_the_base_left() {
    let text = std::fs::read(golden("expected/llama-tied/activated.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let mut split = split(&tiny("llama-tied"), OFF);
    let vocab_size = split.config().vocab_size;
    let adapter = split.load_adapter(&golden("adapters/llama-tied/activated")).unwrap();
    let mut cached = 0;
    for case in cases["cases"].as_array().unwrap() {
        let (prompt, greedy) = (numbers(&case["prompt"]), numbers(&case["greedy"]));
        generate(&mut split, &task(prompt.clone(), 1, vocab_size, 0.0), None);
        let answer = generate(&mut split, &task(prompt, greedy.len(), vocab_size, 0.0), Some(&adapter));
        assert_eq!(answer.tokens, greedy);
        cached += answer.cached_tokens;
    }
    assert_eq!(cached, 16, "the last one invokes it behind a block and more");
}

#[test]
fn adapters_of_embedding_and_head_say_what_peft_does() {
    for (model, name) in [
        ("llama-tied", "embedding/with-layers"),
        ("gemma3", "embedding/alone"),
        ("llama-tied", "saved/embedding"),
        ("llama-tied", "saved/tied"),
        ("llama-rope3", "saved/both"),
        ("gemma2", "saved/head"),
        ("granite", "saved/both"),
    ] {
        let text = std::fs::read(golden("expected").join(model).join(format!("{name}.json"))).unwrap();
        let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let numbers =
            |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
        let mut split = split(&tiny(model), OFF);
        let vocab_size = split.config().vocab_size;
        let (kind, its) = name.split_once('/').unwrap();
        let path = golden("adapters").join(kind).join(model).join(its);
        let adapter = split.load_adapter(&path).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let (prompt, greedy) = (numbers(&case["prompt"]), numbers(&case["greedy"]));
            let answer = generate(&mut split, &task(prompt, greedy.len(), vocab_size, 0.0), Some(&adapter));
            assert_eq!(answer.tokens, greedy, "{model}/{name}");
        }
    }
}

#[test]
fn an_answer_ends_at_a_stop_token_or_when_nobody_wants_more() {
    let mut split = split(&tiny("llama-tied"), OFF);
    let vocab_size = split.config().vocab_size;
    let free = generate(&mut split, &task(tokens(5, vocab_size), 8, vocab_size, 0.0), None);
    assert_eq!((free.tokens.len(), free.finish), (8, GenerateFinish::Length));
    let stop_tokens = vec![free.tokens[2]];
    let stopped = generate(
        &mut split,
        &GenerateRequest {
            stop_tokens: stop_tokens.clone(),
            ..task(tokens(5, vocab_size), 8, vocab_size, 0.0)
        },
        None,
    );
    let end = free.tokens.iter().position(|token| stop_tokens.contains(token)).unwrap();
    assert_eq!((&stopped.tokens[..], stopped.finish), (&free.tokens[..=end], GenerateFinish::Stop));
    let enough = split
        .generate(&task(tokens(5, vocab_size), 8, vocab_size, 0.0), None, &mut |_| {
            std::ops::ControlFlow::Break(())
        })
        .unwrap();
    assert_eq!((enough.tokens.len(), enough.finish), (1, GenerateFinish::Stopped));
}

#[test]
fn a_task_that_cannot_be_done_is_refused_and_the_model_goes_on() {
    let mut split = split(&tiny("llama-tied"), OFF);
    let (vocab_size, context) = (split.config().vocab_size, split.config().context_length);
    let mut refused = |prompt| {
        let task = task(prompt, 4, vocab_size, 0.0);
        split.generate(&task, None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap_err()
    };
    assert!(matches!(refused(Vec::new()), GenerateError::EmptyPrompt));
    assert!(matches!(refused(vec![vocab_size as u32]), GenerateError::UnknownToken { .. }));
    assert!(matches!(refused(vec![1; context]), GenerateError::PromptTooLong { .. }));
    assert_eq!(generate(&mut split, &task(vec![1], 4, vocab_size, 0.0), None).tokens.len(), 4);
}

struct Comparison {
    /// Share of rows with the same most likely token.
    agreement: f64,
    largest: f32,
    /// Whether the most likely tokens differ only at near ties, up to the largest difference.
    are_ties: bool,
}

fn compare(expected: &[f32], found: &[f32], vocab_size: usize) -> Comparison {
    let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    let rows = || expected.chunks(vocab_size).zip(found.chunks(vocab_size));
    let largest = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let differ: Vec<f32> = rows()
        .map(|(a, b)| (a, best(a), best(b)))
        .filter(|(_, a, b)| a != b)
        .map(|(row, a, b)| row[a] - row[b])
        .collect();
    let agreement = 1.0 - differ.len() as f64 / rows().count() as f64;
    Comparison { agreement, largest, are_ties: differ.iter().all(|gap| *gap <= 2.0 * largest) }
}

const PROSE: &str = "The lighthouse keeper had lived on the island for thirty years before the first visitor came. She was a \
    botanist from the mainland, and she had heard that a rare kind of sea lavender grew on the cliffs behind the tower. He \
    showed her the path, made tea, and told her about the winter when the supply boat could not land for nine weeks. When \
    she left, she wrote down her address, and he put it in the drawer where he kept the weather reports.";

#[test]
fn obfuscated_rows_give_the_logits_of_the_linear_path_up_to_rounding() {
    let settings = NoiseSettings { noises: 3, rotate_rows: 40, ..NoiseSettings::default() };
    let text = Text::load(&ModelFiles::at(&real_model()).unwrap()).unwrap();
    let prose = text.encode_raw(PROSE).unwrap();
    let random = tokens(64, 300);
    for (path, prompt) in
        [(tiny("llama-tied"), &random), (tiny("qwen2-f16"), &random), (real_model(), &prose)]
    {
        let mut plain = split(&path, Masking::Off { path: SitePath::Linear });
        let mut masked = split(&path, Masking::Paper(settings));
        assert_eq!((plain.mode(), masked.mode()), ("off", "paper (obfuscation)"));
        let vocab_size = plain.config().vocab_size;
        let expected = split_logits(&mut plain, prompt, None);
        let found = split_logits(&mut masked, prompt, None);
        let Comparison { agreement, largest, are_ties } = compare(&expected, &found, vocab_size);
        let rows = prompt.len();
        println!(
            "{}: {rows} rows, argmax agreement {agreement}, largest difference {largest}",
            path.display()
        );
        assert!(agreement >= 0.97 && largest < 0.1 && are_ties, "{}: {agreement}, {largest}", path.display());
        assert_ne!(bits(&found), bits(&expected), "something was added and taken away");
    }
}
