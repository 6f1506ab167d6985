//! Answers that a trainer asks for in the middle of a job, and their rewards.
//!
//! GRPO learns from answers of the adapter in training. The trainer writes a [`RolloutRequest`] as an event,
//! and the reader of the events answers with a [`RolloutReply`], a line of JSON on the trainer's stdin.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Maximum length of a reply, in bytes.
pub const MAX_REPLY_BYTES: u64 = 1 << 30;

/// Divisor of the advantages: what the rewards of a group are scaled by after their mean is subtracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum RewardScale {
    /// The standard deviation of the answers to the same prompt
    #[default]
    Group,
    /// The standard deviation of all answers of the step
    Batch,
    /// No division, as in Dr. GRPO
    None,
}

/// Options of GRPO; the trainer chooses the value of each missing option.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct GrpoOptions {
    /// For --method grpo: answers to each prompt of a step [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=128))]
    pub num_generations: Option<u32>,
    /// For --method grpo: maximum number of tokens of an answer [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_completion_length: Option<u32>,
    /// For --method grpo: sampling temperature of the answers, up to 2 [default: 1]
    #[arg(long, value_name = "X", value_parser = super::spec::finite)]
    pub temperature: Option<f64>,
    /// For --method grpo: divisor of the differences from a group's mean reward [default: group]
    #[arg(long, value_enum)]
    pub scale_rewards: Option<RewardScale>,
}

/// A request for answers of the adapter in training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutRequest {
    /// Number of the step, from 1.
    pub step: u64,
    /// Directory with the adapter in PEFT's format, until the reply is read.
    pub adapter: PathBuf,
    /// Prompts of the step's batch, in order.
    pub prompts: Vec<RolloutPrompt>,
    /// Number of answers to each prompt.
    pub num_generations: u32,
    /// Maximum number of tokens of an answer.
    pub max_tokens: u32,
    /// Sampling temperature, above 0 and at most 2.
    pub temperature: f64,
}

/// A prompt to be answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutPrompt {
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Seed of the answers.
    pub seed: u64,
    /// The prompt as the data have it: a text or a list of messages.
    pub prompt: Value,
    /// All fields of the prompt's line, for the reward.
    pub row: Map<String, Value>,
}

/// The answers to a request.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RolloutReply {
    /// Answers to each prompt, in the order of the request.
    pub groups: Vec<Vec<Rollout>>,
}

/// An answer and its reward.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Rollout {
    /// Tokens of the answer, with the token that ended it.
    pub tokens: Vec<u32>,
    /// Log-probability of each token.
    pub logprobs: Vec<f32>,
    /// Reward of the answer.
    pub reward: f64,
}

/// Rewards of a step, in reports.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RewardReport {
    /// Mean over all answers.
    pub mean: f64,
    /// Standard deviation over all answers.
    pub deviation: f64,
    /// Mean number of tokens of an answer.
    pub answer_tokens: f64,
    /// Number of prompts whose answers all have the same reward: a step learns nothing from these.
    pub equal_groups: u64,
    /// Sum over the learned tokens of the sampler's log-probability minus that of the trainer. The sum is 0
    /// if sampler and trainer compute with the same bits.
    pub logprob_difference: f64,
}
