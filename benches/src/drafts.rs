//! Drafts in the engine: answers whose text repeats and answers whose text does not, with drafts and without.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{
    config::Config,
    http::post_json,
    machine::Cores,
    measure::{Samples, alternate},
    ours::{Holobiont, Installation, Placement},
    report::{Better, Comparison, Rival, Target},
    workload::{Job, Use},
};

/// Tokens of an answer.
const ANSWER_TOKENS: usize = 160;

/// What text that repeats is to gain, and what other text may lose.
const REPEATS: f64 = 1.5;
const ORDINARY: f64 = 0.97;
/// Of their tokens a second, what streams keep beside one whose text repeats.
const BESIDE: f64 = 0.95;
/// Those streams.
const OTHERS: usize = 7;

/// What is asked for, and what is to come of it.
const TEXTS: [(&str, &str, f64); 6] = [
    ("code that is edited", include_str!("drafts/code.txt"), REPEATS),
    ("JSON", include_str!("drafts/json.txt"), REPEATS),
    ("quotes", include_str!("drafts/quotes.txt"), REPEATS),
    (
        "a story",
        "Tell me a story about a lighthouse keeper who finds a strange bottle on the beach.",
        ORDINARY,
    ),
    ("an explanation", "Why is the sky blue, and why are sunsets red? Explain it to a student.", ORDINARY),
    ("advice", "Give me advice on how to learn to play chess well.", ORDINARY),
];

/// Every comparison of this benchmark.
pub(crate) fn run(config: &Config, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for deployments")?;
    let start = |draft: &str| {
        let (binaries, model) = (config.ours.clone(), config.model.clone());
        let installation =
            Installation { binaries, model, placement: Placement::Cores(cores.list()), key: None };
        let settings = [("HOLOBIONT_DRAFT", draft.to_owned())];
        Holobiont::start_with(&installation, &[], &folder.path().join(draft), &settings)
    };
    let (drafting, plain) = (start("ngram")?, start("off")?);
    let mut comparisons = Vec::new();
    for (what, text, least) in TEXTS {
        let job = job(&plain, text)?;
        for server in [&drafting, &plain] {
            server.warm_up(std::slice::from_ref(&job))?;
        }
        let samples =
            alternate(config.runs, [Box::new(|_| rate(&drafting, &job)), Box::new(|_| rate(&plain, &job))])?;
        comparisons.push(comparison(format!("one stream, {what}"), samples, Target::RatioAtLeast(least))?);
    }
    comparisons.push(beside(config, &drafting, &plain)?);
    Ok(comparisons)
}

/// Streams of ordinary text beside one whose text repeats.
fn beside(config: &Config, drafting: &Holobiont, plain: &Holobiont) -> Result<Comparison> {
    let mut jobs = vec![job(plain, TEXTS[0].1)?];
    for index in 0..OTHERS {
        jobs.push(job(plain, &format!("{} Write chapter {}.", TEXTS[3].1, index + 1))?);
    }
    let others = |server: &Holobiont| -> Result<f64> {
        let burst = server.burst(&jobs)?;
        let each = burst.0[1..].iter().map(|t| (t.tokens - 1) as f64 / (t.last - t.first).as_secs_f64());
        Ok(each.sum())
    };
    let samples = alternate(config.runs, [Box::new(|_| others(drafting)), Box::new(|_| others(plain))])?;
    comparison(
        format!("{OTHERS} streams beside one whose text repeats"),
        samples,
        Target::RatioAtLeast(BESIDE),
    )
}

/// A request for an answer to `text`, as the chat template puts it.
fn job(server: &Holobiont, text: &str) -> Result<Job> {
    let body = json!({ "messages": [{ "role": "user", "content": text.trim() }] });
    let answer: Value = serde_json::from_str(&post_json(server.port(), "/tokenize", &body)?)?;
    let tokens = answer["tokens"].as_array().with_context(|| format!("/tokenize says {answer}"))?;
    let prompt =
        tokens.iter().filter_map(Value::as_u64).filter_map(|token| u32::try_from(token).ok()).collect();
    Ok(Job { prompt, who: Use::Base, generate: ANSWER_TOKENS, says: None })
}

/// Tokens a second behind the first.
fn rate(server: &Holobiont, job: &Job) -> Result<f64> {
    let timeline = server.ask(job)?;
    Ok((timeline.tokens - 1) as f64 / (timeline.last - timeline.first).as_secs_f64())
}

fn comparison(case: String, [drafting, plain]: [Vec<f64>; 2], target: Target) -> Result<Comparison> {
    Ok(Comparison {
        bench: "drafts",
        case,
        unit: "tokens/s",
        better: Better::Higher,
        ours: Samples::new(drafting)?,
        rival: Rival {
            name: "without drafts".to_owned(),
            format: "Q4_1".to_owned(),
            samples: Samples::new(plain)?,
        },
        target: Some(target),
    })
}
