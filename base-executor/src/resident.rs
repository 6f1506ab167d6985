//! The real model behind the engine: opens the weights and says what the engine needs to know of them.

use std::{convert::Infallible, path::Path, sync::Arc};

use model::{
    adapter::Adapter,
    forward::{ForwardPass, SequenceSlice},
};

use crate::{config::Config, loader::Loader};

/// What the process serves.
#[derive(Debug)]
pub struct Resident<P, L> {
    /// The forward pass, which owns weights and KV memory.
    pub pass: P,
    /// Brings adapters into the form the pass takes.
    pub loader: L,
    /// What gateways are told.
    pub facts: Facts,
}

/// What the engine and the gateways need to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Path of the model file or directory.
    pub model_path: String,
    /// Content identity of the base: hash of its configuration and tensor table.
    pub base_hash: [u8; 32],
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// KV blocks the pass has memory for.
    pub kv_blocks: u32,
}

/// Opens the model of `config`.
///
/// # Errors
/// If it cannot be served.
pub fn open(_config: &Config) -> anyhow::Result<Resident<Unwired, Unwired>> {
    anyhow::bail!("not yet wired")
}

/// Stands where the model's pass will be.
#[derive(Debug)]
pub enum Unwired {}

impl ForwardPass for Unwired {
    type Adapter = Infallible;

    fn vocab_size(&self) -> usize {
        match *self {}
    }

    fn forward(&mut self, _: &[SequenceSlice<'_, Infallible>], _: &mut Vec<f32>) {
        match *self {}
    }
}

impl Loader for Unwired {
    type Adapter = Infallible;

    fn read(&self, _: &Path) -> anyhow::Result<Adapter> {
        match *self {}
    }

    fn prepare(&self, _: Adapter) -> anyhow::Result<(Arc<Infallible>, u64)> {
        match *self {}
    }
}
