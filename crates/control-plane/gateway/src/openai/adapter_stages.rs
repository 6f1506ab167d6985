//! Counts the tokens of each stage of a choice, and reports which adapter generated them.

use serde::Serialize;

use super::{adapter_switches::AdapterSwitch, target::ModelTarget};

/// Token counts of the stages that a choice has reached; one stage unless the request switches adapters.
#[derive(Debug, Default)]
pub(crate) struct StageCounts(Vec<StageUsage>);

#[derive(Debug, Default)]
struct StageUsage {
    tokens: usize,
    cached_tokens: usize,
}

/// One stage of a choice, as answers report it.
#[derive(Debug, Serialize)]
pub(crate) struct AdapterStage<'a> {
    /// The model as the request named it.
    model: &'a str,
    /// Content hash of the adapter; null for the base model.
    adapter_generation: Option<String>,
    /// Number of generated tokens.
    tokens: usize,
    /// Tokens before the stage that came from the prefix cache.
    cached_tokens: usize,
}

impl StageCounts {
    /// Notes an output of `stage`; returns true if the output is the first of the choice.
    pub(crate) fn reach(&mut self, stage: usize, cached_tokens: u32) -> bool {
        let reached = self.0.len();
        if stage >= reached {
            // A stage without tokens sends no output.
            self.0.resize_with(stage, StageUsage::default);
            self.0.push(StageUsage { tokens: 0, cached_tokens: cached_tokens as usize });
        }
        reached == 0
    }

    /// Adds generated tokens to the latest stage.
    pub(crate) fn add(&mut self, tokens: usize) {
        if let Some(latest) = self.0.last_mut() {
            latest.tokens += tokens;
        }
    }

    /// Returns the number of prompt tokens from the prefix cache.
    #[must_use]
    pub(crate) fn cached_tokens(&self) -> usize {
        self.0.first().map_or(0, |first| first.cached_tokens)
    }

    /// Returns the number of tokens that the switches so far appended.
    #[must_use]
    pub(crate) fn appended_tokens(&self, switches: &[AdapterSwitch]) -> usize {
        let passed = self.0.len().saturating_sub(1);
        switches.iter().take(passed).map(|switch| switch.appended.len()).sum()
    }

    /// Returns the reached stages; `targets` are the models of all stages.
    #[must_use]
    pub(crate) fn report<'a>(&self, targets: impl Iterator<Item = &'a ModelTarget>) -> Vec<AdapterStage<'a>> {
        let stage = |(usage, target): (&StageUsage, &'a ModelTarget)| AdapterStage {
            model: &target.name,
            adapter_generation: target.lease.as_ref().map(|lease| lease.generation.to_string()),
            tokens: usage.tokens,
            cached_tokens: usage.cached_tokens,
        };
        self.0.iter().zip(targets).map(stage).collect()
    }
}
