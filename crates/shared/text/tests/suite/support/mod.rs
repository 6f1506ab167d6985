//! Support of the text tests: golden files, tiny GGUF files, the real model.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::path::Path;

use model_files::gguf::GgufFile;
use serde_json::Value;

/// A file of `golden/`, made by `golden/make_golden.py`.
pub(crate) fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn smollm2() -> GgufFile {
    GgufFile::open(&testkit::paths::real_model())
        .unwrap_or_else(|error| panic!("{error}\nrun ./scripts/fetch-model first"))
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

pub(crate) fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

#[derive(Default)]
pub(crate) struct GgufWriter {
    entries: Vec<u8>,
    count: u64,
}

impl GgufWriter {
    fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        push_string(&mut self.entries, key);
        self.entries.extend_from_slice(&kind.to_le_bytes());
        self.entries.extend_from_slice(value);
        self.count += 1;
        self
    }

    fn array(self, key: &str, kind: u32, count: usize, elements: &[u8]) -> Self {
        let head = [kind.to_le_bytes().as_slice(), &(count as u64).to_le_bytes()].concat();
        self.entry(key, 9, &[&head, elements].concat())
    }

    pub(crate) fn string(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        push_string(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: &str) -> Self {
        self.entry(key, 7, &[u8::from(value == "true")])
    }

    pub(crate) fn strings(self, key: &str, values: &[String]) -> Self {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| push_string(&mut bytes, value));
        self.array(key, 8, values.len(), &bytes)
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len(), &bytes)
    }

    pub(crate) fn f32s(self, key: &str, values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len(), &bytes)
    }

    pub(crate) fn open(self) -> GgufFile {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend_from_slice(&3u32.to_le_bytes());
        bytes.extend_from_slice(&0u64.to_le_bytes());
        bytes.extend_from_slice(&self.count.to_le_bytes());
        bytes.extend_from_slice(&self.entries);
        GgufFile::from_bytes(Path::new("test.gguf"), bytes).unwrap()
    }
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// The small byte-level vocabulary of the golden files under a pre-tokenizer name.
pub(crate) fn byte_level(pre: &str) -> GgufWriter {
    let golden = golden("byte_level.json");
    GgufWriter::default()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &strings(&golden["tokens"]))
        .i32s(
            "tokenizer.ggml.token_type",
            &serde_json::from_value::<Vec<i32>>(golden["types"].clone()).unwrap(),
        )
        .strings("tokenizer.ggml.merges", &strings(&golden["merges"]))
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
}

pub(crate) fn sentencepiece() -> GgufWriter {
    let golden = golden("sentencepiece.json");
    GgufWriter::default()
        .string("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &strings(&golden["tokens"]))
        .i32s(
            "tokenizer.ggml.token_type",
            &serde_json::from_value::<Vec<i32>>(golden["types"].clone()).unwrap(),
        )
        .f32s("tokenizer.ggml.scores", &serde_json::from_value::<Vec<f32>>(golden["scores"].clone()).unwrap())
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.unknown_token_id", 0)
}
