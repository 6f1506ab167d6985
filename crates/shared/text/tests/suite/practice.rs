//! Schemas from real requests, with the verdicts of an independent validator (`golden/make_practice.py`).

use serde_json::Value;
use text::{
    grammar::{Enforcement, Grammar},
    tokenizer::{AddSpecial, ParseSpecial},
};

use crate::{grammar::Model, support::golden};

fn texts<'a>(line: &'a Value, field: &str) -> impl Iterator<Item = &'a str> {
    line[field].as_array().unwrap().iter().map(|text| text.as_str().unwrap())
}

fn is_taken(model: &Model, source: &str, text: &str) -> bool {
    let mut matcher = model.grammars.compile(source).unwrap();
    let tokens = model.tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).unwrap();
    tokens.iter().all(|&token| matcher.accept(token).is_ok()) && matcher.may_end()
}

#[test]
fn schemas_of_practice_take_what_an_independent_validator_allows_and_nothing_else() {
    let (model, lines) = (Model::open(), golden("practice.json"));
    let lines = lines.as_array().unwrap();
    assert!(lines.len() >= 300);
    let (mut refused, mut wrong) = (0, Vec::new());
    for line in lines {
        let grammar = Grammar::Json(line["schema"].clone());
        let Ok(source) = grammar.source() else {
            let held = grammar.source_behind(None, Enforcement::BestEffort).unwrap();
            assert!(!held.warnings.is_empty(), "{line}");
            model.grammars.compile(&held.text).unwrap();
            refused += 1;
            continue;
        };
        if let Err(error) = model.grammars.compile(&source) {
            wrong.push(format!("{line}: {error}"));
            continue;
        }
        let verdicts = [("allowed", true), ("refused", false)];
        for (field, verdict) in verdicts {
            let other = texts(line, field).filter(|text| is_taken(&model, &source, text) != verdict);
            wrong.extend(other.map(|text| format!("{} {}: {text} is {field}", line["name"], line["schema"])));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(refused * 100 <= lines.len() * 3, "{refused} of {} are refused", lines.len());
}

#[test]
fn no_answer_of_a_schema_of_practice_gets_stuck() {
    let (model, lines) = (Model::open(), golden("practice.json"));
    let mut whole = 0;
    for (line, seed) in lines.as_array().unwrap().iter().zip(0..) {
        let grammar = Grammar::Json(line["schema"].clone());
        if grammar.source().is_err() {
            continue;
        }
        if let Some(said) = model.walk(&grammar, seed) {
            let text = model.text(&said);
            serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{line}: {text}: {error}"));
            whole += 1;
        }
    }
    assert!(whole >= 150, "many walks come to an end: {whole}");
}
