//! Agreement of exact arithmetic with floats: greedy answers of the real model on the fast, the linear and
//! the ring path.
//!
//! `HOLOBIONT_PROMPTS` sets the number of prompts (200 for docs/performance/split.md), `HOLOBIONT_ANSWER` the
//! tokens of each answer.

use crate::support::{committed_executor, generate, real_model, sampling, split_masked};
use client::{
    generate::GenerateRequest,
    masking::Masking,
    split_model::{SplitModel, SplitOptions},
    text::{ChatRole, PromptMessage, Text},
};
use model_files::model_files::ModelFiles;
use shmproto::layer::SitePath;

const PATHS: [SitePath; 3] = [SitePath::Ring, SitePath::Linear, SitePath::Fast];
const SUBJECTS: [&str; 20] = [
    "the sea",
    "a lighthouse",
    "bread",
    "the moon",
    "a violin",
    "rain",
    "chess",
    "a forest",
    "gold",
    "a river",
    "winter",
    "a clock",
    "honey",
    "a bridge",
    "the wind",
    "ink",
    "a harbour",
    "glass",
    "a garden",
    "salt",
];
const QUESTIONS: [&str; 10] = [
    "Write one sentence about {}.",
    "What is {} made of?",
    "Why do people like {}?",
    "Name three things that go with {}.",
    "Explain {} to a child.",
    "What colour is {}?",
    "Write the first line of a poem about {}.",
    "When did people first know {}?",
    "What would happen without {}?",
    "Describe {} in five words.",
];

fn number(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |text| text.parse().unwrap())
}

/// Every question about every subject, in an order whose beginning has many kinds.
fn prompts(text: &Text, count: usize) -> Vec<Vec<u32>> {
    let prompt = |at: usize| {
        let subject = SUBJECTS[at % SUBJECTS.len()];
        let question = QUESTIONS[(at / SUBJECTS.len() + at) % QUESTIONS.len()];
        let content = question.replace("{}", subject);
        text.encode_chat(&[PromptMessage { role: ChatRole::User, content }]).unwrap()
    };
    (0..count).map(prompt).collect()
}

fn answers(model: &mut SplitModel, prompts: &[Vec<u32>], max_tokens: usize) -> Vec<Vec<u32>> {
    let sampling = sampling(model.config().vocab_size, 0.0, 1);
    let answer = |prompt: &Vec<u32>| {
        let task = GenerateRequest {
            prompt: prompt.clone(),
            sampling: sampling.clone(),
            max_tokens,
            stop_tokens: Vec::new(),
        };
        generate(model, &task, None).tokens
    };
    prompts.iter().map(answer).collect()
}

/// Number of equal answers, and of tokens before the first difference.
fn agreement(a: &[Vec<u32>], b: &[Vec<u32>]) -> (usize, usize) {
    let same = |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let whole = a.iter().zip(b).filter(|(a, b)| a == b).count();
    (whole, a.iter().zip(b).map(same).sum())
}

#[test]
fn exact_arithmetic_says_what_floats_say_and_the_fast_path_nearly() {
    let (count, length) = (number("HOLOBIONT_PROMPTS", 3), number("HOLOBIONT_ANSWER", 8));
    let (path, text) = (real_model(), Text::load(&ModelFiles::at(&real_model()).unwrap()).unwrap());
    let (executor, prompts) = (committed_executor(&path), prompts(&text, count));
    let [ring, linear, fast] = PATHS.map(|of| {
        let masking = Masking::Off { path: of };
        let options = SplitOptions::default();
        let mut model = split_masked(Box::new(executor.clone()), &path, masking, &options);
        answers(&mut model, &prompts, length)
    });
    for (name, a, b, least) in [
        ("ring and linear", &ring, &linear, 0.97),
        ("ring and fast", &ring, &fast, 0.5),
        ("linear and fast", &linear, &fast, 0.5),
    ] {
        let (whole, tokens) = agreement(a, b);
        println!("{name}: {whole} of {count} answers, {tokens} of {} tokens", count * length);
        assert!(tokens as f64 >= least * (count * length) as f64, "{name}: {whole} answers, {tokens} tokens");
    }
}
