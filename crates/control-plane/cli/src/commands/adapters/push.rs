//! `holobiont adapters push`: sends an adapter's files to a running gateway, which need not see this disk.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use super::{AdaptersError, load};
use crate::{
    client::{CONFIG_FILE, GatewayClient, PushedFile, WEIGHT_FILE},
    terminal::Terminal,
};

/// Arguments of the subcommand `adapters push`.
#[derive(Debug, clap::Args)]
pub(crate) struct PushArguments {
    /// Name of the adapter in requests
    name: String,
    /// Directory of a PEFT adapter on this machine
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Keeps the adapter in the gateway's memory alone, until the gateway ends
    #[arg(long)]
    ephemeral: bool,
    /// Tenant of the adapter; only this tenant and administrators see and use it
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Pushes an adapter, and prints it.
pub(super) fn run(
    arguments: &PushArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let PushArguments { name, directory, ephemeral, tenant, expect } = arguments;
    let config_path = directory.join(CONFIG_FILE);
    if !config_path.is_file() {
        return Err(AdaptersError::NoAdapter(directory.clone()));
    }
    let config = fs::read_to_string(&config_path).map_err(unread(&config_path))?;
    let weights_path = directory.join(WEIGHT_FILE);
    let weights = File::open(&weights_path).map_err(unread(&weights_path))?;
    let mut query = vec![("durable", if *ephemeral { "false" } else { "true" })];
    query.extend(tenant.as_deref().map(|tenant| ("tenant", tenant)));
    query.extend(expect.as_deref().map(|expected| ("expected_generation", expected)));
    let file = PushedFile::new(&config, weights);
    load::report(name, terminal, || client.push(name, &query, file))
}

fn unread(path: &Path) -> impl FnOnce(std::io::Error) -> AdaptersError + use<> {
    let path = path.to_owned();
    move |source| AdaptersError::Unread { path, source }
}
