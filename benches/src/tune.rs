//! `tune`, `tune-mixed`: training jobs over one shared base, beside PEFT, where each job holds a base of its
//! own.
//!
//! Both sides: rank 8 on q and v, two sequences of 512 tokens per step, AdamW. Our jobs are
//! `holobiont-trainer` as in a deployment: one process each, with lower priority than the executor whose
//! layers they call, on the same cores. Results exclude the warm-up steps.
//!
//! - [`trainer`]: our jobs. [`peft`]: the peer's, kept running between measurements. [`in_process`]: a job in
//!   the process that owns the weights.
//! - [`mixed_load`]: jobs beside requests (`tune-mixed`).

mod in_process;
pub(crate) mod mixed_load;
mod peft;
mod trainer;

use anyhow::{Context, Result};

use self::{
    in_process::InProcessJob,
    peft::Peft,
    trainer::{Trained, TrainerBench},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const BENCH: &str = "tune";
const BATCH: usize = 2;
const TOKENS: usize = 512;
const RANK: usize = 8;
const WARM_UP_STEPS: usize = 1;
const STEPS: usize = 4;
const JOBS: usize = 4;

const OVER_PEFT: f64 = 2.1;
const JOBS_SHARE: f64 = 0.95;
const JOBS_BYTES: f64 = 2e9;
const SPLIT_TIMES: f64 = 1.7;
/// Maximum growth of memory without a leak: memory that an allocator retains.
const FLAT: f64 = 1.05;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let bench = TrainerBench::start(config, cores)?;
    let mut comparisons = Vec::new();
    if let Some(python) = &config.torch_python {
        let mut peft = Peft::start(python, &config.model, config.threads)?;
        comparisons.push(beside_peft(config, &bench, &mut peft)?);
    } else {
        eprintln!(
            "holobiont-bench: tune: PEFT is left out; give a Python with torch, transformers, peft and gguf by --torch-python"
        );
    }
    comparisons.extend(jobs_at_once(config, &bench)?);
    comparisons.push(split(config, &bench, cores)?);
    Ok(comparisons)
}

fn beside_peft(config: &SuiteConfig, bench: &TrainerBench, peft: &mut Peft) -> Result<Comparison> {
    let [ours, theirs] = alternate(
        config.runs,
        [
            Box::new(|_| Ok(bench.train(1)?.tokens_per_s)) as Contestant<'_, f64>,
            Box::new(|_| peft.tokens_per_s()),
        ],
    )?;
    Ok(Comparison {
        bench: BENCH,
        case: format!("one job, rank {RANK} on q and v, {BATCH} x {TOKENS} tokens"),
        unit: "tokens/s",
        better: Better::Higher,
        ours: Samples::new(ours)?,
        rival: PeerSamples {
            name: format!("PEFT, threads: {}", config.threads),
            format: "bf16".to_owned(),
            samples: Samples::new(theirs)?,
        },
        target: Some(BenchTarget::RatioAtLeast(OVER_PEFT)),
    })
}

fn jobs_at_once(config: &SuiteConfig, bench: &TrainerBench) -> Result<Vec<Comparison>> {
    let mut many: Vec<Trained> = Vec::new();
    let mut one: Vec<Trained> = Vec::new();
    for _ in 0..config.runs {
        one.push(bench.train(1)?);
        many.push(bench.train(JOBS)?);
    }
    let row = |case: String, unit, better, target, figure: fn(&Trained) -> f64| -> Result<Comparison> {
        let samples = Samples::of(&one, figure)?;
        let rival =
            PeerSamples { name: "one job".to_owned(), format: config.precision.name().to_owned(), samples };
        Ok(Comparison {
            bench: BENCH,
            case,
            unit,
            better,
            ours: Samples::of(&many, figure)?,
            rival,
            target: Some(target),
        })
    };
    Ok(vec![
        row(
            format!("{JOBS} jobs at once, in total"),
            "tokens/s",
            Better::Higher,
            BenchTarget::ShareAtLeast(JOBS_SHARE),
            |trained| trained.tokens_per_s,
        )?,
        row(
            format!("memory of all processes of {JOBS} jobs at once"),
            "bytes",
            Better::Lower,
            BenchTarget::OursAtMost(JOBS_BYTES),
            |trained| trained.bytes as f64,
        )?,
        row(
            format!("memory of the executor under {JOBS} jobs at once"),
            "bytes",
            Better::Lower,
            BenchTarget::ShareAtMost(FLAT),
            |trained| trained.executor_bytes as f64,
        )?,
    ])
}

/// Compares a job that calls the executor's layers with one in the process that owns the weights, on the same
/// cores.
fn split(config: &SuiteConfig, bench: &TrainerBench, cores: &Cores) -> Result<Comparison> {
    let mut inside = InProcessJob::new(&config.model, config.precision, cores).context("no job inside")?;
    let [ours, theirs] = alternate(
        config.runs,
        [
            Box::new(|_| Ok(step_ms(bench.train(1)?.tokens_per_s))) as Contestant<'_, f64>,
            Box::new(|_| Ok(step_ms(inside.tokens_per_s()?))),
        ],
    )?;
    Ok(Comparison {
        bench: BENCH,
        case: "a step over rented layers".to_owned(),
        unit: "ms",
        better: Better::Lower,
        ours: Samples::new(ours)?,
        rival: PeerSamples {
            name: "in the process that has the weights".to_owned(),
            format: config.precision.name().to_owned(),
            samples: Samples::new(theirs)?,
        },
        target: Some(BenchTarget::ShareAtMost(SPLIT_TIMES)),
    })
}

fn step_ms(tokens_per_s: f64) -> f64 {
    (BATCH * TOKENS) as f64 / tokens_per_s * 1e3
}
