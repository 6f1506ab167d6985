//! Estimates the time models of executors from observed timings.

use super::PlacementRequest;
use crate::perf::{
    linear_fit::LinearFit,
    linear_model::LinearModel,
    serving::{ColdStart, LoraForm, RequestLoad, ServingModel},
};

/// Assumed model while any executor has no timings: milliseconds for a step, each of its sequences and each
/// prompt token; a store of 1 GB/s. All executors get it, so only the proportions matter.
pub const UNSEEN: ServingModel = ServingModel {
    form: LoraForm::TrueRank,
    decode: LinearModel { seconds_each: [5e-3, 1e-3, 1e-6, 1e-6] },
    prefill: LinearModel { seconds_each: [5e-3, 1e-3, 1e-6] },
    link: LinearFit { alpha: 0.0, beta: 0.0 },
    store: LinearFit { alpha: 1e-9, beta: 5e-3 },
    cold: ColdStart::Assisted,
};

/// Observed time model of an executor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostEstimate {
    /// Model that was fitted to the executor's timings.
    pub model: ServingModel,
    /// Whether the timings are old and the executor is idle: it may have become faster unnoticed.
    pub is_stale: bool,
}

/// Selects the time model of each executor for a request: [`UNSEEN`] for all, unless all have timings. An
/// executor with old timings counts as the fastest of the others until it is timed again. Otherwise an
/// executor that was slow once would never get a request, and would never be seen to be fast.
#[derive(Debug)]
pub struct EstimateSelector<'a> {
    asked: &'a PlacementRequest,
    are_seen: bool,
    /// Fastest model among executors with recent timings.
    fastest: Option<ServingModel>,
}

impl<'a> EstimateSelector<'a> {
    /// Creates the selector for a request from the estimates of all executors.
    #[must_use]
    pub fn of(
        asked: &'a PlacementRequest,
        all: &(impl Iterator<Item = Option<CostEstimate>> + Clone),
    ) -> Self {
        let are_seen = all.clone().all(|seen| seen.is_some());
        let seen = || all.clone().flatten();
        // Only executors with old timings are compared with the fastest.
        let is_needed = are_seen && seen().any(|seen| seen.is_stale);
        let judge = Self { asked, are_seen, fastest: None };
        let timed = seen().filter(|seen| is_needed && !seen.is_stale).map(|seen| seen.model);
        Self { fastest: timed.reduce(|fastest, model| judge.faster(fastest, model)), ..judge }
    }

    /// Returns the time model of an executor: that of `seen`, or of the fastest other executor if `seen` is
    /// old; [`UNSEEN`] unless all executors have timings.
    #[must_use]
    pub fn model(&self, seen: Option<CostEstimate>) -> ServingModel {
        match (seen, self.fastest) {
            (Some(seen), Some(fastest)) if self.are_seen && seen.is_stale => self.faster(seen.model, fastest),
            (Some(seen), _) if self.are_seen => seen.model,
            _ => UNSEEN,
        }
    }

    /// Returns the model that is faster for the request; `one` if both are equal.
    fn faster(&self, one: ServingModel, other: ServingModel) -> ServingModel {
        let load = RequestLoad::of(self.asked.rank, self.asked.prompt_tokens);
        let takes =
            |model: &ServingModel| model.prefill_s(load) + self.asked.answer_tokens * model.step_s(load);
        if takes(&other) < takes(&one) { other } else { one }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::Slo;

    #[test]
    fn who_was_slow_long_ago_is_tried_again() {
        let asked = PlacementRequest { prompt_tokens: 10, rank: 8, slo: Slo::default(), answer_tokens: 20.0 };
        let slow = ServingModel { decode: LinearModel { seconds_each: [5.0; 4] }, ..UNSEEN };
        let seen = |model, is_stale| Some(CostEstimate { model, is_stale });
        let judged = |all: &[Option<CostEstimate>]| {
            let judge = EstimateSelector::of(&asked, &all.iter().copied());
            all.iter().map(|seen| judge.model(*seen)).collect::<Vec<_>>()
        };
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, false)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, false)]), [UNSEEN, UNSEEN]);
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, true)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, true)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, false), None]), [UNSEEN, UNSEEN], "they are not compared");
    }
}
