//! A model in a GGUF file: its shape, its tensors in the Hugging Face layout, and rejected files.

use std::path::Path;

use crate::files_support::{
    GgufWriter, TinyTensor, assert_says, f32_bytes, interleave, tensor, tiny, tiny_gguf, tiny_tensors,
};
use kernels::{TensorType, elementwise::Gate};
use model::{
    shape::{
        config::{ModelConfig, RopeScaling},
        source::{Target, TensorId, WeightSource},
    },
    sources::gguf::{GgufSource, GgufSourceError},
};
use model_files::gguf::GgufFile;

const QKV: [Target; 3] = [Target::Q, Target::K, Target::V];

fn open(writer: &GgufWriter) -> Result<GgufSource, GgufSourceError> {
    GgufSource::new(GgufFile::from_bytes(Path::new("tiny.gguf"), writer.bytes()).unwrap())
}

#[track_caller]
fn refused(writer: &GgufWriter, parts: &[&str]) {
    assert_says(open(writer), parts);
}

fn expected(name: &str, biased: &[Target]) -> TinyTensor {
    tiny_tensors(biased).into_iter().find(|tensor| tensor.gguf == name).unwrap()
}

fn llama() -> GgufWriter {
    tiny_gguf("llama", &[])
}

#[test]
fn the_shape_is_what_the_metadata_says() {
    assert_eq!(open(&llama()).unwrap().config(), &tiny());
    let tied = open(&llama().without_tensor("output.weight")).unwrap();
    assert_eq!(tied.config(), &ModelConfig { tied_head: true, ..tiny() });
    assert!(tied.tensor(TensorId::Weight(0, Target::LmHead)).is_none());
    let more = llama().f32("llama.rope.freq_base", 500_000.0).u32("llama.attention.sliding_window", 64);
    let more = open(&more).unwrap();
    assert_eq!(more.config().rope.theta, 500_000.0);
    assert_eq!(more.config().sliding_window, Some(64));
}

#[test]
fn a_declared_width_of_heads_is_what_q_and_k_must_have() {
    let writer =
        tiny_gguf("qwen2", &QKV).u32("qwen2.attention.key_length", 4).u32("qwen2.attention.value_length", 4);
    refused(&writer, &["attn_q.weight", "[32, 32]", "[16, 32]"]);
}

#[test]
fn llama_rows_of_q_and_k_come_in_half_rotation_order() {
    let biased = [Target::Q, Target::K, Target::V, Target::O];
    let source = open(&tiny_gguf("llama", &biased)).unwrap();
    for layer in 0..2 {
        for target in model::shape::layout::BLOCK_TARGETS {
            let name = crate::files_support::gguf_name(layer, target);
            let want = expected(&format!("{name}.weight"), &biased);
            let tensor = source.tensor(TensorId::Weight(layer, target)).unwrap();
            assert_eq!((tensor.kind, [tensor.rows, tensor.cols]), (TensorType::F32, want.shape));
            assert_eq!(tensor.data, f32_bytes(&want.values), "{name}");
            if biased.contains(&target) {
                let want = expected(&format!("{name}.bias"), &biased);
                let bias = source.tensor(TensorId::Bias(layer, target)).unwrap();
                assert_eq!(bias.data, f32_bytes(&want.values), "{name}.bias");
            }
        }
    }
}

#[test]
fn quantized_rows_are_moved_whole() {
    let row_bytes = TensorType::Q8_0.row_bytes(32).unwrap();
    let rows: Vec<u8> = (0..32 * row_bytes).map(|i| (i / row_bytes * 7 + i % row_bytes) as u8).collect();
    let writer = llama().bend("blk.1.attn_q.weight", |t| {
        t.kind = tensor::Q8_0;
        t.data = interleave(&rows, row_bytes, 8);
    });
    let source = open(&writer).unwrap();
    let q = source.tensor(TensorId::Weight(1, Target::Q)).unwrap();
    assert_eq!((q.kind, q.rows, q.cols), (TensorType::Q8_0, 32, 32));
    assert_eq!(q.data, rows);
}

#[test]
fn qwen2_rows_are_left_where_they_are() {
    let source = open(&tiny_gguf("qwen2", &QKV)).unwrap();
    assert_eq!(source.config().architecture, "qwen2");
    let want = expected("blk.0.attn_q.weight", &QKV);
    let q = source.tensor(TensorId::Weight(0, Target::Q)).unwrap();
    assert!(matches!(q.data, std::borrow::Cow::Borrowed(_)));
    assert_eq!(q.data, f32_bytes(&want.values));
    let bias = source.tensor(TensorId::Bias(0, Target::Q)).unwrap();
    assert_eq!(bias.data, f32_bytes(&expected("blk.0.attn_q.bias", &QKV).values));
}

#[test]
fn qwen3_has_norms_of_heads() {
    let mut writer = tiny_gguf("qwen3", &[]);
    refused(&writer, &["`blk.0.attn_q_norm.weight` is missing"]);
    for layer in 0..2 {
        for part in ["q", "k"] {
            writer = writer.f32_tensor(&format!("blk.{layer}.attn_{part}_norm.weight"), [1, 8], &[1.0; 8]);
        }
    }
    let source = open(&writer).unwrap();
    assert!(source.config().qk_norm);
    assert_eq!(source.tensor(TensorId::KeyNorm(1)).unwrap().cols, 8);
}

#[test]
fn gemma3_has_norms_of_heads_and_of_updates_and_one_layer_of_six_without_a_window() {
    let mut writer = tiny_gguf("gemma3", &[])
        .u32("gemma3.attention.sliding_window", 64)
        .f32("gemma3.rope.freq_base", 1e6)
        .text("gemma3.rope.scaling.type", "linear")
        .f32("gemma3.rope.scaling.factor", 8.0);
    for layer in 0..2 {
        for part in ["attn_q_norm", "attn_k_norm", "post_attention_norm"] {
            let width = if part.starts_with("post") { 32 } else { 8 };
            let values = vec![1.5; width];
            writer = writer.f32_tensor(&format!("blk.{layer}.{part}.weight"), [1, width], &values);
        }
    }
    refused(&writer, &["`blk.0.post_ffw_norm.weight` is missing"]);
    for layer in 0..2 {
        writer = writer.f32_tensor(&format!("blk.{layer}.post_ffw_norm.weight"), [1, 32], &[2.5; 32]);
    }
    let source = open(&writer).unwrap();
    let config = source.config();
    assert!(config.qk_norm && config.norms_updates() && config.traits.gate == Gate::GeluTanh);
    assert_eq!(config.traits.embedding_scale, Some(32f32.sqrt()));
    assert_eq!(config.traits.score_scale, Some(1.0 / 8f32.sqrt()));
    assert!(config.limits().iter().all(|limits| limits.window == Some(64)));
    let local = config.traits.local_rope.as_ref().unwrap();
    assert_eq!((local.theta, &local.scaling), (10_000.0, &RopeScaling::None));
    assert_eq!((config.rope.theta, &config.rope.scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    // The files already include the added 1.
    let norm = source.tensor(TensorId::FeedForwardUpdateNorm(1)).unwrap();
    assert_eq!(norm.data, f32_bytes(&[2.5; 32]));
    refused(&writer.f32("gemma3.final_logit_softcapping", 30.0), &["`gemma3.final_logit_softcapping`"]);
}

#[test]
fn rope_scaling_is_read_or_refused_by_name() {
    let scaling = |writer: &GgufWriter| open(writer).unwrap().config().rope.scaling.clone();
    let factors = [1.0, 2.0, 4.0, 8.0];
    let with_factors = llama().f32_tensor("rope_freqs.weight", [1, 4], &factors);
    assert_eq!(scaling(&with_factors), RopeScaling::Factors(factors.to_vec()));
    let linear = llama().text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(scaling(&linear), RopeScaling::Linear { factor: 4.0 });
    assert_eq!(scaling(&llama().f32("llama.rope.scale_linear", 2.0)), RopeScaling::Linear { factor: 2.0 });
    let none = llama().text("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(scaling(&none), RopeScaling::None);

    refused(
        &llama().text("llama.rope.scaling.type", "yarn"),
        &["rope scaling of type \"yarn\"", "not supported"],
    );
    refused(&llama().text("llama.rope.scaling.type", "linear"), &["llama.rope.scaling.factor", "missing"]);
    refused(&linear.f32_tensor("rope_freqs.weight", [1, 4], &factors), &["linear rope scaling beside"]);
    refused(&llama().f32_tensor("rope_freqs.weight", [1, 3], &factors[..3]), &["3 frequency factors", "4"]);
    refused(&llama().f32_tensor("rope_freqs.weight", [1, 4], &[0.0; 4]), &["frequency factor is 0"]);
    refused(&llama().f32_tensor("rope_freqs.weight", [1, 4], &[f32::NAN; 4]), &["frequency factor is NaN"]);
    refused(&llama().f32("llama.rope.scale_linear", -1.0), &["factor is -1"]);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    refused(&tiny_gguf("gemma4", &[]), &["\"gemma4\"", "not supported"]);
    refused(&GgufWriter::default(), &["general.architecture", "missing"]);
    refused(&llama().text("general.type", "adapter"), &["\"adapter\""]);
    refused(&llama().u32("split.count", 3), &["several files"]);
    refused(&tiny_gguf("qwen2", &QKV).u32("qwen2.expert_count", 8), &["experts", "qwen2"]);
    refused(&llama().bool("llama.attention.causal", 0), &["not causal"]);
    refused(&llama().u32("llama.rope.dimension_count", 4), &["part of each head"]);
    refused(&llama().u32("llama.attention.value_length", 4), &["value heads"]);
    refused(
        &llama().f32_tensor("blk.0.ffn_gate_inp.weight", [1, 4], &[0.0; 4]),
        &["`blk.0.ffn_gate_inp.weight`"],
    );
    refused(&llama().f32_tensor("blk.2.attn_q.weight", [32, 32], &[0.0; 1024]), &["`blk.2.attn_q.weight`"]);
    let quantized = llama().bend("blk.0.attn_norm.weight", |t| {
        t.kind = tensor::Q8_0;
        t.data = vec![0; 34];
    });
    refused(&quantized, &["quantized vector `blk.0.attn_norm.weight`"]);
}

#[test]
fn missing_keys_are_named() {
    for key in [
        "llama.context_length",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        refused(&llama().without(key), &[key, "missing", "tiny.gguf"]);
    }
}

#[test]
fn shapes_that_make_no_sense_are_refused() {
    let with = |key: &str, value| llama().without(key).u32(key, value);
    refused(&with("llama.block_count", 0), &["layers is 0"]);
    refused(&with("llama.block_count", u32::MAX), &["layers is 4294967295"]);
    refused(&with("llama.attention.head_count", 0), &["heads is 0"]);
    refused(&with("llama.attention.head_count_kv", 3), &["3 key-value heads", "4 query heads"]);
    refused(
        &with("llama.attention.head_count", 32).without("llama.attention.head_count_kv"),
        &["width 1", "even"],
    );
    refused(&with("llama.context_length", 0), &["context length is 0"]);
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    refused(&llama().without(epsilon).f32(epsilon, f32::INFINITY), &["epsilon is inf"]);
    refused(&llama().f32("llama.rope.freq_base", 0.0), &["base is 0"]);
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    for name in ["output_norm.weight", "blk.1.ffn_down.weight", "blk.0.attn_k.weight"] {
        refused(&llama().without_tensor(name), &[&format!("`{name}` is missing")]);
    }
    refused(&llama().without_tensor("token_embd.weight"), &["token_embd.weight"]);
    refused(&tiny_gguf("qwen2", &[]), &["`blk.0.attn_q.bias` is missing"]);
    let turned = llama().bend("blk.1.ffn_up.weight", |t| t.dims.reverse());
    refused(&turned, &["`blk.1.ffn_up.weight`", "[32, 64]", "[64, 32]"]);
}
