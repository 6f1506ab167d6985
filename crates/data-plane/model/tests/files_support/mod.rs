//! Writers of tiny model and adapter files for the tests of their readers.
#![allow(dead_code, unreachable_pub, reason = "each test binary includes all of this and uses a part")]

use std::path::Path;

use model::shape::{
    config::ModelConfig,
    layout::{BLOCK_TARGETS, linear_shape},
    source::Target,
};
use serde_json::{Value, json};

pub mod kind {
    pub const U8: u32 = 0;
    pub const U32: u32 = 4;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
}

pub mod tensor {
    pub const F32: u32 = 0;
    pub const F16: u32 = 1;
    pub const Q8_0: u32 = 8;
}

/// Builder of a GGUF file in which every part can be wrong.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    pub magic: [u8; 4],
    pub version: u32,
    /// Replaces the true count in the header.
    pub tensor_count: Option<u64>,
    pub entry_count: Option<u64>,
    pub alignment: usize,
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<GgufTensor>,
}

#[derive(Debug, Clone)]
pub struct GgufTensor {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    pub kind: u32,
    /// Replaces the true offset in the table.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            entry_count: None,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
        }
    }
}

pub fn text_bytes(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

impl GgufWriter {
    pub fn raw(mut self, key: &str, kind: u32, value: impl AsRef<[u8]>) -> Self {
        self.entries.push([&text_bytes(key), &kind.to_le_bytes()[..], value.as_ref()].concat());
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, kind::U32, value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, kind::F32, value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: u8) -> Self {
        self.raw(key, kind::BOOL, [value])
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, kind::STRING, text_bytes(value))
    }

    pub fn array(self, key: &str, element: u32, count: u64, elements: impl AsRef<[u8]>) -> Self {
        let value = [&element.to_le_bytes()[..], &count.to_le_bytes(), elements.as_ref()].concat();
        self.raw(key, kind::ARRAY, value)
    }

    pub fn without(mut self, key: &str) -> Self {
        let prefix = text_bytes(key);
        self.entries.retain(|entry| !entry.starts_with(&prefix));
        self
    }

    pub fn tensor(mut self, name: impl AsRef<[u8]>, dims: &[u64], kind: u32, data: Vec<u8>) -> Self {
        let name = name.as_ref().to_vec();
        self.tensors.push(GgufTensor { name, dims: dims.to_vec(), kind, offset: None, data });
        self
    }

    /// Adds a 32-bit matrix `[rows, cols]`, or a vector if there is one row.
    pub fn f32_tensor(self, name: &str, [rows, cols]: [usize; 2], values: &[f32]) -> Self {
        let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        self.tensor(name, &dims, tensor::F32, f32_bytes(values))
    }

    pub fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name.as_bytes());
        self
    }

    pub fn bend(mut self, name: &str, change: impl FnOnce(&mut GgufTensor)) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes());
        change(tensor.expect("the file has the tensor"));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = self.magic.to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        file.extend(self.entries.iter().flatten());
        let mut offset = 0;
        for tensor in &self.tensors {
            file.extend(text_bytes(&tensor.name));
            file.extend((tensor.dims.len() as u32).to_le_bytes());
            file.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&tensor.data);
        }
        file
    }
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub fn f16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect()
}

pub fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

/// Different small numbers for each `seed`, exact in both 16-bit types.
pub fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 127) as f32 / 64.0 - 1.0).collect()
}

/// A safetensors file of `(name, dtype, shape, bytes)`.
pub fn safetensors(tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// Shape of the tiny model: 2 layers, 4 query heads over 2 key heads, all sizes different.
pub fn tiny() -> ModelConfig {
    ModelConfig {
        architecture: "llama".to_owned(),
        vocab_size: 10,
        hidden_size: 32,
        intermediate_size: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        norm_eps: 1e-5,
        rope: model::shape::config::Rope {
            theta: 10_000.0,
            scaling: model::shape::config::RopeScaling::None,
        },
        qk_norm: false,
        tied_head: false,
        context_length: 128,
        sliding_window: None,
        traits: model::shape::config::ArchFlags::default(),
        experts: None,
    }
}

pub fn tiny_json() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
    })
}

#[derive(Debug, Clone)]
pub struct TinyTensor {
    pub gguf: String,
    pub hf: String,
    pub shape: [usize; 2],
    pub values: Vec<f32>,
    /// Head width, if the `llama` architecture of GGUF interleaves the rows.
    pub interleaved: Option<usize>,
}

/// All tensors of the tiny model; `biased` names the layers of a block that have a bias.
pub fn tiny_tensors(biased: &[Target]) -> Vec<TinyTensor> {
    let config = tiny();
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), "model.embed_tokens.weight".to_owned(), [10, 32], None),
        ("output_norm.weight".to_owned(), "model.norm.weight".to_owned(), [1, 32], None),
        ("output.weight".to_owned(), "lm_head.weight".to_owned(), [10, 32], None),
    ];
    for layer in 0..config.layers {
        for (gguf, hf) in [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")] {
            let hf = format!("model.layers.{layer}.{hf}.weight");
            tensors.push((format!("blk.{layer}.{gguf}.weight"), hf, [1, 32], None));
        }
        for target in BLOCK_TARGETS {
            let (gguf, hf) = (gguf_name(layer, target), hf_name(layer, target));
            let [rows, cols] = linear_shape(&config, target);
            let head = matches!(target, Target::Q | Target::K).then_some(config.head_dim);
            tensors.push((format!("{gguf}.weight"), format!("{hf}.weight"), [rows, cols], head));
            if biased.contains(&target) {
                tensors.push((format!("{gguf}.bias"), format!("{hf}.bias"), [1, rows], head));
            }
        }
    }
    let tiny =
        |(seed, (gguf, hf, shape, interleaved)): (usize, (String, String, [usize; 2], Option<usize>))| {
            TinyTensor { gguf, hf, shape, values: numbers(shape[0] * shape[1], seed), interleaved }
        };
    tensors.into_iter().enumerate().map(tiny).collect()
}

pub fn gguf_name(layer: usize, target: Target) -> String {
    let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    format!("blk.{layer}.{}", names[target.index_in_block().unwrap_or(7)])
}

pub fn hf_name(layer: usize, target: Target) -> String {
    let names = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    format!("model.layers.{layer}.{}", names[target.index_in_block().unwrap_or(7)])
}

/// Permutation of q and k by llama.cpp's converter: within each head, rows of the two halves alternate.
pub fn interleave<T: Clone>(values: &[T], feature: usize, head_dim: usize) -> Vec<T> {
    let rows: Vec<&[T]> = values.chunks(feature).collect();
    let mut out = Vec::new();
    for head in rows.chunks(head_dim) {
        for i in 0..head_dim / 2 {
            out.extend_from_slice(head[i]);
            out.extend_from_slice(head[i + head_dim / 2]);
        }
    }
    out
}

/// Metadata of the tiny model under the architecture's name.
pub fn tiny_metadata(architecture: &str) -> GgufWriter {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufWriter::default()
        .text("general.architecture", architecture)
        .u32(&key("context_length"), 128)
        .u32(&key("embedding_length"), 32)
        .u32(&key("block_count"), 2)
        .u32(&key("feed_forward_length"), 64)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
}

pub fn tiny_gguf(architecture: &str, biased: &[Target]) -> GgufWriter {
    let mut writer = tiny_metadata(architecture);
    for TinyTensor { gguf, shape, values, interleaved, .. } in tiny_tensors(biased) {
        let values = match interleaved.filter(|_| architecture == "llama") {
            Some(head_dim) => interleave(&values, if shape[0] == 1 { 1 } else { shape[1] }, head_dim),
            None => values,
        };
        writer = writer.f32_tensor(&gguf, shape, &values);
    }
    writer
}

pub fn tiny_entries(biased: &[Target]) -> Vec<(String, &'static str, Vec<usize>, Vec<u8>)> {
    tiny_tensors(biased)
        .into_iter()
        .map(|TinyTensor { hf, shape, values, .. }| {
            let shape = if shape[0] == 1 { vec![shape[1]] } else { shape.to_vec() };
            (hf, "F32", shape, f32_bytes(&values))
        })
        .collect()
}

pub fn write_model(directory: &Path, config: &Value, entries: &[(String, &str, Vec<usize>, Vec<u8>)]) {
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    std::fs::write(directory.join("model.safetensors"), safetensors(entries)).unwrap();
}

#[track_caller]
pub fn assert_says<T: std::fmt::Debug, E: std::error::Error>(result: Result<T, E>, parts: &[&str]) {
    let text = result.expect_err("this must be refused").to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}
