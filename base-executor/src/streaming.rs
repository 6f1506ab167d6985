//! Settings of streamed weights, and the directory of their packed file.

use std::{
    fs::{self, DirBuilder},
    num::NonZeroU64,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::Path,
};

use anyhow::Context as _;
use model::weights::streamed::StreamOptions;

use crate::{config::ExecutorConfig, startup};

/// Name of the packed weights file.
const FILE: &str = "packed.weights";

/// Returns the streaming options of `config`, if it streams, and creates the file's directory.
///
/// # Errors
/// If the directory cannot be created, or other users may enter it.
pub(crate) fn options(config: &ExecutorConfig) -> anyhow::Result<Option<StreamOptions>> {
    let Some(bound) = config.weights.bytes else { return Ok(None) };
    let directory = config.weight_directory();
    prepare(&directory)?;
    let bytes_per_s = config.weights.disk_gbps.and_then(|gbps| NonZeroU64::new(gbps.bytes_per_s()));
    if let Some(bytes_per_s) = bytes_per_s {
        tracing::warn!(
            bytes_per_s = bytes_per_s,
            "the bandwidth of the weights' disk is emulated; use this for experiments only"
        );
    }
    Ok(Some(StreamOptions {
        path: directory.join(FILE),
        program: startup::program_hash().context("cannot read the file of this program")?,
        bound_bytes: bound.0,
        readahead: config.weights.reads.into(),
        bytes_per_s,
    }))
}

/// Advice to the operator when streamed weights cannot be prepared.
pub(crate) const REMEDY: &str = "--resident-weight-bytes: raise or remove it, or set --disk-directory to \
                                 a disk with space for the packed weights";

fn prepare(directory: &Path) -> anyhow::Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.with_context(|| format!("cannot make {} for the packed weights", directory.display()))?;
    let found = fs::metadata(directory).with_context(|| format!("cannot inspect {}", directory.display()))?;
    anyhow::ensure!(
        found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o077 == 0,
        "other users may enter {}, the directory of packed weights; own it, and run `chmod 700 {}`",
        directory.display(),
        directory.display()
    );
    Ok(())
}
