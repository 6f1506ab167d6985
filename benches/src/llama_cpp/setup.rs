//! Both sides, made ready once for all that is compared.

use std::path::PathBuf;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    config::SuiteConfig,
    holobiont_runner::{BenchProgram, DeploymentPlacement, HolobiontRunner, Installation},
    limits::{MachineLimits, ModelWork},
    machine::Cores,
    measure::Samples,
    peer::LlamaCpp,
};

/// What every benchmark beside llama.cpp works with.
pub(crate) struct Setup {
    /// What was asked for.
    pub(super) config: SuiteConfig,
    /// Our forward pass.
    pub(super) ours: Box<dyn HolobiontRunner>,
    /// Our servers.
    pub(super) holobiont: Installation,
    /// The peer's programs and files.
    pub(super) peer: LlamaCpp,
    /// The machine's limits, run by run, and what the model asks of it.
    pub(super) limits: (Vec<MachineLimits>, ModelWork),
    temporary: TempDir,
}

impl Setup {
    /// Makes the peer's files, and a folder for what servers write.
    ///
    /// # Errors
    /// If a program of the peer is missing or fails, or there is no place for the folder.
    pub(crate) fn prepare(config: SuiteConfig, cores: &Cores) -> Result<Self> {
        let peer = LlamaCpp::prepare(&config)?;
        let ours = Box::new(BenchProgram::new(&config.ours, &config.model, config.threads));
        let holobiont = Installation {
            binaries: config.ours.clone(),
            model: config.model.clone(),
            placement: DeploymentPlacement::Cores(cores.list()),
            key: None,
        };
        let work = ModelWork::of(&config.model)?;
        let limits = (0..config.runs).map(|_| MachineLimits::measure(cores.numbers(), work.bytes as usize));
        let limits = (limits.collect::<Result<_>>()?, work);
        let temporary = tempfile::tempdir().context("cannot make a temporary folder for the servers")?;
        Ok(Self { config, ours, holobiont, peer, limits, temporary })
    }

    /// A rate that the machine allows, run by run.
    ///
    /// # Errors
    /// If it is not a number.
    pub(super) fn limit(&self, rate: impl Fn(&MachineLimits, &ModelWork) -> f64) -> Result<Samples> {
        let (limits, work) = &self.limits;
        Samples::of(limits, |limits| rate(limits, work))
    }

    /// Path of `name` in a folder that is removed after the run.
    pub(super) fn temporary(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }
}
