//! Both sides, made ready once for all that is compared.

use std::path::PathBuf;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    config::Config,
    limits::{Limits, Work},
    machine::Cores,
    measure::Samples,
    ours::{Helper, Installation, Ours, Placement},
    peer::Peer,
};

/// What every benchmark beside llama.cpp works with.
pub(crate) struct Setup {
    /// What was asked for.
    pub(super) config: Config,
    /// Our forward pass.
    pub(super) ours: Box<dyn Ours>,
    /// Our servers.
    pub(super) holobiont: Installation,
    /// The peer's programs and files.
    pub(super) peer: Peer,
    /// The machine's limits, run by run, and what the model asks of it.
    pub(super) limits: (Vec<Limits>, Work),
    temporary: TempDir,
}

impl Setup {
    /// Makes the peer's files, and a folder for what servers write.
    ///
    /// # Errors
    /// If a program of the peer is missing or fails, or there is no place for the folder.
    pub(crate) fn prepare(config: Config, cores: &Cores) -> Result<Self> {
        let peer = Peer::prepare(&config)?;
        let ours = Box::new(Helper::new(&config.ours, &config.model, config.threads));
        let holobiont = Installation {
            binaries: config.ours.clone(),
            model: config.model.clone(),
            placement: Placement::Cores(cores.list()),
            key: None,
        };
        let work = Work::of(&config.model)?;
        let limits = (0..config.runs).map(|_| Limits::measure(cores.numbers(), work.bytes as usize));
        let limits = (limits.collect::<Result<_>>()?, work);
        let temporary = tempfile::tempdir().context("cannot make a temporary folder for the servers")?;
        Ok(Self { config, ours, holobiont, peer, limits, temporary })
    }

    /// A rate that the machine allows, run by run.
    ///
    /// # Errors
    /// If it is not a number.
    pub(super) fn limit(&self, rate: impl Fn(&Limits, &Work) -> f64) -> Result<Samples> {
        let (limits, work) = &self.limits;
        Samples::of(limits, |limits| rate(limits, work))
    }

    /// Path of `name` in a folder that is removed after the run.
    pub(super) fn temporary(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }
}
