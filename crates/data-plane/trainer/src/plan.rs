//! What a job does, with every choice made: those of the user, and for the rest what is known to work.

use serde::{Deserialize, Serialize};

use crate::{adapter::AdapterSpec, draft::DraftSize, optimizer::Hyperparameters, schedule::Decay};

/// How the way forward computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum JobPrecision {
    /// As the engine that will serve the adapter: its log-probabilities are these, bit for bit
    #[default]
    Serving,
    /// Activations, keys, values and the adapter unrounded
    Exact,
}

/// What an adapter begins as.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitialAdapter {
    /// A new one.
    New(AdapterSpec),
    /// One that has been trained, in PEFT's format, by the hash of its content.
    From(String),
}

/// Everything that decides what a job gives, but the data and the base.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobPlan {
    /// What the adapter begins as.
    pub start: InitialAdapter,
    /// Length of the longest step.
    pub learning_rate: f64,
    /// How it becomes shorter.
    pub decay: Decay,
    /// Steps until it is the longest.
    pub warmup_steps: u64,
    /// Examples, or pairs, of a step.
    pub batch_size: usize,
    /// How often every example is seen.
    pub epochs: u64,
    /// Steps at most.
    pub max_steps: Option<u64>,
    /// Of AdamW.
    pub weight_decay: f64,
    /// The share of what LoRA's matrices are given that is dropped.
    #[serde(default)]
    pub dropout: f64,
    /// Longer gradients are shortened to this length.
    pub max_grad_norm: f64,
    /// Of DPO: how much a preference weighs against staying where the adapter began.
    pub beta: f64,
    /// Percent of the examples that are held out.
    pub held_out: usize,
    /// Decides order and first numbers.
    pub seed: u64,
    /// How the way forward computes.
    pub precision: JobPrecision,
    /// Tokens of the longest example.
    pub max_tokens: usize,
    /// What becomes a draft is of this size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftSize>,
}

impl JobPlan {
    /// AdamW's numbers for a step of `learning_rate`.
    #[must_use]
    pub fn hyperparameters(&self, learning_rate: f64) -> Hyperparameters {
        Hyperparameters { learning_rate, weight_decay: self.weight_decay, ..Hyperparameters::default() }
    }
}

/// A learning rate for adapters of a model `hidden` wide: ten times what full fine-tuning takes, less for wide models
/// (Thinking Machines, "LoRA Without Regret", 2025), and less for high ranks whose scale is not divided by them, where more
/// ranks make longer steps.
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
        // Vectors near one, and a prefix of small numbers, have farther to go: PEFT's own examples take as much.
        AdapterSpec::Ia3 { .. } | AdapterSpec::Prefix { .. } => 5e-3,
    }
}
