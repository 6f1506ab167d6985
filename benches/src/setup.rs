//! A run: both sides made ready once, then the benchmarks in their order.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    adapters, batch,
    config::{Config, Name},
    decode,
    machine::Cores,
    neighbour,
    ours::{Helper, Ours},
    overload,
    peer::Peer,
    prefill,
    report::Comparison,
    startup,
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
    fn prepare(config: Config) -> Result<Self> {
        let cores = Cores::confine_to(config.threads)?;
        cores.warn_if_busy();
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
            Name::All => Ok(Vec::new()),
        }
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
pub(crate) fn run(config: Config) -> Result<Outcome> {
    let setup = Setup::prepare(config)?;
    let mut outcome = Outcome::Complete;
    for &name in &setup.config.names {
        eprintln!("holobiont-bench: {name:?}");
        match setup.measure(name) {
            Ok(comparisons) => print(comparisons, setup.config.threads)?,
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
