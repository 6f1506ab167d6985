//! A deployment of ours with adapters of two ranks and memory of a given size.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    cold::adapters::write_for,
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, EnvSetting, Holobiont, Installation, NamedAdapter},
    http::get,
    lora::AdapterShape,
    machine::Cores,
    workload::{AdapterChoice, AnswerKind, BenchRequest, prompt},
};

/// Rank of every second adapter; the others have twice as much.
pub(super) const RANK: usize = 8;

const WARM_UP: (usize, usize) = (256, 8);

/// Memory of an executor in bytes; adapters and KV blocks share the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExecutorMemory {
    pub(super) device: u64,
    pub(super) host: u64,
    pub(super) disk: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) device: u32,
    pub(super) adapters: u32,
    pub(super) host: u32,
    pub(super) disk: u32,
}

#[derive(Debug)]
pub(super) struct Deployment {
    // Dropped before its folder.
    pub(super) server: Holobiont,
    pub(super) blocks: Blocks,
    _folder: TempDir,
}

impl Deployment {
    /// Starts a deployment with `adapters` adapters on `cores`, and warms it up.
    ///
    /// # Errors
    /// Fails if the deployment does not start, or does not report its memory.
    pub(super) fn start(
        config: &SuiteConfig,
        cores: &Cores,
        adapters: usize,
        memory: ExecutorMemory,
    ) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for a deployment")?;
        let placement = match &config.devices {
            Some((devices, split)) => DeploymentPlacement::Devices(devices.clone(), split.clone()),
            None => DeploymentPlacement::Cores(cores.list()),
        };
        let installation =
            Installation { binaries: config.ours.clone(), model: config.model.clone(), placement, key: None };
        let adapters = write(&config.model, &ranks(adapters), &folder.path().join("adapters"))?;
        let settings: [EnvSetting; 4] = [
            // The simulator knows no draft tokens, which make the steps of repeated text several tokens long.
            ("HOLOBIONT_DRAFT", "off".to_owned()),
            ("HOLOBIONT_DEVICE_BYTES", memory.device.to_string()),
            ("HOLOBIONT_HOST_BYTES", memory.host.to_string()),
            ("HOLOBIONT_DISK_BYTES", memory.disk.to_string()),
        ];
        let server = Holobiont::start_with(&installation, &adapters, &folder.path().join("up"), &settings)?;
        let warm_up = |index| BenchRequest {
            prompt: prompt(u64::MAX - index as u64, WARM_UP.0),
            who: AdapterChoice::Adapter(index),
            generate: WARM_UP.1,
            says: AnswerKind::Anything,
        };
        server.burst(&(0..adapters.len().min(4)).map(warm_up).collect::<Vec<_>>())?;
        let blocks = Blocks::read(&get(server.port(), "/metrics")?, memory.device)?;
        Ok(Self { server, blocks, _folder: folder })
    }
}

pub(super) fn ranks(count: usize) -> Vec<usize> {
    [RANK, 2 * RANK].into_iter().cycle().take(count).collect()
}

/// Writes adapters of these ranks on q, k and v, each with memory of its own.
///
/// # Errors
/// Fails if the files cannot be written.
pub(crate) fn write(model: &Path, ranks: &[usize], folder: &Path) -> Result<Vec<NamedAdapter>> {
    let shape = AdapterShape::of(model)?;
    let mut folders = BTreeMap::new();
    for &rank in ranks {
        let count = ranks.iter().filter(|other| **other == rank).count();
        if let Entry::Vacant(place) = folders.entry(rank) {
            place.insert(write_for(&shape, rank, count, &folder.join(rank.to_string()))?.into_iter());
        }
    }
    let next = |(index, rank): (usize, &usize)| {
        let folder = folders.get_mut(rank).and_then(Iterator::next);
        let folder = folder.context("there is a folder for each adapter")?;
        Ok(NamedAdapter { name: format!("adapter-{index}"), folder })
    };
    ranks.iter().enumerate().map(next).collect()
}

impl Blocks {
    /// Reads the metrics of an executor with `bytes` on the device.
    fn read(metrics: &str, bytes: u64) -> Result<Self> {
        let value = |labels: &str| -> Result<u64> {
            let value = metrics.lines().find_map(|line| line.strip_prefix(labels));
            let value = value.and_then(|value| value.trim().parse::<f64>().ok());
            Ok(value.with_context(|| format!("/metrics has no {labels}"))? as u64)
        };
        let blocks = |labels: &str| -> Result<u32> { Ok(u32::try_from(value(labels)?)?) };
        let device = blocks("holobiont_kv_blocks{state=\"total\"}")?;
        let adapter_bytes = value("holobiont_device_adapter_budget_bytes")?;
        Ok(Self {
            device,
            adapters: u32::try_from(adapter_bytes * u64::from(device) / bytes)?,
            host: blocks("holobiont_tier_blocks{tier=\"host\",state=\"total\"}")?,
            disk: blocks("holobiont_tier_blocks{tier=\"disk\",state=\"total\"}")?,
        })
    }
}
