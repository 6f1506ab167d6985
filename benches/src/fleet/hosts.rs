//! Deployments that share a PostgreSQL and a bucket, on the same cores.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use serde_json::json;

use crate::{
    cold::adapters::write_for,
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, EnvSetting, Holobiont, Installation},
    http::post_json,
    lora::AdapterShape,
    machine::Cores,
    servers::{postgres::Postgres, s3::Bucket},
};

const RANK: usize = 8;

#[derive(Debug)]
pub(super) struct Servers {
    pub(super) postgres: Postgres,
    pub(super) bucket: Bucket,
}

impl Servers {
    /// Starts the servers.
    ///
    /// # Errors
    /// If one of them is not installed.
    pub(super) fn start() -> Result<Self> {
        let postgres = Postgres::start().map_err(|missing| anyhow!(missing))?;
        Ok(Self { postgres, bucket: Bucket::start().map_err(|missing| anyhow!(missing))? })
    }

    /// Starts a host with its state in `folder`.
    ///
    /// # Errors
    /// Fails if the host does not start.
    pub(super) fn host(&self, config: &SuiteConfig, cores: &Cores, folder: &Path) -> Result<Holobiont> {
        let mut settings =
            vec![("HOLOBIONT_REGISTRY", self.postgres.url()), ("HOLOBIONT_STORE", self.bucket.url())];
        settings.extend(self.bucket.variables());
        host(config, cores, folder, settings)
    }
}

/// Starts a host without a shared registry or bucket.
///
/// # Errors
/// Fails if the host does not start.
pub(super) fn alone(config: &SuiteConfig, cores: &Cores, folder: &Path) -> Result<Holobiont> {
    host(config, cores, folder, Vec::new())
}

fn host(
    config: &SuiteConfig,
    cores: &Cores,
    folder: &Path,
    mut settings: Vec<EnvSetting>,
) -> Result<Holobiont> {
    let installation = Installation {
        binaries: config.ours.clone(),
        model: config.model.clone(),
        placement: DeploymentPlacement::Cores(cores.list()),
        key: None,
    };
    settings.push(("HOLOBIONT_WORKERS", "0".to_owned()));
    settings.push(("HOLOBIONT_MAX_ADAPTERS", "20000".to_owned()));
    settings.push(("HOLOBIONT_ADAPTER_ROOT", std::env::temp_dir().display().to_string()));
    Holobiont::start_with(&installation, &[], folder, &settings)
}

/// Writes `count` different adapters and returns their folders.
///
/// # Errors
/// Fails if the files cannot be written.
pub(super) fn adapters(config: &SuiteConfig, count: usize, folder: &Path) -> Result<Vec<PathBuf>> {
    write_for(&AdapterShape::of(&config.model)?, RANK, count, folder)
}

/// Registers an adapter.
///
/// # Errors
/// Fails if the adapter is rejected.
pub(super) fn load(host: &Holobiont, name: &str, path: &Path) -> Result<()> {
    let body = json!({ "lora_name": name, "lora_path": path });
    post_json(host.port(), "/v1/load_lora_adapter", &body).map(drop)
}

/// Requests one token of an adapter.
///
/// # Errors
/// If none comes.
pub(super) fn ask(host: &Holobiont, name: &str) -> Result<()> {
    let body =
        json!({ "model": name, "prompt": [2001, 2002, 2003, 2004], "max_tokens": 1, "ignore_eos": true });
    post_json(host.port(), "/v1/completions", &body).map(drop)
}
