//! `tokenizer.json` files: contradictory vocabularies, and expressions and texts that take exponential time.

use serde_json::{Map, Value, json};

use super::{Maker, Seed};
use crate::parts::join;

const BOMBS: &str = "tokenizer bombs";
const IDS: &str = "CVE-2026-93840 (ids beyond)";

fn tokenizer() -> Value {
    json!({
        "added_tokens": [{"id": 5, "content": "<|im_end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "aba": 4, "<|im_end|>": 5},
            "merges": [["a", "b"], ["ab", "a"]]},
    })
}

fn with(pointer: &str, value: Value) -> Value {
    let mut json = tokenizer();
    *json.pointer_mut(pointer).expect("the tokenizer has the option") = value;
    json
}

fn input(json: &Value, text: &str) -> Vec<u8> {
    join(&[json.to_string().as_bytes(), b"", text.as_bytes()])
}

fn split(expression: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false})
}

pub(super) fn jsons() -> Vec<Seed> {
    let mut make = Maker::new("tokenizer_json");
    make.valid("a tokenizer", input(&tokenizer(), "ab aba <|im_end|>"));
    vocabularies(&mut make);
    texts(&mut make);
    make.seeds
}

fn vocabularies(make: &mut Maker) {
    let mut refused = |name, class, json: &Value, why| make.refused(name, class, input(json, "ab"), why);
    refused("an id of 2^32 - 1", IDS, &with("/model/vocab/aba", json!(u32::MAX)), "beyond the limit");
    refused("an id of 2^32", IDS, &with("/model/vocab/aba", json!(1u64 << 32)), "");
    refused("an added id that is taken", IDS, &with("/added_tokens/0/id", json!(9)), "");
    refused(
        "a merge longer than any token",
        BOMBS,
        &with("/model/merges", json!([["<|im_end|>", "aba"]])),
        "longer than",
    );
    refused("a merge of an unknown token", BOMBS, &with("/model/merges", json!([["a", "z"]])), "");
    refused("a WordPiece model", BOMBS, &with("/model/type", json!("WordPiece")), "WordPiece");
    refused("an invalid expression", BOMBS, &with("/pre_tokenizer", split("(")), "");
    refused("an expression that grows", BOMBS, &with("/pre_tokenizer", split("(?:\\w{1000}){1000}")), "");
    make.bounded("an id of two million", IDS, input(&with("/model/vocab/aba", json!(2_000_000)), "aba"));
    make.bounded("two tokens of one id", IDS, input(&with("/model/vocab/aba", json!(0)), "aba"));
    let tokens: Map<String, Value> = (0..50_000u32).map(|id| (format!("{id:x}"), json!(id))).collect();
    let mut large = with("/model/vocab", Value::from(tokens));
    large["model"]["merges"] = json!([]);
    large["added_tokens"] = json!([]);
    make.bounded("50,000 tokens", BOMBS, input(&large, "ab"));
    let merges = vec![json!(["a", "b"]); 200_000];
    make.bounded("200,000 merges", BOMBS, input(&with("/model/merges", Value::from(merges)), "ab"));
    let deep = tokenizer().to_string().replacen("null", &"[".repeat(100_000), 1);
    make.refused("a normalizer 100,000 deep", BOMBS, join(&[deep.as_bytes(), b"", b""]), "");
}

fn texts(make: &mut Maker) {
    for (name, expression) in [
        ("an expression that backtracks", r"(?:a|a)*(?=!)b"),
        ("nested repetition", r"(?:(?:a*)*)*(?=!)b"),
        ("a reference that backtracks", r"(a*)*\1!"),
    ] {
        make.bounded(name, BOMBS, input(&with("/pre_tokenizer", split(expression)), &"a".repeat(200)));
    }
    for (name, unit) in [
        ("64 KiB of one letter", "a"),
        ("64 KiB of spaces", " "),
        ("64 KiB of newlines", "\n"),
        ("64 KiB of a special token", "<|im_end|>"),
        ("64 KiB of half a special token", "<|im_"),
    ] {
        make.bounded(name, BOMBS, input(&tokenizer(), &unit.repeat((1 << 16) / unit.len())));
    }
}
