//! What things will take: the performance model, and what it decides (CaraServe §4.2 and §5; C-09, C-12, C-28).
//!
//! Three lines are fitted to timings, at start by a profile and then online: a core that computes a slice of an
//! adapter, the base model's pass, and the link to the device. From them follow how many tokens one core keeps up
//! with, and whether a request whose adapter is not on the device should start at once with the workers' help or
//! wait for the load. Nothing here reads a clock: whoever measures brings the times.
//!
//! # Layout
//!
//! - [`linear_fit`]: a line by least squares.
//! - [`linear_model`]: the same for several kinds of work at once.
//! - [`fit`]: a line or plane that follows its timings, and is not led astray by a few.
//! - [`serving`]: what a whole executor takes for prompts and steps, for those who choose among several.

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

/// Longest prompt that [`PerfModel::crossover_tokens`] looks at.
const LONGEST_PROMPT: usize = 1 << 20;

/// Most that workers can slow the base down.
const MAX_INTERFERENCE: f64 = 1e6;

/// What a layer of an adapter costs a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerWork {
    /// For each token: rank · (in + out), summed over the layer's matrices.
    pub multiply_adds: u64,
    /// Slices into which the layer is cut for one core: one for each of its linear groups, or each matrix.
    pub slices: usize,
}

/// Who computes what the device does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCompute {
    /// Workers on cores of their own, beside the base's product.
    Workers(NonZeroUsize),
    /// The executor's own threads, after the base's product.
    Executor(NonZeroUsize),
}

impl HostCompute {
    /// The workers if there are any, else the executor's `threads`, of which there is at least one.
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

/// When a device uses what has arrived of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalPolicy {
    /// From the next layer on: layers are enqueued one by one.
    ByLayer,
    /// From the next pass on: a device is given a pass as a whole, and what is missing then the hands compute in all layers.
    ByPass,
}

/// A prompt whose adapter is not, or not all, on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColdPrefill {
    /// Tokens to compute: in one pass, where a device takes passes whole.
    pub tokens: usize,
    /// What a layer of the adapter costs.
    pub work: LayerWork,
    /// Layers of the model; at least one.
    pub layers: usize,
    /// Bytes of the adapter that the device does not have.
    pub missing_bytes: u64,
    /// Bytes that travel before them.
    pub queued_bytes: u64,
    /// When what has arrived is used.
    pub uptake: ArrivalPolicy,
    /// Who computes meanwhile.
    pub hands: HostCompute,
    /// How many times longer the base takes while workers compute: 1, and no less, where they have cores of their own.
    pub interference: f64,
}

/// What to do with a cold prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start at once; the hands compute what is missing until it has arrived.
    Assist,
    /// Start when the adapter has arrived.
    Wait,
}

/// Both ways of a cold prompt to its first token, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// If it starts at once.
    pub assist_s: f64,
    /// If it waits for the load.
    pub wait_s: f64,
}

impl Forecast {
    /// The shorter way; starting at once where they are equal.
    #[must_use]
    pub fn decision(self) -> Decision {
        if self.wait_s < self.assist_s { Decision::Wait } else { Decision::Assist }
    }
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct PerfModel {
    core: Fit,
    base: Fit,
    link: Fit,
}

impl PerfModel {
    /// A model that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One core has computed a slice of `multiply_adds` (rows · rank · (in + out)).
    pub fn observe_core(&mut self, multiply_adds: u64, took: Duration) {
        self.core.observe(multiply_adds as f64, took.as_secs_f64());
    }

    /// The base has computed a pass of `rows` tokens, with no adapter and nobody to wait for.
    pub fn observe_base(&mut self, rows: usize, took: Duration) {
        self.base.observe(rows as f64, took.as_secs_f64());
    }

    /// The link has carried `bytes`.
    pub fn observe_link(&mut self, bytes: u64, took: Duration) {
        self.link.observe(bytes as f64, took.as_secs_f64());
    }

    /// Multiply-adds of a slice to seconds of one core.
    #[must_use]
    pub fn core(&self) -> &Fit {
        &self.core
    }

    /// Tokens of a pass to seconds of the base.
    #[must_use]
    pub fn base(&self) -> &Fit {
        &self.base
    }

    /// Bytes to seconds of the link.
    #[must_use]
    pub fn link(&self) -> &Fit {
        &self.link
    }

    /// CaraServe's c (C-09): the most tokens for which one core needs no longer for a layer than the base does, in a
    /// pass of `pass_tokens` through `layers`. At least one: where not even that keeps up, no number of cores does.
    /// `None` before there are timings of both.
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
        // A hair more, since an exact quotient may be rounded below the integer that it is; the cast saturates.
        Some(((spare_s / token_s * (1.0 + 1e-9)) as usize).max(1))
    }

    /// Both ways of a cold prompt. `None` before there are timings of core, base and link.
    ///
    /// With `b` the base's time for a layer, `c` the hands' and `m` that of both together, a load of `l` seconds keeps
    /// the hands at work for `n = l/m + 1/2` layers, at most all: the one in whose middle the load ends, on average,
    /// is finished by whoever began it. (Rounding `n` up instead makes long prompts change their minds back and
    /// forth, by less than half a layer.) Then `assist = n · m + (layers - n) · b`, `wait = l + layers · b`. Where a pass is
    /// taken whole, `n` is all layers.
    #[must_use]
    pub fn forecast(&self, cold: &ColdPrefill) -> Option<Forecast> {
        let (core, base, link) = (self.core.line()?, self.base.line()?, self.link.line()?);
        let layers = cold.layers.max(1) as f64;
        let load_s = load_s(link, cold);
        let base_s = base_layer_s(base, cold.tokens, cold.layers);
        let both_s = both_layer_s(hands_layer_s(core, cold), base_s, cold);
        let arrives = cold.uptake == ArrivalPolicy::ByLayer && load_s < both_s * layers;
        let assisted = if arrives { (load_s / both_s + 0.5).min(layers) } else { layers };
        // As what assisting adds to the base's time, so that no layer costs nothing where both are equal.
        let assist_s = layers * base_s + if load_s > 0.0 { assisted * (both_s - base_s) } else { 0.0 };
        Some(Forecast { assist_s, wait_s: load_s + layers * base_s })
    }

    /// What to do with a cold prompt; assistance as long as the model knows too little.
    #[must_use]
    pub fn decide(&self, cold: &ColdPrefill) -> Decision {
        self.forecast(cold).map_or(Decision::Assist, Forecast::decision)
    }

    /// The shortest prompt of at most `longest` tokens (and 1,048,576) for which waiting is faster (C-28); `cold` says
    /// the rest. `None` if there is none, or the model knows too little.
    #[must_use]
    pub fn crossover_tokens(&self, cold: &ColdPrefill, longest: usize) -> Option<usize> {
        let prompts = 1..=longest.min(LONGEST_PROMPT);
        prompts.into_iter().find(|&tokens| self.decide(&ColdPrefill { tokens, ..*cold }) == Decision::Wait)
    }
}

/// Cores for a prompt of `tokens` where one keeps up with `tokens_per_core`: `ceil(L / c)`. The paper prints
/// `ceil(L / a)`, where no `a` is defined; its example, 128 tokens at 16 a process, is this.
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

/// The hands' time for a layer, the tokens shared evenly.
fn hands_layer_s(core: LinearFit, cold: &ColdPrefill) -> f64 {
    let share = cold.tokens as f64 / cold.hands.count() as f64;
    let slices = cold.work.slices.max(1) as f64;
    core.at(share * cold.work.multiply_adds as f64 / slices) * slices
}

/// A layer's time while the hands are at work.
fn both_layer_s(hands_s: f64, base_s: f64, cold: &ColdPrefill) -> f64 {
    match cold.hands {
        HostCompute::Workers(_) => hands_s.max(base_s * within(cold.interference, 1.0, MAX_INTERFERENCE)),
        HostCompute::Executor(_) => hands_s + base_s,
    }
}
