//! Performance model: predicts durations and decides from them (CaraServe §4.2 and §5; C-09, C-12, C-28).
//!
//! Three lines are fitted to timings, first from a profile at start and then online. The lines describe a
//! core that computes a slice of an adapter, the forward pass of the base, and the link to the device. The
//! lines say how many tokens one core can compute without delaying the base, and whether a cold request
//! should start at once with the workers' help or wait for the load. The caller measures the times; this
//! module reads no clock.
//!
//! # Layout
//!
//! - [`linear_fit`]: a line by least squares.
//! - [`linear_model`]: a plane by least squares, for several kinds of work at once.
//! - [`fit`]: a line or plane that follows its timings and is robust against outliers.
//! - [`serving`]: predicts prefill and decode times of a whole executor, for routing.

pub mod fit;
pub mod linear_fit;
pub mod linear_model;
pub mod serving;
#[cfg(test)]
mod tests;

use std::{num::NonZeroUsize, time::Duration};

use self::{
    fit::Fit,
    linear_fit::{LinearFit, within},
};

/// Longest prompt in tokens that [`PerfModel::crossover_tokens`] examines.
const LONGEST_PROMPT: usize = 1 << 20;

/// Upper bound of the factor by which workers slow the base down.
const MAX_INTERFERENCE: f64 = 1e6;

/// Work of one adapter layer for a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerWork {
    /// Multiply-adds per token: rank · (in + out), summed over the layer's matrices.
    pub multiply_adds: u64,
    /// Slices of the layer for one core: one for each linear group, or one for each matrix.
    pub slices: usize,
}

/// Threads that compute the part of an adapter that the device lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCompute {
    /// Workers on their own cores, in parallel with the base's product.
    Workers(NonZeroUsize),
    /// The executor's own threads, after the base's product.
    Executor(NonZeroUsize),
}

impl HostCompute {
    /// Returns the workers if there are any, else the executor's `threads`, at least one.
    #[must_use]
    pub fn of(workers: usize, threads: usize) -> Self {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        NonZeroUsize::new(workers).map_or(Self::Executor(threads), Self::Workers)
    }

    fn count(self) -> usize {
        match self {
            Self::Workers(count) | Self::Executor(count) => count.get(),
        }
    }
}

/// When a device starts to use arrived parts of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalPolicy {
    /// From the next layer on, because layers are enqueued one by one.
    ByLayer,
    /// From the next pass on: passes are taken whole, so host threads serve the missing part in all layers.
    ByPass,
}

/// Prompt whose adapter is not completely on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColdPrefill {
    /// Tokens to compute; all in one pass if the device takes passes whole.
    pub tokens: usize,
    /// Work of one adapter layer for a core.
    pub work: LayerWork,
    /// Number of layers of the model, at least one.
    pub layers: usize,
    /// Bytes of the adapter that the device lacks.
    pub missing_bytes: u64,
    /// Bytes queued on the link before the missing ones.
    pub queued_bytes: u64,
    /// When the device uses arrived parts of the adapter.
    pub uptake: ArrivalPolicy,
    /// Threads that compute the missing part until it has arrived.
    pub hands: HostCompute,
    /// Factor by which working cores slow the base down; 1 if the workers have their own cores, never less.
    pub interference: f64,
}

/// How to serve a cold prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start at once; host threads compute the missing part until it has arrived.
    Assist,
    /// Start when the adapter has arrived.
    Wait,
}

/// Forecast times to the first token of a cold prompt, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// Seconds to the first token if the prompt starts at once.
    pub assist_s: f64,
    /// Seconds to the first token if the prompt waits for the load.
    pub wait_s: f64,
}

impl Forecast {
    /// Returns the faster choice; `Assist` if both are equal.
    #[must_use]
    pub fn decision(self) -> Decision {
        if self.wait_s < self.assist_s { Decision::Wait } else { Decision::Assist }
    }
}

/// Fitted lines for core, base and link.
#[derive(Debug, Clone, Default)]
pub struct PerfModel {
    core: Fit,
    base: Fit,
    link: Fit,
}

impl PerfModel {
    /// Creates a model without timings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that one core computed a slice of `multiply_adds` (rows · rank · (in + out)).
    pub fn observe_core(&mut self, multiply_adds: u64, took: Duration) {
        self.core.observe(multiply_adds as f64, took.as_secs_f64());
    }

    /// Records that the base computed a pass of `rows` tokens without an adapter and without waiting.
    pub fn observe_base(&mut self, rows: usize, took: Duration) {
        self.base.observe(rows as f64, took.as_secs_f64());
    }

    /// Records that the link carried `bytes`.
    pub fn observe_link(&mut self, bytes: u64, took: Duration) {
        self.link.observe(bytes as f64, took.as_secs_f64());
    }

    /// Returns the fit from multiply-adds of a slice to seconds of one core.
    #[must_use]
    pub fn core(&self) -> &Fit {
        &self.core
    }

    /// Returns the fit from tokens of a pass to seconds of the base.
    #[must_use]
    pub fn base(&self) -> &Fit {
        &self.base
    }

    /// Returns the fit from bytes to seconds of the link.
    #[must_use]
    pub fn link(&self) -> &Fit {
        &self.link
    }

    /// Returns the maximum number of tokens whose adapter work one core finishes within the base's time per
    /// layer, in a pass of `pass_tokens` through `layers` (CaraServe's `c`). The result is at least one: if
    /// one token is too slow, no number of cores keeps up. `None` before there are timings of core and
    /// base.
    #[must_use]
    pub fn tokens_per_core(&self, work: LayerWork, layers: usize, pass_tokens: usize) -> Option<usize> {
        let (core, base) = (self.core.line()?, self.base.line()?);
        let spare_s = base_layer_s(base, pass_tokens, layers) - core.beta * work.slices as f64;
        let token_s = core.alpha * work.multiply_adds as f64;
        if spare_s <= 0.0 {
            return Some(1);
        }
        if token_s <= 0.0 {
            return Some(usize::MAX);
        }
        // The factor corrects a quotient rounded below the exact integer; the cast saturates.
        Some(((spare_s / token_s * (1.0 + 1e-9)) as usize).max(1))
    }

    /// Forecasts both choices for a cold prompt. `None` before there are timings of core, base and link.
    ///
    /// Let `b` be the base's time per layer, `c` the host threads' and `m` the time of both together. A load
    /// of `l` seconds keeps the host threads at work for `n = l/m + 1/2` layers, at most all; `n` is all
    /// layers if the device takes passes whole. The half stands for the layer that the threads have begun
    /// when the load ends. (Rounding `n` up instead would let the decision alternate for long prompts.) The
    /// forecasts are `assist = n · m + (layers - n) · b` and `wait = l + layers · b`.
    #[must_use]
    pub fn forecast(&self, cold: &ColdPrefill) -> Option<Forecast> {
        let (core, base, link) = (self.core.line()?, self.base.line()?, self.link.line()?);
        let layers = cold.layers.max(1) as f64;
        let load_s = load_s(link, cold);
        let base_s = base_layer_s(base, cold.tokens, cold.layers);
        let both_s = both_layer_s(hands_layer_s(core, cold), base_s, cold);
        let arrives = cold.uptake == ArrivalPolicy::ByLayer && load_s < both_s * layers;
        let assisted = if arrives { (load_s / both_s + 0.5).min(layers) } else { layers };
        // The sum adds the extra time of assisting to the base's time, so equal layer times add exactly zero.
        let assist_s = layers * base_s + if load_s > 0.0 { assisted * (both_s - base_s) } else { 0.0 };
        Some(Forecast { assist_s, wait_s: load_s + layers * base_s })
    }

    /// Decides how to serve a cold prompt; `Assist` while the model lacks timings.
    #[must_use]
    pub fn decide(&self, cold: &ColdPrefill) -> Decision {
        self.forecast(cold).map_or(Decision::Assist, Forecast::decision)
    }

    /// Returns the shortest prompt for which waiting is faster (C-28), up to `longest` and 1,048,576 tokens;
    /// `cold` gives the other inputs. `None` if there is none, or the model lacks timings.
    #[must_use]
    pub fn crossover_tokens(&self, cold: &ColdPrefill, longest: usize) -> Option<usize> {
        let prompts = 1..=longest.min(LONGEST_PROMPT);
        prompts.into_iter().find(|&tokens| self.decide(&ColdPrefill { tokens, ..*cold }) == Decision::Wait)
    }
}

/// Returns the number of cores for a prompt of `tokens`: `ceil(L / c)` with `c = tokens_per_core`. The paper
/// prints `ceil(L / a)` but defines no `a`; its example, 128 tokens at 16 per process, agrees with `c`.
#[must_use]
pub fn cores_for(tokens: usize, tokens_per_core: usize) -> usize {
    tokens.div_ceil(tokens_per_core.max(1))
}

fn load_s(link: LinearFit, cold: &ColdPrefill) -> f64 {
    if cold.missing_bytes == 0 {
        return 0.0;
    }
    link.at(cold.missing_bytes as f64 + cold.queued_bytes as f64)
}

fn base_layer_s(base: LinearFit, tokens: usize, layers: usize) -> f64 {
    base.at(tokens as f64) / layers.max(1) as f64
}

/// Returns the host threads' time for a layer; they share the tokens evenly.
fn hands_layer_s(core: LinearFit, cold: &ColdPrefill) -> f64 {
    let share = cold.tokens as f64 / cold.hands.count() as f64;
    let slices = cold.work.slices.max(1) as f64;
    core.at(share * cold.work.multiply_adds as f64 / slices) * slices
}

fn both_layer_s(hands_s: f64, base_s: f64, cold: &ColdPrefill) -> f64 {
    match cold.hands {
        HostCompute::Workers(_) => hands_s.max(base_s * within(cold.interference, 1.0, MAX_INTERFERENCE)),
        HostCompute::Executor(_) => hands_s + base_s,
    }
}
