//! Arguments of `run`, and the job plan that results from them.

use std::{collections::BTreeSet, path::PathBuf};

use clap::ValueEnum;
use client::{
    cli::{
        masking::{MaskingMode, ProtectionArguments},
        remote_base::RemoteBaseArguments,
        terminal::Terminal,
    },
    masking::Masking,
};
use model::shape::{config::ModelConfig, source::Target};
use shmproto::layer::Path as SitePath;

use super::{error::TunerError, layers::ComputeArguments};
use crate::{
    adapter::{AdapterSpec, TargetModule},
    draft::DraftSize,
    peft::Dtype,
    plan::{InitialAdapter, JobPlan, JobPrecision, usual_learning_rate},
    schedule::Decay,
};

/// Kind of the adapter to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MethodArgument {
    /// Low-rank deltas of linear layers
    Lora,
    /// Vectors that scale inputs or outputs
    Ia3,
    /// Keys and values of virtual tokens
    Prefix,
}

#[derive(Debug, clap::Args)]
pub(super) struct RunArguments {
    #[command(flatten)]
    pub(super) rent: RemoteBaseArguments,
    /// Training data, JSON lines
    #[arg(long, value_name = "FILE")]
    pub(super) data: PathBuf,
    /// Validation data; without it, some of the training data are held out
    #[arg(long, value_name = "FILE")]
    pub(super) validation: Option<PathBuf>,
    /// Directory to write the adapter to; it must not exist
    #[arg(long, value_name = "DIR")]
    pub(super) output: PathBuf,
    /// Directory of the checkpoint
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoints: Option<PathBuf>,
    /// Resumes from the checkpoint, if there is one
    #[arg(long, requires = "checkpoints")]
    pub(super) resume: bool,
    /// Checks everything, prints the plan, and trains nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Continues the training of this adapter, a directory in PEFT's format
    #[arg(long, value_name = "DIR", conflicts_with_all = ["method", "rank", "alpha", "rslora", "targets", "virtual_tokens"])]
    pub(super) from: Option<PathBuf>,
    /// Trains a draft adapter: the base's first blocks learn to predict a model's recorded answers
    #[arg(long, conflicts_with_all = ["from", "validation"])]
    draft: bool,
    /// Number of blocks that the draft runs [default: a quarter of the base's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "draft")]
    draft_layers: Option<u32>,
    /// Number of tokens that the draft may predict; 0 for all [default: 8192]
    #[arg(long, value_name = "N", requires = "draft")]
    draft_shortlist: Option<u32>,
    /// Kind of the adapter
    #[arg(long, value_enum, default_value = "lora")]
    method: MethodArgument,
    /// Rank of LoRA [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    rank: Option<u32>,
    /// lora_alpha [default: twice the rank]
    #[arg(long, value_name = "X")]
    alpha: Option<f64>,
    /// Divides alpha by the root of the rank (rsLoRA)
    #[arg(long)]
    rslora: bool,
    /// Dropout probability of the inputs of LoRA's matrices, for examples but not for preferences
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    dropout: f64,
    /// Linear layers to adapt, as q_proj,v_proj [default: all in a block; for ia3 k_proj,v_proj,down_proj]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) targets: Vec<TargetModule>,
    /// Number of virtual tokens of a prefix [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    virtual_tokens: Option<u32>,
    /// Peak learning rate [default: from the model's width and the rank]
    #[arg(long, value_name = "X")]
    learning_rate: Option<f64>,
    /// Factor of the default learning rate
    #[arg(long, value_name = "X", default_value_t = 1.0, conflicts_with = "learning_rate")]
    learning_rate_multiplier: f64,
    /// Decay of the learning rate after the warm-up
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: Decay,
    /// Steps until the learning rate reaches its peak [default: a twentieth of all]
    #[arg(long, value_name = "N")]
    warmup_steps: Option<u64>,
    /// Number of passes over the examples
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    epochs: u64,
    /// Maximum number of steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,
    /// Number of examples, or pairs, per step
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch_size: u32,
    /// Maximum tokens of an example; longer examples are refused
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..))]
    max_tokens: u32,
    /// Weight decay of AdamW
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    weight_decay: f64,
    /// Norm to which larger gradients are clipped
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    max_grad_norm: f64,
    /// Beta of DPO: larger values keep the model nearer to the initial adapter; only for preferences
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    beta: f64,
    /// Percentage of the examples that are held out for evaluation
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=50))]
    held_out: u8,
    /// Seed of the example order and of the initial parameters
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Steps between two checkpoints, and between two evaluations of the held-out examples
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) checkpoint_steps: u64,
    /// Precision of the forward pass
    #[arg(long, value_enum, default_value = "serving")]
    pub(super) precision: JobPrecision,
    #[command(flatten)]
    protection: ProtectionArguments,
    /// Number format of the stored adapter
    #[arg(long, value_enum, default_value = "f32")]
    pub(super) save_dtype: Dtype,
    #[command(flatten)]
    pub(super) compute: ComputeArguments,
    /// Treat the end of standard input like SIGTERM: the client of this job is gone
    #[arg(long)]
    pub(super) exit_with_stdin: bool,
}

/// Divisor of the base's blocks that gives the default size of a draft.
const USUAL_SHARE: usize = 4;

/// Default shortlist of a draft: these tokens make up most texts, and a head of this size is cheap.
const USUAL_SHORTLIST: usize = 8192;

/// Maximum dropout; above it, too little of the inputs would remain.
const MAX_DROPOUT: f64 = 0.9;

impl RunArguments {
    /// Returns the masking of the job's rows.
    ///
    /// # Errors
    /// Fails if masking mode and precision do not fit, or a file that the mode needs is missing.
    pub(super) fn masking(&self, terminal: Terminal) -> Result<Masking, TunerError> {
        let protection = &self.protection;
        let path = match (protection.mode(), self.precision) {
            (MaskingMode::Off, JobPrecision::Serving) => SitePath::Fast,
            (_, JobPrecision::Exact) if protection.is_exact() => SitePath::Ring,
            (_, JobPrecision::Exact) => SitePath::Linear,
            (mode, JobPrecision::Serving) => {
                return Err(TunerError::Usage(format!(
                    "--masking {} needs --precision exact: masks go away only where rows are not rounded",
                    mode.as_str()
                )));
            }
        };
        Ok(protection.protection(path, &self.rent, terminal)?)
    }

    /// Returns the kind and size of a new adapter.
    pub(super) fn shape(&self) -> Result<AdapterSpec, TunerError> {
        let without = |flags: &[(&str, bool)]| match flags.iter().find(|(_, is_said)| *is_said) {
            Some((flag, _)) => {
                Err(TunerError::Usage(format!("{flag} is nothing to this method: leave it out")))
            }
            None => Ok(()),
        };
        let of_lora =
            [("--rank", self.rank.is_some()), ("--alpha", self.alpha.is_some()), ("--rslora", self.rslora)];
        let of_prefix = [("--virtual-tokens", self.virtual_tokens.is_some())];
        let targets = |usual: &[Target]| -> BTreeSet<TargetModule> {
            let said = !self.targets.is_empty();
            if said {
                self.targets.iter().copied().collect()
            } else {
                usual.iter().map(|&of| TargetModule(of)).collect()
            }
        };
        match self.method {
            MethodArgument::Lora => {
                without(&of_prefix)?;
                let rank = self.rank.unwrap_or(16) as usize;
                let alpha = self.alpha.unwrap_or(2.0 * rank as f64);
                let targets = targets(&model::shape::layout::BLOCK_TARGETS);
                Ok(AdapterSpec::Lora { rank, alpha, rslora: self.rslora, targets })
            }
            MethodArgument::Ia3 => {
                without(&[&of_lora[..], &of_prefix].concat())?;
                Ok(AdapterSpec::Ia3 { targets: targets(&[Target::K, Target::V, Target::Down]) })
            }
            MethodArgument::Prefix => {
                without(&[&of_lora[..], &[("--targets", !self.targets.is_empty())]].concat())?;
                Ok(AdapterSpec::Prefix { virtual_tokens: self.virtual_tokens.unwrap_or(16) as usize })
            }
        }
    }

    /// Returns the plan of a job that begins with `start`, where `shape` is the adapter's kind and size.
    /// `warmup_steps` is that of the command line, or 0.
    pub(super) fn plan(
        &self,
        start: InitialAdapter,
        shape: &AdapterSpec,
        config: &ModelConfig,
    ) -> Result<JobPlan, TunerError> {
        let positive = [
            ("--learning-rate", self.learning_rate.unwrap_or(1.0)),
            ("--learning-rate-multiplier", self.learning_rate_multiplier),
            ("--alpha", self.alpha.unwrap_or(1.0)),
            ("--max-grad-norm", self.max_grad_norm),
            ("--beta", self.beta),
        ];
        if let Some((flag, value)) = positive.iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(TunerError::Usage(format!("{flag} is {value}; it must be above 0")));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(TunerError::Usage(format!(
                "--weight-decay is {}; it cannot be below 0",
                self.weight_decay
            )));
        }
        if !(0.0..=MAX_DROPOUT).contains(&self.dropout) {
            let problem = format!("--dropout is {}; it is a share from 0 to {MAX_DROPOUT}", self.dropout);
            return Err(TunerError::Usage(problem));
        }
        if self.dropout > 0.0 && !matches!(shape, AdapterSpec::Lora { .. }) {
            return Err(TunerError::Usage("--dropout is for LoRA alone: leave it out".to_owned()));
        }
        Ok(JobPlan {
            start,
            learning_rate: self.learning_rate.unwrap_or_else(|| {
                self.learning_rate_multiplier * usual_learning_rate(config.hidden_size, shape)
            }),
            decay: self.schedule,
            warmup_steps: self.warmup_steps.unwrap_or(0),
            batch_size: self.batch_size as usize,
            epochs: self.epochs,
            max_steps: self.max_steps,
            weight_decay: self.weight_decay,
            dropout: self.dropout,
            max_grad_norm: self.max_grad_norm,
            beta: self.beta,
            held_out: usize::from(self.held_out),
            seed: self.seed,
            precision: self.precision,
            max_tokens: (self.max_tokens as usize).min(config.context_length),
            draft: self.draft(shape, config)?,
        })
    }

    pub(super) fn is_draft(&self) -> bool {
        self.draft
    }

    /// Returns the number of trained blocks.
    pub(super) fn blocks(&self, config: &ModelConfig) -> usize {
        let asked = self.draft_layers.map_or(config.layers.div_ceil(USUAL_SHARE), |layers| layers as usize);
        if self.draft { config.layers.min(asked) } else { config.layers }
    }

    /// Returns the size of the draft, if a draft is trained.
    fn draft(&self, shape: &AdapterSpec, config: &ModelConfig) -> Result<Option<DraftSize>, TunerError> {
        if !self.draft {
            return Ok(None);
        }
        if !matches!(shape, AdapterSpec::Lora { .. }) {
            return Err(TunerError::Usage("a draft is a LoRA: --draft takes --method lora alone".to_owned()));
        }
        let (layers, all) = (self.blocks(config), config.layers);
        if layers == all {
            let problem =
                format!("the base has {all} blocks, and a draft must have fewer: lower --draft-layers");
            return Err(TunerError::Usage(problem));
        }
        let shortlist = self.draft_shortlist.map_or(USUAL_SHORTLIST, |tokens| tokens as usize);
        Ok(Some(DraftSize { layers, shortlist }))
    }

    pub(super) fn dropout(&self) -> f64 {
        self.dropout
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of warm-up steps in a job of `steps` steps.
    pub(super) fn warmup(&self, steps: u64) -> u64 {
        self.warmup_steps.unwrap_or(steps / 20)
    }
}
