//! Mixtures of experts: a directory and a GGUF file give the same model, in every weight format, and
//! unsupported parts are rejected by name.

use std::{borrow::Cow, path::Path};
use testkit::paths::golden;

use crate::files_support::{GgufWriter, assert_says, interleave, safetensors, tensor};
use kernels::TensorType;
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass, LogitRows, SequenceSlice},
    linear_sites::SiteId,
    precision::Precision,
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::{ModelConfig, RopeScaling},
        experts::{ExpertId, ExpertPart, Experts},
        layout::{model_groups, required_tensors},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{
        dequantized::Dequantized,
        gguf::{GgufSource, GgufSourceError},
        open::open,
        random::RandomSource,
        safetensors::{SafetensorsSource, SafetensorsSourceError},
    },
};
use model_files::gguf::GgufFile;
use serde_json::{Value, json};
use types::BlockId;

fn open_gguf(writer: &GgufWriter) -> Result<GgufSource, GgufSourceError> {
    GgufSource::new(GgufFile::from_bytes(Path::new("tiny.gguf"), writer.bytes()).unwrap())
}

/// GGUF's codes of the weight formats, except 32-bit floats.
const KINDS: [(TensorType, u32); 11] = [
    (TensorType::F16, 1),
    (TensorType::Bf16, 30),
    (TensorType::Q4_0, 2),
    (TensorType::Q4_1, 3),
    (TensorType::Q5_0, 6),
    (TensorType::Q5_1, 7),
    (TensorType::Q8_0, 8),
    (TensorType::Q4K, 12),
    (TensorType::Q5K, 13),
    (TensorType::Q6K, 14),
    (TensorType::Mxfp4, 39),
];

fn gguf_name(config: &ModelConfig, id: TensorId) -> String {
    let of_expert = |part| match part {
        ExpertPart::Gate => "ffn_gate_exps",
        ExpertPart::Up => "ffn_up_exps",
        ExpertPart::Down => "ffn_down_exps",
    };
    let of_attention = |target| match target {
        Target::Q => "attn_q",
        Target::K => "attn_k",
        Target::V => "attn_v",
        Target::O => "attn_output",
        other => panic!("a mixture has no {other:?}"),
    };
    let (layer, name) = match id {
        TensorId::TokenEmbedding => return "token_embd.weight".to_owned(),
        TensorId::OutputNorm => return "output_norm.weight".to_owned(),
        TensorId::Weight(_, Target::LmHead) => return "output.weight".to_owned(),
        TensorId::AttentionNorm(layer) => (layer, "attn_norm"),
        TensorId::FeedForwardNorm(layer) if config.traits.sinks => (layer, "post_attention_norm"),
        TensorId::FeedForwardNorm(layer) => (layer, "ffn_norm"),
        TensorId::QueryNorm(layer) => (layer, "attn_q_norm"),
        TensorId::KeyNorm(layer) => (layer, "attn_k_norm"),
        TensorId::Sinks(layer) => (layer, "attn_sinks"),
        TensorId::Router(layer) | TensorId::RouterBias(layer) => (layer, "ffn_gate_inp"),
        TensorId::Weight(layer, target) | TensorId::Bias(layer, target) => (layer, of_attention(target)),
        TensorId::Expert(layer, _, part) | TensorId::ExpertBias(layer, _, part) => (layer, of_expert(part)),
        other => panic!("a mixture has no {other:?}"),
    };
    let is_bias = matches!(id, TensorId::Bias(..) | TensorId::RouterBias(_) | TensorId::ExpertBias(..));
    format!("blk.{layer}.{name}.{}", if is_bias { "bias" } else { "weight" })
}

fn code(kind: TensorType) -> u32 {
    KINDS.iter().find(|(of, _)| *of == kind).map_or(tensor::F32, |(_, code)| *code)
}

/// The first `layers` blocks of a mixture as llama.cpp's converter writes them.
fn converted(source: &dyn WeightSource, architecture: &str, layers: usize) -> GgufWriter {
    let config = ModelConfig { layers, ..source.config().clone() };
    let experts = config.experts.clone().unwrap();
    let key = |name: &str| format!("{architecture}.{name}");
    let mut writer = GgufWriter::default().text("general.architecture", architecture);
    for (name, count) in [
        ("context_length", config.context_length),
        ("embedding_length", config.hidden_size),
        ("block_count", layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("expert_count", experts.count),
        ("expert_used_count", experts.chosen),
        ("expert_feed_forward_length", experts.width),
    ] {
        writer = writer.u32(&key(name), count as u32);
    }
    writer = writer
        .f32(&key("attention.layer_norm_rms_epsilon"), config.norm_eps)
        .f32(&key("rope.freq_base"), config.rope.theta);
    for id in required_tensors(&config, biased(&config)) {
        let Tensor { kind, rows, cols, data } = source.tensor(id).unwrap();
        let mut data = data.into_owned();
        let name = gguf_name(&config, id);
        let is_turned = matches!(name.rsplit('.').nth(1), Some("attn_q" | "attn_k"));
        if architecture == "llama" && is_turned {
            data = interleave(&data, data.len() / rows, config.head_dim);
        }
        writer = match id {
            TensorId::Expert(_, ExpertId(0), _) => {
                let dims = [cols, rows, experts.count].map(|size| size as u64);
                writer.tensor(name, &dims, code(kind), data)
            }
            TensorId::ExpertBias(_, ExpertId(0), _) => {
                writer.tensor(name, &[cols as u64, experts.count as u64], code(kind), data)
            }
            TensorId::Expert(..) | TensorId::ExpertBias(..) => {
                writer.bend(&name, |stack| stack.data.extend(&data))
            }
            _ if rows == 1 => writer.tensor(name, &[cols as u64], code(kind), data),
            _ => writer.tensor(name, &[cols as u64, rows as u64], code(kind), data),
        };
    }
    writer
}

/// Linear layers of attention with a bias.
fn biased(config: &ModelConfig) -> &'static [Target] {
    if config.traits.sinks { &[Target::Q, Target::K, Target::V, Target::O] } else { &[] }
}

fn same_tensors(source: &dyn WeightSource, gguf: &GgufSource) {
    let ids: Vec<TensorId> = required_tensors(gguf.config(), biased(gguf.config())).collect();
    for id in ids {
        assert_eq!(source.tensor(id), gguf.tensor(id), "{id:?}");
        assert_eq!(source.kind(id), gguf.kind(id), "{id:?}");
        gguf.release(id);
    }
}

#[test]
fn gpt_oss_in_a_directory_and_in_a_gguf_file_is_one_model() {
    for (model, kind) in [("gptoss", TensorType::F32), ("gptoss-mxfp4", TensorType::Mxfp4)] {
        let directory = open(&golden("models").join(model)).unwrap();
        assert_eq!(directory.kind(TensorId::Expert(1, ExpertId(3), ExpertPart::Up)), Some(kind));
        let RopeScaling::Yarn { factor, beta_fast, original_context, .. } = directory.config().rope.scaling
        else {
            panic!("gpt-oss scales by YaRN")
        };
        let window = directory.config().sliding_window.unwrap();
        let writer = converted(&*directory, "gpt-oss", 3)
            .u32("gpt-oss.attention.sliding_window", window as u32)
            .text("gpt-oss.rope.scaling.type", "yarn")
            .f32("gpt-oss.rope.scaling.factor", factor)
            .f32("gpt-oss.rope.scaling.yarn_beta_fast", beta_fast)
            .u32("gpt-oss.rope.scaling.original_context_length", original_context as u32);
        let gguf = open_gguf(&writer).unwrap();
        same_tensors(&*directory, &gguf);
        assert_eq!(directory.config(), gguf.config());
    }
}

#[test]
fn mixtral_in_a_directory_and_in_a_gguf_file_of_llamas_is_one_model() {
    let directory = open(&golden("models/mixtral")).unwrap();
    let gguf = open_gguf(&converted(&*directory, "llama", 2)).unwrap();
    same_tensors(&*directory, &gguf);
    let experts = Experts { count: 4, chosen: 2, width: 64, normalized: true, dense_layers: vec![] };
    assert_eq!(directory.config().experts, Some(experts));
    let of_directory = ModelConfig { architecture: "llama".to_owned(), ..directory.config().clone() };
    assert_eq!(&of_directory, gguf.config());
    // Old files only give the width of a plain feed-forward layer.
    let old = converted(&*directory, "llama", 2).without("llama.expert_feed_forward_length");
    assert_eq!(open_gguf(&old).unwrap().config(), gguf.config());
}

#[test]
fn a_mixture_of_qwen_in_a_directory_and_in_a_gguf_file_is_one_model() {
    let directory = open(&golden("models/qwen3moe")).unwrap();
    // GGUF files have experts in every block: here in the only one.
    let gguf = open_gguf(&converted(&*directory, "qwen3moe", 1)).unwrap();
    same_tensors(&*directory, &gguf);
    let experts = directory.config().experts.clone().unwrap();
    assert_eq!((experts.count, experts.chosen, experts.width, experts.normalized), (8, 3, 32, true));
    assert_eq!(experts.dense_layers, [1]);
    let alone = Experts { dense_layers: vec![], ..experts };
    assert_eq!(&ModelConfig { layers: 1, experts: Some(alone), ..directory.config().clone() }, gguf.config());
    let said = converted(&*directory, "qwen3moe", 1).bool("qwen3moe.expert_weights_norm", 0);
    assert!(!open_gguf(&said).unwrap().config().experts.as_ref().unwrap().normalized);
    let steps = open(&golden("models/qwen3moe-steps")).unwrap();
    let experts = steps.config().experts.clone().unwrap();
    assert_eq!((experts.dense_layers, experts.normalized), (vec![0, 2], false));
}

/// A mixture whose rows are whole blocks of every format, with its linear layers in one of them.
struct ExpertFormatSource {
    random: RandomSource,
    kind: TensorType,
}

impl ExpertFormatSource {
    fn new(kind: TensorType) -> Self {
        let config = json!({
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256,
            "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "num_local_experts": 4, "num_experts_per_tok": 2,
        });
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        Self { random: RandomSource::open(directory.path(), 3).unwrap(), kind }
    }

    fn is_of_kind(id: TensorId) -> bool {
        matches!(id, TensorId::TokenEmbedding | TensorId::Weight(..) | TensorId::Expert(..))
    }
}

impl WeightSource for ExpertFormatSource {
    fn config(&self) -> &ModelConfig {
        self.random.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.random.tensor(id)?;
        if !Self::is_of_kind(id) {
            return Some(tensor);
        }
        let Tensor { rows, cols, .. } = tensor;
        let bytes = rows * self.kind.row_bytes(cols).unwrap();
        let salt = format!("{id:?}").bytes().map(usize::from).sum::<usize>();
        // Small bytes give small floats of any width.
        let mut data: Vec<u8> = (0..bytes).map(|at| ((at * 31 + at / 7 + salt) % 0x2C) as u8).collect();
        if self.kind == TensorType::Mxfp4 {
            // The first byte of a block is the exponent of a power of two, with 127 for 1.
            data.iter_mut()
                .step_by(self.kind.block_bytes())
                .for_each(|exponent| *exponent = 120 + *exponent % 4);
        }
        Some(Tensor { kind: self.kind, rows, cols, data: Cow::Owned(data) })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.random.kind(id).map(|kind| if Self::is_of_kind(id) { self.kind } else { kind })
    }
}

fn logits(source: &(dyn WeightSource + Sync), precision: Precision) -> Vec<f32> {
    let weights = LoadedWeights::load(source, 2).unwrap().with_precision(precision);
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 8 << 20, kv_dtype: Some(KvPrecision::F32) };
    let mut model = ResidentModel::new(weights, &options).unwrap();
    let tokens: Vec<u32> = (0..24).map(|i| i * 37 % 300).collect();
    let blocks = [BlockId(0), BlockId(1)];
    let slice = SequenceSlice::<PreparedAdapter> {
        trunk: &[],
        tokens: &tokens,
        start: 0,
        blocks: &blocks,
        adapter: None,
        logits: LogitRows::All,
    };
    let mut logits = Vec::new();
    model.forward(&[slice], &mut logits).unwrap();
    logits
}

#[test]
fn experts_of_every_format_are_read_from_their_stack_and_are_the_weights_they_stand_for() {
    for (kind, _) in KINDS {
        let source = ExpertFormatSource::new(kind);
        let gguf = open_gguf(&converted(&source, "llama", 2)).unwrap();
        same_tensors(&source, &gguf);
        assert_eq!(logits(&source, Precision::Mixed), logits(&gguf, Precision::Mixed), "{kind:?}");
        // The weights are not trained, so small rounding errors grow from block to block.
        let (exact, judge) = (logits(&gguf, Precision::Exact), logits(&Dequantized(gguf), Precision::Exact));
        let largest = judge.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let off = exact.iter().zip(&judge).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(largest > 0.0 && off <= 1e-2 * largest, "{kind:?}: {off} of {largest}");
    }
}

#[test]
fn experts_that_share_a_tensor_in_a_directory_are_the_same_experts() {
    let apart = open(&golden("models/mixtral")).unwrap();
    let config = std::fs::read(golden("models/mixtral/config.json")).unwrap();
    let mut entries = Vec::new();
    for id in required_tensors(apart.config(), &[]) {
        let Tensor { rows, cols, data, .. } = apart.tensor(id).unwrap();
        let name = match id {
            TensorId::Expert(..) => continue,
            TensorId::Router(layer) => format!("model.layers.{layer}.mlp.gate.weight"),
            _ => hf_name(id),
        };
        let shape = if rows == 1 { vec![cols] } else { vec![rows, cols] };
        entries.push((name, "F32", shape, data.into_owned()));
    }
    for layer in 0..2 {
        let of = |parts: &[ExpertPart]| {
            let ids = (0..4).flat_map(|expert| {
                parts.iter().map(move |&part| TensorId::Expert(layer, ExpertId(expert), part))
            });
            ids.flat_map(|id| apart.tensor(id).unwrap().data.into_owned()).collect::<Vec<u8>>()
        };
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        let both = of(&[ExpertPart::Gate, ExpertPart::Up]);
        entries.push((name("gate_up_proj"), "F32", vec![4, 128, 64], both));
        entries.push((name("down_proj"), "F32", vec![4, 64, 64], of(&[ExpertPart::Down])));
    }
    let open = |entries: &[_]| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), &config).unwrap();
        std::fs::write(directory.path().join("model.safetensors"), safetensors(entries)).unwrap();
        SafetensorsSource::open(directory.path())
    };
    let stacked = open(&entries).unwrap();
    for id in required_tensors(apart.config(), &[]) {
        assert_eq!(apart.tensor(id), stacked.tensor(id), "{id:?}");
    }
    let last = entries.last_mut().unwrap();
    last.2 = vec![8, 32, 64];
    assert_says(open(&entries), &["`model.layers.1.mlp.experts.down_proj`"]);
    entries.pop();
    assert_says(open(&entries), &["`model.layers.1.mlp.experts.down_proj` is missing"]);
}

fn hf_name(id: TensorId) -> String {
    use model::sources::hf_names::module_name;
    let norm = |layer: usize, name: &str| format!("model.layers.{layer}.{name}.weight");
    match id {
        TensorId::TokenEmbedding => "model.embed_tokens.weight".to_owned(),
        TensorId::OutputNorm => "model.norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => norm(layer, "input_layernorm"),
        TensorId::FeedForwardNorm(layer) => norm(layer, "post_attention_layernorm"),
        TensorId::Weight(_, Target::LmHead) => "lm_head.weight".to_owned(),
        TensorId::Weight(layer, target) => format!("{}.weight", module_name(layer, target)),
        other => panic!("the model has no {other:?}"),
    }
}

#[test]
fn a_stack_of_another_depth_or_a_router_that_is_missing_is_refused_by_name() {
    let directory = open(&golden("models/mixtral")).unwrap();
    let writer = converted(&*directory, "llama", 2);
    let shallow = writer.clone().bend("blk.1.ffn_up_exps.weight", |stack| stack.dims = vec![64, 128, 2]);
    assert_says(open_gguf(&shallow), &["`blk.1.ffn_up_exps.weight`", "[256, 64]"]);
    let without = writer.clone().without_tensor("blk.0.ffn_gate_inp.weight");
    assert_says(open_gguf(&without), &["`blk.0.ffn_gate_inp.weight` is missing"]);
    // A block with experts must not have the tensors of a plain feed-forward layer.
    let both = writer.f32_tensor("blk.0.ffn_gate.weight", [64, 64], &[0.0; 64 * 64]);
    assert_says(open_gguf(&both), &["`blk.0.ffn_gate.weight` is not supported"]);
}

#[test]
fn metadata_of_experts_that_makes_no_sense_or_asks_for_more_is_refused_by_name() {
    let directory = open(&golden("models/mixtral")).unwrap();
    let with = |key: &str, count: u32| {
        let key = format!("llama.{key}");
        open_gguf(&converted(&*directory, "llama", 2).without(&key).u32(&key, count))
    };
    assert_says(with("expert_used_count", 5), &["experts of a token", "5", "1 and 4"]);
    assert_says(with("expert_used_count", 0), &["experts of a token", "0"]);
    assert_says(with("expert_count", 1 << 20), &["the number of experts", "1048576"]);
    assert_says(with("expert_feed_forward_length", 0), &["the width of experts"]);
    for (key, count) in [
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
        ("expert_group_count", 8),
        ("leading_dense_block_count", 1),
    ] {
        assert_says(with(key, count), &[&format!("`llama.{key}`")]);
    }
    let scaled = converted(&*directory, "llama", 2).f32("llama.expert_weights_scale", 2.5);
    assert_says(open_gguf(&scaled), &["`llama.expert_weights_scale`"]);
    let silent = converted(&*directory, "llama", 2).without("llama.expert_used_count");
    assert_says(open_gguf(&silent), &["`llama.expert_used_count` is missing"]);
}

fn with_options(name: &str, options: &Value) -> Result<SafetensorsSource, SafetensorsSourceError> {
    let from = golden("models").join(name);
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    for (option, value) in options.as_object().unwrap() {
        config[option] = value.clone();
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    SafetensorsSource::open(directory.path())
}

#[test]
fn options_of_experts_are_read_by_both_names_and_checked() {
    assert!(with_options("qwen3moe", &json!({"num_experts": null, "num_local_experts": 8})).is_ok());
    assert_says(with_options("qwen3moe", &json!({"decoder_sparse_step": 0})), &["decoder_sparse_step"]);
    assert_says(with_options("qwen3moe", &json!({"num_experts_per_tok": 9})), &["experts of a token", "9"]);
    assert_says(
        with_options("qwen3moe", &json!({"mlp_only_layers": [0, 1, 2]})),
        &["blocks with experts", "0"],
    );
    // A block with experts in the files is not plain.
    assert_says(
        with_options("qwen3moe", &json!({"mlp_only_layers": [0, 1]})),
        &["`model.layers.0.mlp.gate_proj.weight` is missing"],
    );
    assert_says(
        with_options("mixtral", &json!({"num_local_experts": 5})),
        &["`model.layers.0.block_sparse_moe.gate.weight`", "[4, 64]"],
    );
}

#[test]
fn sites_of_experts_stand_behind_those_of_their_attention() {
    for (name, count) in
        [("mixtral", 2 * (2 + 8) + 1), ("qwen3moe", 2 * (2 + 16) + 4 + 1), ("llama-tied", 13)]
    {
        let source = open(&golden("models").join(name)).unwrap();
        let groups: Vec<_> = model_groups(source.config()).collect();
        assert_eq!(groups.len(), count, "{name}");
        for (number, &(layer, group)) in (0..).zip(&groups) {
            assert_eq!(SiteId::of(source.config(), layer, group), SiteId(number), "{name}");
            assert_eq!(SiteId(number).group(source.config()), Some((layer, group)), "{name}");
        }
        assert_eq!(SiteId(count as u32).group(source.config()), None, "{name}");
    }
}

#[test]
fn adapters_of_experts_in_a_gguf_file_are_refused_by_name() {
    let model = open(&golden("models/mixtral")).unwrap();
    let path = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    let gguf = GgufWriter::default()
        .text("general.architecture", "llama")
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .f32("adapter.lora.alpha", 8.0)
        .f32_tensor("blk.0.ffn_down_exps.weight.lora_a", [2, 64], &[0.5; 128]);
    std::fs::write(path.path(), gguf.bytes()).unwrap();
    assert_says(Adapter::read(path.path(), model.config()), &["experts in a form", "ffn_down_exps"]);
}
