//! A run: both sides made ready once, then the benchmarks in their order.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    adapters, batch, board, cold,
    config::{Config, Name},
    decode, gpu,
    machine::Cores,
    neighbour,
    ours::{Helper, Ours},
    overload,
    peer::Peer,
    prefill,
    report::Comparison,
    split, startup, xab,
};

/// What every benchmark works with.
pub(crate) struct Setup {
    /// What was asked for.
    pub(crate) config: Config,
    /// The cores everything is confined to.
    pub(crate) cores: Cores,
    /// Our forward pass.
    pub(crate) ours: Box<dyn Ours>,
    /// The peer's programs and files.
    pub(crate) peer: Peer,
    temporary: TempDir,
}

impl Setup {
    fn prepare(config: Config, cores: Cores) -> Result<Self> {
        let peer = Peer::prepare(&config)?;
        let ours = Box::new(Helper::new(&config.ours, &config.model, config.threads));
        let temporary = tempfile::tempdir().context("cannot make a temporary folder for the servers")?;
        Ok(Self { config, cores, ours, peer, temporary })
    }

    /// Path of `name` in a folder that is removed after the run.
    pub(crate) fn temporary(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }

    fn measure(&self, name: Name) -> Result<Vec<Comparison>> {
        match name {
            Name::Decode => decode::run(self),
            Name::Prefill => prefill::run(self),
            Name::Batch => batch::run(self),
            Name::Adapters => adapters::run(self),
            Name::Neighbour => neighbour::run(self),
            Name::Startup => startup::run(self),
            Name::Overload => overload::run(self),
            _ => Ok(Vec::new()),
        }
    }
}

/// What needs no llama.cpp: other peers, or our own baselines.
fn measure_alone(name: Name, config: &Config, cores: &Cores) -> Result<Vec<Comparison>> {
    match name {
        Name::Xab => xab::run(config, cores),
        Name::Board => board::run(config, cores),
        Name::ColdStart => cold::starts::run(config, cores),
        Name::DecodeModes => cold::decode::run(config, cores),
        Name::Crossover => cold::crossover::run(config, cores),
        Name::Split => split::rate::run(config, cores),
        Name::SplitBatching => split::batching::run(config, cores),
        Name::SplitMixed => split::mixed::run(config, cores),
        Name::SplitMasking => split::masking::run(config, cores),
        _ => Ok(Vec::new()),
    }
}

/// Whether every benchmark could be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All of them.
    Complete,
    /// Some failed; standard error says why.
    Partial,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Complete => Self::SUCCESS,
            Outcome::Partial => Self::FAILURE,
        }
    }
}

/// Measures what `config` asks for and prints the lines. A benchmark that fails does not keep the others from running.
///
/// # Errors
/// If the sides cannot be made ready.
pub(crate) fn run(config: &Config) -> Result<Outcome> {
    let (on_gpu, others): (Vec<_>, Vec<_>) = config.names.iter().partition(|name| name.is_for_gpu());
    let mut outcome = Outcome::Complete;
    if !on_gpu.is_empty() {
        // Before this process is confined to some of its cores.
        outcome = gpu::run(config, &on_gpu)?;
    }
    if !others.is_empty() && run_on_cpu(config, others)? == Outcome::Partial {
        outcome = Outcome::Partial;
    }
    Ok(outcome)
}

fn run_on_cpu(config: &Config, names: Vec<Name>) -> Result<Outcome> {
    let (cores, board_cores) = (Cores::first(config.threads)?, Cores::first(config.cores)?);
    cores.confine()?;
    cores.warn_if_busy();
    let with_llama = names.iter().any(|name| name.needs_llama_cpp());
    let setup = with_llama.then(|| Setup::prepare(config.clone(), cores.clone())).transpose()?;
    let mut outcome = Outcome::Complete;
    for name in names {
        eprintln!("holobiont-bench: {name:?}");
        let used = if name == Name::Board { &board_cores } else { &cores };
        used.confine()?;
        let measured = match &setup {
            Some(setup) if name.needs_llama_cpp() => setup.measure(name),
            _ => measure_alone(name, config, used),
        };
        match measured {
            Ok(comparisons) => print(comparisons, used.numbers().len())?,
            Err(error) => {
                eprintln!("holobiont-bench: {name:?} could not be measured: {error:#}");
                outcome = Outcome::Partial;
            }
        }
    }
    Ok(outcome)
}

fn print(comparisons: Vec<Comparison>, threads: usize) -> Result<()> {
    for comparison in comparisons {
        let row = serde_json::to_string(&comparison.into_row(threads)).context("a row is not JSON")?;
        println!("{row}");
    }
    Ok(())
}
