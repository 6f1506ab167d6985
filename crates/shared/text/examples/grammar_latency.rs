//! How long schemas take to compile, and how long it takes to say what may follow a token: ours, and `llguidance` alone on the schemas
//! as they were sent, one after the other in each round.
//!
//! `grammar_latency MODEL.gguf SCHEMAS.json [ROUNDS]`: the list of `tests/golden/practice.json`. Prints a line of JSON for each round,
//! and one with the medians.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

use std::{path::Path, sync::Arc, time::Instant};

use llguidance::{
    ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie},
};
use model_files::gguf::GgufFile;
use serde_json::{Value, json};
use text::{
    grammar::{Enforcement, Grammar, Grammars, Matcher},
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

/// Milliseconds, each by itself.
#[derive(Default)]
struct Times {
    compiled: Vec<f64>,
    masks: Vec<f64>,
    refused: usize,
}

impl Times {
    /// Adds what one schema takes; `compile` makes a matcher, with which `mask` tells what may come and takes a token.
    fn add<M: Clone>(
        &mut self,
        texts: &[Vec<u32>],
        compile: impl FnOnce() -> Option<M>,
        mask: impl Fn(&mut M),
        take: impl Fn(&mut M, u32) -> bool,
    ) {
        let start = Instant::now();
        let matcher = compile();
        let took = start.elapsed();
        let Some(matcher) = matcher else {
            self.refused += 1;
            return;
        };
        self.compiled.push(took.as_secs_f64() * 1e3);
        for tokens in texts {
            let mut matcher = matcher.clone();
            for token in tokens {
                let start = Instant::now();
                mask(&mut matcher);
                self.masks.push(start.elapsed().as_secs_f64() * 1e3);
                if !take(&mut matcher, *token) {
                    break;
                }
            }
        }
    }

    fn percentiles(&mut self) -> Vec<(&'static str, f64)> {
        vec![
            ("refused", self.refused as f64),
            ("compile_p50_ms", quantile(&mut self.compiled, 0.5)),
            ("compile_p99_ms", quantile(&mut self.compiled, 0.99)),
            ("mask_p50_ms", quantile(&mut self.masks, 0.5)),
            ("mask_p99_ms", quantile(&mut self.masks, 0.99)),
        ]
    }
}

/// The library with its own limits.
fn alone(tokenizer: &Tokenizer) -> ParserFactory {
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32)
        .map(|token| match (tokenizer.is_special(token), tokenizer.token_bytes(token).unwrap_or_default()) {
            (true, name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
            (false, bytes) => bytes.to_vec(),
        })
        .collect();
    let info = TokRxInfo::new(words.len() as u32, tokenizer.stop_tokens()[0]);
    let environment: llguidance::toktrie::TokEnv =
        Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
    let mut factory = ParserFactory::new_simple(&environment).unwrap();
    factory.quiet();
    factory
}

fn main() {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let tokenizer = Tokenizer::from_gguf(&GgufFile::open(Path::new(&paths[0])).unwrap()).unwrap();
    let lines: Value = serde_json::from_slice(&std::fs::read(&paths[1]).unwrap()).unwrap();
    let rounds: usize = paths.get(2).map_or(5, |rounds| rounds.parse().unwrap());
    let (ours, library) = (Grammars::of(&tokenizer).unwrap(), alone(&tokenizer));
    let mut rows: Vec<[Vec<(&str, f64)>; 2]> = Vec::new();
    for _ in 0..rounds {
        let mut times = [Times::default(), Times::default()];
        for line in lines.as_array().unwrap() {
            let encode = |text: &Value| {
                tokenizer.encode(text.as_str().unwrap(), AddSpecial::No, ParseSpecial::No).unwrap()
            };
            let texts: Vec<Vec<u32>> = line["allowed"].as_array().unwrap().iter().map(encode).collect();
            let grammar = Grammar::Json(line["schema"].clone());
            let compile = || {
                let source = grammar.source_behind(None, Enforcement::BestEffort).ok()?;
                ours.compile(&source.text).ok()
            };
            let mask = |matcher: &mut Matcher| drop(matcher.allowed());
            times[0].add(&texts, compile, mask, |matcher, token| matcher.accept(token).is_ok());
            let compile = || {
                let parser = library.create_parser(TopLevelGrammar::from_json_schema(line["schema"].clone()));
                parser.ok().map(|parser| llguidance::Matcher::new(Ok(parser)))
            };
            let mask = |matcher: &mut llguidance::Matcher| drop(matcher.compute_mask_or_eos());
            times[1].add(&texts, compile, mask, |matcher, token| {
                matcher.try_consume_tokens(&[token]).is_ok_and(|taken| taken == 1)
            });
        }
        let row = times.map(|mut times| times.percentiles());
        println!("{}", json!({ "ours": object(&row[0]), "llguidance": object(&row[1]) }));
        rows.push(row);
    }
    let medians = [0, 1].map(|side| {
        let name = |index: usize| rows[0][side][index].0;
        let middle = |index: usize| {
            let mut values: Vec<f64> = rows.iter().map(|row| row[side][index].1).collect();
            quantile(&mut values, 0.5)
        };
        (0..rows[0][side].len()).map(|index| (name(index), middle(index))).collect::<Vec<_>>()
    });
    println!("{}", json!({ "medians": { "ours": object(&medians[0]), "llguidance": object(&medians[1]) } }));
}

fn object(percentiles: &[(&str, f64)]) -> Value {
    percentiles
        .iter()
        .map(|(name, value)| ((*name).to_owned(), json!(value)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// The value below which so great a share of `values` is.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index into a short list")]
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share) as usize]
}
