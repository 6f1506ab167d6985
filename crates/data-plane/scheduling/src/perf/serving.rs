//! What an executor takes for the batches it is given: prefill and decode, as a scheduler sees them (CaraServe §5; C-12).
//!
//! Both are planes, fitted to timings at start and refined by those that follow:
//!
//! ```text
//! decode  = a step + each sequence + each token of context + ranks
//! prefill = a pass + each prompt token + ranks of its tokens
//! ```
//!
//! What ranks cost depends on the kernel. One that pads computes every row at the largest rank of the batch (the paper's
//! BGMV: `|S| · max rank`), one that does not each at its own (MBGMV: `sum of ranks`).

use std::{collections::VecDeque, time::Duration};

use super::{
    fit::Fit,
    linear_fit::{CostCurve as _, LinearFit, TimingSample, r_squared},
    linear_model::LinearModel,
};

/// Every so many timings one is kept to judge by, and never fitted to.
const HELD_OUT_EVERY: u64 = 8;

/// Timings that are kept to judge by.
const MAX_HELD_OUT: usize = 128;

/// How rows of different ranks are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoraForm {
    /// Every row at the largest rank of the batch.
    Padded,
    /// Every row at its own rank.
    #[default]
    TrueRank,
}

/// Requests as far as time goes: those that run, those that wait, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestLoad {
    /// How many.
    pub requests: u64,
    /// Their ranks together; a request of the base has rank 0.
    pub ranks: u64,
    /// The largest.
    pub max_rank: u64,
    /// Tokens together: of context where they run, of prompts still to compute where they wait.
    pub tokens: u64,
    /// Each one's tokens times its rank, together.
    pub token_ranks: u64,
}

impl RequestLoad {
    /// These and those.
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

    /// One request.
    #[must_use]
    pub fn of(rank: u64, tokens: u64) -> Self {
        Self { requests: 1, ranks: rank, max_rank: rank, tokens, token_ranks: rank.saturating_mul(tokens) }
    }

    /// What a kernel of this form computes of ranks when each request has one row.
    fn row_ranks(self, form: LoraForm) -> f64 {
        match form {
            LoraForm::Padded => self.requests as f64 * self.max_rank as f64,
            LoraForm::TrueRank => self.ranks as f64,
        }
    }

    /// The same when each has as many rows as tokens.
    fn token_ranks(self, form: LoraForm) -> f64 {
        match form {
            LoraForm::Padded => self.tokens as f64 * self.max_rank as f64,
            LoraForm::TrueRank => self.token_ranks as f64,
        }
    }
}

/// What one executor takes, in seconds. All numbers are finite and not negative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServingModel {
    /// Its kernel.
    pub form: LoraForm,
    /// A decode step: being asked, each sequence, each token of context, each rank of the form.
    pub decode: LinearModel<4>,
    /// A prompt's pass: being asked, each token, each rank of each token.
    pub prefill: LinearModel<3>,
    /// Bytes of an adapter from the host to the device.
    pub link: LinearFit,
    /// Bytes of an adapter from the store to the host.
    pub store: LinearFit,
    /// What a cold request waits for.
    pub cold: ColdStart,
}

/// What an executor does while an adapter is on its way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ColdStart {
    /// It computes the prompt with workers' help, and nobody waits for the link (C-05).
    #[default]
    Assisted,
    /// The request waits until the adapter is there.
    Waits,
}

impl ServingModel {
    /// Seconds of a step in which each of `load` gets a token; with nobody it is what being asked costs (`DecPerf` of
    /// Algorithm 1).
    #[must_use]
    pub fn step_s(&self, load: RequestLoad) -> f64 {
        self.decode.at(decode_terms(self.form, load))
    }

    /// How much longer that is with `more` beside them. It is computed from what differs, so that equal additions cost
    /// equally to the last bit.
    #[must_use]
    pub fn added_step_s(&self, load: RequestLoad, more: RequestLoad) -> f64 {
        self.decode.at(added(decode_terms(self.form, load.plus(more)), decode_terms(self.form, load)))
    }

    /// Seconds of a pass over the prompts of `load` (`PrePerf`); no tokens take none.
    #[must_use]
    pub fn prefill_s(&self, load: RequestLoad) -> f64 {
        if load.tokens == 0 { 0.0 } else { self.prefill.at(prefill_terms(self.form, load)) }
    }

    /// How much longer that is with `more` beside them. A pass that there is anyway is asked for once.
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

/// The planes of one executor, as its timings come in.
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
    /// One that knows nothing yet.
    #[must_use]
    pub fn new(form: LoraForm, cold: ColdStart) -> Self {
        let (decode, prefill) = (ValidatedFit::default(), ValidatedFit::default());
        Self { form, decode, prefill, link: Fit::default(), store: Fit::default(), cold }
    }

    /// A step in which each of `load` got a token took so long.
    pub fn observe_decode(&mut self, load: RequestLoad, took: Duration) {
        self.decode.add_sample(decode_terms(self.form, load), took);
    }

    /// A pass over the prompts of `load` took so long.
    pub fn observe_prefill(&mut self, load: RequestLoad, took: Duration) {
        self.prefill.add_sample(prefill_terms(self.form, load), took);
    }

    /// An adapter's bytes came to the device.
    pub fn observe_link(&mut self, bytes: u64, took: Duration) {
        self.link.observe(bytes as f64, took.as_secs_f64());
    }

    /// An adapter's bytes came to the host.
    pub fn observe_store(&mut self, bytes: u64, took: Duration) {
        self.store.observe(bytes as f64, took.as_secs_f64());
    }

    /// What is known; `None` before there are timings of decode and prefill. Links that nobody has seen take no time.
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

    /// How much of the variance of decode and prefill timings that were *not* fitted to is foretold: 0 to 1 each. `None`
    /// before there is one of each.
    #[must_use]
    pub fn r_squared(&self) -> Option<[f64; 2]> {
        Some([self.decode.r_squared()?, self.prefill.r_squared()?])
    }
}

/// A fit, and timings that it is judged by.
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
