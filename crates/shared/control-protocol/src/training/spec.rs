//! Options of a training job, which `holobiont tune` passes to the trainer under the same names.

use std::path::PathBuf;

use clap::{
    ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use serde::{Deserialize, Serialize};

use super::rollout::GrpoOptions;

/// Kind of adapter to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum AdapterType {
    /// Low-rank deltas of linear layers
    #[default]
    Lora,
    /// Vectors that scale inputs or outputs of linear layers
    Ia3,
    /// Keys and values of virtual tokens before the first token
    Prefix,
}

/// Algorithm of a training, by the names of TRL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum TrainingMethod {
    /// Supervised fine-tuning: cross-entropy of the answers
    Sft,
    /// Direct preference optimization of pairs of answers
    Dpo,
    /// Kahneman-Tversky optimization of single rated answers
    Kto,
    /// Group relative policy optimization of answers that the model samples
    Grpo,
}

impl TrainingMethod {
    /// Returns the value of the option `--method`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo => "dpo",
            Self::Kto => "kto",
            Self::Grpo => "grpo",
        }
    }
}

/// Decay of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Stays constant after the warm-up
    Constant,
    /// Decreases linearly to zero
    Linear,
    /// Decreases along half a cosine wave to zero
    #[default]
    Cosine,
}

impl std::fmt::Display for Decay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
        })
    }
}

/// Precision of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum JobPrecision {
    /// As the engine that will serve the adapter: same log-probabilities, bit for bit
    #[default]
    Serving,
    /// Activations, keys, values and adapter without rounding
    Exact,
}

/// Number format of a stored adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum SaveDtype {
    /// 32-bit float, as it was trained
    #[default]
    F32,
    /// 16-bit float with more digits and a smaller range
    F16,
    /// 16-bit float with the range of 32 bits and fewer digits
    Bf16,
}

/// Options of a training job; the trainer chooses the value of each missing option.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TrainingSpec {
    /// Validation data; without it, some of the training data are held out
    #[arg(long, value_name = "FILE", conflicts_with = "held_out")]
    pub validation: Option<PathBuf>,
    /// Percentage of the examples that are held out for evaluation [default: 5]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=50))]
    pub held_out: Option<u8>,
    /// Continues the training of this adapter, a directory in PEFT's format
    #[arg(long, value_name = "DIR", conflicts_with_all = ["adapter_type", "rank", "alpha", "rslora", "targets", "virtual_tokens"])]
    pub from: Option<PathBuf>,
    /// Trains a draft adapter: the base's first blocks learn to predict a model's recorded answers
    #[arg(long, conflicts_with_all = ["from", "validation", "method"])]
    pub draft: bool,
    /// Number of blocks that the draft runs [default: a quarter of the base's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "draft")]
    pub draft_layers: Option<u32>,
    /// Number of tokens that the draft may predict; 0 for all [default: 8192]
    #[arg(long, value_name = "N", requires = "draft")]
    pub draft_shortlist: Option<u32>,
    /// Algorithm of the training [default: dpo for preferences, kto for single ratings, else sft]
    #[arg(long, value_parser = method())]
    pub method: Option<TrainingMethod>,
    /// Kind of the adapter [default: lora]
    #[arg(long, value_enum)]
    pub adapter_type: Option<AdapterType>,
    /// Rank of LoRA [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub rank: Option<u32>,
    /// lora_alpha, which over the rank scales the deltas [default: twice the rank]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub alpha: Option<f64>,
    /// Divides alpha by the root of the rank (rsLoRA)
    #[arg(long)]
    pub rslora: bool,
    /// Dropout probability of the inputs of LoRA's matrices, for examples but not for preferences
    /// and ratings [default: 0]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub dropout: Option<f64>,
    /// Linear layers to adapt, as q_proj,v_proj [default: all in a block; for ia3 k_proj,v_proj,down_proj]
    #[arg(long, value_name = "LIST")]
    pub targets: Option<String>,
    /// Number of virtual tokens of a prefix [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub virtual_tokens: Option<u32>,
    /// Peak learning rate [default: from the model's width and the rank]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub learning_rate: Option<f64>,
    /// Decay of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_enum)]
    pub schedule: Option<Decay>,
    /// Steps until the learning rate reaches its peak [default: a twentieth of all]
    #[arg(long, value_name = "N")]
    pub warmup_steps: Option<u64>,
    /// Number of passes over the examples [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub epochs: Option<u64>,
    /// Maximum number of steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// Number of examples, or pairs, per step [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch_size: Option<u32>,
    /// Maximum tokens of an example; longer examples are refused [default: 2048]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_tokens: Option<u32>,
    /// Weight decay of AdamW [default: 0]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub weight_decay: Option<f64>,
    /// Norm to which larger gradients are clipped [default: 1]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub max_grad_norm: Option<f64>,
    /// Beta of DPO and KTO: larger values keep the model nearer to the initial adapter [default: 0.1]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub beta: Option<f64>,
    /// Weight of KTO's good answers, whose `label` is true [default: 1]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub desirable_weight: Option<f64>,
    /// Weight of KTO's bad answers, whose `label` is false [default: 1]
    #[arg(long, value_name = "X", value_parser = finite)]
    pub undesirable_weight: Option<f64>,
    /// Options of GRPO, which other methods do not have.
    #[command(flatten)]
    #[serde(flatten)]
    pub grpo: GrpoOptions,
    /// Seed of the example order and of the initial parameters; the same seed and data give the same adapter
    /// [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Steps between two checkpoints, and between two evaluations of the held-out examples [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub checkpoint_steps: Option<u64>,
    /// Ends with the adapter of the lowest held-out loss, not with that of the last step
    #[arg(long)]
    pub keep_best: bool,
    /// Ends the training after N evaluations without a lower held-out loss; implies --keep-best
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub early_stopping_patience: Option<u64>,
    /// Precision of the forward pass [default: serving]
    #[arg(long, value_enum)]
    pub precision: Option<JobPrecision>,
    /// Number format of the stored adapter [default: f32]
    #[arg(long, value_enum)]
    pub save_dtype: Option<SaveDtype>,
}

/// Returns a parser of methods. The option once had the values of `--adapter-type`, so its error names
/// that option.
fn method() -> impl TypedValueParser<Value = TrainingMethod> {
    let methods = TrainingMethod::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    let types = AdapterType::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    PossibleValuesParser::new(methods.chain(types.map(|value| value.hide(true)))).try_map(|word| {
        TrainingMethod::from_str(&word, false)
            .map_err(|_| format!("this is a kind of adapter; write --adapter-type {word}"))
    })
}

/// Parses a finite number, because JSON cannot hold others.
pub(super) fn finite(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() { Ok(number) } else { Err("it must be finite".into()) }
}
