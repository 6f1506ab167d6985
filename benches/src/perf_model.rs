//! C-12: cost of ranks in a decode step and in a prefill, with true ranks and padded to the batch's largest
//! rank, and how well `scheduling::perf` predicts steps outside its fit.
//!
//! The serving model and its kernels run in this process: an adapter on q, k and v for each sequence, all in
//! blocks of the pool. The padding kernel is the same kernel over adapters that zeros extend to the largest
//! rank.

mod rig;

use std::time::Duration;

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng, rngs::StdRng};
use scheduling::perf::{
    linear_fit::{LinearFit, TimingSample},
    serving::{ColdStart, LoraForm, RequestLoad, ServingFit},
};

use self::rig::PerfModelRig;
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Minimum explained variance of each kernel by its own form.
const LEAST_FIT: f64 = 0.95;
/// Rank mixes of either kind of pass. The fit leaves out every eighth for validation.
const MIXES: usize = 96;
const HELD_OUT_EVERY: usize = 8;
const RANKS: [usize; 5] = [8, 16, 32, 64, 128];
/// Maximum number of sequences per step, and minimum and maximum of their context tokens.
const SEQUENCES: usize = 32;
const CONTEXT: (usize, usize) = (32, 256);
/// Maximum number of prompts per pass, and minimum and maximum of their tokens.
const PROMPTS: usize = 6;
const PROMPT: (usize, usize) = (8, 64);

/// Work of a pass: rank, context tokens and new tokens of each sequence.
type RankMix = Vec<(usize, usize, usize)>;

/// Duration of a mix, in the form that the fits take.
#[derive(Debug, Clone, Copy)]
struct Timing {
    load: RequestLoad,
    took: Duration,
    /// Seconds above the time without adapters.
    added_s: f64,
}

/// Measures every comparison of this benchmark.
///
/// # Errors
/// If the model or adapters cannot be made.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut rig = PerfModelRig::open(&config.model, cores, SEQUENCES, CONTEXT.1.max(PROMPT.1) + 1, RANKS[4])?;
    let mut random = StdRng::seed_from_u64(12);
    let steps: Vec<RankMix> = (0..MIXES).map(|_| step(&mut random)).collect();
    let prompts: Vec<RankMix> = (0..MIXES).map(|_| prompts(&mut random)).collect();
    let mut comparisons = Vec::new();
    for kernel in [LoraForm::TrueRank, LoraForm::Padded] {
        let [steps, prompts] = [&steps, &prompts].map(|mixes| {
            let time = |mix| rig.time(mix, kernel, config.runs);
            mixes.iter().map(time).collect::<Result<Vec<Timing>>>()
        });
        comparisons.extend(compare(kernel, &steps?, &prompts?)?);
    }
    Ok(comparisons)
}

fn step(random: &mut StdRng) -> RankMix {
    let context = random.random_range(CONTEXT.0..=CONTEXT.1);
    let count = random.random_range(1..=SEQUENCES);
    (0..count).map(|_| (rank(random), context, 1)).collect()
}

fn prompts(random: &mut StdRng) -> RankMix {
    let count = random.random_range(1..=PROMPTS);
    (0..count).map(|_| (rank(random), 0, random.random_range(PROMPT.0..=PROMPT.1))).collect()
}

fn rank(random: &mut StdRng) -> usize {
    RANKS[random.random_range(0..RANKS.len())]
}

/// Compares how well each kernel's own form and the other form predict its timings.
fn compare(kernel: LoraForm, steps: &[Timing], prompts: &[Timing]) -> Result<Vec<Comparison>> {
    let other = match kernel {
        LoraForm::TrueRank => LoraForm::Padded,
        LoraForm::Padded => LoraForm::TrueRank,
    };
    let [own, others] = [kernel, other].map(|form| explained_variance(form, steps, prompts));
    let ([own_steps, own_prompts], [other_steps, other_prompts]) = (own?, others?);
    let added = [added_by_a_line(kernel, steps)?, added_by_a_line(other, steps)?];
    let rows = [
        ("decode steps", [own_steps, other_steps]),
        ("times that adapters add to decode steps, by a line of ranks alone", added),
        ("prompts' passes", [own_prompts, other_prompts]),
    ];
    rows.into_iter().map(|(what, [own, others])| row(kernel, what, (own, others, other))).collect()
}

fn row(kernel: LoraForm, what: &str, (own, others, other): (f64, f64, LoraForm)) -> Result<Comparison> {
    Ok(Comparison {
        bench: "perf-model",
        case: format!("{}: held-out {what}", name(kernel)),
        unit: "R²",
        better: Better::Higher,
        ours: Samples::new(vec![own])?,
        rival: PeerSamples {
            name: format!("the form of {}", name(other)),
            format: "Q4_1".to_owned(),
            samples: Samples::new(vec![others])?,
        },
        target: Some(BenchTarget::OursAtLeast(LEAST_FIT)),
    })
}

fn name(form: LoraForm) -> &'static str {
    match form {
        LoraForm::TrueRank => "true ranks",
        LoraForm::Padded => "padded ranks",
    }
}

/// Explained variance of the steps and passes outside the fit.
fn explained_variance(form: LoraForm, steps: &[Timing], prompts: &[Timing]) -> Result<[f64; 2]> {
    let mut fit = ServingFit::new(form, ColdStart::Assisted);
    steps.iter().for_each(|timing| fit.observe_decode(timing.load, timing.took));
    prompts.iter().for_each(|timing| fit.observe_prefill(timing.load, timing.took));
    fit.r_squared().context("there are too few mixes to hold any out")
}

/// Explained variance of what adapters add to decode steps, by the paper's `alpha · ranks + beta`.
fn added_by_a_line(form: LoraForm, steps: &[Timing]) -> Result<f64> {
    let ranks = |load: RequestLoad| match form {
        LoraForm::TrueRank => load.ranks,
        LoraForm::Padded => load.requests * load.max_rank,
    };
    let sample = |timing: &Timing| TimingSample::new(ranks(timing.load) as f64, timing.added_s);
    let is_held_out = |index: &usize| (index + 1).is_multiple_of(HELD_OUT_EVERY);
    let part = |held_out| {
        let part = steps.iter().enumerate().filter(move |(index, _)| is_held_out(index) == held_out);
        part.map(|(_, timing)| sample(timing)).collect::<Vec<TimingSample>>()
    };
    let line = LinearFit::least_squares(&part(false)).context("there are no mixes")?;
    Ok(line.r_squared(&part(true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timings of a kernel whose cost follows its form exactly.
    fn timings(form: LoraForm) -> Vec<Timing> {
        let mut random = StdRng::seed_from_u64(1);
        (0..64)
            .map(|_| {
                let load = rig::load(&step(&mut random));
                let ranks = match form {
                    LoraForm::TrueRank => load.ranks,
                    LoraForm::Padded => load.requests * load.max_rank,
                };
                let added_s = 1e-4 + 1e-5 * ranks as f64;
                Timing { load, took: Duration::from_secs_f64(5e-3 + added_s), added_s }
            })
            .collect()
    }

    #[test]
    fn each_kernel_is_told_by_its_own_form_and_worse_by_the_other() {
        for kernel in [LoraForm::TrueRank, LoraForm::Padded] {
            let timings = timings(kernel);
            for row in compare(kernel, &timings, &timings).unwrap().into_iter().take(2) {
                let (own, other) = (row.ours.median(), row.rival.samples.median());
                assert!(own > 0.99 && other < own, "{row:?}");
            }
        }
    }
}
