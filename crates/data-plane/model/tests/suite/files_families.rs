//! Families other than Llama: a directory and a GGUF file give the same model, and unsupported parts of their
//! files are rejected by name.

use std::path::Path;
use testkit::paths::golden;

use crate::files_support::{
    GgufWriter, assert_says, f32_bytes, interleave, tensor, tiny_entries, tiny_json, write_model,
};
use model::{
    adapter::Adapter,
    shape::{
        config::{BlockNorms, ModelConfig, RopeScaling},
        layout,
        source::{Target, TensorId, WeightSource},
    },
    sources::{
        gguf::{GgufSource, GgufSourceError},
        open::open,
        safetensors::{SafetensorsSource, SafetensorsSourceError},
    },
};
use model_files::gguf::GgufFile;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// Names of a block's tensors in transformers and in llama.cpp.
const NAMES: [(&str, &str); 15] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

fn gguf_name(hf: &str, family: &str) -> String {
    let Some(rest) = hf.strip_prefix("model.layers.") else {
        let ends =
            [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
        let (_, name) = ends.into_iter().find(|(of, _)| hf.strip_suffix(".weight") == Some(*of)).unwrap();
        return format!("{name}.weight");
    };
    let (layer, module) = rest.strip_suffix(".weight").unwrap().split_once('.').unwrap();
    let is_behind = matches!(family, "olmo2" | "gemma2") && module == "post_attention_layernorm";
    let name = NAMES.into_iter().find(|(of, _)| *of == module).unwrap().1;
    format!("blk.{layer}.{}.weight", if is_behind { "post_attention_norm" } else { name })
}

/// The golden model `name` as llama.cpp's converter writes it.
fn converted(name: &str, family: &str) -> GgufWriter {
    let directory = golden("models").join(name);
    let file = std::fs::read(directory.join("model.safetensors")).unwrap();
    let config: Value =
        serde_json::from_slice(&std::fs::read(directory.join("config.json")).unwrap()).unwrap();
    let mut writer = GgufWriter::default().text("general.architecture", family);
    let counts = [
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("attention.sliding_window", "sliding_window"),
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ];
    for (key, option) in counts {
        if let Some(value) = config[option].as_u64() {
            writer = writer.u32(&format!("{family}.{key}"), value as u32);
        }
    }
    let numbers = [
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rope.freq_base", "rope_theta"),
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ];
    for (key, option) in numbers {
        if let Some(value) = config[option].as_f64() {
            writer = writer.f32(&format!("{family}.{key}"), value as f32);
        }
    }
    for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
        let shape: Vec<usize> = view.shape().to_vec();
        let mut data = view.data().to_vec();
        let row = data.len() / shape[0];
        if family == "granite" && (name.contains("q_proj") || name.contains("k_proj")) {
            data = interleave(&data, row, 16);
        }
        if family == "gemma2" && shape.len() == 1 {
            let more = |bytes: &[u8; 4]| (1.0 + f32::from_le_bytes(*bytes)).to_le_bytes();
            data = data.as_chunks().0.iter().flat_map(more).collect();
        }
        let dims: Vec<u64> = shape.iter().rev().map(|&size| size as u64).collect();
        writer = writer.tensor(gguf_name(&name, family), &dims, tensor::F32, data);
    }
    writer
}

fn open_gguf(writer: &GgufWriter) -> Result<GgufSource, GgufSourceError> {
    GgufSource::new(GgufFile::from_bytes(Path::new("tiny.gguf"), writer.bytes()).unwrap())
}

/// Compares all tensors of both; returns their shapes.
fn same_tensors(name: &str, writer: &GgufWriter) -> (ModelConfig, ModelConfig) {
    let (directory, gguf) = (open(&golden("models").join(name)).unwrap(), open_gguf(writer).unwrap());
    let ids: Vec<TensorId> = layout::required_tensors(directory.config(), &[]).collect();
    assert!(ids.len() >= 20);
    for id in ids {
        let tensor = directory.tensor(id).unwrap();
        assert_eq!(Some(&tensor), gguf.tensor(id).as_ref(), "{name}: {id:?}");
        let [rows, cols] = layout::tensor_shape(directory.config(), id);
        assert_eq!((tensor.rows, tensor.cols, tensor.data.len()), (rows, cols, 4 * rows * cols), "{id:?}");
        assert_eq!((directory.kind(id), gguf.kind(id)), (Some(tensor.kind), Some(tensor.kind)), "{id:?}");
        directory.release(id);
        gguf.release(id);
    }
    (directory.config().clone(), gguf.config().clone())
}

#[test]
fn granite_multiplies_embeddings_scores_and_updates_and_divides_logits() {
    let (config, of_gguf) = same_tensors("granite", &converted("granite", "granite"));
    assert_eq!(config, of_gguf);
    let traits = &config.traits;
    assert_eq!(
        (traits.embedding_scale, traits.score_scale, traits.update_scale),
        (Some(1.5), Some(0.2), Some(0.6))
    );
    let norm = |scaling: f64| {
        let writer = converted("granite", "granite").without("granite.logit_scale");
        let source = open_gguf(&writer.f32("granite.logit_scale", scaling as f32)).unwrap();
        source.tensor(TensorId::OutputNorm).unwrap().data[..4].to_vec()
    };
    let [one, four] = [norm(1.0), norm(4.0)].map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    assert_eq!(one, 4.0 * four);
    let with = |key: &str, value: f32| converted("granite", "granite").without(key).f32(key, value);
    assert_says(open_gguf(&with("granite.logit_scale", -1.0)), &["logits are divided by is -1"]);
    assert_says(
        open_gguf(&with("granite.residual_scale", f32::NAN)),
        &["updates are multiplied with is NaN"],
    );
}

#[test]
fn olmo2_norms_behind_and_over_all_heads() {
    let writer = converted("olmo2", "olmo2");
    let (config, of_gguf) = same_tensors("olmo2", &writer);
    assert_eq!(config, of_gguf);
    assert!(config.qk_norm && config.traits.wide_query_norms && config.traits.norms == BlockNorms::Behind);
    assert_says(
        open_gguf(&writer.without_tensor("blk.1.post_ffw_norm.weight")),
        &["`blk.1.post_ffw_norm.weight` is missing"],
    );
    let third = converted("olmo2", "olmo2").u32("olmo2.attention.sliding_window", 64);
    assert_says(open_gguf(&third), &["`olmo2.attention.sliding_window` is not supported"]);
}

#[test]
fn phi3_has_layers_that_share_tensors() {
    let writer = converted("phi3", "phi3");
    let (config, of_gguf) = same_tensors("phi3", &writer);
    assert_eq!((&config, config.sliding_window), (&of_gguf, Some(8)));
    let short = writer.bend("blk.0.attn_qkv.weight", |tensor| {
        tensor.dims[1] -= 1;
        tensor.data.truncate(127 * 64 * 4);
    });
    assert_says(open_gguf(&short), &["`blk.0.attn_qkv.weight`", "[128, 64]", "[127, 64]"]);
}

/// Factors of the longrope model for sequences within its original context.
const SHORT: [f32; 6] = [1.0, 1.05, 1.1, 1.4, 1.9, 2.6];

#[test]
fn longrope_is_read_for_the_context_that_a_phi_was_first_trained_with() {
    let writer = converted("phi3-longrope", "phi3")
        .u32("phi3.rope.dimension_count", 12)
        .f32_tensor("rope_factors_short.weight", [1, 6], &SHORT)
        .f32_tensor("rope_factors_long.weight", [1, 6], &[2.0; 6]);
    let (config, of_gguf) = same_tensors("phi3-longrope", &writer);
    assert_eq!(config, of_gguf);
    assert_eq!(config.rope.scaling, RopeScaling::Factors(SHORT.to_vec()));
    assert_eq!((config.context_length, config.rotary_dim()), (96, 12));
    let magnitude = config.traits.rotary_magnitude.unwrap();
    assert!((magnitude - (1.0 + (256f32 / 96.0).ln() / 96f32.ln()).sqrt()).abs() < 1e-6);
    let said = open_gguf(&writer.clone().f32("phi3.rope.scaling.attn_factor", 1.5)).unwrap();
    assert_eq!(said.config().traits.rotary_magnitude, Some(1.5));
    let odd = writer.clone().without("phi3.rope.dimension_count").u32("phi3.rope.dimension_count", 11);
    assert_says(open_gguf(&odd), &["11 of the 16 features"]);
    let few = writer.without_tensor("rope_factors_short.weight");
    let few = few.f32_tensor("rope_factors_short.weight", [1, 5], &SHORT[..5]);
    assert_says(open_gguf(&few), &["5 frequency factors", "6"]);
    // In other families these factors have no defined meaning.
    let granite = converted("granite", "granite").f32_tensor("rope_factors_short.weight", [1, 8], &[1.0; 8]);
    assert_says(open_gguf(&granite), &["`rope_factors_short.weight`"]);
}

#[test]
fn gemma2_caps_scores_and_logits_and_has_a_window_in_every_second_layer() {
    let (config, of_gguf) = same_tensors("gemma2", &converted("gemma2", "gemma2"));
    let caps = |config: &ModelConfig| (config.traits.score_cap, config.traits.logit_cap);
    assert_eq!(caps(&config), (Some(3.0), Some(9.0)));
    let windows: Vec<_> = config.limits().iter().map(|limits| limits.window).collect();
    assert_eq!(windows, [Some(8), None, Some(8)]);
    // llama.cpp's files lack the divisor of scores: the width of a head.
    assert_eq!(of_gguf.traits.score_scale, Some(1.0 / 32f32.sqrt()));
    let mut said = of_gguf.clone();
    said.traits.score_scale = config.traits.score_scale;
    assert_eq!(config, said);
    let keys = ["gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"];
    let silent = keys.iter().fold(converted("gemma2", "gemma2"), |writer, key| writer.without(key));
    assert_eq!(caps(open_gguf(&silent).unwrap().config()), (Some(50.0), Some(30.0)));
    let none = keys.iter().fold(silent, |writer, key| writer.f32(key, 0.0));
    assert_eq!(caps(open_gguf(&none).unwrap().config()), (None, None));
}

fn tiny_of(class: &str, changes: &Value) -> Result<SafetensorsSource, SafetensorsSourceError> {
    let mut config = tiny_json();
    config["architectures"] = json!([class]);
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &config, &tiny_entries(&[]));
    SafetensorsSource::open(directory.path())
}

#[test]
fn options_of_one_family_are_refused_of_others_by_name() {
    for class in ["LlamaForCausalLM", "GraniteForCausalLM"] {
        assert!(tiny_of(class, &json!({"final_logit_softcapping": null})).is_ok());
        assert_says(tiny_of(class, &json!({"attn_logit_softcapping": 50.0})), &["attn_logit_softcapping"]);
        assert_says(
            tiny_of(class, &json!({"partial_rotary_factor": 0.5})),
            &["partial_rotary_factor", "0.5"],
        );
        let longrope = json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.0, 1.0]}});
        assert_says(tiny_of(class, &longrope), &["rope_type", "longrope"]);
    }
    assert_says(
        tiny_of("GraniteForCausalLM", &json!({"logits_scaling": 0.0})),
        &["logits are divided by is 0"],
    );
    assert_says(
        tiny_of("Phi3ForCausalLM", &json!({})),
        &["`model.layers.0.self_attn.qkv_proj.weight` is missing"],
    );
    let longrope = json!({"rope_scaling": {"type": "su"}});
    assert_says(tiny_of("Phi3ForCausalLM", &longrope), &["rope_scaling.short_factor", "missing"]);
    assert_says(tiny_of("Olmo3ForCausalLM", &json!({})), &["Olmo3ForCausalLM"]);
}

#[test]
fn an_adapter_of_fused_layers_is_one_of_their_parts_whose_a_is_shared() {
    let model = open(&golden("models/phi3")).unwrap();
    let adapter = Adapter::read(&golden("adapters/phi3/patterns"), model.config()).unwrap();
    let of = |layer, target| {
        let found = adapter.modules().iter().find(|module| (module.layer, module.target) == (layer, target));
        found.unwrap_or_else(|| panic!("{target:?} of layer {layer}"))
    };
    assert_eq!(adapter.modules().len(), 14);
    let [q, k, v] = [Target::Q, Target::K, Target::V].map(|target| of(0, target));
    assert_eq!((q.rank, q.scale, of(1, Target::Q).scale), (8, 30.0 / 8.0, 10.0 / 8.0));
    assert!(q.a == k.a && k.a == v.a && of(0, Target::Gate).a == of(0, Target::Up).a);
    assert_eq!([q.b.len(), k.b.len(), v.b.len()], [64 * 8, 32 * 8, 32 * 8]);
    assert_eq!((of(0, Target::Gate).rank, of(0, Target::O).scale, of(1, Target::Down).rank), (12, 4.0, 3));
    let file = std::fs::read(golden("adapters/phi3/patterns/adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let whole = file.tensor("base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight").unwrap();
    assert_eq!(whole.data(), f32_bytes(&[&q.b[..], &k.b, &v.b].concat()));
}

#[test]
fn a_gguf_adapter_of_fused_layers_is_the_same_adapter() {
    let model = open(&golden("models/phi3")).unwrap();
    let from = golden("adapters/phi3/rank4-attention");
    let adapter = Adapter::read(&from, model.config()).unwrap();
    let file = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
    let mut writer = GgufWriter::default()
        .text("general.architecture", "phi3")
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .f32("adapter.lora.alpha", 8.0);
    for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
        let name = name.strip_prefix("base_model.model.").unwrap();
        let (module, part) = name.split_once(".lora_").unwrap();
        let tensor_name = gguf_name(&format!("{module}.weight"), "phi3");
        let tensor_name = format!("{tensor_name}.lora_{}", part[..1].to_lowercase());
        let dims: Vec<u64> = view.shape().iter().rev().map(|&size| size as u64).collect();
        writer = writer.tensor(tensor_name, &dims, tensor::F32, view.data().to_vec());
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("adapter.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let same = Adapter::read(&path, model.config()).unwrap();
    assert_eq!((same.modules(), same.generation), (adapter.modules(), adapter.generation));
    let wide = writer.bend("blk.0.attn_qkv.weight.lora_b", |tensor| tensor.dims[1] *= 2);
    std::fs::write(&path, wide.bytes()).unwrap();
    assert!(Adapter::read(&path, model.config()).is_err());
}
