//! Learning rate schedules, by the names and definitions of transformers (`optimization.py`).

use std::f64::consts::PI;

pub use control_protocol::training::spec::Decay;

/// Learning rate of each step, relative to the peak rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    pub decay: Decay,
    /// Number of steps with a linear increase from zero; the first one has the rate zero, as in transformers.
    pub warmup_steps: u64,
    /// Number of all steps, warm-up included.
    pub total_steps: u64,
}

impl Schedule {
    /// Returns the factor of the peak rate for `step`, from 0; a decaying schedule stays at 0 after its end.
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
