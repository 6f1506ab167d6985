//! How long a step is: schedules by the names and definitions of transformers (`optimization.py`).

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// How the learning rate goes down, once it has gone up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// It stays
    Constant,
    /// In a line to zero
    Linear,
    /// In half a wave to zero
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

/// The learning rate of each step, as a part of the one that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// How it goes down.
    pub decay: Decay,
    /// Steps in which it goes up from zero, in a line; the first step of them does nothing, as in transformers.
    pub warmup_steps: u64,
    /// All steps, those included.
    pub total_steps: u64,
}

impl Schedule {
    /// The part for a step, counted from 0. After the last step, what decays stays at zero.
    #[must_use]
    pub fn multiplier(&self, step: u64) -> f64 {
        let &Self { decay, warmup_steps, total_steps } = self;
        if step < warmup_steps {
            return step as f64 / warmup_steps as f64;
        }
        let decaying_steps = total_steps.saturating_sub(warmup_steps).max(1);
        let progress = ((step - warmup_steps) as f64 / decaying_steps as f64).min(1.0);
        match decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_decays_ends_at_zero_and_stays_there() {
        for decay in [Decay::Linear, Decay::Cosine] {
            let schedule = Schedule { decay, warmup_steps: 2, total_steps: 10 };
            for step in [10, 11, 1000, u64::MAX] {
                assert!(schedule.multiplier(step) < 1e-15, "{decay:?} at {step}");
            }
        }
    }

    #[test]
    fn a_warm_up_longer_than_the_training_only_goes_up() {
        let schedule = Schedule { decay: Decay::Cosine, warmup_steps: 20, total_steps: 10 };
        let multipliers: Vec<f64> = (0..10).map(|step| schedule.multiplier(step)).collect();
        assert!(multipliers.is_sorted() && multipliers[9] < 0.5, "{multipliers:?}");
    }
}
