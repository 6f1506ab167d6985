//! How long schemas take to compile, and how long it takes to say what may follow a token.
//!
//! `grammar_latency MODEL.gguf SCHEMAS.json`: the list of `tests/golden/practice.json`. Prints one line of JSON.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

use std::{path::Path, time::Instant};

use files::gguf::GgufFile;
use serde_json::{Value, json};
use text::{
    grammar::{Enforcement, Grammar, Grammars},
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

fn main() {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let tokenizer = Tokenizer::from_gguf(&GgufFile::open(Path::new(&paths[0])).unwrap()).unwrap();
    let grammars = Grammars::of(&tokenizer).unwrap();
    let lines: Value = serde_json::from_slice(&std::fs::read(&paths[1]).unwrap()).unwrap();
    let (mut compiled, mut masks, mut refused, mut strict) = (Vec::new(), Vec::new(), 0, 0);
    for line in lines.as_array().unwrap() {
        let grammar = Grammar::Json(line["schema"].clone());
        strict += usize::from(grammar.source().is_ok());
        let start = Instant::now();
        let source = grammar.source_behind(None, Enforcement::BestEffort);
        let matcher = source.and_then(|source| grammars.compile(&source.text));
        compiled.push(start.elapsed().as_secs_f64() * 1e3);
        let Ok(matcher) = matcher else {
            refused += 1;
            continue;
        };
        for text in line["allowed"].as_array().unwrap() {
            let mut matcher = matcher.clone();
            for token in tokenizer.encode(text.as_str().unwrap(), AddSpecial::No, ParseSpecial::No).unwrap() {
                let start = Instant::now();
                matcher.allowed().unwrap();
                masks.push(start.elapsed().as_secs_f64() * 1e3);
                if matcher.accept(token).is_err() {
                    break;
                }
            }
        }
    }
    let figures = json!({
        "schemas": lines.as_array().unwrap().len(), "refused": refused, "taken_in_full": strict,
        "compile_p50_ms": quantile(&mut compiled, 0.5), "compile_p99_ms": quantile(&mut compiled, 0.99),
        "mask_p50_ms": quantile(&mut masks, 0.5), "mask_p99_ms": quantile(&mut masks, 0.99), "masks": masks.len(),
    });
    println!("{figures}");
}

/// The value below which so great a share of `values` is.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index into a short list")]
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share) as usize]
}
