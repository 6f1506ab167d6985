//! A small model of random weights for GPU tests, because the stand-in for a GPU runs all threads of a kernel
//! sequentially.
//!
//! Without a device the tests report that and are skipped; `HOLOBIONT_REQUIRE_CUDA=1` forbids that.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use model::{
    shape::{
        layout::required_tensors,
        source::{Target, TensorId, WeightSource as _},
    },
    sources::random::RandomSource,
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::{
    CompletionAnswer, CompletionRequest, DeploymentPlan,
    fixtures::{self, program},
};

/// Number of layers of the model.
pub const LAYERS: usize = 2;
/// Width of the residual stream.
pub const HIDDEN: usize = 64;
/// Width of the feed-forward layers.
pub const INTERMEDIATE: usize = 96;
/// Number of tokens in the vocabulary.
pub const VOCABULARY: usize = 256;
/// Seed of the random weights.
pub const SEED: u64 = 7;
/// Maximum difference of log-probabilities between the CPU and a device that rounds to bf16.
pub const TOLERANCE: f64 = 0.06;

/// Link speed of about a byte per second, at which no adapter reaches the device during a test.
pub const NEVER_GBPS: &str = "0.00000001";

/// Returns the real model, or reports that the package has none (`scripts/gpu-pack --no-model`).
#[must_use]
pub fn real_model() -> Option<PathBuf> {
    let is_packed = env::var_os("HOLOBIONT_TEST_ROOT").is_some();
    let named = env::var_os("HOLOBIONT_TEST_MODEL").map(PathBuf::from);
    if is_packed && !named.is_some_and(|path| path.is_file()) {
        eprintln!("skipped: the package has no model");
        return None;
    }
    Some(fixtures::whole_model())
}

/// Whether a GPU or a stand-in is available; reports if not.
#[must_use]
pub fn has_device() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let probe =
            Command::new(program("base-executor")).args(["device", "cuda:0"]).output().expect("it runs");
        let why = String::from_utf8_lossy(&probe.stderr).into_owned();
        let is_required = env::var_os("HOLOBIONT_REQUIRE_CUDA").is_some_and(|value| value == "1");
        assert!(probe.status.success() || !is_required, "HOLOBIONT_REQUIRE_CUDA is set, but: {why}");
        if !probe.status.success() {
            eprintln!("skipped: {why}");
        }
        probe.status.success()
    })
}

/// True for the driver that `scripts/cuda-on-cpu` builds.
#[must_use]
pub fn is_stand_in() -> bool {
    env::var_os("LD_LIBRARY_PATH")
        .is_some_and(|paths| env::split_paths(&paths).any(|path| path.join("kernels").is_dir()))
}

/// Writes a model: configuration, weights, and a tokenizer with a word for every token. Prompts are token
/// ids.
#[must_use]
pub fn small_model() -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": VOCABULARY,
    });
    let words = (4..VOCABULARY).map(|id| (format!("t{id}"), json!(id)));
    let merged =
        [("a", 0), ("b", 1), ("ab", 2), ("<|end|>", 3)].map(|(word, id)| (word.to_owned(), json!(id)));
    let words: Map<String, Value> = merged.into_iter().chain(words).collect();
    let tokenizer = json!({
        "added_tokens": [{"id": 3, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": words, "merges": [["a", "b"]]},
    });
    write(directory.path(), "config.json", &config.to_string().into_bytes());
    write(directory.path(), "tokenizer.json", &tokenizer.to_string().into_bytes());
    let source = RandomSource::open(directory.path(), SEED).expect("the shape is a model's");
    let ids = required_tensors(source.config(), &[]);
    let tensors = ids.map(|id| (name(id), source.tensor(id).expect("every tensor is made")));
    let tensors = tensors.map(|(name, tensor)| {
        let shape = if tensor.rows == 1 { vec![tensor.cols] } else { vec![tensor.rows, tensor.cols] };
        (name, "BF16", shape, tensor.data.into_owned())
    });
    write(directory.path(), "model.safetensors", &safetensors(tensors));
    directory
}

fn name(id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "model.embed_tokens.weight".to_owned(),
        TensorId::OutputNorm => "model.norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        TensorId::FeedForwardNorm(layer) => format!("model.layers.{layer}.post_attention_layernorm.weight"),
        TensorId::Weight(_, Target::LmHead) => "lm_head.weight".to_owned(),
        TensorId::Weight(layer, target) => {
            let module = match target {
                Target::Q => "self_attn.q_proj",
                Target::K => "self_attn.k_proj",
                Target::V => "self_attn.v_proj",
                Target::O => "self_attn.o_proj",
                Target::Gate => "mlp.gate_proj",
                Target::Up => "mlp.up_proj",
                Target::Down => "mlp.down_proj",
                Target::LmHead | Target::Expert(..) => panic!("the model has no {target:?} in a layer"),
            };
            format!("model.layers.{layer}.{module}.weight")
        }
        other => panic!("the model has no {other:?}"),
    }
}

/// Builds a safetensors file: the length of its header, the header, and the data.
fn safetensors(tensors: impl Iterator<Item = (String, &'static str, Vec<usize>, Vec<u8>)>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, kind, shape, bytes) in tensors {
        let begin = data.len();
        data.extend(bytes);
        header.insert(name, json!({"dtype": kind, "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

/// Writes a LoRA adapter of the model in PEFT's format from a seed, strong enough to change answers.
pub fn adapter(seed: u32, rank: usize, into: &Path) {
    fs::create_dir_all(into).expect("a directory for the adapter");
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "down_proj"], "bias": "none", "fan_in_fan_out": false,
    });
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut number = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        0.4 * (state as f32 / u32::MAX as f32 - 0.5)
    };
    let modules = [("self_attn.q_proj", HIDDEN), ("mlp.down_proj", INTERMEDIATE)];
    let parts = (0..LAYERS).flat_map(|layer| modules.map(move |(module, inputs)| (layer, module, inputs)));
    let parts = parts.flat_map(|(layer, module, inputs)| {
        let name = |part| format!("base_model.model.model.layers.{layer}.{module}.lora_{part}.weight");
        [(name("A"), vec![rank, inputs]), (name("B"), vec![HIDDEN, rank])]
    });
    let tensors = parts.map(|(name, shape)| {
        let bytes = (0..shape[0] * shape[1]).flat_map(|_| number().to_le_bytes()).collect();
        (name, "F32", shape, bytes)
    });
    write(into, "adapter_config.json", config.to_string().as_bytes());
    write(into, "adapter_model.safetensors", &safetensors(tensors));
}

fn write(directory: &Path, name: &str, bytes: &[u8]) {
    fs::write(directory.join(name), bytes).expect("a file of the test");
}

/// Copies an adapter to a folder from which it may be loaded.
pub fn copy_adapter(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory for the adapter");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).expect("the adapter is copied");
    }
}

/// Plans a deployment of the model on `device`.
#[must_use]
pub fn plan(model: &Path, device: &str) -> DeploymentPlan {
    DeploymentPlan::bare()
        .model(model)
        .set("DEVICE", device)
        .set("KV_BYTES", "4MiB")
        .set("CHUNK_TOKENS", "32")
        .set("MAX_RUNNING", "4")
}

/// Compares answers of two devices: tokens must be equal up to two that are about equally likely.
pub fn assert_alike(cpu: &CompletionAnswer, gpu: &CompletionAnswer) {
    let number = |value: &Value| value.as_f64().expect("a number");
    for (index, (expected, found)) in cpu.scored.iter().zip(&gpu.scored).enumerate() {
        let difference = (number(&expected[1]) - number(&found[1])).abs();
        assert!(difference < TOLERANCE, "token {index}: {expected:?} on the CPU, {found:?} on the GPU");
        if expected[0] != found[0] {
            assert!(index > 0, "the first tokens differ: {expected:?}, {found:?}");
            return;
        }
    }
    assert_eq!(cpu.scored.len(), gpu.scored.len());
}

/// Requests `tokens` greedy tokens of `model` for a prompt of `length` tokens from `seed`.
#[must_use]
pub fn question(model: &str, seed: u32, length: usize, tokens: u32) -> CompletionRequest {
    let prompt = fixtures::prompt(seed, length).into_iter().map(|token| token % VOCABULARY as u32);
    CompletionRequest::new(model, prompt.collect(), tokens)
}
