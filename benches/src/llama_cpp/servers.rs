//! Generated adapters and a warm-up for the benchmarks with servers.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use super::setup::Setup;
use crate::{
    holobiont_runner::NamedAdapter,
    http::{Dialect, DialectServer},
    lora::{AdapterShape, RandomAdapter, write_gguf, write_peft},
    workload::{BurstMix, STREAMS, WARM_UP_ROUND, burst},
};

/// Rank of the adapters on q, k, v and o.
const RANK: usize = 16;
/// Adapters that are loaded and idle while base streams are measured.
const MANY: usize = 100;

/// [`MANY`] adapters for us, the first [`STREAMS`] of them also for the peer.
pub(super) struct Adapters {
    pub(super) ours: Vec<NamedAdapter>,
    pub(super) peers: Vec<PathBuf>,
    pub(super) bytes: u64,
}

impl Adapters {
    /// Writes the adapters into the run's temporary folder.
    ///
    /// # Errors
    /// If the model's shape cannot be read or the folder cannot be written.
    pub(super) fn generate(setup: &Setup) -> Result<Self> {
        let shape = AdapterShape::of(&setup.config.model)?;
        let folder = setup.temporary("adapters");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (mut ours, mut peers, mut bytes) = (Vec::new(), Vec::new(), 0);
        for index in 0..MANY {
            let adapter = RandomAdapter::random(&shape, RANK, index as u64);
            bytes = adapter.bytes();
            let name = format!("adapter-{index}");
            let peft = folder.join(&name);
            write_peft(&adapter, &peft)?;
            ours.push(NamedAdapter { name, folder: peft });
            if index < STREAMS {
                let gguf = folder.join(format!("{index}.gguf"));
                write_gguf(&adapter, &gguf)?;
                peers.push(gguf);
            }
        }
        Ok(Self { ours, peers, bytes })
    }
}

/// Sends each request once, so that pages are mapped and adapters loaded.
pub(super) fn warmed_up<D: Dialect>(server: DialectServer<D>) -> Result<DialectServer<D>> {
    for mix in [BurstMix::Adapters, BurstMix::Base] {
        server.warm_up(&burst(mix, WARM_UP_ROUND))?;
    }
    Ok(server)
}
