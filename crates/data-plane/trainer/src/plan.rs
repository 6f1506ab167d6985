//! The plan of a job, with every choice made: by the user, or by defaults that are known to work.

pub use control_protocol::training::spec::JobPrecision;
use serde::{Deserialize, Serialize};

use crate::{
    adapter::AdapterSpec, draft::DraftSize, grpo::GrpoPlan, loss::KtoLoss, optimizer::Hyperparameters,
    schedule::Decay, step::KtoOptions,
};

/// Adapter with which a job begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitialAdapter {
    New(AdapterSpec),
    /// A trained adapter in PEFT's format, by its content hash.
    From(String),
}

/// All inputs that determine the result of a job, except the data and the base.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobPlan {
    pub start: InitialAdapter,
    /// Peak of the learning rate.
    pub learning_rate: f64,
    /// Decay of the learning rate after the warm-up.
    pub decay: Decay,
    /// Number of steps until the learning rate reaches its peak.
    pub warmup_steps: u64,
    /// Number of examples, or pairs, per step.
    pub batch_size: usize,
    /// Number of passes over the examples.
    pub epochs: u64,
    /// Maximum number of steps.
    pub max_steps: Option<u64>,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// Dropout probability of the inputs of LoRA's matrices.
    #[serde(default)]
    pub dropout: f64,
    /// Norm to which larger gradients are clipped.
    pub max_grad_norm: f64,
    /// Beta of DPO and KTO: larger values keep the policy nearer to the initial adapter.
    pub beta: f64,
    /// Weight of KTO's desirable answers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub desirable_weight: f64,
    /// Weight of KTO's undesirable answers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub undesirable_weight: f64,
    /// Percentage of the lines that are held out.
    pub held_out: usize,
    /// Seed of the example order and of the initial parameters.
    pub seed: u64,
    pub precision: JobPrecision,
    /// Maximum tokens per example.
    pub max_tokens: usize,
    /// Whether the job ends with the adapter of the lowest held-out loss, not with that of the last step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_best: bool,
    /// Number of evaluations without a lower held-out loss after which the job ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Size of the draft, if a draft is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftSize>,
    /// Settings of GRPO, if the adapter learns from rewards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpo: Option<GrpoPlan>,
}

impl JobPlan {
    /// Returns AdamW's hyperparameters for a step with `learning_rate`.
    #[must_use]
    pub fn hyperparameters(&self, learning_rate: f64) -> Hyperparameters {
        Hyperparameters { learning_rate, weight_decay: self.weight_decay, ..Hyperparameters::default() }
    }

    /// Returns the options of KTO.
    #[must_use]
    pub fn kto(&self) -> KtoOptions {
        let &Self { beta, desirable_weight, undesirable_weight, max_tokens, .. } = self;
        KtoOptions { loss: KtoLoss { beta, desirable_weight, undesirable_weight }, max_tokens }
    }
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(weight: &f64) -> bool {
    *weight == 1.0
}

/// Returns the default learning rate for adapters of a model with hidden size `hidden`.
///
/// LoRA gets ten times the rate of full fine-tuning, less for wide models (Thinking Machines, "LoRA Without
/// Regret", 2025). High ranks also get less: the scale of their deltas is not divided by the rank, so more
/// ranks make larger steps.
#[must_use]
pub fn usual_learning_rate(hidden: usize, shape: &AdapterSpec) -> f64 {
    const FULL: f64 = 5e-5;
    const USUAL_RANK: f64 = 16.0;
    const MOST: f64 = 2e-3;
    let by_width = (2000.0 / hidden as f64).powf(0.781);
    match shape {
        AdapterSpec::Lora { rank, .. } => {
            (10.0 * FULL * by_width * (USUAL_RANK / *rank as f64).sqrt().min(1.0)).min(MOST)
        }
        // Vectors near one and a small prefix have farther to move; PEFT's own examples use this rate.
        AdapterSpec::Ia3 { .. } | AdapterSpec::Prefix { .. } => 5e-3,
    }
}
