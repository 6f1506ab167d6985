//! GRPO (Shao et al. 2024): learning from rewards of the adapter's own answers.
//!
//! A step draws several answers to each of its prompts. The advantage of an answer is its reward minus the
//! mean reward of the answers to the same prompt, divided as [`RewardScale`] says. The loss is the sum over
//! all tokens of `-ratio * advantage`, divided by the number of tokens of all answers of the step (DAPO; Yu
//! et al. 2025), and no distance to the initial adapter is penalised, as in TRL's defaults. The sampler
//! computes with the bits of the trainer, so the ratio of a token's probabilities is exactly 1.

use std::{fs, io, path::PathBuf};

use control_protocol::training::rollout::{
    RewardReport, RewardScale, Rollout, RolloutPrompt, RolloutReply, RolloutRequest,
};
use model::{adapter::MethodWeights, shape::config::ModelConfig};
use scheduling::random::Rng;
use serde::{Deserialize, Serialize};

use crate::{
    data::RolloutItem,
    peft::{self, SaveDtype, WriteError},
    step::SequenceSample,
};

/// Separates the random numbers of answers from others of the same seed.
const ANSWERS: u64 = 0x6772_706f_2061_6e73;

/// Bits of a seed that JSON's numbers hold exactly.
const SEED_BITS: u32 = 53;

/// Added to standard deviations, as in TRL.
const EPSILON: f64 = 1e-4;

/// Settings of GRPO in the plan of a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GrpoPlan {
    /// Number of answers to each prompt.
    pub num_generations: u32,
    /// Maximum number of tokens of an answer.
    pub max_completion_length: u32,
    /// Sampling temperature.
    pub temperature: f64,
    /// Divisor of the advantages.
    pub scale_rewards: RewardScale,
}

/// Sampling of a job's answers.
#[derive(Debug, Clone)]
pub struct RolloutSampling {
    pub plan: GrpoPlan,
    /// Content of the file `adapter_config.json`.
    pub options: Vec<u8>,
    /// Directory of the adapter for the sampler, which each step replaces.
    pub directory: PathBuf,
}

impl RolloutSampling {
    /// Writes the adapter for the sampler, and returns the directory.
    ///
    /// # Errors
    /// Fails if the directory cannot be replaced.
    pub fn write(&self, method: &MethodWeights, config: &ModelConfig) -> Result<PathBuf, WriteError> {
        match fs::remove_dir_all(&self.directory) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(WriteError::Io { path: self.directory.display().to_string(), source });
            }
            _ => peft::write(&self.directory, &self.options, method, config, SaveDtype::F32, &[])?,
        }
        Ok(self.directory.clone())
    }
}

/// Reason why answers cannot be learned from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RolloutError {
    #[error("the reply has {found} prompts, not {expected}")]
    Prompts { found: usize, expected: usize },
    #[error("a prompt has {found} answers, not {expected}")]
    Answers { found: usize, expected: u32 },
    #[error("an answer has {tokens} tokens and {logprobs} log-probabilities, and the limit is {limit}")]
    Length { tokens: usize, logprobs: usize, limit: u32 },
    #[error("an answer has the token {0}, which is not in the vocabulary")]
    Token(u32),
    #[error("a reward or a log-probability is not a finite number")]
    NotANumber,
}

impl GrpoPlan {
    /// Returns the request of step `step` (from 1) for answers to `items`; `seed` is that of the job.
    #[must_use]
    pub fn request(&self, items: &[&RolloutItem], step: u64, seed: u64, adapter: PathBuf) -> RolloutRequest {
        let of_step = Rng::keyed(Rng::seeded(seed ^ ANSWERS).bits(step));
        let prompt = |(item, number): (&&RolloutItem, u64)| RolloutPrompt {
            tokens: item.tokens.clone(),
            seed: of_step.bits(number) >> (u64::BITS - SEED_BITS),
            prompt: item.row.get(item.field).cloned().unwrap_or_default(),
            row: item.row.clone(),
        };
        RolloutRequest {
            step,
            adapter,
            prompts: items.iter().zip(0..).map(prompt).collect(),
            num_generations: self.num_generations,
            max_tokens: self.max_completion_length,
            temperature: self.temperature,
        }
    }

    /// Returns the sequences that a step learns, and a report of their rewards. Answers without an advantage
    /// are left out.
    ///
    /// # Errors
    /// Fails if the reply is not one to the request for `items`.
    pub fn sequences(
        &self,
        items: &[&RolloutItem],
        reply: &RolloutReply,
        vocabulary: usize,
    ) -> Result<(Vec<SequenceSample>, RewardReport), RolloutError> {
        self.check(items.len(), reply, vocabulary)?;
        let rewards: Vec<Vec<f64>> =
            reply.groups.iter().map(|group| group.iter().map(|it| it.reward).collect()).collect();
        let advantages = advantages(&rewards, self.scale_rewards);
        let tokens: usize = reply.groups.iter().flatten().map(|rollout| rollout.tokens.len()).sum();
        let mut sequences = Vec::new();
        for ((item, group), advantages) in items.iter().zip(&reply.groups).zip(&advantages) {
            for (rollout, &advantage) in group.iter().zip(advantages) {
                if advantage != 0.0 && !rollout.tokens.is_empty() {
                    sequences.push(sequence(&item.tokens, rollout, advantage / tokens as f64));
                }
            }
        }
        Ok((sequences, report(&rewards, tokens)))
    }

    fn check(&self, prompts: usize, reply: &RolloutReply, vocabulary: usize) -> Result<(), RolloutError> {
        let (found, expected) = (reply.groups.len(), self.num_generations);
        if found != prompts {
            return Err(RolloutError::Prompts { found, expected: prompts });
        }
        if let Some(group) = reply.groups.iter().find(|group| group.len() != expected as usize) {
            return Err(RolloutError::Answers { found: group.len(), expected });
        }
        for Rollout { tokens, logprobs, reward } in reply.groups.iter().flatten() {
            let (limit, lengths) = (self.max_completion_length, (tokens.len(), logprobs.len()));
            if lengths.0 != lengths.1 || lengths.0 > limit as usize {
                return Err(RolloutError::Length { tokens: lengths.0, logprobs: lengths.1, limit });
            }
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
                return Err(RolloutError::Token(token));
            }
            if !reward.is_finite() || logprobs.iter().any(|logprob| !logprob.is_finite()) {
                return Err(RolloutError::NotANumber);
            }
        }
        Ok(())
    }
}

/// Returns an answer behind its prompt; each token of the answer has the given weight.
#[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
fn sequence(prompt: &[u32], rollout: &Rollout, weight: f64) -> SequenceSample {
    let all = [prompt, &rollout.tokens].concat();
    let shown = prompt.len() - 1;
    let behind_prompt = |values: &[f32]| [&vec![0.0; shown][..], values].concat();
    SequenceSample {
        tokens: all[..all.len() - 1].to_vec(),
        targets: all[1..].to_vec(),
        weights: behind_prompt(&vec![weight as f32; rollout.tokens.len()]),
        sampling_logprobs: behind_prompt(&rollout.logprobs),
    }
}

/// Returns the advantage of each answer, group by group.
fn advantages(groups: &[Vec<f64>], scale: RewardScale) -> Vec<Vec<f64>> {
    let of_batch = deviation(&groups.concat());
    let of_group = |rewards: &Vec<f64>| {
        let (mean, own) = (mean(rewards), deviation(rewards));
        let divisor = match scale {
            RewardScale::Group => own + EPSILON,
            RewardScale::Batch => of_batch + EPSILON,
            RewardScale::None => 1.0,
        };
        // The mean of equal rewards may differ from these in the last bit.
        let is_equal = are_equal(rewards);
        rewards.iter().map(|reward| if is_equal { 0.0 } else { (reward - mean) / divisor }).collect()
    };
    groups.iter().map(of_group).collect()
}

fn report(groups: &[Vec<f64>], tokens: usize) -> RewardReport {
    let all = groups.concat();
    RewardReport {
        mean: mean(&all),
        deviation: deviation(&all),
        answer_tokens: tokens as f64 / all.len().max(1) as f64,
        equal_groups: groups.iter().filter(|rewards| are_equal(rewards)).count() as u64,
        logprob_difference: 0.0,
    }
}

#[expect(clippy::float_cmp, reason = "rewards that differ at all carry a signal")]
fn are_equal(rewards: &[f64]) -> bool {
    rewards.windows(2).all(|pair| pair[0] == pair[1])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Returns the standard deviation of a sample, with one degree of freedom less than values.
fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    (squares / values.len().saturating_sub(1).max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    const PLAN: GrpoPlan = GrpoPlan {
        num_generations: 2,
        max_completion_length: 3,
        temperature: 1.0,
        scale_rewards: RewardScale::Group,
    };

    fn item(tokens: &[u32]) -> RolloutItem {
        let row = Map::from_iter([("prompt".to_owned(), json!("1+1"))]);
        RolloutItem { line: 1, tokens: tokens.to_vec(), field: "prompt", row }
    }

    fn rollout(tokens: &[u32], reward: f64) -> Rollout {
        Rollout { tokens: tokens.to_vec(), logprobs: vec![-0.5; tokens.len()], reward }
    }

    #[test]
    fn advantages_are_those_of_trl() {
        let groups = [vec![0.0, 1.0], vec![2.0, 2.0], vec![0.1 + 0.2, 0.1 + 0.2]];
        // TRL: (rewards - mean) / (std + 1e-4), where torch's std has one degree of freedom less.
        let of_group = 0.5 / (0.5f64.sqrt() + 1e-4);
        let scaled = |scale| advantages(&groups, scale);
        assert_eq!(scaled(RewardScale::Group), [vec![-of_group, of_group], vec![0.0; 2], vec![0.0; 2]]);
        assert_eq!(scaled(RewardScale::None)[0], [-0.5, 0.5]);
        let of_batch = 0.5 / (deviation(&groups.concat()) + 1e-4);
        assert_eq!(scaled(RewardScale::Batch)[0], [-of_batch, of_batch]);
    }

    #[test]
    fn an_answer_is_learned_behind_its_prompt_and_weighed_by_all_tokens() {
        let (one, other) = (item(&[1, 2, 3]), item(&[4]));
        let same = vec![rollout(&[5], 1.0), rollout(&[6], 1.0)];
        let groups = vec![vec![rollout(&[7, 8], 1.0), rollout(&[], 0.0)], same];
        let (sequences, report) = PLAN.sequences(&[&one, &other], &RolloutReply { groups }, 10).unwrap();
        let [sequence] = &sequences[..] else { panic!("{sequences:?}") };
        assert_eq!((&sequence.tokens[..], &sequence.targets[..]), (&[1, 2, 3, 7][..], &[2, 3, 7, 8][..]));
        let weight = (0.5 / (0.5f64.sqrt() + 1e-4) / 4.0) as f32;
        assert_eq!(sequence.weights, [0.0, 0.0, weight, weight]);
        assert_eq!(sequence.sampling_logprobs, [0.0, 0.0, -0.5, -0.5]);
        assert_eq!((report.mean, report.answer_tokens, report.equal_groups), (0.75, 1.0, 1));
    }

    #[test]
    fn a_reply_that_does_not_fit_the_request_is_refused() {
        let items = [item(&[1])];
        let refused = |groups: Vec<Vec<Rollout>>| {
            PLAN.sequences(&[&items[0]], &RolloutReply { groups }, 10).unwrap_err()
        };
        let with = |rollout: Rollout| refused(vec![vec![self::rollout(&[1], 0.0), rollout]]);
        assert_eq!(refused(vec![]), RolloutError::Prompts { found: 0, expected: 1 });
        assert_eq!(refused(vec![vec![]]), RolloutError::Answers { found: 0, expected: 2 });
        assert_eq!(with(rollout(&[10], 0.0)), RolloutError::Token(10));
        assert_eq!(with(rollout(&[1], f64::NAN)), RolloutError::NotANumber);
        assert!(matches!(with(rollout(&[1; 4], 0.0)), RolloutError::Length { tokens: 4, .. }));
        let short = Rollout { logprobs: vec![], ..rollout(&[1], 0.0) };
        assert!(matches!(with(short), RolloutError::Length { logprobs: 0, .. }));
    }

    #[test]
    fn each_prompt_of_each_step_has_a_seed_of_its_own_that_json_can_hold() {
        let item = item(&[1]);
        let seeds = |step, seed| {
            let request = PLAN.request(&[&item, &item], step, seed, "adapter".into());
            request.prompts.into_iter().map(|prompt| prompt.seed).collect::<Vec<_>>()
        };
        let all = [seeds(1, 0), seeds(2, 0), seeds(1, 1)].concat();
        let mut several = all.clone();
        several.sort_unstable();
        several.dedup();
        assert_eq!(several.len(), 6);
        assert!(all.iter().all(|seed| *seed < 1 << SEED_BITS));
        assert_eq!(seeds(1, 0), seeds(1, 0));
    }
}
