//! Structured output ends: numbers, and objects with pattern properties.

use serde_json::{Value, json};
use text::{
    grammar::{Enforcement, Grammar, lark_json},
    tokenizer::{AddSpecial, ParseSpecial},
};

use crate::grammar::Model;

/// Digits of a number according to the guide, and those that the last token may add.
const MAX_DIGITS: usize = 32 + 8;

fn times(model: &Model, grammar: &Grammar, begin: &str, token: &str) -> usize {
    let mut matcher = model.grammars.compile(&grammar.source().unwrap()).unwrap();
    for token in model.tokenizer.encode(begin, AddSpecial::No, ParseSpecial::No).unwrap() {
        matcher.accept(token).unwrap();
    }
    let token = model.tokenizer.token_id(token).unwrap();
    (0..200)
        .take_while(|_| {
            let is_allowed = matcher.allowed().unwrap().contains(token);
            assert_eq!(matcher.accept(token).is_ok(), is_allowed);
            is_allowed
        })
        .count()
}

#[test]
fn numbers_end_wherever_they_stand_and_digits_in_texts_do_not() {
    let model = Model::open();
    let number = json!({ "type": "number" });
    let free = json!({ "type": "object", "properties": { "x": {} }, "required": ["x"] });
    let bounded = json!({ "type": "number", "minimum": 0, "maximum": 10 });
    let call =
        format!("start: \"f(\" call \")\"\ncall: {}", lark_json(&number, Enforcement::Strict).unwrap().0);
    for (grammar, begin) in [
        (Grammar::Json(number.clone()), ""),
        (Grammar::Json(number.clone()), "-0."),
        (Grammar::Json(number.clone()), "1e"),
        (Grammar::Json(json!({ "type": ["number", "null", "string"] })), "1."),
        (Grammar::Json(json!({ "type": "integer" })), ""),
        (Grammar::Json(bounded), "3."),
        (Grammar::Json(json!({})), ""),
        (Grammar::Json(json!({})), "[1, "),
        (Grammar::Json(free), "{\"x\": "),
        (Grammar::Rules(call), "f(1."),
    ] {
        let digits = times(&model, &grammar, begin, "7");
        assert!((18..=MAX_DIGITS).contains(&digits), "{grammar:?} {begin}: {digits}");
    }
    let text = |pattern: &str| Grammar::Json(json!({ "type": "string", "pattern": pattern }));
    for (grammar, begin) in [
        (Grammar::Json(json!({})), "\""),
        (text("^[0-9]+$"), "\""),
        (text("^[0-9]+-[0-9]+$"), "\""),
        (Grammar::Regex("[0-9]+".into()), ""),
    ] {
        assert_eq!(times(&model, &grammar, begin, "7"), 200, "{grammar:?}");
    }
    assert_eq!(times(&model, &text("^[0-9]{64}$"), "\"", "7"), 64);
    let long = json!({ "enum": [0.000_000_000_000_000_000_000_000_000_000_000_123, true] });
    let rest = times(&model, &Grammar::Json(long), "0.", "0");
    assert_eq!(rest, 33);
}

#[test]
fn what_is_anything_but_a_word_holds_no_special_token_and_no_end() {
    let model = Model::open();
    for lark in ["start: \"x\" A \"y\"\nA: ~\"a\"", "start: \"x\" A \"<\"\nA: ~\"a\""] {
        let mut matcher = model.grammars.compile(&Grammar::Lark(lark.into()).source().unwrap()).unwrap();
        matcher.accept(model.tokenizer.token_id("x").unwrap()).unwrap();
        let allowed = matcher.allowed().unwrap();
        assert!(allowed.contains(model.tokenizer.token_id("b").unwrap()));
        assert!(!matcher.may_end());
        for &end in model.tokenizer.stop_tokens() {
            assert!(!allowed.contains(end), "{lark}");
        }
        let others =
            (0..model.tokenizer.vocab_size() as u32).filter(|&token| model.tokenizer.is_special(token));
        let is_named = lark.contains('<');
        assert!(is_named || !others.into_iter().any(|token| allowed.contains(token)), "{lark}");
    }
}

/// Integer value; -0 is one.
fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_f64().is_some_and(|number| number == 0.0).then_some(0))
}

type IsValid = fn(&str, &Value) -> bool;

/// Schemas whose patterns overlap with properties, and the valid values of an answer's properties.
fn patterns_beside_properties() -> Vec<(Value, IsValid)> {
    fn of_five(name: &str, value: &Value) -> bool {
        match name {
            "score" => whole(value).is_some_and(|score| score % 5 == 0),
            "tag" => value.as_str().is_some_and(|tag| (3..=6).contains(&tag.chars().count())),
            _ => false,
        }
    }
    let both = |pattern: &str, others: Value| {
        json!({
            "type": "object",
            "properties": { "score": { "type": "integer", "multipleOf": 5 }, "tag": { "type": "string", "minLength": 3, "maxLength": 6 } },
            "required": ["score", "tag"],
            "additionalProperties": others,
            "patternProperties": { pattern: if pattern == "^t" { json!({ "type": "string" }) } else { json!({ "type": "integer" }) } },
        })
    };
    let alone = json!({ "type": "object", "patternProperties": { "^score$": { "type": "integer", "minimum": 0, "maximum": 100 } }, "required": ["score"], "additionalProperties": false });
    let mut twice = alone.clone();
    twice["properties"] = json!({ "a": { "type": "boolean" } });
    vec![
        (both("^score$", false.into()), of_five),
        (both("^s", false.into()), |name, value| {
            of_five(name, value) || name.starts_with('s') && whole(value).is_some()
        }),
        (both("^score$", json!({ "type": "boolean" })), |name, value| {
            of_five(name, value) || value.is_boolean()
        }),
        (both("^t", false.into()), |name, value| {
            of_five(name, value) || name.starts_with('t') && value.is_string()
        }),
        (alone, |name, value| {
            name == "score" && whole(value).is_some_and(|score| (0..=100).contains(&score))
        }),
        (twice, |name, value| match name {
            "a" => value.is_boolean(),
            _ => name == "score" && whole(value).is_some_and(|score| (0..=100).contains(&score)),
        }),
    ]
}

#[test]
fn patterns_of_names_beside_properties_lead_to_whole_answers() {
    let model = Model::open();
    for (schema, keeps_to) in patterns_beside_properties() {
        let (mut whole, required) = (0, schema["required"].as_array().unwrap());
        for seed in 0..20 {
            let Some(said) = model.walk(&Grammar::Json(schema.clone()), seed) else { continue };
            let text = model.text(&said);
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let object = value.as_object().unwrap();
            assert!(
                required.iter().all(|name| object.contains_key(name.as_str().unwrap())),
                "{schema}: {text}"
            );
            assert!(object.iter().all(|(name, value)| keeps_to(name, value)), "{schema}: {text}");
            for name in ["\"score\"", "\"a\"", "\"tag\""] {
                assert!(text.matches(name).count() <= 1, "{schema}: {text}");
            }
            whole += 1;
        }
        assert!(whole >= 4, "{schema}: {whole}");
    }
}
