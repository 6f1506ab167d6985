//! Predicts an executor's time for prefill and decode, as a scheduler sees them (CaraServe §5; C-12).
//!
//! Both times are planes, fitted to timings at start and refined online:
//!
//! ```text
//! decode  = a step + each sequence + each token of context + ranks
//! prefill = a pass + each prompt token + ranks of its tokens
//! ```
//!
//! The cost of ranks depends on the kernel. A padding kernel computes every row at the largest rank of the
//! batch (the paper's BGMV: `|S| · max rank`). A kernel without padding computes each row at its own rank
//! (MBGMV: `sum of ranks`).

use std::{collections::VecDeque, time::Duration};

use super::{
    fit::Fit,
    linear_fit::{CostCurve as _, LinearFit, TimingSample, r_squared},
    linear_model::LinearModel,
};

/// One in `HELD_OUT_EVERY` timings is held out for validation and never fitted.
const HELD_OUT_EVERY: u64 = 8;

const MAX_HELD_OUT: usize = 128;

/// How a kernel computes rows of different ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoraForm {
    /// Every row at the largest rank of the batch.
    Padded,
    /// Every row at its own rank.
    #[default]
    TrueRank,
}

/// Sums over requests that determine a batch's time: running ones, waiting ones, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestLoad {
    /// Number of requests in the load.
    pub requests: u64,
    /// Sum of the requests' ranks; a request of the base has rank 0.
    pub ranks: u64,
    /// Largest rank of a request.
    pub max_rank: u64,
    /// Sum of tokens: context of running requests, uncomputed prompt tokens of waiting ones.
    pub tokens: u64,
    /// Sum over the requests of tokens times rank.
    pub token_ranks: u64,
}

impl RequestLoad {
    /// Returns the load of both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            ranks: self.ranks.saturating_add(other.ranks),
            max_rank: self.max_rank.max(other.max_rank),
            tokens: self.tokens.saturating_add(other.tokens),
            token_ranks: self.token_ranks.saturating_add(other.token_ranks),
        }
    }

    /// Returns the load of one request.
    #[must_use]
    pub fn of(rank: u64, tokens: u64) -> Self {
        Self { requests: 1, ranks: rank, max_rank: rank, tokens, token_ranks: rank.saturating_mul(tokens) }
    }

    /// Returns the ranks that a kernel of this form computes if each request has one row.
    fn row_ranks(self, form: LoraForm) -> f64 {
        match form {
            LoraForm::Padded => self.requests as f64 * self.max_rank as f64,
            LoraForm::TrueRank => self.ranks as f64,
        }
    }

    /// Returns the ranks that a kernel of this form computes if each request has one row per token.
    fn token_ranks(self, form: LoraForm) -> f64 {
        match form {
            LoraForm::Padded => self.tokens as f64 * self.max_rank as f64,
            LoraForm::TrueRank => self.token_ranks as f64,
        }
    }
}

/// Time model of one executor, in seconds. All numbers are finite and not negative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServingModel {
    /// How the executor's LoRA kernel computes ranks.
    pub form: LoraForm,
    /// Decode step: fixed, per sequence, per token of context, per rank in the kernel's form.
    pub decode: LinearModel<4>,
    /// Prompt pass: fixed, per token, per rank of each token.
    pub prefill: LinearModel<3>,
    /// Line from bytes of an adapter to seconds of the copy from the host to the device.
    pub link: LinearFit,
    /// Line from bytes of an adapter to seconds of the copy from the store to the host.
    pub store: LinearFit,
    /// Whether a cold request waits for the device.
    pub cold: ColdStart,
}

/// How an executor serves a request while its adapter is on the way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ColdStart {
    /// The executor computes the prompt with workers' help without waiting for the link (C-05).
    #[default]
    Assisted,
    /// The request waits until the adapter is on the device.
    Waits,
}

impl ServingModel {
    /// Returns the seconds of a step in which each request of `load` gets a token; an empty load gives the
    /// fixed cost (`DecPerf` of Algorithm 1).
    #[must_use]
    pub fn step_s(&self, load: RequestLoad) -> f64 {
        self.decode.at(decode_terms(self.form, load))
    }

    /// Returns the increase of the step time if `more` joins `load`. The result is computed from the
    /// difference of the terms, so equal additions cost equally to the last bit.
    #[must_use]
    pub fn added_step_s(&self, load: RequestLoad, more: RequestLoad) -> f64 {
        self.decode.at(added(decode_terms(self.form, load.plus(more)), decode_terms(self.form, load)))
    }

    /// Returns the seconds of a pass over the prompts of `load` (`PrePerf`); no tokens take no time.
    #[must_use]
    pub fn prefill_s(&self, load: RequestLoad) -> f64 {
        if load.tokens == 0 { 0.0 } else { self.prefill.at(prefill_terms(self.form, load)) }
    }

    /// Returns the increase of the prefill time if `more` joins `load`; the fixed cost counts once per pass.
    #[must_use]
    pub fn added_prefill_s(&self, load: RequestLoad, more: RequestLoad) -> f64 {
        let mut terms = added(prefill_terms(self.form, load.plus(more)), prefill_terms(self.form, load));
        terms[0] = if load.tokens == 0 && more.tokens > 0 { 1.0 } else { 0.0 };
        self.prefill.at(terms)
    }
}

fn added<const N: usize>(with: [f64; N], without: [f64; N]) -> [f64; N] {
    let mut differences = with;
    differences.iter_mut().zip(without).for_each(|(term, without)| *term -= without);
    differences
}

fn decode_terms(form: LoraForm, load: RequestLoad) -> [f64; 4] {
    [1.0, load.requests as f64, load.tokens as f64, load.row_ranks(form)]
}

fn prefill_terms(form: LoraForm, load: RequestLoad) -> [f64; 3] {
    [1.0, load.tokens as f64, load.token_ranks(form)]
}

/// Online fits of one executor's times.
#[derive(Debug, Clone)]
pub struct ServingFit {
    form: LoraForm,
    decode: ValidatedFit<4>,
    prefill: ValidatedFit<3>,
    link: Fit,
    store: Fit,
    cold: ColdStart,
}

impl ServingFit {
    /// Creates fits without timings.
    #[must_use]
    pub fn new(form: LoraForm, cold: ColdStart) -> Self {
        let (decode, prefill) = (ValidatedFit::default(), ValidatedFit::default());
        Self { form, decode, prefill, link: Fit::default(), store: Fit::default(), cold }
    }

    /// Records the duration of a step in which each request of `load` got a token.
    pub fn observe_decode(&mut self, load: RequestLoad, took: Duration) {
        self.decode.add_sample(decode_terms(self.form, load), took);
    }

    /// Records the duration of a pass over the prompts of `load`.
    pub fn observe_prefill(&mut self, load: RequestLoad, took: Duration) {
        self.prefill.add_sample(prefill_terms(self.form, load), took);
    }

    /// Records how long an adapter's `bytes` took to the device.
    pub fn observe_link(&mut self, bytes: u64, took: Duration) {
        self.link.observe(bytes as f64, took.as_secs_f64());
    }

    /// Records how long an adapter's `bytes` took from the store to the host.
    pub fn observe_store(&mut self, bytes: u64, took: Duration) {
        self.store.observe(bytes as f64, took.as_secs_f64());
    }

    /// Returns the model; `None` before timings of decode and prefill. Links without timings take no time.
    #[must_use]
    pub fn model(&self) -> Option<ServingModel> {
        const NONE: LinearFit = LinearFit { alpha: 0.0, beta: 0.0 };
        Some(ServingModel {
            form: self.form,
            decode: self.decode.fit.curve()?,
            prefill: self.prefill.fit.curve()?,
            link: self.link.line().unwrap_or(NONE),
            store: self.store.line().unwrap_or(NONE),
            cold: self.cold,
        })
    }

    /// Returns the fractions of variance that the fits explain in held-out decode and prefill timings, from 0
    /// to 1 each. `None` before there is a held-out timing of each.
    #[must_use]
    pub fn r_squared(&self) -> Option<[f64; 2]> {
        Some([self.decode.r_squared()?, self.prefill.r_squared()?])
    }
}

/// Fit with timings that are held out for validation.
#[derive(Debug, Clone, Default)]
struct ValidatedFit<const N: usize> {
    fit: Fit<LinearModel<N>>,
    held_out: VecDeque<TimingSample<[f64; N]>>,
    seen: u64,
}

impl<const N: usize> ValidatedFit<N> {
    fn add_sample(&mut self, terms: [f64; N], took: Duration) {
        let sample = TimingSample::of_terms(terms, took.as_secs_f64());
        self.seen += 1;
        if !self.seen.is_multiple_of(HELD_OUT_EVERY) {
            return self.fit.add_sample(sample);
        }
        if self.held_out.len() == MAX_HELD_OUT {
            self.held_out.pop_front();
        }
        self.held_out.push_back(sample);
    }

    fn r_squared(&self) -> Option<f64> {
        let held_out: Vec<_> = self.held_out.iter().copied().collect();
        self.fit.curve().filter(|_| !held_out.is_empty()).map(|curve| r_squared(curve, &held_out))
    }
}

#[cfg(test)]
mod tests;
