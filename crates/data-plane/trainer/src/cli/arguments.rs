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
use control_protocol::training::spec::{AdapterType, JobPrecision, TrainingSpec};
use model::shape::{config::ModelConfig, source::Target};
use shmproto::layer::SitePath;

use super::{error::TunerError, job_console::StdinUse, layers::ComputeArguments};
use crate::{
    adapter::{AdapterSpec, TargetModule},
    draft::DraftSize,
    plan::{InitialAdapter, JobPlan, usual_learning_rate},
};

#[derive(Debug, clap::Args)]
pub(super) struct RunArguments {
    #[command(flatten)]
    pub(super) rent: RemoteBaseArguments,
    /// Training data: a file, a directory, or a pattern; may be given several times
    #[arg(long, value_name = "PATH", required = true)]
    pub(super) data: Vec<PathBuf>,
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
    /// Tries rising learning rates, and writes no adapter and no checkpoint
    #[arg(long, conflicts_with_all = ["dry_run", "resume", "learning_rate"])]
    pub(super) find_learning_rate: bool,
    #[command(flatten)]
    pub(super) spec: TrainingSpec,
    /// Factor of the default learning rate
    #[arg(long, value_name = "X", default_value_t = 1.0, conflicts_with = "learning_rate")]
    learning_rate_multiplier: f64,
    #[command(flatten)]
    protection: ProtectionArguments,
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
        let path = match (protection.mode(), self.precision()) {
            (MaskingMode::Off, JobPrecision::Serving) => SitePath::Fast,
            (_, JobPrecision::Exact) if protection.is_exact() => SitePath::Ring,
            (_, JobPrecision::Exact) => SitePath::Linear,
            (mode, JobPrecision::Serving) => {
                return Err(TunerError::Usage(format!(
                    "--masking {} needs --precision exact, because rounding would keep the mask",
                    mode.as_str()
                )));
            }
        };
        Ok(protection.protection(path, &self.rent, terminal)?)
    }

    /// Returns the kind and size of a new adapter.
    pub(super) fn shape(&self) -> Result<AdapterSpec, TunerError> {
        let &TrainingSpec { rank, alpha, rslora, virtual_tokens, .. } = &self.spec;
        let kind = self.spec.adapter_type.unwrap_or_default();
        let unused = |flags: &[(&str, bool)]| match flags.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                let kind = kind.to_possible_value().expect("no kind is hidden");
                let name = kind.get_name();
                Err(TunerError::Usage(format!("{flag} has no effect with --adapter-type {name}; remove it")))
            }
            None => Ok(()),
        };
        let of_lora = [("--rank", rank.is_some()), ("--alpha", alpha.is_some()), ("--rslora", rslora)];
        let of_prefix = [("--virtual-tokens", virtual_tokens.is_some())];
        match kind {
            AdapterType::Lora => {
                unused(&of_prefix)?;
                let rank = rank.unwrap_or(16) as usize;
                let alpha = alpha.unwrap_or(2.0 * rank as f64);
                let targets = self.targets(&model::shape::layout::BLOCK_TARGETS)?;
                Ok(AdapterSpec::Lora { rank, alpha, rslora, targets })
            }
            AdapterType::Ia3 => {
                unused(&[&of_lora[..], &of_prefix].concat())?;
                Ok(AdapterSpec::Ia3 { targets: self.targets(&[Target::K, Target::V, Target::Down])? })
            }
            AdapterType::Prefix => {
                unused(&[&of_lora[..], &[("--targets", self.spec.targets.is_some())]].concat())?;
                Ok(AdapterSpec::Prefix { virtual_tokens: virtual_tokens.unwrap_or(16) as usize })
            }
        }
    }

    /// Returns the linear layers of `--targets`, or the `usual` ones.
    fn targets(&self, usual: &[Target]) -> Result<BTreeSet<TargetModule>, TunerError> {
        let Some(list) = &self.spec.targets else {
            return Ok(usual.iter().copied().map(TargetModule).collect());
        };
        let parsed = list.split(',').map(str::parse).collect::<Result<_, _>>();
        parsed.map_err(|error| TunerError::Usage(format!("--targets {list}: {error}")))
    }

    /// Returns the plan of a job that begins with `start`, where `shape` is the adapter's kind and size.
    /// `warmup_steps` is that of the command line, or 0.
    pub(super) fn plan(
        &self,
        start: InitialAdapter,
        shape: &AdapterSpec,
        config: &ModelConfig,
    ) -> Result<JobPlan, TunerError> {
        let spec = &self.spec;
        let grpo = self.grpo(config)?;
        let max_tokens = spec.max_tokens.unwrap_or(2048) as usize;
        let plan = JobPlan {
            start,
            learning_rate: spec.learning_rate.unwrap_or_else(|| {
                self.learning_rate_multiplier * usual_learning_rate(config.hidden_size, shape)
            }),
            decay: spec.schedule.unwrap_or_default(),
            warmup_steps: spec.warmup_steps.unwrap_or(0),
            batch_size: spec.batch_size.unwrap_or(4) as usize,
            epochs: spec.epochs.unwrap_or(3),
            max_steps: spec.max_steps,
            weight_decay: spec.weight_decay.unwrap_or(0.0),
            dropout: self.dropout(),
            max_grad_norm: spec.max_grad_norm.unwrap_or(1.0),
            beta: spec.beta.unwrap_or(0.1),
            desirable_weight: spec.desirable_weight.unwrap_or(1.0),
            undesirable_weight: spec.undesirable_weight.unwrap_or(1.0),
            held_out: if grpo.is_some() { 0 } else { usize::from(spec.held_out.unwrap_or(5)) },
            seed: self.seed(),
            precision: self.precision(),
            max_tokens: self.item_tokens(max_tokens, grpo.as_ref(), config.context_length),
            keep_best: spec.keep_best || spec.early_stopping_patience.is_some(),
            patience: spec.early_stopping_patience,
            draft: self.draft(shape, config)?,
            grpo,
        };
        self.check(&plan, shape)?;
        Ok(plan)
    }

    /// Checks the ranges of real numbers, which clap does not.
    fn check(&self, plan: &JobPlan, shape: &AdapterSpec) -> Result<(), TunerError> {
        let positive = [
            ("--learning-rate", self.spec.learning_rate.unwrap_or(1.0)),
            ("--learning-rate-multiplier", self.learning_rate_multiplier),
            ("--alpha", self.spec.alpha.unwrap_or(1.0)),
            ("--max-grad-norm", plan.max_grad_norm),
            ("--beta", plan.beta),
            ("--desirable-weight", plan.desirable_weight),
            ("--undesirable-weight", plan.undesirable_weight),
        ];
        if let Some((flag, value)) = positive.iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(TunerError::Usage(format!("{flag} is {value}; it must be above 0")));
        }
        if plan.weight_decay < 0.0 {
            let problem = format!("--weight-decay is {}; it cannot be below 0", plan.weight_decay);
            return Err(TunerError::Usage(problem));
        }
        if !(0.0..=MAX_DROPOUT).contains(&plan.dropout) {
            let problem = format!("--dropout is {}; it must be from 0 to {MAX_DROPOUT}", plan.dropout);
            return Err(TunerError::Usage(problem));
        }
        if plan.dropout > 0.0 && !matches!(shape, AdapterSpec::Lora { .. }) {
            return Err(TunerError::Usage("--dropout works only with LoRA; remove it".to_owned()));
        }
        Ok(())
    }

    /// True if the command makes an adapter.
    pub(super) fn trains(&self) -> bool {
        !self.dry_run && !self.find_learning_rate
    }

    /// Returns the number of trained blocks.
    pub(super) fn blocks(&self, config: &ModelConfig) -> usize {
        let usual = config.layers.div_ceil(USUAL_SHARE);
        let asked = self.spec.draft_layers.map_or(usual, |layers| layers as usize);
        if self.spec.draft { config.layers.min(asked) } else { config.layers }
    }

    /// Returns the size of the draft, if a draft is trained.
    fn draft(&self, shape: &AdapterSpec, config: &ModelConfig) -> Result<Option<DraftSize>, TunerError> {
        if !self.spec.draft {
            return Ok(None);
        }
        if !matches!(shape, AdapterSpec::Lora { .. }) {
            return Err(TunerError::Usage("--draft works only with --adapter-type lora".to_owned()));
        }
        let (layers, all) = (self.blocks(config), config.layers);
        if layers == all {
            let problem =
                format!("a draft adapter needs fewer blocks than the base's {all}; lower --draft-layers");
            return Err(TunerError::Usage(problem));
        }
        let shortlist = self.spec.draft_shortlist.map_or(USUAL_SHORTLIST, |tokens| tokens as usize);
        Ok(Some(DraftSize { layers, shortlist }))
    }

    /// Returns the use of stdin by the job.
    pub(super) fn stdin_use(&self) -> StdinUse {
        match (self.is_grpo(), self.exit_with_stdin) {
            (true, _) => StdinUse::Replies,
            (false, true) => StdinUse::EndOfClient,
            (false, false) => StdinUse::Nothing,
        }
    }

    pub(super) fn dropout(&self) -> f64 {
        self.spec.dropout.unwrap_or(0.0)
    }

    pub(super) fn seed(&self) -> u64 {
        self.spec.seed.unwrap_or(0)
    }

    pub(super) fn precision(&self) -> JobPrecision {
        self.spec.precision.unwrap_or_default()
    }

    pub(super) fn checkpoint_steps(&self) -> u64 {
        self.spec.checkpoint_steps.unwrap_or(50)
    }

    /// Returns the number of warm-up steps in a job of `steps` steps.
    pub(super) fn warmup(&self, steps: u64) -> u64 {
        self.spec.warmup_steps.unwrap_or(steps / 20)
    }
}
