//! Adapters in PEFT's format: a directory that transformers and other servers load.

use std::path::Path;

pub use control_protocol::training::spec::SaveDtype;
use kernels::TensorType;
use model::{
    adapter::{MethodWeights, ScaledSide, writing},
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::hf_names::module_name,
};
use safetensors::SafeTensorError;
use serde_json::{Value, json};

pub use model::adapter::writing::{CONFIG_FILE, WriteError};
pub(crate) use model::adapter::writing::{METADATA, NamedTensor, sync, write_file};

use crate::adapter::{AdapterSpec, TargetModule, scaled_side};

fn tensor_type(dtype: SaveDtype) -> TensorType {
    match dtype {
        SaveDtype::F32 => TensorType::F32,
        SaveDtype::F16 => TensorType::F16,
        SaveDtype::Bf16 => TensorType::Bf16,
    }
}

/// Writes an adapter, its configuration `options` and a draft's shortlist to the new directory `path`.
///
/// The directory is written under another name, synced and renamed, so that it is complete or missing. Equal
/// values give equal bytes.
///
/// # Errors
/// Fails if the directory exists or cannot be written.
pub fn write(
    path: &Path,
    options: &[u8],
    method: &MethodWeights,
    config: &ModelConfig,
    dtype: SaveDtype,
    shortlist: &[u32],
) -> Result<(), WriteError> {
    writing::write(path, options, &weight_file(method, config, dtype, shortlist)?)
}

/// Returns the weight file that [`write`] writes.
///
/// # Errors
/// Fails if the tensors cannot be encoded.
pub(crate) fn weight_file(
    method: &MethodWeights,
    config: &ModelConfig,
    dtype: SaveDtype,
    shortlist: &[u32],
) -> Result<Vec<u8>, SafeTensorError> {
    serialize(&tensors(method, config), dtype, shortlist, None)
}

/// Serializes the tensors into one file, with a draft's shortlist and a text as metadata.
pub(crate) fn serialize(
    tensors: &[NamedTensor<'_>],
    dtype: SaveDtype,
    shortlist: &[u32],
    words: Option<String>,
) -> Result<Vec<u8>, SafeTensorError> {
    writing::serialize(tensors, tensor_type(dtype), shortlist, words)
}

fn tensors<'a>(method: &'a MethodWeights, config: &ModelConfig) -> Vec<NamedTensor<'a>> {
    match method {
        MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => modules
            .iter()
            .flat_map(|module| {
                let ([outputs, inputs], rank) = (linear_shape(config, module.target), module.rank);
                let name = peft_name(module.layer, module.target);
                let of = |part: &str, shape: [usize; 2], values| NamedTensor {
                    name: format!("{name}.lora_{part}.weight"),
                    shape: shape.to_vec(),
                    values,
                };
                [of("A", [rank, inputs], &module.a[..]), of("B", [outputs, rank], &module.b[..])]
            })
            .collect(),
        MethodWeights::Ia3(scales) => scales
            .vectors()
            .iter()
            .map(|vector| {
                let name = format!("{}.ia3_l", peft_name(vector.layer, vector.target));
                let count = vector.values.len();
                let shape = match vector.side {
                    ScaledSide::Input => vec![1, count],
                    ScaledSide::Output => vec![count, 1],
                };
                NamedTensor { name, shape, values: &vector.values }
            })
            .collect(),
        MethodWeights::Prefix(prefix) => vec![NamedTensor {
            name: "prompt_embeddings".to_owned(),
            shape: vec![prefix.tokens, prefix.layers * 2 * prefix.width],
            values: &prefix.values,
        }],
        MethodWeights::Prompt(prompt) => vec![NamedTensor {
            name: "prompt_embeddings".to_owned(),
            shape: vec![prompt.tokens, config.hidden_size],
            values: &prompt.values,
        }],
    }
}

fn peft_name(layer: usize, target: Target) -> String {
    format!("base_model.model.{}", module_name(layer, target))
}

/// Returns the `adapter_config.json` of a new adapter.
#[must_use]
pub fn options(shape: &AdapterSpec, dropout: f64, config: &ModelConfig) -> Vec<u8> {
    let names =
        |targets: Vec<&TargetModule>| targets.into_iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut options = json!({ "task_type": "CAUSAL_LM", "inference_mode": true });
    let own = match shape {
        AdapterSpec::Lora { rank, alpha, rslora, targets } => json!({
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "use_rslora": rslora,
            "bias": "none",
            "target_modules": names(targets.iter().collect()),
        }),
        AdapterSpec::Ia3 { targets } => json!({
            "peft_type": "IA3",
            "target_modules": names(targets.iter().collect()),
            "feedforward_modules":
                names(targets.iter().filter(|module| scaled_side(module.0) == ScaledSide::Input).collect()),
        }),
        AdapterSpec::Prefix { virtual_tokens } => json!({
            "peft_type": "PREFIX_TUNING",
            "num_virtual_tokens": virtual_tokens,
            "num_layers": config.layers,
            "num_attention_heads": config.kv_heads,
            "token_dim": config.kv_heads * config.head_dim,
            "encoder_hidden_size": config.kv_heads * config.head_dim,
            "num_transformer_submodules": 1,
            "prefix_projection": false,
        }),
    };
    extend(&mut options, own);
    to_bytes(&options)
}

/// Returns the `adapter_config.json` of a new draft adapter with the blocks of `config`. The configuration
/// names the modules by a regular expression with the blocks, because PEFT's own list of blocks cannot
/// include the head.
#[must_use]
pub fn draft_options(shape: &AdapterSpec, dropout: f64, config: &ModelConfig) -> Vec<u8> {
    let mut own: Value = serde_json::from_slice(&options(shape, dropout, config)).unwrap_or_default();
    if let AdapterSpec::Lora { targets, .. } = shape {
        let in_blocks: Vec<String> =
            targets.iter().filter(|module| module.0 != Target::LmHead).map(ToString::to_string).collect();
        let blocks: Vec<String> = (0..config.layers).map(|layer| layer.to_string()).collect();
        let mut names = format!(r".*\.layers\.({})\..*\.({})", blocks.join("|"), in_blocks.join("|"));
        if targets.iter().any(|module| module.0 == Target::LmHead) {
            names.push_str("|lm_head");
        }
        own["target_modules"] = names.into();
    }
    extend(&mut own, json!({ "holobiont_draft": { "layers": config.layers } }));
    to_bytes(&own)
}

fn extend(options: &mut Value, more: Value) {
    if let (Value::Object(options), Value::Object(more)) = (options, more) {
        options.extend(more);
    }
}

fn to_bytes(options: &Value) -> Vec<u8> {
    serde_json::to_vec_pretty(options).expect("JSON can be written to memory")
}
