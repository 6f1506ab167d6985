//! A model in a Hugging Face directory: its shape, its tensors, and rejected files.

use std::path::Path;

use crate::files_support::{
    assert_says, bf16_bytes, f16_bytes, f32_bytes, numbers, safetensors, tiny, tiny_entries, tiny_gguf,
    tiny_json, tiny_tensors, write_model,
};
use kernels::TensorType;
use model::{
    shape::{
        config::{ModelConfig, RopeScaling},
        layout,
        source::{Target, TensorId, WeightSource},
    },
    sources::{
        gguf::GgufSource,
        safetensors::{SafetensorsSource, SafetensorsSourceError},
    },
};
use model_files::gguf::GgufFile;
use serde_json::{Value, json};

type ModelTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

fn open_with(config: &Value, entries: &ModelTensors) -> Result<SafetensorsSource, SafetensorsSourceError> {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), config, entries);
    SafetensorsSource::open(directory.path())
}

/// Configuration of the tiny model with some options changed; null removes one.
fn json_with(changes: &Value) -> Value {
    let mut config = tiny_json();
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    config
}

fn config_with(changes: &Value) -> ModelConfig {
    open_with(&json_with(changes), &tiny_entries(&[])).unwrap().config().clone()
}

#[track_caller]
fn refused(changes: &Value, parts: &[&str]) {
    assert_says(open_with(&json_with(changes), &tiny_entries(&[])), parts);
}

#[test]
fn a_directory_and_a_gguf_file_of_one_model_give_the_same_tensors() {
    let from_directory = open_with(&tiny_json(), &tiny_entries(&[])).unwrap();
    let gguf = GgufFile::from_bytes(Path::new("tiny.gguf"), tiny_gguf("llama", &[]).bytes()).unwrap();
    let from_gguf = GgufSource::new(gguf).unwrap();
    assert_eq!(from_directory.config(), &tiny());
    assert_eq!(from_directory.config(), from_gguf.config());
    let ids: Vec<TensorId> = layout::required_tensors(&tiny(), &[]).collect();
    assert_eq!(ids.len(), 3 + 2 * 9);
    for id in ids {
        assert_eq!(from_directory.tensor(id), from_gguf.tensor(id), "{id:?}");
        assert!(from_directory.tensor(id).is_some(), "{id:?}");
    }
    assert!(from_directory.tensor(TensorId::Bias(0, Target::Q)).is_none());
    assert!(from_directory.tensor(TensorId::Weight(2, Target::Q)).is_none());
    from_directory.release(TensorId::TokenEmbedding);
    assert_eq!(from_directory.tensor(TensorId::TokenEmbedding), from_gguf.tensor(TensorId::TokenEmbedding));
}

#[test]
fn the_three_stored_types_are_told_apart() {
    let mut entries = tiny_entries(&[]);
    let values = numbers(32 * 32, 5);
    let mut set = |name: &str, dtype, bytes| {
        let entry = entries.iter_mut().find(|entry| entry.0 == name).unwrap();
        (entry.1, entry.3) = (dtype, bytes);
    };
    set("model.layers.0.self_attn.q_proj.weight", "F16", f16_bytes(&values));
    set("model.layers.1.self_attn.q_proj.weight", "BF16", bf16_bytes(&values));
    let source = open_with(&tiny_json(), &entries).unwrap();
    let q = |layer| source.tensor(TensorId::Weight(layer, Target::Q)).unwrap();
    assert_eq!((q(0).kind, q(0).data.to_vec()), (TensorType::F16, f16_bytes(&values)));
    assert_eq!((q(1).kind, q(1).data.to_vec()), (TensorType::Bf16, bf16_bytes(&values)));
    entries[0].1 = "I32";
    assert_says(
        open_with(&tiny_json(), &entries),
        &["model.embed_tokens.weight", "I32", "model.safetensors"],
    );
}

#[test]
fn a_sharded_model_is_read_whole() {
    let directory = tempfile::tempdir().unwrap();
    let entries = tiny_entries(&[]);
    let (first, second) = entries.split_at(7);
    let mut map = serde_json::Map::new();
    for (file, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        std::fs::write(directory.path().join(file), safetensors(part)).unwrap();
        map.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    let index = directory.path().join("model.safetensors.index.json");
    let open = |map: &Value| {
        std::fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
        SafetensorsSource::open(directory.path())
    };
    std::fs::write(directory.path().join("config.json"), tiny_json().to_string()).unwrap();
    let source = open(&Value::Object(map)).unwrap();
    assert!(source.unchanged());
    for tensor in tiny_tensors(&[]).iter().filter(|tensor| tensor.hf.ends_with("mlp.up_proj.weight")) {
        let layer = usize::from(tensor.hf.contains("layers.1."));
        let up = source.tensor(TensorId::Weight(layer, Target::Up)).unwrap();
        assert_eq!(up.data, f32_bytes(&tensor.values));
    }

    assert_says(open(&json!({"x": "a.safetensors"})), &["is missing"]);
    assert_says(open(&json!({"x": "c.safetensors"})), &["c.safetensors", "cannot read"]);
    for name in ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ""] {
        assert_says(open(&json!({"x": name})), &["not a plain file name"]);
    }
    assert_says(open(&json!({})), &["names 0 files"]);
    assert_says(open(&json!([])), &["model.safetensors.index.json"]);
    std::fs::copy(directory.path().join("a.safetensors"), directory.path().join("c.safetensors")).unwrap();
    assert_says(open(&json!({"x": "a.safetensors", "y": "c.safetensors"})), &["stored twice"]);
}

#[test]
fn architectures_are_told_apart_and_others_refused_by_name() {
    assert_eq!(config_with(&json!({"architectures": ["MistralForCausalLM"]})).architecture, "mistral");
    let qkv = [Target::Q, Target::K, Target::V];
    let qwen2 = json_with(&json!({"architectures": ["Qwen2ForCausalLM"]}));
    let source = open_with(&qwen2, &tiny_entries(&qkv)).unwrap();
    assert_eq!(source.config().architecture, "qwen2");
    assert_eq!(source.tensor(TensorId::Bias(1, Target::K)).unwrap().cols, 16);
    assert_says(
        open_with(&qwen2, &tiny_entries(&[])),
        &["`model.layers.0.self_attn.q_proj.bias` is missing"],
    );

    let mut entries = tiny_entries(&[]);
    for layer in 0..2 {
        for part in ["q", "k"] {
            let name = format!("model.layers.{layer}.self_attn.{part}_norm.weight");
            entries.push((name, "F32", vec![8], f32_bytes(&[1.0; 8])));
        }
    }
    let qwen3 = json_with(&json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}));
    assert!(open_with(&qwen3, &entries).unwrap().config().qk_norm);
    assert_says(
        open_with(&tiny_json(), &entries),
        &["`model.layers.0.self_attn.k_norm.weight`", "not supported"],
    );

    refused(
        &json!({"architectures": ["GemmaForCausalLM"]}),
        &["config.json", "architectures", "GemmaForCausalLM"],
    );
    refused(&json!({"architectures": null}), &["`architectures` is missing"]);
}

#[test]
fn biases_are_there_exactly_where_the_configuration_says() {
    let attention = [Target::Q, Target::K, Target::V, Target::O];
    let with = json_with(&json!({"attention_bias": true}));
    let source = open_with(&with, &tiny_entries(&attention)).unwrap();
    assert!(source.tensor(TensorId::Bias(0, Target::O)).is_some());
    assert_says(open_with(&with, &tiny_entries(&[])), &["q_proj.bias` is missing"]);
    assert_says(open_with(&tiny_json(), &tiny_entries(&attention)), &["k_proj.bias", "not supported"]);
    let all = json_with(&json!({"attention_bias": true, "mlp_bias": true}));
    assert!(open_with(&all, &tiny_entries(&layout::BLOCK_TARGETS)).is_ok());
}

#[test]
fn a_tied_head_is_the_embedding_even_if_it_is_stored_again() {
    let tied = json_with(&json!({"tie_word_embeddings": true}));
    let mut entries = tiny_entries(&[]);
    for _ in 0..2 {
        let source = open_with(&tied, &entries).unwrap();
        assert!(source.config().tied_head);
        assert!(source.tensor(TensorId::Weight(0, Target::LmHead)).is_none());
        entries.retain(|entry| entry.0 != "lm_head.weight");
    }
    assert_says(open_with(&tiny_json(), &entries), &["`lm_head.weight` is missing"]);
}

#[test]
fn rope_is_read_in_the_old_form_and_the_new_or_refused_by_name() {
    let scaling = |changes| config_with(&changes).rope.scaling;
    let llama3 = json!({
        "rope_type": "llama3", "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 500_000.0,
    });
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64.0,
    };
    assert_eq!(scaling(json!({"rope_scaling": llama3})), expected);
    let new = config_with(&json!({"rope_parameters": llama3, "rope_theta": null}));
    assert_eq!((new.rope.scaling, new.rope.theta), (expected, 500_000.0));
    assert_eq!(
        scaling(json!({"rope_scaling": {"type": "linear", "factor": 2}})),
        RopeScaling::Linear { factor: 2.0 }
    );
    assert_eq!(scaling(json!({"rope_scaling": {"rope_type": "default"}})), RopeScaling::None);
    assert_eq!(scaling(json!({"rope_scaling": null})), RopeScaling::None);
    assert_eq!(config_with(&json!({"rope_theta": 1e6})).rope.theta, 1e6);
    assert_eq!(config_with(&json!({"rope_theta": null})).rope.theta, 10_000.0);

    for other in ["dynamic", "longrope"] {
        refused(&json!({"rope_scaling": {"rope_type": other, "factor": 2.0}}), &["rope_type", other]);
    }
    refused(&json!({"rope_scaling": {"type": "linear"}}), &["rope_scaling.factor", "missing"]);
    let mut yarn =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16});
    let config = config_with(&json!({ "rope_scaling": yarn }));
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 16.0,
        beta_slow: 1.0,
        original_context: 256.0,
        truncate: true,
    };
    assert_eq!((config.rope.scaling, config.traits.rotary_magnitude), (expected, Some(1.138_629_4)));
    yarn["attention_factor"] = json!(1.5);
    assert_eq!(config_with(&json!({ "rope_scaling": yarn })).traits.rotary_magnitude, Some(1.5));
    yarn["mscale"] = json!(1.0);
    refused(&json!({ "rope_scaling": yarn }), &["rope_scaling.mscale", "1.0"]);
    for option in ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
        let mut broken = llama3.clone();
        broken.as_object_mut().unwrap().remove(option);
        refused(&json!({"rope_scaling": broken}), &[option, "missing"]);
    }
    refused(&json!({"rope_scaling": {"type": "linear", "factor": 0}}), &["factor is 0"]);
    refused(&json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor", "0.5"]);
    refused(&json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}), &["0.5"]);
}

#[test]
fn gemma3_is_read_as_its_files_before_and_since_transformers_5_have_it_or_refused_by_name() {
    let mut entries = tiny_entries(&[]);
    entries.retain(|(name, ..)| name != "lm_head.weight");
    for layer in 0..2 {
        for (part, width) in [
            ("self_attn.q_norm", 8),
            ("self_attn.k_norm", 8),
            ("pre_feedforward_layernorm", 32),
            ("post_feedforward_layernorm", 32),
        ] {
            let name = format!("model.layers.{layer}.{part}.weight");
            entries.push((name, "BF16", vec![width], bf16_bytes(&vec![0.5; width])));
        }
    }
    let json = |changes: &Value| {
        let mut config = json_with(changes);
        config["architectures"] = json!(["Gemma3ForCausalLM"]);
        config["head_dim"] = json!(8);
        for gone in ["tie_word_embeddings", "hidden_act", "rope_theta"] {
            config.as_object_mut().unwrap().remove(gone);
        }
        config
    };
    let config = |changes| open_with(&json(&changes), &entries).unwrap().config().clone();
    let windows =
        |config: &ModelConfig| config.limits().iter().map(|limits| limits.window).collect::<Vec<_>>();
    let of_old =
        config(json!({"rope_local_base_freq": 5000.0, "sliding_window": 16, "query_pre_attn_scalar": 4,
        "layer_types": ["full_attention", "sliding_attention"]}));
    assert!(of_old.tied_head && of_old.qk_norm && of_old.norms_updates());
    assert_eq!(windows(&of_old), [None, Some(16)]);
    assert_eq!(of_old.traits.score_scale, Some(0.5));
    let theta = |config: &ModelConfig| (config.rope.theta, config.traits.local_rope.as_ref().unwrap().theta);
    assert_eq!(theta(&of_old), (1e6, 5000.0));
    let of_new =
        config(json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}, "sliding_window_pattern": 2}));
    assert_eq!(theta(&of_new), (7.0, 9.0));
    assert_eq!(windows(&of_new), [Some(4096), None]);

    let source = open_with(&json(&json!({})), &entries).unwrap();
    let norm = source.tensor(TensorId::FeedForwardUpdateNorm(0)).unwrap();
    assert_eq!((norm.kind, &norm.data[..]), (TensorType::F32, &f32_bytes(&[1.5; 32])[..]));

    let refused = |changes, parts: &[&str]| assert_says(open_with(&json(&changes), &entries), parts);
    refused(json!({"final_logit_softcapping": 30.0}), &["final_logit_softcapping", "not supported"]);
    refused(json!({"use_bidirectional_attention": true}), &["use_bidirectional_attention"]);
    refused(json!({"hidden_activation": "gelu"}), &["hidden_activation", "gelu"]);
    refused(json!({"layer_types": ["full_attention", "chunked_attention"]}), &["chunked_attention"]);
    refused(json!({"layer_types": ["full_attention"]}), &["layer_types", "1 types of 2 layers"]);
    refused(json!({"query_pre_attn_scalar": 0}), &["what scores are multiplied with"]);
    refused(json!({"sliding_window_pattern": 0, "rope_local_base_freq": -1.0}), &["base is -1"]);
}

#[test]
fn a_sliding_window_counts_only_where_the_architecture_slides() {
    let window = |changes| config_with(&changes).sliding_window;
    assert_eq!(window(json!({"sliding_window": 64})), None, "llama never slides");
    let mistral = "MistralForCausalLM";
    assert_eq!(window(json!({"architectures": [mistral], "sliding_window": 64})), Some(64));
    assert_eq!(window(json!({"architectures": [mistral]})), None);

    let entries = tiny_entries(&[Target::Q, Target::K, Target::V]);
    let qwen = |changes: Value| {
        let mut config = json_with(&changes);
        config["architectures"] = json!(["Qwen2ForCausalLM"]);
        config["sliding_window"] = json!(64);
        open_with(&config, &entries).map(|source| source.config().sliding_window)
    };
    assert_eq!(qwen(json!({"use_sliding_window": false})).unwrap(), None);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 0})).unwrap(), Some(64));
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 2})).unwrap(), None);
    assert_says(
        qwen(json!({"use_sliding_window": true, "max_window_layers": 1})),
        &["max_window_layers", "1"],
    );
    let types = |types: [&str; 2]| qwen(json!({"use_sliding_window": true, "layer_types": types}));
    assert_eq!(types(["sliding_attention"; 2]).unwrap(), Some(64));
    assert_eq!(types(["full_attention"; 2]).unwrap(), None);
    assert_says(types(["full_attention", "sliding_attention"]), &["layer_types", "mixed"]);
}

#[test]
fn what_is_not_implemented_or_makes_no_sense_is_refused_by_name() {
    refused(&json!({"hidden_act": "gelu"}), &["hidden_act", "gelu"]);
    let gptq = |changes: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 32});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json!({ "quantization_config": config })
    };
    for (changes, parts) in [
        (json!({"quant_method": "bitsandbytes"}), ["quantization_config", "bitsandbytes"]),
        (json!({"quant_method": "awq", "version": "gemv"}), ["version", "gemv"]),
        (json!({"quant_method": "awq", "bits": 8}), ["bits", "8"]),
        (json!({"bits": 3}), ["bits", "3"]),
        (json!({"group_size": 0}), ["group_size", "0"]),
        (json!({"checkpoint_format": "marlin"}), ["checkpoint_format", "marlin"]),
        (json!({"dynamic": {"-:lm_head": {}}}), ["dynamic", "lm_head"]),
    ] {
        refused(&gptq(changes), &parts);
    }
    for option in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ] {
        refused(&json!({option: null}), &[option, "missing"]);
        refused(&json!({option: 0}), &["0", "between 1"]);
        refused(&json!({option: 1u64 << 40}), &["1099511627776", "between 1"]);
        refused(&json!({option: -1}), &["config.json"]);
    }
    refused(&json!({"num_key_value_heads": 3}), &["3 key-value heads"]);
    refused(&json!({"head_dim": 7}), &["width 7"]);
    refused(&json!({"head_dim": 16}), &["q_proj.weight", "[32, 32]", "[64, 32]"]);
    refused(&json!({"rms_norm_eps": -1.0}), &["epsilon is -1"]);
}

#[test]
fn broken_weight_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &tiny_json(), &tiny_entries(&[]));
    let path = directory.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let open_bytes = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        SafetensorsSource::open(directory.path())
    };
    assert!(open_bytes(&whole).is_ok());
    for length in [0, 7, 8, 100, whole.len() - 1] {
        assert_says(open_bytes(&whole[..length]), &["model.safetensors", "not a usable"]);
    }
    assert_says(open_bytes(&[&whole[..], &[0]].concat()), &["not a usable"]);
    let huge = [&u64::MAX.to_le_bytes(), &whole[8..]].concat();
    assert_says(open_bytes(&huge), &["18446744073709551615", "limit"]);
    std::fs::remove_file(&path).unwrap();
    assert_says(SafetensorsSource::open(directory.path()), &["model.safetensors", "cannot read"]);
    std::fs::write(directory.path().join("config.json"), "{").unwrap();
    assert_says(SafetensorsSource::open(directory.path()), &["config.json", "not the configuration"]);
    std::fs::write(directory.path().join("config.json"), vec![b' '; (1 << 20) + 1]).unwrap();
    assert_says(SafetensorsSource::open(directory.path()), &["config.json", "limit"]);
}

#[test]
fn tensors_that_no_model_of_the_architecture_has_are_refused_by_name() {
    let with = |name: &str| {
        let mut entries = tiny_entries(&[]);
        entries.push((name.to_owned(), "F32", vec![4], f32_bytes(&[0.0; 4])));
        open_with(&tiny_json(), &entries)
    };
    assert!(with("model.layers.0.self_attn.rotary_emb.inv_freq").is_ok(), "old files keep the frequencies");
    assert_says(with("model.layers.2.input_layernorm.weight"), &["`model.layers.2.input_layernorm.weight`"]);
    assert_says(with("vision.patch.weight"), &["`vision.patch.weight`", "not supported"]);
    let mut entries = tiny_entries(&[]);
    entries[0].2 = vec![10, 16, 2];
    assert_says(open_with(&tiny_json(), &entries), &["`model.embed_tokens.weight`"]);
}
