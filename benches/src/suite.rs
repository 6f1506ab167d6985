//! A run: the requested benchmarks in order, each printed as soon as it is measured.

use anyhow::{Context, Result};

use crate::{
    board, cold,
    config::{Name, SuiteConfig},
    devices, divergence, executors, fairness, fleet, forecast, gpu, grammar, limits, llama_cpp,
    machine::Cores,
    many_cores, openvino, perf_model, picker, push, receipts, remote_executor,
    report::{Comparison, SuiteOutcome},
    sim_validation, split, stream, tinker, tune, vllm, xab,
};

/// Runs the benchmarks of `config` and prints their lines. A failed benchmark does not stop the others.
///
/// # Errors
/// If the sides cannot be prepared.
pub(crate) fn run(config: &SuiteConfig) -> Result<SuiteOutcome> {
    let (on_gpu, others): (Vec<_>, Vec<_>) = config.names.iter().partition(|name| name.is_for_gpu());
    let mut outcome = SuiteOutcome::Complete;
    if !on_gpu.is_empty() {
        // Must run before this process is confined to some of its cores.
        outcome = gpu::run(config, &on_gpu)?;
    }
    if !others.is_empty() && run_on_cpu(config, others)? == SuiteOutcome::Partial {
        outcome = SuiteOutcome::Partial;
    }
    Ok(outcome)
}

fn run_on_cpu(config: &SuiteConfig, names: Vec<Name>) -> Result<SuiteOutcome> {
    let (cores, board_cores) = (Cores::first(config.threads)?, Cores::first(config.cores)?);
    cores.confine()?;
    cores.warn_if_busy();
    let with_llama = names.iter().any(|name| name.needs_llama_cpp());
    let setup = with_llama.then(|| llama_cpp::Setup::prepare(config.clone(), &cores)).transpose()?;
    let mut outcome = SuiteOutcome::Complete;
    for name in names {
        eprintln!("holobiont-bench: {name:?}");
        let used = if name == Name::Board { &board_cores } else { &cores };
        used.confine()?;
        let measured = match &setup {
            Some(setup) if name.needs_llama_cpp() => llama_cpp::measure(name, setup),
            _ => measure_alone(name, config, used),
        };
        match measured {
            Ok(comparisons) => print(comparisons, used.numbers().len())?,
            Err(error) => {
                eprintln!("holobiont-bench: {name:?} could not be measured: {error:#}");
                outcome = SuiteOutcome::Partial;
            }
        }
    }
    Ok(outcome)
}

/// Runs the benchmarks without llama.cpp: other peers, or our own baselines.
fn measure_alone(name: Name, config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    match name {
        Name::Openvino => openvino::run(config, cores),
        Name::Devices => devices::run(config, cores),
        Name::Vllm => vllm::run(config, cores),
        Name::Xab => xab::run(config, cores),
        Name::Limits => limits::run(config, cores),
        Name::Divergence => divergence::run(config, cores),
        Name::Board => board::run(config, cores),
        Name::ColdStart => cold::starts::run(config, cores),
        Name::DecodeModes => cold::decode::run(config, cores),
        Name::Crossover => cold::crossover::run(config, cores),
        Name::Cache => cold::history::run(config, cores),
        Name::Costs => sim_validation::fit(config, cores),
        Name::Reality => sim_validation::run(config, cores),
        Name::Split => split::rate::run(config, cores),
        Name::SplitBatching => split::batching::run(config, cores),
        Name::SplitMixed => split::mixed::run(config, cores),
        Name::SplitMasking => split::masking::run(config, cores),
        Name::Speculate => split::drafts::run(config, cores),
        Name::Tune => tune::run(config, cores),
        Name::TuneMixed => tune::mixed_load::run(config, cores),
        Name::Tinker => tinker::run(config, cores),
        Name::Push => push::run(config, cores),
        Name::Receipts => receipts::run(config, cores),
        Name::Executors => executors::run(config, cores),
        Name::PerfModel => perf_model::run(config, cores),
        Name::Fairness => fairness::run(config, cores),
        Name::Hostile => fairness::hostile::run(config, cores),
        Name::Forecast => forecast::run(config, cores),
        Name::Fleet => fleet::run(config, cores),
        Name::Picker => picker::run(),
        Name::Far => remote_executor::run(config, cores),
        Name::ManyCores => many_cores::run(config, cores),
        Name::Stream => stream::run(config, cores),
        Name::Grammar => grammar::run(config, cores),
        _ => Ok(Vec::new()),
    }
}

fn print(comparisons: Vec<Comparison>, threads: usize) -> Result<()> {
    for comparison in comparisons {
        let row = serde_json::to_string(&comparison.into_row(threads)).context("a row is not JSON")?;
        println!("{row}");
    }
    Ok(())
}
