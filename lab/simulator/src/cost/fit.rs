//! Fits the times of a cost model to measurements: least squares of relative errors, with no time below 0.

use scheduling::perf::linear_model::nonnegative;

use super::{ComputedWork, CostModel, TERMS};

/// A timed measurement with the work that it did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TimedObservation {
    /// Measured time in seconds.
    pub seconds: f64,
    /// Number of requests that were answered.
    pub requests: f64,
    /// Steps with their number; 0.5 is a step that was waited for from its middle on.
    pub steps: Vec<(f64, ComputedWork)>,
}

/// Error of measurements that do not determine the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the measurements do not separate the costs of a step; measure more sizes of prompts and batches")]
pub struct FitError;

/// Number of terms: requests, and the terms of steps.
const ALL: usize = TERMS + 1;

/// Maximum number of free tokens that the fit tries.
const MAX_FREE: usize = 32;

impl TimedObservation {
    fn terms(&self, free_tokens: usize) -> [f64; ALL] {
        let mut terms = [0.0; ALL];
        terms[0] = self.requests;
        for (count, work) in &self.steps {
            terms[1..].iter_mut().zip(work.terms(free_tokens)).for_each(|(sum, term)| *sum += count * term);
        }
        terms
    }

    /// Returns the seconds that the cost model predicts for this measurement.
    #[must_use]
    pub fn predicted(&self, model: &CostModel) -> f64 {
        let steps: f64 = self.steps.iter().map(|(count, work)| count * model.step_seconds(*work)).sum();
        self.requests * model.request_s + steps
    }

    /// Returns the square of the relative error.
    fn error(&self, model: &CostModel) -> f64 {
        (self.predicted(model) / self.seconds - 1.0).powi(2)
    }
}

impl CostModel {
    /// Returns this model with the times that fit `observed` best; sizes and bandwidths stay.
    ///
    /// # Errors
    /// If the measurements do not determine all terms.
    pub fn fitted(self, observed: &[TimedObservation]) -> Result<Self, FitError> {
        let models =
            (0..=MAX_FREE).filter_map(|free| Self { free_tokens: free, ..self }.fitted_linear(observed));
        let error = |model: &Self| observed.iter().map(|one| one.error(model)).sum::<f64>();
        models.min_by(|one, other| error(one).total_cmp(&error(other))).ok_or(FitError)
    }

    /// Fits with the model's number of free tokens; all other terms are linear.
    fn fitted_linear(self, observed: &[TimedObservation]) -> Option<Self> {
        // Terms are shares of the measured time, so with the right costs they sum to 1.
        let row = |one: &TimedObservation| {
            one.terms(self.free_tokens).map(|term| term / one.seconds).into_iter().chain([1.0]).collect()
        };
        let rows: Vec<Vec<f64>> = observed.iter().map(row).collect();
        let times: [f64; ALL] = nonnegative(&rows, 0.0)?.try_into().ok()?;
        let [
            request_s,
            step_s,
            batch_s,
            prefill_token_s,
            prefill_pair_s,
            decode_sequence_s,
            context_token_s,
            rank_row_s,
        ] = times;
        Some(Self {
            request_s,
            step_s,
            batch_s,
            prefill_token_s,
            prefill_pair_s,
            decode_sequence_s,
            context_token_s,
            rank_row_s,
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: CostModel = CostModel {
        request_s: 2e-3,
        batch_s: 1e-3,
        free_tokens: 5,
        prefill_pair_s: 3e-7,
        context_token_s: 2e-6,
        rank_row_s: 1e-6,
        ..CostModel::CPU
    };

    /// Returns the rank of one of three adapters.
    fn rank(number: usize) -> usize {
        [8, 64, 16][number % 3]
    }

    fn prompt(prefill_tokens: usize, context_tokens: usize) -> TimedObservation {
        let prefill_pairs = prefill_tokens * (context_tokens + prefill_tokens / 2);
        let rank_rows = rank(prefill_tokens) * prefill_tokens;
        let work = ComputedWork {
            prefill_tokens,
            prefill_pairs,
            context_tokens,
            rank_rows,
            ..ComputedWork::default()
        };
        TimedObservation { seconds: 0.0, requests: 1.0, steps: vec![(1.0, work)] }
    }

    fn batch(decode_sequences: usize, context: usize) -> TimedObservation {
        let work = ComputedWork {
            decode_sequences,
            context_tokens: decode_sequences * context,
            rank_rows: decode_sequences * rank(decode_sequences + context),
            ..ComputedWork::default()
        };
        TimedObservation { seconds: 0.0, requests: 0.0, steps: vec![(1.0, work)] }
    }

    fn timed(what: &[TimedObservation], model: &CostModel) -> Vec<TimedObservation> {
        what.iter().map(|one| TimedObservation { seconds: one.predicted(model), ..one.clone() }).collect()
    }

    fn various() -> Vec<TimedObservation> {
        let prompts = [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (100, 0), (500, 0), (500, 1000), (9, 400)];
        let batches = [(1, 50), (2, 50), (4, 50), (8, 50), (16, 50), (4, 1000)];
        let prompts = prompts.map(|(tokens, context)| prompt(tokens, context));
        prompts.into_iter().chain(batches.map(|(sequences, context)| batch(sequences, context))).collect()
    }

    #[test]
    fn what_a_model_takes_leads_back_to_it() {
        let found = CostModel::CPU.fitted(&timed(&various(), &TRUE)).unwrap();
        assert_eq!(found.free_tokens, TRUE.free_tokens);
        assert!((found.request_s / TRUE.request_s - 1.0).abs() < 1e-6, "{found:?}");
        for (found, wanted) in found.times().into_iter().zip(TRUE.times()) {
            assert!((found / wanted - 1.0).abs() < 1e-6, "{found} {wanted}");
        }
    }

    #[test]
    fn a_term_that_would_take_time_away_is_none_and_too_little_is_refused() {
        let odd = CostModel { context_token_s: -1e-6, ..TRUE };
        let found = CostModel::CPU.fitted(&timed(&various(), &odd)).unwrap();
        assert_eq!(found.context_token_s, 0.0);
        assert_eq!(CostModel::CPU.fitted(&timed(&various()[..3], &TRUE)), Err(FitError));
    }
}
