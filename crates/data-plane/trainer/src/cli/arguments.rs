//! Arguments of `run`, and the plan they come to.

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

/// Kinds of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MethodArgument {
    /// Low-rank deltas
    Lora,
    /// Vectors that scale
    Ia3,
    /// Keys and values before the first token
    Prefix,
}

/// A job.
#[derive(Debug, clap::Args)]
pub(super) struct RunArguments {
    #[command(flatten)]
    pub(super) rent: RemoteBaseArguments,
    /// Training data, JSON lines
    #[arg(long, value_name = "FILE")]
    pub(super) data: PathBuf,
    /// Data to judge by; else some of the training data are held out
    #[arg(long, value_name = "FILE")]
    pub(super) validation: Option<PathBuf>,
    /// The directory that the adapter is written to; it must not exist
    #[arg(long, value_name = "DIR")]
    pub(super) output: PathBuf,
    /// The directory of the checkpoint
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoints: Option<PathBuf>,
    /// Goes on from the checkpoint, if there is one
    #[arg(long, requires = "checkpoints")]
    pub(super) resume: bool,
    /// Checks everything and says the plan, and that is all
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Goes on from this adapter, a directory in PEFT's format
    #[arg(long, value_name = "DIR", conflicts_with_all = ["method", "rank", "alpha", "rslora", "targets", "virtual_tokens"])]
    pub(super) from: Option<PathBuf>,
    /// Trains a draft: the base's first blocks, with an adapter of their own, guess what a model said, which the data tell
    #[arg(long, conflicts_with_all = ["from", "validation"])]
    draft: bool,
    /// Blocks that the draft has [default: a quarter of the base's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "draft")]
    draft_layers: Option<u32>,
    /// Tokens that the draft may guess; 0 for all [default: 8192]
    #[arg(long, value_name = "N", requires = "draft")]
    draft_shortlist: Option<u32>,
    /// The kind of adapter
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
    /// Share of what LoRA's matrices are given that is dropped while it learns; not of preferences
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    dropout: f64,
    /// Linear layers that get a part, as q_proj,v_proj [default: all in a block; for ia3 k_proj,v_proj,down_proj]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) targets: Vec<TargetModule>,
    /// Virtual tokens of a prefix [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    virtual_tokens: Option<u32>,
    /// Length of the longest step [default: by the width of the model and the rank]
    #[arg(long, value_name = "X")]
    learning_rate: Option<f64>,
    /// Times the usual one
    #[arg(long, value_name = "X", default_value_t = 1.0, conflicts_with = "learning_rate")]
    learning_rate_multiplier: f64,
    /// How steps become shorter
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: Decay,
    /// Steps until they are the longest [default: a twentieth of all]
    #[arg(long, value_name = "N")]
    warmup_steps: Option<u64>,
    /// How often every example is seen
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    epochs: u64,
    /// Steps at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,
    /// Examples, or pairs, of a step
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch_size: u32,
    /// Tokens of the longest example; longer ones are refused
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..))]
    max_tokens: u32,
    /// Weight decay of AdamW
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    weight_decay: f64,
    /// Longer gradients are shortened to this length
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    max_grad_norm: f64,
    /// Of preferences (DPO): how much they weigh against staying where the adapter began
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    beta: f64,
    /// Percent of the examples that are held out to judge by
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=50))]
    held_out: u8,
    /// Decides the order of examples and the adapter's first numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Steps between two checkpoints, and two looks at what is held out
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) checkpoint_steps: u64,
    /// How the way forward computes
    #[arg(long, value_enum, default_value = "serving")]
    pub(super) precision: JobPrecision,
    #[command(flatten)]
    protection: ProtectionArguments,
    /// With what numbers the adapter is stored
    #[arg(long, value_enum, default_value = "f32")]
    pub(super) save_dtype: Dtype,
    #[command(flatten)]
    pub(super) compute: ComputeArguments,
    /// Treat the end of standard input like SIGTERM: whoever wants the adapter is gone
    #[arg(long)]
    pub(super) exit_with_stdin: bool,
}

/// The part of the base's blocks that a draft has, as a divisor.
const USUAL_SHARE: usize = 4;

/// Tokens that a draft may guess: of these most texts consist, and its head takes little of its time.
const USUAL_SHORTLIST: usize = 8192;

/// Of more than this, too little would be left to learn from.
const MAX_DROPOUT: f64 = 0.9;

impl RunArguments {
    /// What the executor sees.
    ///
    /// # Errors
    /// What was said does not go together, or what it takes is not there.
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

    /// The shape of a new adapter.
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

    /// The plan of an adapter that begins as `start`, `kind` being its shape or one like it. The number of warm-up steps is
    /// still that of the command line, or 0.
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

    /// Whether a draft is trained.
    pub(super) fn is_draft(&self) -> bool {
        self.draft
    }

    /// Blocks of what is trained.
    pub(super) fn blocks(&self, config: &ModelConfig) -> usize {
        let asked = self.draft_layers.map_or(config.layers.div_ceil(USUAL_SHARE), |layers| layers as usize);
        if self.draft { config.layers.min(asked) } else { config.layers }
    }

    /// The size of the draft, if one is trained.
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

    /// Warm-up of so many steps.
    pub(super) fn warmup(&self, steps: u64) -> u64 {
        self.warmup_steps.unwrap_or(steps / 20)
    }
}
