//! Schemas, expressions and grammars for structural changes: common ones, and the worst known ones.

use serde_json::{Value, json};

use super::{Maker, Seed};

const COSTLY: &str = "forms that cost the most to compile or to follow";

pub(super) fn seeds() -> Vec<Seed> {
    let mut make = Maker::new("grammar_structure");
    let of = |schema: &Value| format!("json 0\n{schema}").into_bytes();
    let tagged = |tag: &str| json!({ "type": "object", "properties": { "kind": { "const": tag }, "v": { "type": "integer", "minimum": 0, "maximum": 99 } }, "required": ["kind"], "additionalProperties": false });
    make.valid("tagged choices", of(&json!({ "oneOf": [tagged("a"), tagged("b"), tagged("c")] })));
    make.valid(
        "a tree",
        of(&json!({ "$ref": "#/$defs/n", "$defs": { "n": { "type": "object", "properties": { "a": { "type": "string", "maxLength": 3 }, "b": { "type": "array", "items": { "$ref": "#/$defs/n" } } }, "required": ["a"], "additionalProperties": false } } })),
    );
    make.valid("an expression", b"regex 0\n[a-c]{1,3}(x|y)?[0-9]{2,}".to_vec());
    make.valid("a grammar in Lark", b"lark 0\nstart: \"a\" b*\nb: /[0-9]+/ | \"(\" b \")\"".to_vec());
    make.valid("a schema in Lark", b"lark 0\nstart: \"f(\" a \")\"\na: %json {\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\"}}}".to_vec());
    make.valid(
        "a pattern beside a property",
        of(&json!({ "type": "object", "properties": { "score": { "multipleOf": 5 }, "tag": { "type": "string", "minLength": 3, "maxLength": 6 } }, "required": ["score", "tag"], "patternProperties": { "^s": { "type": "integer" } }, "additionalProperties": { "type": "boolean" } })),
    );
    let conditions: Vec<Value> = (0..5).map(|index| json!({ "if": { "properties": { "tag": { "const": index } }, "required": ["tag"] }, "then": { "required": [format!("p{index}")] } })).collect();
    make.bounded("conditions on one property", COSTLY, of(&json!({ "type": "object", "properties": { "tag": { "enum": [0, 1, 2, 3, 4, 5] } }, "required": ["tag"], "allOf": conditions })));
    let needs: serde_json::Map<String, Value> =
        (0..6).map(|index| (format!("p{index}"), json!([format!("p{}", (index + 1) % 6)]))).collect();
    make.bounded(
        "properties that need each other",
        COSTLY,
        of(&json!({ "type": "object", "dependentRequired": needs, "minProperties": 2 })),
    );
    let pairs: Vec<Value> =
        (0..8).map(|_| json!({ "anyOf": [{ "minLength": 1 }, { "pattern": "^a" }] })).collect();
    make.bounded(
        "eight choices of two, all at once",
        COSTLY,
        of(&json!({ "type": "string", "allOf": pairs })),
    );
    make.bounded(
        "steps that nearly are too many",
        COSTLY,
        of(&json!({ "type": "number", "multipleOf": 1997, "minimum": -1_000_000, "maximum": 1e15 })),
    );
    make.bounded(
        "all lists of four values",
        COSTLY,
        of(&json!({ "type": "array", "items": { "enum": ["a", "b", "c", "d"] }, "uniqueItems": true })),
    );
    make.bounded("sixty texts that are left out", COSTLY, of(&json!({ "type": "string", "not": { "enum": (0..60).map(|index| format!("word {index}")).collect::<Vec<_>>() } })));
    make.bounded("a long text", COSTLY, of(&json!({ "type": "string", "minLength": 1000, "maxLength": 2000, "pattern": "^[a-z]+( [a-z]+)*$" })));
    make.bounded("a repetition of repetitions", COSTLY, b"regex 1\n((a{1,20}){1,20}b?){1,5}".to_vec());
    make.bounded("the letter before the last dozen", COSTLY, b"regex 1\n(a|b)*a(a|b){12}".to_vec());
    make.bounded("a rule twice behind itself", COSTLY, b"lark 1\nstart: start start | \"a\" | \"\"".to_vec());
    make.seeds
}
