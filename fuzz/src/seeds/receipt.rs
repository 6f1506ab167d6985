//! Receipts to verify.

use serde_json::{Value, json};

use super::{Maker, Seed};

const IDS: &str = "CVE-2026-93840 (ids beyond)";
const JSON: &str = "JSON bombs";
const SILENCE: &str = "silent ignorance";

fn receipt() -> Value {
    let hash = "ab".repeat(32);
    json!({
        "record": {
            "format": 1, "program": "0.1.0", "model": "base", "base": hash, "adapter": null,
            "settings": { "device": "cpu", "numbers": "activations mixed", "precision": "serving" },
            "sampler": {
                "temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": [[5, 1.5]], "seed": "7",
            },
            "limits": {
                "max_tokens": 2, "min_tokens": 0, "stop_tokens": [2], "stop": [],
                "text": { "start": "continuation", "shown": [] },
            },
            "constraint": null, "prompt": [1, 2], "answer": [3, 4], "ended": "length",
        },
        "chain": vec![hash.as_str(); 9], "public_key": hash, "signature": "cd".repeat(64),
    })
}

/// Returns a body whose receipt has `value` at `path`.
fn with(path: &str, value: Value) -> Vec<u8> {
    let mut receipt = receipt();
    if let Some(field) = receipt.pointer_mut(path) {
        *field = value;
    }
    json!({ "receipt": receipt }).to_string().into_bytes()
}

pub(super) fn bodies() -> Vec<Seed> {
    let mut make = Maker::new("receipt");
    make.valid("a receipt", json!({ "model": "base", "receipt": receipt() }).to_string().into_bytes());
    make.refused("no receipt", SILENCE, b"{}".to_vec(), "receipt");
    for (name, class, path, value) in [
        ("a token of -1", IDS, "/record/answer/0", json!(-1)),
        ("a token of 2^32", IDS, "/record/prompt/0", json!(1u64 << 32)),
        ("a seed of 2^64", IDS, "/record/sampler/seed", json!("18446744073709551616")),
        ("a hash that is short", IDS, "/record/base", json!("ab")),
        ("a hash in upper case", IDS, "/chain/0", json!("AB".repeat(32))),
        ("a signature of another length", IDS, "/signature", json!("cd".repeat(32))),
        ("an unknown end", SILENCE, "/record/ended", json!("bored")),
        ("an unknown field", SILENCE, "/record/settings", json!({ "device": "cpu", "speed": "fast" })),
    ] {
        make.refused(name, class, with(path, value), "receipt");
    }
    let links = vec!["ab".repeat(32); 50_000];
    make.bounded("50,000 links", JSON, with("/chain", json!(links)));
    make.bounded("a million tokens", JSON, with("/record/answer", json!(vec![7; 1_000_000])));
    make.bounded("a temperature of 10^300", JSON, with("/record/sampler/temperature", json!(1e300)));
    make.seeds
}
