//! Preparation of both sides, once for all comparisons.

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

pub(crate) struct Setup {
    pub(super) config: SuiteConfig,
    pub(super) ours: Box<dyn HolobiontRunner>,
    pub(super) holobiont: Installation,
    pub(super) peer: LlamaCpp,
    /// Limits of the machine per run, and work of the model.
    pub(super) limits: (Vec<MachineLimits>, ModelWork),
    temporary: TempDir,
}

impl Setup {
    /// Creates the peer's files and a folder for server output.
    ///
    /// # Errors
    /// If a program of the peer is missing or fails, or the folder cannot be created.
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

    /// Rate that the machine allows, per run.
    ///
    /// # Errors
    /// Fails if the rate is NaN.
    pub(super) fn limit(&self, rate: impl Fn(&MachineLimits, &ModelWork) -> f64) -> Result<Samples> {
        let (limits, work) = &self.limits;
        Samples::of(limits, |limits| rate(limits, work))
    }

    /// Path of `name` in a folder that is removed after the run.
    pub(super) fn temporary(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }
}
